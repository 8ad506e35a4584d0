"""What must hold after every operation, recomputed from scratch. Tests call it after each one; the engine
in debug mode after each step."""

from __future__ import annotations

from collections import Counter

from octavo.core.block import BlockId
from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVCacheManager


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
    """free + used = total; reference counts = table entries; filled slots add up; no partial block that is
    shared is filled beyond what every holder sees."""
    check_pool(manager.pool)
    entries: Counter[BlockId] = Counter()
    filled: dict[BlockId, int] = {}
    for seq_id, tables in manager.tables.items():
        for g, table in enumerate(tables):
            entries.update(table.block_ids)
            wanted = manager.layout.groups[g].spec.num_blocks(table.num_tokens, manager.block_size)
            _require(
                table.num_blocks == wanted,
                f"sequence {seq_id} group {g}: {table.num_blocks} blocks for {table.num_tokens} tokens",
            )
            _require(table.num_sent <= table.num_blocks, f"sequence {seq_id}: sent more than it has")
            for logical, block_id in enumerate(table.block_ids):
                here = table.num_filled(logical)
                seen = filled.setdefault(block_id, here)
                _require(here == seen, f"block {block_id} filled {seen} and {here} in two tables")
    for block in range(manager.pool.num_blocks):
        count = manager.pool.ref_count(BlockId(block))
        _require(
            count == entries[BlockId(block)],
            f"block {block}: reference count {count}, in {entries[BlockId(block)]} table entries",
        )
    total = sum(filled.values())
    counted = manager.stats().num_slots_filled
    _require(total == counted, f"{counted} slots counted as filled, {total} found in the tables")


def check_idle(manager: KVCacheManager) -> None:
    """After every request has ended nothing is held."""
    check(manager)
    _require(not manager.tables, f"tables of ended sequences remain: {sorted(manager.tables)}")
    _require(manager.pool.num_used == 0, f"{manager.pool.num_used} blocks leaked")
