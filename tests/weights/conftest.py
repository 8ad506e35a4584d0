"""A tiny llama-like model: its tensors by canonical name, and writers of GGUF files and folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file

from octavo.models.config import ModelConfig
from octavo.weights.checkpoint import expected_shapes
from octavo.weights.config_gguf import gguf_name
from octavo.weights.names_hf import hf_name

TOKENS = ["<s>", "</s>", "<unk>", *"abcdefghijklm"]

Tensors = dict[str, np.ndarray]


def tiny_config(**changes: Any) -> ModelConfig:
    base = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 64,
        "vocab_size": len(TOKENS),
        "max_position": 128,
    }
    return ModelConfig(**{**base, **changes})


def random_tensors(config: ModelConfig) -> Tensors:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s, np.float32) for n, s in expected_shapes(config)}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order llama GGUF files keep q and k in: halves of a head alternate row by row."""
    size = rows.shape[0] // heads
    return np.concatenate(
        [rows[h * size + i :: size // 2][:2] for h in range(heads) for i in range(size // 2)]
    )


def llama_metadata(config: ModelConfig, arch: str = "llama") -> dict[str, Any]:
    return {
        f"{arch}.context_length": config.max_position,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [0.0] * len(TOKENS),
        "tokenizer.ggml.token_type": [3, 3, 2] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
    }


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    qtype: Callable[[str], Q] = lambda name: Q.F32,
) -> Path:
    """Write a file with the gguf package. `tensors` go by their GGUF names."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        writer.add_array(key, value) if isinstance(value, list) else add[type(value)](key, value)
    for name, values in tensors.items():
        kind = qtype(name)
        if kind is Q.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_llama_gguf(config: ModelConfig, tensors: Tensors) -> Tensors:
    """Canonical tensors under the names and in the row order of a llama GGUF file."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    return {
        gguf_name(name): interleave(values, heads[leaf]) if (leaf := name.split(".")[-1]) in heads else values
        for name, values in tensors.items()
    }


def hf_json(**changes: Any) -> dict[str, Any]:
    config = tiny_config()
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {**base, **changes}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """A checkpoint folder with config.json and one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({hf_name(name): values for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


class Tiny:
    """What the tests use, in one value, since test folders are not packages."""

    config = staticmethod(tiny_config)
    tensors = staticmethod(random_tensors)
    metadata = staticmethod(llama_metadata)
    as_llama_gguf = staticmethod(as_llama_gguf)
    write_gguf = staticmethod(write_gguf)
    hf_json = staticmethod(hf_json)
    write_folder = staticmethod(write_folder)

    @staticmethod
    def llama_gguf(path: Path, config: ModelConfig | None = None, **extra: Any) -> Path:
        config = config or tiny_config()
        tensors = as_llama_gguf(config, random_tensors(config))
        return write_gguf(path, "llama", {**llama_metadata(config), **extra}, tensors)


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny
