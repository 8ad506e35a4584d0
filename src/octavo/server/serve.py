"""serve: an engine process and the HTTP server in front of it, from flags to a clean end.

    bind the port ─▶ find the model ─▶ start the engine ┬▶ ready line ─▶ serve until SIGINT or SIGTERM
                                       load tokenizer   ┘

The port comes first: a taken port is said before anything is loaded. Ending stops the engine first, so that
requests in flight end with an error instead of holding the server open. A server whose engine has died ends too,
with an error: what supervises it starts both again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import uvicorn

from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.engine.check_config import check_config
from octavo.engine.client import ProcessEngine
from octavo.errors import ConfigError, EngineError
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.weights import hub
from octavo.weights.loader import open_texts

_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they and not we close them
_GRACE_S = 3  # for answers to be written out after the engine has stopped
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Not httptools, which uvicorn would take where it is installed: it drops the body of a request that offers to
# upgrade to HTTP/2, as Java's client does with each, and bounds no head.
HTTP_PARSER: Literal["h11"] = "h11"
_OFFERS = ("Unsupported upgrade request", "No supported WebSocket library")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = None
    served_model_names: tuple[str, ...] = ()  # empty: a short form of the model's name


# How the weights are stored, at the end of a file's name: no part of the model's name
_FILE_FORMAT = re.compile(r"[.-](?:I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


def serve(config: EngineConfig, options: ServeOptions) -> None:
    """Returns after SIGINT or SIGTERM. Raises ConfigError, ModelError or EngineError if it cannot start, and
    EngineError if the engine dies."""
    check_config(config)
    level = logging.DEBUG if config.debug else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_is_no_offer)
    with contextlib.closing(bind(options.host, options.port)) as listener:
        path = hub.resolve(config.model)
        asyncio.run(_run(config, options, path, listener))


def _is_no_offer(record: logging.LogRecord) -> bool:
    """False for what uvicorn warns of when a client offers another protocol: it is answered in HTTP/1.1."""
    return not record.getMessage().startswith(_OFFERS)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError, naming the remedy, if there can be none."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--port {port}: ports are 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"--host {host}: {error.strerror or error}; give an address of this machine"
        ) from None
    try:
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from None


def short_name(model: str, path: Path) -> str:
    """What a model is called if no name is given: an alias or a repository as asked for, else its file."""
    if model in hub.ALIASES and model:
        return model
    scheme, _, rest = model.partition(":")
    if scheme == "hf" and rest.count("/") == 1:
        return rest
    name = path.name.removesuffix(".gguf") if model != DEFAULT_MODEL else Path(model).stem
    return _FILE_FORMAT.sub("", name)


async def _run(config: EngineConfig, options: ServeOptions, path: Path, listener: socket.socket) -> None:
    engine, (tokenizer, template) = await _load(config, path)
    try:
        names = options.served_model_names or (short_name(config.model, path),)
        settings = ServerSettings(
            served_model_names=names,
            model_root=path.name,
            api_key=options.api_key,
            max_logprobs=config.max_logprobs,
        )
        app = create_app(engine, tokenizer, template, settings)
        server = _Server(
            uvicorn.Config(
                app,
                http=HTTP_PARSER,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
            ),
            engine,
        )
        for line in (*engine.info.report, *_ready_lines(listener, names[0], options.api_key is not None)):
            print(line, flush=True)
        await server.serve(sockets=[listener])
        if server.failure is not None:
            raise EngineError(f"{server.failure}; the server has stopped")
    finally:
        await engine.stop()


async def _load(config: EngineConfig, path: Path) -> tuple[ProcessEngine, tuple[Tokenizer, ChatTemplate]]:
    """Engine and tokenizer at the same time."""
    starting = asyncio.create_task(ProcessEngine.start(config, path))
    try:
        texts = await asyncio.to_thread(_load_texts, path)
        return await starting, texts
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise


def _load_texts(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer, template = open_texts(path)
    return tokenizer, ChatTemplate.for_tokenizer(template, tokenizer)


def _ready_lines(listener: socket.socket, model: str, needs_key: bool) -> list[str]:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return [
        f"Octavo is ready on {url} (model {model})",
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\",
        '    -d \'{"messages": [{"role": "user", "content": "Hello!"}]}\'',
    ]


class _Server(uvicorn.Server):
    """uvicorn, but it ends requests in flight at once, does not raise the signal again afterwards, and ends by
    itself when the engine does. `failure` is why."""

    def __init__(self, config: uvicorn.Config, engine: ProcessEngine) -> None:
        super().__init__(config)
        self._engine = engine
        self.failure: str | None = None
        self._watching: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._watching = asyncio.create_task(self._watch())
        try:
            await super().serve(sockets)
        finally:
            self._watching.cancel()

    async def _watch(self) -> None:
        self.failure = await self._engine.ended()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watching is not None:
            self._watching.cancel()  # from here on the engine ends because it is told to
        await self._engine.stop()
        await super().shutdown(sockets)
