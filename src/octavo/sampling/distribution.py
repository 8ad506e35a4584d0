"""One row of scores [V] as a distribution: selection, draws, log-probabilities.

A pass over the row, the backend's, has summed and compared it in blocks of BLOCK tokens (softmax_blocks of
backends/ops.py). What is asked here looks at the blocks, then into those few that can hold the answer. Nothing
sorts the whole vocabulary unless nearly all of it is wanted. Order among equal scores is always lowest token id
first. Everything works row by row, so a row's result cannot depend on its batch mates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

BLOCK = 64  # tokens; 768 blocks for V = 49 152
_FIRST_TOP_P = 64  # best tokens tried for top_p before looking at the whole row
_LEAST_ACCEPTED = 0.5  # top_p from which on draws are tried until one fits

# (scores [R, V], BLOCK, peaks [R], temperatures [R]) → sums, maxima [R, B]
SoftmaxBlocks = Callable[[F32, int, F32, F32], tuple[F64, F32]]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities exp((score - peak) / temperature), relative to the best token's, which is 1."""

    scores: F32  # [V]
    peak: float  # the best score, finite
    temperature: float
    sums: F64  # [B], of the probabilities in each block
    maxima: F32  # [B], the best score in each block

    def probabilities(self, ids: I64 | slice) -> F64:
        """Of those tokens, not normalised."""
        found: F64 = np.exp((self.scores[ids].astype(np.float64) - self.peak) / self.temperature)
        return found

    def draw(self, u: float) -> int:
        """A token of the whole vocabulary by inverse CDF in id order; u in [0, 1)."""
        cdf = np.cumsum(self.sums)  # [B]
        target = u * float(cdf[-1])
        block = _find(cdf, target)
        inside = np.cumsum(self.probabilities(slice(block * BLOCK, (block + 1) * BLOCK)))  # [<= BLOCK]
        return block * BLOCK + _find(inside, target - float(cdf[block - 1]) if block else target)

    def top_ids(self, k: int) -> I64:
        """The k best tokens, best first, ties by lowest id. Tokens at -inf may be among them if k is large.

        The k-th largest of the blocks' maxima is a lower bound of the k-th largest score, because k blocks each
        hold a score that large. What is not below it lies in the blocks whose maximum is not.
        """
        if k < len(self.maxima):
            ids, scores = self._at_least(
                np.partition(self.maxima, len(self.maxima) - k)[len(self.maxima) - k]
            )
        else:
            k, scores = min(k, len(self.scores)), self.scores
            ids = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
            scores = scores[ids]
        best: I64 = ids[np.argsort(-scores, kind="stable")[:k]]
        return best

    def top_p_ids(self, top_p: float) -> I64 | None:
        """The smallest set of best tokens whose probability is at least top_p, at least one token; in an order
        that depends on the row alone. None where it has many tokens and draw_top_p is the faster way."""
        target = top_p * float(self.sums.sum())
        ids = self.top_ids(_FIRST_TOP_P)
        mass = np.cumsum(self.probabilities(ids))  # [64]
        if mass[-1] >= target:
            return ids[: int(np.searchsorted(mass, target, side="left")) + 1]
        return None if top_p >= _LEAST_ACCEPTED else self._top_p_by_bins(target)

    def draw_top_p(self, top_p: float, min_p: float, uniforms: Iterator[float]) -> int:
        """A token of the set of top_p_ids, of those at least min_p times as probable as the best, without making
        the set: tokens are drawn from all until one has less than top_p before it. One of 1 / top_p is."""
        target = top_p * float(self.sums.sum())
        draw_any = self.draw
        if min_p > 0.0:
            ids = self.min_p_ids(min_p)
            probabilities = self.probabilities(ids)

            def draw_any(u: float) -> int:
                return int(ids[draw(probabilities, u)])

        for u in uniforms:
            drawn = draw_any(u)
            if self._mass_before(drawn) < target:
                return drawn
        raise AssertionError("uniforms ended")

    def _mass_before(self, token_id: int) -> float:
        """Of the tokens that rank before it."""
        ids, scores = self._at_least(self.scores[token_id])
        return float(self.probabilities(ids[(scores > self.scores[token_id]) | (ids < token_id)]).sum())

    def min_p_ids(self, min_p: float) -> I64:
        """All tokens at least min_p times as probable as the best; ids ascending."""
        bound = self.peak + self.temperature * (math.log(min_p) - 1e-3)  # rounding cannot cross the margin
        ids, _ = self._at_least(np.float32(bound))
        return ids[self.probabilities(ids) >= min_p]

    def rank(self, token_id: int) -> int:
        """1 for the best token; equal scores rank by id, as in top_ids."""
        value = self.scores[token_id]
        ids, scores = self._at_least(value)
        above = int(np.count_nonzero(scores > value))
        return 1 + above + int(np.count_nonzero((scores == value) & (ids < token_id)))

    def log_total(self) -> float:
        """log Σ exp(score / temperature)."""
        return self.peak / self.temperature + math.log(float(self.sums.sum()))

    def _at_least(self, bound: np.float32) -> tuple[I64, F32]:
        """The tokens whose score is not below `bound`, ascending, and their scores."""
        blocks = np.flatnonzero(self.maxima >= bound)
        num_whole = len(self.scores) // BLOCK
        whole = blocks[blocks < num_whole]
        scores = self.scores[: num_whole * BLOCK].reshape(num_whole, BLOCK).take(whole, axis=0).ravel()
        if len(whole) < len(blocks):
            scores = np.concatenate([scores, self.scores[num_whole * BLOCK :]])
        found = np.flatnonzero(scores >= bound)
        ids: I64 = blocks[found // BLOCK] * BLOCK + found % BLOCK
        return ids, scores[found]

    def _top_p_by_bins(self, target: float) -> I64:
        """Flat distributions: sum up bins of nearly equal probability, sort only the bin the target falls in.

        The upper 16 bits of a positive float32 order it to within 1/128 of its value.
        """
        scores, peak, temperature = self.scores, np.float32(self.peak), np.float32(self.temperature)
        numerators: F32 = np.exp((scores - peak) / temperature)  # [V]
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


def draw(probabilities: F64, u: float) -> int:
    """Index drawn from unnormalised probabilities [k] by inverse CDF; u in [0, 1)."""
    cdf = np.cumsum(probabilities)
    return _find(cdf, u * float(cdf[-1]))


def _find(cdf: F64, target: float) -> int:
    """First index whose cumulative sum exceeds `target`; never one that adds nothing."""
    found = int(np.searchsorted(cdf, target, side="right"))
    if found == len(cdf):  # the target was rounded up to the total
        found = int(np.searchsorted(cdf, cdf[-1], side="left"))
    return found
