"""TokenBudget: how many tokens and sequences one step may still take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_batched_tokens: int  # tokens in one step
    max_num_seqs: int  # sequences running at once
    max_model_len: int  # tokens of one sequence, prompt and output together
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    force_preemption: bool = False  # tests only: preempt whoever has made progress, at every step

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token a step"
            )


class TokenBudget:
    """Counts down within one step."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def take(self, wanted: int) -> int:
        """As many of `wanted` tokens as are left."""
        taken = min(wanted, self.num_left)
        self.num_left -= taken
        return taken
