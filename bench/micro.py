"""Each kernel against its limit, at a model's shapes: matrices by rows, decode attention by context and block size.

Weights and caches are cold: each product and each layer takes the next of enough copies to exceed the processor's
caches. `paged` has blocks in random order, as they are after some traffic. `contiguous` is the faster of two caches
without paging: the same blocks one after another, and one block as long as the sequence. `scattered` is other
memory in random pieces of a block's size, read by a loop that computes nothing: what random order costs on this
machine whatever the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter

import numpy as np
from limits import Machine
from report import Row

from octavo import _native
from octavo.backends.native import ISA_VARIABLE, NativeBackend
from octavo.backends.native_record import Packed
from octavo.backends.ops import (
    Array,
    GroupedWeights,
    KVCacheConfig,
    KVDtype,
    Limits,
    Ops,
    StepInputs,
    WeightDtype,
)
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import KV_FORMATS, FullAttentionSpec
from octavo.models.config import ModelConfig

FOOTPRINT_BYTES = 512 << 20
ROUNDS = 9  # the best counts
BATCH = 32  # sequences of the attention measurements
MAX_HEAD_ROWS = 32  # only rows that are sampled need logits


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    k: int
    n: int
    is_gated: bool = False


def shapes(config: ModelConfig) -> list[Shape]:
    """The matrices of one layer and the head."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_size
    return [
        Shape("qkv", hidden, heads + 2 * config.num_kv_heads * config.head_size),
        Shape("o", heads, hidden),
        Shape("gate_up", hidden, 2 * config.intermediate_size, is_gated=True),
        Shape("down", config.intermediate_size, hidden),
        Shape("head", hidden, config.vocab_size),
    ]


