"""The cache of packed parameters: what counts, what is packed anew, what is written and what is removed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.weights import packed_cache
from octavo.weights.packed_cache import PackedCache, identity_of


class Bytes:
    """A parameter of one buffer."""

    def __init__(self, values: bytes) -> None:
        self.sizes = [len(values)]
        self.buffers = [np.frombuffer(values, np.uint8).copy()]

    def __bytes__(self) -> bytes:
        return self.buffers[0].tobytes()


def restore(kind: str, sizes: Sequence[int], fill: Callable[[Sequence[Any]], bool]) -> Bytes | None:
    assert kind == "Bytes"
    parameter = Bytes(bytes(sizes[0]))
    return parameter if fill(parameter.buffers) else None


class Model:
    """A model of two parameters with a cache in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.gguf"
        self.path.write_bytes(b"weights")
        self.folder = folder / "packed"
        self.code: list[Path] = []
        self.values = {"a": b"first", "b": b"second"}

    def load(self, weight_dtype: str = "int8") -> tuple[dict[str, bytes], list[str]]:
        """Start once: the parameters, and the names of those that had to be made."""
        cache = PackedCache(
            identity_of(self.path, [self.path], weight_dtype, self.code), restore, self.folder
        )
        made: list[str] = []

        def make(name: str) -> Bytes:
            made.append(name)
            return Bytes(self.values[name])

        found = {name: bytes(cache.obtain(name, lambda name=name: make(name))) for name in self.values}
        thread = cache.finish()
        if thread is not None:
            thread.join()
        return found, made

    @property
    def file(self) -> Path:
        [file] = self.folder.iterdir()
        return file


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def test_the_second_start_makes_nothing(model):
    assert model.load() == (model.values, ["a", "b"])
    assert model.load() == (model.values, [])


def test_a_start_that_found_everything_writes_nothing(model):
    model.load()
    before = model.file.stat().st_ino
    model.load()
    assert model.file.stat().st_ino == before


def test_a_changed_model_is_packed_anew_and_replaces_the_file(model):
    model.load()
    model.values["a"] = b"FIRST"
    os.utime(model.path, ns=(0, 1))
    assert model.load() == (model.values, ["a", "b"])
    assert model.load() == (model.values, [])
    assert model.file.is_file()  # the only one


def test_changed_code_packs_anew(model, tmp_path):
    model.code = [tmp_path / "kernels.so"]
    model.code[0].write_text("one way")
    model.load()
    assert model.load()[1] == []
    model.code[0].write_text("another way")
    assert model.load()[1] == ["a", "b"]


def test_weight_dtypes_have_files_of_their_own(model):
    model.load("int8")
    assert model.load("native")[1] == ["a", "b"]
    assert model.load("int8")[1] == []
    assert model.load("native")[1] == []


def test_a_damaged_parameter_is_made_and_the_file_mended(model, caplog):
    model.load()
    data = model.file.read_bytes()
    at = data.rindex(b"second")
    model.file.write_bytes(data[:at] + b"S" + data[at + 1 :])
    assert model.load() == (model.values, ["b"])
    assert [r.getMessage() for r in caplog.records] == [f"{model.file}: b is damaged and packed anew"]
    assert model.load() == (model.values, [])


@pytest.mark.parametrize("foreign", [b"", b"GGUF and so on", b"OCTAVOP1" + bytes(8)])
def test_a_foreign_file_is_replaced(model, foreign, caplog):
    model.load()
    model.file.write_bytes(foreign)
    assert model.load() == (model.values, ["a", "b"])
    assert "packed weights cannot be used" in caplog.text
    assert model.load() == (model.values, [])


def test_a_parameter_that_the_file_lacks_is_made(model):
    model.load()
    model.values["c"] = b"third"
    assert model.load() == (model.values, ["c"])
    assert model.load() == (model.values, [])


def test_a_folder_that_cannot_be_written_is_one_warning(model, caplog):
    model.folder.write_text("a file where the folder should be")
    assert model.load() == (model.values, ["a", "b"])
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(model.folder) in record.getMessage()
    assert "--no-weight-cache" in record.getMessage()


def test_a_full_disk_leaves_no_draft(model, caplog, monkeypatch):
    def write_packed(file: Any, *_: Any) -> None:
        file.write(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "write_packed", write_packed)
    assert model.load() == (model.values, ["a", "b"])
    assert "No space left on device" in caplog.text
    assert list(model.folder.iterdir()) == []


def test_starts_at_the_same_time_end_with_one_whole_file(model):
    barrier, results = threading.Barrier(4), []

    def start() -> None:
        barrier.wait()
        results.append(model.load()[0])

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [model.values] * 4
    assert model.file.is_file()
    assert model.load() == (model.values, [])


def test_the_least_recently_used_file_goes_and_so_do_old_drafts(model, monkeypatch):
    monkeypatch.setattr(packed_cache, "MAX_FILES", 2)
    model.load("int8")
    first = model.file
    model.load("native")
    for file in model.folder.iterdir():
        os.utime(file, (1, 1))
    model.load("int8")  # used again
    (model.folder / "draft-old").write_bytes(b"")
    os.utime(model.folder / "draft-old", (1, 1))
    (model.folder / "draft-young").write_bytes(b"")
    model.load("float32")
    assert sorted(f.name.split("-")[1] for f in model.folder.iterdir()) == ["float32", "int8", "young"]
    assert first.is_file()
