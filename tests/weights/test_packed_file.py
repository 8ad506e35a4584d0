"""The file of packed parameters: what is written comes back, and every damage is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.errors import CorruptModelError
from octavo.weights.packed_file import PackedFile, write_packed


class Matrix:
    sizes = (3, 70)

    def __init__(self) -> None:
        self.buffers = [np.arange(210, dtype=np.uint8), np.full(3, 7, np.uint8)]


class Vector:
    sizes = (65,)

    def __init__(self) -> None:
        self.buffers = [np.arange(65, dtype=np.uint8)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with (tmp_path / "weights").open("xb") as file:
        write_packed(file, {"model": "m"}, {"a": Matrix(), "b": Vector()})
    return tmp_path / "weights"


def is_intact(path: Path) -> bool:
    """Whether everything can be read, with the values that were written."""
    try:
        file = PackedFile(path)
    except CorruptModelError:
        return False
    room = {"a": [np.empty(210, np.uint8), np.empty(3, np.uint8)], "b": [np.empty(65, np.uint8)]}
    is_read = all(file.read_into(name, buffers) for name, buffers in room.items())
    file.close()
    for name, wanted in (("a", Matrix().buffers), ("b", Vector().buffers)):
        assert not is_read or all(map(np.array_equal, room[name], wanted)), "damage that was not noticed"
    return is_read


def test_what_was_written_comes_back(path):
    file = PackedFile(path)
    assert file.identity == {"model": "m"}
    assert file.form_of("a") == ("Matrix", [3, 70])
    assert file.form_of("b") == ("Vector", [65])
    assert file.form_of("c") is None
    file.close()
    assert is_intact(path)


def test_a_buffer_longer_than_a_chunk_comes_back(tmp_path):
    wanted = np.random.default_rng(0).integers(0, 256, (3 << 20) + 5, np.uint8)
    matrix = Matrix()
    matrix.buffers = [wanted]
    with (tmp_path / "long").open("xb") as stream:
        write_packed(stream, None, {"a": matrix})
    file, found = PackedFile(tmp_path / "long"), np.empty_like(wanted)
    assert file.read_into("a", [found])
    file.close()
    np.testing.assert_array_equal(found, wanted)


def test_damage_of_any_byte_is_found(path):
    data = path.read_bytes()
    start_of_data = len(data) - 256 - 64 - 128  # three buffers, padded
    kept = [*range(start_of_data), *range(start_of_data, start_of_data + 210)]
    kept += [
        *range(start_of_data + 256, start_of_data + 259),
        *range(start_of_data + 320, start_of_data + 385),
    ]
    header = 16 + int.from_bytes(data[8:12], "little")
    padding = range(header, start_of_data)
    for at in kept:
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        assert is_intact(path) == (at in padding), f"byte {at}"


def test_a_file_cut_off_anywhere_is_found(path):
    data = path.read_bytes()
    for length in range(0, len(data) - 63, 13):  # the last 63 bytes are padding
        path.write_bytes(data[:length])
        assert not is_intact(path), f"cut to {length} of {len(data)} bytes"


def test_a_parameter_of_another_size_is_not_filled(path):
    file = PackedFile(path)
    assert not file.read_into("b", [np.empty(64, np.uint8)])
    assert not file.read_into("a", [np.empty(210, np.uint8)])
    file.close()


def test_the_error_names_the_file(tmp_path):
    (tmp_path / "other").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(
        CorruptModelError, match=r"other: no file of packed weights, or damaged \(it starts with b'GGUF"
    ):
        PackedFile(tmp_path / "other")
