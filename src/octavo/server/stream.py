"""Text pieces to HTTP: as server-sent events or folded into one JSON body, and the watch on the client.

Both answers come from the same `Generation.pieces()`; a `Dialect` (chat.py, completions.py) only names the
JSON of a choice. When the client goes away the generation is closed, which frees its blocks in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.choices import Generation
from octavo.server.errors import describe
from octavo.server.protocol import StreamOptions
from octavo.text.output import TextDelta, TokenEntry, Usage

T = TypeVar("T")
logger = logging.getLogger("octavo.server")
_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


@dataclass(slots=True)
class Whole:
    """The pieces of one choice, put together."""

    index: int
    text: str = ""
    logprobs: list[TokenEntry] | None = None
    prompt_logprobs: tuple[TokenEntry, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: TextDelta) -> None:
        self.text += piece.text
        if piece.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(piece.logprobs)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Dialect(Protocol):
    """How one API spells a choice."""

    object_name: str
    chunk_object_name: str

    def chunk(self, piece: TextDelta, is_first: bool) -> dict[str, Any] | None:
        """The choice in a stream's chunk; None if the piece has nothing to tell."""
        ...

    def choice(self, whole: Whole) -> dict[str, Any]:
        """The choice in a plain answer."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    def body(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


async def whole_answer(generation: Generation, dialect: Dialect, head: Head) -> dict[str, Any]:
    """All pieces folded into the body of a plain answer."""
    wholes: dict[int, Whole] = {}
    async with aclosing(generation.pieces()) as batches:
        async for batch in batches:
            for piece in batch:
                wholes.setdefault(piece.index, Whole(piece.index)).add(piece)
    choices = [dialect.choice(wholes[index]) for index in sorted(wholes)]
    return head.body(dialect.object_name, choices) | {"usage": usage_json(generation.usage)}


async def event_lines(
    generation: Generation, dialect: Dialect, head: Head, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """The same pieces as event lines, one item per batch; then the usage, if asked for, and [DONE]."""
    seen: set[int] = set()
    async with aclosing(generation.pieces()) as batches:
        async for batch in batches:
            lines = []
            for piece in batch:
                choice = dialect.chunk(piece, piece.index not in seen)
                if choice is None:
                    continue
                seen.add(piece.index)
                body = head.body(dialect.chunk_object_name, [choice])
                if options.continuous_usage_stats:
                    body["usage"] = usage_json(generation.usage)
                elif options.include_usage:
                    body["usage"] = None
                lines.append(b"data: %b\n\n" % _encode(body))
            if lines:
                yield b"".join(lines)
    if options.include_usage:
        body = head.body(dialect.chunk_object_name, []) | {"usage": usage_json(generation.usage)}
        yield b"data: %b\n\n" % _encode(body)
    yield _DONE


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first. Raises ClientGone then."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends event lines. The status line waits for the first of them, so that a request the engine refuses
    still gets its own status; a later failure becomes an error event before [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        is_started = False
        try:
            async with aclosing(self._lines) as lines:
                async for line in lines:
                    if not is_started:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                        is_started = True
                    await send({"type": "http.response.body", "body": line, "more_body": True})
        except Exception as exc:
            if not is_started:
                raise
            logger.warning("a stream broke off: %s", exc)
            body = _encode(describe(exc)[1])
            await send(
                {"type": "http.response.body", "body": b"data: %b\n\n" % body + _DONE, "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})
