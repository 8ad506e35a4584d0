"""Fixtures that several folders use: backends, running a model over token ids, the default model's file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.ops import F32, Backend, KVCacheConfig, KVDtype, Limits, StepInputs
from octavo.core.kv_groups import group_layers

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Code that draws from a global generator draws the same in every run and order."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def make_backend() -> Callable[[str], Backend]:
    """A backend by name. Skips the test where the kernels have not been built."""

    def make(name: str) -> Backend:
        if name == "numpy":
            from octavo.backends.numpy_ref import NumpyBackend

            return NumpyBackend()
        pytest.importorskip("octavo._native", exc_type=ImportError, reason="the kernels are not built")
        from octavo.backends.native import NativeBackend

        return NativeBackend()

    return make


@pytest.fixture(scope="module", params=["numpy", "native"])
def backend(request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]) -> Backend:
    """Every backend in turn."""
    return make_backend(request.param)


RunModel = Callable[..., F32]


@pytest.fixture(scope="session")
def run_model() -> RunModel:
    """run_model(backend, model, tokens, chunk=…, block_size=…, kv_dtype=…) → logits [T, V] of one sequence,
    computed in steps of `chunk` tokens over blocks in scattered order."""

    def run(
        backend: Backend,
        model: object,
        tokens: np.ndarray,
        *,
        chunk: int = 512,
        block_size: int = 16,
        kv_dtype: KVDtype = "fp32",
    ) -> F32:
        width = -(-len(tokens) // block_size)
        layout = group_layers(model.kv_specs())  # type: ignore[attr-defined]
        num_groups = len(layout.groups)
        num_blocks = num_groups * width + 3
        limits = Limits(max(chunk, 1), 1, 1, width, max(chunk, 1))
        runner = backend.compile(model, KVCacheConfig(layout, num_blocks, block_size, kv_dtype), limits)  # type: ignore[arg-type]
        scattered = np.random.default_rng(0).permutation(num_blocks)[: num_groups * width].astype(np.int32)
        tables = tuple(scattered.reshape(num_groups, 1, width))  # per group [1, width]
        parts = []
        for start in range(0, len(tokens), chunk):
            part = np.asarray(tokens[start : start + chunk], np.int32)
            rows = np.arange(len(part), dtype=np.int32)
            end = np.array([start + len(part)], np.int32)
            starts = np.array([0, len(part)], np.int32)
            zero = np.zeros(1, np.int32)
            runner.forward(StepInputs(part, rows + np.int32(start), starts, end, zero, tables))
            parts.append(runner.logits(rows).copy())
        return np.concatenate(parts)

    return run


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in a folder of its own with a tokenizer: one token for each ASCII character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    unprintable = [*range(0x21), 0x7F]
    names = [chr(0x100 + unprintable.index(b)) if b in unprintable else chr(b) for b in range(128)]
    tokenizer = Tokenizer(models.BPE({name: byte for byte, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("text_model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "tiny" / "llama" / name, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file in the cache. Skips where it has not been fetched: tests never download."""
    from octavo.config import DEFAULT_MODEL
    from octavo.errors import ModelNotFoundError
    from octavo.weights import hub

    try:
        return Path(hub.resolve(DEFAULT_MODEL, offline=True))
    except ModelNotFoundError as error:
        pytest.skip(f"the default model is not in the cache: {error}")
