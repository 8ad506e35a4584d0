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
every_kind = pytest.mark.parametrize("kind", ["4", "4 low", "5", "5 low", "6", "8"])


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def grouped(kind: str, n: int, k: int, seed: int = 0) -> GroupedWeights:
    """Random weights: the kind is the bits of a code, and whether a group has a lowest value."""
    rng, bits = np.random.default_rng(seed), int(kind[0])
    codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    groups = k // (16 if bits == 6 else 32)
    scale, low = (rng.standard_normal((n, groups)).astype(np.float16) for _ in range(2))
    return GroupedWeights(codes, scale, low if "low" in kind else None, bits)


def parts(weight: GroupedWeights) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return weight.codes, weight.scale, weight.low


def pack(weight: GroupedWeights, up: GroupedWeights | None = None, threads: int = 1) -> _native.PackedGrouped:
    second = None if up is None else parts(up)
    return _native.PackedGrouped(parts(weight), second, bits=weight.bits, num_threads=threads)


def values(weight: GroupedWeights) -> F32:
    """The numbers the integers stand for, exactly: a code has at most 8 bits, a scale 11."""
    scale = np.repeat(weight.scale.astype(np.float32), weight.group, axis=1)  # [out, in]
    if weight.low is None:
        return scale * (weight.codes.astype(np.float32) - 2 ** (weight.bits - 1))
    return scale * weight.codes + np.repeat(weight.low.astype(np.float32), weight.group, axis=1)


def rounding_twice(x: F32, weight: GroupedWeights) -> F32:
    """The specified sum with a rounding after each multiplication."""
    total = np.zeros((len(x), len(weight.codes)), np.float32)  # [R, out]
    size = weight.group
    for g in range(x.shape[1] // size):
        group = slice(size * g, size * (g + 1))
        q, a_scale = quantize_rows(x[:, group])
        codes = weight.codes[:, group].astype(np.float32)
        if weight.low is None:
            codes -= 2 ** (weight.bits - 1)
        scaled = (q @ codes.T) * weight.scale[:, g].astype(np.float32)
        if weight.low is not None:
            scaled = scaled + weight.low[:, g].astype(np.float32) * q.sum(axis=1, keepdims=True)
        total = scaled * a_scale[:, None] + total
    return total


@each_isa
@every_kind
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_the_product_is_the_specified_arithmetic_bit_for_bit(
    kind: str, rows: int, k: int, n: int, isa: str
) -> None:
    x, weight = normal(rows, k), grouped(kind, n, k)
    expected = rounding_twice(x, weight) if isa == "portable" else GroupedMatrix(weight).multiply(x)
    np.testing.assert_array_equal(_native.matmul(pack(weight), x, isa=isa), expected)


@every_kind
def test_the_specification_is_close_to_the_exact_product(kind: str) -> None:
    x, weight = normal(40, 320), grouped(kind, 30, 320)
    size = weight.group
    exact = x.astype(np.float64) @ values(weight).astype(np.float64).T
    error = np.abs(GroupedMatrix(weight).multiply(x) - exact)
    assert error.max() < 0.02 * np.abs(exact).max()
    # Activations are off by at most half a step, so a product by that times the sum of |w| of the group.
    step = np.abs(x.reshape(40, -1, size)).max(axis=2) / 127  # [R, groups]
    bound = step @ np.abs(values(weight)).reshape(30, -1, size).sum(axis=2).T / 2
    assert (error <= bound * 1.001).all()


@each_isa
@every_kind
def test_a_row_does_not_depend_on_the_other_rows_or_the_workers(kind: str, isa: str) -> None:
    x, matrix = normal(100, 128), pack(grouped(kind, 105, 128))
    whole = _native.matmul(matrix, x, isa=isa)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 33):
        for num_workers in (1, 2, 3, 8, 64):
            part = _native.matmul(matrix, x[100 - rows :], isa=isa, num_workers=num_workers)
            np.testing.assert_array_equal(part, whole[100 - rows :], err_msg=f"{rows=} {num_workers=}")


