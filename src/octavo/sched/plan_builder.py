"""PlanBuilder: a StepPlan in the making."""

from __future__ import annotations

from octavo.core.block import SeqId
from octavo.core.request import Request
from octavo.core.step import CopyBlock, SequenceSlice, StepPlan, SwapBlock
from octavo.sched.records import PreemptionDecision


class PlanBuilder:
    """Collects one step. Also what the scheduler itself must remember of it until apply()."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens  # tokens the step may still take
        self.slices: list[SequenceSlice] = []
        self.copies: list[CopyBlock] = []
        self.swap_out: list[SwapBlock] = []
        self.swap_in: list[SwapBlock] = []
        self.preempted: list[SeqId] = []
        self.swapped_out: list[Request] = []
        self.swapped_in: list[Request] = []
        self.admitted: list[str] = []  # request ids, new or resumed
        self.decisions: list[PreemptionDecision] = []

    def take(self, wanted: int) -> int:
        """As many of `wanted` tokens as are left."""
        return min(wanted, self.num_left)

    def build(self, step: int, finished: list[SeqId]) -> StepPlan:
        return StepPlan(
            step=step,
            slices=tuple(self.slices),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            preempted=tuple(self.preempted),
            finished=tuple(finished),
        )
