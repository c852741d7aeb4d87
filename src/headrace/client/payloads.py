"""Job data and results as bytes: what Python values become on the wire, and what they are when they come back.

Rules: data only, never code (no pickle). Dataclasses, msgspec structs and pydantic models travel as maps, sets as
lists, UUID and Decimal as text, datetimes as MessagePack timestamps (without a zone: as text). JavaScript clients read
a 64-bit integer as a BigInt, so integers beyond 32 bits travel as floats and those that a float cannot hold are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from headrace.errors import InvalidCommand
from headrace.model import MAX_SAFE_INTEGER, UNDEFINED, js_number

T = TypeVar("T")

_MAX_BATCH: Final = 1000
_MAX_BATCH_BYTES: Final = 8 * 1024 * 1024


def _foreign(value: Any) -> Any:
    """What msgspec does not know: pydantic models (any version) say themselves what they hold."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_foreign, decimal_format="string").encode
# The bytes with which MessagePack introduces unsigned and signed 64-bit integers.
_WIDE: Final = (b"\xcf", b"\xd3")


def encode_payload(value: Any, what: str = "job data") -> Raw:
    """The value as opaque bytes. What is already encoded stays as it is. `what` names it in errors."""
    if isinstance(value, Raw):
        return value
    try:
        encoded = _encode(value)
        # These bytes may also occur inside texts and floats; then the walk finds nothing to change.
        if _WIDE[0] in encoded or _WIDE[1] in encoded:
            encoded = _encode(_narrowed(msgspec.to_builtins(value, enc_hook=_foreign, builtin_types=_KEPT)))
    except TypeError as error:
        raise InvalidCommand(f"{what} may hold plain values only, not {error}") from None
    except OverflowError:
        raise InvalidCommand(
            f"{what} holds an integer that is too large for other languages: send it as text"
        ) from None
    except (RecursionError, ValueError) as error:
        raise InvalidCommand(f"{what} cannot be encoded: {error}") from None
    return Raw(encoded)


_KEPT: Final = (bytes, bytearray, datetime)
_decode_fields: Final = msgspec.msgpack.Decoder(dict[str, Raw]).decode
_decode_items: Final = msgspec.msgpack.Decoder(list[Raw]).decode


def _narrowed(value: Any) -> Any:
    if isinstance(value, dict):
        return {_narrowed(key): _narrowed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_narrowed(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > MAX_SAFE_INTEGER:
            raise InvalidCommand(f"the integer {value} is too large for other languages: send it as text")
        return js_number(value)
    return value


def without_absent(encoded: bytes | Raw, depth: int) -> bytes:
    """The same map without what is `undefined`, which is how servers in JavaScript encode absent fields.

    Maps and lists of maps inside are treated alike down to `depth`; below that is somebody's data, which is kept.
    """
    try:
        fields = _decode_fields(encoded)
    except msgspec.MsgspecError:
        return bytes(encoded)
    kept = {name: value for name, value in fields.items() if bytes(value) != UNDEFINED}
    if depth > 1:
        kept = {name: Raw(_inside(value, depth - 1)) for name, value in kept.items()}
    return _encode(kept)


def _inside(value: Raw, depth: int) -> bytes:
    try:
        return _encode([Raw(without_absent(item, depth)) for item in _decode_items(value)])
    except msgspec.MsgspecError:
        return without_absent(value, depth)


def _undefined(code: int, data: memoryview) -> Any:
    """JavaScript's `undefined` is extension 0; other extensions are left to whoever understands them."""
    return None if code == 0 else msgspec.msgpack.Ext(code, bytes(data))


_decode: Final = msgspec.msgpack.Decoder(ext_hook=_undefined, strict=False).decode


def decode_payload(encoded: bytes | Raw) -> Any:
    """The plain Python value of encoded data: dicts, lists, strings, numbers, None."""
    return _decode(encoded) if encoded else None


def batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in lists that fit one command each. One that is larger than that goes alone."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and (len(batch) >= _MAX_BATCH or total + size > _MAX_BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
