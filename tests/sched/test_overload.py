"""Overload degrades gently and recovers (A6): twice what the pool holds, then normal load again."""

from __future__ import annotations

import random

import pytest

WINDOW = 600  # steps measured before and after


class Load:
    """Arrivals at a steady rate: `every` steps one request of 10 to 30 tokens in and 20 to 60 out."""

    def __init__(self, d) -> None:
        self.d = d
        self.rng = random.Random(3)
        self.started: list[str] = []
        self.preemptions: dict[str, int] = {}
        self.longest_queue = 0

    def run(self, steps: int, every: int) -> float:
        """Output tokens a step."""
        before = self.d.scheduler.counters.num_generated_tokens
        for step in range(steps):
            if step % every == 0:
                self.d.add(
                    f"r{self.d.num_added}", self.rng.randint(10, 30), max_tokens=self.rng.randint(20, 60)
                )
            self.d.step()
            self.started += [r for r in self.d.scheduler.admitted_requests if r not in self.started]
            for decision in self.d.scheduler.preemptions:
                self.preemptions[decision.request_id] = self.preemptions.get(decision.request_id, 0) + 1
            self.longest_queue = max(self.longest_queue, len(self.d.scheduler.waiting))
        return (self.d.scheduler.counters.num_generated_tokens - before) / steps


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_throughput_returns_after_overload(drive, mode, prefix_caching):
    # 400 slots: at one arrival in 14 steps 3 requests run; at one in 4 there would be 10, twice what fits
    d = drive(
        num_blocks=100,
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=32,
        max_model_len=128,
        num_swap_blocks=200,
        preemption_mode=mode,
        prefix_caching=prefix_caching,
    )
    load = Load(d)
    load.run(200, every=14)
    before = load.run(WINDOW, every=14)
    load.run(WINDOW, every=4)
    assert load.longest_queue > 20, "it was an overload"
    load.run(1200, every=14)  # the queue drains
    assert len(d.scheduler.waiting) <= 1
    after = load.run(WINDOW, every=14)
    assert after >= 0.95 * before
    assert load.started == [f"r{i}" for i in range(len(load.started))], "start order is arrival order"
    assert max(load.preemptions.values(), default=0) <= 4
    assert sum(load.preemptions.values()) <= 0.5 * len(load.started)
    d.run()
    for name, number in ((n, int(n[1:])) for n in d.outputs):
        tokens = d.outputs[name]
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens))), number
