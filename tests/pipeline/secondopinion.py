"""The same answers from another engine: DuckDB, straight from the captured files, with SQL of its own.

Nothing of the pipeline is used here. The queries follow docs/pipeline.md, not the transforms.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

_EVENTS = """
CREATE TABLE events AS
SELECT seq, ts, event, epoch, queue, coalesce(job, '') AS job, name, attempt, worker, coalesce(priority, 0) AS priority,
       delay, error, prev, coalesce(terminal, false) AS terminal, "first" AS began, "last" AS reached
FROM read_json('{files}', format = 'newline_delimited', compression = 'zstd', columns = {{
    seq: 'BIGINT', ts: 'BIGINT', event: 'VARCHAR', epoch: 'BIGINT', queue: 'VARCHAR', job: 'VARCHAR', name: 'VARCHAR',
    attempt: 'INTEGER', worker: 'VARCHAR', priority: 'INTEGER', delay: 'BIGINT', error: 'VARCHAR', prev: 'VARCHAR',
    terminal: 'BOOLEAN', "first": 'BIGINT', "last": 'BIGINT'}})
"""

_TOLD = """
CREATE TABLE told AS
WITH life_events AS (
    SELECT *, event IN ('pushed', 'dlq-retried') OR (event = 'waiting' AND prev = 'completed') AS begins,
           event IN ('completed', 'expired', 'removed') OR (event = 'failed' AND terminal) AS ends
    FROM events
    WHERE job <> '' AND event IN ('pushed', 'retried', 'delayed', 'promoted', 'released', 'stalled', 'dlq-retried',
        'waiting', 'failed', 'pulled', 'completed', 'expired', 'removed', 'waiting-children')
      AND NOT (event = 'removed' AND prev IN ('completed', 'failed'))
), lives AS (
    SELECT *, count(*) FILTER (begins) OVER so_far + count(*) FILTER (ends) OVER before AS life FROM life_events
    WINDOW so_far AS (PARTITION BY queue, job ORDER BY epoch, seq),
           before AS (PARTITION BY queue, job ORDER BY epoch, seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT *, count(*) FILTER (event = 'pulled') OVER (PARTITION BY queue, job, life ORDER BY epoch, seq) AS round
FROM lives
"""

_ATTEMPTS = """
CREATE TABLE attempts AS
WITH rounds AS (
    SELECT queue, job, life, round, min(ts) FILTER (event = 'pulled') AS started,
           any_value(worker) FILTER (event = 'pulled') AS worker,
           any_value(attempt) FILTER (event = 'pulled') AS attempt,
           min({'seq': seq, 'ts': ts, 'event': event}) FILTER (event IN ('completed', 'failed', 'stalled', 'released',
               'delayed', 'waiting-children', 'removed', 'expired')) AS ended,
           arg_max(error, seq) FILTER (event = 'failed' AND error IS NOT NULL) AS error,
           lead(min(ts) FILTER (event = 'pulled')) OVER (PARTITION BY queue, job, life ORDER BY round) AS next
    FROM told WHERE round > 0 GROUP BY queue, job, life, round
)
SELECT r.* EXCLUDE (ended, next), coalesce(ended.ts, next, j.finished) AS ended,
       coalesce(ended.event, CASE WHEN next IS NOT NULL THEN 'released' WHEN j.finished IS NOT NULL THEN 'removed' END)
           AS outcome
FROM rounds r JOIN ends j USING (queue, job, life)
"""

_ENDS = """
CREATE TABLE ends AS
WITH lives AS (
    SELECT queue, job, life, min(seq) AS oldest, max(seq) AS newest, arg_max(ts, seq) AS newest_ts,
           arg_max(event, seq) AS newest_event,
           min({'seq': seq, 'ts': ts, 'event': event}) FILTER (ends) AS own_end
    FROM told GROUP BY ALL
), placed AS (
    SELECT *, lead(oldest) OVER (PARTITION BY queue, job ORDER BY life) AS successor FROM lives
), cleared AS (
    SELECT l.queue, l.job, l.life, arg_min(e.ts, e.seq) AS ts
    FROM placed l JOIN events e ON e.queue = l.queue AND e.event IN ('drained', 'obliterated') AND e.reached >= l.newest
    WHERE own_end IS NULL AND (successor IS NULL OR e.seq < successor)
      AND (e.event = 'obliterated' OR newest_event NOT IN ('pulled', 'waiting-children')
           OR (newest_event = 'pulled' AND newest < e.began))
    GROUP BY ALL
)
SELECT l.queue, l.job, l.life,
       coalesce(own_end.ts, c.ts, CASE WHEN successor IS NOT NULL THEN newest_ts END) AS finished,
       coalesce(CASE own_end.event WHEN 'failed' THEN 'dlq' ELSE own_end.event END,
                CASE WHEN c.ts IS NOT NULL OR successor IS NOT NULL THEN 'removed' END) AS outcome
FROM placed l LEFT JOIN cleared c USING (queue, job, life)
"""

_JOBS = """
CREATE TABLE jobs AS
WITH lives AS (
    SELECT queue, job, life, min(seq) AS first_seq, max(name) AS name, min(ts) FILTER (begins) AS added,
           max(delay) FILTER (event = 'pushed') AS delay, max(priority) FILTER (event = 'pushed') AS priority,
           max(ts) FILTER (event = 'waiting' AND prev = 'waiting-children' AND round = 0) AS unblocked,
           arg_max(ts + delay, seq) FILTER (event = 'delayed' AND round = 0) AS put_off,
           max(ts) FILTER (event = 'promoted' AND round = 0) AS promoted,
           count(*) FILTER (event = 'failed') AS failures, count(*) FILTER (event = 'stalled') AS stalls,
           sum(delay) FILTER (event = 'retried') AS backoff,
           arg_max(error, seq) FILTER (event = 'failed' AND error IS NOT NULL) AS last_error
    FROM told GROUP BY ALL
), work AS (
    SELECT queue, job, life, min(started) AS first_active, max(started) AS last_active,
           count(*) FILTER (outcome IS NULL OR outcome NOT IN ('released', 'delayed', 'waiting-children')) AS attempts,
           arg_max(worker, round) AS last_worker
    FROM attempts GROUP BY ALL
)
SELECT l.*, e.finished, e.outcome, w.first_active, w.last_active, coalesce(w.attempts, 0) AS attempts, w.last_worker,
       CASE WHEN added IS NOT NULL AND first_active IS NOT NULL THEN
           greatest(0, first_active - greatest(coalesce(unblocked, 0),
               least(coalesce(put_off, added + coalesce(delay, 0)), coalesce(promoted, 9e15::BIGINT)))) END AS wait,
       CASE WHEN added IS NOT NULL AND finished IS NOT NULL THEN greatest(0, finished - added) END AS total
FROM lives l JOIN ends e USING (queue, job, life) LEFT JOIN work w USING (queue, job, life)
"""


_WORKERS = """
CREATE TABLE workers AS
WITH done AS (
    SELECT * REPLACE (greatest(started, ended - 7 * 86400000) AS started)
    FROM attempts WHERE worker IS NOT NULL AND ended >= started
),
busy AS (
    SELECT worker, minute, sum(least(ended, minute + 60000) - greatest(started, minute)) AS busy,
           count(DISTINCT (queue, job)) AS jobs
    FROM (SELECT *, unnest(range(started - started % 60000, ended + 1, 60000)) AS minute FROM done)
    GROUP BY ALL
), edges AS (
    SELECT worker, started AS moment, 1 AS change FROM done UNION ALL SELECT worker, ended, -1 FROM done
    UNION ALL SELECT worker, unnest(range(started - started % 86400000 + 86400000, ended + 1, 86400000)), 0 FROM done
), held AS (
    SELECT worker, moment - moment % 86400000 AS day,
           sum(change) OVER (PARTITION BY worker ORDER BY moment, change ROWS UNBOUNDED PRECEDING) AS held
    FROM edges
), slots AS (SELECT worker, day, greatest(1, max(held)) AS slots FROM held GROUP BY ALL)
SELECT busy.*, slots FROM busy JOIN slots ON busy.worker = slots.worker AND day = minute - minute % 86400000
"""

_SIGNATURE = r"""regexp_replace(regexp_replace(regexp_replace(regexp_replace(split_part(error, chr(10), 1)[:500],
    '[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F-]{22}', '<id>', 'g'), $$'[^']*'|"[^"]*"$$, '<text>', 'g'),
    '0x[0-9a-fA-F]+|\b[0-9a-fA-F]{12,}\b', '<hex>', 'g'), '\d+(?:[.,:]\d+)*', '<n>', 'g')"""

_ERRORS = f"""
CREATE TABLE errors AS
SELECT queue, ended - ended % 3600000 AS hour, {_SIGNATURE} AS signature, count(*) AS count,
       count(DISTINCT job) AS jobs, min(ended) AS first_seen, max(ended) AS last_seen
FROM attempts WHERE error IS NOT NULL AND ended IS NOT NULL GROUP BY ALL
"""


def ask(log: Path) -> duckdb.DuckDBPyConnection:
    """A database with the tables events, jobs, attempts, workers and errors, made from a capture folder."""
    db = connect()
    read_log(db, log)
    tell(db)
    return db


def connect() -> duckdb.DuckDBPyConnection:
    db = duckdb.connect()
    db.execute("SET TimeZone = 'UTC'")
    return db


def read_log(db: duckdb.DuckDBPyConnection, log: Path) -> None:
    db.execute(_EVENTS.format(files=log / "shard=0" / "seg-*.jsonl.zst"))


def tell(db: duckdb.DuckDBPyConnection) -> None:
    for statement in (_TOLD, _ENDS, _ATTEMPTS, _JOBS, _WORKERS, _ERRORS):
        db.execute(statement)


def facts(db: duckdb.DuckDBPyConnection, unit: str) -> list[tuple[object, ...]]:
    """Facts per queue and window, as a list of rows in order."""
    return db.execute(f"{facts_query(unit)} ORDER BY queue, w").fetchall()


def facts_query(unit: str) -> str:
    window = f"epoch_ms(date_trunc('{unit}', make_timestamp({{0}} * 1000)))"
    return f"""
        WITH added AS (SELECT queue, {window.format("added")} AS w, count(*) AS added FROM jobs
                       WHERE added IS NOT NULL GROUP BY ALL),
        waits AS (SELECT queue, {window.format("first_active")} AS w, count(wait) AS n,
                         quantile_disc(wait, [0.5, 0.95, 0.99]) AS p
                  FROM jobs WHERE first_active IS NOT NULL GROUP BY ALL),
        ends AS (SELECT queue, {window.format("finished")} AS w, count(*) FILTER (outcome = 'completed') AS completed,
                        count(*) FILTER (outcome = 'dlq') AS dlq, count(*) FILTER (outcome = 'removed') AS removed,
                        count(*) FILTER (outcome = 'expired') AS expired, count(added) AS went,
                        quantile_disc(total, [0.5, 0.95, 0.99]) FILTER (outcome IN ('completed', 'dlq')) AS p
                 FROM jobs WHERE finished IS NOT NULL GROUP BY ALL),
        starts AS (SELECT queue, {window.format("started")} AS w, count(*) AS started,
                          count(*) FILTER (round > 1) AS retried, count(DISTINCT (job, life)) AS jobs
                   FROM attempts GROUP BY ALL),
        runs AS (SELECT queue, {window.format("ended")} AS w, count(*) FILTER (outcome = 'failed') AS failed,
                        count(*) FILTER (outcome = 'stalled') AS stalled,
                        quantile_disc(ended - started, [0.5, 0.95, 0.99])
                            FILTER (outcome IN ('completed', 'failed', 'stalled')) AS p
                 FROM attempts WHERE ended IS NOT NULL GROUP BY ALL),
        windows AS (SELECT queue, w FROM added UNION SELECT queue, w FROM waits UNION SELECT queue, w FROM ends
                    UNION SELECT queue, w FROM starts UNION SELECT queue, w FROM runs)
        SELECT queue, w, coalesce(added, 0), coalesce(started, 0), coalesce(completed, 0), coalesce(runs.failed, 0),
               coalesce(retried, 0), coalesce(dlq, 0), coalesce(stalled, 0), coalesce(removed, 0), coalesce(expired, 0),
               coalesce(waits.n, 0), waits.p[1], waits.p[2], waits.p[3], runs.p[1], runs.p[2], runs.p[3],
               ends.p[1], ends.p[2], ends.p[3], round(started / jobs, 6),
               sum(coalesce(added, 0) - coalesce(ends.went, 0)) OVER (PARTITION BY queue ORDER BY w)::BIGINT
        FROM windows LEFT JOIN added USING (queue, w) LEFT JOIN waits USING (queue, w) LEFT JOIN ends USING (queue, w)
             LEFT JOIN starts USING (queue, w) LEFT JOIN runs USING (queue, w)
        """


def parquet(root: Path, table: str) -> str:
    """A table of the lake, as DuckDB reads it."""
    return f"read_parquet('{root / table}/**/*.parquet', hive_partitioning = true, union_by_name = true)"


_JOB_COLUMNS = """queue, job_id, first_seq, job_name, epoch_ms(added_at), epoch_ms(first_active_at),
    epoch_ms(last_active_at), epoch_ms(finished_at), outcome, attempts, failures, stalls, wait_ms, backoff_ms, total_ms,
    priority, last_worker, last_error"""
_THEIR_JOBS = """SELECT queue, job, first_seq, name, added, first_active, last_active, finished, outcome, attempts,
    failures, stalls, wait, backoff, total, priority, last_worker, last_error FROM jobs"""
_ATTEMPT_COLUMNS = """queue, job_id, round, attempt, worker, epoch_ms(started_at), epoch_ms(ended_at), outcome, run_ms,
    error"""
_FACT_COLUMNS = """queue, epoch_ms(window_start), added, started, completed, failed_attempts, retried, dlq, stalled,
    removed, expired, wait_n, wait_p50, wait_p95, wait_p99, run_p50, run_p95, run_p99, total_p50, total_p95, total_p99,
    round(retry_amplification, 6), backlog_end"""


def statements(root: Path) -> dict[str, tuple[str, str]]:
    """By table of the lake: what the lake says, and what DuckDB found by itself."""
    kept = [name for name in ("silver/attempts", "silver/open_attempts") if [*(root / name).rglob("*.parquet")]]
    attempts = " UNION ALL ".join(f"SELECT {_ATTEMPT_COLUMNS} FROM {parquet(root, name)}" for name in kept)
    return {
        "bronze/events": (
            f"SELECT shard, epoch, seq, event, coalesce(job_id, '') FROM {parquet(root, 'bronze/events')}",
            "SELECT 0, epoch, seq, event, job FROM events",
        ),
        "silver/jobs": (
            f"SELECT {_JOB_COLUMNS} FROM {parquet(root, 'silver/jobs')}", f"{_THEIR_JOBS} WHERE finished IS NOT NULL"
        ),
        "silver/open_jobs": (
            f"SELECT {_JOB_COLUMNS} FROM {parquet(root, 'silver/open_jobs')}", f"{_THEIR_JOBS} WHERE finished IS NULL"
        ),
        "silver/attempts": (
            attempts,
            "SELECT queue, job, round, attempt, worker, started, ended, outcome, ended - started, error FROM attempts",
        ),
        **{
            f"gold/queue_{unit}": (
                f"SELECT {_FACT_COLUMNS} FROM {parquet(root, f'gold/queue_{unit}')}", facts_query(unit)
            )
            for unit in ("minute", "hour", "day")
        },
        "gold/worker_minute": (
            f"SELECT worker, epoch_ms(window_start), busy_ms, slots, jobs FROM {parquet(root, 'gold/worker_minute')}",
            "SELECT worker, minute, busy::BIGINT, slots::INT, jobs FROM workers",
        ),
        "gold/error_signature_hour": (
            f"""SELECT queue, epoch_ms(window_start), signature, count, jobs, epoch_ms(first_seen), epoch_ms(last_seen)
                FROM {parquet(root, "gold/error_signature_hour")}""",
            "SELECT * FROM errors",
        ),
    }  # fmt: skip


def disagreements(db: duckdb.DuckDBPyConnection, root: Path) -> dict[str, int]:
    """By table, how many rows only one of the two has."""
    found = {}
    for table, (ours, theirs) in statements(root).items():
        one_way, other_way = (f"(({a}) EXCEPT ALL ({b}))" for a, b in ((ours, theirs), (theirs, ours)))
        found[table] = sum(db.execute(f"SELECT count(*) FROM {way}").fetchall()[0][0] for way in (one_way, other_way))
    return found
