"""One row as a distribution: selection and draws by hand and against the obvious slow way."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.backends.numpy_ref import softmax_blocks
from octavo.sampling import random
from octavo.sampling.distribution import BLOCK, Distribution, draw

F32 = NDArray[np.float32]
INF = math.inf


def row(*values: float) -> F32:
    return np.array(values, np.float32)


def distribution(scores: F32, temperature: float = 1.0) -> Distribution:
    peaks = scores.max(keepdims=True)
    [sums], [maxima] = softmax_blocks(scores[None], BLOCK, peaks, np.array([temperature], np.float32))
    return Distribution(scores, float(peaks[0]), temperature, sums, maxima)


def of_numerators(numerators: F32) -> Distribution:
    with np.errstate(divide="ignore"):
        return distribution(np.log(numerators))


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


# ── selection ───────────────────────────────────────────────────────────────────────────────────────────


def test_top_ids_of_a_small_row() -> None:
    assert distribution(row(1, 5, 3, 5, -INF)).top_ids(3).tolist() == [1, 3, 2]
    assert distribution(row(1, 5, 3, 5, -INF)).top_ids(99).tolist() == [1, 3, 2, 0, 4]


def test_top_ids_breaks_ties_at_the_cut_by_lowest_id() -> None:
    assert distribution(np.zeros(10_000, np.float32)).top_ids(5).tolist() == [0, 1, 2, 3, 4]


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
    scores[0] = 0.0
    assert distribution(scores).top_ids(k).tolist() == ranked(scores)[:k]


def top_p_ids(found: Distribution, top_p: float) -> NDArray[np.int64]:
    ids = found.top_p_ids(top_p)
    assert ids is not None
    return ids


def test_top_p_of_dyadic_probabilities_by_hand() -> None:
    numerators = row(0.25, 1.0, 0.5, 0.25)  # of 2: 1/8, 1/2, 1/4, 1/8
    kept = {
        p: set(top_p_ids(of_numerators(numerators), p).tolist())
        for p in (0.01, 0.4999, 0.51, 0.7499, 0.76, 0.8749, 0.9)
    }
    assert kept == {
        0.01: {1},
        0.4999: {1},
        0.51: {1, 2},
        0.7499: {1, 2},
        0.76: {0, 1, 2},
        0.8749: {0, 1, 2},
        0.9: {0, 1, 2, 3},
    }


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6000),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    top_p=st.floats(0.01, 0.499),
    seed=st.integers(0, 2**32 - 1),
)
def test_top_p_equals_the_slow_way(size: int, spread: float, top_p: float, seed: int) -> None:
    """Flat rows take the path by bins, steep rows the one by the best 64."""
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal(size) * spread).astype(np.float32)
    numerators = np.exp(scores - scores.max())
    kept = top_p_ids(distribution(scores), top_p)
    expected = slow_top_p(numerators, top_p)
    assert len(set(kept.tolist())) == len(kept)
    # sums in another order may round across the target: one token more or less
    assert len(set(kept.tolist()) ^ expected) <= 1


def test_top_p_of_a_uniform_row_takes_the_lowest_ids() -> None:
    kept = top_p_ids(distribution(np.zeros(4096, np.float32)), 0.25)
    assert sorted(kept.tolist()) == list(range(1024))


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(65, 3000),
    spread=st.sampled_from([0.0, 0.5, 2.0]),
    top_p=st.floats(0.5, 0.999),
    min_p=st.sampled_from([0.0, 0.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_draws_of_a_large_top_p_set_stay_inside_and_reach_its_end(
    size: int, spread: float, top_p: float, min_p: float, seed: int
) -> None:
    """A number for each thousandth of the probability: the first that is accepted is drawn."""
    scores = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    found = distribution(scores)
    numerators = np.exp(scores - scores.max())
    inside = slow_top_p(numerators, top_p) & set(np.flatnonzero(numerators >= np.float32(min_p)).tolist())
    drawn = {
        found.draw_top_p(
            top_p, min_p, iter([(i + 0.5) / 1000, 0.0, 1 - 2**-53, 0.5] + [j / 97 for j in range(97)])
        )
        for i in range(1000)
    }
    # sums in another order may round across the target: one token more or less
    assert len(drawn - inside) <= 1
    every = {found.draw((i + 0.5) / 1000) for i in range(1000)} if min_p == 0.0 else set()
    assert len((every & inside) - drawn) <= 1


def test_draws_of_a_large_top_p_set_have_its_proportions() -> None:
    """Tokens of probability 2, 1, 1, … : at 0.7 the first 140 of 200 are drawn, token 0 twice as often."""
    scores = np.zeros(200, np.float32)
    scores[0] = math.log(2)
    found = distribution(scores)
    num = 28_000
    counts = Counter(found.draw_top_p(0.7, 0.0, random.uniforms(1, i)) for i in range(num))
    assert set(counts) == set(range(140))  # 2 + 139 of 201 reach 140.7
    for token_id in (0, 1, 64, 139):
        p = (2 if token_id == 0 else 1) / 141
        assert abs(counts[token_id] - num * p) < 4 * math.sqrt(num * p * (1 - p)), token_id


# ── softmax and draws ───────────────────────────────────────────────────────────────────────────────────


def test_probabilities_are_relative_to_the_best_and_scaled_by_temperature() -> None:
    found = distribution(row(3, 1, -INF), 2.0)
    assert found.probabilities(np.arange(3)).tolist() == pytest.approx([1.0, math.exp(-1), 0.0])
    assert found.sums.tolist() == pytest.approx([1 + math.exp(-1)])
    assert found.probabilities(slice(1, 3)).tolist() == pytest.approx([math.exp(-1), 0.0])


def test_draw_gives_each_index_exactly_its_share_of_the_unit_interval() -> None:
    probabilities = np.array([4, 0, 2, 1, 0, 1], np.float64)
    counts = Counter(draw(probabilities, i / 64) for i in range(64))
    assert counts == {0: 32, 2: 16, 3: 8, 5: 8}


def test_draw_never_returns_an_impossible_token_at_the_ends() -> None:
    probabilities = np.array([0, 0.1, 0.2, 0.7, 0, 0])
    assert draw(probabilities, 0.0) == 1
    assert draw(probabilities, 1 - 2**-53) == 3
    tiny = np.array([0, 5e-324, 0])
    assert {draw(tiny, u) for u in (0.0, 0.5, 0.75, 1 - 2**-53)} == {1}


def test_a_row_gives_each_token_exactly_its_share() -> None:
    numerators = np.zeros(1000, np.float32)
    shares = {0: 8, 63: 4, 64: 2, 700: 1, 999: 1}
    for token_id, share in shares.items():
        numerators[token_id] = share
    found = of_numerators(numerators)
    assert Counter(found.draw((i + 0.5) / 16) for i in range(16)) == shares


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), u=st.floats(0, 1 - 2**-53), seed=st.integers(0, 2**32 - 1))
def test_a_row_draws_a_possible_token_whose_interval_holds_u(size: int, u: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    numerators = rng.random(size).astype(np.float32)
    numerators[rng.random(size) < 0.5] = 0
    numerators[rng.integers(size)] = 1
    drawn = of_numerators(numerators).draw(u)
    cdf = np.cumsum(numerators, dtype=np.float64)
    assert numerators[drawn] > 0
    below = cdf[drawn] - numerators[drawn]
    assert below - 1e-6 * cdf[-1] <= u * cdf[-1] <= cdf[drawn] + 1e-6 * cdf[-1]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3000),
    min_p=st.floats(0.001, 1.0),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_min_p_keeps_all_tokens_that_are_probable_enough(
    size: int, min_p: float, temperature: float, seed: int
) -> None:
    scores = (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)
    probabilities = np.exp((scores.astype(np.float64) - scores.max()) / temperature)
    kept = distribution(scores, temperature).min_p_ids(min_p)
    assert kept.tolist() == np.flatnonzero(probabilities >= min_p).tolist()


# ── log-probabilities ───────────────────────────────────────────────────────────────────────────────────


def test_log_total_of_known_probabilities() -> None:
    found = distribution(row(math.log(0.5), math.log(0.25), math.log(0.25)))
    assert found.log_total() == pytest.approx(0, abs=1e-7)
    assert distribution(row(1000, 1000)).log_total() == pytest.approx(1000 + math.log(2))


@settings(max_examples=30, deadline=None)
@given(size=st.integers(5, 2000), levels=st.sampled_from([2, 30, 100_000]), seed=st.integers(0, 2**32 - 1))
def test_rank_agrees_with_the_order_of_top_ids(size: int, levels: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(-levels, levels, size).astype(np.float32)
    found = distribution(scores)
    order = found.top_ids(size).tolist()
    places = [0, 1, size // 2, size - 1]
    assert [found.rank(order[place]) for place in places] == [place + 1 for place in places]
