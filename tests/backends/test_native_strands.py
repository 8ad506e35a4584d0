"""Steps divided by rows among threads: how they are cut, when strands wait for others, and that nothing shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.backends.native import NativeBackend
from octavo.backends.ops import KVCacheConfig, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec

WIDTH, BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS = 64, 4, 1024, 2048
STEPS = {
    "decoding": [(9 + s % 5, 1) for s in range(40)],
    "one prompt": [(0, 100)],
    "a prompt among decoding ones": [(12, 1), (3, 1), (0, 61), *[(5, 1)] * 20],
    "prompts of which two were begun": [(10, 40), (0, 20), (0, 0), (30, 33)],
}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def compiled(backend: NativeBackend, model: Any, specs: list[Any], dtype: str) -> Any:
    limits = Limits(256, 64, 256, MAX_BLOCKS, 256)
    return backend.compile(model, KVCacheConfig(group_layers(specs), NUM_BLOCKS, BLOCK_SIZE, dtype), limits)


@pytest.fixture
def runner_of(function_model):
    """A function: a runner of two layers of attention and gated products, the second of which may see a window."""

    def build(num_threads: int, dtype: str = "fp32", window: int | None = None) -> Any:
        backend = NativeBackend(num_threads)
        table, norm = (
            backend.embedding(random(64, WIDTH), "float32"),
            backend.vector(np.ones(WIDTH, np.float32)),
        )
        qkv, down = (
            backend.matrix(random(192, WIDTH) / 8, "int8"),
            backend.matrix(random(WIDTH, 96) / 8, "int8"),
        )
        gated = backend.gated_matrix(random(96, WIDTH) / 8, random(96, WIDTH)[::-1] / 8, "int8")
        full = FullAttentionSpec(2, 32)
        specs = [full, full if window is None else SlidingWindowSpec(2, 32, window)]
        layers = group_layers(specs).layers

        def forward(ops):
            x = ops.embed(table)
            for layer, reach in zip(layers, (None, window), strict=True):
                q, k, v = ops.split(ops.linear(ops.rms_norm(x, norm, 1e-5), qkv), (64, 64, 64))
                ops.write_kv(k, v, layer)
                x = ops.add(x, ops.paged_attention(q, layer, 0.2, reach))
                x = ops.linear(ops.gated_linear(ops.rms_norm(x, norm, 1e-5), gated, "silu"), down, residual=x)
            return x

        return compiled(backend, function_model(forward), specs, dtype)

    return build


def inputs_of(slices: list[tuple[int, int]], num_groups: int = 1) -> StepInputs:
    """Sequence s computes n tokens from position p on, for (p, n) = slices[s], in blocks of its own."""
    positions = np.concatenate([np.arange(p, p + n) for p, n in slices]).astype(np.int32)
    lens = np.array([p + n for p, n in slices], np.int32)
    ids, tables = iter(range(NUM_BLOCKS)), np.zeros((num_groups, 64, MAX_BLOCKS), np.int32)
    for table in tables:
        for s, length in enumerate(lens):
            for i in range(-(-length // BLOCK_SIZE)):
                table[s, i] = next(ids)
    starts = np.cumsum([0, *(n for _, n in slices)]).astype(np.int32)
    seqs = np.arange(len(slices), dtype=np.int32)
    tokens = (7 * np.arange(len(positions)) % 64).astype(np.int32)
    return StepInputs(tokens, positions, starts, lens, seqs, tuple(tables))


def run(runner: Any, inputs: StepInputs) -> tuple[np.ndarray, tuple[list[tuple[int, int]], bool]]:
    """All rows' outputs, and how the step was divided."""
    runner.forward(inputs)
    division = runner._program.division()
    return runner.logits(np.arange(len(inputs.tokens), dtype=np.int32)).copy(), division


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", STEPS)
def test_no_division_shows_in_a_result(runner_of, name, window, dtype):
    """First the tokens that precede, 10 at a time in one strand; then the step."""
    num_groups = 1 if window is None else 2
    results = []
    for num_threads in (1, 2, 3, 4, 8):
        runner, inputs = runner_of(num_threads, dtype, window), inputs_of(STEPS[name], num_groups)
        for seq, (before, _) in enumerate(STEPS[name]):
            for start in range(0, before, 10):
                part = inputs_of([(start, min(10, before - start))], num_groups)
                tables = tuple(table[[seq]].copy() for table in inputs.block_tables)
                runner.forward(replace(part, block_tables=tables))
        result, (strands, is_joint) = run(runner, inputs)
        rows = [0, *(end for _, end in strands)]
        assert strands == list(zip(rows, rows[1:], strict=False))
        assert rows[-1] == len(inputs.tokens)
        amid = set(rows) - set(inputs.query_starts.tolist())
        assert is_joint == bool(amid)
        assert (len(strands) > 1) == (num_threads > 1)
        results.append(result)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("num_threads", "num_rows", "strands"),
    [
        (2, 15, [(0, 15)]),
        (2, 16, [(0, 8), (8, 16)]),
        (3, 23, [(0, 23)]),  # two strands do not divide three threads
        (3, 24, [(0, 8), (8, 16), (16, 24)]),
        (4, 30, [(0, 15), (15, 30)]),
        (1, 60, [(0, 60)]),
    ],
)
def test_a_strand_has_at_least_eight_rows(runner_of, num_threads, num_rows, strands):
    _, division = run(runner_of(num_threads), inputs_of([(5, 1)] * num_rows))
    assert division == (strands, False)


