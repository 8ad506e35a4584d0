"""take_snapshot: the block pool and every table as plain values, for eyes. Reads the scheduler, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from octavo.core.block import BlockId, SeqId
from octavo.core.block_table import BlockTable
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_swap import SwapSpace
from octavo.core.request import Request, RequestStatus
from octavo.engine.messages import BlockSnapshot, SequenceBlocks
from octavo.sched.scheduler import Scheduler

NUM_NEXT_FREE = 64

Tables = Mapping[SeqId, tuple[BlockTable, ...]]


def take_snapshot(scheduler: Scheduler) -> BlockSnapshot:
    """Of a paged cache; one that is not paged has no blocks to show."""
    manager, swap = scheduler.allocator, scheduler.swap
    if not isinstance(manager, KVCacheManager):
        return BlockSnapshot(scheduler.block_size, [], [], [], [])
    pool = manager.pool
    cached = sorted(block_id for block_id, _, _ in manager.index.items()) if manager.index is not None else []
    swapped = [r for r in scheduler.waiting if r.status is RequestStatus.SWAPPED]
    return BlockSnapshot(
        block_size=manager.block_size,
        ref_counts=[pool.ref_count(BlockId(b)) for b in range(pool.num_blocks)],
        cached=list(cached),
        next_free=list(islice(pool.free_ids(), NUM_NEXT_FREE)),
        tables=[t for request in scheduler.running for t in _tables_of(request, manager.tables)],
        num_swap_blocks=swap.num_blocks if swap is not None else 0,
        swap_tables=(
            [t for request in swapped for t in _tables_of(request, swap.tables)]
            if isinstance(swap, SwapSpace)
            else []
        ),
    )


def _tables_of(request: Request, tables: Tables) -> Iterator[SequenceBlocks]:
    for position, seq in enumerate(request.live):
        choice = position if request.beam is not None else seq.index
        for group, table in enumerate(tables.get(seq.seq_id, ())):
            yield SequenceBlocks(request.request_id, choice, group, list(table.block_ids), table.num_tokens)
