"""What must be true of the local backend after every commit, whatever was done to it before.

`check` looks at the memory of the backend from outside, job by job, and at its file with Python's own sqlite3. A new
index or a new column belongs here as soon as it exists. Other backends bring a check of their own (see rig.KINDS).
"""

from __future__ import annotations

import sqlite3
from collections import Counter, deque
from pathlib import Path

import msgspec

from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.index import Queue, ReadyOrder
from headrace.backends.local.job import History, Job
from headrace.backends.local.journal import LARGE_BYTES
from headrace.model import DEFAULT_SETTINGS, JobLinks, JobSettings
from headrace.states import State

_ENDED = (State.COMPLETED, State.FAILED)


def check(backend: LocalBackend) -> None:
    members: dict[str, list[Job]] = {name: [] for name in backend._queues}
    for job_id, job in backend._jobs.items():
        assert job.id == job_id
        assert backend._queues.get(job.queue.name) is job.queue, f"{job} is in a queue that is not there"
        members[job.queue.name].append(job)
    for queue in backend._queues.values():
        _check_places(queue, members[queue.name])
        _check_order(queue, members[queue.name])
        _check_groups(queue, members[queue.name])
        _check_keys(queue, members[queue.name])
    everybody = list(backend._jobs.values())
    _check_completed(backend, everybody)
    _check_leases(backend, everybody)
    _check_dependents(backend, everybody)
    _check_due(backend, everybody)
    if backend._journal.path is not None:
        _check_file(backend._journal.path, everybody)


def claim_order(jobs: list[Job]) -> list[Job]:
    """Waiting jobs as the protocol wants them handed out, said independently of the index."""

    def rank(job: Job) -> tuple[int, ...]:
        if job.settings.lifo:
            return (-job.priority, 0, -job.seq)
        return (-job.priority, 1, job.run_at, job.seq)

    return sorted((job for job in jobs if job.state is State.WAITING), key=rank)


def order_of(ready: ReadyOrder) -> list[Job]:
    """What popping everything would give, each job once, without touching the original."""
    copy = ReadyOrder()
    copy._fifo = deque(ready._fifo)
    copy._heap = list(ready._heap)
    copy._void = set(ready._void)
    popped: dict[int, Job] = {}
    while (job := copy.pop()) is not None:
        popped.setdefault(job.seq, job)
    return list(popped.values())


def _check_places(queue: Queue, jobs: list[Job]) -> None:
    assert queue.places[State.COMPLETED] is queue.completed
    assert queue.places[State.FAILED] is queue.failed
    for state in State:
        inside = {job.seq for job in jobs if job.state is state}
        assert queue.counts[state] == len(inside), f"{queue.name}: {state.word} is miscounted"
        if state is not State.REMOVED:
            listed = [job.seq for job in queue.jobs_in(state)]
            assert sorted(listed) == sorted(inside), f"{queue.name}: {state.word} lists other jobs than it has"
    assert queue.prioritized == sum(1 for job in jobs if job.state is State.WAITING and job.priority > 0)
    for job in jobs:
        assert (job.finished is not None) == (job.state in _ENDED), job


def _check_order(queue: Queue, jobs: list[Job]) -> None:
    assert order_of(queue.ready) == claim_order(jobs), f"{queue.name} would hand out in the wrong order"


def _check_groups(queue: Queue, jobs: list[Job]) -> None:
    if not queue.is_grouped:
        return
    assert sorted(queue.turn) == sorted(name for name in queue.groups if name)
    members: dict[str, list[Job]] = {}
    for job in jobs:
        members.setdefault((job.links.group_id if job.links else None) or "", []).append(job)
    for name in {*members, *queue.groups}:
        inside = members.get(name, [])
        group = queue.groups.get(name)
        running = sum(1 for job in inside if job.state is State.ACTIVE)
        assert (group.active if group else 0) == running, f"group {name!r} counts its active jobs wrong"
        assert (order_of(group.ready) if group else []) == claim_order(inside), f"group {name!r} is out of order"


def _check_keys(queue: Queue, jobs: list[Job]) -> None:
    alive = {id(job) for job in jobs}
    for key, holder in queue.keys.items():
        assert id(holder.job) in alive, f"key {key} is held by {holder.job}, which is gone"
        assert holder.job.state not in _ENDED, f"key {key} is held by {holder.job}"
        assert (holder.job.links or JobLinks()).unique_key == key
    for custom_id, job in queue.custom_ids.items():
        assert id(job) in alive, f"{custom_id} stands for {job}, which is gone"
        assert (job.links or JobLinks()).custom_id == custom_id
    for job in jobs:
        if job.links is None:
            continue
        if job.links.custom_id:
            assert queue.custom_ids.get(job.links.custom_id) is job
        history = job.history or History()
        may_lack = history.key_released or history.key_expires is not None or job.state in _ENDED
        if job.links.unique_key and not may_lack:
            assert queue.keys[job.links.unique_key].job is job, f"{job} lost its key"


