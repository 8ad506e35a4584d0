"""Scheduler: first come first served, continuous batching, chunks within a token budget, preemption.

    step(now)  → StepPlan      which tokens to compute; blocks are taken here
    apply(...) → outputs       append what was sampled; fork, finish and free

Running requests are served in order of arrival, then waiting ones are admitted in order of arrival while
budget and blocks last. The running requests are always the earliest arrivals that have not finished: only
the latest gives way, and it comes back before anyone newer.
"""

from __future__ import annotations

from itertools import islice, takewhile

from octavo.core.allocator import Growth, KVAllocator, Match, SwapAllocator
from octavo.core.block import SeqId
from octavo.core.delta import TokenDelta
from octavo.core.request import Request, RequestStatus, Sequence
from octavo.core.step import StepPlan, StepResult
from octavo.errors import ContextLengthError
from octavo.sched.apply import Applier
from octavo.sched.beams import finish_beams
from octavo.sched.book import RequestBook
from octavo.sched.budget import SchedulerConfig
from octavo.sched.groups import (
    blocks_promised,
    blocks_to_start,
    draws_with,
    next_fork_point,
    set_origins,
    set_origins_after_end,
)
from octavo.sched.plan_builder import PlanBuilder
from octavo.sched.preempt import Preempter, choose_victim, headroom_blocks
from octavo.sched.queue_policy import WaitingQueue
from octavo.sched.records import PreemptionDecision, SchedulerCounters


