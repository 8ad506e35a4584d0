"""`make bench-peers`: Octavo and llama.cpp's server over HTTP, OpenVINO GenAI in process, on the same requests.

    .venv/bin/python bench/peers.py [--model gemma3-270m] [--concurrency 1,8,32] [--turns 3]
                                    [--flags "--weight-dtype native"]

Makes an environment for the peers in build/peers on first use. All engines stay loaded and take turns, measurement
by measurement, so that each ratio is of figures taken within seconds of each other. Rates and ratios are medians
over the turns: a machine whose memory has other users changes from one to the next. A peer that cannot load the
model is left out, and its reason printed. Writes build/bench/MODEL/peers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import IO, Protocol

import http_client
import httpx
from report import ROOT, Row, model_name, number, save
from rich.console import Console
from rich.table import Table

from octavo.weights import hub

HERE, PEERS = Path(__file__).parent, ROOT / "build" / "peers"
PACKAGES = {"OpenVINO GenAI": "openvino-genai", "llama.cpp": "xllamacpp"}
NAMES = ("Octavo", *PACKAGES)
NUM_DECODED, NUM_PROMPT_WORDS = 200, 512
SHORT = 3  # turns of a measurement of one stream to one of a closed loop
START_S = 120.0  # for loading a model


class Engine(Protocol):
    def measure(self, kind: str, *values: int) -> float:
        """serve: output tokens/s of so many requests at a time, others in each turn, the second value. decode:
        tokens/s of one stream of so many tokens. prefill: prompt tokens/s of so many words."""
        ...


class HttpEngine:
    def __init__(self, port: int) -> None:
        self._port = port

    def measure(self, kind: str, *values: int) -> float:
        rate: float = asyncio.run(getattr(http_client, kind)(self._port, *values))
        return rate

    def wait(self, process: subprocess.Popen[str]) -> None:
        """Until it answers. Raises RuntimeError with its last words if it ends instead."""
        deadline = monotonic() + START_S
        while process.poll() is None and monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{self._port}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            sleep(0.2)
        raise RuntimeError("did not start")


class PipedEngine:
    """peer_openvino.py: a question a line, an answer a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to: IO[str] = process.stdin
        self._from: IO[str] = process.stdout
        self._answer()

    def measure(self, kind: str, *values: int) -> float:
        print(kind, *values, file=self._to, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        line = self._from.readline()
        if not line:
            raise RuntimeError("ended without an answer")
        return line


@contextmanager
def running(command: list[str], log: Path, is_piped: bool) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended at the end. Its output is read from here, or else goes to `log`."""
    with log.open("w") as err:
        to, out = (subprocess.PIPE, subprocess.PIPE) if is_piped else (subprocess.DEVNULL, err)
        process = subprocess.Popen(command, stdin=to, stdout=out, stderr=err, text=True)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def start(name: str, model: Path, slots: int, flags: list[str], stack: ExitStack) -> Engine:
    """Raises RuntimeError: the engine's own words."""
    python, port = str(PEERS / "bin" / "python"), free_port()
    octavo = str(Path(sys.executable).with_name("octavo"))
    serve = ["serve", str(model), "--served-model-name", "m", "--port", str(port), *flags]
    commands = {
        "Octavo": [octavo, *serve],
        "llama.cpp": [python, str(HERE / "peer_llamacpp.py"), str(model), str(slots), str(port)],
        "OpenVINO GenAI": [python, str(HERE / "peer_openvino.py"), str(model), str(slots)],
    }
    log, is_piped = PEERS / f"{name}.log", name == "OpenVINO GenAI"
    process = stack.enter_context(running(commands[name], log, is_piped))
    try:
        if is_piped:
            return PipedEngine(process)
        engine = HttpEngine(port)
        engine.wait(process)
        return engine
    except RuntimeError as error:
        process.terminate()
        process.wait()
        said = [line for line in log.read_text().splitlines() if line.strip()]
        raise RuntimeError(f"{name} {error}: {said[-1] if said else 'no message'}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def install() -> None:
    """The peers' environment, unless it is there."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        venv.create(PEERS, with_pip=True)
    if subprocess.run(
        [str(python), "-c", "import openvino_genai, xllamacpp"], capture_output=True
    ).returncode:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES.values()], check=True)


def versions() -> dict[str, str]:
    code = "from importlib.metadata import version; import sys; print(*map(version, sys.argv[1:]))"
    command = [str(PEERS / "bin" / "python"), "-c", code, *PACKAGES.values()]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(PACKAGES, found, strict=True))


def measure(engines: dict[str, Engine], what: str, kind: str, value: int, turns: int) -> Row:
    """Medians over the turns of each engine's rate and of the ratios within a turn; lowest and highest too."""
    asked = [(value, turn) if kind == "serve" else (value,) for turn in range(turns)]
    taken = [{name: e.measure(kind, *values) for name, e in engines.items()} for values in asked]
    more = {}
    for name in (n for n in engines if n != "Octavo"):
        ratios = [turn["Octavo"] / turn[name] for turn in taken]
        more[name] = median(turn[name] for turn in taken)
        more[f"ratio to {name}"] = median(ratios)
        more[f"lowest ratio to {name}"], more[f"highest ratio to {name}"] = min(ratios), max(ratios)
    return Row(what, median(turn["Octavo"] for turn in taken), "tok/s", None, more)


def show(rows: list[Row], names: list[str]) -> None:
    peers = [n for n in names if n != "Octavo"]
    table = Table(
        "tokens/s", "Octavo", *(column for name in peers for column in (name, "ratio", "from – to"))
    )
    for row in rows:
        cells = []
        for name in peers:
            low, high = (number(row.more[f"{which} ratio to {name}"]) for which in ("lowest", "highest"))
            cells += [number(row.more[name]), number(row.more[f"ratio to {name}"]), f"{low} – {high}"]
        table.add_row(row.what, number(row.value), *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="as for octavo serve; a GGUF file")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--engines", default=",".join(NAMES), help="some of them")
    parser.add_argument("--flags", default="", help="for octavo serve, separated by spaces")
    parser.add_argument(
        "--turns", type=int, default=1, help=f"of a closed loop; {SHORT} times that of one stream"
    )
    args = parser.parse_args()
    if unknown := set(args.engines.split(",")) - set(NAMES):
        parser.error(f"--engines {', '.join(sorted(unknown))}: use some of {', '.join(NAMES)}")
    if args.turns < 1:
        parser.error(f"--turns {args.turns}: at least 1")
    model = hub.resolve(args.model)
    concurrency = [int(c) for c in args.concurrency.split(",")]
    install()
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in args.engines.split(","):
            try:
                engines[name] = start(name, model, max(concurrency), args.flags.split(), stack)
                engines[name].measure("decode", 32)  # warm up
            except RuntimeError as error:
                if name == "Octavo":
                    raise
                print(f"left out: {error}", flush=True)
        short, prompt = SHORT * args.turns, f"prompt of {NUM_PROMPT_WORDS} words"
        rows = [measure(engines, "one stream, decoding", "decode", NUM_DECODED, short)]
        rows.append(measure(engines, prompt, "prefill", NUM_PROMPT_WORDS, short))
        rows += [measure(engines, f"serve, c={c}", "serve", c, args.turns) for c in concurrency]
    show(rows, list(engines))
    save(model_name(args.model), "peers", vars(args) | {"versions": versions()}, rows)


if __name__ == "__main__":
    main()
