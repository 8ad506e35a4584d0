"""What a client asks of one request's decoding: a plain value, the same from HTTP to the sampler.

It is not validated here: `octavo.sampling.validate.check(params, vocab_size, max_logprobs)` does that at
the border and raises RequestError. Ranges are given in the comments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults are greedy-free: temperature 1.0, no filters, 16 tokens, as in the OpenAI completions API."""

    n: int = 1  # sequences returned, >= 1
    best_of: int | None = None  # sequences sampled, >= n; the n with the best log-probability are returned
    beam_width: int | None = (
        None  # beam search with this many beams, >= n; temperature and filters are ignored
    )
    length_penalty: float = 1.0  # beam search: scores are divided by length ** this
    early_stopping: bool | Literal["never"] = False  # beam search: when it is over
    temperature: float = 1.0  # >= 0; 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None  # None: drawn from the engine's own stream
    repetition_penalty: float = 1.0  # > 0; over prompt and output
    presence_penalty: float = 0.0  # [-2, 2]; over output
    frequency_penalty: float = 0.0  # [-2, 2]; over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, [-100, 100])
    stop: tuple[str, ...] = ()  # stop strings
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # >= 1 (0 only with echo); None: up to the model's context
    min_tokens: int = 0  # before this many, end-of-sequence and stop tokens cannot be drawn
    logprobs: int | None = None  # alternatives per output token; None: none at all
    prompt_logprobs: int | None = None  # the same over the prompt
    skip_special_tokens: bool = True

    @property
    def num_sequences(self) -> int:
        """Sequences that start with the prompt's last row."""
        if self.beam_width is not None:
            return 1
        return self.best_of if self.best_of is not None else self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
