"""GGUF metadata and tensor names -> ModelConfig and canonical names. GGUF's own words occur only here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import ModelConfig, RopeConfig

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
    "post_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Texts that end a turn or a document in the chat formats of the supported families. A GGUF file names one
# end token, where the models were published with a list of them.
_END_TEXTS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"})
_CONTROL = 3  # token type of special tokens


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is particular about one architecture's files."""

    permuted_qk: bool = False  # rows of q and k are stored for interleaved rope


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(permuted_qk=True),
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
    architecture(metadata, path)
    read = _Reader(metadata, path)
    if read.get("expert_count"):
        raise UnsupportedModelError(f"{path}: mixture-of-experts models are not supported; use a dense model")
    if "token_embd.weight" not in shapes:
        raise CorruptModelError(f"{path}: tensor 'token_embd.weight' is missing; download the model again")
    hidden, heads = read.count("embedding_length"), read.count("attention.head_count")
    window = read.get("attention.sliding_window")
    return ModelConfig(
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
        sliding_window=int(window) if window else None,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(metadata),
    )


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer, the file's own end token first."""
    ids = [metadata.get(f"tokenizer.ggml.{word}_token_id") for word in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ids += [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_TEXTS]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _head_size(read: _Reader, hidden: int, heads: int) -> int:
    rotated = read.count("rope.dimension_count", hidden // heads)
    size = read.count("attention.key_length", rotated)
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
