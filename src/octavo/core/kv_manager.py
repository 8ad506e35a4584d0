"""KVCacheManager: block tables over one pool. Allocation on demand, sharing by count, copy on write.

It decides which physical block holds what; it never touches the bytes. What must be done to them comes
back as values: TableWrite (the executor's copy of a table changes) and CopyBlock (a shared block is about
to be written). A model with several groups of layers has one table per group for each sequence; all draw
from the same pool.
"""

from __future__ import annotations

from octavo.core.allocator import Growth
from octavo.core.block import BlockId, SeqId
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_groups import KVLayout
from octavo.core.stats import CacheStats
from octavo.core.step import CopyBlock, TableWrite


class KVCacheManager:
    """The paged KVAllocator."""

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.layout = layout
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tables: dict[SeqId, tuple[BlockTable, ...]] = {}
        self._num_slots_filled = 0

    @property
    def num_blocks_free(self) -> int:
        return self.pool.num_free

    @property
    def num_blocks_total(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return sum(g.spec.num_blocks(num_tokens, self.block_size) for g in self.layout.groups)

    def blocks_missing(self, seq_id: SeqId, num_tokens: int) -> int:
        missing = 0
        for group, table in zip(self.layout.groups, self.tables[seq_id], strict=True):
            missing += max(0, group.spec.num_blocks(num_tokens, self.block_size) - table.num_blocks)
            missing += self._copy_needed(table, num_tokens)
        return missing

    def admit(self, seq_id: SeqId) -> None:
        assert seq_id not in self.tables, f"sequence {seq_id} is already admitted"
        self.tables[seq_id] = tuple(BlockTable(self.block_size) for _ in self.layout.groups)

    def grow(self, seq_id: SeqId, num_tokens: int) -> Growth | None:
        if self.blocks_missing(seq_id, num_tokens) > self.pool.num_free:
            return None
        writes: list[TableWrite] = []
        copies: list[CopyBlock] = []
        for g, table in enumerate(self.tables[seq_id]):
            if self._copy_needed(table, num_tokens):
                copies.append(self._copy_last_block(g, table))
            wanted = self.layout.groups[g].spec.num_blocks(num_tokens, self.block_size)
            while table.num_blocks < wanted:
                table.block_ids.append(self.pool.allocate())
            if table.num_sent < table.num_blocks:
                writes.append(TableWrite(g, table.num_sent, tuple(table.block_ids[table.num_sent :])))
                table.num_sent = table.num_blocks
            assert num_tokens >= table.num_tokens, f"sequence {seq_id} cannot shrink to {num_tokens}"
            self._num_slots_filled += num_tokens - table.num_tokens
            table.num_tokens = num_tokens
        return Growth(tuple(writes), tuple(copies))

    def fork(self, parent: SeqId, child: SeqId) -> None:
        assert child not in self.tables, f"sequence {child} is already admitted"
        forked = []
        for table in self.tables[parent]:
            for block_id in table.block_ids:
                self.pool.share(block_id)
            forked.append(BlockTable(self.block_size, list(table.block_ids), table.num_tokens))
        self.tables[child] = tuple(forked)

    def release(self, seq_id: SeqId) -> None:
        for table in self.tables.pop(seq_id):
            # The tail goes first, so that the tail of a chain is also reused first.
            for logical in reversed(range(table.num_blocks)):
                if self.pool.release(table.block_ids[logical]):
                    self._num_slots_filled -= table.num_filled(logical)

    def stats(self) -> CacheStats:
        return CacheStats(self.block_size, self.pool.num_blocks, self.pool.num_used, self._num_slots_filled)

    def _copy_needed(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether writing positions [table.num_tokens, num_tokens) would write into a shared block."""
        return (
            num_tokens > table.num_tokens
            and table.num_tokens % self.block_size != 0
            and self.pool.is_shared(table.block_ids[-1])
        )

    def _copy_last_block(self, group: int, table: BlockTable) -> CopyBlock:
        """Repoint only this table's last entry to a fresh block; the others keep the old one."""
        old = table.block_ids[-1]
        new: BlockId = self.pool.allocate()
        self.pool.release(old)
        table.block_ids[-1] = new
        table.num_sent = min(table.num_sent, table.num_blocks - 1)
        self._num_slots_filled += table.num_filled(table.num_blocks - 1)
        return CopyBlock(group, old, new)
