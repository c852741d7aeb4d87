"""Every field of every command gets values of every wrong kind: refused by name, and nobody else notices.

The cases are derived from the registry: a new command or field is covered without a line here. For each field (those
of nested objects and of list items too) `_wrong_values` gives what its type cannot be; `_names` are the texts of which
the error must hold one: the path of the field, or the fixed text that the reference has for it.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from msgspec import inspect

from headrace.commands import REGISTRY, Flag, Spec
from headrace.model import Repeat
from tests.protocol.steps import push
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

UNDEFINED = msgpack.ExtType(0, b"\x00")
FOREIGN = msgpack.ExtType(7, b"abc")
QUEUE = "wrong-types"


class Case(NamedTuple):
    """One request with one wrong value in it, and what its error must name."""

    label: str
    path: tuple[str | int, ...]
    value: Any
    names: tuple[str, ...]


# -- values of a type ----------------------------------------------------------------------------------------


def _unwrap(type_: inspect.Type) -> tuple[inspect.Type, dict[str, str]]:
    extra: dict[str, str] = {}
    while isinstance(type_, inspect.Metadata):
        extra |= type_.extra or {}
        type_ = type_.type
    return type_, extra


def _members(type_: inspect.Type) -> list[inspect.Type]:
    kind, _ = _unwrap(type_)
    if not isinstance(kind, inspect.UnionType):
        return [type_]
    return [member for member in kind.types if not isinstance(_unwrap(member)[0], inspect.NoneType)]


def _texts(type_: inspect.Type) -> dict[str, str]:
    """The fixed texts of a type, by kind of fault."""
    texts = dict(_unwrap(type_)[1])
    for member in _members(type_):
        texts |= _unwrap(member)[1]
    return {kind: text for kind, text in texts.items() if isinstance(text, str)}


_OF_KIND: dict[str, Any] = {
    "number": 5,
    "text": "text",
    "truth": True,
    "list": [1],
    "map": {"a": 1},
    "bytes": b"\x00\x01",
    "extension": FOREIGN,
    "nested": [[[[{}]]]],
}


def _accepts(kind: inspect.Type) -> set[str]:
    """Which kinds of values a type may take."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return {"number"}
    if isinstance(kind, inspect.StrType | inspect.LiteralType):
        return {"text"}
    if isinstance(kind, inspect.BoolType):
        return {"truth"}
    if isinstance(kind, inspect.ListType):
        return {"list", "nested"}
    if isinstance(kind, inspect.StructType | inspect.DictType):
        return {"map"}
    return set(_OF_KIND)


def _wrong_values(type_: inspect.Type) -> Iterator[tuple[str, Any]]:
    """Values that a field of this type must refuse."""
    members = [_unwrap(member)[0] for member in _members(type_)]
    accepted = set().union(*(_accepts(kind) for kind in members))
    for name, value in _OF_KIND.items():
        if name not in accepted:
            yield name, value
    for kind in members:
        if isinstance(kind, inspect.IntType | inspect.FloatType):
            yield from _wrong_numbers(kind)
        elif isinstance(kind, inspect.StrType):
            yield from _wrong_texts(kind)
        elif isinstance(kind, inspect.LiteralType):
            yield from (("choice", "nonsense"), ("empty", ""))


def _wrong_numbers(kind: inspect.IntType | inspect.FloatType) -> Iterator[tuple[str, Any]]:
    yield from (("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf")))
    if isinstance(kind, inspect.IntType):
        yield "fraction", 1.5
    if kind.ge is not None and kind.ge > -(2**62):
        yield from (("too small", kind.ge - 1), ("very small", -(2**63)))
    if kind.le is not None and kind.le < 2**62:
        yield from (("too large", kind.le + 1), ("very large", 2**64 - 1), ("huge", 1e300))


def _wrong_texts(kind: inspect.StrType) -> Iterator[tuple[str, Any]]:
    if kind.min_length:
        yield "empty", ""
    if kind.max_length is not None:
        yield "too long", "x" * (kind.max_length + 1)
    if kind.pattern is not None:
        yield "NUL", "a\x00b"


# -- cases of a command --------------------------------------------------------------------------------------


@functools.cache
def _fields(cls: type) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return tuple(field for field in info.fields if field.encode_name != "reqId")


def _valid(type_: inspect.Type, name: str, job_id: str) -> Any:
    """A value that the field takes."""
    kind = _unwrap(_members(type_)[0])[0]
    if isinstance(kind, inspect.StructType):
        return _request(kind.cls, job_id)
    if isinstance(kind, inspect.ListType):
        return [_valid(kind.item_type, name, job_id)]
    if isinstance(kind, inspect.BoolType):
        return False
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return max(1, kind.ge or 1)
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    if isinstance(kind, inspect.StrType):
        return {"queue": QUEUE, "queues": QUEUE, "id": job_id, "ids": job_id, "url": "https://example.com"}.get(
            name, f"any-{name}"
        )
    return 1


