"""The tick, our group commit: all commands of one turn of the loop, on whatever connection, share one commit.

The ticker knows connections as outlets only. Rule: nothing that reports a stored change leaves before the commit that
contains the change, and nothing that promises durability before the sync. A claim is not stored: who pulls need not
wait until the log has its event.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final, Protocol

from headrace.backends.local.slices import run_now
from headrace.engine.engine import Engine
from headrace.engine.peer import Peer
from headrace.errors import StorageUnavailable
from headrace.model import Event
from headrace.server.vigil import Vigil

log: Final = logging.getLogger("headrace.server")

_LATE_MS: Final = 1000
_RELEASE_PAUSES: Final = (0.1, 0.2, 0.4)

Release = Callable[[StorageUnavailable | None], None]
"""Called when the sync is over: sends what an outlet held back, or errors if the sync failed."""


class Outlet(Protocol):
    """A connection as the ticker sees it: replies that wait for the end of the tick."""

    @property
    def is_durable(self) -> bool:
        """Whether a reply of this tick promises that the disk has its write."""

    def hold(self) -> Release:
        """Keep the replies of this tick back until the sync they promise is over."""

    def spoil(self, error: StorageUnavailable) -> None:
        """The commit failed: the replies of this tick become that error."""

    def flush(self) -> None:
        """The commit is done: let the replies of this tick out."""


class Parcels:
    """The output of a connection, in the order of ticks, although some of it has to wait for the disk."""

    __slots__ = ("_queue", "_write")

    def __init__(self, write: Callable[[bytes | bytearray], None]) -> None:
        self._write = write
        self._queue: deque[list[bytes | bytearray | None]] = deque()

    def __bool__(self) -> bool:
        """Whether something is held back."""
        return bool(self._queue)

    def leave(self, out: bytes | bytearray) -> None:
        if self._queue:
            self._queue.append([out])
        else:
            self._write(out)

    def hold(self) -> Callable[[bytes | bytearray], None]:
        """Keep a place; the function that is returned fills it."""
        place: list[bytes | bytearray | None] = [None]
        self._queue.append(place)

        def fill(out: bytes | bytearray) -> None:
            place[0] = out
            ready = []
            while self._queue and (first := self._queue[0][0]) is not None:
                ready.append(first)
                self._queue.popleft()
            if ready:
                self._write(b"".join(ready))

        return fill


class Ticker:
    """Ends ticks and keeps time: all commands since the last turn share one commit.

    `stir` schedules the end of the tick behind the sockets that are readable in this turn of the loop; `_end` settles,
    commits, and only then lets the replies out, unless nothing of the tick is stored.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        soon: Callable[[Callable[[], None]], object] | None = None,
        vigil: Vigil | None = None,
    ) -> None:
        """`soon` calls something at the end of this turn of the loop.

        A `vigil` is for a loop that has its process to itself: elsewhere it would keep others from the interpreter.
        """
        self._engine = engine
        self.loop = loop
        self._soon = soon or loop.call_soon
        self._vigil = vigil
        self._stirred: dict[Outlet, None] = {}
        self._is_scheduled = False
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0
        self._syncs: set[asyncio.Future[None]] = set()
        self._is_sweeping = False
        self._is_stopped = False

    def start(self) -> None:
        if not self._engine.backend.is_local:
            self._engine.backend.on_wake = self.schedule
        self._set_timer()

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether replies wait for the end of a tick or for the disk, or work goes on whose client is gone."""
        return self._is_scheduled or bool(self._syncs or self._engine.unattended)

    def stir(self, outlet: Outlet) -> None:
        self._stirred[outlet] = None
        self.schedule()

    def give_back(self, peer: Peer, pauses: tuple[float, ...] = _RELEASE_PAUSES) -> None:
        """A peer is gone: return its jobs. When the backend errs try again, then leave them to lease expiry."""
        if not self._engine.backend.is_local:
            self._engine.run(self._give_back_later(peer))
            return
        try:
            run_now(self._engine.release(peer))
            self.schedule()
        except StorageUnavailable as error:
            if pauses:
                self.loop.call_later(pauses[0], self.give_back, peer, pauses[1:])
            else:
                log.warning("jobs of %s wait for their leases to expire: %s", peer.address, error)

    async def _give_back_later(self, peer: Peer) -> None:
        """The same on a remote backend: a claim in flight lands first, then its jobs go back too."""
        for pause in (0.0, *_RELEASE_PAUSES, *_RELEASE_PAUSES):
            await asyncio.sleep(pause)
            while peer.is_waiting:  # noqa: ASYNC110 - for calls that have a deadline
                await asyncio.sleep(_RELEASE_PAUSES[0])
            try:
                await self._engine.release(peer)
            except StorageUnavailable as error:
                log.warning("jobs of %s are not released yet: %s", peer.address, error)
            else:
                self.schedule()
                return

    def schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            if self._vigil is not None:
                self._vigil.end()
            self._began = perf_counter()
            self._soon(self._end)

    def _end(self) -> None:
        self._is_scheduled = False
        began, settling = self._began, perf_counter()  # the time of the loop stands still within a turn
        events: list[Event] = []
        if self._engine.backend.confirm_claims():
            self._release()
        try:
            events = self._engine.settle()
        except StorageUnavailable as error:
            log.error("a tick could not be stored: %s", error)
            self._spoil(error)
        except Exception:
            # Whatever went wrong: a reply must not leave as if its commit had happened.
            log.exception("a tick failed")
            self._spoil(StorageUnavailable("Internal server error"))
        ended = perf_counter()
        if self._engine.backend.take_sync():
            self._release_after_sync()
        else:
            self._release()
        # What nobody waits for comes after the replies: while a lone client reads its own, it costs nothing.
        self._engine.figures.observe_tick(ended - began, ended - settling if events else None)
        self._set_timer()
        if self._vigil is not None and len(events) <= 1:
            self._vigil.begin()  # a burst pays for its own waking

    def _spoil(self, error: StorageUnavailable) -> None:
        for outlet in self._stirred:
            outlet.spoil(error)
        self._engine.backend.take_sync()

    def _release(self) -> None:
        stirred, self._stirred = self._stirred, {}
        for outlet in stirred:
            try:
                outlet.flush()
            except Exception:
                log.exception("replies could not be sent")  # those of other connections must still be sent

    # -- durable writes ------------------------------------------------------------------------------------------------

    def _release_after_sync(self) -> None:
        """Hold replies that promise durability until the disk has them; other connections go on meanwhile."""
        releases = [outlet.hold() for outlet in self._stirred if outlet.is_durable]
        self._release()

        def done(future: asyncio.Future[None]) -> None:
            self._syncs.discard(future)
            release_all(future.exception())

        def release_all(error: BaseException | None) -> None:
            failure = None
            if error is not None:
                log.error("a durable write could not be synced: %s", error)
                failure = StorageUnavailable(f"Storage error: not synced to disk ({error})")
            for release in releases:
                try:
                    release(failure)
                except Exception:
                    log.exception("replies could not be sent")

        try:
            self._engine.backend.mend_sync()
        except StorageUnavailable as error:
            release_all(error)
            return
        future = self.loop.run_in_executor(None, self._engine.backend.sync)
        self._syncs.add(future)
        future.add_done_callback(done)

    def _roll_log(self) -> None:
        roll = self._engine.backend.roll_log()
        if roll is not None:
            self.loop.run_in_executor(None, self._engine.backend.publish, roll).add_done_callback(_tell_unsealed)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._is_sweeping or self._is_stopped:
            return  # the end of the sweep sets the timer
        due = self._engine.alarm.due_mono
        if self._timer is not None:
            if due == self._timer_due:
                return
            self._timer.cancel()
        self._timer_due = due
        wait = max(0, due - self._engine.clock.monotonic_ms()) / 1000
        self._timer = self.loop.call_later(wait, self._on_time)

    def _on_time(self) -> None:
        late = self._engine.clock.monotonic_ms() - self._timer_due
        self._engine.figures.observe_lag(late / 1000)
        if late > _LATE_MS:
            # The process was stopped or the loop held up: heartbeats may lie unread in the sockets. Read them first.
            self._timer = self.loop.call_later(0.05, self._sweep)
        else:
            self._sweep()

    def _sweep(self) -> None:
        self._timer = None
        if not self._is_scheduled:
            self._began = perf_counter()  # what is due begins a tick of its own
        if not self._engine.backend.is_local:
            self._engine.run(self._sweep_later())
            return
        try:
            run_now(self._engine.sweep())
        except StorageUnavailable as error:
            log.error("a sweep could not be stored: %s", error)
        except Exception:
            log.exception("a sweep failed")  # time must go on for everybody else
        self._end()
        self._roll_log()

    async def _sweep_later(self) -> None:
        self._is_sweeping = True
        try:
            await self._engine.sweep()
        except StorageUnavailable as error:
            if not self._is_stopped:
                log.warning("a sweep waits for the backend: %s", error)
            self._engine.alarm.due_mono = self._engine.clock.monotonic_ms() + _LATE_MS
        except Exception:
            log.exception("a sweep failed")
        finally:
            self._is_sweeping = False
            self._end()


def _tell_unsealed(rolled: asyncio.Future[None]) -> None:
    error = rolled.exception()
    if error is not None:
        log.warning("a segment of the event log waits to be compressed: %s", error)
