"""Server-sent events: GET /events and /events/queues/{queue}. A stream of text that browsers and curl can read.

Every event has an id, `shard.epoch.seq`, which outlives restarts: a client that comes back with `Last-Event-ID` gets
what it missed from the event log, or a `gap` event when that reaches further back than the log does. Snapshots have
no id, so they do not move the place a client comes back to.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

import msgspec

from headrace.server.exchange import NO_STORE, Request, Response
from headrace.server.live import MAX_UNREAD, Happening, Hub, Position
from headrace.server.projections import Choice, is_pattern
from headrace.server.routes import BadRequest, TooMany, queue_in

if TYPE_CHECKING:
    from headrace.server.httpsession import Carrier, HttpSession, Takeover

log: Final = logging.getLogger("headrace.server")
_encode: Final = msgspec.json.Encoder().encode
_HEADERS: Final = (
    b"Content-Type: text/event-stream\r\n" + NO_STORE + b"X-Accel-Buffering: no\r\nX-Content-Type-Options: nosniff\r\n"
    b"Connection: close\r\n"
)


def sse_frame(happening: Happening) -> bytes:
    head = (
        f"id: {happening.id}\nevent: {happening.name}\ndata: " if happening.id else f"event: {happening.name}\ndata: "
    )
    return head.encode() + _encode(happening.fields) + b"\n\n"


class EventStreams:
    """The place where streams begin."""

    is_open = False

    def __init__(self, hub: Hub, most: int) -> None:
        self._hub = hub
        self._most = most
        self._streams: set[Stream] = set()
        self._numbers = 0

    @property
    def count(self) -> int:
        return len(self._streams)

    def serve(self, session: HttpSession, request: Request) -> Response:
        choice, last_id = _read_query(request)
        last_id = request.headers.get(b"last-event-id", b"").decode("latin-1").strip() or last_id
        after = Position.parse(last_id) if last_id else None
        if last_id and after is None:
            raise BadRequest("Last-Event-ID must be an id of this server, such as 0.1.42")
        if len(self._streams) >= self._most:
            raise TooMany("Too many SSE connections")
        self._numbers += 1
        greeting = _encode({"connected": True, "clientId": f"sse-{self._numbers}"})
        body = b"retry: 3000\ndata: " + greeting + b"\n\n"

        def begin(connection: Carrier) -> Takeover:
            return Stream(self._hub, connection, choice, after, self._streams)

        return Response(200, body, headers=_HEADERS, begins=begin)


def _read_query(request: Request) -> tuple[Choice, str]:
    queue = queue_in(request.parameters)
    patterns: list[str] = []
    last_id = ""
    for name, value in parse_qsl(request.query, keep_blank_values=True):
        if name == "events":
            patterns += [pattern for pattern in value.split(",") if pattern]
        elif name == "lastEventId":
            last_id = value
        else:
            raise BadRequest(f"Unknown query parameter: {name}")
    check_patterns(patterns)
    return Choice(queue, frozenset(patterns)), last_id


def check_patterns(patterns: list[str]) -> None:
    invalid = [pattern for pattern in patterns if not is_pattern(pattern)]
    if invalid:
        raise BadRequest(f"Invalid: {', '.join(invalid)}")


class Stream:
    """One client that listens."""

    only_listens = True
    is_busy = False

    def __init__(
        self, hub: Hub, connection: Carrier, choice: Choice, after: Position | None, streams: set[Stream]
    ) -> None:
        self.choice = choice
        self.is_open = True
        self._hub = hub
        self._connection = connection
        self._streams = streams
        self._room = asyncio.Event()
        self._room.set()
        streams.add(self)
        if after is None:
            hub.flush()  # pending events of others happened before this stream began
            hub.join(self, sse_frame)
        else:
            hub.replay(self, sse_frame, after)

    def write(self, frames: bytes, count: int) -> None:
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            return
        transport.write(frames)
        if transport.get_write_buffer_size() > MAX_UNREAD:
            self.cut_off("it does not read")

    def write_past(self, frames: bytes) -> None:
        if self._connection.transport is not None:
            self._connection.transport.write(frames)

    def beat(self) -> None:
        self.write(b":heartbeat\n\n", 0)

    def cut_off(self, reason: str) -> None:
        log.warning("an event stream of %s is cut off: %s", self._connection.session.address, reason)
        self._connection.abort()

    async def drained(self) -> None:
        await self._room.wait()

    # -- as what the connection has become -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """There is nothing to say to a stream."""

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self) -> None:
        self.is_open = False
        self._room.set()
        self._streams.discard(self)
        self._hub.leave(self, sse_frame)

    def close(self) -> None:
        """A stream just ends."""
