"""`make bench-peers`: Octavo over HTTP beside OpenVINO GenAI in process, on the same requests in one run.

    .venv/bin/python bench/peers.py [--concurrency 1,8,32]

Makes an environment for the peer in build/peers on first use. Each concurrency runs one engine after the other with
4·c requests; the figure to report is the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import venv
from pathlib import Path
from time import monotonic

import httpx
from load import requests
from rich.console import Console
from rich.table import Table

from octavo.weights import hub

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "build" / "peers"


def peer_python() -> Path:
    """The peer's interpreter, set up if need be."""
    python = PEER / "bin" / "python"
    if not python.exists():
        venv.create(PEER, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "openvino-genai"], check=True)
    return python


def measure_peer(model: Path, concurrency: int, count: int) -> float:
    script = Path(__file__).with_name("peer_openvino.py")
    command = [str(peer_python()), str(script), str(model), str(concurrency), str(count)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(found.stdout.splitlines()[-1])["output_tokens_per_s"])


def measure_octavo(model: Path, concurrency: int, count: int, flags: list[str]) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("octavo")), "serve", str(model), "--port", str(port)]
    server = subprocess.Popen([*command, "--served-model-name", "m", *flags], stdout=subprocess.DEVNULL)
    try:
        return asyncio.run(drive(f"http://127.0.0.1:{port}", concurrency, count))
    finally:
        server.terminate()
        server.wait()


async def drive(url: str, concurrency: int, count: int) -> float:
    """Closed loop of streamed completions; output tokens a second."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        while True:
            try:
                await client.get("/health")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        await asyncio.gather(*(complete(client, *r) for r in requests(2, seed=99)))  # warm up
        slots = asyncio.Semaphore(concurrency)

        async def one(prompt: str, max_tokens: int) -> int:
            async with slots:
                return await complete(client, prompt, max_tokens)

        begin = monotonic()
        counts = await asyncio.gather(*(one(*r) for r in requests(count, seed=0)))
        return sum(counts) / (monotonic() - begin)


async def complete(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> int:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith('data: {"'):
                last = line
    return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Octavo beside OpenVINO GenAI.")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--flags", default="", help="for octavo serve, separated by spaces")
    args = parser.parse_args()
    model = hub.resolve("")
    peer_python()
    table = Table(
        "concurrent requests", "Octavo (HTTP), tok/s", "OpenVINO GenAI (in process), tok/s", "ratio"
    )
    rows = []
    for concurrency in map(int, args.concurrency.split(",")):
        count = max(6, 4 * concurrency)
        mine = measure_octavo(model, concurrency, count, args.flags.split())
        theirs = measure_peer(model, concurrency, count)
        rows.append({"concurrency": concurrency, "octavo": mine, "openvino": theirs})
        table.add_row(str(concurrency), f"{mine:,.0f}", f"{theirs:,.0f}", f"{mine / theirs:.2f}")
    Console().print(table)
    (ROOT / "build" / "bench").mkdir(parents=True, exist_ok=True)
    (ROOT / "build" / "bench" / "peers.json").write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
