"""config.json as models are published, old spelling and new, becomes the same ModelConfig."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import ModelConfig, RopeConfig
from octavo.weights.config_hf import config_from_hf

PATH = Path("m/config.json")


def read(tiny, generation=None, **changes) -> ModelConfig:
    return config_from_hf(tiny.hf_json(**changes), generation or {}, PATH)


def test_llama_defaults(tiny):
    assert read(tiny) == tiny.config(bos_token_id=0, eos_token_ids=(1,))


def test_missing_head_dim_and_kv_heads_follow_from_the_others(tiny):
    config = read(tiny, num_key_value_heads=None)
    assert (config.num_kv_heads, config.head_size) == (4, 8)


def test_explicit_head_dim_wins(tiny):
    assert read(tiny, head_dim=16).head_size == 16


def test_generation_config_decides_the_end_tokens(tiny):
    assert read(tiny, {"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert read(tiny, {"eos_token_id": None}, eos_token_id=[3]).eos_token_ids == (3,)


def test_llama_attention_bias_covers_the_output(tiny):
    config = read(tiny, attention_bias=True, mlp_bias=True)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, True)


def test_qwen2_has_biases_and_no_window_unless_asked(tiny):
    config = read(tiny, architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False)
    assert (config.model_type, config.attention_bias, config.output_bias) == ("qwen2", True, False)
    assert config.sliding_window is None


def test_qwen2_window_in_every_layer_counts(tiny):
    changes = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
    assert read(tiny, architectures=["Qwen2ForCausalLM"], **changes).sliding_window == 64


def test_qwen2_slides_from_the_layer_that_the_file_names(tiny):
    changes = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    config = read(tiny, architectures=["Qwen2ForCausalLM"], **changes)
    assert (config.sliding_window, config.sliding_layers) == (64, (False, True))
    assert [config.window(i) for i in range(2)] == [None, 64]


def test_layer_types_say_which_layers_slide(tiny):
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
    mixed = read(tiny, **changes, layer_types=["sliding_attention", "full_attention"])
    assert (mixed.sliding_window, mixed.sliding_layers) == (8, (True, False))
    assert read(tiny, **changes, layer_types=["full_attention"] * 2).sliding_window is None
    for kinds in (["chunked_attention", "full_attention"], ["full_attention"] * 3, 2, "full"):
        with pytest.raises(UnsupportedModelError, match="layer_types must have 2 entries"):
            read(tiny, **changes, layer_types=kinds)


def test_more_layers_than_any_model_has_are_refused_at_once(tiny):
    with pytest.raises(CorruptModelError, match="2147483648 layers are more than any model has"):
        read(tiny, architectures=["MistralForCausalLM"], sliding_window=8, num_hidden_layers=1 << 31)


def test_qwen3_normalises_q_and_k(tiny):
    config = read(tiny, architectures=["Qwen3ForCausalLM"], head_dim=16)
    assert (config.model_type, config.qk_norm, config.attention_bias) == ("qwen3", True, False)


def test_mistral_window_counts(tiny):
    config = read(tiny, architectures=["MistralForCausalLM"], sliding_window=8)
    assert (config.model_type, config.sliding_window) == ("mistral", 8)
    assert read(tiny, architectures=["MistralForCausalLM"], sliding_window=None).sliding_window is None


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=5e5)),
        ({"rope_type": "linear", "factor": 2.0}, RopeConfig(theta=5e5, kind="linear", factor=2.0)),
        (LLAMA3, RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=64)),
        (
            YARN,
            RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_max_position=32, beta_fast=16.0),
        ),
        (
            {**YARN, "attention_factor": 1.5, "original_max_position_embeddings": None},
            RopeConfig(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_position=128,
                beta_fast=16.0,
                attention_factor=1.5,
            ),
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn_attention"],
)
def test_both_spellings_of_rope_scaling_agree(tiny, scaling, rope):
    new = read(tiny, rope_parameters={**scaling, "rope_theta": 5e5})
    old = read(tiny, rope_theta=5e5, rope_scaling=scaling)
    legacy = {**scaling, "type": scaling["rope_type"]}
    del legacy["rope_type"]
    assert new.rope == old.rope == read(tiny, rope_theta=5e5, rope_scaling=legacy).rope == rope


def test_null_rope_scaling_is_none(tiny):
    assert read(tiny, rope_theta=1e6, rope_scaling=None).rope == RopeConfig(theta=1e6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised safetensors"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, "yarn with"),
    ],
)
def test_what_has_no_code_here_is_refused_by_name(tiny, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(tiny, **changes)


@pytest.mark.parametrize("value", [None, 0, -3, "32", True, 1.5])
def test_a_missing_or_mistyped_size_is_named(tiny, value):
    with pytest.raises(CorruptModelError, match="m/config.json: hidden_size is"):
        read(tiny, hidden_size=value)
