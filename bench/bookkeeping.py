"""Bookkeeping alone: a whole engine step with a model that takes no time, by phase and per running sequence.

    .venv/bin/python bench/bookkeeping.py [--sequences 1,32,256,1000] [--steps 400] [--temperature 0]

Every sequence decodes one token a step and needs a block once in 16 steps. The phases are those of Engine.step:
schedule, inputs, sample (all of Executor.run but inputs and the model), apply, observe, and the rest. Steps are so
short here that statistics are hardly ever due.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from octavo.backends.numpy_ref import softmax_blocks
from octavo.backends.ops import F32, I32, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor
from octavo.engine.messages import GenerateRequest, Ready
from octavo.engine.process import GC_THRESHOLD
from octavo.sampling.sampler import Sampler
from octavo.sched.budget import SchedulerConfig
from octavo.sched.scheduler import Scheduler

VOCAB = 64
LOGIT_ROWS = 64
PROMPT, MAX_MODEL_LEN = 20, 4096
PARTS = ("schedule", "inputs", "sample", "apply", "observe", "rest")


class NullRunner:
    """A model whose every answer is token 7."""

    def __init__(self) -> None:
        self._logits = np.zeros((LOGIT_ROWS, VOCAB), np.float32)  # [R, V]
        self._logits[:, 7] = 1000.0

    def run(self, inputs: StepInputs, rows: I32) -> tuple[F32, I32, F32]:
        logits = self._logits[: len(rows)]
        return logits, *NullRunner.best(self, logits)  # not the one that is timed as well

    def logits(self, rows: I32) -> F32:
        return self._logits[: len(rows)]

    def best(self, logits: F32) -> tuple[I32, F32]:
        return logits.argmax(axis=1).astype(np.int32), logits.max(axis=1)


class Stopwatch:
    """Seconds spent in methods since the last lap, those inside one another counted in each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, name: str, owner: Any, method: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any) -> Any:
            begin = perf_counter()
            result = original(*args)
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begin
            return result

        setattr(owner, method, timed)

    def lap(self) -> dict[str, float]:
        lap, self.seconds = self.seconds, {}
        return lap


def make_engine(num_sequences: int) -> Engine:
    manager = KVCacheManager(group_layers([FullAttentionSpec(3, 64)] * 30), num_sequences * 64, 16)
    config = SchedulerConfig(max(2048, num_sequences), num_sequences, MAX_MODEL_LEN)
    limits = Limits(config.max_num_batched_tokens, num_sequences, num_sequences, 256, LOGIT_ROWS)
    return Engine(
        Scheduler(config, manager, 16),
        Executor(NullRunner(), Sampler(VOCAB, softmax_blocks), limits, 1),  # type: ignore[arg-type]
        Ready(MAX_MODEL_LEN, VOCAB, num_sequences * 64, 16, []),
        frozenset({0}),
    )


def measure(num_sequences: int, num_steps: int, temperature: float) -> dict[str, float]:
    """Microseconds a step, by phase."""
    engine = make_engine(num_sequences)
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - 2 * PROMPT, temperature=temperature)
    for i in range(num_sequences):
        engine.add_request(GenerateRequest(str(i), [i % VOCAB] * (PROMPT + i % 16), params))
    while len(engine.step().deltas) < num_sequences:  # until all are decoding
        pass
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)  # as in the engine process
    watch = Stopwatch()
    for name, owner, method in (
        ("schedule", engine.scheduler, "step"),
        ("inputs", engine.executor._inputs, "build"),
        ("model", engine.executor._runner, "run"),
        ("model", engine.executor._runner, "logits"),
        ("model", engine.executor._runner, "best"),
        ("run", engine.executor, "run"),
        ("apply", engine.scheduler, "apply"),
        ("observe", engine.observer, "observe"),
        ("step", engine, "step"),
    ):
        watch.watch(name, owner, method)
    parts = dict.fromkeys(PARTS, 0.0)
    for _ in range(num_steps):
        outputs = engine.step()
        assert len(outputs.deltas) == num_sequences
        lap = watch.lap()
        lap["sample"] = lap["run"] - lap["inputs"] - lap["model"]
        lap["rest"] = lap["step"] - sum(lap[name] for name in ("schedule", "run", "apply", "observe"))
        for name in PARTS:
            parts[name] += lap[name]
    return {name: 1e6 * total / num_steps for name, total in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure scheduling and bookkeeping.")
    parser.add_argument("--sequences", default="1,32,256,1000")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    for count in map(int, args.sequences.split(",")):
        parts = measure(count, args.steps, args.temperature)
        total = sum(parts.values())
        shown = ", ".join(f"{name} {us:,.0f}" for name, us in parts.items())
        print(f"{count} sequences: {total:,.0f} µs a step, {total / count:.2f} µs a sequence ({shown})")


if __name__ == "__main__":
    main()
