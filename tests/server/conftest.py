"""A byte tokenizer, an engine that recites a text, and an app over both; with or without a real socket."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from octavo.core.delta import TokenDelta, TokenLogprobs
from octavo.engine.messages import (
    BlockSnapshot,
    GenerateRequest,
    Ready,
    SequenceBlocks,
    StepStats,
)
from octavo.errors import EngineError, RequestError
from octavo.server.app import create_app
from octavo.server.serve import HTTP_PARSER
from octavo.server.settings import ServerSettings
from octavo.text.chat_template import ChatTemplate

BOS, EOS, VOCAB = 256, 257, 260
MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if shout %}LOUD\n{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class ByteTokenizer:
    """One token a byte, a start token in front; ids 258 and 259 have no text."""

    vocab_size = VOCAB
    bos_token_id = BOS
    eos_token_ids = (EOS,)
    drops_first_space = False
    _names = {BOS: "<s>", EOS: "</s>"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self._names.get(token_id, "").encode()

    def token_text(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("latin-1")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._names


@dataclass
class RecitingEngine:
    """Answers every prompt with `reply`, one byte a token, then EOS; records what it was asked. Choice i says
    replies[i], if there are any."""

    reply: str = "Hello, world."
    replies: tuple[str, ...] = ()
    delay_s: float = 0.0  # before each token
    fail_after: int | None = None  # tokens; then the engine dies
    give_up_after: int | None = None  # tokens; then the request ends with an error
    refusal: RequestError | None = None
    num_cached: int = 0
    is_alive: bool = True
    info: Ready = field(default_factory=lambda: Ready(128, VOCAB, 1024, 16, []))
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    ended_choices: list[tuple[str, int]] = field(default_factory=list)
    snapshot_now: BlockSnapshot = field(
        default_factory=lambda: BlockSnapshot(4, [1, 0], [0], [1], [SequenceBlocks("r", 0, 0, [0], 3)])
    )
    num_cached_blocks: int = 0
    listeners: list[Callable[[StepStats], None]] = field(default_factory=list)
    num_running: int = 0

    def add_stats_listener(self, listener: Callable[[StepStats], None]) -> None:
        self.listeners.append(listener)

    def end_choice(self, request_id: str, index: int) -> None:
        self.ended_choices.append((request_id, index))

    async def reset_prefix_cache(self) -> int:
        self._must_live()
        cleared, self.num_cached_blocks = self.num_cached_blocks, 0
        return cleared

    async def snapshot(self) -> BlockSnapshot:
        self._must_live()
        return self.snapshot_now

    def _must_live(self) -> None:
        if not self.is_alive:
            raise EngineError("the engine process has ended: restart the server")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.num_running += 1
        is_over = False
        try:
            if self.refusal is not None:
                raise self.refusal
            choices = {index: self._tokens(request, index) for index in range(request.params.n)}
            for position in itertools.count():
                await asyncio.sleep(self.delay_s)
                for index in list(choices):
                    delta = self._delta(request, position, next(choices[index]), index)
                    if delta.finish_reason is not None:
                        del choices[index]
                    is_over = not choices
                    yield delta
                    if (request.request_id, index) in self.ended_choices:
                        choices.pop(index, None)
                is_over = not choices
                if is_over:
                    return
        except (EngineError, RequestError):
            is_over = True
            raise
        finally:
            self.num_running -= 1
            if not is_over:
                self.aborted.append(request.request_id)

    def _tokens(self, request: GenerateRequest, index: int) -> Iterator[int]:
        data = (self.replies[index] if self.replies else self.reply).encode()
        while True:
            yield from data
            if not request.params.ignore_eos:
                yield EOS

    def _delta(self, request: GenerateRequest, position: int, token: int, index: int) -> TokenDelta:
        params, count = request.params, position + 1
        if self.fail_after is not None and count > self.fail_after:
            self.is_alive = False
            raise EngineError("the engine died")
        if self.give_up_after is not None and count > self.give_up_after:
            return TokenDelta(request.request_id, 0, (), finish_reason="error", error="not a number")
        is_stop = token == EOS or token in params.stop_token_ids
        limit = params.max_tokens or self.info.max_model_len - len(request.prompt_token_ids)
        logprobs = prompt_logprobs = None
        if params.logprobs is not None:
            logprobs = (logprob(token, params.logprobs),)
        if params.prompt_logprobs is not None and position == index == 0:
            prompt_logprobs = [logprob(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:]]
        return TokenDelta(
            request.request_id,
            index,
            (token,),
            logprobs=logprobs,
            finish_reason="stop" if is_stop else "length" if count == limit else None,
            stop_token_id=token if is_stop else None,
            num_cached_tokens=self.num_cached,
            prompt_logprobs=prompt_logprobs,
        )


def logprob(token: int, num_top: int) -> TokenLogprobs:
    """The token itself is second best; 'z' leads."""
    return TokenLogprobs(token, -1.5, 2, [(ord("z"), -0.5), (token, -1.5), (0, float("-inf"))][:num_top])


@pytest.fixture
def engine() -> RecitingEngine:
    return RecitingEngine()


@pytest.fixture
def make_app(engine: RecitingEngine) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        chosen = {"served_model_names": (MODEL, "alias"), "model_root": "/models/tiny.gguf"} | settings
        return create_app(engine, ByteTokenizer(), ChatTemplate(TEMPLATE), ServerSettings(**chosen))

    return make


@pytest.fixture
def call(make_app: Callable[..., Any]) -> Callable[..., httpx.Response]:
    """call("POST", path, json=…): one request straight into the app. `app=` takes another one."""
    default = make_app()

    def send(method: str, path: str, app: Any = None, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=app or default, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(go())

    return send


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """serve(app) runs it on a free port and returns the base URL."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, http=HTTP_PARSER, log_level="error", timeout_graceful_shutdown=2)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        wait_for(lambda: server.started)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(5.0)


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[..., None]:
    return wait_for
