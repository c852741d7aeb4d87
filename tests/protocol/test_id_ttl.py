"""The option `idTtl`: an id is used once, whatever became of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.steps import complete, counts
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

HOUR = 3_600_000


def push_once(client: Client, queue: str, job_id: str, ttl: float = HOUR, **options: object) -> str:
    return str(client.ok("PUSH", queue=queue, data=1, jobId=job_id, idTtl=ttl, **options)["id"])


def test_a_completed_and_removed_job_is_not_pushed_again(client: Client, queue: str) -> None:
    assert push_once(client, queue, "a", removeOnComplete=True) == "a"
    complete(client, queue)
    assert client.ok("GetState", id="a")["state"] == "unknown"
    assert push_once(client, queue, "a") == "a"
    assert client.ok("PULL", queue=queue)["job"] is None


def test_a_completed_job_that_is_kept_is_left_alone(client: Client, queue: str) -> None:
    push_once(client, queue, "b")
    complete(client, queue)
    assert push_once(client, queue, "b") == "b"
    assert counts(client, queue)["completed"] == 1
    assert "waiting" not in counts(client, queue)


def test_a_ttl_of_nothing_lasts_as_long_as_the_job_is_kept(client: Client, queue: str) -> None:
    push_once(client, queue, "kept", ttl=0)
    complete(client, queue)
    assert push_once(client, queue, "kept", ttl=0) == "kept"
    assert "waiting" not in counts(client, queue)
    client.ok("Obliterate", queue=queue)
    assert push_once(client, queue, "kept", ttl=0) == "kept"
    assert counts(client, queue)["waiting"] == 1


def test_pushes_without_it_neither_leave_nor_honour_a_tombstone(client: Client, queue: str) -> None:
    push_once(client, queue, "c")
    complete(client, queue)
    assert client.ok("PUSH", queue=queue, data=2, jobId="c")["id"] == "c"
    assert counts(client, queue)["waiting"] == 1
    client.ok("PUSH", queue=queue, data=2, jobId="d", removeOnComplete=True)
    for _ in range(2):
        complete(client, queue)
    push_once(client, queue, "d")
    assert counts(client, queue)["waiting"] == 1


def test_queues_do_not_share_tombstones(client: Client, queue: str) -> None:
    push_once(client, queue, "e")
    other = f"{queue}.other"
    push_once(client, other, "e")
    assert counts(client, other)["waiting"] == 1


def test_an_id_may_be_used_again_when_its_time_is_over(client: Client, queue: str) -> None:
    push_once(client, queue, "f", ttl=50, removeOnComplete=True)
    complete(client, queue)
    eventually(lambda: push_once(client, queue, "f", ttl=50) and counts(client, queue).get("waiting") == 1)


def test_a_batch_repeated_in_part_adds_only_what_is_new(client: Client, queue: str) -> None:
    def batch(*names: str) -> list[str]:
        jobs = [{"data": name, "customId": name, "idTtl": HOUR, "removeOnComplete": True} for name in names]
        return list(client.ok("PUSHB", queue=queue, jobs=jobs)["ids"])

    assert batch("g", "h", "g") == ["g", "h", "g"]
    assert counts(client, queue)["waiting"] == 2
    for _ in range(2):
        complete(client, queue)
    assert batch("g", "h", "i") == ["g", "h", "i"]
    assert counts(client, queue)["waiting"] == 1


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "stop"])
def test_tombstones_survive_a_restart(tmp_path: Path, kill: bool) -> None:
    server = ServerProcess(tmp_path / "tombs.db")
    with server:
        with server.client() as client:
            push_once(client, "q", "j", removeOnComplete=True)
            complete(client, "q")
        server.kill() if kill else server.stop()
        server.start()
        with server.client() as client:
            push_once(client, "q", "j")
            assert client.ok("PULL", queue="q")["job"] is None


def test_memory_servers_know_tombstones_too() -> None:
    with ServerProcess(":memory:") as server, server.client() as client:
        push_once(client, "q", "k", removeOnComplete=True)
        complete(client, "q")
        push_once(client, "q", "k")
        assert client.ok("PULL", queue="q")["job"] is None
