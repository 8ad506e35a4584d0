"""Applier: records what a step computed. Tokens are appended, sequences fork and finish, blocks become free."""

from __future__ import annotations

from itertools import islice

from octavo.core.block import SeqId
from octavo.core.delta import TokenDelta
from octavo.core.finish import finish_reason_for_token
from octavo.core.request import Request, Sequence
from octavo.core.step import StepPlan, StepResult
from octavo.sched.beams import advance_beams
from octavo.sched.book import RequestBook
from octavo.sched.records import SchedulerCounters

_new = tuple.__new__  # a third faster than a NamedTuple's own constructor


class Applier:
    def __init__(self, book: RequestBook, block_size: int, counters: SchedulerCounters) -> None:
        self._book = book
        self._block_size = block_size
        self._counters = counters

    def apply(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """The outputs of the step, those decided while it was planned first."""
        outputs, self._book.ended = self._book.ended, []
        self._advance(plan)
        for number in plan.prompt_logprobs:
            self._keep_prompt_logprobs(plan, number, result)
        if max(plan.num_draws, default=0) > 1:
            self._fork(plan)
        for number, _ in plan.candidates:
            outputs += self._take_candidates(plan.seq_ids[number], result)
        outputs += self._append(plan, result)
        self._counters.num_computed_tokens += plan.num_tokens
        self._counters.num_generated_tokens += len(result.token_ids) - result.token_ids.count(None)
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[TokenDelta]:
        """The step itself went wrong: end the requests that were in it; the waiting lose nothing."""
        outputs, self._book.ended = self._book.ended, []
        for seq_id in plan.seq_ids:
            if seq_id in self._book.sequences:
                outputs += self._fail_request(self._book.sequences[seq_id][0], message)
        return outputs

    def _advance(self, plan: StepPlan) -> None:
        """Keys and values of the slices are in the cache; blocks that are full may be found."""
        sequences, block_size = self._book.sequences, self._block_size
        for seq_id, end, length in zip(plan.seq_ids, plan.ends, plan.lengths, strict=True):
            seq = sequences[seq_id][1]
            seq.num_computed_tokens = end
            if end % block_size < length:  # it filled a block
                self._book.allocator.commit(seq_id, seq.token_ids, end)

    def _fork(self, plan: StepPlan) -> None:
        """The other choices of a prompt start where it ends. Before anything is appended: one of them may end."""
        drawing = iter(plan.drawing)
        for seq_id, count in zip(plan.seq_ids, plan.num_draws, strict=True):
            parent = self._book.sequences[seq_id][1]
            for child_id in islice(drawing, count):
                child = self._book.sequences[child_id][1]
                if not child.is_started:
                    self._book.fork(parent, child)
                    child.num_cached_tokens = parent.num_cached_tokens

    def _append(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """One token for each sequence that drew."""
        sequences, has_logprobs = self._book.sequences, bool(result.logprobs)
        outputs: list[TokenDelta] = []
        append = outputs.append
        for seq_id, token_id in zip(plan.drawing, result.token_ids, strict=True):
            request, seq = sequences[seq_id]
            if token_id is None:
                append(self._fail_sequence(request, seq, result.failed[seq_id]))
                continue
            seq.token_ids.append(token_id)
            count = len(seq.token_ids) - seq.num_prompt_tokens
            may_end = count >= request.max_output_tokens or token_id in request.end_ids
            if may_end or has_logprobs or count == 1:
                append(self._delta(request, seq, result))
                continue
            num_cached = seq.num_cached_tokens
            delta = (
                request.request_id,
                seq.index,
                (token_id,),
                None,
                None,
                num_cached,
                None,
                None,
                None,
                None,
            )
            append(_new(TokenDelta, delta))
        return outputs

    def _delta(self, request: Request, seq: Sequence, result: StepResult) -> TokenDelta:
        """Of a sequence that got a token, which may be its last."""
        token_id, count = seq.token_ids[-1], seq.num_output_tokens
        reason = finish_reason_for_token(
            request.params, request.eos_token_ids, token_id, count, request.max_output_tokens
        )
        if reason is not None:
            self._book.end_sequence(request, seq, reason)
        logprobs, prompt_logprobs = result.logprobs.get(seq.seq_id), None
        if count == 1 and request.params.prompt_logprobs is not None and seq.index == 0:
            prompt_logprobs = tuple(seq.prompt_logprobs)
        return TokenDelta(
            request.request_id,
            seq.index,
            (token_id,),
            reason,
            stop_token_id=token_id if reason == "stop" else None,
            num_cached_tokens=seq.num_cached_tokens,
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=prompt_logprobs,
        )

    def _fail_sequence(self, request: Request, seq: Sequence, message: str) -> TokenDelta:
        """No token could be drawn."""
        self._book.end_sequence(request, seq, "error")
        return TokenDelta(request.request_id, seq.index, (), "error", error=message)

    def _take_candidates(self, seq_id: SeqId, result: StepResult) -> list[TokenDelta]:
        """Beams move on together, once the last of them has its candidates."""
        if seq_id not in self._book.sequences:  # its search failed with an earlier beam
            return []
        request = self._book.sequences[seq_id][0]
        if seq_id in result.failed:
            return self._fail_request(request, result.failed[seq_id])
        request.candidates[seq_id] = result.candidates[seq_id]
        if len(request.candidates) < len(request.live):
            return []
        self._counters.num_generated_tokens += len(request.live)
        return advance_beams(self._book, request)

    def _fail_request(self, request: Request, message: str) -> list[TokenDelta]:
        indexes = range(request.params.n) if request.beam is not None else [s.index for s in request.live]
        outputs = [TokenDelta(request.request_id, index, (), "error", error=message) for index in indexes]
        self._book.end_all(request, "error")
        return outputs

    def _keep_prompt_logprobs(self, plan: StepPlan, number: int, result: StepResult) -> None:
        """Append those that were not known before a preemption."""
        seq_id, start = plan.seq_ids[number], plan.ends[number] - plan.lengths[number]
        known = self._book.sequences[seq_id][1].prompt_logprobs
        known.extend(result.prompt_logprobs.get(seq_id, ())[max(0, len(known) - start) :])
