"""The counter-based uniform numbers."""

from __future__ import annotations

import math
from itertools import islice

from octavo.sampling.random import SeedStream, bits, stream_key, uniform, uniforms


def test_bits_are_the_published_splitmix64_sequence() -> None:
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [bits(1234567, i) for i in range(5)] == expected


def test_uniform_is_the_upper_53_bits_as_a_fraction() -> None:
    assert uniform(1234567, 0) == (6457827717110365317 >> 11) / 2**53
    assert uniform(1234567, 4) == (16408922859458223821 >> 11) / 2**53


def test_uniform_never_reaches_one_even_for_all_bits_set() -> None:
    assert ((2**64 - 1) >> 11) * 2.0**-53 < 1.0
    assert all(0.0 <= uniform(stream_key(s), p) < 1.0 for s in range(50) for p in range(50))


def test_numbers_fill_the_unit_interval_evenly() -> None:
    key, num, num_bins = stream_key(7), 64_000, 16
    counts = [0] * num_bins
    for position in range(num):
        counts[int(uniform(key, position) * num_bins)] += 1
    expected = num / num_bins
    sigma = math.sqrt(expected * (1 - 1 / num_bins))
    assert all(abs(count - expected) < 4 * sigma for count in counts), counts


def test_neighbouring_seeds_choices_and_positions_are_not_correlated() -> None:
    def correlation(a: list[float], b: list[float]) -> float:
        return sum((x - 0.5) * (y - 0.5) for x, y in zip(a, b, strict=True)) * 12 / len(a)

    num = 10_000
    base = [uniform(stream_key(1, 0), p) for p in range(num)]
    next_seed = [uniform(stream_key(2, 0), p) for p in range(num)]
    next_index = [uniform(stream_key(1, 1), p) for p in range(num)]
    bound = 4 / math.sqrt(num)
    assert abs(correlation(base, next_seed)) < bound
    assert abs(correlation(base, next_index)) < bound
    assert abs(correlation(base[:-1], base[1:])) < bound


def test_keys_of_seeds_and_choices_are_distinct() -> None:
    keys = {stream_key(seed, index) for seed in range(-100, 100) for index in range(50)}
    assert len(keys) == 200 * 50


def test_negative_and_large_seeds_are_taken_modulo_2_to_the_64() -> None:
    assert stream_key(-1) == stream_key(2**64 - 1)
    assert stream_key(-1) != stream_key(1)


def test_seed_stream_repeats_for_one_engine_seed_and_differs_between_two() -> None:
    a, b, c = SeedStream(0), SeedStream(0), SeedStream(1)
    first = [a.next() for _ in range(100)]
    assert first == [b.next() for _ in range(100)]
    assert len(set(first)) == 100
    assert not set(first) & {c.next() for _ in range(100)}
    assert all(0 <= seed < 2**63 for seed in first)


def test_uniforms_start_with_the_position_s_own_and_do_not_repeat() -> None:
    first = list(islice(uniforms(5, 3), 100))
    assert first[0] == uniform(5, 3)
    assert len(set(first)) == 100
    assert first == list(islice(uniforms(5, 3), 100))
    assert not set(first) & set(islice(uniforms(5, 4), 100))
    assert abs(sum(first) / 100 - 0.5) < 4 * (1 / 12 / 100) ** 0.5
