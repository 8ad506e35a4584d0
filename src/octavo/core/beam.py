"""BeamSearch: which beams live on after each step, and which hypotheses are the answer. A pure rule.

It sees the most likely next tokens of each live beam and no array, block or text. The scheduler forks and
releases sequences as it says; what a step costs here depends on the width, not on the vocabulary.

    candidates ─▶ the num_candidates best of all ─┬─ goes on ─▶ the next live beams, `width` at most
                                                  └─ ends ────▶ hypotheses, the `width` best by score

The rule, its scores and when it is over are those of generate(num_beams=width) in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.core.finish import TokenFinish

MAX_LENGTH_PENALTY = 50.0  # of either sign: a million tokens to this power still is a float


@dataclass(frozen=True, slots=True)
class BeamParams:
    """What is searched for. The border has checked the ranges, given in the comments."""

    width: int  # beams kept, >= 1
    length_penalty: float = 1.0  # within MAX_LENGTH_PENALTY; above 0 favours long answers, below 0 short ones
    early_stopping: bool | Literal["never"] = False  # True: over with `width` hypotheses; see BeamSearch
    max_tokens: int = 16  # output tokens at most, >= 1
    min_tokens: int = 0  # among the first so many tokens none ends a beam
    end_ids: frozenset[int] = frozenset()  # tokens that end a beam

    def __post_init__(self) -> None:
        assert self.width >= 1, f"a search of {self.width} beams"
        assert self.max_tokens >= 1, f"a search for {self.max_tokens} tokens"
        assert abs(self.length_penalty) <= MAX_LENGTH_PENALTY, f"length penalty {self.length_penalty}"

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """What hypotheses are compared by: log-probability per token**length_penalty."""
        return cumulative_logprob / math.pow(num_tokens, self.length_penalty)


@dataclass(frozen=True, slots=True)
class BeamChoice:
    """A beam of the next step: live beam `parent` of before, and one more token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    token_ids: tuple[int, ...]  # output tokens; the last is the token that ended it, if one did
    score: float
    cumulative_logprob: float  # of all token_ids
    finish_reason: TokenFinish


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...] = ()  # output tokens
    logprob: float = 0.0  # of all of them


class BeamSearch:
    """One search, over one prompt.

    It is over when no beam can go on, or when there are `width` hypotheses and the best live beam is not
    expected to beat the worst of them. What it may reach is its log-probability of now

        early_stopping False     at the length of now (for a positive length penalty a guess, not a bound)
        early_stopping "never"   at the length that suits it best: max_tokens for a positive length penalty
        early_stopping True      not asked: `width` hypotheses are enough

    A search of one beam is a greedy one: over with its first hypothesis, whatever early_stopping says.
    """

    def __init__(self, params: BeamParams, ends_text: Callable[[Sequence[int]], bool] | None = None) -> None:
        """`ends_text` says whether the last of these output tokens completes a stop string. It is not asked
        about the first min_tokens tokens."""
        self.params = params
        self._ends_text = ends_text
        self._live: list[_Beam] = [_Beam()]  # best first; empty once the search is over
        self._finished: list[Hypothesis] = []  # `width` at most, best first, of equals the earlier first

    @property
    def num_candidates(self) -> int:
        """How many (token id, log-probability) each live beam brings to advance(), if the vocabulary has as
        many: enough for `width` beams to go on even if each could end with every end token."""
        return self.params.width * max(2, 1 + len(self.params.end_ids))

    @property
    def num_live(self) -> int:
        """Lists that the next advance() takes: 1 at first, 0 once the search is over."""
        return len(self._live)

    @property
    def is_done(self) -> bool:
        return not self._live

    @property
    def num_tokens(self) -> int:
        """Output tokens of each live beam; 0 once the search is over."""
        return len(self._live[0].token_ids) if self._live else 0

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> tuple[BeamChoice, ...]:
        """Take one step: `candidates` has the most likely (token id, log-probability) of each live beam.

        Returns the next live beams, best first; none once the search is over. Of equals the child of the
        better parent goes first, then the lower token id. A log-probability of −inf is no candidate; if
        there is none at all, the live beams end as they are, with "length".
        """
        assert len(candidates) == len(self._live), f"{len(candidates)} lists for {len(self._live)} live beams"
        ranked = self._rank(candidates)
        if not ranked:
            self._finished, self._live = self.best(self.params.width), []
            return ()
        self._live, choices = self._split(ranked)
        if self._is_over():
            self._live = []
            return ()
        return tuple(choices)

    def best(self, n: int) -> list[Hypothesis]:
        """The n best hypotheses, at most `width`, best first.

        Before the search is over it answers as if max_tokens had been reached now: live beams count, with
        "length". Nothing changes, so the search may go on.
        """
        cut = [self._finish(b, "length") for b in self._live if b.token_ids]
        return _best_first([*self._finished, *cut])[: min(n, self.params.width)]

    def _rank(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int, int]]:
        """The num_candidates best continuations, best first: (−log-probability, parent, token id)."""
        banned = self.params.end_ids if self.num_tokens < self.params.min_tokens else frozenset()
        entries = [
            (-(beam.logprob + logprob), parent, token_id)
            for parent, beam in enumerate(self._live)
            for token_id, logprob in candidates[parent]
            if logprob > -math.inf and token_id not in banned
        ]
        entries.sort()
        return entries[: self.num_candidates]

    def _split(self, ranked: list[tuple[float, int, int]]) -> tuple[list[_Beam], list[BeamChoice]]:
        """The beams that go on. One that ends is a hypothesis if it is among the `width` best; behind them
        it is lost, and candidates are there only to replace beams that ended."""
        width = self.params.width
        live: list[_Beam] = []
        choices: list[BeamChoice] = []
        finished: list[Hypothesis] = []
        for rank, (cost, parent, token_id) in enumerate(ranked):
            if len(live) == width:
                break
            beam = _Beam((*self._live[parent].token_ids, token_id), -cost)
            reason = self._finish_reason(beam.token_ids)
            if reason is None:
                live.append(beam)
                choices.append(BeamChoice(parent, token_id))
            elif rank < width:
                finished.append(self._finish(beam, reason))
        if finished:
            self._finished = _best_first([*self._finished, *finished])[:width]
        return live, choices

    def _finish_reason(self, token_ids: tuple[int, ...]) -> TokenFinish | None:
        if token_ids[-1] in self.params.end_ids:
            return "stop"
        is_armed = len(token_ids) > self.params.min_tokens
        if is_armed and self._ends_text is not None and self._ends_text(token_ids):
            return "stop"
        return "length" if len(token_ids) >= self.params.max_tokens else None

    def _finish(self, beam: _Beam, reason: TokenFinish) -> Hypothesis:
        score = self.params.score(beam.logprob, len(beam.token_ids))
        return Hypothesis(beam.token_ids, score, beam.logprob, reason)

    def _is_over(self) -> bool:
        if not self._live:
            return True
        params = self.params
        if len(self._finished) < params.width:
            return False
        if params.early_stopping is True or params.width == 1:
            return True
        is_patient = params.early_stopping == "never" and params.length_penalty > 0
        num_tokens = params.max_tokens if is_patient else self.num_tokens
        return params.score(self._live[0].logprob, num_tokens) <= self._finished[-1].score


def _best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda h: -h.score)
