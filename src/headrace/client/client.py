"""The two ways into a channel: `ask` for coroutines, `ask_blocking` for threads. All that users touch builds on it.

A client is shared and reference-counted: objects of one URL use the same channel, and the last one to close closes it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from headrace.client.channel import Channel, Done, LinkHealth
from headrace.client.line import Line, Mailbox, mailbox_of, shared_line
from headrace.clock import Clock, SystemClock
from headrace.commands._base import BY_TYPE, Command, Reply
from headrace.durations import Duration, seconds
from headrace.errors import ClientClosed, HeadraceError, InvalidCommand

R = TypeVar("R", bound=Reply)

Make = Callable[[], Coroutine[Any, Any, Channel]]

DEFAULT_TIMEOUT: Final = 30.0


_left_to_parent: Final[list[object]] = []


class Near(Protocol):
    """A shortcut from the caller's loop that lets some commands bypass the line."""

    async def ask(self, command: Any, usual: Callable[[], Awaitable[Any]]) -> Any:
        """The reply, from here or from `usual`."""

    def close(self) -> None: ...


class Client:
    """A channel on the line of this process. `make` is called there, with the first command."""

    def __init__(self, make: Make, timeout: float = DEFAULT_TIMEOUT, near: Near | None = None) -> None:
        self._make = self._own_make = make
        self._near = near
        self.clock: Clock = SystemClock()
        """What moments ("run it at three") are compared with."""
        self.timeout = timeout
        """Seconds after which a command without an answer fails."""
        self.is_closed = False
        """What is asked from now on is refused."""
        # The rest is touched on the line only.
        self.at_end: set[Callable[[], object]] = set()
        """What is called when it is closed: workers and listeners have channels of their own, and end with it."""
        self._home: Line | None = None
        self._channel: Channel | None = None
        self._opening: asyncio.Task[Channel] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._has_ended = False

    @property
    def line(self) -> Line:
        return shared_line()

    # -- asking --------------------------------------------------------------------------------------------------------

    async def ask(self, command: Command[R], timeout: Duration | None = None) -> R:
        if self._near is None or self.is_closed:
            return await self._ask_line(command, timeout)
        reply: R = await self._near.ask(command, partial(self._ask_line, command, timeout))
        return reply

    async def _ask_line(self, command: Command[R], timeout: Duration | None) -> R:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._post(command, _Reply(mailbox_of(loop), future), timeout)
        return await future

    def ask_blocking(self, command: Command[R], timeout: Duration | None = None) -> R:
        if self.line.is_here:
            raise RuntimeError("a blocking call from the thread that has to answer it would wait for ever")
        # A lock that the answer opens: a tenth of the price of a Future, which is made for more than one who waits.
        told: list[R | HeadraceError] = []
        gate = threading.Lock()
        gate.acquire()

        def done(outcome: R | HeadraceError) -> None:
            told.append(outcome)
            gate.release()

        self._post(command, done, timeout)
        gate.acquire()
        return _result(told[0])

    def _post(self, command: Command[R], done: Done[R], timeout: Duration | None) -> None:
        if self.is_closed:
            raise ClientClosed
        if type(command) not in BY_TYPE:  # what fails on the line can be told to nobody
            raise InvalidCommand(f"{command!r} is no command: make one of headrace.commands, such as Ping()")
        span = self.timeout if timeout is None else seconds(timeout, "timeout")
        self.line.post(partial(self.submit, command, done, span))

    # -- on the line ---------------------------------------------------------------------------------------------------

    def submit(self, command: Command[R], done: Done[R], timeout: float) -> None:
        """Send a command from the line's own thread."""
        channel = self._standing_channel()
        if channel is not None:
            channel.submit(command, done, timeout)
        elif self._has_ended:
            done(ClientClosed())
        else:
            self._open().add_done_callback(lambda opened: _submit_opened(opened, command, done, timeout))

    async def channel(self) -> Channel:
        """The channel itself, for those who live on the line: workers and listeners."""
        if self._has_ended:
            raise ClientClosed
        channel = self._standing_channel()
        try:
            return await asyncio.shield(self._open()) if channel is None else channel
        except HeadraceError as error:
            raise _own(error) from error.__cause__

    def _standing_channel(self) -> Channel | None:
        if self._home is not shared_line():
            # A forked child has neither the thread nor the sockets of its parent. They are left alone, not closed.
            if self._home is not None:
                _left_to_parent.append((self._channel, self._opening, self._ending, self.at_end))
            self._home, self._channel, self._opening, self._ending = shared_line(), None, None, None
            self.at_end = set()
        return self._channel

    def _open(self) -> asyncio.Task[Channel]:
        """Make the channel; a failure is not kept: the next one who asks tries again."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._make_after(self._ending))
            self._opening.add_done_callback(self._opened)
        return self._opening

    async def _make_after(self, ending: asyncio.Task[None] | None) -> Channel:
        """What was there before has to be closed: a file belongs to one engine at a time."""
        if ending is not None:
            await asyncio.wait([ending])
        return await self._make()

    def _opened(self, opening: asyncio.Task[Channel]) -> None:
        failure = opening.exception()
        if self._opening is not opening:
            return  # it was closed meanwhile, by whoever waits for it
        self._opening = None
        if failure is None:
            self._channel = opening.result()
            self.line.closers[self] = self._end_with_line

    def _end(self) -> Coroutine[Any, Any, None]:
        """Refuse further commands; what is returned can be awaited until everything is closed."""
        self._has_ended = True
        self._standing_channel()
        self.line.closers.pop(self, None)
        while self.at_end:
            self.at_end.pop()()
        closing = self._close_parts(self._ending, self._opening, self._channel, self._near)
        self._opening = self._channel = None
        self._ending = asyncio.get_running_loop().create_task(closing)
        return _finish(self._ending)

    async def _close_parts(
        self,
        before: asyncio.Task[None] | None,
        opening: asyncio.Task[Channel] | None,
        channel: Channel | None,
        near: Near | None,
    ) -> None:
        waited_for = [task for task in (before, opening) if task is not None]
        if waited_for:
            await asyncio.wait(waited_for)
        if opening is not None and opening.exception() is None:
            channel = opening.result()
        if near is not None:
            near.close()
        if channel is not None:
            await channel.close()

    def _end_with_line(self) -> Coroutine[Any, Any, None]:
        self.is_closed = True
        return self._end()

    def _begin_anew(self, like: Client) -> None:
        self._make, self._own_make, self._near = like._make, like._own_make, like._near
        self.timeout = like.timeout
        self._has_ended = False

    # -- opening and closing -------------------------------------------------------------------------------------------

    def connect(self) -> Future[Channel]:
        """Connect now, and raise if the peer cannot be reached."""
        return self.line.run(self.channel)

    def close(self) -> Future[None]:
        """Close the channel; further commands are refused."""
        self.is_closed = True
        return self.line.run(self._end)

    def reopen(self, like: Client) -> None:
        """Accept commands again, as a new client would: everything created from this one can be used again."""
        self.is_closed = False
        self.line.post(partial(self._begin_anew, like))

    def divert(self, make: Make | None, clock: Clock | None = None) -> Future[None]:
        """Close the channel and open the next one elsewhere: a test's engine in place of the real one. None: as before.

        All objects that share this client follow.
        """

        async def change() -> None:
            self.is_closed = True
            await self._end()
            self.is_closed = self._has_ended = False
            self._make = make or self._own_make
            self.clock = clock or SystemClock()

        return self.line.run(change)

    # -- the sockets ---------------------------------------------------------------------------------------------------

    @property
    def health(self) -> list[LinkHealth]:
        """The state, latency and errors of each socket. An embedded engine has none."""
        return [] if self._channel is None else self._channel.health

    def force_reconnect(self) -> None:
        """Close all sockets and open new ones: for when you know that the network has changed."""
        self.line.post(self._force_reconnect)

    def _force_reconnect(self) -> None:
        channel = self._standing_channel()
        if channel is not None:
            channel.force_reconnect()


def _submit_opened(opened: asyncio.Future[Channel], command: Command[Any], done: Any, timeout: float) -> None:
    error = opened.exception()
    if error is None:
        opened.result().submit(command, done, timeout)
    else:
        done(error if isinstance(error, HeadraceError) else HeadraceError(str(error)))


def _own(error: HeadraceError) -> HeadraceError:
    """A lost connection is one error for all who wait: each raises a copy, or their tracebacks and notes would mix."""
    own = copy.deepcopy(error)
    own.__cause__ = error.__cause__
    return own


def _result(outcome: R | HeadraceError) -> R:
    if isinstance(outcome, HeadraceError):
        raise _own(outcome)
    return outcome


def _settle(future: Any, outcome: Any) -> None:
    if future.done():
        return  # whoever asked was cancelled
    if isinstance(outcome, HeadraceError):
        future.set_exception(_own(outcome))
    else:
        future.set_result(outcome)


class _Reply:
    """Where an answer goes: to the loop of who asked."""

    __slots__ = ("_future", "_mailbox")

    def __init__(self, mailbox: Mailbox, future: asyncio.Future[Any]) -> None:
        self._mailbox = mailbox
        self._future = future

    def __call__(self, outcome: Any) -> None:
        try:
            self._mailbox.post(partial(_settle, self._future, outcome))
        except RuntimeError:
            # Who asked has closed its loop meanwhile: then nobody waits.
            if not self._mailbox.loop.is_closed():
                raise

    @property
    def is_unwanted(self) -> bool:
        """Whether the caller was cancelled meanwhile: then a command that waits for a connection is not sent."""
        return self._future.cancelled()


async def _finish(ending: asyncio.Task[None]) -> None:
    await asyncio.shield(ending)
