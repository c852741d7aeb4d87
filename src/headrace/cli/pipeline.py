"""`headrace pipeline`: the jobs of the data pipeline. Spark is imported only when one of them runs.

To add one: a function that takes the parsed arguments, and its parser in `prepare`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace import notation
from headrace.cli.output import print_findings
from headrace.cli.session import add_action
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.eventsource import Position
    from headrace.pipeline.lake import Lake
    from headrace.pipeline.runs import FactsSummary, IngestSummary

_LAKE = "folder of the lake (default: ./lake)"
_MOST = 1_000_000_000
_MAX_EVENTS = 2_000_000
_RAISED = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)", re.MULTILINE)
"""What a traceback ends with."""
_PATIENCE_S = 5.0
"""How long a server may take to answer before Spark is started. Once it works, servers may be away for longer."""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn the history of jobs into tables and reports, and tables into jobs. All but `report` and `status` "
        'need Spark: pip install "headrace[spark]" and Java 17 or newer. docs/pipeline.md says when that is worth it.'
    )
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    ingest = _job(jobs, "ingest", _ingest, "stream captured events into the lake")
    _add_source(ingest)
    how_long = ingest.add_mutually_exclusive_group()
    how_long.add_argument("--once", action="store_true", help="ingest what there is, then exit (the default)")
    how_long.add_argument(
        "--continuous", metavar="SECONDS", type=_above_zero, help="keep going, with a batch this often"
    )
    ingest.add_argument(
        "--max-events", metavar="N", type=_at_least_one, default=_MAX_EVENTS, help=f"per batch (default: {_MAX_EVENTS})"
    )
    ingest.add_argument(
        "--accept-loss",
        action="store_true",
        help="continue past events that are no longer kept, or with the log of another database",
    )
    _add_dry_run(ingest)
    silver = _job(jobs, "silver", _facts, "derive jobs and attempts from what was ingested since the last run")
    _add_facts(silver, "silver")
    gold = _job(jobs, "gold", _facts, "compute the facts that changed")
    _add_facts(gold, "gold")
    facts = _job(jobs, "facts", _facts, "silver, then gold")
    _add_facts(facts, "silver", "gold")
    run = _job(jobs, "run", _run, "ingest what is new, then compute facts")
    _add_source(run)
    _add_facts(run, "silver", "gold")
    run.set_defaults(max_events=_MAX_EVENTS, continuous=None, accept_loss=False)
    report = _job(jobs, "report", _report, "write a report as one HTML file; needs no Spark", with_spark=False)
    report.add_argument("--out", metavar="FILE", default="report.html", help="(default: report.html)")
    report.add_argument("--days", metavar="N", type=_at_least_one, default=7, help="how far back (default: 7)")
    report.add_argument("--queue", metavar="NAME", help="one queue only")
    report.add_argument("--png", metavar="DIR", help="its sections as pictures, too; needs playwright and Chromium")
    redrive = _job(jobs, "redrive", _redrive, "enqueue dead letters again, chosen by SQL")
    redrive.add_argument(
        "--where", metavar="SQL", default="true", help="which jobs of silver, such as \"queue = 'mail'\""
    )
    redrive.add_argument(
        "--name", required=True, help="name of this redrive; under the same name nothing is enqueued twice"
    )
    redrive.add_argument("--url", metavar="URL", help="server (default: headrace://localhost:6789)")
    redrive.add_argument("--to-queue", metavar="NAME", help="a queue other than the one they were in")
    redrive.add_argument("--rate", metavar="N", type=_above_zero, help="jobs per second at most")
    _add_dry_run(redrive)
    enqueue = _job(jobs, "enqueue", _enqueue, "turn every row of a table into a job")
    enqueue.add_argument("table", metavar="PATH", help="Parquet, JSON lines or CSV")
    enqueue.add_argument("--to-queue", metavar="NAME", required=True, help="where the jobs go")
    enqueue.add_argument("--id-columns", metavar="A,B", required=True, help="columns that identify a row")
    enqueue.add_argument("--name", default="enqueue", help="name of this load; part of the jobs' ids")
    enqueue.add_argument("--url", metavar="URL", help="server (default: headrace://localhost:6789)")
    _add_dry_run(enqueue)
    verify = _job(jobs, "verify", _verify, "check the lake: gaps, repeats, counts")
    verify.add_argument("--url", metavar="URL", help="compare with the counters of this server, too")
    about = "what the lake holds and how far behind it is; needs no Spark"
    status = _job(jobs, "status", _status, about, with_spark=False)
    _add_source(status)


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to {_MOST:,} is wanted, not {text!r}")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < _MOST:
        raise argparse.ArgumentTypeError(f"a number above 0 is wanted, not {text!r}")
    return number


def _job(jobs: Any, name: str, run: Any, text: str, *, with_spark: bool = True) -> argparse.ArgumentParser:
    parser = add_action(jobs, name, text)
    parser.add_argument("--lake", metavar="DIR", default="lake", help=_LAKE)
    if with_spark:
        parser.add_argument("--master", metavar="URL", help="Spark master (default: SPARK_MASTER, or local[*])")
        parser.add_argument(
            "--conf", metavar="KEY=VALUE", action="append", default=[], help="Spark setting; repeatable"
        )
    parser.add_argument("--json", action="store_true", dest="as_json", help="JSON for machines on stdout")
    parser.set_defaults(run=run)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", metavar="URL", help="server to read from (default: headrace://localhost:6789)")
    source.add_argument("--capture", metavar="DIR", help="read this capture folder instead of a server")


def _add_facts(parser: argparse.ArgumentParser, *layers: str) -> None:
    parser.add_argument("--rebuild", action="store_true", help="recompute everything")
    _add_dry_run(parser)
    parser.set_defaults(layers=layers, sla=None)
    if "gold" in layers:
        about = "the longest acceptable wait; repeatable, remembered"
        parser.add_argument("--sla", metavar="[QUEUE=]MS", action="append", type=_promise, help=about)


def _promise(text: str) -> tuple[str, int]:
    """5000 and mail=2000 as queue and milliseconds; * stands for all queues."""
    queue, _, ms = text.rpartition("=")
    if not ms.isascii() or not ms.isdigit():
        raise argparse.ArgumentTypeError(f"milliseconds are wanted, such as 5000 or mail=2000, not {text!r}")
    return queue or "*", int(ms)


def _say(text: str) -> None:
    """Progress goes to standard error: what is printed besides may be read by machines."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _lake(arguments: argparse.Namespace) -> Lake:
    from headrace.pipeline.lake import Lake

    return Lake(Path(arguments.lake))


