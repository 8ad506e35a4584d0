"""Uniform numbers that depend on (seed, choice, position) and on nothing else.

There is no generator state: number i of a choice is a function of i, so a sequence that was preempted and
recomputed, or moved to another batch, draws the same tokens again.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) with
Stafford's variant 13 of the mixing function. Output i of SplitMix64 is mix(key + (i + 1) · GAMMA), which
gives random access; the key is itself mixed from seed and choice. Not for cryptography.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


def _mix(z: int) -> int:
    """A bijection of 64-bit integers in which every input bit moves about half of the output bits."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def bits(key: int, position: int) -> int:
    """Output `position` of the SplitMix64 stream that starts at `key`; 64 bits."""
    return _mix((key + (position + 1) * _GAMMA) & _MASK)


def stream_key(seed: int, index: int = 0) -> int:
    """The key of choice `index` of a request with `seed` (any integer; taken modulo 2^64)."""
    return bits(bits(seed & _MASK, 0), index)


def uniform(key: int, position: int) -> float:
    """The number in [0, 1) for output position `position`: a multiple of 2^-53."""
    return (bits(key, position) >> 11) * 2.0**-53


def uniforms(key: int, position: int) -> Iterator[float]:
    """uniform(key, position), then others without end."""
    yield uniform(key, position)
    yield from (uniform(stream_key(key, attempt), position) for attempt in count(1))


class SeedStream:
    """Seeds for requests that bring none: a function of the engine's seed and the order of arrival."""

    def __init__(self, seed: int) -> None:
        self._key = stream_key(seed)
        self._num_drawn = 0

    def next(self) -> int:
        """The next seed; 0 <= seed < 2^63."""
        seed = bits(self._key, self._num_drawn) >> 1
        self._num_drawn += 1
        return seed
