"""LLM on a tiny model that speaks ASCII: groups of choices, beam search, stop strings, the prefix cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.numpy_ref import NumpyBackend
from octavo.config import EngineConfig
from octavo.core import invariants
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM
from octavo.errors import EngineError, RequestError
from octavo.weights.loader import open_checkpoint

PROMPT = "Once upon"
SAMPLED = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def make_llm(text_model: Path) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        defaults = {"backend": "numpy", "weight_dtype": "float32", "num_blocks_override": 64, "block_size": 4}
        return LLM(str(text_model), **(defaults | {"debug": True} | options))

    return make


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


@pytest.fixture(autouse=True)
def _nothing_stays(llm: LLM) -> Any:
    """Whatever a test does, no block is held afterwards."""
    yield
    while llm.engine.has_work:
        llm.engine.step()
    invariants.check_idle(llm.engine.scheduler.allocator)  # type: ignore[arg-type]


def test_what_was_read_of_the_model_is_let_go(text_model: Path) -> None:
    """The engine kept the checkpoint, to build a tokenizer from its path later, and with it the vocabulary."""
    checkpoint = open_checkpoint(text_model)
    gone = weakref.ref(checkpoint)
    loaded = LLM.from_checkpoint(EngineConfig(num_blocks_override=8), checkpoint, NumpyBackend())
    del checkpoint
    assert gone() is None
    assert loaded.engine.info.num_blocks == 8


def test_choices_come_in_order_and_the_prompt_is_counted_once(llm: LLM) -> None:
    """F1, F10."""
    [output] = llm.generate([PROMPT], SAMPLED)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert [len(c.token_ids) for c in output.outputs] == [20] * 4
    assert len({c.text for c in output.outputs}) == 4
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(PROMPT), 80)


def test_a_stop_string_ends_its_choice_alone_and_at_once(llm: LLM) -> None:
    [free] = llm.generate([PROMPT], SAMPLED)
    stop = free.outputs[1].text[4:6]
    assert not any(stop in free.outputs[i].text for i in (0, 2, 3))
    before = llm.engine.scheduler.counters.num_generated_tokens
    [output] = llm.generate([PROMPT], replace(SAMPLED, stop=(stop,)))
    stopped = output.outputs.pop(1)
    assert (stopped.text, stopped.stop_reason) == (free.outputs[1].text[:4], stop)
    assert [c.text for c in output.outputs] == [free.outputs[i].text for i in (0, 2, 3)]
    assert llm.engine.scheduler.counters.num_generated_tokens - before == 3 * 20 + 6


def test_a_choice_ended_by_a_stop_string_counts_as_stopped(llm: LLM) -> None:
    [free] = llm.generate([PROMPT], replace(SAMPLED, n=1))
    llm.generate([PROMPT], replace(SAMPLED, n=1, stop=(free.outputs[0].text[:3],)))
    assert llm.engine.observer.snapshot().finished == {"stop": 1}


def test_best_of_ranks_the_tokens_up_to_the_stop_string(llm: LLM) -> None:
    """Otherwise tokens that are never sent would decide which choices are."""
    many = replace(SAMPLED, n=8, logprobs=0)
    [free] = llm.generate([PROMPT], many)
    [stops] = llm.generate([PROMPT], replace(many, stop=tuple({c.text[3:5] for c in free.outputs})))
    sums = [sum(e.logprob or 0.0 for e in c.logprobs or ()) for c in stops.outputs]
    assert len({len(c.token_ids) for c in stops.outputs}) > 1 or len(stops.outputs[0].token_ids) < 20
    ranked = sorted(range(8), key=lambda i: -sums[i])
    params = replace(SAMPLED, n=3, best_of=8, stop=tuple({c.text[3:5] for c in free.outputs}))
    [best] = llm.generate([PROMPT], params)
    assert [c.token_ids for c in best.outputs] == [stops.outputs[i].token_ids for i in ranked[:3]]
    assert {c.finish_reason for c in best.outputs} == {"stop"}
    assert [c.text for c in best.outputs] == [stops.outputs[i].text for i in ranked[:3]]
    assert best.usage.completion_tokens == sum(len(c.token_ids) for c in best.outputs)


def test_best_of_stops_no_choice_within_min_tokens(llm: LLM) -> None:
    [free] = llm.generate([PROMPT], replace(SAMPLED, n=2, best_of=4))
    stop = (free.outputs[0].text[:1],)
    [output] = llm.generate([PROMPT], replace(SAMPLED, n=4, best_of=5, stop=stop, min_tokens=6))
    assert all(len(c.token_ids) > 6 for c in output.outputs)


def test_best_of_keeps_the_log_probabilities_of_the_prompt(llm: LLM) -> None:
    params = replace(SAMPLED, prompt_logprobs=0)
    [plain] = llm.generate([PROMPT], params)
    [best] = llm.generate([PROMPT], replace(params, n=2, best_of=6))
    assert plain.prompt_logprobs is not None
    assert len(plain.prompt_logprobs) == len(PROMPT)
    assert best.prompt_logprobs == plain.prompt_logprobs


def test_beam_search_gives_scored_answers_best_first(llm: LLM) -> None:
    [output] = llm.beam_search([PROMPT], width=4, max_tokens=10)
    scores = [c.score for c in output.outputs]
    assert None not in scores
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    params = SamplingParams(n=2, beam_width=4, max_tokens=10)
    [two] = llm.generate([PROMPT], params)
    assert [(c.text, c.score) for c in two.outputs] == [(c.text, c.score) for c in output.outputs[:2]]
    assert two.usage.completion_tokens == sum(len(c.token_ids) for c in two.outputs)


def test_beam_search_scores_follow_the_length_penalty(llm: LLM) -> None:
    [plain] = llm.beam_search([PROMPT], width=3, max_tokens=8, length_penalty=0.0, n=1)
    [mean] = llm.beam_search([PROMPT], width=3, max_tokens=8, length_penalty=1.0, n=1)
    assert plain.outputs[0].token_ids == mean.outputs[0].token_ids
    assert plain.outputs[0].score == pytest.approx(8 * (mean.outputs[0].score or 0.0))


def test_beam_search_obeys_stop_strings(llm: LLM) -> None:
    """F4."""
    [free] = llm.beam_search([PROMPT], width=4, max_tokens=12, length_penalty=0.0)
    text = free.outputs[0].text
    stop = text[5:7]
    at = text.index(stop)
    params = SamplingParams(n=4, beam_width=4, max_tokens=12, stop=(stop,), length_penalty=0.0)
    [output] = llm.generate([PROMPT], params)
    first = output.outputs[0]
    assert (first.text, first.finish_reason, first.stop_reason) == (text[:at], "stop", stop)
    assert len(first.token_ids) == at + 2
    assert not any(stop in c.text for c in output.outputs)
    [shown] = llm.generate([PROMPT], replace(params, include_stop_str_in_output=True))
    assert shown.outputs[0].text == text[: at + 2]


def test_beam_search_refuses_what_it_cannot_do(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam_width is 2: use at least n, 3"):
        llm.beam_search([PROMPT], width=2, n=3)


def test_beam_search_that_finds_too_few_answers_says_so(llm: LLM) -> None:
    """Some choices never ended, and their client waited for ever."""
    params = SamplingParams(
        n=128, beam_width=128, max_tokens=1, min_tokens=1, stop_token_ids=(5,), ignore_eos=True
    )
    with pytest.raises(EngineError, match="found 127 of the 128 answers"):
        llm.generate([PROMPT], params)


def test_a_sampled_stream_tells_its_choices_apart(llm: LLM) -> None:
    [whole] = llm.generate([PROMPT], SAMPLED)
    texts = dict.fromkeys(range(4), "")
    for delta in llm.stream(PROMPT, SAMPLED):
        texts[delta.index] += delta.text
    assert texts == {c.index: c.text for c in whole.outputs}


def test_the_prefix_cache_can_be_reset(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=1, temperature=0)

    def num_cached() -> int:
        return llm.generate(["0123456789"], params)[0].usage.cached_tokens

    assert [num_cached(), num_cached()] == [0, 8]
    assert llm.reset_prefix_cache() == 2
    assert llm.reset_prefix_cache() == 0
    assert [num_cached(), num_cached()] == [0, 8]


def test_the_prefix_cache_may_be_reset_while_requests_run(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    expected = [c.text for c in llm.generate([PROMPT], SAMPLED)[0].outputs]
    texts = dict.fromkeys(range(4), "")
    for delta in llm.stream(PROMPT, SAMPLED):
        texts[delta.index] += delta.text
        llm.reset_prefix_cache()
    assert list(texts.values()) == expected
