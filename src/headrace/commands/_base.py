"""What a command is: the base class of all commands, their replies and the one registry.

A command is a struct with its fields and limits, its reply type, HTTP route, flags and a `run` of one to three lines.
TCP decoding, HTTP routing, the client's `call`, the reference pages, fuzz inputs and CLI verbs derive from REGISTRY.

Commands that come in bursts (PUSH, PULL, ACK) also have `together`: it runs several of one kind, read from a connection
in one go, with one call of the backend, and answers as many of the first ones as it could do that way. The others are
run one by one. Each must get the reply that `run` would have given.

A command with many options may have a short form (@short_form): a struct with the few fields that most senders use and
`forbid_unknown_fields`. Frames that come in a row are read as that if possible, see wire.decode_commands.

To add a command: write its class in the module of its category, decorate it with @command, run `make docs`, and give
it a test in tests/protocol. Field limits belong to headrace.model, texts of errors beside them.
"""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

ABSENT: Final = Raw(b"")


class Reply(Struct, rename="camel", kw_only=True):
    """Base of all success replies. Fields that the reference leaves undefined default to UNSET, never to None."""

    ok: bool = True


class Ok(Reply):
    """Done; there is nothing else to report."""


class Removal(Struct):
    removed: bool


class Removed(Reply):
    """Whether there was anything to remove."""

    data: Removal


class Alike(Struct, gc=False, frozen=True):
    """The replies to a burst in bytes: how many keys each has, what all begin with, and what then differs, if any."""

    count: int
    keys: int
    begin: bytes
    ends: Sequence[bytes | Raw] = ()


class ErrorReply(Struct):
    """`code` is the kind of the error, for clients that asked for it in Hello; the protocol has only the text."""

    error: str
    ok: bool = False
    code: str | UnsetType = UNSET

    @classmethod
    def of(cls, error: HeadraceError, peer: Peer | None = None) -> ErrorReply:
        return cls(str(error), code=error.code if peer is not None and peer.wants_codes else UNSET)


BurstReplies = Alike | list[Reply | HeadraceError]
"""The replies to commands that were run together, in their order."""

R = TypeVar("R", bound=Reply)


class Flag(enum.Flag):
    """What dispatch must know about a command."""

    NONE = 0
    WRITE = enum.auto()  # changes something: refused while storage is degraded
    BLOCKING = enum.auto()  # may wait for an event (long polls): suspends, occupies one of the in-flight slots
    BULK = enum.auto()  # may touch very many jobs: works in slices and suspends between them
    OPEN = enum.auto()  # allowed before authentication
    CONNECTION = enum.auto()  # only meaningful on a lasting connection (TCP, WebSocket)


class Route(Struct, frozen=True):
    """How HTTP reaches the command: path parameters and body fields carry the wire names of the fields.

    Written as "METHOD /path/{field}", with options behind it where HTTP differs from the other transports:

    fail=STATUS           the status of every error of the command, instead of that of the error itself
    alias=OTHER:FIELD     a further name of a field
    default=FIELD:NUMBER  what an absent field means here
    whole=FIELD           the body may be the value of this field itself
    lift=FIELD            only this part of the reply is shown: an object beside `ok`, a list alone, text as plain text
    """

    method: str
    path: str
    fail: int | None = None
    aliases: dict[str, str] = {}
    defaults: dict[str, int] = {}
    whole: str | None = None
    lift: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Route:
        method, path, *words = text.split()
        options = dict(word.split("=", 1) for word in words)
        return cls(
            method,
            path,
            fail=int(options["fail"]) if "fail" in options else None,
            aliases=dict(_pairs(options.get("alias"))),
            defaults={name: int(value) for name, value in _pairs(options.get("default"))},
            whole=options.get("whole"),
            lift=tuple(options["lift"].split(".")) if "lift" in options else (),
        )


def _pairs(text: str | None) -> list[tuple[str, str]]:
    return [(left, right) for left, right in (pair.split(":") for pair in text.split(","))] if text else []


class Spec(Struct, frozen=True):
    """One row of the registry."""

    name: str
    type: type[Command[Any]]
    reply: builtins.type[Reply]
    category: str
    flags: Flag
    routes: tuple[Route, ...]
    errors: tuple[str, ...]


class Command(Struct, Generic[R], tag_field="cmd", rename="camel", kw_only=True, omit_defaults=True, gc=False):
    """Base of all commands. `req_id` is echoed byte for byte, whatever its type.

    Clients encode the same classes: fields that are not set are not sent.
    """

    req_id: Raw = ABSENT

    async def run(self, engine: Engine, peer: Peer) -> R:
        raise NotImplementedError


REGISTRY: Final[dict[str, Spec]] = {}
BY_TYPE: Final[dict[type, Spec]] = {}
SHORT_FORMS: Final[dict[str, type[Command[Any]]]] = {}
TOGETHER: Final[dict[type, Any]] = {}
"""The `together` of those commands that have one."""

C = TypeVar("C", bound="type[Command[Any]]")


def command(
    reply: type[Reply],
    *,
    category: str,
    flags: Flag = Flag.NONE,
    http: str | tuple[str, ...] = (),
    errors: tuple[str, ...] = (),
) -> Callable[[C], C]:
    """Enter a command class into the registry. `http` is "METHOD /path/{field}" (see Route), one or several."""

    def register(cls: C) -> C:
        name = cls.__struct_config__.tag
        if not isinstance(name, str) or name in REGISTRY:
            raise TypeError(f"{cls.__name__} needs a wire name of its own")
        routes = tuple(Route.parse(text) for text in ((http,) if isinstance(http, str) else http))
        spec = Spec(name, cls, reply, category, flags, routes, errors)
        REGISTRY[name] = spec
        _enter(cls, spec)
        return cls

    return register


def _enter(cls: type[Command[Any]], spec: Spec) -> None:
    BY_TYPE[cls] = spec
    if hasattr(cls, "together"):
        TOGETHER[cls] = cls.together


def short_form(whole: type[Command[Any]]) -> Callable[[C], C]:
    """Enter the short form of a command. It has a `queue`, whose name is checked by whoever decodes it."""

    def register(cls: C) -> C:
        SHORT_FORMS[BY_TYPE[whole].name] = cls
        _enter(cls, BY_TYPE[whole])
        return cls

    return register
