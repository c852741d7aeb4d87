"""Several lakes fed by one server: each gets every event, at its own pace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.pipeline import runs
from headrace.pipeline.lake import Lake
from tests.protocol.steps import push
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_name_of_a_lake_is_its_own_and_stays(tmp_path: Path) -> None:
    lake, other = Lake(tmp_path / "lake"), Lake(tmp_path / "other")
    name = lake.consumer()
    lake.checkpoint.mkdir(parents=True)
    assert Lake(tmp_path / "lake").consumer() == name != other.consumer()


def test_a_copy_of_a_lake_is_a_consumer_of_its_own_without_the_name_that_was_copied(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake, copy = Lake(tmp_path / "lake"), Lake(tmp_path / "copy")
    with ServerProcess(tmp_path / "headrace.db", "--capture", str(tmp_path / "log")) as server:
        source = {"url": f"headrace://127.0.0.1:{server.port}"}
        with server.client() as client:
            push(client, "q")
            runs.ingest(spark, lake, source)
            shutil.copytree(lake.root, copy.root)
            (copy.root / "state" / "consumer").unlink()
            push(client, "q")
            assert runs.ingest(spark, copy, source).events == 1
            assert client.ok("EventSegments")["positions"] == {lake.consumer(): 1, copy.consumer(): 2}


def test_events_are_kept_for_a_lake_from_its_first_batch_on(spark: SparkSession, tmp_path: Path) -> None:
    """Spark tells a source that a batch is committed only with the next one, which may be hours later."""
    lake = Lake(tmp_path / "lake")
    flags = ("--capture", str(tmp_path / "log"), "--capture-segment-ms", "100", "--capture-keep-bytes", "0")
    with ServerProcess(tmp_path / "headrace.db", *flags) as server, server.client() as client:
        client.ok("EventPosition", consumer="holder", seq=0)
        source = {"url": f"headrace://127.0.0.1:{server.port}"}
        push(client, "q")
        assert runs.ingest(spark, lake, source).events == 1
        client.ok("ForgetEventPosition", consumer="holder")
        for _ in range(4):
            known = len(segments(client))
            push(client, "q")
            eventually(lambda known=known: len(segments(client)) > known)
        assert runs.ingest(spark, lake, source).events == 4


def segments(client: Client) -> list[int]:
    """The closed segments that there have been, by their first event: the oldest of them may be gone."""
    found = client.ok("EventSegments")
    closed = [segment["first"] for segment in found["segments"] if segment["sealed"]]
    return [*range(1, found["first"]), *closed]
