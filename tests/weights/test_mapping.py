"""Mapped files: memory that was read is given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from octavo.weights.mapping import let_go

PAGE = mmap.PAGESIZE


def resident_pages(data: mmap.mmap) -> int:
    """Of the mapping, as the kernel counts them for this process."""
    address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    return next(int(line.split()[1]) for line in lines[start:] if line.startswith("Rss:")) * 1024 // PAGE


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system has no such advice")
@pytest.mark.parametrize(
    ("start", "num_bytes", "kept"), [(0, 8, 0), (1, 6, 2), (0.5, 2, 7), (3, 0.5, 8), (2.5, 1, 8)]
)
def test_whole_pages_are_let_go(tmp_path: Path, start: float, num_bytes: float, kept: int) -> None:
    (tmp_path / "file").write_bytes(bytes(8 * PAGE))
    with (tmp_path / "file").open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert sum(data[i * PAGE] for i in range(8)) == 0
    assert resident_pages(data) == 8
    let_go(data, int(start * PAGE), int(num_bytes * PAGE))
    assert resident_pages(data) == kept
