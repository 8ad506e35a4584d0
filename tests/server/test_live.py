"""Over a real socket: the openai client, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest


@pytest.fixture
def url(serve: Any, make_app: Any) -> str:
    return str(serve(make_app(api_key="secret")))


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_openai_client_lists_models(client: Any) -> None:
    assert [(m.id, m.root, m.max_model_len) for m in client.models.list().data] == [
        ("tiny", "/models/tiny.gguf", 128),
        ("alias", "/models/tiny.gguf", 128),
    ]
    assert client.models.retrieve("alias").id == "alias"


@pytest.mark.parametrize("num_packets", [1, 2])
def test_a_client_that_offers_http_2_is_answered_in_http_1(url: str, num_packets: int) -> None:
    """As Java's HTTP client does with every request."""
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=10) as connection:
        for packet in (head + body,) if num_packets == 1 else (head, body):
            connection.sendall(packet)
            time.sleep(0.05)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "He"


def test_a_head_without_end_is_refused(url: str) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 200_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_openai_client_chats_and_streams(client: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = client.chat.completions.create(model="tiny", messages=messages, extra_body={"top_k": 3})
    assert plain.choices[0].message.content == "Hello, world."
    assert plain.choices[0].finish_reason == "stop"
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (18, 14)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello, world."
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage


def test_openai_client_feeds_an_answer_back(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content


def test_openai_client_completes(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, echo=True, logprobs=0)
    assert [c.text for c in answer.choices] == ["aHe", "bHe"]
    assert answer.choices[1].logprobs.tokens == ["<s>", "b", "H", "e"]


def test_openai_client_raises_what_the_server_says(client: Any, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_openai_client_sees_a_stream_break_off(client: Any, engine: Any) -> None:
    engine.fail_after = 3
    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    assert [next(stream).choices[0].text for _ in range(3)] == ["H", "e", "l"]
    with pytest.raises(openai.APIError, match="the engine died"):
        next(stream)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_client_that_leaves_a_stream_frees_the_engine(
    url: str, engine: Any, wait_for: Any, num_prompts: int
) -> None:
    engine.delay_s = 0.01
    fields = {"prompt": ["x"] * num_prompts, "max_tokens": 100, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer secret"}
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, headers=headers) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert engine.num_running == num_prompts
    wait_for(lambda: engine.num_running == 0)
    assert sorted(engine.aborted) == sorted(r.request_id for r in engine.requests)
    wait_for(lambda: 'route="/v1/completions",status="200"} 1.0' in metrics(url))


def test_a_client_that_leaves_before_a_plain_answer_frees_the_engine(
    url: str, engine: Any, wait_for: Any
) -> None:
    engine.delay_s = 0.01
    raw = json.dumps({"prompt": "x", "max_tokens": 100, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
        connection.sendall(f"{head}authorization: Bearer secret\r\n\r\n".encode() + raw)
        wait_for(lambda: engine.num_running == 1)
    wait_for(lambda: engine.num_running == 0)
    assert engine.aborted == [engine.requests[0].request_id]
    wait_for(lambda: 'route="/v1/completions",status="499"} 1.0' in metrics(url))


def test_a_client_that_leaves_in_its_own_request_is_no_fault(url: str, engine: Any, wait_for: Any) -> None:
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        connection.sendall(f"{head}authorization: Bearer secret\r\n\r\n".encode() + b'{"prompt"')
    wait_for(lambda: 'route="/v1/completions",status="499"} 1.0' in metrics(url))
    assert engine.requests == []


def test_a_client_that_leaves_while_a_stream_waits_frees_the_engine(
    url: str, engine: Any, wait_for: Any
) -> None:
    engine.delay_s = 30.0
    fields = {"prompt": "x", "stream": True}
    headers = {"authorization": "Bearer secret"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=fields, headers=headers, timeout=0.2)
    wait_for(lambda: engine.num_running == 0)
    assert engine.aborted == [engine.requests[0].request_id]


def test_many_streams_at_once_do_not_mix(url: str, engine: Any) -> None:
    async def one(client: httpx.AsyncClient, count: int) -> str:
        fields = {"prompt": "x", "max_tokens": count, "ignore_eos": True, "stream": True}
        answer = await client.post("/v1/completions", json=fields)
        lines = answer.text.split("\n\n")[:-2]
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    async def all_of_them() -> list[str]:
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as client:
            return await asyncio.gather(*(one(client, count) for count in range(1, 33)))

    endless = engine.reply * 3
    assert asyncio.run(all_of_them()) == [endless[:count] for count in range(1, 33)]


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", headers={"authorization": "Bearer secret"}).text
