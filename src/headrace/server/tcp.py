"""The TCP shell: sockets and timers. All rules of the protocol are in `session`, the commit per tick in `ticker`."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from functools import partial
from typing import Final

from headrace.commands._base import ErrorReply
from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError, NotAuthenticated, Refused, StorageUnavailable
from headrace.frames import encode_frame
from headrace.server.listener import Listener, part, see_off
from headrace.server.session import MAX_BACKLOG, Session
from headrace.server.ticker import Parcels, Release, Ticker
from headrace.server.valve import Valve
from headrace.server.vigil import Vigil

log: Final = logging.getLogger("headrace.server")

AUTH_WITHIN_S: Final = 10
"""With tokens configured: how long a connection may stay open without authenticating."""


class Connection(asyncio.Protocol):
    """Feeds a session from a socket and a socket from a session."""

    def __init__(self, server: TcpServer) -> None:
        self._server = server
        self.transport: asyncio.Transport | None = None
        self._partial_timer: asyncio.TimerHandle | None = None
        self._stranger_timer: asyncio.TimerHandle | None = None
        self._has_heard_all = False
        self._is_half_closed = False
        self.still_sends = False
        self._valve = Valve(MAX_BACKLOG)
        self._parcels = Parcels(self._write)
        self.session: Session

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        server = self._server
        peer = transport.get_extra_info("peername")
        self.session = Session(
            server.engine,
            str(peer[0]) if peer else "",
            stir=partial(server.ticker.stir, self),
            later=server.loop.call_soon,
            budget=server.new_budget(),
        )
        server.joined(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if server.is_full:
            self.session.is_closing = True
            self.transport.write(_encode_error(Refused("Too many connections")))  # type: ignore[union-attr]
            self._hang_up()
        elif server.engine.tokens:
            self._stranger_timer = server.loop.call_later(AUTH_WITHIN_S, self._end_stranger)

    def data_received(self, data: bytes) -> None:
        session = self.session
        if session.is_closing or self._has_heard_all:
            self.still_sends = True
            return
        session.receive(data)
        if session.frames.held or self._partial_timer is not None:
            self._watch_partial()
        if session.backlog:
            self._set_reading()

    def eof_received(self) -> bool:
        """The client sends no more but may still read: pending commands are answered before the connection is closed.

        Long polls are not, because a client that disconnected looks the same. With TLS both directions end together.
        """
        if self._server.tls is not None or not self._owes_replies:
            return False
        self.session.is_closing = self._is_half_closed = True
        return True

    @property
    def is_busy(self) -> bool:
        return self.session.is_busy

    @property
    def _owes_replies(self) -> bool:
        return bool(self._parcels) or self.session.owes_replies

    def _watch_partial(self) -> None:
        """A frame must make progress; a connection that is idle between frames may stay."""
        if self._partial_timer is not None:
            self._partial_timer.cancel()
            self._partial_timer = None
        timeout_ms = self._server.settings.tcp_idle_timeout_ms
        if timeout_ms and self.session.frames.held:
            self._partial_timer = self._server.loop.call_later(timeout_ms / 1000, self._end_partial)

    def _end_partial(self) -> None:
        if self._valve.is_open:
            self.abort()
        else:
            self._watch_partial()  # the server has paused reading

    def _end_stranger(self) -> None:
        """Close a connection that did not authenticate in time, or such clients could use up all connections."""
        transport = self.transport
        if transport is None or self.session.is_authenticated:
            return
        self.session.is_closing = True
        transport.write(_encode_error(NotAuthenticated(f"Not authenticated within {AUTH_WITHIN_S} seconds")))
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            self._hang_up()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # -- writing -------------------------------------------------------------------------------------------------------

    @property
    def is_durable(self) -> bool:
        return self.session.is_durable

    def spoil(self, error: StorageUnavailable) -> None:
        self.session.spoil(error)

    def flush(self) -> None:
        out = self.session.take()
        if out:
            self._parcels.leave(out)

    def hold(self) -> Release:
        """Hold back the replies of this tick until a sync is done; later ones queue up behind them."""
        held = self.session.take_held()
        fill = self._parcels.hold()

        def release(error: StorageUnavailable | None) -> None:
            fill(held.out if error is None else held.without_promises(error))

        return release

    def _write(self, out: bytes | bytearray) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._valve.is_choked and self._has_too_much(transport):
            log.warning("%s does not read its replies: disconnected", self.session.address)
            transport.abort()
            return
        transport.write(out)
        if self.session.is_closing and not self._owes_replies:
            self._hang_up()
        elif not self._valve.is_open:
            self._set_reading()

    def _has_too_much(self, transport: asyncio.Transport) -> bool:
        """Only what was unread before counts: the replies of one tick alone may exceed the limit."""
        return transport.get_write_buffer_size() > self._server.settings.tcp_max_write_queue_bytes

    def pause_writing(self) -> None:
        self._valve.is_choked = True
        self.session.choke(True)
        self._set_reading()

    def resume_writing(self) -> None:
        self._valve.is_choked = False
        self.session.choke(False)
        self._set_reading()

    def _set_reading(self) -> None:
        self._valve.set(self.transport, self.session)

    def hear_no_more(self) -> None:
        self._has_heard_all = True

    def _hang_up(self) -> None:
        """Close behind the last reply; a client that goes on sending gets a moment to read it."""
        if self._is_half_closed and self.transport is not None:
            self.transport.close()
        else:
            self.close()
            see_off(self, self._server.loop)

    def close(self) -> None:
        if self.transport is not None:
            self.transport = part(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._partial_timer is not None:
            self._partial_timer.cancel()
        if self._stranger_timer is not None:
            self._stranger_timer.cancel()
        self.transport = None
        self.session.close()
        self._server.left(self)
        self._server.ticker.give_back(self.session)


def _encode_error(error: HeadraceError) -> bytes:
    """The frame of an error that answers no command."""
    return encode_frame(ErrorReply.of(error))


class TcpServer(Listener[Connection]):
    """The listener of the binary protocol; its ticker serves all listeners."""

    def __init__(self, engine: Engine, settings: Settings, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(engine, settings, Ticker(engine, loop, vigil=Vigil(loop)), tls)

    async def start(self) -> None:
        await self._listen(lambda: Connection(self), self.settings.tcp_port)
        self.ticker.start()
