"""Tiny random checkpoints of every variant, against the logits of transformers.

tools/golden/make_tiny_models.py made both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.ops import F32, Backend, WeightDtype
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.weights.loader import open_checkpoint

NAMES = [
    "gemma2", "gemma3",
    "llama", "llama_bias", "llama_linear", "llama_llama3", "llama_tied_mha", "llama_yarn",
    "mistral_window", "qwen2", "qwen2_window", "qwen3",
]  # fmt: skip

STATE_SPACE = ["bamba", "mamba2", "mamba2_groups"]  # test_mamba_hybrid.py

Load = Callable[..., tuple[Decoder, np.ndarray, F32]]


@pytest.fixture(scope="module")
def load(golden_folder: Path) -> Load:
    """load(name, backend, weight_dtype, change) → the model, its tokens [24], the expected logits [24, V]."""

    def load(
        name: str,
        backend: Backend,
        weight_dtype: WeightDtype = "float32",
        change: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    ) -> tuple[Decoder, np.ndarray, F32]:
        folder = golden_folder / "tiny" / name
        checkpoint = open_checkpoint(folder)
        model = build_model(change(checkpoint.config), checkpoint, backend, weight_dtype)
        checkpoint.close()
        expected = np.load(folder / "expected.npz", allow_pickle=False)
        return model, expected["tokens"], expected["logits"]

    return load


def test_there_is_a_test_for_every_golden_folder(golden_folder: Path) -> None:
    folders = sorted(folder.name for folder in (golden_folder / "tiny").iterdir())
    assert folders == sorted(NAMES + STATE_SPACE)


@pytest.mark.parametrize("name", NAMES)
def test_exact_logits_agree_with_transformers(
    name: str, backend: Backend, load: Load, run_model: Callable[..., F32]
) -> None:
    model, tokens, expected = load(name, backend)
    np.testing.assert_allclose(run_model(backend, model, tokens), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama", "mistral_window", "qwen3"])
@pytest.mark.parametrize("weight_dtype", ["float32", "int8"])
def test_chunks_and_block_sizes_change_no_bit(
    name: str, weight_dtype: WeightDtype, backend: Backend, load: Load, run_model: Callable[..., F32]
) -> None:
    model, tokens, _ = load(name, backend, weight_dtype)
    whole = run_model(backend, model, tokens)
    for chunk, block_size in [(1, 16), (5, 4), (7, 1), (24, 32)]:
        assert np.array_equal(run_model(backend, model, tokens, chunk=chunk, block_size=block_size), whole)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama", "mistral_window", "qwen3"])
def test_an_int8_cache_keeps_the_logits_within_a_few_percent_and_its_blocks_unseen(
    name: str, backend: Backend, load: Load, run_model: Callable[..., F32]
) -> None:
    model, tokens, expected = load(name, backend)
    logits = run_model(backend, model, tokens, kv_dtype="int8")
    ratio = float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())
    assert 0.0005 < ratio < 0.03  # not exact: it must really have quantised
    for chunk, block_size in [(1, 16), (7, 1)]:
        other = run_model(backend, model, tokens, kv_dtype="int8", chunk=chunk, block_size=block_size)
        assert np.array_equal(other, logits)


@pytest.mark.parametrize("name", NAMES)
def test_int8_logits_stay_within_a_few_percent(
    name: str, backend: Backend, load: Load, run_model: Callable[..., F32]
) -> None:
    model, tokens, expected = load(name, backend, "int8")
    error = run_model(backend, model, tokens, kv_dtype="fp16") - expected
    ratio = float(np.sqrt((error**2).mean()) / expected.std())
    assert 0.001 < ratio < 0.06  # not exact: it must really have quantised


def test_numpy_and_native_agree_in_int8_mode(
    make_backend: Callable[[str], Backend], load: Load, run_model: Callable[..., F32]
) -> None:
    """What the specification fakes is what the integer kernels do, up to the order of attention's sums."""
    for name in ("llama", "qwen2"):
        results = []
        for backend in (make_backend("numpy"), make_backend("native")):
            model, tokens, expected = load(name, backend, "int8")
            results.append(run_model(backend, model, tokens))
        differences = np.abs(results[0] - results[1]) / expected.std()
        assert np.median(differences) < 2e-3  # an activation near a rounding boundary may go either way
        assert differences.max() < 0.08


def without_window(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, sliding_window=None)


def with_windows_everywhere(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, sliding_layers=())


def with_windows_in_other_layers(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, sliding_layers=config.sliding_layers[::-1])


def with_a_window_of_one_more(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, sliding_window=9)


def with_one_rope(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, local_rope=None)


def with_plain_query_scale(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, query_scale=None)


def without_attention_softcap(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, attention_softcap=None)


def without_logit_softcap(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, logit_softcap=None)


def without_embedding_scale(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, embedding_scale=1.0)


def with_silu(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, activation="silu")


def without_rope_scaling(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))


def without_biases(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, attention_bias=False, output_bias=False)


def without_qk_norm(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, qk_norm=False)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", with_windows_in_other_layers),
        ("gemma2", with_plain_query_scale),
        ("gemma2", without_attention_softcap),
        ("gemma2", without_logit_softcap),
        ("gemma3", without_window),
        ("gemma3", with_a_window_of_one_more),
        ("gemma3", with_windows_everywhere),
        ("gemma3", with_one_rope),
        ("gemma3", without_rope_scaling),
        ("gemma3", without_qk_norm),
        ("gemma3", with_plain_query_scale),
        ("gemma3", without_embedding_scale),
        ("gemma3", with_silu),
        ("mistral_window", without_window),
        ("qwen2_window", with_windows_everywhere),
        ("llama_linear", without_rope_scaling),
        ("llama_llama3", without_rope_scaling),
        ("llama_yarn", without_rope_scaling),
        ("llama_bias", without_biases),
        ("qwen2", without_biases),
        ("qwen3", without_qk_norm),
    ],
)
def test_each_variant_makes_a_difference(
    name: str,
    change: Callable[[ModelConfig], ModelConfig],
    make_backend: Callable[[str], Backend],
    load: Load,
    run_model: Callable[..., F32],
) -> None:
    """The golden values would notice if a field of the configuration were dropped on the way."""
    backend = make_backend("numpy")
    model, tokens, expected = load(name, backend, "float32", change)
    assert np.abs(run_model(backend, model, tokens) - expected).max() > 0.05
