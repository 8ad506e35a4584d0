"""Planning of a recorded program: where every array lies in one arena, and where barriers stand.

An instruction names what it reads and writes; nothing here knows what it computes. Two arrays of the same layout
may share memory if the last use of one comes before the first use of the other. A barrier stands before an
instruction that reads what was written since the last barrier, or writes what was read or written since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo import _native

ALIGNMENT = 16  # floats: one cache line


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory in the arena: float32 [rows][stride], or a plain stretch of `num_floats` (quantised rows).

    A buffer of no floats stands for memory outside the arena, such as a layer's cache.
    """

    num_floats: int
    stride: int = 0  # floats between rows; 0: not an array
    quantised: tuple[int, int] = (0, 0)  # columns and group of quantised rows
    offset: int = -1  # floats from the start of the arena, once planned
    first_use: int = -1  # index of an instruction
    last_use: int = -1

    @property
    def end(self) -> int:
        return self.offset + self.num_floats

    @property
    def layout(self) -> tuple[int, ...]:
        """Where each row lies. Memory goes from one array only to another of the same layout: row r then stays
        where it was, as a rule in the cache of the worker that needs it."""
        return (self.num_floats, self.stride, *self.quantised)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns [begin, begin + width) of every row of a buffer, or all of a buffer that is no array."""

    buffer: Buffer
    begin: int = 0
    width: int = 0

    @property
    def slot(self) -> _native.Slot:
        return _native.Slot(self.buffer.offset + self.begin, self.buffer.stride, self.width)

    def overlaps(self, other: Columns) -> bool:
        """Whether the two share memory. Needs planned offsets."""
        if self.buffer is other.buffer:
            is_array = self.buffer.stride > 0
            apart = self.begin + self.width <= other.begin or other.begin + other.width <= self.begin
            return not (is_array and apart)
        if self.buffer.num_floats == 0 or other.buffer.num_floats == 0:
            return False
        return self.buffer.offset < other.buffer.end and other.buffer.offset < self.buffer.end


@dataclass(frozen=True, slots=True)
class Instruction:
    """One kernel call: `emit` appends it to a program, once places are known."""

    emit: Callable[[_native.Program], None]
    reads: tuple[Columns, ...]
    writes: tuple[Columns, ...]
    unless_unread: Columns | None = None  # of `writes`, what is left out if it has no place


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def array_buffer(rows: int, width: int, is_result: bool = False) -> Buffer:
    """A buffer for [rows][width]; a result that is handed out has no padding between its rows."""
    stride = width if is_result else round_up(width, ALIGNMENT)
    return Buffer(round_up(rows * stride, ALIGNMENT), stride)


def without_unread(instructions: Sequence[Instruction], kept: Sequence[Buffer]) -> list[Instruction]:
    """The same instructions, where possible without writing what none of them reads and is not kept: it will get
    no place."""
    wanted = {columns.buffer for instruction in instructions for columns in instruction.reads} | set(kept)
    return [
        replace(i, writes=tuple(c for c in i.writes if c is not i.unless_unread))
        if i.unless_unread is not None and i.unless_unread.buffer not in wanted
        else i
        for i in instructions
    ]


def mark_uses(instructions: Sequence[Instruction], kept: Sequence[Buffer]) -> list[Buffer]:
    """Note first and last use in every buffer; `kept` ones live to the end. Returns the arena's buffers."""
    buffers: dict[int, Buffer] = {}
    for index, instruction in enumerate(instructions):
        for columns in (*instruction.reads, *instruction.writes):
            buffer = columns.buffer
            buffers[id(buffer)] = buffer
            buffer.first_use = index if buffer.first_use < 0 else buffer.first_use
            buffer.last_use = index
    for buffer in kept:
        buffer.last_use = len(instructions)
    return [b for b in buffers.values() if b.num_floats > 0]


def place(buffers: Sequence[Buffer]) -> int:
    """Give every buffer an offset: the first of its layout's that is free for its life → arena floats."""
    ends: dict[tuple[int, ...], list[Buffer]] = {}  # by layout: the last user of each offset
    num_floats = 0
    for buffer in sorted(buffers, key=lambda b: b.first_use):
        users = ends.setdefault(buffer.layout, [])
        free = next((i for i, user in enumerate(users) if user.last_use < buffer.first_use), None)
        if free is None:
            buffer.offset = num_floats
            num_floats += buffer.num_floats
            users.append(buffer)
        else:
            buffer.offset = users[free].offset
            users[free] = buffer
    return num_floats


class BarrierPlan:
    """Decides, instruction after instruction, whether a barrier must come first."""

    def __init__(self) -> None:
        self._read: list[Columns] = []
        self._written: list[Columns] = []

    def needs_barrier(self, instruction: Instruction) -> bool:
        """Whether to put a barrier before `instruction`, which is then taken as issued."""
        needed = _any_overlap(instruction.reads, self._written) or _any_overlap(
            instruction.writes, self._read + self._written
        )
        if needed:
            self._read, self._written = [], []
        self._read.extend(instruction.reads)
        self._written.extend(instruction.writes)
        return needed


def _any_overlap(left: Sequence[Columns], right: Sequence[Columns]) -> bool:
    return any(a.overlaps(b) for a in left for b in right)
