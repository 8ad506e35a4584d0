"""Applier: records what a step computed. Tokens are appended, sequences fork and finish, blocks become free."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.finish import finish_reason_for_token
from octavo.core.request import FinishReason, Request, Sequence
from octavo.core.step import Sample, SequenceSlice, StepPlan, StepResult
from octavo.sched.beams import advance_beams
from octavo.sched.book import RequestBook
from octavo.sched.records import SchedulerCounters, SequenceOutput


class Applier:
    def __init__(self, book: RequestBook, max_model_len: int, counters: SchedulerCounters) -> None:
        self._book = book
        self._max_model_len = max_model_len
        self._counters = counters

    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """The outputs of the step, those decided while it was planned first."""
        outputs, self._book.ended = self._book.ended, []
        samples = iter(result.samples)
        for piece in plan.slices:
            request, seq = self._book.sequences[piece.seq_id]
            seq.num_computed_tokens = piece.end
            self._counters.num_computed_tokens += piece.num_tokens
            self._book.allocator.commit(piece.seq_id, seq.token_ids, piece.end)
            if piece.prompt_logprobs:
                _keep_prompt_logprobs(seq, piece, result)
            if piece.num_candidates:
                outputs += self._take_candidates(request, seq, result)
            else:
                outputs += self._take_samples(piece, seq, samples, result)
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]:
        """The step itself went wrong: end the requests that were in it; the waiting lose nothing."""
        outputs, self._book.ended = self._book.ended, []
        for piece in plan.slices:
            if piece.seq_id in self._book.sequences:
                outputs += self._fail_request(self._book.sequences[piece.seq_id][0], message)
        return outputs

    def _take_samples(
        self, piece: SequenceSlice, parent: Sequence, samples: Iterator[Sample], result: StepResult
    ) -> Iterator[SequenceOutput]:
        """One token for each sequence that draws from the row. Forks come first: one of them may end."""
        drawn = [self._book.sequences[seq_id] for seq_id in piece.sample_for]
        for _, seq in drawn:
            if not seq.is_started:
                self._book.fork(parent, seq)
                seq.num_cached_tokens = parent.num_cached_tokens
        for request, seq in drawn:
            if seq.seq_id in result.failed:
                self._book.end_sequence(request, seq, "error")
                error = result.failed[seq.seq_id]
                yield SequenceOutput(request.request_id, seq.index, (), "error", error=error)
            else:
                sample = next(samples)
                assert sample.seq_id == seq.seq_id, f"sample of {sample.seq_id} for {seq.seq_id}"
                yield self._append(request, seq, sample)

    def _append(self, request: Request, seq: Sequence, sample: Sample) -> SequenceOutput:
        seq.token_ids.append(sample.token_id)
        self._counters.num_generated_tokens += 1
        reason: FinishReason | None = finish_reason_for_token(
            request.params,
            request.eos_token_ids,
            sample.token_id,
            seq.num_output_tokens,
            self._max_model_len - seq.num_prompt_tokens,
        )
        if reason is not None:
            self._book.end_sequence(request, seq, reason)
        is_first = seq.num_output_tokens == 1 and request.params.prompt_logprobs is not None
        return SequenceOutput(
            request_id=request.request_id,
            index=seq.index,
            token_ids=(sample.token_id,),
            finish_reason=reason,
            stopped_by_token=reason == "stop",
            logprobs=sample.logprobs,
            prompt_logprobs=tuple(seq.prompt_logprobs) if is_first and seq.index == 0 else None,
            num_cached_tokens=seq.num_cached_tokens,
        )

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
