"""EngineObserver: what steps did, as StepStats. Reads the scheduler, changes nothing.

Stats are due after a step in which a request was admitted, preempted or ended, or after which nothing is left to
do, and else every STATS_EVERY_S: they take the same time to make, send and read at a step of 3 ms as at one of 100.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic

from octavo.core.delta import FinishReason, TokenDelta
from octavo.engine.messages import GenerateRequest, StepStats
from octavo.metrics.collect import StepObserver
from octavo.sched.records import PreemptionDecision
from octavo.sched.scheduler import Scheduler

STATS_EVERY_S = 0.05
LOG_EVERY_S = 1.0  # at most one line in this time, however many are preempted

logger = logging.getLogger(__name__)


class _PreemptionLog:
    """What was done with a victim and why, one line a second at most."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._num_silent = 0

    def write(self, decision: PreemptionDecision, now: float) -> None:
        if now < self._next_s:
            self._num_silent += 1
            return
        more = f" ({self._num_silent} more since the last line)" if self._num_silent else ""
        logger.info("preempted %s: %s, %s%s", decision.request_id, decision.mode, decision.reason, more)
        self._next_s, self._num_silent = now + LOG_EVERY_S, 0


class EngineObserver:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._events = StepObserver()
        self._unfinished: dict[str, int] = {}  # request id -> choices that still run
        self._num_steps = 0
        self._step_s: list[float] = []  # here and below: since the last stats
        self._schedule_s = 0.0
        self._last_stats_s = 0.0  # when they were made
        self._log = _PreemptionLog()

    def on_arrival(self, request: GenerateRequest) -> None:
        self._events.on_arrival(request.request_id, request.arrival_s or monotonic())
        params = request.params
        is_beam = params.beam_width is not None
        self._unfinished[request.request_id] = params.n if is_beam else params.num_sequences

    def on_abort(self, request_id: str) -> None:
        if self._unfinished.pop(request_id, None) is not None:
            self._events.on_finished(request_id, "abort", monotonic())

    def on_choice_ended(self, request_id: str, reason: FinishReason) -> None:
        """One choice was ended from outside."""
        self._count_end(request_id, reason, monotonic())

    def observe(
        self, outputs: Sequence[TokenDelta], started: float, planned: float, ended: float
    ) -> StepStats | None:
        """A step was planned in [started, planned) and ended at `ended`, in seconds. The state after it, if due."""
        scheduler = self._scheduler
        is_due = not scheduler.has_work or ended - self._last_stats_s >= STATS_EVERY_S
        for request_id in scheduler.admitted_requests:
            self._events.on_scheduled(request_id, started)
            is_due = True
        for decision in scheduler.preemptions:
            self._events.on_preempted(decision.request_id, started)
            self._log.write(decision, started)
            is_due = True
        self._events.on_tokens(outputs, ended)
        for output in outputs:
            if output.finish_reason is not None:
                self._count_end(output.request_id, output.finish_reason, ended)
                is_due = True
        self._num_steps += 1
        self._step_s.append(ended - started)
        self._schedule_s += planned - started
        if not is_due:
            return None
        self._last_stats_s = ended
        return self.snapshot()

    def snapshot(self) -> StepStats:
        """The state now, also between steps."""
        step_s, self._step_s = self._step_s, []
        schedule_s, self._schedule_s = self._schedule_s, 0.0
        cache = self._scheduler.allocator.stats()
        counters = self._scheduler.counters
        intervals = self._events.drain()
        return StepStats(
            requests_running=len(self._scheduler.running),
            requests_waiting=len(self._scheduler.waiting),
            blocks_total=cache.num_blocks_total,
            blocks_used=cache.num_blocks_used,
            blocks_free=cache.num_blocks_free,
            block_size=cache.block_size,
            slots_filled=cache.num_slots_filled,
            requests_swapped=self._scheduler.num_swapped,
            blocks_cached=cache.num_blocks_cached,
            blocks_shared=cache.num_blocks_shared,
            blocks_saved=cache.num_blocks_saved,
            swap_blocks_total=self._scheduler.swap.num_blocks if self._scheduler.swap is not None else 0,
            swap_blocks_used=self._scheduler.swap.num_used if self._scheduler.swap is not None else 0,
            preemptions_total={
                "recompute": counters.num_preemptions_recompute,
                "swap": counters.num_preemptions_swap,
            },
            blocks_swapped_out_total=counters.num_blocks_swapped_out,
            blocks_swapped_in_total=counters.num_blocks_swapped_in,
            blocks_copied_total=counters.num_blocks_copied,
            prompt_tokens_cached_total=counters.num_prompt_tokens_cached,
            recomputed_tokens_total=counters.num_recomputed_tokens,
            prompt_tokens_total=counters.num_prompt_tokens,
            generated_tokens_total=counters.num_generated_tokens,
            computed_tokens_total=counters.num_computed_tokens,
            steps_total=self._num_steps,
            step_s=step_s,
            schedule_s=schedule_s,
            ttft_s=intervals.ttft_s,
            inter_token_s=intervals.inter_token_s,
            request_s=intervals.request_s,
            queue_s=intervals.queue_s,
            finished=intervals.finished,
        )

    def _count_end(self, request_id: str, reason: FinishReason, now: float) -> None:
        """One choice less; with the last the request ends, for the reason that this one did."""
        self._unfinished[request_id] -= 1
        if not self._unfinished[request_id]:
            del self._unfinished[request_id]
            self._events.on_finished(request_id, reason, now)
