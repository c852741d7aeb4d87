"""The state of the local backend and the few moves that all verbs are made of.

Rules:
- Every change of a job's state goes through `_move` or `_remove`, which consult the transition table, keep the counts
  and move the job from one index to another. The few hot paths that spell this out say so.
- Every change is marked in the journal (`_journal.touch` and friends) and emitted (`_emit`) within the same verb.
- Verbs are grouped by subject into a chain of subclasses (Intake, Settlement, Delivery, ...); LocalBackend is the last.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from msgspec import Raw

from headrace.backends.base import QueueFigures, Totals
from headrace.backends.collection import Collection
from headrace.backends.local.index import DueOrder, Group, LeaseWheel, Queue, QueueConfig
from headrace.backends.local.job import History, Job, Lease
from headrace.backends.local.journal import Journal
from headrace.backends.local.slices import Slices
from headrace.briefs import brief, brief_text
from headrace.clock import Alarm, Clock
from headrace.errors import NotFound, StorageUnavailable
from headrace.ids import IdSource
from headrace.model import EVENT_WORDS, MAX_TIMELINE, Event, EventName, TimelineEntry
from headrace.states import State, Verb, advance
from headrace.views import HistoryView, brief_history, encode, encode_job, history_of, rich_history

MAX_SATISFIED: Final = 100_000
MAX_DEPARTED: Final = 10_000

# Members of an enum are looked up through its metaclass; on the hot path they are plain globals.
_WAITING: Final = State.WAITING
_DELAYED: Final = State.DELAYED
_ACTIVE: Final = State.ACTIVE
_COMPLETED: Final = State.COMPLETED
_NOT_READ_BACK: Final = "Storage error: the job cannot be read at the moment. The server resumes when the disk works."
UNGROUPED: Final = ""
"""The name under which jobs without a groupId are kept when groups are served in turn; no client can send it."""


def group_of(job: Job) -> str:
    return UNGROUPED if job.links is None or job.links.group_id is None else job.links.group_id


class Clearing:
    """A queue that is being emptied in slices. One event at the end covers all jobs without an event `since` it began.

    A job with a newer event (it was promoted, or released by a worker) gets a `removed` event of its own: readers of
    the log could not tell it from jobs that were pushed while the queue was being emptied.

    `first` is the first event of the server that empties it: claims before that are forgotten, and nobody works on
    those jobs. It is None when an earlier server has begun, which knew of them.
    """

    __slots__ = ("_seen", "event", "first", "newly_told", "queue", "since")

    def __init__(self, event: EventName, queue: str, since: int, first: int | None = None) -> None:
        self.event = event
        self.queue = queue
        self.first = first
        self.since = self._seen = since
        self.newly_told: set[str] = set()

    @property
    def why(self) -> str:
        return f"queue {self.queue} was {EVENT_WORDS[self.event]}"

    def look_at(self, events: list[Event]) -> None:
        """Take in the events of the tick so far."""
        for event in reversed(events):
            if event.seq <= self._seen:
                break
            if event.queue == self.queue:
                self.newly_told.add(event.job)
        if events:
            self._seen = events[-1].seq


class Store(Collection):
    def __init__(self, journal: Journal, clock: Clock, rng: Callable[[], float]) -> None:
        super().__init__()
        self._journal = journal
        self._clock = clock
        self._rng = rng
        self.ids = IdSource(clock)
        self._slices = Slices()
        self._jobs: dict[str, Job] = {}
        self._unread_ids: set[str] = set()
        """Jobs that a failed tick had touched, while the disk cannot be read: what became of them is not known."""
        self._queues: dict[str, Queue] = {}
        self._completed: dict[int, Job] = {}
        self._due = DueOrder()
        self.alarm = Alarm()
        self._wheel = LeaseWheel(self.alarm)
        self._wakes: list[tuple[int, str]] = []
        self._burials: list[tuple[int, int]] = []
        """Heap of (due, seq) of dead letters to be retried or removed. May have entries of letters that are gone."""
        self._most_burials = 0
        """The number of entries above which stale ones are looked for."""
        self._dependents: dict[str, list[Job]] = {}
        self._satisfied: OrderedDict[str, None] = OrderedDict()
        """Ids of jobs that completed and were not kept: they still satisfy a dependsOn."""
        self._departed: OrderedDict[str, str | None] = OrderedDict()
        """Jobs that were removed when their lease ended, and its token: like `Job.ended`, for a late ACK or FAIL."""
        self._bad_news: deque[tuple[Job, str | None]] = deque()
        """Failures still to be applied to parents."""
        self._open_batches: dict[int, int] = {}
        """Long batches (first seq -> last seq) that are still incomplete."""
        self._closing_batches: list[int] = []
        self._logged: set[int] = set()
        """Jobs that have log lines."""
        self._job_seq = 0
        self._lease_serial = 0
        self._serial_before = 0
        """That of the newest lease when this tick began."""
        self._totals = Totals()
        self._overall = QueueFigures()
        """Counters of rare events over all queues, including removed ones: a sum over queues would drop with them."""
        self._claimed: list[Job] = []
        self._ended_leases: list[tuple[int, Lease, int | None]] = []
        self._touched_queues: set[str] = set()
        self._obliterated: list[Queue] = []
        self._clearings: list[Clearing] = []
        self._event_seq = 0
        self._first_event = 1
        self._epoch = 1
        self.wants_bodies = False

    # -- finding -------------------------------------------------------------------------------------------------------

    def _find(self, job_id: str) -> Job | None:
        job = self._jobs.get(job_id)
        if job is None and job_id in self._unread_ids:
            raise StorageUnavailable(_NOT_READ_BACK)
        return None if job is None or job.queue.is_dead else job

    def _get(self, job_id: str, error: str = "Job not found") -> Job:
        job = self._find(job_id)
        if job is None:
            raise NotFound(error)
        return job

    def _queue(self, name: str) -> Queue:
        """The queue of that name, created on first use."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = Queue(name)
        return queue

    # -- moving --------------------------------------------------------------------------------------------------------

    def _move(self, job: Job, verb: Verb) -> None:
        """Take `job` through one transition: state, counts, and its place in the index."""
        after = advance(job.state, verb)
        self._leave(job)
        job.state = after
        self._enter(job)

    def _leave(self, job: Job) -> None:
        queue, state = job.queue, job.state
        if state is _WAITING:
            queue.waiting -= 1
            if job.priority > 0:
                queue.prioritized -= 1
            queue.ready.note_removed(job)
            if queue.is_grouped:
                self._group(queue, group_of(job)).ready.note_removed(job)
            return
        del queue.places[state][job.seq]
        if state is _ACTIVE:
            self._drop_lease(job)
        elif state is _COMPLETED:
            self._completed.pop(job.seq, None)
        elif state is _DELAYED:
            self._due.note_removed()

    def _enter(self, job: Job) -> None:
        queue, state = job.queue, job.state
        if state is _WAITING:
            queue.waiting += 1
            if job.priority > 0:
                queue.prioritized += 1
            queue.ready.push(job)
            if queue.is_grouped:
                self._group(queue, group_of(job)).ready.push(job)
            self._ready.add(queue.name)
            return
        queue.places[state][job.seq] = job
        if state is _COMPLETED:
            self._completed[job.seq] = job
        elif state is _DELAYED:
            self._due.push(job)
            self._ring_at(job.run_at)

    def _ring_at(self, wall_ms: int) -> None:
        """Schedule a `sweep` for that wall time."""
        self.alarm.ring_by(wall_ms - self._clock.now_ms() + self._clock.monotonic_ms())

    def _settle_time(self, job: Job, now: int) -> None:
        """Promote a delayed job that is already due."""
        if job.state is State.DELAYED and job.run_at <= now:
            self._move(job, Verb.PROMOTE)

    def _drop_lease(self, job: Job) -> None:
        lease = job.lease
        if lease is None:
            return
        self._ended_leases.append((job.seq, lease, job.started))
        if lease.bucket is not None:
            lease.bucket.jobs.pop(job.seq, None)
        if lease.holder is not None:
            lease.holder.pop(job.id, None)
        job.lease = None
        queue = job.queue
        if queue.is_grouped:
            self._group(queue, group_of(job)).active -= 1
            self._ready.add(queue.name)
        elif queue.config.concurrency is not None:
            # A slot is free again: the next parked pull may be served.
            self._ready.add(queue.name)

    def _remove(self, job: Job, verb: Verb = Verb.REMOVE) -> None:
        """The job is gone from memory and, with the commit, from disk."""
        after = advance(job.state, verb)
        self._release_key(job)
        self._leave(job)
        job.state = after
        self._forget(job)
        self._journal.remove(job)
        if job.seq in self._logged:
            self._logged.discard(job.seq)
            self._journal.later("DELETE FROM log WHERE job=?", job.seq)

    def _forget(self, job: Job) -> None:
        """Remove it from the lookups; it has already left the index."""
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]
        links = job.links
        if links is not None:
            if links.custom_id and job.queue.custom_ids.get(links.custom_id) is job:
                del job.queue.custom_ids[links.custom_id]
            # A custom id in dependsOn may stand for another job id, which `pending` then names.
            pending = job.history.pending if job.history is not None else ()
            for dependency in {*links.depends_on, *pending}:
                self._await_no_more(job, dependency)

    def _await_no_more(self, job: Job, dependency: str) -> None:
        waiting = self._dependents.get(dependency)
        if waiting is not None and job in waiting:
            waiting.remove(job)
            if not waiting:
                del self._dependents[dependency]

    # -- unique keys ---------------------------------------------------------------------------------------------------

    def _release_key(self, job: Job) -> bool:
        if job.links is None or not job.links.unique_key:
            return False
        holder = job.queue.keys.get(job.links.unique_key)
        if holder is None or holder.job is not job:
            return False
        del job.queue.keys[job.links.unique_key]
        return True

    # -- emitting ------------------------------------------------------------------------------------------------------

    def _emit(self, name: EventName, job: Job, now: int) -> Event:
        """Record that something happened to a job; the caller may add details to the returned event."""
        self._event_seq = seq = self._event_seq + 1
        event = Event(seq, now, EVENT_WORDS[name], self._epoch, job.queue.name, job.id, job.name)
        self._events.append(event)
        return event

    def _tell_removed(self, job: Job, now: int) -> None:
        """Before it goes: what it was is part of the event."""
        self._emit(EventName.REMOVED, job, now).prev = job.state.word

    def _emit_queue(self, name: EventName, queue: str, now: int) -> Event:
        self._event_seq = seq = self._event_seq + 1
        event = Event(seq, now, EVENT_WORDS[name], self._epoch, queue)
        self._events.append(event)
        return event

    def _attach(self, event: Event, job: Job, body: bytes | None) -> None:
        """Keep the result or data of an event for live subscribers; the log itself carries no payloads."""
        if body is not None and (self.wants_bodies or job.queue.watchers):
            self._bodies[event.seq] = body

    def _attach_data(self, event: Event, job: Job) -> None:
        """`_attach` of the data of a job, which is read only if somebody wants it; nothing fails for want of it."""
        if self.wants_bodies or job.queue.watchers:
            with suppress(StorageUnavailable):
                self._bodies[event.seq] = self._data(job)

    def _note(
        self,
        job: Job,
        state: str,
        now: int,
        *,
        error: str | None = None,
        attempt: int | None = None,
        worker: str | None = None,
    ) -> None:
        timeline = job.remember().timeline
        timeline.append(TimelineEntry(state, float(now), error, attempt, worker))
        if len(timeline) > MAX_TIMELINE:
            del timeline[1]

    # -- settings of queues --------------------------------------------------------------------------------------------

    def _save_queue(self, queue: Queue) -> None:
        self._touched_queues.add(queue.name)
        if queue.config == QueueConfig():
            self._journal.drop_record("queue", queue.name)
        else:
            self._journal.put_record("queue", queue.name, encode(queue.config))

    def _group(self, queue: Queue, name: str) -> Group:
        group = queue.groups.get(name)
        if group is None:
            group = queue.groups[name] = Group()
            if name != UNGROUPED:
                queue.turn.append(name)
        return group

    # -- showing -------------------------------------------------------------------------------------------------------

    def _data(self, job: Job) -> bytes:
        return job.data if job.data is not None else self._journal.data(job)

    def _result(self, job: Job) -> bytes | None:
        if job.result is None and job.state is State.COMPLETED and self._journal.keeps_jobs:
            return self._journal.result(job)
        return job.result

    def _whole_history(self, job: Job) -> bytes:
        """The history as queries show it: with the worker, also while it runs the first attempt."""
        if job.history is None and job.lease is not None and job.lease.owner is not None:
            return rich_history(HistoryView(0, 0, None, None, job.beginnings()))
        return history_of(job, job.history)

    def _show(self, job: Job) -> Raw:
        """The job as a puller sees it."""
        return encode_job(job, job.queue.encoded_name, self._data(job), history_of(job, job.history))

    def _show_whole(self, job: Job) -> Raw:
        """The job as a query sees it: with state, returnvalue and failedReason."""
        return encode_job(
            job,
            job.queue.encoded_name,
            self._data(job),
            self._whole_history(job),
            state=job.state.word,
            result=self._result(job),
            failed_reason=self._failed_reason(job),
        )

    def _show_brief(self, job: Job) -> Raw:
        """The job as a list of many shows it."""
        data, past = self._data(job), job.history or History()
        return encode_job(
            job,
            job.queue.encoded_name,
            brief(data),
            brief_history(past.children_completed, past.progress, brief_text(past.message)),
            state=job.state.word,
            failed_reason=brief_text(self._failed_reason(job)),
            data_bytes=len(data),
        )

    @staticmethod
    def _failed_reason(job: Job) -> str | None:
        if job.history is None:
            return None
        if job.history.burial is not None and job.history.burial.error is not None:
            return job.history.burial.error
        return next((entry.error for entry in reversed(job.history.timeline) if entry.error is not None), None)

    # -- timers --------------------------------------------------------------------------------------------------------

    def _wake_at(self, queue: Queue, due_mono: int) -> None:
        """Retry the parked pulls of a queue at that moment."""
        if queue.wake_mono and queue.wake_mono <= due_mono:
            return
        queue.wake_mono = due_mono
        heapq.heappush(self._wakes, (due_mono, queue.name))
        self.alarm.ring_by(due_mono)
