"""Llama: the decoder of the Llama family, written once against backends/ops.py.

Llama 2 and 3, SmolLM, Mistral (a window), Qwen2 (biases on q, k, v) and Qwen3 (normed heads) differ in
fields of ModelConfig only. Nothing here reads a file, knows a backend or looks into an array.

    x = embed(tokens)
    each layer:  x += attention(norm(x));  x += mlp(norm(x))
    logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.backends.ops import Array, Embedding, Matrix, Ops, Vector
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import KVCacheSpec
from octavo.errors import UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.layers import Attention, GatedMLP, ParameterLoader
from octavo.models.rope import attention_scale, rope_frequencies

Progress = Callable[[int, int], None]  # (parts loaded, parts in all)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: Vector  # [E]
    attention: Attention
    post_norm: Vector  # [E]
    mlp: GatedMLP


class Llama:
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
        return [layer.attention.kv_spec for layer in self._layers]

    def forward(self, ops: Ops) -> Array:
        eps = self.config.rms_norm_eps
        x = ops.embed(self._embed)  # [T, E]
        for layer, place in zip(self._layers, self._places, strict=True):
            x = layer.attention.forward(ops, ops.rms_norm(x, layer.input_norm, eps), x, place)
            x = layer.mlp.forward(ops, ops.rms_norm(x, layer.post_norm, eps), x)
        return ops.rms_norm(x, self._norm, eps)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.linear(hidden, self._head)  # [R, V]

    @classmethod
    def load(cls, config: ModelConfig, load: ParameterLoader, progress: Progress) -> Llama:
        """Pack all parameters, layer by layer; `progress` is called after each part."""
        if config.mlp_bias:
            raise UnsupportedModelError(
                f"{config.model_type} with biases in its feed-forward layers is not supported; "
                "use a checkpoint whose mlp_bias is false"
            )
        num_parts = config.num_layers + 2
        frequencies = rope_frequencies(config.rope, config.head_size)
        rope = load.backend.rope(frequencies, attention_scale(config.rope))
        embed, head = load_ends(config, load)
        progress(1, num_parts)
        layers = []
        for i in range(config.num_layers):
            prefix = f"layers.{i}"
            layers.append(
                DecoderLayer(
                    input_norm=load.vector(f"{prefix}.input_norm"),
                    attention=Attention.load(config, load, prefix, rope, config.window(i)),
                    post_norm=load.vector(f"{prefix}.post_norm"),
                    mlp=GatedMLP.load(config, load, prefix),
                )
            )
            progress(i + 2, num_parts)
        norm = load.vector("norm")
        progress(num_parts, num_parts)
        return cls(config, embed, layers, norm, head)


def load_ends(config: ModelConfig, load: ParameterLoader) -> tuple[Embedding, Matrix]:
    """The lookup table and the output matrix: two packings of one tensor where they are tied."""
    table = load.source.tensor("embed")  # [V, E]
    embed = load.backend.embedding(table, load.weight_dtype)
    if config.tie_embeddings:
        return embed, load.backend.matrix(table, load.weight_dtype)
    del table
    return embed, load.matrix("lm_head")
