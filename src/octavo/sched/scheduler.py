"""Scheduler: first come first served, continuous batching, chunks within a token budget, preemption.

    step(now)  → StepPlan      which tokens to compute; blocks are taken here
    apply(...) → outputs       append what was sampled; finish and free

Running requests are served in order of arrival, then waiting ones are admitted in order of arrival while
budget and blocks last. The running requests are always the earliest arrivals that have not finished: only
the latest gives way, and it comes back before anyone newer.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.allocator import KVAllocator, Match
from octavo.core.block import SeqId
from octavo.core.finish import finish_reason_for_token
from octavo.core.request import FinishReason, Request, RequestStatus, Sequence
from octavo.core.step import CopyBlock, SequenceSlice, StepPlan, StepResult, TokenLogprobs
from octavo.errors import ContextLengthError
from octavo.sched.budget import SchedulerConfig, TokenBudget
from octavo.sched.preempt import choose_victim, headroom_blocks
from octavo.sched.queue_policy import WaitingQueue


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step gave one sequence. `token_id` is None when it ended without a new token."""

    request_id: str
    index: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    stopped_by_token: bool = False  # token_id is an end-of-sequence or stop token
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str | None = None  # with finish_reason "error"


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # tokens whose keys and values were dropped by preemption
    num_prompt_tokens: int = 0  # of requests admitted for the first time
    num_prompt_tokens_cached: int = 0  # of these, found in the prefix cache
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0


