"""From jobs and attempts to facts: per queue and minute, hour or day; errors by signature; workers. Pure.

Percentiles are nearest rank (`percentile_disc`: the smallest value that at least p of all values do not exceed), always
computed from the jobs of the window and never from other percentiles; `..._n` beside them says of how many values.

`since` leaves out windows that begin before it. The jobs and attempts given must then contain all that ended at or
after `since` and all that have not ended; older ones may be left out, which is what makes a recomputation cheap.

`made` are facts of an earlier run: where nothing has changed, the most expensive ones are taken over from them:
percentiles, and attempts split into minutes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from headrace.pipeline.schemas import ERRORS, FACTS, WORKERS, conform, union

UNITS: Final = ("minute", "hour", "day")
_WINDOW: Final = ("unit", "queue", "window_start")
_MINUTE_MS: Final = 60_000
_MAX_DAYS: Final = 7
"""So much of an attempt is split into minutes, its end: a clock that jumps from 1970 to today is no 30 million rows."""
_MEASURES: Final = ("wait", "run", "total")
_RANKS: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Made(NamedTuple):
    """Facts of an earlier run for minutes and hours of a date. Those of windows before `until`, a full hour, hold."""

    facts: DataFrame
    until: datetime

    def settled(self) -> DataFrame:
        return self.facts.where(f.col("window_start") < f.lit(self.until))


def _count(condition: Column) -> Column:
    return f.sum(condition.cast("bigint"))


def queue_facts(
    jobs: DataFrame,
    attempts: DataFrame,
    *,
    sla_ms: dict[str, int] | None = None,
    since: datetime | None = None,
    made: Made | None = None,
) -> DataFrame:
    """What happened in each queue per minute, hour and day (`unit`).

    Counts are made per minute and added up. Percentiles are computed for every window from the jobs themselves.
    `sla_ms` has the longest wait that is in order by queue, "*" for all others.
    """
    targets = _targets(sla_ms or {})
    minutes = _minutes(jobs, attempts, targets, since)
    counted = (
        _by_unit(minutes, "minute")
        .groupBy(*_WINDOW)
        .agg(
            *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in _COUNTS),
            f.coalesce(f.sum(f.element_at("repeats", f.col("unit"))), f.lit(0)).alias("repeats"),
        )
    )
    measured = counted.join(_percentiles(jobs, attempts, since, made), list(_WINDOW), "left")
    whole = _with_backlog(measured, jobs, since)
    return conform(whole.select("*", *_ratios(targets)), f"unit string, {FACTS}")


def _by_unit(frame: DataFrame, moment: str) -> DataFrame:
    """Every row once per unit, with the window that its moment lies in."""
    windows = f.array(*(f.struct(f.lit(u).alias("unit"), f.date_trunc(u, moment).alias("window_start")) for u in UNITS))
    return frame.withColumn("w", f.explode(windows)).select("*", "w.unit", "w.window_start").drop("w")


def _known(frame: DataFrame, moment: str, since: datetime | None) -> DataFrame:
    return frame.where(f.col(moment).isNotNull() if since is None else f.col(moment) >= f.lit(since))


def _minutes(jobs: DataFrame, attempts: DataFrame, target: Column, since: datetime | None) -> DataFrame:
    """What is counted, per queue and minute."""

    def per_minute(frame: DataFrame, moment: str, *counts: Column) -> DataFrame:
        known = _known(frame, moment, since)
        return known.groupBy("queue", f.date_trunc("minute", moment).alias("minute")).agg(*counts)

    is_done = f.col("outcome").isin("completed", "failed", "stalled")
    repeats = {u: _count(f.date_trunc(u, "previous_at") == f.date_trunc(u, "started_at")) for u in UNITS}
    return union(
        per_minute(jobs, "added_at", f.count("*").alias("added"), f.count("*").alias("came")),
        per_minute(
            jobs, "first_active_at", f.count("wait_ms").alias("wait_n"),
            _count(f.col("wait_ms") > target).alias("sla_breaches"),
        ),
        per_minute(
            jobs, "finished_at", f.count("added_at").alias("went"), f.count(_total_ms()).alias("total_n"),
            *(_count(f.col("outcome") == word).alias(word) for word in ("completed", "dlq", "removed", "expired")),
        ),
        per_minute(
            attempts, "started_at", f.count("*").alias("started"), _count(f.col("round") > 1).alias("retried"),
            f.create_map(*(part for u in UNITS for part in (f.lit(u), repeats[u]))).alias("repeats"),
        ),
        per_minute(
            attempts, "ended_at", _count(f.col("outcome") == "failed").alias("failed_attempts"),
            _count(f.col("outcome") == "stalled").alias("stalled"), _count(is_done).alias("ended"),
            f.count(_run_ms()).alias("run_n"),
        ),
    )  # fmt: skip


_COUNTS: Final = (
    "added", "started", "completed", "failed_attempts", "retried", "dlq", "stalled", "removed", "expired",
    "wait_n", "run_n", "total_n", "sla_breaches", "ended", "came", "went",
)  # fmt: skip


def _total_ms() -> Column:
    """How long a job took that was ended by work."""
    return f.when(f.col("outcome").isin("completed", "dlq"), f.col("total_ms"))


def _run_ms() -> Column:
    return f.when(f.col("outcome").isin("completed", "failed", "stalled"), f.col("run_ms"))


def _percentiles(jobs: DataFrame, attempts: DataFrame, since: datetime | None, made: Made | None = None) -> DataFrame:
    """The percentiles of waits, runs and totals, a row per window."""
    values = union(
        _values("wait", jobs, "first_active_at", f.col("wait_ms"), since),
        _values("run", attempts, "ended_at", _run_ms(), since),
        _values("total", jobs, "finished_at", _total_ms(), since),
    )
    ranks = ", ".join(map(str, _RANKS.values()))
    # One call for all ranks: each would count all values by itself.
    picked = f.expr(f"percentile_disc(array({ranks})) WITHIN GROUP (ORDER BY ms)")
    windows = _by_unit(values, "moment")
    if made is not None:
        windows = windows.where((f.col("unit") == "day") | (f.col("window_start") >= f.lit(made.until)))
    ranked = windows.groupBy(*_WINDOW, "measure").agg(picked.alias("ranked"))
    named = {f"{what}_{p}": (what, n) for what in _MEASURES for n, p in enumerate(_RANKS)}
    found = ranked.groupBy(*_WINDOW).agg(
        *(
            f.max(f.when(f.col("measure") == what, f.get("ranked", f.lit(n)))).cast("bigint").alias(name)
            for name, (what, n) in named.items()
        )
    )
    if made is None:
        return found
    return union(found, made.settled().select(*_WINDOW, *named))


def _values(measure: str, frame: DataFrame, moment: str, ms: Column, since: datetime | None) -> DataFrame:
    known = _known(frame, moment, since).select("queue", f.col(moment).alias("moment"), ms.alias("ms"))
    return known.where(f.col("ms").isNotNull()).withColumn("measure", f.lit(measure))


def _with_backlog(facts: DataFrame, jobs: DataFrame, since: datetime | None) -> DataFrame:
    """Jobs that were there at the end of the window: all that came minus all that went, from the very beginning."""
    so_far = Window.partitionBy("unit", "queue").orderBy("window_start")
    change = f.sum(f.col("came") - f.col("went")).over(so_far)
    if since is None:
        return facts.withColumn("backlog_end", change)
    older = jobs.where(f.col("added_at") < f.lit(since)).groupBy("queue").agg(f.count("*").alias("older"))
    joined = facts.join(f.broadcast(older), "queue", "left")
    return joined.withColumn("backlog_end", change + f.coalesce(f.col("older"), f.lit(0)))


def _ratios(target: Column) -> list[Column]:
    failed = f.col("failed_attempts") + f.col("stalled")
    lives = f.col("started") - f.col("repeats")
    return [
        f.when(f.col("ended") > 0, failed / f.col("ended")).alias("failure_rate"),
        f.when(lives > 0, f.col("started") / lives).alias("retry_amplification"),
        target.alias("sla_target_ms"),
        f.to_date("window_start").alias("window_date"),
    ]


def _targets(sla_ms: dict[str, int]) -> Column:
    """The SLA of the row's queue; null where it has none."""
    named = {queue: ms for queue, ms in sla_ms.items() if queue != "*"}
    fallback = f.lit(sla_ms.get("*")).cast("bigint")
    if not named:
        return fallback
    by_queue = f.create_map(*(f.lit(part) for pair in named.items() for part in pair))
    return f.coalesce(by_queue[f.col("queue")].cast("bigint"), fallback)


