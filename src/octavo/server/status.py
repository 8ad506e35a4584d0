"""The routes that answer at once: health, version, metrics and the list of models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineError
from octavo.metrics.registry import CONTENT_TYPE
from octavo.server.errors import json_response, model_not_found
from octavo.server.service import Service


async def health(request: Request) -> Response:
    """200 while the engine process runs, else 503."""
    service: Service = request.app.state.service
    if not service.engine.is_alive:
        raise EngineError("The engine process is gone; restart the server.")
    return json_response({"status": "ok"})


async def version(request: Request) -> Response:
    return json_response({"version": request.app.version})


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    names = service.settings.served_model_names
    return json_response({"object": "list", "data": [_card(service, name) for name in names]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    name = request.path_params["name"]
    if name not in service.settings.served_model_names:
        raise model_not_found(name, service.settings.served_model_names)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.settings.created,
        "owned_by": "octavo",
        "root": service.settings.model_root,
        "max_model_len": service.engine.info.max_model_len,
    }
