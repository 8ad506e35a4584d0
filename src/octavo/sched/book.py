"""RequestBook: every request that has not ended, who waits and who runs, and how one ends."""

from __future__ import annotations

from octavo.core.allocator import KVAllocator, SwapAllocator
from octavo.core.block import SeqId
from octavo.core.delta import FinishReason, TokenDelta
from octavo.core.request import Request, RequestStatus, Sequence
from octavo.sched.queue_policy import WaitingQueue


class RequestBook:
    """Shared by the parts of the scheduler; nobody else writes to it."""

    def __init__(self, allocator: KVAllocator, swap: SwapAllocator | None) -> None:
        self.allocator = allocator
        self.swap = swap
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.sequences: dict[SeqId, tuple[Request, Sequence]] = {}
        self.finished: list[SeqId] = []  # ended since the last plan
        self.ended: list[TokenDelta] = []  # decided in step(), delivered by apply()
        self._num_arrived = 0
        self._num_sequences = 0

    def new_seq_id(self) -> SeqId:
        self._num_sequences += 1
        return SeqId(self._num_sequences)

    def add(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"request {request.request_id} exists"
        request.order = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        for seq in request.sequences:
            self.sequences[seq.seq_id] = (request, seq)
        self.waiting.push(request)

    def add_fork(self, request: Request, parent: Sequence, token_ids: list[int]) -> Sequence:
        """A new sequence of the group that shares every block of `parent` and goes on its own way."""
        child = Sequence(
            seq_id=self.new_seq_id(),
            index=parent.index,
            token_ids=token_ids,
            num_prompt_tokens=parent.num_prompt_tokens,
        )
        self.sequences[child.seq_id] = (request, child)
        self.fork(parent, child)
        return child

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.allocator.fork(parent.seq_id, child.seq_id)
        child.num_computed_tokens = parent.num_computed_tokens
        child.is_started = True
        child.origin = None

    def end_sequence(self, request: Request, seq: Sequence, reason: FinishReason) -> None:
        """Free its blocks, wherever they are; with its last sequence the request ends."""
        seq.finish_reason = reason
        request.live.remove(seq)
        if seq.is_started:
            if request.status is RequestStatus.SWAPPED:
                assert self.swap is not None
                self.swap.drop(seq.seq_id)
            else:
                self.allocator.release(seq.seq_id)
        seq.is_started = False
        self.finished.append(seq.seq_id)
        del self.sequences[seq.seq_id]
        if not request.live:
            self._end_request(request)

    def end_all(self, request: Request, reason: FinishReason) -> None:
        for seq in list(request.live):
            self.end_sequence(request, seq, reason)

    def _end_request(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
