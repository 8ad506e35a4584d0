"""Applier: records what a step computed. Tokens are appended, sequences fork and finish, blocks become free."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.finish import finish_reason_for_token
from octavo.core.request import FinishReason, Request, Sequence
from octavo.core.step import SequenceSlice, StepPlan, StepResult
from octavo.sched.beams import advance_beams
from octavo.sched.book import RequestBook
from octavo.sched.records import SchedulerCounters, SequenceOutput

_new = tuple.__new__  # a third faster than a NamedTuple's own constructor


class Applier:
    def __init__(self, book: RequestBook, block_size: int, counters: SchedulerCounters) -> None:
        self._book = book
        self._block_size = block_size
        self._counters = counters

    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """The outputs of the step, those decided while it was planned first."""
        outputs, self._book.ended = self._book.ended, []
        sequences, block_size, drawn = self._book.sequences, self._block_size, iter(result.token_ids)
        for piece in plan.slices:
            seq_id, start, token_ids, _, sample_for, num_candidates, has_prompt_logprobs = piece
            known = sequences.get(seq_id)
            if known is None:  # a beam of a search that failed in an earlier slice
                continue
            request, seq = known
            num_tokens = len(token_ids)
            end = seq.num_computed_tokens = start + num_tokens
            if end % block_size < num_tokens:  # it filled a block
                self._book.allocator.commit(seq_id, seq.token_ids, end)
            if has_prompt_logprobs:
                _keep_prompt_logprobs(seq, piece, result)
            if num_candidates:
                outputs += self._take_candidates(request, seq, result)
            elif len(sample_for) == 1:
                outputs.append(self._append(request, seq, next(drawn), result))
            elif sample_for:
                outputs += self._append_all(piece, seq, drawn, result)
        self._counters.num_computed_tokens += plan.num_tokens
        self._counters.num_generated_tokens += len(result.token_ids) - result.token_ids.count(None)
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]:
        """The step itself went wrong: end the requests that were in it; the waiting lose nothing."""
        outputs, self._book.ended = self._book.ended, []
        for piece in plan.slices:
            if piece.seq_id in self._book.sequences:
                outputs += self._fail_request(self._book.sequences[piece.seq_id][0], message)
        return outputs

    def _append_all(
        self, piece: SequenceSlice, parent: Sequence, drawn: Iterator[int | None], result: StepResult
    ) -> list[SequenceOutput]:
        """One token for each sequence that draws from the row. Forks come first: one of them may end."""
        drawing = [self._book.sequences[seq_id] for seq_id in piece.sample_for]
        for _, seq in drawing:
            if not seq.is_started:
                self._book.fork(parent, seq)
                seq.num_cached_tokens = parent.num_cached_tokens
        return [self._append(request, seq, next(drawn), result) for request, seq in drawing]

    def _append(
        self, request: Request, seq: Sequence, token_id: int | None, result: StepResult
    ) -> SequenceOutput:
        """`token_id` None: no token could be drawn."""
        seq_id, token_ids = seq.seq_id, seq.token_ids
        if token_id is None:
            self._book.end_sequence(request, seq, "error")
            return SequenceOutput(request.request_id, seq.index, (), "error", error=result.failed[seq_id])
        token_ids.append(token_id)
        num_output_tokens = len(token_ids) - seq.num_prompt_tokens
        reason: FinishReason | None = None
        if token_id in request.end_ids or num_output_tokens >= request.max_output_tokens:
            reason = finish_reason_for_token(
                request.params,
                request.eos_token_ids,
                token_id,
                num_output_tokens,
                request.max_output_tokens,
            )
            if reason is not None:
                self._book.end_sequence(request, seq, reason)
        prompt_logprobs = None
        if num_output_tokens == 1 and request.params.prompt_logprobs is not None and seq.index == 0:
            prompt_logprobs = tuple(seq.prompt_logprobs)
        output = (
            request.request_id,
            seq.index,
            (token_id,),
            reason,
            reason == "stop",
            result.logprobs.get(seq_id),
            prompt_logprobs,
            seq.num_cached_tokens,
            None,
            None,
        )
        return _new(SequenceOutput, output)

    def _take_candidates(self, request: Request, seq: Sequence, result: StepResult) -> list[SequenceOutput]:
        """Beams move on together, once the last of them has its candidates."""
        if seq.seq_id in result.failed:
            return self._fail_request(request, result.failed[seq.seq_id])
        request.candidates[seq.seq_id] = result.candidates[seq.seq_id]
        if len(request.candidates) < len(request.live):
            return []
        self._counters.num_generated_tokens += len(request.live)
        return advance_beams(self._book, request)

    def _fail_request(self, request: Request, message: str) -> list[SequenceOutput]:
        indexes = range(request.params.n) if request.beam is not None else [s.index for s in request.live]
        outputs = [SequenceOutput(request.request_id, index, (), "error", error=message) for index in indexes]
        self._book.end_all(request, "error")
        return outputs


def _keep_prompt_logprobs(seq: Sequence, piece: SequenceSlice, result: StepResult) -> None:
    """Append those that were not known before a preemption."""
    found = result.prompt_logprobs.get(piece.seq_id, ())
    seq.prompt_logprobs.extend(found[max(0, len(seq.prompt_logprobs) - piece.start) :])
