"""TextStops says the same as the matcher that works on text, whatever the tokens cut apart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.engine.text_stops import TextStops
from octavo.sampling.stop import StopStrings
from octavo.text.detokenize import IncrementalDetokenizer

PIECES = [b"a", b"b", b"ab", b"ba", b"", "ä".encode(), "ä".encode()[:1], "ä".encode()[1:], b"aaa"]
SPECIAL = 4


class Pieces:
    drops_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == SPECIAL else PIECES[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == SPECIAL


def test_only_the_newest_token_counts() -> None:
    stops = TextStops(Pieces(), SamplingParams(stop=("ab",)))
    assert [stops.ends([0, 1, 1][:n]) for n in (1, 2, 3)] == [False, True, False]
    assert stops.ends([0, SPECIAL, 1])
    assert not stops.ends([0, 1, SPECIAL])


def test_special_tokens_are_text_if_they_are_shown() -> None:
    shown = TextStops(Pieces(), SamplingParams(stop=("<s>", "ab"), skip_special_tokens=False))
    assert shown.ends([0, SPECIAL])
    assert not shown.ends([0, SPECIAL, 1])


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    stop=st.lists(st.text("abä", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_it_agrees_with_the_matcher_of_texts(token_ids: list[int], stop: list[str]) -> None:
    pieces = Pieces()
    stops = TextStops(pieces, SamplingParams(stop=tuple(stop)))
    matcher = StopStrings(stop)
    detokenizer = IncrementalDetokenizer(pieces.token_bytes, pieces.is_special)
    for end in range(1, len(token_ids) + 1):
        matched = matcher.push(detokenizer.push(token_ids[end - 1 : end])).matched
        assert stops.ends(token_ids[:end]) == (matched is not None)
        if matched is not None:
            return
