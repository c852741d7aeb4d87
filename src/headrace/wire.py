"""The codec: frames to commands, replies to frames. Does no I/O; knows the quirks of JavaScript clients.

Decoding is optimistic: one typed decode into the union of all commands, limits included. Only when that rejects a
frame is it taken apart field by field (`_decode_slowly`), which either cleans up what is legal in the protocol but not
in the types (JavaScript's `undefined` as extension 0, null for an absent option, whole numbers as floats) or finds the
exact text for what is wrong. It checks the first byte of a value before it decodes it: 64 MB of empty lists
where a number belongs must not become sixty million objects.

Building the union of all commands takes a tenth of a server's start. So it starts with the few that clients send
first; `know_all` adds the others, when the server is idle or when the first of them arrives.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, Union

import msgspec
from msgspec import NODEFAULT, UNSET, Raw, Struct, inspect

from headrace import commands
from headrace.commands import connection, jobs, monitoring
from headrace.commands._base import REGISTRY, SHORT_FORMS, Alike, Command, Spec
from headrace.errors import InvalidCommand, UnknownCommand
from headrace.frames import HEADER
from headrace.model import MENDED, NIL, NULL_IF_NAMED, UNDEFINED, is_queue_name

_REQ_ID_KEY: Final = b"\xa5reqId"
_MOST_FIELDS: Final = 10_000
_encoder: Final = msgspec.msgpack.Encoder()


# -- replies -----------------------------------------------------------------------------------------------------------


_encode_into: Final = _encoder.encode_into
_pack_length: Final = HEADER.pack_into


def append_reply(out: bytearray, reply: Struct, req_id: Raw | bytes) -> int:
    """Append one reply frame to `out`; its length. A reply has fewer than fifteen keys: one more fits its header."""
    start = len(out)
    body = start + 4
    _encode_into(reply, out, body)  # leaves room for the length
    if req_id:
        out[body] += 1
        out += _REQ_ID_KEY
        out += req_id
    length = len(out) - body
    _pack_length(out, start, length)
    return length


class _Heads(dict[int, bytes]):
    """The beginnings of frames that begin alike, by their length: there are few."""

    def __init__(self, begin: bytes) -> None:
        self._begin = begin

    def __missing__(self, length: int) -> bytes:
        self[length] = head = HEADER.pack(length) + self._begin
        return head


def append_alike(out: bytearray, replies: Alike, request_ids: Sequence[Raw | bytes]) -> None:
    """`append_reply` for all replies to a burst of commands that have request ids."""
    begin = bytes((0x81 + replies.keys,)) + replies.begin
    fixed = len(begin) + len(_REQ_ID_KEY)
    parts: list[bytes | Raw] = []
    if replies.ends:
        heads = _Heads(begin)
        for end, req_id in zip(replies.ends, request_ids, strict=True):
            parts += (heads[fixed + len(end) + len(req_id)], end, _REQ_ID_KEY, req_id)
    else:
        heads = _Heads(begin + _REQ_ID_KEY)
        for req_id in request_ids:
            parts += (heads[fixed + len(req_id)], req_id)
    out += b"".join(parts)


# -- commands ----------------------------------------------------------------------------------------------------------


class Undecodable(InvalidCommand):
    """A frame that is not a valid command; carries the reqId to echo and the name of the command, if known."""

    def __init__(self, message: str, req_id: bytes = b"", name: str = "") -> None:
        super().__init__(message)
        self.req_id = req_id
        self.name = name


class _Envelope(Struct, rename="camel"):
    cmd: Raw = Raw(b"")
    req_id: Raw = Raw(b"")


_decode_envelope: Final = msgspec.msgpack.Decoder(_Envelope).decode
_decode_fields: Final = msgspec.msgpack.Decoder(dict[str, Raw]).decode
_decode_items: Final = msgspec.msgpack.Decoder(list[Raw]).decode
_decode_any: Final = msgspec.msgpack.Decoder(ext_hook=lambda code, data: msgspec.msgpack.Ext(code, bytes(data))).decode


def _decoder_of(types: Iterable[type[Command[Any]]]) -> Callable[[bytes], Command[Any]]:
    return msgspec.msgpack.Decoder(Union[tuple(types)]).decode  # noqa: UP007 - built at run time


_FIRST: Final = {connection.__name__, jobs.__name__, monitoring.__name__}
_knows_all = False
_typed_decode: Callable[[bytes], Command[Any]]
_decode_short: Callable[[bytes], Command[Any]]


def _know(specs: Sequence[Spec]) -> None:
    global _typed_decode, _decode_short
    _typed_decode = _decoder_of(spec.type for spec in specs)
    _decode_short = _decoder_of(SHORT_FORMS.get(spec.name, spec.type) for spec in specs)


def know_all() -> None:
    """Load all commands, unless that was done. May be called in any thread."""
    global _knows_all
    if not _knows_all:
        _know(list(commands.REGISTRY.values()))
        _knows_all = True


_know([spec for spec in REGISTRY.values() if spec.type.__module__ in _FIRST])
_short_types: Final = frozenset(SHORT_FORMS.values())
_queue_of: Final = attrgetter("queue")


def decode_commands(frames: list[bytes]) -> list[Command[Any]]:
    """The commands in these frames if all are valid; else an error, and `decode_command` finds out which one."""
    try:
        commands: list[Any] = list(map(_decode_short, frames))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return list(map(_typed_decode, frames))
    # A burst mostly has commands of one kind for one queue, so each queue name is checked only once.
    kinds = set(map(type, commands))
    if kinds.isdisjoint(_short_types):
        return commands
    short = commands if kinds <= _short_types else [each for each in commands if type(each) in _short_types]
    if all(map(is_queue_name, set(map(_queue_of, short)))):
        return commands
    return list(map(_typed_decode, frames))


def decode_command(frame: bytes) -> Command[Any]:
    """The command in a frame, or Undecodable with the text and reqId of the error reply."""
    try:
        return _typed_decode(frame)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return _decode_slowly(frame)
    except (msgspec.DecodeError, RecursionError):
        raise Undecodable("Invalid command format") from None


def _decode_slowly(frame: bytes) -> Command[Any]:
    name, req_id = _identify(frame)
    if not _knows_all:
        know_all()
        return decode_command(frame)
    spec = REGISTRY.get(name)
    if spec is None:
        raise Undecodable(str(UnknownCommand(name)), req_id, name)
    try:
        command = _built(_fields_of(frame), spec.type, "")
    except InvalidCommand as error:
        raise Undecodable(str(error), req_id, name) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Undecodable("Invalid command format", req_id, name) from None
    assert isinstance(command, Command)
    return command


def _identify(frame: bytes) -> tuple[str, bytes]:
    if frame == NIL:
        raise Undecodable("Invalid command format")
    try:
        envelope = _decode_envelope(frame)
        name = _scalar(envelope.cmd) if envelope.cmd else None
    except msgspec.ValidationError:
        raise Undecodable("Invalid command") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Undecodable("Invalid command format") from None
    req_id = bytes(envelope.req_id)
    if not isinstance(name, str) or not name:
        raise Undecodable("Invalid command", req_id)
    return name, req_id


# -- explaining --------------------------------------------------------------------------------------------------------

Path = str
_Rule = Callable[[Raw, Any, Path], Any]
_CHECKED_FIRST: Final = {"queue": 0, "data": 1, "groupId": 2}
"""Of several errors the reference reports that of the queue first, then the payload, then the group."""


def _missing(path: Path, extra: dict[str, str]) -> InvalidCommand:
    return InvalidCommand(extra.get("required") or f"{path} is required")


def _rank(field: inspect.Field) -> int:
    return _CHECKED_FIRST.get(field.encode_name, len(_CHECKED_FIRST))


def _built(fields: dict[str, Raw], cls: type, path: Path) -> Any:
    """A value of a struct from raw fields, or the error text of the protocol."""
    values: dict[str, Any] = {}
    for field in _fields_in_order(cls):
        where = f"{path}.{field.encode_name}" if path else field.encode_name
        value = _field(fields, field, where)
        if value is not NODEFAULT:
            values[field.name] = value
    return cls(**values)


@functools.cache
def _fields_in_order(cls: type) -> list[inspect.Field]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return sorted(info.fields, key=_rank)


def _field(fields: dict[str, Raw], field: inspect.Field, path: Path) -> Any:
    kind, extra = _unwrap(field.type)
    raw = fields.get(field.encode_name)
    encoded = None if raw is None else bytes(raw)
    if isinstance(kind, inspect.RawType) or _has(kind, inspect.RawType):
        if raw is None and NULL_IF_NAMED in extra and "name" in fields:
            encoded = NIL
        return _opaque(encoded, field, path, extra)
    if encoded == NIL and field.default is UNSET and _has(kind, inspect.NoneType):
        return None  # here null and absent differ
    if encoded is None or encoded in (UNDEFINED, NIL):
        if field.required:
            raise _missing(path, extra)
        return NODEFAULT
    return _value(Raw(encoded), field.type, path)


def _opaque(encoded: bytes | None, field: inspect.Field, path: Path, extra: dict[str, str]) -> Any:
    if encoded is None or (encoded == UNDEFINED and not field.required):
        if field.required:
            raise _missing(path, extra)
        return NODEFAULT
    return Raw(NIL if encoded == UNDEFINED else encoded)


def _value(raw: Raw, type_: inspect.Type, path: Path) -> Any:
    kind, extra = _unwrap(type_)
    rule = _RULES.get(type(kind))
    if rule is None:
        raise InvalidCommand(f"{path} is not supported")
    if MENDED in extra:
        raw = _mended(raw)
    if not extra:
        return rule(raw, kind, path)
    try:
        return rule(raw, kind, path)
    except _Fault as fault:
        raise InvalidCommand(extra.get(fault.kind) or str(fault)) from None


class _Fault(InvalidCommand):
    """A fault with its kind, so that a type's own text may replace the general one."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _unwrap(type_: inspect.Type) -> tuple[inspect.Type, dict[str, str]]:
    extra: dict[str, str] = {}
    while isinstance(type_, inspect.Metadata):
        extra |= type_.extra or {}
        type_ = type_.type
    return type_, extra


