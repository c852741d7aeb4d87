"""Running commands for one peer, whatever protocol it speaks: start, suspend, resume, fail, give up.

A command is a coroutine that is started with `send(None)`; nearly all of them finish right there. One that suspends
yields a `Waiter` (it waits for an event), a `Breath` (it works in slices) or a future (a call to a remote backend) and
is resumed from here.

Rules: commands are checked (authenticated, storage healthy) and driven in this one place. How a reply is encoded and
where it goes is up to the transport: a subclass implements `_answer` and `_refuse`, which get the `key` that was passed
in with the command (a request id, a request).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from headrace.backends.local.slices import Breath
from headrace.commands._base import BY_TYPE, Command, Flag, Reply
from headrace.engine.engine import Engine
from headrace.engine.waiters import Waiter
from headrace.errors import HeadraceError, Internal, NotAuthenticated
from headrace.model import Event

log: Final = logging.getLogger("headrace.server")

Work = Coroutine[Any, Any, Reply]
Key = TypeVar("Key")


class Driver(Generic[Key]):
    """Implements engine.peer.Peer except for what happens to replies and events."""

    def __init__(
        self,
        engine: Engine,
        address: str,
        *,
        stir: Callable[[], None],
        later: Callable[[Callable[[], None]], object],
        held: dict[str, int] | None,
    ) -> None:
        self.address = address
        self.is_authenticated = not engine.tokens
        self.held = held
        self.workers: set[str] = set()
        self.auth_failures = 0
        self.wants_codes = False
        self._engine = engine
        self._backend = engine.backend
        self._stir = stir
        self._later = later
        self._waiting: dict[Work, Waiter | None] = {}
        self._is_gone = False

    # -- what a transport adds -----------------------------------------------------------------------------------------

    def _answer(self, reply: Struct, key: Key) -> None:
        raise NotImplementedError

    def _refuse(self, error: HeadraceError, key: Key) -> None:
        raise NotImplementedError

    def _ended(self, key: Key) -> None:
        """A command that had been suspended has been answered."""

    def deliver(self, event: Event, body: bytes | None) -> None:
        raise NotImplementedError

    # -- running -------------------------------------------------------------------------------------------------------

    def _start(self, command: Command[Any], key: Key) -> None:
        try:
            if not self.is_authenticated or self._backend.is_degraded:
                self._check_allowed(command)
            work = command.run(self._engine, self)
            suspended = work.send(None)
        except StopIteration as done:
            self._answer(done.value, key)
        except Exception as error:
            self._fail(error, key, command)
        else:
            self._suspend(work, suspended, command, key)

    def _check_allowed(self, command: Command[Any]) -> None:
        flags = BY_TYPE[type(command)].flags
        if not self.is_authenticated and not flags & Flag.OPEN:
            raise NotAuthenticated
        if flags & Flag.WRITE:
            self._backend.check_writable()

    def _fail(self, error: Exception, key: Key, command: Command[Any]) -> None:
        if not isinstance(error, HeadraceError):
            log.exception("%s failed", type(command).__name__, exc_info=error)
            error = Internal()
        self._refuse(error, key)

    def _suspend(self, work: Work, suspended: object, command: Command[Any], key: Key) -> None:
        self._drive_on(work, suspended, command, key)

    def _drive_on(self, work: Work, suspended: object, command: Command[Any], key: Key) -> None:
        """Arrange for a suspended command to be continued: a waiter when it is served, a breath in the next turn."""

        def resume(value: Any) -> None:
            self._resume(work, value, command, key)

        if isinstance(suspended, Waiter) and self._is_gone:
            self._engine.waiters.cancel(suspended)
            work.close()
            self._forget(work)
        elif isinstance(suspended, Waiter):
            self._waiting[work] = suspended
            suspended.resume = resume
            self._stir()  # the end of the tick sets the timer for its timeout
        elif suspended is None or isinstance(suspended, Breath):  # None is what asyncio.sleep(0) suspends on
            self._waiting[work] = None
            self._later(lambda: resume(None))
            self._stir()  # what the slice did so far is committed with this tick
        elif isinstance(suspended, asyncio.Future):
            # What a task would do, without the cost of one: the reply of the remote backend resumes the command.
            self._waiting[work] = None
            suspended._asyncio_future_blocking = False
            suspended.add_done_callback(lambda _: resume(None))
        else:
            work.close()
            raise RuntimeError(f"{type(command).__name__} suspended on {suspended!r}")

    def _resume(self, work: Work, value: Any, command: Command[Any], key: Key) -> None:
        if work not in self._waiting:
            return
        try:
            suspended = work.send(value)
        except StopIteration as done:
            self._answer(done.value, key)
        except Exception as error:
            self._fail(error, key, command)
        else:
            self._drive_on(work, suspended, command, key)
            return
        self._forget(work)
        self._ended(key)

    def _forget(self, work: Work) -> None:
        self._waiting.pop(work, None)
        if not self._waiting:
            self._engine.unattended.discard(self)

    @property
    def is_waiting(self) -> bool:
        """Whether a command waits for an event or for its next slice."""
        return bool(self._waiting)

    @property
    def is_at_work(self) -> bool:
        """Whether a command is running that continues even if the client disconnects."""
        return None in self._waiting.values()

    def _give_up(self) -> None:
        """The peer disconnected: it gets no more replies or jobs."""
        self._is_gone = True
        for work, waiter in list(self._waiting.items()):
            # Work in slices continues without its client: half an Obliterate or half a PUSHB must not remain.
            if waiter is not None:
                self._engine.waiters.cancel(waiter)
                work.close()
                del self._waiting[work]
        if self._waiting:
            self._engine.unattended.add(self)
