"""Log-probabilities as the two APIs spell them: four parallel lists for completions, entries for chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.text.output import TokenEntry, TokenText

_LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def _clamped(logprob: float) -> float:
    return max(logprob, _LOWEST)


def chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    return {"content": [_chat_entry(entry) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenEntry) -> dict[str, Any]:
    assert entry.logprob is not None, f"output token {entry.token_id} has no log-probability"
    top = [_chat_token(other.text, other.logprob, other.utf8) for other in entry.top]
    return _chat_token(entry.text, entry.logprob, entry.utf8) | {"top_logprobs": top}


def _chat_token(text: str, logprob: float, utf8: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": _clamped(logprob), "bytes": list(utf8)}


def completion_logprobs(entries: Sequence[TokenEntry], first_offset: int = 0) -> dict[str, Any]:
    """The lists of one choice. `first_offset` is where the entries' own offset 0 lies in the whole text."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [None if e.logprob is None else _clamped(e.logprob) for e in entries],
        "top_logprobs": [_completion_top(entry) for entry in entries],
        "text_offset": [first_offset + entry.text_offset for entry in entries],
    }


def _completion_top(entry: TokenEntry) -> dict[str, float] | None:
    """The alternatives and, as OpenAI has it, the token itself; None for the first token of a prompt."""
    if entry.logprob is None:
        return None
    own = TokenText(entry.token_id, entry.text, entry.utf8, entry.logprob)
    top: dict[str, float] = {}
    for token in (*entry.top, own):
        top.setdefault(token.text, _clamped(token.logprob))
    return top
