"""config.json -> ModelConfig. Its words occur only here and, for those families, in config_gemma.py and
config_mamba.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import Activation, MambaConfig, ModelConfig, RopeConfig
from octavo.weights.config_gemma import with_gemma
from octavo.weights.config_mamba import bamba_config, mamba2_config
from octavo.weights.json_reader import Json, JsonReader

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
MAX_LAYERS = 4096  # of a model with windows; a damaged file must not make us count to 2^31
ENDLESS = 1 << 17  # positions: a recurrent state has no longest context, but a block table must


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
    rotated_share: float = 1.0  # the only one the family has
    activation: str = "silu"  # when the file names none
    tie_embeddings: bool = False  # when the file does not say
    full_layer_period: int = 0  # every n-th layer does not slide, when the file lists no layers
    is_gemma: bool = False
    mamba: Callable[[Json, Path], MambaConfig] | None = None


_GEMMA: dict[str, Any] = {"activation": "gelu_pytorch_tanh", "tie_embeddings": True, "is_gemma": True}
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama"),
    "MistralForCausalLM": Architecture("mistral", output_bias=False),
    "Qwen2ForCausalLM": Architecture("qwen2", attention_bias=True, output_bias=False, window_flag=True),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True, window_flag=True),
    "Gemma2ForCausalLM": Architecture("gemma2", full_layer_period=2, **_GEMMA),
    "Gemma3ForCausalLM": Architecture("gemma3", full_layer_period=6, rope_theta=1e6, **_GEMMA),
    "Mamba2ForCausalLM": Architecture("mamba2", norm_eps=1e-5, mamba=mamba2_config),
    "BambaForCausalLM": Architecture("bamba", norm_eps=1e-5, rotated_share=0.5, mamba=bamba_config),
}


def config_from_hf(data: Json, generation: Json, path: Path) -> ModelConfig:
    """Build the ModelConfig from config.json and generation_config.json (empty if there is none)."""
    architecture = _architecture(data, path)
    read = JsonReader(data, path)
    if architecture.model_type == "mamba2":
        return _without_attention(read, architecture, generation)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    bias = bool(data.get("attention_bias", architecture.attention_bias))
    window, sliding_layers = _windows(read, architecture)
    config = ModelConfig(
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
        tie_embeddings=bool(data.get("tie_word_embeddings", architecture.tie_embeddings)),
        attention_bias=bias,
        output_bias=bias and architecture.output_bias,
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=architecture.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
        activation=_activation(read, architecture),
        mamba=architecture.mamba(data, path) if architecture.mamba else None,
        bos_token_id=_bos(data, generation),
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(data.get("eos_token_id")),
    )
    return with_gemma(config, read) if architecture.is_gemma else config


def _without_attention(read: JsonReader, architecture: Architecture, generation: Json) -> ModelConfig:
    """A model of state-space mixers alone."""
    data = read.data
    _activation(read, architecture)
    return ModelConfig(
        model_type=architecture.model_type,
        hidden_size=read.count("hidden_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=0,
        num_kv_heads=0,
        head_size=0,
        intermediate_size=0,
        vocab_size=read.count("vocab_size"),
        max_position=read.count("max_position_embeddings", ENDLESS),
        rms_norm_eps=read.number("layer_norm_epsilon", architecture.norm_eps),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        mamba=architecture.mamba(data, read.path) if architecture.mamba else None,
        bos_token_id=_bos(data, generation),
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(data.get("eos_token_id")),
    )


def _activation(read: JsonReader, architecture: Architecture) -> Activation:
    name = read.data.get("hidden_activation") or read.data.get("hidden_act") or architecture.activation
    supported = [architecture.activation] if architecture.mamba else list(_ACTIVATIONS)
    if name not in supported:
        raise UnsupportedModelError(
            f"{read.path}: hidden_act {name!r} is not supported; supported are: {', '.join(supported)}"
        )
    return _ACTIVATIONS[name]


def _bos(data: Json, generation: Json) -> int | None:
    bos = data.get("bos_token_id", generation.get("bos_token_id"))
    return bos if isinstance(bos, int) else None


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


def _windows(read: JsonReader, architecture: Architecture) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers have it: none listed means all."""
    data = read.data
    if not data.get("sliding_window") or (architecture.window_flag and not data.get("use_sliding_window")):
        return None, ()
    slides = _sliding_layers(read, architecture)
    window = read.count("sliding_window") if any(slides) else None
    return window, () if all(slides) or window is None else slides


def _sliding_layers(read: JsonReader, architecture: Architecture) -> tuple[bool, ...]:
    num_layers, kinds = read.count("num_hidden_layers"), read.data.get("layer_types")
    if num_layers > MAX_LAYERS:
        raise CorruptModelError(f"{read.path}: {num_layers} layers are more than any model has")
    if kinds:
        known = ("full_attention", "sliding_attention")
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or any(kind not in known for kind in kinds)
        ):
            raise UnsupportedModelError(
                f"{read.path}: layer_types must have {num_layers} entries, each {' or '.join(known)}; "
                f"it is {kinds}"
            )
        return tuple(kind == "sliding_attention" for kind in kinds)
    if architecture.window_flag:  # Qwen slides only in the layers from max_window_layers on
        first = read.number("max_window_layers", 0)
        return tuple(i >= first for i in range(num_layers))
    period = architecture.full_layer_period
    if period:
        period = read.count("sliding_window_pattern", period)
    return tuple(not period or (i + 1) % period != 0 for i in range(num_layers))


def _rope(data: Json, architecture: Architecture, path: Path) -> RopeConfig:
    """`rope_scaling` beside `rope_theta` (older files), or both in `rope_parameters` (newer ones)."""
    scaling: Json = data.get("rope_parameters") or data.get("rope_scaling") or {}
    scaling = scaling.get("full_attention", scaling)  # one for each kind of layer: see config_gemma.py
    read = JsonReader({"rope_theta": data.get("rope_theta"), **scaling}, path)
    theta = read.number("rope_theta", architecture.rope_theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    share = architecture.rotated_share
    partial = scaling.get("partial_rotary_factor", data.get("partial_rotary_factor", share))
    if partial != share or (share != 1.0 and kind != "default"):
        raise UnsupportedModelError(
            f"{path}: partial_rotary_factor {partial} with rope type {kind!r} is not supported"
        )
    if kind == "default":
        return RopeConfig(theta=theta, rotated_share=share)
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


def _yarn(read: JsonReader, theta: float, factor: float, trained: int) -> RopeConfig:
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
