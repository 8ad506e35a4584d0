"""Engine: requests in, tokens out, one step at a time. Plan, run, apply, observe.

Single-threaded and in process. process.py runs one in a process of its own, llm.py drives one directly.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from time import monotonic

from octavo.core import invariants
from octavo.core.beam import BeamParams, BeamSearch
from octavo.core.delta import FinishReason, TokenDelta
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_swap import SwapSpace
from octavo.core.prefix_index import Tenant
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import StepPlan
from octavo.engine.best_of import BestOf, needs_selection
from octavo.engine.executor import Executor
from octavo.engine.messages import BlockSnapshot, GenerateRequest, Ready, StepOutputs
from octavo.engine.observe import EngineObserver
from octavo.engine.poison import FreedBlocks
from octavo.engine.snapshot import take_snapshot
from octavo.engine.text_stops import TextStops
from octavo.errors import RequestError
from octavo.sampling.validate import check
from octavo.sched.scheduler import Scheduler
from octavo.text.tokenizer import Tokenizer


class Engine:
    """Made by build.build_engine. `info` is what clients need to know about it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: Ready,
        eos_token_ids: frozenset[int],
        *,
        make_tokenizer: Callable[[], Tokenizer] | None = None,
        max_logprobs: int = 20,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.info = info
        self.observer = EngineObserver(scheduler)
        self._eos_token_ids = eos_token_ids
        self._make_tokenizer = make_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._max_logprobs = max_logprobs
        self._selections: dict[str, BestOf] = {}  # requests with best_of > n
        self._debug = debug
        self._freed: FreedBlocks | None = None
        if debug and isinstance(scheduler.allocator, KVCacheManager):
            self._freed = FreedBlocks(scheduler.allocator, executor)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepOutputs:
        """One pass: plan, run, apply, observe. Stats come with it when they are due (observe.py)."""
        started = monotonic()
        self.scheduler.preempter.prices = self.executor.prices.prices
        plan = self.scheduler.step(started)
        planned = monotonic()
        outputs = self._end_at_stop_strings(self._run(plan))
        stats = self.observer.observe(outputs, started, planned, monotonic())
        if self._debug:
            self._check_step(plan)
        return StepOutputs(self._select(outputs), stats)

    def add_request(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError when it is wrong or can never run; nothing is kept then."""
        self._check(request)
        prompt = request.prompt_token_ids
        sequences = [
            Sequence(self.scheduler.new_seq_id(), index, list(prompt), len(prompt))
            for index in range(request.params.num_sequences)
        ]
        queued = Request(
            request_id=request.request_id,
            sequences=sequences,
            params=request.params,
            eos_token_ids=self._eos_token_ids,
            tenant=Tenant(salt=request.cache_salt),
            arrival_s=request.arrival_s,
            beam=self._beam(request),
        )
        self.scheduler.add(queued)
        if needs_selection(request.params):
            self._selections[request.request_id] = BestOf(request.params, self._text_stops(request.params))
        self.executor.register(queued)
        self.observer.on_arrival(request)

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = "abort") -> bool:
        """End a request, or one choice of it, now; its blocks are free at once. False when it is not known
        (any more). `reason` is for the statistics of a choice."""
        if index is not None:
            is_ended = self.scheduler.abort(request_id, index)
            if is_ended:
                self.observer.on_choice_ended(request_id, reason)
            return is_ended
        self.observer.on_abort(request_id)
        self._selections.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; running requests keep their blocks. Returns how many blocks could be
        found before."""
        manager = self.scheduler.allocator
        return manager.clear_prefixes() if isinstance(manager, KVCacheManager) else 0

    def snapshot(self) -> BlockSnapshot:
        """The block pool and all tables, as they are now."""
        return take_snapshot(self.scheduler)

    def check_invariants(self) -> None:
        """Raises InvariantError when the bookkeeping contradicts itself."""
        manager, swap = self.scheduler.allocator, self.scheduler.swap
        if isinstance(manager, KVCacheManager) and isinstance(swap, SwapSpace):
            invariants.check_swap(manager, swap)
        elif isinstance(manager, KVCacheManager):
            invariants.check(manager)

    def _check_step(self, plan: StepPlan) -> None:
        """Debug mode, after each step."""
        self.check_invariants()
        if self._freed is not None:
            self._freed.after_step(plan)

    def _run(self, plan: StepPlan) -> list[TokenDelta]:
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
        check(request.params, vocab_size=vocab_size, max_logprobs=self._max_logprobs)
        if self.scheduler.request(request.request_id) is not None:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")

    def _end_at_stop_strings(self, outputs: list[TokenDelta]) -> list[TokenDelta]:
        """End the choices that are held back for a selection here; all others end where their text is made."""
        if not self._selections:
            return outputs
        return [self._ended(o) if self._is_stopped(o) else o for o in outputs]

    def _is_stopped(self, output: TokenDelta) -> bool:
        selection = self._selections.get(output.request_id)
        return selection is not None and selection.is_stopped(output)

    def _ended(self, output: TokenDelta) -> TokenDelta:
        self.scheduler.abort(output.request_id, output.choice)
        return output._replace(finish_reason="stop")

    def _select(self, outputs: list[TokenDelta]) -> list[TokenDelta]:
        """Hold back the choices of requests of which only the best are wanted."""
        if not self._selections:
            return outputs
        selected: list[TokenDelta] = []
        for output in outputs:
            selection = self._selections.get(output.request_id)
            chosen = [output] if selection is None else selection.push(output)
            if selection is not None and chosen:
                del self._selections[output.request_id]
            selected += chosen
        return selected

    def _beam(self, request: GenerateRequest) -> BeamSearch | None:
        params = request.params
        if params.beam_width is None:
            return None
        room = self.info.max_model_len - len(request.prompt_token_ids)
        end_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= self._eos_token_ids
        return BeamSearch(
            BeamParams(
                width=params.beam_width,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                max_tokens=max(1, room if params.max_tokens is None else min(params.max_tokens, room)),
                min_tokens=params.min_tokens,
                end_ids=frozenset(end_ids),
            ),
            stops.ends if (stops := self._text_stops(params)) is not None else None,
        )

    def _text_stops(self, params: SamplingParams) -> TextStops | None:
        """Its stop strings, if they have to be found here and not where text is made."""
        if not params.stop or self._make_tokenizer is None:
            return None
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return TextStops(self._tokenizer, params)
