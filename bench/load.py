"""The requests every serving benchmark sends: random words in, a given number of tokens out. Standard library only,
so that a peer's environment can import it too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

WORDS = Path(__file__).with_name("words.txt").read_text().split()


def requests(count: int, seed: int) -> Iterator[tuple[str, int]]:
    """(prompt of 20 to 300 words, 16 to 200 output tokens)."""
    rng = random.Random(seed)
    for _ in range(count):
        yield words(rng.randint(20, 300), rng), rng.randint(16, 200)


def closed_loop(concurrency: int, turn: int) -> list[tuple[str, int]]:
    """4·c requests, at least 6; others in each turn, or a cache of prefixes would answer."""
    return list(requests(max(6, 4 * concurrency), seed=concurrency + 1000 * turn))


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
