"""Rows beside their limits."""

from __future__ import annotations


def test_the_share_of_a_rate_and_of_a_time_is_one_at_the_limit_and_less_below(bench_module):
    row = bench_module("report").Row
    assert row("rate", 30.0, "GB/s", 40.0).share == 0.75
    assert row("time", 40.0, "ms a step", 30.0).share == 0.75
    assert row("count", 3.0, "").share is None
