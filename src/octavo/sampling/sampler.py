"""From logits to tokens: one SampleState a sequence, one Sampler an engine.

Order of processing, the same as in Hugging Face transformers:

    min_tokens → logit_bias → repetition penalty → presence, frequency penalty     one row of scores
    → temperature → top_k → top_p → min_p → a uniform number, inverse CDF           temperature > 0
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
from octavo.sampling import penalties, random
from octavo.sampling.distribution import BLOCK, F32, F64, I32, I64, Distribution, SoftmaxBlocks, draw

# Outside of this range the distribution is one-hot or flat in float32 anyway
_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30

Best = I32 | I64  # [R]
Candidates = tuple[tuple[int, float], ...]


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
        self._counts = (
            penalties.TokenCounts() if params.presence_penalty or params.frequency_penalty else None
        )
        self._seen = penalties.TokenCounts() if params.repetition_penalty != 1.0 else None
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

    @property
    def temperature(self) -> float:
        """Of the draw; not for greedy states."""
        return min(max(self.params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)

    @property
    def temperature_of_logits(self) -> float:
        """At which the distribution of the raw logits is needed; 0: not at all."""
        if self.is_raw and not self.params.is_greedy:
            return self.temperature
        return 0.0 if self.params.logprobs is None else 1.0

    def process(self, scores: F32) -> None:
        """In place: mask, bias and penalties over one row [V]."""
        params = self.params
        if self._banned_early is not None and self.position < params.min_tokens:
            scores[self._banned_early] = -np.inf
        if self._bias is not None:
            scores[self._bias[0]] += self._bias[1]
        self._count_output()
        if self._seen is not None:
            penalties.apply_repetition_penalty(scores, self._seen.ids, params.repetition_penalty)
        if self._counts is not None:
            penalties.apply_count_penalties(
                scores, self._counts, params.presence_penalty, params.frequency_penalty
            )

    def _count_output(self) -> None:
        new = self.output_token_ids[self._num_counted :]
        for counts in (self._seen, self._counts):
            if counts is not None:
                counts.add(new)
        self._num_counted = len(self.output_token_ids)


class Sampler:
    """Draws the tokens of a step. Owns a scratch row and the stream of seeds; keeps no sequence.

    `softmax_blocks` is the backend's pass over rows of scores (Runner.softmax_blocks in backends/ops.py)."""

    def __init__(self, vocab_size: int, softmax_blocks: SoftmaxBlocks, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._softmax_blocks = softmax_blocks
        self._seeds = random.SeedStream(seed)
        self._scores: F32 = np.empty(vocab_size, np.float32)

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

    def sample(self, states: Sequence[SampleState], logits: F32, best: Best, peaks: F32) -> Draws:
        """One token for each row of logits [R, V], which is not changed; row r belongs to states[r]. `best` [R] is
        numpy.argmax of each row: the first NaN, if there is one. `peaks` [R] are the values there."""
        assert logits.shape == (len(states), self._vocab_size), (logits.shape, len(states), self._vocab_size)
        if math.isfinite(sum(peaks.tolist())) and all(s.is_plain for s in states):
            return Draws(best.tolist())
        draws = Draws()
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._distributions(logits, peaks, np.array([s.temperature_of_logits for s in states]))
            for state, row, token_id, raw in zip(states, logits, best.tolist(), found, strict=True):
                draws.token_ids.append(self._sample_row(state, row, token_id, raw, draws))
        return draws

    def prompt_logprobs(
        self, logits: F32, peaks: F32, next_token_ids: Sequence[int], k: int
    ) -> list[TokenLogprobs]:
        """For each row of logits [R, V], whose maxima are `peaks` [R], the log-probability of the token that
        follows it in the prompt, with the k best tokens."""
        return [
            _token_logprobs(raw, self._vocab_size, token_id, k)
            for raw, token_id in zip(self._raw(logits, peaks), next_token_ids, strict=True)
        ]

    def candidates(self, logits: F32, peaks: F32, counts: Sequence[int]) -> list[Candidates | None]:
        """For each row of logits [R, V], whose maxima are `peaks` [R], the counts[r] most likely (token id,
        log-probability) under log-softmax, best first, ties by lowest id. None where the row is not finite enough
        to say."""
        return [
            None if raw is None else _top_logprobs(raw, min(count, self._vocab_size), raw.log_total())
            for raw, count in zip(self._raw(logits, peaks), counts, strict=True)
        ]

    def _raw(self, logits: F32, peaks: F32) -> list[Distribution | None]:
        """The rows as they are, at temperature 1."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._distributions(logits, peaks, np.ones(len(peaks)))

    def _distributions(self, scores: F32, peaks: F32, temperatures: F64) -> list[Distribution | None]:
        """Of each row that has a finite peak and a temperature."""
        wanted = np.where(np.isfinite(peaks), temperatures, 0).astype(np.float32)
        if not wanted.any():
            return [None] * len(wanted)
        sums, maxima = self._softmax_blocks(scores, BLOCK, peaks, wanted)
        return [
            Distribution(row, peak, temperature, row_sums, row_maxima) if temperature else None
            for row, peak, temperature, row_sums, row_maxima in zip(
                scores, peaks.tolist(), wanted.tolist(), sums, maxima, strict=True
            )
        ]

    def _sample_row(
        self, state: SampleState, row: F32, best: int, raw: Distribution | None, draws: Draws
    ) -> int | None:
        """The token of one row, whose argmax is `best`; all else goes into `draws`. `raw` is the row's distribution
        at state.temperature_of_logits."""
        token_id, scores, is_raw = best, row, state.is_raw
        if not is_raw:
            scores = self._scores
            np.copyto(scores, row)
            state.process(scores)
            token_id = int(scores.argmax())
        if not math.isfinite(scores[token_id]):
            draws.failed[state.seq_id] = _explain(row, state.position)
            return None
        if not state.params.is_greedy:
            processed = raw if is_raw else self._distribution(scores, token_id, state.temperature)
            assert processed is not None
            token_id = _draw(state, processed)
        if state.params.logprobs is not None:
            if raw is None or raw.temperature != 1:
                raw = self._distribution(row, best, 1.0)
            logprobs = _token_logprobs(raw, self._vocab_size, token_id, state.params.logprobs)
            draws.logprobs[state.seq_id] = logprobs
        return token_id

    def _distribution(self, scores: F32, best: int, temperature: float) -> Distribution | None:
        """Of one row [V] whose argmax is `best`."""
        [found] = self._distributions(scores[None], scores[best : best + 1], np.array([temperature]))
        return found


def _draw(state: SampleState, scores: Distribution) -> int:
    """The token at temperature > 0."""
    params = state.params
    u = random.uniform(state.key, state.position)
    if 0 < params.top_k < len(scores.scores):
        ids = scores.top_ids(params.top_k)
        ids = ids[: _top_p_length(scores.probabilities(ids), params.top_p)]
    elif params.top_p < 1.0:
        found = scores.top_p_ids(params.top_p)
        if found is None:
            uniforms = random.uniforms(state.key, state.position)
            return scores.draw_top_p(params.top_p, params.min_p, uniforms)
        ids = found
    elif params.min_p > 0.0:
        ids = scores.min_p_ids(params.min_p)
    else:
        return scores.draw(u)
    probabilities = scores.probabilities(ids)
    if params.min_p > 0.0:
        kept = probabilities >= params.min_p
        ids, probabilities = ids[kept], probabilities[kept]
    return int(ids[draw(probabilities, u)])


def _token_logprobs(raw: Distribution | None, vocab_size: int, token_id: int, k: int) -> TokenLogprobs:
    """Log-probability and rank of `token_id`, with the k best tokens.

    A row that holds NaN or no finite maximum is no distribution: minus infinity, last rank, no alternatives.
    """
    if raw is None:
        return TokenLogprobs(token_id, -math.inf, vocab_size)
    norm = raw.log_total()
    top = _top_logprobs(raw, k, norm) if k else ()
    return TokenLogprobs(token_id, float(raw.scores[token_id]) - norm, raw.rank(token_id), top)


def _top_logprobs(raw: Distribution, k: int, norm: float) -> Candidates:
    ids = raw.top_ids(k)
    return tuple((i, score - norm) for i, score in zip(ids.tolist(), raw.scores[ids].tolist(), strict=True))


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