def matrices(
    config: ModelConfig, dtype: WeightDtype, machine: Machine, rows: Iterable[int] = (1, 4, 8, 32, 128, 512)
) -> list[Row]:
    pool, isa = _native.thread_pool(machine.threads), os.environ.get(ISA_VARIABLE)
    backend = NativeBackend(machine.threads)
    found = []
    for shape in shapes(config):
        first = pack(shape, dtype, backend)
        copies = [first, *(pack(shape, dtype, backend) for _ in range(FOOTPRINT_BYTES // first.nbytes))]
        for num_rows in rows:
            if shape.name == "head" and num_rows > MAX_HEAD_ROWS:
                continue
            used = copies[: max(2, 4096 // num_rows)]
            time = partial(_native.time_matmul, used, num_rows, pool, ROUNDS, isa)
            seconds, peaks = machine.during(time)
            num_ops = 2 * num_rows * shape.n * shape.k
            more = {"GB/s": first.nbytes / seconds / 1e9, "GOP/s": num_ops / seconds / 1e9}
            least_us = 1e6 * peaks.seconds(first.nbytes, num_ops, dtype)
            found.append(Row(f"{dtype} {shape.name}, rows {num_rows}", 1e6 * seconds, "us", least_us, more))
    return found


def pack(shape: Shape, dtype: WeightDtype, backend: NativeBackend) -> Packed:
    rng = np.random.default_rng(0)
    n = shape.n // 2 if shape.is_gated else shape.n
    if dtype == "native":  # 4 bits
        codes = rng.integers(0, 16, (n, shape.k), np.uint8)
        scale = np.ones((n, shape.k // 32), np.float16)
        grouped = GroupedWeights(codes, scale, -scale, 4)
        return (
            backend.gated_grouped_matrix(grouped, grouped)
            if shape.is_gated
            else backend.grouped_matrix(grouped)
        )
    weight = rng.standard_normal((n, shape.k), np.float32)
    return backend.gated_matrix(weight, weight, dtype) if shape.is_gated else backend.matrix(weight, dtype)


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Layers of nothing but attention, all with the same queries."""

    config: ModelConfig
    backend: NativeBackend
    num_layers: int

    def forward(self, ops: Ops) -> Array:
        rows = np.full((1, self.config.num_heads * self.config.head_size), 0.5, np.float32)
        q = ops.embed(self.backend.embedding(rows, "float32"))
        layers = group_layers([spec(self.config)] * self.num_layers).layers
        for layer in layers:
            out = ops.paged_attention(q, layer, self.config.head_size**-0.5)
        return out

    def logits(self, ops: Ops, hidden: Array) -> Array:
        return ops.scale(hidden, 1.0)


def spec(config: ModelConfig) -> FullAttentionSpec:
    return FullAttentionSpec(config.num_kv_heads, config.head_size)


class Decode:
    """BATCH sequences of `context` tokens that decode one token, in layers enough to exceed the caches."""

    def __init__(
        self, config: ModelConfig, backend: NativeBackend, context: int, dtype: KVDtype, block_size: int
    ) -> None:
        vector_bytes = KV_FORMATS[dtype].vector_bytes(config.head_size)
        layer_bytes = BATCH * context * 2 * config.num_kv_heads * vector_bytes
        self._num_layers = max(2, -(-FOOTPRINT_BYTES // layer_bytes))
        self.layer_bytes = layer_bytes  # keys and values that one layer reads
        self._num_blocks = BATCH * context // block_size
        self.block_bytes = layer_bytes // self._num_blocks  # of one layer
        layout = group_layers([spec(config)] * self._num_layers)
        self._runner = backend.compile(
            AttentionModel(config, backend, self._num_layers),
            KVCacheConfig(layout, self._num_blocks, block_size, dtype),
            Limits(BATCH, BATCH, BATCH, context // block_size, 1),
        )
        for block in range(self._num_blocks):
            self._runner.fill_block(block, 0.5)
        self._context = context

    def layer_s(self, is_shuffled: bool) -> float:
        """Seconds a layer takes, once."""
        ids = np.arange(self._num_blocks, dtype=np.int32)
        if is_shuffled:
            ids = np.random.default_rng(0).permutation(ids)
        sequences = np.arange(BATCH, dtype=np.int32)
        inputs = StepInputs(
            tokens=np.zeros(BATCH, np.int32),
            positions=np.full(BATCH, self._context - 1, np.int32),
            query_starts=np.arange(BATCH + 1, dtype=np.int32),
            seq_lens=np.full(BATCH, self._context, np.int32),
            table_rows=sequences,
            block_tables=(ids.reshape(BATCH, -1),),
        )
        begin = perf_counter()
        self._runner.forward(inputs)
        return (perf_counter() - begin) / self._num_layers


def attention(
    config: ModelConfig,
    machine: Machine,
    contexts: Iterable[int] = (256, 1024, 4096),
    block_sizes: Iterable[int] = (16, 32, 64, 128),
    dtypes: Iterable[KVDtype] = ("fp16", "int8"),
) -> list[Row]:
    """Paged beside contiguous, taking turns."""
    backend = NativeBackend(machine.threads)
    found = []
    for dtype, context in product(dtypes, contexts):
        whole = Decode(config, backend, context, dtype, context)
        for block_size in block_sizes:
            paged = Decode(config, backend, context, dtype, block_size)
            turns = (
                partial(paged.layer_s, is_shuffled=True),
                partial(paged.layer_s, is_shuffled=False),
                partial(whole.layer_s, is_shuffled=False),
                partial(machine.scattered_s, paged.layer_bytes, paged.block_bytes),
            )
            (paged_s, in_order_s, whole_s, scattered_s), peaks = machine.during(partial(best_of, *turns))
            found.append(
                Row(
                    f"{dtype} attention, batch {BATCH}, context {context}, blocks of {block_size}",
                    paged.layer_bytes / paged_s / 1e9,
                    "GB/s",
                    peaks.read_gb_s,
                    {"paged / contiguous time": paged_s / min(in_order_s, whole_s)}
                    | {"in order GB/s": paged.layer_bytes / in_order_s / 1e9}
                    | {"one block GB/s": paged.layer_bytes / whole_s / 1e9}
                    | {"scattered GB/s": paged.layer_bytes / scattered_s / 1e9},
                )
            )
    return found


def best_of(*measures: Callable[[], float]) -> list[float]:
    """The best of ROUNDS of each, taking turns."""
    return [min(times) for times in zip(*([m() for m in measures] for _ in range(ROUNDS)), strict=True)]
