"""Runs over histories that are not as histories should be: empty, without jobs, taken back, by clocks that jump.

A run takes Spark seconds, however few its rows: what can share a lake is told in one, each test in queues of its own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import HeadraceError
from headrace.pipeline import runs
from headrace.pipeline.lake import GOLD, Lake
from headrace.pipeline.report import write_report
from headrace.pipeline.status import lines, status_of
from headrace.pipeline.verify import examine
from tests.pipeline.test_silver import event, frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


HOUR = 3_600_000
Facts = dict[str, set[str]]


def work(job: str, seq: int, at: int, queue: str = "q") -> list[dict[str, Any]]:
    """A job that is done, in three events."""
    pulled = event(job, seq + 1, "pulled", at + 50 * seq, queue=queue, attempt=1, worker=f"worker of {queue}")
    completed = event(job, seq + 2, "completed", at + 90_000, queue=queue, attempt=1)
    return [event(job, seq, "pushed", at, queue=queue), pulled, completed]


def bring(spark: SparkSession, lake: Lake, batch: int, *events: dict[str, Any]) -> None:
    """A micro-batch of bronze, as `ingest` writes it."""
    runs._write_batch(lake, frame(spark, list(events)), batch)


def outcomes(spark: SparkSession, lake: Lake) -> dict[str, str | None]:
    return {row.job_id: row.outcome for row in runs.read_jobs(spark, lake).collect()}


def facts(spark: SparkSession, lake: Lake) -> Facts:
    made = {name: lake.path(f"gold/{name}") for name in GOLD}
    return {
        name: {repr(row) for row in spark.read.parquet(str(path)).collect()}
        for name, path in made.items()
        if any(path.iterdir())
    }


def about(queue: str, told: Facts) -> Facts:
    """The facts of a queue and its worker."""
    chosen = {name: {row for row in rows if f"{queue}'" in row} for name, rows in told.items()}
    return {name: rows for name, rows in chosen.items() if rows}


def test_a_history_without_jobs_is_told_and_has_nothing_to_report(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    bring(spark, lake, 0, event("", 1, "paused", 0), event("", 2, "resumed", 5))
    told = runs.derive(spark, lake)
    assert (told.events, told.jobs, told.open_jobs) == (2, 0, 0)
    with pytest.raises(HeadraceError, match="has no facts yet"):
        write_report(lake, tmp_path / "report.html")


@dataclass
class Short:
    """A lake with one short life in it, between two batches of which all events were lost."""

    lake: Lake
    said: list[str]
    """By the run that told it."""
    status: list[str]
    """After that run."""
    runs: list[int]
    """The number of the last run after each batch."""
    told_at: list[datetime]
    """Before that run and after it."""


@pytest.fixture(scope="module")
def short(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Short:
    folder = tmp_path_factory.mktemp("short")
    lake, said = Lake(folder / "lake"), []
    bring(spark, lake, 0)
    numbers = [runs.derive(spark, lake).run]
    bring(spark, lake, 1, event("a", 1, "pushed", 0), event("a", 2, "removed", 9, prev="waiting"))
    began = datetime.now(UTC)
    numbers.append(runs.derive(spark, lake, sla_ms={"*": 10}, say=said.append).run)
    told_at = [began, datetime.now(UTC)]
    status = list(lines(status_of(lake, {"path": str(folder / "nowhere")})))
    bring(spark, lake, 2)
    numbers.append(runs.derive(spark, lake).run)
    return Short(lake, said, status, numbers, told_at)


def test_a_run_says_what_it_does_before_it_does_it(short: Short) -> None:
    """Spark takes its time, of which nothing can be seen."""
    steps = [re.sub(r"[\d.]+ s$", "n s", line) for line in short.said]
    assert steps == ["making jobs and attempts of 2 events", "silver in n s", "making facts", "gold in n s"]
    assert "bronze     2 batches, 0 not in the tables yet" in short.status


def test_a_run_notes_when_it_was_made(short: Short) -> None:
    made_at = short.lake.pointer().made_at
    assert made_at is not None
    assert short.told_at[0] <= made_at <= short.told_at[1]


def test_times_are_moments_for_every_reader(short: Short) -> None:
    """A timestamp without a zone would be read as local time."""
    for table, column in (("bronze/events", "ts"), ("silver/jobs", "added_at"), ("gold/queue_minute", "window_start")):
        paths = list(short.lake.path(table).rglob("*.parquet"))
        assert {pq.read_schema(path).field(column).type for path in paths} == {pa.timestamp("us", "UTC")}


def test_a_batch_of_lost_events_is_passed_over(spark: SparkSession, short: Short) -> None:
    assert short.runs == [0, 1, 1]
    assert outcomes(spark, short.lake) == {"a": "removed"}


class Dying(Lake):
    """A lake that a run does not get to the end of: it has replaced the minutes, and not yet the hours."""

    def publish_dates(self, table: str, staged: Path, since: str | None) -> None:
        if table == "gold/queue_hour":
            raise KeyboardInterrupt
        super().publish_dates(table, staged, since)


def test_promises_that_a_dead_run_has_begun_to_keep_are_kept_by_the_next(
    spark: SparkSession, short: Short, tmp_path: Path
) -> None:
    lake = Lake(shutil.copytree(short.lake.root, tmp_path / "lake"))
    assert lake.pointer().sla_ms == {"*": 10}
    with pytest.raises(KeyboardInterrupt):
        runs.derive(spark, Dying(lake.root), sla_ms={"*": 90_000})
    runs.derive(spark, lake)
    told = [spark.read.parquet(str(lake.path(f"gold/queue_{unit}"))) for unit in ("minute", "hour", "day")]
    assert {row.sla_target_ms for frame in told for row in frame.collect()} == {90_000}


def test_a_log_that_was_taken_back_is_told_anew_and_is_in_order(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    bring(spark, lake, 0, event("a", 1, "pushed", 0), event("a", 2, "pulled", 5), event("a", 3, "completed", 9))
    runs.derive(spark, lake, layers=("silver",))
    assert outcomes(spark, lake) == {"a": "completed"}
    failed = event("a", 3, "failed", 20, error="E", terminal=True)
    bring(spark, lake, 1, {**failed, "epoch": 2}, {**event("b", 4, "pushed", 30), "epoch": 2})
    told = runs.derive(spark, lake, layers=("silver",))
    assert told.rebuilt
    assert outcomes(spark, lake) == {"a": "dlq", "b": None}
    assert lake.pointer().first_run == told.run == 2
    assert examine(spark, lake, None).problems == []


# -- in pieces -------------------------------------------------------------------------------------------------------


@dataclass
class Pieces:
    """A history of five days that comes in five batches, and what was made of it on the way."""

    days: list[Any]
    """What the second run said of the queue `set back`."""
    second: Facts
    """After the second run."""
    due: list[str | None]
    """Since when facts were due after each of the other batches, of which silver alone was made."""
    last: Facts
    """After all batches, with dates that had been taken away meanwhile."""
    rebuilt: Facts


@pytest.fixture(scope="module")
def pieces(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    lake = Lake(tmp_path_factory.mktemp("pieces"))
    first, second, *others = batches()
    bring(spark, lake, 0, *first)
    runs.derive(spark, lake)
    bring(spark, lake, 1, *second)
    runs.derive(spark, lake)
    after_second, due = facts(spark, lake), []
    days = spark.read.parquet(str(lake.path("gold/queue_day"))).where("queue = 'set back'").collect()
    for number, events in enumerate(others, 2):
        bring(spark, lake, number, *events)
        runs.derive(spark, lake, layers=("silver",))
        due.append(lake.pointer().facts_due)
    for table in ("queue_hour", "worker_minute"):
        shutil.rmtree(lake.path(f"gold/{table}") / "window_date=2026-11-01")
    runs.derive(spark, lake, layers=("gold",))
    last = facts(spark, lake)
    runs.derive(spark, lake, rebuild=True)
    return Pieces(days, after_second, due, last, facts(spark, lake))


def batches() -> Iterator[list[dict[str, Any]]]:
    """A beginning; a later hour of a day that has facts; new work beside old attempts; the successor of a life; the end
    of an attempt that began on the first day."""
    back = [
        event("back", 1, "pushed", 300_000, queue="set back"),
        event("back", 2, "pulled", 301_000, queue="set back", attempt=1, worker="worker of set back"),
        event("back", 3, "completed", -300_000, queue="set back", attempt=1),  # the evening before
    ]
    held = [event("held", 10, "pushed", 3 * HOUR), event("held", 11, "pulled", 3 * HOUR + 9, attempt=1, worker="w")]
    postponed = [
        event("poll", n + 10 * day, word, day * 24 * HOUR + n, attempt=1, worker="w", delay_ms=24 * HOUR)
        for day in range(0, 6, 2)
        for n, word in ((40, "pulled"), (41, "delayed"))
    ]
    yield [
        *back, *work("b", 4, 0, "set back"), *work("a", 7, 0), *held, event("again", 12, "pushed", 5 * HOUR),
        *work("next day", 13, 25 * HOUR), event("poll", 30, "pushed", 0), *postponed[:4],
    ]  # fmt: skip
    yield work("c", 62, 2 * HOUR, "set back")
    yield [*postponed[4:], *work("d", 82, 96 * HOUR)]
    yield [event("again", 85, "pushed", 100 * HOUR)]
    yield [event("held", 86, "failed", 120 * HOUR, error="E", terminal=True)]


def test_what_a_clock_that_was_set_back_over_midnight_told_is_in_every_date(pieces: Pieces) -> None:
    """A job of the new day that ends in the evening before; the second run is about the new day alone."""
    (day,) = pieces.days
    assert (day.added, day.started, day.completed, day.backlog_end) == (3, 3, 3, 0)


def test_facts_added_to_those_of_the_hours_before_equal_those_of_a_rebuild(pieces: Pieces) -> None:
    """As far as no later batch changed them."""
    told = about("set back", pieces.rebuilt)
    assert about("set back", pieces.second) == told
    assert told.keys() == {"queue_minute", "queue_hour", "queue_day", "worker_minute"}


def test_old_attempts_of_which_nothing_is_new_make_no_facts_due(pieces: Pieces) -> None:
    """A job that somebody holds for days, and one that is postponed again and again."""
    assert pieces.due[0] == "2026-11-05T00:00:00"


def test_the_end_of_a_life_is_due_that_its_successor_tells_of_days_later(pieces: Pieces) -> None:
    assert pieces.due[1] == "2026-11-01T05:00:00"


def test_an_attempt_that_ends_is_due_since_its_beginning(pieces: Pieces) -> None:
    assert pieces.due[2] == "2026-11-01T03:00:00"


def test_facts_made_piece_by_piece_equal_those_of_a_rebuild(pieces: Pieces) -> None:
    """Also those of dates that a dead run took away: they are made anew."""
    assert pieces.last == pieces.rebuilt
