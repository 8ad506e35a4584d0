"""GGUFHeader: what a GGUF file says of itself: metadata as a dict, and where each tensor lies. It reads no tensor.

It is parsed here and not with gguf.GGUFReader because that makes a NumPy view of every token of the
vocabulary: 1.8 s for 49 152 tokens against 0.05 s.

    magic "GGUF" | version u32 | num_tensors u64 | num_entries u64 | entries | tensor infos | padding | data
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32  # bytes
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# ggml type number -> (name, values in a block, bytes of a block): the gguf package's GGML_QUANT_SIZES, which takes
# longer to import than all else takes to open a file.
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in NumPy order: [out, in]."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # ggml's number
    type_name: str
    start: int  # byte offset in the file
    num_bytes: int


class StoredStrings(Collection[str]):
    """An array of strings, decoded anew in each pass: a process that needs no vocabulary does not hold one."""

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        """`start` is where the length of the first one is. All must lie within the file."""
        self._data, self._start, self._count = data, start, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        data, at, unpack = self._data, self._start, _U64.unpack_from
        for _ in range(self._count):
            start = at + 8
            at = start + unpack(data, at)[0]
            yield data[start:at].decode("utf-8", "replace")

    def __contains__(self, text: object) -> bool:
        return any(text == own for own in self)

    def __repr__(self) -> str:
        return repr(list(self))


class _Cursor:
    """A cursor over the mapped file. Reading past the end raises struct.error, which read_header translates."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def u32(self) -> int:
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self) -> int:
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def string(self) -> str:
        [text] = self.strings(1)
        return text

    def strings(self, count: int) -> StoredStrings:
        """`count` strings; one flat loop, since vocabularies and merges are most of a header."""
        data, at, end, unpack = self.data, self.at, len(self.data), _U64.unpack_from
        found = StoredStrings(data, at, count)
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
            if at > end:
                raise struct.error("string runs past the end of the file")
        self.at = at
        return found

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(depth + 1)
        return self._scalars(type_id, 1)[0]

    def _array(self, depth: int) -> Collection[Any]:
        if depth > _MAX_ARRAY_DEPTH:
            raise struct.error("arrays nested too deep")
        item_type, count = self.u32(), self.u64()
        if item_type == _STRING:
            return self.strings(count)
        if item_type == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        return self._scalars(item_type, count)

    def _scalars(self, type_id: int, count: int) -> list[Any]:
        code = _SCALARS.get(type_id)
        if code is None:
            raise struct.error(f"unknown metadata type {type_id}")
        num_bytes = struct.calcsize(code) * count
        if num_bytes > len(self.data) - self.at:
            raise struct.error("array runs past the end of the file")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += num_bytes
        return list(values)


class GGUFHeader:
    """Of one mapped file, whose memory is `data`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._parse(_Cursor(data))

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.data[:4] != _MAGIC:
            raise CorruptModelError(f"{self.path}: not a GGUF file (it starts with {cursor.data[:4]!r})")
        cursor.at = 4
        version = cursor.u32()
        if version not in _VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version}{hint} is not supported; use a file of version 2 or 3"
            )
        num_tensors, num_entries = cursor.u64(), cursor.u64()
        for _ in range(num_entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.u32())
        infos = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CorruptModelError(f"{self.path}: general.alignment is {alignment!r}; it must be positive")
        data_start = -(-cursor.at // alignment) * alignment
        for info in infos:
            self._add_tensor(info, data_start)

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = cursor.string(), cursor.u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CorruptModelError(
                f"{self.path}: tensor {name!r} has {num_dims} dimensions; 1 to 4 are possible"
            )
        shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]  # stored innermost first
        return name, shape, cursor.u32(), cursor.u64()

    def _add_tensor(self, info: tuple[str, tuple[int, ...], int, int], data_start: int) -> None:
        name, shape, type_id, offset = info
        if type_id not in _TYPES:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} has the unknown ggml type {type_id}")
        type_name, block_len, block_bytes = _TYPES[type_id]
        if name in self.tensors or prod(shape) == 0 or shape[-1] % block_len:
            raise CorruptModelError(
                f"{self.path}: tensor {name!r} {list(shape)} of type {type_name} is repeated or impossible"
            )
        num_bytes = prod(shape) // block_len * block_bytes
        start = data_start + offset
        if start + num_bytes > len(self.data):
            raise CorruptModelError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {start + num_bytes}, "
                f"the file at byte {len(self.data)}; download it again"
            )
        self.tensors[name] = GGUFTensor(name, shape, type_id, type_name, start, num_bytes)


def read_header(path: Path) -> GGUFHeader:
    """Map a file and read it. Raises ModelNotFoundError, CorruptModelError or UnsupportedModelError."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CorruptModelError(f"{path}: the file is empty; download it again") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return GGUFHeader(path, data)
    except (struct.error, OverflowError, MemoryError) as error:
        raise CorruptModelError(f"{path}: damaged GGUF header ({error}); download the file again") from error


def read_parts(path: Path) -> list[GGUFHeader]:
    """Of the file, or of all parts of the split model it belongs to, the first (with the metadata) first."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        header = read_header(path)
        if header.metadata.get("split.count", 1) > 1:
            raise CorruptModelError(
                f"{path}: one of {header.metadata['split.count']} parts of a model; keep all parts in one "
                "folder under their published names (…-00001-of-0000N.gguf)"
            )
        return [header]
    stem, count = match[1], int(match[3])
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for part in paths:
        if not part.is_file():
            raise ModelNotFoundError(
                f"{part}: part of the split model {path.name} is missing; download all parts"
            )
    return [read_header(part) for part in paths]
