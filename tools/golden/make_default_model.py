"""Golden values of the default model: what transformers computes from the same GGUF file, in float32.

    python tools/golden/make_default_model.py SmolLM2-135M-Instruct.Q4_1.gguf tests/golden/default_model.npz

Run it where torch, transformers and gguf are installed; Octavo itself is not imported. For each prompt the
file holds the token ids, 64 greedy tokens, and the logits at a few positions over prompt + greedy tokens:
the 50 largest (ids and values) and a fixed random choice of 256 vocabulary entries.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

NUM_GREEDY = 64
NUM_TOP = 50
NUM_SUBSET = 256

CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

LONG = """The harbour had been quiet all morning. A thin fog lay over the water, and the boats at their
moorings turned slowly with the tide, one after another, as if each had to think about it first.
Marta sat on the lowest step of the stone stairs with a notebook on her knees and counted them
again: eleven, no, twelve, because the small green one behind the ferry had hidden itself for a
while. She wrote down the number, the time and the direction of the wind. Her grandfather had kept
such a book for forty years, and nobody had ever asked him why. When the bell of the chapel rang
nine o'clock, the fog began to lift, and the first thing that she could see clearly on the other
side was"""

PROMPTS = {
    "short": "The capital of France is",
    "one_word": "Once",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "chat": CHAT.format("What is the capital of Italy, and what is it known for?"),
    "chat_list": CHAT.format("List three reasons to learn a second language."),
    "cjk_emoji": "你好,世界!🌍 今天天气很好。日本語のテスト 🚀✨",
    "numbers": "Prices: $1,299.00, 45%, 3.14159; dates 2024-02-29 and 12:30.\n\n\t- item 1\n\t- item 2\n",
    "long": LONG.replace("\n", " "),
}


def logit_positions(num_prompt: int) -> list[int]:
    """The first, a middle and the last position of the prompt, and two among the greedy tokens."""
    last = num_prompt - 1
    return sorted({0, last // 2, last, last + 16, last + NUM_GREEDY - 1})


def golden_of(model: PreTrainedModel, prompt: torch.Tensor, subset: np.ndarray) -> dict[str, np.ndarray]:
    """Greedy tokens and logits of one prompt [1, T]."""
    num_prompt = prompt.shape[1]
    with torch.inference_mode():
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_GREEDY,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        logits = model(whole).logits[0].float().numpy()  # [T + 64, V]
    greedy = whole[0, num_prompt:].numpy()
    before = logits[num_prompt - 1 : -1]  # [64, V] what the greedy tokens were chosen from
    assert len(greedy) == NUM_GREEDY
    assert (before.argmax(-1) == greedy).all()
    positions = logit_positions(num_prompt)
    rows = logits[positions]  # [P, V]
    top = np.argsort(-rows, axis=-1, kind="stable")[:, :NUM_TOP]
    best_two = -np.sort(-before, axis=-1)[:, :2]
    return {
        "prompt": prompt[0].numpy().astype(np.int32),
        "greedy": greedy.astype(np.int32),
        "gap": best_two[:, 0] - best_two[:, 1],  # best minus second best logit at each greedy token
        "positions": np.array(positions, np.int32),
        "top_ids": top.astype(np.int32),
        "top_values": np.take_along_axis(rows, top, -1),
        "subset_values": rows[:, subset],
    }


def load(gguf: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The original tokenizer makes every digit a token of its own; the conversion from GGUF forgets it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return tokenizer, model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer, model = load(args.gguf)
    vocab_size = model.config.vocab_size
    subset = np.sort(np.random.default_rng(0).choice(vocab_size, NUM_SUBSET, replace=False)).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"names": np.array(list(PROMPTS)), "subset": subset}
    for name, text in PROMPTS.items():
        golden = golden_of(model, tokenizer(text, return_tensors="pt").input_ids, subset)
        arrays[f"{name}.text"] = np.array(text)
        arrays |= {f"{name}.{key}": value for key, value in golden.items()}
        print(f"{name}: {len(golden['prompt'])} tokens, smallest gap {golden['gap'].min():.4f}")
        print("   ", repr(tokenizer.decode(golden["greedy"])))
    np.savez_compressed(args.out, **arrays)


if __name__ == "__main__":
    main()
