"""From an HTTP request to a command: paths, query parameters and bodies, all derived from the command registry.

Rules: a request becomes the frame that a TCP client would have sent, and is decoded as such; so limits and error texts
are the same. Names that a command does not have are refused by name. To add a route: give the command one (see Route in
headrace.commands._base); what is no command (pages, streams) is added with `Router.add`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import Struct, inspect, msgpack

from headrace.commands import REGISTRY
from headrace.commands._base import Command, Route, Spec
from headrace.errors import HeadraceError, NotFound
from headrace.model import QueueName
from headrace.server.jsonwire import InvalidJson, from_json
from headrace.wire import decode_command

MAX_QUERY_FIELDS: Final = 100
_encode: Final = msgpack.Encoder().encode
_INTEGER: Final = re.compile(r"-?[0-9]{1,15}")
_TRUTH: Final = {"true": True, "1": True, "false": False, "0": False}

Target = TypeVar("Target")


class BadRequest(HeadraceError):
    """Wrong before any command could be made of it: what HTTP alone knows."""

    code = "bad_request"


class MethodNotAllowed(HeadraceError):
    code = "method_not_allowed"
    status = 405

    def __init__(self, allowed: list[str]) -> None:
        super().__init__("Method not allowed")
        self.allowed = allowed


class WrongContent(HeadraceError):
    code = "wrong_content"
    status = 415


class TooMany(HeadraceError):
    code = "too_many"
    status = 503


# -- finding -----------------------------------------------------------------------------------------------------------


class _Node(Generic[Target]):
    __slots__ = ("literal", "parameter", "targets")

    def __init__(self) -> None:
        self.literal: dict[str, _Node[Target]] = {}
        self.parameter: _Node[Target] | None = None
        self.targets: dict[str, tuple[Target, tuple[str, ...]]] = {}


class Router(Generic[Target]):
    """Paths with parameters. A literal segment wins over a parameter, if the method is known there."""

    def __init__(self) -> None:
        self._root: _Node[Target] = _Node()

    def add(self, method: str, path: str, target: Target) -> None:
        node, names = self._root, []
        for segment in path.split("/")[1:]:
            if segment.startswith("{"):
                names.append(segment[1:-1])
                node.parameter = node.parameter or _Node()
                node = node.parameter
            else:
                node = node.literal.setdefault(segment, _Node())
        node.targets[method] = (target, tuple(names))

    def find(self, method: str, path: str) -> tuple[Target, dict[str, str]]:
        """What is at this place, and the parameters of the path; NotFound or MethodNotAllowed."""
        allowed: list[str] = []
        for node, values in _matches(self._root, _segments(path), ()):
            found = node.targets.get(method)
            if found is not None:
                return found[0], dict(zip(found[1], values, strict=True))
            allowed += node.targets
        if allowed:
            raise MethodNotAllowed(sorted({*allowed, "OPTIONS"}))
        raise NotFound("Not found")


def _segments(path: str) -> list[str]:
    """The decoded parts of a path. Decoded one by one: an escaped slash belongs to its part."""
    try:
        return [unquote_to_bytes(part).decode() if "%" in part else part for part in path.split("/")[1:]]
    except UnicodeDecodeError:
        raise BadRequest("The path is not valid UTF-8") from None


def _matches(
    node: _Node[Target], segments: list[str], values: tuple[str, ...]
) -> Iterator[tuple[_Node[Target], tuple[str, ...]]]:
    if not segments:
        yield node, values
        return
    literal = node.literal.get(segments[0])
    if literal is not None:
        yield from _matches(literal, segments[1:], values)
    if node.parameter is not None and segments[0]:
        yield from _matches(node.parameter, segments[1:], (*values, segments[0]))


class Endpoint(Struct, frozen=True):
    """A command at one of its places."""

    spec: Spec
    route: Route


def endpoints() -> list[Endpoint]:
    return [Endpoint(spec, route) for spec in REGISTRY.values() for route in spec.routes]


# -- building ----------------------------------------------------------------------------------------------------------


def build(endpoint: Endpoint, parameters: dict[str, str], query: str, body: bytes | bytearray) -> Command[Any]:
    """The command that the request asks for, or an error that says what is wrong with it."""
    route = endpoint.route
    fields: dict[str, Any] = dict(route.defaults)
    if query:
        fields |= _from_query(endpoint, parameters, query)
    if body:
        fields |= _from_body(endpoint, parameters, body)
    fields |= parameters
    try:
        frame = _encode({"cmd": endpoint.spec.name, **fields})
    except RecursionError:
        raise InvalidJson("Invalid JSON body") from None
    return decode_command(frame)


@functools.cache
def fields_of(struct: type) -> dict[str, inspect.Type]:
    """The fields of a command or an object within one, by their wire names."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields if field.name != "req_id"}


