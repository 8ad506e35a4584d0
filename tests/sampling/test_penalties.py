"""Penalties on one row of scores by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from octavo.sampling import penalties

F32 = NDArray[np.float32]
INF = math.inf


def row(*values: float) -> F32:
    return np.array(values, np.float32)


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores() -> None:
    scores = row(4, -4, 0, 4, -INF)
    penalties.apply_repetition_penalty(scores, np.array([0, 1, 2, 4]), 2.0)
    assert scores.tolist() == [2, -8, 0, 4, -INF]


def test_repetition_penalty_below_one_rewards() -> None:
    scores = row(4, -4, 1)
    penalties.apply_repetition_penalty(scores, np.array([0, 1]), 0.5)
    assert scores.tolist() == [8, -2, 1]


def test_presence_counts_once_and_frequency_each_time() -> None:
    counts = penalties.TokenCounts()
    counts.add([1, 2, 1, 1])
    scores = row(0, 0, 0, 0)
    penalties.apply_count_penalties(scores, counts, presence=0.5, frequency=0.25)
    assert scores.tolist() == [0, -1.25, -0.75, 0]


def test_counts_in_pieces_equal_counts_at_once() -> None:
    tokens = [(7 * i * i) % 61 for i in range(500)]
    pieces = penalties.TokenCounts()
    for token in tokens:
        pieces.add([token])
    expected = Counter(tokens)
    assert dict(zip(pieces.ids.tolist(), pieces.counts.tolist(), strict=True)) == expected
    assert pieces.ids.tolist() == list(dict.fromkeys(tokens))
