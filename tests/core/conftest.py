"""Builders for the core: a manager of plain layers whose every call is followed by invariants.check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.core import invariants
from octavo.core.block import BlockId
from octavo.core.block_pool import BlockPool
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec


class CheckedManager(KVCacheManager):
    """Checks the invariants after each operation."""

    def admit(self, *args):
        super().admit(*args)
        invariants.check(self)

    def grow(self, seq_id, num_tokens):
        growth = super().grow(seq_id, num_tokens)
        invariants.check(self)
        return growth

    def fork(self, *args):
        super().fork(*args)
        invariants.check(self)

    def commit(self, *args):
        super().commit(*args)
        invariants.check(self)

    def release(self, seq_id):
        super().release(seq_id)
        invariants.check(self)


@pytest.fixture
def make_manager() -> Callable[..., CheckedManager]:
    def make(num_blocks: int, block_size: int = 4) -> CheckedManager:
        return CheckedManager(group_layers([FullAttentionSpec(1, 8)] * 2), num_blocks, block_size)

    return make


@pytest.fixture
def reorder() -> Callable[[BlockPool, list[int]], None]:
    """Give an idle pool a free list that starts with the given ids."""

    def apply(pool: BlockPool, first: list[int]) -> None:
        ids = [pool.allocate() for _ in range(pool.num_blocks)]
        for block_id in [*first, *(b for b in ids if b not in first)]:
            pool.release(BlockId(block_id))

    return apply
