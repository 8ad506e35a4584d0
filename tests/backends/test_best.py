"""Runner.best is numpy.argmax of the last logits and the values there, whatever they hold, for each instruction
set and number of threads; Runner.run is forward(), logits() and best()."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import KVCacheConfig, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec

WIDTHS = (1, 5, 16, 33, 200, 1000)


def rows_of(width: int) -> np.ndarray:
    """Random rows, then rows of equal values, NaN, infinities and combinations of them at random places."""
    rng = np.random.default_rng(width)
    rows = rng.integers(-3, 4, (40, width)).astype(np.float32)  # many equals
    rows[:8] = rng.standard_normal((8, width))
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0], np.float32)
    for row in rows[16:]:
        places = rng.integers(0, width, 3)
        row[places] = rng.choice(special, 3)
    rows[8] = -np.inf
    rows[9] = np.nan
    rows[10] = 7.0
    return rows


def check(backend, function_model, x: np.ndarray) -> None:
    table = backend.embedding(x, "float32")
    layout = group_layers([FullAttentionSpec(1, 8)])
    runner = backend.compile(
        function_model(lambda ops: ops.embed(table)),
        KVCacheConfig(layout, 8, 16, "fp32"),
        Limits(len(x), 4, 4, 64, len(x)),
    )
    ids = np.arange(len(x), dtype=np.int32)
    ends, blocks = np.array([0, len(x)], np.int32), np.arange(4, dtype=np.int32)[None]
    inputs = StepInputs(ids, ids, ends, ends[1:], np.zeros(1, np.int32), (blocks,))
    for rows in (ids, ids[::-3].copy(), ids[:0]):
        runner.forward(inputs)
        best, peaks = runner.best(runner.logits(rows))
        assert best.tolist() == x[rows].argmax(axis=1).tolist()
        np.testing.assert_array_equal(peaks, x[rows].max(axis=1))
        logits, same_best, same_peaks = runner.run(inputs, rows)
        np.testing.assert_array_equal(logits, x[rows])
        assert same_best.tolist() == best.tolist()
        np.testing.assert_array_equal(same_peaks, peaks)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_specification_is_numpy(width, function_model):
    check(NumpyBackend(), function_model, rows_of(width))


@pytest.mark.parametrize(
    ("isa", "threads", "width"), list(product(_native.available_isas(), (1, 2, 3), WIDTHS))
)
def test_the_kernels_agree(isa, threads, width, function_model):
    check(NativeBackend(threads, isa), function_model, rows_of(width))
