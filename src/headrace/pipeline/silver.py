"""From events to jobs and attempts. Pure: DataFrame in, DataFrame out.

A job's events, ordered by seq, fall into *lives*: each begins with a push, the retry of a dead letter or
the rerun of a completed job, and has at most one end; events of a job after its end belong to another life,
whose beginning is not known. A life falls into *runs*: each begins when a worker claims the job. `by_life` numbers
the lives, `lives_of` makes one row of each, with its events as a sorted list from which the details are taken,
`judged` says how it ended, and everything else follows from those rows. The events are shuffled once, by (queue,
job_id), and aggregated once.

The order of input and duplicate events change nothing. Open lives are processed again together with later events:
`carried` returns the events to keep for that. So a history read in pieces gives the same rows as one read at once.

To use another event: say in the sets below what it means for a job, and take its details in `_PARTICULARS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from headrace.pipeline.schemas import ATTEMPTS, GAPS, JOBS, conform, millis_between

WAITING: Final = ("pushed", "retried", "delayed", "promoted", "released", "stalled", "dlq-retried", "waiting", "failed")
"""After these a job waits for a worker (terminal failures are sorted out before)."""
LIFE_EVENTS: Final = (*WAITING, "pulled", "completed", "expired", "removed", "waiting-children")
RUN_ENDS: Final = ("completed", "failed", "stalled", "released", "delayed", "waiting-children", "removed", "expired")
GIVEN_BACK: Final = ("released", "delayed", "waiting-children")
"""Ends of runs that were no attempts: the job goes on later, and the server counts none."""
CLEARING: Final = ("drained", "obliterated")

_event: Final = "event"
_by_job: Final = ("queue", "job_id")
_sorted_by_job: Final = ("job_hash", *_by_job)
"""Spark compares the first eight bytes of a sort key at once and the rest slowly: those of a queue's name, or of an id
that begins with the time, are the same for most rows."""
_KEPT: Final = (
    "epoch", "seq", "ts", _event, "prev", "terminal", "shard", "job_name", "attempt", "worker", "priority", "delay_ms",
    "error", "parent_id", "group_id", "tags", "payload_bytes",
)  # fmt: skip
"""The fields of an event that silver is made from. Lists of events are sorted by the first two."""
_SAME: Final = ("shard", "job_name", "parent_id", "group_id", "tags")
"""What all events of a life agree on, as far as they say it."""


def _is(*words: str) -> Column:
    return f.col(_event).isin(*words)


def is_start() -> Column:
    return _is("pushed", "dlq-retried") | (_is("waiting") & f.col("prev").eqNullSafe("completed"))


def is_trailing() -> Column:
    """The removal of a job that had ended before."""
    return _is("removed") & f.coalesce(f.col("prev"), f.lit("")).isin("completed", "failed")


def is_terminal() -> Column:
    return _is("completed", "expired", "removed") | (_is("failed") & f.coalesce(f.col("terminal"), f.lit(False)))


def is_of_life() -> Column:
    """Part of the life of a job."""
    return _is(*LIFE_EVENTS) & ~is_trailing() & (f.col("job_id") != "")


def without_retracted(events: DataFrame) -> DataFrame:
    """Leave out withdrawn events: a higher epoch restarts at a seq that a lower one had reached."""
    begins = events.groupBy("shard", "epoch").agg(f.min("seq").alias("begins"))
    higher = Window.partitionBy("shard").orderBy("epoch").rowsBetween(1, Window.unboundedFollowing)
    cuts = begins.select("shard", "epoch", f.min("begins").over(higher).alias("cut"))
    kept = events.join(f.broadcast(cuts), ["shard", "epoch"])
    return kept.where(f.col("cut").isNull() | (f.col("seq") < f.col("cut"))).drop("cut")


def clearings(events: DataFrame) -> DataFrame:
    """When whole queues were emptied: one row per queue with all such moments."""
    moment = f.struct("seq", "first_seq", "last_seq", "ts", (f.col(_event) == "drained").alias("only_waiting"))
    cleared = events.where(_is(*CLEARING))
    return cleared.groupBy("queue").agg(f.array_sort(f.collect_set(moment)).alias("clearings"))


def by_life(events: DataFrame) -> DataFrame:
    """The events of lives, each with the number of its life, which rises with seq, and where the next one begins.

    The sums run over ranges and not over rows, so that a repeated event gets the same number as its original. No two
    others have the same seq: a log that was taken back is cut before. The next of a repeated beginning may be itself.
    """
    kept = events.where(is_of_life()).select(
        f.xxhash64(*_by_job).alias("job_hash"), *_by_job, f.struct(*_KEPT, *_marks()).alias("one")
    )
    ordered = Window.partitionBy(*_sorted_by_job).orderBy("one.seq")
    before = ordered.rangeBetween(Window.unboundedPreceding, -1)
    starts = f.sum(f.col("one.is_start").cast("int")).over(ordered)
    ends = f.coalesce(f.sum(f.col("one.is_end").cast("int")).over(before), f.lit(0))
    by_job = f"PARTITION BY {', '.join(_sorted_by_job)} ORDER BY one.seq"
    later = f.expr(f"lead(if(one.is_start, one.seq, null)) IGNORE NULLS OVER ({by_job})")
    return kept.select(*_sorted_by_job, (starts + ends).alias("life"), later.alias("next_start"), "one")


def _marks() -> Iterator[Column]:
    """What is asked of every event in a list: to compare words again and again is slow."""
    yield is_start().alias("is_start")
    yield _is("pulled").alias("is_pull")
    yield _is(*RUN_ENDS).alias("is_run_end")
    yield is_terminal().alias("is_end")
    yield _is("failed", "stalled", "retried", "waiting", "delayed", "promoted").alias("is_aside")


def lives_of(numbered: DataFrame) -> DataFrame:
    """One row per life, with its events and its claims (`runs`) in their order.

    A `removed` that stands alone and does not say what the job was before (none on Valkey does) is no life: the job may
    have ended in an earlier run.
    """
    collected = numbered.groupBy(*_sorted_by_job, "life").agg(
        f.max("next_start").alias("next_start"),
        *(f.max(f"one.{name}").alias(name) for name in _SAME),
        f.sort_array(f.collect_list("one")).alias("repeated"),
    )
    # Asked of the list as it is: behind the filter below, Spark would filter once more to ask.
    newest = f.element_at("repeated", -1)
    is_more = f.get("repeated", f.lit(0)).seq != newest.seq
    whole = collected.where(is_more | (newest.event != "removed") | newest.prev.isNotNull())
    each_once = f.expr("filter(repeated, (e, at) -> at = 0 or e.seq != get(repeated, at - 1).seq)")
    marked = whole.withColumn("events", each_once).select(
        *_by_job,
        "next_start",
        *_SAME,
        "events",
        f.element_at("events", 1).alias("first"),
        f.element_at("events", -1).alias("newest"),
        f.expr("get(filter(events, e -> e.is_end), 0)").alias("end"),
        f.expr("filter(events, e -> e.is_aside)").alias("asides"),
        f.expr("filter(sequence(1, size(events)), at -> events[at - 1].is_pull)").alias("pulls"),
    )
    taken = (f.expr(sql).alias(name) for name, sql in {**_PARTICULARS, "runs": _RUNS}.items())
    return marked.select(*_by_job, "next_start", *_SAME, "events", *taken)


_LAST_FAILURE: Final = "try_element_at(filter({}, e -> e.event = 'failed' and e.error is not null), -1)"
_EARLY: Final = "filter(asides, e -> e.seq < get(events, get(pulls, 0) - 1).seq)"
"""What happened before the first claim."""
_READY_MS: Final = f"""
    aggregate(
        {_EARLY},
        unix_millis(first.ts) + if(first.event = 'pushed', coalesce(first.delay_ms, 0L), 0L),
        (due, e) -> case
            when e.event = 'delayed' then unix_millis(e.ts) + coalesce(e.delay_ms, 0L)
            when e.event = 'waiting' then greatest(due, unix_millis(e.ts))
            when e.event = 'promoted' and (unix_millis(e.ts) < due or due = unix_millis(first.ts))
                then unix_millis(e.ts)
            else due end)
