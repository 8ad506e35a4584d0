"""KVAllocator: what the scheduler asks of whoever owns the cache memory.

KVCacheManager (paged) is one implementation; contiguous baselines are others behind the same Protocol, so
the scheduler cannot tell them apart. All verbs come in pairs: admit/release, grow, fork.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.block import SeqId
from octavo.core.stats import CacheStats
from octavo.core.step import CopyBlock, TableWrite


@dataclass(frozen=True, slots=True)
class Growth:
    """What changed when a sequence got more slots."""

    table_writes: tuple[TableWrite, ...] = ()
    copies: tuple[CopyBlock, ...] = ()


class KVAllocator(Protocol):
    @property
    def num_blocks_free(self) -> int: ...

    @property
    def num_blocks_total(self) -> int: ...

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds when it shares none."""
        ...

    def blocks_missing(self, seq_id: SeqId, num_tokens: int) -> int:
        """Blocks that grow(seq_id, num_tokens) would take from the pool now. Changes nothing."""
        ...

    def admit(self, seq_id: SeqId) -> None:
        """Start an empty table."""
        ...

    def grow(self, seq_id: SeqId, num_tokens: int) -> Growth | None:
        """Make slots for positions up to `num_tokens` and count them as filled.

        None, with nothing changed, when the pool has too few blocks.
        """
        ...

    def fork(self, parent: SeqId, child: SeqId) -> None:
        """Start `child` with every block of `parent`, shared."""
        ...

    def release(self, seq_id: SeqId) -> None:
        """Give back every block of the sequence."""
        ...

    def stats(self) -> CacheStats: ...
