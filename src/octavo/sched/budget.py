"""SchedulerConfig: how many tokens and sequences a step may take, and what preemption may do."""

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
