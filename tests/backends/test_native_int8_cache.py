"""int8 blocks of the native backend: the bits are the specification's, and can be filled, saved and restored."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import KVCacheConfig, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec

NUM_BLOCKS, BLOCK_SIZE = 20, 4
LIMITS = Limits(max_tokens=8, max_seqs=2, max_table_rows=3, max_blocks_per_seq=5, max_logit_rows=2)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("block_size", [3, BLOCK_SIZE, 6])
def test_int8_blocks_hold_the_integers_and_scales_of_the_specification(function_model, isa, block_size):
    """Two kv heads of 24 columns, which end within a register; zeros, a NaN and values too small for a scale."""
    spec, num_tokens = FullAttentionSpec(2, 24), 6
    table = np.random.default_rng(0).standard_normal((num_tokens, 96)).astype(np.float32)
    table[1, :24], table[2, 30], table[3, 48:72] = 0.0, np.nan, 1e-37
    ids = np.arange(num_tokens, dtype=np.int32)
    blocks = np.array([[5, 2, 0, 0, 0]], np.int32)
    step = StepInputs(ids, ids, int32(0, 6), int32(6), int32(0), (blocks,))
    cache = KVCacheConfig(group_layers([spec]), NUM_BLOCKS, block_size, "int8")
    heads = []
    for backend in (NativeBackend(2, isa), NumpyBackend()):
        embedding = backend.embedding(table, "float32")

        def forward(ops, embedding=embedding):
            k, v = ops.split(ops.embed(embedding), (48, 48))
            ops.write_kv(k, v, cache.layout.layers[0])
            return k

        runner = backend.compile(function_model(forward), cache, LIMITS)
        runner.forward(step)
        heads.append(np.stack([runner.read_block(b) for b in (5, 2)]))
    vectors = 2 * block_size  # of a head in a block
    assert heads[0].shape == heads[1].shape == (2, 2 * vectors * (24 + 4))
    native = heads[0].reshape(2, 2, -1)  # [blocks, K, scales, K by 4 columns, V by 4 tokens]
    scales = np.ascontiguousarray(native[..., : 4 * vectors]).view(np.float32).reshape(2, 2, 2, block_size)
    keys, values = np.split(native[..., 4 * vectors :], 2, axis=2)
    keys = keys.reshape(2, 2, 6, block_size, 4).transpose(0, 1, 3, 2, 4).reshape(2, 2, block_size, 24)
    group = 4 if block_size % 4 == 0 else 1
    values = values.reshape(2, 2, block_size // group, 24, group).swapaxes(3, 4).reshape(2, 2, block_size, 24)
    wanted_scales = np.ascontiguousarray(heads[1][:, : 8 * vectors]).view(np.float32)
    wanted_scales = wanted_scales.reshape(2, 2, 2, block_size)  # [blocks, k or v, K, B]
    wanted = heads[1][:, 8 * vectors :].view(np.int8).reshape(2, 2, 2, block_size, 24)
    np.testing.assert_array_equal(scales.swapaxes(1, 2), wanted_scales)
    token = np.arange(2 * block_size).reshape(2, 1, block_size, 1)
    np.testing.assert_array_equal(np.where(token < num_tokens, keys ^ 128, 0).view(np.int8), wanted[:, 0])
    np.testing.assert_array_equal(np.where(token < num_tokens, values ^ 128, 0).view(np.int8), wanted[:, 1])
    block, slot = divmod(3, block_size)
    assert scales[0, 0, 0, 1] == scales[block, 0, 1, slot] == 0.0  # [blocks, K, k or v, B]
    assert np.isnan(scales[0, 1, 0, 2])
    assert (keys.max(), keys[keys > 0].min()) == (255, 1)  # 127 and -127


def test_nan_fills_every_scale_of_an_int8_block_and_its_bytes_can_be_restored(function_model):
    backend = NativeBackend(1)
    table = backend.embedding(np.ones((10, 8), np.float32), "float32")
    cache = KVCacheConfig(group_layers([FullAttentionSpec(1, 8)] * 2), NUM_BLOCKS, BLOCK_SIZE, "int8")
    runner = backend.compile(function_model(lambda ops: ops.embed(table)), cache, LIMITS)
    saved = (np.arange(2 * 2 * BLOCK_SIZE * (8 + 4)) % 251).astype(np.uint8)
    runner.write_block(3, saved)
    runner.copy_blocks(int32(3), int32(4))
    runner.fill_block(3, float("nan"))
    scales = runner.read_block(3).reshape(2, -1)[:, : 8 * BLOCK_SIZE]  # [storages, scales of k and v]
    assert np.isnan(np.ascontiguousarray(scales).view(np.float32)).all()
    np.testing.assert_array_equal(runner.read_block(4), saved)
    assert not runner.read_block(2).any()


def test_a_cache_of_an_unknown_dtype_or_of_broken_floats_is_refused():
    with pytest.raises(ValueError, match="cache dtype 'int4' is unknown; use fp32, fp16 or int8"):
        _native.KVCache(1, 4, 256, "int4")
    with pytest.raises(ValueError, match="4 bytes a block or a multiple of that"):
        _native.KVCache(1, 4, 255, "int8")
