from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.swap_store import FileStore, MemoryStore, make_store
from octavo.errors import ConfigError


def block(seed: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_blocks_come_back_as_written(tmp_path: Path, kind: str):
    store = MemoryStore(5, 1000) if kind == "memory" else FileStore(tmp_path, 5, 1000)
    for i in (3, 0, 4):
        store.write(i, block(i))
    store.write(0, block(9))
    assert [np.array_equal(store.read(i), block(s)) for i, s in ((3, 3), (0, 9), (4, 4))] == [True] * 3


def test_file_is_gone_from_the_folder_at_once(tmp_path: Path):
    store = FileStore(tmp_path, 5, 1000)
    store.write(0, block(1))
    assert list(tmp_path.iterdir()) == []


def test_block_that_was_never_written_cannot_be_read(tmp_path: Path):
    with pytest.raises(OSError, match="swap block 2: 0 of 1000 bytes"):
        FileStore(tmp_path, 5, 1000).read(2)


def test_full_disk_raises_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = FileStore(tmp_path, 5, 1000)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(0, block(1))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = FileStore(tmp_path, 5, 1000)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:300], offset))
    store.write(1, block(1))
    assert np.array_equal(store.read(1), block(1))


def test_folder_that_cannot_be_written_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--swap-dir .*missing: No such file or directory"):
        make_store(str(tmp_path / "missing"), 5, 1000)


def test_file_is_closed_with_its_store(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    store = FileStore(tmp_path, 5, 1000)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del store
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_blocks_no_store():
    assert make_store(None, 0, 1000) is None
