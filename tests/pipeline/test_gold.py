"""Facts: percentiles by nearest rank, windows, promises. Everything is computed once; each test looks at its part."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from headrace.pipeline.schemas import ATTEMPTS, JOBS, columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START = datetime(2026, 11, 1, 23, 58, tzinfo=UTC)


def rows(spark: SparkSession, table: str, given: list[dict[str, Any]]) -> DataFrame:
    kinds = columns(table)
    ddl = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    return spark.createDataFrame([tuple(row.get(name) for name in kinds) for row in given], ddl)


def nearest_rank(values: list[int], share: float) -> int:
    """The smallest value that at least this share of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def waits() -> dict[str, list[int]]:
    chance = random.Random(5)
    return {f"n{n}": [chance.randint(0, 10_000) for _ in range(n)] for n in (1, 2, 3, 19, 20, 21, 100, 101, 257)}


def job(queue: str, number: int, wait: int) -> dict[str, Any]:
    times = {"added_at": START, "first_active_at": START, "finished_at": START + timedelta(milliseconds=wait)}
    ends = {"outcome": "completed", "wait_ms": wait, "total_ms": wait}
    return {"queue": queue, "job_id": f"{queue}-{number}", **times, **ends}


def attempt(worker: str, start_s: float, end_s: float, outcome: str = "completed", **more: Any) -> dict[str, Any]:
    moments = {"started_at": START + timedelta(seconds=start_s), "ended_at": START + timedelta(seconds=end_s)}
    named = {"queue": "w", "job_id": f"{worker}{start_s}", "worker": worker, "round": 1, "outcome": outcome}
    return {**named, **moments, "run_ms": int((end_s - start_s) * 1000), **more}


@pytest.fixture(scope="module")
def facts(spark: SparkSession) -> dict[tuple[str, str], list[Any]]:
    """Facts by queue and unit, in order."""
    from headrace.pipeline import gold

    jobs = [job(queue, n, wait) for queue, values in waits().items() for n, wait in enumerate(values)]
    jobs += [{"queue": "open", "job_id": "o", "added_at": START}, {**job("cut", 1, 5), "added_at": None}]
    tries = [
        attempt("a", 0, 1),
        attempt("a", 2, 5, "failed", error_signature="E"),
        attempt("a", 70, 71, "stalled", job_id="a2", round=2, previous_at=START + timedelta(seconds=2)),
        attempt("a", 80, 81, "released"),
    ]
    promised = {"n100": 5_000, "*": 9_000}
    made = gold.queue_facts(rows(spark, JOBS, jobs), rows(spark, ATTEMPTS, tries), sla_ms=promised)
    found: dict[tuple[str, str], list[Any]] = {}
    for row in made.orderBy("queue", "unit", "window_start").collect():
        found.setdefault((row["queue"], row["unit"]), []).append(row)
    return found


@pytest.mark.parametrize("queue", list(waits()))
def test_percentiles_are_nearest_rank(facts: Any, queue: str) -> None:
    values = waits()[queue]
    (row,) = facts[queue, "day"]
    assert (row.wait_p50, row.wait_p95, row.wait_p99) == tuple(nearest_rank(values, p) for p in (0.5, 0.95, 0.99))
    assert row.wait_n == len(values)


def test_breaches_count_against_the_promise_of_the_queue(facts: Any) -> None:
    (row,) = facts["n100", "hour"]
    assert (row.sla_target_ms, row.sla_breaches) == (5_000, sum(wait > 5_000 for wait in waits()["n100"]))
    (row,) = facts["n257", "hour"]
    assert (row.sla_target_ms, row.sla_breaches) == (9_000, sum(wait > 9_000 for wait in waits()["n257"]))


def test_a_job_that_has_not_ended_is_backlog(facts: Any) -> None:
    (row,) = facts["open", "minute"]
    assert (row.added, row.completed, row.backlog_end) == (1, 0, 1)


def test_a_job_that_came_before_the_log_makes_no_negative_backlog(facts: Any) -> None:
    rows = facts["cut", "day"]
    assert [(row.added, row.completed, row.backlog_end) for row in rows] == [(0, 1, 0)]


def test_rates_are_of_attempts(facts: Any) -> None:
    first, second = facts["w", "minute"]
    assert (first.started, first.failed_attempts, first.failure_rate) == (2, 1, 0.5)
    assert (second.started, second.retried, second.stalled, second.failure_rate) == (2, 1, 1, 1.0)
    (hour,) = facts["w", "hour"]
    assert (hour.started, hour.run_n, hour.retry_amplification) == (4, 3, 4 / 3)


