"""The engine in a process of its own: `python -m octavo.engine.process FD`.

The step loop shares no interpreter lock with HTTP. The process reads its configuration from the socket it
is given, answers Ready or Failed, then steps while there is work and sleeps in a read when there is none.
It ends when told to or when the other side is gone; nothing is left behind. What it did not expect it says as
a Failed, on one line; --debug prints the traceback as well.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import sys
import traceback
from pathlib import Path
from time import monotonic
from typing import NoReturn

import msgspec

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.messages import (
    Abort,
    Failed,
    GenerateRequest,
    Refused,
    Reply,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    Submit,
    TakeSnapshot,
    ToEngine,
)
from octavo.engine.wire import EngineSocket
from octavo.errors import OctavoError, RequestError

# A step makes a few objects for each sequence and drops them all, without cycles: at Python's own threshold of 700
# the collector runs several times a step and keeps finding nothing.
GC_THRESHOLD = (10_000, 20, 50)


class EngineLoop:
    """Between the socket and the engine."""

    def __init__(self, engine: Engine, sock: EngineSocket) -> None:
        self._engine = engine
        self._socket = sock
        self._is_running = True
        self._has_memory = False  # whether the cache's memory is taken

    def run(self) -> None:
        while self._is_running and self._socket.is_open:
            self._handle(self._socket.receive(wait=self._has_memory and not self._engine.has_work))
            if self._engine.has_work:
                outputs = self._engine.step()
                if outputs.deltas or outputs.stats is not None:
                    self._socket.send(outputs)
            elif not self._has_memory:
                self._has_memory = not self._engine.executor.take_memory()

    def _handle(self, messages: ToEngine) -> None:
        for message in messages:
            match message:
                case Submit(request):
                    self._submit(request)
                case Abort(request_id, index, reason):
                    self._engine.abort(request_id, index, reason)
                case ResetPrefixCache(call_id):
                    self._socket.send(Reply(call_id, self._engine.reset_prefix_cache()))
                    self._socket.send(StepOutputs([], self._engine.observer.snapshot()))
                case TakeSnapshot(call_id):
                    self._socket.send(Reply(call_id, self._engine.snapshot()))
                case Shutdown():
                    self._is_running = False

    def _submit(self, request: GenerateRequest) -> None:
        try:
            self._engine.add_request(request)
        except RequestError as error:
            self._socket.send(Refused(request.request_id, str(error), error.param, error.code))


def main(fd: int) -> None:
    # Ctrl-C goes to the whole process group, a supervisor's SIGTERM often too; the server decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    started = monotonic()
    connection = EngineSocket(socket.socket(fileno=fd))
    config, model_path = _read_config()
    try:
        engine = build_engine(config, model_path)
    except OctavoError as error:
        _give_up(connection, Failed(type(error).__name__, str(error)))
    except Exception as error:
        _give_up(connection, _unexpected("the model could not be loaded", error, config.debug))
    engine.info.report.append(f"loaded in {monotonic() - started:.1f} s")
    gc.collect()
    gc.freeze()  # what was loaded stays: the collector need not look at it again between steps
    gc.set_threshold(*GC_THRESHOLD)
    try:
        connection.send(engine.info)
        EngineLoop(engine, connection).run()
    except ConnectionError:
        return  # the server is gone: so are we
    except Exception as error:
        _give_up(connection, _unexpected("the engine failed", error, config.debug))


def _give_up(connection: EngineSocket, failed: Failed) -> NoReturn:
    with contextlib.suppress(ConnectionError):
        connection.send(failed)
    sys.exit(1)


def _unexpected(what: str, error: Exception, debug: bool) -> Failed:
    """A fault of Octavo's own: on one line, with the place."""
    if debug:
        traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return Failed("EngineError", f"{what}: {type(error).__name__}: {error} ({place})")


def _read_config() -> tuple[EngineConfig, Path]:
    """One JSON line on standard input: [config, path of the model]."""
    config, path = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[EngineConfig, str])
    return config, Path(path)


if __name__ == "__main__":
    main(int(sys.argv[1]))
