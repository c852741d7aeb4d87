"""The lake says what DuckDB finds in the captured files by itself, and DuckDB reads the lake as it stands.

The lake was told in two runs, so all of this also says that a history in pieces comes to the same as a whole one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from headrace.model import DAY_MS
from headrace.pipeline import runs
from headrace.pipeline.lake import Lake
from tests.pipeline import secondopinion
from tests.pipeline.conftest import Chronicle
from tests.pipeline.history import rig_at, seal
from tests.scale import scaled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HISTORY = Path(__file__).parents[2] / "bench" / "history.py"
pytestmark = pytest.mark.timeout(scaled(300, 3600))


@pytest.fixture(scope="module")
def opinion(chronicle: Chronicle) -> duckdb.DuckDBPyConnection:
    return secondopinion.ask(chronicle.log)


@pytest.fixture(scope="module")
def lake(chronicle: Chronicle) -> Lake:
    return chronicle.lake


def parquet(lake: Lake, table: str) -> str:
    return secondopinion.parquet(lake.root, table)


def rows(db: duckdb.DuckDBPyConnection, query: str) -> list[tuple[Any, ...]]:
    return sorted(db.execute(query).fetchall(), key=repr)


def differences(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]]) -> list[Any]:
    return sorted({*ours} ^ {*theirs}, key=repr)[:6]


@pytest.mark.parametrize("table", list(secondopinion.statements(Path())))
def test_the_lake_says_the_same(lake: Lake, opinion: duckdb.DuckDBPyConnection, table: str) -> None:
    ours, theirs = (rows(opinion, query) for query in secondopinion.statements(lake.root)[table])
    assert differences(ours, theirs) == []
    assert len(ours) == len(theirs) > 0


def test_the_story_has_everything_in_it(opinion: duckdb.DuckDBPyConnection) -> None:
    told = {word for (word,) in opinion.execute("SELECT DISTINCT event FROM events").fetchall()}
    assert told >= {
        "pushed", "pulled", "completed", "failed", "retried", "delayed", "promoted", "stalled", "released", "expired",
        "removed", "dlq-retried", "waiting", "drained", "obliterated", "duplicated",
    }  # fmt: skip


def test_breaches_are_counted_against_the_promise_of_the_queue(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    ours = rows(opinion, f"SELECT queue, sum(sla_breaches)::INT FROM {parquet(lake, 'gold/queue_hour')} GROUP BY 1")
    theirs = """SELECT queue, count(*) FILTER (wait > CASE queue WHEN 'mail' THEN 2000 ELSE 60000 END)::INT
                FROM jobs WHERE first_active IS NOT NULL OR added IS NOT NULL GROUP BY 1"""
    assert ours == rows(opinion, theirs)
    assert sum(count for _, count in ours) > 0


def test_no_worker_is_busier_than_it_can_be(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    busiest = opinion.execute(
        f"SELECT max(busy_ms - slots * 60000), max(utilisation) FROM {parquet(lake, 'gold/worker_minute')}"
    ).fetchone()
    assert busiest is not None
    assert busiest[0] <= 0
    assert busiest[1] <= 1


def test_errors_have_signatures(lake: Lake, opinion: duckdb.DuckDBPyConnection) -> None:
    found = rows(opinion, f"SELECT DISTINCT signature FROM {parquet(lake, 'gold/error_signature_hour')}")
    assert {signature for (signature,) in found} >= {
        "TimeoutError: no answer from <n> after <n> ms", "ValueError: <text> is not a number", "job <n> broke",
    }  # fmt: skip


def test_a_long_made_up_history_is_told_as_duckdb_tells_it(spark: SparkSession, tmp_path: Path) -> None:
    """At full scale five million events."""
    subprocess.run(
        [sys.executable, str(HISTORY), str(tmp_path / "log"), "--events", str(scaled(5_000, 5_000_000))],
        check=True, timeout=1800,
    )  # fmt: skip
    made = Lake(tmp_path / "lake")
    runs.ingest(spark, made, {"path": str(tmp_path / "log")})
    runs.derive(spark, made)
    found = secondopinion.disagreements(secondopinion.ask(tmp_path / "log"), made.root)
    assert {table: count for table, count in found.items() if count} == {}


def test_clocks_that_jump_and_claims_that_a_server_forgot_are_told_alike(spark: SparkSession, tmp_path: Path) -> None:
    rig = rig_at(tmp_path)
    rig.push("mail")
    rig.bury("mail", "E")
    rig.push("mail")
    held = rig.take("mail")
    rig.clock.advance(100 * DAY_MS)
    rig.ack(held)
    forgotten = rig.push("mail")
    rig.take("mail")
    rig.reopen()
    assert rig.drain("mail") == 1
    left = rig.push("mail")
    seal(rig)
    rig.close()
    made = Lake(tmp_path / "lake")
    runs.ingest(spark, made, {"path": str(tmp_path / "log")})
    runs.derive(spark, made)
    found = secondopinion.disagreements(secondopinion.ask(tmp_path / "log"), made.root)
    assert {table: count for table, count in found.items() if count} == {}
    outcomes = {row.job_id: row.outcome for row in runs.read_jobs(spark, made).collect()}
    assert (outcomes[forgotten], outcomes[left]) == ("removed", None)
