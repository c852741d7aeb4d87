"""CompletionTracker: who waits for which job, and how its outcome reaches them.

Outcomes come from the events of a queue: one subscription per queue, however many wait, so a question costs no command
beyond its push. (WaitJob would cost one parked command for each, and connections hold few of them.) Losses on
such a stream are not silent: after a reconnect comes a `gap`, and then the state of every awaited job
is looked up. The same lookup is made before a caller gets a timeout, when the job has to have begun, and when an
attempt ends without an outcome: nothing announces a job that is too late to begin, or to begin again, and without
workers nothing even removes it.

Rules: job ids are known before the job is added and mapped first. For ids that the server chose, outcomes that arrive
before the mapping are kept for a while (a bounded number of them, and only while a mapping is awaited). Callbacks
are called once; what they raise is logged. Everything here runs on one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from headrace.client.channel import EventView
from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.client.job import JobInfo, decode_job
from headrace.commands.monitoring import Ping
from headrace.commands.queries import GetJob
from headrace.errors import (
    EventCancelledError,
    EventTimeoutError,
    HeadraceError,
    NotFound,
    ProviderStoppedError,
    StalledError,
)
from headrace.propagation import ErrorReport, is_stall

MAX_EARLY: Final = 1000
EARLY_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 5.0
_LOOK_AGAIN: Final = 1.0
_LOOKS_AT_ONCE: Final = 20
_GRACE_SECONDS: Final = 0.05
"""After a job has expired, before we look: its store counts from about when it told us of the job."""
_LOOK_EVERY: Final = 30.0
"""Seconds between looks at the jobs of those who wait without limit: not every removal of a job is announced."""
_UNFINISHED: Final = ("failed", "stalled", "released")
"""Events that end an attempt; after one of them the job may be too late for another."""
_GONE: Final = "The job of the event is gone: it was removed, or it expired before a handler began it or tried it again"

OnSuccess = Callable[[Any], object]
OnError = Callable[[BaseException], object]


class _Pending:
    __slots__ = ("is_added", "job_id", "on_error", "on_success", "timer")

    def __init__(self, on_success: OnSuccess, on_error: OnError | None) -> None:
        self.on_success = on_success
        self.on_error = on_error
        self.timer: asyncio.TimerHandle | None = None
        self.job_id: str | None = None
        self.is_added = False
        """Whether the store has the job: until then it is not gone if it is not there."""


class _Watched:
    """One queue: its listener, who waits, and the ends that came too early."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending: dict[str, _Pending] = {}
        self.jobs: dict[str, set[str]] = {}
        self.last_begins: dict[str, asyncio.TimerHandle] = {}
        """By job: it rings when one that has not begun will not begin any more."""
        self.unmapped = 0
        self.early: OrderedDict[str, tuple[float, EventView]] = OrderedDict()
        self.listener: asyncio.Task[None] | None = None
        self.listening: asyncio.Future[None] | None = None


