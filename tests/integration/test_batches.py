"""A long PUSHB is stored as a whole or not at all, whatever happens to the server half way."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

BATCH = 30_000


def push_batch(client: Client, replies: list[dict[str, object]]) -> None:
    try:
        replies.append(client.call("PUSHB", queue="whole", jobs=[{"data": n} for n in range(BATCH)]))
    except (ConnectionError, OSError):
        return  # killed before it answered


@pytest.mark.parametrize("moment", range(scaled(4, 16)))
def test_a_batch_cut_by_kill_9_is_there_as_a_whole_or_not_at_all(tmp_path: Path, moment: int) -> None:
    running = ServerProcess(tmp_path / "headrace.db").start()
    replies: list[dict[str, object]] = []
    client = running.client()
    client.ok("PUSH", queue="other", data=1)
    sender = threading.Thread(target=push_batch, args=(client, replies))
    sender.start()
    time.sleep(0.05 + 0.4 * moment / scaled(4, 16))  # not waiting for anything: the kill must hit any moment
    running.kill()
    sender.join(10)
    with running:
        fresh = running.client()
        count = fresh.ok("Count", queue="whole")["count"]
        assert count in (0, BATCH)
        if replies:
            assert count == BATCH
        assert fresh.ok("Count", queue="other")["count"] == 1
        fresh.close()
    client.close()


def test_jobs_of_a_batch_are_not_handed_out_before_it_is_whole(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db") as running:
        pusher, puller = running.client(), running.client()
        replies: list[dict[str, object]] = []
        sender = threading.Thread(target=push_batch, args=(pusher, replies))
        sender.start()
        seen = puller.ok("PULL", queue="whole", timeout=20_000)["job"]
        assert seen["data"] == 0
        counts = puller.ok("GetJobCounts", queue="whole")["counts"]
        assert counts["waiting"] + counts["active"] == BATCH
        sender.join(10)
        assert len(replies[0]["ids"]) == BATCH  # type: ignore[arg-type]


def test_a_batch_beyond_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db") as running, running.client() as client:
        error = client.error("PUSHB", queue="whole", jobs=[{"data": 1}] * 100_001)
        assert error == "jobs must have at most 100000 items"