class _Named(Struct):
    queue: QueueName | None = None


def queue_in(parameters: dict[str, str]) -> str | None:
    """The queue in a path that leads to no command, if it names one; BadRequest when it cannot be one."""
    try:
        return msgspec.convert(parameters, _Named).queue
    except msgspec.ValidationError:
        raise BadRequest("Queue name contains invalid characters") from None


def _from_body(endpoint: Endpoint, parameters: dict[str, str], body: bytes | bytearray) -> dict[str, Any]:
    route = endpoint.route
    if route.method == "GET":
        raise BadRequest("GET takes no body")
    value = from_json(body)
    if not isinstance(value, dict):
        raise InvalidJson("Invalid JSON body: must be an object")
    if route.whole is not None and set(value) != {route.whole}:
        value = {route.whole: value}
    for name, given in parameters.items():
        if value.get(name, given) != given:
            raise BadRequest(f"{name} differs from the one in the path")
    checked: dict[str, Any] = _checked_struct(value, endpoint.spec.type, "", route.aliases)
    return checked


def _checked(value: Any, kind: inspect.Type, path: str, aliases: dict[str, str]) -> Any:
    """`value` with aliases replaced; BadRequest names a field that its type does not have."""
    if not isinstance(value, dict | list):
        return value
    for member in members_of(kind):
        if isinstance(member, inspect.StructType) and isinstance(value, dict):
            return _checked_struct(value, member.cls, path, aliases)
        if isinstance(member, inspect.ListType | inspect.VarTupleType) and isinstance(value, list):
            item = member.item_type
            return [_checked(entry, item, f"{path}[{index}]", aliases) for index, entry in enumerate(value)]
    return value


def _checked_struct(value: dict[str, Any], struct: type, path: str, aliases: dict[str, str]) -> dict[str, Any]:
    known = fields_of(struct)
    checked: dict[str, Any] = {}
    for name, given in value.items():
        if name not in known and aliases.get(name) in known:
            name = aliases[name]
        where = f"{path}.{name}" if path else name
        if name not in known:
            raise BadRequest(f"Unknown field: {where}")
        checked[name] = _checked(given, known[name], where, aliases)
    return checked


def _from_query(endpoint: Endpoint, parameters: dict[str, str], query: str) -> dict[str, Any]:
    known, aliases = fields_of(endpoint.spec.type), endpoint.route.aliases
    given: dict[str, list[str]] = {}
    for name, value in _pairs(query):
        field = aliases.get(name, name)
        is_known = field in known and field not in parameters and fits_query(known[field])
        if not is_known or endpoint.route.method in ("POST", "PUT"):
            raise BadRequest(f"Unknown query parameter: {name}")
        if value:  # forms send what was left empty, too
            given.setdefault(field, []).append(value)
    return {name: _typed(values, known[name]) for name, values in given.items()}


def _pairs(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        raise BadRequest("The query string is not valid") from None


def members_of(kind: inspect.Type) -> list[inspect.Type]:
    """The types a value may have, without limits and names."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        return [inner for member in kind.types for inner in members_of(member)]
    return [kind]


def fits_query(kind: inspect.Type) -> bool:
    """Whether text can stand for a value of this type: objects and payloads need a body."""
    return not any(isinstance(member, inspect.StructType | inspect.RawType) for member in members_of(kind))


def _typed(values: list[str], kind: inspect.Type) -> Any:
    """The value that a query parameter stands for; text that does not fit stays text, for the command to refuse."""
    members = members_of(kind)
    if any(isinstance(member, inspect.ListType | inspect.VarTupleType) for member in members):
        items = [item.strip() for value in values for item in value.split(",")]
        return items if len(items) > 1 or len(members) == 1 else items[0]
    text = values[-1]
    if any(isinstance(member, inspect.BoolType) for member in members):
        return _TRUTH.get(text.lower(), text)
    if any(isinstance(member, inspect.IntType | inspect.FloatType) for member in members):
        return _number(text)
    return text


def _number(text: str) -> int | float | str:
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text
