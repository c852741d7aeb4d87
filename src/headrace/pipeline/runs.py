"""The jobs of the pipeline: where paths, sessions and transforms meet.

`ingest` streams events into bronze. `derive` computes silver from batches that are new since the last run and gold for
the dates that they touch, or one of the two. Both can be killed at any time and started again: unfinished work is
redone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Container, Iterable
from datetime import UTC, date, datetime
from datetime import time as time_of_day
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, Observation, Row
from pyspark.sql import functions as f
from pyspark.storagelevel import StorageLevel

from headrace.notation import counted
from headrace.pipeline import gold, silver
from headrace.pipeline.bronze import bronze_of
from headrace.pipeline.lake import EVERYTHING, GOLD, Lake, Pointer
from headrace.pipeline.schemas import ATTEMPTS, BRONZE, FACTS, JOBS, WORKERS, columns, union

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Say = Callable[[str], None]
LAYERS: Final = ("silver", "gold")
_STARTS: Final = 10
_TOO_SLOW: Final = "Python worker failed to connect back"
"""Spark gives the process of a stream's source ten seconds to start. No setting changes that, and on a busy machine it
is not enough."""


def _silent(_text: str) -> None:
    return None


# -- events to bronze ----------------------------------------------------------------------------------------------


class IngestSummary(msgspec.Struct):
    batches: int = 0
    events: int = 0


def start_ingest(
    spark: SparkSession, lake: Lake, source: dict[str, str], *, interval_s: float | None, say: Say = _silent
) -> tuple[StreamingQuery, IngestSummary]:
    """Begin to stream events into bronze: all that there are (`interval_s` None), or on and on."""
    summary = IngestSummary()

    def keep(batch: DataFrame, number: int) -> None:
        began = time.monotonic()
        count = _write_batch(lake, batch, number)
        summary.batches += 1
        summary.events += count
        say(f"batch {number}: {counted(count, 'event')} in {time.monotonic() - began:.1f} s")

    stream = spark.readStream.format("headrace").options(**{"consumer": lake.consumer(), **source}).load()
    writer = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(lake.checkpoint))
    writer = writer.queryName("headrace-ingest")
    pause = f"{int((interval_s or 0) * 1000)} milliseconds"
    trigger: dict[str, Any] = {"availableNow": True} if interval_s is None else {"processingTime": pause}
    return writer.trigger(**trigger).start(), summary


def ingest(
    spark: SparkSession,
    lake: Lake,
    source: dict[str, str],
    *,
    interval_s: float | None = None,
    say: Say = _silent,
) -> IngestSummary:
    """Stream events into bronze until there are no more, or with an interval until somebody stops it."""
    with lake.locked("ingest"):
        for tries_left in reversed(range(_STARTS)):
            query, summary = start_ingest(spark, lake, source, interval_s=interval_s, say=say)
            try:
                query.awaitTermination()
                break
            except StreamingQueryException as error:
                if _TOO_SLOW not in str(error) or not tries_left:
                    raise
                say("this machine is too busy to start the stream's process in time: trying again")
            finally:
                query.stop()
    return summary


def _write_batch(lake: Lake, batch: DataFrame, number: int) -> int:
    """Bronze of one micro-batch, in a folder that is named after it: a repeated batch replaces itself."""
    staged = lake.staging_batch(number)
    shutil.rmtree(staged, ignore_errors=True)
    bronze_of(batch).write.partitionBy("event_date").parquet(str(staged))
    count = batch.sparkSession.read.schema(_ddl(BRONZE)).parquet(str(staged)).count()  # from the files' footers
    lake.publish_batch(number, staged)
    return count


# -- bronze to silver and gold -------------------------------------------------------------------------------------


class FactsSummary(msgspec.Struct):
    """What a run did. `since` is the first date whose facts were recomputed, None when nothing was new."""

    run: int
    batches: int
    events: int = 0
    jobs: int = 0
    open_jobs: int = 0
    since: date | None = None
    rebuilt: bool = False
    seconds: dict[str, float] = {}


def derive(
    spark: SparkSession,
    lake: Lake,
    *,
    sla_ms: dict[str, int] | None = None,
    rebuild: bool = False,
    layers: Container[str] = LAYERS,
    say: Say = _silent,
) -> FactsSummary:
    """Silver and gold of everything in bronze that is in no table yet, or of everything (`rebuild`)."""
    with lake.locked("facts"):
        derivation = _Derivation(spark, lake, sla_ms, rebuild, say)
        lake.clean_up(derivation.before)
        if "silver" in layers:
            derivation.make_silver()
        if "gold" in layers:
            derivation.make_gold(is_rebuild=rebuild and "silver" not in layers)
        return derivation.summary


class _Derivation:
    """One run, step by step."""

    def __init__(self, spark: SparkSession, lake: Lake, sla_ms: dict[str, int] | None, rebuild: bool, say: Say) -> None:
        self.spark = spark
        self.lake = lake
        self.say = say
        self.before = lake.pointer()
        self.sla_ms = self.before.sla_ms if sla_ms is None else sla_ms
        self.is_rebuild = rebuild or self.before.run == 0
        self.summary = FactsSummary(self.before.run, 0)

    def make_silver(self) -> None:
        batches = self.lake.batches_after(-1 if self.is_rebuild else self.before.batch)
        events = read_batches(self.spark, self.lake, batches.values()) if batches else None
        facts = [] if events is None else self._look_at(events)
        if events is None or not facts:  # a batch is empty when all its events were lost, and that was accepted
            self.say("nothing new in bronze")
            return
        epochs = {str(row["shard"]): int(row["epoch"]) for row in facts}
        if not self.is_rebuild and any(epoch > self.before.epochs.get(s, epoch) for s, epoch in epochs.items()):
            self.say("the log was taken back to an older state, or a new one began: recomputing everything")
            self.is_rebuild = True
            self.make_silver()
            return
        self.summary.batches, self.summary.rebuilt = len(batches), self.is_rebuild
        self.summary.events = sum(row["events"] for row in facts)
        self.say(f"making jobs and attempts of {counted(self.summary.events, 'event')}")
        since = self._silver(events, has_clearings=any(row["clearings"] for row in facts), facts=facts)
        run = self.before.run + 1
        after = Pointer(
            run=run,
            batch=max(batches),
            first_run=run if self.is_rebuild else self.before.first_run,
            epochs={**self.before.epochs, **epochs},
            sla_ms=self.before.sla_ms,
            facts_due=EVERYTHING if self.is_rebuild else _earlier(self.before.facts_due, since),
            made_at=datetime.now(UTC),
        )
        self.lake.publish(after)
        self.summary.run, self.summary.since = after.run, datetime.fromisoformat(since).date()

    def _timed(self, what: str, began: float) -> None:
        self.summary.seconds[what] = time.monotonic() - began
        self.say(f"{what} in {self.summary.seconds[what]:.1f} s")

    def _look_at(self, events: DataFrame) -> list[Row]:
        """A glance at the new events, from few columns: how many, of which epochs, since when."""
        return (
            events.groupBy("shard", "epoch")
            .agg(
                f.count("*").alias("events"),
                _hour(f.min("ts")).alias("oldest"),
                f.min("seq").alias("first_seq"),
                f.sum(f.col("event").isin(*silver.CLEARING).cast("int")).alias("clearings"),
                f.sum(silver.is_trailing().cast("int")).alias("late"),
                f.sum((f.col("event") == "gap").cast("int")).alias("gaps"),
            )
            .orderBy("shard", "epoch")
            .collect()
        )

    def _silver(self, events: DataFrame, *, has_clearings: bool, facts: list[Row]) -> str:
        """Jobs and attempts; the hour since which facts may have changed."""
        began = time.monotonic()
        if len({(row["shard"], row["epoch"]) for row in facts}) > len({row["shard"] for row in facts}):
            events = silver.without_retracted(events)
        carried = self._carried()
        everything = events if carried is None else union(events, carried)
        cleared = silver.clearings(events) if has_clearings else None
        lives = silver.judged(silver.lives_of(silver.by_life(everything)), cleared)
        # Not in memory: what does not fit there is read back from disk in one piece, and pieces may be of any size.
        lives.persist(StorageLevel.DISK_ONLY)
        seen = Observation()
        observed = lives.observe(
            seen,
            f.count("*").alias("all"),
            f.sum(f.col("finished_at").isNull().cast("int")).alias("open"),
            _hour(f.min("finished_at")).alias("end"),
            _hour(f.min(silver.first_change(min(row["first_seq"] for row in facts)))).alias("start"),
        )
        self._stage_ended(silver.jobs_of(observed), "silver/jobs", "finished_date", "silver/open_jobs")
        self.summary.jobs, self.summary.open_jobs = seen.get["all"], seen.get["open"] or 0
        self._stage_ended(silver.attempts_of(lives), "silver/attempts", "ended_date", "silver/open_attempts")
        if self.summary.open_jobs:
            self._stage(silver.carried(lives), "state/open_events")
        if any(row["late"] for row in facts):
            self._stage(silver.late_of(events), "silver/late_events")
        if any(row["gaps"] for row in facts):
            self._stage(silver.gaps_of(events), "silver/gaps")
        lives.unpersist()
        self._timed("silver", began)
        # Facts may have changed since the oldest new event, since the start of an attempt that began or ended with the
        # new events, or since the end of a life: one that has a successor ended with its newest event, however old.
        hours: list[str | None] = [seen.get["start"], seen.get["end"], *(row["oldest"] for row in facts)]
        return min(hour for hour in hours if hour is not None)

    def _carried(self) -> DataFrame | None:
        folders = [] if self.is_rebuild else self.lake.committed("state/open_events")
        return self.spark.read.parquet(*map(str, folders)) if folders else None

    def _stage(self, frame: DataFrame, table: str, *partitions: str) -> None:
        frame.write.mode("overwrite").partitionBy(*partitions).parquet(str(self.lake.staging(table)))

    def _stage_ended(self, frame: DataFrame, table: str, date_column: str, lasting: str) -> None:
        """What ended goes to `table` by its date; what has no date yet goes to `lasting`."""
        self._stage(frame, table, date_column)
        undated = self.lake.staging(table) / f"{date_column}=__HIVE_DEFAULT_PARTITION__"
        if undated.is_dir():
            self.lake.staging(lasting).parent.mkdir(parents=True, exist_ok=True)
            undated.rename(self.lake.staging(lasting))

    # -- gold ----------------------------------------------------------------------------------------------------------

    def make_gold(self, *, is_rebuild: bool) -> None:
        """Facts that are due. The pointer remembers them until they are made, should this run die before."""
        pointer = self.lake.pointer()
        if pointer.run and (is_rebuild or self.sla_ms != pointer.sla_ms):
            pointer = msgspec.structs.replace(pointer, sla_ms=self.sla_ms, facts_due=EVERYTHING)
            self.lake.store_pointer(pointer)
        due = pointer.facts_due
        if due is None or not pointer.run:
            self.say("no facts are due")
            return
        self.say("making facts")
        self._gold(None if due == EVERYTHING else datetime.fromisoformat(due).replace(tzinfo=UTC))
        after = msgspec.structs.replace(pointer, facts_due=None)
        self.lake.store_pointer(after)
        self.lake.clean_up(after)

    def _gold(self, changed: datetime | None) -> None:
        """Facts of every date on which something changed, since `changed` or ever."""
        began = time.monotonic()
        since = None if changed is None else changed.date()
        jobs = read_jobs(self.spark, self.lake, since)
        attempts = read_attempts(self.spark, self.lake, since)
        moment = None if since is None else datetime.combine(since, time_of_day(), UTC)
        made = self._made(changed, FACTS, "queue_minute", "queue_hour")
        facts = gold.queue_facts(jobs, attempts, sla_ms=self.sla_ms, since=moment, made=made)
        self._stage(facts.repartition(1), "gold/queue", "unit", "window_date")
        self._stage(gold.error_facts(attempts, since=moment).repartition(1), "gold/error_signature_hour", "window_date")
        workers = gold.worker_facts(attempts, since=moment, made=self._made(changed, WORKERS, "worker_minute"))
        self._stage(workers.repartition(1), "gold/worker_minute", "window_date")
        for name in GOLD:
            kind, _, unit = name.partition("_")
            staged = (
                self.lake.staging("gold/queue") / f"unit={unit}"
                if kind == "queue"
                else self.lake.staging(f"gold/{name}")
            )
            self.lake.publish_dates(f"gold/{name}", staged, None if since is None else since.isoformat())
        self._timed("gold", began)

    def _made(self, until: datetime | None, schema: str, *tables: str) -> gold.Made | None:
        """What these tables say of the date of `until`; None when a date is not there: a run died replacing it."""
        if until is None:
            return None
        dates = {table: self.lake.path(f"gold/{table}") / f"window_date={until.date()}" for table in tables}
        if not all(date.is_dir() for date in dates.values()):
            return None
        read = self.spark.read.schema(_ddl(schema))
        facts = (
            read.parquet(str(date)).withColumn("unit", f.lit(table.rpartition("_")[2])) for table, date in dates.items()
        )
        return gold.Made(union(*facts), until)


def _read_silver(
    spark: SparkSession, lake: Lake, ended: str, lasting: str, schema: str, partition: str, since: date | None
) -> DataFrame:
    frames = []
    if folders := lake.committed(ended):
        read = spark.read.schema(_ddl(schema)).option("basePath", str(lake.path(ended)))
        frame = read.parquet(*map(str, folders))
        frames.append(frame if since is None else frame.where(f.col(partition) >= f.lit(since)))
    if folders := lake.committed(lasting):
        frames.append(spark.read.schema(_ddl(schema)).parquet(*map(str, folders)))
    # Only where there is nothing else: each of the dozens of scans of a run would ask Python for its no rows.
    return union(*frames) if frames else spark.createDataFrame([], _ddl(schema))


def read_batches(spark: SparkSession, lake: Lake, folders: Iterable[Path]) -> DataFrame:
    """The events of these batches of bronze."""
    read = spark.read.schema(_ddl(BRONZE)).option("basePath", str(lake.path("bronze/events")))
    return read.parquet(*map(str, folders))


def read_bronze(spark: SparkSession, lake: Lake) -> DataFrame | None:
    """Every event of the lake; None when there is none."""
    batches = lake.numbered("bronze/events")
    return read_batches(spark, lake, batches.values()) if batches else None


def read_jobs(spark: SparkSession, lake: Lake, since: date | None = None) -> DataFrame:
    """The jobs that ended on or after a date, or ever, and those that have not ended."""
    return _read_silver(spark, lake, "silver/jobs", "silver/open_jobs", JOBS, "finished_date", since)


def read_attempts(spark: SparkSession, lake: Lake, since: date | None = None) -> DataFrame:
    return _read_silver(spark, lake, "silver/attempts", "silver/open_attempts", ATTEMPTS, "ended_date", since)


def _hour(moment: Column) -> Column:
    """The hour of a moment as a text that can be compared."""
    return f.date_format(moment, "yyyy-MM-dd'T'HH:00:00")


def _earlier(due: str | None, since: str) -> str:
    return since if due is None else min(due, since)


def _ddl(table: str) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns(table).items())
