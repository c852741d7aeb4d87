"""Commands that change a whole queue: pause, drain, clean, obliterate, promote, its stall and dead-letter settings."""

from __future__ import annotations

import time

import pytest

from tests.protocol.steps import (
    OK,
    bury,
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

STALL_DEFAULTS = {"enabled": True, "stallInterval": 30_000, "maxStalls": 3, "gracePeriod": 5_000}
DLQ_DEFAULTS = {
    "autoRetry": False,
    "autoRetryInterval": 3_600_000,
    "maxAutoRetries": 3,
    "maxAge": 604_800_000,
    "maxEntries": 10_000,
}


def _fill(client: Client, queue: str) -> dict[str, str]:
    jobs = {"completed": push(client, queue)}
    complete(client, queue)
    jobs["failed"] = bury(client, queue)
    jobs["active"] = push(client, queue)
    _, jobs["token"] = take(client, queue)
    jobs["waiting"] = push(client, queue)
    jobs["prioritized"] = push(client, queue, priority=3)
    jobs["delayed"] = push(client, queue, delay=600_000)
    jobs["blocked"] = push(client, queue, dependsOn=[jobs["active"]])
    return jobs


def test_a_paused_queue_hands_out_nothing_until_it_is_resumed(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    assert client.call("IsPaused", queue=queue) == {"ok": True, "paused": False}
    assert client.call("Pause", queue=queue) == OK
    assert client.call("Pause", queue=queue) == OK
    assert client.call("IsPaused", queue=queue) == {"ok": True, "paused": True}
    assert client.call("PULL", queue=queue, timeout=50)["job"] is None
    assert client.call("Resume", queue=queue) == OK
    assert client.call("IsPaused", queue=queue) == {"ok": True, "paused": False}
    assert take_plain(client, queue)["id"] == job_id


@pytest.mark.alone
def test_resume_serves_a_waiting_pull_at_once(server: ServerProcess, client: Client, queue: str) -> None:
    client.ok("Pause", queue=queue)
    job_id = push(client, queue)
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000)
        client.ok("Resume", queue=queue)
        began = time.monotonic()
        assert poller.recv()["job"]["id"] == job_id
        assert time.monotonic() - began < 1


def test_active_jobs_of_a_paused_queue_go_on(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    _, token = take(client, queue)
    client.ok("Pause", queue=queue)
    assert client.call("ACK", id=job_id, token=token) == OK


def test_drain_removes_waiting_and_delayed_jobs_only(client: Client, queue: str) -> None:
    jobs = _fill(client, queue)
    assert client.call("Drain", queue=queue) == {"ok": True, "count": 3}
    assert counts(client, queue) == {"active": 1, "completed": 1, "failed": 1, "waiting-children": 1}
    assert state(client, jobs["waiting"]) == state(client, jobs["delayed"]) == "unknown"
    assert client.call("Drain", queue=f"{queue}.none") == {"ok": True, "count": 0}


def test_obliterate_removes_everything_and_resets_the_settings(client: Client, queue: str) -> None:
    jobs = _fill(client, queue)
    client.ok("Pause", queue=queue)
    client.ok("SetConcurrency", queue=queue, limit=1)
    client.ok("RateLimit", queue=queue, limit=1)
    client.ok("SetStallConfig", queue=queue, config={"maxStalls": 9})
    client.ok("SetDlqConfig", queue=queue, config={"maxEntries": 9})
    assert client.call("Obliterate", queue=queue) == OK
    assert counts(client, queue) == {}
    assert queue not in [line["name"] for line in client.ok("ListQueues")["queues"]]
    error = client.error("ACK", id=jobs["active"], token=jobs["token"])
    assert error == f"Job not found or not in processing state: {jobs['active']}"
    assert client.ok("IsPaused", queue=queue)["paused"] is False
    limits = client.ok("GetQueueLimits", queue=queue)["data"]["limits"]
    assert (limits["rateLimit"], limits["concurrencyLimit"]) == (None, None)
    assert client.ok("GetStallConfig", queue=queue)["config"] == STALL_DEFAULTS
    assert client.ok("GetDlqConfig", queue=queue)["config"] == DLQ_DEFAULTS
    assert client.call("Obliterate", queue=f"{queue}.none") == OK
    push(client, queue)
    assert counts(client, queue) == {"waiting": 1}


def test_clean_without_state_spares_active_and_blocked_jobs(client: Client, queue: str) -> None:
    jobs = _fill(client, queue)
    reply = client.call("Clean", queue=queue, grace=0)
    assert set(reply) == {"ok", "count", "ids"}
    gone = {jobs[k] for k in ("completed", "failed", "waiting", "prioritized", "delayed")}
    assert (reply["count"], set(reply["ids"])) == (5, gone)
    assert counts(client, queue) == {"active": 1, "waiting-children": 1}


@pytest.mark.parametrize(
    ("word", "removed"),
    [
        ("completed", ["completed"]),
        ("failed", ["failed"]),
        ("delayed", ["delayed"]),
        ("waiting", ["waiting", "prioritized"]),
        ("wait", ["waiting", "prioritized"]),
        ("prioritized", ["prioritized"]),
        ("active", []),
        ("nonsense", []),
    ],
)
def test_clean_with_a_state_removes_that_state(client: Client, queue: str, word: str, removed: list[str]) -> None:
    jobs = _fill(client, queue)
    reply = client.ok("Clean", queue=queue, grace=0, state=word)
    assert sorted(reply["ids"]) == sorted(jobs[key] for key in removed)
    assert client.ok("Count", queue=queue)["count"] == 7 - len(removed)


def test_clean_honours_grace_and_limit(client: Client, queue: str) -> None:
    ids = [push(client, queue) for _ in range(5)]
    assert client.call("Clean", queue=queue, grace=60_000) == {"ok": True, "count": 0, "ids": []}
    assert client.ok("Clean", queue=queue, grace=0, limit=2)["ids"] == ids[:2]
    assert client.error("Clean", queue=queue) == "grace is required"
    assert client.error("Clean", queue=queue, grace=-1) == "grace must be at least 0"


def test_promote_jobs_makes_the_oldest_delayed_jobs_ready(client: Client, queue: str) -> None:
    ids = [push(client, queue, delay=60_000 - n) for n in range(4)]
    assert client.call("PromoteJobs", queue=queue, count=2) == {"ok": True, "count": 2}
    assert ids_of(client.ok("GetJobs", queue=queue, state="waiting")["jobs"]) == ids[:2]
    assert client.call("PromoteJobs", queue=queue) == {"ok": True, "count": 2}
    assert counts(client, queue) == {"waiting": 4}
    assert client.call("PromoteJobs", queue=f"{queue}.none") == {"ok": True, "count": 0}


def test_list_queues_gives_a_line_for_each_queue(client: Client, queue: str) -> None:
    _fill(client, queue)
    client.ok("Pause", queue=queue)
    reply = client.call("ListQueues")
    assert set(reply) == {"ok", "queues"}
    (line,) = [line for line in reply["queues"] if line["name"] == queue]
    assert line == {"name": queue, "waiting": 2, "delayed": 1, "active": 1, "paused": True}


# -- stalls --------------------------------------------------------------------------------------------------


def test_stall_settings_are_merged_over_the_current_ones(client: Client, queue: str) -> None:
    assert client.call("GetStallConfig", queue=queue) == {"ok": True, "config": STALL_DEFAULTS}
    assert client.call("SetStallConfig", queue=queue, config={"stallInterval": 500, "maxStalls": 2}) == OK
    assert client.call("SetStallConfig", queue=queue, config={"gracePeriod": 0}) == OK
    expected = STALL_DEFAULTS | {"stallInterval": 500, "maxStalls": 2, "gracePeriod": 0}
    assert client.ok("GetStallConfig", queue=queue)["config"] == expected
    error = client.error("SetStallConfig", queue=queue, config={"maxStalls": 0})
    assert error == "config.maxStalls must be at least 1"
    assert client.error("SetStallConfig", queue=queue) == "config is required"


def test_a_job_without_heartbeats_stalls_is_retried_and_buried(client: Client, queue: str) -> None:
    client.ok("SetStallConfig", queue=queue, config={"stallInterval": 60, "maxStalls": 2, "gracePeriod": 0})
    job_id = push(client, queue, backoff=0, maxAttempts=5)
    take_plain(client, queue)
    eventually(lambda: state(client, job_id) != "active")
    job = job_of(client, job_id)
    assert (job["attempts"], job["stallCount"], job["failedReason"]) == (1, 1, "stalled")
    take_plain(client, queue)
    eventually(lambda: state(client, job_id) == "failed")
    (entry,) = client.ok("Dlq", queue=queue)["entries"]
    assert (entry["reason"], entry["error"]) == ("stalled", "Job stalled 2 times")


def test_a_stall_at_the_last_attempt_buries_the_job(client: Client, queue: str) -> None:
    client.ok("SetStallConfig", queue=queue, config={"stallInterval": 60, "gracePeriod": 0})
    job_id = push(client, queue, maxAttempts=1)
    take_plain(client, queue)
    eventually(lambda: state(client, job_id) == "failed")
    (entry,) = client.ok("Dlq", queue=queue)["entries"]
    assert (entry["reason"], entry["error"]) == ("max_attempts_exceeded", "Job stalled at max attempts (1)")


def test_heartbeats_keep_a_job_from_stalling(client: Client, queue: str) -> None:
    client.ok("SetStallConfig", queue=queue, config={"stallInterval": 1_000, "gracePeriod": 0})
    job_id = push(client, queue)
    started_at = take_plain(client, queue)["startedAt"]

    def is_kept_for_long() -> bool:
        client.ok("JobHeartbeat", id=job_id)
        return bool(job_of(client, job_id)["lastHeartbeat"] > started_at + 1_500)

    eventually(is_kept_for_long)
    assert state(client, job_id) == "active"


# -- dead-letter settings ------------------------------------------------------------------------------------


def test_dead_letter_settings_are_merged_over_the_current_ones(client: Client, queue: str) -> None:
    assert client.call("GetDlqConfig", queue=queue) == {"ok": True, "config": DLQ_DEFAULTS}
    assert client.call("SetDlqConfig", queue=queue, config={"maxEntries": 2}) == OK
    assert client.call("SetDlqConfig", queue=queue, config={"maxAge": None, "autoRetry": True}) == OK
    expected = DLQ_DEFAULTS | {"maxEntries": 2, "maxAge": None, "autoRetry": True}
    assert client.ok("GetDlqConfig", queue=queue)["config"] == expected
    error = client.error("SetDlqConfig", queue=queue, config={"autoRetry": "yes"})
    assert error == "config.autoRetry must be a boolean"


def test_the_dead_letter_queue_keeps_its_newest_entries(client: Client, queue: str) -> None:
    client.ok("SetDlqConfig", queue=queue, config={"maxEntries": 2})
    ids = [bury(client, queue) for _ in range(3)]
    assert ids_of(client.ok("Dlq", queue=queue)["jobs"]) == ids[1:]
    assert state(client, ids[0]) == "unknown"


def test_dead_letters_go_when_they_are_too_old(client: Client, queue: str) -> None:
    client.ok("SetDlqConfig", queue=queue, config={"maxAge": 80})
    job_id = bury(client, queue)
    eventually(lambda: state(client, job_id) == "unknown")
    assert client.ok("Dlq", queue=queue)["entries"] == []


def test_dead_letters_are_retried_by_themselves_when_asked_for(client: Client, queue: str) -> None:
    client.ok("SetDlqConfig", queue=queue, config={"autoRetry": True, "autoRetryInterval": 60})
    job_id = bury(client, queue)
    (entry,) = client.ok("Dlq", queue=queue)["entries"]
    assert entry["nextRetryAt"] - entry["enteredAt"] == 60
    eventually(lambda: state(client, job_id) == "waiting")
    job, token = take(client, queue)
    assert job["attempts"] == 0
    client.ok("FAIL", id=job_id, token=token, unrecoverable=True)
    (entry,) = client.ok("Dlq", queue=queue)["entries"]
    assert entry["retryCount"] == 1
    assert isinstance(entry["lastRetryAt"], float)


def test_queues_summary_counts_each_queue_by_state(client: Client, queue: str) -> None:
    client.ok("PUSHB", queue=queue, jobs=[{"data": 1}, {"data": 2, "delay": 60_000}])
    client.ok("Pause", queue=queue)
    (row,) = [row for row in client.ok("QueuesSummary")["queues"] if row["name"] == queue]
    assert row["paused"] is True
    assert (row["counts"]["waiting"], row["counts"]["delayed"], row["counts"]["active"]) == (1, 1, 0)
