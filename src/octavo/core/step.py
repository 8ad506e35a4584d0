"""StepPlan and StepResult: the whole contract between policy (scheduler) and machine (executor, simulator).

The scheduler never sees an array; a backend never asks the scheduler anything. There is no prefill and no
decode: a slice is `num_tokens` consecutive tokens of one sequence, wherever it stands.

    scheduler.step(now) ──StepPlan──▶ executor.run(plan) ──StepResult──▶ scheduler.apply(plan, result, now)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from octavo.core.block import BlockId, SeqId


@dataclass(frozen=True, slots=True)
class TableWrite:
    """Entries [index, index + len(block_ids)) of the sequence's table for `group` become `block_ids`."""

    group: int  # which group of layers (all layers of one KVCacheSpec); 0 for plain models
    index: int  # first logical block written
    block_ids: tuple[BlockId, ...]


class SequenceSlice(NamedTuple):
    """Compute the tokens at positions [start, start + len(token_ids)) of one sequence.

    A NamedTuple: one is made per sequence and step, and a frozen dataclass takes three times as long.
    """

    seq_id: SeqId
    start: int  # position of token_ids[0]; everything before it is already in the cache
    token_ids: tuple[int, ...]
    table_writes: tuple[TableWrite, ...] = ()  # what changed in the block tables since the last slice
    # Draw a token from the last row for each of these: the sequence itself and, at the end of a prompt, the
    # other choices of its request, which fork from it. Empty while known tokens remain to be computed.
    sample_for: tuple[SeqId, ...] = ()
    num_candidates: int = 0  # instead of drawing: the most likely tokens of the last row, for beam search
    prompt_logprobs: bool = False  # True if log-probabilities of the prompt tokens are wanted

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def needs_logits(self) -> bool:
        """Whether the last row's logits are looked at."""
        return bool(self.sample_for) or self.num_candidates > 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


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
    """One step. Order of execution: swap_out, swap_in, copies, forward over all slices, sample."""

    step: int
    slices: tuple[SequenceSlice, ...] = ()
    swap_out: tuple[SwapBlock, ...] = ()
    swap_in: tuple[SwapBlock, ...] = ()
    copies: tuple[CopyBlock, ...] = ()
    preempted: tuple[SeqId, ...] = ()  # lost their blocks; their table rows are void
    finished: tuple[SeqId, ...] = ()  # ended since the last plan: forget all about them

    @property
    def num_tokens(self) -> int:
        return sum([len(s.token_ids) for s in self.slices])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of the `top` most likely ones, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids` has one entry for each id in each slice's sample_for, in plan order: the token drawn, None for
    those that `failed`."""

    step: int
    token_ids: Sequence[int | None]
    logprobs: dict[SeqId, TokenLogprobs] = field(default_factory=dict)  # of the token drawn, where wanted
    # seq_id -> log-probabilities of the prompt tokens at positions [start + 1, end] of this step's slice
    prompt_logprobs: dict[SeqId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    # seq_id of a slice -> its num_candidates most likely (token id, log-probability), best first
    candidates: dict[SeqId, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    failed: dict[SeqId, str] = field(default_factory=dict)  # seq_id -> why no token could be drawn
    # Moving blocks failed. "out": what was to be swapped out is lost, all else was done. "in": what was to
    # come back is lost, and no slice was computed.
    swap_failure: Literal["out", "in"] | None = None
    duration_s: float = 0.0
