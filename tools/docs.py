"""Writes the generated parts of docs/ and README.md: the references, states, settings, and figures of the benchmarks.

    python tools/docs.py            write them
    python tools/docs.py --check    exit 1 when a page does not say what the code says

Only the text between the markers `<!-- generated -->` and `<!-- /generated -->` is touched; the rest of a page is
written by hand. Everything shown comes from headrace.states, headrace.config, the command registry and the parser of
the command line, so a page is changed by changing the code; in benchmarks.md it comes from the tables that were
measured. To add a generated page: add its path and the function that writes it to PAGES.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import importlib
import inspect as source
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, UNSET, Raw, inspect

from headrace.backends.valkey import differences
from headrace.backends.valkey.arguments import FUNCTIONS, RECORDS
from headrace.backends.valkey.library import GENERATION, function_of
from headrace.cli.main import COMMANDS, _parser
from headrace.cli.session import EXIT_CODES
from headrace.commands import REGISTRY, Flag, Spec
from headrace.config import PROTOCOL_NAMES, SETTING_HELP, Settings
from headrace.errors import HeadraceError
from headrace.model import NULL_IF_NAMED
from headrace.states import NEXT, State, Verb

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs"
BEGIN: Final = "<!-- generated -->"
END: Final = "<!-- /generated -->"

CATEGORIES: Final = [
    "Core",
    "Query",
    "Control",
    "DLQ",
    "Cron",
    "Monitoring",
    "Workers",
    "Webhooks",
    "Rate",
    "Logs",
    "Auth",
    "Families",
    "Dedup",
    "Groups",
    "Events",
    "Dashboard",
]
FLAG_WORDS: Final = {
    Flag.WRITE: "changes something",
    Flag.BLOCKING: "may wait",
    Flag.BULK: "works in slices",
    Flag.OPEN: "allowed before Auth",
    Flag.CONNECTION: "needs a lasting connection (TCP, WebSocket)",
}
Lines = Iterator[str]


# The command reference


def command_reference() -> Lines:
    structs: dict[str, inspect.StructType] = {}
    yield from summary()
    for category in categories():
        yield f"### {category}"
        yield ""
        for spec in of_category(category):
            yield from command_section(spec, structs)
    yield from object_sections(structs)


def categories() -> list[str]:
    found = dict.fromkeys(spec.category for spec in REGISTRY.values())
    return sorted(found, key=lambda name: CATEGORIES.index(name) if name in CATEGORIES else len(CATEGORIES))


def of_category(category: str) -> list[Spec]:
    return [spec for spec in REGISTRY.values() if spec.category == category]


def summary() -> Lines:
    yield f"{len(REGISTRY)} commands."
    yield ""
    yield from table(
        ["category", "commands"],
        [[name, ", ".join(link("command", s.name) for s in of_category(name))] for name in categories()],
    )


def command_section(spec: Spec, structs: dict[str, inspect.StructType]) -> Lines:
    yield heading("command", spec.name)
    yield ""
    yield paragraph(spec.type)
    yield ""
    if facts := [*route_facts(spec), *(word for flag, word in FLAG_WORDS.items() if flag in spec.flags)]:
        sentence = "; ".join(facts)
        yield f"{sentence[0].upper()}{sentence[1:]}."
        yield ""
    fields = [field for field in struct_of(spec.type).fields if field.name != "req_id"]
    fields.sort(key=lambda field: not field.required)
    if fields:
        yield from table(["field", "type", "default", "limits"], [request_row(f, structs) for f in fields])
    yield from reply_lines(spec, structs)
    yield from error_lines(spec, fields)


def route_facts(spec: Spec) -> Lines:
    if spec.routes:
        yield "HTTP " + ", ".join(f"`{route.method} {route.path}`" for route in spec.routes)


def request_row(field: inspect.Field, structs: dict[str, inspect.StructType]) -> list[str]:
    # A null in a request means the same as leaving the field out, so it is not shown.
    text = type_text(field.type, structs, with_null=False)
    return [f"`{field.encode_name}`", text, default_text(field), limits_text(field.type)]


def reply_lines(spec: Spec, structs: dict[str, inspect.StructType]) -> Lines:
    fields = [field for field in struct_of(spec.reply).fields if field.name != "ok"]
    if not fields:
        yield "Reply: `{ok: true}`"
        yield ""
        return
    parts = []
    for field in fields:
        mark = "" if field.required else "?"
        parts.append(f"`{field.encode_name}{mark}`: {reply_type_text(field, structs)}")
    yield "Reply: " + ", ".join(parts)
    yield ""


def reply_type_text(field: inspect.Field, structs: dict[str, inspect.StructType]) -> str:
    text = type_text(field.type, structs, with_null=True)
    if isinstance(field.type, inspect.Metadata) and (field.type.extra or {}).get("nullable"):
        text += " or null"
    # Jobs are put together from encoded parts, so their type does not say what they are; their name does.
    return text.replace("any", "[Job](#the-job-object)") if field.name in ("job", "jobs") else text


def error_lines(spec: Spec, fields: Iterable[inspect.Field]) -> Lines:
    own = (text for field in fields if field.name != "queue" for text in own_texts(field.type))
    texts = dict.fromkeys([*own, *spec.errors])
    if texts:
        yield "Errors:"
        yield ""
        yield from (f"- `{text}`" for text in texts)
        yield ""


def object_sections(structs: dict[str, inspect.StructType]) -> Lines:
    yield "### Objects"
    yield ""
    done: set[str] = set()
    while missing := [name for name in structs if name not in done]:  # objects may name further objects
        name = missing[0]
        done.add(name)
        yield heading("object", name)
        yield ""
        if text := paragraph(structs[name].cls):
            yield text
            yield ""
        fields = [field for field in structs[name].fields if field.name not in ("req_id", "ok")]
        yield from table(["field", "type", "default", "limits"], [object_row(f, structs) for f in fields])


def object_row(field: inspect.Field, structs: dict[str, inspect.StructType]) -> list[str]:
    text = type_text(field.type, structs, with_null=field.required)
    return [f"`{field.encode_name}`", text, default_text(field), limits_text(field.type)]


# From types to words


def struct_of(cls: type) -> inspect.StructType:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return info


def bare(kind: inspect.Type) -> inspect.Type:
    return bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def members(kind: inspect.Type) -> list[inspect.Type]:
    kind = bare(kind)
    return [bare(member) for member in kind.types] if isinstance(kind, inspect.UnionType) else [kind]


PLAIN_WORDS: Final[dict[type, str]] = {
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.BoolType: "boolean",
    inspect.RawType: "any",
    inspect.AnyType: "any",
    inspect.NoneType: "null",
    inspect.BytesType: "binary",
}


def type_text(kind: inspect.Type, structs: dict[str, inspect.StructType], *, with_null: bool) -> str:
    words = [
        single_type_text(member, structs)
        for member in members(kind)
        if with_null or not isinstance(member, inspect.NoneType)
    ]
    return " or ".join(dict.fromkeys(words))


def single_type_text(kind: inspect.Type, structs: dict[str, inspect.StructType]) -> str:
    match kind:
        case inspect.ListType() | inspect.VarTupleType():
            inner = type_text(kind.item_type, structs, with_null=True)
            return f"list of ({inner})" if " or " in inner else f"list of {inner}"
        case inspect.DictType():
            return f"map to {type_text(kind.value_type, structs, with_null=True)}"
        case inspect.LiteralType():
            return " or ".join(f"`{value}`" for value in kind.values)
        case inspect.EnumType():
            return " or ".join(f"`{member.value}`" for member in kind.cls)
        case inspect.StructType():
            if structs.setdefault(kind.cls.__name__, kind).cls is not kind.cls:
                raise SystemExit(f"two objects of the protocol are called {kind.cls.__name__}")
            return link("object", kind.cls.__name__)
    return PLAIN_WORDS[type(kind)]


def default_text(field: inspect.Field) -> str:
    if field.required:
        extra = field.type.extra if isinstance(field.type, inspect.Metadata) else None
        return "required without `name`" if (extra or {}).get(NULL_IF_NAMED) else "required"
    default: Any = field.default
    if default is NODEFAULT and field.default_factory is not NODEFAULT:
        default = field.default_factory()
    if default is None or default is UNSET or default is NODEFAULT or isinstance(default, Raw):
        return ""
    return f"`{msgspec.json.encode(default).decode()}`"


def limits_text(kind: inspect.Type) -> str:
    return ", ".join(dict.fromkeys(text for member in members(kind) for text in member_limits(member)))


def member_limits(kind: inspect.Type) -> Lines:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield from span_text(kind.ge, kind.le, "")
        case inspect.StrType():
            yield from span_text(kind.min_length, kind.max_length, " characters")
            if kind.pattern:
                yield f"`{kind.pattern}`"
        case inspect.ListType() | inspect.VarTupleType():
            yield from span_text(kind.min_length, kind.max_length, " items")
            yield from (f"each: {text}" for text in [limits_text(kind.item_type)] if text)


KNOWN_BOUNDS: Final[dict[float, str]] = {
    86_400_000: "86400000 (a day)",
    31_536_000_000: "31536000000 (a year)",
    3_153_600_000_000: "3153600000000 (100 years)",
    8_640_000_000_000_000: "8640000000000000",
    2**31 - 1: "2^31-1",
    -(2**31): "-2^31",
    2**53 - 1: "2^53-1",
    -(2**53 - 1): "-(2^53-1)",
}


def bound(value: float) -> str:
    return KNOWN_BOUNDS.get(value, f"{value}")


def span_text(low: float | None, high: float | None, unit: str) -> Lines:
    if low is not None and high is not None and low < -1e300 and high > 1e300:
        yield "finite"
    elif low is not None and high is not None:
        yield f"{bound(low)} to {bound(high)}{unit}"
    elif high is not None:
        yield f"at most {bound(high)}{unit}"
    elif low is not None:
        yield f"at least {bound(low)}{unit}"


def own_texts(kind: inspect.Type) -> Lines:
    """Error texts that a type brings along instead of the general ones."""
    if isinstance(kind, inspect.Metadata):
        yield from (text for text in (kind.extra or {}).values() if isinstance(text, str))
        yield from own_texts(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from own_texts(member)


# The states


def state_reference() -> Lines:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield from (f"    {line}" for line in diagram_lines())
    yield "```"
    yield ""
    meanings = comments_of(Verb)
    rows = [
        [verb.name.lower(), *(cell(state, verb) for state in State if NEXT[state]), meanings[verb.name]]
        for verb in Verb
    ]
    yield "The row is what happens, the column the state it happens in, the cell the state afterwards."
    yield "An empty cell is refused."
    yield ""
    yield from table(["verb", *(state.word for state in State if NEXT[state]), "what it means"], rows)


def diagram_lines() -> Lines:
    yield "waiting_children: waiting-children"
    yield "[*] --> waiting: push"
    yield "[*] --> delayed: push with a delay"
    yield "[*] --> waiting_children: push with dependencies"
    for state in State:
        arrows: dict[State, list[str]] = {}
        for verb in sorted(NEXT[state]):
            arrows.setdefault(NEXT[state][verb], []).append(verb.name.lower())
        for after, verbs in arrows.items():
            yield f"{diagram_name(state)} --> {diagram_name(after)}: {', '.join(verbs)}"


def diagram_name(state: State) -> str:
    return "[*]" if state is State.REMOVED else state.name.lower()


def cell(state: State, verb: Verb) -> str:
    after = NEXT[state].get(verb)
    return "" if after is None else after.word


def comments_of(enum: type) -> dict[str, str]:
    """The comment beside each member: the meaning is written once, in the code."""
    lines = source.getsource(enum).splitlines()
    found = (re.match(r"\s+(\w+) = .*?#\s*(.+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


# The settings


def settings_reference() -> Lines:
    rows = [setting_row(field) for field in struct_of(Settings).fields]
    yield from table(["flag", "environment", "default", "what it does"], rows)


def setting_row(field: inspect.Field) -> list[str]:
    other_names = [variable for variable, name in PROTOCOL_NAMES.items() if name == field.name]
    variables = [f"HEADRACE_{field.name.upper()}", *other_names]
    flag = "--" + field.name.replace("_", "-")
    environment = ", ".join(f"`{variable}`" for variable in variables)
    # An empty list is a setting that is not there, like a null.
    default = "" if (text := default_text(field)) == "`[]`" else text.replace('"', "")
    return [f"`{flag}`", environment, default, SETTING_HELP[field.name]]


# The command line


def command_line_reference() -> Lines:
    yield "### Exit codes"
    yield ""
    yield from table(["code", "meaning"], [[str(int(code)), meaning] for code, meaning in EXIT_CODES.items()])
    yield "## Reference"
    yield ""
    yield "Commands that talk to a server also take `--url` and `--json`."
    yield ""
    for name, parser in subparsers_of(_parser(COMMANDS)).items():
        yield from command_line_section(name, parser)


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0].choices if found else {}


def command_line_section(name: str, parser: argparse.ArgumentParser) -> Lines:
    yield f"### headrace {name}"
    yield ""
    yield f"{parser.description}"
    yield ""
    if name == "serve":
        yield "Its flags are the [settings](operations.md#settings)."
        yield ""
        return
    rows = [row for action in parser._actions if (row := argument_row(action))]
    if rows:
        yield from table(["argument", "what it does"], rows)
    if parser.epilog:
        yield from table(
            ["action", "what it does"], [line.split(maxsplit=1) for line in parser.epilog.splitlines()[1:]]
        )
    for action, nested in subparsers_of(parser).items():
        yield from command_line_section(f"{name} {action}", nested)


def argument_row(action: argparse.Action) -> list[str] | None:
    is_shared = action.dest in ("help", "url", "as_json") or isinstance(action, argparse._SubParsersAction)
    if is_shared or not action.help:
        return None
    metavar = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else action.dest.upper())
    written = f"{', '.join(action.option_strings)}" or str(metavar)
    value = f" {metavar}" if action.option_strings and action.nargs != 0 else ""
    return [f"`{written}{value}`", action.help]


# Pages


def valkey_reference() -> Lines:
    yield "## What is different"
    yield ""
    yield "Refused with `not supported on this backend`:"
    yield ""
    yield from table(["what", "why"], ([name, text] for name, text in differences.NOT_SUPPORTED.items()))
    yield "Otherwise than on SQLite:"
    yield ""
    yield from table(["what", "how"], ([name, text] for name, text in differences.DIFFERENT.items()))
    yield "## Functions of the library `headrace`"
    yield ""
    yield f"What is called NAME here is the function `{function_of('NAME')}`: {GENERATION} is the generation of the"
    yield "library (see [upgrading](#upgrading-a-fleet)). The first key is the queue's `P:meta`, the first argument the"
    yield "time in ms. `X*` is any number of X. Only `replaceField` is about no queue: its key is that of a hash, and"
    yield "with `field seen value` it stores the value if the field still has the one that was seen."
    yield ""
    rows = ([f"`{name}`", f"`{given}`" if given else "", text] for name, (given, text) in FUNCTIONS.items())
    yield from table(["function", "arguments", "does"], rows)
    for name, record in RECORDS.items():
        if name[0].isupper():
            yield from record_lines(name, record)


def record_lines(name: str, record: type[msgspec.Struct]) -> Lines:
    yield f"### `{name}`"
    yield ""
    yield paragraph(record)
    yield ""
    names = record.__struct_encode_fields__
    yield from table(["position", "name"], ([str(n), f"`{field}`"] for n, field in enumerate(names, 1)))


# The names that Python programs import


PUBLIC: Final = ("headrace", "headrace.events", "headrace.workflows", "headrace.workflows.testing")


def python_reference() -> Lines:
    told: set[tuple[str, int]] = set()
    for package in PUBLIC:
        module = importlib.import_module(package)
        yield f"## {package}"
        yield ""
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if not name.startswith("__") and (name, id(value)) not in told:
                told.add((name, id(value)))
                yield from public_name(name, value)


def public_name(name: str, value: object) -> Lines:
    yield f"### {name}"
    yield ""
    if not callable(value):
        yield f"`{sorted(value) if isinstance(value, frozenset) else value!r}`"
    else:
        yield source.cleandoc(value.__dict__.get("__doc__") or value.__doc__ or "").partition("\n\n")[0]
    yield ""
    if source.isfunction(value):
        yield f"`{name}{signature_of(value)}`"
        yield ""
    elif isinstance(value, type):
        yield from construction(value)
        rows = [row for member in sorted(dir(value)) if (row := member_row(value, member))]
        yield from table(["", "what it does"], rows) if rows else ()


def construction(kind: type) -> Lines:
    """How one is made, where programs do that, or what it holds: for records, and where our `__init__` tells more."""
    made_by = kind.__init__
    is_ours = getattr(made_by, "__module__", "").startswith("headrace") and not issubclass(kind, HeadraceError)
    text = source.cleandoc(made_by.__doc__ or "") if is_ours else ""
    if text or issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind):
        yield f"`{kind.__name__}{signature_of(kind)}`"
        yield ""
    if text:
        yield text
        yield ""


def member_row(owner: type, name: str) -> list[str] | None:
    value = source.getattr_static(owner, name)
    if isinstance(value, enum.Enum):
        return [f"`{name}`", f"`{value.value}`"]
    value = getattr(value, "__wrapped__", getattr(value, "__func__", value))
    home = getattr(value, "__module__", None) or getattr(getattr(value, "fget", None), "__module__", "")
    # Not `getdoc`: what a base says of a method of the same name may be about something else.
    text = source.cleandoc(value.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    if name.startswith("_") or not home.startswith("headrace") or not text:
        return None
    return [f"`{name}{signature_of(value) if source.isfunction(value) else ''}`", text]


def signature_of(function: Callable[..., Any]) -> str:
    """What a caller gives; types stand in the code."""
    parameters = [
        parameter.replace(annotation=source.Parameter.empty)
        for parameter in source.signature(function).parameters.values()
        if parameter.name not in ("self", "cls") and parameter.name[0] != "_" and parameter.annotation != "Never"
    ]
    return re.sub(r"<[^>]*>", "...", str(source.Signature(parameters)))


# How the tables call a requirement and the figures it is about, and the titles that say nothing more about them.
REQUIREMENT: Final = ("required", "wanted")
FIGURES: Final = (
    *("times less CPU", "to bunqueue", "to beanstalkd", "headrace", "ratio", "commands in them", "figure"),
    *("per second", "alone, p50 ms"),
)
SILENT: Final = ("", "workload", "what", "headrace", "figure")
DISK_COLUMNS: Final = ("headrace jobs/s", "headrace CPU-us", "times less CPU")


def requirements_reference() -> Lines:
    """Every figure of the measured tables that something is required of."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- bench:(\w+):begin -->\n(.*?)<!-- bench:\1:end -->", page, re.DOTALL)
    rows = [[name, *row] for name, text in blocks for row in required_rows(text.splitlines())]
    missed = sum("**missed**" in row[2] for row in rows)
    yield f"{len(rows)} requirements, {missed or 'none'} missed. Dates, versions and machine stand with each table."
    yield ""
    yield from table(["part", "what", "measured", "required"], rows)


