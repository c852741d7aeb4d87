"""Runs over histories that are not as histories should be: empty, without jobs, taken back."""

from __future__ import annotations

import re
import shutil
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


def work(job: str, seq: int, at: int) -> list[dict[str, Any]]:
    """A job that is done, in three events."""
    pulled = event(job, seq + 1, "pulled", at + 50 * seq, attempt=1, worker="w")
    return [event(job, seq, "pushed", at), pulled, event(job, seq + 2, "completed", at + 90_000, attempt=1)]


def bring(spark: SparkSession, lake: Lake, batch: int, *events: dict[str, Any]) -> None:
    """A micro-batch of bronze, as `ingest` writes it."""
    runs._write_batch(lake, frame(spark, list(events)), batch)


def outcomes(spark: SparkSession, lake: Lake) -> dict[str, str | None]:
    return {row.job_id: row.outcome for row in runs.read_jobs(spark, lake).collect()}


def facts(spark: SparkSession, lake: Lake) -> dict[str, set[str]]:
    made = {name: lake.path(f"gold/{name}") for name in GOLD}
    return {
        name: {repr(row) for row in spark.read.parquet(str(path)).collect()}
        for name, path in made.items()
        if any(path.iterdir())
    }


def test_a_history_without_jobs_is_told_and_has_nothing_to_report(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    bring(spark, lake, 0, event("", 1, "paused", 0), event("", 2, "resumed", 5))
    told = runs.derive(spark, lake)
    assert (told.events, told.jobs, told.open_jobs) == (2, 0, 0)
    with pytest.raises(HeadraceError, match="has no facts yet"):
        write_report(lake, tmp_path / "report.html")


@pytest.fixture(scope="module")
def told(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, list[str]]:
    """A lake with one short life in it, and what the run said."""
    lake = Lake(tmp_path_factory.mktemp("lake"))
    bring(spark, lake, 0, event("a", 1, "pushed", 0), event("a", 2, "removed", 9, prev="waiting"))
    said: list[str] = []
    runs.derive(spark, lake, say=said.append)
    return lake, said


def test_a_run_says_what_it_does_before_it_does_it(told: tuple[Lake, list[str]], tmp_path: Path) -> None:
    """Spark takes its time, of which nothing can be seen."""
    lake, said = told
    steps = [re.sub(r"[\d.]+ s$", "n s", line) for line in said]
    assert steps == ["making jobs and attempts of 2 events", "silver in n s", "making facts", "gold in n s"]
    assert "bronze     1 batch, 0 not in the tables yet" in list(
        lines(status_of(lake, {"path": str(tmp_path / "nowhere")}))
    )


def test_times_are_moments_for_every_reader(told: tuple[Lake, list[str]]) -> None:
    """A timestamp without a zone would be read as local time."""
    for table, column in (("bronze/events", "ts"), ("silver/jobs", "added_at"), ("gold/queue_minute", "window_start")):
        paths = list(told[0].path(table).rglob("*.parquet"))
        assert {pq.read_schema(path).field(column).type for path in paths} == {pa.timestamp("us", "UTC")}


def test_a_batch_of_lost_events_is_passed_over(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    bring(spark, lake, 0)
    assert runs.derive(spark, lake).run == 0
    bring(spark, lake, 1, event("a", 1, "pushed", 0), event("a", 2, "removed", 9, prev="waiting"))
    assert runs.derive(spark, lake).run == 1
    bring(spark, lake, 2)
    assert runs.derive(spark, lake).run == 1
    assert outcomes(spark, lake) == {"a": "removed"}


def test_a_log_that_was_taken_back_is_told_anew_and_is_in_order(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    bring(spark, lake, 0, event("a", 1, "pushed", 0), event("a", 2, "pulled", 5), event("a", 3, "completed", 9))
    runs.derive(spark, lake)
    assert outcomes(spark, lake) == {"a": "completed"}
    failed = event("a", 3, "failed", 20, error="E", terminal=True)
    bring(spark, lake, 1, {**failed, "epoch": 2}, {**event("b", 4, "pushed", 30), "epoch": 2})
    told = runs.derive(spark, lake)
    assert told.rebuilt
    assert outcomes(spark, lake) == {"a": "dlq", "b": None}
    assert lake.pointer().first_run == told.run == 2
    assert examine(spark, lake, None).problems == []


def test_a_clock_that_was_set_back_makes_no_negative_times(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    bring(spark, lake, 0, event("a", 1, "pushed", 90), event("a", 2, "pulled", 60), event("a", 3, "completed", 30))
    runs.derive(spark, lake, layers=("silver",))
    (job,) = runs.read_jobs(spark, lake).collect()
    assert (job.wait_ms, job.run_ms, job.busy_ms, job.total_ms) == (0, 0, 0, 0)
    (attempt,) = runs.read_attempts(spark, lake).collect()
    assert attempt.run_ms == 0


def test_facts_made_piece_by_piece_equal_those_of_a_rebuild(spark: SparkSession, tmp_path: Path) -> None:
    """Also those of a life that ended the day before, as its successor says."""
    lake = Lake(tmp_path)
    bring(spark, lake, 0, *work("a", 1, 0), event("again", 4, "pushed", 5_000), *work("b", 5, 25 * HOUR))
    runs.derive(spark, lake)
    bring(spark, lake, 1, *work("c", 8, 28 * HOUR), event("again", 11, "pushed", 28 * HOUR))
    runs.derive(spark, lake)
    bring(spark, lake, 2, *work("d", 12, 30 * HOUR))
    runs.derive(spark, lake)
    in_pieces = facts(spark, lake)
    runs.derive(spark, lake, rebuild=True)
    assert in_pieces == facts(spark, lake)


def test_old_attempts_of_which_nothing_is_new_make_no_facts_due(spark: SparkSession, tmp_path: Path) -> None:
    """A job that somebody holds for days, and one that is postponed again and again."""
    lake = Lake(tmp_path)
    postponed = [
        event("poll", n + day, word, day * 24 * HOUR + n, attempt=1, worker="w", delay_ms=24 * HOUR)
        for day in range(0, 6, 2)
        for n, word in ((10, "pulled"), (11, "delayed"))
    ]
    held = [event("held", 1, "pushed", 0), event("held", 2, "pulled", 9, attempt=1, worker="w")]
    bring(spark, lake, 0, *held, event("poll", 3, "pushed", 0), *postponed[:4])
    runs.derive(spark, lake)
    bring(spark, lake, 1, *postponed[4:], *work("a", 20, 96 * HOUR))
    runs.derive(spark, lake, layers=("silver",))
    assert lake.pointer().facts_due == "2026-11-05T00:00:00"
    bring(spark, lake, 2, event("held", 30, "failed", 120 * HOUR, error="E", terminal=True))
    runs.derive(spark, lake, layers=("silver",))
    assert lake.pointer().facts_due == "2026-11-01T00:00:00"
    runs.derive(spark, lake, layers=("gold",))
    in_pieces = facts(spark, lake)
    runs.derive(spark, lake, rebuild=True)
    assert in_pieces == facts(spark, lake)


def test_what_a_clock_that_was_set_back_over_midnight_told_is_in_every_date(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A job of the new day, that ends in the evening before; the next run is about the new day alone."""
    lake = Lake(tmp_path)
    began = [event("a", 1, "pushed", 300_000), event("a", 2, "pulled", 301_000, attempt=1, worker="w")]
    bring(spark, lake, 0, *began, event("a", 3, "completed", -300_000, attempt=1), *work("b", 4, 0))
    runs.derive(spark, lake)
    bring(spark, lake, 1, *work("c", 7, 2 * HOUR))
    runs.derive(spark, lake)
    in_pieces = facts(spark, lake)
    (day,) = spark.read.parquet(str(lake.path("gold/queue_day"))).collect()
    assert (day.added, day.started, day.completed, day.backlog_end) == (3, 3, 3, 0)
    runs.derive(spark, lake, rebuild=True)
    assert in_pieces == facts(spark, lake)


def test_a_date_that_a_dead_run_took_away_is_made_anew(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    bring(spark, lake, 0, *work("a", 1, 0))
    runs.derive(spark, lake)
    bring(spark, lake, 1, *work("b", 4, 2 * HOUR))
    runs.derive(spark, lake, layers=("silver",))
    for table in ("queue_hour", "worker_minute"):
        shutil.rmtree(lake.path(f"gold/{table}") / "window_date=2026-11-01")
    runs.derive(spark, lake, layers=("gold",))
    mended = facts(spark, lake)
    runs.derive(spark, lake, rebuild=True)
    assert mended == facts(spark, lake)


class Dying(Lake):
    """A lake that a run does not get to the end of: it has replaced the minutes, and not yet the hours."""

    def publish_dates(self, table: str, staged: Path, since: str | None) -> None:
        if table == "gold/queue_hour":
            raise KeyboardInterrupt
        super().publish_dates(table, staged, since)


def test_promises_that_a_dead_run_has_begun_to_keep_are_kept_by_the_next(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    bring(spark, lake, 0, *work("a", 1, 0))
    runs.derive(spark, lake, sla_ms={"*": 10})
    with pytest.raises(KeyboardInterrupt):
        runs.derive(spark, Dying(tmp_path), sla_ms={"*": 90_000})
    runs.derive(spark, lake)
    told = [spark.read.parquet(str(lake.path(f"gold/queue_{unit}"))) for unit in ("minute", "hour", "day")]
    assert {row.sla_target_ms for frame in told for row in frame.collect()} == {90_000}