def test_a_strand_of_long_sequences_has_fewer_rows(runner_of):
    """Up to the last write to the cache a row multiplies 64 * 192 weights three times, and 96 * 64; a token that it
    sees in the first layer counts as 3 * 2 * 64."""
    slices = [(200, 1)] * 10 + [(0, 1)] * 40
    costs = [43008 + 384 * (p + 1) for p, _ in slices]
    _, (strands, is_joint) = run(runner_of(2), inputs_of(slices))
    (_, cut), _ = strands
    assert not is_joint
    assert cut == min(range(50), key=lambda n: abs(sum(costs[:n]) - sum(costs[n:]))) == 16


def test_where_one_row_costs_more_than_a_strand_rows_stay_together(runner_of):
    runner, others = runner_of(2), [(0, 1)] * 24  # that cost 1.04 million together
    assert run(runner, inputs_of([(4000, 1), *others]))[1] == ([(0, 25)], False)  # 1.58 and 1.04
    assert run(runner, inputs_of([(3000, 1), *others]))[1] == ([(0, 1), (1, 25)], False)  # 1.20 and 1.04


def test_strands_join_where_one_reads_a_block_that_another_writes(runner_of):
    """Sequence 30, in the second strand, sees the token that sequence 0 writes at position 3."""
    inputs, results = inputs_of([(3, 1), *[(9, 1)] * 47]), []
    inputs.block_tables[0][30, 0] = inputs.block_tables[0][0, 0]
    for num_threads in (1, 2, 4):
        runner = runner_of(num_threads)
        for _ in range(20):
            result, (strands, is_joint) = run(runner, inputs)
            assert (len(strands), is_joint) == (num_threads, num_threads > 1)
            results.append(result)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    # What another sequence of its own strand writes.
    inputs.block_tables[0][30, 0] = inputs.block_tables[0][39, 2]
    assert run(runner_of(2), inputs)[1][1] is False


def test_rows_chosen_for_logits_are_divided_too(runner_of):
    runner = runner_of(2)
    runner.forward(inputs_of([(0, 100)]))
    everything = runner.logits(np.arange(100, dtype=np.int32)).copy()
    (_, cut), (begin, end) = runner._program.division()[0]
    assert (cut, end) == (begin, 100)
    assert cut > 50  # later rows see more
    rows = np.arange(99, 40, -1, dtype=np.int32)
    np.testing.assert_array_equal(runner.logits(rows), everything[rows])
    assert len(runner._program.division()[0]) == 2
    np.testing.assert_array_equal(runner.logits(rows[:5]), everything[rows[:5]])
    assert runner._program.division() == ([(0, 5)], False)


def test_states_pass_from_row_to_row_in_one_strand(function_model):
    backend, spec = NativeBackend(2), MambaSpec(3 * WIDTH, 16)
    table, taps = backend.embedding(random(64, WIDTH), "float32"), backend.vector(random(4, WIDTH).ravel())
    layer = group_layers([spec]).layers[0]
    model = function_model(lambda ops: ops.conv1d(ops.embed(table), taps, None, layer))
    assert run(compiled(backend, model, [spec], "fp32"), inputs_of([(0, 100)]))[1] == ([(0, 100)], False)


def test_strands_in_layers_of_different_head_sizes_have_memory_of_their_own(function_model):
    specs, results = [FullAttentionSpec(1, 64), FullAttentionSpec(4, 16)] * 3, []
    layers = group_layers(specs).layers
    for num_threads in (1, 4):
        backend = NativeBackend(num_threads)
        table = backend.embedding(random(64, WIDTH), "float32")

        def forward(ops, table=table):
            x = ops.embed(table)
            for layer in layers:
                ops.write_kv(x, x, layer)
                x = ops.add(x, ops.paged_attention(x, layer, 0.1))
            return x

        runner = compiled(backend, function_model(forward), specs, "fp32")
        num_groups = len(group_layers(specs).groups)
        inputs = inputs_of([(7, 1)] * 40, num_groups)
        results += [run(runner, inputs)[0] for _ in range(100)]
        assert len(runner._program.division()[0]) == num_threads
    assert all(np.array_equal(result, results[0]) for result in results)
