"""PriceMeter: what moving a block and computing a token cost on this machine, measured as the engine runs.

A running mean over recent measurements, so that it follows the load. `--preemption-mode auto` compares them.
"""

from __future__ import annotations

from octavo.core.step import StepPlan
from octavo.sched.preempt import PreemptionPrices

WEIGHT = 0.2  # of the newest measurement
MIN_TOKENS = 16  # a step of fewer tokens says what a step costs, not what a token costs


class PriceMeter:
    def __init__(self) -> None:
        self._swap_block_s: float | None = None
        self._compute_token_s: float | None = None

    def on_swap(self, num_blocks: int, seconds: float) -> None:
        """`num_blocks` moved one way in `seconds`."""
        if num_blocks:
            self._swap_block_s = _mean(self._swap_block_s, seconds / num_blocks)

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        """A step over the plan took `seconds`, logits of the rows that draw included. Decoding rows are cheaper by
        the token together with a prompt than alone, so only steps that are mostly prompt count."""
        if plan.num_tokens - len(plan.seq_ids) + 1 < MIN_TOKENS:  # none can be that long
            return
        longest = max(plan.lengths, default=0)
        if longest >= MIN_TOKENS and longest >= plan.num_tokens // 2:
            self._compute_token_s = _mean(self._compute_token_s, seconds / plan.num_tokens)

    @property
    def prices(self) -> PreemptionPrices:
        return PreemptionPrices(self._swap_block_s, self._compute_token_s)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
