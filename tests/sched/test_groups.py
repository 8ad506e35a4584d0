"""Groups: n choices over one prompt, exact blocks, counts and copies; preempted and resumed as a whole."""

from __future__ import annotations

import pytest

from octavo.core.step import CopyBlock
from octavo.errors import ContextLengthError


def ref_counts(d, blocks):
    return [d.manager.pool.ref_count(b) for b in blocks]


def table(d, seq_id):
    return d.manager.tables[seq_id][0].block_ids


def test_prompt_of_a_group_is_computed_once_and_shared(drive):
    d = drive()
    d.add("a", num_prompt=7, max_tokens=3, n=3)
    plan = d.step()
    assert (plan.seq_ids, plan.ends, plan.lengths) == ((0,), (7,), (7,))
    assert (plan.drawing, plan.num_draws) == ((0, 1, 2), (3,))
    assert [table(d, s) for s in (0, 1, 2)] == [[0, 1]] * 3
    assert ref_counts(d, (0, 1)) == [3, 3]


def test_partial_last_block_is_copied_once_for_each_but_the_last_writer(drive):
    d = drive()
    d.add("a", num_prompt=7, max_tokens=3, n=3)
    d.step()
    plan = d.step()
    assert plan.copies == (CopyBlock(0, 1, 2), CopyBlock(0, 1, 3))
    assert [table(d, s) for s in (0, 1, 2)] == [[0, 2], [0, 3], [0, 1]]
    assert ref_counts(d, (0, 1, 2, 3)) == [3, 1, 1, 1]
    assert d.scheduler.counters.num_blocks_copied == 2


def test_two_samples_make_exactly_one_copy(drive):
    d = drive()
    d.add("a", num_prompt=6, max_tokens=6, n=2)
    d.run()
    assert d.scheduler.counters.num_blocks_copied == 1


def test_full_prompt_blocks_are_never_copied(drive):
    d = drive()
    d.add("a", num_prompt=8, max_tokens=4, n=4)
    d.run()
    assert d.scheduler.counters.num_blocks_copied == 0


def test_every_choice_gets_its_own_output(drive):
    d = drive()
    d.add("a", num_prompt=5, max_tokens=4, n=4)
    d.run()
    assert d.choices["a"] == {i: d.expected(0, 5, 4) for i in range(4)}


def test_choices_end_one_by_one_and_the_prompt_stays_until_the_last(drive):
    d = drive()
    d.add("a", num_prompt=8, max_tokens=9, n=3)
    d.step()
    d.scheduler.book.end_sequence(*d.scheduler.book.sequences[0], "abort")  # the one that read the prompt
    d.step()
    assert ref_counts(d, (0, 1)) == [2, 2]
    d.run()
    assert d.choices["a"][1] == d.choices["a"][2] == d.expected(0, 8, 9)


def test_aborting_a_group_frees_everything(drive):
    for steps in range(4):
        d = drive(max_num_batched_tokens=8)
        d.add("a", num_prompt=10, max_tokens=9, n=4)
        for _ in range(steps):
            d.step()
        d.abort("a")
        assert d.manager.pool.num_used == 0


def test_group_counts_with_all_its_sequences_against_max_num_seqs(drive):
    d = drive(max_num_seqs=4)
    d.add("a", num_prompt=2, max_tokens=3, n=3)
    d.add("b", num_prompt=2, max_tokens=3, n=2)
    d.step()
    assert [r.request_id for r in d.scheduler.running] == ["a"]
    d.run()
    assert set(d.choices["b"]) == {0, 1}


def test_group_larger_than_max_num_seqs_is_refused(drive):
    d = drive(max_num_seqs=4)
    with pytest.raises(
        ContextLengthError, match="asks for 5 sequences at once and the engine runs at most 4"
    ):
        d.add("a", num_prompt=2, n=5)


def test_group_that_can_never_fit_is_refused(drive):
    d = drive(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthError, match="needs 5 KV-cache blocks of 4 and the pool has 4"):
        d.add("a", num_prompt=11, n=3)


def test_group_alone_in_a_full_pool_loses_its_last_choice_not_all(drive):
    d = drive(num_blocks=6, block_size=4)
    d.add("a", num_prompt=8, max_tokens=20, n=2)
    d.run()
    assert len(d.choices["a"][1]) == 9
    assert len(d.choices["a"][0]) == 17
    assert d.reasons == {("a", 0): "length", ("a", 1): "length"}


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("budget", [8, 64])
def test_group_preempted_at_every_step_gives_the_same_tokens(drive, mode, prefix_caching, budget):
    d = drive(
        num_blocks=40,
        num_swap_blocks=40,
        max_num_batched_tokens=budget,
        preemption_mode=mode,
        force_preemption=True,
        prefix_caching=prefix_caching,
    )
    d.add("a", num_prompt=9, max_tokens=7, n=3)
    d.add("b", num_prompt=5, max_tokens=6, n=2)
    d.run(max_steps=2000)
    assert d.choices["a"] == {i: d.expected(0, 9, 7) for i in range(3)}
    assert d.choices["b"] == {i: d.expected(1, 5, 6) for i in range(2)}
    counters = d.scheduler.counters
    assert counters.num_preemptions > 8
    if mode == "swap":
        assert counters.num_preemptions_recompute == 0
        assert counters.num_recomputed_tokens == 0


def test_resumed_group_finds_back_into_sharing(drive):
    d = drive(num_blocks=40)
    d.add("a", num_prompt=8, max_tokens=6, n=3)
    d.step()
    d.step()
    d.scheduler._builder.decisions.clear()
    d.scheduler._preempt(d.scheduler.running[0])
    assert d.manager.pool.num_used == 0
    d._tables.clear()
    d.step()  # the first computes the 8 tokens all have in common
    d.step()  # the others fork there
    assert ref_counts(d, table(d, 0)[:2]) == [3, 3]
    d.run()
    assert d.choices["a"] == {i: d.expected(0, 8, 6) for i in range(3)}
