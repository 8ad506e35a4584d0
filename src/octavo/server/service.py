"""Service: what the handlers of one app share, and the steps that both generating routes take."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import AsyncEngine
from octavo.errors import EngineError
from octavo.metrics.registry import Metrics
from octavo.server.choices import Generation, generate_requests
from octavo.server.convert import Prompt
from octavo.server.errors import CLIENT_CLOSED_REQUEST, json_response, model_not_found
from octavo.server.parse import M, parse, read_body
from octavo.server.protocol import SamplingBody, StreamOptions
from octavo.server.settings import ServerSettings
from octavo.server.stream import (
    ClientGone,
    Dialect,
    EventStream,
    Head,
    event_lines,
    until_disconnect,
    whole_answer,
)
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Service:
    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    settings: ServerSettings
    metrics: Metrics

    async def body(self, request: Request, model: type[M]) -> M:
        """The parsed body, whose model name is one that is served."""
        body = parse(model, await read_body(request, self.settings.max_body_bytes))
        self.model_name(getattr(body, "model", None))
        return body

    def model_name(self, asked: str | None) -> str:
        """The name an answer carries. Raises 404 for a model that is not served."""
        if asked is None:
            return self.settings.model_name
        if asked not in self.settings.served_model_names:
            raise model_not_found(asked, self.settings.served_model_names)
        return asked

    def start(
        self,
        head: Head,
        body: SamplingBody,
        prompts: list[Prompt],
        params: list[SamplingParams],
        *,
        has_output: bool = True,
    ) -> Generation:
        """Raises EngineError at once when there is no engine to take the request."""
        if not self.engine.is_alive:
            raise EngineError("The engine process is gone; restart the server.")
        requests = generate_requests(head.request_id, prompts, params, body.cache_salt)
        return Generation(self.engine, self.tokenizer, requests, has_output=has_output)

    async def answer(
        self, request: Request, body: SamplingBody, generation: Generation, dialect: Dialect, head: Head
    ) -> Response:
        """The generation as a stream or as plain JSON, whichever `body` asks for."""
        if body.stream:
            return EventStream(event_lines(generation, dialect, head, body.stream_options or StreamOptions()))
        try:
            return json_response(
                await until_disconnect(request.receive, whole_answer(generation, dialect, head))
            )
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
