"""What a client sends commands through: sockets to a server, or an engine in this process. This is their interface.

A channel lives on the loop of its `line`; nothing here may be called from another thread. Replies come as calls of
`done`, with the reply or with the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from headrace.client.policy import LinkState
from headrace.commands._base import Command, Reply
from headrace.errors import HeadraceError

R = TypeVar("R", bound=Reply)
Done = Callable[[R | HeadraceError], None]


def is_unwanted(done: object) -> bool:
    """Whether nobody waits for this reply any more. Most waiters cannot be cancelled and do not implement it."""
    return getattr(done, "is_unwanted", False)


class EventView(Struct, rename="camel"):
    """A live event of a queue. Which fields are set depends on `event_type`."""

    event_type: str
    queue: str
    job_id: str = ""
    timestamp: float = 0.0
    progress: float | None = None
    error: str | None = None
    terminal: bool | None = None
    prev: str | None = None
    delay: float | None = None
    data: object = None

    @property
    def is_final(self) -> bool:
        """Whether the job has ended: nothing more will happen to it by itself."""
        return self.event_type in ("completed", "removed") or (self.event_type == "failed" and bool(self.terminal))


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[EventView]:
    return msgspec.msgpack.Decoder(EventView, strict=False, ext_hook=lambda code, data: None)


def decode_event(encoded: bytes | Raw) -> EventView:
    """An event. A result that Python cannot hold, such as a map with maps as keys, is left out of it."""
    try:
        return _decoder().decode(encoded)
    except (msgspec.MsgspecError, ValueError):
        fields = msgspec.msgpack.decode(encoded, type=dict[str, Raw])
        return _decoder().decode(msgspec.msgpack.encode(fields | {"data": None}))


Hear = Callable[[EventView], None]
LinkChange = Callable[[bool], None]
"""Called with True when the channel is connected (again), with False when it lost its peer."""


class LinkHealth(NamedTuple):
    """How one socket is doing."""

    state: LinkState
    latency: float | None
    """Seconds that the handshake or the last ping took."""
    errors: int
    """How often it was lost or could not be opened."""
    in_flight: int


class Channel(Protocol):
    def submit(self, command: Command[R], done: Done[R], timeout: float) -> None:
        """Send a command; `done` is called once, at the latest after `timeout` seconds."""

    def open_own(self, hear: Hear | None = None, changed: LinkChange | None = None) -> Channel:
        """A separate channel to the same place: for a worker, or for a listener to events."""

    @property
    def health(self) -> list[LinkHealth]:
        """One entry per socket; none where there is no socket."""

    def force_reconnect(self) -> None:
        """Close all sockets and open new ones."""

    async def start(self) -> None:
        """Return when commands can be sent; raise when the peer cannot be reached."""

    async def close(self) -> None: ...
