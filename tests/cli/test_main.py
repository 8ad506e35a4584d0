"""The command line as a user meets it: help, errors on one line, exit codes, flags that reach their place."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import octavo
from octavo.cli import main
from octavo.cli.app import app
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import CompletionOutput, RequestOutput
from octavo.errors import EngineError, ModelNotFoundError, RequestError
from octavo.models.registry import MODELS
from octavo.sampling.validate import check
from octavo.text.output import TextDelta, Usage

COMMANDS = ("serve", "generate", "chat", "blocks", "models", "version")
LLM_OPTIONS = {
    "weight_dtype": "auto",
    "weight_cache": True,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 256,
    "num_threads": None,
    "seed": 0,
    "preemption_mode": "auto",
    "swap_space_bytes": 0,
    "swap_dir": None,
}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


class FakeLLM:
    """Says its arguments back, one word a delta."""

    made: list[tuple[str, dict[str, Any]]] = []

    def __init__(self, model: str, **options: Any) -> None:
        self.made.append((model, options))

    def check(self, params: SamplingParams) -> None:
        check(params, vocab_size=1000, max_logprobs=0)

    def chat_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        return [len(m["content"]) for m in messages]

    def stream(self, prompt: Any, params: Any) -> Iterator[TextDelta]:
        words = (
            f"prompt={prompt} ",
            f"max={params.max_tokens} ",
            f"t={params.temperature} ",
            f"stop={params.stop}",
        )
        for number, word in enumerate(words):
            yield TextDelta(0, word, (number,), finish_reason="stop" if number == 3 else None)

    def generate(self, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
        self.params = params
        self.check(params)
        scores = [None, -0.25] if params.beam_width is None else [-0.25, -0.5]
        choices = [CompletionOutput(i, f"answer {i}", score=scores[i]) for i in range(params.n)]
        return [RequestOutput(prompts[0], [1], choices, Usage(1, 5))]


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    FakeLLM.made.clear()
    monkeypatch.setattr("octavo.engine.llm.LLM", FakeLLM)
    return FakeLLM


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, Any]]:
    calls: list[tuple[EngineConfig, Any]] = []
    monkeypatch.setattr("octavo.server.serve.serve", lambda config, options: calls.append((config, options)))
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    return calls


def test_every_command_is_listed_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    listed = capsys.readouterr().out
    for command in COMMANDS:
        assert command in listed
        assert run(command, "--help") == 0
        assert "Usage: octavo " + command in capsys.readouterr().out


def printed(code: str) -> str:
    """By a Python process of its own."""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, octavo.cli.app\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'numpy', 'fastapi', 'tokenizers', 'gguf'}))"
    )
    assert printed(code) == "[]"


def test_generate_loads_nothing_of_the_server() -> None:
    code = (
        "import sys, octavo.engine.llm\n"
        "from octavo.cli.app import app\n"
        "try: app(['generate', ''], standalone_mode=False)\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print({m.split('.')[0] for m in sys.modules} & "
        "{'pydantic', 'fastapi', 'uvicorn', 'prometheus_client', 'asyncio', 'huggingface_hub', 'rich'})"
    )
    assert printed(code).split() == ["ConfigError", "set()"]


def test_the_server_loads_nothing_of_the_engine_it_starts() -> None:
    code = (
        "import sys, octavo.server.serve\n"
        "print(sorted({'numpy', 'octavo.engine.build', 'octavo.models.layers'} & set(sys.modules)))"
    )
    assert printed(code) == "[]"


def test_python_dash_m_is_the_same_command() -> None:
    found = subprocess.run([sys.executable, "-m", "octavo", "version"], capture_output=True, text=True)
    assert found.returncode == 0
    assert found.stdout.startswith(f"octavo {octavo.__version__} (Python ")


def test_version_has_two_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    first = capsys.readouterr().out
    assert run("--version") == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("frobnicate",), ("'frobnicate'", "octavo --help")),
        (("serve", "--port", "many"), ("'--port'", "octavo serve --help")),
        (("serve", "--weight-dtype", "int4"), ("int4", "int8")),
        (("serve", "--frob"), ("--frob",)),
        (("serve", "--kv-cache-memory", "lots"), ("'lots'", "512mib")),
        (("generate",), ("missing argument",)),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err.lower()


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelNotFoundError("x: no such\nfile"), 1), (EngineError("died"), 1), (KeyboardInterrupt(), 130)],
)
def test_failures_have_their_exit_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail(config: Any, options: Any) -> None:
        raise error

    monkeypatch.setattr("octavo.server.serve.serve", fail)
    assert run("serve") == code
    expected = "" if code == 130 else f"octavo: error: {' '.join(str(error).split())}"
    assert capsys.readouterr().err.strip() == expected


def test_faults_of_our_own_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Any, options: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("octavo.server.serve.serve", fail)
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


def test_serve_without_flags_has_the_engine_s_own_defaults(served: Any) -> None:
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    config, options = served[0]
    assert config == EngineConfig()
    assert (options.host, options.port, options.api_key) == ("127.0.0.1", 8000, None)
    assert options.served_model_names == ()


def test_every_serve_flag_reaches_its_place(served: Any) -> None:
    flags = (
        "serve model.gguf --host 0.0.0.0 --port 81 --served-model-name a --served-model-name b --api-key k "
        "--block-size 8 --kv-cache-memory 1MiB --num-blocks-override 9 --weight-dtype float32 "
        "--kv-cache-dtype fp16 --no-enable-prefix-caching "
        "--max-model-len 100 --max-num-seqs 7 --max-num-batched-tokens 70 --threads 3 "
        "--seed 5 --debug --preemption-mode swap --swap-space 2GiB --swap-dir /swap"
    )
    result = CliRunner().invoke(app, flags.split())
    assert result.exit_code == 0, result.output
    config, options = served[0]
    assert config == EngineConfig(
        model="model.gguf",
        block_size=8,
        kv_cache_memory_bytes=2**20,
        num_blocks_override=9,
        weight_dtype="float32",
        kv_cache_dtype="fp16",
        prefix_caching=False,
        max_model_len=100,
        max_num_seqs=7,
        max_num_batched_tokens=70,
        num_threads=3,
        seed=5,
        debug=True,
        preemption_mode="swap",
        swap_space_bytes=2**31,
        swap_dir="/swap",
    )
    assert (options.host, options.port, options.api_key) == ("0.0.0.0", 81, "k")
    assert options.served_model_names == ("a", "b")


@pytest.mark.parametrize(("value", "expected"), [("from-env", "from-env"), ("", None)])
def test_the_key_may_come_from_the_environment(
    served: Any, monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", value)
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert served[0][1].api_key == expected


def test_generate_streams_the_answer(capsys: pytest.CaptureFixture[str], fake_llm: Any) -> None:
    assert run("generate", "hello", "--stats", "--max-tokens", "3", "--stop", "x") == 0
    captured = capsys.readouterr()
    assert captured.out == "prompt=[5] max=3 t=0.7 stop=('x',)\n"
    assert captured.err.startswith("4 tokens, ")
    assert fake_llm.made == [(DEFAULT_MODEL, LLM_OPTIONS)]


def test_generate_raw_continues_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fake_llm: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("once upon"))
    assert run("generate", "-", "--raw", "--model", "m", "--temperature", "0", "--threads", "2") == 0
    assert capsys.readouterr().out == "prompt=once upon max=256 t=0.0 stop=()\n"
    assert fake_llm.made == [("m", LLM_OPTIONS | {"num_threads": 2})]


def test_generate_lists_several_answers(capsys: pytest.CaptureFixture[str], fake_llm: Any) -> None:
    assert run("generate", "hello", "--beam-width", "4", "--n", "2", "--length-penalty", "2", "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == "── 1, score -0.2500\nanswer 0\n── 2, score -0.5000\nanswer 1\n"
    assert captured.err.startswith("5 tokens, ")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--n 2 --length-penalty 2", "length_penalty"),
        ("--n 2 --best-of 1", "best_of"),
        ("--beam-width 2 --best-of 2", "best_of"),
        ("--beam-width 2 --n 3", "beam_width"),
    ],
)
def test_generate_ignores_no_flag_silently(
    capsys: pytest.CaptureFixture[str], fake_llm: Any, flags: str, name: str
) -> None:
    assert run("generate", "hello", *flags.split()) == 2
    assert f"octavo: error: {name} is " in capsys.readouterr().err


def test_generate_and_chat_take_a_swap_space(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo.cli.conversation.Conversation.run", lambda self: None)
    flags = ("--preemption-mode", "recompute", "--swap-space", "1MiB", "--swap-dir", "/swap")
    assert run("generate", "hello", *flags) == 0
    assert run("chat", *flags) == 0
    swap = {"preemption_mode": "recompute", "swap_space_bytes": 2**20, "swap_dir": "/swap"}
    assert [made[1] for made in fake_llm.made] == [LLM_OPTIONS | swap] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--top-p", "7"), "top_p is 7.0"), (("--system", "no template"), "the model has no chat template")],
)
def test_chat_says_what_cannot_work_before_anybody_types(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fake_llm: type[FakeLLM],
    flags: tuple[str, ...],
    message: str,
) -> None:
    def refuse(self: FakeLLM, messages: list[dict[str, Any]]) -> list[int]:
        assert messages[0] == {"role": "system", "content": "no template"}
        raise RequestError("the model has no chat template")

    monkeypatch.setattr(fake_llm, "chat_prompt", refuse)
    monkeypatch.setattr("octavo.cli.conversation.Conversation.run", lambda self: pytest.fail("it began"))
    assert run("chat", *flags) == 2
    assert f"octavo: error: {message}" in capsys.readouterr().err


def test_generate_refuses_an_empty_prompt(capsys: pytest.CaptureFixture[str], fake_llm: Any) -> None:
    assert run("generate", "") == 2
    assert "the prompt is empty" in capsys.readouterr().err
    assert fake_llm.made == []


def test_models_lists_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from octavo.weights.cache import ModelCache

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert run("models") == 0
    empty = capsys.readouterr().out
    assert empty.startswith("No model has been downloaded yet")
    file = tmp_path / "x.gguf"
    file.write_bytes(b"x" * 2048)
    ModelCache(tmp_path).add("hf:a/b", file, None)
    ModelCache(tmp_path).add(DEFAULT_MODEL, file, None)
    assert run("models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        f"{'2.0 KiB':>10}  hf:a/b",
        f"{'':12}{file}",
        f"{'2.0 KiB':>10}  smollm2",
        f"{'':12}{file}",
    ]
    assert lines[-1] == "Architectures that load: " + ", ".join(sorted(MODELS))
