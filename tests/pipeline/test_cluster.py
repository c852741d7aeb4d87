"""The pipeline on a real cluster, with drivers that are killed in the midst of their work."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.pipeline import runs
from headrace.pipeline.lake import Lake
from tests.pipeline.cluster import LIMIT_S, Cluster, kill_all
from tests.scale import IS_FULL, scaled
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = scaled(1, 20)
ROWS = scaled(10_000, 500_000)

pytestmark = pytest.mark.timeout(scaled(600, 3600))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def capturing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--capture", str(folder / "log"), "--capture-segment-ms", "500")
    with ServerProcess(folder / "headrace.db", *flags) as server:
        yield server


def wait_for(driver: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
    def is_so() -> object:
        assert driver.poll() is None, "the driver ended by itself"
        return condition()

    eventually(is_so, LIMIT_S)


def written(client: Client) -> set[tuple[int, int, int]]:
    found: set[tuple[int, int, int]] = set()
    after = 0
    while lines := client.ok("Events", after=after, limit=20_000)["lines"].splitlines():
        events = [json.loads(line) for line in lines]
        found |= {(0, event["epoch"], event["seq"]) for event in events}
        after = events[-1]["seq"]
    return found


def bronze(lake: Lake) -> list[tuple[int, int, int]]:
    files = f"{lake.path('bronze/events')}/*/*/*.parquet"
    return duckdb.sql(f"SELECT shard, epoch, seq FROM read_parquet('{files}')").fetchall()


def test_a_killed_ingest_brings_every_event_exactly_once(
    spark: SparkSession, cluster: Cluster, capturing: ServerProcess, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "lake")
    source = ("--lake", str(lake.root), "--url", f"headrace://127.0.0.1:{capturing.port}", "--max-events", "500")
    with capturing.client() as client:
        for kill in range(KILLS):
            client.ok("PUSHB", queue="events", jobs=[{"data": n} for n in range(2_000)])
            before = len(lake.numbered("bronze/events"))
            driver = cluster.start("ingest", "--continuous", "0.1", *source)
            wait_for(driver, lambda before=before: len(lake.numbered("bronze/events")) > before)
            time.sleep(random.Random(kill).uniform(0, 1.5))
            kill_all(driver)
        if IS_FULL:
            cluster.run("ingest", *source[:-1], "5000")
        else:  # any driver can go on from the checkpoint; this one is running already
            runs.ingest(spark, lake, {"url": f"headrace://127.0.0.1:{capturing.port}", "maxEventsPerTrigger": "2000"})
        found = bronze(lake)
        assert set(found) == written(client)
        assert len(found) == len(set(found)) >= KILLS * 2_000
    assert cluster.workers_used() == 2


def test_a_killed_enqueue_makes_one_job_of_every_row(
    spark: SparkSession, cluster: Cluster, capturing: ServerProcess, tmp_path: Path
) -> None:
    half = ROWS // 2
    for n, start in enumerate((0, half)):
        numbers = pa.table({"order_id": list(range(start, start + half)), "note": ["x" * 50] * half})
        pq.write_table(numbers, tmp_path / f"orders-{n}.parquet", row_group_size=2_000)
    where = ("--to-queue", "orders", "--id-columns", "order_id", "--url", f"headrace://127.0.0.1:{capturing.port}")
    with capturing.client(timeout=60) as client:
        driver = cluster.start("enqueue", str(tmp_path), *where)
        wait_for(driver, lambda: client.ok("GetJobCounts", queue="orders")["counts"]["waiting"])
        kill_all(driver)
        stopped_at = client.ok("GetJobCounts", queue="orders")["counts"]["waiting"]
        if IS_FULL:
            cluster.run("enqueue", str(tmp_path), *where)
        else:  # as the command does it
            rows = spark.read.parquet(str(tmp_path)).write.format("headrace").mode("append")
            url = f"headrace://127.0.0.1:{capturing.port}"
            rows.options(url=url, queue="orders", idColumns="order_id", pipeline="enqueue").save()
        found: list[int] = []
        after: int | None = 0
        while after is not None:
            page = client.ok("ScanJobs", queue="orders", after=after, limit=10_000)
            found += [job["data"]["order_id"] for job in page["jobs"]]
            after = page.get("next")
    assert sorted(found) == list(range(2 * half))
    print(f"\nkilled with {stopped_at:,} of {2 * half:,} jobs enqueued")