@contextmanager
def _session(arguments: argparse.Namespace, *checks: Callable[[argparse.Namespace], object]) -> Iterator[SparkSession]:
    """Spark, after checks of what it would find missing only half a minute later."""
    from headrace.pipeline.session import check_spark, start_session

    wrong = [pair for pair in arguments.conf if "=" not in pair]
    if wrong:
        raise HeadraceError(f"--conf needs KEY=VALUE, not {wrong[0]!r}")
    check_spark()
    for check in checks:
        check(arguments)
    _say("starting Spark")
    settings = dict(pair.split("=", 1) for pair in arguments.conf)
    # The dates of a lake are those of UTC, whatever anybody sets.
    settings["spark.sql.session.timeZone"] = "UTC"
    is_quick = _has_few_events(arguments)
    spark = start_session("headrace pipeline", master=arguments.master, settings=settings, is_quick=is_quick)
    _say(f"Spark {spark.version} is ready")
    try:
        yield spark
    except HeadraceError:
        raise
    except Exception as error:
        # Spark wraps what went wrong in pages of Java; the first lines have what a person can use.
        raise HeadraceError(_essence(str(error))) from error
    finally:
        spark.stop()


def _has_few_events(arguments: argparse.Namespace) -> bool:
    """Whether there are few in the lake and in its source, all in all."""
    from headrace.pipeline.session import FEW_EVENTS
    from headrace.pipeline.status import ingested

    if "table" in arguments or getattr(arguments, "continuous", None):
        return False  # nobody knows how many rows it has, or how many events are still to come
    ends = [ingested(_lake(arguments)), *([_newest(arguments)] if "capture" in arguments else [])]
    return max(end.seq for end in ends) <= FEW_EVENTS


