"""NumpyBackend: the executable specification of every operation in ops.py, in plain NumPy.

It computes at once, in float32, one readable line after another; it is the oracle the kernels are tested
against and a slow but complete backend of its own. It is not tuned: attention loops over rows.

int8 weights are fake-quantised: the integers are kept in float32 arrays. Products of two int8 values summed
over a group of 64 stay below 2**24, so those float32 sums are exact whatever order BLAS takes.
Every other sum runs along the last axis of a fixed length, so that a row never depends on its neighbours;
BLAS is not used for it, because its order of summation changes with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import numpy_ssm
from octavo.backends.numpy_cache import PagedCache, check_inputs
from octavo.backends.numpy_grouped import GroupedMatrix
from octavo.backends.numpy_quant import fused_multiply_add, quantize_rows
from octavo.backends.ops import (
    F32,
    F64,
    I32,
    Activation,
    Array,
    GroupedWeights,
    KVCacheConfig,
    Limits,
    Model,
    Rows,
    Scan,
    StepInputs,
    WeightDtype,
)
from octavo.core.kv_groups import KVLayer

QUANT_GROUP = 64  # activations share one scale over this many values along K


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """Exact weights."""

    weight: F32  # [out, in]

    def multiply(self, x: F32) -> F32:
        """x [T, in] → [T, out]; one dot product per output, in an order that only `in` decides."""
        y: F32 = np.einsum("tk,nk->tn", np.ascontiguousarray(x), self.weight)
        return y


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """Symmetric int8 per output channel; the activations are quantised on the way in."""

    weight: F32  # [out, in], integers in [-127, 127]
    scale: F32  # [out]

    def multiply(self, x: F32) -> F32:
        """x [T, in] → [T, out]: exact integer sums per group, added up in ascending order of groups."""
        total = np.zeros((x.shape[0], self.weight.shape[0]), np.float32)  # [T, out]
        for start in range(0, x.shape[1], QUANT_GROUP):
            group = slice(start, start + QUANT_GROUP)
            q, scale = quantize_rows(x[:, group])  # [T, ≤64], [T]
            exact = q @ self.weight[:, group].T  # [T, out]
            total = fused_multiply_add(exact, scale[:, None], total)
        return total * self.scale


@dataclass(frozen=True, slots=True)
class GatedMatrix:
    gate: FloatMatrix | Int8Matrix | GroupedMatrix  # [F, in]
    up: FloatMatrix | Int8Matrix | GroupedMatrix  # [F, in]


@dataclass(frozen=True, slots=True)
class RopeTable:
    frequencies: F32  # [n] radians per position; n is D/2 where whole heads are rotated
    attention_scale: float


def activate(x: F32, activation: Activation) -> F32:
    """silu: x · sigmoid(x); gelu_tanh: the tanh approximation of x · Φ(x)."""
    if activation == "silu":
        return numpy_ssm.silu(x)
    one, half = np.float32(1.0), np.float32(0.5)
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(half * x * (one + np.tanh(inner)), np.float32)


def attend(q: F32, k: F32, v: F32, scale: float, softcap: float | None) -> F32:
    """One query q [H, D] over keys and values [L, K, D] → [H·D]."""
    kv_heads, head_size = k.shape[1:]
    grouped = q.reshape(kv_heads, -1, head_size)  # [K, H/K, D]
    scores = np.einsum("kgd,lkd->kgl", grouped, k) * np.float32(scale)  # [K, H/K, L]
    if softcap is not None:
        scores = np.tanh(scores / np.float32(softcap)) * np.float32(softcap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # [K, H/K, L]
    mixed = np.einsum("kgl,lkd->kgd", weights, v)  # [K, H/K, D]
    out: F32 = (mixed / weights.sum(axis=-1, keepdims=True)).reshape(-1)
    return out


class NumpyOps:
    """The operations of one step, on ndarrays [T, width]. Nothing is overwritten."""

    def __init__(self, inputs: StepInputs, cache: PagedCache) -> None:
        self._inputs = inputs
        self._cache = cache

    def embed(self, table: NDArray[np.floating] | GroupedMatrix) -> F32:
        tokens = self._inputs.tokens
        num_rows = len(table.weight.codes if isinstance(table, GroupedMatrix) else table)
        if len(tokens) and tokens.max() >= num_rows:
            raise ValueError(f"token id {tokens.max()} is not below the {num_rows} rows of the table")
        if isinstance(table, GroupedMatrix):
            return table.rows(tokens)
        return table[tokens].astype(np.float32)  # [T, E]

    def scale(self, x: F32, factor: float) -> F32:
        return x * np.float32(factor)

    def add(self, x: F32, y: F32) -> F32:
        return x + y

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        mean = np.mean(x * x, axis=-1, keepdims=True)  # [..., 1]
        y: F32 = x / np.sqrt(mean + np.float32(eps)) * weight
        return y

    def linear(
        self,
        x: F32,
        matrix: FloatMatrix | Int8Matrix | GroupedMatrix,
        bias: F32 | None = None,
        residual: F32 | None = None,
    ) -> F32:
        y = matrix.multiply(x)  # [T, out]
        if bias is not None:
            y = y + bias
        return y if residual is None else y + residual

    def gated_linear(self, x: F32, matrix: GatedMatrix, activation: Activation) -> F32:
        return activate(matrix.gate.multiply(x), activation) * matrix.up.multiply(x)

    def split(self, x: F32, widths: tuple[int, ...]) -> tuple[F32, ...]:
        if sum(widths) != x.shape[1]:
            raise ValueError(
                f"split widths {widths} add up to {sum(widths)}, the array has {x.shape[1]} columns"
            )
        return tuple(np.split(x, np.cumsum(widths)[:-1], axis=1))

    def head_norm(self, x: F32, weight: F32, eps: float) -> F32:
        heads = x.reshape(x.shape[0], -1, weight.shape[0])  # [T, heads, D]
        return self.rms_norm(heads, weight, eps).reshape(x.shape)

    def rope(self, x: F32, rope: RopeTable, head_size: int) -> F32:
        angles = self._inputs.positions[:, None, None] * rope.frequencies.astype(np.float64)  # [T, 1, n]
        cos = (np.cos(angles) * rope.attention_scale).astype(np.float32)
        sin = (np.sin(angles) * rope.attention_scale).astype(np.float32)
        heads = x.reshape(x.shape[0], -1, head_size)  # [T, heads, D]
        n = len(rope.frequencies)
        left, right, rest = heads[..., :n], heads[..., n : 2 * n], heads[..., 2 * n :]
        rotated: F32 = np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)
        return rotated.reshape(x.shape)

    def write_kv(self, k: F32, v: F32, layer: KVLayer) -> None:
        inputs = self._inputs
        for s, row in enumerate(inputs.table_rows):
            rows = slice(inputs.query_starts[s], inputs.query_starts[s + 1])
            table = inputs.block_tables[layer.group][row]  # [max_blocks]
            self._cache.write(layer, table, inputs.positions[rows], k[rows], v[rows])

    def paged_attention(
        self, q: F32, layer: KVLayer, scale: float, window: int | None = None, softcap: float | None = None
    ) -> F32:
        inputs = self._inputs
        out = np.empty(q.shape, np.float32)  # [T, H·D]
        for s, row in enumerate(inputs.table_rows):
            table = inputs.block_tables[layer.group][row]  # [max_blocks]
            k, v = self._cache.read(layer, table, int(inputs.seq_lens[s]))  # [len, K, D]
            for t in range(inputs.query_starts[s], inputs.query_starts[s + 1]):
                end = int(inputs.positions[t]) + 1
                start = 0 if window is None else max(0, end - window)
                query = q[t].reshape(-1, k.shape[2])  # [H, D]
                out[t] = attend(query, k[start:end], v[start:end], scale, softcap)
        return out

    def softcap(self, x: F32, cap: float) -> F32:
        return np.asarray(np.tanh(x / np.float32(cap)) * np.float32(cap), np.float32)

    def conv1d(self, x: F32, weight: F32, bias: F32 | None, layer: KVLayer) -> F32:
        out = np.empty(x.shape, np.float32)  # [T, C]
        for rows, before, after in self._cache.states(layer, self._inputs):
            after[0][:] = 0.0 if before is None else before[0]
            out[rows] = numpy_ssm.causal_conv(x[rows], after[0].reshape(-1, x.shape[1]), weight, bias)
        return out

    def ssm_scan(self, x: F32, dt: F32, b: F32, c: F32, scan: Scan, layer: KVLayer) -> F32:
        out = np.empty(x.shape, np.float32)  # [T, H·P]
        for rows, before, after in self._cache.states(layer, self._inputs):
            after[1][:] = 0.0 if before is None else before[1]
            state = after[1].reshape(scan.num_heads, scan.state_size, scan.head_size)  # [H, Z, P], a view
            out[rows] = numpy_ssm.selective_scan(x[rows], dt[rows], b[rows], c[rows], scan, state)
        return out

    def gated_rms_norm(self, x: F32, gate: F32, weight: F32, eps: float, group_size: int) -> F32:
        return numpy_ssm.gated_rms_norm(x, gate, weight, eps, group_size)


def softmax_blocks(scores: F32, block: int, peaks: F32, temperatures: F32) -> tuple[F64, F32]:
    """See ops.Runner. Each row by itself, each block too."""
    num_rows, width = scores.shape
    starts = np.arange(0, width, block)
    sums, maxima = np.zeros((num_rows, len(starts))), np.zeros((num_rows, len(starts)), np.float32)
    for r in np.flatnonzero(temperatures):
        numerators = np.exp((scores[r] - peaks[r]) / temperatures[r])  # [V]
        sums[r] = np.add.reduceat(numerators, starts, dtype=np.float64)
        maxima[r] = np.maximum.reduceat(scores[r], starts)
    return sums, maxima


class NumpyRunner:
    """A model with its cache. Each forward() interprets the model's code over the step's arrays."""

    def __init__(self, model: Model, cache: KVCacheConfig, limits: Limits) -> None:
        self._model = model
        self._cache = PagedCache(cache)
        self._limits = limits
        self._ops: NumpyOps | None = None
        self._hidden: Array = None  # [T, E]

    def forward(self, inputs: StepInputs) -> None:
        check_inputs(inputs, self._cache, self._limits)
        self._ops = NumpyOps(inputs, self._cache)
        self._hidden = self._model.forward(self._ops)

    def logits(self, rows: I32) -> F32:
        if self._ops is None:
            raise ValueError("logits() was called before any forward()")
        num_rows = self._hidden.shape[0]
        if len(rows) > self._limits.max_logit_rows:
            raise ValueError(f"{len(rows)} logit rows exceed the limit of {self._limits.max_logit_rows}")
        if len(rows) and not (rows.min() >= 0 and rows.max() < num_rows):
            raise ValueError(f"logit rows {rows.tolist()} must lie in [0, {num_rows})")
        logits: F32 = self._model.logits(self._ops, self._hidden[rows])
        return logits

    def best(self, logits: F32) -> tuple[I32, F32]:
        best: I32 = logits.argmax(axis=1).astype(np.int32)
        return best, logits[np.arange(len(best)), best]

    def run(self, inputs: StepInputs, rows: I32) -> tuple[F32, I32, F32]:
        self.forward(inputs)
        logits = self.logits(rows)
        return logits, *self.best(logits)

    def softmax_blocks(self, scores: F32, block: int, peaks: F32, temperatures: F32) -> tuple[F64, F32]:
        return softmax_blocks(scores, block, peaks, temperatures)

    def copy_blocks(self, src: I32, dst: I32) -> None:
        self._cache.copy_blocks(src, dst)

    def read_block(self, block_id: int) -> NDArray[np.uint8]:
        return self._cache.read_block(block_id)

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        self._cache.write_block(block_id, data)

    def take_memory(self) -> bool:
        return False

    def fill_block(self, block_id: int, value: float) -> None:
        self._cache.fill_block(block_id, value)


class NumpyBackend:
    """Packs parameters as plain arrays and compiles models by keeping them as they are."""

    name = "numpy"
    description = "NumPy, the executable specification (slow)"

    def __init__(self) -> None:
        self.num_weight_bytes = 0

    def matrix(self, weight: F32, dtype: WeightDtype) -> FloatMatrix | Int8Matrix:
        if not np.isfinite(weight).all():
            raise ValueError(f"a weight matrix {weight.shape} holds NaN or infinity")
        if dtype == "float32":
            return FloatMatrix(self._count(np.ascontiguousarray(weight, np.float32)))
        quantized, scales = quantize_rows(np.asarray(weight, np.float32))
        return Int8Matrix(self._count(quantized), self._count(scales))

    def gated_matrix(self, gate: F32, up: F32, dtype: WeightDtype) -> GatedMatrix:
        if gate.shape != up.shape:
            raise ValueError(f"gate {gate.shape} and up {up.shape} must have the same shape")
        return GatedMatrix(self.matrix(gate, dtype), self.matrix(up, dtype))

    def grouped_matrix(self, weight: GroupedWeights) -> GroupedMatrix:
        self.num_weight_bytes += weight.codes.size * weight.bits // 8
        for halves in (weight.scale, *(() if weight.low is None else (weight.low,))):
            self._count(halves)
        return GroupedMatrix(weight)

    def gated_grouped_matrix(self, gate: GroupedWeights, up: GroupedWeights) -> GatedMatrix:
        gate.check_pair(up)
        return GatedMatrix(self.grouped_matrix(gate), self.grouped_matrix(up))

    def embedding(self, weight: F32, dtype: WeightDtype) -> NDArray[np.floating]:
        return self._count(np.array(weight, np.float32 if dtype == "float32" else np.float16))

    def tied(
        self, weight: Rows, dtype: WeightDtype, head_dtype: WeightDtype
    ) -> tuple[NDArray[np.floating], FloatMatrix | Int8Matrix]:
        values = weight[:]
        return self.embedding(values, dtype), self.matrix(values, head_dtype)

    def vector(self, values: F32) -> F32:
        return self._count(np.array(values, np.float32))

    def rope(self, frequencies: F32, attention_scale: float = 1.0) -> RopeTable:
        return RopeTable(np.array(frequencies, np.float32), attention_scale)

    def compile(self, model: Model, cache: KVCacheConfig, limits: Limits) -> NumpyRunner:
        return NumpyRunner(model, cache, limits)

    def _count(self, array: NDArray[Any]) -> NDArray[Any]:
        self.num_weight_bytes += array.nbytes
        return array
