"""KVCacheSpec: how one layer's cache is sized and grows. A frozen value; the model's layers return them.

Layers with equal specs form groups (kv_groups.py) and share block tables; all groups share one pool.

    spec                 blocks a sequence holds at position p     a prefix is usable when it has
    FullAttentionSpec    every block up to p                       all its blocks
    SlidingWindowSpec    those that a query at p can see           those that the next query can see
    MambaSpec            the state after p, and the one before     the state after its last token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one key or one value [D] is stored: D numbers and, where they are integers, their common scale."""

    number_bytes: int
    scale_bytes: int = 0

    def vector_bytes(self, head_size: int) -> int:
        return head_size * self.number_bytes + self.scale_bytes


KV_FORMATS: Mapping[str, KVFormat] = {
    "fp32": KVFormat(4),
    "fp16": KVFormat(2),
    "int8": KVFormat(1, scale_bytes=4),
}


class KVCacheSpec(Protocol):
    """What the manager and the memory planner ask of a layer's cache."""

    def bytes_per_block(self, block_size: int, kv_format: KVFormat) -> int:
        """Bytes one block of one layer takes."""
        ...

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        """Leading logical blocks that no query from position `num_computed_tokens` on can see."""
        ...

    def num_stored(self, num_new: int) -> int:
        """Of `num_new` further logical blocks that one step reaches, how many (the last ones) are kept."""
        ...

    def is_checkpoint(self, boundary: int, num_computed_tokens: int) -> bool:
        """Whether the block that ends at `boundary` tokens holds what a prefix needs, when the step that
        reached it ended at `num_computed_tokens`."""
        ...

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks a sequence ever holds on its way to `num_tokens`, in steps of at most `max_chunk`."""
        ...

    def num_shareable(self, num_tokens: int, block_size: int) -> int:
        """Full blocks that sequences with `num_tokens` tokens in common keep sharing as they grow."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of every token are kept: 2 · K · D values a token."""

    num_kv_heads: int  # K
    head_size: int  # D

    def bytes_per_block(self, block_size: int, kv_format: KVFormat) -> int:
        return 2 * self.num_kv_heads * block_size * kv_format.vector_bytes(self.head_size)

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        return 0

    def num_stored(self, num_new: int) -> int:
        return num_new

    def is_checkpoint(self, boundary: int, num_computed_tokens: int) -> bool:
        return True

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        return -(-num_tokens // block_size)

    def num_shareable(self, num_tokens: int, block_size: int) -> int:
        return num_tokens // block_size


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """A query at position p sees keys at (p - window, p]; blocks that slide out return to the pool."""

    num_kv_heads: int  # K
    head_size: int  # D
    window: int  # tokens, >= 1

    def bytes_per_block(self, block_size: int, kv_format: KVFormat) -> int:
        return 2 * self.num_kv_heads * block_size * kv_format.vector_bytes(self.head_size)

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def num_stored(self, num_new: int) -> int:
        return num_new

    def is_checkpoint(self, boundary: int, num_computed_tokens: int) -> bool:
        return True

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """ceil((window - 1 + chunk) / B) + 1: the window, the chunk, and the block that both ends cut."""
        seen = -(-(self.window - 1 + max_chunk) // block_size) + 1
        return min(-(-num_tokens // block_size), seen)

    def num_shareable(self, num_tokens: int, block_size: int) -> int:
        return 0  # what is shared slides out


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """One state of constant size per sequence, float32, in one block.

    The state after n tokens lies in the block of logical index (n - 1) // B. A step from n to m tokens reads
    that one and writes the one of (m - 1) // B; blocks it jumps over are never taken. A state that ends
    exactly at a block boundary is a checkpoint: it is not written again, and a prefix can start from it.
    """

    conv_values: int  # inputs that the causal convolution still needs
    ssm_values: int  # the recurrent state

    def bytes_per_block(self, block_size: int, kv_format: KVFormat) -> int:
        return 4 * (self.conv_values + self.ssm_values)

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        return max(0, num_computed_tokens - 1) // block_size

    def num_stored(self, num_new: int) -> int:
        return min(1, num_new)

    def is_checkpoint(self, boundary: int, num_computed_tokens: int) -> bool:
        return boundary == num_computed_tokens

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        return min(2, -(-num_tokens // block_size))

    def num_shareable(self, num_tokens: int, block_size: int) -> int:
        return 0  # each goes on from its own copy
