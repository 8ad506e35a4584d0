"""Memory-mapped model files: the pages that were read count as the process's memory until they are let go."""

from __future__ import annotations

import mmap


def let_go(data: mmap.mmap, start: int, num_bytes: int) -> None:
    """The whole pages within [start, start + num_bytes) return to the system's file cache; views stay valid."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, first, length)
