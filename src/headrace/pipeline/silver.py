"""From events to jobs and attempts. Pure: DataFrame in, DataFrame out.

A job's events, ordered by (epoch, seq), fall into *lives*: each begins with a push, the revival of a dead letter or
the repetition of a completed job, and has at most one end. A life falls into *runs*: each begins when the job is handed
to a worker. `told` marks every event with its life and run, `runs_of` makes one row of each run, `lives_of` one of each
life, `judged` says how it ended, and everything else follows from those rows. All of it is grouped by (queue, job_id),
so the events are shuffled once.

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
_sorted_by_job: Final = ("job_hash", *_by_job)
"""Spark compares the first eight bytes of a sort key at once and the rest slowly: those of a queue's name, or of an id
that begins with the time, are the same for most rows."""


def _is(*words: str) -> Column:
    return f.col(_event).isin(*words)


def is_start() -> Column:
    return _is("pushed", "dlq-retried") | (_is("waiting") & (f.col("prev") == "completed"))


def is_trailing() -> Column:
    """Told of a job that had ended before."""
    return _is("removed") & f.coalesce(f.col("prev"), f.lit("")).isin("completed", "failed")


def is_terminal() -> Column:
    return _is("completed", "expired", "removed") | (_is("failed") & f.coalesce(f.col("terminal"), f.lit(False)))


def is_told() -> Column:
    """Part of the life of a job."""
    return _is(*LIFE_EVENTS) & ~is_trailing() & (f.col("job_id") != "")


def _place() -> Column:
    return f.struct("epoch", "seq")


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
    """The events of lives, each once, with the numbers of its life and run: both rise with (epoch, seq).

    The sums run over ranges and not over rows, so that a repeated event gets the same numbers as its original.
    """
    ordered = Window.partitionBy(*_sorted_by_job).orderBy("epoch", "seq")
    kept = events.where(is_told()).withColumn("job_hash", f.xxhash64(*_by_job))
    counted = kept.select(
        "*",
        f.sum(is_start().cast("int")).over(ordered).alias("life"),
        f.sum(_is("pulled").cast("int")).over(ordered).alias("run"),
        f.lag(_place()).over(ordered).alias("before"),
    )
    return counted.where(f.col("before").isNull() | (f.col("before") != _place())).drop("before")


def runs_of(told_events: DataFrame) -> DataFrame:
    """One row per run. What came before the first handing out of a life has a row of its own, without `started_at`."""

    def when(condition: Column, value: Column | str) -> Column:
        return f.when(condition, f.col(value) if isinstance(value, str) else value)

    moment = f.struct("epoch", "seq", "ts", _event)
    return told_events.groupBy(*_sorted_by_job, "life", "run").agg(
        f.max("job_name").alias("job_name"),
        f.max("shard").alias("shard"),
        f.min(_place()).alias("oldest"),
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
        f.min(when(_is(*RUN_ENDS), moment)).alias("run_end"),
        f.min(when(is_terminal(), moment)).alias("own_end"),
        f.sum(_is("failed").cast("int")).alias("failures"),
        f.sum(_is("stalled").cast("int")).alias("stalls"),
        f.sum(when(_is("retried"), "delay_ms")).alias("backoff_ms"),
        f.max(when(_is("failed") & f.col("error").isNotNull(), f.struct("epoch", "seq", "error"))).alias("failure"),
    )


def lives_of(runs: DataFrame) -> DataFrame:
    """One row per life, with its handings out in `runs` in their order."""
    is_run = f.col("started_at").isNotNull()
    run = f.struct(
        "run", "started_at", "worker", "attempt", f.col("oldest.seq").alias("first_seq"),
        f.col("run_end.ts").alias("ended_at"), f.col("run_end.event").alias("outcome"),
        f.col("failure.error").alias("error"),
    )  # fmt: skip
    return runs.groupBy(*_sorted_by_job, "life").agg(
        *(f.max(name).alias(name) for name in _SAME_OR_ONCE),
        *(f.sum(name).alias(name) for name in ("failures", "stalls", "backoff_ms")),
        f.min("oldest").alias("oldest"),
        f.max("newest").alias("newest"),
        f.max("newest_ts").alias("newest_ts"),
        f.min("added_at").alias("added_at"),
        f.min("own_end").alias("own_end"),
        f.max("failure").getField("error").alias("last_error"),
        f.array_sort(f.collect_list(f.when(is_run, run))).alias("runs"),
    )


def judged(lives: DataFrame, cleared: DataFrame | None = None) -> DataFrame:
    """Lives with what became of them: `finished_at` and `outcome` are null while they last.

    A life ends with an event of its own, with the emptying of its queue, or at the latest before its successor begins.
    """
    is_last = f.max("life").over(Window.partitionBy(*_sorted_by_job)) == f.col("life")
    whole = lives.withColumn("is_last", is_last)
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
    return ended.withColumn("outcome", outcome).drop("clearings")


def lasting(judged_lives: DataFrame) -> DataFrame:
    """The jobs that have not ended, with the place in the log where their last life began."""
    return judged_lives.where(f.col("finished_at").isNull()).select(*_by_job, f.col("oldest").alias("since"))


def carried(events: DataFrame, lasting_jobs: DataFrame) -> DataFrame:
    """The events that must be told again next time: those of lives that have not ended."""
    kept = events.where(is_told()).join(lasting_jobs, list(_by_job))
    return kept.where(_place() >= f.col("since")).drop("since")


def jobs_of(judged_lives: DataFrame) -> DataFrame:
    """One row per life."""
    first, last = f.get("runs", f.lit(0)), f.element_at("runs", -1)
    has_run = f.size("runs") > 0
    ended_at = f.coalesce(last.ended_at, f.col("finished_at"))
    ms = "coalesce(unix_millis(coalesce(r.ended_at, finished_at)) - unix_millis(r.started_at), 0)"
    lives = judged_lives.select(
        "*",
        f.col("oldest.seq").alias("first_seq"),
        f.col("newest.epoch").alias("epoch"),
        f.coalesce(f.col("own_end.seq"), f.col("newest.seq")).alias("last_seq"),
        f.when(has_run, first.started_at).alias("first_active_at"),
        f.when(has_run, last.started_at).alias("last_active_at"),
        f.expr("size(filter(runs, r -> not r.outcome <=> 'released'))").alias("attempts"),
        f.when(has_run, millis_between(ended_at, last.started_at)).alias("run_ms"),
        f.when(has_run, f.expr(f"aggregate(runs, 0L, (sum, r) -> sum + {ms})")).alias("busy_ms"),
        f.expr("try_element_at(filter(runs.worker, w -> w is not null), -1)").alias("last_worker"),
    )
    return conform(_timed(lives), JOBS)


_SAME_OR_ONCE: Final = (
    "job_name", "shard", "delay_ms", "priority", "payload_bytes", "unblocked_at", "parent_id", "group_id", "tags",
)  # fmt: skip
"""Columns that all runs of a life agree on, or that only one of them has."""


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


def attempts_of(judged_lives: DataFrame) -> DataFrame:
    """One row per handing out; `ended_at` and `outcome` are null while it lasts, `ended_date` while its life lasts."""
    is_over = f.col("finished_at").isNotNull()
    each = judged_lives.select(
        *_by_job, "job_name", "shard", "finished_at", "runs", f.col("oldest.seq").alias("life_seq"),
        f.col("newest.epoch").alias("epoch"), f.posexplode("runs").alias("place", "one"),
    )  # fmt: skip
    named = each.select(
        *_by_job, "job_name", "shard", "epoch", "life_seq", "finished_at",
        (f.col("place") + 1).alias("round"),
        f.get("runs", f.col("place") - 1).started_at.alias("previous_at"),
        *(f.col(f"one.{name}").alias(name) for name in ("attempt", "worker", "started_at", "first_seq", "error")),
        f.coalesce(f.col("one.ended_at"), f.col("finished_at")).alias("ended_at"),
        f.coalesce(f.col("one.outcome"), f.when(is_over, f.lit("removed"))).alias("outcome"),
    )  # fmt: skip
    ended = named.select(
        "*",
        millis_between(f.col("ended_at"), f.col("started_at")).alias("run_ms"),
        signature(f.col("error")).alias("error_signature"),
        f.when(is_over, f.to_date("ended_at")).alias("ended_date"),
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
