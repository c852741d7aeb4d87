"""`headrace pipeline` without Spark: what it says when something is missing or wrong, the report, the status."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace import notation
from headrace.backends.local.segments import Sealed, rewrite_manifest
from headrace.cli.pipeline import _essence, _has_few_events, prepare
from headrace.errors import HeadraceError
from headrace.pipeline import charts
from headrace.pipeline.lake import Lake, LakeBusy, Pointer
from headrace.pipeline.session import FEW_EVENTS
from headrace.pipeline.status import status_of
from tests.cli.terminal import Cli, warmed_up
from tests.pipeline.conftest import Chronicle
from tests.serverprocess import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Pipeline = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def warm() -> Iterator[subprocess.Popen[str]]:
    with warmed_up() as process:
        yield process


@pytest.fixture
def pipeline(warm: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """`headrace pipeline` as a process in an empty folder: its exit code, and what it says."""
    cli = Cli(None, tmp_path_factory.mktemp("commands"), warm)

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        done = cli("pipeline", *arguments, env=environment)
        return done.code, done.out + done.err

    return run


def test_a_missing_java_is_named_with_what_to_do(pipeline: Pipeline, tmp_path: Path) -> None:
    code, text = pipeline("facts", "--lake", str(tmp_path), JAVA_HOME=str(tmp_path))
    assert code == 1
    assert "Spark needs Java 17 or newer: install openjdk-17-jre-headless, or set JAVA_HOME" in text
    assert "Traceback" not in text


def test_an_old_java_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    code, text = pipeline("facts", JAVA_HOME=str(tmp_path))
    assert code == 1
    assert 'version "11.0.2"' in text


def test_a_missing_pyspark_is_named_with_what_to_do() -> None:
    hide = "import sys; sys.modules['pyspark'] = None"
    code = f"{hide}; from headrace.cli import main; sys.exit(main(['pipeline', 'facts']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert 'PySpark is not installed: pip install "headrace[spark]"' in done.stderr


def test_wrong_settings_are_refused_before_spark_starts(pipeline: Pipeline) -> None:
    assert "--conf needs KEY=VALUE, not 'x'" in pipeline("facts", "--conf", "x")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("run", "--url", "headrace://127.0.0.1:1"), 4, "no answer from the server at 127.0.0.1:1"),
        (("ingest", "--capture", "nowhere"), 1, "is no capture folder"),
        (("run", "--lake", "/proc/lake"), 1, "/proc/lake"),
        (("verify",), 1, "has no events: run `headrace pipeline ingest --lake lake` first"),
        (("redrive", "--name", "x"), 1, "has no events: run `headrace pipeline ingest --lake lake` first"),
        (
            ("enqueue", "rows.csv", "--to-queue", "q", "--id-columns", "id", "--url", "headrace://127.0.0.1:1"),
            4,
            "no answer from the server at 127.0.0.1:1",
        ),
        (
            ("enqueue", "rows.csv", "--to-queue", "q", "--id-columns", "id", "--dry-run"),
            1,
            "there is no file or folder rows.csv",
        ),
        (("enqueue", "rows.txt", "--to-queue", "q", "--id-columns", "id"), 1, "neither Parquet nor JSON lines nor CSV"),
    ],
)
def test_what_is_missing_is_told_before_spark_starts(
    pipeline: Pipeline, arguments: tuple[str, ...], code: int, text: str
) -> None:
    exit_code, said = pipeline(*arguments)
    assert exit_code == code
    assert text in said
    assert "starting Spark" not in said


@pytest.mark.parametrize("job", ["ingest", "run"])
def test_a_lake_without_its_checkpoint_is_not_begun_again_behind_its_own_back(
    pipeline: Pipeline, job: str, chronicle: Chronicle, tmp_path: Path
) -> None:
    """Batch 0 would be written anew with all events, and those that are new would count as told."""
    lake = shutil.copytree(chronicle.lake.root, tmp_path / "lake")
    shutil.rmtree(lake / "state" / "checkpoint")
    code, said = pipeline(job, "--lake", str(lake), "--capture", str(chronicle.log))
    assert code == 1
    assert "checkpoint, which says how far they go, is gone: bring it back, or begin another lake" in said
    assert "starting Spark" not in said


def test_a_report_of_nothing_says_what_to_run_first(pipeline: Pipeline, tmp_path: Path) -> None:
    code, text = pipeline("report", "--lake", str(tmp_path))
    assert code == 1
    assert "has no facts yet: run `headrace pipeline run" in text


def test_the_status_of_an_empty_lake_tells_what_is_missing(pipeline: Pipeline, tmp_path: Path) -> None:
    code, text = pipeline("status", "--lake", str(tmp_path), "--capture", str(tmp_path / "nowhere"))
    assert code == 0
    assert "is empty: run `headrace pipeline run`" in text
    assert "is no capture folder" in text


def test_the_status_does_not_wait_for_a_server_that_is_away(pipeline: Pipeline, tmp_path: Path) -> None:
    began = time.monotonic()
    code, text = pipeline("status", "--lake", str(tmp_path), "--url", "headrace://127.0.0.1:1")
    assert code == 0
    assert "no answer from the server at 127.0.0.1:1" in text
    assert time.monotonic() - began < 15


def test_the_status_tells_how_far_behind_the_lake_is(pipeline: Pipeline, chronicle: Chronicle) -> None:
    code, text = pipeline("status", "--lake", str(chronicle.lake.root), "--capture", str(chronicle.log))
    assert code == 0
    assert "the lake is 0 events behind" in text
    assert "run 2" in text


def test_the_status_counts_what_comes_behind_a_log_that_was_taken_back(tmp_path: Path) -> None:
    """The lake had event 20 of what was taken back from event 15 on: 15 to 18 of the new epoch are to come."""
    shard = tmp_path / "log" / "shard=0"
    shard.mkdir(parents=True)
    lines = [Sealed(1, 14, 14, 0, 0, 0, 100, 100, 1), Sealed(15, 18, 4, 0, 0, 0, 100, 100, 2)]
    rewrite_manifest(shard, lines)
    lake = lake_that_read(20, tmp_path)
    found = status_of(lake, {"path": str(tmp_path / "log")})
    assert (found.newest, found.behind) == (18, 4)


def lake_that_read(events: int, tmp_path: Path, epoch: int = 1) -> Lake:
    lake = Lake(tmp_path / "lake")
    offset = json.dumps({"0": {"epoch": epoch, "seq": events}})
    for name, text in (("commits", "v1\n{}"), ("offsets", f"v1\n{{}}\n{offset}")):
        (lake.checkpoint / name).mkdir(parents=True)
        (lake.checkpoint / name / "0").write_text(text)
    return lake


@pytest.mark.parametrize(
    ("read", "newest", "arguments", "is_quick"),
    [
        (20, 18, ("run",), True),
        (FEW_EVENTS + 1, 18, ("run",), False),
        (20, FEW_EVENTS + 1, ("run",), False),
        (20, FEW_EVENTS + 1, ("facts",), True),
        (20, 18, ("ingest", "--continuous", "1"), False),
    ],
)
def test_spark_is_started_for_few_events_only_where_no_more_can_come(
    read: int, newest: int, arguments: tuple[str, ...], is_quick: bool, tmp_path: Path
) -> None:
    lake, shard = lake_that_read(read, tmp_path), tmp_path / "log" / "shard=0"
    shard.mkdir(parents=True)
    rewrite_manifest(shard, [Sealed(1, newest, newest, 0, 0, 0, 100, 100, 1)])
    source = ("--capture", str(tmp_path / "log")) if arguments[0] != "facts" else ()
    parser = argparse.ArgumentParser()
    prepare(parser)
    assert _has_few_events(parser.parse_args([*arguments, *source, "--lake", str(lake.root)])) == is_quick


def test_a_log_that_ends_before_what_was_read_of_it_is_another_one(tmp_path: Path) -> None:
    """Its events would be taken for known ones until their numbers are higher."""
    with ServerProcess(tmp_path / "fresh.db") as server, server.client() as client:
        client.ok("PUSH", queue="q", data={})
        epoch = client.ok("EventSegments")["epoch"]
        lake = lake_that_read(20, tmp_path, epoch)
        source = {"url": f"headrace://127.0.0.1:{server.port}"}
        problem = status_of(lake, source).problem
        replaced = status_of(lake_that_read(20, tmp_path / "older", epoch - 1), source).problem
    assert replaced is not None
    assert f"event 20 of epoch {epoch - 1} was read, but this event log begins with another epoch" in replaced
    assert problem == (
        f"the server's event log ends with event 1 of epoch {epoch}, but event 20 of epoch {epoch} was read from it: "
        "it is the log of another database, or an older copy of that log; begin another lake"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("redrive", "--name", "x", "--rate", "0"), "a number above 0 is wanted, not '0'"),
        (("redrive", "--name", "x", "--rate", "nan"), "a number above 0 is wanted, not 'nan'"),
        (("ingest", "--continuous", "-1"), "a number above 0 is wanted, not '-1'"),
        (("ingest", "--max-events", "0"), "a whole number from 1 to 1,000,000,000 is wanted, not '0'"),
        (("run", "--sla", "mail=soon"), "milliseconds are wanted, such as 5000 or mail=2000, not 'mail=soon'"),
        (("gold", "--sla", "5s"), "milliseconds are wanted, such as 5000 or mail=2000, not '5s'"),
        (("report", "--days", "none"), "a whole number from 1 to 1,000,000,000 is wanted, not 'none'"),
        (("status", "--url", "headrace://a", "--capture", "b"), "not allowed with argument --url"),
        (("status", "--master", "local[1]"), "unrecognized arguments: --master local[1]"),
        (("report", "--conf", "spark.a=b"), "unrecognized arguments: --conf spark.a=b"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_happens(
    pipeline: Pipeline, arguments: tuple[str, ...], text: str
) -> None:
    code, said = pipeline(*arguments)
    assert code == 2
    assert text in said


def test_the_status_can_be_read_by_machines(pipeline: Pipeline, chronicle: Chronicle) -> None:
    code, text = pipeline("status", "--json", "--lake", str(chronicle.lake.root), "--capture", str(chronicle.log))
    assert code == 0
    status = json.loads(text)
    assert (status["run"], status["behind"], status["pending"], status["problem"]) == (2, 0, 0, None)
    assert status["ingested"] == status["newest"] > 2_000


def test_a_dry_run_tells_what_would_be_done_and_needs_no_spark(
    pipeline: Pipeline, chronicle: Chronicle, tmp_path: Path
) -> None:
    source = ("--capture", str(chronicle.log), "--dry-run", "--json", "--lake")
    code, text = pipeline("run", *source, str(tmp_path), JAVA_HOME="/nowhere")
    assert code == 0, text
    assert json.loads(text.splitlines()[0])["behind"] > 2_000
    code, text = pipeline("facts", "--rebuild", "--dry-run", "--json", "--lake", str(chronicle.lake.root))
    assert json.loads(text.splitlines()[0])["batches"] == len(chronicle.lake.numbered("bronze/events"))
    assert "is no capture folder" in pipeline("ingest", "--dry-run", "--capture", str(tmp_path / "x"))[1]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    with lake.locked("facts"), pytest.raises(LakeBusy, match="another `facts` works on"), lake.locked("facts"):
        raise AssertionError


def test_what_a_dead_run_left_is_removed(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for run in (1, 2):
        folder = lake.path("silver/jobs") / f"run={run}"
        folder.mkdir(parents=True)
        (folder / "part.parquet").touch()
    lake.store_pointer(Pointer(run=1))
    assert [path.name for path in lake.committed("silver/jobs")] == ["run=1"]
    lake.clean_up(lake.pointer())
    assert list(lake.numbered("silver/jobs")) == [1]


def filled(lake: Lake, table: str, run: int) -> None:
    folder = lake.path(table) / f"run={run}"
    folder.mkdir(parents=True)
    (folder / "part.parquet").touch()


def counting(lake: Lake, table: str) -> list[str]:
    return [path.name for path in lake.committed(table)]


def test_what_a_rebuild_replaced_counts_no_more_even_if_it_died_before_removing_it(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for run in (1, 2, 3):
        filled(lake, "silver/jobs", run)
        filled(lake, "silver/open_jobs", run)
    lake.store_pointer(Pointer(run=3, first_run=2))
    assert counting(lake, "silver/jobs") == ["run=2", "run=3"]
    assert counting(lake, "silver/open_jobs") == ["run=3"]
    lake.clean_up(lake.pointer())
    assert list(lake.numbered("silver/jobs")) == [2, 3]
    assert list(lake.numbered("silver/open_jobs")) == [3]


def test_dates_of_facts_are_replaced_one_by_one_from_a_date_on(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    staged = lake.staging("gold/queue_day")
    for folder, dates in ((lake.path("gold/queue_day"), (1, 2, 3)), (staged, (2, 4))):
        for day in dates:
            (folder / f"window_date=2026-11-0{day}").mkdir(parents=True)
            (folder / f"window_date=2026-11-0{day}" / folder.parts[-3]).touch()
    lake.publish_dates("gold/queue_day", staged, "2026-11-02")
    found = {path.parent.name[-1]: path.name for path in lake.path("gold/queue_day").rglob("*") if path.is_file()}
    assert found == {"1": tmp_path.name, "2": staged.parts[-3], "4": staged.parts[-3]}


def test_a_broken_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "pointer.json").write_text("{")
    with pytest.raises(HeadraceError, match=r"pointer\.json is unreadable"):
        Lake(tmp_path).pointer()


# -- the report ----------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every tag with its attributes; open tags must be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(chronicle: Chronicle, tmp_path_factory: pytest.TempPathFactory) -> str:
    from headrace.pipeline.report import write_report

    out = tmp_path_factory.mktemp("report") / "report.html"
    write_report(chronicle.lake, out)
    return out.read_text()


def test_the_report_is_one_whole_file_that_needs_nothing_else(report: str) -> None:
    tags = Tags()
    tags.feed(report)
    assert tags.open == []
    names = {name for name, _ in tags.found}
    assert "script" not in names
    assert "img" not in names
    assert not [value for _, attributes in tags.found for value in attributes.values() if value and "//" in value]
    assert len(report) < 500_000


def test_every_chart_tells_its_n(report: str) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", report)
    assert len(captions) >= 6
    assert [caption for caption in captions if "n = " not in caption] == []


def test_no_percentile_is_shown_for_few_values(chronicle: Chronicle) -> None:
    from headrace.pipeline.report import MIN_N, Facts

    facts = Facts(chronicle.lake, 7, None)
    few_and_many = set()
    for queue in facts.queues:
        for unit in ("minute", "hour", "day"):
            rows = facts.of(queue, unit)
            many = {row["window_start"]: row["wait_p95"] for row in rows if row["wait_n"] >= MIN_N}
            few_and_many |= {row["window_start"] in many for row in rows}
            for at, value in facts.percentile(queue, "wait", "p95", unit):
                window = at - at % facts.step_ms[unit]
                # Where there are few windows, each has a second point, where the next one begins.
                assert value in (many.get(window), many.get(window - facts.step_ms[unit]))
    assert few_and_many == {False, True}


def test_facts_of_short_windows_are_those_that_gold_has(chronicle: Chronicle) -> None:
    from headrace.pipeline import moments
    from headrace.pipeline.report import Facts

    for queue in (None, "mail"):
        jobs = moments.read_jobs(chronicle.lake, date.min, queue)
        attempts = moments.read_attempts(chronicle.lake, date.min, queue)
        ours = {(row["queue"], row["window_start"]): row for row in moments.facts_of(jobs, attempts, 60_000)}
        gold = {(row["queue"], row["window_start"]): row for row in Facts(chronicle.lake, 7, queue).rows("minute")}
        assert len(ours) > 50
        assert [row for key, row in ours.items() if {name: gold[key][name] for name in row} != row] == []


def test_a_history_of_some_minutes_is_shown_by_the_second(chronicle: Chronicle, tmp_path: Path) -> None:
    """The jobs of one queue that were done in one busy stretch, as a lake of their own."""
    import duckdb

    from headrace.pipeline.report import Facts, write_report

    short = Lake(tmp_path)
    shutil.copytree(chronicle.lake.path("state"), short.path("state"))
    for table in ("silver/jobs", "silver/attempts", "gold/queue_minute", "gold/queue_hour", "gold/queue_day"):
        times = {"silver/jobs": "first_active_at", "silver/attempts": "started_at"}.get(table, "window_start")
        busiest = f"""SELECT window_start FROM read_parquet('{chronicle.lake.path("gold/queue_minute")}/*/*.parquet')
                      ORDER BY started DESC, 1 LIMIT 1"""
        for old in chronicle.lake.path(table).rglob("*.parquet"):
            new = short.path(table) / old.relative_to(chronicle.lake.path(table))
            new.parent.mkdir(parents=True, exist_ok=True)
            unit = table.rpartition("_")[2] if "queue_" in table else "minute"
            duckdb.sql(
                f"""COPY (SELECT * FROM read_parquet('{old}', hive_partitioning = false)
                    WHERE date_trunc('{unit}', {times}) = date_trunc('{unit}', ({busiest}))) TO '{new}'"""
            )
    facts = Facts(short, 7, None)
    assert facts.unit == "moment"
    assert facts.end - facts.start <= 15 * 60_000
    write_report(short, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert re.search(r"jobs per (second|\d+ s), n = ", text)


def test_what_was_added_is_done_removed_or_still_there(chronicle: Chronicle, report: str) -> None:
    """Also where jobs are removed as a matter of course: every workflow has one that ends it in time."""
    from headrace.pipeline.report import Facts

    facts = Facts(chronicle.lake, 7, None)
    sums = {}
    for queue in facts.queues:
        days = facts.of(queue, "day")
        sums[queue] = {
            name: sum(day[name] for day in days) for name in ("added", "completed", "dlq", "removed", "expired")
        }
        assert sums[queue].pop("added") == sum(sums[queue].values()) + days[-1]["backlog_end"]
    assert sums["order"]["removed"] > sums["order"]["completed"] == 0
    assert "<th class=n>Removed</th>" in report
    assert '<span class="key dead">removed</span>' in report


def test_findings_are_sentences_with_numbers(report: str) -> None:
    found = re.findall(r"<li>(.*?)</li>", report)
    assert any("waited longer than the SLA of" in text for text in found)
    assert any("attempts failed with an error" in text for text in found)
    assert [text for text in found if not re.search(r"\d", text)] == []


def test_a_report_of_one_queue_is_about_that_queue(chronicle: Chronicle, tmp_path: Path) -> None:
    from headrace.pipeline.report import write_report

    write_report(chronicle.lake, tmp_path / "mail.html", queue="mail")
    text = (tmp_path / "mail.html").read_text()
    assert "<h1>Queue mail," in text
    assert "<b>image</b>" not in text
    with pytest.raises(HeadraceError, match="no facts of the queue nobody"):
        write_report(chronicle.lake, tmp_path / "x.html", queue="nobody")


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (0, ["0", "1"]),
        (1, ["0", "1"]),
        (2, ["0", "1", "2"]),
        (7, ["0", "5", "10"]),
        (70, ["0", "25", "50", "75"]),
        (30_000, ["0", "10 k", "20 k", "30 k"]),
    ],
)
def test_an_axis_of_counts_has_whole_numbers_as_the_dashboard_writes_them(most: int, ticks: list[str]) -> None:
    drawn = charts.time_chart([charts.Series("a", "active", [(0, most), (1, 0)])], (0, 1), notation.count)
    assert re.findall(r'<text class="tick y"[^>]*>([^<]*)</text>', drawn) == ticks


def test_a_heat_map_of_days_has_its_labels_at_midnight() -> None:
    hour = 3_600_000
    drawn = charts.heat_map([("mail", [1.0] * 90)], range(20 * hour, 110 * hour, hour), notation.duration)
    labels = re.findall(r'<text class="tick x"[^>]*>([^<]*)</text>', drawn)
    assert labels == ["Fri 02 Jan", "Sat 03 Jan", "Sun 04 Jan", "Mon 05 Jan"]
    assert "mail, Thu 01 Jan 20:00: 1 ms" in drawn


def test_a_line_has_gaps_where_nothing_is_known() -> None:
    points = [(0, 1.0), (1, None), (2, 3.0), (3, 4.0)]
    drawn = charts.time_chart([charts.Series("a", "active", points)], (0, 3), notation.count)
    assert drawn.count("<polyline") == 1
    assert drawn.count("<circle") == 1


# -- the lake is in order, and is found out when it is not -----------------------------------------------------------


def test_verify_finds_missing_and_repeated_events(spark: SparkSession, chronicle: Chronicle, tmp_path: Path) -> None:
    import shutil

    from headrace.pipeline.verify import examine

    assert examine(spark, chronicle.lake, None).problems == []
    copy = Lake(tmp_path / "lake")
    shutil.copytree(chronicle.lake.root, copy.root)
    batches = copy.numbered("bronze/events")
    shutil.rmtree(batches[1])
    shutil.copytree(batches[0], copy.path("bronze/events") / f"batch={max(batches) + 1}")
    problems = examine(spark, copy, None).problems
    assert any("more than once" in problem for problem in problems)
    assert any("are missing" in problem for problem in problems)


@pytest.mark.parametrize(
    ("spark_says", "told"),
    [
        (
            """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "writer.py", line 9, in write
    raise HeadraceError("no")

headrace.errors.HeadraceError: a row has no id: id (idColumns) must not all be null
""",
            "a row has no id: id (idColumns) must not all be null",
        ),
        (
            """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "writer.py", line 9, in write
    values = column.to_pylist()
             ^^^^^^^^^^^^^^^^^^

OverflowError: date value out of range

\tat org.apache.spark.api.python.BasePythonRunner
""",
            "OverflowError: date value out of range",
        ),
        (
            """An error occurred while calling o57.parquet.
: org.apache.spark.SparkException: No space left on device
\tat org.apache.spark.sql
""",
            "org.apache.spark.SparkException: No space left on device",
        ),
        (
            "[PATH_NOT_FOUND] Path does not exist: file:/gone.csv.",
            "[PATH_NOT_FOUND] Path does not exist: file:/gone.csv.",
        ),
        ("\n", "Spark failed without a reason"),
    ],
)
def test_of_the_pages_that_spark_writes_the_line_is_told_that_says_what_went_wrong(spark_says: str, told: str) -> None:
    assert _essence(spark_says) == told
