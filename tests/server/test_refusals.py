"""What the server refuses: always an OpenAI error body, never a silent change, and it goes on serving."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ContextLengthError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def _documented_codes() -> dict[int, set[str]]:
    doc = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()
    codes: dict[int, set[str]] = {}
    for status, listed in re.findall(r"^\| (\d+) \|([^|]+)\|", doc.split("\n## Errors\n")[1], re.M):
        codes.setdefault(int(status), set()).update(re.findall(r"`(\w+)`", listed))
    return codes


DOCUMENTED_CODES = _documented_codes()


def fault(answer: Any, status: int = 400) -> dict[str, Any]:
    """The error of an answer; checks its shape, and that the documentation knows its code."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert list(answer.json()) == ["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for name in ("message", "type", "code"):
        assert isinstance(error[name], str)
        assert error[name]
    assert error["code"] in DOCUMENTED_CODES[status]
    return error


def completion(call: Any, **fields: Any) -> Any:
    return call("POST", COMPLETIONS, json={"model": "tiny", "prompt": "hi"} | fields)


def chat(call: Any, **fields: Any) -> Any:
    return call("POST", CHAT, json={"model": "tiny", "messages": HI} | fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 5, "min_tokens": 20}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"n": 3, "best_of": 2, "use_beam_search": True}, "best_of"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": True, "length_penalty": 51}, "length_penalty"),
        ({"use_beam_search": True, "length_penalty": "long"}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
        ({"use_beam_search": True, "frequency_penalty": -1}, "frequency_penalty"),
        ({"use_beam_search": True, "logit_bias": {"1": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"stop_token_ids": ["AI"]}, "stop_token_ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"logit_bias": {"AI": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": "yes"}, "stream"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
@pytest.mark.parametrize("send", [completion, chat])
def test_wrong_fields_are_named(call: Any, engine: Any, send: Any, fields: Any, param: str) -> None:
    error = fault(send(call, **fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[-1] in error["message"]
    assert engine.requests == []
    assert send(call).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "x"},
        {"prompt_logprobs": 1},
        {"structured_outputs": {"regex": "a"}},
        {"priority": 1},
    ],
)
def test_known_but_unsupported_completion_fields_are_refused(call: Any, fields: Any) -> None:
    error = fault(completion(call, **fields))
    assert error["param"] == next(iter(fields))
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"functions": [{}]},
        {"modalities": ["text", "audio"]},
        {"reasoning_effort": "high"},
        {"store": True},
        {"echo": True},
        {"web_search_options": {}},
        {"continue_final_message": True},
    ],
)
def test_known_but_unsupported_chat_fields_are_refused(call: Any, fields: Any) -> None:
    error = fault(chat(call, **fields))
    assert error["param"] == next(iter(fields))
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"store": False, "service_tier": "auto", "modalities": ["text"]},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {}},
        {"best_of": 1, "n": 1, "priority": 0, "use_beam_search": False},
        {"length_penalty": 1, "early_stopping": False},
        {"stop": None, "logprobs": None, "top_logprobs": None, "seed": None},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(call: Any, fields: Any) -> None:
    assert chat(call, **fields).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
def test_empty_prompts_are_refused(call: Any, prompt: Any) -> None:
    assert fault(completion(call, prompt=prompt))["param"] == "prompt"
    assert call("GET", "/health").status_code == 200


@pytest.mark.parametrize("prompt", [[-1], [260], [[5, 260]], [2**70], ["a", 1], [1, "a"], [1.5], 7, {"a": 1}])
def test_prompts_that_are_no_prompts_are_refused(call: Any, engine: Any, prompt: Any) -> None:
    assert fault(completion(call, prompt=prompt))["param"] == "prompt"
    assert engine.requests == []


def test_a_missing_prompt_is_named(call: Any) -> None:
    error = fault(call("POST", COMPLETIONS, json={"model": "tiny"}))
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


def test_logprobs_have_a_limit(call: Any) -> None:
    assert completion(call, logprobs=20).status_code == 200
    assert fault(completion(call, logprobs=25))["param"] == "logprobs"
    error = fault(chat(call, logprobs=True, top_logprobs=25))
    assert error["param"] == "top_logprobs"
    assert "25" in error["message"]
    assert fault(chat(call, top_logprobs=2))["param"] == "top_logprobs"


def test_beam_search_gives_no_logprobs(call: Any) -> None:
    assert fault(completion(call, use_beam_search=True, logprobs=0))["param"] == "logprobs"
    assert fault(completion(call, use_beam_search=True, echo=True, logprobs=1))["param"] == "logprobs"
    assert fault(chat(call, use_beam_search=True, logprobs=True))["param"] == "logprobs"


def test_more_min_tokens_than_the_default_allows(call: Any) -> None:
    assert fault(completion(call, min_tokens=17))["param"] == "min_tokens"
    assert chat(call, min_tokens=17).status_code == 200


