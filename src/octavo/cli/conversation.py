"""Conversation: the read-answer loop behind `octavo chat`.

Ctrl-C while the model answers ends the answer and keeps what was said; at the prompt it ends the chat. When
the conversation outgrows the context, its oldest turns are forgotten, and the user is told.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any, Protocol

from rich.console import Console

from octavo.core.sampling_params import SamplingParams
from octavo.errors import RequestError
from octavo.text.output import TextDelta

Message = dict[str, Any]

HELP = """\
/clear   forget the conversation
/exit    leave (so does Ctrl-D)
/help    this list
Ctrl-C while the model answers stops the answer."""
_MIN_ANSWER_TOKENS = 64  # room kept free behind the prompt


class ChatModel(Protocol):
    """The part of LLM that is needed here."""

    engine: Any

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[TextDelta]: ...


@dataclass(slots=True)
class _Answer:
    text: str = ""
    num_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def stats(self, num_context: int, max_context: int) -> str:
        after_first = max(self.total_s - self.first_token_s, 1e-9)
        speed = (self.num_tokens - 1) / after_first if self.num_tokens > 1 else 0.0
        return (
            f"{self.num_tokens} tokens, {speed:.1f} tokens/s, first after {self.first_token_s:.2f} s, "
            f"context {num_context + self.num_tokens} of {max_context}"
        )


class Conversation:
    def __init__(
        self,
        llm: ChatModel,
        params: SamplingParams,
        console: Console,
        system: str | None = None,
        read: Callable[[str], str] | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._console = console
        self._read = read or _reader()
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []

    def run(self) -> None:
        """Until /exit, Ctrl-D, or Ctrl-C at the prompt."""
        self._note("Type a message; /help lists commands.")
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        if line == "/clear":
            self._turns.clear()
            self._note("The conversation is forgotten.")
        elif line == "/help":
            self._note(HELP)
        else:
            self._note(f"There is no command {line.split()[0]}; /help lists them.")

    def _turn(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        try:
            prompt = self._fitting_prompt()
            answer = self._answer(prompt)
        except RequestError as error:
            self._turns.pop()
            self._note(str(error))
            return
        self._turns.append({"role": "assistant", "content": answer.text})
        self._note(answer.stats(len(prompt), self._llm.engine.info.max_model_len))

    def _fitting_prompt(self) -> list[int]:
        """The prompt of the conversation, without its oldest turns if it would not fit otherwise."""
        limit = self._llm.engine.info.max_model_len - _MIN_ANSWER_TOKENS
        while True:
            prompt = self._llm.chat_prompt([*self._opening, *self._turns])
            if len(prompt) <= limit or len(self._turns) == 1:
                return prompt
            del self._turns[:2]
            self._note("The conversation is too long for the model; its oldest turn is forgotten.")

    def _answer(self, prompt: list[int]) -> _Answer:
        answer = _Answer()
        started = monotonic()
        with (
            _interrupt_flag() as is_interrupted,
            contextlib.closing(_as_generator(self._llm.stream(prompt, self._params))) as deltas,
        ):
            for delta in deltas:
                if not answer.num_tokens:
                    answer.first_token_s = monotonic() - started
                answer.num_tokens += len(delta.token_ids)
                answer.text += delta.text
                shown = delta.text.replace("\x1b", "")  # no control sequences out of a model
                self._console.out(shown, end="", highlight=False)
                if is_interrupted():
                    break
        answer.total_s = monotonic() - started
        self._console.print()
        return answer

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


def _as_generator(deltas: Iterator[TextDelta]) -> Any:
    """`stream` returns a generator; its close() ends the request."""
    return deltas


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag instead of raising in the middle of an engine step."""
    is_set = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_set
        is_set = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _reader() -> Callable[[str], str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() editing and history
    return input
