"""POST /v1/completions against a reciting engine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

PATH = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 5} | fields


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream; checks the frame around them."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_plain_answer_has_every_field(call: Any, engine: Any) -> None:
    engine.num_cached = 2
    answer = call("POST", PATH, json=body())
    assert answer.status_code == 200
    got = answer.json()
    assert got.pop("id").startswith("cmpl-")
    assert isinstance(got.pop("created"), int)
    assert got == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert engine.requests[0].prompt_token_ids == [256, *b"hi"]


def test_stream_repeats_id_created_and_model_and_gives_the_same_text(call: Any) -> None:
    plain = call("POST", PATH, json=body(max_tokens=50)).json()
    chunks = events(call("POST", PATH, json=body(max_tokens=50, stream=True)).text)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert all(len(c["choices"]) == 1 for c in chunks)
    assert "".join(c["choices"][0]["text"] for c in chunks) == plain["choices"][0]["text"] == "Hello, world."
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 13 + ["stop"]
    assert "usage" not in chunks[0]


def test_usage_is_one_last_chunk_without_choices(call: Any) -> None:
    chunks = events(call("POST", PATH, json=body(stream=True, stream_options={"include_usage": True})).text)
    assert [c["choices"] == [] for c in chunks] == [False] * 5 + [True]
    assert [c["usage"] for c in chunks[:-1]] == [None] * 5
    assert chunks[-1]["usage"]["total_tokens"] == 8


def test_continuous_usage_counts_up_on_every_chunk(call: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(call("POST", PATH, json=body(stream=True, stream_options=options)).text)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[256, 97, 98]]),
        (["ab", "c"], [[256, 97, 98], [256, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_all_four_spellings_of_a_prompt(
    call: Any, engine: Any, prompt: Any, expected: list[list[int]]
) -> None:
    answer = call("POST", PATH, json=body(prompt=prompt)).json()
    assert [r.prompt_token_ids for r in engine.requests] == expected
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 5 * len(expected)


def test_stream_of_many_prompts_gives_each_choice_its_text(call: Any) -> None:
    chunks = events(call("POST", PATH, json=body(prompt=["a", "b", "c"], stream=True)).text)
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(call: Any, stream: bool) -> None:
    fields = body(prompt="hi", max_tokens=2, echo=True, logprobs=1, stream=stream)
    answer = call("POST", PATH, json=fields)
    if stream:
        choices = [c["choices"][0] for c in events(answer.text)]
        text = "".join(c["text"] for c in choices)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = {n: [x for c in choices for x in c["logprobs"][n]] for n in names}
    else:
        text, lists = answer.json()["choices"][0]["text"], answer.json()["choices"][0]["logprobs"]
    assert text == "hiHe"
    assert lists == {
        "tokens": ["<s>", "h", "i", "H", "e"],
        "token_logprobs": [None, -1.5, -1.5, -1.5, -1.5],
        "top_logprobs": [None, *({"z": -0.5, t: -1.5} for t in "hiHe")],
        "text_offset": [0, 0, 1, 2, 3],
    }


def test_echo_of_no_tokens_scores_the_prompt_alone(call: Any, engine: Any) -> None:
    answer = call("POST", PATH, json=body(prompt=[104, 105], max_tokens=0, echo=True, logprobs=0)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 2


def test_minus_infinity_is_a_number_in_json(call: Any) -> None:
    answer = call("POST", PATH, json=body(max_tokens=1, logprobs=3)).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"z": -0.5, "H": -1.5, "\x00": -9999.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_and_aborts_the_engine(call: Any, engine: Any, stream: bool) -> None:
    answer = call("POST", PATH, json=body(max_tokens=50, stop=[", w", "zzz"], stream=stream))
    choices = [c["choices"][0] for c in events(answer.text)] if stream else answer.json()["choices"]
    assert "".join(c["text"] for c in choices) == "Hello"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == ", w"
    assert engine.ended_choices == [(engine.requests[0].request_id, 0)]
    assert engine.aborted == []


def test_stop_token_is_the_stop_reason(call: Any) -> None:
    choice = call("POST", PATH, json=body(max_tokens=50, stop_token_ids=[ord("o")])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hell", "stop", ord("o"))


@pytest.mark.parametrize("reply", ["naïve — 日本語 🎉👩‍👩‍👧", "a🎉b"])
def test_characters_of_many_tokens_never_break_in_a_stream(call: Any, engine: Any, reply: str) -> None:
    engine.reply = reply
    chunks = events(call("POST", PATH, json=body(max_tokens=100, stream=True)).text)
    pieces = [c["choices"][0]["text"] for c in chunks]
    assert "".join(pieces) == reply
    assert not any("\ufffd" in piece for piece in pieces)


def test_sampling_fields_reach_the_engine(call: Any, engine: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "stop_token_ids": [1],
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
    }
    bias = {"12": 5, "13": -5.5}
    assert call("POST", PATH, json=body(logit_bias=bias, stop="x", **fields)).status_code == 200
    assert abs(engine.requests[0].arrival_s - time.monotonic()) < 60
    params = engine.requests[0].params
    got = {name: getattr(params, name) for name in fields}
    assert got == fields | {"stop_token_ids": (1,)}
    assert params.logit_bias == ((12, 5.0), (13, -5.5))
    assert params.stop == ("x",)


def test_nulls_and_labels_change_nothing(call: Any, engine: Any) -> None:
    fields = body(stop=None, seed=None, logprobs=None, suffix=None, tools=None, n=None, best_of=None)
    fields |= {"user": "me", "metadata": {"a": "b"}, "store": False, "stream_options": None, "n": 1}
    assert call("POST", PATH, json=fields).status_code == 200
    call("POST", PATH, json=body())
    assert engine.requests[0].params == engine.requests[1].params


def test_without_max_tokens_sixteen_or_what_is_left(call: Any, engine: Any) -> None:
    engine.reply = "x" * 200
    for num_prompt in (1, 127):
        call("POST", PATH, json={"prompt": [97] * num_prompt})
    assert [r.params.max_tokens for r in engine.requests] == [16, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_many_prompts_are_numbered_prompt_by_prompt(call: Any, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = call("POST", PATH, json=body(prompt=["a", "b"], n=3, max_tokens=2, echo=True, **options))
    got: dict[int, str] = {}
    chunks = events(answer.text) if stream else [answer.json()]
    for chunk in chunks:
        for choice in chunk["choices"]:
            got[choice["index"]] = got.get(choice["index"], "") + choice["text"]
    assert got == {0: "aHe", 1: "aHe", 2: "aHe", 3: "bHe", 4: "bHe", 5: "bHe"}
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 12)


def test_salt_of_the_prefix_cache_reaches_every_prompt(call: Any, engine: Any) -> None:
    call("POST", PATH, json=body(prompt=["a", "b"], cache_salt="tenant"))
    call("POST", PATH, json=body())
    assert [r.cache_salt for r in engine.requests] == ["tenant", "tenant", None]


def test_start_token_can_be_left_out(call: Any, engine: Any) -> None:
    call("POST", PATH, json=body(add_special_tokens=False))
    assert engine.requests[0].prompt_token_ids == [*b"hi"]
