"""The least time of a step, by hand: at 1 GB/s and 1 GOP/s bytes and operations are nanoseconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.models.config import ModelConfig

CONFIG = ModelConfig(
    "llama",
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
    intermediate_size=8,
    vocab_size=10,
    max_position=64,
)


@pytest.fixture
def least_ns(bench_module):
    """Of a step of one sequence at 10 tokens that decodes and one that reads its first 3."""
    limits = bench_module("limits")

    def measure(config, int8_gops=1.0, float32_gflops=1.0, kv_dtype="fp16"):
        layers, head = limits.Matrices(num_bytes=1000, num_weights=500), limits.Matrices(100, 50)
        meter = limits.Meter(config, "int8", kv_dtype, layers, head)
        step = limits.Step(np.array([1, 3]), np.array([10, 3]), num_logits=2)
        return 1e9 * meter.step_least_s(limits.Peaks(1, int8_gops, float32_gflops, read_gb_s=1.0), step)

    return measure


def test_a_step_takes_its_multiplications_where_they_take_longer(least_ns):
    layers, head = 2 * 4 * 500, 2 * 2 * 50
    attention = 4 * 2 * 4 * (10 + 1 + 2 + 3)  # two products of 2 heads of 4 over each token seen
    assert least_ns(CONFIG) == pytest.approx(layers + head + attention)


def test_a_step_takes_the_reading_of_memory_where_that_takes_longer(least_ns):
    keys_and_values = 2 * 4 * 2 * (10 + 3)
    assert least_ns(CONFIG, int8_gops=1e6, float32_gflops=1e6) == pytest.approx(1000 + 100 + keys_and_values)


def test_int8_keys_and_values_take_two_int8_operations_for_each(least_ns):
    attention = 4 * 2 * 4 * (10 + 1 + 2 + 3)
    assert least_ns(CONFIG, float32_gflops=1e6, kv_dtype="int8") == pytest.approx(4000 + 200 + 2 * attention)
    keys_and_values = 2 * (4 + 4) * (10 + 3)
    assert least_ns(CONFIG, int8_gops=1e6, kv_dtype="int8") == pytest.approx(1000 + 100 + keys_and_values)


def test_a_sliding_window_bounds_what_is_seen(least_ns):
    config = replace(CONFIG, sliding_window=2)
    assert least_ns(config) == pytest.approx(4000 + 200 + 32 * (2 + 1 + 2 + 2))
    assert least_ns(config, int8_gops=1e6, float32_gflops=1e6) == pytest.approx(1100 + 16 * (2 + 3))


def test_peaks_before_and_after_are_joined_by_the_higher_of_each(bench_module):
    peaks = bench_module("limits").Peaks
    assert peaks(2, 900.0, 200.0, 30.0).best(peaks(2, 800.0, 210.0, 60.0)) == peaks(2, 900.0, 210.0, 60.0)
