"""Tokens that cut characters apart: the pieces joined equal the bytes decoded at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.text.detokenize import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

SPECIAL = 1000  # and above: special tokens; below: one token a byte


def token_bytes(token_id: int) -> bytes:
    return f"<|{token_id}|>".encode() if token_id >= SPECIAL else bytes([token_id])


def detokenizer(*, skip_special: bool = True, strip_leading_space: bool = False) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        token_bytes,
        lambda token_id: token_id >= SPECIAL,
        skip_special=skip_special,
        strip_leading_space=strip_leading_space,
    )


SAMPLES = [
    "plain",
    "naïve café",
    "日本語のテキスト",
    "한국어",
    "😀🎉",
    "👩‍💻 ZWJ 👨‍👩‍👧‍👦",
    "🇩🇪 flags, e\u0301 combining",
    "\U0010ffff\x00\n",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_no_replacement_character_at_any_cut(text: str) -> None:
    data = text.encode()
    for cut in range(len(data) + 1):
        one = detokenizer()
        first, second = one.push(data[:cut]), one.push(data[cut:])
        assert first + second == text
        assert "\ufffd" not in first
        assert first == data[:cut].decode("utf-8", "ignore")
        assert one.flush() == ""


@pytest.mark.parametrize("text", SAMPLES)
def test_characters_appear_with_their_last_byte(text: str) -> None:
    one = detokenizer()
    pieces = [one.push([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert [p for p in pieces if p] == list(text)
    assert one.num_chars == len(text)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_any_bytes_in_any_pieces_decode_as_at_once(data: bytes, cuts: list[int]) -> None:
    one = detokenizer()
    edges = [0, *sorted(cuts), len(data)]
    pieces = [one.push(data[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert "".join(pieces) + one.flush() == data.decode("utf-8", "replace")


def test_a_broken_tail_becomes_one_replacement_character_at_the_end() -> None:
    one = detokenizer()
    assert one.push("a😀".encode()[:-1]) == "a"
    assert one.flush() == "\ufffd"
    assert one.num_chars == 2


def test_a_broken_start_becomes_a_replacement_character_at_once() -> None:
    assert detokenizer().push(b"\x80a") == "\ufffda"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = [*b"a", SPECIAL, *b"b"]
    assert detokenizer().push(tokens) == "ab"
    assert detokenizer(skip_special=False).push(tokens) == "a<|1000|>b"


def test_a_skipped_token_does_not_break_the_character_around_it() -> None:
    data = "é".encode()
    one = detokenizer()
    assert one.push([data[0]]) + one.push([SPECIAL]) + one.push([data[1]]) == "é"


def test_one_leading_space_is_stripped_once() -> None:
    one = detokenizer(strip_leading_space=True)
    assert [one.push([SPECIAL]), one.push(b"  a"), one.push(b" b")] == ["", " a", " b"]
    assert one.num_chars == 4
    other = detokenizer(strip_leading_space=True)
    assert [other.push(b"a"), other.push(b" b")] == ["a", " b"]


def byte_level_tokenizer() -> Tokenizer:
    """A vocabulary of all bytes and a few merges that cut characters apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("ð", "Ł"), ("h", "e"), ("l", "l"), ("Ġ", "he")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20) | st.sampled_from(SAMPLES))
def test_a_real_tokenizer_streams_what_it_decodes_at_once(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    for skip in (True, False):
        ids = [*tokenizer.encode(text), *tokenizer.encode("<|end|>"), *tokenizer.encode(" hello")]
        one = IncrementalDetokenizer(tokenizer.token_bytes, tokenizer.is_special, skip_special=skip)
        streamed = "".join(one.push([t]) for t in ids) + one.flush()
        assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)
        assert streamed == text + ("" if skip else "<|end|>") + " hello"


def sentence_piece_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁Hello", "▁w", "orld", "é"]
    backend = Backend(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def test_a_sentence_piece_tokenizer_streams_what_it_decodes_at_once() -> None:
    tokenizer = sentence_piece_tokenizer()
    names = ["<s>", "▁Hello", "▁w", "orld", "▁", *(f"<0x{b:02X}>" for b in "😀".encode()), "é"]
    ids = [i for i in map(tokenizer.token_id, names) if i is not None]
    assert len(ids) == len(names)
    one = IncrementalDetokenizer(
        tokenizer.token_bytes, tokenizer.is_special, strip_leading_space=tokenizer.drops_first_space
    )
    streamed = "".join(one.push([t]) for t in ids) + one.flush()
    assert streamed == tokenizer.decode(ids) == "Hello world 😀é"
