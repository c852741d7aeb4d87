"""From events to jobs and attempts. Pure: DataFrame in, DataFrame out.

A job's events, ordered by (epoch, seq), fall into *lives*: each begins with a push, the revival of a dead letter or
the repetition of a completed job, and has at most one end. A life falls into *runs*: each begins when the job is handed
to a worker. `told` marks every event with its life and run, `runs_of` makes one row of each run, `judged` says of each
how its life ended, and everything else follows from those rows. All of it is grouped by (queue, job_id), so the events
are shuffled once.

Order of input and repeated events change nothing. What is not over yet is told again together with the events to come:
`carried` gives the events to keep for that. So a history read in pieces gives the same rows as one read at once.

To use another event: say in the sets below what it means for a job, and take its particulars in `runs_of`.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from headrace.pipeline.schemas import ATTEMPTS, GAPS, JOBS, conform, millis_between

WAITING: Final = ("pushed", "retried", "delayed", "promoted", "released", "stalled", "dlq-retried", "waiting", "failed")
"""After these a job waits for a worker (a terminal failure is told apart before)."""
LIFE_EVENTS: Final = (*WAITING, "pulled", "completed", "expired", "removed", "waiting-children")
RUN_ENDS: Final = ("completed", "failed", "stalled", "released", "delayed", "waiting-children", "removed", "expired")
CLEARING: Final = ("drained", "obliterated")

_OUTCOMES: Final = {"completed": "completed", "failed": "dlq", "removed": "removed", "expired": "expired"}
_event: Final = "event"
_by_job: Final = ("queue", "job_id")


def _is(*words: str) -> Column:
    return f.col(_event).isin(*words)


def is_start() -> Column:
    return _is("pushed", "dlq-retried") | (_is("waiting") & (f.col("prev") == "completed"))


def is_trailing() -> Column:
    """Told of a job that had ended before."""
    return _is("removed") & f.coalesce(f.col("prev"), f.lit("")).isin("completed", "failed")


def is_terminal() -> Column:
    return _is("completed", "expired", "removed") | (_is("failed") & f.coalesce(f.col("terminal"), f.lit(False)))


def without_retracted(events: DataFrame) -> DataFrame:
    """Leave out what was taken back: a higher epoch begins again at a seq that a lower one had reached."""
    begins = events.groupBy("shard", "epoch").agg(f.min("seq").alias("begins"))
    higher = Window.partitionBy("shard").orderBy("epoch").rowsBetween(1, Window.unboundedFollowing)
    cuts = begins.select("shard", "epoch", f.min("begins").over(higher).alias("cut"))
    kept = events.join(f.broadcast(cuts), ["shard", "epoch"])
    return kept.where(f.col("cut").isNull() | (f.col("seq") < f.col("cut"))).drop("cut")


def clearings(events: DataFrame) -> DataFrame:
    """When whole queues were emptied: one row per queue with all such moments."""
    moment = f.struct("seq", "last_seq", "ts", (f.col(_event) == "drained").alias("only_waiting"))
    cleared = events.where(_is(*CLEARING))
    return cleared.groupBy("queue").agg(f.array_sort(f.collect_set(moment)).alias("clearings"))


def told(events: DataFrame) -> DataFrame:
    """The events of lives, each with its life and run, and whether its life is the last one and goes on."""
    ordered = Window.partitionBy(*_by_job).orderBy("epoch", "seq")
    so_far = ordered.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    whole = Window.partitionBy(*_by_job)
    kept = events.where(_is(*LIFE_EVENTS) & ~is_trailing() & (f.col("job_id") != ""))
    single = kept.withColumn("before", f.lag(f.struct("epoch", "seq")).over(ordered)).where(
        f.col("before").isNull() | (f.col("before") != f.struct("epoch", "seq"))
    )
    counted = single.select(
        "*",
        f.sum(is_start().cast("int")).over(so_far).alias("life"),
        f.sum(_is("pulled").cast("int")).over(so_far).alias("runs"),
        f.sum(is_start().cast("int")).over(whole).alias("lives"),
        f.max(f.when(is_terminal(), f.struct("epoch", "seq"))).over(whole).alias("last_end"),
        f.max(f.when(is_start(), f.struct("epoch", "seq"))).over(whole).alias("last_start"),
    )
    base = f.last(f.when(is_start(), f.col("runs")), ignorenulls=True).over(so_far)
    is_last = f.col("life") == f.col("lives")
    has_no_end = f.col("last_end").isNull() | (f.col("last_end") < f.col("last_start"))
    return counted.select(
        "*",
        (f.col("runs") - f.coalesce(base, f.lit(0))).alias("run"),
        is_last.alias("is_last"),
        (is_last & has_no_end).alias("goes_on"),
    )


def carried(told_events: DataFrame, judged_runs: DataFrame, original: list[str], *, has_clearings: bool) -> DataFrame:
    """The events that must be told again next time: those of lives that have not ended."""
    lasting = told_events.where("goes_on")
    if has_clearings:
        ended = judged_runs.where(f.col("goes_on") & f.col("finished_at").isNotNull()).select(*_by_job).distinct()
        lasting = lasting.join(ended, list(_by_job), "left_anti")
    return lasting.select(*original)


def runs_of(told_events: DataFrame) -> DataFrame:
    """One row per run; run 0 is what came before the first handing out."""

    def when(condition: Column, value: Column | str) -> Column:
        return f.when(condition, f.col(value) if isinstance(value, str) else value)

    ends_run = _is(*RUN_ENDS) & (f.col("run") > 0)
    place = f.struct("epoch", "seq").alias("place")
    return told_events.groupBy(*_by_job, "life", "run").agg(
        f.max("job_name").alias("job_name"),
        f.max("shard").alias("shard"),
        f.max("epoch").alias("epoch"),
        f.min("seq").alias("first_seq"),
        f.max(f.struct("epoch", "seq", _event)).alias("newest"),
        f.max("ts").alias("newest_ts"),
        f.min(when(is_start(), "ts")).alias("added_at"),
        f.max(when(_is("pushed"), "delay_ms")).alias("delay_ms"),
        f.max(when(_is("pushed"), "priority")).alias("priority"),
        f.max(when(_is("pushed"), "payload_bytes")).alias("payload_bytes"),
        f.max("parent_id").alias("parent_id"),
        f.max("group_id").alias("group_id"),
        f.max("tags").alias("tags"),
        f.min(when(_is("pulled"), "ts")).alias("started_at"),
        f.max(when(_is("pulled"), "worker")).alias("worker"),
        f.max(when(_is("pulled"), "attempt")).alias("attempt"),
        f.max(when(_is("waiting") & (f.col("prev") == "waiting-children"), "ts")).alias("unblocked_at"),
        f.min(when(ends_run, f.struct("epoch", "seq", "ts", _event))).alias("run_end"),
        f.min(when(is_terminal(), f.struct("epoch", "seq", "ts", _event))).alias("own_end"),
        f.sum(_is("failed").cast("int")).alias("failures"),
        f.sum(_is("stalled").cast("int")).alias("stalls"),
        f.sum(when(_is("retried"), "delay_ms")).alias("backoff_ms"),
        f.max(when(_is("failed") & f.col("error").isNotNull(), f.struct(place, "error"))).alias("failure"),
        f.first("is_last").alias("is_last"),
        f.first("goes_on").alias("goes_on"),
    )


def judged(runs: DataFrame, cleared: DataFrame | None = None) -> DataFrame:
    """Runs with what became of their life: `finished_at` and `outcome` are null while it lasts.

    A life ends with an event of its own, with the emptying of its queue, or at the latest before its successor begins.
    """
    lives = Window.partitionBy(*_by_job, "life")
    whole = runs.withColumns(
        {
            "own_end": f.min("own_end").over(lives),
            "newest": f.max("newest").over(lives),
            "newest_ts": f.max("newest_ts").over(lives),
            "life_seq": f.min("first_seq").over(lives),
        }
    )
    cleared_at = f.lit(None).cast("timestamp")
    if cleared is not None:
        whole = whole.join(f.broadcast(cleared), "queue", "left")
        cleared_at = f.expr(
            f"""try_element_at(filter(clearings, c -> c.last_seq >= newest.seq
                and (not c.only_waiting or newest.event in {WAITING})), 1).ts"""
        )
    superseded_at = f.when(~f.col("is_last"), f.col("newest_ts"))
    outcomes = f.create_map(*(f.lit(word) for pair in _OUTCOMES.items() for word in pair))
    ended = whole.withColumn("finished_at", f.coalesce(f.col("own_end.ts"), cleared_at, superseded_at))
    outcome = f.coalesce(outcomes[f.col("own_end.event")], f.when(f.col("finished_at").isNotNull(), f.lit("removed")))
    return ended.withColumn("outcome", outcome)


def jobs_of(judged_runs: DataFrame) -> DataFrame:
    """One row per life."""
    is_run = f.col("started_at").isNotNull()
    run_ms = millis_between(_run_ended_at(), f.col("started_at"))
    lives = judged_runs.groupBy(*_by_job, "life").agg(
        *(f.max(name).alias(name) for name in _SAME_OR_ONCE),
        f.min("first_seq").alias("first_seq"),
        f.max(f.coalesce(f.col("own_end.seq"), f.col("newest.seq"))).alias("last_seq"),
        f.min("added_at").alias("added_at"),
        f.min("started_at").alias("first_active_at"),
        f.max("started_at").alias("last_active_at"),
        f.sum((is_run & (f.coalesce(f.col("run_end.event"), f.lit("")) != "released")).cast("int")).alias("attempts"),
        f.sum("failures").alias("failures"),
        f.sum("stalls").alias("stalls"),
        f.max_by(run_ms, f.when(is_run, f.col("run"))).alias("run_ms"),
        f.sum(run_ms).alias("busy_ms"),
        f.sum("backoff_ms").alias("backoff_ms"),
        f.max_by("worker", f.when(f.col("worker").isNotNull(), f.col("run"))).alias("last_worker"),
        f.max("failure").getField("error").alias("last_error"),
    )
    return conform(_timed(lives), JOBS)


_SAME_OR_ONCE: Final = (
    "job_name", "shard", "epoch", "finished_at", "outcome", "delay_ms", "priority", "payload_bytes", "unblocked_at",
    "parent_id", "group_id", "tags",
)  # fmt: skip
"""Columns that all runs of a life agree on, or that only one of them has."""


def _run_ended_at() -> Column:
    return f.coalesce(f.col("run_end.ts"), f.col("finished_at"))


def _timed(lives: DataFrame) -> DataFrame:
    delay = f.make_dt_interval(secs=f.coalesce(f.col("delay_ms"), f.lit(0)) / 1000)
    ready_at = f.greatest(f.col("added_at") + delay, f.col("unblocked_at"))
    waited = f.greatest(f.lit(0), millis_between(f.col("first_active_at"), ready_at))
    lasted = f.greatest(f.lit(0), millis_between(f.col("finished_at"), f.col("added_at")))
    is_whole = f.col("added_at").isNotNull()
    return lives.select(
        "*",
        f.when(is_whole & f.col("first_active_at").isNotNull(), waited).alias("wait_ms"),
        f.when(is_whole & f.col("finished_at").isNotNull(), lasted).alias("total_ms"),
        signature(f.col("last_error")).alias("error_signature"),
        f.to_date("finished_at").alias("finished_date"),
    )


def attempts_of(judged_runs: DataFrame) -> DataFrame:
    """One row per handing out; `ended_at` and `outcome` are null while it lasts."""
    error = f.col("failure.error")
    outcome = f.coalesce(f.col("run_end.event"), f.when(f.col("finished_at").isNotNull(), f.lit("removed")))
    named = judged_runs.where(f.col("started_at").isNotNull()).withColumns(
        {
            "ended_at": _run_ended_at(),
            "outcome": outcome,
            "round": f.col("run"),
            "error": error,
            "error_signature": signature(error),
        }
    )
    ended = named.withColumns(
        {
            "run_ms": millis_between(f.col("ended_at"), f.col("started_at")),
            "ended_date": f.to_date("ended_at"),
        }
    )
    return conform(ended, ATTEMPTS)


def gaps_of(events: DataFrame) -> DataFrame:
    """What the log itself says is missing."""
    gaps = events.where(_is("gap")).select(
        "shard", "epoch", "first_seq", "last_seq", f.col("seq").alias("reported_seq"), f.col("ts").alias("reported_at")
    )
    return conform(gaps.distinct(), GAPS)


def late_of(events: DataFrame) -> DataFrame:
    """What was told of jobs after their end: dead letters and completed jobs that were removed."""
    return events.where(is_trailing()).dropDuplicates(["shard", "epoch", "seq"])


def signature(error: Column) -> Column:
    """An error without what differs from job to job: ids, numbers, quoted text. Equal causes get equal signatures."""
    first_line = f.substring(f.split(error, "\n")[0], 1, 500)
    without_ids = f.regexp_replace(first_line, r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F-]{22}", "<id>")
    without_text = f.regexp_replace(without_ids, r"'[^']*'|\"[^\"]*\"", "<text>")
    without_hex = f.regexp_replace(without_text, r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{12,}\b", "<hex>")
    return f.regexp_replace(without_hex, r"\d+(?:[.,:]\d+)*", "<n>")
