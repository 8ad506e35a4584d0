"""LLM: the engine in this process, text in and text out. For scripts, notebooks and the command line.

    from octavo import LLM, SamplingParams
    llm = LLM(block_size=16)
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0)):
        print(output.outputs[0].text)

All prompts of one call run at once, batched continuously. Not thread-safe: one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.backends.ops import Backend
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.core.delta import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import assemble, make_backend
from octavo.engine.check_config import check_config
from octavo.engine.engine import Engine
from octavo.engine.messages import BlockSnapshot, GenerateRequest
from octavo.errors import ConfigError, EngineError, RequestError
from octavo.sampling.validate import check
from octavo.text.chat_template import ChatTemplate
from octavo.text.output import RequestAssembler, TextDelta, TokenEntry, Usage
from octavo.text.tokenizer import Tokenizer
from octavo.weights import hub
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.loader import open_checkpoint

Prompt = str | Sequence[int]  # text, or token ids
Message = dict[str, Any]  # {"role": …, "content": …}


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenEntry] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None  # beam search: what the choices are ranked by


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt."""

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_logprobs: list[TokenEntry] | None = None


@dataclass(slots=True)
class _Running:
    output: RequestOutput
    assembler: RequestAssembler


class LLM:
    """Loads the model when made; `options` are the fields of EngineConfig."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        try:
            config = EngineConfig(model=model, **options)
        except TypeError as error:
            raise ConfigError(f"{error}; the options are the fields of octavo.EngineConfig") from None
        check_config(config)
        checkpoint = open_checkpoint(hub.resolve(config.model))
        try:
            self._load(config, checkpoint, make_backend(config))
        finally:
            checkpoint.close()

    @classmethod
    def from_checkpoint(cls, config: EngineConfig, checkpoint: Checkpoint, backend: Backend) -> LLM:
        """The same from parts that the caller already has."""
        llm = cls.__new__(cls)
        check_config(config)
        llm._load(config, checkpoint, backend)
        return llm

    def _load(self, config: EngineConfig, checkpoint: Checkpoint, backend: Backend) -> None:
        self.config = config
        with ThreadPoolExecutor(1) as pool:  # reading the weights leaves the interpreter to the tokenizer
            tokenizer = pool.submit(checkpoint.tokenizer)
            self.engine: Engine = assemble(config, checkpoint, backend)
            self.tokenizer: Tokenizer = tokenizer.result()
        self.chat_template = ChatTemplate.for_tokenizer(checkpoint.chat_template, self.tokenizer)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the results are in the order of the prompts.

        `params` is one for all or one for each. `on_progress(finished, total)` is called as requests end.
        Raises RequestError, before anything runs, when one of them is wrong.
        """
        batch = _as_batch(prompts)
        each = _params_for_each(params, len(batch))
        running: dict[str, _Running] = {}
        outputs: list[RequestOutput] = []
        try:
            for prompt, wanted in zip(batch, each, strict=True):
                request_id, state = self._submit(prompt, wanted)
                running[request_id] = state
                outputs.append(state.output)
            while running:
                for request_id, delta in self._step(running):
                    _extend(running[request_id], delta)
                for request_id in [r for r, state in running.items() if state.assembler.is_done]:
                    del running[request_id]
                    if on_progress is not None:
                        on_progress(len(batch) - len(running), len(batch))
        finally:
            self._abort(running)
        return outputs

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError when a value is out of range, as generate and stream would."""
        check(params, vocab_size=self.engine.info.vocab_size, max_logprobs=self.config.max_logprobs)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """The deltas of one prompt as they come. Closing the iterator ends the request."""
        request_id, state = self._submit(prompt, params or SamplingParams())
        running = {request_id: state}
        try:
            while not state.assembler.is_done:
                for _, delta in self._step(running):
                    yield delta
        finally:
            if not state.assembler.is_done:
                self._abort(running)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        width: int,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        n: int | None = None,
    ) -> list[RequestOutput]:
        """The n (default: all `width`) best answers of a beam search for each prompt, best first, each with
        its score. generate() with SamplingParams(beam_width=…) does the same and has stop strings too."""
        params = SamplingParams(
            n=width if n is None else n,
            beam_width=width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        return self.generate(prompts, params)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix. Returns how many blocks could be found before."""
        return self.engine.reset_prefix_cache()

    def snapshot(self) -> BlockSnapshot:
        """The block pool and all tables, as `octavo blocks` shows them."""
        return self.engine.snapshot()

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation through the model's chat template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids the chat template makes of a conversation."""
        text = self.chat_template.render(list(messages))
        return self.tokenizer.encode(text, add_special_tokens=False)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, prompt: Prompt, params: SamplingParams) -> tuple[str, _Running]:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request_id = str(self._num_requests)
        self._num_requests += 1
        self.engine.add_request(GenerateRequest(request_id, token_ids, params))
        choices = [CompletionOutput(i) for i in range(params.n)]
        output = RequestOutput(prompt, token_ids, choices, Usage(len(token_ids), 0))
        return request_id, _Running(output, RequestAssembler(self.tokenizer, params, token_ids))

    def _step(self, running: dict[str, _Running]) -> list[tuple[str, TextDelta]]:
        """One engine step, in text. Raises EngineError when a request ended with an error."""
        if not self.engine.has_work:
            raise EngineError("the engine has nothing to do although requests have not finished")
        result = self.engine.step()
        found = []
        for token_delta in result.deltas:
            state = running.get(token_delta.request_id)
            delta = state.assembler.push(token_delta) if state is not None else None
            if delta is None or state is None:
                continue
            if delta.finish_reason == "error":
                raise EngineError(delta.error or "the request failed")
            if delta.needs_abort:
                self.engine.abort(token_delta.request_id, delta.index, "stop")
            found.append((token_delta.request_id, delta))
        return found

    def _abort(self, running: dict[str, _Running]) -> None:
        for request_id in running:
            self.engine.abort(request_id)


def _extend(state: _Running, delta: TextDelta) -> None:
    choice = state.output.outputs[delta.index]
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    if delta.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or []), *delta.logprobs]
    if delta.prompt_logprobs is not None:
        state.output.prompt_logprobs = list(delta.prompt_logprobs)
    choice.finish_reason = delta.finish_reason
    choice.stop_reason = delta.stop_reason
    choice.score = delta.score
    state.output.usage = state.assembler.usage


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a list of integers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [[int(p) for p in prompts]]  # type: ignore[arg-type]
    return [p if isinstance(p, str) else list(p) for p in prompts]  # type: ignore[arg-type]


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts: give one, or one for each")
    return list(params)
