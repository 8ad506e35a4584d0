"""One HTTP request's prompts through the engine: token deltas in, text pieces of numbered choices out.

    prompt 0 ─▶ choices 0 … n-1
    prompt 1 ─▶ choices n … 2n-1          merged as they come

It knows no HTTP and no JSON. A choice that a stop string ended is ended in the engine at once, while the others
go on; closing the iterator aborts whatever still runs there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from msgspec.structs import replace

from octavo.core.delta import TokenDelta
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import AsyncEngine
from octavo.engine.messages import GenerateRequest
from octavo.server.convert import Prompt
from octavo.server.errors import HTTPError
from octavo.text.output import RequestAssembler, TextDelta, TokenTexts, Usage


def generate_requests(
    request_id: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams], cache_salt: str | None
) -> list[GenerateRequest]:
    """One engine request per prompt; `params` has one entry per prompt, all with the same n."""
    now = time.monotonic()
    return [
        GenerateRequest(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
            prompt_token_ids=prompt.token_ids,
            params=own,
            cache_salt=cache_salt,
            arrival_s=now,
        )
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]


class Generation:
    """The running prompts of one HTTP request. Without `has_output` the tokens drawn are dropped here:
    the client wanted the prompts' log-probabilities only."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: TokenTexts,
        requests: Sequence[GenerateRequest],
        *,
        has_output: bool = True,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._has_output = has_output
        self._assemblers = [RequestAssembler(tokenizer, r.params, r.prompt_token_ids) for r in requests]

    @property
    def usage(self) -> Usage:
        """Over all prompts, up to now."""
        parts = [assembler.usage for assembler in self._assemblers]
        return Usage(
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            completion_tokens=sum(part.completion_tokens for part in parts) if self._has_output else 0,
            cached_tokens=sum(part.cached_tokens for part in parts),
        )

    def pieces(self) -> AsyncGenerator[list[TextDelta], None]:
        """Batches of what is there, until every choice has finished.

        Raises EngineError if the engine goes away, HTTPError if it gives one of the requests up.
        """
        return self._merged() if len(self._requests) > 1 else self._of_prompt(0)

    async def _of_prompt(self, number: int) -> AsyncGenerator[list[TextDelta], None]:
        assembler, request = self._assemblers[number], self._requests[number]
        first_choice = number * request.params.n
        stream = cast("AsyncGenerator[TokenDelta, None]", self._engine.generate(request))
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                piece = assembler.push(delta)
                if piece is None:
                    continue
                if piece.finish_reason == "error":
                    raise _given_up(piece.error)
                if piece.needs_abort:  # the engine would go on behind a stop string
                    self._engine.end_choice(request.request_id, piece.index)
                if first_choice or not self._has_output:
                    piece = self._adjusted(piece, first_choice)
                yield [piece]

    def _adjusted(self, piece: TextDelta, first_choice: int) -> TextDelta:
        piece = replace(piece, index=first_choice + piece.index)
        if self._has_output:
            return piece
        no_entries = None if piece.logprobs is None else ()
        return replace(piece, text="", token_ids=(), logprobs=no_entries, stop_reason=None)

    async def _merged(self) -> AsyncGenerator[list[TextDelta], None]:
        queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue()

        async def pump(number: int) -> None:
            try:
                async for batch in self._of_prompt(number):
                    for piece in batch:
                        queue.put_nowait(piece)
            except Exception as exc:
                queue.put_nowait(exc)
            else:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(pump(number)) for number in range(len(self._requests))]
        num_running = len(tasks)
        try:
            while num_running:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                num_running -= sum(item is None for item in items)
                batch = [item for item in items if isinstance(item, TextDelta)]
                if batch:
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _given_up(reason: str | None) -> HTTPError:
    message = f"The engine gave this request up: {reason or 'no reason given'}"
    return HTTPError(500, message, kind="server_error", code="engine_error")
