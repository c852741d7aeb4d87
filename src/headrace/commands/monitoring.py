"""How the server and its workers are doing: statistics and heartbeats."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType, field

from headrace import __version__
from headrace.backends.base import MinuteMetrics, StorageHealth
from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.commands.jobs import check_lengths
from headrace.errors import InvalidCommand, NotFound, Refused
from headrace.model import Count, JobId, LeaseMs, Many, Position, QueueName, ShortText, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


class Pong(Struct):
    time: float
    pong: bool = True


class Ponged(Reply):
    data: Pong


@command(Ponged, category="Monitoring", http="GET /ping")
class Ping(Command[Ponged], tag="Ping"):
    """Whether the server answers, and its time."""

    async def run(self, engine: Engine, peer: Peer) -> Ponged:
        return Ponged(data=Pong(time=float(engine.clock.now_ms())))


# -- figures -------------------------------------------------------------------------------------------------


class ServerStats(Struct, rename="camel"):
    """Jobs of all queues. `queued` and `waiting`, `processing` and `active` are names for the same number."""

    queued: int
    waiting: int
    processing: int
    active: int
    delayed: int
    dlq: int
    completed: int
    failed: int
    uptime: float
    push_per_sec: float
    pull_per_sec: float


class StatsReply(Reply):
    stats: ServerStats


@command(StatsReply, category="Monitoring", http="GET /stats")
class Stats(Command[StatsReply], tag="Stats"):
    """How many jobs there are in which state, and how fast they come and go. `uptime` is in ms."""

    async def run(self, engine: Engine, peer: Peer) -> StatsReply:
        return StatsReply(stats=await engine.figures.stats())


class ServerMetrics(Struct, rename="camel"):
    """Lifetime counters and averages of the whole server."""

    total_pushed: float
    total_pulled: float
    total_completed: float
    total_failed: float
    avg_latency_ms: float
    avg_processing_ms: float
    memory_usage_mb: float
    sqlite_size_mb: float
    active_connections: int


class QueueMetricsMeta(Struct):
    count: float
    prev_ts: float = field(name="prevTS")
    prev_count: int = field(name="prevCount")


class QueueMetrics(Struct):
    """Finished jobs per minute, newest minute first; `count` is the number of minutes kept."""

    meta: QueueMetricsMeta
    data: list[int]
    count: int


class MetricsReply(Reply):
    """`metrics` of the server, or `data` of the queue that was asked for."""

    metrics: ServerMetrics | UnsetType = UNSET
    data: QueueMetrics | UnsetType = UNSET


@command(
    MetricsReply,
    category="Monitoring",
    http="GET /metrics",
    errors=("Metrics queue is required", "Metrics type must be 'completed' or 'failed'"),
)
class Metrics(Command[MetricsReply], tag="Metrics"):
    """Counters of the server or, with `queue` and `type`, the finished jobs per minute of one queue.

    `start` and `end` choose minutes; both are included and negative numbers count from the oldest.
    """

    queue: QueueName | None = None
    type: ShortText | None = None
    start: Position = 0
    end: Position = -1

    async def run(self, engine: Engine, peer: Peer) -> MetricsReply:
        if self.queue is None and self.type is None:
            return MetricsReply(metrics=engine.figures.metrics())
        if self.queue is None:
            raise InvalidCommand("Metrics queue is required")
        if self.type not in ("completed", "failed"):
            raise InvalidCommand("Metrics type must be 'completed' or 'failed'")
        minutes = engine.backend.minute_metrics(self.queue, self.type)
        return MetricsReply(data=queue_metrics(minutes, self.start, self.end))


def queue_metrics(minutes: MinuteMetrics, start: int, end: int) -> QueueMetrics:
    stop = None if end == -1 else end + 1
    meta = QueueMetricsMeta(float(minutes.count), minutes.prev_ts, minutes.prev_count)
    return QueueMetrics(meta, minutes.data[start:stop], len(minutes.data))


class MetricsText(Struct):
    metrics: str


class PrometheusReply(Reply):
    data: MetricsText


@command(PrometheusReply, category="Monitoring", http="GET /prometheus lift=data.metrics")
class Prometheus(Command[PrometheusReply], tag="Prometheus"):
    """All figures in the text format that Prometheus reads."""

    async def run(self, engine: Engine, peer: Peer) -> PrometheusReply:
        return PrometheusReply(data=MetricsText(await engine.figures.prometheus()))


class StorageReply(Reply):
    data: StorageHealth


@command(StorageReply, category="Monitoring", http="GET /storage")
class StorageStatus(Command[StorageReply], tag="StorageStatus"):
    """Whether the disk takes writes, or Valkey can be reached; what is wrong and since when if not."""

    async def run(self, engine: Engine, peer: Peer) -> StorageReply:
        return StorageReply(data=engine.backend.storage_status())


@command(Ok, category="Monitoring", http="POST /gc")
class CompactMemory(Command[Ok], tag="CompactMemory"):
    """Release memory and file space where that is cheap."""

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.compact()
        return Ok()


# -- health ----------------------------------------------------------------------------------------------------------


class HealthQueues(Struct):
    waiting: int
    active: int
    delayed: int
    completed: int
    dlq: int


class HealthMemory(Struct, rename="camel"):
    """In MB. Python's heap is not measured separately: all three are the resident set size."""

    heap_used: float
    heap_total: float
    rss: float


