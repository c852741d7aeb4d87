"""Conversion between JSON and the protocol's MessagePack, for HTTP, WebSocket and SSE.

To MessagePack: integers beyond 32 bits become float64, because a 64-bit integer reaches JavaScript clients as a BigInt.
To JSON, whatever a client may have put into a payload: dates become ISO 8601 strings, binary base64, JavaScript's
undefined, NaN and the infinities null, whole numbers integers, keys of other types strings. No payload that the server
accepted may fail here, so what msgspec refuses (dates beyond the year 9999, invalid UTF-8, maps as keys) is rendered by
`_Renderer`, which is slow and refuses nothing.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from msgspec import msgpack

from headrace.errors import HeadraceError
from headrace.model import MAX_SAFE_INTEGER, js_number

_decode_json: Final = msgspec.json.Decoder().decode
_encode_json: Final = msgspec.json.Encoder().encode
_encode_packed: Final = msgpack.Encoder().encode
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LONG_NUMBER: Final = re.compile(rb"\d{10}")
_HEX: Final = rb"[0-9a-fA-F]"
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB]%b{2}\\u[dD][c-fC-F]%b{2}|(u[dD][89a-fA-F]%b{2})|.)" % (_HEX, _HEX, _HEX), re.DOTALL
)
"""Any escape in a JSON text; half of a pair that stands alone is in a group."""
_DATE: Final = -1
_UNDEFINED: Final = 0


class InvalidJson(HeadraceError):
    """The text is no JSON that we could take."""

    code = "invalid_json"


# -- from JSON ---------------------------------------------------------------------------------------------------------


def from_json(text: bytes | bytearray) -> Any:
    """The value in a JSON text, with numbers that JavaScript clients can read."""
    try:
        value = _decode_text(text)
        # Nearly all bodies have no number of ten digits, and then there is nothing to convert.
        return _readable(value) if _LONG_NUMBER.search(text) else value
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError):
        raise InvalidJson("Invalid JSON body") from None


def _decode_text(text: bytes | bytearray) -> Any:
    """JavaScript escapes lone surrogates, which msgspec refuses: they become replacement characters."""
    try:
        return _decode_json(text)
    except msgspec.DecodeError:
        if b"\\u" not in text:
            raise
        return _decode_json(_ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], text))


def _readable(value: Any) -> Any:
    if type(value) is int:
        return js_number(value)
    if type(value) is dict:
        return {key: _readable(item) for key, item in value.items()}
    if type(value) is list:
        return [_readable(item) for item in value]
    return value


# -- to JSON -----------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """A reply, or anything else that can be encoded as MessagePack, as JSON text."""
    return packed_to_json(_encode_packed(value))


def packed_to_json(packed: bytes) -> bytes:
    """The JSON text of one MessagePack value."""
    try:
        return _encode_json(_with_whole_numbers(_decode_packed(packed)))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return _Renderer(packed).render()


def plain(packed: bytes) -> Any:
    """A MessagePack value as plain objects that JSON can show."""
    try:
        return _with_whole_numbers(_decode_packed(packed))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return json.loads(_Renderer(packed).render())


def _with_whole_numbers(value: Any) -> Any:
    """`value` with times and the like as integers: they travel as float64 for the sake of JavaScript alone."""
    if type(value) is float:
        return _whole(value)
    open_nodes = [value]
    while open_nodes:
        node = open_nodes.pop()
        items: Any = node.items() if type(node) is dict else enumerate(node) if type(node) is list else ()
        for key, item in items:
            kind = type(item)
            if kind is float:
                node[key] = _whole(item)
            elif kind is dict or kind is list:
                open_nodes.append(item)
    return value


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() and -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER else value


def _shown_ext(code: int, data: memoryview) -> Any:
    if code == _DATE:
        return _iso_text(bytes(data))
    return None if code == _UNDEFINED else _base64(bytes(data))


_decode_packed: Final = msgpack.Decoder(ext_hook=_shown_ext).decode


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _iso_text(data: bytes) -> str | None:
    """A date as msgspec writes it; None for what is no date or lies beyond the years that ISO text can name."""
    if len(data) == 4:
        nanos, seconds = 0, int.from_bytes(data, "big")
    elif len(data) == 8:
        both = int.from_bytes(data, "big")
        nanos, seconds = both >> 34, both & 0x3_FFFF_FFFF
    elif len(data) == 12:
        nanos, seconds = struct.unpack(">Iq", data)
    else:
        return None
    try:
        moment = _EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000)
    except OverflowError:
        return None
    return _encode_json(moment).decode().strip('"')


class _Renderer:
    """Writes one MessagePack value as JSON text, without recursion and without ever refusing it.

    What is open is a stack of (closing bracket, items left, is it a map); a map counts its keys and values as items.
    """

    def __init__(self, packed: bytes, *, is_key: bool = False) -> None:
        self._packed = packed
        self._is_key = is_key
        self._at = 0
        self._out: list[str] = []
        self._open: list[list[Any]] = []

    def render(self) -> bytes:
        self._value()
        while self._open:
            closing, left, is_map = self._open[-1]
            if left == 0:
                self._out.append(closing)
                self._open.pop()
                continue
            self._open[-1][1] = left - 1
            is_key = is_map and left % 2 == 0
            if self._out[-1] not in "[{:":
                self._out.append(",")
            if is_key:
                self._key()
            else:
                self._value()
        return "".join(self._out).encode()

    def _key(self) -> None:
        """Keys may be anything; what is no text is shown as the JSON text of it.

        Keys of such keys are shown as base64: texts within texts would double with every level.
        """
        start = self._at
        kind, argument, self._at = _head_of(self._packed, start)
        if kind in ("array", "map"):
            self._at = _end_of(self._packed, start)
            key = self._packed[start : self._at]
            text = _base64(key) if self._is_key else _Renderer(key, is_key=True).render().decode()
        else:
            shown = self._scalar(kind, argument)
            text = shown if isinstance(shown, str) else json.dumps(shown)
        self._out += (json.dumps(text, ensure_ascii=False), ":")

    def _value(self) -> None:
        kind, argument, self._at = _head_of(self._packed, self._at)
        if kind in ("array", "map"):
            is_map = kind == "map"
            self._out.append("{" if is_map else "[")
            self._open.append(["}" if is_map else "]", argument * 2 if is_map else argument, is_map])
        else:
            self._out.append(json.dumps(self._scalar(kind, argument), ensure_ascii=False))

    def _scalar(self, kind: str, argument: Any) -> Any:
        if kind == "plain":
            if isinstance(argument, float):
                return _whole(argument) if math.isfinite(argument) else None
            return argument
        if kind == "ext":
            size, code = argument
            return _shown_ext(code, memoryview(self._bytes(size)))
        data = self._bytes(argument)
        return data.decode("utf-8", "replace") if kind == "text" else _base64(data)

    def _bytes(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        return self._packed[start : self._at]


_SIZED: Final = {
    0xC4: ("binary", 1), 0xC5: ("binary", 2), 0xC6: ("binary", 4),
    0xD9: ("text", 1), 0xDA: ("text", 2), 0xDB: ("text", 4),
    0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
_NUMBERS: Final = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXED_EXT: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_SIZED_EXT: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}


def _head_of(packed: bytes, at: int) -> tuple[str, Any, int]:
    """What stands at `at`: its kind, its value or size, and where its content begins."""
    byte = packed[at]
    at += 1
    if byte <= 0x7F or byte >= 0xE0:
        return "plain", byte if byte <= 0x7F else byte - 256, at
    if byte <= 0x8F:
        return "map", byte & 0x0F, at
    if byte <= 0x9F:
        return "array", byte & 0x0F, at
    if byte <= 0xBF:
        return "text", byte & 0x1F, at
    if byte in _NUMBERS:
        return "plain", struct.unpack_from(_NUMBERS[byte], packed, at)[0], at + struct.calcsize(_NUMBERS[byte])
    if byte in _SIZED:
        kind, width = _SIZED[byte]
        return kind, int.from_bytes(packed[at : at + width], "big"), at + width
    return _rare_head_of(packed, at, byte)


def _rare_head_of(packed: bytes, at: int, byte: int) -> tuple[str, Any, int]:
    if byte in _FIXED_EXT:
        return "ext", (_FIXED_EXT[byte], struct.unpack_from(">b", packed, at)[0]), at + 1
    if byte in _SIZED_EXT:
        width = _SIZED_EXT[byte]
        size = int.from_bytes(packed[at : at + width], "big")
        return "ext", (size, struct.unpack_from(">b", packed, at + width)[0]), at + width + 1
    return "plain", _CONSTANTS.get(byte), at


def _end_of(packed: bytes, at: int) -> int:
    """Where the value at `at` ends."""
    left = 1
    while left:
        kind, argument, at = _head_of(packed, at)
        left -= 1
        if kind == "array":
            left += argument
        elif kind == "map":
            left += 2 * argument
        elif kind == "ext":
            at += argument[0]
        elif kind != "plain":
            at += argument
    return at
