"""Gemma 3 270M against transformers on the same file (tools/golden/make_gemma3.py).

Skipped where the model is not in the cache: `octavo serve gemma3-270m` fetches it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.ops import F32, Backend
from octavo.core.kv_spec import FullAttentionSpec, SlidingWindowSpec
from octavo.errors import ModelNotFoundError
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.weights import hub
from octavo.weights.loader import open_checkpoint

pytestmark = pytest.mark.model

NUM_GREEDY = 32
Golden = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return hub.resolve("gemma3-270m", offline=True)
    except ModelNotFoundError as error:
        pytest.skip(f"Gemma 3 is not in the cache: {error}")


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> Golden:
    with np.load(golden_folder / "gemma3.npz", allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def native(make_backend: Callable[[str], Backend]) -> Backend:
    return make_backend("native")


def build(path: Path, backend: Backend, weight_dtype: str) -> Decoder:
    checkpoint = open_checkpoint(path)
    try:
        return build_model(checkpoint.config, checkpoint, backend, weight_dtype)  # type: ignore[arg-type]
    finally:
        checkpoint.close()


@pytest.fixture(scope="module")
def exact(path: Path, native: Backend) -> Decoder:
    return build(path, native, "float32")


def whole_text(golden: Golden, name: str) -> np.ndarray:
    return np.concatenate([golden[f"{name}.prompt"], golden[f"{name}.greedy"]])


def greedy_rows(golden: Golden, name: str) -> list[int]:
    """Positions whose logits the greedy tokens were chosen from."""
    last = len(golden[f"{name}.prompt"]) - 1
    return list(range(last, last + NUM_GREEDY))


def test_the_long_prompt_reaches_past_twice_the_window(golden: Golden) -> None:
    assert golden["names"].tolist() == ["short", "code", "long"]
    positions = golden["long.positions"].tolist()
    assert len(golden["long.prompt"]) == 1200
    assert {510, 511, 512, 513, 1022, 1023, 1024, 1025} <= set(positions)


@pytest.mark.parametrize("name", ["short", "code", "long"])
def test_exact_logits_and_greedy_tokens_agree_with_transformers(
    name: str, golden: Golden, native: Backend, exact: Decoder, run_paged: Callable[..., F32]
) -> None:
    """In chunks of 256, over blocks that return to the pool when they slide out of the window."""
    positions = golden[f"{name}.positions"].tolist()
    rows = sorted({*positions, *greedy_rows(golden, name)})
    logits = run_paged(native, exact, whole_text(golden, name), rows, chunk=256)
    found = logits[[rows.index(p) for p in positions]]  # [P, V]
    top = np.take_along_axis(found, golden[f"{name}.top_ids"], axis=-1)
    np.testing.assert_allclose(top, golden[f"{name}.top_values"], rtol=0, atol=5e-4)
    np.testing.assert_allclose(found[:, golden["subset"]], golden[f"{name}.subset_values"], rtol=0, atol=5e-4)
    chosen = logits[[rows.index(p) for p in greedy_rows(golden, name)]].argmax(-1)
    assert chosen.tolist() == golden[f"{name}.greedy"].tolist()


def test_three_layers_of_eighteen_see_everything(exact: Decoder) -> None:
    window, full = SlidingWindowSpec(1, 256, window=512), FullAttentionSpec(1, 256)
    assert exact.kv_specs() == ([window] * 5 + [full]) * 3


@pytest.mark.parametrize(("weight_dtype", "least"), [("int8", 86), ("native", 91)])
def test_rounded_modes_keep_most_of_the_greedy_choices(
    path: Path,
    golden: Golden,
    native: Backend,
    run_paged: Callable[..., F32],
    caplog: pytest.LogCaptureFixture,
    weight_dtype: str,
    least: int,
) -> None:
    with caplog.at_level(logging.INFO):
        model = build(path, native, weight_dtype)
    assert not caplog.records  # a Q4_K_M file: of Q4_K, Q5_0, Q6_K and Q8_0 nothing is rounded to int8
    agreed = 0
    for name in ("short", "code", "long"):
        rows = greedy_rows(golden, name)
        text = whole_text(golden, name)
        logits = run_paged(native, model, text, rows, chunk=256, kv_dtype="fp16")
        agreed += int((logits.argmax(-1) == golden[f"{name}.greedy"]).sum())
    assert agreed >= least, agreed  # of 96; where it differs, two tokens are nearly equal in exact mode


def test_the_tokenizer_gives_the_ids_of_sentencepiece(path: Path, golden: Golden) -> None:
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    checkpoint.close()
    for name in golden["names"].tolist():
        assert tokenizer.encode(str(golden[f"{name}.text"])) == golden[f"{name}.prompt"].tolist(), name
    texts = [bytes.fromhex(text).decode() for text in golden["tokens.texts"].tolist()]
    expected = np.split(golden["tokens.ids"], np.cumsum(golden["tokens.counts"])[:-1])
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids.tolist(), text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (2, (1, 106))
    assert tokenizer.token_text(106) == "<end_of_turn>"
