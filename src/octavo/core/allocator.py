"""KVAllocator: what the scheduler asks of whoever owns the cache memory.

KVCacheManager (paged) is one implementation; contiguous baselines are others behind the same Protocol, so
the scheduler cannot tell them apart. All verbs come in pairs: match, admit/release, grow, commit, fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.core.block import BlockId, SeqId
from octavo.core.prefix_index import PrefixNode, Tenant
from octavo.core.stats import CacheStats
from octavo.core.step import CopyBlock, SwapBlock, TableWrite


class Growth(NamedTuple):
    """What changed when a sequence got more slots."""

    table_writes: tuple[TableWrite, ...] = ()
    copies: tuple[CopyBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix whose keys and values are in the cache. Valid until the next call that changes anything."""

    node: PrefixNode  # the prefix, a whole number of blocks
    num_tokens: int
    blocks: tuple[tuple[BlockId | None, ...], ...]  # per group, by logical block; None where skipped
    num_blocks_shared: int  # of them in use by others: they cost nothing

    @property
    def num_blocks(self) -> int:
        """Physical blocks, over all groups."""
        return sum(b is not None for blocks in self.blocks for b in blocks)


class KVAllocator(Protocol):
    @property
    def num_blocks_free(self) -> int: ...

    @property
    def num_blocks_total(self) -> int: ...

    def blocks_for(self, num_tokens: int, num_shared: int = 0) -> int:
        """Most blocks that a sequence of `num_tokens` tokens holds, without those that it keeps sharing with
        one that has its first `num_shared` tokens in common."""
        ...

    def blocks_missing(self, seq_id: SeqId, num_tokens: int) -> int:
        """Blocks that grow(seq_id, num_tokens) would take from the pool now. Changes nothing."""
        ...

    def reach(self, seq_id: SeqId, num_tokens: int) -> int:
        """How many tokens, up to `num_tokens`, the sequence can grow to with the blocks that are free, after a
        grow() that has returned what slid out of a window."""
        ...

    def chunk_end(self, start: int, end: int) -> int:
        """Where a slice from `start` that could go on to `end` best stops: at the last block boundary where
        layers with a recurrent state leave a checkpoint for the prefix cache, else at `end`."""
        ...

    def match(self, token_ids: Sequence[int], tenant: Tenant) -> Match | None:
        """The longest cached prefix of whole blocks that leaves at least one token to compute, whose logits
        are needed. None when there is none. Changes nothing."""
        ...

    def admit(self, seq_id: SeqId, tenant: Tenant, match: Match | None = None) -> None:
        """Start a table: empty, or with the matched prefix."""
        ...

    def grow(self, seq_id: SeqId, num_tokens: int) -> Growth | None:
        """Make slots for positions up to `num_tokens` and count them as filled. Blocks that have slid out of
        a window return to the pool first.

        None, with nothing but that changed, when the pool has too few blocks.
        """
        ...

    def grow_all(self, targets: Sequence[tuple[SeqId, int]]) -> tuple[Growth, ...] | None:
        """grow() for each (sequence, num_tokens) in turn, all or none."""
        ...

    def grow_each(self, seq_ids: Sequence[SeqId]) -> tuple[int, Growth]:
        """grow() by one token for each sequence in turn, up to the first that gets no block: how many got what
        they needed, and what changed."""
        ...

    def commit(self, seq_id: SeqId, token_ids: Sequence[int], num_computed: int) -> None:
        """The keys and values of the first `num_computed` of `token_ids` are in the cache: full blocks may
        be found from now on."""
        ...

    def fork(self, parent: SeqId, child: SeqId) -> None:
        """Start `child` with every block of `parent`, shared."""
        ...

    def release(self, seq_id: SeqId) -> None:
        """Give back every block of the sequence."""
        ...

    def stats(self) -> CacheStats: ...


class SwapAllocator(Protocol):
    """The second pool: where preempted groups wait with what they have computed."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_used(self) -> int: ...

    def num_distinct(self, seq_ids: Sequence[SeqId]) -> int:
        """Blocks of the KV cache that the sequences hold together."""
        ...

    def swap_out(self, seq_ids: Sequence[SeqId]) -> tuple[SwapBlock, ...] | None:
        """Move the sequences out, all or none. None, with nothing changed, when the space has too little."""
        ...

    def blocks_needed(self, seq_ids: Sequence[SeqId]) -> int:
        """Most blocks of the KV cache that swap_in would take."""
        ...

    def swap_in(self, seq_ids: Sequence[SeqId]) -> tuple[SwapBlock, ...]:
        """Move the sequences back; the KV cache must have blocks_needed() free blocks."""
        ...

    def drop(self, seq_id: SeqId) -> None:
        """Forget a swapped sequence."""
        ...
