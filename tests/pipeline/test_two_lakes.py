"""Several lakes fed by one server: each gets every event, at its own pace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.pipeline import runs
from headrace.pipeline.lake import Lake
from tests.protocol.steps import push
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that drops what every consumer has taken."""
    flags = ("--capture", str(tmp_path / "log"), "--capture-segment-ms", "100", "--capture-keep-bytes", "0")
    with ServerProcess(tmp_path / "headrace.db", *flags) as server:
        yield server


def push_segments(client: Client, count: int) -> None:
    """Jobs in so many segments of the log."""
    for _ in range(count):
        before = client.ok("EventSegments")["last"]
        push(client, "q")
        eventually(lambda before=before: client.ok("EventSegments")["segments"][-1]["last"] > before)


def test_a_lake_that_is_behind_loses_nothing_to_one_that_is_ahead(
    spark: SparkSession, forgetful: ServerProcess, tmp_path: Path
) -> None:
    slow, fast = Lake(tmp_path / "slow"), Lake(tmp_path / "fast")
    source = {"url": f"headrace://127.0.0.1:{forgetful.port}", "maxEventsPerTrigger": "2"}
    with forgetful.client() as client:
        client.ok("EventPosition", consumer="holder", seq=0)  # until both have come
        push_segments(client, 4)
        for lake in (slow, fast):
            runs.ingest(spark, lake, source)
        client.ok("ForgetEventPosition", consumer="holder")
        push_segments(client, 6)
        runs.ingest(spark, fast, source)
        push_segments(client, 1)
        positions = client.ok("EventSegments")["positions"]
        assert set(positions) == {slow.consumer(), fast.consumer()}
        assert positions[slow.consumer()] < positions[fast.consumer()]
        runs.ingest(spark, slow, source)
        last = client.ok("EventSegments")["last"]
    for lake in (slow, fast):
        bronze = runs.read_bronze(spark, lake)
        assert bronze is not None
        assert {row.seq for row in bronze.collect()} >= set(range(1, last))


def test_the_name_of_a_lake_is_its_own_and_stays(tmp_path: Path) -> None:
    lake, other = Lake(tmp_path / "lake"), Lake(tmp_path / "other")
    name = lake.consumer()
    lake.checkpoint.mkdir(parents=True)
    assert Lake(tmp_path / "lake").consumer() == name != other.consumer()


def test_a_lake_from_before_keeps_the_name_under_which_its_events_are_held(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    lake.checkpoint.mkdir(parents=True)
    assert lake.consumer() == "lake"
