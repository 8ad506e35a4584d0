"""Debug mode: freed blocks hold NaN, which changes no token, and a stale read does not go unseen; snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.ops import Backend
from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import assemble
from octavo.engine.engine import Engine
from octavo.engine.messages import BlockSnapshot, GenerateRequest, SequenceBlocks
from octavo.weights.loader import open_checkpoint

REQUESTS = [
    ([5, 17, 42, 90, 3, 8, 61], SamplingParams(n=3, seed=1, max_tokens=14, ignore_eos=True)),
    ([7, 7, 9], SamplingParams(n=2, beam_width=4, max_tokens=12, ignore_eos=True)),
    ([5, 17, 42, 90, 3, 8, 61, 20, 4], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)),
]


@pytest.fixture
def make_engine(golden_folder: Path) -> Callable[..., Engine]:
    def make(model: str, backend: Backend, **options: Any) -> Engine:
        checkpoint = open_checkpoint(golden_folder / "tiny" / model)
        config = EngineConfig(**({"num_blocks_override": 24, "block_size": 4} | options))
        try:
            return assemble(config, checkpoint, backend)
        finally:
            checkpoint.close()

    return make


def tokens_of(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Of all requests, twice, so that blocks are used again."""
    found: dict[tuple[str, int], list[int]] = {}
    for turn in range(2):
        for i, (prompt, params) in enumerate(REQUESTS):
            engine.add_request(GenerateRequest(f"{turn}-{i}", prompt, params))
        while engine.has_work:
            for delta in engine.step().deltas:
                assert delta.error is None
                found.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
    return found


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("weights", "kv"), [("float32", "fp32"), ("float32", "fp16"), ("int8", "fp16"), ("int8", "int8")]
)
@pytest.mark.parametrize("model", ["llama", "mistral_window", "bamba"])
def test_debug_mode_changes_no_token(
    backend: Backend, make_engine: Callable[..., Engine], model: str, weights: str, kv: str, cached: bool
) -> None:
    options = {"weight_dtype": weights, "kv_cache_dtype": kv, "prefix_caching": cached}
    options |= {"num_blocks_override": 60 if model == "bamba" else 24}
    plain = tokens_of(make_engine(model, backend, **options))
    engine = make_engine(model, backend, debug=True, **options)
    assert tokens_of(engine) == plain
    assert len(plain) == 12


def test_freed_blocks_are_filled_unless_they_can_be_found(make_rig: Any) -> None:
    rig = make_rig(num_blocks=6, block_size=4)
    rig.add("a", 10, 6, max_tokens=4)  # 10 tokens, of which the last is never computed
    rig.run()
    assert [row.tolist() for row in rig.runner.cache[:2]] == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert (rig.runner.cache[2:] == -1).all()
    assert rig.engine.reset_prefix_cache() == 2
    rig.add("b", 50, 1, max_tokens=1)
    rig.run()
    assert (rig.runner.cache == -1).all()


def test_a_stale_table_entry_ends_the_request_with_an_error(
    backend: Backend, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine("llama", backend, weight_dtype="float32", debug=True)
    engine.add_request(GenerateRequest("a", [5, 6, 7, 8, 9], SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    free = next(iter(engine.scheduler.allocator.pool.free_ids()))  # type: ignore[attr-defined]
    inputs = engine.executor._inputs
    inputs._tables[0][:, 0] = free
    [delta] = engine.step().deltas
    assert delta.finish_reason == "error"
    assert "not finite" in (delta.error or "")


def test_a_snapshot_shows_tables_counts_and_the_free_list(make_rig: Any) -> None:
    rig = make_rig(num_blocks=100, block_size=4)
    rig.add("a", 10, 7, max_tokens=3, n=2)
    rig.add("b", 40, 4, max_tokens=3)
    rig.step()
    rig.step()
    assert rig.engine.snapshot() == BlockSnapshot(
        block_size=4,
        ref_counts=[2, 1, 1, 1, 1] + [0] * 95,
        cached=[0, 2, 3],  # 1 holds what 3 does
        next_free=list(range(5, 69)),
        tables=[
            SequenceBlocks("a", 0, 0, [0, 3], 8),
            SequenceBlocks("a", 1, 0, [0, 1], 8),
            SequenceBlocks("b", 0, 0, [2, 4], 5),
        ],
    )
    while rig.engine.has_work:
        rig.engine.step()
    assert rig.engine.snapshot().tables == []
    assert sum(rig.engine.snapshot().ref_counts) == 0


def test_a_snapshot_numbers_beams_and_shows_the_swap_space(
    make_engine: Callable[..., Engine], make_backend: Callable[[str], Backend]
) -> None:
    options = {"weight_dtype": "float32", "swap_space_bytes": 1 << 20, "preemption_mode": "swap"}
    engine = make_engine("llama", make_backend("numpy"), num_blocks_override=11, debug=True, **options)
    beams = SamplingParams(n=2, beam_width=3, max_tokens=30, ignore_eos=True)
    engine.add_request(GenerateRequest("old", [1, 2, 3, 4], SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.add_request(GenerateRequest("beams", [5, 6, 7], beams))
    engine.step()
    engine.step()
    shown = engine.snapshot()
    assert [(t.request_id, t.choice) for t in shown.tables] == [("old", 0), *(("beams", i) for i in range(3))]
    while not engine.scheduler.num_swapped:
        assert engine.has_work, "nobody was swapped out"
        engine.step()
    swapped = engine.snapshot()
    assert {t.request_id for t in swapped.swap_tables} == {"beams"}
    assert {t.request_id for t in swapped.tables} == {"old"}
    held = {b for t in swapped.swap_tables for b in t.block_ids}
    assert len(held) == engine.scheduler.swap.num_used  # type: ignore[union-attr]
    assert swapped.num_swap_blocks > 0
    while engine.has_work:
        assert not any(d.error for d in engine.step().deltas)


def test_numpy_and_native_agree_in_debug_mode(
    make_engine: Callable[..., Engine], make_backend: Callable[[str], Backend]
) -> None:
    options = {"weight_dtype": "float32", "kv_cache_dtype": "fp32", "debug": True}
    greedy = [
        tokens_of(make_engine("llama", make_backend(b), **options))["0-2", 0] for b in ("numpy", "native")
    ]
    assert np.array_equal(*greedy)
