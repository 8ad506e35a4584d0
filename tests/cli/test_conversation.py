"""The chat loop on a scripted model and a scripted user."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from octavo.cli.conversation import HELP, Conversation
from octavo.core.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.text.output import TextDelta


class ScriptedLLM:
    """A prompt is one token per character of the conversation; the answer is always the same."""

    def __init__(self, max_model_len: int = 1000, answer: Sequence[str] = ("Good ", "day.")) -> None:
        self.engine = SimpleNamespace(info=SimpleNamespace(max_model_len=max_model_len))
        self.answer = answer
        self.conversations: list[list[dict[str, Any]]] = []
        self.num_closed = 0
        self.interrupt_after: int | None = None

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        self.conversations.append(list(messages))
        return [0] * sum(len(m["content"]) for m in messages)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[TextDelta]:
        if len(prompt) > self.engine.info.max_model_len:
            raise RequestError("the prompt is too long")
        try:
            for number, word in enumerate(self.answer):
                if number == self.interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                yield TextDelta(0, word, (number,))
        finally:
            self.num_closed += 1


def converse(llm: ScriptedLLM, *lines: str | type[BaseException], system: str | None = None) -> str:
    """What is on the screen after the user typed `lines`."""
    script = iter(lines)

    def read(prompt: str) -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    screen = Console(file=io.StringIO(), width=200)
    Conversation(llm, SamplingParams(), screen, system, read).run()
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def contents(messages: list[dict[str, Any]]) -> list[str]:
    return [f"{m['role'][0]}:{m['content']}" for m in messages]


def test_answers_are_shown_with_their_speed_and_remembered() -> None:
    llm = ScriptedLLM()
    screen = converse(llm, "hi", "  ", "more", system="be kind")
    assert screen.count("Good day.\n2 tokens, ") == 2
    assert "context 11 of 1000" in screen
    assert [contents(c) for c in llm.conversations] == [
        ["s:be kind", "u:hi"],
        ["s:be kind", "u:hi", "a:Good day.", "u:more"],
    ]
    assert llm.num_closed == 2


def test_clear_forgets_all_but_the_system_message() -> None:
    llm = ScriptedLLM()
    converse(llm, "hi", "/clear", "again", system="s")
    assert contents(llm.conversations[-1]) == ["s:s", "u:again"]


@pytest.mark.parametrize("line", ["/exit", "/quit", EOFError, KeyboardInterrupt])
def test_ways_to_leave(line: Any) -> None:
    llm = ScriptedLLM()
    converse(llm, line, "hi")
    assert llm.conversations == []


def test_commands_are_no_messages() -> None:
    llm = ScriptedLLM()
    screen = converse(llm, "/help", "/frob now")
    assert HELP in screen
    assert "There is no command /frob; /help lists them." in screen
    assert llm.conversations == []


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said() -> None:
    llm = ScriptedLLM(answer=("a", "b", "c", "d"))
    llm.interrupt_after = 1
    handler = signal.getsignal(signal.SIGINT)
    screen = converse(llm, "hi", "more")
    assert "ab\n2 tokens" in screen
    assert contents(llm.conversations[1]) == ["u:hi", "a:ab", "u:more"]
    assert llm.num_closed == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_oldest_turns_are_forgotten_when_the_context_is_full() -> None:
    llm = ScriptedLLM(max_model_len=100)
    screen = converse(llm, "x" * 30, "y" * 10)
    assert screen.count("its oldest turn is forgotten") == 1
    assert contents(llm.conversations[-1]) == ["u:" + "y" * 10]


def test_a_message_that_cannot_fit_is_refused_and_dropped() -> None:
    llm = ScriptedLLM(max_model_len=100)
    screen = converse(llm, "x" * 101, "hi")
    assert "the prompt is too long" in screen
    assert contents(llm.conversations[-1]) == ["u:hi"]


def test_control_sequences_of_the_model_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in converse(ScriptedLLM(answer=("\x1b[2Jboo",)), "hi")
