"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer for clients that have none."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.convert import chat_text, check_token_ids, encode
from octavo.server.errors import json_response
from octavo.server.protocol import DetokenizeBody, TokenizeBody
from octavo.server.service import Service


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await service.body(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Send either prompt or messages.", param="prompt")
    if body.messages is not None:
        text = chat_text(service.chat_template, body)
        token_ids = await encode(service.tokenizer, text, body.add_special_tokens is True)
    else:
        token_ids = await encode(service.tokenizer, body.prompt or "", body.add_special_tokens is not False)
    answer: dict[str, object] = {
        "count": len(token_ids),
        "max_model_len": service.engine.info.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.token_text(token_id) for token_id in token_ids]
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await service.body(request, DetokenizeBody)
    check_token_ids(body.tokens, service.engine.info.vocab_size, param="tokens")
    return json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def tokenizer_info(request: Request) -> Response:
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    return json_response(
        {
            "vocab_size": service.engine.info.vocab_size,
            "max_model_len": service.engine.info.max_model_len,
            "bos_token": None if bos is None else tokenizer.token_text(bos),
            "bos_token_id": bos,
            "eos_token": tokenizer.token_text(eos[0]) if eos else None,
            "eos_token_ids": list(eos),
            "chat_template": service.chat_template.source,
        }
    )
