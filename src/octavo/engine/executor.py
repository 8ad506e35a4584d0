"""Executor: carries out a StepPlan on a compiled model: copy blocks, run the rows, draw tokens.

It decides nothing. It keeps what the machine side must remember about a sequence: its row in the block
table (InputBuilder) and its sampling state; both are dropped when the plan says that it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Literal

import numpy as np

from octavo.backends.ops import F32, I32, Limits, Runner, StepInputs
from octavo.core.block import SeqId
from octavo.core.delta import TokenLogprobs
from octavo.core.request import Request
from octavo.core.step import CopyBlock, StepPlan, StepResult
from octavo.engine.best_of import needs_selection
from octavo.engine.inputs import InputBuilder
from octavo.engine.prices import PriceMeter
from octavo.engine.swap_store import SwapStore
from octavo.sampling.sampler import Candidates, Draws, Sampler, SampleState

logger = logging.getLogger(__name__)


class Executor:
    """`run(plan)` is the machine's half of a step."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        limits: Limits,
        num_groups: int,
        swap_store: SwapStore | None = None,
    ) -> None:
        self._runner = runner
        self._swap_store = swap_store
        self.prices = PriceMeter()
        self._sampler = sampler
        self._inputs = InputBuilder(limits, num_groups)
        self._max_logit_rows = limits.max_logit_rows
        self._states: dict[SeqId, SampleState] = {}

    def measure_swap(self, num_blocks: int) -> None:
        """Move a few idle blocks out and back, so that the price of swapping is known before the first
        preemption. Only before any request has run."""
        if self._swap_store is None:
            return
        started = monotonic()
        try:
            for _ in range(2):  # the first time also takes the memory from the system
                started = monotonic()
                for block_id in range(num_blocks):
                    self._swap_store.write(block_id, self._runner.read_block(block_id))
                    self._runner.write_block(block_id, self._swap_store.read(block_id))
        except OSError as error:
            logger.warning("swap space failed (%s): preempted requests are recomputed", error)
            return
        self.prices.on_swap(2 * num_blocks, monotonic() - started)

    @property
    def num_sequences(self) -> int:
        """Sequences it remembers; 0 when the engine is idle."""
        return len(self._states)

    def register(self, request: Request) -> None:
        """Make the sampling states of a new request. Its choices share one seed, each with its own index."""
        params = request.params
        if params.seed is None:
            params = replace(params, seed=self._sampler.draw_seed())
        if needs_selection(params) and params.logprobs is None:
            params = replace(params, logprobs=0)
        for seq in request.sequences:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            self._states[seq.seq_id] = self._sampler.new_state(
                seq.seq_id, params, prompt, [], request.eos_token_ids, seq.index
            )

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.preempted:
            self._inputs.forget(seq_id)
        for seq_id in plan.finished:
            self._inputs.forget(seq_id)
            self._states.pop(seq_id, None)
        swap_failure = self._swap(plan)
        if plan.copies:
            self._copy(plan.copies)
        if not plan.seq_ids:
            return StepResult(plan.step, (), swap_failure=swap_failure)
        inputs, drawn_rows = self._inputs.build(plan)
        if swap_failure == "in":
            return StepResult(plan.step, (), swap_failure=swap_failure)
        states = list(map(self._states.__getitem__, plan.drawing))
        started = monotonic()
        first = self._runner.run(inputs, drawn_rows[: self._max_logit_rows])
        self.prices.on_step(plan, monotonic() - started)
        draws = self._sample(states, drawn_rows, first)
        candidates, failed_beams = self._candidates(plan, inputs)
        return StepResult(
            step=plan.step,
            token_ids=draws.token_ids,
            logprobs=draws.logprobs,
            prompt_logprobs=self._prompt_logprobs(plan, inputs),
            candidates=candidates,
            failed=draws.failed | failed_beams,
            swap_failure=swap_failure,
        )

    def take_memory(self) -> bool:
        """See Runner.take_memory."""
        return self._runner.take_memory()

    def fill_block(self, block_id: int, value: float) -> None:
        """Overwrite a free block: debug mode makes stale reads visible so."""
        self._runner.fill_block(block_id, value)

    def _swap(self, plan: StepPlan) -> Literal["out", "in"] | None:
        """Move blocks out, then in. A store that fails is reported, not raised: the engine recomputes."""
        if not (plan.swap_out or plan.swap_in):
            return None
        assert self._swap_store is not None
        started = monotonic()
        failure: Literal["out", "in"] | None = None
        try:
            for move in plan.swap_out:
                self._swap_store.write(move.swap_id, self._runner.read_block(move.block_id))
            failure = "in"
            for move in plan.swap_in:
                self._runner.write_block(move.block_id, self._swap_store.read(move.swap_id))
            failure = None
        except OSError as error:
            failure = failure or "out"
            logger.warning("swap space failed (%s): the requests are recomputed", error)
        self.prices.on_swap(len(plan.swap_out) + len(plan.swap_in), monotonic() - started)
        return failure

    def _copy(self, copies: tuple[CopyBlock, ...]) -> None:
        src = np.array([c.src for c in copies], np.int32)
        dst = np.array([c.dst for c in copies], np.int32)
        self._runner.copy_blocks(src, dst)

    def _sample(self, states: list[SampleState], rows: I32, first: tuple[F32, I32, F32]) -> Draws:
        """A token for each state. `first`: what the runner found of the first rows."""
        draws = self._sampler.sample(states[: self._max_logit_rows], *first)
        for part, logits in self._logits(rows, self._max_logit_rows):
            found = self._sampler.sample(states[part], logits, *self._runner.best(logits))
            draws.token_ids += found.token_ids
            draws.logprobs |= found.logprobs
            draws.failed |= found.failed
        for state, token_id in zip(states, draws.token_ids, strict=True):
            if token_id is not None:
                state.output_token_ids.append(token_id)
        return draws

    def _candidates(
        self, plan: StepPlan, inputs: StepInputs
    ) -> tuple[dict[SeqId, Candidates], dict[SeqId, str]]:
        """The most likely tokens of each live beam."""
        found: dict[SeqId, Candidates] = {}
        failed: dict[SeqId, str] = {}
        if not plan.candidates:
            return found, failed
        last_rows = inputs.query_starts[1:] - 1  # [S]
        for part, logits in self._logits(last_rows[[number for number, _ in plan.candidates]]):
            counts = [count for _, count in plan.candidates[part]]
            _, peaks = self._runner.best(logits)
            lists = self._sampler.candidates(logits, peaks, counts)
            for (number, _), best in zip(plan.candidates[part], lists, strict=True):
                if best is None:
                    failed[plan.seq_ids[number]] = "the model's logits are not finite; check the model file"
                else:
                    found[plan.seq_ids[number]] = best
        return found, failed

    def _logits(self, rows: I32, begin: int = 0) -> Iterator[tuple[slice, F32]]:
        """The logits of `rows` from `begin` on in parts that fit the buffer: which of them, and [R, V]."""
        for first in range(begin, len(rows), self._max_logit_rows):
            part = slice(first, min(first + self._max_logit_rows, len(rows)))
            yield part, self._runner.logits(np.ascontiguousarray(rows[part], np.int32))

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs) -> dict[SeqId, tuple[TokenLogprobs, ...]]:
        """Of the prompt tokens that follow the rows of each slice."""
        found: dict[SeqId, tuple[TokenLogprobs, ...]] = {}
        for number in plan.prompt_logprobs:
            state, end = self._states[plan.seq_ids[number]], plan.ends[number]
            following = state.prompt_token_ids[end - plan.lengths[number] + 1 : end + 1]
            first = inputs.query_starts[number]
            rows = np.arange(first, first + len(following), dtype=np.int32)
            logprobs: list[TokenLogprobs] = []
            for part, logits in self._logits(rows):
                k = state.params.prompt_logprobs or 0
                _, peaks = self._runner.best(logits)
                logprobs += self._sampler.prompt_logprobs(logits, peaks, following[part], k)
            found[plan.seq_ids[number]] = tuple(logprobs)
        return found
