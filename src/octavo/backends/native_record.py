"""The recording Ops: a model's forward() and logits() run once on handles and leave a list of instructions.

Handles are values: an operation returns a new one, and only head_norm, rope and a residual are computed in
place, on memory their handle gives up. Nothing is computed here and no memory exists yet (native_plan.py).

The program has two parts. Once every layer's cache is written, nothing that follows reads another row's result, so
all that follows is computed for the rows whose logits are asked for and no others: what it needs of the first part
is gathered.
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
    is_chosen: bool  # has the chosen rows only
    is_given_up: bool = False

    @property
    def width(self) -> int:
        return self.columns.width

    @property
    def slot(self) -> _native.Slot:
        return self.columns.slot


@dataclass(frozen=True, eq=False, slots=True)
class _Quantisable:
    """An instruction that can quantise its result in the same pass, in groups that divide `unit` columns, and then
    need not store it in any other form."""

    instruction: Instruction
    out: Value
    unit: int
    emit: Callable[[_native.Program, _native.QuantSlot | None], None]

    def quantising(self, quantised: Columns, group: int) -> Instruction:
        def emit(p: _native.Program) -> None:
            self.emit(p, _native.QuantSlot(quantised.buffer.offset, group))

        writes = (*self.instruction.writes, quantised)
        return Instruction(emit, self.instruction.reads, writes, self.out.columns)


@dataclass(frozen=True, eq=False, slots=True)
class _Rotation:
    """A rope. Keys that are written at once are rotated by who writes them."""

    instruction: Instruction
    out: Value
    table: Value


class Recorder:
    """Implements Ops."""

    def __init__(self, layout: KVLayout, max_tokens: int, max_logit_rows: int) -> None:
        self.forward: list[Instruction] = []
        self.logits: list[Instruction] = []  # what is computed for chosen rows
        self.gathered: list[Buffer] = []  # of the forward part, read by the logits part
        self._layout = layout
        self._rows = max_tokens  # the most that the part being recorded can have
        self._max_logit_rows = max_logit_rows
        self._is_choosing = False
        self._unwritten = set(layout.layers)
        self._chosen: dict[Value, Value] = {}  # the chosen rows of values of the forward part
        self._quantised: dict[tuple[Value, int], Columns] = {}  # by the groups' size
        self._quantisable: _Quantisable | None = None
        self._rotation: _Rotation | None = None
        self._rope_tables: dict[_native.Rope, Value] = {}
        self._scratch = Columns(Buffer(0))
        self._storages = [Columns(Buffer(0)) for _ in range(layout.num_storages)]

    def embed(self, table: _native.Table | _native.PackedGrouped) -> Value:
        out = self._new(table.k if isinstance(table, _native.PackedGrouped) else table.width)
        self._append(lambda p: p.embed(table, out.slot), (), (out,))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        x = self._here(x)
        out = self._new(x.width)
        self._append(lambda p: p.scale(x.slot, factor, out.slot), (x,), (out,))
        return out

    def add(self, x: Value, y: Value) -> Value:
        x, y = self._here(x), self._here(y)
        out = self._new(x.width)
        self._append(lambda p: p.add(x.slot, y.slot, out.slot), (x, y), (out,))
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        x = self._here(x)
        out = self._new(x.width)
        self._append(lambda p: p.softcap(x.slot, cap, out.slot), (x,), (out,))
        return out

    def rms_norm(self, x: Value, weight: _native.Vector, eps: float) -> Value:
        x = self._here(x)
        out = self._new(x.width)
        self._append_quantisable(
            lambda p, quantised: p.rms_norm(x.slot, weight, eps, out.slot, quantised), (x,), out
        )
        return out

    def linear(
        self, x: Value, matrix: Packed, bias: _native.Vector | None = None, residual: Value | None = None
    ) -> Value:
        x, residual = self._here(x), None if residual is None else self._here(residual)
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
        x = self._here(x)
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
            views.append(Value(Columns(x.columns.buffer, begin, width), x.is_chosen))
            begin += width
        return tuple(views)

    def head_norm(self, x: Value, weight: _native.Vector, eps: float) -> Value:
        x = self._here(x)
        out = self._reuse(x)
        self._append(lambda p: p.head_norm(out.slot, weight, eps), (out,), (out,))
        return out

    def rope(self, x: Value, rope: _native.Rope, head_size: int) -> Value:
        table = self._rope_tables.get(rope)
        if table is None:
            table = self._rope_tables[rope] = self._new(2 * rope.half)
            self._append(lambda p: p.rope_table(rope, table.slot), (), (table,))
        x, here = self._here(x), self._here(table)
        out = self._reuse(x)
        self._append(lambda p: p.rope(out.slot, here.slot, head_size), (out, here), (out,))
        self._rotation = _Rotation(self._part[-1], out, here)
        return out

    def write_kv(self, k: Value, v: Value, layer: KVLayer) -> None:
        cache_layer = self._cache_layer(layer)
        rotation, storage = self._rotation, self._storages[layer.storage]
        if rotation and rotation.out is k and self._is_last(rotation.instruction):
            table = rotation.table
            self._part.pop()
            self._append(
                lambda p: p.write_kv(k.slot, table.slot, v.slot, cache_layer),
                (k, table, v),
                (k,),
                (),
                (storage,),
            )
        else:
            self._append(lambda p: p.write_kv(k.slot, None, v.slot, cache_layer), (k, v), (), (), (storage,))
        self._on_written(layer)

    def paged_attention(
        self, q: Value, layer: KVLayer, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Value:
        q, cache_layer = self._here(q), self._cache_layer(layer)
        out = self._new(q.width)
        self._append_quantisable(
            lambda p, quantised: p.paged_attention(
                q.slot, cache_layer, scale, window or 0, softcap or 0.0, out.slot, quantised
            ),
            (q,),
            out,
            self._attention_spec(layer).head_size,
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
        self._on_written(layer)
        return out

    def gated_rms_norm(
        self, x: Value, gate: Value, weight: _native.Vector, eps: float, group_size: int
    ) -> Value:
        x, gate = self._here(x), self._here(gate)
        out = self._new(x.width)
        self._append(
            lambda p: p.gated_rms_norm(x.slot, gate.slot, weight, eps, group_size, out.slot),
            (x, gate),
            (out,),
        )
        return out

    def choose(self) -> None:
        """End the forward part, if it has not ended: what follows is computed for chosen rows."""
        self._rows = self._max_logit_rows
        self._is_choosing = True

    def result(self, x: Value) -> Value:
        """x in rows without padding, to be handed out. The last product writes there by itself."""
        x = self._here(x)
        buffer = x.columns.buffer
        if x.columns.begin == 0 and buffer.stride - x.width < 16:
            packed = array_buffer(self._rows, x.width, is_result=True)
            buffer.num_floats, buffer.stride = packed.num_floats, packed.stride
            return x
        out = Value(Columns(array_buffer(self._rows, x.width, is_result=True), 0, x.width), True)
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

        def emit(p: _native.Program, result: _native.QuantSlot | None) -> None:
            offset = quantised.buffer.offset
            if isinstance(matrix, _native.PackedGrouped):
                p.matmul_grouped(matrix, offset, out.slot, bias, slot(), act, result)
            else:
                p.matmul_i8(matrix, offset, out.slot, bias, slot(), act, result)

        if act == "none":
            self._append(lambda p: emit(p, None), residuals, (out,), (quantised,))
        else:
            self._append_quantisable(emit, residuals, out, 0, (quantised,))

    def _quantise(self, x: Value, group: int) -> Columns:
        """The int8 form of x in groups of that many, computed once for all products of it."""
        self._check_usable((x,))
        quantised = self._quantised.get((x, group))
        if quantised is None:
            quantised = Columns(
                Buffer(_native.quant_floats(self._rows, x.width, group), quantised=(x.width, group))
            )
            self._quantised[x, group] = quantised
            last = self._quantisable
            if last and last.out is x and last.unit % group == 0 and self._is_last(last.instruction):
                self._part[-1] = last.quantising(quantised, group)
            else:
                buffer = quantised.buffer
                self._append(lambda p: p.quantize(x.slot, buffer.offset, group), (x,), (), (), (quantised,))
        return quantised

    @property
    def _part(self) -> list[Instruction]:
        return self.logits if self._is_choosing else self.forward

    def _is_last(self, instruction: Instruction) -> bool:
        return bool(self._part) and self._part[-1] is instruction

    def _on_written(self, layer: KVLayer) -> None:
        self._unwritten.discard(layer)
        if not self._unwritten:
            self.choose()

    def _here(self, x: Value) -> Value:
        """x, or where x has all rows and only chosen ones are computed now, those of x."""
        if x.is_chosen == self._is_choosing:
            return x
        self._check_usable((x,))
        chosen = self._chosen.get(x)
        if chosen is None:
            chosen = self._chosen[x] = self._new(x.width)
            to = chosen
            self.gathered.append(x.columns.buffer)
            self._append(lambda p: p.gather(x.slot, to.slot), (), (to,), (x.columns,))
        return chosen

    def _new(self, width: int) -> Value:
        return Value(Columns(array_buffer(self._rows, width), 0, width), self._is_choosing)

    def _reuse(self, x: Value) -> Value:
        """A new handle on x's memory; x must not be used again."""
        self._check_usable((x,))
        x.is_given_up = True
        return Value(x.columns, x.is_chosen)

    def _append_quantisable(
        self,
        emit: Callable[[_native.Program, _native.QuantSlot | None], None],
        reads: tuple[Value, ...],
        out: Value,
        unit: int = 0,
        other_reads: tuple[Columns, ...] = (),
        other_writes: tuple[Columns, ...] = (),
    ) -> None:
        self._append(lambda p: emit(p, None), reads, (out,), other_reads, other_writes)
        self._quantisable = _Quantisable(self._part[-1], out, unit, emit)

    def _append(
        self,
        emit: Callable[[_native.Program], None],
        reads: tuple[Value, ...],
        writes: tuple[Value, ...],
        other_reads: tuple[Columns, ...] = (),
        other_writes: tuple[Columns, ...] = (),
    ) -> None:
        self._check_usable(reads)
        self._part.append(
            Instruction(
                emit,
                tuple(x.columns for x in reads) + other_reads,
                tuple(x.columns for x in writes) + other_writes,
            )
        )

    def _check_usable(self, values: tuple[Value, ...]) -> None:
        if any(x.is_given_up for x in values):
            raise ValueError("a handle given to head_norm, rope or as residual is used again; use the result")

    def _attention_spec(self, layer: KVLayer) -> FullAttentionSpec | SlidingWindowSpec:
        spec = self._layout.groups[layer.group].spec
        if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)):
            raise ValueError(f"group {layer.group} caches {type(spec).__name__}, not keys and values")
        return spec

    def _cache_layer(self, layer: KVLayer) -> _native.CacheLayer:
        spec = self._attention_spec(layer)
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
