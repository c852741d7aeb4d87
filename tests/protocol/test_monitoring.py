"""Ping, Stats, Metrics, Prometheus, StorageStatus, CompactMemory and the heartbeats."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.protocol.steps import OK, bury, complete, counts, job_of, push, state, take, take_plain
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

ALIVE = {"ok": True, "data": {"ok": True}}


def test_ping_answers_with_the_time_as_a_float(client: Client) -> None:
    before = time.time() * 1000
    reply = client.call("Ping")
    assert set(reply) == {"ok", "data"}
    assert set(reply["data"]) == {"pong", "time"}
    assert reply["data"]["pong"] is True
    assert isinstance(reply["data"]["time"], float)
    assert before - 2 <= reply["data"]["time"] <= time.time() * 1000 + 2


def test_stats_count_jobs_under_both_sets_of_names(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "stats.db") as server, server.client() as client:
        push(client, "q")
        complete(client, "q")
        bury(client, "q")
        push(client, "q")
        take(client, "q")
        push(client, "q")
        push(client, "q", delay=60_000)
        reply = client.call("Stats")
        assert set(reply) == {"ok", "stats"}
        stats = reply["stats"]
        rates = [stats.pop("pushPerSec"), stats.pop("pullPerSec")]
        assert all(isinstance(rate, float) and rate >= 0 for rate in rates)
        assert 0 < stats.pop("uptime") < 60_000
        assert stats == {
            "queued": 1,
            "waiting": 1,
            "processing": 1,
            "active": 1,
            "delayed": 1,
            "dlq": 1,
            "completed": 1,
            "failed": 1,
        }


def test_metrics_are_real_figures(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "metrics.db") as server, server.client() as client, server.client():
        before = client.call("Metrics")["metrics"]
        assert set(before) == set(
            [
                "totalPushed",
                "totalPulled",
                "totalCompleted",
                "totalFailed",
                "avgLatencyMs",
                "avgProcessingMs",
                "memoryUsageMb",
                "sqliteSizeMb",
                "activeConnections",
            ]
        )
        for _ in range(3):
            push(client, "q")
            complete(client, "q")
        bury(client, "q")
        after = client.call("Metrics")["metrics"]
        totals = [after[f"total{what}"] for what in ("Pushed", "Pulled", "Completed", "Failed")]
        assert totals == [4, 4, 3, 1]
        assert after["activeConnections"] == 2
        assert after["sqliteSizeMb"] > 0
        assert 5 < after["memoryUsageMb"] < 1000
        assert after["avgLatencyMs"] >= 0
        assert after["avgProcessingMs"] >= 0
        assert not any(isinstance(value, bool) for value in after.values())


def test_metrics_of_a_queue_count_finished_jobs_per_minute(client: Client, queue: str) -> None:
    for _ in range(2):
        push(client, queue)
        complete(client, queue)
    bury(client, queue)
    reply = client.call("Metrics", queue=queue, type="completed")
    assert set(reply) == {"ok", "data"}
    data = reply["data"]
    assert set(data) == {"meta", "data", "count"}
    assert set(data["meta"]) == {"count", "prevTS", "prevCount"}
    assert sum(data["data"]) == data["meta"]["count"] == 2
    assert data["count"] == len(data["data"])
    assert isinstance(data["meta"]["prevTS"], float)
    assert client.ok("Metrics", queue=queue, type="failed")["data"]["meta"]["count"] == 1
    assert client.ok("Metrics", queue=queue, type="failed", start=5, end=9)["data"]["data"] == []
    assert client.error("Metrics", type="completed") == "Metrics queue is required"
    for kind in (None, "waiting"):
        error = client.error("Metrics", queue=queue, type=kind)
        assert error == "Metrics type must be 'completed' or 'failed'"


def test_prometheus_text_can_be_parsed_and_tells_the_truth(client: Client, queue: str) -> None:
    push(client, queue)
    reply = client.call("Prometheus")
    assert set(reply) == {"ok", "data"}
    assert set(reply["data"]) == {"metrics"}
    families = {family.name: family for family in text_string_to_metric_families(reply["data"]["metrics"])}
    assert families["bunqueue_jobs_waiting"].samples[0].value >= 1
    assert families["bunqueue_jobs_pushed"].samples[0].value >= 1
    lines = [s for s in families["bunqueue_queue_jobs_waiting"].samples if s.labels["queue"] == queue]
    assert [sample.value for sample in lines] == [1]
    for name in ("uptime_seconds", "workers_registered", "storage_degraded", "push_duration_seconds"):
        assert f"bunqueue_{name}" in families


def test_storage_status_of_a_healthy_disk(client: Client) -> None:
    healthy = {"diskFull": False, "error": None, "since": None}
    assert client.call("StorageStatus") == {"ok": True, "data": healthy}


def test_compact_memory_loses_nothing(client: Client, queue: str) -> None:
    job_id = push(client, queue, data={"kept": True})
    assert client.call("CompactMemory") == OK
    assert job_of(client, job_id)["data"] == {"kept": True}


def test_a_worker_heartbeat_reports_what_the_worker_did(client: Client, queue: str) -> None:
    worker = client.ok("RegisterWorker", name="w", queues=[queue])["data"]["workerId"]
    assert client.call("Heartbeat", id=worker, activeJobs=2, processed=5, failed=1) == ALIVE
    (view,) = client.ok("ListWorkers", queue=queue)["data"]["workers"]
    assert (view["activeJobs"], view["processedJobs"], view["failedJobs"]) == (2, 5, 1)
    assert client.call("Heartbeat", id=worker) == ALIVE
    (view,) = client.ok("ListWorkers", queue=queue)["data"]["workers"]
    assert view["processedJobs"] == 5
    assert client.error("Heartbeat", id="nobody") == "Worker not found"


def test_a_job_heartbeat_with_its_token_renews_the_lease(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    job, token = take(client, queue, lockTtl=1_000)

    def is_kept_for_long() -> bool:
        assert client.call("JobHeartbeat", id=job_id, token=token) == ALIVE
        return bool(job_of(client, job_id)["lastHeartbeat"] > job["startedAt"] + 1_500)

    eventually(is_kept_for_long)
    assert state(client, job_id) == "active"
    assert client.call("JobHeartbeat", id=job_id, token=token, duration=60_000) == ALIVE
    assert client.call("PULL", queue=queue, timeout=1_200)["job"] is None
    assert state(client, job_id) == "active"


@pytest.mark.alone
def test_a_job_heartbeat_without_token_is_noted_and_renews_nothing(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    began = time.monotonic()
    taken, _ = take(client, queue, lockTtl=250)
    eventually(lambda: time.time() * 1000 > taken["startedAt"] + 3)
    assert client.call("JobHeartbeat", id=job_id) == ALIVE
    assert job_of(client, job_id)["lastHeartbeat"] > taken["startedAt"]
    eventually(lambda: state(client, job_id) == "waiting")
    assert time.monotonic() - began < 1.2


def test_a_job_heartbeat_is_refused_for_wrong_tokens_and_jobs_not_active(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    text = "Job not found or not active (or invalid token)"
    assert client.error("JobHeartbeat", id=job_id) == text
    take(client, queue)
    assert client.error("JobHeartbeat", id=job_id, token="wrong") == text
    assert client.error("JobHeartbeat", id="nobody") == text


def test_a_batch_of_heartbeats_counts_those_that_were_noted_and_names_the_others(client: Client, queue: str) -> None:
    ids = [push(client, queue) for _ in range(3)]
    tokens = client.ok("PULLB", queue=queue, count=2, owner="w")["tokens"]
    reply = client.call("JobHeartbeatB", ids=ids, tokens=[tokens[0], "", "x"])
    assert reply == {"ok": True, "data": {"ok": True, "count": 2, "lost": [ids[2]]}}
    assert client.call("JobHeartbeatB", ids=ids)["data"] == {"ok": True, "count": 2, "lost": [ids[2]]}
    assert client.call("JobHeartbeatB", ids=ids[:2])["data"] == {"ok": True, "count": 2}
    assert client.call("JobHeartbeatB", ids=[])["data"] == {"ok": True, "count": 0}
    error = client.error("JobHeartbeatB", ids=ids, tokens=["t"])
    assert error == "JobHeartbeatB tokens length must match ids length"
    assert counts(client, queue) == {"active": 2, "waiting": 1}


def test_a_pull_without_lease_is_noted_by_heartbeats_too(client: Client, queue: str) -> None:
    job_id = take_plain(client, (push(client, queue), queue)[1])["id"]
    assert client.call("JobHeartbeat", id=job_id) == ALIVE


def test_health_tells_whether_the_server_is_well(client: Client, queue: str) -> None:
    client.ok("PUSH", queue=queue, data=1)
    health = client.ok("Health")
    assert health["status"] == "healthy"
    assert health["uptime"] >= 0
    assert health["queues"].keys() == {"waiting", "active", "delayed", "completed", "dlq"}
    assert health["queues"]["waiting"] >= 1
    assert health["connections"]["tcp"] >= 1
    assert health["memory"]["rss"] > 1


def test_ready_says_that_jobs_are_taken(client: Client) -> None:
    assert client.ok("Ready")["ready"] is True


def test_heap_stats_show_the_size_of_the_process(client: Client, queue: str) -> None:
    client.ok("PUSHB", queue=queue, jobs=[{"data": n, "tags": ["a"]} for n in range(30_000)])
    data = client.ok("HeapStats")["data"]
    assert len(data["objects"]) == 3
    assert sum(data["objects"]) > 30_000, "tags are not shared"
    assert data["rss"] > 1
