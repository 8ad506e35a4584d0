"""PlanBuilder: a StepPlan in the making."""

from __future__ import annotations

from octavo.core.allocator import Growth
from octavo.core.block import SeqId
from octavo.core.request import Request, Sequence
from octavo.core.step import CopyBlock, StepPlan, SwapBlock, TableWrite
from octavo.sched.records import PreemptionDecision


class PlanBuilder:
    """Collects one step. Also what the scheduler itself must remember of it until apply()."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens  # tokens the step may still take
        self.seq_ids: list[SeqId] = []  # from here to `copies` as in StepPlan
        self.ends: list[int] = []
        self.lengths: list[int] = []
        self.token_ids: list[int] = []
        self.drawing: list[SeqId] = []
        self.num_draws: list[int] = []
        self.candidates: list[tuple[int, int]] = []
        self.prompt_logprobs: list[int] = []
        self.table_writes: list[TableWrite] = []
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

    def add_slice(self, seq: Sequence, end: int, drawing: tuple[SeqId, ...], growth: Growth) -> int:
        """What `seq` has from where it is up to `end`. Returns the number of the slice."""
        start = seq.num_computed_tokens
        self.seq_ids.append(seq.seq_id)
        self.ends.append(end)
        self.lengths.append(end - start)
        self.token_ids += seq.token_ids[start:end]
        self.drawing += drawing
        self.num_draws.append(len(drawing))
        self._add_growth(growth)
        return len(self.seq_ids) - 1

    def add_last_tokens(
        self, seq_ids: list[SeqId], ends: list[int], token_ids: list[int], growth: Growth
    ) -> None:
        """For each sequence the one token before `end`, after which it draws the next."""
        ones = [1] * len(seq_ids)
        self.num_left -= len(seq_ids)
        self.seq_ids += seq_ids
        self.ends += ends
        self.lengths += ones
        self.token_ids += token_ids
        self.drawing += seq_ids
        self.num_draws += ones
        self._add_growth(growth)

    def build(self, step: int, finished: list[SeqId]) -> StepPlan:
        return StepPlan(
            step=step,
            seq_ids=tuple(self.seq_ids),
            ends=tuple(self.ends),
            lengths=tuple(self.lengths),
            token_ids=tuple(self.token_ids),
            drawing=tuple(self.drawing),
            num_draws=tuple(self.num_draws),
            candidates=tuple(self.candidates),
            prompt_logprobs=tuple(self.prompt_logprobs),
            table_writes=tuple(self.table_writes),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            preempted=tuple(self.preempted),
            finished=tuple(finished),
        )

    def _add_growth(self, growth: Growth) -> None:
        self.table_writes += growth.table_writes
        self.copies += growth.copies
