"""n, best_of and beam search through the HTTP API, on a reciting engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REPLIES = ("Hello", "Goodbye!", "See you soon")


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "hi", "max_tokens": 40} | fields


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40} | fields


def choices_of(answer: Any, stream: bool) -> tuple[dict[int, str], dict[int, str], dict[str, int]]:
    """Text and finish reason by choice, and the usage, of either kind of answer."""
    assert answer.status_code == 200, answer.text
    if stream:
        lines = answer.text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    else:
        chunks = [answer.json()]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        index = choice["index"]
        part = choice.get("delta") or choice.get("message") or choice
        texts[index] = texts.get(index, "") + (part.get("text") or part.get("content") or "")
        if choice["finish_reason"] is not None:
            assert index not in reasons, "two ends of one choice"
            reasons[index] = choice["finish_reason"]
    return texts, reasons, chunks[-1]["usage"]


def streaming(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [completion, chat])
def test_every_choice_keeps_its_index_text_and_end(call: Any, engine: Any, make: Any, stream: bool) -> None:
    """F1, F9, F10: the prompt is counted once, the answers are added up."""
    engine.replies = REPLIES
    path, body = make(n=3, max_tokens=9, **streaming(stream))
    texts, reasons, usage = choices_of(call("POST", path, json=body), stream)
    assert texts == {0: "Hello", 1: "Goodbye!", 2: "See you s"}
    assert reasons == {0: "stop", 1: "stop", 2: "length"}
    assert usage["prompt_tokens"] == len(engine.requests[0].prompt_token_ids)
    assert usage["completion_tokens"] == 6 + 9 + 9
    assert len(engine.requests) == 1
    assert engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_one_choice_in_the_engine_and_not_the_others(
    call: Any, engine: Any, stream: bool
) -> None:
    engine.replies = REPLIES
    path, body = completion(n=3, stop=["od", "zz"], **streaming(stream))
    texts, reasons, usage = choices_of(call("POST", path, json=body), stream)
    assert texts == {0: "Hello", 1: "Go", 2: "See you soon"}
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    assert usage["completion_tokens"] == 6 + 4 + 13
    assert engine.ended_choices == [(engine.requests[0].request_id, 1)]
    assert engine.aborted == []


def test_a_stop_string_of_a_later_prompt_ends_the_right_choice(call: Any, engine: Any) -> None:
    engine.replies = REPLIES
    _, body = completion(prompt=["a", "b"], n=2, stop="od")
    texts, _, _ = choices_of(call("POST", COMPLETIONS, json=body), False)
    assert texts == {0: "Hello", 1: "Go", 2: "Hello", 3: "Go"}
    assert sorted(engine.ended_choices) == sorted((r.request_id, 1) for r in engine.requests)


def test_echoed_log_probabilities_come_with_every_choice(call: Any) -> None:
    answer = call("POST", COMPLETIONS, json=completion(n=2, echo=True, logprobs=0, max_tokens=1)[1]).json()
    lists = [c["logprobs"]["tokens"] for c in answer["choices"]]
    assert lists == [["<s>", "h", "i", "H"]] * 2


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 2}, {"n": 2, "best_of": None, "beam_width": None}),
        ({"n": 2, "best_of": 5}, {"n": 2, "best_of": 5, "beam_width": None}),
        ({"n": 2, "best_of": 2, "stream": True}, {"n": 2, "best_of": 2, "beam_width": None}),
        ({"n": 2, "best_of": 5, "use_beam_search": True}, {"n": 2, "best_of": None, "beam_width": 5}),
        ({"n": 3, "use_beam_search": True, "stream": True}, {"n": 3, "best_of": None, "beam_width": 3}),
        (
            {"best_of": 4, "use_beam_search": True, "length_penalty": 2, "early_stopping": "never"},
            {"n": 1, "beam_width": 4, "length_penalty": 2.0, "early_stopping": "never"},
        ),
        (
            {"best_of": 4, "use_beam_search": True, "early_stopping": True, "temperature": 0, "top_k": -1},
            {"beam_width": 4, "early_stopping": True, "temperature": 0.0, "top_k": 0},
        ),
        (
            {"best_of": 4, "use_beam_search": True, "seed": 1, "stop": "x", "stop_token_ids": [3]},
            {"beam_width": 4, "seed": 1, "stop": ("x",), "stop_token_ids": (3,)},
        ),
    ],
)
def test_groups_reach_the_engine(
    call: Any, engine: Any, make: Any, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    path, body = make(**fields)
    assert call("POST", path, json=body).status_code == 200
    params = engine.requests[0].params
    assert {name: getattr(params, name) for name in expected} == expected


def test_streaming_best_of_says_why_not(call: Any) -> None:
    answer = call("POST", COMPLETIONS, json=completion(best_of=3, stream=True)[1])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("best_of", "invalid_value")
    assert "best_of is 3, more than n" in error["message"]


def test_the_prefix_cache_is_reset(call: Any, engine: Any) -> None:
    engine.num_cached_blocks = 7
    assert call("POST", "/reset_prefix_cache").json() == {"cleared_blocks": 7}
    assert call("POST", "/reset_prefix_cache").json() == {"cleared_blocks": 0}
    engine.is_alive = False
    assert call("POST", "/reset_prefix_cache").status_code == 503


def test_debug_blocks_are_the_engines_snapshot(call: Any, engine: Any, make_app: Any) -> None:
    assert call("GET", "/debug/blocks").json() == {
        "block_size": 4,
        "ref_counts": [1, 0],
        "cached": [0],
        "next_free": [1],
        "tables": [{"request_id": "r", "choice": 0, "group": 0, "block_ids": [0], "num_tokens": 3}],
        "num_swap_blocks": 0,
        "swap_tables": [],
    }
    assert call("GET", "/debug/blocks", app=make_app(api_key="k")).status_code == 401
    engine.is_alive = False
    assert call("GET", "/debug/blocks").json()["error"]["code"] == "engine_unavailable"
