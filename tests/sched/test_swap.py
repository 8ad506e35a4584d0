"""Swapping: all or nothing, first come first served, recomputation when the space is full or fails."""

from __future__ import annotations

import pytest

from octavo.core.request import RequestStatus
from octavo.core.step import StepResult, SwapBlock
from octavo.sched.preempt import PreemptionPrices


def crowd(d, count=6, num_prompt=1, max_tokens=20):
    for i in range(count):
        d.add(f"r{i}", num_prompt=num_prompt, max_tokens=max_tokens)


def step_until_preempted(d):
    while not d.scheduler.preemptions:
        d.step()
    return d.scheduler.preemptions[0]


SMALL = {"num_blocks": 24, "block_size": 1, "max_num_batched_tokens": 64, "preemption_mode": "swap"}


def test_victim_is_moved_whole_and_computes_nothing_again(drive):
    d = drive(num_swap_blocks=64, **SMALL)
    crowd(d)
    decision = step_until_preempted(d)
    plan = d.plans[-1]
    victim = d.scheduler.request(decision.request_id)
    assert victim.status is RequestStatus.SWAPPED
    assert len(plan.swap_out) == victim.live[0].num_computed_tokens
    assert plan.preempted == (victim.live[0].seq_id,)
    d.run()
    assert d.scheduler.counters.num_recomputed_tokens == 0
    assert d.scheduler.counters.num_blocks_swapped_out == d.scheduler.counters.num_blocks_swapped_in
    for i in range(6):
        assert d.outputs[f"r{i}"] == d.expected(i, 1, 20)


def test_swap_moves_name_both_blocks(drive):
    d = drive(num_blocks=8, num_swap_blocks=8, block_size=4, preemption_mode="swap")
    d.add("a", num_prompt=6, max_tokens=9)
    d.step()
    d.scheduler._preempt(d.scheduler.running[0])
    assert d.scheduler._builder.swap_out == [SwapBlock(0, 0, 0), SwapBlock(0, 1, 1)]
    d.scheduler._builder.decisions.clear()
    plan = d.scheduler.step(0.0)
    assert [(m.swap_id) for m in plan.swap_in] == [0, 1]
    assert d.swap.num_used == 0


def test_shared_blocks_of_a_group_are_moved_once_and_shared_again(drive):
    d = drive(num_blocks=12, num_swap_blocks=12, preemption_mode="swap")
    d.add("a", num_prompt=8, max_tokens=9, n=3)
    d.step()
    d.step()  # 2 shared blocks and 3 of their own
    d.scheduler._preempt(d.scheduler.running[0])
    assert len(d.scheduler._builder.swap_out) == 5
    assert d.swap.num_used == 5
    d.play_swaps(d.scheduler._builder.swap_out, ())
    d._tables.clear()
    d.scheduler._builder.decisions.clear()
    d.run()
    assert d.choices["a"] == {i: d.expected(0, 8, 9) for i in range(3)}


def test_swapped_are_resumed_before_anyone_new(drive):
    d = drive(num_swap_blocks=64, **SMALL)
    crowd(d, count=10)
    started: list[str] = []
    resumed: list[str] = []
    while d.scheduler.has_work:
        d.step()
        for name in d.scheduler.admitted_requests:
            (resumed if name in started else started).append(name)
            older = [r for r in d.scheduler.waiting if r.status is RequestStatus.SWAPPED]
            assert not older or name in resumed
    assert started == [f"r{i}" for i in range(10)]
    assert resumed


@pytest.mark.parametrize("num_swap_blocks", [0, 2])
def test_full_swap_space_falls_back_to_recomputation(drive, num_swap_blocks):
    """D1."""
    d = drive(num_swap_blocks=num_swap_blocks, **SMALL)
    crowd(d)
    decision = step_until_preempted(d)
    assert decision.mode == "recompute"
    assert decision.reason == ("the swap space is full" if num_swap_blocks else "no swap space")
    d.run()
    for i in range(6):
        assert d.outputs[f"r{i}"] == d.expected(i, 1, 20)


