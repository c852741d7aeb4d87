"""Many figures in one answer, for screens that show them side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field, msgpack

from headrace.commands._base import Command, Reply, command
from headrace.commands.cron import CronView, cron_view
from headrace.commands.monitoring import ServerMetrics, ServerStats, StorageHealth
from headrace.commands.queries import JobCounts, job_counts
from headrace.commands.workers import WorkerStats, WorkerView
from headrace.model import Count, DlqFilter, QueueName

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

DLQ_PREVIEW = 10


class WorkersOverview(Struct):
    stats: WorkerStats
    workers: list[WorkerView] = field(name="list")


class Overview(Struct):
    stats: ServerStats
    metrics: ServerMetrics
    workers: WorkersOverview
    crons: list[CronView]
    storage: StorageHealth
    timestamp: float


class OverviewReply(Reply):
    data: Overview


@command(OverviewReply, category="Dashboard", http="GET /dashboard")
class DashboardOverview(Command[OverviewReply], tag="DashboardOverview"):
    """The whole server at a glance: jobs, rates, workers, schedules, storage."""

    async def run(self, engine: Engine, peer: Peer) -> OverviewReply:
        status = engine.backend.storage_status()
        since = None if status.since is None else float(status.since)
        overview = Overview(
            stats=await engine.figures.stats(),
            metrics=await engine.figures.metrics(),
            workers=WorkersOverview(engine.workers.stats(), engine.workers.list(None)),
            crons=[cron_view(entry) for entry in await engine.crons.list()],
            storage=StorageHealth(status.disk_full, status.error, since),
            timestamp=float(engine.clock.now_ms()),
        )
        return OverviewReply(data=overview)


class QueueRow(Struct):
    name: str
    waiting: int
    prioritized: int
    delayed: int
    active: int
    completed: int
    dlq: int
    paused: bool


class QueueRows(Struct):
    """One page of queues; `total` is how many there are."""

    queues: list[QueueRow]
    total: int
    timestamp: float


class QueueRowsReply(Reply):
    data: QueueRows


@command(QueueRowsReply, category="Dashboard", http="GET /dashboard/queues")
class DashboardQueues(Command[QueueRowsReply], tag="DashboardQueues"):
    """All queues with their counts, in order of their names."""

    limit: Annotated[int, Meta(ge=1, le=500)] | None = None
    offset: Count = 0

    async def run(self, engine: Engine, peer: Peer) -> QueueRowsReply:
        queues = sorted(await engine.backend.queues(), key=lambda queue: queue.name)
        stop = None if self.limit is None else self.offset + self.limit
        rows = [
            QueueRow(
                name=queue.name,
                waiting=queue.counts.waiting,
                prioritized=queue.counts.prioritized,
                delayed=queue.counts.delayed,
                active=queue.counts.active,
                completed=queue.counts.completed,
                dlq=queue.counts.failed,
                paused=queue.paused,
            )
            for queue in queues[self.offset : stop]
        ]
        return QueueRowsReply(data=QueueRows(rows, len(queues), float(engine.clock.now_ms())))


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


@command(QueueDetailReply, category="Dashboard", http="GET /dashboard/queues/{queue}")
class DashboardQueue(Command[QueueDetailReply], tag="DashboardQueue"):
    """One queue in detail: counts, priorities, the newest dead letters and, if asked for, the next jobs."""

    queue: QueueName
    include_jobs: bool = False
    jobs_limit: Annotated[int, Meta(ge=1, le=50)] = 10

    async def run(self, engine: Engine, peer: Peer) -> QueueDetailReply:
        backend = engine.backend
        dead_letters = await backend.dead_letters(self.queue, DlqFilter(), DLQ_PREVIEW)
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
            [_summary(job) for job in await engine.backend.jobs(self.queue, [state], 0, self.jobs_limit, True)]
            for state in ("waiting", "active", "delayed")
        ]
        return QueueJobs(waiting, active, delayed)
