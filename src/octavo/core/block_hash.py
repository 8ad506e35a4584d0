"""The chained hash of a block: over its parent's hash, its tokens and, at the root, salt and adapter.

A hash only finds candidates. prefix_index.py compares the tokens of every candidate, so a collision can cost
a hit but can never serve the keys and values of other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NewType

BlockHash = NewType("BlockHash", int)
TokenIds = tuple[int, ...]
HashFunction = Callable[[BlockHash, TokenIds], BlockHash]


def hash_block(parent: BlockHash, token_ids: TokenIds) -> BlockHash:
    """The default: Python's own 64-bit hash, the same in every run for integers."""
    return BlockHash(hash((parent, token_ids)))


def hash_root(salt: str | None, adapter: str | None) -> BlockHash:
    """The parent of every first block of one tenant and adapter."""
    return BlockHash(hash((salt, adapter)))
