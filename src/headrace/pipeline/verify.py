"""Whether a lake is consistent: nothing missing, nothing twice, and the tables agree with each other and the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET
from pyspark.sql import Window
from pyspark.sql import functions as f

from headrace.commands.eventlog import ListEventSegments
from headrace.commands.monitoring import Metrics
from headrace.pipeline import silver
from headrace.pipeline.connection import Connection
from headrace.pipeline.lake import Lake
from headrace.pipeline.runs import read_bronze, read_jobs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass
class Findings:
    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(spark: SparkSession, lake: Lake, url: str | None) -> Findings:
    found = Findings()
    events = read_bronze(spark, lake)
    if events is None:
        found.problems.append(f"{lake.root} has no events: run `headrace pipeline ingest` first")
        return found
    _check_bronze(events, found)
    valid = silver.without_retracted(events)
    _check_silver(spark, lake, valid, found)
    if url is not None:
        _check_server(valid, url, found)
    return found


def _check_bronze(events: DataFrame, found: Findings) -> None:
    """Every (shard, epoch, seq) once, without holes that the log does not name itself."""
    keys = events.groupBy("shard", "epoch", "seq").agg(f.count("*").alias("times"))
    in_order = Window.partitionBy("shard").orderBy("epoch", "seq")
    placed = keys.select("*", f.lag("seq").over(in_order).alias("before"), f.lag("epoch").over(in_order).alias("old"))
    hole = (f.col("seq") > f.col("before") + 1) & (f.col("epoch") == f.col("old"))
    row = placed.agg(
        f.count("*").alias("events"),
        f.sum((f.col("times") > 1).cast("int")).alias("repeated"),
        f.collect_list(f.when(hole, f.struct("shard", "epoch", "before", "seq"))).alias("holes"),
    ).first()
    assert row is not None
    gaps = {(gap["shard"], gap["first_seq"]) for gap in events.where("event = 'gap'").collect()}
    found.facts.append(f"bronze: {row['events']:,} events, {len(gaps)} gaps named by the log")
    if row["repeated"]:
        found.problems.append(f"bronze: {row['repeated']:,} events are there more than once")
    for hole_found in row["holes"]:
        if (hole_found["shard"], hole_found["before"] + 1) not in gaps:
            bounds = f"{hole_found['before'] + 1}..{hole_found['seq'] - 1}"
            found.problems.append(f"bronze: events {bounds} of shard {hole_found['shard']} are missing")


def _check_silver(spark: SparkSession, lake: Lake, events: DataFrame, found: Findings) -> None:
    """What bronze says completed must have completed in silver, as far as runs have processed it."""
    waiting = len(lake.batches_after(lake.pointer().batch))
    if waiting:
        found.facts.append(
            f"silver: {waiting} batches of bronze are not in the tables yet; run `headrace pipeline facts`"
        )
        return
    outcomes = {row["outcome"]: row["count"] for row in read_jobs(spark, lake).groupBy("outcome").count().collect()}
    counted = events.agg(
        f.sum((f.col("event") == "completed").cast("int")).alias("completed"),
        f.sum(((f.col("event") == "failed") & f.col("terminal")).cast("int")).alias("dlq"),
    ).first()
    assert counted is not None
    found.facts.append("silver: " + ", ".join(f"{count:,} {name or 'open'}" for name, count in outcomes.items()))
    for outcome in ("completed", "dlq"):
        if (counted[outcome] or 0) != outcomes.get(outcome, 0):
            counts = f"{counted[outcome] or 0:,} events and {outcomes.get(outcome, 0):,} jobs"
            found.problems.append(f"silver: {counts} say {outcome}")


def _check_server(events: DataFrame, url: str, found: Findings) -> None:
    """The counters of the server count what was ever completed; so does a lake that has everything."""
    with Connection(url) as connection:
        metrics = connection.ask(Metrics()).metrics
        newest = connection.ask(ListEventSegments(limit=0)).last
    assert metrics is not UNSET
    row = events.agg(
        f.max("seq").alias("newest"), f.sum((f.col("event") == "completed").cast("int")).alias("completed")
    ).first()
    assert row is not None
    found.facts.append(f"server: event {newest:,} is the newest, the lake has them up to {row['newest'] or 0:,}")
    completed = row["completed"] or 0
    if row["newest"] == newest and completed != metrics.total_completed:
        counts = f"{metrics.total_completed:,.0f} jobs completed in its life, the lake has {completed:,}"
        found.problems.append(f"server: {counts}")
