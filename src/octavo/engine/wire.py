"""Frames on a stream socket: a length of four bytes, big endian, then one msgpack value of messages.py."""

from __future__ import annotations

import asyncio
import select
import socket
import struct

import msgspec

from octavo.engine.messages import FromEngine, ToEngine

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_engine = msgspec.msgpack.Decoder(ToEngine)


def encode(message: FromEngine | ToEngine) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_from_engine(reader: asyncio.StreamReader) -> FromEngine:
    """The next message. Raises asyncio.IncompleteReadError when the engine is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _from_engine.decode(await reader.readexactly(length))


class EngineSocket:
    """The engine's end: blocking writes, reads that wait only when the engine is idle."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self.is_open = True

    def send(self, message: FromEngine) -> None:
        """Raises OSError when the other side is gone."""
        self._socket.sendall(encode(message))

    def receive(self, wait: bool) -> ToEngine:
        """Everything that has arrived, in order; empty when nothing has or the other side is gone."""
        messages: ToEngine = []
        if wait and not self._has_frame():
            self._fill()
        while self.is_open and select.select([self._socket], [], [], 0)[0]:
            self._fill()
        while self._has_frame():
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            messages += _to_engine.decode(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
        return messages

    def _has_frame(self) -> bool:
        if len(self._buffer) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._buffer)
        return len(self._buffer) >= _LENGTH.size + int(length)

    def _fill(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionError:
            data = b""
        self._buffer += data
        self.is_open = bool(data)
