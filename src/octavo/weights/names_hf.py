"""Canonical tensor names -> the names published checkpoints use, by family. Those words occur only here.

Most families share one spelling. A family that departs from it has a Names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
_MIXER = {
    "in": "in_proj",
    "out": "out_proj",
    "conv": "conv1d",
    "dt_bias": "dt_bias",
    "decay_log": "A_log",
    "skip": "D",
    "mixer_norm": "norm",
}
_BARE = frozenset({"dt_bias", "decay_log", "skip"})  # parameters published without ".weight"


@dataclass(frozen=True, slots=True)
class Names:
    """How one family spells its tensors."""

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    norm_offset: float = 0.0  # what published norm weights lack to the factor


_COMMON = Names(_TOP, _LAYER)
_GEMMA = Names(
    _TOP,
    {
        **_LAYER,
        "o_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
_BAMBA_MLP = {part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
_FAMILIES: Mapping[str, Names] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "bamba": Names(
        {**_TOP, "norm": "model.final_layernorm.weight"},
        {
            **_LAYER,
            **_BAMBA_MLP,
            "post_norm": "pre_ff_layernorm",
            **{leaf: f"mamba.{name}" for leaf, name in _MIXER.items()},
        },
    ),
    "mamba2": Names(
        {
            "embed": "backbone.embeddings.weight",
            "norm": "backbone.norm_f.weight",
            "lm_head": "lm_head.weight",
        },
        {"input_norm": "norm", **{leaf: f"mixer.{name}" for leaf, name in _MIXER.items()}},
        layers="backbone.layers",
    ),
}


def hf_name(name: str, model_type: str = "llama") -> str:
    """Canonical tensor name -> the name in a safetensors file of that family."""
    names = _FAMILIES.get(model_type, _COMMON)
    if name in names.top:
        return names.top[name]
    _, index, leaf = name.split(".", 2)
    stem, _, suffix = leaf.partition(".")
    published = f"{names.layers}.{index}.{names.layer[stem]}"
    return published if stem in _BARE else f"{published}.{suffix or 'weight'}"


def norm_offset(name: str, model_type: str) -> float:
    """What to add to a tensor of this canonical name: 1 for the norms of a family that stores them less 1."""
    return _FAMILIES.get(model_type, _COMMON).norm_offset if name.endswith("norm") else 0.0
