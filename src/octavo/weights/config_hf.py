"""config.json and published tensor names -> ModelConfig and canonical names. Those words occur only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import ModelConfig, RopeConfig

Json = Mapping[str, Any]

_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_LAYER = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What config.json leaves unsaid about one class of models."""

    model_type: str
    attention_bias: bool = False  # q, k, v have biases unless the file says otherwise
    output_bias: bool = True  # "attention_bias" includes o
    qk_norm: bool = False
    window_flag: bool = False  # sliding_window counts only with use_sliding_window
    rope_theta: float = 10000.0  # when the file names none
    norm_eps: float = 1e-6


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama"),
    "MistralForCausalLM": Architecture("mistral", output_bias=False),
    "Qwen2ForCausalLM": Architecture("qwen2", attention_bias=True, output_bias=False, window_flag=True),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True, window_flag=True),
}


def hf_name(name: str) -> str:
    """Canonical tensor name -> the name in a safetensors file."""
    if name in _TOP:
        return _TOP[name]
    _, index, leaf = name.split(".", 2)
    leaf, _, suffix = leaf.partition(".")
    return f"model.layers.{index}.{_LAYER[leaf]}.{suffix or 'weight'}"


class _Reader:
    """Typed access to config.json; a missing or mistyped key is a CorruptModelError."""

    def __init__(self, data: Json, path: Path) -> None:
        self.data = data
        self.path = path

    def count(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CorruptModelError(f"{self.path}: {key} is {value!r}; a positive whole number is needed")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CorruptModelError(f"{self.path}: {key} is {value!r}; a number is needed")
        return float(value)


def config_from_hf(data: Json, generation: Json, path: Path) -> ModelConfig:
    """Build the ModelConfig from config.json and generation_config.json (empty if there is none)."""
    architecture = _architecture(data, path)
    read = _Reader(data, path)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    bias = bool(data.get("attention_bias", architecture.attention_bias))
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{path}: hidden_act {activation!r} is not supported; silu is")
    bos = data.get("bos_token_id", generation.get("bos_token_id"))
    return ModelConfig(
        model_type=architecture.model_type,
        hidden_size=hidden,
        num_layers=read.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.count("num_key_value_heads", heads),
        head_size=read.count("head_dim", hidden // heads),
        intermediate_size=read.count("intermediate_size"),
        vocab_size=read.count("vocab_size"),
        max_position=read.count("max_position_embeddings", 2048),
        rms_norm_eps=read.number("rms_norm_eps", architecture.norm_eps),
        rope=_rope(data, architecture, path),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias and architecture.output_bias,
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=architecture.qk_norm,
        sliding_window=_window(data, architecture, path),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(data.get("eos_token_id")),
    )


def _architecture(data: Json, path: Path) -> Architecture:
    names = data.get("architectures") or [None]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {names[0]!r} is not supported; supported are: {', '.join(ARCHITECTURES)}"
        )
    if data.get("quantization_config"):
        raise UnsupportedModelError(
            f"{path}: quantised safetensors are not supported; use the original checkpoint or a GGUF file"
        )
    return ARCHITECTURES[names[0]]


def _window(data: Json, architecture: Architecture, path: Path) -> int | None:
    window = data.get("sliding_window")
    if not window or (architecture.window_flag and not data.get("use_sliding_window", False)):
        return None
    kinds = set(data.get("layer_types") or [])
    if kinds == {"full_attention"}:
        return None
    # Qwen slides only in the layers from max_window_layers on.
    first = data.get("max_window_layers", 0) if architecture.window_flag else 0
    if len(kinds) > 1 or first not in (0, data.get("num_hidden_layers")):
        raise UnsupportedModelError(f"{path}: a sliding window in some layers only is not supported")
    return None if first else int(window)


def _rope(data: Json, architecture: Architecture, path: Path) -> RopeConfig:
    """`rope_scaling` beside `rope_theta` (older files), or both in `rope_parameters` (newer ones)."""
    scaling: Json = data.get("rope_parameters") or data.get("rope_scaling") or {}
    read = _Reader({"rope_theta": data.get("rope_theta"), **scaling}, path)
    theta = read.number("rope_theta", architecture.rope_theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(f"{path}: partial_rotary_factor {partial} is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    trained = read.count("original_max_position_embeddings", data.get("max_position_embeddings", 2048))
    factor = read.number("factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=read.number("low_freq_factor", 1.0),
            high_freq_factor=read.number("high_freq_factor", 4.0),
            original_max_position=trained,
        )
    if kind == "yarn":
        return _yarn(read, theta, factor, trained)
    raise UnsupportedModelError(
        f"{path}: rope type {kind!r} is not supported; default, linear, llama3 and yarn are"
    )


def _yarn(read: _Reader, theta: float, factor: float, trained: int) -> RopeConfig:
    unsupported = [key for key in ("mscale", "mscale_all_dim") if read.data.get(key)]
    if unsupported or read.data.get("truncate") is False:
        raise UnsupportedModelError(f"{read.path}: yarn with {unsupported or ['truncate']} is not supported")
    attention = read.number("attention_factor", 0.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=trained,
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        attention_factor=attention or None,
    )


def _ids(value: Any) -> tuple[int, ...]:
    """One id, or a list of them."""
    ids = value if isinstance(value, list) else [value]
    return tuple(i for i in ids if isinstance(i, int))
