"""The TCP shell: sockets and timers. All rules of the protocol are in `session`, the commit per tick in `ticker`."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.errors import Refused, StorageUnavailable
from headrace.server.session import Budget, Session
from headrace.server.ticker import Parcels, Release, Ticker
from headrace.server.valve import Valve
from headrace.wire import encode_error

log: Final = logging.getLogger("headrace.server")

_BACKLOG_LIMIT: Final = 200


class Connection(asyncio.Protocol):
    """Feeds a session from a socket and a socket from a session."""

    def __init__(self, server: TcpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._partial_timer: asyncio.TimerHandle | None = None
        self._valve = Valve(_BACKLOG_LIMIT)
        self._parcels = Parcels(self._write)
        self.session: Session

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        server = self._server
        peer = transport.get_extra_info("peername")
        self.session = Session(
            server.engine,
            str(peer[0]) if peer else "",
            stir=lambda _: server.ticker.stir(self),
            later=server.loop.call_soon,
            budget=server.new_budget(),
        )
        server.joined(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if server.is_full:
            self._transport.write(encode_error(Refused("Too many connections"), b""))  # type: ignore[union-attr]
            self._transport.close()  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        session = self.session
        if session.is_closing:
            return
        session.receive(data)
        if session.has_partial_frame or self._partial_timer is not None:
            self._watch_partial()
        if session.backlog_size > _BACKLOG_LIMIT:
            self._set_reading()

    def _watch_partial(self) -> None:
        """A frame must make progress; a connection that is idle between frames may stay."""
        if self._partial_timer is not None:
            self._partial_timer.cancel()
            self._partial_timer = None
        timeout_ms = self._server.settings.tcp_idle_timeout_ms
        if timeout_ms and self.session.has_partial_frame:
            self._partial_timer = self._server.loop.call_later(timeout_ms / 1000, self._abort)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

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
        """Take what would leave now, to be let go after a sync; what comes later queues up behind it."""
        held = self.session.take_held()
        fill = self._parcels.hold()

        def let_go(error: StorageUnavailable | None) -> None:
            fill(held.out if error is None else held.without_promises(error))

        return let_go

    def _write(self, out: bytes | bytearray) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(out)
        if self.session.is_closing:
            transport.close()
        elif (
            self._valve.is_choked
            and transport.get_write_buffer_size() > self._server.settings.tcp_max_write_queue_bytes
        ):
            log.warning("%s does not read its replies: disconnected", self.session.address)
            transport.abort()
        elif not self._valve.is_open:
            self._set_reading()

    def pause_writing(self) -> None:
        self._valve.is_choked = True
        self.session.choke(True)
        self._set_reading()

    def resume_writing(self) -> None:
        self._valve.is_choked = False
        self.session.choke(False)
        self._set_reading()

    def _set_reading(self) -> None:
        self._valve.set(self._transport, self.session.backlog_size)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._partial_timer is not None:
            self._partial_timer.cancel()
        self._transport = None
        self.session.close()
        self._server.left(self)
        self._server.ticker.give_back(self.session)


class TcpServer:
    def __init__(self, engine: Engine, settings: Settings, tls: ssl.SSLContext | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.ticker = Ticker(engine, self.loop)
        self._tls = tls
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def is_full(self) -> bool:
        return len(self._connections) > self.settings.max_connections

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def new_budget(self) -> Budget | None:
        limit = self.settings.rate_limit_max_requests
        return Budget(limit, self.settings.rate_limit_window_ms) if limit else None

    def joined(self, connection: Connection) -> None:
        self._connections.add(connection)

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)

    async def start(self) -> None:
        make: Callable[[], Connection] = lambda: Connection(self)  # noqa: E731
        self._server = await self.loop.create_server(
            make, self.settings.bind_host, self.settings.tcp_port, ssl=self._tls, backlog=1024
        )
        self.ticker.start()

    @property
    def _is_busy(self) -> bool:
        return self.ticker.is_busy or any(connection.session.is_busy for connection in self._connections)

    async def stop(self) -> None:
        """Stop listening, end long polls, let the replies in flight leave, close what is left."""
        deadline = self.loop.time() + self.settings.shutdown_timeout_ms / 1000
        if self._server is not None:
            self._server.close()
        self.engine.end_waiting()
        self.ticker.schedule()
        while self._is_busy and self.loop.time() < deadline:  # noqa: ASYNC110 - many parts are busy, none tells
            await asyncio.sleep(0.005)
        for connection in list(self._connections):
            connection.close()
        while self._connections and self.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection._abort()
        await asyncio.sleep(0)
        self.ticker.stop()
