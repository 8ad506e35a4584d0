"""What the machine can do at best, and the least time that a step can take on it.

A Machine measures the peaks. A MeteredBackend notes what its steps read and compute; `least_s` is the time they
would take at those peaks: each matrix once, at the speed of memory or of its multiplications, whichever takes
longer; then attention the same way over the keys and values that are seen.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.backends.native import NativeBackend
from octavo.backends.native_record import Packed
from octavo.backends.ops import (
    F32,
    I32,
    GroupedWeights,
    KVCacheConfig,
    Limits,
    Model,
    StepInputs,
    WeightDtype,
)
from octavo.core.kv_spec import KV_FORMATS
from octavo.models.config import ModelConfig

T = TypeVar("T")
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of `threads` threads at once."""

    threads: int
    int8_gops: float  # multiplications and additions
    float32_gflops: float
    read_gb_s: float

    def best(self, other: Peaks) -> Peaks:
        """The higher of each."""
        return Peaks(*map(max, astuple(self), astuple(other)))

    def seconds(self, num_bytes: float, num_ops: float, weight_dtype: str) -> float:
        """The least for reading so much and computing so much."""
        peak = self.float32_gflops if weight_dtype == "float32" else self.int8_gops
        return max(num_bytes / self.read_gb_s, num_ops / peak) / 1e9