@pytest.fixture(scope="module")
def workers(spark: SparkSession) -> dict[str, list[Any]]:
    """Minutes by worker, in order."""
    from headrace.pipeline import gold

    weeks = 6 * 7 * 86_400
    tries = [attempt("w", 50, 130), attempt("w", 55, 65), attempt("idle", 1, 2)]
    tries += [attempt("two", 0, 600), attempt("two", 1, 650), attempt("days", 0, 200_000)]
    tries += [attempt("jumped", -weeks, 90), attempt("jumped", 100, 101), attempt("week", 90 - 7 * 86_400, 90)]
    found: dict[str, list[Any]] = {}
    for row in gold.worker_facts(rows(spark, ATTEMPTS, tries)).orderBy("worker", "window_start").collect():
        found.setdefault(row["worker"], []).append(row)
    return found


def test_an_attempt_across_borders_counts_in_every_minute_for_its_part(workers: Any) -> None:
    shown = [
        (row.worker, row.window_start.minute, row.busy_ms, row.slots, row.jobs)
        for row in workers["idle"] + workers["w"]
    ]
    assert shown == [
        ("idle", 58, 1_000, 1, 1),
        ("w", 58, 15_000, 2, 2),
        ("w", 59, 65_000, 2, 2),
        ("w", 0, 10_000, 1, 1),
    ]
    assert [str(row.window_date) for row in workers["w"]][-2:] == ["2026-11-01", "2026-11-02"]


def test_a_worker_has_its_slots_on_every_day_that_its_work_touches(workers: Any) -> None:
    assert {(str(row.window_date), row.slots) for row in workers["two"]} == {("2026-11-01", 2), ("2026-11-02", 2)}
    assert max(row.utilisation for row in workers["two"] + workers["days"]) == 1
    assert sum(row.busy_ms for row in workers["days"]) == 200_000_000


def test_of_an_attempt_that_a_clock_makes_last_for_years_a_week_is_counted(workers: Any) -> None:
    for worker, more in (("jumped", 1_000), ("week", 0)):
        minutes = workers[worker]
        assert (len(minutes), sum(row.busy_ms for row in minutes)) == (7 * 1440 + 1, 7 * 86_400_000 + more)
        assert {row.slots for row in minutes} == {1}


def test_signatures_leave_out_what_differs(spark: SparkSession) -> None:
    from pyspark.sql import functions as f

    from headrace.pipeline.silver import signature

    texts = {
        "KeyError: 'user-17'": "KeyError: <text>",
        'no file "/tmp/a b"': "no file <text>",
        "at 0xDEADBEEF, line 12": "at <hex>, line <n>",
        "job 01a1e1b5-a1b1-7000-9757-8cd012345678 failed": "job <id> failed",
        "10.0.0.7:443 refused\nstack": "<n> refused",
        "digest d41d8cd98f00b204e9800998ecf8427e": "digest <hex>",
    }
    frame = spark.createDataFrame([(text,) for text in texts], "error string")
    found = {row.error: row.s for row in frame.select("error", signature(f.col("error")).alias("s")).collect()}
    assert found == texts


def test_facts_since_a_date_equal_the_same_dates_of_all_facts(spark: SparkSession) -> None:
    from headrace.pipeline import gold

    night = START.replace(hour=0, minute=0) + timedelta(days=1)
    jobs = [job("q", n, 400_000 * n) | {"finished_at": START + timedelta(seconds=40 * n)} for n in range(8)]
    jobs += [{"queue": "q", "job_id": "open", "added_at": START}]
    whole = gold.queue_facts(rows(spark, JOBS, jobs), rows(spark, ATTEMPTS, []))
    late = [row for row in jobs if row.get("finished_at", night) >= night]
    part = gold.queue_facts(rows(spark, JOBS, late), rows(spark, ATTEMPTS, []), since=night)
    expected = [row for row in whole.collect() if str(row.window_date) == "2026-11-02"]
    assert {*map(repr, part.collect())} == {*map(repr, expected)}
    assert expected


def test_minutes_of_workers_taken_over_equal_those_made_anew(spark: SparkSession) -> None:
    """Also of attempts across the border. That facts of queues are taken over rightly is told in test_odd_lakes."""
    from headrace.pipeline import gold

    noon, chance = START.replace(hour=12, minute=0), random.Random(7)
    tries = []
    for n in range(180):  # one every 40 seconds from 11:00 to 13:00
        begin = noon + timedelta(seconds=40 * n - 3600)
        end = begin + timedelta(seconds=chance.randint(1, 200))
        tries.append({**attempt(f"w{n % 2}", n, n + n * 13 % 97), "started_at": begin, "ended_at": end})
    made = gold.Made(gold.worker_facts(rows(spark, ATTEMPTS, tries[:90])), noon)
    everything = rows(spark, ATTEMPTS, tries)
    taken_over = gold.worker_facts(everything, since=noon.replace(hour=0), made=made)
    assert {*map(repr, taken_over.collect())} == {*map(repr, gold.worker_facts(everything).collect())}
