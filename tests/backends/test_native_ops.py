"""Every row-wise operation of the native backend against the NumPy specification, on each instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.numpy_ref import NumpyBackend

ISAS = _native.available_isas()
ROWS = (1, 2, 7, 33)
TOLERANCE = 3e-6  # relative to the largest value: float32 sums in another order

FREQUENCIES = (10000.0 ** (-np.arange(64) / 64)).astype(np.float32)


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm(b, ops, x):
    return ops.rms_norm(x, b.vector(array(x_width(x), seed=1)), 1e-5)


def head_norm(b, ops, x):
    return ops.head_norm(x, b.vector(array(20, seed=1)), 1e-6)


def rope(b, ops, x):
    return ops.rope(x, b.rope(FREQUENCIES[:10], 1.25), 20)


def wide_rope(b, ops, x):
    return ops.rope(x, b.rope(FREQUENCIES[:30]), 60)


def scale(b, ops, x):
    return ops.scale(x, -0.7)


def add(b, ops, x):
    return ops.add(ops.scale(x, 3.0), x)


def softcap(b, ops, x):
    return ops.softcap(ops.scale(x, 20.0), 30.0)


def linear_float32(b, ops, x):
    return ops.linear(x, b.matrix(array(37, 180, seed=2), "float32"), b.vector(array(37, seed=3)))


def linear_int8(b, ops, x):
    return ops.linear(x, b.matrix(array(37, 180, seed=2), "int8"), b.vector(array(37, seed=3)))


def gated_float32(b, ops, x):
    gate, up = array(53, 180, seed=4) * 0.1, array(53, 180, seed=5)
    return ops.gated_linear(x, b.gated_matrix(gate, up, "float32"), "gelu_tanh")


def gated_int8(b, ops, x):
    gate, up = array(53, 180, seed=4) * 0.1, array(53, 180, seed=5)
    return ops.gated_linear(x, b.gated_matrix(gate, up, "int8"), "silu")


def residual_int8(b, ops, x):
    y = ops.scale(x, 2.0)
    return ops.linear(x, b.matrix(array(180, 180, seed=6), "int8"), residual=y)


def residual_of_itself(b, ops, x):
    return ops.linear(x, b.matrix(array(180, 180, seed=6), "float32"), residual=x)


def split_and_rejoin(b, ops, x):
    left, middle, right = ops.split(x, (60, 60, 60))
    return ops.add(ops.add(left, ops.rope(middle, b.rope(FREQUENCIES[:15]), 30)), right)


def shared_product(b, ops, x):
    """Two products of one array: it is quantised once."""
    left = ops.linear(x, b.matrix(array(40, 180, seed=7), "int8"))
    return ops.add(left, ops.linear(x, b.matrix(array(40, 180, seed=8), "int8")))


def x_width(x) -> int:
    return x.shape[1] if isinstance(x, np.ndarray) else x.width


CASES = [
    norm,
    head_norm,
    rope,
    wide_rope,
    scale,
    add,
    softcap,
    linear_float32,
    linear_int8,
    gated_float32,
    gated_int8,
    residual_int8,
    residual_of_itself,
    split_and_rejoin,
    shared_product,
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_operation_equals_numpy(rows_runner, case, num_rows, isa):
    native, reference = NativeBackend(2, isa), NumpyBackend()
    x = array(num_rows, 180)
    got = rows_runner(native, x, lambda ops, h: case(native, ops, h))
    want = rows_runner(reference, x, lambda ops, h: case(reference, ops, h))
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_a_row_does_not_depend_on_the_others_or_the_threads(rows_runner, case, isa):
    one, two = NativeBackend(1, isa), NativeBackend(2, isa)
    x = array(33, 180)
    together = rows_runner(two, x, lambda ops, h: case(two, ops, h))
    np.testing.assert_array_equal(rows_runner(one, x, lambda ops, h: case(one, ops, h)), together)
    np.testing.assert_array_equal(rows_runner(two, x[:5], lambda ops, h: case(two, ops, h)), together[:5])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_norm_quantised_in_its_own_pass_equals_two_passes(rows_runner, num_rows, isa):
    backend = NativeBackend(2, isa)
    matrix = backend.matrix(array(180, 180, seed=6), "int8")

    def one_pass(ops, x):
        normed = norm(backend, ops, x)
        return ops.add(ops.linear(normed, matrix), normed)

    def two_passes(ops, x):
        normed = norm(backend, ops, x)
        return ops.add(ops.linear(ops.scale(normed, 1.0), matrix), normed)

    def unread(ops, x):
        return ops.linear(norm(backend, ops, x), matrix)

    def unread_in_two(ops, x):
        return ops.linear(ops.scale(norm(backend, ops, x), 1.0), matrix)

    x = array(num_rows, 180)
    np.testing.assert_array_equal(rows_runner(backend, x, one_pass), rows_runner(backend, x, two_passes))
    np.testing.assert_array_equal(rows_runner(backend, x, unread), rows_runner(backend, x, unread_in_two))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_nan_stays_in_its_row(rows_runner, isa, dtype):
    backend = NativeBackend(2, isa)
    weight, x = array(48, 180), array(9, 180)
    clean = rows_runner(backend, x, lambda ops, h: ops.linear(h, backend.matrix(weight, dtype)))
    x[4, 7] = np.nan
    got = rows_runner(backend, x, lambda ops, h: ops.linear(h, backend.matrix(weight, dtype)))
    assert np.isnan(got[4]).all()
    np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("isa", ISAS)
def test_embedding_rounds_to_half_with_int8_only(rows_runner, function_model, isa):
    backend = NativeBackend(1, isa)
    values = array(4, 19)
    values[0, :4] = [65504.0, 1e-7, -0.0, 6.1e-5]
    exact = rows_runner(backend, values, lambda ops, h: ops.scale(h, 1.0))
    np.testing.assert_array_equal(exact, values)
    half = rows_runner(backend, values, lambda ops, h: ops.embed(backend.embedding(values, "int8")))
    np.testing.assert_array_equal(half, values.astype(np.float16).astype(np.float32))


def test_embedding_out_of_half_range_stays_float32(rows_runner):
    backend = NativeBackend(1)
    values = np.array([[1.0, 70000.0]], np.float32)
    got = rows_runner(backend, values, lambda ops, h: ops.embed(backend.embedding(values, "int8")))
    np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize("isa", ISAS)
def test_softcap_is_accurate_near_zero_and_saturates(rows_runner, isa):
    backend = NativeBackend(1, isa)
    x = np.array([[0.0, -0.0, 1e-6, -3e-3, 0.6, 0.7, -1e4, np.inf, -np.inf, np.nan]], np.float32)
    got = rows_runner(backend, x, lambda ops, h: ops.softcap(h, 1.0))
    np.testing.assert_allclose(got, np.tanh(x.astype(np.float64)), rtol=5e-7)


@pytest.mark.parametrize("isa", ISAS)
def test_rope_is_accurate_at_the_last_position_of_a_long_context(isa, function_model):
    backend = NativeBackend(2, isa)
    runner, inputs = far_rope(backend, function_model, 131071)
    runner.forward(inputs)
    angle = 131071 * FREQUENCIES[:8].astype(np.float64)
    want = np.concatenate([np.cos(angle) - 2 * np.sin(angle), 2 * np.cos(angle) + np.sin(angle)])
    np.testing.assert_allclose(runner.logits(np.zeros(1, np.int32))[0], want, rtol=0, atol=3e-7)


def far_rope(backend, function_model, position):
    """A runner that rotates (1, 2) at one far position, and the inputs of that step."""
    from octavo.backends.ops import KVCacheConfig, Limits, StepInputs
    from octavo.core.kv_groups import group_layers
    from octavo.core.kv_spec import FullAttentionSpec

    table = backend.embedding(np.array([[1.0] * 8 + [2.0] * 8], np.float32), "float32")
    rope = backend.rope(FREQUENCIES[:8])
    model = function_model(lambda ops: ops.rope(ops.embed(table), rope, 16))
    config = KVCacheConfig(group_layers([FullAttentionSpec(1, 16)]), 4, 256, "fp32")
    runner = backend.compile(model, config, Limits(4, 1, 1, 1024, 4))
    zero = np.zeros(1, np.int32)
    blocks = np.zeros((1, 1024), np.int32)
    starts, lens = np.array([0, 1], np.int32), np.array([position + 1], np.int32)
    return runner, StepInputs(zero, np.array([position], np.int32), starts, lens, zero, (blocks,))
