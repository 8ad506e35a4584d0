"""StepPlan and StepResult: the whole contract between policy (scheduler) and machine (executor, simulator).

The scheduler never sees an array; a backend never asks the scheduler anything. There is no prefill and no
decode: a slice is some consecutive tokens of one sequence, wherever it stands.

    scheduler.step(now) ──StepPlan──▶ executor.run(plan) ──StepResult──▶ scheduler.apply(plan, result, now)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from octavo.core.block import BlockId, SeqId
from octavo.core.delta import TokenLogprobs


class TableWrite(NamedTuple):
    """Entries [first, first + len(block_ids)) of the sequence's table for `group` become `block_ids`."""

    seq_id: SeqId
    group: int  # which group of layers (all layers of one KVCacheSpec); 0 for plain models
    first: int  # logical block written first
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy physical block src to dst in the group's layers, before the forward pass."""

    group: int
    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class SwapBlock:
    """Move one block between the pools: `block_id` in the KV cache, `swap_id` in the swap space."""

    group: int
    block_id: BlockId
    swap_id: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of execution: swap_out, swap_in, copies, forward over all slices, sample.

    Slices stand in columns, as an object for each would cost more than deciding it. Slice s computes the
    tokens at positions [ends[s] - lengths[s], ends[s]) of seq_ids[s]; all before them are in the cache.
    """

    step: int
    seq_ids: tuple[SeqId, ...] = ()  # [S]
    ends: tuple[int, ...] = ()  # [S]
    lengths: tuple[int, ...] = ()  # [S]
    token_ids: tuple[int, ...] = ()  # [T] of all slices, one after another
    # Who draws a token from the last row of a slice, num_draws[s] of slice s: its sequence and, at the end of a
    # prompt, the other choices of its request, which fork from it. None while known tokens remain to be computed.
    drawing: tuple[SeqId, ...] = ()  # [sum of num_draws]
    num_draws: tuple[int, ...] = ()  # [S]
    candidates: tuple[tuple[int, int], ...] = ()  # (s, how many): its most likely tokens instead, for beams
    prompt_logprobs: tuple[int, ...] = ()  # slices whose prompt tokens' log-probabilities are wanted
    table_writes: tuple[TableWrite, ...] = ()  # what changed in the block tables
    swap_out: tuple[SwapBlock, ...] = ()
    swap_in: tuple[SwapBlock, ...] = ()
    copies: tuple[CopyBlock, ...] = ()
    preempted: tuple[SeqId, ...] = ()  # lost their blocks; their table rows are void
    finished: tuple[SeqId, ...] = ()  # ended since the last plan: forget all about them

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids` has one entry for each of StepPlan.drawing: the token drawn, None for those that `failed`."""

    step: int
    token_ids: Sequence[int | None]
    logprobs: dict[SeqId, TokenLogprobs] = field(default_factory=dict)  # of the token drawn, where wanted
    # seq_id -> log-probabilities of the prompt tokens that follow those of this step's slice
    prompt_logprobs: dict[SeqId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    # seq_id of a slice -> its most likely (token id, log-probability), best first
    candidates: dict[SeqId, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    failed: dict[SeqId, str] = field(default_factory=dict)  # seq_id -> why no token could be drawn
    # Moving blocks failed. "out": what was to be swapped out is lost, all else was done. "in": what was to
    # come back is lost, and no slice was computed.
    swap_failure: Literal["out", "in"] | None = None
    duration_s: float = 0.0
