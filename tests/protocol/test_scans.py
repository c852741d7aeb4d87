"""ScanJobs, ScanResults and ScanDlq: every job once, however it moves between two pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.protocol.steps import bury, complete, push
from tests.serverprocess import ServerProcess
from tests.wireclient import Client


def scan(client: Client, cmd: str, rows: str, **wanted: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after: int | None = 0
    while after is not None:
        reply = client.ok(cmd, after=after, **wanted)
        assert len(reply[rows]) <= wanted.get("limit", 1000)
        found += reply[rows]
        after = reply.get("next")
    return found


def test_pages_join_to_all_jobs_in_push_order(client: Client, queue: str) -> None:
    ids = client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(23)])["ids"]
    push(client, f"{queue}.other")
    assert [job["id"] for job in scan(client, "ScanJobs", "jobs", queue=queue, limit=5)] == ids
    assert [job["data"] for job in scan(client, "ScanJobs", "jobs", queue=queue, limit=23)] == list(range(23))
    assert scan(client, "ScanJobs", "jobs", queue=f"{queue}.nobody") == []


def test_all_queues_are_scanned_when_none_is_named(client: Client, queue: str) -> None:
    mine = {push(client, queue), push(client, f"{queue}.other")}
    assert mine <= {job["id"] for job in scan(client, "ScanJobs", "jobs")}


def test_jobs_that_move_between_pages_are_neither_skipped_nor_repeated(client: Client, queue: str) -> None:
    ids = [push(client, queue) for _ in range(6)]
    first = client.ok("ScanJobs", queue=queue, limit=2)
    for _ in range(3):
        complete(client, queue)
    push(client, queue, lifo=True)
    rest = client.ok("ScanJobs", queue=queue, after=first["next"], until=first["newest"], limit=100)
    assert [job["id"] for job in [*first["jobs"], *rest["jobs"]]] == ids
    assert "next" not in rest


def test_ranges_read_side_by_side_are_the_whole(client: Client, queue: str) -> None:
    ids = client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(10)])["ids"]
    found = client.ok("ScanJobs", queue=queue, limit=1)
    newest = found["newest"]
    assert found["oldest"] == 0
    bounds = [(newest - 10, newest - 7), (newest - 7, newest - 1), (newest - 1, newest)]
    parts = [client.ok("ScanJobs", queue=queue, after=a, until=b)["jobs"] for a, b in bounds]
    assert [len(part) for part in parts] == [3, 6, 1]
    assert [job["id"] for part in parts for job in part] == ids


def test_a_state_can_be_asked_for(client: Client, queue: str) -> None:
    done = [complete(client, queue, push(client, queue)) for _ in range(2)]
    waiting = push(client, queue)
    assert len(scan(client, "ScanJobs", "jobs", queue=queue, state="completed")) == len(done)
    assert [job["id"] for job in scan(client, "ScanJobs", "jobs", queue=queue, state="waiting")] == [waiting]
    assert scan(client, "ScanJobs", "jobs", queue=queue, state="sleeping") == []


def test_results_come_with_what_the_worker_returned(client: Client, queue: str) -> None:
    for result in ({"sum": 3}, None):
        job_id = push(client, queue)
        client.ok("PULL", queue=queue)
        client.ok("ACK", id=job_id, **({} if result is None else {"result": result}))
    push(client, queue)
    assert client.ok("ScanResults", queue=f"{queue}.nobody")["results"] == []
    first, second = scan(client, "ScanResults", "results", queue=queue, limit=1)
    assert (first["queue"], first["result"]) == (queue, {"sum": 3})
    assert isinstance(first["finishedAt"], float)
    assert "result" not in second


def test_dead_letters_come_with_their_history(client: Client, queue: str) -> None:
    buried = [bury(client, queue) for _ in range(3)]
    push(client, queue)
    assert client.ok("ScanDlq", queue=f"{queue}.nobody")["entries"] == []
    letters = scan(client, "ScanDlq", "entries", queue=queue, limit=2)
    assert [letter["job"]["id"] for letter in letters] == buried
    assert all(letter["attempts"] for letter in letters)


@pytest.mark.parametrize("path", ["scan.db", ":memory:"])
def test_large_payloads_make_short_pages(tmp_path: Path, path: str) -> None:
    with ServerProcess(path if path == ":memory:" else tmp_path / path) as server, server.client() as client:
        ids = [push(client, "q", data="x" * 3_000_000) for _ in range(7)]
        page = client.ok("ScanJobs", queue="q")
        assert 1 <= len(page["jobs"]) < 7
        assert [job["id"] for job in scan(client, "ScanJobs", "jobs", queue="q")] == ids
