"""How a decode step's time grows with batch, context and pool size, and whether any of it is worse than linear.

The local exponent between neighbours x1 < x2 is log(t2 / t1) / log(x2 / x1): 1 where time is proportional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import TypeVar

import numpy as np
from limits import Machine
from report import Row
from serving import Bench

from octavo.config import EngineConfig

T = TypeVar("T")

CONTEXT_BATCH = 4
POOL_BATCH = 32
SHORT = 64  # tokens of context where something else is varied
NUM_STEPS = 16


def worst_exponent(xs: Sequence[float], times: Sequence[float]) -> float:
    """The largest local exponent."""
    pairs = zip(xs, xs[1:], times, times[1:], strict=False)
    return max(log(t2 / t1) / log(x2 / x1) for x1, x2, t1, t2 in pairs)


def linear_fit(xs: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(fixed, slope) of fixed + slope · x, with the least relative error."""
    weights = 1 / np.array(times)
    slope, fixed = np.polyfit(xs, times, 1, w=weights)
    return float(fixed), float(slope)


def curve(name: str, xs: Sequence[int], measured: Sequence[tuple[float, float]]) -> list[Row]:
    """A row a point, then one of what they add up to."""
    times = [1e3 * seconds for seconds, _ in measured]
    points = [
        Row(f"{name} {x}", t, "ms a step", 1e3 * least_s or None)
        for x, t, (_, least_s) in zip(xs, times, measured, strict=True)
    ]
    fixed, slope = linear_fit(xs, times)
    more = {"fit: fixed ms": fixed, "+ us each": 1e3 * slope}
    return [*points, Row(f"{name}: worst local exponent", worst_exponent(xs, times), "", None, more)]


def best_of_two(
    measure: Callable[[T], tuple[float, float]], points: Sequence[T]
) -> list[tuple[float, float]]:
    """The better of two passes over all points: what disturbs one rarely lasts until the next."""
    first, second = ([measure(point) for point in points] for _ in range(2))
    return list(map(min, first, second))


def by_batch(bench: Bench, batches: Sequence[int]) -> list[Row]:
    bench.decode_s(1, SHORT, NUM_STEPS)  # warm up
    return curve("batch", batches, best_of_two(lambda n: bench.decode_s(n, SHORT, NUM_STEPS), batches))


def by_context(bench: Bench, contexts: Sequence[int]) -> list[Row]:
    measured = best_of_two(lambda n: bench.decode_s(CONTEXT_BATCH, n, NUM_STEPS), contexts)
    return curve(f"batch {CONTEXT_BATCH}, context", contexts, measured)


def by_pool(path: Path, config: EngineConfig, machine: Machine, pools: Sequence[int]) -> list[Row]:
    """The same work in pools of so many blocks."""
    benches = [Bench(path, replace(config, num_blocks_override=n), machine) for n in pools]
    measured = best_of_two(lambda bench: bench.decode_s(POOL_BATCH, SHORT, NUM_STEPS), benches)
    return curve(f"batch {POOL_BATCH}, blocks", pools, measured)
