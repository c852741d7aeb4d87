"""Sharing a backend with other brokers: what they do to jobs, flows and queues that somebody waits for here.

An engine on a shared backend has one of these; an engine on a file has none, and nobody to share with.

Rules:
- Announce that somebody waits, then check once more: a change made meanwhile is either seen by that check or announced
  by whoever made it.
- Messages between brokers may be lost. What was missed is found when the waiting ends, and by a check once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final

from headrace.backends.base import Outcome
from headrace.clock import Clock
from headrace.engine.claims import ClaimLoops
from headrace.engine.waiters import Waiter, Waiters
from headrace.errors import HeadraceError, NotFound
from headrace.model import EVERY_QUEUE, Event, Flow

if TYPE_CHECKING:
    from headrace.backends.valkey.backend import ValkeyBackend

_UNTIL_TOLD: Final = 0.01
"""Seconds after which a tick that is under way has ended."""


class Brokers:
    def __init__(
        self,
        backend: ValkeyBackend,
        clock: Clock,
        waiters: Waiters,
        run: Callable[[Coroutine[Any, Any, None]], None],
        hear_of_event: Callable[[Event, bytes | None], None],
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._waiters = waiters
        self._run = run
        self._claims = ClaimLoops(backend, waiters, run)
        backend.on_end = waiters.finish_job
        backend.on_flow = waiters.finish_flow
        backend.on_event = hear_of_event

    # -- somebody waits here -------------------------------------------------------------------------------------------

    async def announce_pull(self, waiter: Waiter, timeout_ms: float) -> None:
        """Have other brokers wake this one for pushes; what came before they knew woke nobody."""
        try:
            if await self._backend.announce_waiting(waiter.key, timeout_ms):
                self._claims.wake(waiter.key)
            self._backend.alarm.ring_by(self.next_poll() or waiter.deadline_mono)
        except HeadraceError:
            self._waiters.cancel(waiter)
            raise

    async def announce_job(self, waiter: Waiter, timeout_ms: float) -> None:
        """Have other brokers announce the end of a job; it may have ended before they knew."""
        try:
            await self._backend.announce_awaited(waiter.key, timeout_ms)
            outcome = await self._backend.outcome(waiter.key)
        except NotFound:
            # It was there when the waiting began: it ended and was not kept. If that was done here, its end is told
            # with the tick that is under way; if not, nobody tells of it.
            await asyncio.sleep(_UNTIL_TOLD)
            self._waiters.finish_job(waiter.key, None)
            return
        except HeadraceError:
            self._waiters.cancel(waiter)
            raise
        if outcome.has_ended:
            self._waiters.finish_job(waiter.key, outcome)

    async def missed_end(self, job_id: str) -> Outcome | None:
        """Time is up, or so it seems: the message of another broker may have been lost."""
        try:
            outcome = await self._backend.outcome(job_id)
        except NotFound:
            return None  # it ended and was not kept
        return outcome if outcome.has_ended else None

    async def announce_flow(self, waiter: Waiter, seen: Flow, timeout_ms: float, *, is_any_change: bool) -> None:
        """Have other brokers announce changes of a flow; it may have changed before they knew."""
        try:
            await self._backend.announce_watched(seen.queue, timeout_ms)
            flow = await self._backend.flow(seen.id)
        except HeadraceError:
            self._waiters.cancel(waiter)
            raise
        if flow is None or flow.status.is_final or (is_any_change and flow.revision != seen.revision):
            self._waiters.finish_flow(seen.id, flow is None or flow.status.is_final)

    # -- queues --------------------------------------------------------------------------------------------------------

    def wake(self, queues: Iterable[str]) -> None:
        """Claim for those who wait on these queues."""
        for queue in queues:
            self._claims.wake(queue)

    async def follow(self, queue: str) -> None:
        """Learn what others do to a queue, or to all, before somebody listens to it here."""
        if queue == EVERY_QUEUE:
            await self._backend.follow_all()
        else:
            await self._backend.follow(queue)

    def watch_all(self, change: int) -> None:
        """Somebody began (+1) or ceased (-1) to listen to all queues."""
        self._backend.watching_all += change
        if change > 0:
            self._run(self.follow(EVERY_QUEUE))

    def told_already(self, events: list[Event]) -> set[int]:
        """Numbers of those that listeners heard of by the streams of their queues."""
        return {event.seq for event in events if self._backend.is_told_already(event)}

    def tell_heard(self) -> None:
        self._backend.tell_heard()

    # -- time ----------------------------------------------------------------------------------------------------------

    def next_poll(self) -> int | None:
        """When parked pulls must ask again because nobody would wake them."""
        if self._backend.poll_ms is None or not self._waiters.pulled_queues():
            return None
        return self._clock.monotonic_ms() + self._backend.poll_ms

    def poll(self) -> None:
        if self._backend.poll_ms is not None:
            self.wake(self._waiters.pulled_queues())

    async def look_after(self) -> None:
        """Do what a dead broker left undone."""
        try:
            await self._backend.look_after()
        finally:  # also when a node is away: others have theirs
            self.wake(self._waiters.pulled_queues())
