"""RegisterWorker, UnregisterWorker, ListWorkers, ReleaseLeases, and jobs that are taken away from their worker."""

from __future__ import annotations

from pathlib import Path

from tests.protocol.steps import OK, UUID7, push, state, take
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client


def test_register_worker_answers_with_its_whole_record(client: Client, queue: str) -> None:
    reply = client.call("RegisterWorker", name="mailer", queues=[queue])
    assert set(reply) == {"ok", "data"}
    data = reply["data"]
    assert UUID7.fullmatch(data.pop("workerId"))
    assert isinstance(data["registeredAt"], float)
    assert data.pop("registeredAt") == data.pop("lastSeen")
    assert data == {
        "name": "mailer",
        "queues": [queue],
        "concurrency": 1,
        "hostname": "unknown",
        "pid": 0,
        "status": "active",
        "activeJobs": 0,
        "processedJobs": 0,
        "failedJobs": 0,
        "currentJob": None,
    }


def test_registering_an_id_again_updates_the_worker(client: Client, queue: str) -> None:
    fields = {"name": "w", "queues": [queue], "workerId": "me", "hostname": "h", "pid": 77, "concurrency": 5}
    client.ok("RegisterWorker", **fields, startedAt=1_700_000_000_000.0)
    client.ok("Heartbeat", id="me", processed=3)
    again = client.ok("RegisterWorker", **fields | {"concurrency": 9})["data"]
    assert (again["workerId"], again["concurrency"], again["processedJobs"]) == ("me", 9, 3)
    workers = client.ok("ListWorkers", queue=queue)["data"]["workers"]
    assert [worker["id"] for worker in workers] == ["me"]


def test_list_workers_shows_all_or_those_of_a_queue_with_totals(client: Client, queue: str) -> None:
    for name in ("a", "b"):
        client.ok("RegisterWorker", name=name, queues=[f"{queue}.{name}"], workerId=f"{queue}.{name}", concurrency=2)
    client.ok("Heartbeat", id=f"{queue}.a", activeJobs=1, processed=4, failed=2)
    reply = client.call("ListWorkers", queue=f"{queue}.a")
    assert set(reply["data"]) == {"workers", "stats"}
    (worker,) = reply["data"]["workers"]
    assert set(worker) == set(
        [
            "id",
            "name",
            "queues",
            "concurrency",
            "hostname",
            "pid",
            "status",
            "registeredAt",
            "lastSeen",
            "activeJobs",
            "processedJobs",
            "failedJobs",
            "uptime",
            "currentJob",
        ]
    )
    assert isinstance(worker["uptime"], float)
    stats = client.ok("ListWorkers")["data"]["stats"]
    assert set(stats) == {
        "total",
        "active",
        "totalProcessed",
        "totalFailed",
        "activeJobs",
        "concurrencySlots",
    }
    assert stats["total"] >= 2
    assert stats["totalProcessed"] >= 4
    assert stats["concurrencySlots"] >= 4


def test_unregister_worker_forgets_it(client: Client, queue: str) -> None:
    worker = client.ok("RegisterWorker", name="w", queues=[queue])["data"]["workerId"]
    reply = client.call("UnregisterWorker", workerId=worker)
    assert reply == {"ok": True, "data": {"removed": True}}
    assert client.error("UnregisterWorker", workerId=worker) == "Worker not found"
    assert client.error("Heartbeat", id=worker) == "Worker not found"
    assert client.ok("ListWorkers", queue=queue)["data"]["workers"] == []


def test_a_worker_dies_with_its_connection(server: ServerProcess, client: Client, queue: str) -> None:
    with server.client() as leaving:
        leaving.ok("RegisterWorker", name="w", queues=[queue])
        assert len(client.ok("ListWorkers", queue=queue)["data"]["workers"]) == 1
    eventually(lambda: client.ok("ListWorkers", queue=queue)["data"]["workers"] == [])


def test_a_silent_worker_becomes_stale(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "w.db", "--worker-timeout-ms", "150")
    with server, server.client() as client:
        client.ok("RegisterWorker", name="w", queues=["q"], workerId="w1")

        def status() -> str:
            return "".join(worker["status"] for worker in client.ok("ListWorkers")["data"]["workers"])

        eventually(lambda: status() == "stale")
        client.ok("Heartbeat", id="w1")
        assert status() == "active"


def test_register_worker_refuses_wrong_fields(client: Client, queue: str) -> None:
    assert client.error("RegisterWorker", queues=[queue]) == "name is required"
    assert client.error("RegisterWorker", name="w") == "queues is required"
    assert client.error("RegisterWorker", name="w", queues=["a b"]) == "Queue name contains invalid characters"
    error = client.error("RegisterWorker", name="w", queues=[queue], concurrency=-1)
    assert error == "concurrency must be at least 0"


