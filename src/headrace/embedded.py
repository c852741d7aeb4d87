"""The engine in this process: the same commands as over a socket, without the socket.

An `EmbeddedEngine` owns a database file (or memory) and ends ticks as the server does: the commands of one turn of the
loop share one commit, and none is answered before it. Each client of it is a `LocalPeer`, as each connection of a
server is a session. Commands and replies take the form they have on the wire, so limits, errors and types are those of
a server, and no caller holds a reference into the engine.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from headrace.backends.local.backend import BOUNDED_LOG, LocalBackend
from headrace.client.channel import Channel, Done, Hear, LinkChange, LinkHealth, decode_event
from headrace.client.conversation import reply_decoder
from headrace.client.line import mailbox_of
from headrace.clock import Clock, SystemClock
from headrace.commands._base import Command, Reply
from headrace.engine.engine import Engine
from headrace.errors import ClientClosed, CommandTimeout, HeadraceError, InvalidCommand, StorageUnavailable
from headrace.model import Event
from headrace.server.driving import Driver, Work
from headrace.server.projections import tcp_event
from headrace.server.ticker import Release, Ticker
from headrace.views import encode
from headrace.wire import decode_command

if TYPE_CHECKING:
    from headrace.backends import AnyBackend

R = TypeVar("R", bound=Reply)


class EmbeddedEngine:
    """An engine on the running loop. `path` None keeps everything in memory, `backend` somewhere else."""

    ticker_type: type[Ticker] = Ticker

    def __init__(self, path: Path | None, clock: Clock | None = None, *, backend: AnyBackend | None = None) -> None:
        clock = clock or SystemClock()
        self.engine = Engine(backend or LocalBackend(path, clock=clock, log_limits=BOUNDED_LOG), clock)
        self.ticker: Ticker
        self._peers: set[LocalPeer] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.ticker = self.ticker_type(self.engine, loop, mailbox_of(loop).at_end)
        await self.engine.start()
        self.ticker.start()

    def open_peer(self, hear: Hear | None = None, *, owns_home: bool = False) -> LocalPeer:
        """A channel to this engine; one that owns it stops it when it is closed."""
        peer = LocalPeer(self, hear, owns_home)
        self._peers.add(peer)
        return peer

    def drop_peer(self, peer: LocalPeer) -> None:
        self._peers.discard(peer)
        self.ticker.give_back(peer)

    async def stop(self) -> None:
        for peer in list(self._peers):
            await peer.close()
        while self.ticker.is_busy:  # noqa: ASYNC110 - only until this tick and the syncs in flight end
            await asyncio.sleep(0.001)
        self.ticker.stop()
        await self.engine.stop()


class Asked:
    """A command in flight: whom to notify of its outcome, once."""

    __slots__ = ("_done", "decode", "timeout", "timer")

    def __init__(self, command: Command[Any], done: Done[Any], timeout: float) -> None:
        self._done: Done[Any] | None = done
        self.decode = reply_decoder(type(command))
        self.timeout = timeout
        self.timer: asyncio.TimerHandle | None = None

    def end(self, outcome: Any) -> None:
        done, self._done = self._done, None
        if self.timer is not None:
            self.timer.cancel()
        if done is not None:
            done(outcome)


class LocalPeer(Driver[Asked]):
    """A channel to an engine on the same loop, and an outlet of its ticker."""

    def __init__(self, home: EmbeddedEngine, hear: Hear | None, owns_home: bool) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(home.engine, "embedded", stir=partial(home.ticker.stir, self), later=loop.call_soon, held={})
        self.home = home
        self._owns_home = owns_home
        self._loop = loop
        self._hear = hear
        self._answers: list[tuple[Asked, Any]] = []
        self._durable: list[tuple[Asked, Any]] = []
        self._suspended: set[Asked] = set()
        self._is_closed = False

    # -- Channel -------------------------------------------------------------------------------------------------------

    def submit(self, command: Command[R], done: Done[R], timeout: float) -> None:
        if self._is_closed:
            done(ClientClosed())
            return
        try:
            checked = decode_command(encode(command))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            done(InvalidCommand(f"{type(command).__name__} cannot be sent: {error}"))
        except InvalidCommand as error:
            done(InvalidCommand(str(error)))
        else:
            self._start(checked, Asked(command, done, timeout))

    @property
    def health(self) -> list[LinkHealth]:
        return []

    def force_reconnect(self) -> None:
        """There is no connection to lose."""

    def open_own(self, hear: Hear | None = None, changed: LinkChange | None = None) -> Channel:
        peer = self.home.open_peer(hear)
        if changed is not None:
            self._loop.call_soon(changed, True)
        return peer

    async def start(self) -> None:
        """An engine in the same process answers from the beginning."""

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._engine.unsubscribe(self)
        self._give_up()
        self.home.drop_peer(self)
        for asked in list(self._suspended):
            asked.end(ClientClosed())
        if self._owns_home:
            await self.home.stop()

    # -- Driver --------------------------------------------------------------------------------------------------------

    def _suspend(self, work: Work, suspended: object, command: Command[Any], key: Asked) -> None:
        name = type(command).__struct_config__.tag
        late = CommandTimeout(f"{name} got no answer within {key.timeout:g} s")
        key.timer = self._loop.call_later(key.timeout, key.end, late)
        self._suspended.add(key)
        super()._suspend(work, suspended, command, key)

    def _ended(self, key: Asked) -> None:
        self._suspended.discard(key)

    def _answer(self, reply: Struct, key: Asked) -> None:
        self._collect(key, key.decode(encode(reply)))

    def _refuse(self, error: HeadraceError, key: Asked) -> None:
        self._collect(key, error)

    def _collect(self, asked: Asked, outcome: Any) -> None:
        if self._backend.sync_requests:
            self._backend.sync_requests = 0
            self._durable.append((asked, outcome))
        else:
            self._answers.append((asked, outcome))
        self._stir()

    def deliver(self, event: Event, body: bytes | None) -> None:
        shown = tcp_event(event, body)
        if shown is not None and self._hear is not None:
            self._hear(decode_event(encode(shown)))

    # -- Outlet: what the ticker lets out ------------------------------------------------------------------------------

    @property
    def is_durable(self) -> bool:
        return bool(self._durable)

    def hold(self) -> Release:
        held, self._durable = self._durable, []

        def release(error: StorageUnavailable | None) -> None:
            for asked, outcome in held:
                asked.end(outcome if error is None else error)

        return release

    def spoil(self, error: StorageUnavailable) -> None:
        self._answers = [(asked, error) for asked, _ in self._answers + self._durable]
        self._durable = []

    def flush(self) -> None:
        # A promise that nobody held back needs no sync: memory has no disk.
        answers, self._answers, self._durable = self._answers + self._durable, [], []
        for asked, outcome in answers:
            asked.end(outcome)