def error_facts(attempts: DataFrame, *, since: datetime | None = None) -> DataFrame:
    """Failed attempts by the signature of their error, per queue and hour."""
    failed = attempts.where(f.col("error_signature").isNotNull()).withColumn(
        "window_start", f.date_trunc("hour", "ended_at")
    )
    if since is not None:
        failed = failed.where(f.col("window_start") >= f.lit(since))
    first = f.min(f.struct("ended_at", "first_seq", "job_id", "error"))
    grouped = failed.groupBy("queue", "window_start", f.col("error_signature").alias("signature")).agg(
        f.count("*").alias("count"),
        f.count_distinct("job_id").alias("jobs"),
        f.min("ended_at").alias("first_seen"),
        f.max("ended_at").alias("last_seen"),
        first.getField("job_id").alias("sample_job_id"),
        first.getField("error").alias("sample_error"),
    )
    return conform(
        grouped.select(
            "*", f.xxhash64("signature").alias("signature_id"), f.to_date("window_start").alias("window_date")
        ),
        ERRORS,
    )


def worker_facts(attempts: DataFrame, *, since: datetime | None = None, made: Made | None = None) -> DataFrame:
    """How busy each worker was per minute. An attempt counts in every minute that it touches, for its part of it.

    One that lasted longer than _MAX_DAYS counts in the last of them.
    `slots` is how many jobs the worker had at once at most on that day: the log does not record its concurrency.
    """
    done = attempts.where(
        f.col("worker").isNotNull() & f.col("ended_at").isNotNull() & (f.col("ended_at") >= f.col("started_at"))
    )
    earliest = f.col("ended_at") - f.expr(f"INTERVAL {_MAX_DAYS} DAY")
    done = done.withColumn("started_at", f.greatest(f.col("started_at"), earliest))
    if made is not None:
        done = done.where(f.col("ended_at") >= f.lit(made.until))
    busy = _busy(done, since if made is None else made.until)
    slots = _slots(done, since)
    if made is not None:
        # All that a worker held before was counted then: attempts that changed since began later.
        settled = made.settled().withColumn("window_date", f.to_date("window_start"))
        busy = union(busy, settled.select(*busy.columns))
        both = union(slots, settled.select(*slots.columns))
        slots = both.groupBy("worker", "window_date").agg(f.max("slots").alias("slots"))
    joined = busy.join(slots, ["worker", "window_date"])
    return conform(
        joined.withColumn("utilisation", f.col("busy_ms") / (f.col("slots") * _MINUTE_MS)),
        WORKERS,
    )


