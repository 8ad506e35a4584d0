"""The Gemma 2 and 3 family, written against backends/ops.py.

What differs from Llama: embeddings are scaled, what a part gives is normed before it is added, most layers
see a window only and have a rotary base of their own, and scores and logits may be capped (Gemma 2).

    x = scale · embed(tokens)
    each layer:  x += o_norm(attention(input_norm(x)));  x += down_norm(mlp(post_norm(x)))
    logits = cap(head(norm(x)))
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.ops import Array, Ops, Rope, Vector
from octavo.core.kv_groups import KVLayer
from octavo.core.kv_spec import KVCacheSpec
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.decoder import Decoder, Progress, load_decoder
from octavo.models.layers import Attention, GatedMLP, ParameterLoader
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

    @property
    def kv_spec(self) -> KVCacheSpec:
        return self.attention.kv_spec

    def forward(self, ops: Ops, x: Array, eps: float, place: KVLayer) -> Array:
        attended = self.attention.forward(ops, ops.rms_norm(x, self.input_norm, eps), None, place)  # [T, E]
        x = ops.add(x, ops.rms_norm(attended, self.o_norm, eps))
        hidden = self.mlp.forward(ops, ops.rms_norm(x, self.post_norm, eps), None)  # [T, E]
        return ops.add(x, ops.rms_norm(hidden, self.down_norm, eps))


def load_gemma3(config: ModelConfig, load: ParameterLoader, progress: Progress) -> Decoder:
    ropes: dict[RopeConfig, Rope] = {}  # one packing for all layers that share it

    def load_layer(i: int) -> GemmaLayer:
        prefix, rope = f"layers.{i}", config.layer_rope(i)
        if rope not in ropes:
            frequencies = rope_frequencies(rope, config.head_size)  # [D/2]
            ropes[rope] = load.backend.rope(frequencies, attention_scale(rope))
        return GemmaLayer(
            input_norm=load.vector(f"{prefix}.input_norm"),
            attention=Attention.load(config, load, prefix, ropes[rope], config.window(i)),
            o_norm=load.vector(f"{prefix}.o_norm"),
            post_norm=load.vector(f"{prefix}.post_norm"),
            mlp=GatedMLP.load(config, load, prefix),
            down_norm=load.vector(f"{prefix}.down_norm"),
        )

    return load_decoder(config, load, progress, load_layer)