def _newest(arguments: argparse.Namespace) -> Position:
    """How far the events go that can be ingested; an error says why there are none to be had."""
    from headrace.pipeline.eventsource import open_source
    from headrace.pipeline.options import Options

    return open_source(Options.parse(_source(arguments)), _PATIENCE_S).newest()


def _check_server(arguments: argparse.Namespace) -> None:
    from headrace.commands.monitoring import Ping
    from headrace.pipeline.connection import Connection

    with Connection(arguments.url, patience_s=_PATIENCE_S) as connection:
        connection.ask(Ping())


def _check_folder(arguments: argparse.Namespace) -> None:
    lake = _lake(arguments)
    lake.root.mkdir(parents=True, exist_ok=True)
    lake.check_checkpoint()


def _check_events(arguments: argparse.Namespace) -> None:
    lake = _lake(arguments)
    if not lake.numbered("bronze/events"):
        raise HeadraceError(f"{lake.root} has no events: run `headrace pipeline ingest --lake {arguments.lake}` first")


def _check_table(arguments: argparse.Namespace) -> None:
    path = arguments.table
    if not re.search(r"://|[*?\[{]", path) and not Path(path).exists():  # a file of this machine, by its name
        raise HeadraceError(f"there is no file or folder {path}")


def _essence(text: str) -> str:
    """Our own error, if Spark only carries it, else Python's, else the first line of Spark's that says anything."""
    lines = [line.strip(" \t\r:") for line in text.splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("headrace.")]
    raised = _RAISED.findall(text)
    others = [line for line in lines if not line.startswith("An error occurred while calling")]
    return next(iter([*ours, *raised, *others]), "Spark failed without a reason")


def _source(arguments: argparse.Namespace) -> dict[str, str]:
    if arguments.capture:
        return {"path": str(Path(arguments.capture).absolute())}
    return {"url": arguments.url} if arguments.url else {}


def _print_json(arguments: argparse.Namespace, **results: Any) -> int:
    """What was done, on standard output, if it was asked for."""
    if arguments.as_json:
        print(msgspec.json.encode(results).decode())
    return 0


def _say_plan(arguments: argparse.Namespace, *, with_source: bool) -> int:
    """What would be done: what bronze lacks, and what of it is in no table yet."""
    from headrace.pipeline.status import status_of

    status = status_of(_lake(arguments), _source(arguments) if with_source else {})
    if with_source and status.problem is not None:
        raise HeadraceError(status.problem)
    if with_source:
        _say(f"{notation.counted(status.behind or 0, 'event')} would be ingested")
    batches = status.batches if getattr(arguments, "rebuild", False) else status.pending
    _say(f"{_batches(batches)} of bronze would go into the tables" + (", and those events" if with_source else ""))
    return _print_json(arguments, behind=status.behind if with_source else None, batches=batches)


