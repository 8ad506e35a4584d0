"""What the recorder makes of a model: what is computed in one pass, and for which rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.ops import GroupedWeights, KVCacheConfig, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec

ISAS = _native.available_isas()
RNG = np.random.default_rng(4)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def apart(ops, x):
    """x again, by an instruction between two others, so that these cannot be one."""
    return ops.scale(x, 1.0)


def names_of(runner: Any, inputs: StepInputs, rows: list[int]) -> list[str]:
    """The instructions of one step; the first call of profile() turns the measuring on."""
    runner._program.profile()
    runner.forward(inputs)
    if rows:
        runner.logits(np.array(rows, np.int32))
    return [name for name, _ in runner._program.profile() if name != "waiting"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "width", [16, 48, 64, 200, 392, 1500]
)  # of the gated product: multiples of 64 or not
def test_quantising_a_gated_product_as_it_is_made_does_not_show(rows_runner, isa, threads, width):
    backend = NativeBackend(threads, isa)
    gated = backend.gated_matrix(random(width, 64), random(width, 64), "int8")
    down = backend.matrix(random(32, width), "int8")

    def at_once(ops, h):
        return ops.linear(ops.gated_linear(h, gated, "silu"), down)

    def in_two(ops, h):
        return ops.linear(apart(ops, ops.gated_linear(h, gated, "silu")), down)

    def stored_too(ops, h):
        made = ops.gated_linear(h, gated, "silu")
        return ops.add(ops.linear(made, down), ops.linear(apart(ops, made), down))

    # At most 256 rows wait at a time for the end of their group: of 1,100 each part has more.
    for rows in (1, 7, 40, 300, *([1100] if width in (48, 1500) else [])):
        x = random(rows, 64)
        once = rows_runner(backend, x, at_once)
        assert np.array_equal(once, rows_runner(backend, x, in_two))
        assert np.array_equal(2 * once, rows_runner(backend, x, stored_too))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [4, 6, 8])  # groups of 32, 16 and 32
def test_the_same_of_weights_as_stored(rows_runner, isa, bits):
    def weights(rows: int, columns: int) -> GroupedWeights:
        codes = RNG.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
        scale = random(rows, columns // (16 if bits == 6 else 32)).astype(np.float16)
        return GroupedWeights(codes, scale, None, bits)

    backend = NativeBackend(2, isa)
    gated = backend.gated_grouped_matrix(weights(96, 64), weights(96, 64))
    down = backend.grouped_matrix(weights(32, 96))
    for rows in (3, 300):
        x = random(rows, 64)
        once, two = (
            rows_runner(
                backend,
                x,
                lambda ops, h, between=between: ops.linear(
                    between(ops, ops.gated_linear(h, gated, "silu")), down
                ),
            )
            for between in (lambda ops, made: made, apart)
        )
        assert np.abs(once).max() > 0
        assert np.array_equal(once, two)


def attention_runner(
    backend, function_model, embedding, function, head_size: int, num_layers: int = 1
) -> Any:
    layout = group_layers([FullAttentionSpec(2, head_size)] * num_layers)
    model = function_model(lambda ops: function(ops, ops.embed(embedding), layout.layers))
    return backend.compile(model, KVCacheConfig(layout, 8, 16, "fp16"), Limits(64, 4, 4, 4, 64))


def inputs_of(*lengths: int) -> StepInputs:
    """Sequences of these lengths from position 0, each with two blocks."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    tables = np.arange(8, dtype=np.int32).reshape(4, 2)[::-1].copy()
    seqs = np.arange(len(lengths), dtype=np.int32)
    return StepInputs(
        np.arange(sum(lengths), dtype=np.int32),
        positions,
        starts,
        np.array(lengths, np.int32),
        seqs,
        (tables,),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("head_size", "is_one_pass"), [(64, True), (128, True), (32, False), (96, False)])
