"""TokenDelta: what one step gave one choice. The scheduler makes it, and it travels as it is to whoever asked."""

from __future__ import annotations

from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(NamedTuple):
    """Log-probability of one token and of the `top` most likely ones (id, log-probability), best first."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()


class TokenDelta(NamedTuple):
    """New tokens of one choice of one request. Exactly one delta of a choice carries a finish_reason.

    Beam search gives all its tokens at once, when it is over.
    """

    request_id: str
    choice: int  # 0 <= choice < n
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the last of token_ids, if it is the one that ended the choice
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of token_ids
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token; of all but the first
    score: float | None = None  # beam search: what the choices are ranked by
    error: str | None = None  # with finish_reason "error"