"""
"""When a job could have run first: delays may be changed or cut short, and children be waited for. A push on Valkey
does not record the delay; there the job's promotion does."""
_PARTICULARS: Final = {
    "epoch": "newest.epoch",
    "first_seq": "first.seq",
    **{f"{which}_{name}": f"{which}.{name}" for which in ("newest", "end") for name in ("seq", "ts", "event")},
    "added_at": "if(first.is_start, first.ts, null)",
    **{name: f"if(first.event = 'pushed', first.{name}, null)" for name in ("delay_ms", "priority", "payload_bytes")},
    "ready_ms": _READY_MS,
    "has_lost_start": f"exists({_EARLY}, e -> e.event in ('failed', 'stalled'))",
    "failures": "size(filter(asides, e -> e.event = 'failed'))",
    "stalls": "size(filter(asides, e -> e.event = 'stalled'))",
    "backoff_ms": """aggregate(filter(asides, e -> e.event = 'retried').delay_ms, cast(null as bigint),
        (sum, delay) -> coalesce(sum + delay, sum, delay))""",
    "last_error": f"{_LAST_FAILURE.format('asides')}.error",
}
"""What the events of a life say about it. Few lives have `asides`, so what is taken from those costs little."""
_PARTS: Final = """
    transform(pulls, (at, n) -> struct(
        slice(events, at, coalesce(get(pulls, n + 1), size(events) + 1) - at) as events,
        get(events, get(pulls, n + 1) - 1) as next))
"""
_RUNS: Final = f"""
    transform(
        transform({_PARTS}, part -> struct(
            part.events[0] as start, get(filter(part.events, e -> e.is_run_end), 0) as end, part.next as next,
            if(size(asides) = 0, null, {_LAST_FAILURE.format("part.events")}) as failure)),
        run -> struct(
            run.start.ts as started_at, run.start.worker as worker, run.start.attempt as attempt,
            run.start.seq as first_seq, coalesce(run.end.ts, run.next.ts) as ended_at,
            coalesce(run.end.event, if(run.next is null, null, 'released')) as outcome, run.failure.error as error,
            greatest(coalesce(run.end.seq, run.next.seq, run.start.seq), run.failure.seq) as last_seq))
"""
"""A run goes from its `pulled` to the event before the next one. A server that was killed has forgotten who had a job
and logs nothing about it: that run is over when the job is claimed again, at the latest."""


