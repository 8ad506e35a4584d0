"""Bytes of a request body to one of the models of protocol.py, or a RequestError that names the field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.server.errors import body_too_large, request_error_from
from octavo.server.protocol import LABELS, UNSUPPORTED

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises a 413 as soon as it is known to be larger than `limit_bytes`."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise body_too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise body_too_large(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def parse(model: type[M], raw: bytes) -> M:
    """Decode and validate. Raises RequestError."""
    fields = _without_nulls(_decode_object(raw))
    options = fields.get("stream_options")
    if isinstance(options, dict):
        fields["stream_options"] = _without_nulls(options)
    known = {name: value for name, value in fields.items() if _is_kept(model, name, value)}
    try:
        return model.model_validate(known)
    except ValidationError as exc:
        raise request_error_from(exc, known) from None


def _decode_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"The request body is no valid JSON: {exc}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_json")
    return body


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _is_kept(model: type[BaseModel], name: str, value: Any) -> bool:
    """Whether the model should see this field. Raises RequestError if it asks for what does not exist."""
    if name in model.model_fields:
        return True
    if name in LABELS:
        return False
    if name not in UNSUPPORTED:
        return True  # the model refuses it as unknown
    if value in UNSUPPORTED[name]:
        return False
    raise RequestError(
        f"The field {name!r} is not supported by this server; remove it.",
        param=name,
        code="unsupported_parameter",
    )
