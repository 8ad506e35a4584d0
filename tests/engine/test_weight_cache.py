"""Starting from packed weights on disk: no tensor is read, and every bit of the logits is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.native import NativeBackend
from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import F32
from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine import build
from octavo.engine.llm import LLM
from octavo.models.registry import build_model
from octavo.weights.hf_folder import HFCheckpoint
from octavo.weights.packed_cache import PackedCache, identity_of

NAMES = ["bamba", "gemma3", "llama_bias", "llama_tied_mha", "mamba2_groups", "qwen3"]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which keeps tiny models too."""
    monkeypatch.setattr(build, "MIN_MODEL_BYTES", 0)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "packed"


class Unreadable(HFCheckpoint):
    def tensor(self, name: str) -> F32:
        raise AssertionError(f"{name} is read although it is in the cache")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight_dtype", ["int8", "float32"])
def test_a_model_from_the_cache_has_the_same_logits(
    name: str, weight_dtype: str, golden_folder: Path, run_model: Callable[..., F32]
) -> None:
    folder, tokens = golden_folder / "tiny" / name, np.arange(20, dtype=np.int32)
    logits, sizes = [], []
    for kind in (HFCheckpoint, HFCheckpoint, Unreadable):
        checkpoint, backend = kind(folder), NativeBackend(1)
        kept = None
        if logits:  # the first run has no cache, the second fills it, the third has nothing else
            identity = identity_of(folder, checkpoint.files, weight_dtype, backend.code_files())
            kept = PackedCache(identity, backend.restore)
        model = build_model(checkpoint.config, checkpoint, backend, weight_dtype, None, kept)  # type: ignore[arg-type]
        if kept is not None and (thread := kept.finish()):
            thread.join()
        logits.append(run_model(backend, model, tokens).tobytes())
        sizes.append(backend.num_weight_bytes)
    assert logits[0] == logits[1] == logits[2]
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_the_second_start_answers_alike_and_reads_no_tensor(
    text_model: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(**options: object) -> list[int]:
        llm = LLM(str(text_model), num_blocks_override=16, num_threads=1, **options)
        [output] = llm.generate(["Once"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        return output.outputs[0].token_ids

    threads = []
    finish = PackedCache.finish
    monkeypatch.setattr(PackedCache, "finish", lambda cache: threads.append(finish(cache)))
    expected = answer(weight_cache=False)
    assert not cache_folder.exists()
    assert answer() == expected
    threads[0].join()
    monkeypatch.setattr(HFCheckpoint, "tensor", Unreadable.tensor)
    assert answer() == expected
    assert len(list(cache_folder.iterdir())) == 1


def test_what_is_packed_in_no_time_and_the_numpy_backend_are_not_kept(
    text_model: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, config = HFCheckpoint(text_model), EngineConfig()
    assert build._open_cache(config, "int8", checkpoint, NativeBackend(1)) is not None
    assert build._open_cache(config, "int8", checkpoint, NumpyBackend()) is None
    monkeypatch.setattr(build, "MIN_MODEL_BYTES", 1 << 40)
    assert build._open_cache(config, "int8", checkpoint, NativeBackend(1)) is None
