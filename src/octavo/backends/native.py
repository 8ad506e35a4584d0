"""NativeBackend: the C++ kernels behind ops.py.

compile() runs the model's code once on a recorder (native_record.py), plans one arena (native_plan.py) and
leaves a `_native.Program`; each step is then one call without the interpreter lock. What is computed is
specified by numpy_ref.py; how, is in csrc/. This file only connects the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.backends.native_plan import BarrierPlan, Instruction, mark_uses, place, without_unread
from octavo.backends.native_record import Packed, Recorder, Value
from octavo.backends.ops import (
    F32,
    F64,
    I32,
    GroupedWeights,
    KVCacheConfig,
    Limits,
    Model,
    Rows,
    StepInputs,
    WeightDtype,
)
from octavo.backends.threads import default_num_threads
from octavo.core.kv_spec import KV_FORMATS
from octavo.errors import ConfigError

ISA_VARIABLE = "OCTAVO_ISA"  # overrides the instruction set, for tests and comparisons
HALF_MAX = 65504.0  # the largest float16
PART_FLOATS = 1 << 21  # of a large matrix at a time


def available_isas() -> list[str]:
    """Instruction sets that this build has and this processor runs, best first."""
    return list(_native.available_isas())


class NativeRunner:
    """A compiled model with its cache. Arrays it is given must be C-contiguous; wrong ones raise."""

    def __init__(self, program: _native.Program, cache: _native.KVCache) -> None:
        self._program = program
        self._cache = cache

    def forward(self, inputs: StepInputs) -> None:
        self._program.forward(*_arrays(inputs))

    def logits(self, rows: I32) -> F32:
        return self._program.logits(rows)

    def best(self, logits: F32) -> tuple[I32, F32]:
        return self._program.best()

    def run(self, inputs: StepInputs, rows: I32) -> tuple[F32, I32, F32]:
        return self._program.run(*_arrays(inputs), rows)

    def softmax_blocks(self, scores: F32, block: int, peaks: F32, temperatures: F32) -> tuple[F64, F32]:
        return self._program.softmax_blocks(scores, block, peaks, temperatures)

    def copy_blocks(self, src: I32, dst: I32) -> None:
        self._cache.copy_blocks(src, dst)

    def read_block(self, block_id: int) -> NDArray[np.uint8]:
        return self._cache.read_block(block_id)

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        self._cache.write_block(block_id, data)

    def take_memory(self) -> bool:
        return self._cache.take_memory()

    def fill_block(self, block_id: int, value: float) -> None:
        self._cache.fill_block(block_id, value)


class NativeBackend:
    """Packs parameters into the kernels' layouts and compiles models."""

    name = "native"

    def __init__(self, num_threads: int | None = None, isa: str | None = None) -> None:
        """`num_threads` None: the cores this process may use. `isa` None: the best one of this processor."""
        self.isa = isa or os.environ.get(ISA_VARIABLE) or _native.isa()
        if self.isa not in _native.available_isas():
            raise ConfigError(
                f"instruction set '{self.isa}' is not available here; use one of {_native.available_isas()}"
            )
        self.num_threads = default_num_threads() if num_threads is None else num_threads
        if not 1 <= self.num_threads <= 1024:
            raise ConfigError(f"--threads {num_threads} must be between 1 and 1024")
        self.num_weight_bytes = 0
        self._pool = _native.thread_pool(self.num_threads)

    @property
    def description(self) -> str:
        plural = "" if self.num_threads == 1 else "s"
        return f"native kernels ({self.isa}) on {self.num_threads} thread{plural}"

    def matrix(self, weight: F32, dtype: WeightDtype) -> Packed:
        return self._packed(dtype, weight, None)

    def gated_matrix(self, gate: F32, up: F32, dtype: WeightDtype) -> Packed:
        if gate.shape != up.shape:
            raise ValueError(f"gate {gate.shape} and up {up.shape} must have the same shape")
        return self._packed(dtype, gate, up)

    def grouped_matrix(self, weight: GroupedWeights) -> Packed:
        packed = _native.PackedGrouped(_parts(weight), bits=weight.bits, num_threads=self.num_threads)
        return self._count(packed)

    def gated_grouped_matrix(self, gate: GroupedWeights, up: GroupedWeights) -> Packed:
        gate.check_pair(up)
        pair = _parts(gate), _parts(up)
        return self._count(_native.PackedGrouped(*pair, bits=gate.bits, num_threads=self.num_threads))

    def embedding(self, weight: F32, dtype: WeightDtype) -> _native.Table:
        fits_half = dtype != "float32" and bool(_largest(weight) <= HALF_MAX)
        table: _native.Table = _native.Table.empty([*weight.shape, fits_half])
        [values] = table.buffers
        values.view(np.float16 if fits_half else np.float32).reshape(weight.shape)[:] = weight
        self.num_weight_bytes += values.nbytes
        return table

    def tied(self, weight: Rows, dtype: WeightDtype, head_dtype: WeightDtype) -> tuple[_native.Table, Packed]:
        height, width = weight.shape
        panel = _native.PANEL
        step = max(1, PART_FLOATS // (panel * width)) * panel
        is_half = dtype != "float32"
        table: _native.Table = _native.Table.empty([height, width, is_half])
        [memory] = table.buffers
        values = memory.view(np.float16 if is_half else np.float32).reshape(height, width)
        pack = _packing(head_dtype)
        head: Packed = pack.empty([height, width, False])
        for start in range(0, height, step):
            part = _contiguous(weight[start : start + step])
            if height <= step or not _largest(part) <= (HALF_MAX if is_half else np.finfo(np.float32).max):
                del table, head, memory, values, part  # small, or not to be kept so: as a whole
                whole = weight[:]
                return self.embedding(whole, dtype), self.matrix(whole, head_dtype)
            values[start : start + step] = part
            _put_panels(pack(part, None, self.num_threads), head, start // panel, -(-height // panel))
        self.num_weight_bytes += memory.nbytes
        return table, self._count(head)

    def vector(self, values: F32) -> _native.Vector:
        self.num_weight_bytes += values.nbytes
        return _native.Vector(_contiguous(values))

    def restore(
        self, kind: str, sizes: Sequence[int], fill: Callable[[Sequence[NDArray[np.uint8]]], bool]
    ) -> _native.Parameter | None:
        parameter: _native.Parameter = getattr(_native, kind).empty(sizes)
        buffers = parameter.buffers
        if not fill(buffers):
            return None
        self.num_weight_bytes += sum(buffer.nbytes for buffer in buffers)
        return parameter

    def code_files(self) -> Iterator[Path]:
        yield Path(_native.__file__)
        yield from sorted(Path(__file__).parent.glob("*.py"))

    def rope(self, frequencies: F32, attention_scale: float = 1.0) -> _native.Rope:
        return _native.Rope(_contiguous(frequencies), attention_scale)

    def compile(self, model: Model, cache: KVCacheConfig, limits: Limits) -> NativeRunner:
        _native.release_free_memory()  # what packing left over
        recorder = Recorder(cache.layout, limits.max_tokens, limits.max_logit_rows)
        hidden: Value = model.forward(recorder)
        recorder.choose()
        logits = recorder.result(model.logits(recorder, hidden))
        kept = (*recorder.gathered, logits.columns.buffer)
        instructions = without_unread(recorder.forward + recorder.logits, kept)
        arena_floats = place(mark_uses(instructions, kept))
        kv_cache = _allocate(cache)
        program = _native.Program(
            self._pool,
            self.isa,
            kv_cache,
            _native.ProgramLimits(
                arena_floats,
                limits.max_tokens,
                limits.max_seqs,
                limits.max_logit_rows,
                limits.max_blocks_per_seq,
                len(cache.layout.groups),
                cache.block_size,
            ),
        )
        num_forward = len(recorder.forward)
        _emit(instructions[:num_forward], program)
        program.begin_logits()
        _emit(instructions[num_forward:], program)
        program.end(logits.slot)
        return NativeRunner(program, kv_cache)

    def _packed(self, dtype: WeightDtype, weight: F32, up: F32 | None) -> Packed:
        second = None if up is None else _contiguous(up)
        return self._count(_packing(dtype)(_contiguous(weight), second, self.num_threads))

    def _count(self, packed: Packed) -> Packed:
        self.num_weight_bytes += packed.nbytes
        return packed


def _arrays(inputs: StepInputs) -> tuple[I32, I32, I32, I32, I32, tuple[I32, ...]]:
    """As Program takes them."""
    return (
        inputs.tokens,
        inputs.positions,
        inputs.query_starts,
        inputs.seq_lens,
        inputs.table_rows,
        inputs.block_tables,
    )


def _parts(weight: GroupedWeights) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    low = None if weight.low is None else np.ascontiguousarray(weight.low)
    return np.ascontiguousarray(weight.codes), np.ascontiguousarray(weight.scale), low


def _put_panels(part: Packed, whole: Packed, first: int, num_panels: int) -> None:
    """Panels lie one after another. A function, so that nothing holds a part while the next one is packed."""
    for to, piece in zip(whole.buffers, part.buffers, strict=True):
        at = to.nbytes // num_panels * first
        to[at : at + piece.nbytes] = piece


def _packing(dtype: WeightDtype) -> type[_native.PackedI8] | type[_native.PackedF32]:
    if dtype not in ("int8", "float32"):
        raise ConfigError(f"weight dtype '{dtype}' is unknown; use int8 or float32")
    return _native.PackedI8 if dtype == "int8" else _native.PackedF32


def _largest(weight: F32) -> float:
    """max |w|, NaN where there is one; without a copy, as abs() is."""
    return float(max(weight.max(initial=0.0), -weight.min(initial=0.0)))


def _contiguous(array: F32) -> F32:
    return np.ascontiguousarray(array, np.float32)


def _allocate(config: KVCacheConfig) -> _native.KVCache:
    all_storages = config.layout.bytes_per_block(config.block_size, KV_FORMATS[config.dtype])
    block_bytes = all_storages // config.layout.num_storages
    try:
        return _native.KVCache(config.layout.num_storages, config.num_blocks, block_bytes, config.dtype)
    except MemoryError:
        raise ConfigError(
            f"no memory for a KV cache of {config.num_blocks} blocks of {all_storages} bytes; "
            "lower --kv-cache-memory-bytes"
        ) from None


def _emit(part: Sequence[Instruction], program: _native.Program) -> None:
    """Append the instructions of a part, and the barriers that must stand between them."""
    barriers = BarrierPlan()
    for instruction in part:
        if barriers.needs_barrier(instruction):
            program.barrier()
        instruction.emit(program)
