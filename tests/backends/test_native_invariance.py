"""The promise: the result for a row depends on its own sequence alone, bitwise."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend

ISAS = _native.available_isas()
LENGTH = 700  # three spans of 256 tokens, the last one short


def qkv_rows(case, num_tokens: int) -> np.ndarray:
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    return np.random.default_rng(3).standard_normal((num_tokens, width)).astype(np.float32)


def by_chunks(bench, chunks: list[int], seed: int = 0) -> np.ndarray:
    """The outputs of one sequence of LENGTH tokens, computed in chunks of these sizes, the last repeated."""
    bench.give_blocks([LENGTH], seed)
    outputs, start = [], 0
    while start < LENGTH:
        n = min(chunks[0] if len(chunks) == 1 else chunks.pop(0), LENGTH - start)
        outputs.append(bench.step([(0, start, n)], [0]))
        start += n
    return np.concatenate(outputs)


@pytest.fixture
def whole(attention_bench, attention_case):
    """A function: the outputs of one sequence, computed alone in as few steps as possible by one thread."""

    def compute(isa, **options):
        case = attention_case(**{"num_blocks": 128, "max_blocks": 64, "max_tokens": LENGTH, **options})
        bench = attention_bench(NativeBackend(1, isa), case, qkv_rows(case, LENGTH))
        return by_chunks(bench, [LENGTH])

    return compute


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("chunks", [[1], [48, 53, 1, 1, 250, 100], [255, 2]])
def test_chunks_do_not_show(attention_bench, attention_case, whole, chunks, dtype, window, isa):
    options = {"heads": 6, "kv_heads": 2, "window": window, "dtype": dtype}
    case = attention_case(**options, num_blocks=128, max_blocks=64)
    bench = attention_bench(NativeBackend(2, isa), case, qkv_rows(case, LENGTH))
    np.testing.assert_array_equal(by_chunks(bench, list(chunks), seed=5), whole(isa, **options))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 24, 32, 100, 128, 256])
def test_block_size_and_ids_do_not_show(attention_bench, attention_case, whole, block_size, dtype, isa):
    max_blocks = -(-LENGTH // block_size)
    case = attention_case(
        heads=3,
        kv_heads=1,
        dtype=dtype,
        block_size=block_size,
        num_blocks=2 * max_blocks,
        max_blocks=max_blocks,
    )
    bench = attention_bench(NativeBackend(2, isa), case, qkv_rows(case, LENGTH))
    np.testing.assert_array_equal(
        by_chunks(bench, [256], seed=9), whole(isa, heads=3, kv_heads=1, dtype=dtype)
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_batch_and_threads_do_not_show(attention_bench, attention_case, whole, num_threads, dtype, isa):
    """The same sequence thrice in a batch, and alone, where its spans are divided among workers."""
    options = {"heads": 6, "kv_heads": 2, "dtype": dtype}
    case = attention_case(**options, num_blocks=400, max_blocks=64)
    bench = attention_bench(NativeBackend(num_threads, isa), case, qkv_rows(case, LENGTH))
    lengths, first = [LENGTH, 50, LENGTH, 400, LENGTH], [0, 600, 0, 200, 0]
    bench.give_blocks(lengths, seed=4)
    for s in (0, 2, 4, 1, 3):
        for start in range(0, lengths[s] - 1, 300):
            bench.step([(s, start, min(300, lengths[s] - 1 - start))], first)
    want = whole(isa, **options)[-1]
    batch = bench.step([(s, length - 1, 1) for s, length in enumerate(lengths)], first)
    for s in (0, 2, 4):
        np.testing.assert_array_equal(batch[s], want)
    np.testing.assert_array_equal(bench.step([(2, LENGTH - 1, 1)], first)[0], want)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"window": 100, "dtype": "fp16"}, {"dtype": "int8"}]
)
def test_instruction_sets_with_fused_multiply_add_agree(whole, options):
    fused = [isa for isa in ISAS if isa != "portable"]
    results = [whole(isa, heads=5, kv_heads=1, head_size=40, **options) for isa in fused]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
