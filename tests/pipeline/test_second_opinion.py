"""The lake says what DuckDB finds in the captured files by itself, and DuckDB reads the lake as it stands.

The lake was told in two runs, so all of this also says that a history in pieces comes to the same as a whole one.
"""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from headrace.pipeline.lake import Lake
from tests.pipeline import secondopinion
from tests.pipeline.conftest import Chronicle

_JOB_COLUMNS = """queue, job_id, first_seq, job_name, epoch_ms(added_at), epoch_ms(first_active_at),
    epoch_ms(last_active_at), epoch_ms(finished_at), outcome, attempts, failures, stalls, wait_ms, backoff_ms, total_ms,
    priority, last_worker, last_error"""
_THEIR_JOBS = """SELECT queue, job, first_seq, name, added, first_active, last_active, finished, outcome, attempts,
    failures, stalls, wait, backoff, total, priority, last_worker, last_error FROM jobs"""


@pytest.fixture(scope="module")
def opinion(chronicle: Chronicle) -> duckdb.DuckDBPyConnection:
    return secondopinion.ask(chronicle.log)


@pytest.fixture(scope="module")
def lake(chronicle: Chronicle) -> Lake:
    return chronicle.lake


def parquet(lake: Lake, table: str) -> str:
    return f"read_parquet('{lake.path(table)}/**/*.parquet', hive_partitioning = true, union_by_name = true)"


def rows(db: duckdb.DuckDBPyConnection, query: str) -> list[tuple[Any, ...]]:
    return sorted(db.execute(query).fetchall(), key=repr)


def differences(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]]) -> list[Any]:
    return sorted({*ours} ^ {*theirs}, key=repr)[:6]


def test_bronze_has_every_event_once(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    query = "SELECT shard, epoch, seq, event, coalesce(job_id, '') FROM " + parquet(lake, "bronze/events")
    ours = rows(opinion, query)
    assert ours == rows(opinion, "SELECT 0, epoch, seq, event, job FROM events")
    assert len(ours) > 2_000


def test_the_story_has_everything_in_it(opinion: duckdb.DuckDBPyConnection) -> None:
    told = {word for (word,) in opinion.execute("SELECT DISTINCT event FROM events").fetchall()}
    assert told >= {
        "pushed", "pulled", "completed", "failed", "retried", "delayed", "promoted", "stalled", "released", "expired",
        "removed", "dlq-retried", "waiting", "drained", "obliterated", "duplicated",
    }  # fmt: skip


def test_finished_jobs_are_the_same(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    ours = rows(opinion, f"SELECT {_JOB_COLUMNS} FROM {parquet(lake, 'silver/jobs')}")
    theirs = rows(opinion, f"{_THEIR_JOBS} WHERE finished IS NOT NULL")
    assert differences(ours, theirs) == []
    assert len(ours) == len(theirs) > 300


def test_open_jobs_are_the_same(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    ours = rows(opinion, f"SELECT {_JOB_COLUMNS} FROM {parquet(lake, 'silver/open_jobs')}")
    theirs = rows(opinion, f"{_THEIR_JOBS} WHERE finished IS NULL")
    assert differences(ours, theirs) == []
    assert ours


def test_attempts_are_the_same(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    shown = "queue, job_id, round, attempt, worker, epoch_ms(started_at), epoch_ms(ended_at), outcome, run_ms, error"
    ours = rows(opinion, f"SELECT {shown} FROM {parquet(lake, 'silver/attempts')}")
    ours += rows(opinion, f"SELECT {shown} FROM {parquet(lake, 'silver/open_attempts')}")
    theirs = "SELECT queue, job, round, attempt, worker, started, ended, outcome, ended - started, error FROM attempts"
    assert differences(ours, rows(opinion, theirs)) == []


@pytest.mark.parametrize("unit", ["minute", "hour", "day"])
def test_facts_are_the_same(lake: Lake, opinion: duckdb.DuckDBPyConnection, unit: str) -> None:
    ours = opinion.execute(
        f"""SELECT queue, epoch_ms(window_start), added, started, completed, failed_attempts, retried, dlq, stalled,
            removed, expired, wait_n, wait_p50, wait_p95, wait_p99, run_p50, run_p95, run_p99, total_p50, total_p95,
            total_p99, round(retry_amplification, 6), backlog_end
            FROM {parquet(lake, f"gold/queue_{unit}")} ORDER BY 1, 2"""
    ).fetchall()
    theirs = secondopinion.facts(opinion, unit)
    assert differences(ours, theirs) == []
    assert len(ours) == len(theirs)


def test_breaches_are_counted_against_the_promise_of_the_queue(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    ours = rows(opinion, f"SELECT queue, sum(sla_breaches)::INT FROM {parquet(lake, 'gold/queue_hour')} GROUP BY 1")
    theirs = """SELECT queue, count(*) FILTER (wait > CASE queue WHEN 'mail' THEN 2000 ELSE 60000 END)::INT
                FROM jobs WHERE first_active IS NOT NULL OR added IS NOT NULL GROUP BY 1"""
    assert ours == rows(opinion, theirs)
    assert sum(count for _, count in ours) > 0


def test_workers_are_as_busy(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    shown = "worker, epoch_ms(window_start), busy_ms, slots, jobs"
    ours = rows(opinion, f"SELECT {shown} FROM {parquet(lake, 'gold/worker_minute')}")
    theirs = rows(opinion, "SELECT worker, minute, busy::BIGINT, slots::INT, jobs FROM workers")
    assert differences(ours, theirs) == []
    assert len(ours) == len(theirs) > 10
    busiest = opinion.execute(
        f"SELECT max(busy_ms - slots * 60000), max(utilisation) FROM {parquet(lake, 'gold/worker_minute')}"
    ).fetchone()
    assert busiest is not None
    assert busiest[0] <= 0
    assert busiest[1] <= 1


def test_errors_have_the_same_signatures_and_counts(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    shown = "queue, epoch_ms(window_start), signature, count, jobs, epoch_ms(first_seen), epoch_ms(last_seen)"
    ours = rows(opinion, f"SELECT {shown} FROM {parquet(lake, 'gold/error_signature_hour')}")
    assert differences(ours, rows(opinion, "SELECT * FROM errors")) == []
    assert {row[2] for row in ours} >= {
        "TimeoutError: no answer from <n> after <n> ms", "ValueError: <text> is not a number", "job <n> broke",
    }  # fmt: skip
