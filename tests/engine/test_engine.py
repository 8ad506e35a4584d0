"""Requests in, tokens out, on the counting model; every step is followed by invariants.check (debug)."""

from __future__ import annotations

import random

import pytest

from octavo.core import invariants
from octavo.core.sampling_params import SamplingParams
from octavo.engine.messages import GenerateRequest
from octavo.errors import ContextLengthError, RequestError


def count(first: int, num: int) -> list[int]:
    return list(range(first, first + num))


def test_step_returns_the_tokens_of_the_step(make_rig):
    rig = make_rig()
    rig.add("a", 10, 3, max_tokens=2)
    first = rig.step()
    assert [(d.request_id, d.token_ids, d.finish_reason) for d in first.deltas] == [("a", (13,), None)]
    second = rig.step()
    assert [(d.request_id, d.token_ids, d.finish_reason) for d in second.deltas] == [("a", (14,), "length")]


def test_stats_of_a_step(make_rig):
    rig = make_rig()
    rig.add("a", 10, 6, max_tokens=4)
    stats = rig.step().stats
    assert (stats.requests_running, stats.requests_waiting) == (1, 0)
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_free) == (32, 2, 30)
    assert stats.slots_filled == 6
    assert (stats.prompt_tokens_total, stats.generated_tokens_total, stats.computed_tokens_total) == (6, 1, 6)
    assert len(stats.ttft_s) == 1
    assert len(stats.queue_s) == 1


def test_idle_engine_holds_nothing(make_rig):
    rig = make_rig()
    for i in range(5):
        rig.add(f"r{i}", 50 * i, 3 + i, max_tokens=4)
    rig.run()
    invariants.check_idle(rig.manager)
    assert rig.executor.num_sequences == 0
    assert rig.engine.scheduler.num_running_seqs == 0


def test_end_of_sequence_token_ends_a_request_and_is_named(make_rig):
    rig = make_rig()
    rig.add("a", 4092, 2, max_tokens=10)
    rig.step()
    delta = rig.step().deltas[0]
    assert (delta.token_ids, delta.finish_reason, delta.stop_token_id) == ((4095,), "stop", 4095)


def test_ignore_eos_goes_on(make_rig):
    rig = make_rig()
    rig.add("a", 4092, 2, max_tokens=2, ignore_eos=True)
    rig.run()
    assert (rig.tokens["a"], rig.reasons["a"]) == ([4094, 4095], "length")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([-1], {}, "token id -1 is outside the vocabulary"),
        ([4096], {}, "token id 4096 is outside the vocabulary, 0 to 4095"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"stop_token_ids": (5000,)}, "stop_token_ids"),
        ([1], {"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ([1], {"logprobs": 25}, "logprobs"),
    ],
)
def test_wrong_request_is_refused_and_leaves_nothing_behind(make_rig, prompt, params, message):
    rig = make_rig()
    with pytest.raises(RequestError, match=message):
        rig.engine.add_request(GenerateRequest("a", prompt, SamplingParams(**params)))
    assert not rig.engine.has_work
    assert rig.executor.num_sequences == 0
    rig.add("a", 1, 2, max_tokens=1)
    rig.run()
    assert rig.tokens["a"] == [3]


def test_prompt_that_can_never_fit_is_refused_and_leaves_nothing_behind(make_rig):
    rig = make_rig(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthError, match="needs 5 KV-cache blocks"):
        rig.add("a", 0, 17, max_tokens=1)
    assert rig.executor.num_sequences == 0


def test_request_id_in_use_is_refused(make_rig):
    rig = make_rig()
    rig.add("a", 1, 2, max_tokens=3)
    with pytest.raises(RequestError, match="'a' is in use"):
        rig.engine.add_request(GenerateRequest("a", [1], SamplingParams()))
    rig.run()
    assert rig.tokens["a"] == [3, 4, 5]


def test_step_that_raises_ends_its_requests_and_spares_the_waiting(make_rig, capfd):
    rig = make_rig(max_num_seqs=2)
    rig.runner.fail_on = 12
    rig.add("a", 10, 3, max_tokens=5)
    rig.add("b", 50, 3, max_tokens=5)
    rig.add("c", 90, 3, max_tokens=5)
    rig.run()
    assert rig.reasons == {"a": "error", "b": "error", "c": "length"}
    assert rig.errors["a"] == "the step failed: RuntimeError: token 12 is poison"
    assert rig.tokens["c"] == count(93, 5)
    assert "RuntimeError: token 12 is poison" in capfd.readouterr().err
    invariants.check_idle(rig.manager)


def test_row_of_nan_ends_that_request_alone(make_rig):
    rig = make_rig()
    rig.runner.nan_on = 13
    rig.add("a", 10, 3, max_tokens=5)
    rig.add("b", 50, 3, max_tokens=5)
    rig.run()
    assert rig.reasons == {"a": "error", "b": "length"}
    assert "not finite" in rig.errors["a"]
    assert rig.tokens["b"] == count(53, 5)


def test_logprobs_come_with_each_token(make_rig):
    rig = make_rig()
    rig.add("a", 10, 3, max_tokens=2, logprobs=1)
    delta = rig.step().deltas[0]
    assert [(p.token_id, p.rank, p.top[0][0]) for p in delta.logprobs] == [(13, 1, 13)]
    assert delta.logprobs[0].logprob == pytest.approx(10 - 10.1698, abs=1e-3)


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_prompt_logprobs_are_complete_whatever_the_chunks(make_rig, budget):
    rig = make_rig(max_num_batched_tokens=budget, max_num_seqs=1)
    rig.add("a", 10, 8, max_tokens=2, prompt_logprobs=0)
    found = []
    while rig.engine.has_work:
        found += [d.prompt_logprobs for d in rig.step().deltas]
    assert found[1:] == [None]
    assert [p.token_id for p in found[0]] == count(11, 7)
    assert all(p.rank == 1 for p in found[0])


def test_preempted_requests_end_with_the_same_tokens(make_rig):
    rig = make_rig(num_blocks=40, block_size=1, max_num_batched_tokens=64)
    for i in range(6):
        rig.add(f"r{i}", 100 * i, 2 + i % 3, max_tokens=25)
    rig.run()
    assert rig.engine.scheduler.counters.num_preemptions > 0
    for i in range(6):
        assert rig.tokens[f"r{i}"] == count(100 * i + 2 + i % 3, 25)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_five_hundred_requests_a_third_cancelled(make_rig, block_size):
    rng = random.Random(block_size)
    rig = make_rig(num_blocks=-(-160 // block_size), block_size=block_size, max_num_batched_tokens=48)
    cancelled = set()
    lengths = {}
    for i in range(500):
        name = f"r{i}"
        lengths[name] = (rng.randrange(3000), rng.randint(1, 60), rng.randint(1, 40))
        rig.add(name, *lengths[name])
        for _ in range(rng.randrange(4)):
            if rig.engine.has_work:
                rig.step()
        if rng.random() < 1 / 3:
            victim = f"r{rng.randint(0, i)}"
            if rig.engine.abort(victim):
                cancelled.add(victim)
    rig.run(max_steps=50_000)
    assert len(cancelled) > 50
    for name, (first, num_prompt, max_tokens) in lengths.items():
        got = rig.tokens[name]
        assert got == count(first + num_prompt, len(got))
        assert (name in cancelled) != (len(got) == max_tokens and rig.reasons[name] == "length")
    invariants.check_idle(rig.manager)
    assert rig.executor.num_sequences == 0
    assert rig.engine.observer._events.num_requests == 0