class Machine:
    """Measures peaks with probe.cpp, compiled for this machine. A measurement takes a fraction of a second."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        with tempfile.TemporaryDirectory() as folder:
            library = str(Path(folder) / "probe.so")
            source = str(Path(__file__).with_name("probe.cpp"))
            flags = ["-O2", "-std=c++17", "-march=native", "-pthread", "-shared", "-fPIC"]
            subprocess.run(["c++", *flags, source, "-o", library], check=True)
            code = ctypes.CDLL(library)
        self._probe, self._handover_ns = code.probe, code.handover_ns
        self._scattered_gb_s = code.scattered_gb_s
        self._handover_ns.restype = self._scattered_gb_s.restype = ctypes.c_double
        self._scattered_gb_s.argtypes = [ctypes.c_int, ctypes.c_size_t]

    def peaks(self, threads: int | None = None) -> Peaks:
        found = [ctypes.c_double() for _ in range(3)]
        threads = threads or self.threads
        self._probe(threads, *map(ctypes.byref, found))
        return Peaks(threads, *(f.value for f in found))

    def scattered_s(self, num_bytes: int, piece_bytes: int) -> float:
        """Seconds for reading so much in pieces that lie in random order."""
        return num_bytes / self._scattered_gb_s(self.threads, piece_bytes) / 1e9

    def handover_ns(self) -> float:
        """Of a cache line, from one thread to another. Cores that share no cache make every step slower."""
        return float(self._handover_ns())

    def during(self, work: Callable[[], T]) -> tuple[T, Peaks]:
        """What `work` returns, and the better of the peaks before and after: other users of the memory change
        them from one second to the next."""
        before = self.peaks()
        result = work()
        return result, before.best(self.peaks())


@dataclass(slots=True)
class Matrices:
    num_bytes: int = 0
    num_weights: int = 0


@dataclass(slots=True)
class Step:
    """What one step, and the logits() after it, were asked for."""

    num_new: I32  # [S] rows of each sequence
    seq_lens: I32  # [S]
    num_logits: int = 0


@dataclass(slots=True)
class Meter:
    config: ModelConfig
    weight_dtype: WeightDtype
    kv_dtype: str = ""
    layers: Matrices = field(default_factory=Matrices)
    head: Matrices = field(default_factory=Matrices)
    steps: list[Step] = field(default_factory=list)

    def least_s(self, peaks: Peaks, first_step: int = 0) -> float:
        """Of the steps since `first_step`."""
        return sum(self.step_least_s(peaks, step) for step in self.steps[first_step:])

    def step_least_s(self, peaks: Peaks, step: Step) -> float:
        ends, num_new = step.seq_lens.astype(np.int64), step.num_new.astype(np.int64)
        rows = int(num_new.sum())
        vector_bytes = KV_FORMATS[self.kv_dtype].vector_bytes(self.config.head_size)
        row_ops = 4 * self.config.num_heads * self.config.head_size  # of one row over one token
        kv_bytes = kv_ops = 0
        for window in (self.config.window(layer) or 1 << 60 for layer in range(self.config.num_layers)):
            seen = np.minimum(ends, window + num_new - 1)  # by all rows of a sequence
            kv_bytes += 2 * self.config.num_kv_heads * vector_bytes * int(seen.sum())
            kv_ops += row_ops * int((attended(ends, window) - attended(ends - num_new, window)).sum())
        return (
            self._product_s(peaks, self.layers, rows)
            + self._product_s(peaks, self.head, step.num_logits)
            + self._attention_s(peaks, kv_bytes, kv_ops)
        )

    def _attention_s(self, peaks: Peaks, num_bytes: int, num_ops: int) -> float:
        """int8 keys and values meet two digits of everything (csrc/attention_int8.inl)."""
        if self.kv_dtype == "int8":
            return peaks.seconds(num_bytes, 2 * num_ops, "int8")
        return peaks.seconds(num_bytes, num_ops, "float32")

    def _product_s(self, peaks: Peaks, matrices: Matrices, rows: int) -> float:
        if not rows:
            return 0.0
        return peaks.seconds(matrices.num_bytes, 2 * rows * matrices.num_weights, self.weight_dtype)


def attended(num_rows: I64, window: int) -> I64:
    """Tokens that the first `num_rows` rows of a sequence see, summed."""
    growing = np.minimum(num_rows, window)  # each of these rows sees one token more than the one before
    return growing * (growing + 1) // 2 + (num_rows - growing) * window


class MeteredRunner:
    """A Runner that notes its steps."""

    def __init__(self, runner: Any, meter: Meter) -> None:
        self._runner, self._meter = runner, meter

    def logits(self, rows: I32) -> F32:
        self._meter.steps[-1].num_logits += len(rows)
        logits: F32 = self._runner.logits(rows)
        return logits

    def run(self, inputs: StepInputs, rows: I32) -> tuple[F32, I32, F32]:
        self._meter.steps.append(Step(np.diff(inputs.query_starts), inputs.seq_lens.copy(), len(rows)))
        found: tuple[F32, I32, F32] = self._runner.run(inputs, rows)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class MeteredBackend(NativeBackend):
    """A NativeBackend whose matrices and steps are noted in `meter`."""

    def __init__(self, meter: Meter, num_threads: int | None = None) -> None:
        super().__init__(num_threads)
        self.meter = meter

    def matrix(self, weight: F32, dtype: WeightDtype) -> Packed:
        return self._note(super().matrix(weight, dtype))

    def gated_matrix(self, gate: F32, up: F32, dtype: WeightDtype) -> Packed:
        return self._note(super().gated_matrix(gate, up, dtype))

    def grouped_matrix(self, weight: GroupedWeights) -> Packed:
        return self._note(super().grouped_matrix(weight))

    def gated_grouped_matrix(self, gate: GroupedWeights, up: GroupedWeights) -> Packed:
        return self._note(super().gated_grouped_matrix(gate, up))

    def restore(
        self, kind: str, sizes: Sequence[int], fill: Callable[[Sequence[NDArray[np.uint8]]], bool]
    ) -> Any:
        parameter = super().restore(kind, sizes, fill)
        return self._note(parameter) if isinstance(parameter, Packed) else parameter

    def compile(self, model: Model, cache: KVCacheConfig, limits: Limits) -> Any:
        self.meter.kv_dtype = cache.dtype
        return MeteredRunner(super().compile(model, cache, limits), self.meter)

    def _note(self, packed: Packed) -> Packed:
        is_head = packed.n == self.meter.config.vocab_size
        matrices = self.meter.head if is_head else self.meter.layers
        matrices.num_bytes += packed.nbytes
        matrices.num_weights += packed.n * packed.k
        return packed
