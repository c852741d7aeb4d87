"""Dlq, RetryDlq, PurgeDlq, RemoveDlqJob, GetDlqStats, RetryCompleted."""

from __future__ import annotations

import time

import pytest

from tests.protocol.steps import (
    bury,
    check_job,
    complete,
    counts,
    ids_of,
    job_of,
    push,
    state,
    take,
)
from tests.waiting import eventually
from tests.wireclient import Client

REASONS = ["explicit_fail", "max_attempts_exceeded", "timeout", "stalled", "ttl_expired", "worker_lost", "unknown"]


def test_dead_letters_come_with_the_history_of_their_failure(client: Client, queue: str) -> None:
    assert client.call("Dlq", queue=queue) == {"ok": True, "jobs": [], "entries": []}
    job_id = bury(client, queue, "boom")
    reply = client.call("Dlq", queue=queue)
    assert set(reply) == {"ok", "jobs", "entries"}
    check_job(reply["jobs"][0], queried=False, id=job_id, attempts=1)
    (entry,) = reply["entries"]
    check_job(entry["job"], queried=False, id=job_id)
    assert set(entry) == set(
        ["job", "enteredAt", "reason", "error", "attempts", "retryCount", "lastRetryAt", "nextRetryAt", "expiresAt"]
    )
    assert (entry["reason"], entry["error"], entry["retryCount"]) == ("max_attempts_exceeded", "boom", 0)
    assert (entry["lastRetryAt"], entry["nextRetryAt"]) == (None, None)
    assert isinstance(entry["enteredAt"], float)
    assert entry["expiresAt"] == entry["enteredAt"] + 604_800_000
    (attempt,) = entry["attempts"]
    assert set(attempt) == {"attempt", "startedAt", "failedAt", "reason", "error", "duration"}
    assert attempt["failedAt"] - attempt["startedAt"] == attempt["duration"]


def test_dead_letters_are_limited_and_filtered(client: Client, queue: str) -> None:
    first = bury(client, queue)
    entered = client.ok("Dlq", queue=queue)["entries"][0]["enteredAt"]
    eventually(lambda: time.time() * 1000 > entered + 2)
    second = bury(client, queue)
    third = push(client, queue)
    client.ok("Discard", id=third)

    def chosen(**fields: object) -> list[str]:
        return ids_of(client.ok("Dlq", queue=queue, **fields)["jobs"])

    assert chosen() == [first, second, third]
    assert chosen(count=2) == [first, second]
    assert chosen(count=0) == []
    assert chosen(filter={"reason": "unknown"}) == [third]
    assert chosen(filter={"newerThan": entered}) == [first, second, third], "that moment included"
    assert chosen(filter={"newerThan": entered + 1}) == [second, third]
    assert chosen(filter={"olderThan": entered}) == [first]
    assert chosen(filter={"olderThan": entered - 1}) == []
    assert chosen(filter={"offset": 1, "limit": 1}) == [second]
    assert chosen(filter={"expired": True}) == []
    assert chosen(filter={"retriable": True}) == [first, second, third]


def test_retry_gives_dead_letters_fresh_attempts(client: Client, queue: str) -> None:
    ids = [bury(client, queue) for _ in range(4)]
    assert client.call("RetryDlq", queue=queue, jobId=ids[2]) == {"ok": True, "count": 1}
    job = check_job(job_of(client, ids[2]), queried=True, state="waiting", attempts=0, stallCount=0)
    assert [entry["state"] for entry in job["timeline"]][:3] == ["waiting", "active", "failed"]
    assert client.call("RetryDlq", queue=queue, count=1) == {"ok": True, "count": 1}
    assert state(client, ids[0]) == "waiting"
    assert client.call("RetryDlq", queue=queue, filter={"reason": "timeout"})["count"] == 0
    assert client.call("RetryDlq", queue=queue) == {"ok": True, "count": 2}
    assert counts(client, queue) == {"waiting": 4}
    for fields in ({"jobId": "nobody"}, {"jobId": ids[0]}, {}):
        assert client.call("RetryDlq", queue=queue, **fields) == {"ok": True, "count": 0}
    assert client.call("RetryDlq", queue=f"{queue}.none") == {"ok": True, "count": 0}


def test_several_dead_letters_are_retried_by_their_ids(client: Client, queue: str) -> None:
    ids = [bury(client, queue) for _ in range(4)]
    reply = client.call("RetryDlq", queue=queue, ids=[ids[0], "nobody", ids[2], ids[2]])
    assert reply == {"ok": True, "count": 2}
    assert [state(client, job_id) for job_id in ids] == ["waiting", "failed", "waiting", "failed"]
    assert client.call("RetryDlq", queue=queue, ids=[]) == {"ok": True, "count": 0}
    assert client.error("RetryDlq", queue=queue, ids=["x"] * 1001) == "ids must have at most 1000 items"


def test_retry_skips_a_job_whose_key_belongs_to_another_by_now(client: Client, queue: str) -> None:
    dead = bury(client, queue, uniqueKey="k")
    push(client, queue, uniqueKey="k")
    assert client.call("RetryDlq", queue=queue) == {"ok": True, "count": 0}
    assert state(client, dead) == "failed"


