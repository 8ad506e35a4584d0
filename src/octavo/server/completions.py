"""POST /v1/completions: prompts of text or token ids, one or many, with or without echo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.convert import (
    DEFAULT_COMPLETION_TOKENS,
    Prompt,
    check_params,
    completion_params,
    completion_prompts,
    fit,
)
from octavo.server.logprobs import completion_logprobs
from octavo.server.protocol import CompletionBody
from octavo.server.service import Service, new_id
from octavo.server.stream import Head, Whole
from octavo.text.output import TextDelta, TokenEntry


class CompletionDialect:
    """A choice is a text. With echo it begins with its prompt, which comes with the first chunk."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, echoed: Sequence[Prompt] | None, choices_per_prompt: int) -> None:
        self._echoed = echoed  # one per prompt; None without echo
        self._choices_per_prompt = choices_per_prompt

    def chunk(self, piece: TextDelta, is_first: bool) -> dict[str, Any] | None:
        echo = self._echo_of(piece.index) if is_first else ""
        if not (piece.text or piece.logprobs or piece.finish_reason or echo):
            return None
        choice = {
            "index": piece.index,
            "text": echo + piece.text,
            "logprobs": self._logprobs(piece.index, piece.prompt_logprobs, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return choice

    def choice(self, whole: Whole) -> dict[str, Any]:
        return {
            "index": whole.index,
            "text": self._echo_of(whole.index) + whole.text,
            "logprobs": self._logprobs(whole.index, whole.prompt_logprobs, whole.logprobs),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }

    def _echo_of(self, index: int) -> str:
        if self._echoed is None:
            return ""
        return self._echoed[index // self._choices_per_prompt].text or ""

    def _logprobs(
        self, index: int, prompt: Sequence[TokenEntry] | None, output: Sequence[TokenEntry] | None
    ) -> dict[str, Any] | None:
        """Prompt entries, if echoed, then output entries, all with offsets into the choice's whole text."""
        if output is None:
            return None
        lists = completion_logprobs(output, len(self._echo_of(index)))
        if prompt is None:
            return lists
        before = completion_logprobs(prompt)
        return {name: before[name] + lists[name] for name in lists}


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await service.body(request, CompletionBody)
    info = service.engine.info
    params = completion_params(body)
    has_output = not (body.echo and body.max_tokens == 0)
    if not has_output:  # the engine computes a prompt by drawing a token after it
        params = replace(params, max_tokens=1, min_tokens=0)
    check_params(params, info, service.settings.max_logprobs)
    prompts = await completion_prompts(body, service.tokenizer, info.vocab_size)
    fitted = [fit(params, p, info, default_tokens=DEFAULT_COMPLETION_TOKENS) for p in prompts]
    head = Head(new_id("cmpl"), service.model_name(body.model))
    generation = service.start(head, body, prompts, fitted, has_output=has_output)
    dialect = CompletionDialect(prompts if body.echo else None, params.n)
    return await service.answer(request, body, generation, dialect, head)
