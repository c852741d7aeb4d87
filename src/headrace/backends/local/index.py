"""The in-memory indexes: which job is next, which is due when. Pure data structures, no clock, no storage.

Entries of heaps and deques are deleted lazily: a job that was cancelled or claimed elsewhere is skipped when it comes
up. That is safe because a job is handed out only if its state says WAITING at that moment.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from headrace.backends.base import QueueFigures
from headrace.backends.local.job import Job
from headrace.buckets import TokenBucket
from headrace.clock import Alarm
from headrace.model import DEFAULT_SETTINGS, DlqConfig, RateLimit, StallConfig
from headrace.states import State

_COMPACT_AFTER: Final = 1024
_ELDER_SAMPLE: Final = 256
_WAITING: Final = State.WAITING


class ReadyOrder:
    """Waiting jobs, best first: priority descending, LIFO before FIFO, LIFO newest first, FIFO by time then age.

    Plain jobs (priority 0, FIFO) arrive in order, so they live in a deque; everything else is in a heap. A job that
    leaves from the middle of the deque and comes back goes to the heap as well: its old entry, which is not where the
    job belongs now, is void until it is passed.
    """

    __slots__ = ("_elder", "_elder_offset", "_fifo", "_heap", "_is_by_age", "_serial", "_stale", "_void")

    def __init__(self) -> None:
        self._fifo: deque[Job] = deque()
        self._heap: list[tuple[int, int, int, int, int, Job]] = []
        self._serial = itertools.count()
        self._stale = 0
        self._void: set[int] = set()
        """Jobs whose entry in the deque counts no more."""
        self._is_by_age = True
        self._elder: Job | None = None
        self._elder_offset = 0

    def push(self, job: Job) -> None:
        if job.priority == 0 and not job.settings.lifo and job.seq not in self._void:
            fifo = self._fifo
            if job.run_at != job.created:
                self._is_by_age = False
            elif not fifo:
                self._is_by_age = True
            if not fifo or job.run_at > fifo[-1].run_at or (job.run_at == fifo[-1].run_at and job.seq > fifo[-1].seq):
                fifo.append(job)
                return
        heapq.heappush(self._heap, self._entry(job))

    def extend(self, jobs: list[Job]) -> bool:
        """Add many new jobs at once if they are all plain, due since their creation, and belong behind all others.

        False, with nothing added, when they are not.
        """
        fifo, first = self._fifo, jobs[0]
        if fifo and (fifo[-1].run_at, fifo[-1].seq) > (first.run_at, first.seq):
            return False
        for job in jobs:
            if job.priority or job.settings.lifo or job.run_at != first.run_at or job.created != first.run_at:
                return False
            if job.state is not _WAITING:
                return False
        if not fifo:
            self._is_by_age = True
        fifo.extend(jobs)
        return True

    def _entry(self, job: Job) -> tuple[int, int, int, int, int, Job]:
        # The serial keeps two entries of one job from being compared by job.
        if job.settings.lifo:
            return (-job.priority, 0, 0, -job.seq, next(self._serial), job)
        return (-job.priority, 1, job.run_at, job.seq, next(self._serial), job)

    def peek(self) -> Job | None:
        """The best job, or None. Stale entries above it are dropped."""
        fifo, heap, void = self._fifo, self._heap, self._void
        while fifo and (
            fifo[0].seq in void or fifo[0].state is not State.WAITING or fifo[0].priority != 0 or fifo[0].settings.lifo
        ):
            void.discard(fifo.popleft().seq)
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        if not heap:
            return fifo[0] if fifo else None
        if fifo and (0, 1, fifo[0].run_at, fifo[0].seq) < heap[0][:4]:
            return fifo[0]
        return heap[0][5]

    def pop_plain(self, count: int, size: int) -> list[Job]:
        """Up to `count` of the best jobs, as long as they stand in the deque, have nothing but defaults and payloads of
        at most `size` bytes."""
        fifo = self._fifo
        jobs: list[Job] = []
        if not self._heap:
            while fifo and len(jobs) < count:
                job = fifo[0]
                if job.settings is not DEFAULT_SETTINGS or job.state is not _WAITING or job.priority or job.size > size:
                    break
                jobs.append(fifo.popleft())
        return jobs

    def pop(self) -> Job | None:
        fifo = self._fifo
        if fifo and not self._heap:
            job = fifo.popleft()
            if job.state is _WAITING and job.priority == 0 and not job.settings.lifo:
                return job
        best = self.peek()
        if best is not None:
            if fifo and fifo[0] is best:
                fifo.popleft()
            else:
                heapq.heappop(self._heap)
        return best

    @staticmethod
    def _is_current(entry: tuple[int, int, int, int, int, Job]) -> bool:
        job = entry[5]
        if job.state is not State.WAITING or entry[0] != -job.priority:
            return False
        return entry[1] == 0 if job.settings.lifo else entry[1] == 1 and entry[2] == job.run_at

    def note_removed(self, job: Job) -> None:
        """A job left otherwise than by `pop`; rebuild when most entries are stale, so that they do not pile up."""
        fifo = self._fifo
        if fifo and fifo[-1] is job:
            fifo.pop()
            return
        self._void.add(job.seq)
        self._stale += 1
        if self._stale > _COMPACT_AFTER and self._stale * 2 > len(self._fifo) + len(self._heap):
            # The job itself may still look as if it waited: its state changes after it has left.
            live = sorted((other for other in self.live() if other is not job), key=lambda job: (job.run_at, job.seq))
            self.clear()
            for other in live:
                self.push(other)

    def live(self) -> Iterator[Job]:
        """Waiting jobs, each once, in no particular order beyond FIFO jobs by time."""
        if not self._heap:
            return (job for job in self._fifo if job.state is _WAITING)
        return self._live_of_both()

    def _live_of_both(self) -> Iterator[Job]:
        seen = set()
        for job in itertools.chain(self._fifo, (entry[5] for entry in self._heap)):
            if job.state is _WAITING and job.seq not in seen:
                seen.add(job.seq)
                yield job

    def oldest(self) -> Job | None:
        """The job that has been ready for longest, or None.

        Plain jobs stand in the order of their age. Those in the heap do not, and following their age would cost every
        push and pop: instead each call looks at a few of them, other ones than the last time, and remembers the oldest
        that it has come across while that one waits.
        """
        best, elder, heap = self.peek(), self._elder, self._heap
        if elder is not None and elder.state is not _WAITING:
            elder = None
        candidates = [job for job in (best, elder, self._fifo[0] if self._fifo else None) if job is not None]
        if heap:
            stride = len(heap) // _ELDER_SAMPLE + 1
            self._elder_offset = (self._elder_offset + 1) % stride
            sample = (entry[5] for entry in heap[self._elder_offset :: stride])
            candidates += [job for job in sample if job.state is _WAITING]
        self._elder = oldest = min(candidates, key=_ready_since, default=None)
        return oldest

    @property
    def is_by_age(self) -> bool:
        """Whether `live` yields the jobs in the order of their creation."""
        return self._is_by_age and not self._heap

    def clear(self) -> None:
        self._fifo.clear()
        self._heap.clear()
        self._void.clear()
        self._stale = 0
        self._elder = None


def _ready_since(job: Job) -> int:
    return job.run_at


class DueOrder:
    """Delayed jobs by the wall time at which they fall due."""

    __slots__ = ("_heap", "_serial", "count")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Job]] = []
        self._serial = itertools.count()
        self.count = 0
        """How many jobs are delayed; the heap may have more entries."""

    def push(self, job: Job) -> None:
        self.count += 1
        heapq.heappush(self._heap, (job.run_at, job.seq, next(self._serial), job))

    def note_removed(self) -> None:
        """A job is no longer delayed. A stale entry would keep its job in memory until it falls due, perhaps in a year,
        so they are removed once they are the majority."""
        self.count -= 1
        if len(self._heap) > 2 * self.count + _COMPACT_AFTER:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def next_due(self) -> int | None:
        heap = self._heap
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    @staticmethod
    def _is_current(entry: tuple[int, int, int, Job]) -> bool:
        return entry[3].state is State.DELAYED and entry[3].run_at == entry[0]

    def pop_due(self, now: int, limit: int) -> list[Job]:
        # A job that was put off twice to the same moment has two entries: once is enough.
        due: dict[int, Job] = {}
        heap = self._heap
        while heap and heap[0][0] <= now and len(due) < limit:
            entry = heapq.heappop(heap)
            if self._is_current(entry):
                due[entry[1]] = entry[3]
        return list(due.values())


class Bucket(NamedTuple):
    """Active jobs that are looked at again in the same slot of the wheel."""

    number: int
    jobs: dict[int, Job]


class LeaseWheel:
    """Active jobs by the moment at which somebody must look at them again, in buckets of 64 ms.

    A lease usually ends long before its deadline, so entering and leaving must be cheap; being 64 ms late is not felt.
    """

    GRAIN: Final = 64
    __slots__ = ("_alarm", "_buckets", "_heap")

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self._buckets: dict[int, Bucket] = {}
        self._heap: list[int] = []

    def bucket_at(self, due_mono: int) -> Bucket:
        """Where jobs due at that moment are kept; whoever puts one in notes it in its lease."""
        number = due_mono // self.GRAIN
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = Bucket(number, {})
            heapq.heappush(self._heap, number)
            self._alarm.ring_by((number + 1) * self.GRAIN)
        return bucket

    def add(self, job: Job, due_mono: int) -> None:
        bucket = self.bucket_at(due_mono)
        bucket.jobs[job.seq] = job
        assert job.lease is not None
        job.lease = msgspec.structs.replace(job.lease, bucket=bucket)

    def discard(self, job: Job) -> None:
        if job.lease is not None and job.lease.bucket is not None:
            job.lease.bucket.jobs.pop(job.seq, None)

    def clear(self) -> None:
        """Break the cycles between leases and buckets by hand, as `Queue.clear` does."""
        for bucket in self._buckets.values():
            bucket.jobs.clear()
        self._buckets.clear()
        self._heap.clear()

    def next_due(self) -> int | None:
        while self._heap and not self._buckets[self._heap[0]].jobs:
            del self._buckets[heapq.heappop(self._heap)]
        return (self._heap[0] + 1) * self.GRAIN if self._heap else None

    def pop_due(self, now_mono: int) -> list[Job]:
        due: list[Job] = []
        while self._heap and (self._heap[0] + 1) * self.GRAIN <= now_mono:
            due.extend(self._buckets.pop(heapq.heappop(self._heap)).jobs.values())
        return due


class KeyHolder(Struct, gc=False):
    """Who owns a uniqueKey, and until when (wall ms; None: as long as the job lives)."""

    job: Job
    expires: int | None


class QueueConfig(Struct, rename="camel", omit_defaults=True):
    """What clients told a queue; stored whenever it changes."""

    paused: bool = False
    rate_limit: RateLimit | None = None
    concurrency: int | None = None
    stall: StallConfig | None = None
    dlq: DlqConfig | None = None
    group_limits: dict[str, RateLimit] = {}
    group_concurrency: dict[str, int] = {}
    paused_groups: list[str] = []


class Group:
    """Jobs of one groupId within a queue, for pulls that serve groups in turn."""

    __slots__ = ("active", "bucket", "bucket_of", "held_until", "ready")

    def __init__(self) -> None:
        self.ready = ReadyOrder()
        self.active = 0
        self.bucket: TokenBucket | None = None
        self.bucket_of: tuple[float, float] | None = None
        self.held_until = 0


class Queue:
    """Everything in memory about one queue."""

    __slots__ = (
        "active",
        "blocked",
        "bucket",
        "completed",
        "config",
        "custom_ids",
        "delayed",
        "encoded_name",
        "failed",
        "figures",
        "groups",
        "is_dead",
        "is_grouped",
        "keys",
        "minutes",
        "name",
        "places",
        "prioritized",
        "ready",
        "turn",
        "waiting",
        "wake_mono",
        "watchers",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.encoded_name = msgspec.msgpack.encode(name)
        self.config = QueueConfig()
        self.ready = ReadyOrder()
        self.waiting = 0
        self.prioritized = 0
        self.delayed: dict[int, Job] = {}
        self.active: dict[int, Job] = {}
        self.blocked: dict[int, Job] = {}
        self.completed: dict[int, Job] = {}
        self.failed: OrderedDict[int, Job] = OrderedDict()
        """Ordered: when there are too many the first goes, and a dict would look for it behind all removed entries."""
        nowhere: dict[int, Job] = {}
        self.places = [nowhere, nowhere, self.delayed, self.active, self.completed, self.failed, self.blocked]
        """Where the jobs of a state are, by its number; waiting jobs are in `ready`."""
        self.keys: dict[str, KeyHolder] = {}
        self.custom_ids: dict[str, Job] = {}
        self.bucket: TokenBucket | None = None
        self.groups: dict[str, Group] = {}
        self.turn: deque[str] = deque()
        self.is_grouped = False
        self.is_dead = False
        self.watchers = 0
        self.wake_mono = 0
        self.minutes: dict[str, dict[int, int]] = {"completed": {}, "failed": {}}
        self.figures = QueueFigures()

    @property
    def counts(self) -> list[int]:
        """How many jobs are in each state, by its number."""
        return [0, self.waiting, *map(len, self.places[State.DELAYED :]), 0]

    def jobs_in(self, state: State) -> Iterator[Job]:
        return self.ready.live() if state is State.WAITING else iter(self.places[state].values())

    def clear(self) -> None:
        """Break the cycles between jobs and queue by hand; jobs are not seen by the garbage collector."""
        self.ready.clear()
        for place in (self.delayed, self.active, self.blocked, self.completed, self.failed):
            place.clear()
        self.keys.clear()
        self.custom_ids.clear()
        for group in self.groups.values():
            group.ready.clear()
        self.groups.clear()
        self.turn.clear()
