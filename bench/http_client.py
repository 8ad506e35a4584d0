"""What bench/peers.py asks of an OpenAI server: a closed loop, one stream, one long prompt."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from time import monotonic

import httpx
from load import requests, words


@dataclass(frozen=True, slots=True)
class Completion:
    prompt_tokens: int
    output_tokens: int
    begin: float  # seconds of the monotonic clock
    first: float
    last: float


async def serve(client: httpx.AsyncClient, concurrency: int) -> float:
    """Closed loop of 4·c requests (at least 6): output tokens a second."""
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: str, max_tokens: int) -> int:
        async with slots:
            return (await complete(client, prompt, max_tokens)).output_tokens

    begin = monotonic()
    counts = await asyncio.gather(*(one(*r) for r in requests(max(6, 4 * concurrency), seed=concurrency)))
    return sum(counts) / (monotonic() - begin)


async def decode(client: httpx.AsyncClient, num_tokens: int) -> float:
    """One stream, from its first token to its last: tokens a second."""
    done = await complete(client, words(20, random.Random()), num_tokens)
    return (done.output_tokens - 1) / (done.last - done.first)


async def prefill(client: httpx.AsyncClient, num_words: int) -> float:
    """One prompt that nobody has seen and one token out: prompt tokens a second."""
    done = await complete(client, words(num_words, random.Random()), 1)
    return done.prompt_tokens / (done.last - done.begin)


async def complete(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> Completion:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin, times, usage = monotonic(), [], {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith('data: {"'):
                times.append(monotonic())
                if '"usage":{' in line:
                    usage = json.loads(line.removeprefix("data: "))["usage"]
    return Completion(usage["prompt_tokens"], usage["completion_tokens"], begin, times[0], times[-1])
