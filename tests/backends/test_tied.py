"""A lookup table that is the output matrix as well, read in parts: the bytes are those of both made as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends import native
from octavo.backends.native import NativeBackend
from octavo.backends.ops import F32


class Parts:
    """Rows that remember how many were asked for at a time."""

    def __init__(self, values: F32) -> None:
        self.values = values
        self.asked: list[int] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: slice) -> F32:
        self.asked.append(len(self.values[rows]))
        return self.values[rows]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PART_FLOATS", 64 * 72)


def random_rows(height: int) -> F32:
    return np.random.default_rng(0).standard_normal((height, 72)).astype(np.float32)


def bytes_of(*parameters: Any) -> list[tuple[list[int], list[bytes]]]:
    return [(list(p.sizes), [buffer.tobytes() for buffer in p.buffers]) for p in parameters]


@pytest.mark.parametrize(("height", "asked"), [(150, [64, 64, 22]), (128, [64, 64])])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_parts_are_packed_as_the_whole(dtype: Any, height: int, asked: list[int]) -> None:
    values = random_rows(height)
    rows, backend, other = Parts(values), NativeBackend(1), NativeBackend(1)
    whole = other.embedding(values, dtype), other.matrix(values, dtype)
    assert bytes_of(*backend.tied(rows, dtype, dtype)) == bytes_of(*whole)
    assert rows.asked == asked
    assert backend.num_weight_bytes == other.num_weight_bytes


def test_a_table_beyond_half_precision_is_kept_in_float32() -> None:
    values = random_rows(150)
    values[140, 3] = 70000.0
    backend = NativeBackend(1)
    table, head = backend.tied(Parts(values), "int8", "int8")
    assert table.buffers[0].view(np.float32).reshape(150, 72)[140, 3] == 70000.0
    assert bytes_of(table, head) == bytes_of(
        backend.embedding(values, "int8"), backend.matrix(values, "int8")
    )


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_weight_is_named_by_its_row(dtype: Any, value: float) -> None:
    values = random_rows(150)
    values[70, 0] = value
    with pytest.raises(ValueError, match=r"weight row 70 \(of 150\) holds NaN or infinity"):
        NativeBackend(1).tied(Parts(values), dtype, dtype)


def test_each_part_is_packed_in_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    put = native._put_panels

    def recorded(part: Any, *where: Any) -> None:
        starts.append(part.buffers[0].ctypes.data)
        put(part, *where)

    monkeypatch.setattr(native, "_put_panels", recorded)
    monkeypatch.setattr(native, "PART_FLOATS", 64 * 2048)  # large enough for a slab
    NativeBackend(1).tied(np.ones((256, 2048), np.float32), "int8", "int8")
    assert len(starts) == 4
    assert len(set(starts)) == 1
