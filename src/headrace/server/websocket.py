"""WebSocket: GET /ws and /ws/queues/{queue}. Commands as JSON messages, and events as they happen.

A message becomes the frame that a TCP client would have sent and goes through the same session; its replies become
JSON messages. So order, waiting, limits and what is released when the connection closes are those of TCP.
`Subscribe` and `Unsubscribe` choose events; until the first of them a client gets all events in the protocol's own
shape. Framing is wsproto's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, msgpack
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Message, Ping, TextMessage
from wsproto.utilities import ProtocolError

from headrace.commands._base import ABSENT, Command, Reply
from headrace.errors import HeadraceError, StorageUnavailable
from headrace.frames import Frames
from headrace.model import EVENT_WORDS
from headrace.server.access import subprotocols
from headrace.server.exchange import Request, Response
from headrace.server.jsonwire import InvalidJson, from_json, packed_to_json
from headrace.server.live import MAX_UNREAD, Happening, Hub
from headrace.server.projections import NOTHING, Choice, live_name
from headrace.server.routes import BadRequest, TooMany, queue_in
from headrace.server.session import MAX_BACKLOG, Session
from headrace.server.sse import check_patterns
from headrace.server.ticker import Parcels, Release
from headrace.server.valve import Valve
from headrace.wire import Undecodable

if TYPE_CHECKING:
    from headrace.server.httpsession import Carrier, HttpSession, Takeover

SUBPROTOCOL: Final = "headrace"
"""Selected when it is offered: a browser that offers its token this way expects one of its offers to be selected."""
MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_PER_TURN: Final = 64
_BEATS_OF_SILENCE: Final = 4
_MAGIC: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TOO_BIG: Final = 1009
_GOING_AWAY: Final = 1001
_WRONG: Final = 1002
_encode_json: Final = msgspec.json.Encoder().encode
_pack: Final = msgpack.Encoder().encode


class _TooBig(Exception):
    """A message that exceeds MAX_MESSAGE_BYTES."""


class Subscribed(Reply):
    subscribed: list[str]


def ws_event(happening: Happening) -> bytes:
    fields = {name: value for name, value in happening.fields.items() if name != "timestamp" or not happening.id}
    return _text_frame(_encode_json({"event": happening.name, "ts": happening.ts, "data": fields}))


def legacy_event(happening: Happening) -> bytes:
    """The shape before any Subscribe: events of the log alone, named as the protocol names them."""
    word = _LEGACY_WORDS.get(happening.name)
    return b"" if word is None else _text_frame(_encode_json({"eventType": word, **happening.fields}))


_LEGACY_WORDS: Final = {live_name(word): word for word in EVENT_WORDS.values()}


def _text_frame(text: bytes) -> bytes:
    """A whole text message, as a server frames it."""
    size = len(text)
    if size < 126:
        return bytes((0x81, size)) + text
    if size < 65_536:
        return b"\x81\x7e" + size.to_bytes(2, "big") + text
    return b"\x81\x7f" + size.to_bytes(8, "big") + text


# -- the handshake -----------------------------------------------------------------------------------------------------


class Sockets:
    """Accepts WebSocket connections."""

    is_open = False

    def __init__(self, hub: Hub, most: int) -> None:
        self._hub = hub
        self._most = most
        self._peers: set[WebSocket] = set()

    @property
    def count(self) -> int:
        return len(self._peers)

    def serve(self, session: HttpSession, request: Request) -> Response:
        queue = queue_in(request.parameters)
        accept = _accept(request)
        if len(self._peers) >= self._most:
            raise TooMany("Too many WebSocket connections")
        headers = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n"
        if SUBPROTOCOL in subprotocols(request.headers):
            headers += b"Sec-WebSocket-Protocol: " + SUBPROTOCOL.encode() + b"\r\n"

        def begin(connection: Carrier) -> Takeover:
            return WebSocket(self._hub, connection, queue, self._peers)

        return Response(101, headers=headers, begins=begin)


class _OtherVersion(HeadraceError):
    code = "other_version"
    status = 426


def _accept(request: Request) -> bytes:
    headers = request.headers
    is_upgrade = (
        headers.get(b"upgrade", b"").lower() == b"websocket" and b"upgrade" in headers.get(b"connection", b"").lower()
    )
    if not is_upgrade:
        raise BadRequest("WebSocket upgrade failed")
    if headers.get(b"sec-websocket-version") != b"13":
        raise _OtherVersion("WebSocket version must be 13")
    key = headers.get(b"sec-websocket-key", b"")
    try:
        if len(base64.b64decode(key, validate=True)) != 16:
            raise BadRequest("WebSocket upgrade failed")
    except binascii.Error:
        raise BadRequest("WebSocket upgrade failed") from None
    return base64.b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest())


# -- one connection ----------------------------------------------------------------------------------------------------


class _Wish(Command[Subscribed]):
    """A Subscribe, or an Unsubscribe if not `is_more`."""

    message: dict[str, Any]
    is_more: bool


class _JsonSession(Session):
    """A session whose frames are JSON texts, and which knows two commands more."""

    def __init__(self, *args: Any, choose: Callable[[_Wish], list[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._choose = choose
        self.has_asked = False
        """Whether it was asked for anything but events."""

    def _decode_all(self, frames: list[bytes]) -> Sequence[Command[Any] | Undecodable]:
        return [self._decode(frame) for frame in frames]

    def _decode(self, frame: bytes) -> Command[Any] | Undecodable:
        try:
            value = from_json(frame)
            packed = _pack(value)
        except (InvalidJson, RecursionError):
            return Undecodable("Invalid JSON")
        name = value.get("cmd") if isinstance(value, dict) else None
        if name in ("Subscribe", "Unsubscribe"):
            req_id = Raw(_pack(value["reqId"])) if "reqId" in value else ABSENT
            return _Wish(message=value, is_more=name == "Subscribe", req_id=req_id)
        self.has_asked = True
        return super()._decode(packed)

    def _start(self, command: Command[Any], key: bytes | Raw) -> None:
        if not isinstance(command, _Wish):
            super()._start(command, key)
            return
        try:
            self._answer(Subscribed(subscribed=self._choose(command)), key)
        except HeadraceError as error:
            self._refuse(error, key)


class WebSocket:
    """One client: a session of the protocol, and a listener of the hub."""

    def __init__(self, hub: Hub, connection: Carrier, queue: str | None, peers: set[WebSocket]) -> None:
        server = connection.server
        self.choice = Choice(queue)
        self.session = _JsonSession(
            server.engine,
            connection.session.address,
            stir=partial(server.ticker.stir, self),
            later=server.loop.call_soon,
            budget=server.new_budget(),
            choose=self.choose,
        )
        self.session.is_authenticated = True  # the upgrade was
        self._hub = hub
        self._connection = connection
        self._peers = peers
        self._queue = queue
        self._frames = Frames()
        self._wire = Connection(ConnectionType.SERVER)
        self._message = bytearray()
        self._valve = Valve(MAX_BACKLOG)
        self._is_choked = False
        self._silent_beats = 0
        self._dropped = 0
        self._last_code = 0
        self._writer: Callable[[Happening], bytes] = legacy_event
        self._parcels = Parcels(self._write)
        peers.add(self)
        hub.flush()
        hub.join(self, self._writer)

    # -- incoming ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.session.is_closing:
            return
        self._silent_beats = 0
        self._wire.receive_data(data)
        self._read_on()

    def _read_on(self) -> None:
        """Process received messages, a limited number per turn of the loop, so that a flood does not hold up others."""
        transport, read = self._connection.transport, 0
        if transport is None or transport.is_closing():
            return
        try:
            for event in islice(self._wire.events(), MAX_PER_TURN):
                read += 1
                if isinstance(event, TextMessage | BytesMessage):
                    self._take_part(event)
                elif isinstance(event, Ping):
                    self._write(self._wire.send(event.response()))
                elif isinstance(event, CloseConnection):  # from the client, or what wsproto makes of its fault
                    self._end(event.code)
        except _TooBig:
            self._end(_TOO_BIG)
        except (ProtocolError, ValueError):
            self._end(_WRONG)
        self._valve.is_behind = read == MAX_PER_TURN and not self.session.is_closing
        if self._valve.is_behind:
            self._connection.server.loop.call_soon(self._read_on)
        self._set_reading()

    def _take_part(self, part: Message[Any]) -> None:
        self._message += part.data.encode() if isinstance(part.data, str) else part.data
        if len(self._message) > MAX_MESSAGE_BYTES:
            raise _TooBig
        if part.message_finished:
            text, self._message = bytes(self._message), bytearray()
            self.session.receive_frame(text)

    @property
    def only_listens(self) -> bool:
        return not self.session.has_asked

    def choose(self, wish: _Wish) -> list[str]:
        """Change the selection as a Subscribe or Unsubscribe says; what is selected then."""
        given = _patterns_of(wish.message, is_required=wish.is_more)
        had = set() if self._writer is legacy_event else self.choice.patterns - NOTHING
        chosen = had | set(given) if wish.is_more else had - set(given or had)
        self._listen(frozenset(chosen))
        return sorted(chosen)

    def _listen(self, patterns: frozenset[str]) -> None:
        self._hub.flush()  # what has happened is sent by the old selection
        self._hub.leave(self, self._writer)
        self._writer = ws_event
        self.choice = Choice(self._queue, patterns or NOTHING)
        self._hub.join(self, self._writer)

    # -- outgoing ------------------------------------------------------------------------------------------------------

    @property
    def is_durable(self) -> bool:
        return self.session.is_durable

    def spoil(self, error: StorageUnavailable) -> None:
        self.session.spoil(error)

    def flush(self) -> None:
        out = self.session.take()
        if out:
            self._parcels.leave(self._messages(out))

    def hold(self) -> Release:
        held = self.session.take_held()
        fill = self._parcels.hold()

        def release(error: StorageUnavailable | None) -> None:
            out = held.out if error is None else held.without_promises(error)
            fill(self._messages(out))

        return release

    def _messages(self, out: bytearray) -> bytes:
        """Frames of the protocol as messages."""
        return b"".join([_text_frame(packed_to_json(frame)) for frame in self._frames.feed(bytes(out))])

    def _write(self, out: bytes | bytearray) -> None:
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > self._connection.server.settings.tcp_max_write_queue_bytes:
            transport.abort()
            return
        transport.write(out)
        if self.session.is_closing:
            self._end(_WRONG)
        elif not self._valve.is_open:
            self._set_reading()

    def _set_reading(self) -> None:
        """A client that does not read is still read from, within limits: its pongs count as signs of life."""
        self._valve.set(self._connection.transport, self.session)

    def write(self, frames: bytes, count: int) -> None:
        transport = self._connection.transport
        if transport is None or transport.is_closing() or self._wire.state is not ConnectionState.OPEN:
            return
        if transport.get_write_buffer_size() > MAX_UNREAD:
            self._dropped += count
            return
        self._report_dropped()
        transport.write(frames)

    def _report_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            now = self._connection.server.engine.clock.now_ms()
            self._write(_text_frame(_encode_json({"event": "dropped", "ts": now, "data": {"count": dropped}})))

    def beat(self) -> None:
        """Send a ping; abort the connection of a client that has been silent for too long."""
        self._silent_beats += self._valve.is_open or self._is_choked  # else the server has paused reading
        if self._silent_beats > _BEATS_OF_SILENCE:
            self._connection.abort()
        elif self._wire.state is ConnectionState.OPEN:
            self._write(self._wire.send(Ping()))

    # -- as what the connection has become -----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._is_choked = True
        self.session.choke(True)

    def resume_writing(self) -> None:
        self._is_choked = False
        self.session.choke(False)
        self._report_dropped()

    @property
    def is_busy(self) -> bool:
        return self._valve.is_behind or self.session.is_busy

    def _end(self, code: int) -> None:
        """Read no further. Behind the last reply that is owed, send a close frame with the first code, and close."""
        self.session.is_closing = True
        self._last_code = self._last_code or code
        if not self._parcels and not self.session.owes_replies:
            self._say_goodbye(self._last_code)
            self._connection.hang_up()

    def _say_goodbye(self, code: int) -> None:
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            return
        if self._wire.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
            transport.write(self._wire.send(CloseConnection(code=code)))

    def connection_lost(self) -> None:
        self._peers.discard(self)
        self._hub.leave(self, self._writer)
        self.session.close()
        self._connection.server.ticker.give_back(self.session)

    def close(self) -> None:
        self._say_goodbye(_GOING_AWAY)


def _patterns_of(value: dict[str, Any], *, is_required: bool) -> list[str]:
    given = value.get("events")
    if not given and not is_required:
        return []
    if not isinstance(given, list) or not given or not all(isinstance(item, str) for item in given):
        raise BadRequest("events must be a non-empty array")
    check_patterns(given)
    return given
