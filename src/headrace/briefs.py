"""The beginning of a payload, for lists: a few of its entries, long strings truncated, the same shape.

It is taken from the encoded bytes, and what is left out is skipped, never decoded: a payload of many megabytes costs
no more than a small one.
"""

from __future__ import annotations

from typing import Final

from msgspec import msgpack

from headrace.model import NIL

BRIEF_BYTES: Final = 1000
"""Payloads up to here are shown whole."""
BRIEF_TEXT: Final = 200
"""Bytes of a text within a longer payload."""
_DEPTH: Final = 8
_HEADER_BYTES: Final = 3
_ELLIPSIS: Final = "…"

_encode: Final = msgpack.Encoder().encode
# First bytes of MessagePack values: how many bytes of length follow, or how long the value itself is.
_TEXTS: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_LISTS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}
_NUMBERS: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED: Final = {**_NUMBERS, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}


def brief(encoded: bytes) -> bytes:
    """The value if it is short, else its beginning."""
    return encoded if len(encoded) <= BRIEF_BYTES else _Beginning(encoded).value(_DEPTH)


def brief_text(text: str | None) -> str | None:
    return text if text is None or len(text) <= BRIEF_BYTES else f"{text[:BRIEF_BYTES]}{_ELLIPSIS}"


class _Beginning:
    """Goes through an encoded value once and stops when it has enough."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self._at = 0
        self._room = BRIEF_BYTES

    def value(self, depth: int) -> bytes:
        """The next value, shortened; nothing may be read behind one that used up the room."""
        first = self._encoded[self._at]
        self._at += 1
        if 0x80 <= first <= 0x9F:
            return self._many(first & 0x0F, depth, is_map=first < 0x90)
        if first in _LISTS or first in _MAPS:
            return self._many(self._length(_LISTS.get(first) or _MAPS[first]), depth, is_map=first in _MAPS)
        if 0xA0 <= first <= 0xBF:
            return self._text(first & 0x1F)
        if first in _TEXTS:
            return self._text(self._length(_TEXTS[first]))
        if first in _BYTES:
            return self._taken(_encode(self._slice(self._length(_BYTES[first]))))
        if first in _EXTENSIONS:
            self._slice(1 + self._length(_EXTENSIONS[first]))
            return self._taken(NIL)
        return self._taken(bytes((first,)) + self._slice(_FIXED.get(first, 0)))

    def _length(self, size: int) -> int:
        self._at += size
        return int.from_bytes(self._encoded[self._at - size : self._at], "big")

    def _slice(self, length: int) -> bytes:
        """The first of the next so many bytes, all of which are passed."""
        start = self._at
        self._at += length
        return self._encoded[start : start + min(length, BRIEF_TEXT)]

    def _text(self, length: int) -> bytes:
        shown = self._slice(length).decode(errors="ignore")
        return self._taken(_encode(shown if length <= BRIEF_TEXT else shown + _ELLIPSIS))

    def _many(self, count: int, depth: int, *, is_map: bool) -> bytes:
        if not depth:
            self._room = 0
            return _encode(_ELLIPSIS)
        take = self._pair if is_map else self.value
        entries: list[bytes] = []
        self._room -= _HEADER_BYTES
        while len(entries) < count and self._room > 0:
            entries.append(take(depth - 1))
        return (b"\xde" if is_map else b"\xdc") + len(entries).to_bytes(2, "big") + b"".join(entries)

    def _pair(self, depth: int) -> bytes:
        key = self.value(depth)
        return key + (self.value(depth) if self._room > 0 else NIL)

    def _taken(self, encoded: bytes) -> bytes:
        self._room -= len(encoded)
        return encoded
