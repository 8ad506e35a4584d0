"""POST /v1/chat/completions against a reciting engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, "max_tokens": 5} | fields


def chunks_of(answer: Any) -> list[dict[str, Any]]:
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def prompt_text(engine: Any, number: int = 0) -> str:
    return bytes(engine.requests[number].prompt_token_ids).decode()


def test_plain_answer_has_every_field(call: Any, engine: Any) -> None:
    got = call("POST", PATH, json=body()).json()
    assert got.pop("id").startswith("chatcmpl-")
    assert isinstance(got.pop("created"), int)
    assert got == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 18,
            "completion_tokens": 5,
            "total_tokens": 23,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert prompt_text(engine) == "user:hi\nassistant:"


def test_stream_gives_the_role_once_and_the_same_text(call: Any) -> None:
    chunks = chunks_of(call("POST", PATH, json=body(max_tokens=50, stream=True)))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": "H"}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world."
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 13 + ["stop"]


def test_include_usage_adds_one_chunk_without_choices(call: Any) -> None:
    fields = body(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None})
    chunks = chunks_of(call("POST", PATH, json=fields))
    assert [len(c["choices"]) for c in chunks] == [1] * 5 + [0]
    assert [c["usage"] is None for c in chunks] == [True] * 5 + [False]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_every_token(call: Any, stream: bool) -> None:
    answer = call("POST", PATH, json=body(max_tokens=1, logprobs=True, top_logprobs=1, stream=stream))
    choice = (chunks_of(answer)[0] if stream else answer.json())["choices"][0]
    top = [{"token": "z", "logprob": -0.5, "bytes": [122]}]
    entry = {"token": "H", "logprob": -1.5, "bytes": [72], "top_logprobs": top}
    assert choice["logprobs"] == {"content": [entry], "refusal": None}


def test_logprobs_alone_gives_no_alternatives(call: Any, engine: Any) -> None:
    choice = call("POST", PATH, json=body(max_tokens=1, logprobs=True)).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert engine.requests[0].params.logprobs == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_tokens": None, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 4, "max_completion_tokens": 4}, 4),
        ({"max_tokens": None}, None),
    ],
)
def test_both_names_of_max_tokens(call: Any, engine: Any, fields: Any, expected: int | None) -> None:
    assert call("POST", PATH, json=body(**fields)).status_code == 200
    assert engine.requests[0].params.max_tokens == expected


def test_without_max_tokens_the_answer_may_fill_the_context(call: Any, engine: Any) -> None:
    answer = call("POST", PATH, json=body(max_tokens=None, ignore_eos=True)).json()
    assert answer["usage"]["total_tokens"] == engine.info.max_model_len


def test_content_may_come_in_parts(call: Any, engine: Any) -> None:
    parts = [{"type": "text", "text": "hi"}]
    call("POST", PATH, json=body(messages=[{"role": "user", "content": parts}]))
    assert prompt_text(engine) == "user:hi\nassistant:"


def test_developer_is_a_system_message_and_history_is_kept(call: Any, engine: Any) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "a", "name": "joe"},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "c", "type": "text"},
    ]
    assert call("POST", PATH, json=body(messages=messages)).status_code == 200
    assert prompt_text(engine) == "system:be kind\nuser:a\nassistant:b\nuser:c\nassistant:"


def test_template_options_have_an_effect(call: Any, engine: Any) -> None:
    call("POST", PATH, json=body(add_generation_prompt=False, chat_template_kwargs={"shout": True}))
    call("POST", PATH, json=body(add_special_tokens=True))
    assert prompt_text(engine, 0) == "user:hi\nLOUD\n"
    assert engine.requests[1].prompt_token_ids[0] == 256


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role"),
        ([*HI, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages"),
        ("hi", "messages"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(
    call: Any, engine: Any, messages: Any, param: str
) -> None:
    answer = call("POST", PATH, json=body(messages=messages))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert engine.requests == []


def test_template_kwargs_cannot_replace_the_messages(call: Any) -> None:
    answer = call("POST", PATH, json=body(chat_template_kwargs={"messages": []}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
