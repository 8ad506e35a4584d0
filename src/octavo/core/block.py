"""The two ids everything else is written in, and the record of one physical block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)  # dense, 0 <= id < num_blocks
SeqId = NewType("SeqId", int)  # unique for the life of a scheduler


@dataclass(slots=True)
class Block:
    """One physical block. `prev`/`next` thread the free list; they are None while the block is in use."""

    block_id: BlockId
    ref_count: int = 0
    prev: Block | None = None
    next: Block | None = None
