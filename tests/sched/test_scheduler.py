"""Scripted traffic → exact plans."""

from __future__ import annotations

import pytest

from octavo.core.request import RequestStatus
from octavo.errors import ContextLengthError
from octavo.sched.budget import SchedulerConfig


def test_one_request_reads_its_prompt_then_draws_one_token_a_step(drive):
    d = drive()
    d.add("a", num_prompt=7, max_tokens=3)
    d.run()
    assert d.table() == [
        "1: 0@[0,7)*",
        "2: 0@[7,8)*",
        "3: 0@[8,9)*",
        "4: end 0",
    ]
    assert d.outputs["a"] == [7, 8, 9]
    assert d.reasons == {"a": "length"}


def test_a_request_joins_and_leaves_at_any_step(drive):
    d = drive()
    d.add("a", num_prompt=3, max_tokens=4)
    d.step()
    d.add("b", num_prompt=5, max_tokens=2)
    d.run()
    assert d.table() == [
        "1: 0@[0,3)*",
        "2: 0@[3,4)* 1@[0,5)*",
        "3: 0@[4,5)* 1@[5,6)*",
        "4: 0@[5,6)* end 1",
        "5: end 0",
    ]


def test_long_prompt_is_read_in_chunks_beside_a_decoding_request(drive):
    d = drive(max_num_batched_tokens=4, max_num_seqs=2)
    d.add("a", num_prompt=2, max_tokens=4)
    d.add("b", num_prompt=8, max_tokens=1)
    d.run()
    assert d.table() == [
        "1: 0@[0,2)* 1@[0,2)",
        "2: 0@[2,3)* 1@[2,5)",
        "3: 0@[3,4)* 1@[5,8)*",
        "4: 0@[4,5)* end 1",
        "5: end 0",
    ]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 11, 64])
def test_every_chunk_size_computes_each_token_once(drive, chunk):
    d = drive(max_num_batched_tokens=chunk, max_num_seqs=1)
    d.add("a", num_prompt=11, max_tokens=5)
    d.run()
    assert d.outputs["a"] == d.expected(0, 11, 5)
    assert d.scheduler.counters.num_computed_tokens == 11 + 4
    assert all(p.num_tokens <= chunk for p in d.plans)


def test_latest_arrival_gives_way_whole_and_computes_all_its_tokens_again(drive):
    """20 blocks of one slot: both fit until "a" holds 11 and "b" 9 of them, when "a" needs one more."""
    d = drive(num_blocks=20, block_size=1, max_num_batched_tokens=64)
    d.add("a", num_prompt=2, max_tokens=12)
    b = d.add("b", num_prompt=1, max_tokens=12)
    d.run()
    assert d.table() == [
        "1: 0@[0,2)* 1@[0,1)*",
        *(f"{i}: 0@[{i},{i + 1})* 1@[{i - 1},{i})*" for i in range(2, 10)),
        "10: 0@[10,11)* preempt 1",
        "11: 0@[11,12)*",
        "12: 0@[12,13)*",
        "13: 1@[0,10)* end 0",
        "14: 1@[10,11)*",
        "15: 1@[11,12)*",
        "16: end 1",
    ]
    assert d.outputs == {"a": d.expected(0, 2, 12), "b": d.expected(1, 1, 12)}
    assert b.num_preemptions == 1
    assert d.scheduler.counters.num_recomputed_tokens == 9


def test_admission_leaves_headroom_for_those_who_run(drive):
    d = drive(num_blocks=6, block_size=4, max_num_batched_tokens=32)
    d.add("a", num_prompt=6, max_tokens=8)
    d.step()
    b = d.add("b", num_prompt=1, max_tokens=6)
    d.step()
    assert b.status is RequestStatus.WAITING  # 1 block + 4 of headroom for "a" is more than the 4 free
    d.run()
    assert d.scheduler.counters.num_preemptions == 0


def test_pool_so_small_that_all_are_preempted_gives_the_same_tokens(drive):
    d = drive(num_blocks=24, block_size=1, max_num_batched_tokens=64, max_num_seqs=8)
    for i in range(6):
        d.add(f"r{i}", num_prompt=1 + i % 2, max_tokens=20)
    d.run()
    for i in range(6):
        assert d.outputs[f"r{i}"] == d.expected(i, 1 + i % 2, 20)
    assert d.scheduler.counters.num_preemptions > 0
    assert d.scheduler.counters.num_recomputed_tokens > 0


def test_nothing_is_admitted_in_a_step_that_preempted(drive):
    d = drive(num_blocks=24, block_size=1, max_num_batched_tokens=64)
    for i in range(6):
        d.add(f"r{i}", num_prompt=1, max_tokens=20)
    seen = 0
    while d.scheduler.has_work:
        plan = d.step()
        if plan.preempted:
            seen += 1
            assert d.scheduler.admitted_requests == []
            assert not set(plan.seq_ids) & set(plan.preempted)
    assert seen > 0


def test_start_order_is_arrival_order_under_pressure(drive):
    d = drive(num_blocks=24, block_size=1, max_num_batched_tokens=64)
    for i in range(8):
        d.add(f"r{i}", num_prompt=2, max_tokens=12)
    started: list[str] = []
    while d.scheduler.has_work:
        d.step()
        started += [r for r in d.scheduler.admitted_requests if r not in started]
    assert started == [f"r{i}" for i in range(8)]


def test_long_head_of_the_queue_is_not_overtaken(drive):
    d = drive(num_blocks=10, block_size=4)
    d.add("a", num_prompt=20, max_tokens=8)
    d.step()
    d.add("long", num_prompt=24, max_tokens=1)
    d.add("short", num_prompt=1, max_tokens=1)
    d.step()
    assert [r.request_id for r in d.scheduler.waiting] == ["long", "short"]
    d.run()
    assert d.reasons == {"a": "length", "long": "length", "short": "length"}


