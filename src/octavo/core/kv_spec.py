"""KVCacheSpec: how one layer's cache is sized and grows. A frozen value; the model's layers return them.

Layers with equal specs form groups (kv_groups.py) and share block tables; all groups share one pool.

    spec                 blocks a sequence holds at position p     a prefix is usable when it has
    FullAttentionSpec    every block up to p                       all its blocks
    SlidingWindowSpec    those that a query at p can see           those that the next query can see
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class KVCacheSpec(Protocol):
    """What the manager and the memory planner ask of a layer's cache."""

    def bytes_per_block(self, block_size: int, dtype_bytes: float) -> int:
        """Bytes one block of one layer takes."""
        ...

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        """Leading logical blocks that no query from position `num_computed_tokens` on can see."""
        ...

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks a sequence ever holds on its way to `num_tokens`, in steps of at most `max_chunk`."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of every token are kept: 2 · K · D values a token."""

    num_kv_heads: int  # K
    head_size: int  # D

    def bytes_per_block(self, block_size: int, dtype_bytes: float) -> int:
        return int(2 * self.num_kv_heads * self.head_size * block_size * dtype_bytes)

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """A query at position p sees keys at (p - window, p]; blocks that slide out return to the pool."""

    num_kv_heads: int  # K
    head_size: int  # D
    window: int  # tokens, >= 1

    def bytes_per_block(self, block_size: int, dtype_bytes: float) -> int:
        return int(2 * self.num_kv_heads * self.head_size * block_size * dtype_bytes)

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """ceil((window - 1 + chunk) / B) + 1: the window, the chunk, and the block that both ends cut."""
        seen = -(-(self.window - 1 + max_chunk) // block_size) + 1
        return min(-(-num_tokens // block_size), seen)