def _request(cls: type, job_id: str) -> dict[str, Any]:
    """The fields that a command or object cannot do without."""
    return {f.encode_name: _valid(f.type, f.encode_name, job_id) for f in _fields(cls) if f.required}


def _cases(cls: type, path: tuple[str | int, ...], inherited: tuple[str, ...]) -> Iterator[Case]:
    for field in _fields(cls):
        here = (*path, field.encode_name)
        names = (*inherited, _pointer(here), *_texts(field.type).values())
        for label, value in _wrong_values(field.type):
            yield Case(f"{_pointer(here)}={label}", here, value, names)
        if field.required and _accepts(_unwrap(field.type)[0]) != set(_OF_KIND):
            for label, nothing in (("nil", None), ("undefined", UNDEFINED)):
                yield Case(f"{_pointer(here)}={label}", here, nothing, names)
        yield from _inner_cases(field.type, here, inherited)


def _inner_cases(type_: inspect.Type, here: tuple[str | int, ...], inherited: tuple[str, ...]) -> Iterator[Case]:
    for member in _members(type_):
        kind = _unwrap(member)[0]
        if isinstance(kind, inspect.StructType):
            yield from _cases(kind.cls, here, inherited)
        elif isinstance(kind, inspect.ListType):
            yield from _item_cases(kind, here, inherited)


def _item_cases(kind: inspect.ListType, here: tuple[str | int, ...], inherited: tuple[str, ...]) -> Iterator[Case]:
    item = _unwrap(kind.item_type)[0]
    at = (*here, 0)
    names = (*inherited, _pointer(at), *_texts(kind.item_type).values())
    for label, value in _wrong_values(kind.item_type):
        yield Case(f"{_pointer(at)}={label}", at, value, names)
    if isinstance(item, inspect.StructType):
        yield from _cases(item.cls, at, inherited)
    if kind.max_length is not None:
        yield Case(f"{_pointer(here)}=long", here, ["x"] * (kind.max_length + 1), (_pointer(here),))


def _pointer(path: tuple[str | int, ...]) -> str:
    """How errors spell a path: `backoff.type`, `ids[0]`, and `jobs[0]: priority` for entries of a batch."""
    out = ""
    for step, before in zip(path, ("", *path), strict=False):
        if isinstance(step, int):
            out += f"[{step}]"
        elif isinstance(before, int):
            out += f": {step}"
        else:
            out += f".{step}" if out else step
    return out