class HealthReply(Reply):
    """`ok` is false and `status` degraded while nothing can be stored. `uptime` is in seconds."""

    status: str
    uptime: float
    version: str
    queues: HealthQueues
    connections: dict[str, int]
    memory: HealthMemory


@command(HealthReply, category="Monitoring", http="GET /health fail=503")
class Health(Command[HealthReply], tag="Health"):
    """Whether the server is healthy, with supporting figures."""

    async def run(self, engine: Engine, peer: Peer) -> HealthReply:
        stats, metrics = await engine.figures.stats(), engine.figures.metrics()
        size = metrics.memory_usage_mb
        is_well = engine.backend.storage_status().error is None
        return HealthReply(
            ok=is_well,
            status="healthy" if is_well else "degraded",
            uptime=stats.uptime / 1000,
            version=__version__,
            queues=HealthQueues(stats.waiting, stats.active, stats.delayed, stats.completed, stats.dlq),
            connections=engine.open_connections(),
            memory=HealthMemory(size, size, size),
        )


class ReadyReply(Reply):
    ready: bool


@command(ReadyReply, category="Monitoring", http="GET /ready fail=503")
class Ready(Command[ReadyReply], tag="Ready"):
    """Whether the server takes jobs now; not while the disk refuses writes or Valkey cannot be reached."""

    async def run(self, engine: Engine, peer: Peer) -> ReadyReply:
        ready = engine.backend.storage_status().error is None
        return ReadyReply(ok=ready, ready=ready)


class HeapFigures(Struct, rename="camel"):
    """Objects that the garbage collector tracks, by generation, without those from before the server listened; and the
    resident set size in MB."""

    objects: list[int]
    rss: float


class HeapReply(Reply):
    data: HeapFigures


@command(HeapReply, category="Monitoring", http="GET /heapstats")
class HeapStats(Command[HeapReply], tag="HeapStats"):
    """What the process holds in memory, for investigating growth."""

    async def run(self, engine: Engine, peer: Peer) -> HeapReply:
        metrics = engine.figures.metrics()
        objects = [len(gc.get_objects(generation)) for generation in range(3)]
        return HeapReply(data=HeapFigures(objects, metrics.memory_usage_mb))


# -- signs of life -------------------------------------------------------------------------------------------


class Alive(Struct):
    ok: bool = True


class AliveReply(Reply):
    data: Alive


class AliveCount(Struct):
    """`lost` lists the jobs that the caller no longer holds; it is left out when there are none."""

    count: int
    ok: bool = True
    lost: list[str] | UnsetType = UNSET


class AliveBatchReply(Reply):
    data: AliveCount


@command(AliveReply, category="Monitoring", http="POST /workers/{id}/heartbeat fail=200", errors=("Worker not found",))
class Heartbeat(Command[AliveReply], tag="Heartbeat"):
    """Heartbeat of a registered worker, with what it has done so far."""

    id: ShortText
    active_jobs: Count | None = None
    processed: Count | None = None
    failed: Count | None = None

    async def run(self, engine: Engine, peer: Peer) -> AliveReply:
        if not engine.workers.heartbeat(self.id, self.active_jobs, self.processed, self.failed):
            raise NotFound("Worker not found")
        return AliveReply(data=Alive())


@command(
    AliveReply,
    category="Monitoring",
    flags=Flag.WRITE,
    http="POST /jobs/{id}/heartbeat fail=400",
    errors=("Job not found or not active (or invalid token)",),
)
class JobHeartbeat(Command[AliveReply], tag="JobHeartbeat"):
    """Heartbeat of an active job. With its token its lease is renewed for its length or for `duration`."""

    id: JobId
    token: Token | None = None
    duration: LeaseMs | None = None

    async def run(self, engine: Engine, peer: Peer) -> AliveReply:
        if not await engine.backend.extend(self.id, self.token or None, self.duration):
            raise Refused("Job not found or not active (or invalid token)")
        return AliveReply(data=Alive())


@command(
    AliveBatchReply,
    category="Monitoring",
    flags=Flag.WRITE,
    http="POST /jobs/heartbeat-batch fail=400",
    errors=("JobHeartbeatB tokens length must match ids length",),
)
class JobHeartbeatBatch(Command[AliveBatchReply], tag="JobHeartbeatB"):
    """Heartbeats of many active jobs; returns how many were accepted."""

    ids: Many[JobId]
    tokens: Many[Token | None] | None = None

    async def run(self, engine: Engine, peer: Peer) -> AliveBatchReply:
        check_lengths("JobHeartbeatB", self.ids, tokens=self.tokens)
        tokens = self.tokens or [None] * len(self.ids)
        extend = engine.backend.extend
        pairs = zip(self.ids, tokens, strict=True)
        lost = [job_id for job_id, token in pairs if not await extend(job_id, token or None, None)]
        return AliveBatchReply(data=AliveCount(count=len(self.ids) - len(lost), lost=lost or UNSET))
