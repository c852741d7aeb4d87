"""Frames: a 4-byte big-endian length and that many bytes of MessagePack. What server and client have in common."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from headrace.errors import ProtocolViolation
from headrace.model import MAX_FRAME_BYTES

HEADER: Final = struct.Struct(">I")
_encode: Final = msgspec.msgpack.Encoder().encode


class Frames:
    """Splits a byte stream into length-prefixed frames.

    A large frame is collected in pieces and joined once, so that 64 MB arriving in small reads costs linear time.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self.held = 0
        """Bytes of a frame that has begun and not ended."""
        self._need = 4
        self.violation: ProtocolViolation | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """All frames that `data` completes, up to one whose length exceeds the limit: that becomes `violation`."""
        if self.held:
            self._pieces.append(data)
            self.held += len(data)
            if self.held < self._need:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
            self.held = 0
        return self._split(data)

    def _split(self, data: bytes) -> list[bytes]:
        frames: list[bytes] = []
        at, end, limit = 0, len(data), self._limit
        while end - at >= 4:
            (length,) = HEADER.unpack_from(data, at)
            if length > limit:
                text = f"Frame too large: {length} bytes exceeds maximum {limit}"
                self.violation = ProtocolViolation(text)
                return frames
            stop = at + 4 + length
            if stop > end:
                self._need = stop - at
                break
            frames.append(data[at + 4 : stop])
            at = stop
        else:
            self._need = 4
        if at < end:
            self._pieces.append(data[at:] if at else data)
            self.held = end - at
        return frames


def encode_frame(value: Any) -> bytes:
    """A frame with any content: what clients and tests send, and server pushes."""
    body = _encode(value)
    return HEADER.pack(len(body)) + body
