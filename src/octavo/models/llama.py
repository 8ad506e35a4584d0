"""The Llama family, written once against backends/ops.py.

Llama 2 and 3, SmolLM, Mistral (a window), Qwen2 (biases on q, k, v) and Qwen3 (normed heads) differ in
fields of ModelConfig only. Nothing here reads a file, knows a backend or looks into an array.

    each layer:  x += attention(norm(x));  x += mlp(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.ops import Array, Ops, Vector
from octavo.core.kv_groups import KVLayer
from octavo.core.kv_spec import KVCacheSpec
from octavo.errors import UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder, Progress, load_decoder
from octavo.models.layers import Attention, GatedMLP, ParameterLoader
from octavo.models.rope import attention_scale, rope_frequencies


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Attention and feed-forward network, each behind a norm."""

    input_norm: Vector  # [E]
    attention: Attention
    post_norm: Vector  # [E]
    mlp: GatedMLP

    @property
    def kv_spec(self) -> KVCacheSpec:
        return self.attention.kv_spec

    def forward(self, ops: Ops, x: Array, eps: float, place: KVLayer) -> Array:
        x = self.attention.forward(ops, ops.rms_norm(x, self.input_norm, eps), x, place)
        return self.mlp.forward(ops, ops.rms_norm(x, self.post_norm, eps), x)


def load_llama(config: ModelConfig, load: ParameterLoader, progress: Progress) -> Decoder:
    if config.mlp_bias:
        raise UnsupportedModelError(
            f"{config.model_type} with biases in its feed-forward layers is not supported; "
            "use a checkpoint whose mlp_bias is false"
        )
    rope = load.backend.rope(rope_frequencies(config.rope, config.head_size), attention_scale(config.rope))

    def load_layer(i: int) -> LlamaLayer:
        prefix = f"layers.{i}"
        return LlamaLayer(
            input_norm=load.vector(f"{prefix}.input_norm"),
            attention=Attention.load(config, load, prefix, rope, config.window(i)),
            post_norm=load.vector(f"{prefix}.post_norm"),
            mlp=GatedMLP.load(config, load, prefix),
        )

    return load_decoder(config, load, progress, load_layer)
