"""The specification itself: formulas against independent sums, and the promise that a row depends on its own
sequence alone. Its cache is tested in test_numpy_cache.py."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.numpy_ref import NumpyBackend, NumpyOps, PagedCache, activate, attend, quantize_rows
from octavo.backends.ops import F32, KVCacheConfig, Limits, Ops, StepInputs
from octavo.core.kv_groups import KVLayer, group_layers
from octavo.core.kv_spec import FullAttentionSpec

BACKEND = NumpyBackend()
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


class OneLayer:
    """The smallest model that touches every kind of operation."""

    def __init__(self, dtype: str = "float32") -> None:
        self.table = BACKEND.embedding(normal(1, 50, 48), dtype)
        self.norm = BACKEND.vector(normal(2, 48))
        self.head_norm = BACKEND.vector(normal(3, 8))
        self.qkv = BACKEND.matrix(normal(4, 64, 48) / 7, dtype)  # H = 4, K = 2, D = 8
        self.out = BACKEND.matrix(normal(5, 48, 32) / 6, dtype)
        self.mlp = BACKEND.gated_matrix(normal(6, 100, 48) / 7, normal(7, 100, 48) / 7, dtype)
        self.down = BACKEND.matrix(normal(8, 48, 100) / 10, dtype)
        self.rope = BACKEND.rope(
            np.float32(1.0) / np.float32(10000.0) ** (np.arange(4, dtype=np.float32) / 4)
        )

    def forward(self, ops: Ops) -> F32:
        x = ops.embed(self.table)
        q, k, v = ops.split(ops.linear(ops.rms_norm(x, self.norm, 1e-5), self.qkv), (32, 16, 16))
        q = ops.rope(ops.head_norm(q, self.head_norm, 1e-5), self.rope, 8)
        ops.write_kv(ops.rope(k, self.rope, 8), v, LAYER)
        x = ops.linear(ops.paged_attention(q, LAYER, 8**-0.5), self.out, residual=x)
        x = ops.linear(ops.gated_linear(x, self.mlp, "silu"), self.down, residual=x)
        return ops.rms_norm(x, self.norm, 1e-5)

    def logits(self, ops: Ops, hidden: F32) -> F32:
        return ops.linear(hidden, self.qkv)


def hidden_rows(
    model: OneLayer, prompts: list[np.ndarray], chunk: int, block_size: int, order_seed: int
) -> list[F32]:
    """Run all prompts side by side, `chunk` tokens of each a step; the hidden rows of every prompt."""
    num_blocks = 96
    width = 96 // len(prompts)
    ids = np.random.default_rng(order_seed).permutation(num_blocks)[: width * len(prompts)]
    tables = ids.reshape(len(prompts), width)
    runner = BACKEND.compile(model, cache_config(block_size, num_blocks), Limits(512, 8, 8, width, 512))
    rows: list[list[F32]] = [[] for _ in prompts]
    for begin in range(0, max(len(p) for p in prompts), chunk):
        live = [s for s, p in enumerate(prompts) if begin < len(p)]
        spans = [(begin, min(begin + chunk, len(prompts[s]))) for s in live]
        tokens = np.concatenate([prompts[s][a:b] for s, (a, b) in zip(live, spans, strict=True)])
        runner.forward(step(spans, tables[live], tokens.astype(np.int32)))
        logits = runner.logits(np.arange(len(tokens), dtype=np.int32))
        for s, part in zip(live, np.split(logits, np.cumsum([b - a for a, b in spans])[:-1]), strict=True):
            rows[s].append(part.copy())
    return [np.concatenate(parts) for parts in rows]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_row_depends_on_its_own_sequence_alone(dtype: str) -> None:
    """Bitwise: not on its batch, the chunk, the block size or the block ids."""
    model = OneLayer(dtype)
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 50, n) for n in (1, 7, 33)]
    alone = [hidden_rows(model, [p], chunk=64, block_size=16, order_seed=0)[0] for p in prompts]
    for chunk, block_size, seed in [(64, 16, 1), (1, 4, 2), (5, 1, 3), (2, 7, 4), (16, 32, 5)]:
        if -(-33 // block_size) * len(prompts) > 96:
            prompts_now, alone_now = prompts[:2], alone[:2]
        else:
            prompts_now, alone_now = prompts, alone
        together = hidden_rows(model, prompts_now, chunk, block_size, seed)
        for expected, got in zip(alone_now, together, strict=True):
            assert np.array_equal(expected, got), (chunk, block_size)


@pytest.mark.parametrize("shape", [(1, 1), (15, 63), (16, 64), (17, 65), (960, 576), (576, 1536)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_linear_rows_do_not_depend_on_how_many_there_are(shape: tuple[int, int], dtype: str) -> None:
    matrix = BACKEND.matrix(normal(1, *shape), dtype)
    x = normal(2, 33, shape[1])
    whole = matrix.multiply(x)
    for rows in [1, 2, 7, 8, 31]:
        assert np.array_equal(matrix.multiply(x[:rows]), whole[:rows])
        assert np.array_equal(matrix.multiply(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("width", [1, 63, 64, 65, 576])
def test_exact_linear_agrees_with_a_float64_product(width: int) -> None:
    weight, x = normal(1, 40, width), normal(2, 5, width)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    got = BACKEND.matrix(weight, "float32").multiply(x)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_int8_linear_is_the_sum_of_scaled_integer_groups() -> None:
    weight, x = normal(1, 3, 130), normal(2, 2, 130) * np.float32(5)
    w_scale = np.abs(weight).max(1) / 127
    w_int = np.rint(weight / w_scale[:, None]).astype(int)
    expected = np.zeros((2, 3))
    for a, b in [(0, 64), (64, 128), (128, 130)]:
        x_scale = np.abs(x[:, a:b]).max(1) / 127
        x_int = np.rint(x[:, a:b] / x_scale[:, None]).astype(int)
        expected += (x_int @ w_int[:, a:b].T) * x_scale[:, None]
    got = BACKEND.matrix(weight, "int8").multiply(x)
    np.testing.assert_allclose(got, expected * w_scale, rtol=1e-5, atol=1e-5)


def test_quantisation_rounds_half_to_even_and_keeps_the_ends() -> None:
    row = np.float32([127.0, -127.0, 0.5, 1.5, 2.5, -2.5, 0.0])
    q, scale = quantize_rows(np.stack([row, np.zeros_like(row), row * np.float32(2)]))
    assert q[0].tolist() == [127, -127, 0, 2, 2, -2, 0]
    assert q[1].tolist() == [0] * 7
    assert q[2].tolist() == q[0].tolist()
    assert scale.tolist() == [1.0, 0.0, 2.0]


def test_rows_too_small_for_a_scale_count_as_zero() -> None:
    q, scale = quantize_rows(np.float32([[1e-36, 0.0], [1e-35, -1e-35]]))
    assert q.tolist() == [[0, 0], [127, -127]]
    assert scale.tolist() == [0.0, np.float32(1e-35) / np.float32(127)]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_nan_or_infinity_turns_nan_and_leaves_the_others_alone(poison: float) -> None:
    matrix = BACKEND.matrix(normal(1, 20, 96), "int8")
    x = normal(2, 5, 96)
    expected = matrix.multiply(x)
    x[2, 70] = poison
    got = matrix.multiply(x)
    assert np.isnan(got[2]).all()
    assert np.array_equal(np.delete(got, 2, 0), np.delete(expected, 2, 0))


def test_weights_with_nan_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight matrix \(2, 3\) holds NaN"):
        BACKEND.matrix(np.full((2, 3), np.nan, np.float32), "int8")


def test_activations_have_their_known_values() -> None:
    x = np.float32([-200.0, -1.0, 0.0, 1.0, 3.0])
    np.testing.assert_allclose(activate(x, "silu"), [0.0, -0.26894143, 0.0, 0.7310586, 2.8577224], rtol=1e-6)
    np.testing.assert_allclose(
        activate(x, "gelu_tanh"), [0.0, -0.15880796, 0.0, 0.841192, 2.9963627], rtol=1e-6, atol=1e-7
    )


def make_ops(inputs: StepInputs, **config: object) -> tuple[NumpyOps, PagedCache]:
    cache = PagedCache(cache_config(**config))  # type: ignore[arg-type]
    return NumpyOps(inputs, cache), cache


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    ops, _ = make_ops(step([(0, 1)], [[0]]))
    got = ops.rms_norm(np.float32([[3.0, 4.0]]), np.float32([2.0, 1.0]), 0.5)
    np.testing.assert_allclose(got, [[6.0 / 13**0.5, 4.0 / 13**0.5]], rtol=1e-6)


def test_head_norm_is_rms_norm_of_each_head() -> None:
    ops, _ = make_ops(step([(0, 3)], [[0]]))
    x, weight = normal(1, 3, 32), normal(2, 8)
    got = ops.head_norm(x, weight, 1e-6)
    for h in range(4):
        columns = slice(8 * h, 8 * h + 8)
        assert np.array_equal(got[:, columns], ops.rms_norm(x[:, columns], weight, 1e-6))


def test_rope_turns_column_i_with_column_i_plus_half() -> None:
    ops, _ = make_ops(step([(2, 3)], [[0]]))
    rope = BACKEND.rope(np.float32([np.pi / 4, 0.0]), attention_scale=2.0)
    got = ops.rope(np.float32([[1.0, 5.0, 3.0, 7.0]]), rope, 4)  # a quarter turn of (1, 3), none of (5, 7)
    np.testing.assert_allclose(got, [[-6.0, 10.0, 2.0, 14.0]], atol=1e-6)


def test_split_gives_consecutive_columns_and_refuses_other_sums() -> None:
    ops, _ = make_ops(step([(0, 1)], [[0]]))
    x = np.arange(6, dtype=np.float32)[None]
    assert [part.tolist() for part in ops.split(x, (1, 3, 2))] == [[[0]], [[1, 2, 3]], [[4, 5]]]
    with pytest.raises(ValueError, match="add up to 5, the array has 6"):
        ops.split(x, (2, 3))


def test_elementwise_operations() -> None:
    ops, _ = make_ops(step([(0, 1)], [[0]]))
    x = np.float32([[1.0, -2.0]])
    assert ops.scale(x, 3.0).tolist() == [[3.0, -6.0]]
    assert ops.add(x, x).tolist() == [[2.0, -4.0]]
    np.testing.assert_allclose(ops.softcap(x, 2.0), 2 * np.tanh([[0.5, -1.0]]), rtol=1e-6)


def test_embedding_is_exact_in_float32_and_rounded_to_half_in_int8_mode() -> None:
    weight = np.float32([[0.1, 1.0], [70.0, 0.2]])
    ops, _ = make_ops(step([(0, 2)], [[0]], tokens=i32(1, 0)))
    assert np.array_equal(ops.embed(BACKEND.embedding(weight, "float32")), weight[[1, 0]])
    half = ops.embed(BACKEND.embedding(weight, "int8"))
    assert half.dtype == np.float32
    assert np.array_equal(half, weight[[1, 0]].astype(np.float16).astype(np.float32))


def softmax_attention(
    q: F32, k: F32, v: F32, scale: float, visible: np.ndarray, softcap: float | None
) -> F32:
    """The textbook formula in float64. q [T, H, D], k, v [L, K, D], visible [T, L] → [T, H·D]."""
    repeat = q.shape[1] // k.shape[1]
    k64, v64 = (np.repeat(a.astype(np.float64), repeat, axis=1) for a in (k, v))
    scores = np.einsum("thd,lhd->thl", q.astype(np.float64), k64) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible[:, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("thl,lhd->thd", weights / weights.sum(-1, keepdims=True), v64)
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (1, None), (None, 2.5), (6, 2.5)])
def test_paged_attention_is_softmax_attention(
    block_size: int, window: int | None, softcap: float | None
) -> None:
    tables = np.random.default_rng(3).permutation(64)[:46].reshape(2, 23)
    lens, spans = (11, 23), [(8, 11), (0, 23)]
    k, v = (
        [normal(10 + s, n, 16) for s, n in enumerate(lens)],
        [normal(20 + s, n, 16) for s, n in enumerate(lens)],
    )
    history, _ = make_ops(step([(0, 8)], tables[:1]), block_size=block_size)
    cache = history._cache
    history.write_kv(k[0][:8], v[0][:8], LAYER)
    ops = NumpyOps(step(spans, tables), cache)
    ops.write_kv(np.concatenate([k[0][8:], k[1]]), np.concatenate([v[0][8:], v[1]]), LAYER)
    q = normal(30, 26, 32)
    got = ops.paged_attention(q, LAYER, 0.3, window, softcap)
    for s, rows in enumerate([slice(0, 3), slice(3, 26)]):
        query_at = np.arange(*spans[s])[:, None]
        key_at = np.arange(lens[s])[None]
        visible = (key_at <= query_at) & (key_at > query_at - (window or 1000))
        args = q[rows].reshape(-1, 4, 8), k[s].reshape(-1, 2, 8), v[s].reshape(-1, 2, 8)
        np.testing.assert_allclose(got[rows], softmax_attention(*args, 0.3, visible, softcap), atol=2e-6)


def test_attention_over_one_key_returns_its_value() -> None:
    v = normal(2, 1, 2, 8)
    got = attend(normal(1, 6, 8), normal(3, 1, 2, 8), v, 1.0, None)
    assert np.array_equal(got, np.repeat(v[0], 3, axis=0).reshape(-1))