def _busy(done: DataFrame, since: datetime | None) -> DataFrame:
    """How long each worker was busy per minute, and with how many jobs."""
    minute = f.explode(
        f.sequence(
            f.date_trunc("minute", "started_at"), f.date_trunc("minute", "ended_at"), f.expr("INTERVAL 1 MINUTE")
        )
    )
    split = done.select("worker", "queue", "job_id", "started_at", "ended_at", minute.alias("window_start"))
    if since is not None:
        split = split.where(f.col("window_start") >= f.lit(since))
    opens, closes = f.unix_millis("window_start"), f.unix_millis("window_start") + _MINUTE_MS
    overlap = f.least(f.unix_millis("ended_at"), closes) - f.greatest(f.unix_millis("started_at"), opens)
    busy = split.groupBy("worker", "window_start").agg(
        f.sum(overlap).alias("busy_ms"), f.count_distinct("queue", "job_id").alias("jobs")
    )
    return busy.withColumn("window_date", f.to_date("window_start"))


def _slots(done: DataFrame, since: datetime | None) -> DataFrame:
    """The most jobs that each worker had at once per day, by counting starts and ends in their order."""
    first, last = f.date_trunc("day", "started_at"), f.date_trunc("day", "ended_at")
    nights = f.sequence(first + f.expr("INTERVAL 1 DAY"), last, f.expr("INTERVAL 1 DAY"))
    edges = union(
        done.select("worker", f.col("started_at").alias("at"), f.lit(1).alias("change")),
        done.select("worker", f.col("ended_at").alias("at"), f.lit(-1).alias("change")),
        # A day begins with the jobs that the night before has left.
        done.where(first < last).select("worker", f.explode(nights).alias("at"), f.lit(0).alias("change")),
    )
    in_order = Window.partitionBy("worker").orderBy("at", "change").rowsBetween(Window.unboundedPreceding, 0)
    held = edges.select("worker", f.to_date("at").alias("window_date"), f.sum("change").over(in_order).alias("held"))
    most = held.groupBy("worker", "window_date").agg(f.greatest(f.lit(1), f.max("held")).alias("slots"))
    return most if since is None else most.where(f.col("window_date") >= f.to_date(f.lit(since)))
