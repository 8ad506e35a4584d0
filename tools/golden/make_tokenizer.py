"""Golden token ids of the default model's tokenizer, as transformers makes them: tests/golden/tokenizer.json.

    python tools/golden/make_tokenizer.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Needs transformers, torch and gguf. transformers rebuilds the tokenizer from the GGUF file without the rule
that every digit is a token of its own (the original tokenizer.json has Digits, then ByteLevel), so that
rule is put back.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "tokenizer.json"

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\t x",
    "a",
    "Hello",
    " Hello",
    "Hello, world!",
    "Hello   world",
    "trailing spaces   ",
    "   leading spaces",
    "tabs\tand\nnewlines\r\nand returns\r",
    "12345",
    "1 22 333 4444 55555",
    "3.14159e-10",
    "$1,234.56 (50%)",
    "I'm you're he's we'll they'd I've DON'T",
    "naïve café déjà vu Ångström",
    "e\u0301 combining",
    "Привет, мир!",
    "Καλημέρα κόσμε",
    "你好，世界！今天天气很好。",
    "日本語のテキストと漢字かな交じり文",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "🎉🚀 party 👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "👍🏽",
    "ꙮ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9ff",
    "def f(x):\n    return x ** 2  # square\n\n\tif x:\n\t\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c; }",
    '{"key": [1, 2.5, null, true], "s": "a\\"b"}',
    "<html><body class='x'>&amp;</body></html>",
    "https://example.org/path?query=1&other=%20two#frag",
    "C:\\Users\\name\\file.txt",
    "a" * 70,
    "=" * 40 + "-" * 40,
    "\u00a0non-breaking\u2003em\u3000ideographic",
    "\u200bzero\u200dwidth\ufeff",
    "\x00\x01\x7f control",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "a<|endoftext|>b",
    " <|im_end|> ",
    "<|im_start|",
    "<|not_special|>",
    "<repo_name>octavo<file_sep>",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    path = parser.parse_args().gguf
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    cases = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        cases.append({"text": text, "ids": ids, "decoded": decoded})
    OUT.write_text(json.dumps({"cases": cases}, ensure_ascii=True, indent=0) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {OUT.stat().st_size} bytes: {OUT}")


if __name__ == "__main__":
    main()
