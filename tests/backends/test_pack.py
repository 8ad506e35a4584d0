"""Packed matrices: what is kept of the weights, and which arguments the border refuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from octavo import _native
from octavo.backends.ops import F32

PACKED: dict[str, type[_native.PackedI8] | type[_native.PackedF32]] = {
    "int8": _native.PackedI8,
    "float32": _native.PackedF32,
}
SHAPES = [(1, 1), (15, 63), (16, 64), (17, 65), (33, 576), (100, 3)]


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_weights_come_back_exactly(shape: tuple[int, int]) -> None:
    weight, up = normal(*shape), normal(*shape, seed=1)
    np.testing.assert_array_equal(_native.PackedF32(weight).unpack(), weight)
    np.testing.assert_array_equal(_native.PackedF32(weight, up).unpack(), np.concatenate([weight, up]))


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_weights_come_back_within_half_a_step(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    step = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)  # [out, 1]
    unpacked = _native.PackedI8(weight).unpack()
    assert (np.abs(unpacked - weight) <= step * np.float32(0.50001)).all()
    np.testing.assert_array_equal(unpacked, np.rint(unpacked / step) * step)
    assert (np.abs(np.rint(unpacked / step)).max(axis=1) == 127).all()


def test_gate_and_up_have_scales_of_their_own() -> None:
    gate, up = normal(21, 40), normal(21, 40, seed=1) * np.float32(1000)
    unpacked = _native.PackedI8(gate, up).unpack()
    np.testing.assert_array_equal(unpacked[:21], _native.PackedI8(gate).unpack())
    np.testing.assert_array_equal(unpacked[21:], _native.PackedI8(up).unpack())


def test_channels_without_a_scale_are_zero() -> None:
    weight = normal(4, 30)
    weight[1] = 0.0
    weight[3] *= np.float32(1e-38)  # its scale would be subnormal
    unpacked = _native.PackedI8(weight).unpack()
    assert not unpacked[[1, 3]].any()
    assert unpacked[[0, 2]].any(axis=1).all()


@pytest.mark.parametrize("dtype", PACKED)
def test_threads_pack_the_same_matrix(dtype: str) -> None:
    weight = normal(900, 1000)  # large enough for three threads
    alone = PACKED[dtype](weight).unpack()
    for num_threads in (2, 3, 64):
        np.testing.assert_array_equal(PACKED[dtype](weight, num_threads=num_threads).unpack(), alone)


def test_sizes_are_those_of_the_padded_panels() -> None:
    packed = _native.PackedI8(normal(33, 65), normal(33, 65))
    assert (packed.n, packed.k, packed.is_gated) == (66, 65, True)
    panels = 3  # of 16 gate and 16 up columns
    assert packed.nbytes == panels * 32 * (128 + 4)
    assert _native.PackedF32(normal(33, 65)).nbytes == 2 * 32 * 65 * 4


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damaged_weights_are_refused_by_row(dtype: str, value: float) -> None:
    weight, damaged = normal(40, 70), normal(40, 70)
    damaged[38, 69] = value
    with pytest.raises(ValueError, match=r"weight row 38 \(of 40\) holds NaN or infinity"):
        PACKED[dtype](damaged)
    with pytest.raises(ValueError, match=r"weight row 38 of gate \(of 40\)"):
        PACKED[dtype](damaged, weight)
    with pytest.raises(ValueError, match=r"weight row 38 of up \(of 40\)"):
        PACKED[dtype](weight, damaged)


@pytest.mark.parametrize("dtype", PACKED)
def test_wrong_weights_are_refused(dtype: str) -> None:
    pack: Callable[..., object] = PACKED[dtype]
    with pytest.raises(ValueError, match="0 by 5 is empty"):
        pack(normal(0, 5))
    with pytest.raises(ValueError, match="5 by 0 is empty"):
        pack(normal(5, 0))
    with pytest.raises(TypeError, match="weight: must have dtype float32"):
        pack(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="weight: must be C-contiguous"):
        pack(normal(4, 8)[:, ::2])
    with pytest.raises(ValueError, match=re.escape("up: has shape (4, 7), expected (4, 8)")):
        pack(normal(4, 8), normal(4, 7))
    with pytest.raises(ValueError, match="weight: has too few dimensions"):
        pack(normal(4))


@pytest.mark.parametrize("dtype", PACKED)
def test_wrong_operands_are_refused(dtype: str) -> None:
    plain, gated, x = PACKED[dtype](normal(6, 8)), PACKED[dtype](normal(6, 8), normal(6, 8)), normal(3, 8)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("x: has shape (3, 7), expected (3, 8)", lambda: _native.matmul(plain, normal(3, 7))),
        ("bias: has shape (5,), expected (6)", lambda: _native.matmul(plain, x, bias=normal(5))),
        ("residual: has shape (2, 6)", lambda: _native.matmul(plain, x, residual=normal(2, 6))),
        ("a gated matrix needs act", lambda: _native.matmul(gated, x)),
        ("act 'silu' needs a gated matrix", lambda: _native.matmul(plain, x, act="silu")),
        ("act 'relu' is unknown", lambda: _native.matmul(gated, x, act="relu")),
        ("act excludes bias and residual", lambda: _native.matmul(gated, x, act="silu", bias=normal(12))),
        ("isa 'sse9' is not available", lambda: _native.matmul(plain, x, isa="sse9")),
        ("num_workers must be within [1, 1024]", lambda: _native.matmul(plain, x, num_workers=0)),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match="x: must have dtype float32"):
        _native.matmul(plain, x.astype(np.float64))


@pytest.mark.parametrize("dtype", PACKED)
def test_timing_wants_matrices_of_one_shape(dtype: str) -> None:
    pool = _native.thread_pool(2)
    matrices = [PACKED[dtype](normal(32, 64, seed=seed)) for seed in range(3)]
    assert 0 < _native.time_matmul(matrices, 4, pool, 2) < 1
    with pytest.raises(ValueError, match="matrices must not be empty"):
        _native.time_matmul([], 4, pool, 2)
    with pytest.raises(ValueError, match="must have the same shape"):
        _native.time_matmul([*matrices, PACKED[dtype](normal(33, 64))], 4, pool, 2)


def test_memory_of_the_last_matrix_is_used_again_and_that_of_an_earlier_one_is_not() -> None:
    def pack() -> _native.PackedI8:
        return _native.PackedI8(normal(512, 256))  # large enough for a slab, whatever lies in it already

    def start(packed: _native.PackedI8) -> int:
        return packed.buffers[0].ctypes.data

    first, second = pack(), pack()
    found = start(second)
    del second
    second = pack()
    assert start(second) == found
    del first
    third = pack()
    assert abs(start(third) - found) >= second.buffers[0].nbytes
    np.testing.assert_array_equal(second.unpack(), third.unpack())
