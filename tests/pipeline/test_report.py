"""Reports of lakes that are as small or as large as lakes get. The facts are made up: no Spark needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import HeadraceError
from headrace.pipeline import moments
from headrace.pipeline.lake import Lake, Pointer
from headrace.pipeline.report import Facts, write_report
from headrace.pipeline.schemas import ERRORS, FACTS, JOBS, WORKERS, arrow

START = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)  # half an hour later clocks go forward in Berlin
_COUNTED = ("added", "started", "completed", "failed_attempts", "retried", "dlq", "stalled", "removed", "expired")


def fact(at: datetime, queue: str = "mail", **more: Any) -> dict[str, Any]:
    numbers = dict.fromkeys((*_COUNTED, "backlog_end", "wait_n", "run_n", "total_n", "sla_breaches"), 0)
    return {"queue": queue, "window_start": at, **numbers, **more}


def write(lake: Lake, folder: str, table: str, rows: list[dict[str, Any]]) -> None:
    """Rows as one file, without the columns that are the names of folders."""
    schema = arrow(table.rpartition(",")[0])
    path = lake.path(folder) / "part.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def lake_of(root: Path, facts: list[dict[str, Any]]) -> Lake:
    """A lake with these facts of minutes, and the same as facts of hours and days."""
    lake = Lake(root)
    lake.store_pointer(Pointer(run=1, first_run=1))
    lengths = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
    for unit, length in lengths.items():
        by_date: dict[str, list[dict[str, Any]]] = {}
        for row in facts:
            at = row["window_start"]
            at -= (at - datetime(1970, 1, 1, tzinfo=UTC)) % length
            by_date.setdefault(str(at.date()), []).append({**row, "window_start": at})
        for date, rows in by_date.items():
            write(lake, f"gold/queue_{unit}/window_date={date}", FACTS, rows)
    return lake


def report_of(lake: Lake, **options: Any) -> str:
    write_report(lake, lake.root / "report.html", **options)
    return (lake.root / "report.html").read_text()


def test_a_single_event_makes_a_report(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, [fact(START, added=1, backlog_end=1)])
    write(lake, "silver/open_jobs/run=1", JOBS, [{"queue": "mail", "job_id": "a", "added_at": START}])
    text = report_of(lake)
    assert "1 queues" not in text
    assert "<h1>1 queue, Sun 29 Mar 2026, 00:30 to 00:30:01 UTC</h1>" in text
    assert "jobs per second, n = 1 added" in text
    assert "had not ended, delayed ones included" in text
    assert "backlog (below)" in text


def test_every_line_of_a_chart_has_a_colour_of_its_own(tmp_path: Path) -> None:
    text = report_of(lake_of(tmp_path, [fact(START, added=1, backlog_end=1)]))
    keys = re.findall(
        r'<span class="key (\w+)">([^<]*)</span>', text.partition("<figure>")[2].partition("</figure>")[0]
    )
    assert keys == [("completed", "done"), ("came", "added"), ("waiting", "backlog (below)")]


@pytest.mark.parametrize(("hours", "courses"), [(0, 0), (2, 1), (4, 2)])
def test_a_table_has_a_column_for_the_course_when_there_is_one_to_show(
    tmp_path: Path, hours: int, courses: int
) -> None:
    lake = lake_of(tmp_path, [fact(START + timedelta(hours=n), added=1) for n in range(hours + 1)])
    about = {"window_start": START, "count": 1, "first_seen": START, "last_seen": START}
    error = {"queue": "mail", "signature": "E", "sample_error": "E", "sample_job_id": "j", **about}
    write(lake, "gold/error_signature_hour/window_date=2026-03-29", ERRORS, [error])
    worker = {"worker": "w", "window_start": START, "busy_ms": 10, "slots": 1}
    write(lake, "gold/worker_minute/window_date=2026-03-29", WORKERS, [worker])
    text = report_of(lake)
    assert text.count("<th>Over time</th>") == courses
    for table in text.split("<table>")[1:]:
        heads, _, rows = table.partition("</thead>")
        first = rows.partition("</tr>")[0]
        assert len(re.findall("<th[ >]", heads)) == len(re.findall("<t[hd][ >]", first))


def test_a_queue_that_nobody_works_on_is_found(tmp_path: Path) -> None:
    told = [fact(START, "orders", added=1000, backlog_end=1000)]
    told += [fact(START + timedelta(minutes=n), added=20, started=20, completed=20, backlog_end=15) for n in range(20)]
    (found,) = re.findall("<li>(.*?)</li>", report_of(lake_of(tmp_path, told)))
    assert found == (
        "<b>orders</b> is stuck: no job was started since Sun 29 Mar 00:40, and its backlog is 1,000 jobs, "
        "delayed ones included."
    )


def test_a_queue_that_nobody_has_worked_on_for_minutes_is_found(tmp_path: Path) -> None:
    late = START + timedelta(minutes=4)
    lake = lake_of(tmp_path, [fact(START, "orders", added=20, backlog_end=20), fact(late, added=1, backlog_end=1)])
    jobs = [{"queue": "orders", "job_id": str(n), "added_at": START} for n in range(20)]
    jobs.append({"queue": "mail", "job_id": "late", "added_at": late})
    write(lake, "silver/open_jobs/run=1", JOBS, jobs)
    text = report_of(lake)
    assert re.search(r"jobs per \d+ s, n = 20 added", text)
    assert "<b>orders</b> is stuck: no job was started since Sun 29 Mar 00:32" in text


def test_facts_without_their_jobs_are_shown_by_the_minute(tmp_path: Path) -> None:
    assert "jobs per minute, n = 1 added" in report_of(lake_of(tmp_path, [fact(START, added=1, backlog_end=1)]))


def test_a_year_is_shown_by_the_day_and_stays_small(tmp_path: Path) -> None:
    days = [START.replace(hour=0, minute=0) + timedelta(days=n) for n in range(400)]
    waits = {"wait_n": 500, "wait_p50": 10, "wait_p95": 50, "wait_p99": 90}
    busy = [fact(at, f"q{n}", added=500, started=500, completed=500, **waits) for at in days for n in range(12)]
    text = report_of(lake_of(tmp_path, busy), days=1_000_000_000)
    assert "Sun 29 Mar 2026, 00:00 to Sun 02 May 2027, 00:01 UTC" in text
    assert "jobs per day, n = 200 k added" in text
    assert "p95 wait per queue and day" in text
    assert len(text) < 2_000_000
    axis = re.findall(r'<text class="tick x"[^>]*>([^<]*)</text>', text.partition("<figure>")[2].partition("</svg>")[0])
    assert 2 <= len(axis) <= 7


def test_only_the_wanted_days_are_told_of(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, [fact(START + timedelta(days=n), added=10**n) for n in range(3)])
    assert sum(row["added"] for row in Facts(lake, 2, None).rows("day")) == 110


def test_a_clock_that_is_ahead_does_not_move_the_days_and_is_told_of(tmp_path: Path) -> None:
    """A job was pushed and done in a year to come, and one of today is said to have ended then."""
    ahead = START + timedelta(days=800)
    told = [fact(START + timedelta(minutes=n), added=5, started=5, completed=5) for n in range(3)]
    told += [fact(ahead, added=1, started=1, completed=1), fact(ahead + timedelta(minutes=7), completed=1)]
    lake = lake_of(tmp_path, told)
    about = {"window_start": ahead, "count": 1, "first_seen": ahead, "last_seen": ahead}
    error = {"queue": "mail", "signature": "E", "sample_error": "E", "sample_job_id": "j", **about}
    write(lake, f"gold/error_signature_hour/window_date={ahead.date()}", ERRORS, [error])
    jobs = [{"queue": "mail", "job_id": str(n), "added_at": START + timedelta(minutes=n)} for n in range(3)]
    write(lake, "silver/open_jobs/run=1", JOBS, [*jobs, {"queue": "mail", "job_id": "late", "added_at": ahead}])
    lake.store_pointer(Pointer(run=1, first_run=1, made_at=START + timedelta(minutes=9)))
    text = report_of(lake, days=2)
    assert "<h1>1 queue, Sun 29 Mar 2026, 00:30 to 00:32:01 UTC</h1>" in text
    assert "n = 15 added" in text
    assert re.findall("<li>(.*?)</li>", text) == [
        "2 minutes are left out whose events are dated after the last run, up to Tue 06 Jun 2028 00:37: "
        "a clock was ahead."
    ]
    assert {row["added"] for row in Facts(lake, 2, None).rows("moment")} == {1}
    assert Facts(lake, 2, None).rows("moment")[-1]["window_start"] < moments.ms_of(ahead)


def test_a_run_whose_clock_was_behind_leaves_nothing_out(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, [fact(START + timedelta(days=n), added=10**n) for n in range(3)])
    lake.store_pointer(Pointer(run=1, first_run=1, made_at=datetime(1970, 1, 1, tzinfo=UTC)))
    facts = Facts(lake, 2, None)
    assert (sum(row["added"] for row in facts.rows("day")), facts.ahead) == (110, [])


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_times_are_utc_whatever_the_time_zone_of_who_makes_the_report(tmp_path: Path, zone: str) -> None:
    lake = lake_of(tmp_path, [fact(START + timedelta(minutes=n), added=1) for n in (0, 59, 90)])
    command = [sys.executable, "-m", "headrace", "pipeline", "report", "--lake", str(lake.root)]
    out = tmp_path / "report.html"
    environment = {**os.environ, "TZ": zone}
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, env=environment, timeout=60)
    assert "<h1>1 queue, Sun 29 Mar 2026, 00:30 to 02:01 UTC</h1>" in out.read_text()


def test_names_are_shown_as_they_are_and_are_no_markup(tmp_path: Path) -> None:
    text = report_of(lake_of(tmp_path / "<i>", [fact(START, "<script>", added=1)]), queue="<script>")
    assert "<script>" not in text
    assert "<i>" not in text
    assert "&lt;script&gt;" in text


def test_a_lake_that_changes_while_it_is_read_is_said_to_be_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_of(tmp_path, [fact(START, added=1)])

    def vanish(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "gone", "window_date=2026-03-29")

    monkeypatch.setattr("headrace.pipeline.report.ds.dataset", vanish)
    with pytest.raises(HeadraceError, match="changed while it was read: try again"):
        write_report(lake, tmp_path / "report.html")


def test_a_backlog_from_before_the_days_of_a_report_is_not_taken_for_growth(tmp_path: Path) -> None:
    """The queue stood still with 1,000 jobs, and one more came when most of these days were over."""
    days = [START + timedelta(days=n) for n in range(10)]
    told = [fact(at, added=20, started=20, completed=20) for at in days]
    told += [fact(days[0], "orders", added=1000, backlog_end=1000), fact(days[9], "orders", added=1, backlog_end=1001)]
    found = re.findall("<li>(.*?)</li>", report_of(lake_of(tmp_path, told)))
    assert found == [
        "<b>orders</b> is stuck: no job was started since Sat 04 Apr 00:00, and its backlog is 1,001 jobs, "
        "delayed ones included."
    ]


def test_a_queue_in_which_nothing_happens_any_more_still_has_its_backlog(tmp_path: Path) -> None:
    days = [START + timedelta(days=n) for n in range(10)]
    told = [fact(at, added=20, started=20, completed=20) for at in days]
    told += [fact(days[0], "orders", added=1000, backlog_end=1000), fact(days[0], "idle", added=1, completed=1)]
    lake = lake_of(tmp_path, told)
    text = report_of(lake)
    assert re.findall("<li>(.*?)</li>", text) == [
        "<b>orders</b> is stuck: no job was started since Sat 04 Apr 00:00, and its backlog is 1,000 jobs, "
        "delayed ones included."
    ]
    assert "<h1>2 queues, " in text
    alone = report_of(lake, queue="orders")
    assert "<h1>Queue orders, Wed 01 Apr 2026, 00:30 to Tue 07 Apr 2026, 00:31 UTC</h1>" in alone
    assert "<b>orders</b> is stuck" in alone
    with pytest.raises(HeadraceError, match="no facts of the queue idle since 2026-04-01: --days takes more"):
        report_of(lake, queue="idle")


def test_a_queue_in_which_nothing_happens_is_as_large_as_its_backlog(tmp_path: Path) -> None:
    """With more queues than the report shows, it is not left out as one of the smaller ones."""
    told = [fact(START, "orders", added=1000, backlog_end=1000)]
    told += [fact(START + timedelta(days=9), f"q{n}", added=20, started=20, completed=20) for n in range(20)]
    text = report_of(lake_of(tmp_path, told))
    assert "<tr><th>orders</th>" in text
    assert "Left out: 9 smaller queues." in text


def test_a_large_backlog_is_not_read_job_by_job(tmp_path: Path) -> None:
    """Shortly after midnight, of a day that has hardly begun."""
    today = START + timedelta(days=1)
    left = moments.MAX_JOBS
    told = [fact(START, added=left, backlog_end=left), fact(today, added=1, backlog_end=left + 1)]
    lake = lake_of(tmp_path, told)
    write(lake, "silver/open_jobs/run=1", JOBS, [{"queue": "mail", "job_id": "a", "added_at": today}])
    assert "jobs per minute, n = 1 added" in report_of(lake, days=1)


def test_the_course_of_an_error_over_the_years_is_a_line_of_few_points(tmp_path: Path) -> None:
    """A clock that jumps makes a report of all days a report of half a century."""
    lake = lake_of(tmp_path, [fact(START + timedelta(days=n), added=1) for n in (0, 20_000)])
    seen = {"window_start": START, "count": 1, "first_seen": START, "last_seen": START}
    error = {"queue": "mail", "signature": "E", "sample_error": "E", "sample_job_id": "j", **seen}
    write(lake, "gold/error_signature_hour/window_date=2026-03-29", ERRORS, [error])
    (course,) = re.findall(r'class="line failed" points="([^"]*)"', report_of(lake, days=30_000))
    heights = [point.partition(",")[2] for point in course.split()]
    assert 100 < len(heights) <= 168
    assert heights.count(heights[0]) == 1


def test_many_queues_in_trouble_are_counted_and_the_worst_of_them_named(tmp_path: Path) -> None:
    told = [fact(START + timedelta(minutes=20), added=1, started=1, completed=1)]
    for n in range(200):
        waits = {"started": 50, "wait_n": 50, "sla_breaches": 50, "sla_target_ms": 10}
        told.append(fact(START, f"tenant-{n}", added=100 + n, backlog_end=50 + n, **waits))
    found = re.findall("<li>(.*?)</li>", report_of(lake_of(tmp_path, told)))
    assert len(found) == 12
    assert found[0].startswith("<b>tenant-199</b> is stuck")
    assert "195 more queues have a backlog that grows or that no worker takes." in found
    assert "195 more queues missed their SLA." in found
