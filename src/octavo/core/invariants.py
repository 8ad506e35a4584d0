"""What must hold after every operation, recomputed from scratch. Tests call it after each one; the engine
in debug mode after each step."""

from __future__ import annotations

from collections import Counter

from octavo.core.block import BlockId, SeqId
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_swap import SwapSpace
from octavo.core.prefix_index import PrefixIndex


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself: a bug in Octavo, never in a request."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def check_pool(pool: BlockPool) -> None:
    """The free list holds each block of reference count 0 exactly once, and no other."""
    free = list(pool.free_ids())
    _require(len(free) == pool.num_free, f"num_free {pool.num_free}, free list has {len(free)}")
    _require(len(set(free)) == len(free), f"free list holds a block twice: {free}")
    zero = {b for b in range(pool.num_blocks) if pool.ref_count(BlockId(b)) == 0}
    _require(set(free) == zero, f"free list {sorted(free)} but reference count 0 on {sorted(zero)}")


def check(manager: KVCacheManager) -> None:
    """free + used = total; reference counts = table entries; filled slots add up; what two tables see in one
    block is the same; every cached block is full, known once and counted; chains match their tables."""
    check_pool(manager.pool)
    entries: Counter[BlockId] = Counter()
    filled: dict[BlockId, int] = {}
    for seq_id, tables in manager.tables.items():
        ends = {(table.num_tokens, table.quiet_until) for table in tables}
        _require(len(ends) == 1, f"sequence {seq_id}: its tables end at different positions: {sorted(ends)}")
        for table in tables:
            _check_table(manager, seq_id, table)
            for logical, block_id in table.held:
                here = table.num_filled(logical)
                entries[block_id] += 1
                seen = filled.setdefault(block_id, here)
                _require(here == seen, f"block {block_id} filled {seen} and {here} in two tables")
    for block in range(manager.pool.num_blocks):
        count, found = manager.pool.ref_count(BlockId(block)), entries[BlockId(block)]
        _require(count == found, f"block {block}: reference count {count}, in {found} table entries")
    _check_counts(manager, entries, filled)
    if manager.index is not None:
        _check_index(manager, manager.index)


def _check_table(manager: KVCacheManager, seq_id: SeqId, table: BlockTable) -> None:
    logical = -(-table.num_tokens // manager.block_size)
    _require(
        table.num_logical == logical,
        f"sequence {seq_id}: {table.num_logical} logical blocks for {table.num_tokens} tokens",
    )
    _require(table.num_sent <= table.num_logical, f"sequence {seq_id}: sent more than it has")
    skipped = table.block_ids[: table.num_skipped]
    _require(not any(b is not None for b in skipped), f"sequence {seq_id}: skipped blocks held: {skipped}")


def _check_counts(manager: KVCacheManager, entries: Counter[BlockId], filled: dict[BlockId, int]) -> None:
    stats = manager.stats()
    total = sum(filled.values())
    _require(total == stats.num_slots_filled, f"{stats.num_slots_filled} slots counted, {total} filled")
    shared = sum(count > 1 for count in entries.values())
    _require(shared == stats.num_blocks_shared, f"{stats.num_blocks_shared} shared counted, {shared} found")
    saved = sum(count - 1 for count in entries.values())
    _require(saved == stats.num_blocks_saved, f"{stats.num_blocks_saved} saved counted, {saved} found")


def _check_index(manager: KVCacheManager, index: PrefixIndex) -> None:
    free_and_cached = 0
    for block_id, node, group in index.items():
        _require(node.blocks.get(group) == block_id, f"block {block_id} and its node disagree")
        free_and_cached += manager.pool.ref_count(block_id) == 0
    counted = manager.stats().num_blocks_cached
    _require(free_and_cached == counted, f"{counted} cached blocks counted, {free_and_cached} found")
    children: Counter[int] = Counter(id(node.parent) for node in index.nodes)
    holders: Counter[int] = Counter(id(c.node) for c in manager.chains.values() if c.node is not None)
    for node in index.nodes:
        _require(not node.is_dead, f"a dead prefix remains: {node.token_ids}")
        _require(node.num_children == children[id(node)], f"prefix {node.token_ids}: wrong child count")
        _require(node.num_holders == holders[id(node)], f"prefix {node.token_ids}: wrong holder count")


def check_swap(manager: KVCacheManager, swap: SwapSpace) -> None:
    """check(), and the same for the swap space; no sequence lies in both."""
    check(manager)
    both = manager.tables.keys() & swap.tables.keys()
    _require(not both, f"sequences {sorted(both)} are in the cache and swapped out")
    if swap.pool is None:
        return
    check_pool(swap.pool)
    held = (b for tables in swap.tables.values() for t in tables for _, b in t.held)
    entries = Counter(held)
    for block in range(swap.num_blocks):
        count, found = swap.pool.ref_count(BlockId(block)), entries[BlockId(block)]
        _require(count == found, f"swap block {block}: reference count {count}, in {found} table entries")


def check_idle(manager: KVCacheManager) -> None:
    """After every request has ended nothing is held."""
    check(manager)
    _require(not manager.tables, f"tables of ended sequences remain: {sorted(manager.tables)}")
    _require(not manager.chains, f"chains of ended sequences remain: {sorted(manager.chains)}")
    _require(manager.pool.num_used == 0, f"{manager.pool.num_used} blocks leaked")
