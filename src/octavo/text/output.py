"""RequestAssembler: the engine's token deltas of one request to text deltas of its choices.

Here tokens become text, stop strings end a choice, log-probabilities get their token texts and the usage is
counted. Server and LLM both use it, streamed or not: the whole text is the concatenation of the deltas. It
knows neither HTTP nor JSON, and sends nothing to the engine: it only says that a choice is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from octavo.core.delta import FinishReason, TokenDelta, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.sampling.stop import StopStrings
from octavo.text.detokenize import IncrementalDetokenizer


class TokenTexts(Protocol):
    """The part of a Tokenizer that is needed here."""

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...

    @property
    def drops_first_space(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenText:
    """One alternative. `text` writes bytes that are not UTF-8 by themselves as \\xNN: texts stay distinct."""

    token_id: int
    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with what the log-probability formats of the OpenAI APIs want to know."""

    token_id: int
    text: str
    utf8: bytes
    text_offset: int  # characters of text complete before this token, from the start of the choice or prompt
    logprob: float | None = None  # None for the first token of a prompt
    rank: int | None = None
    top: tuple[TokenText, ...] = ()  # best first


class TextDelta(Struct, frozen=True):
    """What one TokenDelta adds to a choice. Text can lag behind the tokens; the last delta has the rest."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenEntry, ...] | None = None  # one per token id
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id out of stop_token_ids
    needs_abort: bool = False  # True if a stop string ended the choice and the engine still goes on with it
    prompt_logprobs: tuple[TokenEntry, ...] | None = None  # one per prompt token, with a choice's first delta
    error: str | None = None
    score: float | None = None  # beam search: what the choices are ranked by


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: the prompt once, the output of all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def token_text(data: bytes) -> str:
    """A token's bytes as text by themselves; what is not UTF-8 is written as \\xNN."""
    return data.decode("utf-8", "backslashreplace")


def describe_prompt(
    tokenizer: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    skip_special_tokens: bool = True,
) -> tuple[TokenEntry, ...]:
    """Entries of all prompt tokens; `logprobs` has one for each token but the first. Offsets point into
    tokenizer.decode(token_ids, skip_special_tokens), where a skipped token has no width."""
    detokenizer = IncrementalDetokenizer(
        tokenizer.token_bytes,
        tokenizer.is_special,
        skip_special=skip_special_tokens,
        strip_leading_space=tokenizer.drops_first_space,
    )
    entries = []
    for i, token_id in enumerate(token_ids):
        entries.append(_entry(tokenizer, token_id, logprobs[i - 1] if i else None, detokenizer.num_chars))
        detokenizer.push((token_id,))
    return tuple(entries)


