"""The worker registry: for monitoring, and for schedules that need a worker.

It is kept in memory only: an entry lives as long as its worker's connection, and workers register again after
a restart. Silence makes a worker stale, longer silence removes it. Totals outlive the workers they count.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from headrace.clock import Clock
from headrace.commands.workers import RegisteredWorker, RegisterWorker, WorkerStats, WorkerView
from headrace.engine.peer import Peer
from headrace.ids import IdSource

# In timeouts. A worker is stale after one; it stays on the lists for a while so that it can be seen there.
_FORGET_AFTER: Final = 3


class _Worker(Struct):
    id: str
    name: str
    queues: list[str]
    concurrency: int
    hostname: str
    pid: int
    registered_at: float
    last_seen: float
    heard_at: int
    """Monotonic: a clock that is set does not make workers stale."""
    peer: Peer | None
    active_jobs: int = 0
    processed: int = 0
    failed: int = 0


class WorkerRegistry:
    def __init__(self, clock: Clock, ids: IdSource, timeout_ms: int = 30_000) -> None:
        self._clock = clock
        self._ids = ids
        self._timeout_ms = timeout_ms
        self._workers: dict[str, _Worker] = {}
        self._total_processed = 0
        self._total_failed = 0

    def register(self, presented: RegisterWorker, peer: Peer | None = None) -> RegisteredWorker:
        """Enter a worker, or renew it under the id it names. It belongs to `peer` from now on."""
        now = float(self._clock.now_ms())
        worker_id = presented.worker_id or self._ids.next()
        known = self._workers.get(worker_id)
        since = presented.started_at or (known.registered_at if known else now)
        worker = _Worker(
            id=worker_id,
            name=presented.name,
            queues=presented.queues,
            concurrency=presented.concurrency,
            hostname=presented.hostname,
            pid=presented.pid,
            registered_at=float(since),
            last_seen=now,
            heard_at=self._clock.monotonic_ms(),
            peer=peer,
        )
        if known is not None:
            worker.active_jobs, worker.processed, worker.failed = known.active_jobs, known.processed, known.failed
        self._workers[worker_id] = worker
        return RegisteredWorker(worker_id=worker.id, **self._record(worker))

    def unregister(self, worker_id: str) -> bool:
        return self._workers.pop(worker_id, None) is not None

    def heartbeat(
        self,
        worker_id: str,
        active_jobs: int | None = None,
        processed: int | None = None,
        failed: int | None = None,
    ) -> bool:
        """Note a sign of life and what the worker says it has done; False when nobody knows it."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return False
        worker.last_seen = float(self._clock.now_ms())
        worker.heard_at = self._clock.monotonic_ms()
        if active_jobs is not None:
            worker.active_jobs = active_jobs
        if processed is not None:
            self._total_processed += _gain(worker.processed, processed)
            worker.processed = processed
        if failed is not None:
            self._total_failed += _gain(worker.failed, failed)
            worker.failed = failed
        return True

    def drop(self, peer: Peer) -> None:
        """Forget the workers of a connection that closed, but for those that came back over another one."""
        for worker_id in peer.workers:
            worker = self._workers.get(worker_id)
            if worker is not None and worker.peer is peer:
                del self._workers[worker_id]

    def expire(self) -> None:
        """Forget workers that have been silent for too long."""
        oldest = self._clock.monotonic_ms() - _FORGET_AFTER * self._timeout_ms
        self._workers = {worker.id: worker for worker in self._workers.values() if worker.heard_at > oldest}

    def any_for_queue(self, queue: str) -> bool:
        """Whether a worker that is not stale serves the queue."""
        return any(queue in worker.queues and self._is_active(worker) for worker in self._workers.values())

    def list(self, queue: str | None = None) -> list[WorkerView]:
        workers = self._workers.values()
        return [self._as_view(worker) for worker in workers if queue is None or queue in worker.queues]

    def stats(self) -> WorkerStats:
        active = [worker for worker in self._workers.values() if self._is_active(worker)]
        return WorkerStats(
            total=len(self._workers),
            active=len(active),
            total_processed=self._total_processed,
            total_failed=self._total_failed,
            active_jobs=sum(worker.active_jobs for worker in self._workers.values()),
            concurrency_slots=sum(worker.concurrency for worker in active),
        )

    def _is_active(self, worker: _Worker) -> bool:
        return self._clock.monotonic_ms() - worker.heard_at < self._timeout_ms

    def _as_view(self, worker: _Worker) -> WorkerView:
        uptime = max(0.0, self._clock.now_ms() - worker.registered_at)
        return WorkerView(id=worker.id, uptime=uptime, **self._record(worker))

    def _record(self, worker: _Worker) -> dict[str, Any]:
        """The fields of a WorkerRecord."""
        return {
            "name": worker.name,
            "queues": worker.queues,
            "concurrency": worker.concurrency,
            "hostname": worker.hostname,
            "pid": worker.pid,
            "status": "active" if self._is_active(worker) else "stale",
            "registered_at": worker.registered_at,
            "last_seen": worker.last_seen,
            "active_jobs": worker.active_jobs,
            "processed_jobs": worker.processed,
            "failed_jobs": worker.failed,
        }


def _gain(before: int, after: int) -> int:
    """What a worker's own counter grew by; one that became smaller was reset."""
    return after - before if after >= before else after
