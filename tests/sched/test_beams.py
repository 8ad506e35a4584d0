"""Beam search in the scheduler: width 4 over ten steps with the exact tables, counts and copies."""

from __future__ import annotations

from octavo.core import invariants
from octavo.core.beam import BeamParams, BeamSearch
from octavo.core.block import SeqId
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import StepResult
from octavo.sched.budget import SchedulerConfig
from octavo.sched.scheduler import Scheduler

WIDTH, STEPS = 4, 10

# live beams' blocks after each step, best first | blocks copied because a shared partial one was written
TABLES = [
    "0-1 0-1 0-1 0-1",
    "0-2 0-2 0-3 0-3 | 1>2 1>3 1>4",
    "0-5 0-5 0-2 0-2 | 2>5 3>6",
    "0-5-7 0-5-8 0-2-9 0-2-10",
    "0-5-7 0-5-8 0-2-9 0-2-10",
    "0-5-7 0-5-7 0-5-8 0-5-8",
    "0-5-11 0-5-7 0-5-12 0-5-8 | 7>11 8>12",
    "0-5-11-13 0-5-7-14 0-5-12-15 0-5-8-16",
    "0-5-11-13 0-5-11-13 0-5-7-14 0-5-7-14",
    "0-5-11-17 0-5-11-17 0-5-11-13 0-5-11-13 | 13>17 14>18",
]


def candidates(token_ids: list[int], count: int) -> tuple[tuple[int, float], ...]:
    """A small language: what follows depends on the last token and the position."""
    last, position = token_ids[-1], len(token_ids)
    scored = [(t, -(((7 * t + 3 * last + 5 * position) % 11) + 1) / 4) for t in range(16)]
    return tuple(sorted(scored, key=lambda s: (-s[1], s[0]))[:count])


def run() -> tuple[list[str], Scheduler, KVCacheManager]:
    """One line a step: tables of the live beams, best first, then the copies."""
    manager = KVCacheManager(group_layers([FullAttentionSpec(1, 8)]), 40, 4, prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(64, 8, 64), manager, 4)
    params = SamplingParams(beam_width=WIDTH, max_tokens=STEPS + 2)
    beam = BeamSearch(BeamParams(width=WIDTH, max_tokens=STEPS + 2))
    sequence = Sequence(SeqId(0), 0, [1, 2, 3, 4, 5, 6], 6)
    scheduler.add(Request("a", [sequence], params, beam=beam))
    lines = []
    for _ in range(STEPS):
        plan = scheduler.step(0.0)
        found = {
            plan.seq_ids[s]: candidates(scheduler.sequence(plan.seq_ids[s]).token_ids, count)
            for s, count in plan.candidates
        }
        scheduler.apply(plan, StepResult(plan.step, (), candidates=found), 0.0)
        invariants.check(manager)
        live = scheduler.request("a").live
        tables = " ".join("-".join(map(str, manager.tables[s.seq_id][0].block_ids)) for s in live)
        copies = " ".join(f"{c.src}>{c.dst}" for c in plan.copies)
        lines.append(f"{tables} | {copies}".rstrip(" |"))
    return lines, scheduler, manager


def test_tables_of_four_beams_over_ten_steps():
    lines, _, _ = run()
    assert lines == TABLES


def test_prompt_block_is_held_by_all_and_nothing_else_is_copied_than_partial_blocks():
    lines, _, manager = run()
    assert manager.pool.ref_count(0) == WIDTH
    assert all(line.split("-")[0] == "0" for line in lines)


def test_search_that_is_aborted_frees_everything():
    _, scheduler, manager = run()
    assert scheduler.abort("a")
    invariants.check_idle(manager)


def test_search_with_one_beam_that_cannot_be_ranked_ends_as_a_whole():
    """The other beams' slices come after the failure; applying them once looked for sequences that were gone."""
    _, scheduler, manager = run()
    plan = scheduler.step(0.0)
    assert [s for s, _ in plan.candidates] == list(range(WIDTH))
    found = dict.fromkeys(plan.seq_ids[1:], ((1, -1.0),))
    result = StepResult(plan.step, (), candidates=found, failed={plan.seq_ids[0]: "not finite"})
    (output,) = scheduler.apply(plan, result, 0.0)
    assert (output.choice, output.finish_reason, output.error) == (0, "error", "not finite")
    invariants.check_idle(manager)
