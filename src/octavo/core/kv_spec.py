"""KVCacheSpec: how one layer's cache is sized and grows. A frozen value; the model's layers return them.

Layers with equal specs form a group (kv_groups.py) and share block tables; all groups share one pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class KVCacheSpec(Protocol):
    """What the manager and the memory planner ask of a layer's cache."""

    def bytes_per_block(self, block_size: int, dtype_bytes: float) -> int:
        """Bytes one block of one layer takes."""
        ...

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks a sequence of `num_tokens` tokens holds."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of every token are kept: 2 · K · D values a token."""

    num_kv_heads: int  # K
    head_size: int  # D

    def bytes_per_block(self, block_size: int, dtype_bytes: float) -> int:
        return int(2 * self.num_kv_heads * self.head_size * block_size * dtype_bytes)

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)
