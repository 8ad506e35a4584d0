"""Stop strings: the same result however the text is cut, and nothing of a stop string shown too early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.stop import StopResult, StopStrings

TEXT = "once upon a ti"


def run(pieces: Iterable[str], stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """Pieces shown, and the stop string found."""
    matcher = StopStrings(stop, include_in_output=include)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return shown, matched
    shown.append(matcher.flush())
    return shown, None


def chunkings(text: str, max_cuts: int) -> Iterator[list[str]]:
    for num_cuts in range(max_cuts + 1):
        for cuts in combinations(range(1, len(text)), num_cuts):
            edges = [0, *cuts, len(text)]
            yield [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def first_complete(text: str, stop: list[str]) -> tuple[int, str] | None:
    """(end, stop string): what a reader who goes character by character meets first."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return end, max(found, key=len)
    return None


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_stop_string_at_every_offset_in_every_chunking(length: int) -> None:
    for start in range(len(TEXT) - length + 1):
        stop = TEXT[start : start + length]
        cut = TEXT.index(stop)
        for pieces in chunkings(TEXT, max_cuts=3):
            shown, matched = run(pieces, [stop])
            assert ("".join(shown), matched) == (TEXT[:cut], stop)
            shown, matched = run(pieces, [stop], include=True)
            assert ("".join(shown), matched) == (TEXT[: cut + length], stop)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_any_cut_gives_what_a_reader_meets_first(pieces: list[str], stop: list[str], include: bool) -> None:
    text = "".join(pieces)
    shown, matched = run(pieces, stop, include)
    expected = first_complete(text, stop)
    if expected is None:
        assert ("".join(shown), matched) == (text, None)
    else:
        end, winner = expected
        assert ("".join(shown), matched) == (text[: end if include else end - len(winner)], winner)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_exactly_the_longest_partial_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    matcher = StopStrings(stop)
    for i, char in enumerate(text):
        if matcher.push(char).matched is not None:
            return
        seen = text[: i + 1]
        held = max(
            (n for n in range(i + 2) for s in stop if n < len(s) and s.startswith(seen[len(seen) - n :])),
        )
        rest = StopStrings(stop)
        assert rest.push(seen).text == seen[: len(seen) - held]


def test_text_is_held_back_only_while_it_can_become_a_stop_string() -> None:
    matcher = StopStrings(["###", "#-"])
    assert matcher.push("a#") == StopResult("a")
    assert matcher.push("#") == StopResult("")
    assert matcher.push("b") == StopResult("##b")
    assert matcher.push("##") == StopResult("")
    assert matcher.flush() == "##"
    assert matcher.flush() == ""


def test_included_stop_strings_hold_nothing_back() -> None:
    matcher = StopStrings(["abc"], include_in_output=True)
    assert matcher.push("xa") == StopResult("xa")
    assert matcher.push("b") == StopResult("b")
    assert matcher.push("cd") == StopResult("c", "abc")


def test_the_string_complete_first_wins_and_of_equal_ends_the_longest() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert run(["xabc"], ["bc", "abc"]) == (["x"], "abc")
    assert run(["xab"], ["ab", "a"]) == (["x"], "a")


def test_the_first_of_two_occurrences_counts() -> None:
    assert run(["one.two.three"], ["."]) == (["one"], ".")


def test_without_stop_strings_everything_passes() -> None:
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_a_match_completed_while_not_armed_does_not_count_but_one_begun_there_does() -> None:
    matcher = StopStrings(["ab", "wxyz"])
    assert matcher.push("ab", is_armed=False) == StopResult("ab")
    assert matcher.push("_a", is_armed=False) == StopResult("_")
    assert matcher.push("bc") == StopResult("", "ab")


def test_a_match_inside_text_held_back_while_not_armed_does_not_count() -> None:
    matcher = StopStrings(["abcd", "bc"])
    assert matcher.push("abc", is_armed=False) == StopResult("")
    assert matcher.push("x") == StopResult("abcx")


def test_characters_beyond_ascii_match_whole() -> None:
    assert run(["日本", "語です"], ["語で"]) == (["日本", ""], "語で")
    assert run(["a👩‍", "💻b"], ["👩‍💻"]) == (["a", ""], "👩‍💻")
