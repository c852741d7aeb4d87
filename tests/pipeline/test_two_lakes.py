"""Several lakes fed by one server: each gets every event, at its own pace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.pipeline import runs
from headrace.pipeline.lake import Lake
from tests.protocol.steps import push
from tests.serverprocess import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_server_keeps_events_for_each_lake_by_itself(spark: SparkSession, tmp_path: Path) -> None:
    lakes = Lake(tmp_path / "first"), Lake(tmp_path / "second")
    with ServerProcess(tmp_path / "headrace.db", "--capture", str(tmp_path / "log")) as server:
        source = {"url": f"headrace://127.0.0.1:{server.port}", "maxEventsPerTrigger": "2"}
        with server.client() as client:
            for _ in range(4):
                push(client, "q")
            for lake in lakes:
                runs.ingest(spark, lake, source)
            assert set(client.ok("EventSegments")["positions"]) == {lake.consumer() for lake in lakes}


def test_the_name_of_a_lake_is_its_own_and_stays(tmp_path: Path) -> None:
    lake, other = Lake(tmp_path / "lake"), Lake(tmp_path / "other")
    name = lake.consumer()
    lake.checkpoint.mkdir(parents=True)
    assert Lake(tmp_path / "lake").consumer() == name != other.consumer()


def test_a_lake_from_before_keeps_the_name_under_which_its_events_are_held(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    lake.checkpoint.mkdir(parents=True)
    assert lake.consumer() == "lake"
