"""A BlockSnapshot as lines of text: the map of the pool, then each sequence's block table.

    block map                 one character a block; a run of equal rows is one line
    logical  physical         as in docs/blocks.md: which block holds what, and how far it is filled

Pure: no colours, no terminal, no network.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from octavo.engine.messages import BlockSnapshot, SequenceBlocks

FREE, CACHED, USED, MANY = "·", "c", "█", "+"
LEGEND = "· free   c free, content still found   █ in one table   2-9 in so many   + in ten or more"
_ROW = 64  # blocks in one line of the map
_BAR = 32  # characters of a fill bar, at most


def view(snapshot: BlockSnapshot, request_id: str | None = None) -> Iterator[str]:
    """All lines; of one request only, or of all."""
    yield from _summary(snapshot)
    yield from _map(snapshot)
    yield LEGEND
    if snapshot.next_free:
        yield f"next to be handed out: {_some(snapshot.next_free)}"
    for title, tables in (("", snapshot.tables), (", in the swap space", snapshot.swap_tables)):
        for table in tables:
            if request_id is None or table.request_id == request_id:
                yield ""
                yield from _table(snapshot, table, title)


def request_ids(snapshot: BlockSnapshot) -> list[str]:
    """Of the requests that have tables, oldest first."""
    return list(dict.fromkeys(t.request_id for t in (*snapshot.tables, *snapshot.swap_tables)))


def _summary(snapshot: BlockSnapshot) -> Iterator[str]:
    counts = snapshot.ref_counts
    used, shared = sum(c > 0 for c in counts), sum(c > 1 for c in counts)
    found = sum(counts[b] == 0 for b in snapshot.cached)
    yield (
        f"{len(counts):,} blocks of {snapshot.block_size} tokens: {used:,} used ({shared:,} shared), "
        f"{len(counts) - used:,} free ({found:,} of them cached)"
    )
    if snapshot.num_swap_blocks:
        swapped = {b for t in snapshot.swap_tables for b in t.block_ids if b is not None}
        yield f"{snapshot.num_swap_blocks:,} blocks of swap space: {len(swapped):,} used"


def _map(snapshot: BlockSnapshot) -> Iterator[str]:
    cached = set(snapshot.cached)
    marks = "".join(_mark(count, b in cached) for b, count in enumerate(snapshot.ref_counts))
    rows = [marks[first : first + _ROW] for first in range(0, len(marks), _ROW)]
    width = len(str(len(marks)))
    first = 0
    for row, run in groupby(rows):
        length = len(list(run))
        times = f"  × {length} rows" if length > 1 else ""
        yield f"{first:>{width}}  {row}{times}"
        first += length * _ROW


def _mark(count: int, is_cached: bool) -> str:
    if not count:
        return CACHED if is_cached else FREE
    return USED if count == 1 else str(count) if count < 10 else MANY


def _table(snapshot: BlockSnapshot, table: SequenceBlocks, title: str) -> Iterator[str]:
    held = sum(b is not None for b in table.block_ids)
    group = f", group {table.group}" if _has_groups(snapshot) else ""
    yield (
        f"{table.request_id}, choice {table.choice}{group}{title}: "
        f"{table.num_tokens:,} tokens, {held:,} block{'s' * (held != 1)}"
    )
    yield "  logical  physical  filled"
    for logical, block_id in enumerate(table.block_ids):
        if block_id is not None:
            filled = max(0, min(snapshot.block_size, table.num_tokens - logical * snapshot.block_size))
            count = snapshot.ref_counts[block_id] if not title else 1
            shared = f"  in {count} tables" if count > 1 else ""
            bar = _bar(filled, snapshot.block_size)
            yield f"  {logical:>7}  {block_id:>8}  {filled:>6}  │{bar}│{shared}"


def _has_groups(snapshot: BlockSnapshot) -> bool:
    return any(t.group for t in (*snapshot.tables, *snapshot.swap_tables))


def _bar(filled: int, block_size: int) -> str:
    """One character a slot; of large blocks, one for several."""
    slots = -(-block_size // _BAR)
    length, full = -(-block_size // slots), filled // slots
    return "■" * full + "·" * (length - full)


def _some(block_ids: list[int], limit: int = 16) -> str:
    more = " …" if len(block_ids) > limit else ""
    return " ".join(map(str, block_ids[:limit])) + more
