"""Wrong arguments raise Python exceptions that name them; blocks can be copied, saved and restored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.ops import KVCacheConfig, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec
from octavo.errors import ConfigError, UnsupportedModelError

NUM_BLOCKS, BLOCK_SIZE = 20, 4
LIMITS = Limits(max_tokens=8, max_seqs=2, max_table_rows=3, max_blocks_per_seq=5, max_logit_rows=2)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


GOOD = StepInputs(
    tokens=int32(1, 2, 3, 4),
    positions=int32(0, 1, 2, 9),
    query_starts=int32(0, 3, 4),
    seq_lens=int32(3, 10),
    table_rows=int32(2, 0),
    block_tables=(np.array([[3, 4, 5, 6, 7], [0] * 5, [8, 9, 10, 11, 12]], np.int32),),
)


def config(dtype="fp32", layers=2, head_size=8, num_blocks=NUM_BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(
        group_layers([FullAttentionSpec(1, head_size)] * layers), num_blocks, BLOCK_SIZE, dtype
    )


@pytest.fixture
def runner(function_model):
    backend = NativeBackend(2)
    table = backend.embedding(np.ones((10, 24), np.float32), "float32")

    def forward(ops):
        q, k, v = ops.split(ops.embed(table), (8, 8, 8))
        for layer in config().layout.layers:
            ops.write_kv(k, v, layer)
            q = ops.paged_attention(q, layer, 1.0)
        return q

    return backend.compile(function_model(forward), config(), LIMITS)


def with_table(change) -> StepInputs:
    table = GOOD.block_tables[0].copy()
    return replace(GOOD, block_tables=(change(table),))


def set_entry(row: int, column: int, value: int):
    def change(table):
        table[row, column] = value
        return table

    return change


BAD_VALUES = {
    "token id 10 is not within the vocabulary of 10": replace(GOOD, tokens=int32(1, 2, 10, 4)),
    "token id -1": replace(GOOD, tokens=int32(1, 2, -1, 4)),
    "positions must be consecutive": replace(GOOD, positions=int32(0, 2, 3, 9)),
    "positions from -1 on": replace(GOOD, positions=int32(0, 1, 2, -1)),
    "positions from 10 on do not fit a sequence of 10": replace(GOOD, positions=int32(0, 1, 2, 10)),
    "query_starts must begin with 0": replace(GOOD, query_starts=int32(1, 3, 4)),
    "query_starts must not decrease": replace(GOOD, query_starts=int32(0, 5, 4)),
    "query_starts must end with the number of tokens, 4": replace(GOOD, query_starts=int32(0, 2, 3)),
    "length 21 is not within": replace(GOOD, seq_lens=int32(3, 21)),
    "length -5 is not within": replace(GOOD, seq_lens=int32(3, -5)),
    "table row 3 is not one of the table's 3": replace(GOOD, table_rows=int32(3, 0)),
    "table row -1": replace(GOOD, table_rows=int32(-1, 0)),
    "block 1 of its table is 20, which is not one of the cache's 20": with_table(set_entry(0, 1, 20)),
    "block 0 of its table is -1": with_table(set_entry(2, 0, -1)),
    "its table of 2 blocks is too short": with_table(lambda t: t[:, :2].copy()),
    "a block table of 6 columns": with_table(lambda t: np.pad(t, ((0, 0), (0, 1)))),
    "0 block tables for 1 groups": replace(GOOD, block_tables=()),
    "positions: has shape": replace(GOOD, positions=int32(0, 1)),
    "seq_lens|query_starts: has shape": replace(GOOD, seq_lens=int32(3)),
    "table_rows: has shape": replace(GOOD, table_rows=int32(1)),
    "tokens: must be C-contiguous": replace(GOOD, tokens=int32(1, 0, 2, 0, 3, 0, 4, 0)[::2]),
    "block_tables: must be C-contiguous": with_table(np.asfortranarray),
    "9 tokens in a step planned for 8": replace(
        GOOD, tokens=int32(*range(9)), positions=int32(*range(8), 9), query_starts=int32(0, 8, 9)
    ),
    "3 sequences in a step planned for 2": replace(
        GOOD, seq_lens=int32(3, 10, 1), query_starts=int32(0, 3, 4, 4), table_rows=int32(0, 1, 2)
    ),
}


@pytest.mark.parametrize("message", BAD_VALUES)
def test_a_wrong_value_or_shape_is_a_value_error(runner, message):
    with pytest.raises(ValueError, match=message):
        runner.forward(BAD_VALUES[message])
    runner.forward(GOOD)  # and the runner lives on
    assert runner.logits(int32(0, 3)).shape == (2, 8)


@pytest.mark.parametrize(
    "field", ["tokens", "positions", "query_starts", "seq_lens", "table_rows", "block_tables"]
)
def test_a_wrong_dtype_is_a_type_error_that_names_the_array(runner, field):
    value = getattr(GOOD, field)
    wrong = tuple(t.astype(np.int64) for t in value) if field == "block_tables" else value.astype(np.int64)
    with pytest.raises(TypeError, match=f"{field}: must have dtype int32"):
        runner.forward(replace(GOOD, **{field: wrong}))


def test_a_list_is_a_type_error(runner):
    with pytest.raises(TypeError):
        runner.forward(replace(GOOD, tokens=[1, 2, 3, 4]))


def test_logit_rows_are_checked(runner):
    with pytest.raises(ValueError, match="logit row 0 is not one of the last step's 0 tokens"):
        runner.logits(int32(0))
    runner.forward(GOOD)
    with pytest.raises(ValueError, match="logit row 4"):
        runner.logits(int32(0, 4))
    with pytest.raises(ValueError, match="3 logit rows in a program planned for 2"):
        runner.logits(int32(0, 1, 2))
    with pytest.raises(TypeError, match="rows: must have dtype int32"):
        runner.logits(np.array([0]))


def test_an_empty_step_is_no_error(runner):
    empty = StepInputs(int32(), int32(), int32(0), int32(), int32(), GOOD.block_tables)
    runner.forward(empty)
    assert runner.logits(int32()).shape == (0, 8)


def test_a_sequence_without_tokens_in_the_step_is_left_alone(runner):
    runner.forward(GOOD)
    want = runner.logits(int32(0, 2)).copy()
    runner.forward(
        replace(GOOD, tokens=int32(1, 2, 3), positions=int32(0, 1, 2), query_starts=int32(0, 3, 3))
    )
    np.testing.assert_array_equal(runner.logits(int32(0, 2)), want)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_blocks_copy_save_and_restore_in_every_storage(function_model, dtype):
    backend = NativeBackend(1)
    table = backend.embedding(
        np.random.default_rng(0).standard_normal((10, 16)).astype(np.float32), "float32"
    )

    def forward(ops):
        k, v = ops.split(ops.embed(table), (8, 8))
        ops.write_kv(k, v, config().layout.layers[1])
        return k

    runner = backend.compile(function_model(forward), config(dtype), LIMITS)
    runner.forward(GOOD)
    saved = runner.read_block(8)  # positions 0-2 of the first sequence
    element = 4 if dtype == "fp32" else 2
    assert saved.dtype == np.uint8
    assert saved.shape == (2 * 2 * 8 * BLOCK_SIZE * element,)
    layer = saved.view(f"f{element}").reshape(2, 2, -1)[1]  # [K or V, D·B]
    rows = np.random.default_rng(0).standard_normal((10, 16)).astype(np.float32).astype(layer.dtype)
    np.testing.assert_array_equal(layer[0].reshape(8, BLOCK_SIZE)[:, :3], rows[1:4, :8].T)  # transposed
    np.testing.assert_array_equal(layer[1].reshape(BLOCK_SIZE, 8)[:3], rows[1:4, 8:])
    runner.copy_blocks(int32(8, 8), int32(15, 16))
    np.testing.assert_array_equal(runner.read_block(16), saved)
    runner.fill_block(8, float("nan"))
    assert np.isnan(runner.read_block(8).view(f"f{element}")).all()
    runner.write_block(8, saved)
    np.testing.assert_array_equal(runner.read_block(8), saved)
    assert not runner.read_block(17).any()


def test_block_operations_check_their_arguments(runner):
    with pytest.raises(ValueError, match="block 20 is not one of the cache's 20 blocks"):
        runner.copy_blocks(int32(0), int32(20))
    with pytest.raises(ValueError, match="dst: has shape"):
        runner.copy_blocks(int32(0, 1), int32(2))
    with pytest.raises(ValueError, match="block -1"):
        runner.read_block(-1)
    with pytest.raises(ValueError, match="data: has shape"):
        runner.write_block(0, np.zeros(3, np.uint8))
    with pytest.raises(TypeError, match="data: must have dtype uint8"):
        runner.write_block(0, np.zeros(512, np.float32))
    with pytest.raises(ValueError, match="block 99"):
        runner.fill_block(99, 0.0)


def test_a_handle_that_was_given_up_cannot_be_used_again(function_model):
    backend = NativeBackend(1)
    table = backend.embedding(np.ones((10, 24), np.float32), "float32")
    weight = backend.matrix(np.ones((24, 24), np.float32), "int8")

    def forward(ops):
        x = ops.embed(table)
        ops.linear(ops.scale(x, 2.0), weight, residual=x)
        return ops.scale(x, 1.0)

    with pytest.raises(ValueError, match="used again"):
        backend.compile(function_model(forward), config(), LIMITS)


def test_wrong_widths_are_refused_when_compiling(function_model):
    backend = NativeBackend(1)
    table = backend.embedding(np.ones((10, 24), np.float32), "float32")
    weight = backend.matrix(np.ones((5, 23), np.float32), "int8")
    norm = backend.vector(np.ones(25, np.float32))
    for forward, message in (
        (
            lambda ops: ops.linear(ops.embed(table), weight),
            "a matrix of 23 columns cannot multiply rows of 24",
        ),
        (lambda ops: ops.split(ops.embed(table), (8, 8))[0], r"split widths \(8, 8\) add up to 16"),
        (lambda ops: ops.rms_norm(ops.embed(table), norm, 1e-5), "rms_norm: x, weight and out"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.compile(function_model(forward), config(), LIMITS)


def test_a_result_without_a_place_must_be_quantised():
    limits = _native.ProgramLimits(1024, 4, 1, 4, 1, 1, 16)
    program = _native.Program(_native.thread_pool(1), None, _native.KVCache(1, 4, 256, "fp32"), limits)
    norm, x, nowhere = (
        _native.Vector(np.ones(16, np.float32)),
        _native.Slot(0, 16, 16),
        _native.Slot(-1, 16, 16),
    )
    with pytest.raises(ValueError, match="out at float -1, width 16, stride 16 does not fit the arena"):
        program.rms_norm(x, norm, 1e-5, nowhere, None)
    program.rms_norm(x, norm, 1e-5, nowhere, _native.QuantSlot(64, 16))


def test_head_sizes_without_a_kernel_are_refused(function_model):
    backend = NativeBackend(1)
    table = backend.embedding(np.ones((10, 12), np.float32), "float32")
    layout = config(head_size=12)

    def forward(ops):
        return ops.paged_attention(ops.embed(table), layout.layout.layers[0], 1.0)

    with pytest.raises(UnsupportedModelError, match="head size 12 is not a multiple of 8"):
        backend.compile(function_model(forward), layout, LIMITS)


def test_a_cache_larger_than_the_address_space_is_a_config_error(function_model):
    backend = NativeBackend(1)
    table = backend.embedding(np.ones((10, 24), np.float32), "float32")
    with pytest.raises(ConfigError, match="no memory for a KV cache of 2000000000 blocks"):
        backend.compile(
            function_model(lambda ops: ops.embed(table)),
            config(layers=300, head_size=4096, num_blocks=2_000_000_000),
            LIMITS,
        )


def test_backend_options_are_checked(monkeypatch):
    with pytest.raises(ConfigError, match="'sse9' is not available here"):
        NativeBackend(1, "sse9")
    with pytest.raises(ConfigError, match="--threads 0"):
        NativeBackend(0)
    plainest = _native.available_isas()[-1]
    monkeypatch.setenv("OCTAVO_ISA", plainest)
    assert NativeBackend(1).isa == plainest
    monkeypatch.delenv("OCTAVO_ISA")
    assert NativeBackend(1).isa == _native.isa() == _native.available_isas()[0]


def test_parameters_are_checked():
    backend = NativeBackend(1)
    ones = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="must have the same shape"):
        backend.gated_matrix(ones, ones[:2], "int8")
    with pytest.raises(ConfigError, match="'int4' is unknown"):
        backend.matrix(ones, "int4")
    with pytest.raises(ValueError, match="NaN or infinity"):
        backend.matrix(np.full((4, 8), np.nan, np.float32), "int8")
    with pytest.raises(ValueError, match="values: has shape"):
        backend.vector(ones)


def test_taking_the_caches_memory_ahead_changes_nothing_and_ends():
    block_bytes, num_blocks = 4096, 1000  # 2 pieces of 2 MiB in each of 3 arrays
    cache = _native.KVCache(3, num_blocks, block_bytes, "fp16")
    data = np.random.default_rng(0).integers(0, 256, 3 * block_bytes).astype(np.uint8)
    for block_id in (0, 511, 999):
        cache.write_block(block_id, data)
    taken = [cache.take_memory() for _ in range(8)]
    assert taken in ([True] * 6 + [False] * 2, [False] * 8)  # a system before Linux 5.14 refuses
    for block_id in (0, 511, 999):
        np.testing.assert_array_equal(cache.read_block(block_id), data)
    assert not cache.read_block(500).any()


def test_a_profile_names_the_instructions_run_since_the_last_one(runner):
    program = runner._program
    assert program.profile() == []  # turns the measuring on
    runner.forward(GOOD)
    seconds = dict(program.profile())
    assert {"embed", "waiting"} <= seconds.keys()
    assert seconds["embed"] > 0.0
    assert set(dict(program.profile()).values()) == {0.0}  # nothing has run since
