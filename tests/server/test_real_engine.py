"""`octavo serve` itself on a tiny model: groups, stops and debugging through real processes and a real socket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.cli import main

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def start(text_model: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """start(flags) runs it and returns the process and its base URL."""
    pytest.importorskip("octavo._native", exc_type=ImportError, reason="the kernels are not built")
    running: list[subprocess.Popen[str]] = []

    def run(*flags: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "octavo", "serve", str(text_model), "--port", "0", *flags]
        command += ["--weight-dtype", "float32", "--threads", "1", "--served-model-name", "tiny"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if ready := re.match(r"Octavo is ready on (\S+)", line):
                return process, ready[1]
        raise AssertionError(process.communicate()[1])

    yield run
    for process in running:
        process.terminate()
        process.communicate(timeout=10)


@pytest.fixture(scope="module")
def url(start: Any) -> str:
    return str(start("--num-blocks-override", "64", "--block-size", "4", "--debug")[1])


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _idle_afterwards(url: str) -> Iterator[None]:
    yield
    blocks = httpx.get(f"{url}/debug/blocks").json()
    assert blocks["tables"] == []
    assert sum(blocks["ref_counts"]) == 0


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    known = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "seed": 1} | fields
    extra = {"ignore_eos": True}
    for name in ("use_beam_search", "length_penalty"):
        if name in known:
            extra[name] = known.pop(name)
    return client.completions.create(**known, extra_body=extra)


def test_choices_of_one_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    """F1, F2, F10."""
    first, again = (complete(client, n=8) for _ in range(2))
    assert [c.index for c in first.choices] == list(range(8))
    assert len({c.text for c in first.choices}) == 8
    assert {c.finish_reason for c in first.choices} == {"length"}
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (16, 128)
    assert again.usage.prompt_tokens_details.cached_tokens == 12


def test_a_stream_of_choices_is_the_plain_answer(client: openai.OpenAI) -> None:
    plain = complete(client, n=4)
    stop = plain.choices[2].text[5:7]
    texts, reasons = dict.fromkeys(range(4), ""), {}
    for chunk in complete(client, n=4, stop=stop, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    expected = {c.index: c.text.split(stop)[0] for c in plain.choices}
    assert texts == expected
    assert reasons == {c.index: "stop" if stop in c.text else "length" for c in plain.choices}


def test_best_of_returns_the_likeliest(client: openai.OpenAI) -> None:
    many = complete(client, n=6, logprobs=0)
    likely = sorted(many.choices, key=lambda c: -sum(c.logprobs.token_logprobs))
    best = complete(client, n=2, best_of=6)
    assert [c.text for c in best.choices] == [c.text for c in likely[:2]]
    assert [c.logprobs for c in best.choices] == [None, None]
    assert best.usage.completion_tokens == 32


def test_best_of_ends_at_stop_strings_in_the_engine(client: openai.OpenAI) -> None:
    many = complete(client, n=6)
    stops = sorted({c.text[3:5] for c in many.choices})[:4]
    best = complete(client, n=3, best_of=6, stop=stops)
    assert all(not any(stop in c.text for stop in stops) for c in best.choices)
    alone = complete(client, n=6, logprobs=0, stop=stops)
    likely = sorted(alone.choices, key=lambda c: -sum(c.logprobs.token_logprobs))
    assert [c.text for c in best.choices] == [c.text for c in likely[:3]]


@pytest.mark.parametrize("stream", [False, True])
def test_beam_search_is_the_same_every_time(client: openai.OpenAI, stream: bool) -> None:
    plain = complete(client, n=3, best_of=4, use_beam_search=True)
    assert [c.index for c in plain.choices] == [0, 1, 2]
    assert len({c.text for c in plain.choices}) == 3
    assert plain.usage.completion_tokens == 48
    if stream:
        chunks = complete(client, n=3, best_of=4, use_beam_search=True, stream=True)
        texts = dict.fromkeys(range(3), "")
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert list(texts.values()) == [c.text for c in plain.choices]


def test_beam_search_stops_at_a_stop_string(client: openai.OpenAI) -> None:
    """F4."""
    fields = {"best_of": 4, "use_beam_search": True, "length_penalty": 0.0}
    text = complete(client, **fields).choices[0].text
    stop = text[5:7]
    [choice] = complete(client, stop=stop, **fields).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.stop_reason == stop


def test_too_many_sequences_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n is 129"):
        complete(client, n=129)


def test_the_prefix_cache_is_reset(client: openai.OpenAI, url: str) -> None:
    complete(client)
    assert httpx.post(f"{url}/reset_prefix_cache").json()["cleared_blocks"] > 0
    assert httpx.post(f"{url}/reset_prefix_cache").json() == {"cleared_blocks": 0}
    assert complete(client).usage.prompt_tokens_details.cached_tokens == 0
    assert 'octavo_kv_blocks{state="cached"}' in httpx.get(f"{url}/metrics").text


def test_octavo_blocks_shows_a_running_request(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fields = {"prompt": PROMPT, "n": 2, "max_tokens": 40, "ignore_eos": True, "stream": True}
    record = tmp_path / "step.json"
    with httpx.stream("POST", f"{url}/v1/completions", json=fields) as answer:
        next(answer.iter_lines())
        with pytest.raises(SystemExit) as ended:
            main(["blocks", "--url", url, "--record", str(record)])
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("64 blocks of 4 tokens: ")
    assert record.read_bytes().startswith(b'{"block_size":4,')
    with pytest.raises(SystemExit):
        main(["blocks", "--file", str(record)])
    assert capsys.readouterr().out == shown


def test_a_server_whose_engine_was_killed_ends_with_one_line(start: Any) -> None:
    process, url = start("--num-blocks-override", "64")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    fields = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=fields | {"n": 16}) as answer:
        lines = answer.iter_lines()
        next(lines)
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    said = "the engine process was killed (SIGKILL: did memory run out?); the server has stopped"
    assert [line for line in err.splitlines() if "a stream broke off" not in line] == [
        f"octavo: error: {said}"
    ]
