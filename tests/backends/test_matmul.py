"""The matrix kernels, on every instruction set this processor has, against NumPy.

int8 products are compared bit for bit with the arithmetic that numpy_ref.py specifies. float32 products are
compared with a chain of fused multiply-adds. "portable" has none: it rounds the product first.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.backends.numpy_ref import QUANT_GROUP, NumpyBackend, fused_multiply_add, quantize_rows
from octavo.backends.ops import F32

ISAS = _native.available_isas()
PACKED: dict[str, type[_native.PackedI8] | type[_native.PackedF32]] = {
    "int8": _native.PackedI8,
    "float32": _native.PackedF32,
}
SHAPES = [  # rows, in, out
    (1, 1, 1),
    (2, 63, 15),
    (3, 64, 16),
    (4, 65, 17),
    (5, 576, 33),
    (6, 1536, 31),
    (7, 128, 960),
    (9, 130, 64),
    (16, 576, 48),
    (31, 65, 32),
    (33, 192, 100),
    (100, 64, 15),
]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> F32:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def multiply_add(isa: str, x: F32, y: F32, z: F32) -> F32:
    return x * y + z if isa == "portable" else fused_multiply_add(x, y, z)


def expected_int8(isa: str, x: F32, weight: F32) -> F32:
    """x [R, in], weight [out, in] → [R, out]: exact integer sums, one chain over the groups."""
    w, w_scale = quantize_rows(weight)
    total = np.zeros((len(x), len(weight)), np.float32)  # [R, out]
    for start in range(0, x.shape[1], QUANT_GROUP):
        q, scale = quantize_rows(x[:, start : start + QUANT_GROUP])
        total = multiply_add(isa, q @ w[:, start : start + QUANT_GROUP].T, scale[:, None], total)
    return total * w_scale


def expected_float32(isa: str, x: F32, weight: F32) -> F32:
    total = np.zeros((len(x), len(weight)), np.float32)  # [R, out]
    for i in range(x.shape[1]):
        total = multiply_add(isa, x[:, i, None], weight[:, i], total)
    return total


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_int8_product_is_the_specified_arithmetic_bit_for_bit(isa: str, rows: int, k: int, n: int) -> None:
    x, weight = normal(rows, k, seed=1), normal(n, k, seed=2, scale=0.05)
    y = _native.matmul(_native.PackedI8(weight), x, isa=isa)
    np.testing.assert_array_equal(y, expected_int8(isa, x, weight))
    if isa != "portable":
        np.testing.assert_array_equal(y, NumpyBackend().matrix(weight, "int8").multiply(x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_float32_product_is_one_ascending_chain_bit_for_bit(isa: str, rows: int, k: int, n: int) -> None:
    x, weight = normal(rows, k, seed=1), normal(n, k, seed=2, scale=0.05)
    y = _native.matmul(_native.PackedF32(weight), x, isa=isa)
    np.testing.assert_array_equal(y, expected_float32(isa, x, weight))


@pytest.mark.parametrize("dtype", PACKED)
def test_instruction_sets_with_fused_multiply_add_agree_bit_for_bit(dtype: str) -> None:
    x, matrix = normal(19, 200), PACKED[dtype](normal(77, 200, seed=1), normal(77, 200, seed=2))
    results = [_native.matmul(matrix, x, act="gelu_tanh", isa=isa) for isa in ISAS if isa != "portable"]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", PACKED)
def test_a_row_does_not_depend_on_the_other_rows_or_the_workers(dtype: str, isa: str) -> None:
    x, matrix = normal(100, 130), PACKED[dtype](normal(105, 130, seed=1))
    whole = _native.matmul(matrix, x, isa=isa)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 33):
        for num_workers in (1, 2, 3, 8, 64):
            part = _native.matmul(matrix, x[100 - rows :], isa=isa, num_workers=num_workers)
            np.testing.assert_array_equal(part, whole[100 - rows :], err_msg=f"{rows=} {num_workers=}")


@pytest.mark.parametrize("dtype", PACKED)
def test_rows_beyond_one_cache_block_are_all_computed(dtype: str) -> None:
    x, matrix = normal(700, 640), PACKED[dtype](normal(40, 640, seed=1))
    alone = [_native.matmul(matrix, x[r : r + 1])[0] for r in range(0, 700, 33)]
    for num_workers in (1, 3, 8, 12, 50):
        whole = _native.matmul(matrix, x, num_workers=num_workers)
        np.testing.assert_array_equal(whole[::33], alone)
    assert np.isfinite(whole).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("n", [16, 23, 49])
def test_bias_then_residual_are_added_to_the_product(dtype: str, n: int, isa: str) -> None:
    x, matrix, bias, residual = normal(11, 70), PACKED[dtype](normal(n, 70)), normal(n), normal(11, n, seed=3)
    plain = _native.matmul(matrix, x, isa=isa)
    np.testing.assert_array_equal(_native.matmul(matrix, x, bias=bias, isa=isa), plain + bias)
    np.testing.assert_array_equal(_native.matmul(matrix, x, residual=residual, isa=isa), plain + residual)
    both = _native.matmul(matrix, x, bias=bias, residual=residual, isa=isa)
    np.testing.assert_array_equal(both, plain + bias + residual)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_gated_product_is_act_of_gate_times_up(dtype: str, width: int, act: str, isa: str) -> None:
    gate, up, x = normal(width, 70, seed=1), normal(width, 70, seed=2), normal(13, 70)
    y = _native.matmul(PACKED[dtype](gate, up), x, act=act, isa=isa)
    g = _native.matmul(PACKED[dtype](gate), x, isa=isa).astype(np.float64)
    u = _native.matmul(PACKED[dtype](up), x, isa=isa).astype(np.float64)
    s = sigmoid(g) if act == "silu" else sigmoid(2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
    # Far out gelu_tanh is tiny, and its relative error is the exponent's absolute error: |2u| ulp.
    np.testing.assert_allclose(y, g * s * u, rtol=2e-6 if act == "silu" else 1e-4, atol=2e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_activations_reach_their_limits(act: str, isa: str) -> None:
    x = np.array([[-3e38], [-1e9], [-200.0], [0.0], [200.0], [1e9], [3e38]], np.float32)
    one = np.ones((1, 1), np.float32)
    y = _native.matmul(_native.PackedF32(one, one), x, act=act, isa=isa)
    np.testing.assert_array_equal(y[3:], [[0.0], [40000.0], [np.float32(1e9) ** 2], [np.inf]])
    np.testing.assert_allclose(y[:3], 0.0, atol=1e-30)


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_integers_do_not_saturate(isa: str) -> None:
    signs = np.where(np.arange(QUANT_GROUP) % 3 == 0, -1.0, 1.0)
    weight = np.stack([np.ones(QUANT_GROUP), -np.ones(QUANT_GROUP), signs]).astype(np.float32) * 127
    x = np.stack([np.ones(QUANT_GROUP), signs]).astype(np.float32) * 127
    y = _native.matmul(_native.PackedI8(weight), x, isa=isa)
    np.testing.assert_array_equal(y, x @ weight.T)  # up to 64 · 127²: exact in float32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", PACKED)
def test_zero_rows_and_zero_weights_give_zero(dtype: str, isa: str) -> None:
    x, weight = normal(5, 96), normal(20, 96)
    x[2], weight[7] = 0.0, 0.0
    y = _native.matmul(PACKED[dtype](weight), x, isa=isa)
    assert not y[2].any()
    assert not y[:, 7].any()
    assert np.count_nonzero(y) == 4 * 19


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_harms_no_other_row(dtype: str, poison: float, isa: str) -> None:
    x, matrix = normal(20, 130), PACKED[dtype](normal(33, 130))
    clean = _native.matmul(matrix, x, isa=isa)
    x[11, 129] = poison
    y = _native.matmul(matrix, x, isa=isa)
    assert not np.isfinite(y[11]).any()
    others = np.arange(20) != 11
    np.testing.assert_array_equal(y[others], clean[others])


@pytest.mark.parametrize("isa", ISAS)
def test_int8_keeps_its_precision_at_every_magnitude(isa: str) -> None:
    x, weight = normal(4, 64), normal(8, 64)
    matrix = _native.PackedI8(weight)
    plain = _native.matmul(matrix, x, isa=isa)
    for exponent in (-100, -20, 20, 100):  # powers of two change no rounding
        factor = np.float32(2.0**exponent)
        np.testing.assert_array_equal(_native.matmul(matrix, x * factor, isa=isa), plain * factor)
    tiny = x * np.float32(2.0**-125)  # its scale would be subnormal
    assert not _native.matmul(matrix, tiny, isa=isa).any()
    huge = np.full((1, 64), 1e33, np.float32)
    expected = expected_int8(isa, huge, weight)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(_native.matmul(matrix, huge, isa=isa), expected)
