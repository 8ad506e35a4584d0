"""Every field out of range is refused by name; what is in range passes."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.sampling.validate import check

V = 1000


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(SamplingParams(**fields), vocab_size=V, max_logprobs=20)
    return caught.value


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"n": 1},
    {"n": 128},
    {"n": 2, "best_of": 2},
    {"n": 2, "best_of": 128},
    {"n": 2, "beam_width": 2},
    {"beam_width": 128, "length_penalty": -50, "early_stopping": "never"},
    {"beam_width": 4, "length_penalty": 2.5, "early_stopping": True, "temperature": 0, "seed": 7},
    {"beam_width": 4, "stop": ("a",), "stop_token_ids": (3,), "min_tokens": 2, "logit_bias": []},
    {"temperature": 0},
    {"temperature": 0.0},
    {"temperature": 1e9},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"top_k": 0},
    {"top_k": 10**9},
    {"min_p": 0},
    {"min_p": 1},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"seed": 0},
    {"repetition_penalty": 0.5},
    {"presence_penalty": -2},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2},
    {"frequency_penalty": 2.0},
    {"logit_bias": ((0, -100), (V - 1, 100.0))},
    {"stop": ("a", "b" * 1024)},
    {"stop": ["a"]},
    {"stop": tuple("abcdefghijklmnop")},
    {"stop_token_ids": (0, V - 1)},
    {"max_tokens": None},
    {"max_tokens": 1},
    {"max_tokens": None, "min_tokens": 100},
    {"max_tokens": 5, "min_tokens": 5},
    {"logprobs": 0},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_values_in_range_pass(fields: dict[str, Any]) -> None:
    check(SamplingParams(**fields), vocab_size=V, max_logprobs=20)


REFUSED: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, 129, True, 1.0, "1", None)],
    *[("best_of", value) for value in (0, -1, 129, True, 1.0, "1")],
    *[("beam_width", value) for value in (0, -1, 129, True, 1.0, "1")],
    *[("length_penalty", v) for v in (50.1, -50.1, float("nan"), float("inf"), True, "1", None, 0.5)],
    *[("early_stopping", v) for v in (0, 1, 1.0, "always", None, True, "never")],
    *[("temperature", v) for v in (-0.1, -1, float("nan"), float("inf"), True, "1", None, 10**400)],
    *[("top_p", v) for v in (0, 0.0, -0.5, 1.0001, float("nan"), True, "0.5")],
    *[("top_k", v) for v in (-1, 1.5, True, "5", None)],
    *[("min_p", v) for v in (-0.01, 1.01, float("nan"), False, "0")],
    *[("seed", v) for v in (2**63, -(2**63) - 1, 1.5, True, "7")],
    *[("repetition_penalty", v) for v in (0, -1, 1e-9, 1e9, float("inf"), float("nan"), True)],
    *[("presence_penalty", v) for v in (2.01, -2.01, float("nan"), True, "1")],
    *[("frequency_penalty", v) for v in (2.01, -2.01, float("-inf"), True, "1")],
    ("logit_bias", {5: 1.0}),
    ("logit_bias", (5,)),
    ("logit_bias", ((5, 1.0, 2),)),
    ("logit_bias", ((5, 1.0), (5, 2.0))),
    *[("logit_bias", ((v, 1.0),)) for v in (-1, V, V + 1, "AI", 1.0, True, None)],
    *[("logit_bias", ((5, v),)) for v in (100.5, -100.5, float("nan"), float("inf"), "1", True)],
    ("stop", "a plain string"),
    ("stop", ("",)),
    ("stop", ("a", "")),
    ("stop", (5,)),
    ("stop", ("x" * 1025,)),
    ("stop", ("a",) * 17),
    ("stop", None),
    ("stop_token_ids", 5),
    ("stop_token_ids", (1,) * 257),
    *[("stop_token_ids", (v,)) for v in (-1, V, V + 1, "AI", 1.0, True, None)],
    *[("max_tokens", v) for v in (0, -1, 1.5, True, "16")],
    *[("min_tokens", v) for v in (-1, 17, 1.5, True, None)],
    *[("logprobs", v) for v in (-1, 21, 1.5, True, "5")],
    *[("prompt_logprobs", v) for v in (-1, 21, 1.5, True, "5")],
    *[("include_stop_str_in_output", v) for v in (1, "yes", None)],
    *[("ignore_eos", v) for v in (1, "yes", None)],
    *[("skip_special_tokens", v) for v in (0, "no", None)],
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda v: repr(v)[:30])
def test_values_out_of_range_are_refused_by_field_name(field: str, value: Any) -> None:
    assert refusal(**{field: value}).param == field


def test_the_message_names_the_value_and_the_remedy() -> None:
    assert str(refusal(temperature=-1)) == "temperature is -1: use 0 (greedy) or more."
    assert str(refusal(logprobs=25)) == "logprobs is 25: use a whole number from 0 to 20."
    assert str(refusal(stop_token_ids=(V,))) == "stop_token_ids is 1000: token ids are 0 to 999."
    assert str(refusal(min_tokens=17)) == "min_tokens is 17: use at most max_tokens, 16."
    assert str(refusal(logit_bias=((3, 200),))) == "logit_bias is 200: use -100 to 100 for token 3."


def test_a_long_value_is_cut_in_the_message() -> None:
    assert str(refusal(stop=("y" * 2000,))) == f"stop is '{'y' * 56}...: use strings of 1 to 1024 characters."


def test_logprobs_cannot_exceed_the_vocabulary() -> None:
    with pytest.raises(RequestError) as caught:
        check(SamplingParams(logprobs=11), vocab_size=10, max_logprobs=20)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "beam_width": 2}, "beam_width"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "temperature": True}, "temperature"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p"),
        ({"beam_width": 2, "top_k": 1}, "top_k"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 2, "presence_penalty": 0.1}, "presence_penalty"),
        ({"beam_width": 2, "frequency_penalty": 0.1}, "frequency_penalty"),
        ({"beam_width": 2, "logit_bias": ((1, 1.0),)}, "logit_bias"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs"),
        ({"beam_width": 2, "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_beam_search_says_what_it_cannot_honour() -> None:
    assert str(refusal(beam_width=2, top_k=5)) == "top_k is 5: beam search cannot honour it; leave it out."
    assert str(refusal(length_penalty=0.5)) == (
        "length_penalty is 0.5: it works with beam search only; leave it out."
    )


def test_beams_cannot_exceed_the_vocabulary() -> None:
    """Every first token is another one, so there could be no such many beams."""
    with pytest.raises(RequestError, match="from 1 to 10"):
        check(SamplingParams(beam_width=11), vocab_size=10, max_logprobs=20)
