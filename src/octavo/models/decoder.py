"""Decoder: what every model here has in common: a lookup table, layers, a last norm, an output matrix.

A family is a kind of layer (llama.py, gemma3.py, mamba_hybrid.py); this file runs a stack of them and knows no
family. Variants of scale and caps are fields of ModelConfig.

    x = scale · embed(tokens);  x = layer(x) for each layer;  logits = cap(head(norm(x)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.backends.ops import Array, Embedding, Matrix, Ops, Vector
from octavo.core.kv_groups import KVLayer, group_layers
from octavo.core.kv_spec import KVCacheSpec
from octavo.models.config import ModelConfig
from octavo.models.layers import ParameterLoader

Progress = Callable[[int, int], None]  # (parts loaded, parts in all)


class DecoderLayer(Protocol):
    """One layer of a family."""

    @property
    def kv_spec(self) -> KVCacheSpec:
        """The rule of its cache."""
        ...

    def forward(self, ops: Ops, x: Array, eps: float, place: KVLayer) -> Array:
        """x [T, E] → [T, E]; its cache lies at `place`."""
        ...


class Decoder:
    """A Model whose weights are packed for one backend."""

    def __init__(
        self,
        config: ModelConfig,
        embed: Embedding,  # [V, E]
        layers: Sequence[DecoderLayer],
        norm: Vector,  # [E]
        head: Matrix,  # [V, E]
    ) -> None:
        self.config = config
        self._embed = embed
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._places = group_layers(self.kv_specs()).layers  # where each layer's cache lies

    def kv_specs(self) -> list[KVCacheSpec]:
        """One per layer; group_layers() of them is the layout that forward() uses."""
        return [layer.kv_spec for layer in self._layers]

    def forward(self, ops: Ops) -> Array:
        eps, scale = self.config.rms_norm_eps, self.config.embedding_scale
        x = ops.embed(self._embed)  # [T, E]
        if scale != 1.0:
            x = ops.scale(x, scale)
        for layer, place in zip(self._layers, self._places, strict=True):
            x = layer.forward(ops, x, eps, place)
        return ops.rms_norm(x, self._norm, eps)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        logits = ops.linear(hidden, self._head)  # [R, V]
        cap = self.config.logit_softcap
        return logits if cap is None else ops.softcap(logits, cap)


def load_decoder(
    config: ModelConfig,
    load: ParameterLoader,
    progress: Progress,
    load_layer: Callable[[int], DecoderLayer],
) -> Decoder:
    """Pack all parameters, layer by layer; `progress` is called after each part."""
    num_parts = config.num_layers + 2
    embed, head = load.ends("embed", "embed" if config.tie_embeddings else "lm_head")
    progress(1, num_parts)
    layers = []
    for i in range(config.num_layers):
        layers.append(load_layer(i))
        progress(i + 2, num_parts)
    norm = load.vector("norm")
    progress(num_parts, num_parts)
    return Decoder(config, embed, layers, norm, head)
