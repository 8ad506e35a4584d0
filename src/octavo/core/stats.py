"""CacheStats: one snapshot of the pool, in blocks and in slots. What the metrics and the simulator report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    block_size: int
    num_blocks_total: int
    num_blocks_used: int
    num_blocks_cached: int  # of the free ones: their content can still be found
    num_blocks_shared: int  # of the used ones: more than one table points to them
    num_blocks_saved: int  # that would be used more if nothing were shared
    num_slots_filled: int  # slots of used blocks that hold keys and values

    @property
    def num_blocks_free(self) -> int:
        return self.num_blocks_total - self.num_blocks_used

    @property
    def usage_ratio(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.num_blocks_used / self.num_blocks_total

    @property
    def fill_ratio(self) -> float:
        """Share of the slots of used blocks that are filled, 0 to 1; 1 when nothing is used."""
        slots = self.num_blocks_used * self.block_size
        return self.num_slots_filled / slots if slots else 1.0
