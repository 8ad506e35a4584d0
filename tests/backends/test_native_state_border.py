"""State-space operations with sizes that do not fit are refused when they are recorded, by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.ops import KVCacheConfig, Limits, Scan, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec, MambaSpec

HEADS, HEAD_SIZE, STATE_SIZE, TAPS = 4, 8, 5, 3
INNER, CHANNELS = HEADS * HEAD_SIZE, HEADS * HEAD_SIZE + 2 * STATE_SIZE
SPEC = MambaSpec((TAPS - 1) * CHANNELS, INNER * STATE_SIZE)


@pytest.fixture
def backend():
    return NativeBackend(1)


@pytest.fixture
def record(backend, function_model):
    """record(operations, spec): compile operations(ops, u, dt, scan, layer) on a layer with that spec."""

    def compile_with(operations, spec=SPEC, scan_changes=None):
        layout = group_layers([spec])
        rows = backend.embedding(np.zeros((4, CHANNELS + HEADS), np.float32), "float32")
        heads = backend.vector(np.ones(HEADS, np.float32))
        scan = replace(Scan(HEADS, HEAD_SIZE, 1, STATE_SIZE, heads, heads, heads), **(scan_changes or {}))

        def forward(ops):
            u, dt = ops.split(ops.embed(rows), (CHANNELS, HEADS))
            return operations(ops, u, dt, scan, layout.layers[0])

        cache = KVCacheConfig(layout, 4, 16, "fp32")
        return backend.compile(function_model(forward), cache, Limits(4, 1, 1, 1, 4))

    return compile_with


def scan_all(ops, u, dt, scan, layer):
    x, b, c = ops.split(u, (INNER, STATE_SIZE, STATE_SIZE))
    return ops.ssm_scan(x, dt, b, c, scan, layer)


def test_the_right_sizes_compile(backend, record):
    weight = backend.vector(np.ones(TAPS * CHANNELS, np.float32))
    record(lambda ops, u, dt, scan, layer: scan_all(ops, ops.conv1d(u, weight, None, layer), dt, scan, layer))


@pytest.mark.parametrize(
    ("size", "bias_size", "message"),
    [
        (TAPS * CHANNELS - 1, None, "the weight a multiple of it"),
        ((TAPS + 1) * CHANNELS, None, f"4 taps of {CHANNELS} channels do not keep {2 * CHANNELS} floats"),
        (TAPS * CHANNELS, CHANNELS - 1, f"a bias must have {CHANNELS} values"),
    ],
)
def test_a_convolution_that_does_not_fit_is_refused(backend, record, size, bias_size, message):
    weight = backend.vector(np.ones(size, np.float32))
    bias = None if bias_size is None else backend.vector(np.ones(bias_size, np.float32))
    with pytest.raises(ValueError, match=message):
        record(lambda ops, u, dt, scan, layer: ops.conv1d(u, weight, bias, layer))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 7}, "4 heads of 7 columns"),
        ({"num_groups": 3}, "equal groups of heads"),
        ({"num_groups": 0}, "equal groups of heads"),
        ({"state_size": 6}, "equal groups of heads with 6 columns each"),
        ({"dt_min": 2.0, "dt_max": 1.0}, "dt_min <= dt_max"),
        ({"dt_min": float("nan")}, "dt_min <= dt_max"),
    ],
)
def test_a_scan_that_does_not_fit_is_refused(record, changes, message):
    with pytest.raises(ValueError, match=message):
        record(scan_all, scan_changes=changes)


def test_vectors_of_another_number_of_heads_are_refused(backend, record):
    short = backend.vector(np.ones(HEADS - 1, np.float32))
    for name in ("decay", "skip", "dt_bias"):
        with pytest.raises(ValueError, match="one value per head"):
            record(scan_all, scan_changes={name: short})


def test_a_state_of_another_size_is_refused(record):
    with pytest.raises(ValueError, match="the state of 32 columns is not 159 floats"):
        record(scan_all, MambaSpec(SPEC.conv_values, SPEC.ssm_values - 1))


@pytest.mark.parametrize(("width", "group_size"), [(INNER, 5), (INNER, 0), (INNER + 1, INNER)])
def test_a_gated_norm_that_does_not_fit_is_refused(backend, record, width, group_size):
    weight = backend.vector(np.ones(width, np.float32))

    def norm(ops, u, dt, scan, layer):
        x, _ = ops.split(u, (INNER, 2 * STATE_SIZE))
        return ops.gated_rms_norm(x, x, weight, 1e-5, group_size)

    with pytest.raises(ValueError, match="gated_rms_norm: "):
        record(norm)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ((1, 0, 10, 8), "group 1, storage 0 is not in a cache"),
        ((0, -1, 10, 8), "group 0, storage -1 is not in a cache"),
        ((0, 0, 10, 1 << 40), "does not fit blocks of 256 bytes"),
        ((0, 0, 10, 55), "does not fit blocks of 256 bytes"),
    ],
)
def test_a_state_outside_the_cache_is_refused(layer, message):
    cache = _native.KVCache(1, 4, 256, "fp32")
    limits = _native.ProgramLimits(1024, 4, 1, 4, 1, 1, 16)
    program = _native.Program(_native.thread_pool(1), None, cache, limits)
    weight = _native.Vector(np.ones(20, np.float32))
    x = _native.Slot(0, 16, abs(layer[2]))
    with pytest.raises(ValueError, match=message):
        program.conv1d(x, weight, None, _native.StateLayer(*layer), x)


@pytest.mark.parametrize("with_attention", [False, True])
def test_blocks_that_are_only_written_are_checked_too(backend, function_model, with_attention):
    """Writing alone once left the block of the first position unchecked, if it was that block's last."""
    layout = group_layers([FullAttentionSpec(1, 8)])
    rows = backend.embedding(np.zeros((40, 8), np.float32), "float32")
    cache = KVCacheConfig(layout, 4, 16, "fp32")

    def forward(ops):
        x = ops.embed(rows)
        ops.write_kv(x, x, layout.layers[0])
        return ops.paged_attention(x, layout.layers[0], 1.0) if with_attention else x

    runner = backend.compile(function_model(forward), cache, Limits(40, 1, 1, 3, 1))
    ids, zero = np.arange(17, dtype=np.int32), np.zeros(1, np.int32)
    table = np.array([[-1, 1, 2]], np.int32)
    starts, lens = np.array([0, 17], np.int32), np.array([17], np.int32)
    with pytest.raises(ValueError, match="block 0 of its table is -1"):
        runner.forward(StepInputs(ids, ids, starts, lens, zero, (table,)))
    last = np.array([15], np.int32)
    with pytest.raises(ValueError, match="block 0 of its table is -1"):
        runner.forward(StepInputs(last, last, np.array([0, 1], np.int32), last + 1, zero, (table,)))
