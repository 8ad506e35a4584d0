"""The routes that answer at once, the tokenizer routes, and the counting of requests."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.messages import StepStats


def test_health_version_and_models(call: Any) -> None:
    assert call("GET", "/health").json() == {"status": "ok"}
    assert list(call("GET", "/version").json()) == ["version"]
    listed = call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert call("GET", "/models").json() == listed
    card = listed["data"][0]
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": "tiny",
        "object": "model",
        "owned_by": "octavo",
        "root": "/models/tiny.gguf",
        "max_model_len": 128,
    }
    assert call("GET", "/v1/models/alias").json()["id"] == "alias"
    assert call("GET", "/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_routes_without_v1_are_the_same(call: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert call("POST", "/chat/completions", json={"messages": messages}).status_code == 200
    assert call("POST", "/completions", json={"prompt": "hi"}).status_code == 200


def test_tokenize_and_back(call: Any) -> None:
    got = call("POST", "/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert got == {
        "count": 4,
        "max_model_len": 128,
        "tokens": [256, 104, 0xC3, 0xA9],
        "token_strs": ["<s>", "h", "\u00c3", "\u00a9"],
    }
    plain = call("POST", "/tokenize", json={"model": "tiny", "prompt": "hé", "add_special_tokens": False})
    assert plain.json()["tokens"] == [104, 0xC3, 0xA9]
    assert call("POST", "/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "<s>hé"}
    assert call("POST", "/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []


def test_tokenize_renders_messages(call: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    tokens = call("POST", "/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(tokens) == b"user:a\nassistant:"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_tokenizer_routes_name_what_is_wrong(call: Any, path: str, fields: Any, param: str) -> None:
    answer = call("POST", path, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_tokenizer_info_has_what_evaluators_ask_for(call: Any) -> None:
    info = call("GET", "/tokenizer_info").json()
    assert info["chat_template"].startswith("{% for m in messages %}")
    assert {k: v for k, v in info.items() if k != "chat_template"} == {
        "vocab_size": 260,
        "max_model_len": 128,
        "bos_token": "<s>",
        "bos_token_id": 256,
        "eos_token": "</s>",
        "eos_token_ids": [257],
    }


def test_metrics_show_the_pool_before_the_first_step_and_the_steps_after(call: Any, engine: Any) -> None:
    idle = call("GET", "/metrics")
    assert idle.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'octavo_kv_blocks{state="free"} 1024.0' in idle.text
    for listener in engine.listeners:
        listener(StepStats(requests_running=3, steps_total=1, step_s=[0.5]))
    text = call("GET", "/metrics").text
    assert "octavo_requests_running 3.0" in text
    assert "octavo_step_seconds_sum 0.5" in text
    assert "octavo_engine_up 1.0" in text


def test_requests_are_counted_by_route_not_by_path(call: Any) -> None:
    call("GET", "/health")
    call("GET", "/v1/models/a")
    call("GET", "/v1/models/b")
    call("GET", "/made/up")
    call("GET", "/v1/completions")
    call("BREW", "/health")
    lines = [
        x for x in call("GET", "/metrics").text.splitlines() if x.startswith("octavo_http_requests_total")
    ]
    assert sorted(lines) == [
        'octavo_http_requests_total{method="GET",route="/health",status="200"} 1.0',
        'octavo_http_requests_total{method="GET",route="/v1/completions",status="405"} 1.0',
        'octavo_http_requests_total{method="GET",route="/v1/models/{name:path}",status="404"} 2.0',
        'octavo_http_requests_total{method="GET",route="none",status="404"} 1.0',
        'octavo_http_requests_total{method="other",route="/health",status="405"} 1.0',
    ]


def test_requests_without_the_key_are_counted_too(call: Any, make_app: Any) -> None:
    app = make_app(api_key="k")
    call("GET", "/v1/models", app=app)
    text = call("GET", "/metrics", app=app, headers={"authorization": "Bearer k"}).text
    assert 'octavo_http_requests_total{method="GET",route="none",status="401"} 1.0' in text


def test_openapi_describes_every_public_route(call: Any) -> None:
    schema = call("GET", "/openapi.json").json()
    assert set(schema["paths"]) == {
        "/health",
        "/version",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/reset_prefix_cache",
        "/debug/blocks",
    }
    post = schema["paths"]["/v1/completions"]["post"]
    fields = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert fields["top_k"]["default"] == 0
