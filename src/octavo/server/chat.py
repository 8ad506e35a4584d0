"""POST /v1/chat/completions: messages through the chat template, answers as assistant messages."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.convert import Prompt, chat_params, chat_text, check_params, encode, fit
from octavo.server.logprobs import chat_logprobs
from octavo.server.protocol import ChatBody
from octavo.server.service import Service, new_id
from octavo.server.stream import Head, Whole
from octavo.text.output import TextDelta


class ChatDialect:
    """A choice is a message; the role comes with the first chunk of each choice."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def chunk(self, piece: TextDelta, is_first: bool) -> dict[str, Any] | None:
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return None
        delta: dict[str, Any] = {}
        if is_first:
            delta["role"] = "assistant"
        if piece.text or is_first:
            delta["content"] = piece.text
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": chat_logprobs(piece.logprobs) if piece.logprobs is not None else None,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return choice

    def choice(self, whole: Whole) -> dict[str, Any]:
        return {
            "index": whole.index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": chat_logprobs(whole.logprobs) if whole.logprobs is not None else None,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await service.body(request, ChatBody)
    info = service.engine.info
    params = chat_params(body, service.settings.max_logprobs)
    check_params(params, info, service.settings.max_logprobs)
    text = chat_text(service.chat_template, body)
    token_ids = await encode(service.tokenizer, text, body.add_special_tokens is True)
    if not token_ids:
        raise RequestError("The chat template made an empty prompt; send a text.", param="messages")
    prompt = Prompt(token_ids, text)
    head = Head(new_id("chatcmpl"), service.model_name(body.model))
    generation = service.start(head, body, [prompt], [fit(params, prompt, info, default_tokens=None)])
    return await service.answer(request, body, generation, ChatDialect(), head)
