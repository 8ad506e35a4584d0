"""StopStrings: finds stop strings in a text that arrives in pieces, and says what may be shown already.

Which of several stop strings wins does not depend on how the text is cut: the one that is complete first;
of those complete at the same character, the longest. So the matcher never waits for a longer match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that is final now, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """One per choice. After a match, or flush(), it is spent."""

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        """No stop string may be empty."""
        self._stop = tuple(stop)
        self._include = include_in_output
        self._tail = ""  # longest suffix of the text so far that is a proper prefix of a stop string

    def push(self, text: str, *, is_armed: bool = True) -> StopResult:
        """Take more text, return what can be shown. A stop string completed by text that was pushed with
        is_armed False does not count (min_tokens); one that only began there does."""
        if not self._stop or not text:
            return StopResult(text)
        window = self._tail + text
        shown = len(self._tail) if self._include else 0  # characters of the window given out before
        match = self._find(window, len(self._tail)) if is_armed else None
        if match is not None:
            end, matched = match
            self._tail = ""
            return StopResult(window[shown : end if self._include else end - len(matched)], matched)
        self._tail = window[len(window) - self._num_held(window) :]
        return StopResult(window[shown:] if self._include else window[: len(window) - len(self._tail)])

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held = "" if self._include else self._tail
        self._tail = ""
        return held

    def _find(self, window: str, num_old: int) -> tuple[int, str] | None:
        """(end, stop string) of the match that ends first, after the `num_old` characters seen before."""
        best: tuple[int, str] | None = None
        for stop in self._stop:
            start = window.find(stop, max(0, num_old + 1 - len(stop)))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = end, stop
        return best

    def _num_held(self, window: str) -> int:
        """Length of the longest suffix of the window that is a proper prefix of a stop string."""
        longest = min(len(window), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            suffix = window[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
