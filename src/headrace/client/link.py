"""One socket to a server that comes back by itself: connect, greet, notice death, wait, try again.

What to do when is `policy`; what is said is `conversation`; this is the part that does I/O. Commands that were under
way when the link broke fail at once ("Connection lost"); those that had not been sent yet go over the next connection,
as far as their time allows. A server that was never reached is reported at once instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any, Final, TypeVar, cast

from msgspec import Raw

from headrace.client.channel import Channel, Hear, LinkChange, decode_event
from headrace.client.conversation import Conversation, Done, Question
from headrace.client.policy import ConnectionOptions, LinkState, Vitals, reconnect_delay
from headrace.commands._base import Command, Reply
from headrace.commands.monitoring import Ping
from headrace.errors import ClientClosed, CommandTimeout, ConnectionLost, HeadraceError, NotAuthenticated

log: Final = logging.getLogger("headrace.client")
R = TypeVar("R", bound=Reply)


class Link(asyncio.Protocol):
    """Lives on one loop. `start` begins; `close` ends for good."""

    def __init__(self, options: ConnectionOptions, hear: Hear | None = None, changed: LinkChange | None = None) -> None:
        self.options = options
        self.state = LinkState.DISCONNECTED
        self.latency: float | None = None
        """Seconds that the last ping took."""
        self.errors = 0
        """How often the link was lost or could not be made."""
        self._loop = asyncio.get_running_loop()
        self._hear = hear
        self._changed = changed
        self._vitals = Vitals(options)
        self._conversation = Conversation(options, self._deliver)
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.Future[None] | None = None
        self._lost = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._is_stirred = False
        self._is_choked = False
        self._was_connected = False
        self._timer: asyncio.TimerHandle | None = None
        self._ping_timer: asyncio.TimerHandle | None = None

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        return self._life is not None

    @property
    def in_flight(self) -> int:
        return self._conversation.in_flight

    @property
    def has_room_to_block(self) -> bool:
        return self._conversation.has_room_to_block

    def submit(self, command: Command[R], done: Done[R], timeout: float) -> None:
        question = Question(command, done)
        if self._life is not None and self._life.done():
            question.end(ClientClosed())
            return
        question.timeout = timeout
        question.deadline = self._loop.time() + timeout
        self.begin()
        self._conversation.ask(question)
        self._watch(question.deadline)
        self._stir()

    def _stir(self) -> None:
        """Send what this turn of the loop brings together with one write."""
        if not self._is_stirred and not self._is_choked and self._transport is not None:
            self._is_stirred = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_stirred = False
        if self._transport is not None and not self._is_choked:
            out = self._conversation.take()
            if out:
                self._transport.write(out)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _watch(self, deadline: float) -> None:
        if self._timer is None or deadline < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        left = float("inf")
        is_dead = False
        for question in self._conversation.open_questions():
            if question.deadline > now:
                left = min(left, question.deadline)
                continue
            is_dead |= bool(question.number) and self._vitals.command_timed_out()
            name = type(question.command).__struct_config__.tag
            question.end(CommandTimeout(f"{name} got no answer within {question.timeout:g} s"))
        if left < float("inf"):
            self._watch(left)
        if is_dead:
            self.force_reconnect()

    def _plan_ping(self) -> None:
        if self.options.ping_interval > 0:
            self._ping_timer = self._loop.call_later(self.options.ping_interval, self._ping)

    def _ping(self) -> None:
        asked_at = self._loop.time()

        def done(outcome: object) -> None:
            if not isinstance(outcome, HeadraceError):
                self.latency = self._loop.time() - asked_at
            elif isinstance(outcome, CommandTimeout) and self._vitals.ping_failed():
                self.force_reconnect()
                return
            if self.state is LinkState.CONNECTED:
                self._plan_ping()

        self.submit(Ping(), done, self.options.command_timeout)

    # -- the life of the link ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._life is None:
            self._life = self._loop.create_task(self._live(), name="headrace-link")

    async def start(self) -> None:
        """Return when the link stands; raise when the first try failed."""
        self.begin()
        await asyncio.shield(self._first)

    async def _live(self) -> None:
        attempt = 0
        while True:
            self.state = LinkState.RECONNECTING if self._was_connected else LinkState.CONNECTING
            try:
                await self._connect()
                attempt = 0
                await self._lost.wait()
            except (OSError, TimeoutError, HeadraceError) as error:
                self._failed(error)
            self.errors += 1
            self._hang_up(ConnectionLost())
            self.state = LinkState.RECONNECTING
            await asyncio.sleep(reconnect_delay(attempt))
            attempt += 1

    async def _connect(self) -> None:
        self._lost.clear()
        self._greeting = self._loop.create_future()
        async with asyncio.timeout(self.options.connect_timeout):
            await self._loop.create_connection(
                lambda: self,
                self.options.host,
                self.options.port,
                ssl=self.options.tls,
                server_hostname=self.options.host if self.options.tls else None,
            )
            await self._greeting
        self.state = LinkState.CONNECTED
        self._was_connected = True
        self._vitals.success()
        self._plan_ping()
        if not self._first.done():
            self._first.set_result(None)
        if self._changed is not None:
            self._changed(True)

    def _failed(self, error: BaseException) -> None:
        """A try to connect failed. Who has waited for the very first one, or cannot be let in, is told why."""
        where = f"{self.options.host}:{self.options.port}"
        silence = f"no answer within {self.options.connect_timeout:g} s"
        reason = getattr(error, "strerror", None) or str(error) or silence
        told = error if isinstance(error, NotAuthenticated) else ConnectionLost(f"Cannot reach {where}: {reason}")
        log.log(logging.DEBUG if self._was_connected else logging.INFO, "%s", told)
        if not self._was_connected or isinstance(error, NotAuthenticated):
            for question in self._conversation.take_waiting():
                question.end(told)
        if not self._first.done():
            self._first.set_exception(told)
            self._first.exception()  # nobody may be waiting for it

    def force_reconnect(self) -> None:
        """Give this connection up now and make another one."""
        if self._transport is not None:
            self._transport.abort()

    def _hang_up(self, error: HeadraceError) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        was_connected = self.state is LinkState.CONNECTED
        old, self._conversation = self._conversation, Conversation(self.options, self._deliver)
        for question in old.take_waiting():
            self._conversation.ask(question)
        old.lose(error)
        if was_connected and self._changed is not None:
            self._changed(False)

    async def close(self) -> None:
        if self._life is not None:
            self._life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._life
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        for question in self._conversation.open_questions():
            question.end(ClientClosed())
        self.state = LinkState.DISCONNECTED

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by inheritance
        self._is_choked = False
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._conversation.greet()
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._vitals.success()
        try:
            self._conversation.receive(data)
        except HeadraceError as error:
            log.warning("%s", error)
            self.force_reconnect()
            return
        self._stir()
        if self._greeting is not None and not self._greeting.done():
            if self._conversation.failure is not None:
                self._greeting.set_exception(self._conversation.failure)
            elif self._conversation.is_ready:
                self._greeting.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(ConnectionLost("the server closed the connection"))
        self._lost.set()

    def pause_writing(self) -> None:
        self._is_choked = True

    def resume_writing(self) -> None:
        self._is_choked = False
        self._stir()

    def _deliver(self, event: Raw) -> None:
        if self._hear is not None:
            self._hear(decode_event(event))

    def open_own(self, hear: Hear | None = None, changed: LinkChange | None = None) -> Channel:
        return Link(self.options, hear, changed)


def describe(link: Link) -> dict[str, Any]:
    """How one socket is doing."""
    return {"state": link.state.value, "latency": link.latency, "errors": link.errors, "inFlight": link.in_flight}
