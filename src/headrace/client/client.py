"""The two doors to a channel: `ask` for coroutines, `ask_blocking` for threads. Everything a user touches stands on it.

A client is shared and counted: objects made from one URL use the same channel, and the last one to close it closes it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from headrace.client.channel import Channel
from headrace.client.line import Line, Mailbox, shared_line
from headrace.commands._base import Command, Reply
from headrace.errors import ClientClosed, HeadraceError

R = TypeVar("R", bound=Reply)

DEFAULT_TIMEOUT: Final = 30.0


class Client:
    """A channel on the line of this process. `make` is called there, when somebody first asks."""

    def __init__(self, make: Callable[[], Awaitable[Channel]], timeout: float = DEFAULT_TIMEOUT) -> None:
        self._make = make
        self.timeout = timeout
        self._line: Line | None = None
        self._channel: Channel | None = None
        self._opening: asyncio.Future[Channel] | None = None
        self.is_closed = False

    @property
    def line(self) -> Line:
        # A forked child has neither the thread nor the sockets of its parent.
        line = shared_line()
        if self._line is not line:
            self._line, self._channel, self._opening = line, None, None
        return line

    # -- asking --------------------------------------------------------------------------------------------------------

    async def ask(self, command: Command[R], timeout: float | None = None) -> R:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        mailbox = _mailbox_of(loop)
        self._post(command, lambda outcome: _post_home(mailbox, partial(_settle, future, outcome)), timeout)
        return await future

    def ask_blocking(self, command: Command[R], timeout: float | None = None) -> R:
        future: Future[R] = Future()
        if self.line.is_here:
            raise RuntimeError("a blocking call from the thread that has to answer it would wait for ever")
        self._post(command, partial(_settle, future), timeout)
        return future.result()

    def _post(self, command: Command[R], done: Callable[[R | HeadraceError], None], timeout: float | None) -> None:
        if self.is_closed:
            raise ClientClosed
        self.line.post(partial(self.submit, command, done, self.timeout if timeout is None else timeout))

    # -- on the line ---------------------------------------------------------------------------------------------------

    def submit(self, command: Command[R], done: Callable[[R | HeadraceError], None], timeout: float) -> None:
        """Ask from the line's own thread."""
        if self._channel is not None:
            self._channel.submit(command, done, timeout)
        else:
            opening = self.open()
            opening.add_done_callback(lambda opened: _submit_opened(opened, command, done, timeout))

    def open(self) -> asyncio.Future[Channel]:
        """The channel, made when it is first wanted; a failure is not kept: the next one who asks tries again."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return self._opening

    async def _open(self) -> Channel:
        try:
            self._channel = await self._make()
            return self._channel
        finally:
            self._opening = None

    async def channel(self) -> Channel:
        """The channel itself, for those who live on the line: workers and listeners."""
        return self._channel or await self.open()

    # -- opening and closing -------------------------------------------------------------------------------------------

    def connect(self) -> Future[None]:
        async def opened() -> None:
            if self._channel is None:
                await self.open()

        return self.line.run(opened)

    def close(self) -> Future[None]:
        """Close the channel; what is asked from now on is refused."""
        self.is_closed = True

        async def closed() -> None:
            channel, self._channel = self._channel, None
            if channel is not None:
                await channel.close()

        return self.line.run(closed)


def _submit_opened(opened: asyncio.Future[Channel], command: Command[Any], done: Any, timeout: float) -> None:
    error = opened.exception()
    if error is None:
        opened.result().submit(command, done, timeout)
    else:
        done(error if isinstance(error, HeadraceError) else HeadraceError(str(error)))


def _settle(future: Any, outcome: Any) -> None:
    if future.cancelled() or future.done():
        return
    if isinstance(outcome, HeadraceError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()


def _mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes[loop] = Mailbox(loop)
    return mailbox


def _post_home(mailbox: Mailbox, work: Callable[[], None]) -> None:
    # Who asked may have closed its loop meanwhile: then nobody waits.
    if not mailbox.loop.is_closed():
        mailbox.post(work)
