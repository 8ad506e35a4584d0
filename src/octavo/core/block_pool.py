"""BlockPool: `num_blocks` physical blocks, a free list in LRU order, a reference count each.

Knows nothing about sequences, tokens or bytes. The free list is doubly linked through the blocks
themselves, so that a block can leave it from the middle (a later hit on a freed block) without a search:

    front ─▶ next to be reused … most recently freed ◀─ back

A block is in the free list exactly when its reference count is 0. A free block keeps its content, and may be
found and acquired again, until `allocate` hands it out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.core.block import Block, BlockId


class BlockPool:
    """Hands out block ids; `allocate` takes from the front of the free list, `release` puts at the back.

    `on_reuse(block_id)` is called when a free block is about to lose its content.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[BlockId], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._blocks = [Block(BlockId(i)) for i in range(num_blocks)]
        self._front = Block(BlockId(-1))  # sentinels: never handed out
        self._back = Block(BlockId(-1))
        self._front.next, self._back.prev = self._back, self._front
        self.num_free = 0
        self.num_shared = 0  # blocks that more than one table points to
        self.num_saved = 0  # blocks that would be needed more if nothing were shared
        for block in self._blocks:
            self._push_back(block)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: BlockId) -> int:
        return self._blocks[block_id].ref_count

    def is_shared(self, block_id: BlockId) -> bool:
        return self._blocks[block_id].ref_count > 1

    def free_ids(self) -> Iterator[BlockId]:
        """Free blocks in the order they will be reused."""
        block = self._front.next
        while block is not None and block is not self._back:
            yield block.block_id
            block = block.next

    def allocate(self) -> BlockId:
        """Take the least recently used free block; its reference count becomes 1."""
        block = self._front.next
        assert block is not None and block is not self._back, f"no free block of {self.num_blocks}"
        if self._on_reuse is not None:
            self._on_reuse(block.block_id)
        self._unlink(block)
        block.ref_count = 1
        return block.block_id

    def share(self, block_id: BlockId) -> None:
        """One more table points to a used block."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is free and cannot be shared"
        self._count_one_more(block)

    def acquire(self, block_id: BlockId) -> bool:
        """One more table points to a block whose content is wanted as it is, used or free. Returns whether it
        was free and has left the free list."""
        block = self._blocks[block_id]
        was_free = block.ref_count == 0
        if was_free:
            self._unlink(block)
            block.ref_count = 1
        else:
            self._count_one_more(block)
        return was_free

    def release(self, block_id: BlockId, reuse_first: bool = False) -> bool:
        """One table fewer points to the block; at zero it joins the free list, at the front with
        `reuse_first` (nobody can find its content). Returns whether it did."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} released twice"
        block.ref_count -= 1
        if block.ref_count:
            self.num_saved -= 1
            self.num_shared -= block.ref_count == 1
            return False
        if reuse_first:
            self._push_front(block)
        else:
            self._push_back(block)
        return True

    def _count_one_more(self, block: Block) -> None:
        self.num_shared += block.ref_count == 1
        self.num_saved += 1
        block.ref_count += 1

    def _push_back(self, block: Block) -> None:
        last = self._back.prev
        assert last is not None
        self._link(last, block, self._back)

    def _push_front(self, block: Block) -> None:
        first = self._front.next
        assert first is not None
        self._link(self._front, block, first)

    def _link(self, before: Block, block: Block, after: Block) -> None:
        before.next, block.prev, block.next, after.prev = block, before, after, block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        assert block.prev is not None and block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_free -= 1
