"""Bookkeeping alone: time per step and per running sequence with a model that takes no time.

    .venv/bin/python bench/bookkeeping.py [--sequences 32,256,1000] [--steps 400]

Every sequence decodes one token a step and needs a block once in 16 steps. Counts scheduler.step, building the
inputs, scheduler.apply and observing; sampling and the forward pass are replaced by constants.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np

from octavo.backends.ops import Limits
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import Sample, StepResult
from octavo.engine.inputs import InputBuilder
from octavo.engine.messages import GenerateRequest
from octavo.engine.observe import EngineObserver
from octavo.sched.budget import SchedulerConfig
from octavo.sched.scheduler import Scheduler


def measure(num_sequences: int, num_steps: int) -> dict[str, float]:
    """Microseconds a step, by part."""
    layout = group_layers([FullAttentionSpec(3, 64)] * 30)
    manager = KVCacheManager(layout, num_sequences * 64, 16)
    config = SchedulerConfig(max(2048, num_sequences), num_sequences, 4096)
    scheduler = Scheduler(config, manager, 16)
    observer = EngineObserver(scheduler)
    limits = Limits(config.max_num_batched_tokens, num_sequences, num_sequences, 256, 64)
    inputs = InputBuilder(limits, 1)
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    for i in range(num_sequences):
        prompt = [i % 1000] * 20
        scheduler.add(Request(str(i), [Sequence(scheduler.new_seq_id(), 0, prompt, 20)], params))
        observer.on_arrival(GenerateRequest(str(i), prompt, params))
    parts = {"step": 0.0, "inputs": 0.0, "apply": 0.0, "observe": 0.0}
    counted = 0
    while counted < num_steps:
        times = [perf_counter()]
        plan = scheduler.step(0.0)
        times.append(perf_counter())
        inputs.build(plan)
        times.append(perf_counter())
        samples = tuple(Sample(seq_id, 7) for piece in plan.slices for seq_id in piece.sample_for)
        times.append(perf_counter())
        outputs = scheduler.apply(plan, StepResult(plan.step, samples), 0.0)
        times.append(perf_counter())
        observer.observe(outputs, times[0], times[1], times[4])
        times.append(perf_counter())
        if len(plan.slices) == num_sequences and plan.num_tokens == num_sequences:
            counted += 1
            for name, a, b in (("step", 0, 1), ("inputs", 1, 2), ("apply", 3, 4), ("observe", 4, 5)):
                parts[name] += times[b] - times[a]
    return {name: 1e6 * total / num_steps for name, total in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure scheduling and bookkeeping.")
    parser.add_argument("--sequences", default="32,256,1000")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    for count in map(int, args.sequences.split(",")):
        parts = measure(count, args.steps)
        total = sum(parts.values())
        shown = ", ".join(f"{name} {np.round(us)}" for name, us in parts.items())
        print(f"{count} sequences: {total:,.0f} µs a step, {total / count:.2f} µs a sequence ({shown})")


if __name__ == "__main__":
    main()
