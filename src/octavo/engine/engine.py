"""Engine: requests in, tokens out, one step at a time. Plan, run, apply, observe.

Single-threaded and in process. process.py runs one in a process of its own, llm.py drives one directly.
"""

from __future__ import annotations

import sys
import traceback
from time import monotonic

from octavo.core import invariants
from octavo.core.block import SeqId
from octavo.core.kv_manager import KVCacheManager
from octavo.core.prefix_index import Tenant
from octavo.core.request import Request, Sequence
from octavo.core.step import StepPlan, TokenLogprobs
from octavo.engine.executor import Executor
from octavo.engine.messages import GenerateRequest, Logprob, Ready, StepOutputs, TokenDelta
from octavo.engine.observe import EngineObserver
from octavo.errors import RequestError
from octavo.sampling.validate import check
from octavo.sched.scheduler import Scheduler, SequenceOutput


class Engine:
    """Made by build.build_engine. `info` is what clients need to know about it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: Ready,
        eos_token_ids: frozenset[int],
        *,
        max_logprobs: int = 20,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.info = info
        self.observer = EngineObserver(scheduler)
        self._eos_token_ids = eos_token_ids
        self._max_logprobs = max_logprobs
        self._debug = debug
        self._next_seq_id = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepOutputs:
        """One pass: plan, run, apply, observe."""
        started = monotonic()
        plan = self.scheduler.step(started)
        planned = monotonic()
        outputs = self._run(plan)
        stats = self.observer.observe(outputs, started, planned, monotonic())
        if self._debug:
            self.check_invariants()
        return StepOutputs([_delta(o) for o in outputs], stats)

    def add_request(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError when it is wrong or can never run; nothing is kept then."""
        self._check(request)
        sequences = [
            Sequence(self._new_seq_id(), index, list(request.prompt_token_ids), len(request.prompt_token_ids))
            for index in range(request.params.n)
        ]
        queued = Request(
            request_id=request.request_id,
            sequences=sequences,
            params=request.params,
            eos_token_ids=self._eos_token_ids,
            tenant=Tenant(salt=request.cache_salt),
            arrival_s=request.arrival_s,
        )
        self.scheduler.add(queued)
        self.executor.register(queued)
        self.observer.on_arrival(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; its blocks are free at once. False when it is not known (any more)."""
        self.observer.on_abort(request_id)
        return self.scheduler.abort(request_id)

    def check_invariants(self) -> None:
        if isinstance(self.scheduler.allocator, KVCacheManager):
            invariants.check(self.scheduler.allocator)

    def _run(self, plan: StepPlan) -> list[SequenceOutput]:
        """Run and apply. A step that raises ends its own sequences with an error; the engine lives on."""
        try:
            result = self.executor.run(plan)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            return self.scheduler.fail(plan, f"the step failed: {type(error).__name__}: {error}")
        return self.scheduler.apply(plan, result, monotonic())

    def _check(self, request: GenerateRequest) -> None:
        vocab_size = self.info.vocab_size
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt token id {token_id} is outside the vocabulary, 0 to {vocab_size - 1}",
                    param="prompt",
                )
        if request.params.n != 1:
            raise RequestError(f"n={request.params.n} is not supported: ask for one choice", param="n")
        check(request.params, vocab_size=vocab_size, max_logprobs=self._max_logprobs)
        if self.scheduler.request(request.request_id) is not None:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")

    def _new_seq_id(self) -> SeqId:
        self._next_seq_id += 1
        return SeqId(self._next_seq_id)


def _delta(output: SequenceOutput) -> TokenDelta:
    token_id = output.token_id
    return TokenDelta(
        request_id=output.request_id,
        index=output.index,
        token_ids=[] if token_id is None else [token_id],
        logprobs=None if output.logprobs is None else [_logprob(output.logprobs)],
        finish_reason=output.finish_reason,
        stop_token_id=token_id if output.stopped_by_token else None,
        num_cached_tokens=output.num_cached_tokens,
        prompt_logprobs=(
            None if output.prompt_logprobs is None else [_logprob(p) for p in output.prompt_logprobs]
        ),
        error=output.error,
    )


def _logprob(value: TokenLogprobs) -> Logprob:
    return Logprob(value.token_id, value.logprob, value.rank, list(value.top))
