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
    Embedding,
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

    def matrix(self, name: str) -> Matrix:
        return self._matrix((name,), self._stored(name))

    def matrices(self, *names: str) -> tuple[Matrix, ...]:
        """One matrix [sum of outs, in] of the named ones, or each alone where they are not stored alike."""
        stored = self._stored(*names)
        if len({weight and weight.kind for weight in stored}) == 1:
            return (self._matrix(names, stored),)
        return tuple(self._matrix((name,), [weight]) for name, weight in zip(names, stored, strict=True))

    def ends(self, table: str, head: str) -> tuple[Embedding, Matrix]:
        """The lookup table and the output matrix, which may be the same tensor.

        Integers that stay as they are stored are packed once and serve as both.
        """
        (stored,) = self._stored(table)
        if stored is not None:
            embed = self.backend.grouped_matrix(stored)
            return embed, embed if head == table else self.matrix(head)
        values = self.source.tensor(table)  # [V, E]
        embed = self.backend.embedding(values, self.weight_dtype)
        if head == table:
            return embed, self.backend.matrix(values, self._rounded(table))
        del values
        return embed, self.matrix(head)

    def bias(self, *names: str) -> Vector:
        """The biases of the named matrices, one after another."""
        return self.backend.vector(np.concatenate([self.source.tensor(f"{name}.bias") for name in names]))

    def gated_matrix(self, gate: str, up: str) -> GatedMatrix:
        first, second = self._stored(gate, up)
        if first is not None and second is not None and first.kind == second.kind:
            return self.backend.gated_grouped_matrix(first, second)
        dtype = self._rounded(gate, up)
        return self.backend.gated_matrix(self.source.tensor(gate), self.source.tensor(up), dtype)

    def _matrix(self, names: tuple[str, ...], stored: list[GroupedWeights | None]) -> Matrix:
        weights = [weight for weight in stored if weight is not None]
        if weights:
            return self.backend.grouped_matrix(join_rows(weights))
        parts = [self.source.tensor(name) for name in names]
        dtype = self._rounded(*names)
        return self.backend.matrix(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)

    def _rounded(self, *names: str) -> WeightDtype:
        """What these become if they do not stay as they are stored."""
        if self.weight_dtype != "native":
            return self.weight_dtype
        log.info("%s: no native kernel for how this is stored; rounded to int8", ", ".join(names))
        return "int8"

    def _stored(self, *names: str) -> list[GroupedWeights | None]:
        """The integers these matrices are stored as, where they are to be kept."""
        return [self.source.grouped(name) if self.weight_dtype == "native" else None for name in names]


def join_rows(parts: list[GroupedWeights]) -> GroupedWeights:
    """One matrix of the rows of several of one kind."""
    if len(parts) == 1:
        return parts[0]
    lows = [part.low for part in parts if part.low is not None]
    return GroupedWeights(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(lows) if lows else None,
        parts[0].bits,
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
    qkv: tuple[Matrix, ...]  # one [H·D + 2·K·D, E], or three where they are not stored alike
    qkv_bias: tuple[Vector | None, ...]  # of each
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
        parts = [ops.linear(x, *projection) for projection in zip(self.qkv, self.qkv_bias, strict=True)]
        q, k, v = parts if len(parts) == 3 else ops.split(parts[0], (q_width, kv_width, kv_width))
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
        qkv = load.matrices(q, k, v)
        names = [(q, k, v)] if len(qkv) == 1 else [(q,), (k,), (v,)]  # of each matrix
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5 if config.query_scale is None else config.query_scale,
            softcap=config.attention_softcap,
            window=window,
            norm_eps=config.rms_norm_eps,
            rope=rope,
            qkv=qkv,
            qkv_bias=tuple(load.bias(*part) if config.attention_bias else None for part in names),
            q_norm=load.vector(f"{prefix}.q_norm") if config.qk_norm else None,
            k_norm=load.vector(f"{prefix}.k_norm") if config.qk_norm else None,
            out=load.matrix(o),
            out_bias=load.bias(o) if config.output_bias else None,
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
