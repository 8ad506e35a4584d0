"""The pipeline as a whole: order of processing, seeds, independence of batch mates, broken rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.numpy_ref import softmax_blocks
from octavo.core.block import SeqId
from octavo.core.delta import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.sampling.sampler import Draws, Sampler, SampleState

F32 = NDArray[np.float32]
INF = math.inf
EOS = frozenset({0})


def draw(sampler: Sampler, states: list[SampleState], logits: np.ndarray) -> Draws:
    return sampler.sample(states, logits, logits.argmax(axis=1), logits.max(axis=1))


def state(
    sampler: Sampler, output: list[int] | None = None, seq_id: int = 1, index: int = 0, **fields: Any
) -> SampleState:
    fields.setdefault("seed", 1)
    prompt = fields.pop("prompt", [])
    return sampler.new_state(
        SeqId(seq_id), SamplingParams(**fields), prompt, output if output is not None else [], EOS, index
    )


def token(values: list[float] | F32, output: list[int] | None = None, **fields: Any) -> int:
    """The token drawn from one row."""
    scores = np.array([values], np.float32)
    sampler = Sampler(scores.shape[1], softmax_blocks)
    (token_id,) = draw(sampler, [state(sampler, output, **fields)], scores).token_ids
    assert token_id is not None
    return token_id


def support(values: list[float], num_draws: int = 400, **fields: Any) -> set[int]:
    """All tokens that come up at output positions [0, num_draws)."""
    return set(draws(values, num_draws, **fields))


def draws(values: list[float] | F32, num_draws: int, **fields: Any) -> list[int]:
    scores = np.array([values], np.float32)
    sampler = Sampler(scores.shape[1], softmax_blocks)
    output: list[int] = []
    one = state(sampler, output, **fields)
    for _ in range(num_draws):
        (token_id,) = draw(sampler, [one], scores).token_ids
        assert token_id is not None
        output.append(token_id)
    return output


def greedy(values: list[float], output: list[int] | None = None, **fields: Any) -> int:
    return token(values, output, temperature=0, **fields)


# ── greedy ──────────────────────────────────────────────────────────────────────────────────────────────


def test_greedy_takes_the_best_token_and_the_lowest_id_of_equals() -> None:
    assert greedy([1, 3, 2]) == 1
    assert greedy([1, 3, 2, 3]) == 1
    assert greedy([-0.0, 0.0]) == 0


def test_greedy_ignores_top_k_top_p_and_min_p() -> None:
    assert greedy([1, 3, 2], top_k=1, top_p=0.1, min_p=1.0) == 1


# ── the processors, one by one and in their order ───────────────────────────────────────────────────────


def test_min_tokens_masks_end_and_stop_tokens_until_enough_are_there() -> None:
    row: list[float] = [9, 8, 7]
    fields: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (1,)}
    assert [greedy(row, [5] * n, **fields) for n in (0, 1, 2, 3)] == [2, 2, 0, 0]
    fields["logit_bias"] = ((2, 0.5),)  # the row is processed after min_tokens, too
    assert [greedy(row, [5] * n, **fields) for n in (0, 1, 2, 3)] == [2, 2, 0, 0]


def test_logit_bias_moves_scores() -> None:
    assert greedy([1, 3, 2], logit_bias=((0, 2.5),)) == 0
    assert greedy([1, 3, 2], logit_bias=((1, -100), (0, 0.5))) == 2


def test_repetition_penalty_covers_prompt_and_output() -> None:
    assert greedy([0, 4, 3, 2.5], repetition_penalty=2.0, prompt=[1]) == 2
    assert greedy([0, 4, 3, 2.5], [2], repetition_penalty=2.0, prompt=[1]) == 3
    assert greedy([0, 4, 3, 2.5], repetition_penalty=2.0) == 1


def test_presence_and_frequency_penalties_cover_output_only() -> None:
    assert greedy([0, 4, 3.5], presence_penalty=1, prompt=[1]) == 1
    assert greedy([0, 4, 3.5], [1], presence_penalty=1) == 2
    assert greedy([0, 4, 3.5], [1], frequency_penalty=0.25) == 1
    assert greedy([0, 4, 3.5], [1, 1, 1], frequency_penalty=0.25) == 2


def test_a_live_output_list_is_followed_token_by_token() -> None:
    """Each token costs 1 every time it was output, so the scores 3, 2.5, 2 are used up in turns."""
    assert draws([-9, 3, 2.5, 2], 6, temperature=0, frequency_penalty=1.0) == [1, 2, 1, 3, 2, 1]


def test_bias_comes_before_the_repetition_penalty() -> None:
    """(-1 + 2) / 2 = 0.5 lies between 0.25 and 0.75; the other order would give -1 · 2 + 2 = 0."""
    fields: dict[str, Any] = {"logit_bias": ((1, 2.0),), "repetition_penalty": 2.0, "prompt": [1]}
    assert greedy([-9, -1, 0.75], **fields) == 2
    assert greedy([-9, -1, 0.25], **fields) == 1


def test_repetition_penalty_comes_before_the_presence_penalty() -> None:
    """2 / 2 - 0.5 = 0.5 against 0.6 loses; presence first would give (2 - 0.5) / 2 = 0.75 and win."""
    assert greedy([-9, 2, 0.6], [1], repetition_penalty=2.0, presence_penalty=0.5) == 2


def test_the_logits_stay_as_they_are() -> None:
    scores = np.array([[1, 2, 3], [3, 2, 1]], np.float32)
    before = scores.copy()
    sampler = Sampler(3, softmax_blocks)
    fields: dict[str, Any] = {"logit_bias": ((0, 5.0),), "presence_penalty": 1.0, "min_tokens": 9}
    draw(sampler, [state(sampler, [1], **fields), state(sampler, [2], top_p=0.5)], scores)
    assert np.array_equal(scores, before)


# ── temperature and filters ─────────────────────────────────────────────────────────────────────────────

LOG = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]


def test_top_k_keeps_exactly_k_tokens() -> None:
    assert support(LOG, top_k=1) == {1}
    assert support(LOG, top_k=2) == {1, 2}
    assert support(LOG, top_k=3) == {0, 1, 2}  # 0 and 3 are equal: lowest id
    assert support(LOG, top_k=99) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert support(LOG, top_p=0.49) == {1}
    assert support(LOG, top_p=0.7) == {1, 2}
    assert support(LOG, top_p=0.8) == {0, 1, 2}
    assert support(LOG, top_p=0.9) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_best_token() -> None:
    assert support(LOG, min_p=0.6) == {1}
    assert support(LOG, min_p=0.4) == {1, 2}
    assert support(LOG, min_p=0.2) == {0, 1, 2, 3}
    assert support(LOG, min_p=1.0) == {1}


def test_top_p_counts_what_top_k_left() -> None:
    """Of 1/2 and 1/4 the first is 2/3: enough for 0.6, which alone would need both."""
    assert support(LOG, top_k=2, top_p=0.6) == {1}
    assert support(LOG, top_p=0.6) == {1, 2}


def test_min_p_applies_after_top_k_and_after_top_p() -> None:
    assert support(LOG, top_k=3, min_p=0.4) == {1, 2}
    assert support(LOG, top_p=0.8, min_p=0.4) == {1, 2}


def test_temperature_comes_before_the_filters() -> None:
    """At temperature 2 the probabilities become √p: .188, .375, .265, .188 after normalising."""
    assert support(LOG, temperature=0.5, top_p=0.7) == {1}  # p²: 1/22, 16/22, 4/22, 1/22
    assert support(LOG, temperature=2.0, top_p=0.7) == {0, 1, 2}
    assert support(LOG, temperature=2.0, min_p=0.6) == {1, 2}


def test_extreme_temperatures_are_greedy_and_flat() -> None:
    assert support(LOG, temperature=1e-300) == {1}
    assert support(LOG, temperature=1e-6, top_k=3) == {1}
    assert support(LOG, temperature=1e-300, top_p=0.99) == {1}
    flat = Counter(draws(LOG, 4000, temperature=1e300))
    assert all(abs(flat[t] - 1000) < 4 * math.sqrt(4000 * 0.25 * 0.75) for t in range(4)), flat


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 0.01}], ids=str)
def test_every_path_draws_by_the_probabilities(fields: dict[str, Any]) -> None:
    num = 16_000
    probabilities = [0.0625, 0.5, 0.25, 0.125, 0.0625]
    counts = Counter(draws([*map(math.log, probabilities), -1000], num, **fields))
    for token_id, p in enumerate(probabilities):
        assert abs(counts[token_id] - num * p) < 4 * math.sqrt(num * p * (1 - p)), counts


def test_masked_tokens_are_never_drawn() -> None:
    assert support([5, -INF, 4, -INF], min_tokens=10_000) == {2}
    assert support([1, 1, 1, -INF], logit_bias=((1, -100.0),)) == {0, 2}


# ── seeds ───────────────────────────────────────────────────────────────────────────────────────────────

FLAT = np.zeros(997, np.float32)


def test_a_seed_repeats_and_another_differs() -> None:
    assert draws(FLAT, 20, seed=5) == draws(FLAT, 20, seed=5)
    assert draws(FLAT, 20, seed=5) != draws(FLAT, 20, seed=6)


def test_choices_of_one_seed_differ_but_repeat() -> None:
    runs = [tuple(draws(FLAT, 20, seed=5, index=index)) for index in range(4)]
    assert len(set(runs)) == 4
    assert runs == [tuple(draws(FLAT, 20, seed=5, index=index)) for index in range(4)]


def test_without_a_seed_the_engine_seed_and_the_order_of_arrival_decide() -> None:
    def run(engine_seed: int) -> list[int]:
        sampler = Sampler(997, softmax_blocks, engine_seed)
        found = []
        for _ in range(8):
            (token_id,) = draw(sampler, [state(sampler, seed=None)], FLAT[None]).token_ids
            assert token_id is not None
            found.append(token_id)
        return found

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert len(set(run(0))) > 1


def test_a_state_made_anew_in_the_middle_continues_with_the_same_tokens() -> None:
    fields: dict[str, Any] = {"seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.2, "prompt": [4, 4]}
    whole = draws(FLAT, 12, **fields)
    sampler, output = Sampler(997, softmax_blocks), whole[:5]
    later = state(sampler, output, **fields)
    while len(output) < 12:
        (token_id,) = draw(sampler, [later], FLAT[None]).token_ids
        assert token_id is not None
        output.append(token_id)
    assert output == whole


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_gives_the_same_sample_alone_and_in_any_batch() -> None:
    vocab, num = 6000, 32
    rng = np.random.default_rng(0)
    scores = (rng.standard_normal((num, vocab)) * 2).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.02, "logprobs": 5},
        {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": ((9, 3.0),), "logprobs": 0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 50, "logprobs": 3},
    ]

    def sampled(order: list[int]) -> dict[int, tuple[int | None, TokenLogprobs | None]]:
        sampler = Sampler(vocab, softmax_blocks)
        states = [
            state(sampler, [r, r + 1], seq_id=r, seed=r, prompt=[r + 2], **kinds[r % len(kinds)])
            for r in order
        ]
        draws = draw(sampler, states, scores[order])
        logprobs = [draws.logprobs.get(SeqId(r)) for r in order]
        return dict(zip(order, zip(draws.token_ids, logprobs, strict=True), strict=True))

    alone = {r: sampled([r])[r] for r in range(num)}
    for seed in range(3):
        order = list(range(num))
        random.Random(seed).shuffle(order)
        assert sampled(order) == alone
    assert sampled([3, 17]) == {3: alone[3], 17: alone[17]}


def test_a_broken_row_is_an_error_of_its_sequence_alone() -> None:
    scores = np.array([[1, 2, 3], [1, np.nan, 3], [3, 2, 1], [1, INF, 1], [-INF] * 3], np.float32)
    sampler = Sampler(3, softmax_blocks)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}]
    for fields in kinds:
        states = [state(sampler, seq_id=i, **fields) for i in range(5)]
        draws = draw(sampler, states, scores)
        assert draws.token_ids == [2, None, 0, None, None]
        assert sorted(draws.failed) == [1, 3, 4]
        for i in (1, 3):
            assert "output token 0 are not finite" in draws.failed[SeqId(i)]
        assert "every score is minus infinity" in draws.failed[SeqId(4)]


def test_a_row_without_any_token_left_is_an_error() -> None:
    sampler = Sampler(2, softmax_blocks)
    one = state(sampler, min_tokens=1, stop_token_ids=(1,))
    draws = draw(sampler, [one], np.zeros((1, 2), np.float32))
    assert draws.token_ids == [None]
    assert "min_tokens" in draws.failed[SeqId(1)]


# ── log-probabilities ───────────────────────────────────────────────────────────────────────────────────


def sample_logprobs(values: list[float], **fields: Any) -> TokenLogprobs | None:
    sampler = Sampler(len(values), softmax_blocks)
    draws = draw(sampler, [state(sampler, **fields)], np.array([values], np.float32))
    return draws.logprobs.get(SeqId(1))


def test_logprobs_are_absent_unless_wanted() -> None:
    assert sample_logprobs(LOG, temperature=0) is None


def test_logprobs_have_value_rank_and_best_alternatives() -> None:
    found = sample_logprobs(LOG, temperature=0, logprobs=3)
    assert found is not None
    assert (found.token_id, found.rank, [t for t, _ in found.top]) == (1, 1, [1, 2, 0])
    assert found.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [p for _, p in found.top] == pytest.approx(
        [math.log(0.5), math.log(0.25), math.log(0.125)], abs=1e-6
    )


def test_logprobs_are_of_the_raw_logits_and_rank_may_exceed_the_alternatives() -> None:
    found = sample_logprobs(LOG, temperature=0, logprobs=0, logit_bias=((3, 50.0),))
    assert found is not None
    assert (found.token_id, found.rank, found.top) == (3, 4, ())
    assert found.logprob == pytest.approx(math.log(0.125), abs=1e-6)


def prompt_logprobs(rows: F32, next_token_ids: list[int], k: int) -> list[TokenLogprobs]:
    return Sampler(rows.shape[1], softmax_blocks).prompt_logprobs(rows, rows.max(axis=1), next_token_ids, k)


def test_logprobs_are_at_temperature_1_whatever_the_draw_has() -> None:
    for fields in ({"temperature": 0.3, "top_k": 1}, {"temperature": 1.0, "top_k": 1}, {"temperature": 0}):
        found = sample_logprobs(LOG, logprobs=2, **fields)
        assert found is not None
        assert (found.token_id, [t for t, _ in found.top]) == (1, [1, 2])
        assert found.logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_candidates_are_the_most_likely_tokens_of_each_row() -> None:
    rows = np.array([LOG, [1, math.nan, 0, 0], LOG[::-1]], np.float32)
    first, broken, second = Sampler(4, softmax_blocks).candidates(rows, rows.max(axis=1), [2, 2, 99])
    assert broken is None
    assert first is not None
    assert [t for t, _ in first] == [1, 2]
    assert [p for _, p in first] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)
    assert second is not None
    assert [t for t, _ in second] == [2, 1, 0, 3]


def test_prompt_logprobs_score_the_given_next_tokens() -> None:
    rows = np.array([LOG, LOG[::-1]], np.float32)
    first, second = prompt_logprobs(rows, [2, 3], 1)
    assert (first.token_id, first.rank, first.top[0][0]) == (2, 2, 1)
    assert (second.token_id, second.rank, second.top[0][0]) == (3, 4, 2)
    assert [first.logprob, second.logprob] == pytest.approx([math.log(0.25), math.log(0.125)], abs=1e-6)


@pytest.mark.parametrize("broken", [[1, math.nan], [INF, 1], [-INF, -INF]], ids=str)
def test_prompt_logprobs_of_a_broken_row_are_minus_infinity(broken: list[float]) -> None:
    rows = np.array([broken, [0, 0]], np.float32)
    first, second = prompt_logprobs(rows, [0, 1], 1)
    assert first == TokenLogprobs(0, -INF, 2)
    assert second.logprob == pytest.approx(math.log(0.5))


def test_logprobs_of_float32_logits_match_float64_arithmetic() -> None:
    row = (np.random.default_rng(1).standard_normal(50_000) * 5).astype(np.float32)
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    (found,) = prompt_logprobs(row[None], [123], 20)
    assert found.logprob == pytest.approx(exact[123], abs=2e-6)
    assert [t for t, _ in found.top] == np.argsort(-exact, kind="stable")[:20].tolist()
