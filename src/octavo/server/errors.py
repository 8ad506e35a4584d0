"""Every failure of the server as an OpenAI error body.

    400 RequestError        401 wrong key       404 unknown model or route    405 wrong method
    413 body too large      500 a fault here    503 EngineError: the engine is gone

Validation of a body answers 400, never 422, and names the field.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.errors import EngineError, OctavoError, RequestError

logger = logging.getLogger("octavo.server")

CLIENT_CLOSED_REQUEST = 499  # never seen by a client; it labels the request counter


class HTTPError(Exception):
    """A failure with a status of its own. Its body is complete."""

    def __init__(self, status: int, message: str, *, kind: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind=kind, code=code, param=param)


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_not_found(name: str, served: tuple[str, ...]) -> HTTPError:
    names = ", ".join(repr(s) for s in served)
    message = f"The model {name!r} is not served here; this server answers to {names}."
    return HTTPError(404, message, kind="invalid_request_error", code="model_not_found", param="model")


def body_too_large(limit_bytes: int) -> HTTPError:
    message = f"The request body is larger than {limit_bytes} bytes; send fewer or shorter prompts."
    return HTTPError(413, message, kind="invalid_request_error", code="request_too_large")


def wrong_api_key() -> HTTPError:
    message = (
        "No valid API key; send the header 'Authorization: Bearer KEY' with the key the server runs with."
    )
    return HTTPError(401, message, kind="invalid_request_error", code="invalid_api_key")


def describe(exc: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body for any exception."""
    if isinstance(exc, HTTPError):
        return exc.status, exc.body
    if isinstance(exc, RequestError):
        code = exc.code or "invalid_value"
        return 400, error_body(str(exc), kind="invalid_request_error", code=code, param=exc.param)
    if isinstance(exc, EngineError):
        return 503, error_body(str(exc), kind="server_error", code="engine_unavailable")
    if isinstance(exc, OctavoError):
        return 500, error_body(str(exc), kind="server_error", code="internal_error")
    message = "The server failed on this request; its log has the details."
    return 500, error_body(message, kind="server_error", code="internal_error")


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def request_error_from(exc: ValidationError, body: dict[str, Any]) -> RequestError:
    """The first fault of a body, with the field, the value given and what it should be."""
    errors = exc.errors(include_url=False, include_context=False)
    first = errors[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        path = ".".join(str(part) for part in first["loc"])
        return RequestError(f"Unknown field {path!r}; remove it.", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        path = ".".join(str(part) for part in first["loc"])
        return RequestError(f"The field {path!r} is missing.", param=path, code="missing_required_parameter")
    wanted = dict.fromkeys(e["msg"] for e in errors if e["loc"] and e["loc"][0] == field)
    reasons = ", or ".join(reason[:1].lower() + reason[1:] for reason in wanted)
    given = repr(body.get(field)) if field else ""
    shown = given if len(given) <= 80 else given[:77] + "..."
    return RequestError(f"{field} is {shown}: {reasons}.", param=field, code="invalid_type")


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    kind = "invalid_request_error" if exc.status_code < 500 else "server_error"
    where = f"{request.method} {request.url.path}"
    if exc.status_code == 404:
        message, code = f"There is no route {where}; the API lives under /v1.", "not_found"
    elif exc.status_code == 405:
        allowed = (exc.headers or {}).get("Allow", "another method")
        message, code = f"{where} is not allowed; use {allowed}.", "method_not_allowed"
    else:
        message, code = str(exc.detail), "invalid_request"
    response = json_response(error_body(message, kind=kind, code=code), exc.status_code)
    response.headers.update(exc.headers or {})
    return response


async def _on_error(request: Request, exc: Exception) -> Response:
    status, body = describe(exc)
    if status == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
    response = json_response(body, status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _on_disconnect(request: Request, exc: Exception) -> Response:
    """The client went away in the middle of its own request; nobody reads this."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    for kind in (HTTPError, OctavoError, Exception):
        app.add_exception_handler(kind, _on_error)