def test_admission_counts_what_a_half_read_prompt_was_promised(drive):
    """A5: the second long prompt must wait until the first one's whole prompt is paid for."""
    d = drive(num_blocks=8, block_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    d.add("a", num_prompt=24, max_tokens=2)
    d.add("b", num_prompt=12, max_tokens=2)
    d.run()
    assert d.scheduler.counters.num_preemptions == 0
    assert d.scheduler.counters.num_computed_tokens == 24 + 1 + 12 + 1


@pytest.mark.parametrize("num_prompt", [15, 16])
def test_prompt_that_just_fits_the_pool_is_served(drive, num_prompt):
    """A1: N*B - 1 and N*B tokens run; the short one behind them is not held up."""
    d = drive(num_blocks=4, block_size=4)
    d.add("long", num_prompt=num_prompt, max_tokens=1)
    d.add("short", num_prompt=1, max_tokens=1)
    d.run(max_steps=10)
    assert d.outputs == {"long": [num_prompt], "short": [101]}


def test_prompt_larger_than_the_pool_is_refused_on_arrival(drive):
    d = drive(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthError, match=r"prompt of 17 tokens needs 5 KV-cache blocks.*has 4"):
        d.add("long", num_prompt=17)
    assert not d.scheduler.has_work


@pytest.mark.parametrize("num_prompt", [63, 64, 65])
def test_prompt_must_leave_room_for_one_token(drive, num_prompt):
    d = drive(num_blocks=64, block_size=4, max_model_len=64, max_num_batched_tokens=64)
    if num_prompt < 64:
        d.add("a", num_prompt, max_tokens=9)
        d.run()
        assert d.outputs["a"] == [63]
        assert d.reasons["a"] == "length"
    else:
        with pytest.raises(ContextLengthError, match=f"prompt has {num_prompt} tokens; the context holds 64"):
            d.add("a", num_prompt)


def test_answer_that_outgrows_the_pool_ends_with_length(drive):
    """A2: alone in a pool of 16 slots, a prompt of 8 asking for 64 tokens stops after 9, without preemption."""
    d = drive(num_blocks=4, block_size=4)
    d.add("a", num_prompt=8, max_tokens=64)
    d.run(max_steps=12)
    assert d.outputs["a"] == d.expected(0, 8, 9)
    assert d.reasons["a"] == "length"
    assert d.scheduler.counters.num_preemptions == 0


def test_engine_serves_the_next_request_after_one_outgrew_the_pool(drive):
    """A3."""
    d = drive(num_blocks=4, block_size=4)
    d.add("a", num_prompt=8, max_tokens=64)
    d.add("b", num_prompt=8, max_tokens=2)
    d.run(max_steps=30)
    assert d.outputs["b"] == d.expected(1, 8, 2)


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_abort_frees_blocks_at_once_wherever_the_request_is(drive, steps_before):
    d = drive(max_num_batched_tokens=4, max_num_seqs=2)
    d.add("a", num_prompt=10, max_tokens=8)
    for _ in range(steps_before):
        d.step()
    assert d.abort("a") is True
    assert d.manager.pool.num_used == 0
    assert d.abort("a") is False
    d.run()


def test_abort_of_a_preempted_request(drive):
    d = drive(num_blocks=24, block_size=1, max_num_batched_tokens=64)
    for i in range(6):
        d.add(f"r{i}", num_prompt=1, max_tokens=20)
    while not d.scheduler.preemptions:
        d.step()
    victim = d.scheduler.preemptions[0].request_id
    assert d.scheduler.request(victim).status is RequestStatus.PREEMPTED
    d.abort(victim)
    d.run()
    assert victim not in d.reasons  # the one who aborted knows
    assert len(d.reasons) == 5


def test_max_num_seqs_bounds_who_runs(drive):
    d = drive(max_num_seqs=2, num_blocks=64)
    for i in range(5):
        d.add(f"r{i}", num_prompt=2, max_tokens=3)
    while d.scheduler.has_work:
        assert len(d.step().seq_ids) <= 2


def test_a_sequence_whose_row_is_broken_ends_alone(drive):
    d = drive()
    d.add("a", num_prompt=2, max_tokens=3)
    d.add("b", num_prompt=2, max_tokens=3)
    d.step(fail=frozenset({"a"}))
    d.run()
    assert d.reasons == {"a": "error", "b": "length"}
    assert d.errors == {"a": "broken"}
    assert d.outputs["b"] == d.expected(1, 2, 3)


def test_failed_step_ends_its_sequences_and_keeps_the_waiting(drive):
    d = drive(max_num_seqs=1)
    d.add("a", num_prompt=2)
    d.add("b", num_prompt=2)
    plan = d.scheduler.step(0.0)
    outputs = d.scheduler.fail(plan, "boom")
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [("a", "error", "boom")]
    d.run()
    assert d.outputs["b"] == d.expected(1, 2, 4)


def test_stop_token_ends_a_sequence(drive):
    d = drive()
    d.add("a", num_prompt=3, max_tokens=10, stop_token_ids=(5,))
    d.run()
    assert d.outputs["a"] == [3, 4, 5]
    assert d.reasons["a"] == "stop"


def test_counters_count(drive):
    d = drive()
    d.add("a", num_prompt=5, max_tokens=3)
    d.run()
    c = d.scheduler.counters
    assert (c.num_prompt_tokens, c.num_generated_tokens, c.num_computed_tokens) == (5, 3, 7)


def test_budget_smaller_than_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(4\) must be at least max_num_seqs \(8\)"):
        SchedulerConfig(4, 8, 64)
