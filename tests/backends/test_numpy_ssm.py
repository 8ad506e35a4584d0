"""The state-space specification against formulas written another way: sums over all earlier tokens, in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from octavo.backends.numpy_ssm import causal_conv, gated_rms_norm, selective_scan, silu, softplus
from octavo.backends.ops import Scan

LENGTH = 23


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scan_of(
    heads: int = 4, head_size: int = 6, groups: int = 2, state_size: int = 5, **limits: float
) -> Scan:
    decay, skip, bias = -np.exp(normal(heads, seed=1)), normal(heads, seed=2), normal(heads, seed=3)
    return Scan(heads, head_size, groups, state_size, decay, skip, bias, **limits)


def scan_inputs(scan: Scan, length: int = LENGTH) -> tuple[np.ndarray, ...]:
    """x, dt, b, c"""
    group_width = scan.num_groups * scan.state_size
    widths = (scan.num_heads * scan.head_size, scan.num_heads, group_width, group_width)
    return tuple(normal(length, width, seed=10 + i) for i, width in enumerate(widths))


def empty_state(scan: Scan) -> np.ndarray:
    return np.zeros((scan.num_heads, scan.state_size, scan.head_size), np.float32)


def attention_form(x, dt, b, c, scan: Scan) -> np.ndarray:
    """y[t] = Σ_{s ≤ t} (c[t]·b[s]) · d[s] · exp(Σ_{s < r ≤ t} d[r]·A) · x[s] + D·x[t], head by head."""
    out = np.empty(x.shape)
    for head in range(scan.num_heads):
        columns = slice(head * scan.head_size, (head + 1) * scan.head_size)
        group = head * scan.num_groups // scan.num_heads
        of_group = slice(group * scan.state_size, (group + 1) * scan.state_size)
        d = np.log1p(np.exp(dt[:, head].astype(float) + float(scan.dt_bias[head])))
        d = d.clip(scan.dt_min, scan.dt_max)
        for t in range(len(x)):
            total = float(scan.skip[head]) * x[t, columns].astype(float)
            for s in range(t + 1):
                kept = np.exp(float(scan.decay[head]) * d[s + 1 : t + 1].sum())
                score = c[t, of_group].astype(float) @ b[s, of_group].astype(float)
                total = total + score * d[s] * kept * x[s, columns]
            out[t, columns] = total
    return out


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("limits", [{}, {"dt_min": 0.4, "dt_max": 0.9}])
def test_the_recurrence_is_the_weighted_sum_over_all_earlier_tokens(groups, limits):
    scan = scan_of(groups=groups, **limits)
    inputs = scan_inputs(scan)
    expected = attention_form(*inputs, scan)
    np.testing.assert_allclose(
        selective_scan(*inputs, scan, empty_state(scan)), expected, rtol=1e-5, atol=1e-5
    )


def test_clamping_the_time_step_changes_the_result():
    scan = scan_of()
    inputs = scan_inputs(scan)
    free = selective_scan(*inputs, scan, empty_state(scan))
    clamped = dataclasses.replace(scan, dt_min=0.4, dt_max=0.9)
    assert np.abs(selective_scan(*inputs, clamped, empty_state(scan)) - free).max() > 0.1


@pytest.mark.parametrize("chunk", [1, 2, 7, 22])
def test_a_scan_in_chunks_is_the_same_bits(chunk):
    scan = scan_of()
    inputs, state = scan_inputs(scan), empty_state(scan)
    whole = selective_scan(*inputs, scan, state)
    again = empty_state(scan)
    parts = [
        selective_scan(*(part[start : start + chunk] for part in inputs), scan, again)
        for start in range(0, LENGTH, chunk)
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(again, state)


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_mixes_each_channel_with_its_last_inputs(taps, has_bias):
    channels = 5
    x, weight = normal(LENGTH, channels), normal(taps * channels, seed=1)
    bias = normal(channels, seed=2) if has_bias else None
    expected = np.zeros((LENGTH, channels))
    for t in range(LENGTH):
        for c in range(channels):
            total = float(bias[c]) if bias is not None else 0.0
            for age in range(min(taps, t + 1)):
                total += float(weight[(taps - 1 - age) * channels + c]) * float(x[t - age, c])
            expected[t, c] = total / (1.0 + np.exp(-total))
    inputs = np.zeros((taps - 1, channels), np.float32)
    np.testing.assert_allclose(causal_conv(x, inputs, weight, bias), expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(inputs, x[LENGTH - taps + 1 :])


@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_a_convolution_in_chunks_is_the_same_bits(chunk):
    """Also where a chunk is shorter than the inputs that are kept."""
    x, weight, bias = normal(LENGTH, 5), normal(20, seed=1), normal(5, seed=2)
    whole = causal_conv(x, np.zeros((3, 5), np.float32), weight, bias)
    inputs = np.zeros((3, 5), np.float32)
    parts = [causal_conv(x[t : t + chunk], inputs, weight, bias) for t in range(0, LENGTH, chunk)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(inputs, x[-3:])


def test_the_gated_norm_norms_each_group_by_itself():
    x, gate, weight = normal(3, 12), normal(3, 12, seed=1), normal(12, seed=2)
    y = gated_rms_norm(x, gate, weight, 1e-5, 4)
    product = x.astype(float) * gate / (1.0 + np.exp(-gate.astype(float)))
    for first in (0, 4, 8):
        part = product[:, first : first + 4]
        expected = part / np.sqrt((part**2).mean(axis=1, keepdims=True) + 1e-5) * weight[first : first + 4]
        np.testing.assert_allclose(y[:, first : first + 4], expected, rtol=1e-5, atol=1e-6)


def test_softplus_and_silu_stay_finite_far_out():
    far = np.array([-200.0, -20.0, 0.0, 20.0, 200.0], np.float32)
    np.testing.assert_allclose(softplus(far), [0.0, 2.0611537e-09, 0.6931472, 20.0, 200.0], rtol=1e-6)
    np.testing.assert_allclose(silu(far), [0.0, -4.1223074e-08, 0.0, 20.0, 200.0], rtol=1e-6)
