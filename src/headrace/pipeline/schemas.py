"""Every table of the lake as a constant, and what an event looks like when it comes from the log.

A table is one text of column names and types, which Spark, Arrow and readers of this file understand alike. `conform`
makes a DataFrame exactly that table, so a wrong column is noticed where it is made. Times are UTC timestamps, durations
are milliseconds. To add a column: here, and in the transform that fills it.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EVENTS: Final = """
    shard int, epoch bigint, seq bigint, ts timestamp, event string, queue string, job_id string, job_name string,
    attempt int, worker string, priority int, delay_ms bigint, progress double, error string, parent_id string,
    group_id string, tags array<string>, payload_bytes bigint, result_bytes bigint, prev string, terminal boolean,
    stalls int, action string, first_seq bigint, last_seq bigint, extra string
"""
"""An event as the data source gives it. `extra` holds fields that this version does not know, as JSON text."""

BRONZE: Final = f"{EVENTS}, event_code int, error_type string, schema_version int, event_date date"

JOBS: Final = """
    queue string, job_id string, job_name string, added_at timestamp, first_active_at timestamp,
    last_active_at timestamp, finished_at timestamp, outcome string, attempts int, failures int, stalls int,
    wait_ms bigint, run_ms bigint, busy_ms bigint, backoff_ms bigint, total_ms bigint, delay_ms bigint, priority int,
    last_worker string, last_error string, error_signature string, parent_id string, group_id string,
    tags array<string>, payload_bytes bigint, shard int, epoch bigint, first_seq bigint, last_seq bigint,
    finished_date date
"""
"""One life of a job, from its push (or its revival) to its end. `added_at` is null when the log begins in its midst."""

ATTEMPTS: Final = """
    queue string, job_id string, job_name string, life_seq bigint, round int, attempt int, worker string,
    previous_at timestamp, started_at timestamp, ended_at timestamp, outcome string, run_ms bigint, error string,
    error_signature string, shard int, epoch bigint, first_seq bigint, ended_date date
"""
"""One claim of a job by a worker, with how it ended: completed, failed, stalled, released, ...

`round` counts them within a life of the job, `previous_at` is when the one before began; `attempt` is what the server
counts, and it does not count released ones.
"""

GAPS: Final = """
    shard int, epoch bigint, first_seq bigint, last_seq bigint, reported_seq bigint, reported_at timestamp
"""

FACTS: Final = """
    queue string, window_start timestamp, added bigint, started bigint, completed bigint, failed_attempts bigint,
    retried bigint, dlq bigint, stalled bigint, removed bigint, expired bigint, backlog_end bigint,
    wait_p50 bigint, wait_p95 bigint, wait_p99 bigint, wait_n bigint,
    run_p50 bigint, run_p95 bigint, run_p99 bigint, run_n bigint,
    total_p50 bigint, total_p95 bigint, total_p99 bigint, total_n bigint,
    failure_rate double, retry_amplification double, sla_breaches bigint, sla_target_ms bigint, window_date date
"""
"""A queue per minute, hour or day. A wait counts in the window in which it ended, and so do runs and totals."""

ERRORS: Final = """
    queue string, window_start timestamp, signature string, signature_id bigint, count bigint, jobs bigint,
    first_seen timestamp, last_seen timestamp, sample_job_id string, sample_error string, window_date date
"""

WORKERS: Final = """
    worker string, window_start timestamp, busy_ms bigint, slots int, utilisation double, jobs bigint, window_date date
"""

JOB_ROWS: Final = """
    queue string, job_id string, job_name string, state string, data string, result string, failed_reason string,
    priority int, attempts int, max_attempts int, created_at timestamp, run_at timestamp, started_at timestamp,
    finished_at timestamp, parent_id string, group_id string, tags array<string>
"""
"""A job as the server has it now; `data` and `result` are JSON text."""

RESULT_ROWS: Final = "queue string, job_id string, job_name string, finished_at timestamp, result string"

LETTER_ROWS: Final = """
    queue string, job_id string, job_name string, data string, reason string, error string, entered_at timestamp,
    attempts int, retry_count int, expires_at timestamp
"""


def columns(table: str) -> dict[str, str]:
    """The columns of a table and their types, in order."""
    return {name: kind for name, kind in (column.split() for column in table.split(","))}


def conform(frame: DataFrame, table: str) -> DataFrame:
    """Exactly the columns of the table, in its order and its types; a missing one is an error."""
    from pyspark.sql import functions as f

    return frame.select(*(f.col(name).cast(kind).alias(name) for name, kind in columns(table).items()))


def union(*frames: DataFrame) -> DataFrame:
    """All rows, columns by name; what a frame lacks is null."""
    return reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), frames)


def arrow(table: str, wanted: list[str] | None = None) -> Any:
    """The same columns as an Arrow schema."""
    import pyarrow as pa

    kinds = {
        "int": pa.int32(),
        "bigint": pa.int64(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "string": pa.string(),
        "timestamp": pa.timestamp("us", "UTC"),
        "array<string>": pa.list_(pa.field("element", pa.string())),
    }
    return pa.schema([(name, kinds[kind]) for name, kind in columns(table).items() if not wanted or name in wanted])


def millis_between(later: Column, earlier: Column) -> Column:
    """Whole milliseconds from one timestamp to another."""
    from pyspark.sql import functions as f

    return f.unix_millis(later) - f.unix_millis(earlier)
