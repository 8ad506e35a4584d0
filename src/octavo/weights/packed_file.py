"""The file packed parameters are kept in: named buffers, each with its checksum. It knows no model and no layout.

    magic | header length u32 | header crc32 u32 | header JSON | buffers, each on a multiple of 64 bytes

The header is {"identity": …, "parameters": {name: {"kind", "sizes", "buffers": [[offset, bytes, crc32], …]}}}.
CRC-32 finds every damage that lies within 32 bits and takes 0.3 s a gigabyte. It guards against bad disks, not
against enemies: who can write to the user's cache can write to the model too.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import CorruptModelError

U8 = NDArray[np.uint8]

_MAGIC = b"OCTAVOP1"
_HEAD = struct.Struct("<II")
_ALIGNMENT = 64  # bytes
_CHUNK_BYTES = 1 << 20  # checked while it is still in the core's cache


class Parameter(Protocol):
    """What a backend makes of a tensor, as `kind` (its class's name), sizes and memory."""

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def buffers(self) -> Sequence[U8]: ...


class PackedFile:
    """One open file."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises OSError, CorruptModelError."""
        self._file = path.open("rb", buffering=0)
        try:
            header = _read_header(self._file)
            self.identity: Any = header["identity"]
            self._entries: dict[str, Any] = header["parameters"]
        except (ValueError, KeyError, TypeError, struct.error) as error:
            self.close()
            raise CorruptModelError(f"{path}: no file of packed weights, or damaged ({error})") from None

    def form_of(self, name: str) -> tuple[str, list[int]] | None:
        """Kind and sizes of a parameter; None if it is not here."""
        entry = self._entries.get(name)
        return None if entry is None else (entry["kind"], entry["sizes"])

    def read_into(self, name: str, buffers: Sequence[U8]) -> bool:
        """Fill the buffers of a parameter; False if the file is damaged there, and their contents are undefined."""
        stored = self._entries[name]["buffers"]
        return [b.nbytes for b in buffers] == [num_bytes for _, num_bytes, _ in stored] and all(
            self._read(buffer, offset) == crc
            for buffer, (offset, _, crc) in zip(buffers, stored, strict=True)
        )

    def close(self) -> None:
        self._file.close()

    def _read(self, buffer: U8, offset: int) -> int | None:
        """The checksum of what was read; None at the end of the file."""
        crc = 0
        for start in range(0, buffer.nbytes, _CHUNK_BYTES):
            chunk = buffer.data[start : start + _CHUNK_BYTES]
            if os.preadv(self._file.fileno(), [chunk], offset + start) != chunk.nbytes:
                return None
            crc = zlib.crc32(chunk, crc)
        return crc


def write_packed(file: BinaryIO, identity: Any, parameters: Mapping[str, Parameter]) -> None:
    """Write everything to an empty file. Raises OSError."""
    entries, offset = {}, 0  # from the end of the header
    for name, parameter in parameters.items():
        stored = []
        for buffer in parameter.buffers:
            stored.append([offset, buffer.nbytes, zlib.crc32(buffer.data)])
            offset += _padded(buffer.nbytes)
        entries[name] = {"kind": type(parameter).__name__, "sizes": list(parameter.sizes), "buffers": stored}
    header = json.dumps({"identity": identity, "parameters": entries}).encode()
    head = _MAGIC + _HEAD.pack(len(header), zlib.crc32(header)) + header
    file.write(head.ljust(_padded(len(head)), b"\0"))
    for parameter in parameters.values():
        for buffer in parameter.buffers:
            file.write(buffer.data)
            file.write(bytes(_padded(buffer.nbytes) - buffer.nbytes))


def _read_header(file: BinaryIO) -> Any:
    """The JSON, with offsets from the start of the file. Raises ValueError, struct.error."""
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise ValueError(f"it starts with {magic!r}")
    length, crc = _HEAD.unpack(file.read(_HEAD.size))
    data = file.read(length)
    if len(data) != length or zlib.crc32(data) != crc:
        raise ValueError("its header is not what was written")
    header = json.loads(data)
    start = _padded(len(_MAGIC) + _HEAD.size + length)
    for entry in header["parameters"].values():
        for buffer in entry["buffers"]:
            buffer[0] += start
    return header


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
