from __future__ import annotations

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.invariants import InvariantError, check_pool


def test_fresh_pool_hands_out_ids_in_order():
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (0, 3)
    check_pool(pool)


def test_released_blocks_are_reused_least_recently_freed_first():
    pool = BlockPool(4)
    for _ in range(4):
        pool.allocate()
    for block_id in (2, 0, 3):
        assert pool.release(block_id) is True
    assert list(pool.free_ids()) == [2, 0, 3]
    assert [pool.allocate() for _ in range(3)] == [2, 0, 3]
    check_pool(pool)


def test_shared_block_stays_used_until_its_last_holder_releases_it():
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.share(block_id)
    assert pool.ref_count(block_id) == 2
    assert pool.is_shared(block_id)
    assert pool.release(block_id) is False
    assert list(pool.free_ids()) == [1]
    assert pool.release(block_id) is True
    assert list(pool.free_ids()) == [1, 0]


def test_releasing_a_free_block_is_refused():
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.release(block_id)
    with pytest.raises(AssertionError, match="block 0 released twice"):
        pool.release(block_id)
    assert pool.num_free == 2


def test_sharing_a_free_block_is_refused():
    with pytest.raises(AssertionError, match="block 1 is free"):
        BlockPool(2).share(1)


def test_allocating_from_an_empty_pool_is_refused():
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(AssertionError, match="no free block of 1"):
        pool.allocate()


def test_a_pool_of_no_blocks_is_refused():
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0)


def test_check_sees_a_block_missing_from_the_free_list():
    pool = BlockPool(2)
    pool._blocks[0].ref_count = 1  # corrupt it on purpose
    with pytest.raises(InvariantError, match="reference count 0"):
        check_pool(pool)