class Scheduler:
    """The one policy of engine and simulator. It owns the requests and asks the allocator for blocks."""

    def __init__(self, config: SchedulerConfig, allocator: KVAllocator, block_size: int) -> None:
        self.config = config
        self.allocator = allocator
        self.block_size = block_size
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.counters = SchedulerCounters()
        self._requests: dict[str, Request] = {}
        self._sequences: dict[SeqId, tuple[Request, Sequence]] = {}
        self._num_arrived = 0
        self._num_steps = 0
        self._finished: list[SeqId] = []  # ended since the last plan
        self._ended: list[SequenceOutput] = []  # outputs decided in step(), delivered by apply()
        self._slices: list[SequenceSlice] = []  # of the plan being made
        self._copies: list[CopyBlock] = []
        self._preempted: list[SeqId] = []
        self.admitted_requests: list[str] = []  # by the last plan, new or resumed
        self.preempted_requests: list[str] = []  # by the last plan

    # ── what the engine asks ────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or len(self.waiting) or self._finished)

    @property
    def num_running_seqs(self) -> int:
        return sum(len(r.live) for r in self.running)

    def request(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def sequence(self, seq_id: SeqId) -> Sequence:
        return self._sequences[seq_id][1]

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ContextLengthError when it can never run: a prompt that leaves no room for one token in the
        model's context, or one that needs more blocks than the pool has.
        """
        self._refuse_unservable(request)
        assert request.request_id not in self._requests, f"request {request.request_id} exists"
        request.order = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        for seq in request.sequences:
            self._sequences[seq.seq_id] = (request, seq)
        self.waiting.push(request)

    def abort(self, request_id: str) -> bool:
        """End a request at once, wherever it is; its blocks are free. False when it is not known."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for seq in list(request.live):
            self._end_sequence(request, seq, "abort")
        return True

    # ── step: decide ────────────────────────────────────────────────────────────────────────────────

    def step(self, now: float) -> StepPlan:
        """Plan the next step and take its blocks. `now` is the caller's clock, in seconds."""
        self._slices, self._copies, self._preempted = [], [], []
        self.admitted_requests, self.preempted_requests = [], []
        budget = TokenBudget(self.config.max_num_batched_tokens)
        promised = self._continue_running(budget)
        if not self._preempted:
            self._admit_waiting(budget, promised)
        finished, self._finished = tuple(self._finished), []
        self._num_steps += 1
        return StepPlan(
            step=self._num_steps,
            slices=tuple(self._slices),
            copies=tuple(self._copies),
            preempted=tuple(self._preempted),
            finished=finished,
        )

    def _continue_running(self, budget: TokenBudget) -> int:
        """Give every running request its next tokens, oldest first. Returns the blocks that requests still
        reading their prompt were promised but do not hold yet."""
        promised = 0
        position = 0
        while position < len(self.running):
            request = self.running[position]
            if not self._schedule(request, budget):
                if self._make_room(request):
                    continue  # somebody gave way: try the same request again
                break  # it gave way itself, and it was the last
            promised += self._blocks_promised(request)
            position += 1
        return promised

    def _make_room(self, request: Request) -> bool:
        """Preempt the latest arrival. False when that was `request` itself or when it had to be ended."""
        victim = choose_victim(self.running)
        if victim is None:
            # Alone and the pool is full: nobody will ever free a block for it.
            for seq in list(request.live):
                self._end_sequence(request, seq, "length", deliver=True)
            return False
        self._preempt(victim)
        return victim is not request

    def _schedule(self, request: Request, budget: TokenBudget) -> bool:
        """Add the request's slices to the plan; False, with none added, when blocks are short."""
        slices: list[SequenceSlice] = []
        copies: list[CopyBlock] = []
        for seq in request.live:
            num_tokens = budget.take(seq.gap)
            if not num_tokens:
                continue
            end = seq.num_computed_tokens + num_tokens
            growth = self.allocator.grow(seq.seq_id, end)
            if growth is None:
                budget.num_left += num_tokens + sum(s.num_tokens for s in slices)
                return False
            copies.extend(growth.copies)
            slices.append(
                SequenceSlice(
                    seq_id=seq.seq_id,
                    start=seq.num_computed_tokens,
                    token_ids=tuple(seq.token_ids[seq.num_computed_tokens : end]),
                    needs_sample=end == seq.num_tokens,
                    prompt_logprobs=_wants_prompt_logprobs(request, seq),
                    table_writes=growth.table_writes,
                )
            )
        self._slices.extend(slices)
        self._copies.extend(copies)
        return True

    def _admit_waiting(self, budget: TokenBudget, promised: int) -> None:
        """Admit in order of arrival while all of the next request's known tokens fit beside the rest."""
        num_seqs = self.num_running_seqs
        while (request := self.waiting.head()) is not None and budget.num_left:
            match = self._match(request)
            needed = sum(self.allocator.blocks_for(s.num_tokens) for s in request.live)
            needed -= match.num_blocks_shared if match is not None else 0
            headroom = headroom_blocks(num_seqs, self.block_size)
            if needed + promised + headroom > self.allocator.num_blocks_free:
                return
            if num_seqs + len(request.live) > self.config.max_num_seqs:
                return
            self.waiting.pop()
            self._start(request, match)
            scheduled = self._schedule(request, budget)
            assert scheduled, f"request {request.request_id} was admitted without blocks"
            promised += self._blocks_promised(request)
            num_seqs += len(request.live)

    def _match(self, request: Request) -> Match | None:
        """What the prefix cache has of it. Prompt log-probabilities need every row computed."""
        seq = request.live[0]
        if request.params.prompt_logprobs is not None and len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1:
            return None
        return self.allocator.match(seq.token_ids, request.tenant)

    def _start(self, request: Request, match: Match | None) -> None:
        num_hit = match.num_tokens if match is not None else 0
        for seq in request.live:
            self.allocator.admit(seq.seq_id, request.tenant, match)
            seq.num_computed_tokens = num_hit
        if request.status is RequestStatus.WAITING:
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_prompt_tokens_cached += num_hit
            request.live[0].num_cached_tokens = num_hit
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.admitted_requests.append(request.request_id)

    def _blocks_promised(self, request: Request) -> int:
        """Blocks its known tokens will need beyond those it holds."""
        return sum(self.allocator.blocks_missing(s.seq_id, s.num_tokens) for s in request.live if s.gap > 1)

    def _preempt(self, request: Request) -> None:
        """Drop its blocks; its tokens stay known and will be computed again."""
        self.running.remove(request)
        for seq in request.live:
            self.allocator.release(seq.seq_id)
            self._preempted.append(seq.seq_id)
            self.counters.num_recomputed_tokens += seq.num_computed_tokens
            seq.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.preempted_requests.append(request.request_id)
        self.waiting.push(request)

    def _refuse_unservable(self, request: Request) -> None:
        num_tokens = request.num_prompt_tokens
        if num_tokens >= self.config.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; the context holds {self.config.max_model_len} and at "
                f"least one must be left for the answer: shorten the prompt",
                param="prompt",
            )
        needed = self.allocator.blocks_for(num_tokens) * len(request.sequences)
        if needed > self.allocator.num_blocks_total:
            raise ContextLengthError(
                f"the prompt of {num_tokens} tokens needs {needed} KV-cache blocks of {self.block_size} and "
                f"the pool has {self.allocator.num_blocks_total}: shorten it or give --kv-cache-memory more",
                param="prompt",
            )

    # ── apply: record ───────────────────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Append the sampled tokens, finish what is done, free its blocks."""
        outputs, self._ended = self._ended, []
        samples = iter(result.samples)
        for piece in plan.slices:
            request, seq = self._sequences[piece.seq_id]
            seq.num_computed_tokens = piece.end
            self.allocator.commit(piece.seq_id, seq.token_ids, piece.end)
            self.counters.num_computed_tokens += piece.num_tokens
            _keep_prompt_logprobs(seq, piece, result)
            if piece.seq_id in result.failed:
                outputs.append(self._fail(request, seq, result.failed[piece.seq_id]))
            elif piece.needs_sample:
                sample = next(samples)
                assert sample.seq_id == piece.seq_id, f"sample of {sample.seq_id} for {piece.seq_id}"
                outputs.append(self._append(request, seq, sample.token_id, sample.logprobs))
        return outputs

    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]:
        """The step itself went wrong: end the sequences that were in it; the waiting lose nothing."""
        outputs, self._ended = self._ended, []
        for piece in plan.slices:
            outputs.append(self._fail(*self._sequences[piece.seq_id], message))
        return outputs

    def _fail(self, request: Request, seq: Sequence, message: str) -> SequenceOutput:
        self._end_sequence(request, seq, "error")
        return SequenceOutput(request.request_id, seq.index, None, "error", error=message)

    def _append(
        self, request: Request, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> SequenceOutput:
        seq.token_ids.append(token_id)
        self.counters.num_generated_tokens += 1
        reason: FinishReason | None = finish_reason_for_token(
            request.params, request.eos_token_ids, token_id, seq.num_output_tokens
        )
        stopped_by_token = reason == "stop"
        if reason is None and seq.num_tokens >= self.config.max_model_len:
            reason = "length"
        if reason is not None:
            self._end_sequence(request, seq, reason)
        is_first = seq.num_output_tokens == 1 and request.params.prompt_logprobs is not None
        return SequenceOutput(
            request_id=request.request_id,
            index=seq.index,
            token_id=token_id,
            finish_reason=reason,
            stopped_by_token=stopped_by_token,
            logprobs=logprobs,
            prompt_logprobs=tuple(seq.prompt_logprobs) if is_first else None,
            num_cached_tokens=seq.num_cached_tokens,
        )

    def _end_sequence(
        self, request: Request, seq: Sequence, reason: FinishReason, deliver: bool = False
    ) -> None:
        seq.finish_reason = reason
        request.live.remove(seq)
        if request.status is RequestStatus.RUNNING:
            self.allocator.release(seq.seq_id)
        self._finished.append(seq.seq_id)
        del self._sequences[seq.seq_id]
        if deliver:
            self._ended.append(SequenceOutput(request.request_id, seq.index, None, reason))
        if not request.live:
            self._end_request(request)

    def _end_request(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]


def _wants_prompt_logprobs(request: Request, seq: Sequence) -> bool:
    """Until each prompt token but the first has one; the first choice stands for all."""
    return (
        request.params.prompt_logprobs is not None
        and seq.index == 0
        and len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1
    )


def _keep_prompt_logprobs(seq: Sequence, piece: SequenceSlice, result: StepResult) -> None:
    """Append those that were not known before a preemption."""
    found = result.prompt_logprobs.get(piece.seq_id, ())
    seq.prompt_logprobs.extend(found[max(0, len(seq.prompt_logprobs) - piece.start) :])
