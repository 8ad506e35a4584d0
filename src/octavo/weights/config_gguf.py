"""GGUF metadata and tensor names -> ModelConfig and canonical names. GGUF's own words occur only here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import Activation, ModelConfig, RopeConfig
from octavo.text.vocabulary_gguf import read_vocabulary

Shapes = Mapping[str, tuple[int, ...]]  # GGUF tensor name -> shape [out, in]

_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o_norm": "post_attention_norm",
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "down_norm": "post_ffw_norm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is particular about one architecture's files."""

    permuted_qk: bool = False  # rows of q and k are stored for interleaved rope
    activation: Activation = "silu"
    full_layer_period: int = 0  # every n-th layer does not slide, when the file does not say
    is_gemma: bool = False
    num_layers_27b: int = 0  # of the one size whose scores are scaled by E/H instead of D


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(permuted_qk=True),
    "gemma2": Architecture(activation="gelu_tanh", full_layer_period=2, is_gemma=True, num_layers_27b=46),
    "gemma3": Architecture(activation="gelu_tanh", full_layer_period=6, is_gemma=True, num_layers_27b=62),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
}


def architecture(metadata: Mapping[str, Any], path: Path) -> Architecture:
    """The architecture of a file. Raises UnsupportedModelError with the list of those that are supported."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {name!r} is not supported; supported are: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[str(name)]


def gguf_name(name: str) -> str:
    """Canonical tensor name -> GGUF tensor name."""
    if name in _TOP:
        return _TOP[name]
    _, index, leaf = name.split(".", 2)
    leaf, _, suffix = leaf.partition(".")
    return f"blk.{index}.{_LAYER[leaf]}.{suffix or 'weight'}"


class _Reader:
    """Typed access to the keys of one architecture; a missing or mistyped one is a CorruptModelError."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.arch = str(metadata["general.architecture"])

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CorruptModelError(
                f"{self.path}: metadata {self.arch}.{key} is {value!r}; a number is needed"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; a list of one per layer is accepted when all are equal."""
        value = self.get(key)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UnsupportedModelError(
                    f"{self.path}: {self.arch}.{key} differs between layers; only equal layers are supported"
                )
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or value <= 0:
            raise CorruptModelError(
                f"{self.path}: metadata {self.arch}.{key} is {value!r}; a positive whole number is needed"
            )
        return value


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Shapes, rope_factors: tuple[float, ...], path: Path
) -> ModelConfig:
    """Build the ModelConfig. `rope_factors` are the values of rope_freqs.weight, or empty."""
    arch = architecture(metadata, path)
    read = _Reader(metadata, path)
    if read.get("expert_count"):
        raise UnsupportedModelError(f"{path}: mixture-of-experts models are not supported; use a dense model")
    if "token_embd.weight" not in shapes:
        raise CorruptModelError(f"{path}: tensor 'token_embd.weight' is missing; download the model again")
    if read.count("block_count") > len(shapes):
        raise CorruptModelError(f"{path}: {read.count('block_count')} layers, but only {len(shapes)} tensors")
    hidden, heads = read.count("embedding_length"), read.count("attention.head_count")
    window, sliding_layers = _windows(read, arch)
    vocabulary = read_vocabulary(metadata)
    config = ModelConfig(
        model_type=read.arch,
        hidden_size=hidden,
        num_layers=read.count("block_count"),
        num_heads=heads,
        num_kv_heads=read.count("attention.head_count_kv", heads),
        head_size=_head_size(read, hidden, heads),
        intermediate_size=read.count("feed_forward_length"),
        vocab_size=shapes["token_embd.weight"][0],
        max_position=read.count("context_length"),
        rms_norm_eps=_short(read.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(read, rope_factors),
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        sliding_window=window,
        sliding_layers=sliding_layers,
        activation=arch.activation,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
    )
    return _with_gemma(config, read, arch) if arch.is_gemma else config


def _windows(read: _Reader, arch: Architecture) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers have it: none listed means all."""
    if not read.get("attention.sliding_window"):
        return None, ()
    num_layers = read.count("block_count")  # no more than there are tensors
    pattern = read.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise CorruptModelError(
                f"{read.path}: sliding_window_pattern has {len(pattern)} entries for {num_layers} layers"
            )
        slides = tuple(bool(value) for value in pattern)
    else:
        period = arch.full_layer_period
        if pattern is not None:
            period = read.count("attention.sliding_window_pattern")
        slides = tuple(not period or (i + 1) % period != 0 for i in range(num_layers))
    window = read.count("attention.sliding_window") if any(slides) else None
    return window, () if all(slides) or window is None else slides


def _with_gemma(config: ModelConfig, read: _Reader, arch: Architecture) -> ModelConfig:
    """What Gemma 2 and 3 have that the others have not. Their files leave most of it unsaid."""
    is_27b = config.num_layers == arch.num_layers_27b
    scaled_by = config.hidden_size / config.num_heads if is_27b else config.head_size
    local_theta = _short(read.number("rope.freq_base_swa", 10000.0))
    return replace(
        config,
        output_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
        query_scale=read.number("attention.scale", scaled_by**-0.5),
        attention_softcap=read.number("attn_logit_softcapping", 0.0) or None,
        logit_softcap=read.number("final_logit_softcapping", 0.0) or None,
        local_rope=RopeConfig(theta=local_theta) if read.arch == "gemma3" else None,
    )


def _head_size(read: _Reader, hidden: int, heads: int) -> int:
    size = read.count("attention.key_length", read.count("rope.dimension_count", hidden // heads))
    rotated = read.count("rope.dimension_count", size)
    if size != rotated or read.count("attention.value_length", size) != size:
        raise UnsupportedModelError(
            f"{read.path}: heads of {size} keys with {rotated} rotated dimensions are not supported; "
            "only whole heads are rotated, and values are as long as keys"
        )
    return size


def _rope(read: _Reader, factors: tuple[float, ...]) -> RopeConfig:
    theta = _short(read.number("rope.freq_base", 10000.0))
    kind = read.get("rope.scaling.type") or "none"
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0))
    trained = read.count("context_length")
    if kind == "none" and read.get("rope.scale_linear"):
        kind = "linear"
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta, factors=factors)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, factors=factors)
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{read.path}: rope scaling {kind!r} is not supported; linear and yarn are"
        )
    scale = read.get("rope.scaling.attn_factor") or read.get("rope.scaling.yarn_attn_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=read.count("rope.scaling.original_context_length", trained),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        # The file's factor multiplies yarn's own; the configuration's replaces it.
        attention_factor=scale * (0.1 * math.log(factor) + 1.0) if scale else None,
        factors=factors,
    )


def _short(value: float) -> float:
    """Undo float32 rounding: 9.999999747378752e-06 was written as 1e-5."""
    return float(f"{value:.7g}")
