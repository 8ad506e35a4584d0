"""Runner.softmax_blocks: the kernels against the specification, for each instruction set and number of threads."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.numpy_ref import softmax_blocks
from octavo.backends.ops import KVCacheConfig, Limits
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec

WIDTHS = (1, 15, 16, 64, 65, 200, 1000)
TEMPERATURES = np.array([1, 0.3, 0, 5, 1e-5, 1e30, 1], np.float32)


def runner(function_model: Any, threads: int = 1, isa: str | None = None) -> Any:
    backend = NativeBackend(threads, isa)
    table = backend.embedding(np.zeros((4, 8), np.float32), "float32")
    layout = group_layers([FullAttentionSpec(1, 8)])
    return backend.compile(
        function_model(lambda ops: ops.embed(table)),
        KVCacheConfig(layout, 8, 16, "fp32"),
        Limits(4, 4, 4, 64, 4),
    )


def scores_of(width: int) -> np.ndarray:
    """A row for each of TEMPERATURES; the last but one has nothing but its best, the first some at -inf."""
    rng = np.random.default_rng(width)
    scores = (3 * rng.standard_normal((len(TEMPERATURES), width))).astype(np.float32)
    scores[0, rng.random(width) < 0.3] = -np.inf
    scores[-2] = -np.inf
    scores[:, rng.integers(width)] = 11.0
    return scores


@pytest.mark.parametrize(
    ("isa", "threads", "width"), list(product(_native.available_isas(), (1, 2, 3), WIDTHS))
)
def test_sums_and_maxima_are_those_of_the_specification(isa, threads, width, function_model):
    scores = scores_of(width)
    peaks = scores.max(axis=1)
    sums, maxima = runner(function_model, threads, isa).softmax_blocks(scores, 64, peaks, TEMPERATURES)
    with np.errstate(over="ignore"):
        true_sums, true_maxima = softmax_blocks(scores, 64, peaks, TEMPERATURES)
    wanted = TEMPERATURES > 0
    assert maxima[wanted].tolist() == true_maxima[wanted].tolist()
    np.testing.assert_allclose(sums[wanted], true_sums[wanted], rtol=2e-6, atol=1e-30)


def test_a_row_has_the_same_bits_alone_and_in_a_wider_array(function_model):
    one = runner(function_model, threads=2)
    scores, wide = scores_of(1000), np.zeros((len(TEMPERATURES), 1040), np.float32)
    wide[:, :1000] = scores
    peaks = scores.max(axis=1)
    together = one.softmax_blocks(wide[:, :1000], 64, peaks, TEMPERATURES)
    for r in np.flatnonzero(TEMPERATURES):
        alone = one.softmax_blocks(scores[r : r + 1], 64, peaks[r : r + 1], TEMPERATURES[r : r + 1])
        assert [a.tobytes() for a in alone] == [t[r].tobytes() for t in together]


def test_all_instruction_sets_with_fused_multiply_add_have_the_same_bits(function_model):
    scores = scores_of(1000)
    found = {
        isa: [
            a.tobytes()
            for a in runner(function_model, 1, isa).softmax_blocks(
                scores, 64, scores.max(axis=1), TEMPERATURES
            )
        ]
        for isa in _native.available_isas()
        if isa != "portable"
    }
    first = next(iter(found.values()))
    assert all(bits == first for bits in found.values())


def test_wrong_arrays_are_named(function_model):
    one = runner(function_model)
    scores, ones = np.zeros((2, 8), np.float32), np.ones(2, np.float32)
    with pytest.raises(TypeError, match="scores: must have dtype float32"):
        one.softmax_blocks(scores.astype(np.float64), 64, ones, ones)
    with pytest.raises(ValueError, match="scores: rows must be contiguous"):
        one.softmax_blocks(np.asfortranarray(scores), 64, ones, ones)
    with pytest.raises(ValueError, match=r"scores: has shape \(1, 2, 8\), expected \(any, any\)"):
        one.softmax_blocks(scores[None], 64, ones, ones)
    with pytest.raises(ValueError, match=r"peaks: has shape \(1,\), expected \(2\)"):
        one.softmax_blocks(scores, 64, ones[:1], ones)
    with pytest.raises(ValueError, match="block must be at least 1"):
        one.softmax_blocks(scores, 0, ones, ones)