def test_two_different_limits_are_refused(call: Any) -> None:
    assert fault(chat(call, max_tokens=1, max_completion_tokens=2))["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"),
    [(127, 1, 200), (127, None, 200), (127, 2, 400), (128, 1, 400), (128, None, 400), (129, None, 400)]
    + [(1, 127, 200), (1, 128, 400), (1, 10**9, 400)],
)
def test_prompt_and_answer_must_fit_the_context(
    call: Any, engine: Any, num_prompt: int, max_tokens: int | None, status: int
) -> None:
    answer = completion(call, prompt=[97] * num_prompt, max_tokens=max_tokens)
    assert answer.status_code == status
    if status == 400:
        error = fault(answer)
        assert error["code"] == "context_length_exceeded"
        assert "128" in error["message"]
        assert str(num_prompt) in error["message"]
        assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_what_the_engine_refuses_is_the_clients_fault(
    call: Any, engine: Any, stream: bool, prompt: Any
) -> None:
    engine.refusal = ContextLengthError("needs 3 blocks, there are 2", param="prompt")
    error = fault(completion(call, prompt=prompt, stream=stream))
    assert error["code"] == "context_length_exceeded"
    assert (error["message"], error["param"]) == ("needs 3 blocks, there are 2", "prompt")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": NaN}', b'{"prompt": "\\ud800"}']
)
def test_bodies_that_are_no_json_object_are_refused(call: Any, raw: bytes) -> None:
    assert fault(call("POST", COMPLETIONS, content=raw))["code"] == "invalid_json"


def test_a_body_needs_no_content_type(call: Any) -> None:
    raw = b'{"prompt": "hi", "max_tokens": 1}'
    assert call("POST", COMPLETIONS, content=raw).json()["model"] == "tiny"


def test_unknown_models_are_not_found(call: Any) -> None:
    error = fault(completion(call, model="gpt-9"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny', 'alias'" in error["message"]
    assert completion(call, model="alias").json()["model"] == "alias"


def test_unknown_routes_and_methods(call: Any) -> None:
    assert fault(call("GET", "/v1/nothing"), 404)["code"] == "not_found"
    answer = call("GET", CHAT)
    assert fault(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


def test_large_bodies_are_refused_announced_or_not(call: Any, make_app: Any) -> None:
    async def chunks() -> Any:
        for _ in range(5):
            yield b" " * 50

    app = make_app(max_body_bytes=200)
    assert call("POST", COMPLETIONS, app=app, content=b'{"prompt": "hi"}').status_code == 200
    for content in (b" " * 201, chunks()):
        error = fault(call("POST", COMPLETIONS, app=app, content=content), 413)
        assert "200 bytes" in error["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [(None, 401), ("Bearer wrong", 401), ("secret", 401), ("Bearer secret", 200), ("bearer secret", 200)]
    + [("Bearer secret2", 401), ("Bearer \xe9", 401)],
)
def test_the_key_guards_all_but_health(call: Any, make_app: Any, header: str | None, status: int) -> None:
    app = make_app(api_key="secret")
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for path in ("/v1/models", "/metrics", "/version"):
        answer = call("GET", path, app=app, headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert fault(answer, 401)["code"] == "invalid_api_key"
    assert call("GET", "/health", app=app, headers=headers).status_code == 200


def test_a_dead_engine_is_503(call: Any, engine: Any) -> None:
    engine.is_alive = False
    assert fault(call("GET", "/health"), 503)["code"] == "engine_unavailable"
    assert fault(completion(call), 503)["type"] == "server_error"
    assert engine.requests == []


def test_an_engine_that_dies_before_the_first_token_is_503(call: Any, engine: Any) -> None:
    for stream in (False, True):
        engine.fail_after, engine.is_alive = 0, True
        assert fault(completion(call, stream=stream), 503)["message"] == "the engine died"


def test_a_request_the_engine_gives_up_is_500(call: Any, engine: Any) -> None:
    engine.give_up_after = 2
    error = fault(completion(call), 500)
    assert error["code"] == "engine_error"
    assert "not a number" in error["message"]


def test_a_stream_that_breaks_off_ends_with_an_error_event(call: Any, engine: Any) -> None:
    engine.fail_after = 2
    lines = completion(call, stream=True).text.split("\n\n")
    assert len(lines) == 5
    assert lines[2].startswith('data: {"error":{"message":"the engine died","type":"server_error"')
    assert lines[3:] == ["data: [DONE]", ""]


def test_a_fault_of_the_server_is_500_and_says_little(call: Any, engine: Any) -> None:
    engine.info = None
    error = fault(completion(call), 500)
    assert error["code"] == "internal_error"
    assert "NoneType" not in error["message"]
