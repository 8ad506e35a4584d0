"""Tokenizer: golden ids of the default model, token bytes, and texts no library would take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.text.tokenizer import TokenForm, Tokenizer
from octavo.weights.loader import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "tokenizer.json").read_text())["cases"]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Every byte is a token, and two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, "he", "Ġhe"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("h", "e"), ("Ġ", "he")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<tag>", special=False, normalized=False)])
    return Tokenizer(backend, bos_token_id=None, eos_token_ids=(258,))


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path) -> Tokenizer:
    checkpoint = open_checkpoint(default_model_path)
    return checkpoint.tokenizer()


@pytest.mark.model
@pytest.mark.parametrize("case", CASES, ids=[repr(case["text"][:20]) for case in CASES])
def test_the_default_model_tokenises_as_transformers_does(default_tokenizer, case):
    ids = default_tokenizer.encode(case["text"], add_special_tokens=False)
    assert ids == case["ids"]
    assert default_tokenizer.decode(ids) == case["decoded"]
    assert b"".join(map(default_tokenizer.token_bytes, ids)) == case["text"].encode()


@pytest.mark.model
def test_the_default_model_adds_nothing_around_a_text(default_tokenizer):
    assert default_tokenizer.encode("Hello") == default_tokenizer.encode("Hello", add_special_tokens=False)
    assert (default_tokenizer.vocab_size, default_tokenizer.form) == (49152, TokenForm.BYTE_LEVEL)
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.token_text(2) == "<|im_end|>"


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_any_text_survives_the_default_model_s_tokenizer(default_tokenizer, text):
    # Its vocabulary has no token for 21 bytes: some control characters, and what begins a code point from
    # U+40000 on. The original tokenizer drops those too.
    ids = default_tokenizer.encode(text)
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(default_tokenizer.token_bytes, ids)) == text.encode()


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_survives_a_byte_level_tokenizer(byte_level, text):
    ids = byte_level.encode(text)
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == text


def test_merges_and_spaces_are_bytes_again(byte_level):
    ids = byte_level.encode("he he")
    assert [byte_level.token_text(i) for i in ids] == ["he", "Ġhe"]
    assert [byte_level.token_bytes(i) for i in ids] == [b"he", b" he"]


def test_one_character_may_be_several_tokens(byte_level):
    ids = byte_level.encode("é")
    assert [byte_level.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert byte_level.decode(ids[:1]) == "\ufffd"


def test_special_tokens_are_recognised_in_text_and_left_out_of_it(byte_level):
    ids = byte_level.encode("a<|end|>b")
    assert byte_level.token_text(ids[1]) == "<|end|>"
    assert byte_level.is_special(ids[1])
    assert not byte_level.is_special(ids[0])
    assert byte_level.token_bytes(ids[1]) == b"<|end|>"
    assert byte_level.decode(ids) == "ab"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|end|>b"


def test_user_defined_tokens_stay_in_the_text(byte_level):
    ids = byte_level.encode("<tag>")
    assert len(ids) == 1
    assert not byte_level.is_special(ids[0])
    assert byte_level.token_bytes(ids[0]) == b"<tag>"
    assert byte_level.decode(ids) == "<tag>"


@pytest.mark.parametrize("token_id", [-1, 260, 1 << 31, 1 << 40])
def test_an_id_outside_the_vocabulary_is_no_bytes(byte_level, token_id):
    assert byte_level.vocab_size == 260
    assert byte_level.token_text(token_id) is None
    assert byte_level.token_bytes(token_id) == b""
    assert not byte_level.is_special(token_id)


def test_token_ids_are_found_by_text(byte_level):
    assert byte_level.token_id("<|end|>") == 258
    assert byte_level.token_id("nothing") is None


def test_lone_surrogates_are_replaced_and_pairs_joined(byte_level):
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a\ufffdb"
    assert byte_level.decode(byte_level.encode("\ud83c\udf89")) == "🎉"


def test_a_tokenizer_without_a_decoder_is_plain():
    backend = tokenizers.Tokenizer(models.WordLevel({"Ġa": 0}, unk_token="Ġa"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.form is TokenForm.PLAIN
    assert not tokenizer.drops_first_space
    assert tokenizer.token_bytes(0) == "Ġa".encode()
