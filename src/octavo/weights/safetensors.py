"""SafetensorsFile: the container format. Named float tensors as float32; it knows no model.

The header is read here because the safetensors package gives no NumPy access to bfloat16, which most
checkpoints are in: two bytes that are the upper half of a float32.

    header length u64 | header JSON {name: {dtype, shape, data_offsets}} | data
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.weights.mapping import let_go

F32 = NDArray[np.float32]
Raw = NDArray[np.uint8]

_MAX_HEADER_BYTES = 100 << 20


def _from_bf16(raw: Raw) -> F32:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


_READERS: dict[str, tuple[int, Callable[[Raw], F32]]] = {  # dtype -> (bytes of a value, reader)
    "F32": (4, lambda raw: raw.view("<f4").astype(np.float32)),
    "F16": (2, lambda raw: raw.view("<f2").astype(np.float32)),
    "BF16": (2, _from_bf16),
    "F64": (8, lambda raw: raw.view("<f8").astype(np.float32)),
}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    num_bytes: int


class SafetensorsFile:
    """One mapped file. The header is checked on opening; values are converted when they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        self.tensors = self._parse()

    def read(self, name: str) -> F32:
        """A tensor as a fresh float32 array in its stored shape."""
        tensor = self.tensors[name]
        if tensor.dtype not in _READERS:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has type {tensor.dtype}; {', '.join(_READERS)} are supported"
            )
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        values = _READERS[tensor.dtype][1](raw).reshape(tensor.shape)
        let_go(self._data, tensor.start, tensor.num_bytes)
        return values

    def _parse(self) -> dict[str, SafetensorsTensor]:
        length = int.from_bytes(self._data[:8], "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, len(self._data) - 8):
            raise CorruptModelError(
                f"{self.path}: not a safetensors file, or truncated (header of {length} bytes in a file of "
                f"{len(self._data)}); download it again"
            )
        try:
            header = json.loads(self._data[8 : 8 + length])
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            return {name: self._entry(name, entry, 8 + length) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptModelError(f"{self.path}: damaged safetensors header ({error!r})") from error

    def _entry(self, name: str, entry: dict[str, Any], data_start: int) -> SafetensorsTensor:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
        if start < 0 or end < start or any(size < 0 for size in shape):
            raise ValueError(f"tensor {name!r} at [{start}, {end}) with shape {list(shape)}")
        if data_start + end > len(self._data):
            raise CorruptModelError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {data_start + end}, the file at byte "
                f"{len(self._data)}; download it again"
            )
        if dtype in _READERS and prod(shape) * _READERS[dtype][0] != end - start:
            raise ValueError(f"tensor {name!r} {list(shape)} {dtype} in {end - start} bytes")
        return SafetensorsTensor(dtype, shape, data_start + start, end - start)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CorruptModelError(f"{path}: the file is empty; download it again") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from error
