"""A long queue after kill -9: what it weighs, how soon it serves again, and that both grow in proportion."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.scale import scaled
from tests.serverprocess import ServerProcess

JOBS = scaled(100_000, 1_000_000)
PAYLOAD = "x" * 96  # 98 bytes of MessagePack; with the array around it 100


def push_payloads(server: ServerProcess, count: int) -> None:
    with server.client(timeout=60) as client:
        batch = [{"data": [1, PAYLOAD]} for _ in range(5_000)]
        for _ in range(count // len(batch)):
            assert len(client.ok("PUSHB", queue="long", jobs=batch)["ids"]) == len(batch)


def seconds_to_first_job(server: ServerProcess) -> float:
    server.kill()
    killed_at = time.monotonic()
    server.start(timeout=60)
    with server.client(timeout=60) as client:
        assert client.ok("PULL", queue="long")["job"]["data"] == [1, PAYLOAD]
    return time.monotonic() - killed_at


def resident_bytes(server: ServerProcess) -> int:
    return int(psutil.Process(server.pid).memory_info().rss)


@pytest.mark.timeout(scaled(120, 900))
@pytest.mark.alone
def test_many_waiting_jobs_are_light_and_back_soon(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "long.db") as server:
        empty_bytes = resident_bytes(server)
        empty_seconds = seconds_to_first_job_of_an_empty_server(server)
        push_payloads(server, JOBS // 4)
        quarter = seconds_to_first_job(server) - empty_seconds
        push_payloads(server, JOBS - JOBS // 4)
        pushed_bytes = resident_bytes(server)
        whole = seconds_to_first_job(server) - empty_seconds
        loaded_bytes = resident_bytes(server)
        with server.client(timeout=60) as client:
            assert client.ok("Count", queue="long")["count"] == JOBS
    per_job = (loaded_bytes - empty_bytes) / JOBS
    print(
        f"\n{JOBS:,} waiting jobs of 100 bytes: {per_job:.0f} bytes of RSS each after a restart "
        f"({(pushed_bytes - empty_bytes) / JOBS:.0f} before it), {loaded_bytes / 2**20:.0f} MiB in all; "
        f"kill -9 to first PULL {whole + empty_seconds:.2f} s, of a quarter of them {quarter + empty_seconds:.2f} s"
    )
    assert per_job < 900
    assert loaded_bytes < 2**30
    assert whole + empty_seconds < scaled(3, 10)
    assert whole < 4 * quarter * 1.6 + 0.2, "the time to restart grows faster than the queue"


def seconds_to_first_job_of_an_empty_server(server: ServerProcess) -> float:
    with server.client() as client:
        client.ok("PUSH", queue="first", data=1)
    server.kill()
    killed_at = time.monotonic()
    server.start()
    with server.client() as client:
        assert client.ok("PULL", queue="first")["job"]["data"] == 1
    return time.monotonic() - killed_at
