"""One socket to a server that reconnects by itself: connect, shake hands, detect death, back off, try again.

`policy` decides what to do when, `conversation` what is said; this is the part that does I/O. Commands that were in
flight when the link broke fail at once ("Connection lost"); those not yet sent go over the next connection,
as far as their timeout allows. A server that was never reached is reported at once instead, unless the link is patient.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import Any, Final, TypeVar, cast

from msgspec import Raw

from headrace.client.channel import Channel, Done, Hear, LinkChange, LinkHealth, decode_event
from headrace.client.conversation import Conversation, Question
from headrace.client.line import mailbox_of
from headrace.client.policy import ConnectionOptions, LinkState, Vitals, reconnect_delay
from headrace.commands._base import Command, Reply
from headrace.commands.monitoring import Ping
from headrace.errors import (
    ClientClosed,
    ClientError,
    CommandTimeout,
    ConnectionLost,
    HeadraceError,
    NotAuthenticated,
    ProtocolViolation,
    Unreachable,
)

log: Final = logging.getLogger("headrace.client")
R = TypeVar("R", bound=Reply)

_OTHER_NAME: Final = (62, 64)
"""OpenSSL's codes of a certificate that is valid, but for another host or address."""


class Link(asyncio.Protocol):
    """Lives on one loop. `start` begins; `close` ends for good."""

    def __init__(
        self,
        options: ConnectionOptions,
        hear: Hear | None = None,
        changed: LinkChange | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        self.options = options
        self.state = LinkState.DISCONNECTED
        self.latency: float | None = None
        """Seconds that the handshake or the last ping took."""
        self.errors = 0
        """How often the link was lost or could not be made."""
        self.is_pipelined = options.pipelining
        """Whether replies may overtake each other, as far as is known."""
        self._is_patient = is_patient
        """Whether the server was reached before: then it is away and will come back, and commands wait for it."""
        self._loop = asyncio.get_running_loop()
        self._at_end = mailbox_of(self._loop).at_end
        self._hear = hear
        self._changed = changed
        self._vitals = Vitals(options)
        self._conversation = Conversation(options, self._deliver)
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.Future[None] | None = None
        self._lost = asyncio.Event()
        self._hurry = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._is_stirred = False
        self._is_choked = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"{self.options.host}:{self.options.port}"

    @property
    def is_started(self) -> bool:
        return self._life is not None

    @property
    def health(self) -> list[LinkHealth]:
        return [LinkHealth(self.state, self.latency, self.errors, self._conversation.in_flight)]

    @property
    def blocking(self) -> int:
        return self._conversation.blocking

    def submit(self, command: Command[R], done: Done[R], timeout: float) -> None:
        question = Question(command, done)
        if self._is_closed:
            question.end(ClientClosed())
            return
        now = self._loop.time()
        question.timeout = timeout
        question.deadline = now + timeout
        wait_ms = getattr(command, "timeout", None) if question.is_blocking else None
        if isinstance(wait_ms, int | float) and wait_ms > 0:
            # Whoever waits five seconds for an event waits no longer than that for a connection.
            question.send_by = now + wait_ms / 1000
        self.begin()
        self._conversation.ask(question)
        self._watch(question.due)
        self._stir()

    def _stir(self) -> None:
        """Send what this turn of the loop brings together, with one write."""
        if not self._is_stirred and not self._is_choked and self._transport is not None:
            self._is_stirred = True
            self._at_end(self._flush)

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
        is_dead = False
        for question in self._conversation.overdue(self._loop.time()):
            # One that was never sent says nothing about the link.
            is_dead |= bool(question.number) and self._vitals.command_timed_out()
            question.end(self._lateness(question))
        left = self._conversation.next_deadline()
        if left < float("inf"):
            self._watch(left)
        if is_dead:
            self.force_reconnect()

    def _lateness(self, question: Question[Any]) -> HeadraceError:
        waited = question.timeout - (question.deadline - question.due)
        if question.number == 0 and self.state is not LinkState.CONNECTED:
            return Unreachable(f"No connection to {self._where} within {waited:g} s")
        name = type(question.command).__struct_config__.tag
        return CommandTimeout(f"{name} got no answer within {waited:g} s")

    def _plan_ping(self) -> None:
        """Ask when nothing was heard for an interval; a link that carries replies proves itself."""
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self.options.ping_interval > 0:
            self._ping_timer = self._loop.call_later(self.options.ping_interval, self._ping_if_silent)

    def _ping_if_silent(self) -> None:
        due = self._heard_at + self.options.ping_interval
        if due > self._loop.time():
            self._ping_timer = self._loop.call_at(due, self._ping_if_silent)
        else:
            self._ping()

    def _ping(self) -> None:
        asked_at = self._loop.time()

        def done(outcome: object) -> None:
            if not isinstance(outcome, ClientError):
                self.latency = self._loop.time() - asked_at
            if isinstance(outcome, CommandTimeout) and self._vitals.ping_failed():
                self.force_reconnect()
            elif self.state is LinkState.CONNECTED:
                self._plan_ping()

        self.submit(Ping(), done, self.options.command_timeout)

    # -- the life of the link ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._life is None:
            self._life = self._loop.create_task(self._live(), name="headrace-link")

    async def start(self) -> None:
        """Return when the link is up; raise if the first try failed."""
        self.begin()
        await asyncio.shield(self._first)

    async def _live(self) -> None:
        attempt = 0
        self.state = LinkState.CONNECTING
        while True:
            try:
                await self._connect()
                attempt = 0
                await self._lost.wait()
            except (OSError, TimeoutError, ValueError, HeadraceError) as error:  # ValueError: no such name can be
                self._failed(error)
            self.errors += 1
            self._hang_up()
            await self._pause(reconnect_delay(attempt))
            attempt += 1

    async def _pause(self, delay: float) -> None:
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._hurry.wait()

    async def _connect(self) -> None:
        self._lost.clear()
        self._greeting = self._loop.create_future()
        began = self._loop.time()
        async with asyncio.timeout(self.options.connect_timeout):
            await self._open_socket()
            await self._greeting
        self.state = LinkState.CONNECTED
        self.latency = self._loop.time() - began
        self.is_pipelined = self._conversation.is_pipelined
        self._is_patient = True
        self._vitals.success()
        self._plan_ping()
        if not self._first.done():
            self._first.set_result(None)
        if self._changed is not None:
            self._changed(True)

    async def _open_socket(self) -> None:
        try:
            await self._loop.create_connection(
                lambda: self,
                self.options.host,
                self.options.port,
                ssl=self.options.tls,
                server_hostname=self.options.host if self.options.tls else None,
            )
        except BaseException:
            self._transport = None  # it is closed, if there was one: uvloop does not tell, and raises when it is used
            if self._greeting is not None:
                self._greeting.cancel()
            raise

    def _failed(self, error: BaseException) -> None:
        """A try to connect failed. If it was the first one, or the token is refused, those who wait are told why."""
        silence = f"no answer within {self.options.connect_timeout:g} s"
        reason = getattr(error, "strerror", None) or str(error) or silence
        told = error if isinstance(error, NotAuthenticated) else Unreachable(f"Cannot reach {self._where}: {reason}")
        if (advice := self._advice(error)) is not None:
            told.add_note(advice)
        log.debug("%s", told)
        if not self._is_patient or isinstance(error, NotAuthenticated):
            for question in self._conversation.take_waiting():
                question.end(told)
        self._fail_first(told)

    def _advice(self, error: BaseException) -> str | None:
        """What to do when something answers there, but not in the way that the URL says."""
        if isinstance(error, ProtocolViolation):
            return "a URL names the TCP port: the first one that `headrace serve` prints, 6789 by default"
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in _OTHER_NAME:
                return "the certificate is for another name: write the one that it is for in the URL"
            return "SSL_CERT_FILE names a file with certificates that are trusted"
        if isinstance(error, ssl.SSLError):
            return "if the server has no certificate, write headrace:// instead of headraces://"
        if isinstance(error, ConnectionLost) and self.options.tls is None:
            return "if the server has a certificate, write headraces:// instead of headrace://"
        return None

    def _fail_first(self, error: HeadraceError) -> None:
        if not self._first.done():
            self._first.set_exception(error)
            self._first.exception()  # nobody may be waiting for it

    def hurry(self) -> None:
        """If it is backing off, try to connect now."""
        self._hurry.set()

    def force_reconnect(self) -> None:
        """Close this connection and open another one; if it is backing off, try now."""
        self.hurry()
        self._conversation.is_ready = False  # what is asked from now on goes over the next connection
        if self._transport is not None:
            self._transport.abort()

    def _hang_up(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        was_connected = self.state is LinkState.CONNECTED
        self.state = LinkState.RECONNECTING
        old, self._conversation = self._conversation, Conversation(self.options, self._deliver)
        for question in old.take_waiting():
            self._conversation.ask(question)
        old.lose(ConnectionLost())
        if was_connected and self._changed is not None:
            self._changed(False)

    async def close(self) -> None:
        self._is_closed = True
        if self._life is not None:
            self._life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._life
        for timer in (self._timer, self._ping_timer):
            if timer is not None:
                timer.cancel()
        self._flush()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self.state = LinkState.DISCONNECTED
        self._conversation.end(ClientClosed())
        self._fail_first(ClientClosed())

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._greeting is None or self._greeting.done():
            transport.close()  # too late: nobody waits for it any more
            return
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by inheritance
        self._is_choked = False
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._conversation.greet()
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        self._vitals.success()
        try:
            self._conversation.receive(data)
        except HeadraceError as error:
            log.warning("%s: %s", self._where, error)
            self._end_greeting(error)
            self.force_reconnect()
            return
        if self._conversation.has_output:
            self._stir()
        if self._conversation.failure is not None or self._conversation.is_ready:
            self._end_greeting(self._conversation.failure)

    def _end_greeting(self, failure: HeadraceError | None) -> None:
        if self._greeting is None or self._greeting.done():
            return
        if failure is None:
            self._greeting.set_result(None)
        else:
            self._greeting.set_exception(failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end_greeting(ConnectionLost("the server closed the connection"))
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