class Scheduler:
    """The one policy of engine and simulator. It owns the requests and asks the allocator for blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: KVAllocator,
        block_size: int,
        swap: SwapAllocator | None = None,
    ) -> None:
        self.config = config
        self.allocator = allocator
        self.swap = swap
        self.block_size = block_size
        self.counters = SchedulerCounters()
        self.book = RequestBook(allocator, swap)
        self.preempter = Preempter(self.book, config, self.counters)
        self._applier = Applier(self.book, block_size, self.counters)
        self._num_steps = 0
        self._to_preempt: set[str] = set()
        self._builder = PlanBuilder(0)  # of the last plan

    # ── what the engine asks ────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> list[Request]:
        return self.book.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.book.waiting

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or len(self.waiting) or self.book.finished)

    @property
    def num_running_seqs(self) -> int:
        return sum(len(r.live) for r in self.running)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks lie in the swap space."""
        # Who ran before arrived before all who never did: those need not be looked at at every step.
        ran = takewhile(lambda r: r.status is not RequestStatus.WAITING, self.waiting)
        return sum(r.status is RequestStatus.SWAPPED for r in ran)

    @property
    def admitted_requests(self) -> list[str]:
        """By the last plan, new or resumed."""
        return self._builder.admitted

    @property
    def preemptions(self) -> list[PreemptionDecision]:
        """By the last plan."""
        return self._builder.decisions

    def request(self, request_id: str) -> Request | None:
        return self.book.requests.get(request_id)

    def sequence(self, seq_id: SeqId) -> Sequence:
        return self.book.sequences[seq_id][1]

    def new_seq_id(self) -> SeqId:
        return self.book.new_seq_id()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ContextLengthError when it can never run: a prompt that leaves no room for one token in the
        model's context, or one that needs more blocks than the pool has.
        """
        set_origins(request)
        self._refuse_unservable(request)
        room = self.config.max_model_len - request.num_prompt_tokens
        wanted = request.params.max_tokens
        request.max_output_tokens = room if wanted is None else min(wanted, room)
        self.book.add(request)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one choice of it, at once, wherever it is; its blocks are free. False when it is
        not known (any more)."""
        request = self.book.requests.get(request_id)
        if request is None:
            return False
        ending = [s for s in request.live if index is None or s.index == index]
        for seq in ending:
            self.book.end_sequence(request, seq, "abort")
        set_origins_after_end(request)
        return bool(ending)

    def preempt(self, request_id: str) -> None:
        """Take the blocks of a running request with the next step; it resumes as after any preemption."""
        self._to_preempt.add(request_id)

    # ── step: decide ────────────────────────────────────────────────────────────────────────────────

    def step(self, now: float) -> StepPlan:
        """Plan the next step and take its blocks. `now` is the caller's clock, in seconds."""
        self._builder = PlanBuilder(self.config.max_num_batched_tokens)
        self._preempt_on_request()
        promised = self._continue_running()
        if not self._builder.decisions:
            self._admit_waiting(promised)
        finished, self.book.finished = self.book.finished, []
        self._num_steps += 1
        return self._builder.build(self._num_steps, finished)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenDelta]:
        """Append the sampled tokens, fork, finish what is done, free its blocks."""
        if result.swap_failure == "in":
            for request in self._builder.swapped_in:
                self.running.remove(request)
                self.preempter.drop(request)
                self.waiting.push(request)
            outputs, self.book.ended = self.book.ended, []
            return outputs
        if result.swap_failure == "out":
            for request in self._builder.swapped_out:
                self.preempter.drop(request)
        self.counters.num_blocks_copied += len(plan.copies)
        return self._applier.apply(plan, result)

    def fail(self, plan: StepPlan, message: str) -> list[TokenDelta]:
        """The step itself went wrong: end the requests that were in it; the waiting lose nothing."""
        return self._applier.fail(plan, message)

    def _continue_running(self) -> int:
        """Give every running request its next tokens, oldest first. Returns the blocks that requests still
        reading their prompt were promised but do not hold yet."""
        promised = 0
        position = 0
        while (position := self._continue_decoding(position)) < len(self.running):
            request = self.running[position]
            if not self._schedule(request):
                if self._make_room(request):
                    continue  # somebody gave way: try the same request again
                break  # it gave way itself, and it was the last
            promised += blocks_promised(request, self.allocator)
            position += 1
        return promised

    def _continue_decoding(self, first: int) -> int:
        """The short way through _schedule for running requests from `first` on that are one sequence each and
        compute the token they drew last. Returns where the first one stands that needs more than that."""
        seq_ids, ends, token_ids = [], [], []
        for request in islice(self.running, first, first + self._builder.num_left):
            live = request.live
            if len(live) != 1 or request.beam is not None:
                break
            seq = live[0]
            known = seq.token_ids
            end = len(known)
            if end != seq.num_computed_tokens + 1 or end <= seq.num_prompt_tokens:
                break
            seq_ids.append(seq.seq_id)
            ends.append(end)
            token_ids.append(known[-1])
        count, growth = self.allocator.grow_each(seq_ids)
        self._builder.add_last_tokens(seq_ids[:count], ends[:count], token_ids[:count], growth)
        return first + count

    def _make_room(self, request: Request) -> bool:
        """Preempt the latest arrival, or shorten a request that is alone in a full pool. False when `request`
        is no longer running."""
        victim = choose_victim(self.running)
        if victim is not None:
            self._preempt(victim)
            return victim is not request
        if request.beam is not None:
            self.book.ended += finish_beams(self.book, request)
        else:
            # Nobody will ever free a block for it: its last choice ends here, the others may go on.
            last = request.live[-1]
            self.book.ended.append(TokenDelta(request.request_id, last.index, (), "length"))
            self.book.end_sequence(request, last, "length")
        return bool(request.live)

    def _preempt(self, victim: Request) -> None:
        started = [s.seq_id for s in victim.started]
        decision, moves = self.preempter.preempt(victim)
        self._builder.decisions.append(decision)
        self._builder.preempted += started
        self._builder.swap_out += moves
        if decision.mode == "swap":
            self._builder.swapped_out.append(victim)

    def _preempt_on_request(self) -> None:
        """Whom preempt() named; in the stress of tests, whoever has computed all it knows."""
        wanted, self._to_preempt = self._to_preempt, set()
        if not wanted and not self.config.force_preemption:
            return
        for request in list(self.running):
            progressed = all(s.is_started and s.gap <= 1 for s in request.live)
            if request.request_id in wanted or (self.config.force_preemption and progressed):
                self._preempt(request)

    def _schedule(self, request: Request) -> bool:
        """Add the request's slices to the plan, shorter ones where that is all the pool holds; False, with none
        added, when blocks are short."""
        if len(request.live) == 1 and request.beam is None and request.live[0].is_started:
            return self._schedule_one(request, request.live[0])
        builder = self._builder
        self._start_forks(request)
        if request.beam is not None and self._beams_must_wait(request):
            return True
        before = builder.num_left
        ends: list[tuple[Sequence, int]] = []
        for seq in request.started:
            end = self._slice_end(request, seq)
            if end > seq.num_computed_tokens:
                builder.num_left -= end - seq.num_computed_tokens
                ends.append((seq, end))
        growths = self.allocator.grow_all([(seq.seq_id, end) for seq, end in ends])
        if growths is None:
            builder.num_left = before
            return self._schedule_shorter(request, ends)
        for (seq, end), growth in zip(ends, growths, strict=True):
            self._add_slice(request, seq, end, growth)
        return True

    def _schedule_shorter(self, request: Request, ends: list[tuple[Sequence, int]]) -> bool:
        """Of slices that are too long for the free blocks, as much as these hold. Only of a request that is
        alone, for which nobody can give way: windows that are read in smaller steps need fewer blocks."""
        if len(self.running) > 1 or all(end - seq.num_computed_tokens == 1 for seq, end in ends):
            return False
        before = self._builder.num_left
        for seq, wanted in ends:
            start = seq.num_computed_tokens
            end = self.allocator.chunk_end(start, self.allocator.reach(seq.seq_id, wanted))
            growth = self.allocator.grow(seq.seq_id, end) if end > start else None
            if growth is not None:
                self._builder.num_left -= end - start
                self._add_slice(request, seq, end, growth)
        return self._builder.num_left < before

    def _schedule_one(self, request: Request, seq: Sequence) -> bool:
        """The same for a request that is one sequence, as most are."""
        start = seq.num_computed_tokens
        end = start + self._builder.take(len(seq.token_ids) - start)
        end = self.allocator.chunk_end(start, end)
        if end == start:
            return True
        growth = self.allocator.grow(seq.seq_id, end)
        if growth is None:
            return self._schedule_shorter(request, [(seq, end)])
        self._builder.num_left -= end - start
        self._add_slice(request, seq, end, growth)
        return True

    def _add_slice(self, request: Request, seq: Sequence, end: int, growth: Growth) -> None:
        builder, beam, is_last = self._builder, request.beam, end == len(seq.token_ids)
        drawing = self._drawing(request, seq) if is_last and beam is None else ()
        number = builder.add_slice(seq, end, drawing, growth)
        if is_last and beam is not None:
            builder.candidates.append((number, beam.num_candidates))
        if _wants_prompt_logprobs(request, seq):
            builder.prompt_logprobs.append(number)

    def _beams_must_wait(self, request: Request) -> bool:
        """Beams move on together or not at all."""
        is_decoding = all(s.gap <= 1 for s in request.live)
        return is_decoding and self._builder.num_left < sum(s.gap for s in request.live)

    def _slice_end(self, request: Request, seq: Sequence) -> int:
        """How far the sequence gets in this step."""
        start = seq.num_computed_tokens
        wanted = seq.num_tokens
        if len(request.live) > 1:
            wanted = min(wanted, next_fork_point(seq, request) or wanted)
        end = start + self._builder.take(wanted - start)
        return self.allocator.chunk_end(start, end)

    def _drawing(self, request: Request, seq: Sequence) -> tuple[SeqId, ...]:
        if len(request.live) == 1:
            return (seq.seq_id,)
        return (seq.seq_id, *(s.seq_id for s in draws_with(seq, request)))

    def _start_forks(self, request: Request) -> None:
        """Start the sequences of a group whose parents have come to where they part."""
        if len(request.live) == 1 and request.live[0].is_started:
            return
        for seq in request.live:
            if seq.is_started:
                continue
            parent, point = seq.origin if seq.origin is not None else (None, 0)
            if parent is not None and parent.is_started:
                if parent.num_computed_tokens == point and seq.gap and seq.num_tokens > point:
                    self.book.fork(parent, seq)
                if parent.num_computed_tokens <= point:
                    continue
            elif parent is not None and parent.finish_reason is None:
                continue
            self._start_sequence(request, seq, self._match(request, seq))

    def _admit_waiting(self, promised: int) -> None:
        """Admit in order of arrival while all of the next request's known tokens fit beside the rest."""
        if not len(self.waiting) or len(self.running) >= self.config.max_num_seqs:
            return
        num_seqs = sum(_num_seqs(r) for r in self.running)
        while (request := self.waiting.head()) is not None and self._builder.num_left:
            first = request.live[0]
            match = None if request.status is RequestStatus.SWAPPED else self._match(request, first)
            needed = self._blocks_to_admit(request, match)
            headroom = headroom_blocks(num_seqs, self.block_size)
            if needed + promised + headroom > self.allocator.num_blocks_free:
                return
            if num_seqs + _num_seqs(request) > self.config.max_num_seqs:
                return
            self.waiting.pop()
            self._start(request, match)
            scheduled = self._schedule(request)
            assert scheduled, f"request {request.request_id} was admitted without blocks"
            promised += blocks_promised(request, self.allocator)
            num_seqs += _num_seqs(request)

    def _blocks_to_admit(self, request: Request, match: Match | None) -> int:
        """Blocks for all its known tokens. An estimate above the whole pool (choices share less than
        before) must not keep it waiting for ever."""
        if request.status is RequestStatus.SWAPPED:
            assert self.swap is not None
            needed = self.swap.blocks_needed([s.seq_id for s in request.started])
            needed += len(request.started) * self.allocator.blocks_for(1)  # the next slot of each
        else:
            needed = 0
        needed += blocks_to_start(request, self.allocator)
        needed -= match.num_blocks_shared if match is not None else 0
        return min(needed, self.allocator.num_blocks_total)

    def _start(self, request: Request, match: Match | None) -> None:
        if request.status is RequestStatus.SWAPPED:
            assert self.swap is not None
            moves = self.swap.swap_in([s.seq_id for s in request.started])
            self._builder.swap_in += moves
            self._builder.swapped_in.append(request)
            self.counters.num_blocks_swapped_in += len(moves)
        else:
            self._start_sequence(request, request.live[0], match)
        if request.status is RequestStatus.PREEMPTED:
            self.preempter.on_resume(request, request.live[0].num_computed_tokens)
        if request.status is RequestStatus.WAITING:
            num_hit = request.live[0].num_computed_tokens
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_prompt_tokens_cached += num_hit
            request.live[0].num_cached_tokens = num_hit
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._builder.admitted.append(request.request_id)

    def _match(self, request: Request, seq: Sequence) -> Match | None:
        """What the prefix cache has of it. Prompt log-probabilities need every row computed."""
        if _wants_prompt_logprobs(request, seq):
            return None
        return self.allocator.match(seq.token_ids, request.tenant)

    def _start_sequence(self, request: Request, seq: Sequence, match: Match | None) -> None:
        self.allocator.admit(seq.seq_id, request.tenant, match)
        seq.num_computed_tokens = match.num_tokens if match is not None else 0
        seq.is_started = True
        seq.origin = None

    def _refuse_unservable(self, request: Request) -> None:
        num_tokens = request.num_prompt_tokens
        if num_tokens >= self.config.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; the context holds {self.config.max_model_len} and at "
                f"least one must be left for the answer: shorten the prompt",
                param="prompt",
            )
        needed = blocks_to_start(request, self.allocator)
        if needed > self.allocator.num_blocks_total:
            raise ContextLengthError(
                f"the prompt of {num_tokens} tokens needs {needed} KV-cache blocks of {self.block_size} and "
                f"the pool has {self.allocator.num_blocks_total}: shorten it or give --kv-cache-memory more",
                param="prompt",
            )
        if _num_seqs(request) > self.config.max_num_seqs:
            raise ContextLengthError(
                f"the request asks for {_num_seqs(request)} sequences at once and the engine runs at most "
                f"{self.config.max_num_seqs}: ask for fewer or raise --max-num-seqs",
                param="n",
            )


def _num_seqs(request: Request) -> int:
    """Sequences it may have running at once."""
    return request.beam.params.width if request.beam is not None else len(request.live)


def _wants_prompt_logprobs(request: Request, seq: Sequence) -> bool:
    """Until each prompt token but the first has one; the first choice stands for all."""
    return (
        request.params.prompt_logprobs is not None
        and seq.index == 0
        and len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1
    )
