"""The parts a decoder layer is made of: attention and the gated feed-forward network, with their weights.

They hold packed parameters and say, in operations of backends/ops.py, what is done with them. They know
neither the model around them nor where their cache lies: the KVLayer is given with every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

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
from octavo.backends.ops import Rows as Rows  # and these
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

    def rows(self, name: str) -> Rows:
        """The matrix [out, in], to be read in parts."""
        ...

    @property
    def has_grouped(self) -> bool:
        """Whether grouped() has something to hand out. Asked for native weights only, as the next two are."""
        ...

    def grouped_type(self, name: str) -> str | None:
        """How the matrix of this canonical name is stored: equal where matrices can be packed as one, None where
        grouped() is."""
        ...

    def grouped(self, name: str) -> GroupedWeights | None:
        """The matrix of this canonical name in the integers it is stored as; None if it is not stored so."""
        ...


class ParameterStore(Protocol):
    """Where packed parameters may lie already (weights/packed_cache.py)."""

    def obtain(self, name: str, make: Callable[[], Any]) -> Any:
        """The parameter of that name, kept or made by `make`."""
        ...


@dataclass(frozen=True, slots=True)
class ParameterLoader:
    """Reads tensors and packs them, holding each float32 copy no longer than its own packing takes. What the store
    has is not read at all."""

    source: TensorSource
    backend: Backend
    weight_dtype: WeightDtype
    store: ParameterStore | None = None

    def vector(self, name: str, change: Callable[[F32], F32] = lambda values: values) -> Vector:
        """The named tensor, after `change`."""
        return self._obtain((name,), lambda: self.backend.vector(change(self.source.tensor(name))))

    def matrix(self, name: str) -> Matrix:
        return self._obtain((name,), lambda: self._matrix(name))

    def matrices(self, *names: str) -> tuple[Matrix, ...]:
        """One matrix [sum of outs, in] of the named ones, or each alone where they are not stored alike."""
        if len({self._kept_type(name) for name in names}) == 1:
            return (self._obtain(names, lambda: self._matrix(*names)),)
        return tuple(self.matrix(name) for name in names)

    def ends(self, table: str, head: str) -> tuple[Embedding, Matrix]:
        """The lookup table and the output matrix, which may be the same tensor; it is read once.

        Integers that stay as they are stored are packed once and serve as both.
        """
        if self._kept_type(table) is not None:
            embed = self.matrix(table)
            return embed, embed if head == table else self.matrix(head)
        named = (table, "table")
        if head != table:
            make = self.backend.embedding
            embed = self._obtain(named, lambda: make(self.source.tensor(table), self.weight_dtype))
            return embed, self.matrix(head)
        rounded = self._rounded(table)
        tied = cache(lambda: self.backend.tied(self.source.rows(table), self.weight_dtype, rounded))
        return self._obtain(named, lambda: tied()[0]), self._obtain((table,), lambda: tied()[1])

    def bias(self, *names: str) -> Vector:
        """The biases of the named matrices, one after another."""
        tensors = [f"{name}.bias" for name in names]
        return self._obtain(
            tuple(tensors),
            lambda: self.backend.vector(np.concatenate([self.source.tensor(name) for name in tensors])),
        )

    def gated_matrix(self, gate: str, up: str) -> GatedMatrix:
        return self._obtain((gate, up), lambda: self._gated_matrix(gate, up))

    def _matrix(self, *names: str) -> Matrix:
        if self._kept_type(names[0]) is not None:
            return self.backend.grouped_matrix(join_rows([self._stored(name) for name in names]))
        parts = [self.source.tensor(name) for name in names]
        dtype = self._rounded(*names)
        return self.backend.matrix(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)

    def _gated_matrix(self, gate: str, up: str) -> GatedMatrix:
        kept = self._kept_type(gate)
        if kept is not None and kept == self._kept_type(up):
            return self.backend.gated_grouped_matrix(self._stored(gate), self._stored(up))
        dtype = self._rounded(gate, up)
        return self.backend.gated_matrix(self.source.tensor(gate), self.source.tensor(up), dtype)

    def _obtain(self, names: tuple[str, ...], make: Callable[[], Any]) -> Any:
        return make() if self.store is None else self.store.obtain(" ".join(names), make)

    def _rounded(self, *names: str) -> WeightDtype:
        """What these become if they do not stay as they are stored."""
        if self.weight_dtype != "native":
            return self.weight_dtype
        log.info("%s: no native kernel for how this is stored; rounded to int8", ", ".join(names))
        return "int8"

    def _kept_type(self, name: str) -> str | None:
        """How this matrix is stored, where its integers are to be kept."""
        return self.source.grouped_type(name) if self.weight_dtype == "native" else None

    def _stored(self, name: str) -> GroupedWeights:
        stored = self.source.grouped(name)
        assert stored is not None, name
        return stored


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
