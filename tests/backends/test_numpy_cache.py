"""The cache of the NumPy backend: where block tables put keys and values, blocks, refused inputs."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.numpy_cache import PagedCache
from octavo.backends.numpy_ref import NumpyBackend, NumpyOps, NumpyRunner
from octavo.backends.ops import F32, KVCacheConfig, Limits, Ops, StepInputs
from octavo.core.kv_groups import KVLayer, group_layers
from octavo.core.kv_spec import FullAttentionSpec, KVFormat

LAYER = KVLayer(0, 0)


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def step(spans: list[tuple[int, int]], tables: np.ndarray, tokens: np.ndarray | None = None) -> StepInputs:
    """Sequence s computes positions [start, end) of spans[s] and uses row s of `tables`."""
    positions = np.concatenate([np.arange(a, b) for a, b in spans]).astype(np.int32)
    starts = np.cumsum([0] + [b - a for a, b in spans]).astype(np.int32)
    return StepInputs(
        tokens=np.zeros(len(positions), np.int32) if tokens is None else tokens,
        positions=positions,
        query_starts=starts,
        seq_lens=i32(*[b for _, b in spans]),
        table_rows=np.arange(len(spans), dtype=np.int32),
        block_tables=(np.asarray(tables, np.int32),),
    )


def cache_config(
    block_size: int = 4, num_blocks: int = 64, dtype: str = "fp32", layers: int = 1
) -> KVCacheConfig:
    spec = FullAttentionSpec(num_kv_heads=2, head_size=8)
    return KVCacheConfig(group_layers([spec] * layers), num_blocks, block_size, dtype)  # type: ignore[arg-type]


class Lookup:
    """A model that only embeds: its cache is there to be moved about."""

    def __init__(self, backend: NumpyBackend) -> None:
        self.table = backend.embedding(normal(1, 50, 8), "float32")

    def forward(self, ops: Ops) -> F32:
        return ops.embed(self.table)

    def logits(self, ops: Ops, hidden: F32) -> F32:
        return ops.scale(hidden, 2.0)


def lookup_runner(cache: KVCacheConfig, limits: Limits) -> NumpyRunner:
    backend = NumpyBackend()
    return backend.compile(Lookup(backend), cache, limits)


def make_ops(inputs: StepInputs, **config: object) -> tuple[NumpyOps, PagedCache]:
    cache = PagedCache(cache_config(**config))  # type: ignore[arg-type]
    return NumpyOps(inputs, cache), cache


def test_write_kv_follows_the_block_table_of_the_article() -> None:
    """A 7-token prompt with blocks of 4 lies in blocks 7 and 1; the next token fills block 1's last slot."""
    table = [[7, 1, 3]]
    ops, cache = make_ops(step([(0, 7)], table), num_blocks=8)
    k = np.arange(7, dtype=np.float32)[:, None] + np.zeros(16, np.float32) + 1
    ops.write_kv(k, -k, LAYER)
    keys, values = cache.view(LAYER)[:, 0, 1, :, 5], cache.view(LAYER)[:, 1, 0, :, 0]  # [N, B]
    assert keys[[7, 1, 3]].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0], [0, 0, 0, 0]]
    NumpyOps(step([(7, 9)], table), cache).write_kv(k[:2] + 7, -k[:2] - 7, LAYER)
    assert keys[[7, 1, 3]].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
    assert np.array_equal(values, -keys)
    assert np.count_nonzero(np.delete(keys, [7, 1, 3], 0)) == 0


def test_stale_nan_slots_do_not_reach_the_result() -> None:
    inputs = step([(0, 5)], [[2, 0]])
    clean, _ = make_ops(inputs)
    dirty, cache = make_ops(inputs)
    cache.storages[:] = np.nan
    q, k, v = normal(1, 5, 32), normal(2, 5, 16), normal(3, 5, 16)
    results = []
    for ops in (clean, dirty):
        ops.write_kv(k, v, LAYER)
        results.append(ops.paged_attention(q, LAYER, 1.0))
    assert np.array_equal(*results)


def test_half_precision_cache_rounds_keys_and_values_once() -> None:
    ops, cache = make_ops(step([(0, 3)], [[1]]), dtype="fp16")
    k, v = normal(1, 3, 16), normal(2, 3, 16)
    ops.write_kv(k, v, LAYER)
    read_k, read_v = cache.read(LAYER, i32(1), 3)
    assert np.array_equal(read_k.reshape(3, 16), k.astype(np.float16).astype(np.float32))
    assert np.array_equal(read_v.reshape(3, 16), v.astype(np.float16).astype(np.float32))


