"""Which token ends a sequence."""

from __future__ import annotations

from typing import Any

from octavo.core.finish import finish_reason_for_token
from octavo.core.sampling_params import SamplingParams

EOS = frozenset({2, 3})


def reason(token_id: int, count: int, limit: int | None = None, **fields: Any) -> str | None:
    return finish_reason_for_token(SamplingParams(**fields), EOS, token_id, count, limit)


def test_an_ordinary_token_goes_on() -> None:
    assert reason(7, 1) is None


def test_every_end_of_sequence_token_stops() -> None:
    assert [reason(t, 1) for t in (1, 2, 3, 4)] == [None, "stop", "stop", None]


def test_ignore_eos_goes_on_but_a_stop_token_still_stops() -> None:
    assert reason(2, 1, ignore_eos=True) is None
    assert reason(2, 1, ignore_eos=True, stop_token_ids=(2,)) == "stop"
    assert reason(9, 1, ignore_eos=True, stop_token_ids=(8, 9)) == "stop"


def test_the_last_token_allowed_ends_with_length() -> None:
    assert [reason(7, count, max_tokens=3) for count in (1, 2, 3)] == [None, None, "length"]


def test_without_max_tokens_only_the_given_limit_counts() -> None:
    assert reason(7, 10_000, max_tokens=None) is None
    assert [reason(7, count, limit=5, max_tokens=None) for count in (4, 5)] == [None, "length"]


def test_the_smaller_of_two_limits_counts() -> None:
    assert [reason(7, c, limit=2, max_tokens=3) for c in (1, 2)] == [None, "length"]
    assert [reason(7, c, limit=3, max_tokens=2) for c in (1, 2)] == [None, "length"]


def test_stop_wins_over_length() -> None:
    assert reason(2, 3, max_tokens=3) == "stop"


def test_nothing_stops_within_min_tokens() -> None:
    assert [reason(2, c, min_tokens=2, max_tokens=9) for c in (1, 2, 3)] == [None, None, "stop"]
    assert [reason(5, c, min_tokens=2, max_tokens=9, stop_token_ids=(5,)) for c in (2, 3)] == [None, "stop"]


def test_length_ends_within_min_tokens() -> None:
    assert reason(2, 2, min_tokens=2, max_tokens=2) == "length"
