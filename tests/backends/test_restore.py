"""Packed parameters as plain memory: restored from their sizes and bytes they are the same."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.ops import GroupedWeights

F32 = np.float32
random = np.random.default_rng(0)
MATRIX, UP = random.standard_normal((33, 96)).astype(F32), random.standard_normal((33, 96)).astype(F32)


def grouped(bits: int) -> GroupedWeights:
    scale = random.random((33, 3)).astype(np.float16)
    codes = random.integers(0, 1 << bits, (33, 96), np.uint8)
    return GroupedWeights(codes, scale, scale if bits == 4 else None, bits)


MAKE = {
    "int8": lambda b: b.matrix(MATRIX, "int8"),
    "int8 gated": lambda b: b.gated_matrix(MATRIX, UP, "int8"),
    "float32": lambda b: b.matrix(MATRIX, "float32"),
    "float32 gated": lambda b: b.gated_matrix(MATRIX, UP, "float32"),
    "grouped 4": lambda b: b.grouped_matrix(grouped(4)),
    "grouped 8": lambda b: b.grouped_matrix(grouped(8)),
    "grouped 4 gated": lambda b: b.gated_grouped_matrix(grouped(4), grouped(4)),
    "half table": lambda b: b.embedding(MATRIX, "int8"),
    "float table": lambda b: b.embedding(MATRIX, "float32"),
    "vector": lambda b: b.vector(MATRIX[0]),
}


@pytest.mark.parametrize("what", MAKE)
def test_a_restored_parameter_has_the_same_bytes_and_counts_the_same(what: str) -> None:
    made_by, restored_by = NativeBackend(1), NativeBackend(1)
    made = MAKE[what](made_by)

    def fill(buffers: list[np.ndarray]) -> bool:
        for to, source in zip(buffers, made.buffers, strict=True):
            to[:] = source
        return True

    restored = restored_by.restore(type(made).__name__, made.sizes, fill)
    assert type(restored) is type(made)
    assert list(restored.sizes) == list(made.sizes)
    assert [b.tobytes() for b in restored.buffers] == [b.tobytes() for b in made.buffers]
    assert restored_by.num_weight_bytes == made_by.num_weight_bytes == sum(b.nbytes for b in made.buffers)
    if hasattr(made, "unpack"):
        np.testing.assert_array_equal(restored.unpack(), made.unpack())


def test_a_parameter_that_cannot_be_filled_is_none_and_counts_nothing() -> None:
    backend = NativeBackend(1)
    assert backend.restore("Vector", [8], lambda buffers: False) is None
    assert backend.num_weight_bytes == 0


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("PackedI8", [0, 4, 0]), ("PackedI8", [4, 0, 0]), ("PackedI8", [3, 4, 1]), ("PackedI8", [4, 4, 2]),
        ("PackedF32", [-1, 4, 0]), ("PackedF32", [2**31 - 1, 4, 0]),
        ("PackedGrouped", [4, 33, 0, 4, 0]), ("PackedGrouped", [4, 32, 0, 7, 0]),
        ("PackedGrouped", [4, 32, 0, 6, 1]), ("PackedGrouped", [1, 32, 1, 4, 0]),
        ("Vector", [0]), ("Table", [0, 4, 1]), ("Table", [4, 4, 2]),
    ],
)  # fmt: skip
def test_sizes_that_no_parameter_has_are_refused(kind: str, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot be|must be at least 1|no kernel"):
        getattr(_native, kind).empty(sizes)


def test_buffers_outlive_their_parameter() -> None:
    [buffer] = _native.Vector(np.arange(1000, dtype=F32)).buffers
    np.testing.assert_array_equal(buffer.view(F32), np.arange(1000))
