"""The state-space part of config.json, as Mamba2 and Bamba publish it, and the tensors it implies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import MambaConfig, ModelConfig, RopeConfig
from octavo.weights.checkpoint import expected_shapes
from octavo.weights.config_hf import config_from_hf
from octavo.weights.names_hf import hf_name

PATH = Path("m/config.json")

MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "vocab_size": 50,
    "layer_norm_epsilon": 1e-4,
    "time_step_limit": [0.0, float("inf")],
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 3,
}
BAMBA = {
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_from_hf({**base, **changes}, {}, PATH)


def test_mamba2_has_mixers_in_all_layers_and_nothing_else() -> None:
    config = read(MAMBA2)
    assert config.mamba == MambaConfig(num_heads=8, head_size=8, num_groups=2, state_size=16, num_taps=4)
    assert (config.model_type, config.rms_norm_eps, config.tie_embeddings) == ("mamba2", 1e-4, True)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.intermediate_size) == (0, 0, 0, 0)
    assert (config.max_position, config.bos_token_id, config.eos_token_ids) == (1 << 17, 0, (3,))


def test_bamba_has_attention_where_it_says_and_turns_half_of_each_head() -> None:
    config = read(BAMBA)
    assert config.mamba == MambaConfig(
        num_heads=4, head_size=16, num_groups=1, state_size=16, num_taps=4, attention_layers=(1, 3)
    )
    assert config.rope == RopeConfig(rotated_share=0.5)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (4, 2, 8)


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (None, (0.0, float("inf"))),
        ([0.0, float("inf")], (0.0, float("inf"))),
        ([0.001, {"__float__": "Infinity"}], (0.001, float("inf"))),
        ([0.01, 0.1], (0.01, 0.1)),
    ],
)
def test_time_step_limits_in_every_spelling(value: Any, limits: tuple[float, float]) -> None:
    for base in (MAMBA2, BAMBA):
        mamba = read(base, time_step_limit=value).mamba
        assert mamba is not None
        assert (mamba.dt_min, mamba.dt_max) == limits


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (MAMBA2, {"num_heads": 7}, "7 heads of 8 columns do not fill the 64 columns"),
        (MAMBA2, {"n_groups": 3}, "8 heads in 3 unequal groups"),
        (MAMBA2, {"time_step_limit": [1.0, 0.5]}, "two ascending numbers"),
        (MAMBA2, {"time_step_limit": [1.0]}, "two ascending numbers"),
        (MAMBA2, {"time_step_limit": ["a", "b"]}, "two ascending numbers"),
        (MAMBA2, {"state_size": 0}, "state_size is 0"),
        (MAMBA2, {"head_dim": None}, "head_dim is None"),
        (BAMBA, {"attn_layer_indices": [4]}, "a list of layers below 4"),
        (BAMBA, {"attn_layer_indices": 1}, "a list of layers below 4"),
        (BAMBA, {"mamba_d_head": 8}, "4 heads of 8 columns do not fill the 64 columns"),
    ],
)
def test_a_wrong_size_is_named(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModelError, match=message):
        read(base, **changes)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (MAMBA2, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (BAMBA, {"partial_rotary_factor": 1.0}, "partial_rotary_factor 1.0"),
        (BAMBA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope type 'linear'"),
    ],
)
def test_what_has_no_code_here_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(base, **changes)


def test_the_tensors_of_a_mixer_and_their_published_names() -> None:
    shapes = dict(expected_shapes(read(MAMBA2, use_bias=True)))
    layer = {name: shape for name, shape in shapes.items() if name.startswith("layers.1.")}
    assert {hf_name(name, "mamba2"): shape for name, shape in layer.items()} == {
        "backbone.layers.1.norm.weight": (32,),
        "backbone.layers.1.mixer.in_proj.weight": (64 + 128 + 8, 32),
        "backbone.layers.1.mixer.in_proj.bias": (200,),
        "backbone.layers.1.mixer.conv1d.weight": (128, 1, 4),
        "backbone.layers.1.mixer.conv1d.bias": (128,),
        "backbone.layers.1.mixer.dt_bias": (8,),
        "backbone.layers.1.mixer.A_log": (8,),
        "backbone.layers.1.mixer.D": (8,),
        "backbone.layers.1.mixer.norm.weight": (64,),
        "backbone.layers.1.mixer.out_proj.weight": (32, 64),
        "backbone.layers.1.mixer.out_proj.bias": (32,),
    }
    others = [hf_name(name, "mamba2") for name in shapes if "." not in name]
    assert others == ["backbone.embeddings.weight", "backbone.norm_f.weight"]


def test_the_layers_of_bamba_differ_in_their_tensors() -> None:
    shapes = dict(expected_shapes(read(BAMBA)))
    names = [[hf_name(n, "bamba") for n in shapes if n.startswith(f"layers.{i}.")] for i in (0, 1)]
    shared = [
        "input_layernorm", "pre_ff_layernorm",
        "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj",
    ]  # fmt: skip
    for i, own in enumerate(["mamba", "self_attn"]):
        leaves = [name.removeprefix(f"model.layers.{i}.") for name in names[i]]
        assert [n.removesuffix(".weight") for n in leaves if not n.startswith(own)] == shared
    assert hf_name("norm", "bamba") == "model.final_layernorm.weight"
