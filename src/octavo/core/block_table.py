"""BlockTable: which physical block holds each logical block of one sequence, and how far it is filled.

    position p  ─▶  logical block p // block_size, slot p % block_size  ─▶  physical block block_ids[logical]

An entry is None when no query can see the block any more, or when it was never taken: the head of a sliding
window, all but the newest states of a Mamba layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.block import BlockId


class Slot(NamedTuple):
    """Where one token's keys and values lie."""

    block_id: BlockId
    offset: int  # 0 <= offset < block_size


@dataclass(slots=True)
class BlockTable:
    """A plain record; KVCacheManager is its only writer."""

    block_size: int
    block_ids: list[BlockId | None] = field(default_factory=list)
    num_tokens: int = 0  # positions written, those in skipped blocks included
    num_skipped: int = 0  # leading entries that were given back: all None
    num_sent: int = 0  # leading entries the executor already knows
    quiet_until: int = (
        0  # growing its sequence up to here is counting: no block is taken, copied, sent or given back
    )

    @property
    def num_logical(self) -> int:
        """Logical blocks, skipped ones included."""
        return len(self.block_ids)

    @property
    def held(self) -> list[tuple[int, BlockId]]:
        """(logical, physical) of the blocks it holds, in logical order."""
        first = self.num_skipped
        return [(i, b) for i, b in enumerate(self.block_ids[first:], first) if b is not None]

    @property
    def num_slots_empty(self) -> int:
        """Internal fragmentation: slots held but not filled, at most block_size - 1 between steps."""
        return len(self.block_ids) * self.block_size - self.num_tokens

    def block_at(self, logical: int) -> BlockId:
        block_id = self.block_ids[logical]
        assert block_id is not None, f"logical block {logical} is not held"
        return block_id

    def locate(self, position: int) -> Slot:
        assert 0 <= position < self.num_tokens, f"position {position} of {self.num_tokens} filled"
        return Slot(self.block_at(position // self.block_size), position % self.block_size)

    def num_filled(self, logical: int) -> int:
        """Filled slots of one logical block."""
        return max(0, min(self.block_size, self.num_tokens - logical * self.block_size))
