"""The recording Ops: a model's forward() and logits() run once on handles and leave a list of instructions.

Handles are values: an operation returns a new one, and only head_norm, rope and a residual are computed in
place, on memory their handle gives up. Nothing is computed here and no memory exists yet (native_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo import _native
from octavo.backends.native_plan import Buffer, Columns, Instruction, array_buffer
from octavo.backends.ops import Activation, Scan
from octavo.core.kv_groups import KVLayer, KVLayout
from octavo.core.kv_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from octavo.errors import UnsupportedModelError

QUANT_GROUP = 64  # activations of int8 weights share one scale over this many values along K

Packed = _native.PackedI8 | _native.PackedGrouped | _native.PackedF32


@dataclass(eq=False, slots=True)
class Value:
    """A handle: an array [rows, width] that an instruction computes."""

    columns: Columns
    is_given_up: bool = False

    @property
    def width(self) -> int:
        return self.columns.width

    @property
    def slot(self) -> _native.Slot:
        return self.columns.slot


@dataclass(frozen=True, eq=False, slots=True)
class _Norm:
    """An rms_norm just recorded. What is quantised at once is quantised in the same pass."""

    instruction: Instruction
    x: Value
    weight: _native.Vector
    eps: float
    out: Value

    def quantising(self, quantised: Columns, group: int) -> Instruction:
        def emit(p: _native.Program) -> None:
            offset = quantised.buffer.offset
            p.rms_norm_quantize(self.x.slot, self.weight, self.eps, self.out.slot, (offset, group))

        return Instruction(emit, self.instruction.reads, (*self.instruction.writes, quantised))


class Recorder:
    """Implements Ops. `rows` is the most rows the part being recorded can have."""

    def __init__(self, layout: KVLayout, rows: int) -> None:
        self.instructions: list[Instruction] = []
        self._layout = layout
        self._rows = rows
        self._quantised: dict[tuple[Value, int], Columns] = {}  # by the groups' size
        self._last_norm: _Norm | None = None
        self._rope_tables: dict[_native.Rope, Value] = {}
        self._scratch = Columns(Buffer(0))
        self._storages = [Columns(Buffer(0)) for _ in range(layout.num_storages)]

    def embed(self, table: _native.Table | _native.PackedGrouped) -> Value:
        out = self._new(table.k if isinstance(table, _native.PackedGrouped) else table.width)
        self._append(lambda p: p.embed(table, out.slot), (), (out,))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        out = self._new(x.width)
        self._append(lambda p: p.scale(x.slot, factor, out.slot), (x,), (out,))
        return out

    def add(self, x: Value, y: Value) -> Value:
        out = self._new(x.width)
        self._append(lambda p: p.add(x.slot, y.slot, out.slot), (x, y), (out,))
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        out = self._new(x.width)
        self._append(lambda p: p.softcap(x.slot, cap, out.slot), (x,), (out,))
        return out

    def rms_norm(self, x: Value, weight: _native.Vector, eps: float) -> Value:
        out = self._new(x.width)
        self._append(lambda p: p.rms_norm(x.slot, weight, eps, out.slot), (x,), (out,))
        self._last_norm = _Norm(self.instructions[-1], x, weight, eps, out)
        return out

    def linear(
        self, x: Value, matrix: Packed, bias: _native.Vector | None = None, residual: Value | None = None
    ) -> Value:
        if residual is None:
            out = self._new(matrix.n)
        elif residual.columns.buffer is x.columns.buffer:  # other workers still read x
            self._check_usable((residual,))
            out = self._new(matrix.n)
        else:
            out = self._reuse(residual)
        self._multiply(x, matrix, out, bias, residual, "none")
        return out

    def gated_linear(self, x: Value, matrix: Packed, activation: Activation) -> Value:
        out = self._new(matrix.n // 2)
        self._multiply(x, matrix, out, None, None, activation)
        return out

    def split(self, x: Value, widths: tuple[int, ...]) -> tuple[Value, ...]:
        self._check_usable((x,))
        if sum(widths) != x.width:
            raise ValueError(
                f"split widths {widths} add up to {sum(widths)}, the array has {x.width} columns"
            )
        begin, views = x.columns.begin, []
        for width in widths:
            views.append(Value(Columns(x.columns.buffer, begin, width)))
            begin += width
        return tuple(views)

    def head_norm(self, x: Value, weight: _native.Vector, eps: float) -> Value:
        out = self._reuse(x)
        self._append(lambda p: p.head_norm(out.slot, weight, eps), (out,), (out,))
        return out

    def rope(self, x: Value, rope: _native.Rope, head_size: int) -> Value:
        table = self._rope_tables.get(rope)
        if table is None:
            table = self._rope_tables[rope] = self._new(2 * rope.half)
            self._append(lambda p: p.rope_table(rope, table.slot), (), (table,))
        out = self._reuse(x)
        self._append(lambda p: p.rope(out.slot, table.slot, head_size), (out, table), (out,))
        return out

    def write_kv(self, k: Value, v: Value, layer: KVLayer) -> None:
        cache_layer = self._cache_layer(layer)
        self._append(
            lambda p: p.write_kv(k.slot, v.slot, cache_layer),
            (k, v),
            (),
            (),
            (self._storages[layer.storage],),
        )

    def paged_attention(
        self, q: Value, layer: KVLayer, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Value:
        cache_layer = self._cache_layer(layer)
        out = self._new(q.width)
        self._append(
            lambda p: p.paged_attention(q.slot, cache_layer, scale, window or 0, softcap or 0.0, out.slot),
            (q,),
            (out,),
            (self._storages[layer.storage],),
            (self._scratch,),
        )
        return out

    def conv1d(self, x: Value, weight: _native.Vector, bias: _native.Vector | None, layer: KVLayer) -> Value:
        state_layer, out = self._state_layer(layer), self._new(x.width)
        state = (self._storages[layer.storage],)
        self._append(
            lambda p: p.conv1d(x.slot, weight, bias, state_layer, out.slot), (x,), (out,), state, state
        )
        return out

    def ssm_scan(self, x: Value, dt: Value, b: Value, c: Value, scan: Scan, layer: KVLayer) -> Value:
        state_layer, out = self._state_layer(layer), self._new(x.width)
        state = (self._storages[layer.storage],)
        parameters = _native.Scan(
            scan.decay,
            scan.skip,
            scan.dt_bias,
            (scan.head_size, scan.num_groups, scan.state_size),
            (scan.dt_min, scan.dt_max),
        )

        def emit(p: _native.Program) -> None:
            inputs = _native.ScanSlots(x.slot, dt.slot, b.slot, c.slot)
            p.ssm_scan(inputs, parameters, state_layer, out.slot)

        self._append(emit, (x, dt, b, c), (out,), state, state)
        return out

    def gated_rms_norm(
        self, x: Value, gate: Value, weight: _native.Vector, eps: float, group_size: int
    ) -> Value:
        out = self._new(x.width)
        self._append(
            lambda p: p.gated_rms_norm(x.slot, gate.slot, weight, eps, group_size, out.slot),
            (x, gate),
            (out,),
        )
        return out

    def begin_logits(self, hidden: Value, max_logit_rows: int) -> Value:
        """End the forward part: what follows computes on chosen rows of `hidden`."""
        self._rows = max_logit_rows
        gathered = self._new(hidden.width)
        self._append(lambda p: p.begin_logits(hidden.slot, gathered.slot), (hidden,), (gathered,))
        return gathered

    def result(self, x: Value) -> Value:
        """x in rows without padding, to be handed out. The last product writes there by itself."""
        buffer = x.columns.buffer
        if x.columns.begin == 0 and buffer.stride - x.width < 16:
            packed = array_buffer(self._rows, x.width, is_result=True)
            buffer.num_floats, buffer.stride = packed.num_floats, packed.stride
            return x
        out = Value(Columns(array_buffer(self._rows, x.width, is_result=True), 0, x.width))
        self._append(lambda p: p.scale(x.slot, 1.0, out.slot), (x,), (out,))
        return out

    def _multiply(
        self,
        x: Value,
        matrix: Packed,
        out: Value,
        bias: _native.Vector | None,
        residual: Value | None,
        act: str,
    ) -> None:
        if x.width != matrix.k:
            raise ValueError(f"a matrix of {matrix.k} columns cannot multiply rows of {x.width}")

        def slot() -> _native.Slot | None:
            return None if residual is None else residual.slot

        residuals = () if residual is None else (out,) if residual.is_given_up else (residual,)
        if isinstance(matrix, _native.PackedF32):
            self._append(
                lambda p: p.matmul_f32(matrix, x.slot, out.slot, bias, slot(), act), (x, *residuals), (out,)
            )
            return
        group = matrix.group if isinstance(matrix, _native.PackedGrouped) else QUANT_GROUP
        quantised = self._quantise(x, group)

        def emit(p: _native.Program) -> None:
            offset = quantised.buffer.offset
            if isinstance(matrix, _native.PackedGrouped):
                p.matmul_grouped(matrix, offset, out.slot, bias, slot(), act)
            else:
                p.matmul_i8(matrix, offset, out.slot, bias, slot(), act)

        self._append(
            emit,
            residuals,
            (out,),
            (quantised,),
        )

    def _quantise(self, x: Value, group: int) -> Columns:
        """The int8 form of x in groups of that many, computed once for all products of it."""
        self._check_usable((x,))
        quantised = self._quantised.get((x, group))
        if quantised is None:
            quantised = Columns(
                Buffer(_native.quant_floats(self._rows, x.width, group), quantised=(x.width, group))
            )
            self._quantised[x, group] = quantised
            norm = self._last_norm
            if norm is not None and norm.out is x and norm.instruction is self.instructions[-1]:
                self.instructions[-1] = norm.quantising(quantised, group)
            else:
                buffer = quantised.buffer
                self._append(lambda p: p.quantize(x.slot, buffer.offset, group), (x,), (), (), (quantised,))
        return quantised

    def _new(self, width: int) -> Value:
        return Value(Columns(array_buffer(self._rows, width), 0, width))

    def _reuse(self, x: Value) -> Value:
        """A new handle on x's memory; x must not be used again."""
        self._check_usable((x,))
        x.is_given_up = True
        return Value(x.columns)

    def _append(
        self,
        emit: Callable[[_native.Program], None],
        reads: tuple[Value, ...],
        writes: tuple[Value, ...],
        other_reads: tuple[Columns, ...] = (),
        other_writes: tuple[Columns, ...] = (),
    ) -> None:
        self._check_usable(reads)
        self.instructions.append(
            Instruction(
                emit,
                tuple(x.columns for x in reads) + other_reads,
                tuple(x.columns for x in writes) + other_writes,
            )
        )

    def _check_usable(self, values: tuple[Value, ...]) -> None:
        if any(x.is_given_up for x in values):
            raise ValueError("a handle given to head_norm, rope or as residual is used again; use the result")

    def _cache_layer(self, layer: KVLayer) -> _native.CacheLayer:
        spec = self._layout.groups[layer.group].spec
        if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)):
            raise ValueError(f"group {layer.group} caches {type(spec).__name__}, not keys and values")
        if spec.head_size % 8:
            raise UnsupportedModelError(
                f"head size {spec.head_size} is not a multiple of 8; use --backend numpy for this model"
            )
        return _native.CacheLayer(layer.group, layer.storage, spec.num_kv_heads, spec.head_size)

    def _state_layer(self, layer: KVLayer) -> _native.StateLayer:
        spec = self._layout.groups[layer.group].spec
        if not isinstance(spec, MambaSpec):
            raise ValueError(f"group {layer.group} caches {type(spec).__name__}, not a recurrent state")
        return _native.StateLayer(layer.group, layer.storage, spec.conv_values, spec.ssm_values)