def test_purge_removes_all_dead_letters(client: Client, queue: str) -> None:
    ids = [bury(client, queue) for _ in range(3)]
    assert client.call("PurgeDlq", queue=queue) == {"ok": True, "count": 3}
    assert {state(client, job_id) for job_id in ids} == {"unknown"}
    assert client.call("PurgeDlq", queue=queue) == {"ok": True, "count": 0}
    assert counts(client, queue) == {}


def test_remove_dlq_job_removes_one_dead_letter(client: Client, queue: str) -> None:
    first, second = bury(client, queue), bury(client, queue)
    assert client.call("RemoveDlqJob", queue=queue, jobId=first) == {"ok": True, "data": {"removed": True}}
    assert client.call("RemoveDlqJob", queue=queue, jobId=first) == {"ok": True, "data": {"removed": False}}
    wrong = client.call("RemoveDlqJob", queue=f"{queue}.other", jobId=second)
    assert wrong == {"ok": True, "data": {"removed": False}}
    assert counts(client, queue) == {"failed": 1}


def test_dlq_stats_count_by_reason(client: Client, queue: str) -> None:
    empty = client.call("GetDlqStats", queue=queue)
    assert empty == {
        "ok": True,
        "data": {
            "stats": {
                "total": 0,
                "byReason": dict.fromkeys(REASONS, 0),
                "byQueue": {},
                "pendingRetry": 0,
                "expired": 0,
                "oldestEntry": None,
                "newestEntry": None,
            }
        },
    }
    bury(client, queue)
    client.ok("Discard", id=push(client, queue))
    stats = client.ok("GetDlqStats", queue=queue)["data"]["stats"]
    assert stats["total"] == 2
    assert {k: n for k, n in stats["byReason"].items() if n} == {"max_attempts_exceeded": 1, "unknown": 1}
    assert stats["byQueue"] == {queue: 2}
    assert isinstance(stats["oldestEntry"], float)
    assert stats["oldestEntry"] <= stats["newestEntry"]


def test_retry_completed_runs_jobs_again_from_the_start(client: Client, queue: str) -> None:
    ids = []
    for n in range(3):
        push(client, queue)
        ids.append(complete(client, queue, result=n))
    assert client.call("RetryCompleted", queue=queue, id=ids[1]) == {"ok": True, "count": 1}
    check_job(job_of(client, ids[1]), queried=True, state="waiting", attempts=0, progress=0, completedAt=None)
    assert "result" not in client.ok("GetResult", id=ids[1])
    assert client.call("RetryCompleted", queue=queue, count=1) == {"ok": True, "count": 1}
    assert state(client, ids[0]) == "waiting"
    done = job_of(client, ids[2])["completedAt"]
    assert client.call("RetryCompleted", queue=queue, timestamp=done - 1) == {"ok": True, "count": 0}
    assert client.call("RetryCompleted", queue=queue, timestamp=done) == {"ok": True, "count": 1}
    assert counts(client, queue) == {"waiting": 3}
    job, token = take(client, queue)
    client.ok("ACK", id=job["id"], token=token, result="again")
    assert client.ok("GetResult", id=job["id"])["result"] == "again"


@pytest.mark.parametrize("fields", [{}, {"id": "nobody"}, {"count": 0}])
def test_retry_completed_of_nothing_is_zero(client: Client, queue: str, fields: dict[str, object]) -> None:
    waiting = push(client, queue)
    assert client.call("RetryCompleted", queue=queue, **fields) == {"ok": True, "count": 0}
    assert client.call("RetryCompleted", queue=queue, id=waiting) == {"ok": True, "count": 0}
    assert client.call("RetryCompleted", queue=f"{queue}.other", id=waiting) == {"ok": True, "count": 0}


def test_dead_letters_can_be_paged(client: Client, queue: str) -> None:
    for n in range(3):
        client.ok("PUSH", queue=queue, data=n, maxAttempts=1)
        client.ok("FAIL", id=client.ok("PULL", queue=queue)["job"]["id"], error=f"error {n}")
    page = client.ok("DlqPage", queue=queue, limit=2, offset=1)
    assert page["total"] == 3
    assert [entry["error"] for entry in page["entries"]] == ["error 1", "error 2"]
    assert client.ok("DlqPage", queue=f"{queue}-empty") == {"ok": True, "entries": [], "total": 0}


def test_dead_letters_in_brief_are_listed_whatever_they_carry(client: Client, queue: str) -> None:
    ids = [bury(client, queue, "boom", data={"image": "x" * 1_000_000, "of": "Ada"}) for _ in range(40)]
    assert client.error("DlqPage", queue=queue).startswith("Reply exceeds 64 MB")
    page = client.ok("DlqPage", queue=queue, brief=True)
    assert page["total"] == 40
    assert [entry["job"]["id"] for entry in page["entries"]] == ids
    entry = page["entries"][0]
    assert (entry["error"], entry["attempts"], entry["job"]["data"]["of"]) == ("boom", [], "Ada")
    assert entry["job"]["dataBytes"] > 1_000_000
    preview = client.ok("DashboardQueue", queue=queue, brief=True)["data"]["dlqPreview"]
    assert [letter["data"]["of"] for letter in preview] == ["Ada"] * 10