def _has(kind: inspect.Type, wanted: type) -> bool:
    return isinstance(kind, inspect.UnionType) and any(isinstance(_unwrap(t)[0], wanted) for t in kind.types)


def _scalar(raw: Raw) -> Any:
    """The value, or None for a list or object."""
    return None if _count_of(raw) is not None else _decode_any(raw)


def _count_of(raw: Raw | bytes) -> int | None:
    """How many items a list, or entries an object, claims to have; None for everything else."""
    view = memoryview(raw)
    if 0x80 <= view[0] <= 0x9F:
        return view[0] & 0x0F
    width = _COUNT_BYTES.get(view[0])
    return None if width is None else int.from_bytes(view[1 : 1 + width], "big")


_COUNT_BYTES: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def _mended(raw: Raw) -> Raw:
    """A text with replacement characters for invalid Unicode; anything else unchanged.

    JavaScript cuts strings in the middle of a surrogate pair, and its packers encode the half of it.
    """
    start = 1 if 0xA0 <= memoryview(raw)[0] <= 0xBF else _TEXT_HEADS.get(memoryview(raw)[0])
    return raw if start is None else Raw(_encoder.encode(bytes(raw)[start:].decode(errors="replace")))


_TEXT_HEADS: Final = {0xD9: 2, 0xDA: 3, 0xDB: 5}