@every_kind
def test_rows_beyond_one_cache_block_are_all_computed(kind: str) -> None:
    x, weight = normal(700, 640), grouped(kind, 40, 640)
    whole = _native.matmul(pack(weight), x, num_workers=3)
    np.testing.assert_array_equal(whole[::33], GroupedMatrix(weight).multiply(x[::33]))
    alone = [_native.matmul(pack(weight), x[r : r + 1])[0] for r in range(0, 700, 33)]
    np.testing.assert_array_equal(whole[::33], alone)


@each_isa
@every_kind
@pytest.mark.parametrize("n", [16, 23, 49])
def test_bias_then_residual_are_added_to_the_product(kind: str, n: int, isa: str) -> None:
    x, matrix, bias, residual = normal(11, 64), pack(grouped(kind, n, 64)), normal(n), normal(11, n, seed=3)
    plain = _native.matmul(matrix, x, isa=isa)
    both = _native.matmul(matrix, x, bias=bias, residual=residual, isa=isa)
    np.testing.assert_array_equal(both, plain + bias + residual)


@each_isa
@every_kind
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_gated_product_is_act_of_gate_times_up(kind: str, width: int, isa: str) -> None:
    gate, up, x = grouped(kind, width, 64, seed=1), grouped(kind, width, 64, seed=2), normal(13, 64)
    x *= np.float32(0.32 / (1 << gate.bits))  # results of about 1, where silu bends
    y = _native.matmul(pack(gate, up), x, act="silu", isa=isa)
    g, u = (_native.matmul(pack(w), x, isa=isa).astype(np.float64) for w in (gate, up))
    np.testing.assert_allclose(y, g * u / (1 + np.exp(-g)), rtol=2e-6, atol=2e-7)


@each_isa
@every_kind
def test_extreme_integers_do_not_saturate(kind: str, isa: str) -> None:
    signs = np.where(np.arange(32) % 3 == 0, -1.0, 1.0).astype(np.float32)
    x = np.stack([np.ones(32, np.float32), signs, -signs]) * np.float32(127)
    bits = int(kind[0])
    codes = np.stack([np.zeros(32), np.full(32, (1 << bits) - 1)]).astype(np.uint8)
    one = np.ones((2, 2 if bits == 6 else 1), np.float16)
    weight = GroupedWeights(codes, one, -one if "low" in kind else None, bits)
    np.testing.assert_array_equal(_native.matmul(pack(weight), x, isa=isa), x @ values(weight).T)


@each_isa
@every_kind
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_harms_no_other_row(kind: str, poison: float, isa: str) -> None:
    x, matrix = normal(20, 96), pack(grouped(kind, 33, 96))
    clean = _native.matmul(matrix, x, isa=isa)
    x[11, 95] = poison
    y = _native.matmul(matrix, x, isa=isa)
    assert not np.isfinite(y[11]).any()
    others = np.arange(20) != 11
    np.testing.assert_array_equal(y[others], clean[others])


@each_isa
@every_kind
def test_subnormal_scales_count(kind: str, isa: str) -> None:
    weight = grouped(kind, 20, 64)
    tiny = np.full_like(weight.scale, 2.0**-24)  # the smallest
    weight = GroupedWeights(weight.codes, tiny, None if weight.low is None else -tiny, weight.bits)
    x = np.full((1, 64), 127.0, np.float32)
    np.testing.assert_array_equal(
        _native.matmul(pack(weight), x, isa=isa)[0], np.float32(127) * values(weight).sum(axis=1)
    )


@every_kind
@pytest.mark.parametrize("shape", [(1, 32), (15, 64), (33, 576), (100, 96)])
def test_weights_come_back_exactly(kind: str, shape: tuple[int, int]) -> None:
    weight, up = grouped(kind, *shape), grouped(kind, *shape, seed=1)
    np.testing.assert_array_equal(pack(weight).unpack(), values(weight))
    np.testing.assert_array_equal(pack(weight, up).unpack(), np.concatenate([values(weight), values(up)]))
    np.testing.assert_array_equal(pack(weight, threads=3).unpack(), values(weight))


