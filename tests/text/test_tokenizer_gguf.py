"""Tokenizers rebuilt from GGUF metadata: SentencePiece golden ids, byte-level rules, flags, refusals."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.text.tokenizer import TokenForm
from octavo.text.tokenizer_gguf import tokenizer_from_gguf

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sentencepiece.json").read_text())


def sentence_piece(tokens=GOLDEN["tokens"], scores=GOLDEN["scores"], types=GOLDEN["types"], **flags):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{k}": v for k, v in flags.items()})


def byte_level(tokens=(), merges=(), types=None, **flags):
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types or [1] * len(tokens),
        "tokenizer.ggml.merges": list(merges),
    }
    return tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{k}": v for k, v in flags.items()})


@pytest.fixture(scope="module")
def golden():
    return sentence_piece()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=[repr(case["text"]) for case in GOLDEN["cases"]])
def test_sentencepiece_ids_are_sentencepiece_s_own(golden, case):
    ids = golden.encode(case["text"], add_special_tokens=False)
    assert ids == case["ids"]
    assert golden.decode(ids) == case["decoded"]


def test_sentencepiece_token_bytes_are_the_text_with_its_first_space(golden):
    ids = golden.encode("the café 🎉", add_special_tokens=False)
    assert b"".join(map(golden.token_bytes, ids)) == " the café 🎉".encode()
    assert golden.form is TokenForm.SENTENCE_PIECE
    assert golden.drops_first_space
    assert golden.token_bytes(GOLDEN["tokens"].index("<0xF0>")) == b"\xf0"


def test_a_byte_token_spelled_out_is_plain_text(golden):
    ids = golden.encode("<0x0A>", add_special_tokens=False)
    assert golden.decode(ids) == "<0x0A>"
    assert golden.encode("\n", add_special_tokens=False)[-1] == GOLDEN["tokens"].index("<0x0A>")


def test_start_and_end_tokens_follow_the_flags():
    assert sentence_piece().encode("a")[0] == 1
    assert sentence_piece(add_bos_token=False).encode("a")[0] != 1
    both = sentence_piece(add_eos_token=True).encode("a")
    assert (both[0], both[-1]) == (1, 2)
    assert sentence_piece().encode("a", add_special_tokens=False)[0] != 1


def test_without_a_space_prefix_nothing_is_put_before_the_text():
    tokenizer = sentence_piece(add_space_prefix=False)
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"the"
    assert not tokenizer.drops_first_space
    assert tokenizer.decode(tokenizer.encode(" the", add_special_tokens=False)) == " the"


def test_control_tokens_are_found_in_text_and_are_special(golden):
    ids = golden.encode("a</s>", add_special_tokens=False)
    assert ids[-1] == 2
    assert golden.is_special(2)
    assert golden.decode(ids) == "a"


def best_pair_first(text: str, vocab: dict[str, int], scores: list[float]) -> list[str]:
    """SentencePiece's rule, word for word: join the neighbours with the best union, the leftmost first."""
    parts = list(text)
    while True:
        unions = [(-scores[vocab[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocab]
        if not unions:
            return parts
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


WORDS = ["a", "b", "c", "ab", "bc", "abc", "ca", "aab", "cab", "bca", "aa", "abca"]


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(len(WORDS))), st.text("abc", min_size=1, max_size=12))
def test_merging_by_score_follows_the_rule(order, text):
    scores = [0.0] + [-float(rank) for rank in order]
    tokenizer = sentence_piece(["?", *WORDS], scores, [2] + [1] * len(WORDS), add_space_prefix=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    vocab = {word: i for i, word in enumerate(["?", *WORDS])}
    assert [tokenizer.token_text(i) for i in ids] == best_pair_first(text, vocab, scores)


def test_byte_level_texts_are_cut_by_the_rule_the_file_names():
    tokens, merges = ["12", "Ġ12"], ["1 2", "Ġ 12"]
    whole = byte_level(tokens, merges, pre="gpt-2")
    assert [whole.token_text(i) for i in whole.encode("x 12")] == ["x", "Ġ12"]
    single = byte_level(tokens, merges, pre="smollm")
    assert [single.token_text(i) for i in single.encode("x 12")] == ["x", "Ġ", "1", "2"]


def test_llama3_takes_a_whole_piece_that_is_a_token():
    # "abc" cannot be reached by merging, but is a token.
    tokens, merges = ["ab", "abc"], ["a b"]
    assert [byte_level(tokens, merges).token_text(i) for i in byte_level(tokens, merges).encode("abc")] == [
        "ab",
        "c",
    ]
    llama3 = byte_level(tokens, merges, pre="llama-bpe")
    assert [llama3.token_text(i) for i in llama3.encode("abc")] == ["abc"]


def test_llama3_adds_its_start_token_unless_told_not_to():
    control = {"tokens": ["<|begin|>"], "types": [1] * 256 + [3], "pre": "llama-bpe", "bos_token_id": 256}
    assert byte_level(**control).encode("a")[0] == 256
    assert byte_level(**control, add_bos_token=False).encode("a")[0] != 256


def test_qwen2_composes_characters_first():
    tokenizer = byte_level(pre="qwen2")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_user_defined_tokens_are_found_but_not_special():
    tokenizer = byte_level(["<tag>"], types=[1] * 256 + [4])
    assert tokenizer.encode("a<tag>")[-1] == 256
    assert not tokenizer.is_special(256)


def test_an_unknown_rule_is_gpt2_s_with_one_warning(caplog):
    tokenizer = byte_level(pre="brand-new")
    assert tokenizer.decode(tokenizer.encode("It's 12")) == "It's 12"
    assert [record.message for record in caplog.records] == [
        "pre-tokenizer 'brand-new' is not known; using gpt-2's, so some texts may be cut differently"
    ]


def test_the_first_of_two_equal_tokens_counts():
    tokenizer = byte_level(["ab", "ab"], ["a b"])
    assert tokenizer.encode("ab") == [256]


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({}, CorruptModelError, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "bert"}, UnsupportedModelError, "'bert'"),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "llama"},
            CorruptModelError,
            "no tokenizer.ggml.scores",
        ),
        (
            {
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.merges": ["a zz"],
            },
            CorruptModelError,
            "cannot be built: .*zz",
        ),
        (
            {
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.merges": ["a"],
            },
            CorruptModelError,
            "cannot be built: .*Token `` out of vocabulary",
        ),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [1]},
            CorruptModelError,
            "tokenizer.ggml.merges is not a list of str",
        ),
        ({"tokenizer.ggml.tokens": "a"}, CorruptModelError, "tokenizer.ggml.tokens is not a list of str"),
    ],
)
def test_an_unusable_vocabulary_is_refused(metadata, error, message):
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(metadata)
