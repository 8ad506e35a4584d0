"""AsyncEngine: what the server speaks to. ProcessEngine: a client of an engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.core.delta import TokenDelta
from octavo.engine import wire
from octavo.engine.messages import (
    Abort,
    BlockSnapshot,
    Failed,
    FromEngine,
    GenerateRequest,
    Ready,
    Refused,
    Reply,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    StepStats,
    Submit,
    TakeSnapshot,
)
from octavo.errors import EngineError, OctavoError, RequestError

StatsListener = Callable[[StepStats], None]
STOP_TIMEOUT_S = 5.0  # after that the engine process is killed
_GONE = "the engine process has ended: restart the server"


class AsyncEngine(Protocol):
    """Submit requests, stream tokens. Tests give the server a small fake of this."""

    info: Ready

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Deltas until every choice has finished. Closing the iterator early aborts the request, whose
        blocks are free after the next step.

        Raises RequestError when the engine refuses the request, EngineError when the engine is gone.
        """
        ...

    def end_choice(self, request_id: str, index: int) -> None:
        """A stop string ended this choice: its blocks are free after the next step, and no more deltas of it
        come out of generate(), which is over with the last choice."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; returns how many blocks could be found. Raises EngineError."""
        ...

    async def snapshot(self) -> BlockSnapshot:
        """The block pool and all tables. Raises EngineError."""
        ...

    def add_stats_listener(self, listener: StatsListener) -> None:
        """Call `listener` with the stats whenever the engine makes some (observe.py)."""
        ...

    @property
    def is_alive(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Stream:
    """One request of generate()."""

    unfinished: set[int]  # choices
    queue: asyncio.Queue[TokenDelta | OctavoError] = field(default_factory=asyncio.Queue)


class ProcessEngine:
    """Starts the process, multiplexes requests over one socket. Belongs to one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        self.info = Ready(0, 0, 0, 0, [])
        self._process = process
        self._reader = reader
        self._writer: asyncio.StreamWriter | None = None
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[int | BlockSnapshot]] = {}
        self._num_calls = 0
        self._reason: str | None = None  # why it ended, in its own words
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
            raise EngineError(_GONE)
        stream = _Stream(set(range(request.params.n)))
        self._streams[request.request_id] = stream
        try:
            self._send(Submit(request))
            while stream.unfinished:
                item = await stream.queue.get()
                if isinstance(item, OctavoError):
                    stream.unfinished.clear()
                    raise item
                if item.choice in stream.unfinished:
                    if item.finish_reason is not None:
                        stream.unfinished.remove(item.choice)
                    yield item
        finally:
            del self._streams[request.request_id]
            if stream.unfinished and self._is_alive:
                self._send(Abort(request.request_id))

    def end_choice(self, request_id: str, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and index in stream.unfinished:
            stream.unfinished.remove(index)
            if self._is_alive:
                self._send(Abort(request_id, index, "stop"))

    async def reset_prefix_cache(self) -> int:
        value = await self._call(ResetPrefixCache)
        assert isinstance(value, int), f"the engine answered {value!r}"
        return value

    async def snapshot(self) -> BlockSnapshot:
        value = await self._call(TakeSnapshot)
        assert isinstance(value, BlockSnapshot), f"the engine answered {value!r}"
        return value

    async def ended(self) -> str:
        """Wait until the process has ended without having been told to, and say why."""
        assert self._task is not None
        await asyncio.shield(self._task)
        code = await self._process.wait()
        return self._reason or f"the engine process {_fate(code)}"

    async def stop(self) -> None:
        """End the process; requests still running get EngineError."""
        if self._is_alive:
            self._send(Shutdown())
        self._fail_all("the engine was stopped")
        await self._end_process()
        if self._task is not None:
            await self._task

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────

    def _send(self, message: Submit | Abort | ResetPrefixCache | TakeSnapshot | Shutdown) -> None:
        assert self._writer is not None
        self._writer.write(wire.encode([message]))

    async def _call(self, make: type[ResetPrefixCache | TakeSnapshot]) -> int | BlockSnapshot:
        if not self._is_alive:
            raise EngineError(_GONE)
        self._num_calls += 1
        call_id = self._num_calls
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(call_id))
            value: int | BlockSnapshot = await answer
            return value
        finally:
            del self._calls[call_id]

    async def _wait_until_ready(self) -> Ready:
        try:
            message = await wire.read_from_engine(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            raise EngineError(f"the engine process {_fate(code)} while it loaded the model") from None
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
            self._fail_all(_GONE)

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
            case Reply(call_id, value):
                answer = self._calls.get(call_id)
                if answer is not None and not answer.done():
                    answer.set_result(value)
            case Failed(_, text):
                self._reason = text
                self._fail_all(text)

    def _deliver(self, request_id: str, item: TokenDelta | OctavoError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:  # else its client went away a moment ago
            stream.queue.put_nowait(item)

    def _fail_all(self, reason: str) -> None:
        self._is_alive = False
        for stream in self._streams.values():
            stream.queue.put_nowait(EngineError(reason))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineError(reason))

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


def _fate(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL: did memory run out?)"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _as_error(failed: Failed) -> OctavoError:
    """The engine's exception, raised again on this side."""
    kind = getattr(errors, failed.kind, EngineError)
    error: OctavoError = kind(failed.message)
    return error
