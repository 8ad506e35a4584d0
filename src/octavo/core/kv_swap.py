"""SwapSpace: the second pool, and the tables of the sequences that lie in it.

Whole groups move: every block of every sequence of a request, each block once however many of them share it.
The bytes are moved by the executor; here a block of the KV cache and one of the swap space are paired.

    swap_out   for each distinct block: take a swap block → SwapBlock; release it in the KV cache
    swap_in    for each distinct swap block: the same content may still be cached → share it, nothing to move;
               else take a block → SwapBlock; release the swap block
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.block import BlockId, SeqId
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_manager import KVCacheManager
from octavo.core.step import SwapBlock


class SwapSpace:
    """Swapped sequences of one KVCacheManager. `num_blocks` 0: swapping is off, nothing ever fits."""

    def __init__(self, manager: KVCacheManager, num_blocks: int) -> None:
        self._manager = manager
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks) if num_blocks else None
        self.tables: dict[SeqId, tuple[BlockTable, ...]] = {}  # block ids are those of the swap space

    @property
    def num_used(self) -> int:
        return self.pool.num_used if self.pool is not None else 0

    def num_distinct(self, seq_ids: Sequence[SeqId]) -> int:
        """Blocks of the KV cache that the sequences hold together."""
        tables = self._manager.tables
        return len({b for seq_id in seq_ids for t in tables[seq_id] for _, b in t.held})

    def swap_out(self, seq_ids: Sequence[SeqId]) -> tuple[SwapBlock, ...] | None:
        """Move the sequences out, all or none. None, with nothing changed, when the space has too little."""
        for seq_id in seq_ids:
            self._manager.release_skipped(seq_id)
        if self.pool is None or self.num_distinct(seq_ids) > self.pool.num_free:
            return None
        paired: dict[BlockId, BlockId] = {}  # in the KV cache → in the swap space
        moves: list[SwapBlock] = []
        for seq_id in seq_ids:
            swapped = []
            for group, table in enumerate(self._manager.tables[seq_id]):
                entries: list[BlockId | None] = [None] * table.num_logical
                for logical, block_id in table.held:
                    if block_id in paired:
                        self.pool.share(paired[block_id])
                    else:
                        paired[block_id] = self.pool.allocate()
                        moves.append(SwapBlock(group, block_id, paired[block_id]))
                    entries[logical] = paired[block_id]
                swapped.append(BlockTable(table.block_size, entries, table.num_tokens, table.num_skipped))
            self.tables[seq_id] = tuple(swapped)
        for seq_id in seq_ids:
            self._manager.release_tables(seq_id)
        return tuple(moves)

    def blocks_needed(self, seq_ids: Sequence[SeqId]) -> int:
        """Most blocks of the KV cache that swap_in would take."""
        return len({b for seq_id in seq_ids for t in self.tables[seq_id] for _, b in t.held})

    def swap_in(self, seq_ids: Sequence[SeqId]) -> tuple[SwapBlock, ...]:
        """Move the sequences back. The KV cache must have blocks_needed() free blocks."""
        paired = self._acquire_cached(seq_ids)
        counted = set(paired)  # swap blocks whose partner already has the reference of its first entry
        moves: list[SwapBlock] = []
        for seq_id in seq_ids:
            restored = []
            for group, table in enumerate(self.tables[seq_id]):
                entries: list[BlockId | None] = [None] * table.num_logical
                for logical, swap_id in table.held:
                    if swap_id not in paired:
                        paired[swap_id] = self._manager.take(table.num_filled(logical))
                        moves.append(SwapBlock(group, paired[swap_id], swap_id))
                    elif swap_id in counted:
                        counted.remove(swap_id)
                    else:
                        self._manager.pool.share(paired[swap_id])
                    entries[logical] = paired[swap_id]
                restored.append(BlockTable(table.block_size, entries, table.num_tokens, table.num_skipped))
            self._manager.restore_tables(seq_id, tuple(restored))
        for seq_id in seq_ids:
            self._release(seq_id)
        return tuple(moves)

    def _acquire_cached(self, seq_ids: Sequence[SeqId]) -> dict[BlockId, BlockId]:
        """Hold what is still cached before anything is taken, which might reuse it: swap block → block."""
        paired: dict[BlockId, BlockId] = {}
        for seq_id in seq_ids:
            cached = self._manager.cached_blocks(seq_id)
            for group, table in enumerate(self.tables[seq_id]):
                for logical, swap_id in table.held:
                    if swap_id not in paired and (group, logical) in cached:
                        paired[swap_id] = cached[group, logical]
                        self._manager.acquire(paired[swap_id])
        return paired

    def drop(self, seq_id: SeqId) -> None:
        """Forget a swapped sequence."""
        self._release(seq_id)
        self._manager.drop_chain(seq_id)

    def _release(self, seq_id: SeqId) -> None:
        assert self.pool is not None
        for table in self.tables.pop(seq_id):
            for _, swap_id in table.held:
                self.pool.release(swap_id)
