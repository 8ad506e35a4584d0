"""Helpers to run one operation, or a few, through a backend: `bench` drives a model made of plain functions.

The rows of a float32 table are the input: token id t of a step looks up row t, so any array can be fed to any
operation through embed(), and logits() over all rows hands the result back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from octavo.backends.ops import F32, Array, KVCacheConfig, KVDtype, Limits, Ops, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec


@dataclass
class FunctionModel:
    """A Model from functions; by default logits are the hidden rows themselves."""

    function: Callable[[Ops], Array]
    logits_function: Callable[[Ops, Array], Array] = lambda ops, hidden: ops.scale(hidden, 1.0)

    def forward(self, ops: Ops) -> Array:
        return self.function(ops)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return self.logits_function(ops, hidden)


def one_sequence(num_tokens: int) -> StepInputs:
    """Tokens 0, 1, … of one sequence at positions 0, 1, … in blocks of 16."""
    ids = np.arange(num_tokens, dtype=np.int32)
    table = np.arange(-(-num_tokens // 16), dtype=np.int32)[None]
    starts, lens = np.array([0, num_tokens], np.int32), np.array([num_tokens], np.int32)
    return StepInputs(ids, ids, starts, lens, np.zeros(1, np.int32), (table,))


def run_rows(backend: Any, x: F32, function: Callable[[Ops, Array], Array], specs: Any = None) -> F32:
    """function(x) row by row: x [T, width] goes through one step as one sequence."""
    table = backend.embedding(x, "float32")
    layout = group_layers([specs or FullAttentionSpec(1, 8)])
    limits = Limits(max(len(x), 1), 4, 4, 128, max(len(x), 1))
    cache = KVCacheConfig(layout, 8, 16, "fp32")
    runner = backend.compile(FunctionModel(lambda ops: function(ops, ops.embed(table))), cache, limits)
    runner.forward(one_sequence(len(x)))
    return runner.logits(np.arange(len(x), dtype=np.int32)).copy()


@dataclass(frozen=True)
class AttentionCase:
    """Shapes and options of one attention layer."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    block_size: int = 16
    num_blocks: int = 64
    max_blocks: int = 32
    dtype: KVDtype = "fp32"
    window: int | None = None
    softcap: float | None = None
    max_tokens: int = 600
    max_seqs: int = 40


@dataclass
class AttentionBench:
    """One attention layer over a cache. q, k, v of token id t are row t of `rows` [tokens, (H + 2K)·D]."""

    backend: Any
    case: AttentionCase
    rows: F32
    tables: np.ndarray = field(init=False)  # [max_seqs, max_blocks]

    def __post_init__(self) -> None:
        case = self.case
        layout = group_layers([FullAttentionSpec(case.kv_heads, case.head_size)])
        embedding = self.backend.embedding(self.rows, "float32")
        q_width, kv_width = case.heads * case.head_size, case.kv_heads * case.head_size

        def forward(ops: Ops) -> Array:
            q, k, v = ops.split(ops.embed(embedding), (q_width, kv_width, kv_width))
            ops.write_kv(k, v, layout.layers[0])
            return ops.paged_attention(q, layout.layers[0], case.head_size**-0.5, case.window, case.softcap)

        cache = KVCacheConfig(layout, case.num_blocks, case.block_size, case.dtype)
        limits = Limits(case.max_tokens, case.max_seqs, case.max_seqs, case.max_blocks, case.max_tokens)
        self.runner = self.backend.compile(FunctionModel(forward), cache, limits)
        self.tables = np.zeros((case.max_seqs, case.max_blocks), np.int32)

    def give_blocks(self, lengths: list[int], seed: int = 0, last: int | None = None) -> None:
        """Sequence s gets random distinct blocks for lengths[s] tokens (of the `last` highest ids)."""
        case = self.case
        low = 0 if last is None else case.num_blocks - last
        free = list(np.random.default_rng(seed).permutation(case.num_blocks - low) + low)
        for s, length in enumerate(lengths):
            for i in range(-(-length // case.block_size)):
                self.tables[s, i] = free.pop()

    def step(self, slices: list[tuple[int, int, int]], first_ids: list[int]) -> F32:
        """Compute tokens [start, start + n) of each (seq, start, n) → [T, H·D]. Sequence s owns the token ids
        from first_ids[s] on."""
        positions = np.concatenate([np.arange(a, a + n) for _, a, n in slices]).astype(np.int32)
        tokens = np.concatenate([first_ids[s] + np.arange(a, a + n) for s, a, n in slices]).astype(np.int32)
        inputs = StepInputs(
            tokens,
            positions,
            np.cumsum([0] + [n for _, _, n in slices]).astype(np.int32),
            np.array([a + n for _, a, n in slices], np.int32),
            np.array([s for s, _, _ in slices], np.int32),
            (self.tables,),
        )
        self.runner.forward(inputs)
        return self.runner.logits(np.arange(len(tokens), dtype=np.int32)).copy()


@pytest.fixture
def rows_runner() -> Callable[..., F32]:
    return run_rows


@pytest.fixture
def attention_bench() -> type[AttentionBench]:
    return AttentionBench


@pytest.fixture
def attention_case() -> type[AttentionCase]:
    return AttentionCase


@pytest.fixture
def function_model() -> type[FunctionModel]:
    return FunctionModel
