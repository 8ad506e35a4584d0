"""The parts a decoder layer is made of: attention and the gated feed-forward network, with their weights.

They hold packed parameters and say, in operations of backends/ops.py, what is done with them. They know
neither the model around them nor where their cache lies: the KVLayer is given with every call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.backends.ops import (
    F32,
    Activation,
    Array,
    Backend,
    GatedMatrix,
    Matrix,
    Ops,
    Rope,
    Vector,
    WeightDtype,
)
from octavo.backends.ops import GroupedWeights as GroupedWeights  # for weights/, which makes them
from octavo.core.kv_groups import KVLayer
from octavo.core.kv_spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from octavo.models.config import ModelConfig

log = logging.getLogger(__name__)


class TensorSource(Protocol):
    """What a model reads its weights from: any Checkpoint (weights/checkpoint.py), or a dict in a test."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this canonical name."""
        ...

    def tensor(self, name: str) -> F32:
        """A fresh float32 array [out, in] or [width]."""
        ...

    @property
    def has_grouped(self) -> bool:
        """Whether grouped() has something to hand out. Asked for native weights only, as grouped() is."""
        ...

    def grouped(self, name: str) -> GroupedWeights | None:
        """The matrix of this canonical name in the integers it is stored as; None if it is not stored so."""
        ...


@dataclass(frozen=True, slots=True)
class ParameterLoader:
    """Reads tensors and packs them, holding each float32 copy no longer than its own packing takes."""

    source: TensorSource
    backend: Backend
    weight_dtype: WeightDtype

    def vector(self, name: str) -> Vector:
        return self.backend.vector(self.source.tensor(name))

    def matrix(self, *names: str) -> Matrix:
        """One matrix [sum of outs, in] of the named ones, in this order."""
        grouped = self._grouped(*names)
        if grouped is not None:
            return self.backend.grouped_matrix(join_rows(grouped))
        parts = [self.source.tensor(name) for name in names]
        return self.backend.matrix(parts[0] if len(parts) == 1 else np.concatenate(parts), self._rounded)

    def matrix_of(self, name: str, values: F32) -> Matrix:
        """The named matrix, whose values [out, in] are at hand."""
        grouped = self._grouped(name)
        if grouped is not None:
            return self.backend.grouped_matrix(grouped[0])
        return self.backend.matrix(values, self._rounded)

    def bias(self, *names: str) -> Vector:
        return self.backend.vector(np.concatenate([self.source.tensor(name) for name in names]))

    def gated_matrix(self, gate: str, up: str) -> GatedMatrix:
        grouped = self._grouped(gate, up)
        if grouped is not None:
            return self.backend.gated_grouped_matrix(grouped[0], grouped[1])
        return self.backend.gated_matrix(self.source.tensor(gate), self.source.tensor(up), self._rounded)

    @property
    def _rounded(self) -> WeightDtype:
        """What a matrix becomes that cannot stay as it is stored."""
        return "int8" if self.weight_dtype == "native" else self.weight_dtype

    def _grouped(self, *names: str) -> list[GroupedWeights] | None:
        """The stored integers of matrices that are packed as one; None unless all have codes of one size."""
        if self.weight_dtype != "native":
            return None
        parts = [part for name in names if (part := self.source.grouped(name)) is not None]
        if len(parts) == len(names) and len({part.bits for part in parts}) == 1:
            return parts
        log.info("%s: no native kernel for how this is stored; rounded to int8", ", ".join(names))
        return None


def join_rows(parts: list[GroupedWeights]) -> GroupedWeights:
    """One matrix of the rows of several with codes of one size."""
    if len(parts) == 1:
        return parts[0]
    lows = [part.low for part in parts if part.low is not None]
    return GroupedWeights(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(lows) if lows else None,
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary embedding over a paged cache."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_size: int  # D
    scale: float  # factor of q·k
    softcap: float | None  # of the scaled scores
    window: int | None  # positions a query sees, itself included; None: all
    norm_eps: float
    rope: Rope
    qkv: Matrix  # [H·D + 2·K·D, E]
    qkv_bias: Vector | None  # [H·D + 2·K·D]
    q_norm: Vector | None  # [D]
    k_norm: Vector | None  # [D]
    out: Matrix  # [E, H·D]
    out_bias: Vector | None  # [E]

    @property
    def kv_spec(self) -> KVCacheSpec:
        if self.window is None:
            return FullAttentionSpec(self.num_kv_heads, self.head_size)
        return SlidingWindowSpec(self.num_kv_heads, self.head_size, self.window)

    def forward(self, ops: Ops, x: Array, residual: Array | None, layer: KVLayer) -> Array:
        """(residual +) attention(x) → [T, E]."""
        q_width, kv_width = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        qkv = ops.linear(x, self.qkv, self.qkv_bias)  # [T, H·D + 2·K·D]
        q, k, v = ops.split(qkv, (q_width, kv_width, kv_width))
        if self.q_norm is not None:
            q = ops.head_norm(q, self.q_norm, self.norm_eps)
        if self.k_norm is not None:
            k = ops.head_norm(k, self.k_norm, self.norm_eps)
        q = ops.rope(q, self.rope, self.head_size)
        k = ops.rope(k, self.rope, self.head_size)
        ops.write_kv(k, v, layer)
        mixed = ops.paged_attention(q, layer, self.scale, self.window, self.softcap)  # [T, H·D]
        return ops.linear(mixed, self.out, self.out_bias, residual)

    @classmethod
    def load(
        cls, config: ModelConfig, load: ParameterLoader, prefix: str, rope: Rope, window: int | None = None
    ) -> Attention:
        """The attention of the layer whose tensors are called `prefix`.q and so on."""
        q, k, v, o = (f"{prefix}.{part}" for part in "qkvo")
        biases = (f"{q}.bias", f"{k}.bias", f"{v}.bias")
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5 if config.query_scale is None else config.query_scale,
            softcap=config.attention_softcap,
            window=window,
            norm_eps=config.rms_norm_eps,
            rope=rope,
            qkv=load.matrix(q, k, v),
            qkv_bias=load.bias(*biases) if config.attention_bias else None,
            q_norm=load.vector(f"{prefix}.q_norm") if config.qk_norm else None,
            k_norm=load.vector(f"{prefix}.k_norm") if config.qk_norm else None,
            out=load.matrix(o),
            out_bias=load.vector(f"{o}.bias") if config.output_bias else None,
        )


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) · up(x))."""

    gate_up: GatedMatrix  # two [F, E]
    down: Matrix  # [E, F]
    activation: Activation

    def forward(self, ops: Ops, x: Array, residual: Array | None) -> Array:
        """(residual +) mlp(x) → [T, E]."""
        hidden = ops.gated_linear(x, self.gate_up, self.activation)  # [T, F]
        return ops.linear(hidden, self.down, residual=residual)

    @classmethod
    def load(cls, config: ModelConfig, load: ParameterLoader, prefix: str) -> GatedMLP:
        return cls(
            gate_up=load.gated_matrix(f"{prefix}.gate", f"{prefix}.up"),
            down=load.matrix(f"{prefix}.down"),
            activation=config.activation,
        )
