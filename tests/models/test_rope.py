"""Rotary frequencies against values worked out by hand from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.errors import UnsupportedModelError
from octavo.models.config import RopeConfig
from octavo.models.rope import attention_scale, rope_frequencies


def test_default_frequencies_fall_from_one_by_powers_of_theta() -> None:
    np.testing.assert_allclose(
        rope_frequencies(RopeConfig(theta=10000.0), 8), [1.0, 0.1, 0.01, 0.001], rtol=1e-6
    )


def test_frequencies_are_float32() -> None:
    assert rope_frequencies(RopeConfig(), 64).dtype == np.float32


def test_linear_scaling_divides_every_frequency() -> None:
    rope = RopeConfig(theta=10000.0, kind="linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(rope, 8), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    """Turns over 200·π positions are 100, 10, 1, 0.1; of 2 to 50 turns the share kept is (turns-2)/48."""
    rope = RopeConfig(
        theta=10000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=2.0,
        high_freq_factor=50.0,
        original_max_position=628,
    )
    kept = (628 * 0.1 / (2 * math.pi) - 2.0) / 48.0
    blended = 0.1 * (kept + (1 - kept) / 8)
    np.testing.assert_allclose(rope_frequencies(rope, 8), [1.0, blended, 0.01 / 8, 0.001 / 8], rtol=1e-6)


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_ramps_between() -> None:
    """D = 16, theta = 100, original 64: 4 turns at pair 1.6 and 1 turn at pair 4.03, so the ramp is 1 … 5."""
    rope = RopeConfig(
        theta=100.0, kind="yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0, original_max_position=64
    )
    base = 100.0 ** -(np.arange(8) / 8)
    divided = np.array([0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    expected = base * (1 - divided) + base / 4 * divided
    np.testing.assert_allclose(rope_frequencies(rope, 16), expected, rtol=1e-6)


def test_yarn_with_a_ramp_of_no_width_is_a_step() -> None:
    rope = RopeConfig(theta=1e30, kind="yarn", factor=2.0, original_max_position=7)
    frequencies = rope_frequencies(rope, 8)
    assert np.isfinite(frequencies).all()
    np.testing.assert_allclose(frequencies[1:], (1e30 ** -(np.arange(1, 4) / 4)) / 2, rtol=1e-6)


def test_factors_divide_the_base_frequencies_one_by_one() -> None:
    rope = RopeConfig(theta=10000.0, factors=(1.0, 2.0, 4.0, 8.0))
    np.testing.assert_allclose(rope_frequencies(rope, 8), [1.0, 0.05, 0.0025, 0.000125], rtol=1e-6)


def test_factors_take_the_place_of_llama3_scaling_and_add_to_linear_scaling() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    plain = rope_frequencies(RopeConfig(factors=factors), 8)
    assert np.array_equal(rope_frequencies(RopeConfig(kind="llama3", factor=8.0, factors=factors), 8), plain)
    linear = rope_frequencies(RopeConfig(kind="linear", factor=2.0, factors=factors), 8)
    assert np.array_equal(linear, plain / 2)


def test_a_wrong_number_of_factors_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="3 rope factors for 4 rotary frequencies"):
        rope_frequencies(RopeConfig(factors=(1.0, 2.0, 3.0)), 8)


def test_an_odd_head_size_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="even head size, the model has 7"):
        rope_frequencies(RopeConfig(), 7)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeConfig(), 1.0),
        (RopeConfig(kind="llama3", factor=8.0, attention_factor=2.0), 1.0),
        (RopeConfig(kind="yarn", factor=1.0), 1.0),
        (RopeConfig(kind="yarn", factor=math.e), 1.1),
        (RopeConfig(kind="yarn", factor=4.0, attention_factor=1.25), 1.25),
    ],
)
def test_only_yarn_scales_the_attention(rope: RopeConfig, expected: float) -> None:
    assert attention_scale(rope) == pytest.approx(expected, rel=1e-12)
