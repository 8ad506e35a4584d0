"""The arithmetic of sampling on one row of logits [V]: masks, penalties, selection, softmax, the draw.

Everything works row by row, so a row's result cannot depend on its batch mates. Nothing sorts the whole
vocabulary unless nearly all of it is wanted. Order among equal scores is always lowest token id first.
Functions that change their argument say so; `scores` is a float32 row that the caller may overwrite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

_GROUP_SIZE = 64  # tokens a group of the selection bound; 768 groups for V = 49 152
_DRAW_BLOCK = 256  # tokens a block of the two-level inverse CDF
_FIRST_TOP_P = 64  # best tokens tried for top_p before looking at the whole row


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


def top_ids(scores: F32, k: int) -> I64:
    """The k best tokens, best first, ties by lowest id. Tokens at -inf may be among them if k is large.

    The k-th largest of the group maxima is a lower bound of the k-th largest score, because k groups each
    hold a score that large. One comparison with the bound leaves a little more than k tokens to sort.
    """
    num_groups = len(scores) // _GROUP_SIZE
    num_body = num_groups * _GROUP_SIZE
    bounds = scores  # of which the k-th largest is no larger than the k-th largest score
    if k < num_groups:
        maxima = scores[:num_body].reshape(_GROUP_SIZE, num_groups).max(axis=0)  # [groups]
        bounds = np.concatenate([maxima, scores[num_body:]])
    k = min(k, len(scores))
    bound = np.partition(bounds, len(bounds) - k)[len(bounds) - k]
    candidates = np.flatnonzero(scores >= bound)  # [>= k], ids ascending
    order = np.argsort(-scores[candidates], kind="stable")[:k]
    return candidates[order]


def softmax_numerators(scores: F32, peak: float, temperature: float, out: F32) -> F32:
    """exp((scores - peak) / temperature) into `out` [V], which is returned."""
    np.subtract(scores, np.float32(peak), out=out)
    np.divide(out, np.float32(temperature), out=out)
    return np.exp(out, out=out)


def top_p_ids(scores: F32, numerators: F32, top_p: float) -> I64:
    """The smallest set of best tokens whose probability is at least top_p, at least one token; in an order
    that depends on the row alone. `numerators` are softmax_numerators of the scores."""
    target = top_p * float(numerators.sum(dtype=np.float64))
    ids = top_ids(scores, _FIRST_TOP_P)
    mass = np.cumsum(numerators[ids], dtype=np.float64)  # [64]
    if mass[-1] < target:
        return _top_p_by_bins(numerators, target)
    return ids[: int(np.searchsorted(mass, target, side="left")) + 1]


def _top_p_by_bins(numerators: F32, target: float) -> I64:
    """Flat distributions: sum up bins of nearly equal probability, sort only the bin the target falls in.

    The upper 16 bits of a positive float32 order it to within 1/128 of its value.
    """
    bins = (numerators.view(np.uint32) >> 16).astype(np.int64)  # [V]
    mass = np.cumsum(np.bincount(bins, weights=numerators)[::-1])  # [bins], best bin first
    step = min(int(np.searchsorted(mass, target, side="left")), len(mass) - 1)
    edge_bin = len(mass) - 1 - step
    above = np.flatnonzero(bins > edge_bin)
    edge = np.flatnonzero(bins == edge_bin)
    edge = edge[np.argsort(-numerators[edge], kind="stable")]
    mass_above = float(mass[step - 1]) if step else 0.0
    edge_mass = np.cumsum(numerators[edge], dtype=np.float64)
    num_edge = int(np.searchsorted(edge_mass, target - mass_above, side="left")) + 1
    return np.concatenate([above, edge[:num_edge]])


def _find(cdf: F64, target: float) -> int:
    """First index whose cumulative sum exceeds `target`; never one that adds nothing."""
    found = int(np.searchsorted(cdf, target, side="right"))
    if found == len(cdf):  # the target was rounded up to the total
        found = int(np.searchsorted(cdf, cdf[-1], side="left"))
    return found


def draw(probabilities: F64, u: float) -> int:
    """Index drawn from unnormalised probabilities [k] by inverse CDF; u in [0, 1)."""
    cdf = np.cumsum(probabilities)
    return _find(cdf, u * float(cdf[-1]))


def draw_full(numerators: F32, u: float) -> int:
    """draw() over the whole vocabulary in id order, by blocks: no cumulative sum of V terms."""
    starts = np.arange(0, len(numerators), _DRAW_BLOCK)
    cdf = np.cumsum(np.add.reduceat(numerators, starts, dtype=np.float64))  # [blocks]
    target = u * float(cdf[-1])
    block = _find(cdf, target)
    begin = block * _DRAW_BLOCK
    inside = np.cumsum(numerators[begin : begin + _DRAW_BLOCK], dtype=np.float64)  # [<= 256]
    return begin + _find(inside, target - float(cdf[block - 1]) if block else target)


def log_sum_exp(row: F32) -> float:
    """log Σ exp(row), in float64 from float32 exponentials. Not finite if the row's maximum is not."""
    peak = row.max()
    if not np.isfinite(peak):
        return float(peak)
    return float(peak) + math.log(float(np.exp(row - peak).sum(dtype=np.float64)))


def rank(row: F32, token_id: int) -> int:
    """1 for the best token; equal scores rank by id, as in top_ids."""
    value = row[token_id]
    above = int(np.count_nonzero(row > value))
    return 1 + above + int(np.count_nonzero(row[:token_id] == value))
