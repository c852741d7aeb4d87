"""The scheduler: pushes the jobs of schedules when they are due, each slot once.

A slot is the planned time of one run. `Backend.fire_cron` stores the entry advanced past that slot and the
job in one commit, and refuses a slot that is not ahead of the stored one, so a slot fires once however often
the server restarts and however many servers share the store. What is kept here is only a heap of next runs:
before a run the entry is read from the backend again.

Slots that a busy loop missed are run late, one by one. After more than CATCH_UP_MS of sleep, and for
entries that were due while the server was down, one run stands for all that were missed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Raw, structs

from headrace.backends.base import Backend
from headrace.clock import Clock
from headrace.commands.jobs import PushEntry
from headrace.engine.workers import WorkerRegistry
from headrace.errors import HeadraceError, InvalidCommand, StorageUnavailable
from headrace.model import CronEntry

CATCH_UP_MS: Final = 60_000
RETRY_MS: Final = 1_000
MAX_FIRES: Final = 1_000
"""Runs in one call; the rest is still due afterwards, and others get a turn between."""
MAX_TRIES: Final = 100
"""How often a schedule is stored anew because another server fired or changed it meanwhile."""
KEPT_RUNS: Final = 5
"""Runs of each schedule that are remembered, until the server stops."""


class Run(NamedTuple):
    """One run of a schedule: its slot and the job it pushed."""

    slot: float
    job_id: str


class Crons:
    def __init__(self, backend: Backend, clock: Clock, workers: WorkerRegistry) -> None:
        self._backend = backend
        self._clock = clock
        self._workers = workers
        self._heap: list[tuple[float, str]] = []
        self._planned: dict[str, float] = {}
        self._running: set[str] = set()
        self._missed: set[str] = set()
        self._grace_ms = 0 if backend.is_local else RETRY_MS
        """A run that is a little late may be in progress at another broker, or left to one that has a worker for it: it
        was not missed."""
        self._recent: dict[str, deque[Run]] = {}

    async def start(self) -> None:
        """Plan what is stored. What was due while nobody ran is left out, or run once, as each entry says."""
        now = self._clock.now_ms()
        for entry in await self._backend.crons():
            if entry.next_run <= now - self._grace_ms:
                # At start no worker can be registered yet, so skipIfNoWorker means the same.
                if entry.skip_missed_on_restart or entry.skip_if_no_worker:
                    entry = await self._skip_missed(entry, now)
                else:
                    self._missed.add(entry.name)
            self._plan(entry.name, entry.next_run)

    async def _skip_missed(self, entry: CronEntry, now: int) -> CronEntry:
        following = _run_after(entry, now)
        if following is None:
            return entry
        skipping = structs.replace(entry, next_run=following)
        is_stored = await self._backend.put_cron(skipping, entry)
        return skipping if is_stored else entry  # another server was faster: its next run is found before the run

    # -- what clients ask for --------------------------------------------------------------------------------

    async def upsert(self, entry: CronEntry, *, immediately: bool = False) -> CronEntry:
        """Store a schedule. One that had its name passes its count on and, if timed alike, its phase."""
        from headrace.schedules import check_cron  # calendars and time zones: loaded with the first schedule

        check_cron(entry.schedule, entry.repeat_every, entry.timezone)
        for _ in range(MAX_TRIES):
            now = self._clock.now_ms()
            known = await self._backend.cron(entry.name)
            if known is None:
                first = float(now) if immediately else _first_run(entry, now)
                stored = structs.replace(entry, next_run=first, created_at=float(now))
            else:
                stored = _replacing(known, entry, now)
            if await self._backend.put_cron(stored, known):
                self._plan(stored.name, stored.next_run)
                return stored
        raise StorageUnavailable(f"Schedule {entry.name} is being changed by others all the time: try again")

    async def get(self, name: str) -> CronEntry | None:
        return await self._backend.cron(name)

    async def list(self) -> list[CronEntry]:
        return await self._backend.crons()

    async def delete(self, name: str) -> bool:
        self._planned.pop(name, None)
        self._recent.pop(name, None)
        return await self._backend.delete_cron(name)

    def recent(self, name: str) -> Sequence[Run]:
        """The latest runs, the last one first. A run that was held back by the one before it is not counted."""
        return tuple(reversed(self._recent.get(name, ())))

    @staticmethod
    def upcoming(entry: CronEntry, count: int) -> Sequence[float]:
        """When the schedule runs next, the time after that, and so on."""
        runs = [float(entry.next_run)]
        while len(runs) < count and (following := _run_after(entry, runs[-1])) is not None:
            runs.append(following)
        return runs

    # -- running ---------------------------------------------------------------------------------------------

    async def replan(self) -> None:
        """Plan what is stored: a tick that failed took back what had been changed or fired in it."""
        for entry in await self._backend.crons():
            if entry.name not in self._running:  # its run plans it
                self._plan(entry.name, entry.next_run)

    def next_due_ms(self) -> int | None:
        """Wall time of the next run, or None when nothing is planned."""
        heap = self._heap
        while heap and self._planned.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return math.ceil(heap[0][0]) if heap else None

    def next_due_mono(self) -> int | None:
        """The same on the monotonic clock. Ask again now and then: wall time may be set."""
        due = self.next_due_ms()
        if due is None:
            return None
        return self._clock.monotonic_ms() + max(0, due - self._clock.now_ms())

    def due_runs(self) -> Iterator[Coroutine[Any, Any, None]]:
        """What is due, each to be awaited: one by one or side by side, since the node of one entry may be away."""
        now = self._clock.now_ms()
        for _ in range(MAX_FIRES):
            due = self.next_due_ms()
            if due is None or due > now:
                return
            name = heapq.heappop(self._heap)[1]
            del self._planned[name]
            self._running.add(name)
            yield self._run(name, now)

    async def _run(self, name: str, now: int) -> None:
        """One due entry; afterwards it is planned again or gone, whatever happened."""
        try:
            entry = await self._backend.cron(name)
            if entry is None:
                return
            due: float | None = entry.next_run
            if entry.next_run <= now:
                due = await self._fire(entry, now)
        except HeadraceError:
            due = now + RETRY_MS  # the store refuses: the slot is still there and is tried again
        finally:
            self._running.discard(name)
        if due is not None:
            self._plan(name, due)

    async def _fire(self, entry: CronEntry, now: int) -> float | None:
        """Run the slot that is due; when the next one is, None when there is none."""
        if _is_spent(entry):
            await self.delete(entry.name)
            return None
        following = self._following(entry, now)
        skipped = entry.skip_if_no_worker and not self._workers.any_for_queue(entry.queue)
        if skipped and now < entry.next_run + self._grace_ms:
            return entry.next_run + self._grace_ms  # a broker knows its own workers only: another one may run it
        advanced = structs.replace(
            entry,
            last_slot=entry.next_run,
            next_run=entry.next_run if following is None else following,
            executions=entry.executions + (not skipped),
        )
        job_id = await self._backend.fire_cron(advanced, None if skipped else _job_of(entry))
        if job_id is not None:
            self._remember(entry.name, Run(entry.next_run, job_id))
        self._missed.discard(entry.name)
        if following is None or _is_spent(advanced):
            await self.delete(entry.name)
            return None
        return await self._next_of(advanced, now)

    def _remember(self, name: str, run: Run) -> None:
        runs = self._recent.setdefault(name, deque(maxlen=KEPT_RUNS))
        if not runs or runs[-1].job_id != run.job_id:
            runs.append(run)

    async def _next_of(self, advanced: CronEntry, now: int) -> float | None:
        stored = await self._backend.cron(advanced.name)
        if stored is None:
            return None
        if stored.last_slot == advanced.last_slot:
            return stored.next_run
        # Refused: another server was faster. Its next run is in the entry, or will be in a moment.
        return max(stored.next_run, now + RETRY_MS)

    def _following(self, entry: CronEntry, now: int) -> float | None:
        is_behind = entry.name in self._missed or now - entry.next_run > CATCH_UP_MS
        return _run_after(entry, max(now, entry.next_run) if is_behind else entry.next_run)

    def _plan(self, name: str, due: float) -> None:
        if self._planned.get(name) != due:  # brokers plan everything every second: it is in the heap already
            self._planned[name] = due
            heapq.heappush(self._heap, (due, name))
        self._backend.alarm.ring_by(self._clock.monotonic_ms() + max(0, int(due) - self._clock.now_ms()))


def _first_run(entry: CronEntry, now: int) -> float:
    from headrace.schedules import parse_schedule

    if entry.schedule is not None:
        return float(parse_schedule(entry.schedule, entry.timezone).next_after(now))
    return now + (entry.repeat_every or 0)


def _replacing(known: CronEntry, entry: CronEntry, now: int) -> CronEntry:
    """`entry` in the place of `known`.

    Clients say their schedules again at every start, so one that is timed alike keeps its phase.
    """
    kept = structs.replace(entry, executions=known.executions, created_at=known.created_at)
    if _timing(known) == _timing(entry):
        return structs.replace(kept, next_run=known.next_run, last_slot=known.last_slot)
    return structs.replace(kept, next_run=_first_run(entry, now))


def _timing(entry: CronEntry) -> tuple[object, ...]:
    return (entry.schedule, entry.timezone) if entry.schedule is not None else (entry.repeat_every,)


def _run_after(entry: CronEntry, after: float) -> float | None:
    """The first run after `after`; None when the calendar has no more."""
    from headrace.schedules import next_every, parse_schedule

    if entry.schedule is None:
        return float(next_every(entry.next_run, entry.repeat_every or 1, after))
    try:
        return float(parse_schedule(entry.schedule, entry.timezone).next_after(after))
    except InvalidCommand:
        return None


def _is_spent(entry: CronEntry) -> bool:
    return entry.max_limit is not None and 0 < entry.max_limit <= entry.executions


def _job_of(entry: CronEntry) -> PushEntry:
    settings = {name: getattr(entry.settings, name) for name in entry.settings.__struct_fields__}
    return PushEntry(
        data=Raw(entry.data),
        name=entry.job_name,
        priority=entry.priority,
        delay=entry.delay,
        # A run counts from its slot, however late it is made: that is how a handler tells one run from another.
        timestamp=entry.next_run,
        unique_key=entry.unique_key or (f"cron:{entry.name}" if entry.prevent_overlap else None),
        dedup=entry.dedup,
        **settings,
    )
