"""Mamba2 and Bamba: decoders whose layers are state-space mixers (Mamba2), attention, or some of each.

Mamba2 has mixers alone and no feed-forward layers; Bamba has attention in a few layers and a feed-forward
network in all. A mixer keeps one state of constant size per sequence where attention keeps keys and values.

    x = embed(tokens)
    each layer:  x += mixer or attention(norm(x));  x += mlp(norm(x)), where there is one
    mixer:       gate, u, dt = in(x);  u, b, c = silu(conv(u));  out(norm(scan(u, dt, b, c) · silu(gate)))
    logits = head(norm(x))

The scan is Mamba2's (Dao and Gu, arXiv:2405.21060), token by token; see backends/ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.ops import F32, Array, Matrix, Ops, Rope, Scan, Vector
from octavo.core.kv_groups import KVLayer
from octavo.core.kv_spec import KVCacheSpec, MambaSpec
from octavo.errors import UnsupportedModelError
from octavo.models.config import MambaConfig, ModelConfig
from octavo.models.decoder import Decoder, Progress, load_decoder
from octavo.models.layers import Attention, GatedMLP, ParameterLoader
from octavo.models.rope import attention_scale, rope_frequencies


@dataclass(frozen=True, slots=True)
class MambaMixer:
    """A Mamba2 mixer. Its cache is the last inputs of the convolution and the state of the scan."""

    config: MambaConfig
    norm_eps: float
    scan: Scan
    inward: Matrix  # [H·P + C + H, E]: gate, what is convolved, time steps
    inward_bias: Vector | None
    conv: Vector  # [W·C], one row per tap
    conv_bias: Vector | None  # [C]
    norm: Vector  # [H·P]
    out: Matrix  # [E, H·P]
    out_bias: Vector | None  # [E]

    @property
    def kv_spec(self) -> KVCacheSpec:
        config = self.config
        return MambaSpec(
            conv_values=(config.num_taps - 1) * config.num_channels,
            ssm_values=config.inner_size * config.state_size,
        )

    def forward(self, ops: Ops, x: Array, residual: Array, layer: KVLayer) -> Array:
        """residual + mixer(x) → [T, E]."""
        config = self.config
        inner, group_width = config.inner_size, config.num_groups * config.state_size
        projected = ops.linear(x, self.inward, self.inward_bias)  # [T, H·P + C + H]
        gate, u, dt = ops.split(projected, (inner, config.num_channels, config.num_heads))
        u = ops.conv1d(u, self.conv, self.conv_bias, layer)  # [T, C]
        u, b, c = ops.split(u, (inner, group_width, group_width))
        y = ops.ssm_scan(u, dt, b, c, self.scan, layer)  # [T, H·P]
        y = ops.gated_rms_norm(y, gate, self.norm, self.norm_eps, inner // config.num_groups)
        return ops.linear(y, self.out, self.out_bias, residual)

    @classmethod
    def load(cls, config: ModelConfig, mamba: MambaConfig, load: ParameterLoader, prefix: str) -> MambaMixer:
        """The mixer of the layer whose tensors are called `prefix`.in and so on."""

        def by_tap(taps: F32) -> F32:  # [C, 1, W] → [W·C]
            return np.ascontiguousarray(taps.reshape(-1, mamba.num_taps).T).reshape(-1)

        return cls(
            config=mamba,
            norm_eps=config.rms_norm_eps,
            scan=Scan(
                num_heads=mamba.num_heads,
                head_size=mamba.head_size,
                num_groups=mamba.num_groups,
                state_size=mamba.state_size,
                decay=load.vector(f"{prefix}.decay_log", lambda log: -np.exp(log)),
                skip=load.vector(f"{prefix}.skip"),
                dt_bias=load.vector(f"{prefix}.dt_bias"),
                dt_min=mamba.dt_min,
                dt_max=mamba.dt_max,
            ),
            inward=load.matrix(f"{prefix}.in"),
            inward_bias=load.vector(f"{prefix}.in.bias") if mamba.proj_bias else None,
            conv=load.vector(f"{prefix}.conv", by_tap),
            conv_bias=load.vector(f"{prefix}.conv.bias") if mamba.conv_bias else None,
            norm=load.vector(f"{prefix}.mixer_norm"),
            out=load.matrix(f"{prefix}.out"),
            out_bias=load.vector(f"{prefix}.out.bias") if mamba.proj_bias else None,
        )


@dataclass(frozen=True, slots=True)
class FeedForward:
    norm: Vector  # [E]
    mlp: GatedMLP


@dataclass(frozen=True, slots=True)
class HybridLayer:
    input_norm: Vector  # [E]
    mixer: Attention | MambaMixer
    feed_forward: FeedForward | None

    @property
    def kv_spec(self) -> KVCacheSpec:
        return self.mixer.kv_spec

    def forward(self, ops: Ops, x: Array, eps: float, place: KVLayer) -> Array:
        x = self.mixer.forward(ops, ops.rms_norm(x, self.input_norm, eps), x, place)
        if self.feed_forward is None:
            return x
        return self.feed_forward.mlp.forward(ops, ops.rms_norm(x, self.feed_forward.norm, eps), x)


def load_mamba_hybrid(config: ModelConfig, load: ParameterLoader, progress: Progress) -> Decoder:
    mamba = config.mamba
    if mamba is None or config.mlp_bias:
        raise UnsupportedModelError(
            f"{config.model_type} needs state-space layers, and feed-forward layers without biases; "
            "use another checkpoint"
        )
    rope = _load_rope(config, load)
    return load_decoder(config, load, progress, lambda i: _load_layer(config, mamba, load, i, rope))


def _load_rope(config: ModelConfig, load: ParameterLoader) -> Rope | None:
    """None in a model without attention."""
    if config.num_heads == 0:
        return None
    return load.backend.rope(rope_frequencies(config.rope, config.head_size), attention_scale(config.rope))


def _load_layer(
    config: ModelConfig, mamba: MambaConfig, load: ParameterLoader, index: int, rope: Rope | None
) -> HybridLayer:
    prefix = f"layers.{index}"
    mixer: Attention | MambaMixer
    if index in mamba.attention_layers:
        mixer = Attention.load(config, load, prefix, rope)
    else:
        mixer = MambaMixer.load(config, mamba, load, prefix)
    feed_forward = None
    if config.intermediate_size > 0:
        feed_forward = FeedForward(load.vector(f"{prefix}.post_norm"), GatedMLP.load(config, load, prefix))
    return HybridLayer(load.vector(f"{prefix}.input_norm"), mixer, feed_forward)