@pytest.mark.parametrize(
    ("kind", "group_bytes"),
    [("4", 18), ("4 low", 20), ("5", 22), ("5 low", 24), ("6", 2 * 14), ("8", 34)],
)
def test_sizes_are_those_of_the_codes_and_their_halves(kind: str, group_bytes: int) -> None:
    assert pack(grouped(kind, 64, 576)).nbytes == 64 * 18 * group_bytes
    assert (
        pack(grouped(kind, 17, 32), grouped(kind, 17, 32)).nbytes == 2 * 32 * group_bytes
    )  # two panels of 16 and 16
    backend = NumpyBackend()
    backend.grouped_matrix(grouped(kind, 64, 576))
    assert backend.num_weight_bytes == 64 * 18 * group_bytes


def damaged(**changes: object) -> GroupedWeights:
    weight = grouped("4 low", 6, 64)
    fields = {name: getattr(weight, name) for name in ("codes", "scale", "low", "bits")} | changes
    return GroupedWeights(**fields)  # type: ignore[arg-type]


REFUSED = {
    "a scale or lowest value of a weight group is NaN": damaged(scale=np.full((6, 2), np.nan, np.float16)),
    "value of a weight group is NaN or infinity": damaged(low=np.full((6, 2), np.inf, np.float16)),
    "a code does not fit the 4 bits": damaged(codes=np.full((6, 64), 16, np.uint8)),
    "a code does not fit the 5 bits": damaged(codes=np.full((6, 64), 32, np.uint8), low=None, bits=5),
    "no kernel for codes of 6 bits with a lowest": damaged(
        scale=np.ones((6, 4), np.float16), low=np.ones((6, 4), np.float16), bits=6
    ),
    "no kernel for codes of 3 bits": damaged(codes=np.zeros((6, 64), np.uint8), low=None, bits=3),
    "no kernel for codes of 7 bits": damaged(low=None, bits=7),
    "multiple of 32": damaged(codes=np.zeros((6, 65), np.uint8)),
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("make", [NativeBackend, NumpyBackend])
def test_damaged_weights_are_refused(make: Callable[[], Backend], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().grouped_matrix(REFUSED[message])


def test_wrong_arrays_are_refused() -> None:
    codes, scale, low = parts(grouped("4 low", 6, 64))
    for message, call in (
        ("0 by 64", lambda: _native.PackedGrouped((codes[:0], scale[:0], None), bits=4)),
        (
            "scale: has shape (5, 2), expected (6, 2)",
            lambda: _native.PackedGrouped((codes, scale[:5], low), bits=4),
        ),
        (
            "low: has shape (6, 1), expected (6, 2)",
            lambda: _native.PackedGrouped((codes, scale, low[:, :1]), bits=4),
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match="codes: must have dtype uint8"):
        _native.PackedGrouped((codes.astype(np.int8), scale, low), bits=4)
    with pytest.raises(TypeError, match="scale: must have dtype float16"):
        _native.PackedGrouped((codes, scale.astype(np.float32), low), bits=4)


@pytest.mark.parametrize("make", [NativeBackend, NumpyBackend])
def test_gate_and_up_must_have_one_form(make: Callable[[], Backend]) -> None:
    gate = grouped("4 low", 6, 64)
    for up in (grouped("4", 6, 64), grouped("5 low", 6, 64), grouped("4 low", 7, 64)):
        with pytest.raises(
            ValueError, match=r"gate \(6, 64\) of 4 bits with a lowest value and up .* must have the same"
        ):
            make().gated_grouped_matrix(gate, up)


class MixedModel:
    """Products of one array with weights of every kind, then one of the sum: two quantised forms side by side."""

    def __init__(self, backend: Backend, kind: str, num_tokens: int) -> None:
        self.table = backend.embedding(normal(num_tokens, 64), "int8")
        self.first = backend.grouped_matrix(grouped(kind, 64, 64, seed=1))
        self.second = backend.matrix(normal(64, 64, seed=2), "int8")
        self.third = backend.grouped_matrix(grouped("8" if kind == "6" else "6", 96, 64, seed=3))
        self.bias = backend.vector(normal(64))

    def forward(self, ops: Ops) -> Array:
        x = ops.embed(self.table)
        y = ops.linear(x, self.first, self.bias)
        return ops.linear(x, self.second, residual=y)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.linear(hidden, self.third)


@every_kind
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "portable"])
def test_a_compiled_model_mixes_weights_as_specified(kind: str, isa: str) -> None:
    rows, table = np.arange(20, dtype=np.int32), np.array([[0, 1]], np.int32)
    starts = np.array([0, 20], np.int32)
    results = []
    for backend in (NumpyBackend(), NativeBackend(isa=isa)):
        cache = KVCacheConfig(group_layers([FullAttentionSpec(1, 8)]), 2, 16, "fp32")
        runner = backend.compile(MixedModel(backend, kind, 20), cache, Limits(20, 1, 1, 2, 20))
        runner.forward(StepInputs(rows, rows, starts, starts[1:], np.zeros(1, np.int32), (table,)))
        results.append(runner.logits(rows).copy())
    assert results[0].shape == (20, 96)
    np.testing.assert_array_equal(results[0], results[1])


class Lookup:
    """A table of grouped weights that is the output matrix as well."""

    def __init__(self, backend: Backend, kind: str) -> None:
        self.table = backend.grouped_matrix(grouped(kind, 90, 96))

    def forward(self, ops: Ops) -> Array:
        return ops.embed(self.table)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.scale(hidden, 1.0)


@each_isa
@every_kind
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_packed_matrix_is_a_table_of_its_rows(kind: str, isa: str, num_threads: int) -> None:
    tokens = np.array([89, 0, 31, 32, 0, 64, 63], np.int32)
    for backend in (NumpyBackend(), NativeBackend(num_threads, isa)):
        expected = values(grouped(kind, 90, 96))[tokens]
        np.testing.assert_array_equal(looked_up(backend, kind, tokens), expected)
        with pytest.raises(ValueError, match="90"):
            looked_up(backend, kind, np.array([90], np.int32))


def looked_up(backend: Backend, kind: str, tokens: np.ndarray) -> F32:
    cache = KVCacheConfig(group_layers([FullAttentionSpec(1, 8)]), 2, 16, "fp32")
    runner = backend.compile(Lookup(backend, kind), cache, Limits(20, 1, 1, 2, 20))
    rows, table = np.arange(len(tokens), dtype=np.int32), np.array([[0, 1]], np.int32)
    starts = np.array([0, len(tokens)], np.int32)
    runner.forward(StepInputs(tokens, rows, starts, starts[1:], np.zeros(1, np.int32), (table,)))
    return runner.logits(rows).copy()


class NormedProduct:
    """norm(x) times grouped weights; with `apart` nothing can be done in one pass."""

    def __init__(self, backend: Backend, kind: str, apart: bool) -> None:
        self.table = backend.embedding(normal(20, 96), "float32")
        self.weight = backend.vector(normal(96, seed=1))
        self.matrix = backend.grouped_matrix(grouped(kind, 40, 96))
        self.apart = apart

    def forward(self, ops: Ops) -> Array:
        x = ops.rms_norm(ops.embed(self.table), self.weight, 1e-5)
        return ops.linear(ops.scale(x, 1.0) if self.apart else x, self.matrix)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.scale(hidden, 1.0)


@each_isa
@every_kind
def test_a_norm_that_quantises_gives_the_bits_of_both_apart(kind: str, isa: str) -> None:
    rows, table = np.arange(20, dtype=np.int32), np.array([[0, 1]], np.int32)
    starts = np.array([0, 20], np.int32)
    results = []
    for apart in (False, True):
        backend = NativeBackend(isa=isa)
        cache = KVCacheConfig(group_layers([FullAttentionSpec(1, 8)]), 2, 16, "fp32")
        runner = backend.compile(NormedProduct(backend, kind, apart), cache, Limits(20, 1, 1, 2, 20))
        runner.forward(StepInputs(rows, rows, starts, starts[1:], np.zeros(1, np.int32), (table,)))
        results.append(runner.logits(rows).copy())
    assert np.abs(results[0]).min(axis=1).max() > 0
    np.testing.assert_array_equal(results[0], results[1])