def _number(raw: Raw, path: Path) -> int | float:
    value = _scalar(raw)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Fault("type", f"{path} must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise _Fault("finite", f"{path} must be a finite number")
    return value


def _check_range(value: float, kind: Any, path: Path) -> None:
    if kind.ge is not None and value < kind.ge:
        raise _Fault("ge", f"{path} must be at least {_plain(kind.ge)}")
    if kind.gt is not None and value <= kind.gt:
        raise _Fault("gt", f"{path} must be greater than {_plain(kind.gt)}")
    if kind.le is not None and value > kind.le:
        raise _Fault("le", f"{path} must be at most {_plain(kind.le)}")


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _int(raw: Raw, kind: inspect.IntType, path: Path) -> int:
    value = _number(raw, path)
    if isinstance(value, float):
        if not value.is_integer():
            raise _Fault("integer", f"{path} must be an integer")
        value = int(value)
    _check_range(value, kind, path)
    return value


def _float(raw: Raw, kind: inspect.FloatType, path: Path) -> float:
    value = float(_number(raw, path))
    _check_range(value, kind, path)
    return value


def _str(raw: Raw, kind: inspect.StrType, path: Path) -> str:
    try:
        value = _scalar(raw)
    except UnicodeDecodeError:
        raise _Fault("unicode", f"{path} must be well-formed Unicode") from None
    if not isinstance(value, str):
        raise _Fault("type", f"{path} must be a string")
    if kind.min_length is not None and len(value) < kind.min_length:
        raise _Fault("min_length", f"{path} must be a non-empty string")
    if kind.max_length is not None and len(value) > kind.max_length:
        raise _Fault("max_length", f"{path} must be at most {kind.max_length} characters")
    if kind.pattern is not None and not re.search(kind.pattern, value):
        raise _Fault("pattern", f"{path} contains invalid characters")
    return value


def _bool(raw: Raw, kind: inspect.BoolType, path: Path) -> bool:
    value = _scalar(raw)
    if not isinstance(value, bool):
        raise _Fault("type", f"{path} must be a boolean")
    return value


def _literal(raw: Raw, kind: inspect.LiteralType, path: Path) -> Any:
    value = _scalar(raw)
    if not isinstance(value, str | int) or value not in kind.values:
        raise _Fault("choice", f"{path} must be one of: {', '.join(map(str, kind.values))}")
    return value


def _enum(raw: Raw, kind: inspect.EnumType, path: Path) -> Any:
    value = _scalar(raw)
    words = [member.value for member in kind.cls]
    if value not in words:
        raise _Fault("choice", f"{path} must be one of: {', '.join(words)}")
    return kind.cls(value)


def _list(raw: Raw, kind: inspect.ListType | inspect.VarTupleType, path: Path) -> list[Any]:
    if kind.max_length is not None and (_count_of(raw) or 0) > kind.max_length:
        raise _Fault("max_length", f"{path} must have at most {kind.max_length} items")
    try:
        items = _decode_items(raw)
    except msgspec.ValidationError:
        raise _Fault("type", f"{path} must be an array") from None
    if kind.min_length is not None and len(items) < kind.min_length:
        raise _Fault("min_length", f"{path} must be a non-empty array")
    return [_item(item, kind.item_type, f"{path}[{i}]") for i, item in enumerate(items)]


def _tuple(raw: Raw, kind: inspect.VarTupleType, path: Path) -> tuple[Any, ...]:
    return tuple(_list(raw, kind, path))


def _item(raw: Raw, type_: inspect.Type, path: Path) -> Any:
    kind, _ = _unwrap(type_)
    if isinstance(kind, inspect.StructType):
        # Errors of batch entries read `jobs[1]: priority must be ...`.
        fields = _struct_fields(raw, path)
        try:
            return _built(fields, kind.cls, "")
        except InvalidCommand as error:
            raise InvalidCommand(f"{path}: {error}") from None
    encoded = bytes(raw)
    if encoded == UNDEFINED and not isinstance(kind, inspect.RawType):  # in a payload it is kept
        encoded = NIL
    return _value(Raw(encoded), type_, path)


def _fields_of(raw: Raw | bytes) -> dict[str, Raw]:
    if (_count_of(raw) or 0) > _MOST_FIELDS:
        raise InvalidCommand(f"An object must have at most {_MOST_FIELDS} fields")
    return _decode_fields(raw)


def _struct_fields(raw: Raw, path: Path) -> dict[str, Raw]:
    try:
        return _fields_of(raw)
    except msgspec.ValidationError:
        raise _Fault("type", f"{path} must be an object") from None


def _struct(raw: Raw, kind: inspect.StructType, path: Path) -> Any:
    return _built(_struct_fields(raw, path), kind.cls, path)


def _dict(raw: Raw, kind: inspect.DictType, path: Path) -> dict[str, Any]:
    return {key: _value(value, kind.value_type, f"{path}.{key}") for key, value in _struct_fields(raw, path).items()}


def _opaque_value(raw: Raw, kind: inspect.RawType, path: Path) -> Raw:
    return Raw(bytes(raw))


def _union(raw: Raw, kind: inspect.UnionType, path: Path) -> Any:
    """The member that fits the kind of value sent; None stands for absent."""
    members = [t for t in kind.types if not isinstance(_unwrap(t)[0], inspect.NoneType)]
    first = memoryview(raw)[0]
    if first == NIL[0]:
        return None
    for member in members:
        if isinstance(_unwrap(member)[0], _kinds_for(first)):
            return _value(raw, member, path)
    return _value(raw, members[0], path)


def _kinds_for(byte: int) -> tuple[type, ...]:
    if byte <= 0x7F or byte >= 0xE0 or 0xCA <= byte <= 0xD3:
        return (inspect.IntType, inspect.FloatType)
    if 0x80 <= byte <= 0x8F or byte in (0xDE, 0xDF):
        return (inspect.StructType, inspect.DictType)
    if 0x90 <= byte <= 0x9F or byte in (0xDC, 0xDD):
        return (inspect.ListType, inspect.VarTupleType)
    if 0xA0 <= byte <= 0xBF or byte in (0xD9, 0xDA, 0xDB):
        return (inspect.StrType, inspect.LiteralType, inspect.EnumType)
    if byte in (0xC2, 0xC3):
        return (inspect.BoolType,)
    return ()


_RULES: Final[dict[type, _Rule]] = {
    inspect.IntType: _int,
    inspect.FloatType: _float,
    inspect.StrType: _str,
    inspect.BoolType: _bool,
    inspect.LiteralType: _literal,
    inspect.EnumType: _enum,
    inspect.ListType: _list,
    inspect.VarTupleType: _tuple,
    inspect.StructType: _struct,
    inspect.DictType: _dict,
    inspect.RawType: _opaque_value,
    inspect.UnionType: _union,
}
