"""The same bits on every processor: a small model with every operation, on instruction sets that multiply and add
at once, of x86 and ARM alike. Its parameters are fractions, so that they too are the same everywhere.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.ops import (
    F32,
    Array,
    GroupedWeights,
    KVCacheConfig,
    KVDtype,
    Limits,
    Ops,
    Scan,
    StepInputs,
)
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec, MambaSpec

FUSED = [isa for isa in _native.available_isas() if isa != "portable"]
WIDTH, HEAD, HEADS, LENGTH = 96, 32, 4, 300  # the longer span of keys is cut at 256


def fractions(*shape: int, seed: int) -> F32:
    """Between -1 and 1, in an order that looks random."""
    steps = (np.arange(np.prod(shape), dtype=np.int64) + 1000 * seed) * 7919 % 10007
    return (steps / 5003.0 - 1.0).astype(np.float32).reshape(shape)


def grouped(bits: int, has_low: bool, n: int, k: int, seed: int) -> GroupedWeights:
    codes = ((np.arange(n * k) + seed) * 7919 % 10007 % (1 << bits)).astype(np.uint8).reshape(n, k)
    scale, low = (
        fractions(n, k // (16 if bits == 6 else 32), seed=seed + i).astype(np.float16) / np.float16(1 << bits)
        for i in (0, 1)
    )
    return GroupedWeights(codes, scale, low if has_low else None, bits)


class EveryOperation:
    """A layer of attention, one of state-space and a gated product, with weights of one kind."""

    layout = group_layers([FullAttentionSpec(1, HEAD), MambaSpec(3 * (WIDTH + 32), WIDTH * 16)])

    def __init__(self, backend: NativeBackend, kind: str, window: int | None) -> None:
        def matrix(n: int, seed: int) -> Any:
            if kind[0].isdigit():
                return backend.grouped_matrix(grouped(int(kind[0]), "low" in kind, n, WIDTH, seed))
            return backend.matrix(fractions(n, WIDTH, seed=seed) / np.float32(8), kind)  # type: ignore[arg-type]

        self.window = window
        self.table = backend.embedding(fractions(LENGTH, WIDTH, seed=0), "float32")
        self.norm = backend.vector(fractions(WIDTH, seed=1))
        self.head_norm = backend.vector(fractions(HEAD, seed=2))
        self.rope = backend.rope(fractions(HEAD // 2, seed=3))
        self.qkv, self.mixed, self.out = (
            matrix((HEADS + 2) * HEAD, 4),
            matrix(WIDTH + 32 + 3, 5),
            matrix(70, 6),
        )
        self.gated = backend.gated_matrix(
            fractions(WIDTH, HEADS * HEAD, seed=7), fractions(WIDTH, HEADS * HEAD, seed=8), "int8"
        )
        self.taps = backend.vector(fractions(4 * (WIDTH + 32), seed=9))
        self.bias = backend.vector(fractions(WIDTH + 32, seed=10))
        decay, skip, dt_bias = (backend.vector(fractions(3, seed=11 + i) - np.float32(1)) for i in range(3))
        self.scan = Scan(3, 32, 1, 16, decay=decay, skip=skip, dt_bias=dt_bias)

    def forward(self, ops: Ops) -> Array:
        attention, states = self.layout.layers
        x = ops.embed(self.table)
        q, k, v = ops.split(
            ops.linear(ops.rms_norm(x, self.norm, 1e-5), self.qkv), (HEADS * HEAD, HEAD, HEAD)
        )
        ops.write_kv(ops.rope(ops.head_norm(k, self.head_norm, 1e-6), self.rope, HEAD), v, attention)
        mixed = ops.paged_attention(ops.rope(q, self.rope, HEAD), attention, 0.25, self.window, 5.0)
        x = ops.add(x, ops.gated_linear(mixed, self.gated, "gelu_tanh"))
        u, dt = ops.split(ops.linear(x, self.mixed), (WIDTH + 32, 3))
        scanned, b, c = ops.split(ops.conv1d(u, self.taps, self.bias, states), (WIDTH, 16, 16))
        y = ops.ssm_scan(scanned, dt, b, c, self.scan, states)
        return ops.scale(ops.gated_rms_norm(y, x, self.norm, 1e-5, 32), 0.5)

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.softcap(ops.linear(hidden, self.out), 30.0)


@pytest.mark.parametrize("isa", FUSED)
@pytest.mark.parametrize(
    ("kind", "dtype", "window", "expected"),
    [
        ("float32", "fp32", None, 0x6922D9DB),
        ("int8", "fp16", None, 0xA90F7CAC),
        ("int8", "int8", 100, 0x814D39A6),
        ("4", "fp16", None, 0x21169B77),
        ("4 low", "fp16", None, 0xCFC9A64F),
        ("5", "fp16", None, 0x8FDA9EF7),
        ("5 low", "fp16", None, 0xE07475AD),
        ("6", "fp16", None, 0x8445D627),
        ("8", "fp16", None, 0xF268D058),
    ],
)
def test_a_model_with_every_operation_has_these_bits(
    kind: str, dtype: KVDtype, window: int | None, expected: int, isa: str
) -> None:
    backend = NativeBackend(2, isa)
    cache = KVCacheConfig(EveryOperation.layout, 40, 16, dtype)
    runner = backend.compile(EveryOperation(backend, kind, window), cache, Limits(LENGTH, 1, 1, 20, LENGTH))
    rows = np.arange(LENGTH, dtype=np.int32)
    starts, tables = np.array([0, LENGTH], np.int32), np.arange(40, dtype=np.int32).reshape(2, 1, 20)
    runner.forward(StepInputs(rows, rows, starts, starts[1:], np.zeros(1, np.int32), tuple(tables)))
    logits = runner.logits(rows)
    assert np.isfinite(logits).all()
    assert np.ptp(logits) > 1
    assert hex(crc32(logits.tobytes())) == hex(expected)
