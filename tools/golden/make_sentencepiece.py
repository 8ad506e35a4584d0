"""A small SentencePiece vocabulary with golden token ids: tests/golden/sentencepiece.json.

    python tools/golden/make_sentencepiece.py

Needs sentencepiece. It trains a byte-pair model with byte fallback, as Llama 2 and Mistral have, on the
evaluation text, and stores pieces, scores and types as GGUF writes them: 1 normal, 2 unknown, 3 control,
6 byte.
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import sentencepiece

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
NUM_PIECES = 600

TEXTS = [
    "",
    " ",
    "   ",
    "a",
    "the software",
    " the software",
    "the  software   license",
    "License, version 2.0 (January 2004)",
    "trailing ",
    "two\nlines\n\nand tabs\t\tend",
    "12345 6789",
    "naïve café déjà vu",
    "Привет, мир",
    "你好 世界",
    "🎉 party 🚀",
    "<0x0A>",
    "a▁b ▁c",
    "UPPER lower MiXeD",
    "modification, distribution and reproduction of the work",
]


def main() -> None:
    text = gzip.decompress((GOLDEN / "eval_text.txt.gz").read_bytes()).decode()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        vocab_size=NUM_PIECES,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(sp.vocab_size())
    golden = {
        "tokens": [sp.id_to_piece(i) for i in ids],
        "scores": [round(sp.get_score(i), 6) for i in ids],
        "types": [
            2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids
        ],
        "cases": [
            {"text": text, "ids": sp.encode(text), "decoded": sp.decode(sp.encode(text))} for text in TEXTS
        ],
    }
    out = GOLDEN / "sentencepiece.json"
    out.write_text(json.dumps(golden, ensure_ascii=True) + "\n", encoding="utf-8")
    print(f"{len(TEXTS)} cases, {out.stat().st_size} bytes: {out}")


if __name__ == "__main__":
    main()