class CompletionTracker:
    """Delivers the outcome of an event's job to those who wait for it."""

    def __init__(
        self,
        client: Client,
        *,
        default_timeout: float = 30.0,
        queue_events_class: Callable[[Client, str], Any] = QueueEvents,
        logger: logging.Logger | None = None,
    ) -> None:
        self._client = client
        self.default_timeout = default_timeout
        self._listen_to = queue_events_class
        self._log = logger or logging.getLogger("headrace.events")
        self._watched: dict[str, _Watched] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._is_looking = asyncio.Semaphore(_LOOKS_AT_ONCE)
        self._is_patrolling = False

    # -- waiting -------------------------------------------------------------------------------------------------------

    def register(
        self,
        queue: str,
        subscription_id: str,
        on_success: OnSuccess,
        on_error: OnError | None = None,
        timeout: float | None = None,
    ) -> None:
        """Wait for the end of a job that is mapped later. Seconds; 0 is without limit."""
        watched = self._watch(queue)
        pending = watched.pending[subscription_id] = _Pending(on_success, on_error)
        watched.unmapped += 1
        limit = self.default_timeout if timeout is None else timeout
        if limit > 0:
            loop = asyncio.get_running_loop()
            pending.timer = loop.call_later(limit, self._expire, watched, subscription_id, limit)
        elif not self._is_patrolling:
            self._is_patrolling = True
            self._spawn(self._patrol())

    async def listening(self, queue: str) -> None:
        """Return when no outcome in this queue can be missed any more."""
        listening = self._watch(queue).listening
        if listening is not None and not (listening.done() and listening.exception() is None):
            await asyncio.shield(listening)

    def map_job_id(self, queue: str, job_id: str, subscription_id: str, *, is_added: bool = True) -> None:
        """Say which job it is. Several may wait for one job. Say it again when it is added, if it was not yet."""
        watched = self._watch(queue)
        pending = watched.pending.get(subscription_id)
        if pending is None:
            return
        pending.is_added = is_added
        if pending.job_id == job_id:
            return
        self._unmap(watched, subscription_id, pending)
        pending.job_id = job_id
        watched.unmapped -= 1
        watched.jobs.setdefault(job_id, set()).add(subscription_id)
        early = watched.early.pop(job_id, None)
        if early is not None:
            self._ended(watched, early[1])

    def expect_begin(self, queue: str, job_id: str, within: float) -> None:
        """Say that an awaited job begins within so many seconds from now or not at all."""
        watched = self._watch(queue)
        if job_id in watched.jobs:
            self._expect_no_more(watched, job_id)
            late = within + _GRACE_SECONDS
            watched.last_begins[job_id] = asyncio.get_running_loop().call_later(late, self._look_again, watched, job_id)

    def _expect_no_more(self, watched: _Watched, job_id: str) -> None:
        timer = watched.last_begins.pop(job_id, None)
        if timer is not None:
            timer.cancel()

    def subscriptions_of(self, queue: str, job_id: str) -> frozenset[str]:
        watched = self._watched.get(queue)
        return frozenset(watched.jobs.get(job_id, ()) if watched is not None else ())

    def has_pending(self, queue: str, subscription_id: str) -> bool:
        return queue in self._watched and subscription_id in self._watched[queue].pending

    # -- settling ------------------------------------------------------------------------------------------------------

    def complete(self, queue: str, subscription_id: str, result: Any) -> None:
        pending = self._take(queue, subscription_id)
        if pending is not None:
            self._call(pending.on_success, result)

    def fail(self, queue: str, subscription_id: str, error: BaseException) -> None:
        pending = self._take(queue, subscription_id)
        if pending is not None and pending.on_error is not None:
            self._call(pending.on_error, error)

    def _take(self, queue: str, subscription_id: str) -> _Pending | None:
        watched = self._watched.get(queue)
        pending = watched.pending.pop(subscription_id, None) if watched is not None else None
        if watched is None or pending is None:
            return None
        if pending.timer is not None:
            pending.timer.cancel()
        if pending.job_id is None:
            watched.unmapped -= 1
        self._unmap(watched, subscription_id, pending)
        return pending

    def _unmap(self, watched: _Watched, subscription_id: str, pending: _Pending) -> None:
        mates = watched.jobs.get(pending.job_id) if pending.job_id is not None else None
        if mates is None or pending.job_id is None:
            return
        mates.discard(subscription_id)
        watched.unmapped += subscription_id in watched.pending
        if not mates:
            del watched.jobs[pending.job_id]
            self._expect_no_more(watched, pending.job_id)

    def _call(self, callback: Callable[[Any], object], told: Any) -> None:
        try:
            callback(told)
        except Exception:
            self._log.exception("a callback of the CompletionTracker failed")

    # -- hearing -------------------------------------------------------------------------------------------------------

    def _watch(self, queue: str) -> _Watched:
        watched = self._watched.get(queue)
        if watched is None:
            watched = self._watched[queue] = _Watched(queue)
        if watched.listener is None or watched.listener.done():
            watched.listening = asyncio.get_running_loop().create_future()
            watched.listener = asyncio.ensure_future(self._listen(watched, watched.listening))
        return watched

    async def _listen(self, watched: _Watched, listening: asyncio.Future[None]) -> None:
        try:
            async with self._listen_to(self._client, watched.name) as events:
                listening.set_result(None)
                async for event in events:
                    self._hear(watched, event)
        except HeadraceError as error:
            if not listening.done():
                listening.set_exception(error)
                listening.exception()  # nobody may be waiting for it
            else:
                self._log.warning("lost the connection that reports events of %s: %s", watched.name, error)

    def _hear(self, watched: _Watched, event: EventView) -> None:
        if event.event_type == "gap":
            self._look_at_all(watched)
        elif event.is_final:
            if event.job_id in watched.jobs:
                self._ended(watched, event)
            elif watched.unmapped:
                self._keep_early(watched, event)
        elif event.event_type in _UNFINISHED and event.job_id in watched.last_begins:
            self.expect_begin(watched.name, event.job_id, 0)

    def _keep_early(self, watched: _Watched, event: EventView) -> None:
        now = asyncio.get_running_loop().time()
        early = watched.early
        early[event.job_id] = (now, event)
        while early and (len(early) > MAX_EARLY or next(iter(early.values()))[0] < now - EARLY_SECONDS):
            early.popitem(last=False)

    def _ended(self, watched: _Watched, event: EventView) -> None:
        if event.event_type == "completed":
            self._complete_all(watched, event.job_id, event.data)
        elif event.event_type == "removed":
            self._fail_all(watched, event.job_id, EventCancelledError("Event cancelled"))
        else:
            # The stream tells the reason only; the job has the traceback and the attempt, too.
            fallback = ErrorReport.of_reason(event.error or "").rebuild()
            self._spawn(self._look(watched, event.job_id, fallback))

    def _complete_all(self, watched: _Watched, job_id: str, result: Any) -> None:
        for subscription_id in self.subscriptions_of(watched.name, job_id):
            self.complete(watched.name, subscription_id, result)

    def _fail_all(self, watched: _Watched, job_id: str, error: BaseException) -> None:
        for subscription_id in self.subscriptions_of(watched.name, job_id):
            self.fail(watched.name, subscription_id, error)

    # -- looking -------------------------------------------------------------------------------------------------------

    def look_at(self, queue: str, job_id: str) -> None:
        """Look whether a job that others may have added has ended already."""
        self._spawn(self._look(self._watch(queue), job_id, None))

    def _look_at_all(self, watched: _Watched, *, is_patrol: bool = False) -> None:
        for job_id, waiting in list(watched.jobs.items()):
            if not is_patrol or any(watched.pending[one].timer is None for one in waiting):
                self._look_again(watched, job_id)

    def _look_again(self, watched: _Watched, job_id: str) -> None:
        """Look at a job that was there when it was added."""
        self._spawn(self._look(watched, job_id, None, self._added(watched, job_id)))

    def _added(self, watched: _Watched, job_id: str) -> list[str]:
        return [one for one in self.subscriptions_of(watched.name, job_id) if watched.pending[one].is_added]

    async def _patrol(self) -> None:
        """Look now and then at the jobs of those who wait without limit, as long as there are any."""
        while any(one.timer is None for watched in self._watched.values() for one in watched.pending.values()):
            await asyncio.sleep(_LOOK_EVERY)
            for watched in self._watched.values():
                self._look_at_all(watched, is_patrol=True)
        self._is_patrolling = False

    async def _look(
        self, watched: _Watched, job_id: str, otherwise: BaseException | None, added: Sequence[str] = ()
    ) -> None:
        """Settle those who wait for a job by its state; one that has not ended gets `otherwise`, if anything.

        Without that, a store that does not answer is asked again for as long as somebody waits. `added` are those whose
        job was there before: if it is not any more, they wait in vain.
        """
        while True:
            try:
                info = await self._found(job_id)
                if self._settle(watched, info):
                    return
                if otherwise is None:
                    await self._mind_expiry(watched, info)
            except NotFound:
                self._tell_gone(watched, added)
            except HeadraceError:
                if otherwise is None and job_id in watched.jobs:
                    await asyncio.sleep(_LOOK_AGAIN)
                    continue
            break
        if otherwise is not None:
            self._fail_all(watched, job_id, otherwise)

    def _tell_gone(self, watched: _Watched, subscriptions: Sequence[str]) -> None:
        for subscription_id in subscriptions:
            self.fail(watched.name, subscription_id, EventCancelledError(_GONE))

    async def _mind_expiry(self, watched: _Watched, info: JobInfo) -> None:
        """Tell those who wait for a job that is too late to begin, or look again when it is; by the clock of the store,
        which ours may differ from."""
        if info.ttl is None:
            return
        waiting = self._added(watched, info.id)
        left = info.created_at + info.ttl - (await self._client.ask(Ping(), _LOOK_SECONDS)).data.time
        if left >= 0:
            self.expect_begin(watched.name, info.id, left / 1000)
        elif info.state != "active" and await self._found(info.id) == info:  # has it just begun, or is it another one?
            self._tell_gone(watched, waiting)

    async def _found(self, job_id: str) -> JobInfo:
        async with self._is_looking:
            return decode_job((await self._client.ask(GetJob(id=job_id), _LOOK_SECONDS)).job)

    def _settle(self, watched: _Watched, info: JobInfo) -> bool:
        """Whether the job has ended."""
        if info.state == "completed":
            self._complete_all(watched, info.id, info.result)
        elif info.state == "failed":
            self._fail_all(watched, info.id, failure_of(info))
        return info.state in ("completed", "failed")

    def _expire(self, watched: _Watched, subscription_id: str, limit: float) -> None:
        late = EventTimeoutError(f"Request timeout after {limit * 1000:g}ms")
        pending = watched.pending.get(subscription_id)
        if pending is None or pending.job_id is None:
            self.fail(watched.name, subscription_id, late)
        else:
            self._spawn(self._look_last(watched, subscription_id, pending.job_id, late))

    async def _look_last(self, watched: _Watched, subscription_id: str, job_id: str, late: EventTimeoutError) -> None:
        # Its turn to look counts as well: with a store that is away, many would wait for each other.
        with contextlib.suppress(HeadraceError, TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                self._settle(watched, await self._found(job_id))
        self.fail(watched.name, subscription_id, late)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Tell everybody who still waits, then stop listening."""
        for watched in self._watched.values():
            for subscription_id in list(watched.pending):
                self.fail(watched.name, subscription_id, ProviderStoppedError("CompletionTracker shutting down"))
        listeners = [watched.listener for watched in self._watched.values() if watched.listener is not None]
        self._watched.clear()
        self._is_patrolling = False
        for task in (*listeners, *self._looks):
            task.cancel()
        for task in (*listeners, *list(self._looks)):
            with contextlib.suppress(asyncio.CancelledError, HeadraceError):
                await task


def failure_of(info: JobInfo) -> HeadraceError:
    """Why a job failed for good."""
    reason = info.failed_reason or ""
    if is_stall(reason):
        return StalledError(f"The worker of the event died or hung: {reason}")
    return ErrorReport.of_reason(reason, info.stacktrace, attempt=info.attempts or None).rebuild()