def test_failed_write_turns_into_recomputation(drive):
    d = drive(num_swap_blocks=64, **SMALL)
    crowd(d)
    d.fail_swap = "out"
    decision = step_until_preempted(d)
    assert d.scheduler.request(decision.request_id).status is RequestStatus.PREEMPTED
    assert d.swap.num_used == 0
    d.fail_swap = None
    d.run()
    for i in range(6):
        assert d.outputs[f"r{i}"] == d.expected(i, 1, 20)


def test_failed_read_turns_into_recomputation_and_the_others_repeat_their_step(drive):
    d = drive(num_swap_blocks=64, **SMALL)
    crowd(d)
    step_until_preempted(d)
    d.fail_swap = "in"
    while not d.plans[-1].swap_in:
        d.step()
    assert d.swap.num_used == 0 or d.scheduler.num_swapped
    d.fail_swap = None
    d.run()
    assert d.scheduler.counters.num_recomputed_tokens > 0
    for i in range(6):
        assert d.outputs[f"r{i}"] == d.expected(i, 1, 20)


def test_abort_of_a_swapped_request_frees_the_swap_space(drive):
    d = drive(num_swap_blocks=64, **SMALL)
    crowd(d)
    decision = step_until_preempted(d)
    assert d.swap.num_used > 0
    d.abort(decision.request_id)
    assert d.swap.num_used == 0
    d.run()


@pytest.mark.parametrize(
    ("prices", "kept_ratio", "mode"),
    [
        (PreemptionPrices(), 0.0, "recompute"),
        (PreemptionPrices(swap_block_s=1.0, compute_token_s=0.1), 0.0, "recompute"),
        (PreemptionPrices(swap_block_s=0.01, compute_token_s=0.1), 0.0, "swap"),
        (PreemptionPrices(swap_block_s=0.04, compute_token_s=0.1), 0.0, "swap"),
        (PreemptionPrices(swap_block_s=0.04, compute_token_s=0.1), 0.9, "recompute"),
    ],
)
def test_auto_compares_measured_prices(drive, prices, kept_ratio, mode):
    d = drive(num_swap_blocks=64, **(SMALL | {"preemption_mode": "auto"}))
    d.scheduler.preempter.prices = prices
    d.scheduler.preempter.kept_ratio = kept_ratio
    crowd(d)
    decision = step_until_preempted(d)
    assert decision.mode == mode
    if prices.swap_block_s is not None:
        assert decision.reason.startswith("swap ")


def test_swapped_prefix_that_is_still_cached_is_not_moved_back(drive):
    d = drive(num_blocks=16, num_swap_blocks=16, preemption_mode="swap", prefix_caching=True)
    d.add("a", num_prompt=10, max_tokens=5)
    d.step()
    d.scheduler._preempt(d.scheduler.running[0])
    d.play_swaps(d.scheduler._builder.swap_out, ())
    d._tables.clear()
    d.scheduler._builder.decisions.clear()
    plan = d.step()
    assert len(plan.swap_in) == 1  # the partial third block; the two full ones were found
    d.run()
    assert d.outputs["a"] == d.expected(0, 10, 5)


def test_result_without_failure_changes_nothing_of_who_was_swapped(drive):
    d = drive(num_swap_blocks=64, **SMALL)
    crowd(d)
    decision = step_until_preempted(d)
    before = d.swap.num_used
    d.scheduler.apply(d.plans[-1].__class__(step=0), StepResult(0, ()), 0.0)
    assert d.swap.num_used == before
    assert d.scheduler.request(decision.request_id).status is RequestStatus.SWAPPED


def test_what_the_prefix_cache_kept_is_learnt_from_resumptions(drive):
    d = drive(num_blocks=16, prefix_caching=True)
    d.add("a", num_prompt=9, max_tokens=5)
    d.step()
    d.scheduler.preempt("a")
    d.step()
    d.step()  # resumes: 8 of its 9 computed tokens are found
    assert d.scheduler.preempter.kept_ratio == pytest.approx(0.2 * 8 / 9)
    d.run()
    assert d.outputs["a"] == d.expected(0, 9, 5)
