"""SwapStore: the bytes of swapped blocks, in memory or in a file on disk. Block ids are those of the swap space.

The file is unlinked as soon as it is open, so nothing is left behind however the process ends. A disk that
fills or fails raises OSError at the block; the executor reports it and the scheduler recomputes instead.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError

Bytes = NDArray[np.uint8]


class SwapStore(Protocol):
    def write(self, swap_id: int, data: Bytes) -> None:
        """Keep one block. Raises OSError."""
        ...

    def read(self, swap_id: int) -> Bytes:
        """The block as written; valid until it is written again. Raises OSError."""
        ...


class MemoryStore:
    """Pages are taken from the system as blocks are first written."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._blocks = np.zeros((num_blocks, block_bytes), np.uint8)

    def write(self, swap_id: int, data: Bytes) -> None:
        self._blocks[swap_id] = data

    def read(self, swap_id: int) -> Bytes:
        block: Bytes = self._blocks[swap_id]
        return block


class FileStore:
    """One file in `folder`, block i at offset i · block_bytes."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        try:
            fd, name = tempfile.mkstemp(prefix="octavo-swap-", dir=folder)
        except OSError as error:
            raise ConfigError(
                f"--swap-dir {folder}: {error.strerror}; give a folder that can be written"
            ) from None
        os.unlink(name)
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._block_bytes = block_bytes

    def write(self, swap_id: int, data: Bytes) -> None:
        view = data.data
        offset = swap_id * self._block_bytes
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def read(self, swap_id: int) -> Bytes:
        data = os.pread(self._fd, self._block_bytes, swap_id * self._block_bytes)
        if len(data) != self._block_bytes:
            raise OSError(f"swap block {swap_id}: {len(data)} of {self._block_bytes} bytes could be read")
        return np.frombuffer(data, np.uint8)


def make_store(folder: str | None, num_blocks: int, block_bytes: int) -> SwapStore | None:
    if not num_blocks:
        return None
    if folder is None:
        return MemoryStore(num_blocks, block_bytes)
    return FileStore(Path(folder), num_blocks, block_bytes)
