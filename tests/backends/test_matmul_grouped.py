"""Products with weights as quantised files store them: the kernels against the specification, bit for bit.

"portable" has no fused multiply-add: it rounds the product first, and is compared with that arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.numpy_grouped import GroupedMatrix
from octavo.backends.numpy_quant import quantize_rows
from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import F32, Array, Backend, GroupedWeights, KVCacheConfig, Limits, Ops, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec

ISAS = _native.available_isas()
SHAPES = [(1, 32, 1), (2, 64, 15), (5, 576, 33), (6, 1536, 31), (8, 96, 960), (31, 64, 32), (100, 32, 15)]
each_isa = pytest.mark.parametrize("isa", ISAS)
both_sizes = pytest.mark.parametrize("bits", [4, 8])


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def grouped(bits: int, n: int, k: int, seed: int = 0) -> GroupedWeights:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    scale, low = (rng.standard_normal((n, k // 32)).astype(np.float16) for _ in range(2))
    return GroupedWeights(codes, scale, low if bits == 4 else None)


def parts(weight: GroupedWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return weight.codes, weight.scale, weight.low


def pack(weight: GroupedWeights, up: GroupedWeights | None = None) -> _native.PackedGrouped:
    return _native.PackedGrouped(parts(weight), None if up is None else parts(up))


def values(weight: GroupedWeights) -> F32:
    """The numbers the integers stand for, exactly: a code has 4 or 8 bits, a scale 11."""
    scale = np.repeat(weight.scale.astype(np.float32), 32, axis=1)  # [out, in]
    if weight.low is None:
        return scale * (weight.codes.astype(np.float32) - 128)
    return scale * weight.codes + np.repeat(weight.low.astype(np.float32), 32, axis=1)


def rounding_twice(x: F32, weight: GroupedWeights) -> F32:
    """The specified sum with a rounding after each multiplication."""
    total = np.zeros((len(x), len(weight.codes)), np.float32)  # [R, out]
    for g in range(x.shape[1] // 32):
        q, a_scale = quantize_rows(x[:, 32 * g : 32 * g + 32])
        codes = weight.codes[:, 32 * g : 32 * g + 32].astype(np.float32)
        scaled = (q @ (codes if weight.bits == 4 else codes - 128).T) * weight.scale[:, g].astype(np.float32)
        if weight.low is not None:
            scaled = scaled + weight.low[:, g].astype(np.float32) * q.sum(axis=1, keepdims=True)
        total = scaled * a_scale[:, None] + total
    return total


@each_isa
@both_sizes
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_the_product_is_the_specified_arithmetic_bit_for_bit(
    bits: int, rows: int, k: int, n: int, isa: str
) -> None:
    x, weight = normal(rows, k), grouped(bits, n, k)
    expected = rounding_twice(x, weight) if isa == "portable" else GroupedMatrix(weight).multiply(x)
    np.testing.assert_array_equal(_native.matmul(pack(weight), x, isa=isa), expected)


@both_sizes
def test_the_specification_is_close_to_the_exact_product(bits: int) -> None:
    x, weight = normal(40, 320), grouped(bits, 30, 320)
    exact = x.astype(np.float64) @ values(weight).astype(np.float64).T
    error = np.abs(GroupedMatrix(weight).multiply(x) - exact)
    assert error.max() < 0.02 * np.abs(exact).max()
    # Activations are off by at most half a step, so a product by that times the sum of |w| of the group.
    step = np.abs(x.reshape(40, 10, 32)).max(axis=2) / 127  # [R, groups]
    bound = step @ np.abs(values(weight)).reshape(30, 10, 32).sum(axis=2).T / 2
    assert (error <= bound * 1.001).all()


@each_isa
@both_sizes
def test_a_row_does_not_depend_on_the_other_rows_or_the_workers(bits: int, isa: str) -> None:
    x, matrix = normal(100, 128), pack(grouped(bits, 105, 128))
    whole = _native.matmul(matrix, x, isa=isa)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 33):
        for num_workers in (1, 2, 3, 8, 64):
            part = _native.matmul(matrix, x[100 - rows :], isa=isa, num_workers=num_workers)
            np.testing.assert_array_equal(part, whole[100 - rows :], err_msg=f"{rows=} {num_workers=}")


@both_sizes
def test_rows_beyond_one_cache_block_are_all_computed(bits: int) -> None:
    x, weight = normal(700, 640), grouped(bits, 40, 640)
    whole = _native.matmul(pack(weight), x, num_workers=3)
    np.testing.assert_array_equal(whole[::33], GroupedMatrix(weight).multiply(x[::33]))
    alone = [_native.matmul(pack(weight), x[r : r + 1])[0] for r in range(0, 700, 33)]
    np.testing.assert_array_equal(whole[::33], alone)


@each_isa
@both_sizes
@pytest.mark.parametrize("n", [16, 23, 49])
def test_bias_then_residual_are_added_to_the_product(bits: int, n: int, isa: str) -> None:
    x, matrix, bias, residual = normal(11, 64), pack(grouped(bits, n, 64)), normal(n), normal(11, n, seed=3)
    plain = _native.matmul(matrix, x, isa=isa)
    both = _native.matmul(matrix, x, bias=bias, residual=residual, isa=isa)
    np.testing.assert_array_equal(both, plain + bias + residual)


@each_isa
@both_sizes
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_gated_product_is_act_of_gate_times_up(bits: int, width: int, isa: str) -> None:
    gate, up, x = grouped(bits, width, 64, seed=1), grouped(bits, width, 64, seed=2), normal(13, 64)
    x *= np.float32(0.02 if bits == 4 else 0.002)  # results of about 1, where silu bends
    y = _native.matmul(pack(gate, up), x, act="silu", isa=isa)
    g, u = (_native.matmul(pack(w), x, isa=isa).astype(np.float64) for w in (gate, up))
    np.testing.assert_allclose(y, g * u / (1 + np.exp(-g)), rtol=2e-6, atol=2e-7)


@each_isa
@both_sizes
def test_extreme_integers_do_not_saturate(bits: int, isa: str) -> None:
    signs = np.where(np.arange(32) % 3 == 0, -1.0, 1.0).astype(np.float32)
    x = np.stack([np.ones(32, np.float32), signs, -signs]) * np.float32(127)
    codes = np.stack([np.zeros(32), np.full(32, (1 << bits) - 1)]).astype(np.uint8)
    one = np.ones((2, 1), np.float16)
    weight = GroupedWeights(codes, one, -one if bits == 4 else None)
    np.testing.assert_array_equal(_native.matmul(pack(weight), x, isa=isa), x @ values(weight).T)


@each_isa
@both_sizes
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_harms_no_other_row(bits: int, poison: float, isa: str) -> None:
    x, matrix = normal(20, 96), pack(grouped(bits, 33, 96))
    clean = _native.matmul(matrix, x, isa=isa)
    x[11, 95] = poison
    y = _native.matmul(matrix, x, isa=isa)
    assert not np.isfinite(y[11]).any()
    others = np.arange(20) != 11
    np.testing.assert_array_equal(y[others], clean[others])


@each_isa
@both_sizes
def test_subnormal_scales_count(bits: int, isa: str) -> None:
    weight = grouped(bits, 20, 64)
    tiny = np.full((20, 2), 2.0**-24, np.float16)  # the smallest
    weight = GroupedWeights(weight.codes, tiny, None if bits == 8 else -tiny)
    x = np.full((1, 64), 127.0, np.float32)
    np.testing.assert_array_equal(
        _native.matmul(pack(weight), x, isa=isa)[0], np.float32(127) * values(weight).sum(axis=1)
    )


@both_sizes
@pytest.mark.parametrize("shape", [(1, 32), (15, 64), (33, 576), (100, 96)])
def test_weights_come_back_exactly(bits: int, shape: tuple[int, int]) -> None:
    weight, up = grouped(bits, *shape), grouped(bits, *shape, seed=1)
    np.testing.assert_array_equal(pack(weight).unpack(), values(weight))
    np.testing.assert_array_equal(pack(weight, up).unpack(), np.concatenate([values(weight), values(up)]))
    alone = pack(weight).unpack()
    threaded = _native.PackedGrouped(parts(weight), None, 3).unpack()
    np.testing.assert_array_equal(threaded, alone)


def test_sizes_are_those_of_the_codes_and_their_halves() -> None:
    assert pack(grouped(4, 64, 576)).nbytes == 64 * 576 * 5 // 8
    assert pack(grouped(8, 64, 576)).nbytes == 64 * 576 * 17 // 16
    assert pack(grouped(4, 17, 32), grouped(4, 17, 32)).nbytes == 2 * 32 * 20  # panels of 16 and 16 columns
    for bits, size in ((4, 64 * 576 * 5 // 8), (8, 64 * 576 * 17 // 16)):
        backend = NumpyBackend()
        backend.grouped_matrix(grouped(bits, 64, 576))
        assert backend.num_weight_bytes == size


def damaged(**changes: object) -> GroupedWeights:
    weight = grouped(4, 6, 64)
    fields = {"codes": weight.codes, "scale": weight.scale, "low": weight.low, **changes}
    return GroupedWeights(**fields)  # type: ignore[arg-type]


REFUSED = {
    "a scale or lowest value of a weight group is NaN": damaged(scale=np.full((6, 2), np.nan, np.float16)),
    "value of a weight group is NaN or infinity": damaged(low=np.full((6, 2), np.inf, np.float16)),
    "a code is above 15": damaged(codes=np.full((6, 64), 16, np.uint8)),
    "multiple of 32": damaged(codes=np.zeros((6, 65), np.uint8)),
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("make", [NativeBackend, NumpyBackend])
def test_damaged_weights_are_refused(make: Callable[[], Backend], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().grouped_matrix(REFUSED[message])


def test_wrong_arrays_are_refused() -> None:
    codes, scale, low = parts(grouped(4, 6, 64))
    for message, call in (
        ("0 by 64", lambda: _native.PackedGrouped((codes[:0], scale[:0], None))),
        ("scale: has shape (5, 2), expected (6, 2)", lambda: _native.PackedGrouped((codes, scale[:5], low))),
        ("low: has shape (6, 1), expected (6, 2)", lambda: _native.PackedGrouped((codes, scale, low[:, :1]))),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match="codes: must have dtype uint8"):
        _native.PackedGrouped((codes.astype(np.int8), scale, low))
    with pytest.raises(TypeError, match="scale: must have dtype float16"):
        _native.PackedGrouped((codes, scale.astype(np.float32), low))


@pytest.mark.parametrize("make", [NativeBackend, NumpyBackend])
def test_gate_and_up_must_have_one_form(make: Callable[[], Backend]) -> None:
    with pytest.raises(ValueError, match="bits"):
        make().gated_grouped_matrix(grouped(4, 6, 64), grouped(8, 6, 64))
    with pytest.raises(ValueError, match=r"shape"):
        make().gated_grouped_matrix(grouped(4, 6, 64), grouped(4, 7, 64))


class MixedModel:
    """Products of one array with weights of every kind, then one of the sum: two quantised forms side by side."""

    def __init__(self, backend: Backend, bits: int, num_tokens: int) -> None:
        self.table = backend.embedding(normal(num_tokens, 64), "int8")
        self.first = backend.grouped_matrix(grouped(bits, 64, 64, seed=1))
        self.second = backend.matrix(normal(64, 64, seed=2), "int8")
        self.third = backend.grouped_matrix(grouped(12 - bits, 96, 64, seed=3))
        self.bias = backend.vector(normal(64))

    def forward(self, ops: Ops) -> Array:
        x = ops.embed(self.table)
        y = ops.linear(x, self.first, self.bias)
        return ops.linear(x, self.second, residual=y)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.linear(hidden, self.third)


@both_sizes
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "portable"])
def test_a_compiled_model_mixes_weights_as_specified(bits: int, isa: str) -> None:
    rows, table = np.arange(20, dtype=np.int32), np.array([[0, 1]], np.int32)
    starts = np.array([0, 20], np.int32)
    results = []
    for backend in (NumpyBackend(), NativeBackend(isa=isa)):
        cache = KVCacheConfig(group_layers([FullAttentionSpec(1, 8)]), 2, 16, "fp32")
        runner = backend.compile(MixedModel(backend, bits, 20), cache, Limits(20, 1, 1, 2, 20))
        runner.forward(StepInputs(rows, rows, starts, starts[1:], np.zeros(1, np.int32), (table,)))
        results.append(runner.logits(rows).copy())
    assert results[0].shape == (20, 96)
    np.testing.assert_array_equal(results[0], results[1])


class NormedProduct:
    """norm(x) times grouped weights; with `apart` nothing can be done in one pass."""

    def __init__(self, backend: Backend, bits: int, apart: bool) -> None:
        self.table = backend.embedding(normal(20, 96), "float32")
        self.weight = backend.vector(normal(96, seed=1))
        self.matrix = backend.grouped_matrix(grouped(bits, 40, 96))
        self.apart = apart

    def forward(self, ops: Ops) -> Array:
        x = ops.rms_norm(ops.embed(self.table), self.weight, 1e-5)
        return ops.linear(ops.scale(x, 1.0) if self.apart else x, self.matrix)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.scale(hidden, 1.0)


@each_isa
@both_sizes
def test_a_norm_that_quantises_gives_the_bits_of_both_apart(bits: int, isa: str) -> None:
    rows, table = np.arange(20, dtype=np.int32), np.array([[0, 1]], np.int32)
    starts = np.array([0, 20], np.int32)
    results = []
    for apart in (False, True):
        backend = NativeBackend(isa=isa)
        cache = KVCacheConfig(group_layers([FullAttentionSpec(1, 8)]), 2, 16, "fp32")
        runner = backend.compile(NormedProduct(backend, bits, apart), cache, Limits(20, 1, 1, 2, 20))
        runner.forward(StepInputs(rows, rows, starts, starts[1:], np.zeros(1, np.int32), (table,)))
        results.append(runner.logits(rows).copy())
    assert np.abs(results[0]).min(axis=1).max() > 0
    np.testing.assert_array_equal(results[0], results[1])
