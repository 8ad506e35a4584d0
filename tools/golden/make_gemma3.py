"""Golden values of Gemma 3 270M: what transformers computes from the same GGUF file, in float32.

    python tools/golden/make_gemma3.py gemma-3-270m-q4_k_m.gguf tests/golden/gemma3.npz

Run it where torch, transformers, sentencepiece and gguf are installed; Octavo itself is not imported. For
each prompt the file holds the text, the token ids, 32 greedy tokens, and the logits at some positions over
prompt + greedy tokens: the 50 largest (ids and values) and a fixed random choice of 256 vocabulary entries.
The long prompt reaches past twice the window of 512, with positions on both sides of each multiple.

Token ids are those of the sentencepiece library on the file's vocabulary, which is how the model was
published. "tokens.*" holds more of them, of texts that are hard to cut.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
from sentencepiece import sentencepiece_model_pb2 as sp
from transformers import AutoModelForCausalLM, PreTrainedModel

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
NUM_GREEDY = 32
NUM_TOP = 50
NUM_SUBSET = 256
LONG_CHARS = 5200
LONG_POSITIONS = [0, 100, 510, 511, 512, 513, 700, 1022, 1023, 1024, 1025, 1100]

PROMPTS = {
    "short": "The capital of France is",
    "code": "def mean(values):\n    total = 0\n    for value in values:\n\t",
}
TOKEN_TEXTS = [
    "",
    " ",
    "     ",
    "a  b   c    d",
    "   three before",
    "after   ",
    "\n\n\n",
    "\t\t x\n \t",
    "1234567890 3.14",
    "naïve café Ångström",
    "你好，世界！日本語のテキスト",
    "नमस्ते สวัสดี مرحبا",
    "🎉🚀 👩‍👩‍👧‍👦 🏳️‍🌈",
    "<b>bold</b><table><td>1</td></table>",
    "<0x0A> <eos un<unk",
    "UPPER lower MiXeD_snake-kebab",
    "ꙮ\x01\x7f\u00a0\u200b",
    "a" * 70 + "=" * 40,
]


def sentencepiece_of(reader: gguf.GGUFReader) -> sentencepiece.SentencePieceProcessor:
    """The published kind of tokenizer, from the vocabulary that the file holds."""
    pieces, scores, types = (
        reader.get_field(f"tokenizer.ggml.{key}").contents() for key in ("tokens", "scores", "token_type")
    )
    model = sp.ModelProto()
    for text, score, kind in zip(pieces, scores, types, strict=True):
        # Pieces that are found before cutting are stored as they look, sentencepiece escapes their spaces.
        model.pieces.add(piece=text.replace(" ", "▁") if kind == 4 else text, score=score, type=kind)
    model.trainer_spec.model_type = sp.TrainerSpec.BPE
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id = 3, 2
    model.trainer_spec.eos_id, model.trainer_spec.pad_id = 1, 0
    model.trainer_spec.unk_piece, model.trainer_spec.bos_piece = "<unk>", "<bos>"
    model.trainer_spec.eos_piece, model.trainer_spec.pad_piece = "<eos>", "<pad>"
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.SerializeToString())
    return processor


def long_prompt() -> str:
    text = gzip.decompress((GOLDEN / "eval_text.txt.gz").read_bytes()).decode()
    return text.split("\n", 1)[1][:LONG_CHARS].rsplit(" ", 1)[0]


def golden_of(model: PreTrainedModel, prompt: list[int], wanted: list[int], subset: np.ndarray) -> dict:
    """Greedy tokens and logits of one prompt."""
    tokens = torch.tensor([prompt])  # [1, T]
    num_prompt = len(prompt)
    with torch.inference_mode():
        whole = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NUM_GREEDY,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        hidden = model.model(whole).last_hidden_state[0]  # [T + 32, E], without a cache
        before = model.lm_head(hidden[num_prompt - 1 : -1]).numpy()  # [32, V]
        last = num_prompt - 1
        positions = sorted({*wanted, 0, last // 2, last, last + 16, last + NUM_GREEDY - 1})
        rows = model.lm_head(hidden[positions]).numpy()  # [P, V]
    greedy = whole[0, num_prompt:].numpy()  # [32]
    assert (before.argmax(-1) == greedy).all()
    top = np.argsort(-rows, axis=-1, kind="stable")[:, :NUM_TOP]
    best_two = -np.sort(-before, axis=-1)[:, :2]
    return {
        "prompt": np.array(prompt, np.int32),
        "greedy": greedy.astype(np.int32),
        "gap": best_two[:, 0] - best_two[:, 1],  # best minus second best logit at each greedy token
        "positions": np.array(positions, np.int32),
        "top_ids": top.astype(np.int32),
        "top_values": np.take_along_axis(rows, top, -1),
        "subset_values": rows[:, subset],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer = sentencepiece_of(gguf.GGUFReader(args.gguf))
    model = AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32
    ).eval()
    vocab_size = model.config.vocab_size
    subset = np.sort(np.random.default_rng(0).choice(vocab_size, NUM_SUBSET, replace=False)).astype(np.int32)
    prompts = PROMPTS | {"long": long_prompt()}
    arrays: dict[str, np.ndarray] = {"names": np.array(list(prompts)), "subset": subset}
    for name, text in prompts.items():
        prompt = [2, *tokenizer.encode(text)]
        golden = golden_of(model, prompt, LONG_POSITIONS if name == "long" else [], subset)
        arrays[f"{name}.text"] = np.array(text)
        arrays |= {f"{name}.{key}": value for key, value in golden.items()}
        print(f"{name}: {len(prompt)} tokens, smallest gap {golden['gap'].min():.4f}")
        print("   ", repr(tokenizer.decode(golden["greedy"].tolist())))
    encoded = [tokenizer.encode(text) for text in TOKEN_TEXTS]
    arrays["tokens.texts"] = np.array([text.encode().hex() for text in TOKEN_TEXTS])
    arrays["tokens.ids"] = np.array([i for ids in encoded for i in ids], np.int32)
    arrays["tokens.counts"] = np.array([len(ids) for ids in encoded], np.int32)
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
