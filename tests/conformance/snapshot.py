"""Everything a backend knows that outlives a tick, as plain values that two moments can be compared by."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.index import Queue
from headrace.backends.local.job import History, Job
from headrace.backends.local.slices import run_now
from headrace.states import State
from tests.conformance.invariants import claim_order


def snapshot(backend: LocalBackend) -> dict[str, Any]:
    return {
        "jobs": {job.id: _job(backend, job) for job in backend._jobs.values()},
        "queues": {queue.name: _queue(backend, queue) for queue in backend._queues.values()},
        "leases": {job.id: _lease(job) for job in backend._jobs.values() if job.lease is not None},
        "blocked": _blocked(backend),
        "logs": {job_id: msgspec.to_builtins(run_now(backend.logs(job_id))) for job_id in backend._jobs},
        "crons": msgspec.to_builtins(run_now(backend.crons())),
        "webhooks": msgspec.to_builtins(run_now(backend.webhooks())),
        "flows": _flows(backend),
        "totals": {name: getattr(backend.totals(), name) for name in ("pushed", "completed", "failed")},
    }


def _flows(backend: LocalBackend) -> dict[str, Any]:
    flows = run_now(backend.flows(None, None, 1000, None))
    assert backend._flows == {flow.id: flow for flow in flows if not flow.status.is_final}, "memory and file differ"
    logs = {flow.id: [bytes(step.body) for step in run_now(backend.flow_steps(flow.id, 0))] for flow in flows}
    return {flow.id: (msgspec.to_builtins(flow), logs[flow.id], backend._flow_sizes.get(flow.id)) for flow in flows}


def as_restarted(before: dict[str, Any]) -> dict[str, Any]:
    """What a snapshot looks like after a restart: what was active waits again, nothing else has changed."""
    jobs = {
        job_id: {**job, "state": "waiting" if job["state"] == "active" else job["state"]}
        for job_id, job in before["jobs"].items()
    }
    queues = {name: {**queue, "order": None} for name, queue in before["queues"].items() if queue["is_stored"]}
    return {**before, "jobs": jobs, "queues": queues, "leases": {}}


def _job(backend: LocalBackend, job: Job) -> dict[str, Any]:
    names = ("seq", "name", "priority", "created", "run_at", "finished", "attempts", "stalls")
    history = msgspec.to_builtins(job.history or History())
    history.pop("timeline", None)  # a claim is told there and not written
    history["pending"] = sorted(history.get("pending", ()))
    return {
        **{name: getattr(job, name) for name in names},
        "queue": job.queue.name,
        "state": job.state.word,
        "data": backend._data(job),
        "result": backend._result(job),
        "settings": msgspec.to_builtins(job.settings),
        "links": msgspec.to_builtins(job.links) if job.links else {},
        "history": history,
    }


def _queue(backend: LocalBackend, queue: Queue) -> dict[str, Any]:
    now = backend._clock.now_ms()
    members = [job for job in backend._jobs.values() if job.queue is queue]
    config = msgspec.to_builtins(queue.config)
    return {
        "config": config,
        "order": [job.id for job in claim_order(members)],
        # Only the times: jobs that ended in the same millisecond may change places.
        "completed": [job.finished for job in queue.completed.values()],
        "failed": [job.finished for job in queue.failed.values()],
        "delayed": sorted(job.id for job in queue.delayed.values()),
        "keys": {
            key: (holder.job.id, holder.expires)
            for key, holder in queue.keys.items()
            if holder.expires is None or holder.expires > now
        },
        "custom_ids": {custom_id: job.id for custom_id, job in queue.custom_ids.items()},
        "is_stored": bool(members or config),
    }


def _lease(job: Job) -> tuple[Any, ...]:
    assert job.lease is not None
    return (job.lease.token, job.lease.owner, job.lease.serial, job.lease.until_mono, job.started)


def _blocked(backend: LocalBackend) -> dict[str, list[str]]:
    """Who waits for whom; jobs that stopped waiting otherwise do not count."""
    found = {
        dependency: sorted(job.id for job in waiting if job.state is State.WAITING_CHILDREN)
        for dependency, waiting in backend._dependents.items()
    }
    return {dependency: ids for dependency, ids in found.items() if ids}
