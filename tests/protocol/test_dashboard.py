"""The Dashboard commands: many figures in one answer, the recent past, and failures by kind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headrace.commands.dashboard import signature_of
from tests.protocol.steps import bury, complete, push, take, take_plain
from tests.waiting import eventually
from tests.wireclient import Client


def test_the_overview_shows_the_whole_server(client: Client, queue: str) -> None:
    client.ok("RegisterWorker", name="w", queues=[queue], workerId=queue)
    client.ok("Cron", name=queue, queue=queue, data=1, schedule="@yearly")
    data = client.call("DashboardOverview")["data"]
    assert set(data) == {
        "stats", "metrics", "workers", "crons", "storage", "queues", "totalQueues", "timestamp",
    }  # fmt: skip
    assert set(data["workers"]) == {"stats", "list"}
    assert queue in [worker["id"] for worker in data["workers"]["list"]]
    assert queue in [cron["name"] for cron in data["crons"]]
    assert data["storage"] == {"diskFull": False, "error": None, "since": None}
    assert data["stats"]["uptime"] > 0
    assert data["metrics"]["activeConnections"] >= 1
    assert isinstance(data["timestamp"], float)


def test_the_queues_come_in_order_and_by_page(client: Client, queue: str) -> None:
    for name in ("c", "a", "b"):
        push(client, f"{queue}.{name}", priority=1)
    reply = client.call("DashboardQueues")
    data = reply["data"]
    assert set(data) == {"queues", "total", "timestamp"}
    names = [row["name"] for row in data["queues"]]
    assert names == sorted(names)
    assert data["total"] == len(names)
    row = data["queues"][names.index(f"{queue}.a")]
    assert 0 <= row.pop("oldestWaitingMs") < 60_000
    assert row.pop("inPerSec") > 0
    assert row == {
        "name": f"{queue}.a",
        "waiting": 1,
        "prioritized": 1,
        "delayed": 0,
        "active": 0,
        "completed": 0,
        "dlq": 0,
        "paused": False,
        "concurrency": None,
        "outPerSec": 0.0,
        "failedToday": 0,
        "p95WaitMs": None,
    }
    page = client.ok("DashboardQueues", limit=2, offset=1)["data"]
    assert [row["name"] for row in page["queues"]] == names[1:3]
    assert page["total"] == data["total"]
    assert client.error("DashboardQueues", limit=501) == "limit must be at most 500"


def test_a_row_tells_of_failures_and_limits(client: Client, queue: str) -> None:
    bury(client, queue)
    client.ok("SetConcurrency", queue=queue, limit=4)
    for cmd in ("DashboardQueues", "DashboardOverview"):
        data = client.call(cmd)["data"]
        (row,) = [row for row in data["queues"] if row["name"] == queue]
        assert (row["failedToday"], row["dlq"], row["concurrency"], row["oldestWaitingMs"]) == (1, 1, 4, None)


def test_a_lone_job_that_is_stuck_is_among_the_queues_of_the_overview_however_many_there_are(
    client: Client, queue: str
) -> None:
    others = [f"{queue}.{number}" for number in range(110)]
    for other in others:
        client.ok("PUSHB", queue=other, jobs=[{"data": 1}] * 3)
    push(client, queue, timestamp=client.ok("Ping")["data"]["time"] - 86_400_000)
    client.ok("PUSHB", queue=others[-1], jobs=[{"data": 1}] * 300)
    data = client.call("DashboardOverview")["data"]
    assert [row["name"] for row in data["queues"][:2]] == [queue, others[-1]]
    assert len(data["queues"]) == 100 < data["totalQueues"]
    for name in (queue, *others):
        client.ok("Obliterate", queue=name)


def test_where_nothing_is_late_the_overview_has_the_most_loaded_queues_first(client: Client, queue: str) -> None:
    client.ok("PUSHB", queue=queue, jobs=[{"data": 1}] * 3)
    rows = [row for row in client.call("DashboardOverview")["data"]["queues"] if (row["oldestWaitingMs"] or 0) < 50_000]
    loads = [row["waiting"] + row["delayed"] + row["active"] + row["dlq"] for row in rows]
    assert loads == sorted(loads, reverse=True)
    assert queue in [row["name"] for row in rows]


def test_schedules_come_with_their_next_and_their_last_runs(client: Client, queue: str) -> None:
    names = [f"{queue}.{kind}" for kind in ("often", "nightly")]
    client.ok("Cron", name=names[0], queue=queue, data=1, repeatEvery=50)
    client.ok("Cron", name=names[1], queue=queue, data=1, schedule="0 3 * * *", timezone="UTC")

    def row(name: str) -> dict[str, Any]:
        return next(row for row in client.ok("DashboardCrons")["data"]["crons"] if row["cron"]["name"] == name)

    first = take_plain(client, queue)
    client.ok("ACK", id=first["id"])
    second = take_plain(client, queue)
    often, nightly = (row(name) for name in names)
    runs = [(run["jobId"], run["state"]) for run in often["recent"]]
    assert runs[-2:] == [(second["id"], "active"), (first["id"], "completed")]
    assert often["recent"][0]["at"] <= often["cron"]["lastRun"]
    assert nightly["recent"] == []
    days = [later - sooner for sooner, later in itertools.pairwise(nightly["upcoming"])]
    assert days == [86_400_000, 86_400_000]
    assert nightly["upcoming"][0] == nightly["cron"]["nextRun"]
    for name in names:
        client.ok("CronDelete", name=name)


def test_the_history_has_lists_of_equal_length(client: Client, queue: str) -> None:
    push(client, queue)
    data = client.call("DashboardHistory", window="15m")["data"]
    assert set(data) == {"window", "step", "start", "series", "queues", "oldest", "rates", "timestamp"}
    assert (data["window"], data["step"]) == ("15m", 5000.0)
    assert set(data["series"]) == {"in", "out", "failed", "waiting", "active", "waitP50", "waitP95", "runP95"}
    assert len({len(values) for values in data["series"].values()}) == 1
    assert set(data["rates"]) == {"inPerSec", "outPerSec", "failedPerSec"}
    assert data["rates"]["inPerSec"] > 0
    assert data["timestamp"] - 16 * 60_000 <= data["start"] <= data["timestamp"]


def test_the_history_moves_on_with_time(client: Client, queue: str) -> None:
    for _ in range(3):
        push(client, queue)
    complete(client, queue)

    def seen() -> dict[str, Any] | None:
        data = client.call("DashboardHistory", window="15m", queue=queue)["data"]
        return data if any(data["series"]["out"]) else None

    data = eventually(seen, every=0.1)
    series = data["series"]
    assert any(series["in"])
    assert not any(series["failed"])
    assert (series["waiting"][-1], series["active"][-1]) == (2.0, 0.0)
    assert any(value is not None for value in series["waitP95"])
    assert data["queues"] == {}
    assert data["oldest"][queue] > 0
    everything = client.ok("DashboardHistory", window="15m", top=50)["data"]
    assert len(everything["queues"][queue]["in"]) == len(everything["series"]["in"])


def test_the_history_knows_its_windows(client: Client, queue: str) -> None:
    assert client.call("DashboardHistory")["data"]["window"] == "1h"
    assert client.call("DashboardHistory", window="24h")["data"]["step"] == 300_000.0
    assert client.call("DashboardHistory", queue=queue)["data"]["series"]["in"] == []
    assert "window" in client.error("DashboardHistory", window="2h")
    assert client.error("DashboardHistory", top=51) == "top must be at most 50"


def test_failures_are_grouped_by_what_went_wrong(client: Client, queue: str) -> None:
    one = bury(client, queue, error="user 17 not found in 'eu-1'\n  at line 3")
    other = bury(client, f"{queue}.b", error="timeout after 30.5 s, request 0x7f3a")
    two = bury(client, queue, error="user 4211 not found in 'us-2'")
    data = client.call("DashboardFailures")["data"]
    assert set(data) == {"groups", "examined", "total", "timestamp"}
    assert data["examined"] == data["total"] >= 3
    users, timeouts = data["groups"][:2]
    assert users.pop("lastSeen") >= timeouts.pop("lastSeen")
    assert users == {
        "signature": "user # not found in '...'",
        "count": 2,
        "queues": [queue],
        "jobIds": [two, one],
        "error": "user 4211 not found in 'us-2'",
    }
    assert timeouts["signature"] == "timeout after # s, request <id>"
    assert timeouts["jobIds"] == [other]


def test_failures_of_one_queue_and_a_number_of_groups(client: Client, queue: str) -> None:
    for error in ("disk full", "no route", "disk full"):
        bury(client, queue, error=error)
    bury(client, f"{queue}.other")
    data = client.ok("DashboardFailures", queue=queue)["data"]
    assert [(group["signature"], group["count"]) for group in data["groups"]] == [("disk full", 2), ("no route", 1)]
    assert data["total"] == 3
    assert len(client.ok("DashboardFailures", queue=queue, limit=1)["data"]["groups"]) == 1
    assert client.ok("DashboardFailures", queue=f"{queue}.none")["data"]["groups"] == []
    assert client.error("DashboardFailures", limit=101) == "limit must be at most 100"


@pytest.mark.parametrize(
    ("error", "signature"),
    [
        ("order 0193b2c4-7d1e-7abc-8def-0123456789ab is gone", "order <id> is gone"),
        ("commit deadbeef01 failed", "commit <id> failed"),
        ("decade facade", "decade facade"),
        ("Cannot read properties of undefined (reading 'id')", "Cannot read properties of undefined (reading '...')"),
        ("HTTP 503 from 10.0.0.1:8080", "HTTP # from #"),
        ("", ""),
    ],
)
def test_a_signature_keeps_what_does_not_vary(error: str, signature: str) -> None:
    assert signature_of(error) == signature


def test_the_server_measures_its_own_commits_and_delays(client: Client, queue: str) -> None:
    push(client, queue)
    text = client.ok("Prometheus")["data"]["metrics"]
    values = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.split()[0].endswith(("_sum", "_count"))
    }
    for name in ("commit_duration", "event_loop_lag"):
        assert values[f"bunqueue_{name}_seconds_count"] >= 1
    assert 0 < values["bunqueue_commit_duration_seconds_sum"] < 60
    assert values["bunqueue_event_loop_lag_seconds_sum"] < 60
    assert values["bunqueue_push_duration_seconds_sum"] > 0


def test_one_queue_in_detail_with_its_jobs_when_asked_for(client: Client, queue: str) -> None:
    push(client, queue)
    complete(client, queue)
    dead = bury(client, queue, data={"d": 1})
    active = push(client, queue)
    take(client, queue)
    waiting, delayed = push(client, queue, priority=2), push(client, queue, delay=60_000)
    data = client.call("DashboardQueue", queue=queue)["data"]
    assert set(data) == {"name", "counts", "paused", "priorityCounts", "dlqPreview", "timestamp"}
    assert {k: n for k, n in data["counts"].items() if n} == {
        "waiting": 1,
        "prioritized": 1,
        "delayed": 1,
        "active": 1,
        "completed": 1,
        "failed": 1,
    }
    assert data["priorityCounts"] == {"2": 1, "0": 1}
    (preview,) = data["dlqPreview"]
    assert (preview["id"], preview["data"], preview["attempts"]) == (dead, {"d": 1}, 1)
    jobs = client.ok("DashboardQueue", queue=queue, includeJobs=True, jobsLimit=1)["data"]["jobs"]
    assert {word: [job["id"] for job in listed] for word, listed in jobs.items()} == {
        "waiting": [waiting],
        "active": [active],
        "delayed": [delayed],
    }
    assert set(jobs["active"][0]) == {"id", "priority", "createdAt", "runAt", "attempts", "progress"}
    assert client.error("DashboardQueue") == "Queue name is required"
    assert client.error("DashboardQueue", queue=queue, jobsLimit=51) == "jobsLimit must be at most 50"
