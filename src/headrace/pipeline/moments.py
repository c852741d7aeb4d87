"""Facts of windows shorter than a minute, for reports of a few minutes: computed from silver on demand.

The rules are those of `gold`, and so are the names; a test keeps the two consistent. No Spark here: a few minutes
hold little data. To show another fact in such reports: count it in `facts_of`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import date, datetime
from typing import Any, Final

import pyarrow.dataset as ds

from headrace.pipeline.lake import Lake

LONGEST_MS: Final = 15 * 60_000
"""Longer histories have minutes enough for a chart."""
MAX_JOBS: Final = 200_000
_STEPS_MS: Final = (1_000, 2_000, 5_000, 10_000, 15_000)
_MAX_WINDOWS: Final = 60
_JOB: Final = ["queue", "added_at", "first_active_at", "finished_at", "outcome", "wait_ms"]
_ATTEMPT: Final = ["queue", "ended_at", "outcome", "run_ms"]
_OUTCOMES: Final = ("completed", "dlq", "removed", "expired")
_COUNTED: Final = ("added", *_OUTCOMES, "failed_attempts", "stalled", "wait_n", "run_n")
_RANKS: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Row = dict[str, Any]


def step_of(span_ms: int) -> int:
    """How long the windows of a history should be."""
    return next((step for step in _STEPS_MS if span_ms <= step * _MAX_WINDOWS), _STEPS_MS[-1])


def read_jobs(lake: Lake, since: date, queue: str | None) -> list[Row]:
    """The jobs that ended on or after a date, and those that have not ended."""
    ended = _read(lake, "silver/jobs", _JOB, queue, ds.field("finished_date").cast("string") >= since.isoformat())
    return ended + _read(lake, "silver/open_jobs", _JOB, queue)


def read_attempts(lake: Lake, since: date, queue: str | None) -> list[Row]:
    ended = _read(lake, "silver/attempts", _ATTEMPT, queue, ds.field("ended_date").cast("string") >= since.isoformat())
    return ended + _read(lake, "silver/open_attempts", _ATTEMPT, queue)


def _read(lake: Lake, table: str, columns: list[str], queue: str | None, wanted: Any = None) -> list[Row]:
    if queue is not None:
        of_queue = ds.field("queue") == queue
        wanted = of_queue if wanted is None else wanted & of_queue
    rows: list[Row] = []
    for folder in lake.committed(table):
        data = ds.dataset(folder, format="parquet", partitioning="hive")
        rows += data.to_table(columns=columns, filter=wanted).to_pylist()
    return rows


def ms_of(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


class _Windows:
    """Rows by queue and window, made when something happens in them."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.rows: dict[tuple[str, int], Row] = {}
        self.changes: dict[tuple[str, int], int] = defaultdict(int)
        self.values: dict[tuple[str, int, str], list[int]] = defaultdict(list)

    def at(self, queue: str, moment: datetime) -> tuple[str, int]:
        ms = ms_of(moment)
        key = queue, ms - ms % self._step
        self.rows.setdefault(key, {"queue": queue, "window_start": key[1], **dict.fromkeys(_COUNTED, 0)})
        return key

    def count(self, queue: str, moment: datetime, name: str) -> None:
        self.rows[self.at(queue, moment)][name] += 1

    def measure(self, queue: str, moment: datetime, what: str, ms: int) -> None:
        self.count(queue, moment, f"{what}_n")
        self.values[*self.at(queue, moment), what].append(ms)


def facts_of(jobs: Iterable[Row], attempts: Iterable[Row], step: int) -> list[Row]:
    """A row per queue and window in which something happened, in order of time."""
    windows = _Windows(step)
    for job in jobs:
        _count_job(windows, job)
    for attempt in attempts:
        _count_attempt(windows, attempt)
    levels: dict[str, int] = defaultdict(int)
    rows = [windows.rows[key] for key in sorted(windows.rows, key=lambda key: key[1])]
    for row in rows:
        key = row["queue"], row["window_start"]
        levels[row["queue"]] += windows.changes[key]
        row["backlog_end"] = levels[row["queue"]]
        for what in ("wait", "run"):
            row |= _ranked(what, windows.values.get((*key, what), []))
    return rows


def _count_job(windows: _Windows, job: Row) -> None:
    queue, added, finished = job["queue"], job["added_at"], job["finished_at"]
    if added is not None:
        windows.count(queue, added, "added")
        windows.changes[windows.at(queue, added)] += 1
    if finished is not None:
        windows.changes[windows.at(queue, finished)] -= added is not None
        if job["outcome"] in _OUTCOMES:
            windows.count(queue, finished, job["outcome"])
    if job["wait_ms"] is not None:
        windows.measure(queue, job["first_active_at"], "wait", job["wait_ms"])


def _count_attempt(windows: _Windows, attempt: Row) -> None:
    queue, ended, outcome = attempt["queue"], attempt["ended_at"], attempt["outcome"]
    if outcome in ("completed", "failed", "stalled"):
        windows.measure(queue, ended, "run", attempt["run_ms"])
    if outcome in ("failed", "stalled"):
        windows.count(queue, ended, "failed_attempts" if outcome == "failed" else "stalled")


def _ranked(what: str, values: list[int]) -> Row:
    """Nearest rank."""
    values.sort()
    return {
        f"{what}_{name}": values[math.ceil(rank * len(values)) - 1] if values else None for name, rank in _RANKS.items()
    }
