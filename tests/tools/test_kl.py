"""The sums of tools/kl.py, by hand and on a tiny checkpoint."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import F32
from octavo.models.registry import build_model
from octavo.weights.loader import open_checkpoint


@pytest.fixture(scope="module")
def kl() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "kl.py"
    spec = importlib.util.spec_from_file_location("kl", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kl"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_compare_sums_over_the_positions_with_a_known_next_token(kl: ModuleType) -> None:
    """Row 0: (1/2, 1/2) against (1/4, 3/4); row 1: the same twice; row 2 has no next token."""
    exact = np.log(np.float32([[0.5, 0.5], [0.2, 0.8], [0.5, 0.5]]))
    int8 = np.log(np.float32([[0.25, 0.75], [0.2, 0.8], [0.9, 0.1]])) + np.float32(3.0)
    score = kl.compare(exact, int8, np.array([0, 1]))
    assert score.num_tokens == 2
    assert score.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)
    assert score.num_agreed == 1  # row 0: a tie, so the first, against the second
    assert score.nll_exact == pytest.approx(-math.log(0.5) - math.log(0.8), rel=1e-6)
    assert score.nll_rounded == pytest.approx(-math.log(0.25) - math.log(0.8), rel=1e-6)
    assert (score + score).mean_kl == pytest.approx(score.mean_kl)


@pytest.mark.parametrize("model", ["llama", "gemma3"])  # one group of layers, and several
@pytest.mark.parametrize(("weight_dtype", "kv_dtype"), [("int8", "fp16"), ("float32", "int8")])
def test_a_text_is_scored_across_chunks(
    kl: ModuleType,
    golden_folder: Path,
    run_model: Callable[..., F32],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    weight_dtype: str,
    kv_dtype: str,
) -> None:
    monkeypatch.setattr(kl, "CHUNK", 5)
    backend = NumpyBackend()
    checkpoint = open_checkpoint(golden_folder / "tiny" / model)
    tokens = np.random.default_rng(0).integers(0, 128, 24).astype(np.int32)
    modes = kl.EXACT, (weight_dtype, kv_dtype)
    readers = tuple(kl.compile_mode(checkpoint, backend, *mode, 24) for mode in modes)
    score = kl.score_text(readers, tokens)

    logits = [
        run_model(backend, build_model(checkpoint.config, checkpoint, backend, dtype), tokens, kv_dtype=kv)
        for dtype, kv in modes
    ]
    whole = kl.compare(logits[0], logits[1], tokens[1:])
    assert score.num_tokens == 23
    assert score.kl == pytest.approx(whole.kl, rel=1e-9)
    assert score.nll_exact == pytest.approx(whole.nll_exact, rel=1e-9)
    assert score.nll_rounded == pytest.approx(whole.nll_rounded, rel=1e-9)
    assert 0 < score.mean_kl < 0.05


def test_the_texts_are_named_and_long_enough(kl: ModuleType) -> None:
    texts = kl.read_texts()
    assert list(texts) == ["story", "talk", "pumps", "questions", "cc0", "apache"]
    assert sum(len(text.split()) for text in texts.values()) == 4602
    assert texts["pumps"].startswith("A heat pump does not make heat.")