def judged(lives: DataFrame, cleared: DataFrame | None = None) -> DataFrame:
    """Lives with what became of them: `finished_at` and `outcome` are null, and their events kept, while they last.

    A life ends with an event of its own, with the emptying of its queue, or at the latest before its successor begins.
    Draining spares jobs at work, but not those whose claim is older than the server: they wait again.
    """
    cleared_at = f.lit(None).cast("timestamp")
    if cleared is not None:
        lives = lives.join(f.broadcast(cleared), "queue", "left")
        cleared_at = f.expr(
            f"""try_element_at(filter(clearings, c -> c.last_seq >= newest_seq
                and (not c.only_waiting or newest_event in {WAITING}
                    or (newest_event = 'pulled' and newest_seq < c.first_seq))
                and coalesce(next_start <= newest_seq or c.seq < next_start, true)), 1).ts"""
        )
    superseded_at = f.when(f.col("next_start") > f.col("newest_seq"), f.col("newest_ts"))
    end = f.coalesce(f.col("end_ts"), cleared_at, superseded_at)
    ended = lives.withColumn("finished_at", _not_before(end, f.col("added_at"), f.get("runs", f.lit(0)).started_at))
    is_over = f.col("finished_at").isNotNull()
    return ended.select(
        *(name for name in ended.columns if name not in ("next_start", "events", "clearings")),
        f.when(~is_over, f.col("events")).alias("events"),
        f.coalesce(f.col("end_seq"), f.col("newest_seq")).alias("last_seq"),
        f.when(f.col("end_event") == "failed", "dlq")
        .otherwise(f.coalesce(f.col("end_event"), f.when(is_over, "removed")))
        .alias("outcome"),
    )


def first_change(since_seq: int) -> Column:
    """When the first attempt of a judged life began that is new, or ended otherwise, since this event."""
    is_changed = f"r.last_seq >= {since_seq} or (r.outcome is null and finished_at is not null)"
    return f.expr(f"array_min(filter(runs, r -> {is_changed}).started_at)")


def carried(judged_lives: DataFrame) -> DataFrame:
    """The events that the next run must process again: those of lives that have not ended."""
    lasting = judged_lives.where(f.col("finished_at").isNull())
    return lasting.select(*_by_job, f.inline("events")).select(*_by_job, *_KEPT)


