"""Gemma 2 and 3, from config.json in both spellings and from GGUF metadata, and what their names stand for."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import ModelConfig, RopeConfig
from octavo.weights.checkpoint import expected_shapes
from octavo.weights.config_gguf import config_from_gguf, gguf_name
from octavo.weights.config_hf import config_from_hf
from octavo.weights.gguf import GGUFCheckpoint
from octavo.weights.hf_folder import HFCheckpoint
from octavo.weights.names_hf import hf_name, norm_offset
from octavo.weights.safetensors import SafetensorsFile

PATH = Path("m/config.json")
LAYERS = {"num_hidden_layers": 7, "sliding_window": 8}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def gemma3(tiny, **changes: Any) -> ModelConfig:
    data = tiny.hf_json(architectures=["Gemma3ForCausalLM"], head_dim=16, **{**LAYERS, **changes})
    return config_from_hf(data, {}, PATH)


def gemma2(tiny, **changes: Any) -> ModelConfig:
    data = tiny.hf_json(architectures=["Gemma2ForCausalLM"], head_dim=16, **{**LAYERS, **changes})
    return config_from_hf(data, {}, PATH)


def from_gguf(tiny, arch: str, num_layers: int = 7, head_size: int = 16, **keys: Any) -> ModelConfig:
    config = tiny.config(num_layers=num_layers, head_size=head_size)
    own = {"attention.sliding_window": 8, "attention.key_length": head_size} | {
        key.replace("__", "."): value for key, value in keys.items()
    }
    metadata = {"general.architecture": arch, **tiny.metadata(config, arch)}
    metadata |= {f"{arch}.{key}": value for key, value in own.items()}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (16, 32)}
    shapes |= {f"blk.{i}.attn_q_norm.weight": (head_size,) for i in range(num_layers)}
    return config_from_gguf(metadata, shapes, (), PATH)


def test_what_every_gemma_has_need_not_be_said(tiny):
    for config in (gemma3(tiny), gemma2(tiny), from_gguf(tiny, "gemma3"), from_gguf(tiny, "gemma2")):
        assert config.tie_embeddings
        assert config.output_norms
        assert config.activation == "gelu_tanh"
        assert config.embedding_scale == math.sqrt(32)
        assert config.query_scale == 0.25  # 16 ** -0.5
        assert config.sliding_window == 8
        assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert gemma3(tiny).qk_norm
    assert not gemma2(tiny).qk_norm


def test_every_sixth_or_every_second_layer_sees_everything(tiny):
    sixth, second = (True,) * 5 + (False, True), (True, False) * 3 + (True,)
    assert gemma3(tiny).sliding_layers == from_gguf(tiny, "gemma3").sliding_layers == sixth
    assert gemma2(tiny).sliding_layers == from_gguf(tiny, "gemma2").sliding_layers == second


def test_the_file_s_own_pattern_wins(tiny):
    slides = (True, True, False) * 2 + (True,)
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    assert gemma3(tiny, layer_types=kinds).sliding_layers == slides
    assert gemma3(tiny, sliding_window_pattern=3).sliding_layers == slides
    for pattern in (3, list(slides)):
        assert from_gguf(tiny, "gemma3", attention__sliding_window_pattern=pattern).sliding_layers == slides


def test_a_pattern_of_another_length_is_refused(tiny):
    with pytest.raises(CorruptModelError, match="2 entries for 7 layers"):
        from_gguf(tiny, "gemma3", attention__sliding_window_pattern=[True, False])


def test_window_and_full_layers_have_their_own_rope(tiny):
    newer = gemma3(
        tiny,
        rope_parameters={
            "full_attention": {**LINEAR, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    )
    older = gemma3(tiny, rope_theta=1e6, rope_scaling=LINEAR, rope_local_base_freq=5e3)
    stored = from_gguf(
        tiny,
        "gemma3",
        rope__freq_base=1e6,
        rope__freq_base_swa=5e3,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )
    for config in (newer, older, stored):
        assert config.layer_rope(0) == RopeConfig(theta=5e3)
        assert config.layer_rope(5) == RopeConfig(theta=1e6, kind="linear", factor=8.0)


def test_ropes_when_the_file_names_none(tiny):
    config = gemma3(tiny)
    assert (config.rope, config.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert from_gguf(tiny, "gemma3", rope__freq_base=1e6).local_rope == RopeConfig(theta=1e4)
    for config in (gemma2(tiny), from_gguf(tiny, "gemma2")):
        assert config.local_rope is None
        assert config.layer_rope(0) == config.layer_rope(1) == RopeConfig(theta=1e4)


def test_caps_and_scale_are_read(tiny):
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = gemma2(tiny, **caps, query_pre_attn_scalar=64)
    assert (config.attention_softcap, config.logit_softcap, config.query_scale) == (50.0, 30.0, 0.125)
    config = from_gguf(tiny, "gemma2", **caps, attention__scale=0.125)
    assert (config.attention_softcap, config.logit_softcap, config.query_scale) == (50.0, 30.0, 0.125)


@pytest.mark.parametrize(("arch", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gguf_files_of_27b_scale_scores_by_hidden_size_over_heads(tiny, arch, num_layers):
    """hidden 32 / 4 heads = 8, though a head has 16 columns."""
    assert from_gguf(tiny, arch, num_layers).query_scale == 8**-0.5
    assert from_gguf(tiny, arch, num_layers + 1).query_scale == 16**-0.5


def test_keys_decide_the_head_size_where_no_rotated_size_is_given(tiny):
    assert from_gguf(tiny, "gemma3", head_size=24).head_size == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_act 'gelu' is not supported"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
            "rope type 'yarn' in sliding layers",
        ),
    ],
)
def test_what_has_no_code_here_is_refused(tiny, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        gemma3(tiny, **changes)


def test_names_of_the_four_norms():
    names = ["input_norm", "o_norm", "post_norm", "down_norm"]
    assert [hf_name(f"layers.3.{name}", "gemma3") for name in names] == [
        "model.layers.3.input_layernorm.weight",
        "model.layers.3.post_attention_layernorm.weight",
        "model.layers.3.pre_feedforward_layernorm.weight",
        "model.layers.3.post_feedforward_layernorm.weight",
    ]
    assert [gguf_name(f"layers.3.{name}") for name in names] == [
        "blk.3.attn_norm.weight",
        "blk.3.post_attention_norm.weight",
        "blk.3.ffn_norm.weight",
        "blk.3.post_ffw_norm.weight",
    ]


def test_published_norms_are_one_less_than_the_factor(golden_folder):
    folder = golden_folder / "tiny" / "gemma3"
    stored = SafetensorsFile(folder / "model.safetensors")
    checkpoint = HFCheckpoint(folder)
    for name in ("norm", "layers.0.input_norm", "layers.0.q_norm", "layers.0.o_norm", "layers.0.down_norm"):
        assert np.array_equal(checkpoint.tensor(name), stored.read(hf_name(name, "gemma3")) + np.float32(1))
    for name in ("embed", "layers.0.q", "layers.0.down"):
        assert np.array_equal(checkpoint.tensor(name), stored.read(hf_name(name, "gemma3")))
    checkpoint.close()
    assert norm_offset("layers.0.input_norm", "llama") == 0.0


def test_a_gguf_file_holds_the_same_model_as_the_folder_it_was_made_from(tiny, golden_folder, tmp_path):
    folder = HFCheckpoint(golden_folder / "tiny" / "gemma3")
    config = folder.config
    names = [name for name, _ in expected_shapes(config)]
    own = {
        "attention.key_length": 16,
        "attention.sliding_window": 8,
        "attention.scale": config.query_scale,
        "rope.freq_base": 1000.0,
        "rope.freq_base_swa": 100.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    metadata = tiny.metadata(config, "gemma3") | {f"gemma3.{key}": value for key, value in own.items()}
    tensors = {gguf_name(name): folder.tensor(name) for name in names}
    stored = GGUFCheckpoint(tiny.write_gguf(tmp_path / "m.gguf", "gemma3", metadata, tensors))
    assert stored.config.query_scale == pytest.approx(24**-0.5, rel=1e-6)  # float32 in the file
    ends = {"bos_token_id": 0, "eos_token_ids": (1,), "query_scale": stored.config.query_scale}
    assert stored.config == dataclasses.replace(config, **ends)
    assert len(names) == 2 + 12 * 13
    for name in names:
        assert np.array_equal(stored.tensor(name), folder.tensor(name)), name
    stored.close()
    folder.close()
