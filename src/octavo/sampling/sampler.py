"""From logits to tokens: one SampleState a sequence, one Sampler an engine.

Order of processing, the same as in Hugging Face transformers:

    min_tokens → logit_bias → repetition penalty → presence, frequency penalty     one row of scores
    → temperature → top_k → top_p → min_p → one uniform number, inverse CDF         temperature > 0
    → argmax, ties by lowest token id                                               temperature 0

Differences: top_k keeps exactly k tokens (ties by lowest id); log-probabilities are those of the raw
logits, before any of the above. A row whose logits are broken fails and disturbs nobody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.core.block import SeqId
from octavo.core.delta import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.sampling import logits as ops
from octavo.sampling import random
from octavo.sampling.logits import F32, F64, I32, I64

# Outside of this range the distribution is one-hot or flat in float32 anyway
_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30


@dataclass(slots=True)
class Draws:
    """What a batch of rows gave."""

    token_ids: list[int | None] = field(default_factory=list)  # by row; None for those that `failed`
    logprobs: dict[SeqId, TokenLogprobs] = field(default_factory=dict)  # where wanted
    failed: dict[SeqId, str] = field(default_factory=dict)  # why no token could be drawn


class SampleState:
    """What sampling knows about one sequence. Made by Sampler.new_state.

    The caller appends each sampled token to `output_token_ids` before the next call of sample(), and nothing
    else. Its length is the position of the next draw.
    """

    __slots__ = (
        "_banned_early",
        "_bias",
        "_counts",
        "_num_counted",
        "_seen",
        "is_plain",
        "key",
        "output_token_ids",
        "params",
        "prompt_token_ids",
        "seq_id",
    )

    def __init__(
        self,
        seq_id: SeqId,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: list[int],
        eos_token_ids: Collection[int],
        key: int,
    ) -> None:
        self.seq_id = seq_id
        self.params = params
        self.key = key  # of the uniform numbers: random.stream_key(seed, index of the choice)
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self._num_counted = 0
        self._banned_early = _ids({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else None
        self._bias: tuple[I64, F32] | None = None
        if params.logit_bias:
            biases = np.array([bias for _, bias in params.logit_bias], np.float32)
            self._bias = _ids([token_id for token_id, _ in params.logit_bias]), biases
        self._counts = ops.TokenCounts() if params.presence_penalty or params.frequency_penalty else None
        self._seen = ops.TokenCounts() if params.repetition_penalty != 1.0 else None
        if self._seen is not None:
            self._seen.add(prompt_token_ids)
        # The token with the best logit, and nothing else, at every position
        self.is_plain = params.is_greedy and params.logprobs is None and not params.min_tokens and self.is_raw

    @property
    def position(self) -> int:
        """Output tokens so far."""
        return len(self.output_token_ids)

    @property
    def is_raw(self) -> bool:
        """True if the logits themselves are the scores: no mask, no bias, no penalty."""
        return (
            self._bias is None
            and self._counts is None
            and self._seen is None
            and self.position >= self.params.min_tokens
        )

    def process(self, scores: F32) -> None:
        """In place: mask, bias and penalties over one row [V]."""
        params = self.params
        if self._banned_early is not None and self.position < params.min_tokens:
            scores[self._banned_early] = -np.inf
        if self._bias is not None:
            scores[self._bias[0]] += self._bias[1]
        self._count_output()
        if self._seen is not None:
            ops.apply_repetition_penalty(scores, self._seen.ids, params.repetition_penalty)
        if self._counts is not None:
            ops.apply_count_penalties(scores, self._counts, params.presence_penalty, params.frequency_penalty)

    def _count_output(self) -> None:
        new = self.output_token_ids[self._num_counted :]
        for counts in (self._seen, self._counts):
            if counts is not None:
                counts.add(new)
        self._num_counted = len(self.output_token_ids)


class Sampler:
    """Draws the tokens of a step. Owns scratch rows and the stream of seeds; keeps no sequence."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seeds = random.SeedStream(seed)
        self._scores: F32 = np.empty(vocab_size, np.float32)
        self._numerators: F32 = np.empty(vocab_size, np.float32)

    def draw_seed(self) -> int:
        """A seed for a request that brought none. Its choices share it, each with its own index."""
        return self._seeds.next()

    def new_state(
        self,
        seq_id: SeqId,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: list[int],
        eos_token_ids: Collection[int],
        index: int = 0,
    ) -> SampleState:
        """The state of choice `index` of a request. Without params.seed it takes one from the stream;
        params are trusted: octavo.sampling.validate.check has seen them."""
        seed = params.seed if params.seed is not None else self.draw_seed()
        key = random.stream_key(seed, index)
        return SampleState(seq_id, params, prompt_token_ids, output_token_ids, eos_token_ids, key)

    def sample(self, states: Sequence[SampleState], logits: F32, best: I32 | I64) -> Draws:
        """One token for each row of logits [R, V], which is not changed; row r belongs to states[r]. `best` [R] is
        numpy.argmax of each row: the first NaN, if there is one."""
        assert logits.shape == (len(states), self._vocab_size), (logits.shape, len(states), self._vocab_size)
        if np.isfinite(logits[np.arange(len(states)), best]).all() and all(s.is_plain for s in states):
            return Draws(best.tolist())
        draws = Draws()
        with np.errstate(over="ignore", invalid="ignore"):
            for state, row, token_id in zip(states, logits, best.tolist(), strict=True):
                draws.token_ids.append(self._sample_row(state, row, token_id, draws))
        return draws

    def prompt_logprobs(self, logits: F32, next_token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
        """For each row of logits [R, V] the log-probability of the token that follows it in the prompt."""
        with np.errstate(over="ignore", invalid="ignore"):
            return [token_logprobs(row, t, k) for row, t in zip(logits, next_token_ids, strict=True)]

    def _sample_row(self, state: SampleState, row: F32, best: int, draws: Draws) -> int | None:
        """The token of one row, whose argmax is `best`; all else goes into `draws`."""
        scores = row
        if not state.is_raw:
            scores = self._scores
            np.copyto(scores, row)
            state.process(scores)
            best = int(scores.argmax())
        peak = float(scores[best])
        if not math.isfinite(peak):
            draws.failed[state.seq_id] = _explain(row, state.position)
            return None
        token_id = best if state.params.is_greedy else self._draw(state, scores, peak)
        if state.params.logprobs is not None:
            draws.logprobs[state.seq_id] = token_logprobs(row, token_id, state.params.logprobs)
        return token_id

    def _draw(self, state: SampleState, scores: F32, peak: float) -> int:
        """The token at temperature > 0. Probabilities are relative to the best token, whose is 1."""
        params = state.params
        u = random.uniform(state.key, state.position)
        temperature = min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
        if 0 < params.top_k < self._vocab_size:
            ids = ops.top_ids(scores, params.top_k)
            probabilities = np.exp((scores[ids].astype(np.float64) - peak) / temperature)  # [k]
            probabilities = probabilities[: _top_p_length(probabilities, params.top_p)]
        else:
            numerators = ops.softmax_numerators(scores, peak, temperature, self._numerators)
            if params.top_p < 1.0:
                ids = ops.top_p_ids(scores, numerators, params.top_p)
            elif params.min_p > 0.0:
                ids = np.flatnonzero(numerators >= np.float32(params.min_p))
            else:
                return ops.draw_full(numerators, u)
            probabilities = numerators[ids].astype(np.float64)
        if params.min_p > 0.0:
            kept = probabilities >= params.min_p
            ids, probabilities = ids[: len(kept)][kept], probabilities[kept]
        return int(ids[ops.draw(probabilities, u)])


def token_logprobs(row: F32, token_id: int, k: int) -> TokenLogprobs:
    """Log-probability and rank of `token_id` under log-softmax(row), with the k best tokens.

    A row that holds NaN or no finite maximum is no distribution: minus infinity, last rank, no alternatives.
    """
    norm = ops.log_sum_exp(row)
    if not math.isfinite(norm):
        return TokenLogprobs(token_id, -math.inf, len(row))
    top = ops.top_ids(row, k) if k else ()
    return TokenLogprobs(
        token_id,
        float(row[token_id]) - norm,
        ops.rank(row, token_id),
        tuple((int(i), float(row[i]) - norm) for i in top),
    )


def candidates(row: F32, k: int) -> tuple[tuple[int, float], ...] | None:
    """The k most likely (token id, log-probability) under log-softmax(row), best first, ties by lowest id.

    None when the row is not finite enough to say.
    """
    norm = ops.log_sum_exp(row)
    if not np.isfinite(norm):
        return None
    return tuple((int(i), float(row[i]) - norm) for i in ops.top_ids(row, min(k, len(row))))


def _top_p_length(probabilities: F64, top_p: float) -> int:
    """How many of the best tokens, sorted best first, make up `top_p` of their sum; at least one."""
    if top_p >= 1.0:
        return len(probabilities)
    mass = np.cumsum(probabilities)
    return int(np.searchsorted(mass, top_p * mass[-1], side="left")) + 1


def _ids(token_ids: Collection[int]) -> I64:
    return np.array(sorted(token_ids) if isinstance(token_ids, set) else list(token_ids), np.int64)


def _explain(row: F32, position: int) -> str:
    if np.isnan(row).any() or np.isposinf(row).any():
        return (
            f"the model's logits for output token {position} are not finite (NaN or infinity);"
            " check the model file, or use --weight-dtype float32"
        )
    return (
        f"no token is left for output token {position}: every score is minus infinity;"
        " check logit_bias, stop_token_ids and min_tokens"
    )
