"""State-space layers over paged states, on NumPy and on every instruction set of the native backend.

One layer: convolution, then scan. Row t of a float32 table is what token id t feeds into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import F32, KVCacheConfig, KVDtype, Limits, Scan, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec, MambaSpec

ISAS = _native.available_isas()
LENGTH = 53


def make(name: str, num_threads: int = 2) -> Any:
    return NumpyBackend() if name == "numpy" else NativeBackend(num_threads, name)


@pytest.fixture(params=["numpy", *ISAS])
def backend(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def normal(*shape: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    heads: int = 4
    head_size: int = 24
    groups: int = 2
    state_size: int = 11
    taps: int = 4
    has_bias: bool = True
    dt_max: float = float("inf")
    block_size: int = 4
    num_blocks: int = 42
    dtype: KVDtype = "fp32"

    @property
    def widths(self) -> tuple[int, int, int]:
        """x, then b and c each."""
        group_width = self.groups * self.state_size
        return self.heads * self.head_size, group_width, group_width

    @property
    def spec(self) -> MambaSpec:
        channels, inner = sum(self.widths), self.widths[0]
        return MambaSpec((self.taps - 1) * channels, inner * self.state_size)


@dataclass
class Bench:
    """A compiled layer and the block tables of three sequences; entries are -1 until a test sets them."""

    backend: Any
    function_model: Any
    case: Case = Case()
    tables: np.ndarray = field(init=False)  # [3, max_blocks]

    def __post_init__(self) -> None:
        case, vector = self.case, self.backend.vector
        channels = sum(case.widths)
        layout = group_layers([case.spec])
        rows = self.backend.embedding(normal(3 * LENGTH, channels + case.heads, seed=0), "float32")
        weight = vector(normal(case.taps * channels, seed=1) * np.float32(0.5))
        bias = vector(normal(channels, seed=2)) if case.has_bias else None
        scan = Scan(
            *(case.heads, case.head_size, case.groups, case.state_size),
            decay=vector(-np.exp(normal(case.heads, seed=3))),
            skip=vector(normal(case.heads, seed=4)),
            dt_bias=vector(normal(case.heads, seed=5)),
            dt_max=case.dt_max,
        )

        def forward(ops: Any) -> Any:
            u, dt = ops.split(ops.embed(rows), (channels, case.heads))
            x, b, c = ops.split(ops.conv1d(u, weight, bias, layout.layers[0]), case.widths)
            return ops.ssm_scan(x, dt, b, c, scan, layout.layers[0])

        cache = KVCacheConfig(layout, case.num_blocks, case.block_size, case.dtype)
        limits = Limits(3 * LENGTH, 3, 3, LENGTH, 3 * LENGTH)
        self.runner = self.backend.compile(self.function_model(forward), cache, limits)
        self.tables = np.full((3, LENGTH), -1, np.int32)

    def step(self, *slices: tuple[int, int, int], blocks: dict[int, int] | None = None) -> F32:
        """Compute tokens [start, end) of each (seq, start, end); sequences 0 and 1 have the same tokens.
        `blocks` sets table entries of the first slice's sequence beforehand."""
        for index, block in (blocks or {}).items():
            self.tables[slices[0][0], index] = block
        positions = np.concatenate([np.arange(a, b) for _, a, b in slices]).astype(np.int32)
        tokens = np.concatenate([np.arange(a, b) + s // 2 * LENGTH for s, a, b in slices]).astype(np.int32)
        starts = np.cumsum([0] + [b - a for _, a, b in slices]).astype(np.int32)
        ends = np.array([b for *_, b in slices], np.int32)
        rows = np.array([s for s, *_ in slices], np.int32)
        self.runner.forward(StepInputs(tokens, positions, starts, ends, rows, (self.tables,)))
        return self.runner.logits(np.arange(len(tokens), dtype=np.int32)).copy()

    def give_blocks(self, seed: int = 0) -> None:
        """Every logical block of every sequence, in random order."""
        per_sequence = -(-LENGTH // self.case.block_size)
        ids = np.random.default_rng(seed).permutation(self.case.num_blocks)[: 3 * per_sequence]
        self.tables[:, :per_sequence] = ids.reshape(3, per_sequence)

    def in_chunks(self, size: int) -> F32:
        return np.concatenate(
            [self.step((0, start, min(start + size, LENGTH))) for start in range(0, LENGTH, size)]
        )


@pytest.fixture
def bench(backend, function_model) -> Bench:
    return Bench(backend, function_model)


@pytest.fixture
def whole(backend, function_model):
    """A function: all outputs of sequence 0, computed alone in one step by one thread → [LENGTH, H·P]."""

    def compute(**options) -> F32:
        case = Case(**options)
        alone = make("numpy") if isinstance(backend, NumpyBackend) else make(backend.isa, 1)
        bench = Bench(alone, function_model, case)
        return bench.step((0, 0, LENGTH), blocks={(LENGTH - 1) // case.block_size: 3})

    return compute


SHAPES = [
    {},
    {"heads": 1, "head_size": 1, "groups": 1, "state_size": 1, "taps": 1},
    {"heads": 3, "head_size": 64, "groups": 1, "state_size": 16, "has_bias": False},
    {"heads": 2, "head_size": 80, "groups": 1, "state_size": 6, "taps": 2, "dt_max": 0.7},
    {"heads": 6, "head_size": 33, "groups": 3, "state_size": 9, "taps": 6},
    {"heads": 5, "head_size": 130, "groups": 5, "state_size": 4},
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_agrees_with_the_specification(function_model, shape, isa):
    results = []
    for backend in (make("numpy"), make(isa)):
        bench = Bench(backend, function_model, Case(**shape))
        first = bench.step((0, 0, 19), blocks={4: 1})
        results.append(np.concatenate([first, bench.step((0, 19, LENGTH), blocks={13: 2})]))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=3e-6 * np.abs(results[0]).max())


def test_instruction_sets_with_fused_multiply_add_agree(function_model):
    fused = [isa for isa in ISAS if isa != "portable"]
    results = [Bench(make(isa), function_model).step((0, 0, LENGTH), blocks={13: 0}) for isa in fused]
    for result in results[1:]:
        assert np.array_equal(result, results[0])


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 17])
def test_chunks_and_block_sizes_do_not_show(backend, function_model, whole, chunk, block_size):
    bench = Bench(backend, function_model, Case(block_size=block_size, num_blocks=3 * LENGTH))
    bench.give_blocks()
    assert np.array_equal(bench.in_chunks(chunk), whole())


def test_a_batch_does_not_show(bench, whole):
    bench.give_blocks()
    first = bench.step((0, 0, 9), (2, 0, 30))
    second = bench.step((2, 30, 31), (0, 9, 10), (1, 0, LENGTH))
    third = bench.step((2, 31, LENGTH), (0, 10, LENGTH))
    expected = whole()
    assert np.array_equal(np.concatenate([first[:9], second[1:2], third[LENGTH - 31 :]]), expected)
    assert np.array_equal(second[2:], expected)


@pytest.mark.parametrize("num_threads", [1, 3, 5, 16])
def test_the_number_of_threads_does_not_show(function_model, num_threads):
    results = []
    for threads in (2, num_threads):
        bench = Bench(make(ISAS[0], threads), function_model, Case(heads=3, groups=1, head_size=70))
        bench.give_blocks()
        results.append((bench.step((0, 0, 40), (1, 0, 3), (2, 0, 17)), bench.step((0, 40, 41), (2, 17, 18))))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_a_cache_of_less_precision_keeps_the_state_in_full_precision(backend, function_model, whole, dtype):
    bench = Bench(backend, function_model, Case(dtype=dtype))
    bench.give_blocks()
    assert np.array_equal(bench.in_chunks(5), whole())


def test_a_sequence_begins_with_a_state_of_zeros_whatever_its_block_holds(bench, whole):
    bench.runner.fill_block(7, float("nan"))
    assert np.array_equal(bench.step((0, 0, LENGTH), blocks={13: 7}), whole())


def test_the_blocks_that_a_step_jumps_over_need_not_exist(bench, whole):
    """Tokens 0..6 end in logical block 1, tokens 6..53 in block 13; those between stay -1."""
    first = bench.step((0, 0, 6), blocks={1: 30})
    second = bench.step((0, 6, LENGTH), blocks={13: 31})
    assert np.array_equal(np.concatenate([first, second]), whole())
    assert (bench.tables[0] >= 0).sum() == 2


def test_a_state_is_updated_in_place_within_a_block_and_left_alone_beyond_it(bench):
    bench.step((0, 0, 5), blocks={1: 8})
    at_5 = bench.runner.read_block(8)
    bench.step((0, 5, 8))
    at_8 = bench.runner.read_block(8)
    assert not np.array_equal(at_8, at_5)
    bench.step((0, 8, 9), blocks={2: 9})
    assert np.array_equal(bench.runner.read_block(8), at_8)
    assert not np.array_equal(bench.runner.read_block(9), at_8)


def test_no_other_block_is_touched(bench):
    for block in range(bench.case.num_blocks):
        bench.runner.fill_block(block, 2.0)
    untouched = bench.runner.read_block(0)
    bench.step((0, 0, 6), blocks={1: 5})
    bench.step((0, 6, LENGTH), blocks={13: 6})
    others = [b for b in range(bench.case.num_blocks) if b not in (5, 6)]
    assert all(np.array_equal(bench.runner.read_block(b), untouched) for b in others)


def test_sequences_go_on_from_one_checkpoint(bench, whole):
    """The state after 8 tokens ends block 1: both read it, each writes a block of its own."""
    bench.step((0, 0, 8), blocks={1: 20})
    bench.tables[1, 1] = 20
    bench.tables[:2, 13] = (21, 22)
    both = bench.step((0, 8, LENGTH), (1, 8, LENGTH))
    expected = whole()[8:]
    assert np.array_equal(both, np.concatenate([expected, expected]))


def test_a_copied_and_a_swapped_state_go_on_like_the_original(bench, whole):
    bench.step((0, 0, 6), blocks={1: 10})
    bench.runner.copy_blocks(np.array([10], np.int32), np.array([11], np.int32))
    saved = bench.runner.read_block(10)
    bench.runner.fill_block(10, float("nan"))
    bench.runner.write_block(12, saved)
    expected = whole()[6:7]
    assert np.array_equal(bench.step((0, 6, 7), blocks={1: 11}), expected)
    assert np.array_equal(bench.step((0, 6, 7), blocks={1: 12}), expected)


@pytest.mark.parametrize("bad", [-1, 42])
@pytest.mark.parametrize("index", [1, 13])
def test_a_missing_block_is_refused(bench, index, bad):
    """Index 1 is read, index 13 written by the step from 6 tokens on."""
    bench.step((0, 0, 6), blocks={1: 4})
    with pytest.raises(ValueError, match="sequence 0"):
        bench.step((0, 6, LENGTH), blocks={1: 4, 13: 5, index: bad})


def test_a_state_in_a_group_of_keys_and_values_is_refused(backend, function_model):
    layout = group_layers([FullAttentionSpec(1, 8)])
    rows, weight = backend.embedding(normal(4, 8, seed=0), "float32"), backend.vector(normal(16, seed=1))
    model = function_model(lambda ops: ops.conv1d(ops.embed(rows), weight, None, layout.layers[0]))
    inputs = one_sequence_of_one_token()

    def compile_and_run() -> None:
        backend.compile(model, KVCacheConfig(layout, 4, 16, "fp32"), Limits(4, 1, 1, 1, 4)).forward(inputs)

    with pytest.raises(ValueError, match="group 0 caches FullAttentionSpec, not a recurrent state"):
        compile_and_run()


def one_sequence_of_one_token() -> StepInputs:
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    return StepInputs(zero, zero, np.array([0, 1], np.int32), one, zero, (np.zeros((1, 1), np.int32),))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("width", "group_size"), [(96, 96), (96, 24), (35, 7), (1600, 400)])
def test_the_gated_norm_agrees_with_the_specification(rows_runner, width, group_size, isa):
    def gated(backend):
        weight = backend.vector(normal(width, seed=3))
        return lambda ops, x: ops.gated_rms_norm(*ops.split(x, (width, width)), weight, 1e-5, group_size)

    for rows in (1, 2, 7, 33):
        x = normal(rows, 2 * width, seed=rows)
        want, got = (rows_runner(b, x, gated(b)) for b in (make("numpy"), make(isa)))
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("num_pairs", [1, 4, 9, 16, 32])
def test_rope_turns_the_first_columns_of_each_head_and_leaves_the_rest(rows_runner, backend, num_pairs):
    heads, head_size = 3, 64
    frequencies = (100.0 ** (-np.arange(num_pairs) / num_pairs)).astype(np.float32)
    x = normal(20, heads * head_size, seed=1)
    got = rows_runner(backend, x, lambda ops, a: ops.rope(a, backend.rope(frequencies), head_size))
    got, turned = got.reshape(20, heads, head_size), 2 * num_pairs
    narrow = np.ascontiguousarray(x.reshape(20, heads, head_size)[..., :turned]).reshape(20, -1)
    want = rows_runner(backend, narrow, lambda ops, a: ops.rope(a, backend.rope(frequencies), turned))
    assert np.array_equal(got[..., :turned], want.reshape(20, heads, turned))
    assert np.array_equal(got[..., turned:], x.reshape(20, heads, head_size)[..., turned:])
