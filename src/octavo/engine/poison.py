"""FreedBlocks: in debug mode, fills blocks that nobody can read any more with NaN.

A stale read through a wrong block table then shows as a request that ends with "logits are not finite"
instead of as a plausible wrong word. Blocks that the prefix cache still finds keep their content.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from octavo.core.kv_manager import KVCacheManager
from octavo.core.step import StepPlan
from octavo.engine.executor import Executor

NUM_FILLED_AT_START = 1024  # blocks that have never been used


class FreedBlocks:
    """Fills each block once, however long it stays free."""

    def __init__(self, manager: KVCacheManager, executor: Executor) -> None:
        self._manager = manager
        self._executor = executor
        # Free and full of NaN; or free and never used, as filling a whole large pool takes many seconds
        self._filled: set[int] = set(islice(manager.pool.free_ids(), NUM_FILLED_AT_START, None))

    def after_step(self, plan: StepPlan) -> None:
        """To be called when the step's blocks have been freed, before the next is planned."""
        self._filled.difference_update(_taken(plan))
        index = self._manager.index
        for block_id in self._manager.pool.free_ids():
            if block_id not in self._filled and not (index is not None and index.holds(block_id)):
                self._executor.fill_block(block_id, float("nan"))
                self._filled.add(block_id)


def _taken(plan: StepPlan) -> Iterator[int]:
    """Blocks that the plan wrote to, or might have; some may be free again."""
    for write in plan.table_writes:
        yield from write.block_ids
    for copy in plan.copies:
        yield copy.dst
    for move in plan.swap_in:
        yield move.block_id
