"""create_app: the route list, the error handlers and the shared Service. It starts and stops no engine."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import BaseRoute

from octavo import __version__
from octavo.engine.client import AsyncEngine
from octavo.engine.messages import StepStats
from octavo.metrics.registry import Metrics
from octavo.server import blocks, chat, completions, status, tokens
from octavo.server.errors import add_error_handlers
from octavo.server.middleware import CountRequests, RequireKey
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.service import Service
from octavo.server.settings import ServerSettings
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

_GET, _POST = ["GET"], ["POST"]


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that the handler reads and validates itself."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _routes() -> list[BaseRoute]:
    chat_body, completion_body = _takes(ChatBody), _takes(CompletionBody)
    return [
        APIRoute("/health", status.health, methods=_GET),
        APIRoute("/version", status.version, methods=_GET),
        APIRoute("/metrics", status.metrics, methods=_GET),
        APIRoute("/v1/models", status.models, methods=_GET),
        APIRoute("/v1/models/{name:path}", status.model, methods=_GET),
        APIRoute("/v1/completions", completions.completions, methods=_POST, openapi_extra=completion_body),
        APIRoute("/v1/chat/completions", chat.chat_completions, methods=_POST, openapi_extra=chat_body),
        APIRoute("/tokenize", tokens.tokenize, methods=_POST, openapi_extra=_takes(TokenizeBody)),
        APIRoute("/detokenize", tokens.detokenize, methods=_POST, openapi_extra=_takes(DetokenizeBody)),
        APIRoute("/tokenizer_info", tokens.tokenizer_info, methods=_GET),
        APIRoute("/reset_prefix_cache", blocks.reset_prefix_cache, methods=_POST),
        APIRoute("/debug/blocks", blocks.debug_blocks, methods=_GET),
        # For clients whose base URL is given without /v1
        APIRoute("/models", status.models, methods=_GET, include_in_schema=False),
        APIRoute("/completions", completions.completions, methods=_POST, include_in_schema=False),
        APIRoute("/chat/completions", chat.chat_completions, methods=_POST, include_in_schema=False),
    ]


def create_app(
    engine: AsyncEngine, tokenizer: Tokenizer, chat_template: ChatTemplate, settings: ServerSettings
) -> FastAPI:
    """The ASGI app over a running engine, whose steps feed the metrics from now on."""
    info = engine.info
    idle = StepStats(blocks_total=info.num_blocks, blocks_free=info.num_blocks, block_size=info.block_size)
    metrics = Metrics(__version__, lambda: engine.is_alive, idle)
    engine.add_stats_listener(metrics.observe)
    app = FastAPI(title="Octavo", version=__version__, routes=_routes(), docs_url=None, redoc_url=None)
    app.state.service = Service(engine, tokenizer, chat_template, settings, metrics)
    add_error_handlers(app)
    if settings.api_key is not None:
        app.add_middleware(RequireKey, api_key=settings.api_key)
    app.add_middleware(CountRequests, metrics=metrics)
    return app
