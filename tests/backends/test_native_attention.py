"""Paged attention of the native backend: equal to NumPy over odd shapes, blind to stale slots."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.numpy_ref import NumpyBackend

ISAS = _native.available_isas()
# Both store the same rounded numbers; the kernels round what int8 ones are multiplied with, to 1 in 32,639 of the
# largest query or of the largest scale of a span's values.
TOLERANCE = {"fp32": 3e-6, "fp16": 3e-6, "int8": 4e-4}

SHAPES = [
    {"heads": 1, "kv_heads": 1, "head_size": 8},
    {"heads": 4, "kv_heads": 2, "head_size": 16},
    {"heads": 9, "kv_heads": 3, "head_size": 64},
    {"heads": 7, "kv_heads": 1, "head_size": 40},
    {"heads": 5, "kv_heads": 5, "head_size": 80},
    {"heads": 8, "kv_heads": 1, "head_size": 96},
    {"heads": 2, "kv_heads": 1, "head_size": 128},
    {"heads": 2, "kv_heads": 2, "head_size": 256},
]
BLOCK_SIZES = (1, 2, 8, 16, 24, 32, 128, 256)


def qkv_rows(case, num_tokens: int, seed: int = 0) -> np.ndarray:
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    return np.random.default_rng(seed).standard_normal((num_tokens, width)).astype(np.float32)


def mixed_steps(bench) -> list[np.ndarray]:
    """Prefill in chunks, decode and new sequences in one step: 300 + 40 + 70 tokens of three sequences."""
    bench.give_blocks([300, 40, 70])
    first = [0, 300, 340]
    return [
        bench.step([(0, 0, 33)], first),
        bench.step([(0, 33, 200), (1, 0, 7)], first),
        bench.step([(0, 233, 1), (1, 7, 33), (2, 0, 69)], first),
        bench.step([(2, 69, 1), (0, 234, 66)], first),
    ]


def assert_equals_numpy(attention_bench, case, isa, num_threads=2):
    rows = qkv_rows(case, 410)
    native = mixed_steps(attention_bench(NativeBackend(num_threads, isa), case, rows))
    reference = mixed_steps(attention_bench(NumpyBackend(), case, rows))
    for got, want in zip(native, reference, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{heads}q{kv_heads}kv{head_size}d".format(**s))
def test_every_head_shape_equals_numpy(attention_bench, attention_case, shape, dtype, isa):
    assert_equals_numpy(attention_bench, attention_case(**shape, dtype=dtype), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_equals_numpy(attention_bench, attention_case, block_size, dtype, isa):
    max_blocks = -(-512 // block_size)
    case = attention_case(
        heads=6,
        kv_heads=2,
        block_size=block_size,
        num_blocks=2 * max_blocks,
        max_blocks=max_blocks,
        dtype=dtype,
    )
    assert_equals_numpy(attention_bench, case, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [1, 2, 16, 17, 100, 256, 299])
def test_every_window_equals_numpy(attention_bench, attention_case, window, isa):
    assert_equals_numpy(
        attention_bench, attention_case(window=window, block_size=8, num_blocks=90, max_blocks=64), isa
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_softcapped_scores_equal_numpy(attention_bench, attention_case, dtype, isa):
    assert_equals_numpy(attention_bench, attention_case(softcap=0.8, window=50, dtype=dtype), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_work_divided_among_threads_equals_numpy(attention_bench, attention_case, dtype, isa):
    """One long sequence with one kv head: its spans go to different workers and are merged."""
    case = attention_case(heads=3, kv_heads=1, num_blocks=128, max_blocks=128, max_tokens=2000, dtype=dtype)
    rows = qkv_rows(case, 2000)
    results = []
    for backend in (NativeBackend(3, isa), NativeBackend(1, isa), NumpyBackend()):
        bench = attention_bench(backend, case, rows)
        bench.give_blocks([2000])
        bench.step([(0, 0, 1990)], [0])
        results.append(np.concatenate([bench.step([(0, 1990, 9)], [0]), bench.step([(0, 1999, 1)], [0])]))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_allclose(results[0], results[2], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("isa", ISAS)
def test_block_ids_beyond_32_bit_byte_offsets(attention_bench, attention_case, isa):
    """Blocks past 4 GiB of a cache whose untouched pages cost nothing."""
    shape = {"heads": 2, "kv_heads": 1, "head_size": 64, "block_size": 16}
    num_blocks = 5 * 2**30 // (2 * 64 * 16 * 4)
    near, far = attention_case(**shape), attention_case(**shape, num_blocks=num_blocks)
    rows = qkv_rows(near, 100)
    bench = attention_bench(NativeBackend(2, isa), far, rows)
    bench.give_blocks([100], last=40)
    assert int(bench.tables[0, 0]) * 2 * 64 * 16 * 4 > 2**32
    reference = attention_bench(NativeBackend(2, isa), near, rows)
    reference.give_blocks([100])
    np.testing.assert_array_equal(bench.step([(0, 0, 100)], [0]), reference.step([(0, 0, 100)], [0]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32])
def test_nan_in_stale_slots_and_other_blocks_never_shows(
    attention_bench, attention_case, block_size, dtype, isa
):
    case = attention_case(
        heads=6,
        kv_heads=2,
        block_size=block_size,
        num_blocks=600,
        max_blocks=-(-512 // block_size),
        dtype=dtype,
    )
    rows = qkv_rows(case, 410)
    clean = mixed_steps(attention_bench(NativeBackend(2, isa), case, rows))
    dirty_bench = attention_bench(NativeBackend(2, isa), case, rows)
    for block in range(case.num_blocks):
        dirty_bench.runner.fill_block(block, float("nan"))
    for got, want in zip(mixed_steps(dirty_bench), clean, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_nan_of_a_later_token_never_reaches_an_earlier_one(attention_bench, attention_case, dtype, isa):
    case = attention_case(heads=4, kv_heads=1, dtype=dtype)
    rows = qkv_rows(case, 64)
    clean = attention_bench(NativeBackend(2, isa), case, rows)
    clean.give_blocks([64])
    want = clean.step([(0, 0, 64)], [0])
    rows[40] = np.nan
    dirty = attention_bench(NativeBackend(2, isa), case, rows)
    dirty.give_blocks([64])
    got = dirty.step([(0, 0, 64)], [0])
    np.testing.assert_array_equal(got[:40], want[:40])
    assert np.isnan(got[40:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_any_nan_in_a_key_alone_is_seen(attention_bench, attention_case, bits, dtype, isa):
    case = attention_case(heads=4, kv_heads=1, dtype=dtype)
    rows = qkv_rows(case, 50)
    key = slice(case.heads * case.head_size, (case.heads + 1) * case.head_size)
    rows.view(np.uint32)[40, key] = bits
    bench = attention_bench(NativeBackend(2, isa), case, rows)
    bench.give_blocks([50])
    got = bench.step([(0, 0, 50)], [0])
    assert np.isfinite(got[:40]).all()
    assert np.isnan(got[40:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_value_far_larger_than_the_others_costs_no_more_than_its_own_rounding(
    attention_bench, attention_case, isa
):
    """A thousand times as large, and hardly attended to."""
    case = attention_case(heads=4, kv_heads=1, dtype="int8")
    rows = qkv_rows(case, 200)
    key, value = (
        slice((case.heads + i) * case.head_size, (case.heads + i + 1) * case.head_size) for i in (0, 1)
    )
    rows[100, value] *= 1000
    rows[:, : case.heads * case.head_size] += 1
    rows[100, key] -= 4
    results = []
    for backend in (NativeBackend(2, isa), NumpyBackend()):
        bench = attention_bench(backend, case, rows)
        bench.give_blocks([200])
        results.append(bench.step([(0, 0, 200)], [0]))
    largest = np.abs(rows[100, value]).max()
    np.testing.assert_array_less(np.abs(results[0] - results[1]).max(), largest / 127 / 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 20])
def test_entries_behind_the_window_are_not_looked_at(attention_bench, attention_case, block_size, dtype, isa):
    """Blocks that slid out of the window were given back: their table entries may be anything."""
    case = attention_case(
        window=20, block_size=block_size, num_blocks=120, max_blocks=-(-120 // block_size), dtype=dtype
    )
    rows = qkv_rows(case, 115)
    bench = attention_bench(NativeBackend(2, isa), case, rows)
    bench.give_blocks([115])
    bench.step([(0, 0, 114)], [0])
    want = bench.step([(0, 114, 1)], [0])
    first = 95 // block_size  # position 114 sees (94, 114]
    bench.tables[0, :first] = -(2**30)
    np.testing.assert_array_equal(bench.step([(0, 114, 1)], [0]), want)
    bench.tables[0, first] = -1
    with pytest.raises(ValueError, match=f"block {first} of its table is -1"):
        bench.step([(0, 114, 1)], [0])


@pytest.mark.parametrize("isa", ISAS)
def test_very_large_scores_do_not_overflow(attention_bench, attention_case, isa):
    case = attention_case(heads=2, kv_heads=1, head_size=8)
    rows = qkv_rows(case, 30) * np.float32(1e3)
    results = []
    for backend in (NativeBackend(1, isa), NumpyBackend()):
        bench = attention_bench(backend, case, rows)
        bench.give_blocks([30])
        results.append(bench.step([(0, 0, 30)], [0]))
    assert np.isfinite(results[0]).all()
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1.0)
