"""Beam search: transformers' own results replayed without a model, then the rule piece by piece."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.beam import MAX_LENGTH_PENALTY, BeamChoice, BeamParams, BeamSearch, Hypothesis

Tokens = tuple[int, ...]
Candidates = list[tuple[int, float]]
Language = Callable[
    [Tokens], Candidates
]  # known tokens → every next one with its log-probability, best first
EndsText = Callable[[Sequence[int]], bool]
END = 0


def best_first(logprobs: Sequence[float]) -> Candidates:
    return sorted(enumerate(logprobs), key=lambda entry: (-entry[1], entry[0]))


def log_softmax(logits: Sequence[float]) -> list[float]:
    norm = math.log(sum(math.exp(x) for x in logits))
    return [x - norm for x in logits]


def table_language(table: list[list[list[float]]]) -> Language:
    """Logits [position modulo its length][last token][next token]."""
    rows = [[best_first(log_softmax(row)) for row in position] for position in table]
    return lambda tokens: rows[(len(tokens) - 1) % len(rows)][tokens[-1]]


def random_language(seed: int, num_tokens: int) -> Language:
    draw = random.Random(seed)
    table = [[[draw.gauss(0, 1.5) for _ in range(num_tokens)] for _ in range(num_tokens)] for _ in range(5)]
    return table_language(table)


def walk(search: BeamSearch, language: Language, prompt: Tokens = (1,)) -> Iterator[list[Tokens]]:
    """Search to the end; after each step the live beams, prompt included."""
    live = [prompt]
    while not search.is_done:
        choices = search.advance([language(tokens)[: search.num_candidates] for tokens in live])
        live = [(*live[c.parent], c.token_id) for c in choices]
        yield live


def found(
    params: BeamParams, language: Language, prompt: Tokens = (1,), ends_text: EndsText | None = None
) -> list[Hypothesis]:
    search = BeamSearch(params, ends_text)
    for _ in walk(search, language, prompt):
        pass
    return search.best(params.width)


# Against transformers: tools/golden/make_beam.py made the file, from tables that it holds


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((golden_folder / "beam.json").read_text())
    return data


def golden_params(case: dict[str, Any]) -> BeamParams:
    return BeamParams(
        case["width"],
        case.get("length_penalty", 1.0),
        case.get("early_stopping", False),
        case.get("max_tokens", 12),
        case.get("min_tokens", 0),
        frozenset(case.get("end_ids", ())),
    )


def golden_ends_text(case: dict[str, Any]) -> EndsText | None:
    pair = case.get("stop_pair")
    return (lambda output: list(output[-2:]) == pair) if pair else None


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("table", ["even", "sharp"])
def test_sequences_and_scores_are_those_of_transformers(
    golden: dict[str, Any], table: str, width: int
) -> None:
    logits = [[[x / 1000 for x in row] for row in position] for position in golden["tables"][table]]
    language = table_language(logits)
    cases = [case for case in golden["cases"] if case["model"] == table and case["width"] == width]
    assert len(cases) > 80
    for case in cases:
        best = found(golden_params(case), language, tuple(case["prompt"]), golden_ends_text(case))
        assert [list(h.token_ids) for h in best] == case["sequences"], case
        assert [h.score for h in best] == pytest.approx(case["scores"], rel=0, abs=1e-4), case


def test_the_stored_searches_tell_the_settings_apart(golden: dict[str, Any]) -> None:
    """Else agreement with them would prove little."""
    kinds = [("length_penalty", 1.0), ("early_stopping", False), ("min_tokens", 0), ("stop_pair", ())]
    told_apart = Counter[str]()
    for name, default in kinds:
        groups: dict[str, dict[str, list[list[int]]]] = {}
        for case in golden["cases"]:
            rest = {k: v for k, v in case.items() if k not in (name, "sequences", "scores")}
            groups.setdefault(json.dumps(rest), {})[str(case.get(name, default))] = case["sequences"]
        told_apart[name] = sum(any(a != b for a in g.values() for b in g.values()) for g in groups.values())
    assert told_apart["length_penalty"] > 50
    assert told_apart["early_stopping"] > 50
    assert told_apart["min_tokens"] > 5
    stopped = [c["stop_pair"] == s[-2:] for c in golden["cases"] if "stop_pair" in c for s in c["sequences"]]
    assert sum(stopped) > 50


# Scores and ranges


@pytest.mark.parametrize(
    ("length_penalty", "score"), [(0.0, -6.0), (1.0, -2.0), (2.0, -6.0 / 9.0), (-1.0, -18.0)]
)
def test_score_is_log_probability_per_length_to_the_penalty(length_penalty: float, score: float) -> None:
    assert BeamParams(2, length_penalty).score(-6.0, 3) == score


def test_the_largest_penalty_still_gives_a_number() -> None:
    for penalty in (MAX_LENGTH_PENALTY, -MAX_LENGTH_PENALTY):
        assert math.isfinite(BeamParams(2, penalty).score(-1e6, 1_000_000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "a search of 0 beams"),
        ({"width": 2, "max_tokens": 0}, "a search for 0 tokens"),
        ({"width": 2, "length_penalty": 51.0}, "length penalty 51.0"),
        ({"width": 2, "length_penalty": math.nan}, "length penalty nan"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        BeamParams(**fields)


@pytest.mark.parametrize(
    ("width", "end_ids", "num_candidates"),
    [(1, (), 2), (4, (), 8), (4, (2,), 8), (4, (2, 3), 12), (8, (2, 3, 5), 32)],
)
def test_candidates_suffice_for_every_end_token_of_every_beam(
    width: int, end_ids: Tokens, num_candidates: int
) -> None:
    assert BeamSearch(BeamParams(width, end_ids=frozenset(end_ids))).num_candidates == num_candidates


def test_a_list_for_each_live_beam_is_asked_for() -> None:
    search = BeamSearch(BeamParams(2))
    with pytest.raises(AssertionError, match="2 lists for 1 live beams"):
        search.advance([[(1, -1.0)], [(2, -1.0)]])


# Which beams go on


def test_live_beams_are_the_best_of_all_continuations() -> None:
    search = BeamSearch(BeamParams(2))
    assert search.num_live == 1
    assert search.advance([[(7, -0.5), (3, -1.0), (4, -2.0)]]) == (BeamChoice(0, 7), BeamChoice(0, 3))
    assert search.num_live == 2
    #   7,5: -3.5   7,6: -4.5   3,8: -1.5   3,9: -3.0
    assert search.advance([[(5, -3.0), (6, -4.0)], [(8, -0.5), (9, -2.0)]]) == (
        BeamChoice(1, 8),
        BeamChoice(1, 9),
    )
    assert [h.token_ids for h in search.best(2)] == [(3, 8), (3, 9)]


def test_of_equals_the_lower_beam_goes_first_then_the_lower_token() -> None:
    search = BeamSearch(BeamParams(3))
    assert search.advance([[(9, -1.0), (4, -1.0), (6, -1.0), (5, -1.0)]]) == tuple(
        BeamChoice(0, t) for t in (4, 5, 6)
    )
    same = [(8, -1.0), (2, -1.0)]
    assert search.advance([same, same, same]) == (BeamChoice(0, 2), BeamChoice(0, 8), BeamChoice(1, 2))


def test_an_end_token_finishes_a_beam_and_the_next_best_takes_its_place() -> None:
    search = BeamSearch(BeamParams(2, end_ids=frozenset({END})))
    assert search.advance([[(END, -0.5), (7, -1.0), (8, -3.0), (9, -4.0)]]) == (
        BeamChoice(0, 7),
        BeamChoice(0, 8),
    )
    assert search.best(2) == [
        Hypothesis((END,), -0.5, -0.5, "stop"),
        Hypothesis((7,), -1.0, -1.0, "length"),
    ]


def test_a_beam_that_ends_behind_the_best_is_lost() -> None:
    search = BeamSearch(BeamParams(2, end_ids=frozenset({END})))
    assert search.advance([[(7, -0.5), (8, -1.0), (END, -1.5), (9, -4.0)]]) == (
        BeamChoice(0, 7),
        BeamChoice(0, 8),
    )
    assert [h.token_ids for h in search.best(2)] == [(7,), (8,)]


def test_the_last_token_allowed_ends_every_beam() -> None:
    search = BeamSearch(BeamParams(2, max_tokens=1, end_ids=frozenset({END})))
    assert search.advance([[(7, -0.5), (END, -1.0), (8, -3.0), (9, -4.0)]]) == ()
    assert (search.is_done, search.num_live) == (True, 0)
    assert search.best(5) == [
        Hypothesis((7,), -0.5, -0.5, "length"),
        Hypothesis((END,), -1.0, -1.0, "stop"),
    ]
    assert search.best(1) == [Hypothesis((7,), -0.5, -0.5, "length")]
    assert search.advance([]) == ()


def test_end_tokens_are_no_candidates_before_min_tokens() -> None:
    search = BeamSearch(BeamParams(1, min_tokens=1, end_ids=frozenset({END})))
    assert search.advance([[(END, -0.25), (7, -2.0)]]) == (BeamChoice(0, 7),)
    assert search.advance([[(END, -0.25), (7, -2.0)]]) == ()
    assert search.best(1) == [Hypothesis((7, END), -1.125, -2.25, "stop")]


def test_an_impossible_token_is_no_candidate() -> None:
    search = BeamSearch(BeamParams(2))
    assert search.advance([[(7, -0.5), (8, -math.inf), (9, math.nan)]]) == (BeamChoice(0, 7),)
    assert search.advance([[(8, -1.0), (9, -2.0)]]) == (BeamChoice(0, 8), BeamChoice(0, 9))


def test_beams_without_any_candidate_end_as_they_are() -> None:
    search = BeamSearch(BeamParams(2))
    search.advance([[(7, -0.5), (8, -1.0)]])
    assert search.advance([[(1, -math.inf)], []]) == ()
    assert search.is_done
    assert search.best(2) == [
        Hypothesis((7,), -0.5, -0.5, "length"),
        Hypothesis((8,), -1.0, -1.0, "length"),
    ]


def test_a_prompt_without_any_candidate_has_no_hypothesis() -> None:
    search = BeamSearch(BeamParams(2))
    assert search.best(2) == []
    assert search.advance([[]]) == ()
    assert (search.is_done, search.best(2)) == (True, [])


# When it is over

STEPS: list[list[Candidates]] = [
    [[(END, -1.0), (1, -1.2), (2, -3.0)]],
    # two hypotheses from here on: -1.0 and -1.8 / 2; the best live beam has -1.9 / 2
    [[(END, -0.6), (1, -0.7), (2, -3.0)], [(END, -0.1), (1, -2.5), (2, -9.0)]],
    # the best live beam has -3.2 / 3, less than -1.0, but -3.2 / 10 is more
    [[(1, -1.3), (2, -4.0), (END, -5.0)], [(1, -1.0), (2, -3.0), (END, -3.0)]],
]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "num_steps"),
    [(True, 1.0, 2), (False, 1.0, 3), ("never", 1.0, None), ("never", -1.0, 2), (False, -1.0, 2)],
)
def test_when_the_search_is_over(
    early_stopping: bool | Literal["never"], length_penalty: float, num_steps: int | None
) -> None:
    search = BeamSearch(BeamParams(2, length_penalty, early_stopping, 10, end_ids=frozenset({END})))
    done = []
    for candidates in STEPS[:num_steps]:
        search.advance(candidates)
        done.append(search.is_done)
    assert done == ([False] * 3 if num_steps is None else [False] * (num_steps - 1) + [True])
    if length_penalty == 1.0:
        assert [h.token_ids for h in search.best(2)] == [(1, END), (END,)]
        assert [h.score for h in search.best(2)] == pytest.approx([-0.9, -1.0])


def test_a_negative_penalty_expects_no_longer_answer_than_now() -> None:
    search = BeamSearch(BeamParams(2, -1.0, "never", 30, end_ids=frozenset({END})))
    search.advance([[(1, -0.1), (END, -3.0), (2, -9.0)]])
    # worst hypothesis -2.1 * 2; the best live beam has -0.2 * 2 now, and would have -0.2 * 30 in the end
    search.advance([[(1, -0.1), (END, -2.0), (2, -9.0)], [(1, -1.0)]])
    assert not search.is_done


def test_an_equal_score_is_no_reason_to_go_on() -> None:
    search = BeamSearch(BeamParams(2, 0.0, end_ids=frozenset({END})))
    search.advance([[(END, -1.0), (1, -1.0), (2, -3.0)]])
    assert search.advance([[(END, -1.0), (1, -1.0), (2, -9.0)], [(1, -9.0)]]) == ()
    assert [h.score for h in search.best(2)] == [-1.0, -2.0]


def test_a_better_hypothesis_replaces_the_worst() -> None:
    search = BeamSearch(BeamParams(2, 1.0, "never", 10, end_ids=frozenset({END})))
    for candidates in STEPS:
        search.advance(candidates)
    assert (search.num_live, len(search.best(5))) == (2, 2)
    search.advance([[(END, -0.01), (1, -5.0)], [(1, -9.0), (2, -9.5)]])
    assert [h.token_ids for h in search.best(2)] == [(1, 1, 1, END), (1, END)]
    assert [h.score for h in search.best(2)] == pytest.approx([-3.21 / 4, -0.9])


# Stop strings


def test_a_stop_string_ends_a_beam() -> None:
    search = BeamSearch(BeamParams(2), ends_text=lambda output: list(output[-2:]) == [7, 8])
    search.advance([[(7, -0.5), (8, -1.0), (9, -2.0), (5, -3.0)]])
    assert search.advance([[(8, -0.25), (4, -2.0)], [(8, -1.0), (4, -3.0)]]) == (
        BeamChoice(1, 8),
        BeamChoice(0, 4),
    )
    assert search.best(2) == [
        Hypothesis((7, 8), -0.375, -0.75, "stop"),
        Hypothesis((8, 8), -1.0, -2.0, "length"),
    ]


def test_a_stop_string_that_ends_every_beam_ends_the_search() -> None:
    search = BeamSearch(BeamParams(2), ends_text=lambda output: True)
    assert search.advance([[(7, -0.5), (8, -1.0), (9, -2.0), (5, -3.0)]]) == ()
    assert [(h.token_ids, h.finish_reason) for h in search.best(2)] == [((7,), "stop"), ((8,), "stop")]


def test_only_num_candidates_replace_beams_that_ended() -> None:
    search = BeamSearch(BeamParams(2, early_stopping="never"), ends_text=lambda output: output[-1] < 5)
    assert search.num_candidates == 4
    assert search.advance([[(1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0), (5, -4.0)]]) == ()


def test_stop_strings_are_not_looked_for_before_min_tokens_nor_behind_the_live_beams() -> None:
    asked: list[Tokens] = []

    def ends_text(output: Sequence[int]) -> bool:
        asked.append(tuple(output))
        return False

    search = BeamSearch(BeamParams(1, min_tokens=1), ends_text)
    search.advance([[(7, -0.5), (8, -1.0)]])
    assert asked == []
    search.advance([[(9, -0.5), (8, -1.0)]])
    assert asked == [(7, 9)]


# Properties, over random languages

SEEDS = st.integers(0, 2**32)
PENALTIES = st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0])
EARLY = st.sampled_from([False, True, "never"])
some = settings(max_examples=60, deadline=None)


@given(SEEDS, PENALTIES, EARLY, st.integers(1, 8))
@some
def test_one_beam_is_a_greedy_search(seed: int, penalty: float, early: Any, max_tokens: int) -> None:
    language = random_language(seed, 5)
    output: list[int] = []
    total = 0.0
    while len(output) < max_tokens and END not in output:
        token, logprob = language((1, *output))[0]
        output.append(token)
        total += logprob
    [best] = found(BeamParams(1, penalty, early, max_tokens, end_ids=frozenset({END})), language)
    assert best.token_ids == tuple(output)
    assert best.cumulative_logprob == pytest.approx(total)
    assert best.finish_reason == ("stop" if output[-1] == END else "length")


def every_output(num_tokens: int, max_tokens: int) -> Iterator[Tokens]:
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(num_tokens), repeat=length):
            if END not in output[:-1] and (output[-1] == END or length == max_tokens):
                yield output


def logprob_of(language: Language, output: Tokens) -> float:
    return sum(dict(language((1, *output[:i])))[token] for i, token in enumerate(output))


@given(SEEDS, PENALTIES, EARLY, st.integers(1, 4))
@some
def test_as_many_beams_as_outputs_find_them_all(
    seed: int, penalty: float, early: Any, max_tokens: int
) -> None:
    language = random_language(seed, 3)
    params = BeamParams(3**max_tokens, penalty, early, max_tokens, end_ids=frozenset({END}))
    outputs = list(every_output(3, max_tokens))
    scores = {output: params.score(logprob_of(language, output), len(output)) for output in outputs}
    best = found(params, language)
    assert sorted(h.token_ids for h in best) == sorted(outputs)
    assert [h.score for h in best] == pytest.approx(sorted(scores.values(), reverse=True))
    assert {h.token_ids: h.score for h in best} == pytest.approx(scores)


@given(SEEDS, PENALTIES, EARLY, st.integers(1, 6), st.integers(0, 3))
@some
def test_every_step_keeps_its_promises(
    seed: int, penalty: float, early: Any, width: int, min_tokens: int
) -> None:
    language = random_language(seed, 7)
    params = BeamParams(width, penalty, early, 9, min_tokens, frozenset({END, 3}))
    search = BeamSearch(params)
    for live in walk(search, language):
        assert len(live) == search.num_live <= width
        assert len(set(live)) == len(live)
        assert not any(set(tokens[1:]) & params.end_ids for tokens in live)
        logprobs = [logprob_of(language, tokens[1:]) for tokens in live]
        assert logprobs == sorted(logprobs, reverse=True)
    best = search.best(width)
    assert len(best) == width
    assert len({h.token_ids for h in best}) == width
    assert [h.score for h in best] == sorted((h.score for h in best), reverse=True)
    for h in best:
        assert h.cumulative_logprob == pytest.approx(logprob_of(language, h.token_ids))
        assert h.score == params.score(h.cumulative_logprob, len(h.token_ids))
        assert h.finish_reason == ("stop" if h.token_ids[-1] in params.end_ids else "length")
        assert len(h.token_ids) > min_tokens if h.finish_reason == "stop" else len(h.token_ids) == 9
    assert search.best(width // 2) == best[: width // 2]


@given(SEEDS, PENALTIES, st.booleans(), st.integers(1, 6))
@some
def test_stopped_before_it_is_over_it_answers_as_if_max_tokens_had_been_reached(
    seed: int, penalty: float, early: bool, width: int
) -> None:
    language = random_language(seed, 14)
    ends = frozenset({END})
    search = BeamSearch(BeamParams(width, penalty, early, 8, end_ids=ends))
    for step, _ in enumerate(walk(search, language), start=1):
        if not search.is_done:
            cut = found(BeamParams(width, penalty, early, step, end_ids=ends), language)
            assert search.best(width) == cut


@given(SEEDS, PENALTIES, EARLY, st.integers(1, 4), st.integers(0, 3))
@some
def test_the_whole_vocabulary_tells_nothing_that_num_candidates_do_not(
    seed: int, penalty: float, early: Any, width: int, min_tokens: int
) -> None:
    language = random_language(seed, 20)
    params = BeamParams(width, penalty, early, 6, min_tokens, frozenset({END, 3}))
    search = BeamSearch(params)
    live: list[Tokens] = [(1,)]
    while not search.is_done:
        choices = search.advance([language(tokens) for tokens in live])
        live = [(*live[c.parent], c.token_id) for c in choices]
    assert search.best(width) == found(params, language)
