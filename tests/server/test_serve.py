"""Starting and ending: the port, the model's name, signals, and errors before anything is loaded."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.errors import ConfigError
from octavo.server.serve import ServeOptions, bind, serve, short_name

# A server whose engine and tokenizer are the fakes of conftest.py, in a process of its own.
SCRIPT = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("fakes", sys.argv[1])
fakes = sys.modules["fakes"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fakes)
from octavo.config import EngineConfig
from octavo.server import serve

class Engine(fakes.RecitingEngine):
    @classmethod
    async def start(cls, config, path):
        engine = cls(delay_s=0.02)
        engine.info = fakes.Ready(4096, fakes.VOCAB, 1024, 16, ["report: " + str(path)])
        return engine

    async def ended(self):
        while self.is_alive:
            await fakes.asyncio.sleep(0.01)
        return "the engine process ended with exit code 7"

    async def stop(self):
        if self.is_alive:
            print("engine stopped", flush=True)
        self.fail_after, self.is_alive = 0, False

serve.ProcessEngine = Engine
serve._load_texts = lambda path: (fakes.ByteTokenizer(), fakes.ChatTemplate(fakes.TEMPLATE))
serve.serve(EngineConfig(model=sys.argv[1]), serve.ServeOptions(port=int(sys.argv[2])))
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def server(port: int) -> Iterator[subprocess.Popen[str]]:
    """Started, up to its ready line."""
    fakes = str(Path(__file__).with_name("conftest.py"))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, fakes, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        report, ready, command = (process.stdout.readline() for _ in range(3))
        assert report == f"report: {fakes}\n"
        assert ready == f"Octavo is ready on http://127.0.0.1:{port} (model conftest.py)\n"
        assert command.startswith(f"  curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_requests_in_flight_and_exits_cleanly(
    server: subprocess.Popen[str], port: int, number: signal.Signals
) -> None:
    fields = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=fields) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith('data: {"id":"cmpl-')
        started = time.monotonic()
        server.send_signal(number)
        rest = [line for line in lines if line]
    assert '"code":"engine_unavailable"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    out, err = server.communicate(timeout=5)
    assert server.returncode == 0
    assert time.monotonic() - started < 4
    assert out.endswith("engine stopped\n")
    assert "Traceback" not in err


def test_an_idle_server_ends_at_once(server: subprocess.Popen[str], port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=2)
    assert server.returncode == 0


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_offers_of_other_protocols_are_answered_without_a_warning(
    server: subprocess.Popen[str], port: int, offer: str
) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": offer}
    for _ in range(2):
        assert httpx.get(f"http://127.0.0.1:{port}/health", headers=headers).status_code == 200
    server.send_signal(signal.SIGTERM)
    assert server.communicate(timeout=10)[1] == ""


def test_a_taken_port_is_said_before_anything_is_loaded(port: int) -> None:
    config = EngineConfig(model="/no/such/model.gguf")
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1:{port}: address already in use; choose"
        ),
    ):
        serve(config, ServeOptions(port=port))


def test_wrong_flags_are_said_before_the_port_is_taken() -> None:
    with pytest.raises(ConfigError, match="--block-size"):
        serve(EngineConfig(block_size=0), ServeOptions(port=1))


def test_ports_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="--port 70000: ports are 0 to 65535"):
        bind("127.0.0.1", 70_000)


def test_addresses_of_other_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1:0: cannot assign requested address"):
        bind("192.0.2.1", 0)


def test_hosts_without_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match="--host nowhere: Name or service not known"):
        bind("nowhere", 0)


def test_port_zero_is_any_free_port() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("model", "path", "expected"),
    [
        (DEFAULT_MODEL, "/cache/whatever.gguf", "SmolLM2-135M-Instruct"),
        ("smollm2", "/cache/whatever.gguf", "smollm2"),
        ("hf:org/repo", "/cache/snapshots/0123", "org/repo"),
        ("hf:org/repo/file-Q8.gguf", "/cache/file-Q8.gguf", "file"),
        ("/models/some.gguf", "/models/some.gguf", "some"),
        ("/models/folder/", "/models/folder", "folder"),
    ],
)
def test_the_name_clients_use(model: str, path: str, expected: str) -> None:
    assert short_name(model, Path(path)) == expected