def test_int8_cache_keeps_integers_and_a_scale_for_each_key_and_value() -> None:
    ops, cache = make_ops(step([(0, 3)], [[1]]), dtype="int8")
    k, v = np.zeros((2, 3, 2, 8), np.float32)  # [T, K, D]
    k[0, 0] = [254.0, -254.0, 1.0, -1.0, 3.0, 5.0, 0.9, -2.1]  # scale 2: the halves go to the even integer
    k[0, 1, 7] = -127.0
    v[2, 0] = 6.35
    v[2, 1] = normal(1, 8)
    ops.write_kv(k.reshape(3, 16), v.reshape(3, 16), LAYER)
    numbers, scales = cache.view(LAYER)[1], cache.scales(LAYER)[1]  # [2, K, B, D], [2, K, B]
    assert numbers[0, 0, 0].tolist() == [127, -127, 0, 0, 2, 2, 0, -1]
    assert numbers[0, 1, 0].tolist() == [0] * 7 + [-127]
    assert numbers[1, 0, 2].tolist() == [127] * 8
    assert scales[0].tolist() == [[2, 0, 0, 0], [1, 0, 0, 0]]
    assert scales[1, 0].tolist() == [0, 0, np.float32(6.35) / np.float32(127), 0]
    read_k, read_v = cache.read(LAYER, i32(1), 3)
    assert read_k[0, 0].tolist() == [254, -254, 0, 0, 4, 4, 0, -2]
    assert not read_k[1:].any()
    assert np.abs(read_v[2, 1] - v[2, 1]).max() <= scales[1, 1, 2] / 2
    assert not np.delete(cache.storages, 1, axis=1).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_spoils_its_own_int8_vector_alone(bad: float) -> None:
    ops, cache = make_ops(step([(0, 3)], [[1]]), dtype="int8")
    k, v = normal(1, 3, 16), normal(2, 3, 16)
    k[1, 11] = v[2, 3] = bad
    ops.write_kv(k, v, LAYER)
    for vectors, spoilt in zip(cache.read(LAYER, i32(1), 3), [(1, 1), (2, 0)], strict=True):
        assert np.isnan(vectors[spoilt]).all()
        assert np.isnan(vectors).sum() == 8


def test_nan_fills_the_scales_of_an_int8_block_and_its_bytes_can_be_restored() -> None:
    inputs = step([(0, 5)], [[2, 0]])
    ops, cache = make_ops(inputs, dtype="int8", num_blocks=3, layers=2)
    q, k, v = normal(1, 5, 32), normal(2, 5, 16), normal(3, 5, 16)
    ops.write_kv(k, v, LAYER)
    want = ops.paged_attention(q, LAYER, 1.0)
    saved = cache.read_block(2)
    assert saved.nbytes == 2 * 2 * 2 * 4 * (8 + 4)  # layers, k and v, K, B, D integers and a scale
    cache.fill_block(2, float("nan"))
    assert np.isnan(cache.scales(LAYER)[2]).all()
    assert np.isnan(cache.scales(KVLayer(0, 1))[2]).all()
    assert np.isfinite(cache.scales(LAYER)[:2]).all()
    assert np.isnan(ops.paged_attention(q, LAYER, 1.0)).all()
    cache.write_block(2, saved)
    assert np.array_equal(ops.paged_attention(q, LAYER, 1.0), want)
    cache.copy_blocks(i32(2), i32(1))
    assert np.array_equal(cache.read_block(1), saved)


def test_int8_blocks_of_odd_sizes_hold_whole_floats() -> None:
    layout = group_layers([FullAttentionSpec(1, 3)])
    cache = PagedCache(KVCacheConfig(layout, num_blocks=2, block_size=1, dtype="int8"))
    assert cache.storages.shape == (1, 2, 16)  # 2 · (3 + 4) = 14 bytes
    cache.fill_block(1, float("nan"))
    assert np.isnan(cache.scales(layout.layers[0])).tolist() == [[[[False]], [[False]]], [[[True]], [[True]]]]


def test_blocks_are_copied_read_written_and_filled_in_every_storage() -> None:
    runner = lookup_runner(cache_config(num_blocks=6, layers=3), Limits(8, 1, 1, 4, 8))
    for block in range(6):
        runner.fill_block(block, float(block))
    runner.copy_blocks(i32(5, 4), i32(0, 1))
    bytes_per_block = 3 * 2 * 2 * 8 * 4 * 4  # layers, k and v, K, D, B, float32
    assert runner.read_block(0).shape == (bytes_per_block,)
    assert [set(runner.read_block(b).view(np.float32)) for b in range(6)] == [
        {5.0},
        {4.0},
        {2.0},
        {3.0},
        {4.0},
        {5.0},
    ]
    data = np.arange(bytes_per_block, dtype=np.uint8)
    runner.write_block(2, data)
    assert np.array_equal(runner.read_block(2), data)
    assert set(runner.read_block(3).view(np.float32)) == {3.0}


