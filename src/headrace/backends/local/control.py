"""What clients do to single jobs and whole queues: cancel, delay, promote, pause, drain, clean, limits, groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import msgspec
from msgspec import Raw

from headrace.backends.base import QueueLimits
from headrace.backends.listing import Listing
from headrace.backends.local.delivery import Delivery
from headrace.backends.local.index import Queue, QueueConfig
from headrace.backends.local.job import Ended, Job
from headrace.backends.local.settlement import wrong_token
from headrace.backends.local.store import UNGROUPED, Clearing, group_of
from headrace.errors import NotFound, Refused, StorageUnavailable
from headrace.model import (
    DeadLetterReason,
    DlqConfig,
    EventName,
    RateLimit,
    StallConfig,
    intern_settings,
)
from headrace.states import State, Verb

T = TypeVar("T")

UNSTARTED: Final = (State.WAITING, State.DELAYED, State.WAITING_CHILDREN)
QUEUED: Final = (State.WAITING, State.DELAYED)
_ENDED: Final = (State.COMPLETED, State.FAILED)
CLEANABLE: Final[dict[str | None, tuple[State, ...]]] = {
    None: (State.WAITING, State.DELAYED, State.COMPLETED, State.FAILED),
    "wait": (State.WAITING,),
    "waiting": (State.WAITING,),
    "prioritized": (State.WAITING,),
    "paused": (State.WAITING,),
    "delayed": (State.DELAYED,),
    "completed": (State.COMPLETED,),
    "failed": (State.FAILED,),
    "waiting-children": (State.WAITING_CHILDREN,),
}
PLACES: Final = tuple(state for state in State if state is not State.REMOVED)


class Control(Delivery):
    # -- one job -------------------------------------------------------------------------------------------------------

    async def cancel(self, job_id: str, *, force: bool = False) -> None:
        job = self._get(job_id, "Job not found or cannot be cancelled")
        if job.state not in UNSTARTED and not (force and job.state is State.ACTIVE):
            raise Refused("Job not found or cannot be cancelled")
        now = self._clock.now_ms()
        self._tell_removed(job, now)
        self._take_away(job, "its job was cancelled", now, Verb.CANCEL)

    def _take_away(self, job: Job, why: str, now: int, verb: Verb = Verb.REMOVE) -> None:
        """Remove a job on behalf of a client. If it had not ended, it counts as failed for those that wait for it."""
        if job.state not in _ENDED:
            self._tell_flow_of_removal(job, why, now)
            self._child_failed(job, "removed", now)
        self._remove(job, verb)

    def _active(self, job_id: str) -> Job:
        job = self._get(job_id)
        if job.state is not State.ACTIVE:
            raise Refused(f"Job is not active (current state: {job.state.word})")
        return job

    @staticmethod
    def _check_token(job: Job, token: str | None) -> None:
        lease = job.lease
        if lease is not None and lease.token not in (None, token):
            raise wrong_token(job.id, token)

    async def set_progress(self, job_id: str, progress: float, message: str | None) -> None:
        job = self._active(job_id)
        now = self._clock.now_ms()
        history = job.remember()
        history.progress = min(100, max(0, progress))
        if message is not None:
            history.message = message
        if job.lease is not None:
            mono = self._clock.monotonic_ms()
            job.lease = msgspec.structs.replace(job.lease, heartbeat_ms=now, heartbeat_mono=mono)
        self._journal.touch(job)
        event = self._emit(EventName.PROGRESS, job, now)
        event.progress = history.progress
        event.action = history.message

    async def progress(self, job_id: str) -> tuple[float, str | None]:
        job = self._active(job_id)
        return (job.history.progress, job.history.message) if job.history else (0, None)

    async def update(self, job_id: str, data: Raw) -> None:
        job = self._find(job_id)
        if job is not None and job.state is State.COMPLETED:
            following = job.history.successor if job.history is not None else None
            job = self._find(following) if following is not None else None
        if job is None or job.state in _ENDED:
            raise Refused("Job not found or cannot be updated")
        self._replace_data(job, bytes(data))
        self._emit(EventName.UPDATED, job, self._clock.now_ms()).bytes = job.size

    def _replace_data(self, job: Job, data: bytes) -> None:
        job.data = data
        job.size = len(data)
        self._journal.rewrite(job)

    async def change_priority(self, job_id: str, priority: int, lifo: bool | None) -> None:
        job = self._get(job_id, "Job not found or not in queue")
        if job.state not in QUEUED:
            raise Refused("Job not found or not in queue")
        self._leave(job)
        job.priority = priority
        if lifo is not None and lifo != job.settings.lifo:
            job.settings = intern_settings(msgspec.structs.replace(job.settings, lifo=lifo))
        self._enter(job)
        self._journal.touch(job)

    async def promote(self, job_id: str) -> None:
        job = self._get(job_id, "Job not found or not delayed")
        if job.state is not State.DELAYED:
            raise Refused("Job not found or not delayed")
        self._promote(job, self._clock.now_ms())

    def _promote(self, job: Job, now: int) -> None:
        job.remember()
        job.run_at = now
        self._move(job, Verb.PROMOTE)
        self._note(job, "waiting", now)
        self._journal.touch(job)
        self._emit(EventName.PROMOTED, job, now)

    async def promote_many(self, queue: str, count: int | None) -> int:
        q = self._queues.get(queue)
        if q is None:
            return 0

        def promote(job: Job, now: int) -> bool:
            self._promote(job, now)
            return True

        oldest = sorted(q.delayed.values(), key=lambda job: (job.created, job.seq))[:count]
        return await self._for_each(oldest, (State.DELAYED,), promote)

    async def move_to_delayed(self, job_id: str, delay_ms: float, token: str | None) -> None:
        job = self._get(job_id)
        if job.state not in (State.ACTIVE, State.WAITING, State.DELAYED):
            raise Refused(f"Job is not active (current state: {job.state.word})")
        self._delay(job, delay_ms, token)

    async def change_delay(self, job_id: str, delay_ms: float, token: str | None) -> None:
        job = self._get(job_id, "Job not found or cannot change delay")
        if job.state not in (State.ACTIVE, State.WAITING, State.DELAYED):
            raise Refused("Job not found or cannot change delay")
        self._delay(job, delay_ms, token)

    def _delay(self, job: Job, delay_ms: float, token: str | None) -> None:
        self._check_token(job, token)
        now = self._clock.now_ms()
        lease = job.lease
        job.remember()
        job.run_at = now + int(delay_ms)
        self._move(job, Verb.DELAY)
        self._settle_time(job, now)
        if lease is not None:
            job.ended = Ended(lease.token, finalized=True)
            job.started = None
        self._note(job, job.state.word, now)
        self._journal.touch(job)
        self._emit(EventName.DELAYED, job, now).delay = int(delay_ms)

    async def move_to_wait(self, job_id: str, token: str | None) -> None:
        job = self._get(job_id)
        now = self._clock.now_ms()
        if job.state is State.ACTIVE:
            self._check_token(job, token)
            self._emit(EventName.RELEASED, job, now).attempt = job.attempts + 1
            self._back_to_waiting(job)
            job.ended = None
        elif job.state is State.DELAYED:
            self._promote(job, now)
        elif job.state is not State.WAITING and not (job.state is State.FAILED and self._revive_dead_letter(job, now)):
            raise Refused(f"Cannot move job from state '{job.state.word}' to waiting")

    async def move_to_waiting_children(self, job_id: str, token: str | None) -> bool:
        job = self._get(job_id)
        if job.state is not State.ACTIVE:
            raise Refused("Job is not active")
        self._check_token(job, token)
        now = self._clock.now_ms()
        children = [child for child in map(self._find, job.own_links().children_ids) if child is not None]
        pending = [child.id for child in children if child.state is not State.COMPLETED]
        self._await_children(job, pending, now)
        job.started = None
        self._hear_of_failures(pending, now)
        if children:
            # Without children yet it waits for the first one to be pushed; with all of them done it may go on.
            self._after_drop(job, now)
        return True

    async def discard(self, job_id: str, token: str | None) -> None:
        job = self._get(job_id)
        if job.state in _ENDED:
            raise NotFound("Job not found")
        self._check_token(job, token)
        now = self._clock.now_ms()
        lease = job.lease
        event = self._emit(EventName.FAILED, job, now)
        event.terminal = True
        event.action = "discard"
        self._attach_data(event, job)
        self._note(job, "failed", now)
        self._bury_or_remove(job, now, DeadLetterReason.UNKNOWN, None, remove=False, is_discarded=True)
        if lease is not None:
            job.ended = Ended(lease.token, finalized=True)

    # -- one queue -----------------------------------------------------------------------------------------------------

    async def pause(self, queue: str) -> None:
        self._set_paused(queue, True, EventName.PAUSED)

    async def resume(self, queue: str) -> None:
        self._set_paused(queue, False, EventName.RESUMED)

    def _set_paused(self, name: str, paused: bool, event: EventName) -> None:
        queue = self._queue(name)
        if queue.config.paused == paused:
            return
        queue.config.paused = paused
        self._save_queue(queue)
        self._ready.add(name)
        self._emit_queue(event, name, self._clock.now_ms())

    async def is_paused(self, queue: str) -> bool:
        q = self._queues.get(queue)
        return q is not None and q.config.paused

    async def drain(self, queue: str) -> int:
        q = self._queues.get(queue)
        doomed = [] if q is None else [*q.delayed.values(), *q.ready.live()]
        if q is None or not doomed:
            return 0
        with self._clearing(EventName.DRAINED, q) as clearing:

            def drain(job: Job, now: int) -> bool:
                self._clear_away(clearing, job, now)
                return True

            count = await self._for_each(_from_the_end(doomed), QUEUED, drain)
            self._tell_cleared(clearing, count)
        return count

    @contextmanager
    def _clearing(self, event: EventName, q: Queue) -> Iterator[Clearing]:
        """While a queue is being emptied. If interrupted, `LocalBackend._finish_clearings` continues it."""
        clearing = Clearing(event, q.name, self._event_seq, self._first_event)
        spared = [job.seq for job in q.active.values()] if event is EventName.DRAINED else []
        self._journal.open_clearing(event, q.name, clearing.since, self._job_seq, spared)
        self._clearings.append(clearing)
        try:
            yield clearing
        finally:
            self._clearings.remove(clearing)

    def _clear_away(self, clearing: Clearing, job: Job, now: int) -> None:
        clearing.look_at(self._events)
        if job.id in clearing.newly_told:
            self._tell_removed(job, now)
        self._take_away(job, clearing.why, now)

    def _tell_cleared(self, clearing: Clearing, count: int) -> None:
        event = self._emit_queue(clearing.event, clearing.queue, self._clock.now_ms())
        event.bytes, event.first, event.last = count, clearing.first, clearing.since
        self._journal.close_clearing(clearing.event, clearing.queue, clearing.since)

    async def obliterate(self, queue: str) -> None:
        q = self._queues.pop(queue, None)
        if q is None:
            return
        # From here on nothing finds the old queue or its jobs; a push makes a new queue of that name.
        q.is_dead = True
        self._obliterated.append(q)
        successor = Queue(queue)
        successor.watchers = q.watchers
        if q.watchers:
            self._queues[queue] = successor
        self._journal.drop_record("queue", queue)
        self._touched_queues.add(queue)
        self._slices.begin()
        doomed: list[Job] = [job for state in PLACES for job in q.jobs_in(state)]
        count = len(doomed)
        try:
            with self._clearing(EventName.OBLITERATED, q) as clearing:
                for n in range(count):
                    job = doomed.pop()  # newest first and freed slice by slice: see _from_the_end
                    if job.state is not State.REMOVED:  # time may have removed it between two slices
                        self._clear_away(clearing, job, self._clock.now_ms())
                    if n % 128 == 0:
                        await self._slices.breathe()
                q.clear()
                self._tell_cleared(clearing, count)
        except StorageUnavailable:
            if q.is_dead:  # else the rollback of its first tick has already restored it
                self._raise(q)
            raise

    def _raise(self, queue: Queue) -> None:
        """Its obliteration was interrupted: restore the rest of the queue, merged with what was pushed since."""
        successor = self._queues.get(queue.name)
        queue.is_dead, queue.config = False, QueueConfig()
        self._queues[queue.name] = queue
        self._ready.add(queue.name)
        if successor is not None:
            queue.config, queue.watchers = successor.config, successor.watchers
            for job in [job for state in PLACES for job in successor.jobs_in(state)]:
                lease, started = job.lease, job.started
                self._leave(job)
                job.queue = queue
                self._enter(job)
                if lease is not None:
                    self._hold(job, lease, started)
            queue.keys |= successor.keys
            queue.custom_ids |= successor.custom_ids
            successor.clear()
        for letter in queue.failed.values():
            self._watch_burial(letter)

    async def clean(self, queue: str, grace_ms: float, state: str | None, limit: int) -> list[str]:
        q = self._queues.get(queue)
        if q is None:
            return []
        before, states = self._clock.now_ms() - grace_ms, CLEANABLE.get(state, ())
        removed = Listing()

        def clean(job: Job, now: int) -> bool:
            at = job.finished if job.finished is not None else job.created
            if at > before or (state == "prioritized" and job.priority <= 0):
                return False
            self._tell_removed(job, now)
            self._take_away(job, f"queue {queue} was cleaned", now)
            removed.add(job.id)
            return True

        jobs = [job for s in states for job in q.jobs_in(s)]
        await self._for_each(itertools.takewhile(lambda _: removed.has_room, jobs), states, clean, most=limit)
        return removed.ids

    async def _for_each(
        self, jobs: Iterable[Job], states: Sequence[State], do: Callable[[Job, int], bool], most: int | None = None
    ) -> int:
        """Apply `do` to those of these jobs that are in one of these states; returns how often it applied.

        Works in slices. Other commands run between them, so a job may have changed its state or be gone. `do` is
        told the time anew: events of one tick that are far apart would be taken for those of several (`lost_upto`).
        """
        self._slices.begin()
        count = 0
        for n, job in enumerate(jobs, 1):
            if count == most:
                break
            if job.state in states and not job.queue.is_dead:
                count += do(job, self._clock.now_ms())
            if n % 128 == 0:
                await self._slices.breathe()
        return count

    # -- settings of a queue -------------------------------------------------------------------------------------------

    def _config(self, queue: str) -> QueueConfig:
        q = self._queues.get(queue)
        return q.config if q is not None else QueueConfig()

    async def stall_config(self, queue: str) -> StallConfig:
        return self._config(queue).stall or StallConfig()

    async def set_stall_config(self, queue: str, config: StallConfig) -> None:
        q = self._queue(queue)
        q.config.stall = config
        self._save_queue(q)
        for job in q.active.values():
            self._wheel.discard(job)
            self._wheel.add(job, self._next_look(job))

    async def dlq_config(self, queue: str) -> DlqConfig:
        return self._config(queue).dlq or DlqConfig()

    async def set_dlq_config(self, queue: str, config: DlqConfig) -> None:
        q = self._queue(queue)
        q.config.dlq = config
        self._save_queue(q)
        room = 2 * len(q.failed)
        self._most_burials += room  # not to be tidied in the midst of it, in one go
        try:
            # By the config of the queue: it may be changed again between two slices.
            await self._for_each(list(q.failed.values()), (State.FAILED,), self._plan_anew)
        finally:
            self._most_burials = max(0, self._most_burials - room)
        if len(self._burials) > self._most_burials:
            await self._tidy_burials_slowly()

    async def set_rate_limit(self, queue: str, limit: float, duration_ms: float, ttl_ms: float | None) -> None:
        q = self._queue(queue)
        until = None if ttl_ms is None else float(self._clock.now_ms() + int(ttl_ms))
        q.config.rate_limit = RateLimit(limit, duration_ms, until)
        q.bucket = None
        self._save_queue(q)
        self._ready.add(queue)
        if until is not None:
            self._limited_until.add(queue)
            self._wake_at(q, self._clock.monotonic_ms() + int(ttl_ms or 0) + 1)

    async def clear_rate_limit(self, queue: str) -> None:
        q = self._queue(queue)
        q.config.rate_limit = None
        q.bucket = None
        self._save_queue(q)
        self._ready.add(queue)

    async def set_concurrency(self, queue: str, limit: int | None) -> None:
        q = self._queue(queue)
        q.config.concurrency = limit
        self._save_queue(q)
        self._ready.add(queue)

    async def limits(self, queue: str) -> QueueLimits:
        q = self._queues.get(queue)
        if q is None:
            return QueueLimits(None, -2, None, False)
        config = q.config
        maxed = config.concurrency is not None and len(q.active) >= config.concurrency
        return QueueLimits(config.rate_limit, self._rate_limit_ttl(q), config.concurrency, maxed)

    def _rate_limit_ttl(self, q: Queue) -> float:
        """ms until the limit is over or, for a lasting one, until the next token; -2 without a limit."""
        limit = q.config.rate_limit
        if limit is None:
            return -2
        if limit.until is not None:
            return max(0.0, limit.until - self._clock.now_ms())
        wait = q.bucket.wait_ms(self._clock.monotonic_ms()) if q.bucket is not None else 0
        return float(wait or 0)

    # -- unique keys ---------------------------------------------------------------------------------------------------

    async def unique_key_owner(self, queue: str, key: str) -> str | None:
        q = self._queues.get(queue)
        holder = q.keys.get(key) if q is not None else None
        if holder is None or (holder.expires is not None and holder.expires <= self._clock.now_ms()):
            return None
        return holder.job.id

    async def remove_unique_key(self, queue: str, key: str) -> int:
        q = self._queues.get(queue)
        holder = q.keys.get(key) if q is not None else None
        return int(holder is not None and self._take_key_away(holder.job))

    async def remove_job_unique_key(self, job_id: str) -> bool:
        job = self._find(job_id)
        return job is not None and self._take_key_away(job)

    def _take_key_away(self, job: Job) -> bool:
        if not self._release_key(job):
            return False
        job.remember().key_released = True
        self._journal.touch(job)
        return True

    # -- groups --------------------------------------------------------------------------------------------------------

    async def group_jobs_count(self, queue: str, group: str) -> int:
        q = self._queues.get(queue)
        return sum(group_of(job) == group for job in self._queued(q)) if q is not None else 0

    async def groups_jobs_count(self, queue: str) -> int:
        q = self._queues.get(queue)
        return sum(group_of(job) != UNGROUPED for job in self._queued(q)) if q is not None else 0

    @staticmethod
    def _queued(q: Queue) -> Iterable[Job]:
        return (*q.ready.live(), *q.delayed.values())

    async def group_active_count(self, queue: str, group: str) -> int:
        q = self._queues.get(queue)
        return sum(group_of(job) == group for job in q.active.values()) if q is not None else 0

    async def set_group_rate_limit(self, queue: str, group: str, limit: RateLimit | None) -> bool:
        q = self._queue(queue)
        return self._set_limit(q, q.config.group_limits, group, limit)

    def _set_limit(self, q: Queue, limits: dict[str, T], group: str, limit: T | None) -> bool:
        """Set or, with None, remove one of the limits of a group; whether there was one."""
        had = group in limits
        if limit is not None:
            limits[group] = limit
        else:
            limits.pop(group, None)
        self._save_queue(q)
        self._ready.add(q.name)
        return had

    async def group_rate_limit(self, queue: str, group: str) -> RateLimit | None:
        return self._config(queue).group_limits.get(group)

    async def group_rate_limit_ttl(self, queue: str, group: str) -> float:
        q = self._queues.get(queue)
        known = q.groups.get(group) if q is not None else None
        if known is None:
            return -2
        mono = self._clock.monotonic_ms()
        wait = known.bucket.wait_ms(mono) if known.bucket is not None else 0
        left = max(known.held_until - mono, wait or 0)
        return float(left) if left > 0 else -2

    async def rate_limit_group(self, queue: str, group: str, duration_ms: float) -> None:
        q = self._queue(queue)
        held = self._group(q, group)
        held.held_until = self._clock.monotonic_ms() + int(duration_ms)
        self._wake_at(q, held.held_until)

    async def set_group_concurrency(self, queue: str, group: str, limit: int | None) -> bool:
        q = self._queue(queue)
        return self._set_limit(q, q.config.group_concurrency, group, limit)

    async def group_concurrency(self, queue: str, group: str) -> int | None:
        return self._config(queue).group_concurrency.get(group)

    async def pause_group(self, queue: str, group: str, paused: bool) -> bool:
        q = self._queue(queue)
        if (group in q.config.paused_groups) == paused:
            return False
        if paused:
            q.config.paused_groups.append(group)
        else:
            q.config.paused_groups.remove(group)
        self._save_queue(q)
        self._ready.add(queue)
        return True

    async def is_group_paused(self, queue: str, group: str) -> bool:
        return group in self._config(queue).paused_groups


def _from_the_end(jobs: list[Job]) -> Iterator[Job]:
    """The ready order gives up its newest job at no cost, and what is popped here is freed slice by slice."""
    while jobs:
        yield jobs.pop()
