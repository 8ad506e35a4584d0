"""Plain ASGI middleware: the API key and the request counter. No body passes through here."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.metrics.registry import Metrics
from octavo.server.errors import CLIENT_CLOSED_REQUEST, describe, json_response, wrong_api_key

_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_OPEN_PATHS = frozenset({"/health"})  # asked by load balancers, which have no key


class RequireKey:
    """401 for every request without the key, /health excepted."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = b"bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._is_allowed(scope):
            status, body = describe(wrong_api_key())
            response = json_response(body, status)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + key.strip(), self._expected)


class CountRequests:
    """One count per answer, labelled with the route's pattern so that made-up paths add no series."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST  # stands if nothing is sent

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except Exception:
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.count_http(method, route, status)