def _with(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """`request` with the wrong value at the path of the case; objects on the way are filled with valid fields."""
    target: Any = request
    for depth, step in enumerate(case.path[:-1], 1):
        needs_list = isinstance(case.path[depth], int)
        if isinstance(step, str) and not isinstance(target.get(step), list if needs_list else dict):
            target[step] = _filled(_type_at(request["cmd"], case.path[:depth]), needs_list)
        target = target[step]
    target[case.path[-1]] = case.value
    return request


def _type_at(command: str, path: tuple[str | int, ...]) -> inspect.Type:
    cls: type = REGISTRY[command].type
    found: inspect.Type | None = None
    for step in path:
        if isinstance(step, int):
            assert found is not None
            (item,) = [k for k in (_unwrap(m)[0] for m in _members(found)) if isinstance(k, inspect.ListType)]
            found = item.item_type
        else:
            (field,) = [f for f in _fields(cls) if f.encode_name == step]
            found = field.type
        for member in _members(found):
            kind = _unwrap(member)[0]
            if isinstance(kind, inspect.StructType):
                cls = kind.cls
    assert found is not None
    return found


def _filled(type_: inspect.Type, as_list: bool) -> Any:
    kinds = [_unwrap(member)[0] for member in _members(type_)]
    for kind in kinds:
        if as_list and isinstance(kind, inspect.ListType):
            return [_valid(kind.item_type, "item", "no-such-job")]
        if not as_list and isinstance(kind, inspect.StructType):
            # A repeat is told its interval or pattern, and needs one of them before anything else is looked at.
            return _request(kind.cls, "no-such-job") | ({"every": 5} if kind.cls is Repeat else {})
    raise AssertionError(type_)


# -- the tests -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Like the shared one; afterwards the same file must open again without a word of complaint."""
    running = ServerProcess(Path(tmp_path_factory.mktemp("wrong")) / "headrace.db").start()
    try:
        yield running
        first = running.stop()
        assert not _complaints(first)
        running.start()
        with running.client() as again:
            assert again.ok("Ping")["data"]["pong"] is True
            assert again.ok("StorageStatus")["data"]["error"] is None
        assert not _complaints(running.stop())
    finally:
        if running.process is not None and running.process.poll() is None:
            running.kill()


def _complaints(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if re.search(r"WARN|ERROR|CRITICAL|Traceback|failed", line)]


class Onlooker(threading.Thread):
    """Another connection, which only wants its pings answered meanwhile."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._client = Client(port)
        self._done = threading.Event()
        self.count = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._done.wait(0.001):
                self._client.ok("Ping")
                self.count += 1
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self._done.set()
        self.join(10)
        self._client.close()
        assert self.error is None, self.error
        assert self.count


@pytest.fixture(scope="module")
def onlooker(server: ServerProcess) -> Iterator[None]:
    watching = Onlooker(server.port)
    watching.start()
    yield
    watching.finish()


by_command = pytest.mark.parametrize("spec", list(REGISTRY.values()), ids=lambda spec: spec.name)


@by_command
@pytest.mark.usefixtures("onlooker")
def test_wrong_values_are_refused_by_the_name_of_their_field_and_cost_little(
    server: ServerProcess, client: Client, spec: Spec
) -> None:
    job_id = push(client, QUEUE)
    wrong = []
    for case in _cases(spec.type, (), ()):
        request = _with({"cmd": spec.name, **_request(spec.type, job_id), "reqId": case.label}, case)
        before = server.cpu_s
        client.send_value(request)
        reply = client.recv()
        assert server.cpu_s - before < 0.05, case.label
        assert reply.get("reqId") == case.label, (case.label, reply)
        if reply["ok"] is not False or not _is_named(reply["error"], case, spec):
            wrong.append((case.label, repr(case.value)[:40], reply))
    assert not wrong, f"{len(wrong)} of them: {wrong[:8]}"
    assert client.ok("Ping")


@by_command
@pytest.mark.usefixtures("onlooker")
@pytest.mark.parametrize("nothing", [None, UNDEFINED], ids=["nil", "undefined"])
def test_nil_and_undefined_stand_for_an_absent_option(server: ServerProcess, spec: Spec, nothing: object) -> None:
    with server.client() as client:
        for field in _fields(spec.type):
            if not field.required:
                # A command that waits would wait for a job that is there.
                waits = Flag.BLOCKING in spec.flags
                request = _request(spec.type, "nobody" if waits else push(client, QUEUE))
                absent = _outcome(client.call(spec.name, **request))
                request = _request(spec.type, "nobody" if waits else push(client, QUEUE))
                given = _outcome(client.call(spec.name, **request, **{field.encode_name: nothing}))
                if spec.name == "ACK" and field.encode_name == "result":
                    continue  # null is a result
                assert given == absent, field.encode_name


def _is_named(error: str, case: Case, spec: Spec) -> bool:
    """The error holds the path of the field, its fixed text, or a documented text about an object around it."""
    documented = error in spec.errors and any(str(step) in error for step in case.path)
    return documented or any(name in error for name in case.names)


def _outcome(reply: dict[str, Any]) -> tuple[Any, ...]:
    """What a reply says, apart from ids."""
    error = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "<id>", str(reply.get("error")))
    return reply["ok"], error, sorted(reply)


@by_command
@pytest.mark.usefixtures("onlooker")
def test_any_payload_is_taken_or_refused_in_words(server: ServerProcess, spec: Spec) -> None:
    """Opaque fields take every value; nothing in them may break the server."""
    odd = [
        *_OF_KIND.values(),
        float("nan"),
        2**64 - 1,
        -(2**63),
        "\x00" * 100,
        {1: {None: True}},
        msgpack.Timestamp(2**33, 5),
        UNDEFINED,
        [UNDEFINED],
        "😀" * 1000,
    ]
    with server.client() as client:
        for field in _fields(spec.type):
            if _accepts(_unwrap(_members(field.type)[0])[0]) != set(_OF_KIND):
                continue
            for value in odd:
                job_id = push(client, QUEUE)
                request = {**_request(spec.type, job_id), field.encode_name: value}
                reply = client.call(spec.name, **request)
                assert reply.get("error") != "Internal server error", (field.encode_name, value)


@by_command
@pytest.mark.usefixtures("onlooker")
def test_a_missing_required_field_is_named(client: Client, spec: Spec) -> None:
    for field in _fields(spec.type):
        if field.required:
            request = _request(spec.type, "no-such-job")
            del request[field.encode_name]
            error = client.error(spec.name, **request)
            expected = _texts(field.type).get("required") or f"{field.encode_name} is required"
            assert error == expected