def required_rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """What a row is about, its figures and what is required of them, for each that has a requirement."""
    head: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        else:
            row = dict(zip(head, cells, strict=True))
            wanted = next((row[title] for title in REQUIREMENT if title in row), "-")
            if wanted not in ("", "-", "---"):
                named = [pair for pair in zip(head, cells, strict=True) if pair[0] in FIGURES]
                shown = [text if title in SILENT else f"{title}: {text}" for title, text in named]
                what = cells[0] if head[0] in SILENT else f"{head[0]}: {cells[0]}"
                yield [what, ", ".join(shown), wanted]


def measured(block: str, row: str, column: str) -> str:
    """One cell of a measured table, without the mark of what was missed."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    text = page.partition(f"<!-- bench:{block}:begin -->")[2].partition(f"<!-- bench:{block}:end -->")[0]
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        head = [] if not line.startswith("|") else head or cells
        if line.startswith(f"| {row} |") and column in head:
            return cells[head.index(column)].partition(" **")[0]
    raise SystemExit(f"docs/benchmarks.md has no {column!r} of {row!r} in its block {block}")


def figures_reference() -> Lines:
    """The few figures that the README shows, from the measured tables."""

    def served(what: str, row: str, anchor: str) -> list[str]:
        speed, cpu, ratio = (measured("disk", row, title) for title in DISK_COLUMNS)
        beside = (
            f"{ratio} less CPU than bunqueue; {measured('anchor', anchor, 'to beanstalkd')} that of beanstalkd, in C"
        )
        return [f"{what}, stored before the reply", f"{speed} a second, {cpu} us CPU each", beside]

    def backlog(server: str) -> str:
        size, start = (measured("million", row, server) for row in ("RSS, MB", "kill -9 to first PULL, s"))
        return f"{size} MB, {start} s from kill -9 to the first PULL"

    def task(peer: str) -> str:
        return f"{measured('tasks', peer, 'bulk CPU-us')} us CPU"

    def flow(peer: str) -> str:
        return f"{measured('flows', f'{peer}, workflows', 'CPU-ms each')} ms CPU"

    peers = f"Dramatiq on Redis with AOF {task('dramatiq, redis with AOF')}, Huey on SQLite {task('huey, sqlite')}"
    rows = [
        served("PUSH", "PUSH 8 x 16", "put / PUSH"),
        served("PULL and ACK", "PULL+ACK 8 x 16", "reserve + delete / PULL + ACK"),
        ["a no-op task in bulk, from the call to its end", task("headrace, embedded"), peers],
        ["a workflow of three steps", flow("headrace"), f"DBOS on SQLite {flow('DBOS')}"],
        ["a million waiting jobs", backlog("headrace"), f"bunqueue {backlog('bunqueue')}"],
    ]
    yield from table(["on one core of a small machine", "Headrace", "beside it"], rows)


def table(head: list[str], rows: Iterable[list[str]]) -> Lines:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(text.replace("|", "\\|") for text in row) + " |"
    yield ""


def heading(kind: str, name: str) -> str:
    """A heading with an anchor of its own: commands, objects and categories may share a name."""
    return f'#### <a id="{kind}-{name.lower()}"></a>{name}'


def link(kind: str, name: str) -> str:
    return f"[{name}](#{kind}-{name.lower()})"


def paragraph(documented: type) -> str:
    """The docstring of a class, but not one inherited from its base, which would say nothing here."""
    own = documented.__dict__.get("__doc__")
    return source.cleandoc(own) if own else ""


PAGES: Final[dict[str, Callable[[], Lines]]] = {
    "docs/protocol.md": command_reference,
    "docs/states.md": state_reference,
    "docs/operations.md": settings_reference,
    "docs/cli.md": command_line_reference,
    "docs/valkey.md": valkey_reference,
    "docs/reference.md": python_reference,
    "docs/benchmarks.md": requirements_reference,
    "README.md": figures_reference,
}


def fresh(page: str, old: str) -> str:
    """`old` with its generated part written anew."""
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise SystemExit(f"{page} needs exactly one {BEGIN} and one {END}")
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    body = "\n".join(PAGES[page]()).strip("\n")
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of docs/.")
    parser.add_argument("--check", action="store_true", help="only say whether they are fresh")
    is_check = parser.parse_args(arguments).check
    stale = 0
    for page in PAGES:
        path = ROOT / page
        old = path.read_text(encoding="utf-8")
        new = fresh(page, old)
        if new == old:
            continue
        stale += 1
        if is_check:
            report(page, old, new)
        else:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {page}")
    return 1 if is_check and stale else 0


def report(page: str, old: str, new: str) -> None:
    print(f"{page} is stale: run `make docs`", file=sys.stderr)
    changes = list(
        difflib.unified_diff(old.splitlines(), new.splitlines(), "on disk", "from the code", lineterm="", n=0)
    )
    print("\n".join(changes[:20]), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
