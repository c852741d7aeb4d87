"""Commands that change one job: cancel, progress, update, priority, delay, discard, wait, leases."""

from __future__ import annotations

import time

import msgpack
import pytest

from tests.protocol.steps import (
    NOT_APPLIED,
    OK,
    bury,
    check_job,
    complete,
    counts,
    ids_of,
    job_of,
    park,
    push,
    state,
    take,
    take_plain,
)
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client


def _ended(client: Client, queue: str) -> list[str]:
    """A completed job, a failed one, and an id that nobody has."""
    done = push(client, f"{queue}.ended")
    complete(client, f"{queue}.ended")
    return [done, bury(client, f"{queue}.ended"), "nobody"]


# -- Cancel --------------------------------------------------------------------------------------------------


def test_cancel_removes_jobs_that_have_not_begun(client: Client, queue: str) -> None:
    waiting = push(client, queue)
    jobs = [push(client, queue, dependsOn=[waiting]), waiting, push(client, queue, delay=60_000)]
    for job_id in jobs:
        assert client.call("Cancel", id=job_id) == OK
        assert state(client, job_id) == "unknown"
    assert counts(client, queue) == {}
    assert client.ok("PULL", queue=queue)["job"] is None


def test_cancel_refuses_jobs_that_run_or_have_ended(client: Client, queue: str) -> None:
    active = push(client, queue)
    take(client, queue)
    for job_id in (active, *_ended(client, queue)):
        assert client.error("Cancel", id=job_id) == "Job not found or cannot be cancelled"
    assert state(client, active) == "active"


# -- Progress ------------------------------------------------------------------------------------------------


