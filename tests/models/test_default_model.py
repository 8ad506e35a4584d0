"""The default model against transformers on the same file (tools/golden/make_default_model.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.ops import F32, Backend, KVCacheConfig, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.weights.loader import open_checkpoint

pytestmark = pytest.mark.model

NUM_GREEDY = 64
Golden = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> Golden:
    with np.load(golden_folder / "default_model.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def build(path: Path, backend: Backend, weight_dtype: str) -> Decoder:
    checkpoint = open_checkpoint(path)
    return build_model(checkpoint.config, checkpoint, backend, weight_dtype)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def native(make_backend: Callable[[str], Backend]) -> Backend:
    return make_backend("native")


@pytest.fixture(scope="module")
def exact(default_model_path: Path, native: Backend) -> Decoder:
    return build(default_model_path, native, "float32")


def whole_text(golden: Golden, name: str) -> np.ndarray:
    return np.concatenate([golden[f"{name}.prompt"], golden[f"{name}.greedy"]])


def assert_golden_logits(golden: Golden, name: str, logits: F32) -> None:
    rows = logits[golden[f"{name}.positions"]]  # [P, V]
    top = np.take_along_axis(rows, golden[f"{name}.top_ids"], axis=-1)
    np.testing.assert_allclose(top, golden[f"{name}.top_values"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(rows[:, golden["subset"]], golden[f"{name}.subset_values"], rtol=0, atol=2e-3)


def greedy_batch(backend: Backend, model: Decoder, prompts: list[np.ndarray], block_size: int) -> np.ndarray:
    """Decode side by side, as the engine does: a step over all prompts, then a token each → [S, 64]."""
    num_seqs = len(prompts)
    width = -(-(max(map(len, prompts)) + NUM_GREEDY) // block_size)
    tables = np.random.default_rng(1).permutation(num_seqs * width).reshape(num_seqs, width).astype(np.int32)
    cache = KVCacheConfig(group_layers(model.kv_specs()), tables.size, block_size, "fp32")
    num_prompt = sum(map(len, prompts))
    runner = backend.compile(model, cache, Limits(num_prompt, num_seqs, num_seqs, width, num_seqs))
    lens = np.zeros(num_seqs, np.int32)  # [S] tokens in the cache
    news, out = [np.asarray(p, np.int32) for p in prompts], []
    for _ in range(NUM_GREEDY):
        counts = [len(new) for new in news]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(lens, counts, strict=True)])
        lens = lens + np.array(counts, np.int32)
        rows = np.arange(num_seqs, dtype=np.int32)
        runner.forward(
            StepInputs(np.concatenate(news), positions.astype(np.int32), starts, lens, rows, (tables,))
        )
        tokens = runner.logits(starts[1:] - 1).argmax(-1).astype(np.int32)  # [S]
        news = list(tokens[:, None])
        out.append(tokens)
    return np.stack(out, axis=1)


def test_greedy_decoding_of_all_prompts_gives_the_tokens_of_transformers(
    golden: Golden, native: Backend, exact: Decoder
) -> None:
    names = golden["names"].tolist()
    assert len(names) == 8
    tokens = greedy_batch(native, exact, [golden[f"{name}.prompt"] for name in names], block_size=16)
    for name, row in zip(names, tokens, strict=True):
        assert row.tolist() == golden[f"{name}.greedy"].tolist(), name


@pytest.mark.parametrize("name", ["short", "code", "chat", "cjk_emoji", "long"])
def test_exact_logits_agree_with_transformers(
    name: str, golden: Golden, native: Backend, exact: Decoder, run_model: Callable[..., F32]
) -> None:
    assert_golden_logits(golden, name, run_model(native, exact, whole_text(golden, name)))


def test_the_specification_agrees_with_transformers(
    default_model_path: Path,
    golden: Golden,
    make_backend: Callable[[str], Backend],
    run_model: Callable[..., F32],
) -> None:
    backend = make_backend("numpy")
    logits = run_model(backend, build(default_model_path, backend, "float32"), whole_text(golden, "chat"))
    assert_golden_logits(golden, "chat", logits)
    last = len(golden["chat.prompt"]) - 1
    assert logits[last:-1].argmax(-1).tolist() == golden["chat.greedy"].tolist()


@pytest.mark.parametrize(("weight_dtype", "least"), [("int8", 0.95), ("native", 0.96)])
def test_rounded_modes_keep_most_of_the_greedy_choices(
    default_model_path: Path,
    golden: Golden,
    native: Backend,
    run_model: Callable[..., F32],
    weight_dtype: str,
    least: float,
) -> None:
    """Given the same text before it, the most likely next token is the exact mode's, nearly always."""
    model = build(default_model_path, native, weight_dtype)
    agreed = 0
    names = golden["names"].tolist()
    for name in names:
        logits = run_model(native, model, whole_text(golden, name), kv_dtype="fp16")
        last = len(golden[f"{name}.prompt"]) - 1
        agreed += int((logits[last:-1].argmax(-1) == golden[f"{name}.greedy"]).sum())
    assert agreed >= least * NUM_GREEDY * len(names)


def test_the_tokenizer_gives_the_ids_of_transformers(default_model_path: Path, golden: Golden) -> None:
    tokenizer = open_checkpoint(default_model_path).tokenizer()
    for name in golden["names"].tolist():
        assert tokenizer.encode(str(golden[f"{name}.text"])) == golden[f"{name}.prompt"].tolist(), name