def test_attention_quantises_heads_that_are_whole_groups(function_model, isa, head_size, is_one_pass):
    backend = NativeBackend(2, isa)
    embedding = backend.embedding(random(64, 8 * head_size), "float32")
    out = backend.matrix(random(32, 4 * head_size), "int8")
    inputs = inputs_of(20, 1, 12)
    results = []
    for is_apart in (False, True):

        def attend(ops, x, layers, is_apart=is_apart):
            q, k, v = ops.split(x, (4 * head_size, 2 * head_size, 2 * head_size))
            ops.write_kv(k, v, layers[0])
            mixed = ops.paged_attention(q, layers[0], 0.1)
            return ops.linear(apart(ops, mixed) if is_apart else mixed, out)

        runner = attention_runner(backend, function_model, embedding, attend, head_size)
        names = names_of(runner, inputs, list(range(33)))
        assert ("quantize" not in names) == (is_one_pass and not is_apart)
        results.append(runner.logits(np.arange(33, dtype=np.int32)).copy())
    assert np.array_equal(*results)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_so_does_attention_whose_spans_are_divided_among_threads(function_model, dtype):
    """One row over 600 tokens: what the threads have of it is merged, and then quantised."""
    backend = NativeBackend(2)
    embedding = backend.embedding(random(600, 4 * 64), "float32")
    out = backend.matrix(random(32, 2 * 64), "int8")
    layout = group_layers([FullAttentionSpec(1, 64)])
    table = np.arange(38, dtype=np.int32)[None]
    results = []
    for is_apart in (False, True):

        def attend(ops, is_apart=is_apart):
            q, k, v = ops.split(ops.embed(embedding), (128, 64, 64))
            ops.write_kv(k, v, layout.layers[0])
            mixed = ops.paged_attention(q, layout.layers[0], 0.1)
            return ops.linear(apart(ops, mixed) if is_apart else mixed, out)

        cache = KVCacheConfig(layout, 38, 16, dtype)
        runner = backend.compile(function_model(attend), cache, Limits(599, 1, 1, 38, 1))
        zero = np.zeros(1, np.int32)
        for begin, end in ((0, 599), (599, 600)):
            rows = np.arange(begin, end, dtype=np.int32)
            starts = np.array([0, end - begin], np.int32)
            names = names_of(runner, StepInputs(rows, rows, starts, zero + end, zero, (table,)), [0])
        assert ("quantize" in names) == is_apart
        results.append(runner.logits(zero).copy())
    assert np.abs(results[0]).max() > 0
    assert np.array_equal(*results)


def test_keys_rotated_as_they_are_written_are_the_same(function_model):
    backend = NativeBackend(2)
    rope = backend.rope(np.array([1.0, 0.1, 0.01, 0.001], np.float32))
    embedding = backend.embedding(random(64, 8 * 8), "float32")
    results = []
    for is_apart in (False, True):

        def attend(ops, x, layers, is_apart=is_apart):
            q, k, v = ops.split(x, (32, 16, 16))
            k = ops.rope(k, rope, 8)
            if is_apart:
                k = apart(ops, k)
            ops.write_kv(k, v, layers[0])
            return ops.paged_attention(q, layers[0], 0.1)

        runner = attention_runner(backend, function_model, embedding, attend, 8)
        assert ("rope" in names_of(runner, inputs_of(20, 1, 12), [0])) == is_apart
        results.append(runner.logits(np.arange(33, dtype=np.int32)).copy())
    assert np.array_equal(*results)


def two_layers(ops, x, layers):
    """Attention, a sum with what came in, attention."""
    q, k, v = ops.split(x, (16, 16, 16))
    ops.write_kv(k, v, layers[0])
    mixed = ops.add(ops.paged_attention(q, layers[0], 0.5), q)
    ops.write_kv(mixed, v, layers[1])
    return ops.add(ops.paged_attention(mixed, layers[1], 0.5), q)


@pytest.fixture
def chosen_runner(function_model):
    backend = NativeBackend(2)
    embedding = backend.embedding(random(64, 48), "float32")
    return attention_runner(backend, function_model, embedding, two_layers, 8, num_layers=2)


def test_after_the_last_write_to_the_cache_nothing_is_computed_until_logits_are_asked_for(chosen_runner):
    inputs = inputs_of(20, 1, 12)
    assert sorted(names_of(chosen_runner, inputs, [])) == [
        "add", "embed", "merge_attention", "paged_attention", "write_kv",
    ]  # fmt: skip
    assert "gather" in names_of(chosen_runner, inputs, [3])


def test_chosen_rows_in_any_order_are_those_of_all_rows(chosen_runner):
    chosen_runner.forward(inputs_of(20, 1, 12))
    everything = chosen_runner.logits(np.arange(33, dtype=np.int32)).copy()
    for rows in ([32], [19, 20, 32], [32, 0, 20, 0, 0], [5, 4, 3], [2, 4, 6], list(range(32, -1, -1))):
        assert np.array_equal(chosen_runner.logits(np.array(rows, np.int32)), everything[rows]), rows


def test_inputs_may_change_between_forward_and_logits(chosen_runner):
    inputs = inputs_of(20, 1, 12)
    chosen_runner.forward(inputs)
    before = chosen_runner.logits(np.array([19, 32], np.int32)).copy()
    chosen_runner.forward(inputs)
    for array in (inputs.positions, inputs.query_starts, inputs.table_rows, *inputs.block_tables):
        array[:] = 1 << 30
    assert np.array_equal(chosen_runner.logits(np.array([19, 32], np.int32)), before)


def test_a_cache_written_after_all_layers_wrote_theirs_is_refused(function_model):
    backend = NativeBackend(1)
    embedding = backend.embedding(random(64, 32), "float32")

    def twice(ops, x, layers):
        k, v = ops.split(x, (16, 16))
        ops.write_kv(k, v, layers[0])
        ops.write_kv(k, v, layers[0])
        return x

    with pytest.raises(ValueError, match="write_kv belongs to the forward part"):
        attention_runner(backend, function_model, embedding, twice, 8)
