"""What the scheduler tells operators of its steps: counts and decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PreemptionMode = Literal["recompute", "swap"]


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
