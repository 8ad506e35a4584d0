"""Who gives way when the pool is empty, and how: the latest arrival, whole, and never the oldest.

The oldest running request always advances, so the engine cannot livelock: each step either computes a
token of the oldest or ends it.

    recompute   drop the blocks; the tokens stay known and are computed again (the prefix cache may still
                have some)
    swap        move the blocks to the swap space and back; needs room there, else recompute
    auto        whichever is cheaper for this victim by measured prices
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.request import Request, RequestStatus
from octavo.core.step import SwapBlock
from octavo.sched.book import RequestBook
from octavo.sched.budget import SchedulerConfig
from octavo.sched.groups import set_origins
from octavo.sched.records import PreemptionDecision, PreemptionMode, SchedulerCounters

KEPT_WEIGHT = 0.2  # of the newest resumption in the mean
HEADROOM_TOKENS = 16  # slots a running sequence may claim soon, kept free when somebody is admitted


@dataclass(frozen=True, slots=True)
class PreemptionPrices:
    """Measured by the machine. None: not measured yet."""

    swap_block_s: float | None = None  # one block, one way
    compute_token_s: float | None = None  # one token of a prompt


def choose_victim(running: list[Request]) -> Request | None:
    """The latest arrival, or None when only the oldest is left."""
    return running[-1] if len(running) > 1 else None


def headroom_blocks(num_running_seqs: int, block_size: int) -> int:
    """Blocks to leave free on admission, so that it does not cause a preemption at once (hysteresis)."""
    return num_running_seqs * -(-HEADROOM_TOKENS // block_size)


class Preempter:
    """Takes the blocks of running requests. `prices` may be replaced at any time."""

    def __init__(self, book: RequestBook, config: SchedulerConfig, counters: SchedulerCounters) -> None:
        self._book = book
        self._mode = config.preemption_mode
        self._counters = counters
        self.prices = PreemptionPrices()
        self.kept_ratio = 0.0  # of dropped tokens, how many the prefix cache still had: a running mean

    def preempt(self, request: Request) -> tuple[PreemptionDecision, tuple[SwapBlock, ...]]:
        """Put a running request back into the queue; what has to be moved is the caller's to plan."""
        mode, reason = self._choose(request)
        moves: tuple[SwapBlock, ...] | None = None
        if mode == "swap":
            assert self._book.swap is not None
            moves = self._book.swap.swap_out([s.seq_id for s in request.started])
            if moves is None:
                mode, reason = "recompute", "the swap space is full"
        self._book.running.remove(request)
        if moves is None:
            self.drop(request)
        else:
            request.status = RequestStatus.SWAPPED
            self._counters.num_preemptions_swap += 1
            self._counters.num_blocks_swapped_out += len(moves)
        request.num_preemptions += 1
        self._book.waiting.push(request)
        return PreemptionDecision(request.request_id, mode, reason), moves or ()

    def on_resume(self, request: Request, num_kept: int) -> None:
        """A request that dropped its tokens starts again, with `num_kept` of them found in the cache."""
        if request.num_dropped_tokens:
            found = min(1.0, num_kept / request.num_dropped_tokens)
            self.kept_ratio += KEPT_WEIGHT * (found - self.kept_ratio)

    def drop(self, request: Request) -> None:
        """Let go of all blocks of a request that is in no queue; it will compute its tokens again."""
        request.num_dropped_tokens = _num_distinct_tokens(request)
        for seq in request.started:
            if request.status is RequestStatus.SWAPPED:
                assert self._book.swap is not None
                self._book.swap.drop(seq.seq_id)
            else:
                self._book.allocator.release(seq.seq_id)
            self._counters.num_recomputed_tokens += seq.num_computed_tokens
            seq.num_computed_tokens = 0
            seq.is_started = False
        request.candidates.clear()
        request.status = RequestStatus.PREEMPTED
        self._counters.num_preemptions_recompute += 1
        set_origins(request)

    def _choose(self, request: Request) -> tuple[PreemptionMode, str]:
        swap = self._book.swap
        if self._mode == "recompute" or swap is None or not swap.num_blocks:
            return (
                "recompute",
                "--preemption-mode recompute" if self._mode == "recompute" else "no swap space",
            )
        if self._mode == "swap":
            return "swap", "--preemption-mode swap"
        prices = self.prices
        if prices.swap_block_s is None or prices.compute_token_s is None:
            return "recompute", "no prices measured yet"
        num_blocks = swap.num_distinct([s.seq_id for s in request.started])
        swap_s = 2 * num_blocks * prices.swap_block_s
        num_tokens = _num_distinct_tokens(request) * (1.0 - self.kept_ratio)
        compute_s = num_tokens * prices.compute_token_s
        reason = f"swap {swap_s * 1e3:.2f} ms, recompute {compute_s * 1e3:.2f} ms"
        return ("swap" if swap_s < compute_s else "recompute"), reason


def _num_distinct_tokens(request: Request) -> int:
    """Computed tokens, the common prompt counted once."""
    started = request.started
    shared = min((s.num_prompt_tokens for s in started), default=0)
    return sum(max(0, s.num_computed_tokens - shared) for s in started) + min(
        shared, max((s.num_computed_tokens for s in started), default=0)
    )