def _check_completed(backend: LocalBackend, jobs: list[Job]) -> None:
    assert sorted(backend._completed) == sorted(job.seq for job in jobs if job.state is State.COMPLETED)


def _check_leases(backend: LocalBackend, jobs: list[Job]) -> None:
    watched = {seq: number for number, bucket in backend._wheel._buckets.items() for seq in bucket.jobs}
    assert sorted(watched) == sorted(job.seq for job in jobs if job.state is State.ACTIVE)
    for job in jobs:
        assert (job.lease is not None) == (job.state is State.ACTIVE), f"{job} and its lease disagree"
        if job.lease is not None:
            assert job.lease.bucket is not None
            assert watched[job.seq] == job.lease.bucket.number
            if job.lease.holder is not None:
                assert job.lease.holder.get(job.id) == job.lease.serial


def _check_dependents(backend: LocalBackend, jobs: list[Job]) -> None:
    alive = {id(job) for job in jobs}
    for dependency, waiting in backend._dependents.items():
        assert waiting, f"nobody waits for {dependency}, but it is listed"
        assert max(Counter(map(id, waiting)).values()) == 1, f"somebody waits twice for {dependency}"
        for job in waiting:
            assert id(job) in alive, f"{job} is gone and still waits for {dependency}"
            assert dependency in (job.history or History()).pending
    for job in jobs:
        if job.state is State.WAITING_CHILDREN:
            assert job.history is not None
            for dependency in job.history.pending:
                assert job in backend._dependents.get(dependency, []), f"{job} would never hear of {dependency}"


def _check_due(backend: LocalBackend, jobs: list[Job]) -> None:
    assert backend._due.count == sum(1 for job in jobs if job.state is State.DELAYED)
    planned = {(entry[0], entry[1]) for entry in backend._due._heap}
    for job in jobs:
        assert job.state is not State.DELAYED or (job.run_at, job.seq) in planned, f"{job} would sleep for ever"


# -- the file ------------------------------------------------------------------------------------------------


_COVERED = "(SELECT c.finished FROM completion c WHERE job.seq BETWEEN c.first AND c.last AND history IS NULL)"
_WHOLE = "NOT EXISTS (SELECT 1 FROM batch WHERE seq BETWEEN first AND last)"
_ROWS = f"""
SELECT seq, id, queue, CASE WHEN {_COVERED} IS NULL THEN state ELSE 4 END, priority, created, run_at,
       ifnull(finished, {_COVERED}), attempts, stalls, name, data, settings, links, history, result
FROM job WHERE {_WHOLE}
"""
"""The rows with what is said of them elsewhere."""


def _check_file(path: Path, jobs: list[Job]) -> None:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        rows = {row[0]: row for row in connection.execute(_ROWS)}
        payloads = dict(connection.execute(f"SELECT seq, data FROM payload WHERE {_WHOLE}"))
        logged = {seq for (seq,) in connection.execute("SELECT DISTINCT job FROM log")}
        settled: dict[int, set[str]] = {}
        for parent, child in connection.execute("SELECT parent, child FROM settled"):
            settled.setdefault(parent, set()).add(child)
    finally:
        connection.close()
    assert sorted(rows) == sorted(job.seq for job in jobs)
    assert logged <= rows.keys(), "log lines of jobs that are gone"
    assert settled.keys() <= rows.keys(), "notes on the children of jobs that are gone"
    assert payloads.keys() == {job.seq for job in jobs if job.size > LARGE_BYTES}
    for job in jobs:
        _check_row(job, rows[job.seq], payloads.get(job.seq), settled.get(job.seq, set()))


def _check_row(job: Job, row: tuple[object, ...], payload: bytes | None, settled: set[str]) -> None:
    state = State.WAITING if job.state is State.ACTIVE else job.state
    head = (job.seq, job.id, job.queue.name, int(state), job.priority, job.created, job.run_at, job.finished)
    assert row[:11] == (*head, job.attempts, job.stalls, job.name)
    data, settings, links, history, result = row[11:16]
    if job.data is not None:
        assert job.data == (payload if job.size > LARGE_BYTES else data)
    assert _decoded(settings, JobSettings, DEFAULT_SETTINGS) == job.settings
    assert _decoded(links, JobLinks, JobLinks()) == (job.links or JobLinks())
    if job.result is not None:
        assert result == job.result
    stored = _decoded(history, History, History())
    assert isinstance(stored, History)
    stored.pending -= settled
    stored.children_completed += len(settled)
    _check_history(job.history or History(), stored)


def _check_history(known: History, stored: History) -> None:
    # A claim is not written, so the timeline on disk may lack the latest "active".
    for name in ("burial", "failures", "pending", "children_completed", "failed_children", "ignored_children"):
        assert getattr(known, name) == getattr(stored, name), name
    assert (known.key_released, known.key_expires) == (stored.key_released, stored.key_expires)


def _decoded(blob: object, shape: type, absent: object) -> object:
    assert blob is None or isinstance(blob, bytes)
    return absent if blob is None else msgspec.msgpack.decode(blob, type=shape)
