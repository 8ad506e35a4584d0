"""KVCacheManager: block tables over one pool. Allocation on demand, sharing by count, copy on write.

It decides which physical block holds what; it never touches the bytes. What must be done to them comes
back as values: TableWrite (the executor's copy of a table changes) and CopyBlock (a shared block is about
to be written). A model with several groups of layers has one table per group for each sequence; all draw
from the same pool. Full blocks stay findable after their sequence ended, until the pool reuses them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.core.allocator import Growth, Match
from octavo.core.block import BlockId, SeqId
from octavo.core.block_hash import HashFunction, hash_block
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_groups import KVLayout
from octavo.core.kv_spec import KVCacheSpec, MambaSpec
from octavo.core.prefix_index import PrefixIndex, PrefixNode, Tenant
from octavo.core.prefix_match import find_prefix
from octavo.core.stats import CacheStats
from octavo.core.step import CopyBlock, TableWrite

NOBODY = Tenant()
_NOTHING_NEW = Growth()


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
        self._specs = [group.spec for group in layout.groups]
        # Groups whose blocks go out of sight
        self._skipping = [g for g, s in enumerate(self._specs) if s.num_skipped(1 << 30, block_size)]
        self._has_states = any(isinstance(g.spec, MambaSpec) for g in layout.groups)
        self._num_slots_filled = 0
        self._num_cached = 0  # free blocks that can still be found

    @property
    def num_blocks_free(self) -> int:
        return self.pool.num_free

    @property
    def num_blocks_total(self) -> int:
        return self.pool.num_blocks

    def blocks_for(self, num_tokens: int, num_shared: int = 0) -> int:
        return sum(
            group.spec.max_blocks(num_tokens, self.max_chunk, self.block_size)
            - group.spec.num_shareable(num_shared, self.block_size)
            for group in self.layout.groups
        )

    def blocks_missing(self, seq_id: SeqId, num_tokens: int) -> int:
        missing = 0
        logical = -(-num_tokens // self.block_size)
        for group, table in zip(self.layout.groups, self.tables[seq_id], strict=True):
            num_new = logical - len(table.block_ids)
            missing += group.spec.num_stored(num_new) if num_new > 0 else 0
            missing += self._copy_needed(table, num_tokens)
        return missing

    def reach(self, seq_id: SeqId, num_tokens: int) -> int:
        start = self.tables[seq_id][0].num_tokens
        steps = range(start + 1, num_tokens + 1)
        return start + bisect_right(steps, self.pool.num_free, key=lambda n: self.blocks_missing(seq_id, n))

    def chunk_end(self, start: int, end: int) -> int:
        if self.index is None or not self._has_states:
            return end
        boundary = end // self.block_size * self.block_size
        return boundary if boundary > start else end

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
            self.index.move_hold(child)
            chain.node = child
            self._put_blocks(seq_id, child, chain.num_blocks, num_computed)
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
        tables = self.tables[seq_id]
        if tables[0].num_tokens <= num_tokens <= tables[0].quiet_until:
            for table in tables:
                self._num_slots_filled += num_tokens - table.num_tokens
                table.num_tokens = num_tokens
            return _NOTHING_NEW
        writes: list[TableWrite] = []
        copies: list[CopyBlock] = []
        if not self._grow_blocks(seq_id, num_tokens, writes, copies):
            return None
        return Growth(tuple(writes), tuple(copies))

    def grow_each(self, seq_ids: Sequence[SeqId]) -> tuple[int, Growth]:
        writes: list[TableWrite] = []
        copies: list[CopyBlock] = []
        num_quiet = num_others = 0
        for seq_id in seq_ids:
            tables = self.tables[seq_id]
            first = tables[0]
            num_tokens = first.num_tokens + 1
            if num_tokens <= first.quiet_until:  # as in most steps
                for table in tables:
                    table.num_tokens = num_tokens
                num_quiet += 1
            elif self._grow_blocks(seq_id, num_tokens, writes, copies):
                num_others += 1
            else:
                break
        self._num_slots_filled += num_quiet * len(self.layout.groups)
        return num_quiet + num_others, Growth(tuple(writes), tuple(copies))

    def grow_all(self, targets: Sequence[tuple[SeqId, int]]) -> tuple[Growth, ...] | None:
        if len(targets) == 1:
            only = self.grow(*targets[0])
            return None if only is None else (only,)
        for seq_id, _ in targets:
            self.release_skipped(seq_id)
        if self._missing_together(targets) > self.pool.num_free:
            return None
        growths = []
        for seq_id, num_tokens in targets:
            growth = self.grow(seq_id, num_tokens)
            assert growth is not None, f"sequence {seq_id} got no block although all had been counted"
            growths.append(growth)
        return tuple(growths)

    def fork(self, parent: SeqId, child: SeqId) -> None:
        assert child not in self.tables, f"sequence {child} is already admitted"
        self.tables[child] = tuple(self._forked_table(table) for table in self.tables[parent])
        chain = self.chains[parent]
        self._start_chain(child, chain.node, chain.num_blocks)

    def release(self, seq_id: SeqId) -> None:
        self.release_tables(seq_id)
        self.drop_chain(seq_id)

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

    # ── parts that kv_swap.py is made of ────────────────────────────────────────────────────────────

    def release_tables(self, seq_id: SeqId) -> None:
        """Give back the blocks but keep the chain: the sequence is swapped out."""
        for table in self.tables.pop(seq_id):
            # The tail of a chain is reused first: kept blocks join the back of the free list from the tail
            # on, the others its front from the head on.
            held = table.held
            kept = {i for i, b in held if self._is_kept(b)}
            for logical, _ in sorted(held, key=lambda h: (h[0] in kept, -h[0] if h[0] in kept else h[0])):
                self._release_block(table, logical)

    def restore_tables(self, seq_id: SeqId, tables: tuple[BlockTable, ...]) -> None:
        """The opposite: blocks that came back can be found again."""
        self.tables[seq_id] = tables
        for logical, node in enumerate(self._chain_nodes(seq_id)):
            self._put_blocks(seq_id, node, logical, tables[0].num_tokens)

    def cached_blocks(self, seq_id: SeqId) -> dict[tuple[int, int], BlockId]:
        """(group, logical block) → a block that still holds that part of the sequence's prefix."""
        return {
            (group, logical): block_id
            for logical, node in enumerate(self._chain_nodes(seq_id))
            for group, block_id in node.blocks.items()
        }

    def acquire(self, block_id: BlockId) -> None:
        """One more table points to a full, findable block, in use or free."""
        if self.pool.acquire(block_id):
            self._num_cached -= 1
            self._num_slots_filled += self.block_size

    def take(self, num_filled: int) -> BlockId:
        """A fresh block of which `num_filled` slots will be filled."""
        self._num_slots_filled += num_filled
        return self.pool.allocate()

    def drop_chain(self, seq_id: SeqId) -> None:
        chain = self.chains.pop(seq_id)
        if self.index is not None and chain.node is not None:
            self.index.drop(chain.node)

    def _chain_nodes(self, seq_id: SeqId) -> list[PrefixNode]:
        """The prefixes of the sequence's committed blocks, shortest first."""
        nodes: list[PrefixNode] = []
        node = self.chains[seq_id].node
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────

    def _grow_blocks(
        self, seq_id: SeqId, num_tokens: int, writes: list[TableWrite], copies: list[CopyBlock]
    ) -> bool:
        """grow() where more than a count changes: adds what to `writes` and `copies`. False: too few blocks."""
        self.release_skipped(seq_id)
        tables, num_free = self.tables[seq_id], self.pool.num_free
        num_new = max(0, -(-num_tokens // self.block_size) - len(tables[0].block_ids))
        most = len(tables) * (num_new + 1)  # with a copy of each last block
        if most > num_free and self.blocks_missing(seq_id, num_tokens) > num_free:
            return False
        for g, table in enumerate(tables):
            assert num_tokens >= table.num_tokens, f"sequence {seq_id} cannot shrink to {num_tokens}"
            if self._copy_needed(table, num_tokens):
                copies.append(self._copy_last_block(g, table))
            self._extend(table, self._specs[g], num_new, num_tokens)
            writes += _unsent(seq_id, g, table)
            table.num_sent = len(table.block_ids)
        quiet_until = min([self._quiet_until(g, table) for g, table in enumerate(tables)])
        for table in tables:
            table.quiet_until = quiet_until
        return True

    def _start_chain(self, seq_id: SeqId, node: PrefixNode | None, num_blocks: int) -> None:
        if self.index is not None and node is not None:
            self.index.hold(node)
        self.chains[seq_id] = Chain(node, num_blocks)

    def _matched_table(self, blocks: tuple[BlockId | None, ...]) -> BlockTable:
        table = BlockTable(self.block_size, list(blocks), len(blocks) * self.block_size)
        table.num_skipped = sum(b is None for b in blocks)
        for _, block_id in table.held:
            self.acquire(block_id)
        return table

    def _forked_table(self, table: BlockTable) -> BlockTable:
        for _, block_id in table.held:
            self.pool.share(block_id)
        table.quiet_until = 0  # its last block is no longer its own
        return BlockTable(self.block_size, list(table.block_ids), table.num_tokens, table.num_skipped)

    def _quiet_until(self, group: int, table: BlockTable) -> int:
        """The end of the table's last block, or before it the first position where a block slides out of sight."""
        spec = self._specs[group]
        last = table.block_ids[-1] if table.block_ids else None
        if last is None or self.pool.is_shared(last):
            return 0
        ends = range(table.num_tokens, len(table.block_ids) * self.block_size)
        if spec.num_skipped(ends.stop, self.block_size) <= table.num_skipped:
            return ends.stop
        return ends.start + bisect_right(
            ends, table.num_skipped, key=lambda end: spec.num_skipped(end, self.block_size)
        )

    def _extend(self, table: BlockTable, spec: KVCacheSpec, num_new: int, num_tokens: int) -> None:
        """Take the blocks up to `num_tokens`, `num_new` logical ones, and count their slots as filled."""
        num_stored = spec.num_stored(num_new)
        table.block_ids += [None] * (num_new - num_stored)
        table.block_ids += [self.pool.allocate() for _ in range(num_stored)]
        not_stored = (num_new - num_stored) * self.block_size
        self._num_slots_filled += num_tokens - table.num_tokens - not_stored
        table.num_tokens = num_tokens

    def _put_blocks(self, seq_id: SeqId, node: PrefixNode, logical: int, num_computed: int) -> None:
        """Make the blocks of one logical index findable under the prefix that ends with them."""
        assert self.index is not None
        boundary = (logical + 1) * self.block_size
        for g, table in enumerate(self.tables[seq_id]):
            block_id = table.block_ids[logical]
            if block_id is not None and self._specs[g].is_checkpoint(boundary, num_computed):
                self.index.put(node, g, block_id)

    def release_skipped(self, seq_id: SeqId) -> None:
        """Return the blocks that no query from the next one on can see."""
        for g in self._skipping:
            table = self.tables[seq_id][g]
            skipped = self._specs[g].num_skipped(table.num_tokens, self.block_size)
            if skipped <= table.num_skipped:
                continue
            skipped = min(skipped, len(table.block_ids))
            for logical in range(table.num_skipped, skipped):
                if table.block_ids[logical] is not None:
                    self._release_block(table, logical)
                    table.block_ids[logical] = None
            table.num_skipped = skipped

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
            table.num_tokens % self.block_size != 0
            and num_tokens > table.num_tokens
            and self.pool.is_shared(table.block_at(-1))
        )

    def _missing_together(self, targets: Sequence[tuple[SeqId, int]]) -> int:
        """blocks_missing() of all, less the copies that the last writer of a shared block need not make."""
        missing = sum(self.blocks_missing(seq_id, num_tokens) for seq_id, num_tokens in targets)
        writers = Counter(
            table.block_at(-1)
            for seq_id, num_tokens in targets
            for table in self.tables[seq_id]
            if self._copy_needed(table, num_tokens)
        )
        return missing - sum(count == self.pool.ref_count(block) for block, count in writers.items())

    def _copy_last_block(self, group: int, table: BlockTable) -> CopyBlock:
        """Repoint only this table's last entry to a fresh block; the others keep the old one."""
        old = table.block_at(-1)
        new = self.pool.allocate()
        self.pool.release(old)
        table.block_ids[-1] = new
        table.num_sent = min(table.num_sent, table.num_logical - 1)
        self._num_slots_filled += table.num_filled(table.num_logical - 1)
        return CopyBlock(group, old, new)


def _unsent(seq_id: SeqId, group: int, table: BlockTable) -> Iterator[TableWrite]:
    """What the executor does not know yet, as runs of held blocks."""
    first = max(table.num_sent, table.num_skipped)
    run: list[BlockId] = []
    for block_id in (*table.block_ids[first:], None):
        if block_id is not None:
            run.append(block_id)
            continue
        if run:
            yield TableWrite(seq_id, group, first, tuple(run))
        first += len(run) + 1
        run = []
