"""The cutting rules, by name, on texts that tell them apart."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from octavo.text.pretokenizers import pre_tokenizer


def cut(name: str | None, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer(name).patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'm 123  x", ["I", "'m", " 123", " ", " x"]),
        ("gpt-2", "a\n\n b", ["a", "\n\n", " b"]),
        ("smollm", "I'm 123 x", ["I", "'m", " ", "1", "2", "3", " x"]),
        ("llama-bpe", "I'M 12345 x\n\n y", ["I", "'M", " ", "123", "45", " x", "\n\n", " y"]),
        ("llama-bpe", "a,b!!\n", ["a", ",b", "!!\n"]),
        ("qwen2", "I'M 123 x\n\n y", ["I", "'M", " ", "1", "2", "3", " x", "\n\n", " y"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
        ("deepseek-llm", "it 12\nx 你好", ["it", " ", "1", "2", "\n", "x", " ", "你好"]),
        ("deepseek-coder", "it, 12\nx", ["it", ",", " ", "1", "2", "\n", "x"]),
        ("deepseek-v3", "it 1234 你好!", ["it", " ", "123", "4", " ", "你好", "!"]),
        ("default", "a=b 12345", ["a", "=", "b", " ", "123", "45"]),
        (None, "a=b", ["a", "=", "b"]),
    ],
)
def test_a_text_is_cut_as_the_family_cuts_it(name, text, pieces):
    assert cut(name, text) == pieces


@pytest.mark.parametrize(
    "name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "deepseek-llm", "default"]
)
def test_no_character_is_lost(name):
    text = "The “naïve” fox's 1,234.5 jumps\t\r\n over 你好 — 🎉\u00a0x  "
    assert "".join(cut(name, text)) == text
