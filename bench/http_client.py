"""What bench/peers.py asks of an OpenAI server: a closed loop, one stream, one long prompt."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from time import monotonic

from load import closed_loop, words

TIMEOUT_S = 600  # of a request


@dataclass(frozen=True, slots=True)
class Completion:
    prompt_tokens: int
    output_tokens: int
    begin: float  # seconds of the monotonic clock
    first: float
    last: float


async def serve(port: int, concurrency: int, turn: int) -> float:
    """Closed loop: output tokens a second."""
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: str, max_tokens: int) -> int:
        async with slots:
            return (await complete(port, prompt, max_tokens)).output_tokens

    begin = monotonic()
    counts = await asyncio.gather(*(one(*r) for r in closed_loop(concurrency, turn)))
    return sum(counts) / (monotonic() - begin)


async def decode(port: int, num_tokens: int) -> float:
    """One stream, from its first token to its last: tokens a second."""
    done = await complete(port, words(20, random.Random()), num_tokens)
    return (done.output_tokens - 1) / (done.last - done.first)


async def prefill(port: int, num_words: int) -> float:
    """One prompt that nobody has seen and one token out: prompt tokens a second."""
    done = await complete(port, words(num_words, random.Random()), 1)
    return done.prompt_tokens / (done.last - done.begin)


async def complete(port: int, prompt: str, max_tokens: int) -> Completion:
    """Of plain streams and without reading more of an event than it must, because it shares the server's cores.
    Raises RuntimeError with the server's words unless it answers 200."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    begin = monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        times, usage = await _stream(port, head.encode() + data)
    return Completion(usage["prompt_tokens"], usage["completion_tokens"], begin, times[0], times[-1])


async def _stream(port: int, request: bytes) -> tuple[list[float], dict[str, int]]:
    """When each event came, and the usage."""
    times: list[float] = []
    usage: dict[str, int] = {}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
        async for line in reader:
            if line.startswith(b'data: {"'):
                times.append(monotonic())
                if b'"usage":{' in line:
                    usage = json.loads(line.removeprefix(b"data: "))["usage"]
    finally:
        writer.close()
    return times, usage
