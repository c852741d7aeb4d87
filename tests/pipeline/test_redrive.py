"""Dead letters that run again, a lake beside its server, and streams that wait for more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pytest

from headrace.errors import HeadraceError
from headrace.pipeline import runs
from headrace.pipeline.lake import Lake
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)


@dataclass
class Wreck:
    """A server with dead letters, and the lake that knows of them."""

    lake: Lake
    url: str
    client: Client


@pytest.fixture(scope="module")
def wreck(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wreck]:
    folder = tmp_path_factory.mktemp("wreck")
    flags = ("--capture", str(folder / "log"))
    with ServerProcess(folder / "headrace.db", *flags) as server, server.client(timeout=60) as client:
        for n in range(9):
            client.ok("PUSH", queue="mail" if n < 6 else "sms", data={"n": n}, maxAttempts=1)
        for n in range(9):
            job = client.ok("PULL", queue="mail" if n < 6 else "sms")["job"]
            client.ok("FAIL", id=job["id"], error=f"Timeout after {n} ms" if n < 4 else "Refused")
        for n in range(103):
            client.ok("PUSH", queue=f"tenant-{n:03}", data={}, maxAttempts=1)
            client.ok("FAIL", id=client.ok("PULL", queue=f"tenant-{n:03}")["job"]["id"], error="Refused")
        for n in range(3):
            client.ok("PUSH", queue="bare", data=None if n else {"n": n}, maxAttempts=1)
            client.ok("FAIL", id=client.ok("PULL", queue="bare")["job"]["id"], error="Refused")
        client.ok("PUSH", queue="twice", data={}, maxAttempts=1, priority=7)
        for error in ("Timeout after 1 ms", "Refused"):
            client.ok("RetryDlq", queue="twice")
            client.ok("FAIL", id=client.ok("PULL", queue="twice")["job"]["id"], error=error)
        lake, url = Lake(folder / "lake"), f"headrace://127.0.0.1:{server.port}"
        runs.ingest(spark, lake, {"url": url})
        runs.derive(spark, lake, layers=("silver",))
        yield Wreck(lake, url, client)


def waiting(wreck: Wreck, queue: str) -> list[int]:
    jobs = wreck.client.ok("GetJobs", queue=queue, state="waiting", limit=100)["jobs"]
    return sorted(job["data"]["n"] for job in jobs)


def test_a_dry_run_counts_by_queue_and_signature_and_sends_nothing(spark: SparkSession, wreck: Wreck) -> None:
    from headrace.pipeline import redrive
    from headrace.pipeline.redrive import Redrive

    plan = Redrive(spark, wreck.lake, "look", "queue IN ('mail', 'sms')", wreck.url)
    assert [line.split() for line in redrive.lines(plan.counts())] == [
        ["4", "mail", "Timeout", "after", "<n>", "ms"],
        ["3", "sms", "Refused"],
        ["2", "mail", "Refused"],
    ]
    assert waiting(wreck, "mail") == []


def test_of_many_groups_the_largest_are_listed_and_the_others_counted(spark: SparkSession, wreck: Wreck) -> None:
    from headrace.pipeline import redrive
    from headrace.pipeline.redrive import Redrive

    wreck.client.ok("PurgeDlq", queue="tenant-102")
    counts = Redrive(spark, wreck.lake, "many", "queue LIKE 'tenant-%'", wreck.url).counts()
    assert (len(counts.chosen), counts.groups, counts.jobs, counts.gone) == (100, 103, 103, 1)
    *listed, rest, gone = redrive.lines(counts)
    assert [line.split()[:2] for line in listed] == [["1", f"tenant-{n:03}"] for n in range(100)]
    assert rest.strip() == "3  in 3 more groups of a queue and an error"
    assert gone == "1 of them are no dead letters of the server any more: their data is gone"


@pytest.mark.parametrize(("where", "word"), [("quue = 'mail'", "`quue`"), ("queue = = 1", "at or near '='")])
def test_a_wrong_condition_is_named_in_one_line(spark: SparkSession, tmp_path: Path, where: str, word: str) -> None:
    from headrace.pipeline.redrive import Redrive

    with pytest.raises(HeadraceError, match="is not a condition on the columns of silver/jobs") as caught:
        Redrive(spark, Lake(tmp_path), "wrong", where, None)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_redrive_keeps_its_rate_comes_once_per_name_and_is_written_down(spark: SparkSession, wreck: Wreck) -> None:
    from headrace.pipeline.redrive import Redrive

    where = "queue = 'mail' AND error_signature LIKE 'Timeout%'"
    began = time.monotonic()
    for _ in range(2):
        plan = Redrive(spark, wreck.lake, "fix-1", where, wreck.url)
        assert plan.send(to_queue=None, rate=2, say=lambda _text: None) == 4
    assert time.monotonic() - began >= 2 * 4 / 2 * 0.9
    assert waiting(wreck, "mail") == [0, 1, 2, 3]
    audit = f"read_parquet('{wreck.lake.path('audit/redrive')}/*.parquet')"
    found = duckdb.sql(f"SELECT redrive, queue, count(DISTINCT old_job_id) FROM {audit} GROUP BY ALL").fetchall()
    assert found == [("fix-1", "mail", 4)]


def test_dead_letters_without_data_run_again_and_only_what_is_gone_does_not(spark: SparkSession, wreck: Wreck) -> None:
    from headrace.pipeline.redrive import Redrive

    wreck.client.ok("PurgeDlq", queue="sms")
    plan = Redrive(spark, wreck.lake, "bare", "queue IN ('bare', 'sms')", wreck.url)
    assert {row.queue: (row.jobs, row.gone) for row in plan.counts().chosen} == {"bare": (3, 0), "sms": (3, 3)}
    assert plan.send(to_queue="again", rate=None, say=lambda _text: None) == 3
    jobs = wreck.client.ok("GetJobs", queue="again", state="waiting", limit=100)["jobs"]
    assert sorted((job["data"] for job in jobs), key=str) == [None, None, {"n": 0}]


def test_a_dead_letter_is_chosen_by_how_it_died_last_and_keeps_its_priority(spark: SparkSession, wreck: Wreck) -> None:
    from headrace.pipeline.redrive import Redrive

    chosen = {
        word: Redrive(spark, wreck.lake, word, f"queue = 'twice' AND last_error LIKE '{word}%'", wreck.url)
        for word in ("Timeout", "Refused")
    }
    assert {word: plan.counts().groups for word, plan in chosen.items()} == {"Timeout": 0, "Refused": 1}
    assert chosen["Refused"].send(to_queue="thrice", rate=None, say=lambda _text: None) == 1
    job = wreck.client.ok("PULL", queue="thrice")["job"]
    assert job["priority"] == 7
    wreck.client.ok("ACK", id=job["id"])  # held for longer it would stall, and events come while others count them


def test_a_lake_that_has_everything_agrees_with_its_server(spark: SparkSession, wreck: Wreck) -> None:
    from headrace.pipeline.verify import examine

    runs.ingest(spark, wreck.lake, {"url": wreck.url})
    runs.derive(spark, wreck.lake, layers=("silver",))
    found = examine(spark, wreck.lake, wreck.url)
    assert found.problems == []
    newest = wreck.client.ok("EventSegments", limit=0)["last"]
    assert f"server: event {newest:,} is the newest, the lake has them up to {newest:,}" in found.facts


def test_a_stream_puts_a_small_batch_off_but_not_for_long(wreck: Wreck) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from headrace.pipeline.options import Options
    from headrace.pipeline.stream import EventsStreamReader

    newest = wreck.client.ok("EventSegments", limit=0)["last"]
    options = {"url": wreck.url, "minEventsPerTrigger": str(newest + 1), "maxTriggerDelay": "0.3"}
    reader = EventsStreamReader(Options.parse(options))
    start = reader.initialOffset()
    began = time.monotonic()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    eventually(lambda: reader.latestOffset(start, ReadAllAvailable()) != start)
    assert time.monotonic() - began >= 0.3
    enough = EventsStreamReader(Options.parse({**options, "minEventsPerTrigger": str(newest)}))
    assert enough.latestOffset(start, ReadAllAvailable())["0"]["seq"] == newest
