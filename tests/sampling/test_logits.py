"""One row of logits: penalties by hand, selection and draws against the obvious slow way."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.sampling import logits

F32 = NDArray[np.float32]
INF = math.inf


def row(*values: float) -> F32:
    return np.array(values, np.float32)


def ranked(scores: F32) -> list[int]:
    """The obvious order: best first, equal ones by id."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def slow_top_p(probabilities: F32, top_p: float) -> set[int]:
    """Keep a token while the better ones hold less than top_p."""
    total, mass = math.fsum(probabilities.tolist()), 0.0
    kept: set[int] = set()
    for i in ranked(probabilities):
        if kept and mass >= top_p * total:
            break
        kept.add(i)
        mass += float(probabilities[i])
    return kept


# ── penalties ───────────────────────────────────────────────────────────────────────────────────────────


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores() -> None:
    scores = row(4, -4, 0, 4, -INF)
    logits.apply_repetition_penalty(scores, np.array([0, 1, 2, 4]), 2.0)
    assert scores.tolist() == [2, -8, 0, 4, -INF]


def test_repetition_penalty_below_one_rewards() -> None:
    scores = row(4, -4, 1)
    logits.apply_repetition_penalty(scores, np.array([0, 1]), 0.5)
    assert scores.tolist() == [8, -2, 1]


def test_presence_counts_once_and_frequency_each_time() -> None:
    counts = logits.TokenCounts()
    counts.add([1, 2, 1, 1])
    scores = row(0, 0, 0, 0)
    logits.apply_count_penalties(scores, counts, presence=0.5, frequency=0.25)
    assert scores.tolist() == [0, -1.25, -0.75, 0]


def test_counts_in_pieces_equal_counts_at_once() -> None:
    tokens = [(7 * i * i) % 61 for i in range(500)]
    pieces = logits.TokenCounts()
    for token in tokens:
        pieces.add([token])
    expected = Counter(tokens)
    assert dict(zip(pieces.ids.tolist(), pieces.counts.tolist(), strict=True)) == expected
    assert pieces.ids.tolist() == list(dict.fromkeys(tokens))


# ── selection ───────────────────────────────────────────────────────────────────────────────────────────


def test_top_ids_of_a_small_row() -> None:
    assert logits.top_ids(row(1, 5, 3, 5, -INF), 3).tolist() == [1, 3, 2]
    assert logits.top_ids(row(1, 5, 3, 5, -INF), 99).tolist() == [1, 3, 2, 0, 4]


def test_top_ids_breaks_ties_at_the_cut_by_lowest_id() -> None:
    assert logits.top_ids(np.zeros(10_000, np.float32), 5).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9000),
    levels=st.sampled_from([2, 30, 100_000]),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_top_ids_equals_a_full_sort(size: int, levels: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(-levels, levels, size).astype(np.float32)
    scores[rng.random(size) < 0.2] = -INF
    assert logits.top_ids(scores, k).tolist() == ranked(scores)[:k]


def test_top_p_of_dyadic_probabilities_by_hand() -> None:
    numerators = row(0.25, 1.0, 0.5, 0.25)  # of 2: 1/8, 1/2, 1/4, 1/8
    scores = np.log(numerators)
    kept = {
        p: set(logits.top_p_ids(scores, numerators, p).tolist())
        for p in (0.01, 0.5, 0.51, 0.75, 0.76, 0.875, 0.9)
    }
    assert kept == {
        0.01: {1},
        0.5: {1},
        0.51: {1, 2},
        0.75: {1, 2},
        0.76: {0, 1, 2},
        0.875: {0, 1, 2},
        0.9: {0, 1, 2, 3},
    }


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6000),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    top_p=st.floats(0.01, 0.999),
    seed=st.integers(0, 2**32 - 1),
)
def test_top_p_equals_the_slow_way(size: int, spread: float, top_p: float, seed: int) -> None:
    """Flat rows take the path by bins, steep rows the one by the best 64."""
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal(size) * spread).astype(np.float32)
    numerators = np.exp(scores - scores.max())
    kept = logits.top_p_ids(scores, numerators, top_p)
    expected = slow_top_p(numerators, top_p)
    assert len(set(kept.tolist())) == len(kept)
    # sums in another order may round across the target: one token more or less
    assert len(set(kept.tolist()) ^ expected) <= 1


def test_top_p_of_a_uniform_row_takes_the_lowest_ids() -> None:
    scores = np.zeros(4096, np.float32)
    kept = logits.top_p_ids(scores, np.ones(4096, np.float32), 0.25)
    assert sorted(kept.tolist()) == list(range(1024))


# ── softmax and draws ───────────────────────────────────────────────────────────────────────────────────


def test_numerators_are_relative_to_the_best_and_scaled_by_temperature() -> None:
    out = np.empty(3, np.float32)
    scores = row(3, 1, -INF)
    result = logits.softmax_numerators(scores, 3.0, 2.0, out)
    assert result is out
    assert out.tolist() == pytest.approx([1.0, math.exp(-1), 0.0])
    assert scores.tolist() == [3, 1, -INF]


def test_draw_gives_each_index_exactly_its_share_of_the_unit_interval() -> None:
    probabilities = np.array([4, 0, 2, 1, 0, 1], np.float64)
    counts = Counter(logits.draw(probabilities, i / 64) for i in range(64))
    assert counts == {0: 32, 2: 16, 3: 8, 5: 8}


def test_draw_never_returns_an_impossible_token_at_the_ends() -> None:
    probabilities = np.array([0, 0.1, 0.2, 0.7, 0, 0])
    assert logits.draw(probabilities, 0.0) == 1
    assert logits.draw(probabilities, 1 - 2**-53) == 3
    tiny = np.array([0, 5e-324, 0])
    assert {logits.draw(tiny, u) for u in (0.0, 0.5, 0.75, 1 - 2**-53)} == {1}


def test_draw_full_gives_each_token_exactly_its_share() -> None:
    numerators = np.zeros(1000, np.float32)
    shares = {0: 8, 255: 4, 256: 2, 700: 1, 999: 1}
    for token_id, share in shares.items():
        numerators[token_id] = share
    assert Counter(logits.draw_full(numerators, i / 16) for i in range(16)) == shares


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), u=st.floats(0, 1 - 2**-53), seed=st.integers(0, 2**32 - 1))
def test_draw_full_draws_a_possible_token_whose_interval_holds_u(size: int, u: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    numerators = rng.random(size).astype(np.float32)
    numerators[rng.random(size) < 0.5] = 0
    numerators[rng.integers(size)] = 1
    drawn = logits.draw_full(numerators, u)
    cdf = np.cumsum(numerators, dtype=np.float64)
    assert numerators[drawn] > 0
    below = cdf[drawn] - numerators[drawn]
    assert below - 1e-9 <= u * cdf[-1] <= cdf[drawn] + 1e-9


# ── log-probabilities ───────────────────────────────────────────────────────────────────────────────────


def test_log_sum_exp_of_known_probabilities() -> None:
    assert logits.log_sum_exp(row(math.log(0.5), math.log(0.25), math.log(0.25))) == pytest.approx(
        0, abs=1e-7
    )
    assert logits.log_sum_exp(row(1000, 1000)) == pytest.approx(1000 + math.log(2))


def test_rank_agrees_with_the_order_of_top_ids() -> None:
    scores = row(1, 5, 3, 5, -INF)
    order = logits.top_ids(scores, 5).tolist()
    assert [logits.rank(scores, t) for t in order] == [1, 2, 3, 4, 5]
