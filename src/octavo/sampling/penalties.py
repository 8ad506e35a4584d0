"""Penalties on one row of scores [V], which the caller lets them overwrite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.sampling.distribution import F32, I64


class TokenCounts:
    """How often each token occurred, as parallel arrays that grow with the number of distinct tokens."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # token id -> position in the arrays
        self._ids: I64 = np.zeros(16, np.int64)
        self._counts: F32 = np.zeros(16, np.float32)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._counts[slot] += 1

    @property
    def ids(self) -> I64:
        """Distinct tokens in order of first occurrence; a view."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> F32:
        """Occurrences of `ids`; a view."""
        return self._counts[: len(self._slots)]


def apply_repetition_penalty(scores: F32, seen: I64, penalty: float) -> None:
    """In place: tokens `seen` lose probability: positive scores are divided, negative ones multiplied."""
    values = scores[seen]  # [distinct]
    scores[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def apply_count_penalties(scores: F32, counts: TokenCounts, presence: float, frequency: float) -> None:
    """In place: score -= presence + frequency · count, for every token that was output."""
    scores[counts.ids] -= np.float32(presence) + np.float32(frequency) * counts.counts
