"""Redriving dead letters: selected by SQL over silver, enqueued as new jobs with their data, once per name.

The lake knows what failed and why, the server has the data: what both know is enqueued. The new job's id is
derived from the old queue and id and the name of the redrive, so repeating a redrive under its name adds nothing.
What was sent is recorded in `audit/redrive` of the lake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f
from pyspark.storagelevel import StorageLevel

from headrace.client.urls import default_url
from headrace.errors import HeadraceError
from headrace.model import DAY_MS
from headrace.notation import counted
from headrace.pipeline.lake import Lake
from headrace.pipeline.runs import read_jobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SLICE: Final = 1000
_MAX_GROUPS: Final = 100
"""Groups that are listed one by one: there may be as many as dead letters."""
_REMEMBERED_MS: Final = 30 * DAY_MS
"""Longer than dead letters are kept: what is repeated meanwhile must find its ids known."""


class Chosen(msgspec.Struct):
    """Jobs of a queue with the same error; `gone` of them are no dead letters any more."""

    queue: str
    signature: str | None
    jobs: int
    gone: int


class Counts(msgspec.Struct):
    """What a redrive would take: its largest groups, and how many groups and jobs there are in all."""

    chosen: list[Chosen]
    groups: int
    jobs: int
    gone: int


def lines(counts: Counts) -> Iterator[str]:
    for row in counts.chosen:
        yield f"{row.jobs:>8,}  {row.queue:<24}  {row.signature or '(no error text)'}"
    if more := counts.groups - len(counts.chosen):
        left = counts.jobs - sum(row.jobs for row in counts.chosen)
        yield f"{left:>8,}  in {counted(more, 'more group')} of a queue and an error"
    if counts.gone:
        yield f"{counts.gone:,} of them are no dead letters of the server any more: their data is gone"
    if not counts.groups:
        yield "no dead letter fits"


def _reason(error: Exception) -> str:
    """What Spark has against it, without its plan, which is a page for every query."""
    first = next((line for line in str(error).splitlines() if line.strip()), "Spark does not say why")
    return first.partition(" SQLSTATE: ")[0]


class Redrive:
    """One redrive: what it would take, and doing it."""

    def __init__(self, spark: SparkSession, lake: Lake, name: str, where: str, url: str | None) -> None:
        self._spark = spark
        self._lake = lake
        self._name = name
        self._url = url or default_url()
        self._chosen = self._choose(where).persist(StorageLevel.DISK_ONLY)

    def _choose(self, where: str) -> DataFrame:
        by_job = Window.partitionBy("queue", "job_id")
        # Only the first life of a job has it.
        priority = f.max_by("priority", f.when(f.col("priority").isNotNull(), f.col("last_seq"))).over(by_job)
        newest = f.row_number().over(by_job.orderBy(f.desc("last_seq")))
        jobs = read_jobs(self._spark, self._lake).withColumn("priority", priority)
        dead = jobs.where(f.col("outcome") == "dlq").withColumn("newest", newest)
        failed = dead.where("newest = 1").drop("newest")
        try:
            wanted = failed.where(where)
        except (AnalysisException, ParseException) as error:
            raise HeadraceError(f"--where is not a condition on the columns of silver/jobs: {_reason(error)}") from None
        letters = self._spark.read.format("headrace").options(kind="dlq", url=self._url).load()
        data = letters.select("queue", "job_id", "job_name", "data", f.lit(True).alias("is_letter"))
        chosen = wanted.select("queue", "job_id", f.col("error_signature").alias("signature"), "priority")
        return chosen.join(data, ["queue", "job_id"], "left")

    def counts(self) -> Counts:
        """How many jobs, by queue and error, and how many of them the server has no data of any more."""
        groups = self._chosen.groupBy("queue", "signature").agg(
            f.count("*").alias("jobs"), f.sum(f.col("is_letter").isNull().cast("int")).alias("gone")
        )
        rows = groups.orderBy(f.desc("jobs"), "queue", "signature").limit(_MAX_GROUPS).collect()
        chosen = [Chosen(row["queue"], row["signature"], row["jobs"], row["gone"]) for row in rows]
        (total,) = groups.agg(f.count("*"), f.sum("jobs"), f.sum("gone")).collect()
        return Counts(chosen, *(number or 0 for number in total))

    def send(self, *, to_queue: str | None, rate: float | None, say: Callable[[str], None]) -> int:
        """Enqueue them, at most `rate` a second; how many."""
        target = f.lit(to_queue) if to_queue else f.col("queue")
        rows = (
            self._chosen.where("is_letter")
            .select(target.alias("queue"), f.col("queue").alias("origin"), "job_id", "job_name", "priority", "data")
            .orderBy("queue", "origin", "job_id")
        )
        options = {
            "url": self._url,
            "idColumns": "origin, job_id",
            "pipeline": f"redrive:{self._name}",
            "idTtl": str(_REMEMBERED_MS),
            "dataColumn": "data",
        }
        sent = 0
        for part in self._parts(rows, rate):
            began = time.monotonic()
            count = part.count()
            part.write.format("headrace").mode("append").options(**options).save()
            sent += count
            if rate is not None:
                say(f"{sent:,} jobs")
                time.sleep(max(0.0, count / rate - (time.monotonic() - began)))
        self._write_down(rows)
        return sent

    def _parts(self, rows: DataFrame, rate: float | None) -> list[DataFrame]:
        """All at once, or in pieces of about a second when there is a rate to keep."""
        if rate is None:
            return [rows]
        kept = rows.persist(StorageLevel.DISK_ONLY)
        size = max(1, min(_SLICE, int(rate)))
        count = -(-kept.count() // size)
        return kept.randomSplit([1.0] * count, seed=7) if count > 1 else [kept]

    def _write_down(self, rows: DataFrame) -> None:
        audit = rows.select(
            f.lit(self._name).alias("redrive"),
            f.lit(datetime.now(UTC)).alias("sent_at"),
            "queue",
            f.col("job_id").alias("old_job_id"),
        )
        audit.write.mode("append").parquet(str(self._lake.path("audit/redrive")))