# -- leases of a worker whose connection broke -------------------------------------------------------------------------


def test_release_leases_gives_back_what_the_owner_does_not_name(
    server: ServerProcess, client: Client, queue: str
) -> None:
    ids = [push(client, queue) for _ in range(3)]
    with server.client() as leaving:
        pulled = leaving.ok("PULLB", queue=queue, count=3, owner="me", detach=True)
    others = push(client, queue)
    take(client, queue, owner="somebody else")
    assert client.call("ReleaseLeases", owner="me", queues=[queue, "empty"], keep=[ids[1]]) == {"ok": True, "count": 2}
    assert [state(client, job_id) for job_id in (*ids, others)] == ["waiting", "active", "waiting", "active"]
    again, _ = take(client, queue)
    assert (again["id"], again["attempts"], again["stallCount"]) == (ids[0], 0, 0)
    assert client.call("ACK", id=ids[1], token=pulled["tokens"][1]) == OK
    assert client.error("ACK", id=ids[2], token=pulled["tokens"][2]) == (
        f"Job not found or not in processing state: {ids[2]}"
    )


def test_leases_that_a_restart_forgot_are_resumed_under_the_tokens_of_their_worker(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "w.db") as server:
        with server.client() as client:
            ids = [push(client, "q") for _ in range(3)]
            tokens = client.ok("PULLB", queue="q", count=3, owner="me", detach=True)["tokens"]
        server.kill()
        server.start()
        with server.client() as client:
            taken, _ = take(client, "q", owner="somebody else")
            assert taken["id"] == ids[0]
            kept = client.ok("ReleaseLeases", owner="me", queues=["q"], keep=ids, tokens=tokens, lockTtl=5000)
            assert kept["count"] == 0
            assert [state(client, job_id) for job_id in ids] == ["active"] * 3
            assert client.ok("JobHeartbeatB", ids=ids, tokens=tokens)["data"]["lost"] == [ids[0]]
            assert client.call("ACKB", ids=ids[1:], tokens=tokens[1:]) == OK
            assert client.ok("PULL", queue="q")["job"] is None


def test_a_lease_is_resumed_in_a_queue_that_serves_groups_in_turn(client: Client, queue: str) -> None:
    ids = [push(client, queue, groupId="g") for _ in range(2)]
    assert client.ok("PULL", queue=queue, group={"affinity": "other"})["job"] is None
    assert client.ok("ReleaseLeases", owner="me", queues=[queue], keep=ids[:1], tokens=["t"])["count"] == 0
    assert state(client, ids[0]) == "active"
    assert client.ok("GetGroupActiveCount", queue=queue, groupId="g")["data"]["count"] == 1
    assert client.ok("PULL", queue=queue, group={})["job"]["id"] == ids[1]
    assert client.call("ACK", id=ids[0], token="t") == OK


def test_release_leases_wants_a_token_for_each_job(client: Client, queue: str) -> None:
    error = client.error("ReleaseLeases", owner="me", queues=[queue], keep=["a", "b"], tokens=["t"])
    assert error == "ReleaseLeases tokens length must match ids length"


def test_a_detached_batch_survives_its_connection(server: ServerProcess, client: Client, queue: str) -> None:
    job_id = push(client, queue)
    with server.client() as leaving:
        (token,) = leaving.ok("PULLB", queue=queue, count=1, owner="me", detach=True)["tokens"]
    client.ok("ListWorkers")
    assert state(client, job_id) == "active"
    assert client.call("ACK", id=job_id, token=token) == OK


# -- taking a job away from its worker ---------------------------------------------------------------------------------


def test_an_active_job_is_cancelled_by_force_only_and_its_worker_hears_of_it(client: Client, queue: str) -> None:
    job_id, kept = push(client, queue), push(client, queue)
    _, token = take(client, queue)
    _, kept_token = take(client, queue)
    assert client.error("Cancel", id=job_id) == "Job not found or cannot be cancelled"
    assert client.call("Cancel", id=job_id, force=True) == OK
    assert state(client, job_id) == "unknown"
    beat = client.ok("JobHeartbeatB", ids=[job_id, kept], tokens=[token, kept_token])
    assert beat["data"] == {"ok": True, "count": 1, "lost": [job_id]}
    assert client.error("ACK", id=job_id, token=token) == f"Job not found or not in processing state: {job_id}"
    assert client.call("ACK", id=kept, token=kept_token) == OK
