"""`headrace call`: any command of the protocol by its name. Names, fields, limits and errors come from the registry."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from headrace.cli.output import Column, print_json, print_json_line, print_line, print_table
from headrace.cli.session import BULK_S, Exit, UsageError, add_client_flags, advised, connected

if TYPE_CHECKING:
    from headrace.commands import Spec

_COMMANDS: Final = (Column("ABOUT", spared=1), Column("COMMAND"), Column("WHAT IT DOES", gives_way=12))
_FIELDS: Final = (Column("FIELD"), Column("TYPE", gives_way=8), Column("DEFAULT", gives_way=8, spared=1))


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send any command of the protocol and print its reply as JSON. Without a command: list them all. "
        "With --fields: what a command takes."
    )
    parser.add_argument("command", metavar="COMMAND", nargs="?", help="its name, in upper or lower case")
    parser.add_argument(
        "fields", metavar="FIELD=VALUE", nargs="*", help="a text, or JSON where the field is not a text; @FILE for data"
    )
    parser.add_argument("--fields", action="store_true", dest="describe", help="show its fields instead of sending it")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.command is None:
        return _list_all(arguments)
    spec = _spec(arguments.command)
    if arguments.describe:
        return _describe(spec, arguments)
    command = _command(spec, arguments.fields)
    with connected(arguments, may_create=True) as client:
        print_json(client.ask_blocking(command, client.timeout + _extra_s(spec, command)))
    return Exit.OK


def _spec(name: str) -> Spec:
    from headrace.commands import REGISTRY, Flag

    by_lower = {known.lower(): spec for known, spec in REGISTRY.items()}
    spec = by_lower.get(name.lower())
    if spec is None:
        raise advised(UsageError(f"there is no command {name}"), _suggestion(name, list(REGISTRY)))
    if Flag.CONNECTION in spec.flags or Flag.OPEN in spec.flags:
        raise UsageError(f"{spec.name} is about a lasting connection; `headrace events` follows events")
    return spec


def _suggestion(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), [word.lower() for word in known], 3)
    alike = [word for word in known if word.lower() in close]
    return f"did you mean {' or '.join(alike)}?" if alike else "`headrace call` lists them all"


def _extra_s(spec: Spec, command: Any) -> float:
    """How much longer than others it may take: it waits for something, or it touches a whole queue."""
    from headrace.commands import Flag

    if Flag.BULK in spec.flags:
        return BULK_S
    return (getattr(command, "timeout", None) or 0) / 1000 if Flag.BLOCKING in spec.flags else 0.0


# -- fields ------------------------------------------------------------------------------------------------------------


def _command(spec: Spec, given: list[str]) -> Any:
    """The typed command; errors in a field are reported with the protocol's texts."""
    import msgspec

    from headrace.errors import InvalidCommand
    from headrace.wire import decode_command

    known = {field.encode_name: field.type for field in _fields(spec)}
    fields: dict[str, Any] = {"cmd": spec.name}
    for word in given:
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            hint = f"{spec.name} takes: {', '.join(known) or 'no fields'}"
            raise advised(UsageError(f"{word!r} is not a field of {spec.name}"), hint)
        fields[name] = _value(text, known[name], name)
    try:
        return decode_command(msgspec.msgpack.encode(fields))
    except InvalidCommand as error:
        raise advised(error, f"`headrace call {spec.name} --fields` shows what it takes") from None


def _fields(spec: Spec) -> list[Any]:
    from msgspec import inspect

    info = inspect.type_info(spec.type)
    assert isinstance(info, inspect.StructType)
    return sorted((field for field in info.fields if field.name != "req_id"), key=lambda field: not field.required)


def _value(text: str, kind: Any, name: str) -> Any:
    import msgspec

    from headrace.cli.jobflags import read_data
    from headrace.client.payloads import encode_payload

    kinds = _kinds(kind)
    if kinds == {"string"}:
        return text
    if text[:1] in ("@", "{", "[", '"'):  # meant as a file or as JSON: a typo must not make a text of it
        return encode_payload(read_data(text, name))
    try:
        return encode_payload(msgspec.json.decode(text))
    except msgspec.DecodeError:
        return text


def _kinds(kind: Any) -> set[str]:
    from msgspec import inspect

    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        return set().union(*map(_kinds, kind.types)) - {"null"}
    return {_KIND_WORDS.get(type(kind).__name__, type(kind).__name__.removesuffix("Type").lower())}


_KIND_WORDS: Final = {
    "StrType": "string",
    "IntType": "integer",
    "FloatType": "number",
    "BoolType": "true/false",
    "RawType": "JSON",
    "ListType": "list",
    "VarTupleType": "list",
    "StructType": "object",
    "DictType": "object",
    "LiteralType": "choice",
    "NoneType": "null",
    "UnsetType": "null",
}


# -- help --------------------------------------------------------------------------------------------------------------


def _list_all(arguments: argparse.Namespace) -> int:
    from headrace.commands import REGISTRY

    if arguments.as_json:
        for spec in REGISTRY.values():
            print_json_line({"command": spec.name, "category": spec.category, "summary": _summary(spec)})
        return Exit.OK
    specs = sorted(REGISTRY.values(), key=lambda spec: spec.category)
    firsts = {spec.category: spec for spec in reversed(specs)}
    rows = [[spec.category if firsts[spec.category] is spec else "", spec.name, _summary(spec)] for spec in specs]
    print_table(_COMMANDS, rows)
    return Exit.OK


def _summary(spec: Spec) -> str:
    return " ".join((spec.type.__doc__ or "").split("\n\n")[0].split())


def _describe(spec: Spec, arguments: argparse.Namespace) -> int:
    rows = [(field.encode_name, " or ".join(sorted(_kinds(field.type))), _default(field)) for field in _fields(spec)]
    if arguments.as_json:
        for name, kind, default in rows:
            print_json_line({"field": name, "type": kind, "default": default})
        return Exit.OK
    print_line(" ".join((spec.type.__doc__ or "").split()))
    if rows:
        print_table(_FIELDS, rows)
    return Exit.OK


def _default(field: Any) -> str:
    from msgspec import NODEFAULT, UNSET

    if field.required:
        return "required"
    return "" if field.default in (None, UNSET, NODEFAULT, ()) else str(field.default).lower()
