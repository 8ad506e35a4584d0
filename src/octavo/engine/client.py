"""AsyncEngine: what the server speaks to. ProcessEngine: a client of an engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine import wire
from octavo.engine.messages import (
    Abort,
    Failed,
    FromEngine,
    GenerateRequest,
    Ready,
    Refused,
    Shutdown,
    StepOutputs,
    StepStats,
    Submit,
    TokenDelta,
)
from octavo.errors import EngineError, OctavoError, RequestError

StatsListener = Callable[[StepStats], None]
STOP_TIMEOUT_S = 5.0  # after that the engine process is killed


class AsyncEngine(Protocol):
    """Submit requests, stream tokens. Tests give the server a small fake of this."""

    info: Ready

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Deltas until every choice has finished. Closing the iterator early aborts the request, whose
        blocks are free after the next step.

        Raises RequestError when the engine refuses the request, EngineError when the engine is gone.
        """
        ...

    def add_stats_listener(self, listener: StatsListener) -> None:
        """Call `listener` with the stats of every step."""
        ...

    @property
    def is_alive(self) -> bool: ...


class ProcessEngine:
    """Starts the process, multiplexes requests over one socket. Belongs to one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        self.info = Ready(0, 0, 0, 0, [])
        self._process = process
        self._reader = reader
        self._writer: asyncio.StreamWriter | None = None
        self._queues: dict[str, asyncio.Queue[TokenDelta | OctavoError]] = {}
        self._listeners: list[StatsListener] = []
        self._is_alive = False
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig, model_path: Path) -> ProcessEngine:
        """Load the model in a new process; returns when it can serve.

        Raises ConfigError or ModelError as the engine did, EngineError when the process died.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "octavo.engine.process",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        engine = cls(process, reader)
        engine._writer = writer
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode((config, str(model_path))) + b"\n")
        try:
            engine.info = await engine._wait_until_ready()
        except BaseException:
            await engine._end_process()
            raise
        engine._is_alive = True
        engine._task = asyncio.create_task(engine._read())
        return engine

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    @property
    def pid(self) -> int:
        return self._process.pid

    def add_stats_listener(self, listener: StatsListener) -> None:
        self._listeners.append(listener)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        if not self._is_alive:
            raise EngineError("the engine process has ended: restart the server")
        queue: asyncio.Queue[TokenDelta | OctavoError] = asyncio.Queue()
        self._queues[request.request_id] = queue
        num_unfinished = request.params.n
        try:
            self._send(Submit(request))
            while num_unfinished:
                delta = await queue.get()
                if isinstance(delta, OctavoError):
                    num_unfinished = 0
                    raise delta
                num_unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            del self._queues[request.request_id]
            if num_unfinished and self._is_alive:
                self._send(Abort(request.request_id))

    async def stop(self) -> None:
        """End the process; requests still running get EngineError."""
        if self._is_alive:
            self._send(Shutdown())
        self._fail_all("the engine was stopped")
        await self._end_process()
        if self._task is not None:
            await self._task

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────

    def _send(self, message: Submit | Abort | Shutdown) -> None:
        assert self._writer is not None
        self._writer.write(wire.encode([message]))

    async def _wait_until_ready(self) -> Ready:
        try:
            message = await wire.read_from_engine(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineError("the engine process died while it loaded the model") from None
        if isinstance(message, Failed):
            raise _as_error(message)
        assert isinstance(message, Ready), f"the engine began with {message!r}"
        return message

    async def _read(self) -> None:
        """Hand out what the engine says until it ends."""
        try:
            while True:
                self._dispatch(await wire.read_from_engine(self._reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail_all("the engine process has ended: restart the server")

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(deltas, stats):
                for delta in deltas:
                    self._deliver(delta.request_id, delta)
                if stats is not None:
                    for listener in self._listeners:
                        listener(stats)
            case Refused(request_id, text, param, code):
                self._deliver(request_id, RequestError(text, param=param, code=code))
            case Failed():
                self._fail_all(message.message)

    def _deliver(self, request_id: str, item: TokenDelta | OctavoError) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:  # else its client went away a moment ago
            queue.put_nowait(item)

    def _fail_all(self, reason: str) -> None:
        self._is_alive = False
        for queue in self._queues.values():
            queue.put_nowait(EngineError(reason))

    async def _end_process(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _as_error(failed: Failed) -> OctavoError:
    """The engine's exception, raised again on this side."""
    kind = getattr(errors, failed.kind, EngineError)
    error: OctavoError = kind(failed.message)
    return error
