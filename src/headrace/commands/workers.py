"""Worker registration. It is for monitoring only: pulling works without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.commands._base import Command, Flag, Removal, Removed, Reply, command
from headrace.commands.jobs import check_lengths
from headrace.commands.queries import Counted
from headrace.errors import NotFound
from headrace.model import Count, JobId, LeaseMs, Many, ManyFixed, QueueName, ShortText, TimestampMs, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


class WorkerRecord(Struct, rename="camel", kw_only=True):
    """What is known of a worker."""

    name: str
    queues: list[str]
    concurrency: int
    hostname: str
    pid: int
    status: str
    registered_at: float
    last_seen: float
    active_jobs: int
    processed_jobs: int
    failed_jobs: int
    current_job: str | None = None


class RegisteredWorker(WorkerRecord, kw_only=True):
    """A worker as the answer to its registration shows it."""

    worker_id: str


class WorkerView(WorkerRecord, kw_only=True):
    """A worker in a list; `status` is `stale` when it has been silent for too long."""

    id: str
    uptime: float


class WorkerStats(Struct, rename="camel"):
    total: int = 0
    active: int = 0
    total_processed: int = 0
    total_failed: int = 0
    active_jobs: int = 0
    concurrency_slots: int = 0


class WorkersData(Struct):
    workers: list[WorkerView]
    stats: WorkerStats


class Registered(Reply):
    data: RegisteredWorker


class WorkersFound(Reply):
    data: WorkersData


@command(Registered, category="Workers", http="POST /workers fail=400")
class RegisterWorker(Command[Registered], tag="RegisterWorker"):
    """Register a worker until its connection closes. Registering a `workerId` again updates it."""

    name: ShortText
    queues: Many[QueueName]
    concurrency: Count = 1
    worker_id: ShortText | None = None
    hostname: ShortText = "unknown"
    pid: Count = 0
    started_at: TimestampMs | None = None

    async def run(self, engine: Engine, peer: Peer) -> Registered:
        worker = engine.workers.register(self, peer)
        peer.workers.add(worker.worker_id)
        return Registered(data=worker)


@command(Removed, category="Workers", http="DELETE /workers/{workerId} fail=404", errors=("Worker not found",))
class UnregisterWorker(Command[Removed], tag="UnregisterWorker"):
    """Remove a worker from the registry."""

    worker_id: ShortText

    async def run(self, engine: Engine, peer: Peer) -> Removed:
        if not engine.workers.unregister(self.worker_id):
            raise NotFound("Worker not found")
        peer.workers.discard(self.worker_id)
        return Removed(data=Removal(removed=True))


@command(
    Counted,
    category="Workers",
    flags=Flag.WRITE,
    errors=("ReleaseLeases tokens length must match ids length",),
)
class ReleaseLeases(Command[Counted], tag="ReleaseLeases"):
    """Give back the jobs leased to `owner` except those in `keep`; returns how many.

    A worker sends this after a reconnect: jobs that were handed out in a lost reply wait again at
    once, with no attempt counted, and those it still runs stay leased to it (if they were pulled with `detach`). If
    it gives the `tokens` of these, those that wait (a restarted server knows of no leases) are leased to it
    again for `lockTtl` ms.
    """

    owner: ShortText
    queues: Many[QueueName]
    keep: ManyFixed[JobId] = ()
    tokens: Many[Token] | None = None
    lock_ttl: LeaseMs = 30_000

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        check_lengths("ReleaseLeases", self.keep, tokens=self.tokens)
        keep = frozenset(self.keep)
        held = dict(zip(self.keep, self.tokens or (), strict=self.tokens is not None))
        released = 0
        for queue in self.queues:
            released += await engine.backend.release_leases(queue, self.owner, keep)
            if held:
                await engine.backend.resume_leases(queue, self.owner, held, self.lock_ttl)
        return Counted(count=released)


@command(WorkersFound, category="Workers", http=("GET /workers", "GET /queues/{queue}/workers lift=data"))
class ListWorkers(Command[WorkersFound], tag="ListWorkers"):
    """All registered workers, or those that serve `queue`, with what they have done in total."""

    queue: QueueName | None = None

    async def run(self, engine: Engine, peer: Peer) -> WorkersFound:
        return WorkersFound(data=WorkersData(engine.workers.list(self.queue), engine.workers.stats()))
