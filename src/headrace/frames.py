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

    A frame that comes in pieces is collected in one buffer: however small they are, it takes its own size in memory and
    linear time.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self.held = bytearray()
        """What has come of a frame that has begun and not ended."""
        self.awaited = 4
        """How long it will be, as far as is known, with its length."""
        self.violation: ProtocolViolation | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """All frames that `data` completes, up to one whose length exceeds the limit: that becomes `violation`."""
        held, awaited = self.held, self.awaited
        if not held:
            return self._split(data)
        held += data
        if len(held) < awaited:
            return []
        first = [bytes(memoryview(held)[4:awaited])] if awaited > 4 else []  # copied once: it may be large
        rest = bytes(memoryview(held)[awaited if first else 0 :])
        self.held = bytearray()
        return first + self._split(rest)

    def _split(self, data: bytes) -> list[bytes]:
        frames = _split_alike(data, self._limit)
        if frames:
            self.awaited = 4
            return frames
        at, end, limit = 0, len(data), self._limit
        while end - at >= 4:
            (length,) = HEADER.unpack_from(data, at)
            if length > limit:
                text = f"Frame too large: {length} bytes exceeds maximum {limit}"
                self.violation = ProtocolViolation(text)
                return frames
            stop = at + 4 + length
            if stop > end:
                self.awaited = stop - at
                break
            frames.append(data[at + 4 : stop])
            at = stop
        else:
            self.awaited = 4
        if at < end:
            self.held += data[at:] if at else data
        return frames


def _split_alike(data: bytes, limit: int) -> list[bytes]:
    """The frames in `data` if it is several whole ones of the same length, as a burst often is; else none."""
    head = data[:4]
    length = int.from_bytes(head, "big")
    count, rest = divmod(len(data), 4 + length)
    if rest or count < 2 or length > limit:
        return []
    _, *frames = data.split(head)
    return frames if set(map(len, frames)) == {length} else []  # a head may also occur within a frame


def encode_frame(value: Any) -> bytes:
    """A frame with any content: what clients and tests send, and server pushes."""
    body = _encode(value)
    return HEADER.pack(len(body)) + body
