"""Window and full layers over one pool: what a sequence holds, and that what it gave back is never read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import F32, Backend
from octavo.core import invariants
from octavo.core.block import SeqId
from octavo.core.kv_groups import KVLayout, group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import KV_FORMATS, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.weights.loader import open_checkpoint

SEQ = SeqId(0)
GIB = 1 << 30
FULL, WINDOW = FullAttentionSpec(1, 256), SlidingWindowSpec(1, 256, window=512)
GEMMA3_270M: list[KVCacheSpec] = ([WINDOW] * 5 + [FULL]) * 3

Load = Callable[..., tuple[Decoder, np.ndarray]]


@pytest.fixture(scope="module")
def load(golden_folder: Path) -> Load:
    """load(name, backend, weight_dtype) → the tiny model and 60 tokens, seven times the window and more."""

    def load(name: str, backend: Backend, weight_dtype: str = "float32") -> tuple[Decoder, np.ndarray]:
        checkpoint = open_checkpoint(golden_folder / "tiny" / name)
        model = build_model(checkpoint.config, checkpoint, backend, weight_dtype)  # type: ignore[arg-type]
        checkpoint.close()
        return model, np.random.default_rng(3).integers(0, 128, 60).astype(np.int32)

    return load


def manager(layout: KVLayout, num_blocks: int, max_chunk: int) -> KVCacheManager:
    return KVCacheManager(layout, num_blocks, 16, max_chunk=max_chunk, prefix_caching=False)


def held(kv: KVCacheManager) -> list[int]:
    """Blocks of the sequence, per group."""
    return [len(table.held) for table in kv.tables[SEQ]]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral_window", "qwen2_window"])
@pytest.mark.parametrize(("weight_dtype", "kv_dtype"), [("float32", "fp32"), ("int8", "fp16")])
def test_reused_blocks_change_no_bit(
    name: str,
    weight_dtype: str,
    kv_dtype: str,
    backend: Backend,
    load: Load,
    run_model: Callable[..., F32],
    run_paged: Callable[..., F32],
) -> None:
    model, tokens = load(name, backend, weight_dtype)
    whole = run_model(backend, model, tokens, kv_dtype=kv_dtype)
    for chunk, block_size in [(1, 4), (3, 1), (7, 2), (16, 16)]:
        paged = run_paged(
            backend, model, tokens, range(60), chunk=chunk, block_size=block_size, kv_dtype=kv_dtype
        )
        assert np.array_equal(paged, whole), (chunk, block_size)


def test_window_layers_say_so(load: Load) -> None:
    model, _ = load("gemma3", NumpyBackend())
    window, full = SlidingWindowSpec(1, 16, window=8), FullAttentionSpec(1, 16)
    assert model.kv_specs() == ([window] * 5 + [full]) * 2
    layout = group_layers(model.kv_specs())
    assert [len(group.layers) for group in layout.groups] == [2, 2, 2, 2, 2, 2]
    assert layout.num_storages == 2
    mistral, _ = load("mistral_window", NumpyBackend())
    assert mistral.kv_specs() == [SlidingWindowSpec(2, 16, window=8)] * 2
    qwen2, _ = load("qwen2_window", NumpyBackend())
    assert qwen2.kv_specs() == [FullAttentionSpec(2, 16), SlidingWindowSpec(2, 16, window=8)]


def test_window_groups_stop_growing_at_the_window() -> None:
    """One token a step, 2000 of them: a query at p sees the blocks of (p - 512, p]."""
    kv = manager(group_layers(GEMMA3_270M), 290, max_chunk=1)
    kv.admit(SEQ)
    assert [group.spec for group in kv.layout.groups] == [WINDOW] * 5 + [FULL]
    for num_tokens in range(1, 2001):
        assert kv.grow(SEQ, num_tokens) is not None
        invariants.check(kv)
        position = num_tokens - 1
        in_window = position // 16 - max(0, position - 511) // 16 + 1
        assert held(kv) == [in_window] * 5 + [position // 16 + 1]
        assert in_window <= 33
    assert held(kv) == [32] * 5 + [125]
    assert kv.blocks_for(2000) == 5 * 33 + 125 == 290


def test_a_chunk_holds_its_own_blocks_besides_the_window() -> None:
    kv = manager(group_layers(GEMMA3_270M), 5 * 65 + 128, max_chunk=512)
    kv.admit(SEQ)
    for end in (512, 1024, 1536, 2048):
        assert kv.grow(SEQ, end) is not None
        window = min(end, 512 + 511)
        assert held(kv) == [-(-window // 16)] * 5 + [end // 16]


def num_sequences(layout: KVLayout, num_tokens: int) -> int:
    """Sequences of this length that 1 GiB of half-precision cache holds at once, each grown block by block."""
    num_blocks = GIB // layout.bytes_per_block(16, KV_FORMATS["fp16"])
    kv = manager(layout, num_blocks, max_chunk=16)
    count = 0
    while True:
        kv.admit(SeqId(count))
        for end in range(16, num_tokens + 1, 16):
            if kv.grow(SeqId(count), end) is None:
                return count
        count += 1


def test_windows_hold_more_tokens_in_the_same_memory() -> None:
    """Gemma 3 270M in 1 GiB: a block of 3 layers is 48 KiB, of all 18 layers 288 KiB."""
    windows, full = group_layers(GEMMA3_270M), group_layers([FULL] * 18)
    assert windows.bytes_per_block(16, KV_FORMATS["fp16"]) == 3 * 2 * 256 * 16 * 2 == 48 << 10
    assert full.bytes_per_block(16, KV_FORMATS["fp16"]) == 18 * 2 * 256 * 16 * 2 == 288 << 10
    # 21,845 blocks, 256 + 5 · 33 a sequence; 3,640 blocks, 256 a sequence
    assert (num_sequences(windows, 4096), num_sequences(full, 4096)) == (51, 14)
    # 2048 + 5 · 33 a sequence; 2048 a sequence
    assert (num_sequences(windows, 32_768), num_sequences(full, 32_768)) == (9, 1)