def test_progress_is_clamped_and_keeps_the_old_message(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    started = take_plain(client, queue)
    assert client.call("Progress", id=job_id, progress=250, message="far") == OK
    job = check_job(job_of(client, job_id), queried=True, progress=100, progressMessage="far")
    assert job["lastHeartbeat"] >= started["startedAt"]
    assert client.call("Progress", id=job_id, progress=-3.5) == OK
    check_job(job_of(client, job_id), queried=True, progress=0, progressMessage="far")
    assert client.call("Progress", id=job_id, progress=12.25, message="near") == OK
    check_job(job_of(client, job_id), queried=True, progress=12.25, progressMessage="near")


def test_progress_is_refused_unless_the_job_is_active(client: Client, queue: str) -> None:
    waiting = push(client, queue)
    done, failed, nobody = _ended(client, queue)
    for job_id, word in ((waiting, "waiting"), (done, "completed"), (failed, "failed")):
        error = client.error("Progress", id=job_id, progress=1)
        assert error == f"Job is not active (current state: {word})"
    assert client.error("Progress", id=nobody, progress=1) == "Job not found"
    assert client.error("Progress", id=waiting, progress="half") == "progress must be a number"
    assert client.error("Progress", id=waiting, progress=float("nan")) == "progress must be a finite number"


# -- Update --------------------------------------------------------------------------------------------------


def test_update_replaces_the_data_of_a_job_that_has_not_ended(client: Client, queue: str) -> None:
    waiting = push(client, queue, data="old")
    blocked = push(client, queue, data="old", dependsOn=[waiting])
    delayed = push(client, queue, data="old", delay=60_000)
    for job_id in (waiting, blocked, delayed):
        assert client.call("Update", id=job_id, data={"new": job_id}) == OK
        assert job_of(client, job_id)["data"] == {"new": job_id}
    assert take_plain(client, queue)["data"] == {"new": waiting}
    assert client.call("Update", id=waiting, data=msgpack.ExtType(0, b"\x00")) == OK
    assert job_of(client, waiting)["data"] is None
    for job_id in _ended(client, queue):
        assert client.error("Update", id=job_id, data=1) == "Job not found or cannot be updated"
    assert client.error("Update", id=waiting) == "data is required"
    large = "x" * (10 * 1024 * 1024 + 1)
    assert client.error("Update", id=waiting, data=large) == "Job data too large (max 10MB)"


def test_update_of_a_completed_repeat_job_reaches_its_successor(client: Client, queue: str) -> None:
    first = push(client, queue, data="old", repeat={"every": 60_000})
    complete(client, queue)
    assert client.call("Update", id=first, data="new") == OK
    (successor,) = client.ok("GetJobs", queue=queue, state="delayed")["jobs"]
    assert successor["data"] == "new"


# -- ChangePriority ------------------------------------------------------------------------------------------


def test_change_priority_reorders_waiting_and_delayed_jobs(client: Client, queue: str) -> None:
    first, second, third = push(client, queue), push(client, queue), push(client, queue)
    assert client.call("ChangePriority", id=third, priority=5) == OK
    assert client.call("ChangePriority", id=second, priority=0, lifo=True) == OK
    check_job(job_of(client, second), queried=True, lifo=True, priority=0)
    assert counts(client, queue) == {"waiting": 3, "prioritized": 1}
    delayed = push(client, queue, delay=60_000)
    assert client.call("ChangePriority", id=delayed, priority=-4) == OK
    assert job_of(client, delayed)["priority"] == -4
    assert ids_of(client.ok("PULLB", queue=queue, count=9)["jobs"]) == [third, second, first]
    assert counts(client, queue) == {"active": 3, "delayed": 1}


def test_change_priority_back_and_forth_hands_the_job_out_once(client: Client, queue: str) -> None:
    job_id, other = push(client, queue), push(client, queue)
    for priority in (5, 0, 5, 0):
        client.ok("ChangePriority", id=job_id, priority=priority)
    assert ids_of(client.ok("PULLB", queue=queue, count=9)["jobs"]) == [job_id, other]
    assert counts(client, queue) == {"active": 2}


def test_change_priority_is_refused_for_jobs_not_in_the_queue(client: Client, queue: str) -> None:
    active = push(client, queue)
    take(client, queue)
    for job_id in (active, *_ended(client, queue)):
        assert client.error("ChangePriority", id=job_id, priority=1) == "Job not found or not in queue"
    error = client.error("ChangePriority", id=active, priority=1_000_001)
    assert error == "priority must be at most 1000000"


# -- Promote, ChangeDelay, MoveToDelayed, MoveToWait ---------------------------------------------------------


def test_promote_makes_a_delayed_job_ready_now(client: Client, queue: str) -> None:
    job_id = push(client, queue, delay=60_000)
    assert client.call("Promote", id=job_id) == OK
    job = check_job(job_of(client, job_id), queried=True, state="waiting")
    assert job["runAt"] <= time.time() * 1000 + 1
    for other in (job_id, *_ended(client, queue)):
        assert client.error("Promote", id=other) == "Job not found or not delayed"
    assert take_plain(client, queue)["id"] == job_id


def test_move_to_delayed_puts_off_active_waiting_and_delayed_jobs(client: Client, queue: str) -> None:
    active = push(client, queue)
    _, token = take(client, queue)
    waiting, delayed = push(client, queue), push(client, queue, delay=1_000)
    assert client.error("MoveToDelayed", id=active, delay=1) == f"Lock token required for job {active}"
    error = client.error("MoveToDelayed", id=active, delay=1, token="x")
    assert error == f"Invalid or expired lock token for job {active}"
    assert client.call("MoveToDelayed", id=active, delay=60_000, token=token) == OK
    assert client.call("MoveToDelayed", id=waiting, delay=60_000) == OK
    assert client.call("MoveToDelayed", id=delayed, delay=60_000) == OK
    assert counts(client, queue) == {"delayed": 3}
    assert job_of(client, delayed)["runAt"] >= job_of(client, waiting)["runAt"]
    check_job(job_of(client, active), queried=True, attempts=0, startedAt=None)
    assert client.call("ACK", id=active, token=token) == NOT_APPLIED


def test_move_to_delayed_is_refused_in_other_states(client: Client, queue: str) -> None:
    done, failed, nobody = _ended(client, queue)
    for job_id, word in ((done, "completed"), (failed, "failed")):
        error = client.error("MoveToDelayed", id=job_id, delay=1)
        assert error == f"Job is not active (current state: {word})"
    assert client.error("MoveToDelayed", id=nobody, delay=1) == "Job not found"
    assert client.error("MoveToDelayed", id=done, delay=-1) == "delay must be at least 0"


def test_change_delay_counts_from_now(client: Client, queue: str) -> None:
    job_id = push(client, queue, delay=60_000)
    assert client.call("ChangeDelay", id=job_id, delay=120_000) == OK
    left = job_of(client, job_id)["runAt"] - time.time() * 1000
    assert 115_000 < left <= 120_001
    assert client.call("ChangeDelay", id=job_id, delay=0) == OK
    assert state(client, job_id) == "waiting"
    _, token = take(client, queue)
    assert client.error("ChangeDelay", id=job_id, delay=5) == f"Lock token required for job {job_id}"
    error = client.error("ChangeDelay", id=job_id, delay=5, token="x")
    assert error == f"Invalid or expired lock token for job {job_id}"
    assert client.call("ChangeDelay", id=job_id, delay=60_000, token=token) == OK
    assert state(client, job_id) == "delayed"
    for other in _ended(client, queue):
        assert client.error("ChangeDelay", id=other, delay=1) == "Job not found or cannot change delay"


def test_move_to_wait_makes_jobs_ready_from_most_states(client: Client, queue: str) -> None:
    active = push(client, queue)
    _, token = take(client, queue)
    assert client.error("MoveToWait", id=active) == f"Lock token required for job {active}"
    error = client.error("MoveToWait", id=active, token="x")
    assert error == f"Invalid or expired lock token for job {active}"
    assert client.call("MoveToWait", id=active, token=token) == OK
    check_job(job_of(client, active), queried=True, state="waiting", attempts=0, startedAt=None)
    assert client.call("MoveToWait", id=active) == OK
    client.ok("Cancel", id=active)
    failed = bury(client, queue)
    for job_id in (failed, push(client, queue, delay=60_000)):
        assert client.call("MoveToWait", id=job_id) == OK
        assert state(client, job_id) == "waiting"
    assert job_of(client, failed)["attempts"] == 0
    done = complete(client, queue)
    assert client.error("MoveToWait", id=done) == "Cannot move job from state 'completed' to waiting"
    assert client.error("MoveToWait", id="nobody") == "Job not found"


def test_move_to_wait_of_a_failed_job_is_refused_while_another_has_its_key(client: Client, queue: str) -> None:
    failed = bury(client, queue, uniqueKey="k")
    rival = push(client, queue, uniqueKey="k")
    assert client.error("MoveToWait", id=failed) == "Cannot move job from state 'failed' to waiting"
    assert state(client, failed) == "failed"
    client.ok("Cancel", id=rival)
    assert client.call("MoveToWait", id=failed) == OK


# -- Discard -------------------------------------------------------------------------------------------------


def test_discard_moves_a_job_to_the_dead_letters(client: Client, queue: str) -> None:
    active = push(client, queue)
    _, token = take(client, queue)
    waiting, delayed = push(client, queue), push(client, queue, delay=60_000)
    assert client.error("Discard", id=active) == f"Lock token required for job {active}"
    error = client.error("Discard", id=active, token="x")
    assert error == f"Invalid or expired lock token for job {active}"
    assert client.call("Discard", id=active, token=token) == OK
    assert client.call("Discard", id=waiting) == OK
    assert client.call("Discard", id=delayed) == OK
    entries = client.ok("Dlq", queue=queue)["entries"]
    assert [(entry["job"]["id"], entry["reason"], entry["error"]) for entry in entries] == [
        (job_id, "unknown", None) for job_id in (active, waiting, delayed)
    ]
    assert counts(client, queue) == {"failed": 3}
    for job_id in _ended(client, queue):
        assert client.error("Discard", id=job_id) == "Job not found"


# -- WaitJob -------------------------------------------------------------------------------------------------


def test_wait_job_answers_at_once_for_a_job_that_has_ended(client: Client, queue: str) -> None:
    push(client, queue)
    done = complete(client, queue, result=[1])
    assert client.call("WaitJob", id=done) == {"ok": True, "completed": True, "result": [1]}
    assert client.call("WaitJob", id=bury(client, queue)) == {"ok": True, "completed": False}
    assert client.error("WaitJob", id="nobody") == "Job not found"
    assert client.error("WaitJob", id=done, timeout=600_001) == "timeout must be at most 600000"


@pytest.mark.parametrize("kept", [True, False])
def test_wait_job_answers_when_the_job_completes(server: ServerProcess, client: Client, queue: str, kept: bool) -> None:
    job_id = push(client, queue, removeOnComplete=not kept)
    _, token = take(client, queue)
    with server.client() as waiter:
        park(waiter, "WaitJob", id=job_id, timeout=10_000)
        client.ok("ACK", id=job_id, token=token, result={"n": 2})
        assert waiter.recv() == {"ok": True, "completed": True, "result": {"n": 2}, "reqId": "parked"}


def test_wait_job_answers_at_once_when_the_job_fails_for_good(
    server: ServerProcess, client: Client, queue: str
) -> None:
    job_id = push(client, queue, maxAttempts=2, backoff=0)
    with server.client() as waiter:
        park(waiter, "WaitJob", id=job_id, timeout=10_000)
        for _ in range(2):
            _, token = take(client, queue)
            began = time.monotonic()
            client.ok("FAIL", id=job_id, token=token)
        assert waiter.recv() == {"ok": True, "completed": False, "reqId": "parked"}
        assert time.monotonic() - began < 2


def test_wait_job_gives_up_after_its_timeout_and_when_the_job_is_cancelled(
    server: ServerProcess, client: Client, queue: str
) -> None:
    job_id = push(client, queue)
    assert client.call("WaitJob", id=job_id, timeout=0) == {"ok": True, "completed": False}
    assert client.call("WaitJob", id=job_id, timeout=50) == {"ok": True, "completed": False}
    with server.client() as waiter:
        park(waiter, "WaitJob", id=job_id, timeout=10_000)
        client.ok("Cancel", id=job_id)
        assert waiter.recv() == {"ok": True, "completed": False, "reqId": "parked"}


@pytest.mark.parametrize("removal", ["Drain", "Obliterate", "Clean"])
def test_wait_job_answers_at_once_when_the_job_goes_with_its_queue(
    server: ServerProcess, client: Client, queue: str, removal: str
) -> None:
    elsewhere = push(client, f"{queue}-kept")
    with server.client() as waiter, server.client() as patient:
        for options in ({}, {"delay": 60_000}):
            park(waiter, "WaitJob", id=push(client, queue, **options), timeout=10_000)
            park(patient, "WaitJob", id=elsewhere, timeout=1_000)
            began = time.monotonic()
            client.ok(removal, queue=queue, **({"grace": 0} if removal == "Clean" else {}))
            assert waiter.recv() == {"ok": True, "completed": False, "reqId": "parked"}
            assert time.monotonic() - began < 5
            assert patient.recv()["completed"] is False
            assert time.monotonic() - began > 0.9
    assert client.error("WaitJob", id=push_and_drain(client, queue)) == "Job not found"


def push_and_drain(client: Client, queue: str) -> str:
    job_id = push(client, queue)
    client.ok("Drain", queue=queue)
    return job_id


def test_wait_job_answers_at_once_when_an_active_job_is_obliterated(
    server: ServerProcess, client: Client, queue: str
) -> None:
    job_id = push(client, queue)
    take(client, queue)
    with server.client() as waiter:
        park(waiter, "WaitJob", id=job_id, timeout=10_000)
        client.ok("Drain", queue=queue)  # nothing that waits: who waits for the active job waits on
        client.ok("Obliterate", queue=queue)
        began = time.monotonic()
        assert waiter.recv() == {"ok": True, "completed": False, "reqId": "parked"}
        assert time.monotonic() - began < 2


# -- leases --------------------------------------------------------------------------------------------------


def test_extend_lock_moves_the_end_of_the_lease(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    _, token = take(client, queue, lockTtl=1_000)
    assert client.call("ExtendLock", id=job_id, token=token, duration=60_000) == OK
    assert client.call("PULL", queue=queue, timeout=1_500)["job"] is None
    assert state(client, job_id) == "active"
    assert client.call("ExtendLock", id=job_id, duration=50) == OK
    eventually(lambda: state(client, job_id) == "waiting")


def test_extend_lock_is_refused_without_a_lease_or_with_a_wrong_token(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    text = "Lock not found or invalid token"
    assert client.error("ExtendLock", id=job_id, token="t", duration=5) == text
    take(client, queue)
    assert client.error("ExtendLock", id=job_id, token="wrong", duration=5) == text
    assert client.error("ExtendLock", id="nobody", duration=5) == text
    assert client.error("ExtendLock", id=job_id) == "duration is required"
    assert client.error("ExtendLock", id=job_id, duration=0) == "duration must be at least 1"


def test_extend_locks_counts_the_leases_it_could_extend(client: Client, queue: str) -> None:
    ids = [push(client, queue) for _ in range(3)]
    reply = client.ok("PULLB", queue=queue, count=3, owner="w", lockTtl=1_000)
    tokens = [reply["tokens"][0], "wrong", reply["tokens"][2]]
    reply = client.call("ExtendLocks", ids=ids, tokens=tokens, durations=[60_000] * 3)
    assert reply == {"ok": True, "count": 2}
    eventually(lambda: state(client, ids[1]) == "waiting")
    assert [state(client, ids[0]), state(client, ids[2])] == ["active", "active"]
    error = client.error("ExtendLocks", ids=ids, tokens=["t"], durations=[1, 1, 1])
    assert error == "ExtendLocks tokens length must match ids length"
    error = client.error("ExtendLocks", ids=ids, tokens=tokens, durations=[1])
    assert error == "ExtendLocks durations length must match ids length"
