"""Token deltas to text deltas: stop strings, log-probabilities, usage, several choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.delta import FinishReason, TokenDelta, TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.text.output import (
    RequestAssembler,
    TextDelta,
    TokenEntry,
    TokenText,
    Usage,
    describe_prompt,
    token_text,
)

END = 1000  # a special token
WORDS = {2000: b"hello", 2001: b" wor", 2002: b"ld", 2003: b"\xf0\x9f\x98", 2004: b"\x80!"}
PROMPT = [*b"prompt"]


class ByteTokens:
    """One token a byte, a few words, one special token."""

    def __init__(self, *, drops_first_space: bool = False) -> None:
        self.drops_first_space = drops_first_space

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == END:
            return b"<|end|>"
        return WORDS.get(token_id) or bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == END


def assembler(**fields: Any) -> RequestAssembler:
    return RequestAssembler(ByteTokens(), SamplingParams(max_tokens=None, **fields), PROMPT)


def delta(
    tokens: Sequence[int], finish_reason: FinishReason | None = None, index: int = 0, **fields: Any
) -> TokenDelta:
    return TokenDelta("r", index, tuple(tokens), finish_reason=finish_reason, **fields)


def push(one: RequestAssembler, *args: Any, **fields: Any) -> TextDelta:
    result = one.push(delta(*args, **fields))
    assert result is not None
    return result


def logprob(token_id: int, *top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, [(t, -0.5 - i) for i, t in enumerate(top)])


def splits(tokens: Sequence[int], max_cuts: int) -> Iterator[list[Sequence[int]]]:
    for num_cuts in range(max_cuts + 1):
        for cuts in combinations(range(1, len(tokens)), num_cuts):
            edges = [0, *cuts, len(tokens)]
            yield [tokens[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def play(
    one: RequestAssembler, pieces: list[Sequence[int]], reason: FinishReason = "length"
) -> list[TextDelta]:
    """Feed the pieces, the last with a finish reason, until the request is done."""
    results = []
    for i, piece in enumerate(pieces):
        results.append(push(one, piece, reason if i == len(pieces) - 1 else None))
        if one.is_done:
            break
    return results


def joined(results: list[TextDelta]) -> str:
    return "".join(r.text for r in results)


# ── text ────────────────────────────────────────────────────────────────────────────────────────────────


def test_words_become_text_and_the_last_delta_finishes() -> None:
    one = assembler()
    assert push(one, [2000]) == TextDelta(0, "hello", (2000,))
    assert not one.is_done
    assert push(one, [2001, 2002], "length") == TextDelta(0, " world", (2001, 2002), finish_reason="length")
    assert one.is_done


def test_a_character_in_two_tokens_appears_with_the_second() -> None:
    one = assembler()
    assert [push(one, [t]).text for t in (2000, 2003, 2004)] == ["hello", "", "😀!"]


def test_a_broken_last_character_is_flushed_at_the_end() -> None:
    one = assembler()
    assert push(one, [2003]).text == ""
    assert push(one, [], "length") == TextDelta(0, "\ufffd", (), finish_reason="length")


def test_special_tokens_are_skipped_unless_wanted() -> None:
    assert push(assembler(), [2000, END, 2001], "length").text == "hello wor"
    assert push(assembler(skip_special_tokens=False), [2000, END], "length").text == "hello<|end|>"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_held_text_is_given_out_when_the_engine_ends_early(reason: FinishReason) -> None:
    one = assembler(stop=("hello!",))
    assert push(one, [2000]).text == ""
    last = push(one, [], reason, error="broken" if reason == "error" else None)
    assert (last.text, last.finish_reason) == ("hello", reason)
    assert last.error == ("broken" if reason == "error" else None)
    assert one.is_done


# ── stop tokens ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_end_of_sequence_token_has_no_text_and_no_stop_reason() -> None:
    result = push(assembler(skip_special_tokens=False), [2000, END], "stop", stop_token_id=END)
    assert result == TextDelta(0, "hello", (2000, END), finish_reason="stop")


def test_a_stop_token_is_the_stop_reason_and_its_text_is_left_out_unless_included() -> None:
    fields: dict[str, Any] = {"stop_token_ids": (2002,)}
    result = push(assembler(**fields), [2001, 2002], "stop", stop_token_id=2002)
    assert (result.text, result.stop_reason, result.finish_reason) == (" wor", 2002, "stop")
    result = push(
        assembler(**fields, include_stop_str_in_output=True), [2001, 2002], "stop", stop_token_id=2002
    )
    assert (result.text, result.stop_reason) == (" world", 2002)


def test_only_the_last_token_of_the_delta_is_the_stop_token() -> None:
    one = assembler(stop_token_ids=(2002,), min_tokens=1)
    assert push(one, [2002, 2001, 2002], "stop", stop_token_id=2002).text == "ld wor"


# ── stop strings ────────────────────────────────────────────────────────────────────────────────────────

TEXT = "né 😀 ab ab."


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_at_every_offset_stream_as_at_once(length: int, include: bool) -> None:
    tokens = TEXT.encode()
    for start in range(len(TEXT) - length + 1):
        stop = TEXT[start : start + length]
        begin = TEXT.index(stop)
        expected = TEXT[: begin + length if include else begin]
        used = len(TEXT[: begin + length].encode())
        for pieces in splits(tokens, max_cuts=2):
            one = assembler(stop=(stop,), include_stop_str_in_output=include)
            results = play(one, pieces)
            assert joined(results) == expected
            assert (results[-1].finish_reason, results[-1].stop_reason) == ("stop", stop)
            assert one.usage.completion_tokens == used
            assert sum(len(r.token_ids) for r in results) == used
            assert one.is_done


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("ab é😀", max_size=12),
    stop=st.lists(st.text("ab é😀", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_any_split_of_the_tokens_gives_the_same_text(text: str, stop: list[str], cuts: list[int]) -> None:
    tokens = text.encode()
    fields: dict[str, Any] = {"stop": tuple(stop)}
    whole = play(assembler(**fields), [tokens])
    edges = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    split = play(assembler(**fields), [tokens[a:b] for a, b in zip(edges, edges[1:], strict=False)])
    assert joined(split) == joined(whole)
    assert (split[-1].finish_reason, split[-1].stop_reason) == (whole[0].finish_reason, whole[0].stop_reason)
    assert tuple(t for r in split for t in r.token_ids) == whole[0].token_ids
    assert [r.finish_reason for r in split[:-1]] == [None] * (len(split) - 1)


def test_a_stop_string_ends_the_choice_and_asks_for_an_abort() -> None:
    one = assembler(stop=("wor",))
    assert push(one, [2000]).needs_abort is False
    result = push(one, [2001, 2002, 2000])
    assert result == TextDelta(0, " ", (2001,), finish_reason="stop", stop_reason="wor", needs_abort=True)
    assert one.usage == Usage(len(PROMPT), 2)
    assert one.push(delta([2000])) is None
    assert one.usage == Usage(len(PROMPT), 2)


def test_a_stop_string_in_the_last_delta_needs_no_abort_and_wins_over_length() -> None:
    result = push(assembler(stop=("wor",)), [2001], "length")
    assert (result.finish_reason, result.stop_reason, result.needs_abort) == ("stop", "wor", False)


def test_a_stop_string_in_the_flushed_rest_counts() -> None:
    result = push(assembler(stop=("\ufffd",)), [2000, 2003], "length")
    assert (result.text, result.finish_reason, result.stop_reason) == ("hello", "stop", "\ufffd")


def test_stop_strings_do_not_count_within_min_tokens() -> None:
    one = assembler(stop=("a",), min_tokens=2)
    results = [push(one, [t]) for t in b"aaa"]
    assert [(r.text, r.finish_reason) for r in results] == [("a", None), ("a", None), ("", "stop")]


# ── log-probabilities ───────────────────────────────────────────────────────────────────────────────────


def test_logprobs_carry_text_bytes_and_offset_of_every_token() -> None:
    tokens = [2000, 2003, 2004]
    result = push(assembler(), tokens, "length", logprobs=[logprob(t, t, 2001) for t in tokens])
    assert result.text == "hello😀!"
    assert result.logprobs is not None
    assert [(e.text, e.utf8, e.text_offset) for e in result.logprobs] == [
        ("hello", b"hello", 0),
        ("\\xf0\\x9f\\x98", b"\xf0\x9f\x98", 5),
        ("\\x80!", b"\x80!", 5),
    ]
    assert result.logprobs[0] == TokenEntry(
        2000,
        "hello",
        b"hello",
        0,
        -0.5,
        1,
        (TokenText(2000, "hello", b"hello", -0.5), TokenText(2001, " wor", b" wor", -1.5)),
    )


def test_offsets_go_on_over_deltas_and_skipped_tokens_have_no_width() -> None:
    one = assembler()
    offsets = []
    for token_id in (2000, END, 2001):
        entries = push(one, [token_id], logprobs=[logprob(token_id)]).logprobs
        assert entries is not None
        offsets.append((entries[0].text, entries[0].text_offset))
    assert offsets == [("hello", 0), ("<|end|>", 5), (" wor", 5)]


def test_logprobs_end_with_the_token_that_completed_the_stop_string() -> None:
    one = assembler(stop=("wor",))
    result = push(one, [2000, 2001, 2002], logprobs=[logprob(t) for t in (2000, 2001, 2002)])
    assert result.token_ids == (2000, 2001)
    assert result.logprobs is not None
    assert [e.token_id for e in result.logprobs] == [2000, 2001]


def test_logprobs_are_absent_unless_sent() -> None:
    assert push(assembler(), [2000]).logprobs is None


def test_prompt_logprobs_describe_every_prompt_token() -> None:
    one = RequestAssembler(ByteTokens(), SamplingParams(), [END, 2000, 2001])
    result = push(one, [2002], prompt_logprobs=[logprob(2000, 2000), logprob(2001)])
    assert result.prompt_logprobs == (
        TokenEntry(END, "<|end|>", b"<|end|>", 0),
        TokenEntry(2000, "hello", b"hello", 0, -0.5, 1, (TokenText(2000, "hello", b"hello", -0.5),)),
        TokenEntry(2001, " wor", b" wor", 5, -0.5, 1),
    )
    assert push(one, [2002]).prompt_logprobs is None


def test_prompt_offsets_count_special_tokens_that_are_shown() -> None:
    entries = describe_prompt(ByteTokens(), [END, 2000], [logprob(2000)], skip_special_tokens=False)
    assert [e.text_offset for e in entries] == [0, 7]


def test_prompt_offsets_leave_out_the_space_that_the_tokenizer_drops() -> None:
    entries = describe_prompt(ByteTokens(drops_first_space=True), [2001, 2001], [logprob(2001)])
    assert [e.text_offset for e in entries] == [0, 3]


def test_output_keeps_its_first_space_because_it_continues_the_prompt() -> None:
    one = RequestAssembler(ByteTokens(drops_first_space=True), SamplingParams(), PROMPT)
    assert push(one, [2001]).text == " wor"


def test_texts_of_undecodable_tokens_stay_distinct() -> None:
    assert [token_text(b) for b in (b"\xf0", b"\x9f", "é".encode())] == ["\\xf0", "\\x9f", "é"]


# ── choices and usage ───────────────────────────────────────────────────────────────────────────────────


def test_choices_are_assembled_apart_and_the_request_is_done_with_the_last() -> None:
    one = assembler(n=3, stop=("wor",))
    assert push(one, [2000], index=0).text == "hello"
    assert push(one, [2003], index=1).text == ""
    assert push(one, [2001], index=2).needs_abort
    assert push(one, [2004], "length", index=1).text == "😀!"
    assert not one.is_done
    assert push(one, [2002], "stop", index=0).text == "ld"
    assert one.is_done
    assert one.usage == Usage(len(PROMPT), 5)


def test_usage_counts_the_prompt_once_and_its_cached_tokens_once() -> None:
    one = assembler(n=2)
    push(one, [2000], index=0, num_cached_tokens=4)
    push(one, [2000], index=1, num_cached_tokens=6)  # the second shares the prompt of the first
    push(one, [2001, END], "stop", index=0, num_cached_tokens=4, stop_token_id=END)
    assert one.usage == Usage(prompt_tokens=6, completion_tokens=4, cached_tokens=4)
    assert one.usage.total_tokens == 10


def test_a_done_request_ignores_what_still_arrives() -> None:
    one = assembler()
    push(one, [2000], "length")
    assert one.push(delta([2001])) is None
    assert one.push(delta([], "abort")) is None
    assert one.usage == Usage(len(PROMPT), 1)
