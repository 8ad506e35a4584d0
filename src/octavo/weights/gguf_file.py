"""GGUFFile: the container format. Metadata as a dict, tensors as raw memory-mapped rows; it knows no model.

The header is read in gguf_header.py. Dequantising is the gguf package's.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.errors import UnsupportedModelError
from octavo.weights.gguf_header import GGUFHeader, GGUFTensor
from octavo.weights.mapping import let_go

# The gguf package works on 16 rows at a time; joining short rows makes it five times as fast.
_DEQUANTIZE_ROW_BYTES = 8192
_DEQUANTIZE_BYTES = 1 << 20  # at a time: its intermediate arrays are several times the result
_PLAIN_DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix [out, in] whose rows are dequantised as they are asked for, as float32."""

    file: GGUFFile
    tensor: GGUFTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def __getitem__(self, rows: slice) -> NDArray[np.float32]:
        raw = self.file.raw(self.tensor.name)[rows]
        values = _dequantize(raw, self.tensor, self.file.path)
        self.file.forget(self.tensor.name)
        return values


class GGUFFile:
    """One mapped file. Arrays from raw() are views: they keep the mapping alive until they are dropped."""

    def __init__(self, header: GGUFHeader) -> None:
        self.path = header.path
        self.metadata, self.tensors = header.metadata, header.tensors
        self._data: mmap.mmap | None = header.data

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, one row of blocks per output: [rows, row_bytes]."""
        tensor = self.tensors[name]
        assert self._data is not None, f"{self.path} is closed"
        flat = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        return flat.reshape(prod(tensor.shape[:-1]), -1)  # [rows, row_bytes]

    def read(self, name: str, row_order: NDArray[np.intp] | None = None) -> NDArray[np.float32]:
        """A tensor as a fresh float32 array [out, in] or [width]; row i is row `row_order[i]` of the file."""
        tensor = self.tensors[name]
        raw = self.raw(name)  # [out, row_bytes]; [1, num_bytes] for a vector
        if row_order is not None and len(tensor.shape) > 1:
            raw = raw[row_order]  # rows are quantised one by one, so they can be moved as bytes
        values = _dequantize(raw, tensor, self.path).reshape(tensor.shape)
        return values[row_order] if row_order is not None and len(tensor.shape) == 1 else values

    def rows(self, name: str) -> StoredRows:
        return StoredRows(self, self.tensors[name])

    def forget(self, name: str) -> None:
        """Let go of the memory that reading a tensor took; it can be read again. Views stay valid."""
        assert self._data is not None, f"{self.path} is closed"
        tensor = self.tensors[name]
        let_go(self._data, tensor.start, tensor.num_bytes)

    def close(self) -> None:
        # Views may still be out: the mapping goes with the last of them.
        self._data = None


def _dequantize(raw: NDArray[np.uint8], tensor: GGUFTensor, path: Path) -> NDArray[np.float32]:
    """Rows of stored bytes [rows, row_bytes] -> float32 [rows, in]."""
    if tensor.type_name in _PLAIN_DTYPES:
        dtype = np.dtype(_PLAIN_DTYPES[tensor.type_name])
        return np.ascontiguousarray(raw).view(dtype).astype(np.float32)  # [rows, in]
    from gguf import GGMLQuantizationType, quants

    rows, row_bytes = raw.shape
    wanted = max(1, _DEQUANTIZE_ROW_BYTES // row_bytes)
    joined = gcd(rows, 1 << (wanted.bit_length() - 1))  # a power of two, so that it divides most shapes
    raw = raw.reshape(rows // joined, -1)
    values = np.empty((len(raw), tensor.shape[-1] * joined), np.float32)
    step = max(1, _DEQUANTIZE_BYTES // raw.shape[1])
    try:
        for part in (slice(start, start + step) for start in range(0, len(raw), step)):
            values[part] = quants.dequantize(raw[part], GGMLQuantizationType(tensor.type_id))
    except (NotImplementedError, ValueError):  # ValueError: a type younger than the package
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name!r} has type {tensor.type_name}, which cannot be dequantised; "
            "use a file in another quantisation, such as Q8_0 or Q4_K_M"
        ) from None
    return values.reshape(rows, -1)  # [rows, in]
