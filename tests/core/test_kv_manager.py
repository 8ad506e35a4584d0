"""Exact block ids, reference counts and reuse order of the paged allocator."""

from __future__ import annotations

import pytest

from octavo.core import invariants
from octavo.core.allocator import Growth
from octavo.core.block_table import Slot
from octavo.core.step import CopyBlock, TableWrite


def ids(manager, seq_id, group=0):
    return manager.tables[seq_id][group].block_ids


def test_worked_example_of_the_article(make_manager, reorder):
    """7 prompt tokens at block size 4: blocks 7 and 1; token 8 fills block 1; token 9 takes block 3."""
    manager = make_manager(num_blocks=8, block_size=4)
    reorder(manager.pool, [7, 1, 3])
    manager.admit(0)
    growth = manager.grow(0, 7)
    table = manager.tables[0][0]
    assert growth.table_writes == (TableWrite(0, 0, 0, (7, 1)),)
    assert [table.num_filled(0), table.num_filled(1)] == [4, 3]
    assert table.num_slots_empty == 1

    assert manager.grow(0, 8).table_writes == ()
    assert table.locate(7) == Slot(1, 3)  # the first generated token: fourth slot of block 1
    assert table.num_filled(1) == 4

    assert manager.grow(0, 9).table_writes == (TableWrite(0, 0, 2, (3,)),)
    assert table.block_ids == [7, 1, 3]
    assert table.locate(8) == Slot(3, 0)
    assert manager.stats().num_slots_filled == 9


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 100])
def test_waste_is_at_most_one_partial_block(make_manager, block_size):
    manager = make_manager(num_blocks=64, block_size=block_size)
    manager.admit(0)
    for num_tokens in range(1, 50):
        manager.grow(0, num_tokens)
        assert manager.tables[0][0].num_slots_empty <= block_size - 1
        assert len(ids(manager, 0)) == -(-num_tokens // block_size)


def test_growth_that_does_not_fit_changes_nothing(make_manager):
    manager = make_manager(num_blocks=3)
    manager.admit(0)
    manager.grow(0, 5)
    assert manager.blocks_missing(0, 13) == 2
    assert manager.grow(0, 13) is None
    assert ids(manager, 0) == [0, 1]
    assert manager.tables[0][0].num_tokens == 5
    assert manager.num_blocks_free == 1


def test_reach_is_as_far_as_the_free_blocks_go(make_manager):
    manager = make_manager(num_blocks=3)
    manager.admit(0)
    manager.grow(0, 5)
    assert [manager.reach(0, n) for n in (5, 6, 12, 13, 100)] == [5, 6, 12, 12, 12]
    assert manager.grow(0, 12) is not None
    assert manager.reach(0, 13) == 12


def test_growing_each_by_one_ends_at_the_first_without_a_block(make_manager):
    manager = make_manager(num_blocks=4)
    for seq_id, num_tokens in ((0, 3), (1, 4), (2, 4)):
        manager.admit(seq_id)
        manager.grow(seq_id, num_tokens)
    assert manager.grow_each([0, 1, 2, 0]) == (2, Growth((TableWrite(1, 0, 1, (3,)),)))
    assert [manager.tables[seq_id][0].num_tokens for seq_id in (0, 1, 2)] == [4, 5, 4]
    assert manager.num_blocks_free == 0
    invariants.check(manager)


def test_release_returns_the_tail_first(make_manager):
    manager = make_manager(num_blocks=4)
    manager.admit(0)
    manager.grow(0, 12)
    manager.release(0)
    assert list(manager.pool.free_ids()) == [2, 1, 0, 3]  # 3 was never used and keeps its turn
    invariants.check_idle(manager)


def test_fork_shares_every_block_and_takes_none(make_manager):
    manager = make_manager(num_blocks=8)
    manager.admit(0)
    manager.grow(0, 7)
    manager.fork(0, 1)
    assert ids(manager, 1) == [0, 1]
    assert [manager.pool.ref_count(b) for b in (0, 1)] == [2, 2]
    assert manager.num_blocks_free == 6
    assert manager.stats().num_slots_filled == 7  # physical slots, counted once


def test_first_divergent_write_copies_the_partial_block_once(make_manager):
    """Two samples share a prompt whose last block is partial: exactly one copy, counts 2 to 1."""
    manager = make_manager(num_blocks=8)
    manager.admit(0)
    manager.grow(0, 7)
    manager.fork(0, 1)
    first = manager.grow(1, 8)
    assert first.copies == (CopyBlock(0, src=1, dst=2),)
    assert first.table_writes == (TableWrite(1, 0, 0, (0, 2)),)  # the child's table was never sent before
    assert [manager.pool.ref_count(b) for b in (0, 1, 2)] == [2, 1, 1]
    second = manager.grow(0, 8)
    assert second.copies == ()
    assert second.table_writes == ()
    assert ids(manager, 0) == [0, 1]
    assert ids(manager, 1) == [0, 2]
    assert manager.stats().num_slots_filled == 4 + 4 + 4


def test_writing_parent_is_repointed_and_told_so(make_manager):
    manager = make_manager(num_blocks=8)
    manager.admit(0)
    manager.grow(0, 6)
    manager.fork(0, 1)
    growth = manager.grow(0, 7)
    assert growth.copies == (CopyBlock(0, src=1, dst=2),)
    assert growth.table_writes == (TableWrite(0, 0, 1, (2,)),)


def test_full_shared_block_is_never_copied(make_manager):
    manager = make_manager(num_blocks=8)
    manager.admit(0)
    manager.grow(0, 8)
    manager.fork(0, 1)
    growth = manager.grow(1, 9)
    assert growth.copies == ()
    assert ids(manager, 1) == [0, 1, 2]
    assert manager.pool.ref_count(1) == 2


def test_copy_on_write_counts_as_a_missing_block(make_manager):
    manager = make_manager(num_blocks=2)
    manager.admit(0)
    manager.grow(0, 7)
    manager.fork(0, 1)
    assert manager.blocks_missing(1, 8) == 1
    assert manager.grow(1, 8) is None
    assert ids(manager, 1) == [0, 1]


def test_releasing_the_parent_leaves_the_child_whole(make_manager):
    manager = make_manager(num_blocks=4)
    manager.admit(0)
    manager.grow(0, 7)
    manager.fork(0, 1)
    manager.release(0)
    assert [manager.pool.ref_count(b) for b in (0, 1)] == [1, 1]
    assert manager.grow(1, 8).copies == ()  # nobody shares it any more
    manager.release(1)
    invariants.check_idle(manager)


def test_growing_to_the_same_length_writes_nothing(make_manager):
    manager = make_manager(num_blocks=4)
    manager.admit(0)
    manager.grow(0, 7)
    manager.fork(0, 1)
    growth = manager.grow(1, 7)
    assert growth.copies == ()
    assert ids(manager, 1) == [0, 1]


def test_forked_sequence_learns_its_table_once_even_if_it_needs_no_block(make_manager):
    manager = make_manager(num_blocks=4)
    manager.admit(0)
    manager.grow(0, 8)
    manager.fork(0, 1)
    assert manager.grow(1, 8).table_writes == (TableWrite(1, 0, 0, (0, 1)),)
    assert manager.grow(1, 8).table_writes == ()


def test_sequence_cannot_shrink_within_its_last_block(make_manager):
    manager = make_manager(num_blocks=4)
    manager.admit(0)
    manager.grow(0, 7)
    with pytest.raises(AssertionError, match="sequence 0 cannot shrink to 6"):
        manager.grow(0, 6)
    assert manager.stats().num_slots_filled == 7


def test_admitting_twice_is_refused(make_manager):
    manager = make_manager(num_blocks=4)
    manager.admit(0)
    with pytest.raises(AssertionError, match="sequence 0 is already admitted"):
        manager.admit(0)


def test_stats_in_blocks_and_slots(make_manager):
    manager = make_manager(num_blocks=10)
    manager.admit(0)
    manager.grow(0, 6)
    stats = manager.stats()
    assert (stats.num_blocks_used, stats.num_blocks_free, stats.num_slots_filled) == (2, 8, 6)
    assert stats.usage_ratio == 0.2
    assert stats.fill_ratio == 0.75


def test_check_sees_a_leaked_reference(make_manager):
    manager = make_manager(num_blocks=4)
    manager.admit(0)
    manager.grow(0, 4)
    manager.pool.share(0)
    with pytest.raises(invariants.InvariantError, match="block 0: reference count 2, in 1 table entries"):
        invariants.check(manager)
