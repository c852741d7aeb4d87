"""The engine: what commands call, on top of whatever backend there is.

It adds to the backend what is not storage: parked pulls and WaitJobs, schedules, the worker registry, live
subscribers, authentication, figures. It keeps no invariant across an await and no state a backend should keep. What
it takes to share a backend with other brokers is in `brokers`.

The life of a tick, driven by the server: commands run and change memory; `settle` hands ready jobs to parked pulls,
commits once for all of them, and returns the events to publish; only then do replies leave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from headrace.addresses import DEFAULT_RULES, UrlRules
from headrace.backends.base import JOB_ENDS, Claim, Demand, Outcome
from headrace.backends.local.slices import run_now
from headrace.clock import Clock
from headrace.engine.brokers import Brokers
from headrace.engine.crons import Crons
from headrace.engine.figures import MAX_QUEUES, Figures
from headrace.engine.guessing import Guesses
from headrace.engine.history import History
from headrace.engine.peer import Peer
from headrace.engine.waiters import Waiters
from headrace.engine.workers import WorkerRegistry
from headrace.errors import HeadraceError, NotAuthenticated, StorageUnavailable
from headrace.model import EVENT_WORDS, EVERY_QUEUE, Event, FlowStatus

if TYPE_CHECKING:
    from headrace.backends import AnyBackend

log: Final = logging.getLogger("headrace.engine")

Listener = Callable[[list[Event], dict[int, bytes]], None]
Upkeep = Callable[[], Coroutine[Any, Any, object]]

_FLOW_CHANGES: Final = frozenset(word for word in EVENT_WORDS.values() if word.startswith("flow-"))
_FLOW_ENDS: Final = frozenset(f"flow-{status}" for status in FlowStatus if status.is_final)
_MASS_REMOVALS: Final = frozenset(("drained", "obliterated"))
"""Their jobs have no events of their own."""
_MAINTAIN_EVERY_MS: Final = 1000
_PROBE_EVERY_MS: Final = 250
_STOP_S: Final = 2.0
MAX_AUTH_FAILURES: Final = 5
"""Wrong tokens of one connection, after which none is looked at any more: the connection is about to be closed."""


class Engine:
    def __init__(
        self,
        backend: AnyBackend,
        clock: Clock,
        *,
        tokens: Sequence[str] = (),
        worker_timeout_ms: int = 30_000,
        connections: Callable[[], int] = lambda: 0,
        webhook_rules: UrlRules = DEFAULT_RULES,
        metrics_max_queues: int = MAX_QUEUES,
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.ids = backend.ids
        self.tokens = [token.encode() for token in tokens]
        self.webhook_rules = webhook_rules
        self.alarm = backend.alarm
        self.waiters = Waiters(self.alarm)
        self._brokers = (
            None if backend.is_local else Brokers(backend, clock, self.waiters, self.run, self._hear_of_event)
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self.workers = WorkerRegistry(clock, self.ids, worker_timeout_ms)
        self.crons = Crons(backend, clock, self.workers)
        self.guesses = Guesses(clock)
        self.figures = Figures(backend, clock, self.workers, self.crons, self.guesses, connections, metrics_max_queues)
        self.history = History(backend, clock)
        self.unattended: set[Peer] = set()
        """Peers that are gone while a command of theirs is running; a server does not stop before it has ended."""
        self._subscriptions: dict[Peer, str] = {}
        self._subscribers: dict[str, set[Peer]] = {}
        self._newcomers: dict[Peer, int] = {}
        """Who subscribed in this tick, and the last event before that: such events were made without their data."""
        self._listeners: list[Listener] = []
        self._listeners_to_others: list[Callable[[Event], None]] = []
        self.told_already: set[int] = set()
        """Numbers of the events of this tick of which listeners heard before, by the stream that all brokers write."""
        self._body_readers = 0
        self._next_maintenance = 0
        self._upkeep: list[Upkeep] = [self.history.sample, backend.retire_completed, backend.retire_flows]
        if backend.is_local:
            self._upkeep.append(backend.retire_queues)
        if self._brokers is not None:
            self._upkeep += [self._brokers.look_after, self.crons.replan]  # others may have been given schedules
        self._under_way: set[Upkeep] = set()
        self._held_up: dict[Upkeep, str] = {}
        self._is_stopping = False

    async def start(self) -> None:
        await self.backend.open()
        await self.crons.start()
        self.backend.commit()
        self.figures.start()
        self.history.start()
        self._next_maintenance = self.clock.monotonic_ms()
        self._set_alarm()

    async def stop(self) -> None:
        """Work in the background gets a moment to end: above all jobs that go back to their queues."""
        self.guesses.tell(is_last=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        for task in list(self._tasks):
            task.cancel()
        try:
            if not self.backend.is_degraded:
                self.backend.commit()
        except StorageUnavailable as error:  # nobody was promised anything of it
            log.error("the figures of the last moment could not be stored: %s", error)
        finally:
            await self.backend.close()

    def end_waiting(self) -> None:
        """The server stops: parked commands get an empty reply, and no further one is parked."""
        self._is_stopping = True
        for waiter in self.waiters.everybody():
            waiter.finish(None)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for: at once on a local backend, else as a task of its own."""
        if self.backend.is_local:
            run_now(work)
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, HeadraceError):
            log.warning("%s", error)
        elif error is not None:
            log.error("work in the background failed", exc_info=error)

    # -- pulling and waiting -------------------------------------------------------------------------------------------

    async def pull(self, queue: str, demand: Demand, timeout_ms: float) -> list[Claim]:
        """Jobs, or [] when none came within `timeout_ms`. Parked pulls are served in the order in which they came."""
        claims = await self.backend.claim(queue, demand)
        if claims or timeout_ms <= 0 or self._is_stopping:
            return claims
        deadline = self.clock.monotonic_ms() + int(timeout_ms)
        waiter = self.waiters.park_pull(queue, demand, deadline)
        if self._brokers is not None:
            await self._brokers.announce_pull(waiter, timeout_ms)
        return await waiter or []

    async def wait_job(self, job_id: str, timeout_ms: float) -> Outcome | None:
        """How the job ended; None when it did not within `timeout_ms`. Answers at once when it has ended already."""
        outcome = await self.backend.outcome(job_id)
        if outcome.has_ended:
            return outcome
        if timeout_ms <= 0 or self._is_stopping:
            return None
        deadline = self.clock.monotonic_ms() + int(timeout_ms)
        # The job may not be kept after its end: have its result come with the event.
        self.backend.wants_bodies = True
        waiter = self.waiters.park_job(job_id, deadline)
        if self._brokers is not None:
            await self._brokers.announce_job(waiter, timeout_ms)
        ended: Outcome | None = await waiter
        return await self._brokers.missed_end(job_id) if ended is None and self._brokers is not None else ended

    async def wait_flow(self, flow_id: str, timeout_ms: float, revision: int | None) -> None:
        """Until the flow has ended or, if a revision is given, has changed since it; or time is up."""
        flow = await self.backend.flow(flow_id)
        if flow is None or flow.status.is_final or timeout_ms <= 0 or self._is_stopping:
            return
        if revision is None or flow.revision == revision:
            deadline = self.clock.monotonic_ms() + int(timeout_ms)
            waiter = self.waiters.park_flow(flow_id, deadline, is_any_change=revision is not None)
            if self._brokers is not None:
                await self._brokers.announce_flow(waiter, flow, timeout_ms, is_any_change=revision is not None)
            await waiter

    # -- the tick ------------------------------------------------------------------------------------------------------

    def settle(self) -> list[Event]:
        """End a tick: serve who waits, commit once, and return the events that may now be shown.

        StorageUnavailable: nothing of the tick happened, and every reply of it must say so.
        """
        if not self.backend.is_degraded:
            self._serve_parked_pulls()
            if self.waiters.has_jobs:
                self._serve_job_waiters()
                self.want_bodies(0)
        was_degraded = self.backend.is_degraded
        newcomers, self._newcomers = self._newcomers, {}
        try:
            self.backend.commit()
        except StorageUnavailable:
            self._probe_soon()
            raise
        if self.backend.is_degraded:  # nothing was to be stored, so nothing failed; but the log refused
            if not was_degraded:
                log.error("events wait for the disk: %s", self.backend.storage_status().error)
            self._probe_soon()
        events, bodies = self.backend.take_events(), self.backend.take_bodies()
        if self._brokers is not None:
            self.told_already = self._brokers.told_already(events)
        if self._subscribers:
            self._publish(events, bodies, newcomers)
        if self._brokers is not None:
            self._brokers.tell_heard()
        for listener in self._listeners:
            self._tell(listener, events, bodies)
        return events

    def _tell(self, listener: Listener, events: list[Event], bodies: dict[int, bytes]) -> None:
        try:
            listener(events, bodies)
        except Exception:
            log.exception("a listener failed")  # the tick is committed: its replies must leave all the same

    def _probe_soon(self) -> None:
        """Storage refused: ask again soon, and before the connections that die now give up returning their jobs."""
        self._next_maintenance = min(self._next_maintenance, self.clock.monotonic_ms() + _PROBE_EVERY_MS)
        self.alarm.ring_by(self._next_maintenance)

    def _serve_parked_pulls(self) -> None:
        ready = self.backend.take_ready()
        if self._brokers is not None:
            self._brokers.wake(ready)
            return
        for queue in ready:
            self.waiters.serve_pulls(queue, self._claim_now)

    def _claim_now(self, queue: str, demand: Demand) -> list[Claim]:
        try:
            return run_now(self.backend.claim(queue, demand))
        except StorageUnavailable as error:  # this pull goes on waiting; the others of the tick have their replies
            log.error("a parked pull of queue %s goes on waiting: %s", queue, error)
            return []

    def _serve_job_waiters(self) -> None:
        for event in self.backend.uncommitted_events():
            if event.event == "failed" and not event.terminal:
                continue
            if event.event in _FLOW_CHANGES:
                self.waiters.finish_flow(event.job, event.event in _FLOW_ENDS)
            elif event.event in JOB_ENDS:
                outcome = Outcome(event.event, self.backend.body_of(event), event.error)
                self.waiters.finish_job(event.job, outcome)
            elif event.event in _MASS_REMOVALS and self.backend.is_local:
                self._dismiss_waiters_of_removed()

    def _dismiss_waiters_of_removed(self) -> None:
        for job_id in self.waiters.awaited_jobs():
            if run_now(self.backend.state(job_id)) == "unknown":
                self.waiters.finish_job(job_id, Outcome("removed"))

    def _hear_of_event(self, event: Event, body: bytes | None) -> None:
        """Another program changed a queue: notify its listeners here."""
        for peer in (*self._subscribers.get(event.queue, ()), *self._subscribers.get(EVERY_QUEUE, ())):
            peer.deliver(event, body)
        for listener in self._listeners_to_others:
            listener(event)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _set_alarm(self) -> None:
        """Find the next thing to do; between sweeps whoever schedules something earlier sets the alarm."""
        self.alarm.due_mono = min(self._next_maintenance, self.next_due())

    def next_due(self) -> int:
        """The next moment (monotonic) that means something to a job or to somebody who waits."""
        poll = None if self._brokers is None else self._brokers.next_poll()
        dues = (self.backend.next_due_ms(), self.waiters.next_due(), self.crons.next_due_mono(), poll)
        return min((due for due in dues if due is not None), default=self.alarm.NEVER)

    async def sweep(self) -> None:
        """Do what time demands, then set the alarm for what comes next."""
        try:
            await self._sweep()
        finally:
            self._set_alarm()

    async def _sweep(self) -> None:
        """While storage refuses, only those who waited too long are sent away."""
        mono = self.clock.monotonic_ms()
        for waiter in self.waiters.expired(mono):
            waiter.finish(None)
        self.guesses.tell()
        if self.backend.is_degraded:
            if mono >= self._next_maintenance:
                self._next_maintenance = mono + _PROBE_EVERY_MS
                if self.backend.probe():
                    log.warning("storage accepts writes again")
                    await self.crons.replan()
            return
        self.run(self.backend.sweep())
        for run in self.crons.due_runs():
            self.run(self._told(run))
        if self._brokers is not None:
            self._brokers.poll()
        if mono >= self._next_maintenance:
            self._next_maintenance = mono + _MAINTAIN_EVERY_MS
            self.workers.expire()
            self.figures.sample()
            for work in self._upkeep:
                self._keep_up(work)
            self.backend.retire_tombstones()

    def _keep_up(self, work: Upkeep) -> None:
        """Do one kind of upkeep, unless it is still under way: a node that is away may hold it up, but nothing else."""
        if work not in self._under_way:
            self._under_way.add(work)
            self.run(self._told(self._do(work)))

    async def _do(self, work: Upkeep) -> None:
        try:
            await work()
            self._held_up.pop(work, None)
        except StorageUnavailable as error:
            if self.backend.is_local:
                raise
            if work not in self._held_up:  # told once, and once for all kinds: each is tried every second
                if str(error) not in self._held_up.values():
                    log.warning("upkeep waits for the backend: %s", error)
                self._held_up[work] = str(error)
        finally:
            self._under_way.discard(work)

    async def _told(self, work: Coroutine[Any, Any, None]) -> None:
        """A sweep does not wait for what a remote backend does: a tick of its own tells of it and sets the timer."""
        try:
            await work
        finally:
            if not self.backend.is_local:
                self.backend.on_wake()

    # -- connections ---------------------------------------------------------------------------------------------------

    async def authenticate(self, token: str, peer: Peer) -> None:
        """Let the connection in if the token is one of ours. Wrong ones are answered slower and slower."""
        if not self.tokens:
            return
        if peer.auth_failures >= MAX_AUTH_FAILURES or not self.knows(token):
            peer.auth_failures += 1
            await self.waiters.park_until(self.clock.monotonic_ms() + self.guesses.note(peer.address))
            raise NotAuthenticated("Invalid token")
        peer.is_authenticated = True

    def knows(self, token: str) -> bool:
        """Whether the token is one of ours; compared in constant time, all of them."""
        from hmac import compare_digest  # many servers have no tokens

        given = token.encode()
        return any([compare_digest(given, known) for known in self.tokens])

    def open_connections(self) -> dict[str, int]:
        """How many connections are open, by transport."""
        counts = {transport: count() for transport, count in self.figures.transports.items()}
        return {"tcp": counts["tcp"], "ws": counts.get("websocket", 0), "sse": counts.get("sse", 0)}

    async def release(self, peer: Peer) -> None:
        """The connection closed: its jobs wait again, its workers are gone."""
        self.workers.drop(peer)
        if peer.held:
            self.backend.check_writable()
            await self.backend.release(peer.held)

    async def follow(self, queue: str) -> None:
        """Learn what other brokers do to a queue before somebody listens to it here."""
        if self._brokers is not None:
            await self._brokers.follow(queue)

    def subscribe(self, queue: str, peer: Peer) -> None:
        """Deliver the events of one queue to this peer from now on, instead of those of another."""
        self.unsubscribe(peer)
        self._subscriptions[peer] = queue
        self._subscribers.setdefault(queue, set()).add(peer)
        if before := self.backend.uncommitted_events():
            self._newcomers[peer] = before[-1].seq
        self._watch(queue, +1)

    def unsubscribe(self, peer: Peer) -> None:
        queue = self._subscriptions.pop(peer, None)
        if queue is not None:
            self._subscribers[queue].discard(peer)
            self._watch(queue, -1)
            if not self._subscribers[queue]:
                del self._subscribers[queue]

    def _watch(self, queue: str, change: int) -> None:
        if queue == EVERY_QUEUE:
            self.want_bodies(change)
            self.watch_all(change)
        else:
            self.backend.watch(queue, change)

    def listen(self, listener: Listener) -> None:
        """Have `listener` called after every commit with its events and the bodies that were asked for."""
        self._listeners.append(listener)

    def listen_to_others(self, listener: Callable[[Event], None]) -> None:
        """Have `listener` called with what other brokers did, as far as somebody watches it. Such events have no
        number, and are in the log of that broker."""
        self._listeners_to_others.append(listener)

    def watch_all(self, change: int) -> None:
        """Somebody began (+1) or ceased (-1) to want to hear what happens to all queues, whoever does it."""
        if self._brokers is not None:
            self._brokers.watch_all(change)

    def want_bodies(self, change: int) -> None:
        """Somebody began (+1) or ceased (-1) to need the results and data that go with events of all queues.

        With 0 it only looks anew whether those who wait for the end of a job still need them.
        """
        self._body_readers += change
        self.backend.wants_bodies = self.waiters.has_jobs or self._body_readers > 0

    def _publish(self, events: list[Event], bodies: dict[int, bytes], newcomers: dict[Peer, int]) -> None:
        everywhere = self._subscribers.get(EVERY_QUEUE, ())
        for event in events:
            if event.seq in self.told_already:
                continue
            for peer in (*self._subscribers.get(event.queue, ()), *everywhere):
                if event.seq > newcomers.get(peer, 0):
                    peer.deliver(event, bodies.get(event.seq))