def jobs_of(judged_lives: DataFrame) -> DataFrame:
    """One row per life."""
    first, last = f.get("runs", f.lit(0)), f.element_at("runs", -1)
    has_run = f.size("runs") > 0
    ended_at = f.coalesce(last.ended_at, f.col("finished_at"))
    ms = "greatest(0L, unix_millis(coalesce(r.ended_at, finished_at)) - unix_millis(r.started_at))"
    lives = judged_lives.select(
        "*",
        f.when(has_run, first.started_at).alias("first_active_at"),
        f.when(has_run, last.started_at).alias("last_active_at"),
        f.expr(f"size(filter(runs, r -> r.outcome is null or r.outcome not in {GIVEN_BACK}))").alias("attempts"),
        f.when(has_run, _lasted(last.started_at, ended_at)).alias("run_ms"),
        f.when(has_run, f.expr(f"aggregate(runs, 0L, (sum, r) -> sum + {ms})")).alias("busy_ms"),
        f.expr("try_element_at(filter(runs.worker, w -> w is not null), -1)").alias("last_worker"),
    )
    return conform(_timed(lives), JOBS)


def _lasted(start: Column, end: Column) -> Column:
    return _not_negative(millis_between(end, start))


def _not_negative(ms: Column) -> Column:
    """Null stays null, and clocks are set back at times."""
    return f.when(ms.isNotNull(), f.greatest(f.lit(0), ms))


def _not_before(end: Column, *starts: Column) -> Column:
    """When something ended, by a clock that may have been set back meanwhile.

    Facts of a date are made of what ended on it or later: what ended before it began would be missing from them.
    """
    return f.when(end.isNotNull(), f.greatest(end, *starts))


def _timed(lives: DataFrame) -> DataFrame:
    is_whole = f.col("added_at").isNotNull() & ~f.col("has_lost_start")
    waited = f.unix_millis("first_active_at") - f.col("ready_ms")
    return lives.select(
        "*",
        f.when(is_whole, _not_negative(waited)).alias("wait_ms"),
        _lasted(f.col("added_at"), f.col("finished_at")).alias("total_ms"),
        signature(f.col("last_error")).alias("error_signature"),
        f.to_date("finished_at").alias("finished_date"),
    )


def attempts_of(judged_lives: DataFrame) -> DataFrame:
    """One row per claim; `ended_at` and `outcome` are null while it lasts, `ended_date` while its life lasts."""
    is_over = f.col("finished_at").isNotNull()
    each = judged_lives.select(
        *_by_job, "job_name", "shard", "epoch", "finished_at", "runs", f.col("first_seq").alias("life_seq"),
        f.posexplode("runs").alias("place", "one"),
    )  # fmt: skip
    named = each.select(
        *_by_job, "job_name", "shard", "epoch", "life_seq", "finished_at",
        (f.col("place") + 1).alias("round"),
        f.get("runs", f.col("place") - 1).started_at.alias("previous_at"),
        *(f.col(f"one.{name}").alias(name) for name in ("attempt", "worker", "started_at", "first_seq", "error")),
        _not_before(f.coalesce(f.col("one.ended_at"), f.col("finished_at")), f.col("one.started_at")).alias("ended_at"),
        f.coalesce(f.col("one.outcome"), f.when(is_over, f.lit("removed"))).alias("outcome"),
    )  # fmt: skip
    ended = named.select(
        "*",
        _lasted(f.col("started_at"), f.col("ended_at")).alias("run_ms"),
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
    """Events of jobs after their end: dead letters and completed jobs that were removed."""
    return events.where(is_trailing()).dropDuplicates(["shard", "epoch", "seq"])


def signature(error: Column) -> Column:
    """An error without what differs from job to job: ids, numbers, quoted text. Equal causes get equal signatures."""
    first_line = f.substring(f.split(error, "\n")[0], 1, 500)
    without_ids = f.regexp_replace(first_line, r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F-]{22}", "<id>")
    without_text = f.regexp_replace(without_ids, r"'[^']*'|\"[^\"]*\"", "<text>")
    without_hex = f.regexp_replace(without_text, r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{12,}\b", "<hex>")
    return f.regexp_replace(without_hex, r"\d+(?:[.,:]\d+)*", "<n>")
