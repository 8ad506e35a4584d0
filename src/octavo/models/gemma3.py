"""Gemma3: the decoder of Gemma 2 and 3, written against backends/ops.py.

What differs from Llama: embeddings are scaled, what a part gives is normed before it is added, most layers
see a window only and have a rotary base of their own, and scores and logits may be capped (Gemma 2).

    x = scale · embed(tokens)
    each layer:  x += o_norm(attention(input_norm(x)));  x += down_norm(mlp(post_norm(x)))
    logits = cap(head(norm(x)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.backends.ops import Array, Embedding, Matrix, Ops, Rope, Vector
from octavo.core.kv_groups import KVLayer, group_layers
from octavo.core.kv_spec import KVCacheSpec
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.layers import Attention, GatedMLP, ParameterLoader
from octavo.models.llama import Progress, load_ends
from octavo.models.rope import attention_scale, rope_frequencies


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """Attention and feed-forward network, each between two norms."""

    input_norm: Vector  # [E]
    attention: Attention
    o_norm: Vector  # [E]
    post_norm: Vector  # [E]
    mlp: GatedMLP
    down_norm: Vector  # [E]

    def forward(self, ops: Ops, x: Array, eps: float, place: KVLayer) -> Array:
        attended = self.attention.forward(ops, ops.rms_norm(x, self.input_norm, eps), None, place)  # [T, E]
        x = ops.add(x, ops.rms_norm(attended, self.o_norm, eps))
        hidden = self.mlp.forward(ops, ops.rms_norm(x, self.post_norm, eps), None)  # [T, E]
        return ops.add(x, ops.rms_norm(hidden, self.down_norm, eps))

    @classmethod
    def load(cls, config: ModelConfig, load: ParameterLoader, layer: int, rope: Rope) -> GemmaLayer:
        prefix = f"layers.{layer}"
        return cls(
            input_norm=load.vector(f"{prefix}.input_norm"),
            attention=Attention.load(config, load, prefix, rope, config.window(layer)),
            o_norm=load.vector(f"{prefix}.o_norm"),
            post_norm=load.vector(f"{prefix}.post_norm"),
            mlp=GatedMLP.load(config, load, prefix),
            down_norm=load.vector(f"{prefix}.down_norm"),
        )


class Gemma3:
    """A Model whose weights are packed for one backend."""

    def __init__(
        self,
        config: ModelConfig,
        embed: Embedding,  # [V, E]
        layers: Sequence[GemmaLayer],
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
        return [layer.attention.kv_spec for layer in self._layers]

    def forward(self, ops: Ops) -> Array:
        eps = self.config.rms_norm_eps
        x = ops.scale(ops.embed(self._embed), self.config.embedding_scale)  # [T, E]
        for layer, place in zip(self._layers, self._places, strict=True):
            x = layer.forward(ops, x, eps, place)
        return ops.rms_norm(x, self._norm, eps)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        logits = ops.linear(hidden, self._head)  # [R, V]
        cap = self.config.logit_softcap
        return logits if cap is None else ops.softcap(logits, cap)

    @classmethod
    def load(cls, config: ModelConfig, load: ParameterLoader, progress: Progress) -> Gemma3:
        """Pack all parameters, layer by layer; `progress` is called after each part."""
        num_parts = config.num_layers + 2
        embed, head = load_ends(config, load)
        progress(1, num_parts)
        ropes: dict[RopeConfig, Rope] = {}  # one packing for all layers that share it
        layers = []
        for i in range(config.num_layers):
            rope = config.layer_rope(i)
            if rope not in ropes:
                frequencies = rope_frequencies(rope, config.head_size)  # [D/2]
                ropes[rope] = load.backend.rope(frequencies, attention_scale(rope))
            layers.append(GemmaLayer.load(config, load, i, ropes[rope]))
            progress(i + 2, num_parts)
        norm = load.vector("norm")
        progress(num_parts, num_parts)
        return cls(config, embed, layers, norm, head)