def _ingest(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return _say_plan(arguments, with_source=True)
    with _session(arguments, _check_folder, _newest) as spark:
        summary = _ingest_with(spark, arguments)
    return _print_json(arguments, ingested=summary)


def _ingest_with(spark: SparkSession, arguments: argparse.Namespace) -> IngestSummary:
    from headrace.pipeline.runs import ingest

    source = {**_source(arguments), "maxEventsPerTrigger": str(arguments.max_events)}
    source["failOnDataLoss"] = str(not arguments.accept_loss).lower()
    _say("reading new events")
    summary = ingest(spark, _lake(arguments), source, interval_s=arguments.continuous, say=_say)
    _say(f"ingested {notation.counted(summary.events, 'event')} in {_batches(summary.batches)}")
    return summary


def _batches(number: int) -> str:
    return notation.counted(number, "batch", "batches")


def _facts(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return _say_plan(arguments, with_source=False)
    with _session(arguments) as spark:
        summary = _facts_with(spark, arguments)
    return _print_json(arguments, facts=summary)


def _facts_with(spark: SparkSession, arguments: argparse.Namespace) -> FactsSummary:
    from headrace.pipeline.runs import derive

    promises, layers = dict(arguments.sla) if arguments.sla else None, arguments.layers
    summary = derive(spark, _lake(arguments), sla_ms=promises, rebuild=arguments.rebuild, layers=layers, say=_say)
    if summary.since is not None:
        made = f"{notation.jobs(summary.jobs)} from {notation.counted(summary.events, 'event')}"
        _say(f"run {summary.run}: {made}, since {summary.since}")
    return summary


def _run(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return _say_plan(arguments, with_source=True)
    with _session(arguments, _check_folder, _newest) as spark:
        ingested = _ingest_with(spark, arguments)
        facts = _facts_with(spark, arguments)
    _say(f"`headrace pipeline report --lake {arguments.lake}` shows what there is")
    return _print_json(arguments, ingested=ingested, facts=facts)


def _report(arguments: argparse.Namespace) -> int:
    from headrace.pipeline.report import write_report

    out = Path(arguments.out)
    write_report(_lake(arguments), out, days=arguments.days, queue=arguments.queue)
    _say(f"wrote {out} ({out.stat().st_size // 1024} kB)")
    pictures: list[Path] = []
    if arguments.png:
        from headrace.pipeline.pictures import take_pictures

        pictures = take_pictures(out, Path(arguments.png))
        _say(f"wrote {len(pictures)} pictures to {arguments.png}")
    return _print_json(arguments, report=str(out), pictures=list(map(str, pictures)))


def _redrive(arguments: argparse.Namespace) -> int:
    with _session(arguments, _check_events, _check_server) as spark:
        from headrace.pipeline.redrive import Redrive, lines

        plan = Redrive(spark, _lake(arguments), arguments.name, arguments.where, arguments.url)
        _say("choosing from the dead letters of the lake and of the server")
        counts, sent = plan.counts(), 0
        for line in [] if arguments.as_json else lines(counts):
            print(f"  {line}")
        if arguments.dry_run:
            _say("a dry run: nothing was enqueued")
        else:
            sent = plan.send(to_queue=arguments.to_queue, rate=arguments.rate, say=_say)
            _say(f"{sent:,} jobs are enqueued again under the name {arguments.name}")
    return _print_json(arguments, **msgspec.structs.asdict(counts), sent=sent)


def _enqueue(arguments: argparse.Namespace) -> int:
    from headrace.client.urls import default_url

    kind = _kind_of(arguments.table)
    with _session(arguments, *([] if arguments.dry_run else [_check_server]), _check_table) as spark:
        table = spark.read.format(kind).option("header", True).option("inferSchema", True).load(arguments.table)
        rows = table.count()
        _say(f"{rows:,} rows in {arguments.table}")
        if not arguments.dry_run:
            writer = table.write.format("headrace").mode("append").option("url", arguments.url or default_url())
            options = {"queue": arguments.to_queue, "idColumns": arguments.id_columns, "pipeline": arguments.name}
            writer.options(**options).save()
            _say(f"all of them are jobs of {arguments.to_queue}; run again, they stay the same jobs")
    return _print_json(arguments, rows=rows, sent=0 if arguments.dry_run else rows)


def _kind_of(path: str) -> str:
    kinds = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
    names = [path, *(str(found) for found in Path(path).rglob("*.*"))] if os.path.isdir(path) else [path]
    kind = next((kinds[Path(name).suffix] for name in names if Path(name).suffix in kinds), None)
    if kind is None:
        raise HeadraceError(f"{path} is neither Parquet nor JSON lines nor CSV, by its name")
    return kind


def _verify(arguments: argparse.Namespace) -> int:
    checks = [_check_events, _check_server] if arguments.url else [_check_events]
    with _session(arguments, *checks) as spark:
        from headrace.pipeline.verify import examine

        found = examine(spark, _lake(arguments), arguments.url)
    if arguments.as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print_findings(found.facts, found.problems, "the lake is in order")
    return 1 if found.problems else 0


def _status(arguments: argparse.Namespace) -> int:
    from headrace.pipeline.status import lines, status_of

    status = status_of(_lake(arguments), _source(arguments))
    for line in [msgspec.json.encode(status).decode()] if arguments.as_json else lines(status):
        print(line)
    return 0
