"""DashboardOverview, DashboardQueues, DashboardQueue: many figures in one answer."""

from __future__ import annotations

from tests.protocol.steps import bury, complete, push, take
from tests.wireclient import Client


def test_the_overview_shows_the_whole_server(client: Client, queue: str) -> None:
    client.ok("RegisterWorker", name="w", queues=[queue], workerId=queue)
    client.ok("Cron", name=queue, queue=queue, data=1, schedule="@yearly")
    data = client.call("DashboardOverview")["data"]
    assert set(data) == {"stats", "metrics", "workers", "crons", "storage", "timestamp"}
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
    assert row == {
        "name": f"{queue}.a",
        "waiting": 1,
        "prioritized": 1,
        "delayed": 0,
        "active": 0,
        "completed": 0,
        "dlq": 0,
        "paused": False,
    }
    page = client.ok("DashboardQueues", limit=2, offset=1)["data"]
    assert [row["name"] for row in page["queues"]] == names[1:3]
    assert page["total"] == data["total"]
    assert client.error("DashboardQueues", limit=501) == "limit must be at most 500"


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
