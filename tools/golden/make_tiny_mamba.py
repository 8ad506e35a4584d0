"""Tiny random state-space checkpoints (Mamba2, Bamba), and what transformers makes of them.

    python tools/golden/make_tiny_mamba.py tests/golden/tiny

Like make_tiny_models.py; expected.npz also has the 16 tokens that greedy decoding adds, each found by a
forward pass over all tokens before it. transformers computes the scan in chunks (of 8 tokens here) by
matrix products; Octavo goes token by token, so agreement is not a matter of the same code twice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, BambaConfig, Mamba2Config, PreTrainedConfig, PreTrainedModel

NUM_TOKENS = 28
NUM_GREEDY = 16
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MAMBA2 = {**COMMON, "num_heads": 4, "head_dim": 16, "num_hidden_layers": 3, "chunk_size": 8}


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "mamba2": Mamba2Config(**MAMBA2, state_size=16, n_groups=1, tie_word_embeddings=True),
        "mamba2_groups": Mamba2Config(
            **MAMBA2,
            state_size=12,
            n_groups=2,
            conv_kernel=3,
            use_bias=True,
            use_conv_bias=False,
            time_step_limit=(0.3, 1.0),
        ),
        "bamba": BambaConfig(
            **COMMON,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_layer_indices=[2],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_chunk_size=8,
            max_position_embeddings=64,
        ),
    }


def values_for(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Weights of about unit gain; decays that forget within some ten tokens; nothing zero or one."""
    leaf = name.split(".")[-1]
    if leaf == "A_log":
        return -0.5 + 0.7 * noise
    if leaf == "dt_bias":
        return -1.0 + 0.7 * noise
    if leaf == "D" or "norm" in name:
        return 1.0 + 0.3 * noise
    if leaf == "bias":
        return 0.5 * noise
    if "embed" in name:
        return noise
    gain = 0.8 if "conv1d" in name else 1.4
    return noise * gain / noise[0].numel() ** 0.5


def randomise(model: PreTrainedModel, seed: int) -> None:
    """All parameters anew, representable in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values_for(name, noise).to(torch.bfloat16))


def logits_of(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """[T, V]"""
    with torch.inference_mode():
        return model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()


def make(name: str, config: PreTrainedConfig, folder: Path) -> None:
    seed = sum(name.encode())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model, seed)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, NUM_TOKENS).astype(np.int32)
    logits = logits_of(model, tokens.tolist())
    text = tokens.tolist()
    margins = []
    for _ in range(NUM_GREEDY):
        last = logits_of(model, text)[-1]
        best = np.sort(last)
        margins.append(best[-1] - best[-2])
        text.append(int(last.argmax()))
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    greedy = np.array(text[NUM_TOKENS:], np.int32)
    np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits, greedy=greedy)
    size = (folder / "model.safetensors").stat().st_size
    print(f"{name:16} {size:7} bytes, deviation {logits.std():.2f}, smallest lead {min(margins):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for name, config in configs().items():
        make(name, config, args.out / name)


if __name__ == "__main__":
    main()
