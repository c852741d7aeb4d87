"""Many figures in one reply, for dashboards."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field, msgpack

from headrace.backends.base import Failure, QueueSummary, StorageHealth
from headrace.commands._base import Command, Flag, Reply, command
from headrace.commands.cron import CronView, cron_view
from headrace.commands.monitoring import ServerMetrics, ServerStats
from headrace.commands.queries import JobCounts, job_counts
from headrace.commands.workers import WorkerStats, WorkerView
from headrace.model import Count, CronEntry, DlqFilter, QueueName

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.history import Pace
    from headrace.engine.peer import Peer

DLQ_PREVIEW = 10
UPCOMING_RUNS = 3
MAX_FAILURES_LOOKED_AT = 2_000
SAMPLE_IDS = 5
MAX_SIGNATURE = 200
OVERVIEW_QUEUES = 100
"""Rows of the overview at most; DashboardQueues has them all, by page."""
LONG_WAIT_MS: Final = 60_000
"""A queue in which a job has waited for longer needs a look."""


class QueueRow(Struct, rename="camel"):
    """One line of a table of queues.

    Rates and `p95_wait_ms` are of the last seconds; `p95_wait_ms` is None where nothing was handed out lately or the
    queue is not among the busy ones whose history is kept. `failed_today` counts from midnight UTC or the start of the
    server, whichever was later.
    """

    name: str
    waiting: int
    prioritized: int
    delayed: int
    active: int
    completed: int
    dlq: int
    paused: bool
    concurrency: int | None
    oldest_waiting_ms: float | None
    in_per_sec: float
    out_per_sec: float
    failed_today: int
    p95_wait_ms: float | None


class WorkersOverview(Struct):
    stats: WorkerStats
    workers: list[WorkerView] = field(name="list")


class Overview(Struct, rename="camel"):
    stats: ServerStats
    metrics: ServerMetrics
    workers: WorkersOverview
    crons: list[CronView]
    storage: StorageHealth
    queues: list[QueueRow]
    """At most OVERVIEW_QUEUES: those in which a job has waited for long, the longest first, then the most loaded."""
    total_queues: int
    timestamp: float


class OverviewReply(Reply):
    data: Overview


@command(OverviewReply, category="Dashboard", http="GET /dashboard lift=data")
class DashboardOverview(Command[OverviewReply], tag="DashboardOverview"):
    """The whole server at a glance: jobs, rates, workers, schedules, storage."""

    async def run(self, engine: Engine, peer: Peer) -> OverviewReply:
        queues = await engine.backend.queues()
        overview = Overview(
            stats=await engine.figures.stats(),
            metrics=engine.figures.metrics(),
            workers=WorkersOverview(engine.workers.stats(), engine.workers.list(None)),
            crons=[cron_view(entry) for entry in await engine.crons.list()],
            storage=engine.backend.storage_status(),
            queues=rows_of(engine, _pressing(engine, queues)),
            total_queues=len(queues),
            timestamp=float(engine.clock.now_ms()),
        )
        return OverviewReply(data=overview)


def _pressing(engine: Engine, queues: list[QueueSummary]) -> list[QueueSummary]:
    """The queues that the overview shows. Where trouble is need not be where most jobs are: one may be stuck alone."""

    def lateness(queue: QueueSummary) -> float:
        waited = engine.backend.oldest_waiting_ms(queue.name) or 0.0
        return waited if waited > LONG_WAIT_MS else 0.0

    return sorted(engine.figures.busiest(queues, len(queues)), key=lateness, reverse=True)[:OVERVIEW_QUEUES]


class QueueRows(Struct):
    """One page of queues; `total` is how many there are."""

    queues: list[QueueRow]
    total: int
    timestamp: float


class QueueRowsReply(Reply):
    data: QueueRows


@command(QueueRowsReply, category="Dashboard", http="GET /dashboard/queues lift=data default=limit:100")
class DashboardQueues(Command[QueueRowsReply], tag="DashboardQueues"):
    """All queues with their counts, in order of their names."""

    limit: Annotated[int, Meta(ge=1, le=500)] | None = None
    offset: Count = 0

    async def run(self, engine: Engine, peer: Peer) -> QueueRowsReply:
        queues = sorted(await engine.backend.queues(), key=lambda queue: queue.name)
        stop = None if self.limit is None else self.offset + self.limit
        rows = rows_of(engine, queues[self.offset : stop])
        return QueueRowsReply(data=QueueRows(rows, len(queues), float(engine.clock.now_ms())))


def rows_of(engine: Engine, queues: list[QueueSummary]) -> list[QueueRow]:
    figures = engine.backend.queue_figures()
    return [_row(engine, queue, engine.history.pace(queue.name, figures.get(queue.name))) for queue in queues]


def _row(engine: Engine, queue: QueueSummary, pace: Pace) -> QueueRow:
    return QueueRow(
        name=queue.name,
        waiting=queue.counts.waiting,
        prioritized=queue.counts.prioritized,
        delayed=queue.counts.delayed,
        active=queue.counts.active,
        completed=queue.counts.completed,
        dlq=queue.counts.failed,
        paused=queue.paused,
        concurrency=queue.concurrency,
        oldest_waiting_ms=engine.backend.oldest_waiting_ms(queue.name),
        in_per_sec=pace.in_per_sec,
        out_per_sec=pace.out_per_sec,
        failed_today=queue.failed_today,
        p95_wait_ms=pace.p95_wait_ms,
    )


class JobSummary(Struct, rename="camel"):
    """The few fields that a list of jobs shows."""

    id: str
    priority: int
    created_at: float
    run_at: float
    attempts: int
    progress: float


class DeadLetterSummary(Struct, rename="camel"):
    id: str
    data: Raw
    attempts: int
    created_at: float


class QueueJobs(Struct):
    waiting: list[JobSummary]
    active: list[JobSummary]
    delayed: list[JobSummary]


class QueueDetail(Struct, rename="camel"):
    name: str
    counts: JobCounts
    paused: bool
    priority_counts: dict[str, int]
    dlq_preview: list[DeadLetterSummary]
    timestamp: float
    jobs: QueueJobs | UnsetType = UNSET


class QueueDetailReply(Reply):
    data: QueueDetail


# Typed decoding reads the named fields only and skips the rest, payloads included.
_summary = msgpack.Decoder(JobSummary).decode
_dead_letter = msgpack.Decoder(DeadLetterSummary).decode


@command(QueueDetailReply, category="Dashboard", flags=Flag.BULK, http="GET /dashboard/queues/{queue} lift=data")
class DashboardQueue(Command[QueueDetailReply], tag="DashboardQueue"):
    """One queue in detail: counts, priorities, the oldest dead letters and, if asked for, the next jobs.

    With `brief` the dead letters have only the beginning of their payloads, as in GetJob.
    """

    queue: QueueName
    include_jobs: bool = False
    jobs_limit: Annotated[int, Meta(ge=1, le=50)] = 10
    brief: bool = False

    async def run(self, engine: Engine, peer: Peer) -> QueueDetailReply:
        backend = engine.backend
        dead_letters = await backend.dead_letters(self.queue, DlqFilter(), DLQ_PREVIEW, self.brief)
        detail = QueueDetail(
            name=self.queue,
            counts=job_counts(await backend.counts(self.queue)),
            paused=await backend.is_paused(self.queue),
            priority_counts=await backend.counts_per_priority(self.queue),
            dlq_preview=[_dead_letter(entry.job) for entry in dead_letters],
            timestamp=float(engine.clock.now_ms()),
            jobs=await self.jobs(engine) if self.include_jobs else UNSET,
        )
        return QueueDetailReply(data=detail)

    async def jobs(self, engine: Engine) -> QueueJobs:
        waiting, active, delayed = [
            [_summary(job) for job in await engine.backend.jobs(self.queue, [state], 0, self.jobs_limit, True, True)]
            for state in ("waiting", "active", "delayed")
        ]
        return QueueJobs(waiting, active, delayed)


# -- schedules -------------------------------------------------------------------------------------------------------


class CronRun(Struct, rename="camel"):
    """One run of a schedule: when it was due, the job it pushed, and what became of that (`unknown`: it is gone)."""

    at: float
    job_id: str
    state: str


class CronRow(Struct, rename="camel"):
    """A schedule with its next runs and, since the server started, its last ones, the latest first."""

    cron: CronView
    upcoming: list[float]
    recent: list[CronRun]


class CronRows(Struct):
    """Schedules in order of their next run; `total` is how many there are."""

    crons: list[CronRow]
    total: int
    timestamp: float


class CronRowsReply(Reply):
    data: CronRows


@command(CronRowsReply, category="Dashboard", http="GET /dashboard/crons lift=data")
class DashboardCrons(Command[CronRowsReply], tag="DashboardCrons"):
    """Schedules with their last and their next runs."""

    limit: Annotated[int, Meta(ge=1, le=200)] = 100
    offset: Count = 0

    async def run(self, engine: Engine, peer: Peer) -> CronRowsReply:
        entries = sorted(await engine.crons.list(), key=lambda entry: entry.next_run)
        rows = [await _cron_row(engine, entry) for entry in entries[self.offset : self.offset + self.limit]]
        return CronRowsReply(data=CronRows(rows, len(entries), float(engine.clock.now_ms())))


async def _cron_row(engine: Engine, entry: CronEntry) -> CronRow:
    recent = [
        CronRun(float(run.slot), run.job_id, await engine.backend.state(run.job_id))
        for run in engine.crons.recent(entry.name)
    ]
    return CronRow(cron_view(entry), list(engine.crons.upcoming(entry, UPCOMING_RUNS)), recent)


# -- the recent past -------------------------------------------------------------------------------------------------


class HistorySeries(Struct, rename="camel"):
    """Lists of equal length, oldest step first.

    `in`, `out` and `failed` are jobs per second within the step (pushed, completed, failed for good), in the first step
    per second that the server was up. `waiting` and `active` are counts at its end. The others are durations
    in ms of the jobs that were handed out or completed within it, None where there were none; for all queues together
    they are those of the busiest queues.
    """

    pushed: list[float] = field(name="in")
    out: list[float]
    failed: list[float]
    waiting: list[float]
    active: list[float]
    wait_p50: list[float | None]
    wait_p95: list[float | None]
    run_p95: list[float | None]


class QueueSeries(Struct):
    pushed: list[float] = field(name="in")
    out: list[float]
    failed: list[float]
    waiting: list[float]


class HistoryRates(Struct, rename="camel"):
    """Jobs per second over the last 5 to 10 seconds."""

    in_per_sec: float
    out_per_sec: float
    failed_per_sec: float


class HistoryView(Struct):
    """`step` is in ms; the first values cover the time from `start` (Unix ms) to `start + step`.

    Only whole steps since the server started are there. `queues` has the busiest queues of the window and is empty
    when one queue was asked for; `oldest` says how long, in ms, the oldest waiting job of those queues has waited.
    """

    window: str
    step: float
    start: float
    series: HistorySeries
    queues: dict[str, QueueSeries]
    oldest: dict[str, float]
    rates: HistoryRates
    timestamp: float


class HistoryReply(Reply):
    data: HistoryView


@command(HistoryReply, category="Dashboard", http="GET /dashboard/history lift=data")
class DashboardHistory(Command[HistoryReply], tag="DashboardHistory"):
    """What came, went, failed and waited in the last minutes or hours, for charts: all queues together, or one.

    Steps are 5 s for 15 minutes, 20 s for an hour, 5 minutes for a day. A queue that was idle or is not among the busy
    ones has empty series. It is kept in memory: after a restart it starts empty.
    """

    window: Literal["15m", "1h", "24h"] = "1h"
    queue: QueueName | None = None
    top: Annotated[int, Meta(ge=0, le=50)] = 10
    """How many queues get series of their own."""

    async def run(self, engine: Engine, peer: Peer) -> HistoryReply:
        return HistoryReply(data=engine.history.view(self.window, self.queue, self.top))


class FailureGroup(Struct, rename="camel"):
    """Dead letters whose errors are alike: `signature` is the first line with numbers, ids and quoted text replaced
    by `#`, `<id>` and `'...'`; `error` is that line as the newest of them has it."""

    signature: str
    count: int
    last_seen: float
    queues: list[str]
    job_ids: list[str]
    """The newest of them, up to 5."""
    error: str


class FailureGroups(Struct):
    """Groups with the most recent failure first; `examined` of `total` dead letters were grouped, the newest ones."""

    groups: list[FailureGroup]
    examined: int
    total: int
    timestamp: float


class FailuresReply(Reply):
    data: FailureGroups


@command(FailuresReply, category="Dashboard", http="GET /dashboard/failures lift=data")
class DashboardFailures(Command[FailuresReply], tag="DashboardFailures"):
    """The latest dead letters of one or all queues, grouped by what went wrong."""

    queue: QueueName | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20

    async def run(self, engine: Engine, peer: Peer) -> FailuresReply:
        failures, total = await engine.backend.latest_failures(self.queue, MAX_FAILURES_LOOKED_AT)
        groups = group_failures(failures)[: self.limit]
        return FailuresReply(data=FailureGroups(groups, len(failures), total, float(engine.clock.now_ms())))


# What differs between two failures of the same kind. Ids go before numbers, which would take them to pieces.
_VARYING: Final = (
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`"), "'...'"),
    (re.compile(r"\b0[xX][0-9a-fA-F]+\b|\b(?=[0-9a-fA-F]*[0-9])(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b"), "<id>"),
    (re.compile(r"\d+(?:[.,:]\d+)*"), "#"),
)


def signature_of(error: str) -> str:
    """What an error says once everything that differs from job to job is taken out."""
    text = error[:MAX_SIGNATURE]
    for pattern, stand_in in _VARYING:
        text = pattern.sub(stand_in, text)
    return text


def first_line(error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return lines[0].strip()[:MAX_SIGNATURE] if lines else "(no error text)"


def group_failures(failures: list[Failure]) -> list[FailureGroup]:
    """Groups of failures that come newest first; the group with the newest one leads."""
    groups: dict[str, FailureGroup] = {}
    for failure in failures:
        line = first_line(failure.error)
        signature = signature_of(line)
        group = groups.get(signature)
        if group is None:
            group = groups[signature] = FailureGroup(signature, 0, failure.failed_at, [], [], line)
        group.count += 1
        if failure.queue not in group.queues:
            group.queues.append(failure.queue)
        if len(group.job_ids) < SAMPLE_IDS:
            group.job_ids.append(failure.id)
    return list(groups.values())
