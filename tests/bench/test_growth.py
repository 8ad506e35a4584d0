"""How a curve of step times is judged."""

from __future__ import annotations

import pytest


def test_the_worst_local_exponent_is_that_of_the_steepest_pair(bench_module):
    growth = bench_module("growth")
    assert growth.worst_exponent([1, 2, 4, 8], [3, 3, 12, 24]) == pytest.approx(2.0)
    assert growth.worst_exponent([1, 2, 4], [5, 5, 5]) == 0.0


def test_the_fit_of_a_line_is_that_line(bench_module):
    assert bench_module("growth").linear_fit([1, 10, 100], [2.5, 7, 52]) == pytest.approx((2.0, 0.5))
