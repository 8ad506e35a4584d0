"""What the scheduler says of a step besides the plan: outputs for clients, counts and decisions for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.core.request import FinishReason
from octavo.core.step import TokenLogprobs

PreemptionMode = Literal["recompute", "swap"]


class SequenceOutput(NamedTuple):
    """What one step gave one choice. Beam search gives all its tokens at once, when it is over."""

    request_id: str
    choice: int  # which of its request
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stopped_by_token: bool = False  # the last of token_ids is an end-of-sequence or stop token
    logprobs: TokenLogprobs | None = None  # of the one token
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    score: float | None = None  # beam search
    error: str | None = None  # with finish_reason "error"


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start."""

    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_recomputed_tokens: int = 0  # tokens whose keys and values were dropped by preemption
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0  # on write
    num_prompt_tokens: int = 0  # of requests admitted for the first time
    num_prompt_tokens_cached: int = 0  # of these, found in the prefix cache
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0

    @property
    def num_preemptions(self) -> int:
        return self.num_preemptions_recompute + self.num_preemptions_swap


@dataclass(frozen=True, slots=True)
class PreemptionDecision:
    """What was done with a victim, and the two prices (seconds) where they were compared."""

    request_id: str
    mode: PreemptionMode
    reason: str
