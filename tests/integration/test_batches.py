"""A long PUSHB or PUSHF is stored as a whole or not at all, whatever happens to the server half way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

MOMENTS = scaled(4, 16)
Ask = dict[str, Any]


def plain_batch() -> Ask:
    return {"cmd": "PUSHB", "queue": "whole", "jobs": [{"data": n} for n in range(30_000)]}


def rich_batch() -> Ask:
    """Settings, keys, relatives and a large payload here and there."""
    jobs: list[Ask] = [{"data": n, "maxAttempts": 5, "customId": f"r{n}"} for n in range(10_000)]
    jobs[5] = {"data": "x" * 20_000, "uniqueKey": "one"}
    jobs[7_000]["dependsOn"] = ["r1", "r9999"]
    return {"cmd": "PUSHB", "queue": "whole", "jobs": jobs}


def family() -> Ask:
    """A parent of many, and one that depends on none of them."""
    children = [f"c{n}" for n in range(9_000)]
    top = {"id": "top", "queue": "whole", "input": {"data": 0, "dependsOn": children, "childrenIds": children}}
    rest = [
        {"id": child, "queue": "whole", "input": {"data": n, "parentId": "top"}} for n, child in enumerate(children)
    ]
    return {"cmd": "PUSHF", "jobs": [*rest[:4_000], top, *rest[4_000:]]}


BATCHES = pytest.mark.parametrize("make", [plain_batch, rich_batch, family])


def push_batch(client: Client, asked: Ask, replies: list[Ask]) -> None:
    try:
        replies.append(client.call(**asked))
    except (ConnectionError, OSError):
        return  # killed before it answered


@BATCHES
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_batch_cut_by_kill_9_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, moment: int, make: Callable[[], Ask]
) -> None:
    running, asked = ServerProcess(tmp_path / "headrace.db").start(), make()
    replies: list[Ask] = []
    client = running.client()
    client.ok("PUSH", queue="other", data=1)
    sender = threading.Thread(target=push_batch, args=(client, asked, replies))
    sender.start()
    time.sleep(0.05 + 0.4 * moment / MOMENTS)  # not waiting for anything: the kill must hit any moment
    running.kill()
    sender.join(10)
    with running:
        fresh = running.client()
        counts = fresh.ok("GetJobCounts", queue="whole")["counts"]
        count = counts["waiting"] + counts["waiting-children"]
        assert count in (0, len(asked["jobs"]))
        if replies:
            assert count > 0
        assert fresh.ok("Count", queue="other")["count"] == 1
        fresh.close()
    client.close()


@BATCHES
def test_jobs_of_a_batch_are_not_handed_out_before_it_is_whole(tmp_path: Path, make: Callable[[], Ask]) -> None:
    asked = make()
    with ServerProcess(tmp_path / "headrace.db") as running:
        pusher, puller = running.client(), running.client()
        replies: list[Ask] = []
        sender = threading.Thread(target=push_batch, args=(pusher, asked, replies))
        sender.start()
        assert puller.ok("PULL", queue="whole", timeout=20_000)["job"]["data"] == 0
        counts = puller.ok("GetJobCounts", queue="whole")["counts"]
        assert counts["waiting"] + counts["waiting-children"] + counts["active"] == len(asked["jobs"])
        sender.join(10)
        assert replies[0]["ok"]


def test_a_batch_beyond_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db") as running, running.client() as client:
        error = client.error("PUSHB", queue="whole", jobs=[{"data": 1}] * 100_001)
        assert error == "jobs must have at most 100000 items"
