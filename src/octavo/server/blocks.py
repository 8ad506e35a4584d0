"""The routes about the block pool itself: POST /reset_prefix_cache and GET /debug/blocks."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.errors import json_response
from octavo.server.service import Service


async def reset_prefix_cache(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response({"cleared_blocks": await service.engine.reset_prefix_cache()})


async def debug_blocks(request: Request) -> Response:
    """A BlockSnapshot of engine/messages.py, as JSON; `octavo blocks` draws it."""
    service: Service = request.app.state.service
    return json_response(await service.engine.snapshot())