class ChoiceAssembler:
    """Text of one choice, which continues the prompt's: a first space is kept. Stop strings count from the
    first token after params.min_tokens on."""

    def __init__(self, tokenizer: TokenTexts, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stop = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer.token_bytes, tokenizer.is_special, skip_special=params.skip_special_tokens
        )
        self._is_plain = not params.stop
        self._stop_string: str | None = None
        self.num_tokens = 0  # output tokens, up to and including the one that completed a stop string
        self.is_done = False

    def push(self, delta: TokenDelta) -> TextDelta:
        """Must not be called once is_done."""
        assert not self.is_done, f"choice {delta.choice} of {delta.request_id} is done"
        if self._is_plain and delta.finish_reason is None and delta.logprobs is None:  # as nearly all are
            self.num_tokens += len(delta.token_ids)
            text = self._detokenizer.push(delta.token_ids)
            return TextDelta(delta.choice, text, delta.token_ids, score=delta.score)
        pieces: list[str] = []
        entries: list[TokenEntry] = []
        num_before = self.num_tokens
        for i, token_id in enumerate(delta.token_ids):
            if delta.logprobs is not None:
                offset = self._detokenizer.num_chars
                entries.append(_entry(self._tokenizer, token_id, delta.logprobs[i], offset))
            self.num_tokens += 1
            if not self._is_hidden(delta, i):
                self._match(self._detokenizer.push((token_id,)), pieces)
            if self._stop_string is not None:
                break
        if self._stop_string is None and delta.finish_reason is not None:
            self._match(self._detokenizer.flush(), pieces)
            pieces.append(self._stop.flush())
        self.is_done = self._stop_string is not None or delta.finish_reason is not None
        return self._delta(delta, self.num_tokens - num_before, "".join(pieces), entries)

    def _is_hidden(self, delta: TokenDelta, i: int) -> bool:
        """True for the token that ended the sequence: it is no more part of the text than a stop string."""
        is_stop_token = delta.stop_token_id is not None and i == len(delta.token_ids) - 1
        return is_stop_token and not self._params.include_stop_str_in_output

    def _match(self, text: str, pieces: list[str]) -> None:
        is_armed = self.num_tokens > self._params.min_tokens
        result = self._stop.push(text, is_armed=is_armed)
        pieces.append(result.text)
        self._stop_string = result.matched

    def _delta(
        self, delta: TokenDelta, num_taken: int, text: str, entries: Sequence[TokenEntry]
    ) -> TextDelta:
        stop_reason: str | int | None = self._stop_string
        if stop_reason is None and delta.stop_token_id in self._params.stop_token_ids:
            stop_reason = delta.stop_token_id
        return TextDelta(
            index=delta.choice,
            text=text,
            token_ids=tuple(delta.token_ids[:num_taken]),
            logprobs=tuple(entries) if delta.logprobs is not None else None,
            finish_reason="stop" if self._stop_string is not None else delta.finish_reason,
            stop_reason=stop_reason,
            needs_abort=self._stop_string is not None and delta.finish_reason is None,
            error=delta.error if self._stop_string is None else None,
            score=delta.score,
        )


class RequestAssembler:
    """The choices of one request. What a delta that `needs_abort` says is the caller's to tell the engine."""

    def __init__(
        self, tokenizer: TokenTexts, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._choices = tuple(ChoiceAssembler(tokenizer, params) for _ in range(params.n))
        self._num_cached = 0
        self._prompt: tuple[TokenEntry, ...] | None = None

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """The delta in text, whose text may be empty; None if its choice is done already."""
        if delta.choice == 0:  # the other choices share the prompt of the first one
            self._num_cached = max(self._num_cached, delta.num_cached_tokens)
        choice = self._choices[delta.choice]
        if choice.is_done:
            return None
        is_first = not choice.num_tokens
        result = choice.push(delta)
        if delta.prompt_logprobs is not None:
            self._prompt = describe_prompt(
                self._tokenizer,
                self._prompt_token_ids,
                delta.prompt_logprobs,
                skip_special_tokens=self._params.skip_special_tokens,
            )
        # The engine sends them once, with its first delta; they belong to every choice
        return replace(result, prompt_logprobs=self._prompt) if self._prompt and is_first else result

    @property
    def is_done(self) -> bool:
        """True once every choice has a finish reason."""
        return all(choice.is_done for choice in self._choices)

    @property
    def usage(self) -> Usage:
        """Up to now; final once is_done."""
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage(len(self._prompt_token_ids), completion_tokens, self._num_cached)


def _entry(
    tokenizer: TokenTexts, token_id: int, logprob: TokenLogprobs | None, text_offset: int
) -> TokenEntry:
    utf8 = tokenizer.token_bytes(token_id)
    text = token_text(utf8)
    if logprob is None:
        return TokenEntry(token_id, text, utf8, text_offset)
    top = tuple(_alternative(tokenizer, t, value) for t, value in logprob.top)
    return TokenEntry(token_id, text, utf8, text_offset, logprob.logprob, logprob.rank, top)


def _alternative(tokenizer: TokenTexts, token_id: int, logprob: float) -> TokenText:
    utf8 = tokenizer.token_bytes(token_id)
    return TokenText(token_id, token_text(utf8), utf8, logprob)
