from __future__ import annotations

import logging

import pytest


def test_preemption_is_logged_with_what_was_chosen_and_why_once_a_second(make_rig, caplog):
    caplog.set_level(logging.INFO, "octavo.engine.observe")
    rig = make_rig(num_blocks=40, block_size=1, max_num_batched_tokens=64)
    for i in range(6):
        rig.add(f"r{i}", 100 * i, 2, max_tokens=25)
    rig.run()
    assert rig.engine.scheduler.counters.num_preemptions > 1
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("preempted r")
    assert ": recompute, --preemption-mode recompute" in lines[0]


def test_stats_are_due_when_requests_come_and_go_and_else_after_a_while(make_rig, monkeypatch):
    monkeypatch.setattr("octavo.engine.observe.STATS_EVERY_S", 1e9)
    rig = make_rig()
    rig.add("a", 10, 3, max_tokens=6)
    seen = [rig.step().stats for _ in range(3)]
    rig.add("b", 50, 3, max_tokens=2)
    seen += [rig.step().stats for _ in range(4)]
    # the first step admits a, the fourth b, the fifth ends b, the sixth a, the last leaves nothing to do
    assert [stats is not None for stats in seen] == [True, False, False, True, True, True, True]
    assert not rig.engine.has_work
    made = [stats for stats in seen if stats is not None]
    assert [stats.steps_total for stats in made] == [1, 4, 5, 6, 7]
    assert [len(stats.step_s) for stats in made] == [1, 3, 1, 1, 1]
    assert [len(stats.ttft_s) for stats in made] == [1, 1, 0, 0, 0]
    assert [len(stats.inter_token_s) for stats in made] == [0, 3, 2, 1, 0]
    assert [stats.finished for stats in made] == [{}, {}, {"length": 1}, {"length": 1}, {}]
    assert all(0 < stats.schedule_s < sum(stats.step_s) for stats in made)


def test_stats_are_due_after_the_last_abort_and_after_a_preemption(make_rig, monkeypatch):
    monkeypatch.setattr("octavo.engine.observe.STATS_EVERY_S", 1e9)
    rig = make_rig()
    rig.add("a", 10, 3, max_tokens=60)
    rig.step()
    assert rig.step().stats is None
    rig.engine.scheduler.preempt("a")
    preempted = rig.step().stats
    assert preempted is not None and preempted.requests_running == 0
    rig.step()
    assert rig.step().stats is None
    rig.engine.abort("a")
    last = rig.step().stats
    assert last is not None and (last.blocks_used, last.finished) == (0, {"abort": 1})


def test_stats_are_due_after_a_while(make_rig):
    rig = make_rig()
    rig.add("a", 10, 3, max_tokens=60)
    rig.step()
    rig.step()
    rig.engine.observer.snapshot()
    observer = rig.engine.observer
    started = observer._last_stats_s
    assert observer.observe([], started, started, started + 0.049) is None
    stats = observer.observe([], started + 0.01, started + 0.02, started + 0.05)
    assert stats is not None
    assert stats.step_s == pytest.approx([0.049, 0.04])
    assert stats.schedule_s == pytest.approx(0.01)
