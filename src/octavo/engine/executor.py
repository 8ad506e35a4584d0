"""Executor: carries out a StepPlan on a compiled model: copy blocks, run the rows, draw tokens.

It decides nothing. It keeps what the machine side must remember about a sequence: its row in the block
table (InputBuilder) and its sampling state; both are dropped when the plan says that it ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.ops import F32, Limits, Runner, StepInputs
from octavo.core.block import SeqId
from octavo.core.request import Request
from octavo.core.step import CopyBlock, Sample, SequenceSlice, StepPlan, StepResult, TokenLogprobs
from octavo.engine.inputs import InputBuilder
from octavo.sampling.sampler import SampleError, Sampler, SampleState


@dataclass(slots=True)
class _Drawn:
    """One sequence as the sampler sees it."""

    state: SampleState
    prompt: list[int]
    output: list[int]  # the sampler's live list, appended here


class Executor:
    """`run(plan)` is the machine's half of a step."""

    def __init__(self, runner: Runner, sampler: Sampler, limits: Limits, num_groups: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._inputs = InputBuilder(limits, num_groups)
        self._max_logit_rows = limits.max_logit_rows
        self._sequences: dict[SeqId, _Drawn] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences it remembers; 0 when the engine is idle."""
        return len(self._sequences)

    def register(self, request: Request) -> None:
        """Make the sampling states of a new request."""
        for seq in request.sequences:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            output: list[int] = []
            state = self._sampler.new_state(
                seq.seq_id, request.params, prompt, output, request.eos_token_ids, seq.index
            )
            self._sequences[seq.seq_id] = _Drawn(state, prompt, output)

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.preempted:
            self._inputs.forget(seq_id)
        for seq_id in plan.finished:
            self._inputs.forget(seq_id)
            self._sequences.pop(seq_id, None)
        if plan.copies:
            self._copy(plan.copies)
        if not plan.slices:
            return StepResult(plan.step, ())
        inputs = self._inputs.build(plan)
        self._runner.forward(inputs)
        samples, failed = self._sample(plan, inputs)
        return StepResult(plan.step, samples, self._prompt_logprobs(plan, inputs), failed)

    def _copy(self, copies: tuple[CopyBlock, ...]) -> None:
        src = np.array([c.src for c in copies], np.int32)
        dst = np.array([c.dst for c in copies], np.int32)
        self._runner.copy_blocks(src, dst)

    def _sample(self, plan: StepPlan, inputs: StepInputs) -> tuple[tuple[Sample, ...], dict[SeqId, str]]:
        chosen = [s for s, piece in enumerate(plan.slices) if piece.needs_sample]
        rows = inputs.query_starts[1:][chosen] - 1  # [R] the last row of each slice
        samples: list[Sample] = []
        failed: dict[SeqId, str] = {}
        for first in range(0, len(chosen), self._max_logit_rows):
            part = chosen[first : first + self._max_logit_rows]
            logits = self._runner.logits(np.ascontiguousarray(rows[first : first + len(part)]))  # [R, V]
            drawn = [self._sequences[plan.slices[s].seq_id] for s in part]
            for it, result in zip(drawn, self._sampler.sample([d.state for d in drawn], logits), strict=True):
                if isinstance(result, SampleError):
                    failed[result.seq_id] = result.message
                else:
                    samples.append(result)
                    it.output.append(result.token_id)
        return tuple(samples), failed

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs) -> dict[SeqId, tuple[TokenLogprobs, ...]]:
        found = {}
        for piece, first_row in zip(plan.slices, inputs.query_starts, strict=False):
            if piece.prompt_logprobs:
                found[piece.seq_id] = self._logprobs_of(piece, int(first_row))
        return found

    def _logprobs_of(self, piece: SequenceSlice, first_row: int) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow the slice's rows."""
        drawn = self._sequences[piece.seq_id]
        following = drawn.prompt[piece.start + 1 : piece.end + 1]
        logprobs: list[TokenLogprobs] = []
        for first in range(0, len(following), self._max_logit_rows):
            part = following[first : first + self._max_logit_rows]
            rows = np.arange(first_row + first, first_row + first + len(part), dtype=np.int32)
            logits: F32 = self._runner.logits(rows)  # [R, V]
            k = drawn.state.params.prompt_logprobs or 0
            logprobs += self._sampler.prompt_logprobs(logits, part, k)
        return tuple(logprobs)
