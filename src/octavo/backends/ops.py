"""Ops: the operations models are written in, one set for all backends. NumPy (numpy_ref.py) specifies them.

A model calls these on opaque `Array` handles (float32, [T, width], T = tokens in the step) and never looks
inside one. The NumPy backend computes at once on ndarrays; the native backend records the calls into a
program when the model is compiled and then runs it in one call a step, without the interpreter lock.
So a model's forward() must not branch on values, only on its configuration.

Shape letters: S sequences, T tokens, R logit rows, E hidden size, F feed-forward size, H query heads,
K kv heads, D head size, B block size, N blocks, V vocabulary.
In a state-space layer: H heads of P columns each, G groups, Z values of state a column, C channels, W taps.

The promise every backend keeps: the result for a row depends on that row's own sequence alone, bitwise;
not on T, S, the chunk, the block size or the block ids. Every sum has one order, fixed by its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.core.kv_groups import KVLayer, KVLayout

Array = Any  # a backend's handle of a float32 array [T, width]
Matrix = Any  # a packed weight matrix [out, in]
GatedMatrix = Any  # two packed matrices [F, in], gate and up, laid out for gated_linear
Embedding = Any  # a lookup table [V, E]
Vector = Any  # a float32 vector
Rope = Any  # per-dimension frequencies and a scale

WeightDtype = Literal["float32", "int8", "native"]  # native: as the file stores them, where it can be
KVDtype = Literal["fp32", "fp16", "int8"]  # core.kv_spec.KV_FORMATS has their sizes
Activation = Literal["silu", "gelu_tanh"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """A matrix [out, in] of small integers with a scale for every `group` along `in`, as quantised files hold them.

    Its values are scale · code + low where there is a low, scale · (code - 2^(bits - 1)) elsewhere.
    """

    codes: NDArray[np.uint8]  # [out, in]
    scale: NDArray[np.float16]  # [out, in/group]
    low: NDArray[np.float16] | None  # [out, in/group]; codes of 4 and 5 bits only
    bits: int  # of a code: 4, 5, 6 or 8

    @property
    def group(self) -> int:
        return 16 if self.bits == 6 else 32

    @property
    def kind(self) -> str:
        """Matrices can be packed as one if this is equal."""
        return f"{self.bits} bits" + ("" if self.low is None else " with a lowest value")

    def check_pair(self, up: GroupedWeights) -> None:
        """Raise ValueError unless this and `up` can be packed as a gated pair."""
        if (self.codes.shape, self.kind) != (up.codes.shape, up.kind):
            raise ValueError(
                f"gate {self.codes.shape} of {self.kind} and up {up.codes.shape} of {up.kind} "
                "must have the same shape and bits"
            )


class Rows(Protocol):
    """A float32 matrix [rows, width] whose rows may be read as they are asked for. Any such array is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> F32: ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The integer inputs of one step. Row t of the step is token t; sequences lie one after another."""

    tokens: I32  # [T] token ids
    positions: I32  # [T] position of each token in its sequence
    query_starts: I32  # [S+1] rows [query_starts[s], query_starts[s+1]) belong to sequence s
    seq_lens: I32  # [S] tokens in the cache once this step's keys and values are written
    table_rows: I32  # [S] row of each sequence in every block table
    block_tables: tuple[I32, ...]  # per group: [rows, max_blocks] physical block ids


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes buffers are planned for, once."""

    max_tokens: int  # T, at most
    max_seqs: int  # S, at most
    max_table_rows: int  # rows of a block table
    max_blocks_per_seq: int  # columns of a block table
    max_logit_rows: int  # R, at most, per call of Runner.logits


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The cache to allocate: `layout.num_storages` arrays of `num_blocks` blocks each."""

    layout: KVLayout
    num_blocks: int  # N
    block_size: int  # B
    dtype: KVDtype


@dataclass(frozen=True, slots=True)
class Scan:
    """The parameters of a selective scan (Mamba2), made of vectors that the backend packed."""

    num_heads: int  # H
    head_size: int  # P
    num_groups: int  # G; head h reads b and c of group h // (H/G)
    state_size: int  # Z
    decay: Vector  # [H] A, negative
    skip: Vector  # [H] D
    dt_bias: Vector  # [H]
    dt_min: float = 0.0  # the time step is clamped to [dt_min, dt_max]
    dt_max: float = float("inf")


class Ops(Protocol):
    """The graph operations. `x`, `q`, `k`, `v` are handles [T, width]; each result is a new handle, and a
    handle given to `head_norm`, `rope` or as `residual` must not be used again (it may be overwritten)."""

    def embed(self, table: Embedding) -> Array:
        """Rows of `table` at the step's token ids → [T, E]; a matrix from grouped_matrix is a table as well."""
        ...

    def scale(self, x: Array, factor: float) -> Array:
        """x · factor."""
        ...

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        ...

    def rms_norm(self, x: Array, weight: Vector, eps: float) -> Array:
        """x / sqrt(mean(x²) + eps) · weight over the last axis → [T, width]."""
        ...

    def linear(
        self, x: Array, matrix: Matrix, bias: Vector | None = None, residual: Array | None = None
    ) -> Array:
        """x @ matrix.T (+ bias) (+ residual) → [T, out]."""
        ...

    def gated_linear(self, x: Array, matrix: GatedMatrix, activation: Activation) -> Array:
        """activation(x @ gate.T) · (x @ up.T) → [T, F]."""
        ...

    def split(self, x: Array, widths: tuple[int, ...]) -> tuple[Array, ...]:
        """Views of consecutive column ranges of x."""
        ...

    def head_norm(self, x: Array, weight: Vector, eps: float) -> Array:
        """rms_norm over each head of len(weight) columns (Qwen3 and Gemma 3 normalise q and k)."""
        ...

    def rope(self, x: Array, rope: Rope, head_size: int) -> Array:
        """Rotary embedding at the step's positions: within each head of `head_size` columns, column i is
        rotated with column i + n by the angle position · frequency[i], i < n (the half-split form), where n
        is the number of frequencies. Where 2·n < head_size the other columns stay as they are."""
        ...

    def write_kv(self, k: Array, v: Array, layer: KVLayer) -> None:
        """Store k, v [T, K·D] at the step's positions through the block table of layer.group.

        Values are rounded to the cache's dtype. int8 is symmetric: each key and each value [D] of a kv head
        becomes integers round(x · 127 / max|x|), half to even, and the scale max|x| / 127 in float32. An all-zero
        vector has scale 0; one with a NaN or an infinity has scale NaN and so reads as NaN throughout.
        """
        ...

    def paged_attention(
        self, q: Array, layer: KVLayer, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Array:
        """Causal attention of q [T, H·D] over the sequence's cached keys and values → [T, H·D].

        Query head h reads kv head h // (H/K). With `window` w a query at position p sees keys at
        positions (p - w, p]. With `softcap` c scores become c · tanh(score / c) before the softmax.
        """
        ...

    def softcap(self, x: Array, cap: float) -> Array:
        """cap · tanh(x / cap)."""
        ...

    def conv1d(self, x: Array, weight: Vector, bias: Vector | None, layer: KVLayer) -> Array:
        """silu(causal depthwise convolution of x [T, C] over its own sequence + bias) → [T, C].

        `weight` [W·C] holds one row of C weights per tap, the oldest input's first. Inputs before the first
        are zero. The last W-1 inputs of the sequence are kept in the layer's state, see `ssm_scan`.
        """
        ...

    def ssm_scan(self, x: Array, dt: Array, b: Array, c: Array, scan: Scan, layer: KVLayer) -> Array:
        """The selective scan of x [T, H·P] with time steps dt [T, H] and b, c [T, G·Z] → [T, H·P].

        Token by token, for each head with its state S [Z, P], zero before the first token:
            d = clamp(softplus(dt + dt_bias));  S = exp(d · decay) · S + b ⊗ (d · x);  y = c @ S + skip · x

        A layer's state is one block per sequence, of float32 values whatever the cache's dtype:
        | last inputs of conv1d [W-1, C] | S [H, Z, P] |. After n tokens it lies in the block of logical index
        (n-1)//B. A step from `start` to `end` tokens reads block (start-1)//B, writes block (end-1)//B and
        leaves all others as they are: they may be checkpoints, shared, or not there at all.
        """
        ...

    def gated_rms_norm(self, x: Array, gate: Array, weight: Vector, eps: float, group_size: int) -> Array:
        """rms_norm of x · silu(gate) over each `group_size` columns, times weight [width] → [T, width]."""
        ...


class Model(Protocol):
    """What a backend compiles. Written in models/, one file per family."""

    def forward(self, ops: Ops) -> Array:
        """The hidden states after the last norm → [T, E]."""
        ...

    def logits(self, ops: Ops, hidden: Array) -> Array:
        """hidden [R, E] → [R, V]."""
        ...


class Runner(Protocol):
    """A compiled model with its KV cache."""

    def forward(self, inputs: StepInputs) -> None:
        """Run the model over the step; hidden states stay inside."""
        ...

    def logits(self, rows: I32) -> F32:
        """Logits [R, V] of the given rows of the last forward(); a view, valid until the next call."""
        ...

    def best(self, logits: F32) -> tuple[I32, F32]:
        """Of each row of what logits() returned last the index of the largest value, as numpy.argmax, and that
        value: [R] each."""
        ...

    def run(self, inputs: StepInputs, rows: I32) -> tuple[F32, I32, F32]:
        """forward(), logits() and best() in one call: after each, the interpreter finds its caches cold."""
        ...

    def softmax_blocks(self, scores: F32, block: int, peaks: F32, temperatures: F32) -> tuple[F64, F32]:
        """What sampling asks of rows of scores [R, V] in blocks of `block` tokens, the last perhaps shorter: of
        each block the sum of exp((score - peaks[r]) / temperatures[r]) and the best score, [R, B] each. peaks[r]
        is the maximum of the row. Rows of temperature 0 are not wanted and hold anything. Scores may be minus
        infinity, not NaN."""
        ...

    def copy_blocks(self, src: I32, dst: I32) -> None:
        """Copy whole blocks, in every storage array."""
        ...

    def read_block(self, block_id: int) -> NDArray[np.uint8]:
        """The bytes of one block over all storage arrays (a copy)."""
        ...

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        """The opposite of read_block."""
        ...

    def take_memory(self) -> bool:
        """Take some of the cache's memory from the system ahead of its use, in milliseconds; False when there is
        nothing left to take."""
        ...

    def fill_block(self, block_id: int, value: float) -> None:
        """Overwrite a block with one value (debug mode writes NaN into freed blocks). In an int8 cache scales
        and states get the value, integers anything."""
        ...


class Backend(Protocol):
    """Packs parameters and compiles models."""

    name: str

    @property
    def description(self) -> str:
        """What computes, in words for the log: instruction set, threads."""
        ...

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all parameters packed so far."""
        ...

    def matrix(self, weight: F32, dtype: WeightDtype) -> Matrix:
        """Pack [out, in]."""
        ...

    def gated_matrix(self, gate: F32, up: F32, dtype: WeightDtype) -> GatedMatrix:
        """Pack two matrices [F, in] for gated_linear."""
        ...

    def grouped_matrix(self, weight: GroupedWeights) -> Matrix:
        """Pack [out, in] without rounding; products quantise their activations in the same groups."""
        ...

    def gated_grouped_matrix(self, gate: GroupedWeights, up: GroupedWeights) -> GatedMatrix:
        """Pack two of [F, in] of one kind for gated_linear."""
        ...

    def embedding(self, weight: F32, dtype: WeightDtype) -> Embedding:
        """A lookup table [V, E]: exact with float32, half precision otherwise."""
        ...

    def tied(self, weight: Rows, dtype: WeightDtype, head_dtype: WeightDtype) -> tuple[Embedding, Matrix]:
        """embedding() and matrix() of the same [V, E], read once and, where it is large, in parts."""
        ...

    def vector(self, values: F32) -> Vector:
        """A norm weight or a bias."""
        ...

    def rope(self, frequencies: F32, attention_scale: float = 1.0) -> Rope:
        """`frequencies` [≤ head_size/2] in radians per position; cos and sin are multiplied by the scale."""
        ...

    def compile(self, model: Model, cache: KVCacheConfig, limits: Limits) -> Runner:
        """Allocate the cache and all buffers."""
        ...


@runtime_checkable
class RestoresParameters(Protocol):
    """A backend whose packed parameters are plain memory, so that they can be kept in a file."""

    def restore(
        self, kind: str, sizes: Sequence[int], fill: Callable[[Sequence[NDArray[np.uint8]]], bool]
    ) -> Any:
        """The parameter whose class had this name and which had these sizes. `fill` is given its buffers and says
        whether it filled them; if not, the result is None."""
        ...

    def code_files(self) -> Iterable[Path]:
        """The files whose change may change what a tensor is packed to."""
        ...
