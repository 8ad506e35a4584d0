"""Tiny random checkpoints, one for each variant of the Llama and Gemma families, and what transformers makes
of them.

    python tools/golden/make_tiny_models.py tests/golden/tiny [NAME …]

Run it where torch and transformers are installed; Octavo itself is not imported. Each folder is an ordinary
checkpoint (config.json, model.safetensors in bfloat16) with expected.npz: the token ids [24] and their
float32 logits [24, V]. Weights are drawn so that every part matters: norms are not all ones, biases not
zero, attention not uniform, and 24 positions reach past windows and original contexts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

NUM_TOKENS = 24

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


# Every second layer (Gemma 2) or five of six (Gemma 3) slide. Scores are not scaled by the head size.
GEMMA = {
    **SHAPE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}


def rope(rope_type: str, theta: float = 10000.0, **parameters: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **parameters}}


def configs() -> dict[str, PreTrainedConfig]:
    llama3 = rope(
        "llama3",
        theta=100.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    )
    yarn = rope(
        "yarn", theta=100.0, factor=4.0, beta_fast=4.0, beta_slow=1.0, original_max_position_embeddings=64
    )
    return {
        "llama": LlamaConfig(**SHAPE),
        "llama_tied_mha": LlamaConfig(
            **{**SHAPE, "tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}
        ),
        "llama_bias": LlamaConfig(
            **{
                **SHAPE,
                "attention_bias": True,
                "num_attention_heads": 6,
                "head_dim": 8,
                "num_hidden_layers": 3,
            }
        ),
        "llama_llama3": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, **llama3),
        "llama_linear": LlamaConfig(**SHAPE, **rope("linear", factor=4.0)),
        "llama_yarn": LlamaConfig(**{**SHAPE, "max_position_embeddings": 256}, **yarn),
        "mistral_window": MistralConfig(**SHAPE, sliding_window=8),
        "gemma2": Gemma2Config(
            **{**GEMMA, "num_hidden_layers": 4}, attn_logit_softcapping=3.0, final_logit_softcapping=6.0
        ),
        "gemma3": Gemma3TextConfig(
            **{**GEMMA, "num_hidden_layers": 12},
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        "qwen2": Qwen2Config(**{**SHAPE, "tie_word_embeddings": True}),
        "qwen2_window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "qwen3": Qwen3Config(**{**SHAPE, "head_dim": 24, "rms_norm_eps": 1e-6}),
    }


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights of about unit gain, norms around one, biases around a half; all representable in bfloat16."""
    mean_norm = 0.0 if model.config.model_type.startswith("gemma") else 1.0  # Gemma stores them less one
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                values = mean_norm + 0.3 * noise
            elif name.endswith("bias"):
                values = 0.5 * noise
            elif "embed" in name:
                values = noise
            else:
                values = noise * 1.4 / parameter.shape[1] ** 0.5
            parameter.copy_(values.to(torch.bfloat16))


def make(name: str, config: PreTrainedConfig, folder: Path) -> None:
    seed = sum(name.encode())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model, seed)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, NUM_TOKENS).astype(np.int32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()  # [24, V]
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits)
    size = (folder / "model.safetensors").stat().st_size
    print(f"{name:16} {size:7} bytes, logits of deviation {logits.std():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="which of them; all by default")
    args = parser.parse_args()
    for name, config in configs().items():
        if not args.names or name in args.names:
            make(name, config, args.out / name)


if __name__ == "__main__":
    main()