def test_a_layer_of_a_narrower_group_uses_the_front_of_each_block() -> None:
    wide, narrow = FullAttentionSpec(2, 8), FullAttentionSpec(1, 4)
    layout = group_layers([wide, narrow])
    cache = PagedCache(KVCacheConfig(layout, num_blocks=3, block_size=2, dtype="fp32"))
    assert cache.storages.shape == (1, 3, 64)
    assert cache.view(layout.layers[0]).shape == (3, 2, 2, 2, 8)
    cache.view(layout.layers[1])[1] = 1.0
    assert cache.storages[0].sum(axis=1).tolist() == [0.0, 16.0, 0.0]


def test_a_cache_spec_without_keys_is_refused() -> None:
    class StateSpec:
        def bytes_per_block(self, block_size: int, kv_format: KVFormat) -> int:
            return 64

        def num_blocks(self, num_tokens: int, block_size: int) -> int:
            return 1

    cache = PagedCache(KVCacheConfig(group_layers([StateSpec()]), num_blocks=1, block_size=1, dtype="fp32"))
    with pytest.raises(ValueError, match="the layer caches StateSpec, not keys and values"):
        cache.view(LAYER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": i32(0, 1, 2, 3, 4, 5, 6, 7, 8)}, "9 tokens and 1 sequences exceeds the limits of 8"),
        ({"tokens": i32(0, -1, 2)}, "token id -1 is negative"),
        ({"query_starts": i32(0, 2)}, "must rise from 0 to 3"),
        ({"positions": i32(0, 2, 3)}, "positions of sequence 0 must be consecutive and below 3"),
        ({"positions": i32(1, 2, 3)}, "positions of sequence 0 must be consecutive and below 3"),
        ({"block_tables": (np.array([[64]], np.int32),)}, "no valid block for position 2"),
        ({"block_tables": (np.array([[-1]], np.int32),)}, "no valid block for position 2"),
        ({"positions": i32(2, 3, 4), "seq_lens": i32(5)}, "no valid block for position 4"),
    ],
)
def test_inputs_that_would_index_outside_are_refused(change: dict[str, object], message: str) -> None:
    good = step([(0, 3)], [[0]], tokens=i32(0, 1, 2))
    fields = {name: getattr(good, name) for name in StepInputs.__slots__}
    runner = lookup_runner(cache_config(), Limits(8, 2, 2, 1, 4))
    runner.forward(good)
    with pytest.raises(ValueError, match=message):
        runner.forward(StepInputs(**{**fields, **change}))  # type: ignore[arg-type]


def test_logit_rows_must_exist() -> None:
    runner = lookup_runner(cache_config(), Limits(8, 2, 2, 1, 2))
    with pytest.raises(ValueError, match="before any forward"):
        runner.logits(i32(0))
    runner.forward(step([(0, 3)], [[0]]))
    with pytest.raises(ValueError, match=r"logit rows \[3\] must lie in \[0, 3\)"):
        runner.logits(i32(3))
    with pytest.raises(ValueError, match="3 logit rows exceed the limit of 2"):
        runner.logits(i32(0, 1, 2))


def test_token_ids_beyond_the_table_are_refused() -> None:
    runner = lookup_runner(cache_config(), Limits(8, 2, 2, 1, 2))
    with pytest.raises(ValueError, match="token id 50 is not below the 50 rows"):
        runner.forward(step([(0, 2)], [[0]], tokens=i32(3, 50)))


@pytest.mark.parametrize("block_id", [-1, 6])
def test_blocks_outside_the_cache_are_refused(block_id: int) -> None:
    runner = lookup_runner(cache_config(num_blocks=6), Limits(8, 1, 1, 4, 8))
    message = rf"block id {block_id} must lie in \[0, 6\)"
    with pytest.raises(ValueError, match=message):
        runner.copy_blocks(i32(0), i32(block_id))
    with pytest.raises(ValueError, match=message):
        runner.copy_blocks(i32(block_id), i32(0))
    with pytest.raises(ValueError, match=message):
        runner.read_block(block_id)
    with pytest.raises(ValueError, match=message):
        runner.write_block(block_id, np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match=message):
        runner.fill_block(block_id, 0.0)


def test_a_block_of_another_size_is_refused() -> None:
    runner = lookup_runner(cache_config(num_blocks=6), Limits(8, 1, 1, 4, 8))
    with pytest.raises(ValueError, match="a block has 512 bytes, not 511"):
        runner.write_block(0, np.zeros(511, np.uint8))
