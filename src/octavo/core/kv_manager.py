"""KVCacheManager: block tables over one pool. Allocation on demand, sharing by count, copy on write.

It decides which physical block holds what; it never touches the bytes. What must be done to them comes
back as values: TableWrite (the executor's copy of a table changes) and CopyBlock (a shared block is about
to be written). A model with several groups of layers has one table per group for each sequence; all draw
from the same pool. Full blocks stay findable after their sequence ended, until the pool reuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.allocator import Growth, Match
from octavo.core.block import BlockId, SeqId
from octavo.core.block_hash import HashFunction, hash_block
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_groups import KVLayout
from octavo.core.prefix_index import PrefixIndex, PrefixNode, Tenant
from octavo.core.prefix_match import find_prefix
from octavo.core.stats import CacheStats
from octavo.core.step import CopyBlock, TableWrite

NOBODY = Tenant()


@dataclass(slots=True)
class Chain:
    """How far a sequence's full blocks are known to the index."""

    node: PrefixNode | None  # where it ends; None: the chain is broken, or nothing is cached
    num_blocks: int  # full blocks up to `node`


class KVCacheManager:
    """The paged KVAllocator."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        *,
        max_chunk: int = 1 << 30,
        prefix_caching: bool = True,
        hash_function: HashFunction = hash_block,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.layout = layout
        self.block_size = block_size
        self.max_chunk = max_chunk  # tokens of one sequence in one step, at most
        self.index = PrefixIndex(hash_function) if prefix_caching else None
        self.pool = BlockPool(num_blocks, self._on_reuse)
        self.tables: dict[SeqId, tuple[BlockTable, ...]] = {}
        self.chains: dict[SeqId, Chain] = {}
        self._num_slots_filled = 0
        self._num_cached = 0  # free blocks that can still be found

    @property
    def num_blocks_free(self) -> int:
        return self.pool.num_free

    @property
    def num_blocks_total(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return self.layout.max_blocks(num_tokens, self.max_chunk, self.block_size)

    def blocks_missing(self, seq_id: SeqId, num_tokens: int) -> int:
        missing = 0
        logical = -(-num_tokens // self.block_size)
        for table in self.tables[seq_id]:
            missing += max(0, logical - table.num_logical) + self._copy_needed(table, num_tokens)
        return missing

    # ── prefixes ────────────────────────────────────────────────────────────────────────────────────

    def match(self, token_ids: Sequence[int], tenant: Tenant) -> Match | None:
        if self.index is None:
            return None
        found = find_prefix(self.index, self.layout.groups, self.block_size, token_ids, tenant)
        if found is None:
            return None
        node, blocks = found
        shared = sum(self.pool.ref_count(b) > 0 for group in blocks for b in group if b is not None)
        return Match(node, len(blocks[0]) * self.block_size, blocks, shared)

    def admit(self, seq_id: SeqId, tenant: Tenant = NOBODY, match: Match | None = None) -> None:
        assert seq_id not in self.tables, f"sequence {seq_id} is already admitted"
        if match is not None:
            self.tables[seq_id] = tuple(self._matched_table(blocks) for blocks in match.blocks)
            self._start_chain(seq_id, match.node, len(match.blocks[0]))
            return
        self.tables[seq_id] = tuple(BlockTable(self.block_size) for _ in self.layout.groups)
        root = self.index.root(tenant) if self.index is not None else None
        self._start_chain(seq_id, root, 0)

    def commit(self, seq_id: SeqId, token_ids: Sequence[int], num_computed: int) -> None:
        chain = self.chains[seq_id]
        if self.index is None or chain.node is None:
            return
        while (chain.num_blocks + 1) * self.block_size <= num_computed:
            start = chain.num_blocks * self.block_size
            child = self.index.add_child(chain.node, tuple(token_ids[start : start + self.block_size]))
            if child is None:  # another prefix has this hash: the rest of the chain cannot be found
                self.index.drop(chain.node)
                chain.node = None
                return
            self.index.hold(child)
            self.index.drop(chain.node)
            chain.node = child
            for g, table in enumerate(self.tables[seq_id]):
                block_id = table.block_ids[chain.num_blocks]
                if block_id is not None:
                    self.index.put(child, g, block_id)
            chain.num_blocks += 1

    def clear_prefixes(self) -> int:
        """Forget every cached block (those in use stay in use). Returns how many there were."""
        if self.index is None:
            return 0
        count = len(self.index)
        self.index.clear()
        self._num_cached = 0
        return count

    # ── blocks ──────────────────────────────────────────────────────────────────────────────────────

    def grow(self, seq_id: SeqId, num_tokens: int) -> Growth | None:
        self._release_skipped(seq_id)
        if self.blocks_missing(seq_id, num_tokens) > self.pool.num_free:
            return None
        writes: list[TableWrite] = []
        copies: list[CopyBlock] = []
        logical = -(-num_tokens // self.block_size)
        for g, table in enumerate(self.tables[seq_id]):
            assert num_tokens >= table.num_tokens, f"sequence {seq_id} cannot shrink to {num_tokens}"
            if self._copy_needed(table, num_tokens):
                copies.append(self._copy_last_block(g, table))
            while table.num_logical < logical:
                table.block_ids.append(self.pool.allocate())
            first = max(table.num_sent, table.num_skipped)
            if first < table.num_logical:
                writes.append(TableWrite(g, first, tuple(table.block_at(i) for i in range(first, logical))))
            table.num_sent = table.num_logical
            self._num_slots_filled += num_tokens - table.num_tokens
            table.num_tokens = num_tokens
        return Growth(tuple(writes), tuple(copies))

    def fork(self, parent: SeqId, child: SeqId, num_tokens: int | None = None) -> None:
        assert child not in self.tables, f"sequence {child} is already admitted"
        self.tables[child] = tuple(self._forked_table(t, num_tokens) for t in self.tables[parent])
        chain = self.chains[parent]
        if num_tokens is None or num_tokens >= chain.num_blocks * self.block_size:
            self._start_chain(child, chain.node, chain.num_blocks)
            return
        node, num_blocks = chain.node, chain.num_blocks
        while node is not None and num_blocks * self.block_size > num_tokens:
            node, num_blocks = node.parent, num_blocks - 1
        self._start_chain(child, node, num_blocks)

    def release(self, seq_id: SeqId) -> None:
        for table in self.tables.pop(seq_id):
            # The tail of a chain is reused first: kept blocks join the back of the free list from the tail
            # on, the others its front from the head on.
            held = range(table.num_skipped, table.num_logical)
            kept = {i for i in held if self._is_kept(table.block_at(i))}
            for logical in sorted(held, key=lambda i: (i in kept, -i if i in kept else i)):
                self._release_block(table, logical)
        chain = self.chains.pop(seq_id)
        if self.index is not None and chain.node is not None:
            self.index.drop(chain.node)

    def stats(self) -> CacheStats:
        return CacheStats(
            block_size=self.block_size,
            num_blocks_total=self.pool.num_blocks,
            num_blocks_used=self.pool.num_used,
            num_blocks_cached=self._num_cached,
            num_blocks_shared=self.pool.num_shared,
            num_blocks_saved=self.pool.num_saved,
            num_slots_filled=self._num_slots_filled,
        )

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────

    def _start_chain(self, seq_id: SeqId, node: PrefixNode | None, num_blocks: int) -> None:
        if self.index is not None and node is not None:
            self.index.hold(node)
        self.chains[seq_id] = Chain(node, num_blocks)

    def _matched_table(self, blocks: tuple[BlockId | None, ...]) -> BlockTable:
        table = BlockTable(self.block_size, list(blocks), len(blocks) * self.block_size)
        table.num_skipped = sum(b is None for b in blocks)
        for block_id in table.held:
            if self.pool.acquire(block_id):
                self._num_cached -= 1
                self._num_slots_filled += self.block_size
        return table

    def _forked_table(self, table: BlockTable, num_tokens: int | None) -> BlockTable:
        if num_tokens is None:
            num_tokens = table.num_tokens
        else:
            assert num_tokens % self.block_size == 0, f"{num_tokens} tokens are not whole blocks"
            assert num_tokens <= table.num_tokens, f"{num_tokens} of {table.num_tokens} tokens"
        block_ids = table.block_ids[: -(-num_tokens // self.block_size)]
        forked = BlockTable(self.block_size, block_ids, num_tokens, min(table.num_skipped, len(block_ids)))
        for block_id in forked.held:
            self.pool.share(block_id)
        return forked

    def _release_skipped(self, seq_id: SeqId) -> None:
        """Return the blocks that no query from the next one on can see."""
        for group, table in zip(self.layout.groups, self.tables[seq_id], strict=True):
            skipped = group.spec.num_skipped(table.num_tokens, self.block_size)
            for logical in range(table.num_skipped, min(skipped, table.num_logical)):
                self._release_block(table, logical)
                table.block_ids[logical] = None
                table.num_skipped = logical + 1

    def _release_block(self, table: BlockTable, logical: int) -> None:
        block_id = table.block_at(logical)
        if self.pool.release(block_id, reuse_first=not self._is_kept(block_id)):
            self._num_cached += self._is_findable(block_id)
            self._num_slots_filled -= table.num_filled(logical)

    def _is_findable(self, block_id: BlockId) -> bool:
        return self.index is not None and self.index.holds(block_id)

    def _is_kept(self, block_id: BlockId) -> bool:
        """Whether the block waits its turn when it is free: without a cache all do, else the findable."""
        return self.index is None or self.index.holds(block_id)

    def _on_reuse(self, block_id: BlockId) -> None:
        """A free block is handed out anew: its content can no longer be found."""
        if self.index is not None and self.index.holds(block_id):
            self.index.forget(block_id)
            self._num_cached -= 1

    def _copy_needed(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether writing positions [table.num_tokens, num_tokens) would write into a shared block."""
        return (
            num_tokens > table.num_tokens
            and table.num_tokens % self.block_size != 0
            and self.pool.is_shared(table.block_at(-1))
        )

    def _copy_last_block(self, group: int, table: BlockTable) -> CopyBlock:
        """Repoint only this table's last entry to a fresh block; the others keep the old one."""
        old = table.block_at(-1)
        new = self.pool.allocate()
        self.pool.release(old)
        table.block_ids[-1] = new
        table.num_sent = min(table.num_sent, table.num_logical - 1)
        self._num_slots_filled += table.num_filled(table.num_logical - 1)
        return CopyBlock(group, old, new)
