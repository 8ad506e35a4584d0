"""The kernels beside the specification, on what both must do to the last bit: int8 products.

Everything but the order of float sums is specified exactly, and an int8 product has only one order. The
portable kernels are left out: without fused multiply-add they round each group's product before adding it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from octavo.backends.ops import F32, Array, Backend, KVCacheConfig, Limits, Ops, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec

NUM_TOKENS = 20


class OneProduct:
    """logits = table[token] @ weight.T + bias."""

    def __init__(self, backend: Backend, table: F32, weight: F32, bias: F32) -> None:
        self.table = backend.embedding(table, "int8")
        self.matrix = backend.matrix(weight, "int8")
        self.bias = backend.vector(bias)

    def forward(self, ops: Ops) -> Array:
        return ops.embed(self.table)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.linear(hidden, self.matrix, self.bias)


def run(backend: Backend, model: OneProduct) -> F32:
    """The model on tokens 0 … 19 → [20, N]."""
    cache = KVCacheConfig(group_layers([FullAttentionSpec(1, 8)]), num_blocks=2, block_size=16, dtype="fp32")
    runner = backend.compile(model, cache, Limits(NUM_TOKENS, 1, 1, 2, NUM_TOKENS))
    rows = np.arange(NUM_TOKENS, dtype=np.int32)
    starts, table = np.array([0, NUM_TOKENS], np.int32), np.array([[0, 1]], np.int32)
    inputs = StepInputs(rows, rows, starts, starts[1:], np.zeros(1, np.int32), (table,))
    runner.forward(inputs)
    return runner.logits(rows).copy()


@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2_vnni", "avx512", "avx2", "neon_dotprod", "neon"])
@pytest.mark.parametrize(("k", "n"), [(1, 5), (64, 16), (65, 33), (130, 49), (576, 960), (1536, 576)])
def test_int8_products_of_the_kernels_are_those_of_the_specification(
    isa: str, k: int, n: int, make_backend: Callable[[str], Backend]
) -> None:
    make_backend("native")  # skips where the kernels are not built
    from octavo import _native
    from octavo.backends.native import NativeBackend

    if isa not in _native.available_isas():
        pytest.skip(f"this processor has no {isa}")
    rng = np.random.default_rng(k * n)
    table = rng.standard_normal((NUM_TOKENS, k)).astype(np.float32)
    weight = (rng.standard_normal((n, k)) / k**0.5).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    results = [
        run(backend, OneProduct(backend, table, weight, bias))
        for backend in (make_backend("numpy"), NativeBackend(isa=isa))
    ]
    assert results[0].shape == (NUM_TOKENS, n)
    assert np.array_equal(*results)
