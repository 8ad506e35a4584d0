"""The paged KV cache of the NumPy backend, and the check of a step's inputs against it.

Every storage array is [N, values of a block]; a layer reads its own shape into it. Block b, keys first:

    storages[layer.storage, b] = | keys [K, B, D] | values [K, B, D] | unused where another spec is wider |
    of an int8 cache:            | scales [2, K, B] float32 | keys | values | unused |
    of a state-space layer:      | last inputs [W-1, C] | state [H, Z, P] | float32 in every cache |

All access goes through the block table of one sequence, as the article describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.numpy_quant import quantize_rows
from octavo.backends.ops import F32, I32, KVCacheConfig, KVDtype, Limits, StepInputs
from octavo.core.kv_groups import KVLayer
from octavo.core.kv_spec import KV_FORMATS, FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

KVArray = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.int8]
NUMBERS: Mapping[KVDtype, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}
StateParts = tuple[F32, F32]  # a layer's last inputs [(W-1)·C] and its recurrent state [H·Z·P]


def kv_widths(spec: KVCacheSpec) -> tuple[int, int]:
    """(K, D) of a layer that keeps keys and values."""
    if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)):
        raise ValueError(f"the layer caches {type(spec).__name__}, not keys and values")
    return spec.num_kv_heads, spec.head_size


class PagedCache:
    """The blocks, and each layer's view of them. Keys and values of block b lie together, keys first."""

    def __init__(self, config: KVCacheConfig) -> None:
        layout = config.layout
        dtype = NUMBERS[config.dtype]
        all_storages = layout.bytes_per_block(config.block_size, KV_FORMATS[config.dtype])
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        block_values = all_storages // layout.num_storages // dtype.itemsize
        shape = (layout.num_storages, config.num_blocks, block_values)
        self.storages: KVArray = np.zeros(shape, dtype)  # [storages, N, values of a block]
        self._specs = tuple(group.spec for group in layout.groups)
        self._is_scaled = config.dtype == "int8"

    def view(self, layer: KVLayer) -> KVArray:
        """Keys and values of one layer, sharing memory with the storage → [N, 2, K, B, D]."""
        kv_heads, head_size = kv_widths(self._specs[layer.group])
        num_vectors = 2 * kv_heads * self.block_size
        begin = 4 * num_vectors if self._is_scaled else 0
        blocks = self.storages[layer.storage, :, begin : begin + num_vectors * head_size]  # [N, 2·K·B·D]
        return blocks.reshape(self.num_blocks, 2, kv_heads, self.block_size, head_size)

    def scales(self, layer: KVLayer) -> F32:
        """Of an int8 cache: one scale for each key and value, sharing memory too → [N, 2, K, B]."""
        kv_heads, _ = kv_widths(self._specs[layer.group])
        blocks = self.storages[layer.storage, :, : 4 * 2 * kv_heads * self.block_size].view(np.float32)
        return blocks.reshape(self.num_blocks, 2, kv_heads, self.block_size)

    def write(self, layer: KVLayer, table: I32, positions: I32, k: F32, v: F32) -> None:
        """Store k, v [n, K·D] of one sequence whose block table is `table` [max_blocks]."""
        cache = self.view(layer)  # [N, 2, K, B, D]
        blocks, slots = table[positions // self.block_size], positions % self.block_size  # [n]
        for part, rows in enumerate((k, v)):
            vectors = rows.reshape(len(rows), *cache.shape[2:5:2])  # [n, K, D]
            if self._is_scaled:
                integers, scales = quantize_rows(vectors.reshape(-1, vectors.shape[2]))  # [n·K, D], [n·K]
                vectors = integers.reshape(vectors.shape)
                self.scales(layer)[blocks, part, :, slots] = scales.reshape(vectors.shape[:2])
            cache[blocks, part, :, slots] = vectors

    def read(self, layer: KVLayer, table: I32, num_tokens: int) -> tuple[F32, F32]:
        """Keys and values of a sequence's first `num_tokens` positions, each [num_tokens, K, D]."""
        num_blocks = -(-num_tokens // self.block_size)
        blocks = self.view(layer)[table[:num_blocks]].astype(np.float32)  # [n, 2, K, B, D]
        if self._is_scaled:
            blocks *= self.scales(layer)[table[:num_blocks], ..., None]
        flat = blocks.transpose(1, 0, 3, 2, 4)  # [2, n, B, K, D]
        flat = flat.reshape(2, num_blocks * self.block_size, *blocks.shape[2:5:2])[:, :num_tokens]
        k, v = np.ascontiguousarray(flat)
        return k, v

    def states(
        self, layer: KVLayer, inputs: StepInputs
    ) -> Iterator[tuple[slice, StateParts | None, StateParts]]:
        """For each sequence of the step its rows, the state before them (None at its start) and the one to
        write, both in the cache; they may be the same memory."""
        for s, row in enumerate(inputs.table_rows):
            rows = slice(int(inputs.query_starts[s]), int(inputs.query_starts[s + 1]))
            if rows.start == rows.stop:
                continue
            table = inputs.block_tables[layer.group][row]  # [max_blocks]
            start, last = int(inputs.positions[rows.start]), int(inputs.positions[rows.stop - 1])
            before = self.state(layer, table[(start - 1) // self.block_size]) if start else None
            yield rows, before, self.state(layer, table[last // self.block_size])

    def state(self, layer: KVLayer, block_id: int) -> StateParts:
        """The state of a state-space layer in one block, sharing its memory."""
        spec = self._specs[layer.group]
        if not isinstance(spec, MambaSpec):
            raise ValueError(f"group {layer.group} caches {type(spec).__name__}, not a recurrent state")
        values = self.storages[layer.storage, block_id].view(np.float32)
        end = spec.conv_values + spec.ssm_values
        return values[: spec.conv_values], values[spec.conv_values : end]

    def needed_blocks(self, group: int, start: int, end: int) -> list[int]:
        """Logical blocks of a group that a step over positions [start, end) reads or writes."""
        last = (end - 1) // self.block_size
        if not isinstance(self._specs[group], MambaSpec):
            return list(range(last + 1))
        return [last] if start == 0 else [(start - 1) // self.block_size, last]

    def copy_blocks(self, src: I32, dst: I32) -> None:
        for block_id in (*src, *dst):
            self._check(block_id)
        self.storages[:, dst] = self.storages[:, src]

    def read_block(self, block_id: int) -> NDArray[np.uint8]:
        self._check(block_id)
        return self.storages[:, block_id].copy().view(np.uint8).reshape(-1)

    def write_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        self._check(block_id)
        block = self.storages[:, block_id]  # [storages, values of a block]
        if data.nbytes != block.nbytes:
            raise ValueError(f"a block has {block.nbytes} bytes, not {data.nbytes}")
        block[:] = data.view(block.dtype).reshape(block.shape)

    def fill_block(self, block_id: int, value: float) -> None:
        self._check(block_id)
        block = self.storages[:, block_id]  # [storages, values of a block]
        if self._is_scaled:
            block.view(np.float32)[:] = value
        else:
            block[:] = value

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block id {block_id} must lie in [0, {self.num_blocks})")


def check_inputs(inputs: StepInputs, cache: PagedCache, limits: Limits) -> None:
    """Raise ValueError for inputs that would index outside the cache or mix up sequences."""
    starts, num_tokens, num_seqs = inputs.query_starts, len(inputs.tokens), len(inputs.seq_lens)
    if num_tokens > limits.max_tokens or num_seqs > limits.max_seqs:
        raise ValueError(
            f"a step of {num_tokens} tokens and {num_seqs} sequences exceeds the limits "
            f"of {limits.max_tokens} tokens and {limits.max_seqs} sequences"
        )
    if (
        len(starts) != num_seqs + 1
        or starts[0] != 0
        or starts[-1] != num_tokens
        or (np.diff(starts) < 0).any()
    ):
        raise ValueError(
            f"query_starts {starts.tolist()} must rise from 0 to {num_tokens} in {num_seqs} parts"
        )
    if len(inputs.positions) != num_tokens or len(inputs.table_rows) != num_seqs:
        raise ValueError("positions must have one entry per token and table_rows one per sequence")
    if num_tokens and inputs.tokens.min() < 0:
        raise ValueError(f"token id {inputs.tokens.min()} is negative")
    for s, row in enumerate(inputs.table_rows):
        positions = inputs.positions[starts[s] : starts[s + 1]]
        if len(positions) == 0:
            continue
        last = int(positions[-1])
        if positions[0] < 0 or last >= inputs.seq_lens[s] or (np.diff(positions) != 1).any():
            raise ValueError(f"positions of sequence {s} must be consecutive and below {inputs.seq_lens[s]}")
        for group, table in enumerate(inputs.block_tables):
            needed = cache.needed_blocks(group, int(positions[0]), last + 1)
            used = table[row, [i for i in needed if i < table.shape[1]]]
            if len(used) < len(needed) or used.min() < 0 or used.max() >= cache.num_blocks:
                raise ValueError(f"the block table of sequence {s} has no valid block for position {last}")
