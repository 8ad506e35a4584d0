"""The engine in process: a closed loop of requests, single prompts, single streams.

The closed loop has `c` requests at a time, 4·c in all, prompts of 20 to 300 random words, 16 to 200 output tokens,
greedy, end-of-sequence ignored. A limit is what the machine's peaks allow for
the very steps that were run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic

from limits import Machine, Meter, MeteredBackend
from load import requests
from report import Row

from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import assemble
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.text.tokenizer import Tokenizer
from octavo.weights.loader import open_checkpoint


class Bench:
    """An engine with a meter, and the machine it runs on."""

    def __init__(self, path: Path, config: EngineConfig, machine: Machine) -> None:
        checkpoint = open_checkpoint(path)
        try:
            self.tokenizer: Tokenizer = checkpoint.tokenizer()
            self.meter = Meter(checkpoint.config, config.weight_dtype)
            backend = MeteredBackend(self.meter, config.num_threads)
            self.engine: Engine = assemble(config, checkpoint, backend)
        finally:
            checkpoint.close()
        self.machine = machine
        self._num_requests = 0

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Queue a greedy request that runs to its length."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request_id = str(self._num_requests)
        self._num_requests += 1
        self.engine.add_request(GenerateRequest(request_id, prompt, params))
        return request_id

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens, different each time."""
        rng = random.Random(self._num_requests)
        return [rng.randrange(100, self.engine.info.vocab_size) for _ in range(num_tokens)]

    def decode_s(self, batch: int, context: int, num_steps: int) -> tuple[float, float]:
        """Median seconds of a step in which `batch` sequences of about `context` tokens decode, and the least."""
        ids = [self.add(self.prompt(context), 4096) for _ in range(batch)]
        answered: set[str] = set()
        while len(answered) < batch:
            answered |= {delta.request_id for delta in self.engine.step().deltas}
        times, peaks = self.machine.during(lambda: [self.step_s() for _ in range(num_steps)])
        least_s = self.meter.least_s(peaks, -num_steps) / num_steps
        for request_id in ids:
            self.engine.abort(request_id)
        self.drain()
        return median(times), least_s

    def step_s(self) -> float:
        begin = monotonic()
        self.engine.step()
        return monotonic() - begin

    def drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def rows(
    bench: Bench, concurrency: list[int], prefills: list[int], contexts: list[int], per_slot: int
) -> list[Row]:
    """`per_slot`: requests of the closed loop, for each that runs at a time."""
    closed_loop(bench, iter([(bench.prompt(100), 50)] * 2), 2)  # warm up
    found = [closed_loop(bench, texts(bench, max(6, per_slot * c), c), c) for c in concurrency]
    found += [prefill(bench, n) for n in prefills]
    return found + [one_stream(bench, n) for n in contexts]


def texts(bench: Bench, count: int, seed: int) -> Iterator[tuple[list[int], int]]:
    for text, max_tokens in requests(count, seed):
        yield bench.tokenizer.encode(text), max_tokens


def closed_loop(bench: Bench, waiting: Iterator[tuple[list[int], int]], concurrency: int) -> Row:
    first_step = len(bench.meter.steps)
    loop, peaks = bench.machine.during(lambda: run_loop(bench, waiting, concurrency))
    more = {
        "first token ms": 1e3 * median(loop.first_token_s),
        "step ms": 1e3 * median(loop.step_s),
        "planning %": 100 * loop.schedule_s / sum(loop.step_s),
    }
    limit = loop.num_tokens / bench.meter.least_s(peaks, first_step)
    return Row(f"serve, c={concurrency}", loop.num_tokens / loop.seconds, "output tok/s", limit, more)


@dataclass(slots=True)
class Loop:
    """What a closed loop did."""

    num_tokens: int = 0
    seconds: float = 0.0
    schedule_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # since the request


def run_loop(bench: Bench, waiting: Iterator[tuple[list[int], int]], concurrency: int) -> Loop:
    loop, running, begin = Loop(), 0, monotonic()
    started: dict[str, float] = {}
    while True:
        while running < concurrency and (request := next(waiting, None)) is not None:
            started[bench.add(*request)] = monotonic()
            running += 1
        if not running:
            loop.seconds = monotonic() - begin
            return loop
        outputs = bench.engine.step()
        if outputs.stats is not None:
            loop.step_s += outputs.stats.step_s
            loop.schedule_s += outputs.stats.schedule_s
        for delta in outputs.deltas:
            loop.num_tokens += len(delta.token_ids)
            if delta.request_id in started:
                loop.first_token_s.append(monotonic() - started.pop(delta.request_id))
            running -= delta.finish_reason is not None


def prefill(bench: Bench, num_tokens: int) -> Row:
    """The best of several prompts of random tokens, none of them cached."""

    def once() -> float:
        bench.add(bench.prompt(num_tokens), 1)
        begin = monotonic()
        bench.drain()
        return monotonic() - begin

    runs = 5 if num_tokens <= 1024 else 2
    first_step = len(bench.meter.steps)
    seconds, peaks = bench.machine.during(lambda: min(once() for _ in range(runs)))
    least_s = bench.meter.least_s(peaks, first_step) / runs
    return Row(f"prefill, {num_tokens} tokens", num_tokens / seconds, "prompt tok/s", num_tokens / least_s)


def one_stream(bench: Bench, context: int) -> Row:
    seconds, least_s = bench.decode_s(1, context, 64)
    return Row(f"one stream after {context} tokens", 1 / seconds, "output tok/s", 1 / least_s)
