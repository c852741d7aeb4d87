"""What the data pipeline costs, in CPU seconds of all its processes, beside DuckDB, rows and a plain client.

    bench/pipeline.py                                everything at 5 million events, some at 1 and 20; writes the table
    bench/pipeline.py --parts learn-500000 --no-write               quicker, prints only
    bench/pipeline.py --parts move,learn-20000000    some of it
    bench/pipeline.py --parts ""                     the table of what was measured before

CPU time is taken from the process tree (Java, Python workers), since wall time depends on what else the machine does.
Things that are compared run in turn, and ratios are medians of pairs. DuckDB does the same work: the same tables, from
the same files, bronze, jobs and attempts written as Parquet by date. What it says is also compared with the lake.

From events to facts every size has a process of its own, whose memory is then known. What a part found is kept in
`bench/build/pipeline`, and the table has the newest of each: a part can be measured again without the others.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, DataSourceWriter, InputPartition

import history
import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.pipeline import secondopinion
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

from headrace import Headrace, NewJob
from headrace.commands.jobs import AcknowledgeBatch, PullBatch, PushBatch, PushEntry
from headrace.model import DAY_MS
from headrace.pipeline import runs, silver
from headrace.pipeline.connection import Connection
from headrace.pipeline.eventsource import open_source
from headrace.pipeline.lake import Lake
from headrace.pipeline.options import Options
from headrace.pipeline.reader import EventsPartition, EventsReader, _blocks
from headrace.pipeline.schemas import EVENTS, columns
from headrace.pipeline.session import start_session
from headrace.pipeline.source import HeadraceSource
from headrace.pipeline.writer import RowsToJobs, Written

BLOCK = "pipeline"
BUILD = Path(__file__).resolve().parent / "build/pipeline"
PARTS = ("capture", "move", "learn-5000000", "learn-1000000", "learn-20000000", "lives-5000000")
ROUNDS = {"learn-20000000": 0, "learn-1000000": 0}
"""Other than asked for: one pass, in which the first run over all events takes the place of a rebuild."""
COLUMNS = "seq,ts,event,queue,job_id,attempt,worker"
EVENTS_PER_DAY = 1_700_000
READ_EVENTS = 400_000
HEAP = "3g"
_BECOME_SUBREAPER = 36


@dataclass
class Cost:
    cpu: float
    wall: float


class Meter:
    """CPU seconds and wall seconds of a piece of work; the server's own are left out.

    What a process used counts for its parent when it has ended. So that none ends outside of the tree, orphans are
    ours: and a reading counts if the tree did not change while it was taken.
    """

    def __init__(self, without: int | None = None) -> None:
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
        self._without = without
        self._me = psutil.Process()

    def _tree(self) -> list[psutil.Process]:
        return [p for p in [self._me, *self._me.children(recursive=True)] if p.pid != self._without]

    def _cpu(self) -> float:
        while True:
            tree, total = self._tree(), 0.0
            try:
                for process in tree:
                    times = process.cpu_times()
                    total += times.user + times.system + times.children_user + times.children_system
            except psutil.NoSuchProcess:
                continue
            if {process.pid for process in tree} == {process.pid for process in self._tree()}:
                return total

    def of(self, work: Callable[[], object]) -> Cost:
        cpu, wall = self._cpu(), time.perf_counter()
        work()
        return Cost(self._cpu() - cpu, time.perf_counter() - wall)


class Row(msgspec.Struct):
    """A line of the table: what, the figure, what was wanted, and whether that was missed."""

    what: str
    figure: str
    wanted: str = ""
    is_missed: bool = False


class Found(msgspec.Struct):
    """What a part of the measurement found, and under which circumstances."""

    rounds: int
    rows: list[Row] = []
    date: str = ""
    load: float = 0.0

    def add(self, what: str, figure: str, wanted: str = "", *, missed: bool = False) -> None:
        self.rows.append(Row(what, figure, wanted, missed))
        print(f"{what}: {figure}" + (f" (wanted {wanted}{', MISSED' if missed else ''})" if wanted else ""), flush=True)


# -- the row path, for comparison ----------------------------------------------------------------------------------


class RowsReader(EventsReader):
    """The same events, one tuple at a time."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, EventsPartition)
        options = self._options
        decode = msgspec.json.Decoder().decode
        names = COLUMNS.split(",")
        fields = {"job_id": "job"}
        source = open_source(options)
        for piece in partition.slices:
            for block in _blocks(source, piece, options):
                for line in block.splitlines():
                    event = decode(line)
                    if piece.after < event["seq"] <= piece.until:
                        event["ts"] = datetime.datetime.fromtimestamp(event["ts"] / 1000, datetime.UTC)
                        yield tuple(event.get(fields.get(name, name)) for name in names)


class RowsWriter(DataSourceWriter):
    def __init__(self, options: Options, names: list[str]) -> None:
        self._rows = RowsToJobs(options, names)

    def write(self, iterator: Iterator[Any]) -> Written:
        rows, sent = self._rows, 0

        def commands() -> Iterator[PushBatch]:
            while batch := list(itertools.islice(iterator, rows.options.batch_size)):
                values = dict(zip(batch[0].__fields__, map(list, zip(*batch, strict=True)), strict=True))
                yield PushBatch(queue=rows.options.queue or "", jobs=cast("Any", rows.jobs(values)))

        with rows.options.connect() as connection:
            for reply in connection.stream(commands(), rows.options.max_in_flight):
                sent += len(reply.ids)
        return Written(sent)


class RowsSource(HeadraceSource):
    @classmethod
    def name(cls) -> str:
        return "headrace_rows"

    def schema(self) -> str:
        kinds = columns(EVENTS)
        return ", ".join(f"{name} {kinds[name]}" for name in COLUMNS.split(","))

    def reader(self, schema: Any) -> DataSourceReader:
        return RowsReader(self._parsed)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        return RowsWriter(self._parsed, schema.fieldNames())


# -- measurements --------------------------------------------------------------------------------------------------


def consume(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def cpu(costs: list[Cost]) -> list[float]:
    return [cost.cpu for cost in costs]


def paired(over: list[float], under: list[float]) -> tuple[float, str]:
    """The median of the ratios, and it in words with its quartiles."""
    ratios = sorted(a / b for a, b in zip(over, under, strict=True))
    middle = statistics.median(ratios)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [middle] * 3
    return middle, f"{middle:.2f} (quartiles {quartiles[0]:.2f} and {quartiles[2]:.2f}, {len(ratios)} pairs)"


def in_turn(ways: dict[str, Callable[[], object]], rounds: int, meter: Meter) -> dict[str, list[Cost]]:
    """What each way costs per round, in changing order. A first round warms up and does not count."""
    found: dict[str, list[Cost]] = {name: [] for name in ways}
    for n in range(rounds + 1):
        for name in sorted(ways, reverse=bool(n % 2)):
            cost = meter.of(ways[name])
            if n:
                found[name].append(cost)
    return found


def measure_reading(spark: SparkSession, log: Path, rounds: int, found: Found) -> None:
    def read(source: str) -> None:
        reader = spark.read.format(source).option("path", str(log)).option("numPartitions", "2")
        consume(reader.option("columns", COLUMNS).load())

    ways = {"arrow": lambda: read("headrace"), "rows": lambda: read("headrace_rows")}
    costs = in_turn(ways, rounds, Meter())
    ratio, words = paired(cpu(costs["rows"]), cpu(costs["arrow"]))
    found.add(
        f"reading {READ_EVENTS:,} events of 7 columns: CPU of rows beside Arrow", words, "≥ 1.5", missed=ratio < 1.5
    )


def measure_writing(spark: SparkSession, rows: int, rounds: int, found: Found) -> None:
    """CPU of whoever writes; the server's is left out. Every time has a queue of its own."""
    with ServerProcess(":memory:") as server, server.client(timeout=60) as client:
        url = f"headrace://127.0.0.1:{server.port}"
        names = _fresh_queues(client)
        frame = spark.range(0, rows, 1, 2).selectExpr("id", "concat('user-', id) AS user", "id * 2.5 AS amount")
        frame.persist().count()
        ways: dict[str, Callable[[], object]] = {
            "arrow": lambda: _save(frame, "headrace", url, next(names)),
            "rows": lambda: _save(frame, "headrace_rows", url, next(names)),
            "client": lambda: _push_plainly(url, rows, next(names)),
        }
        costs = in_turn(ways, rounds, Meter(server.pid))
    ratio, words = paired(cpu(costs["rows"]), cpu(costs["arrow"]))
    found.add(f"writing {rows:,} rows: CPU of rows beside Arrow", words, "≥ 1.5", missed=ratio < 1.5)
    _compare_rates(costs, rows, found)


def _compare_rates(costs: dict[str, list[Cost]], rows: int, found: Found) -> None:
    """Rows per second of `df.write` and of a plain program: batches of 1000, ids, and the same `idTtl` for both."""
    ratio, words = paired([cost.wall for cost in costs["client"]], [cost.wall for cost in costs["arrow"]])
    what = f"writing {rows:,} rows in batches of 1,000 with `idTtl`"
    found.add(f"{what}: rate of `df.write` beside the library's `add_many`", words, "≥ 0.5", missed=ratio < 0.5)
    for name, words in (("arrow", "`df.write`"), ("client", "`add_many`")):
        cost = _median(costs[name])
        found.add(f"{what}: {words}", f"{rows / cost.wall:,.0f} rows/s, {cost.cpu:.1f} CPU s")


def _fresh_queues(client: Client) -> Iterator[str]:
    """Names of queues; when the next one is asked for, the one before is emptied."""
    for n in itertools.count():
        yield f"q{n}"
        client.ok("Obliterate", queue=f"q{n}", force=True)


def _save(frame: DataFrame, name: str, url: str, queue: str) -> None:
    frame.write.format(name).mode("append").options(url=url, queue=queue, idColumns="id").save()


def _push_plainly(url: str, rows: int, queue: str) -> None:
    """The same jobs in the same batches, as safe to repeat, from one program that uses the library."""
    once = datetime.timedelta(milliseconds=DAY_MS)

    def job(n: int) -> NewJob:
        data = {"id": n, "user": f"user-{n}", "amount": n * 2.5}
        return NewJob(data=data, options={"job_id": f"{n:032x}", "once": once})

    with Headrace(url).sync() as app:
        jobs = app.queue(queue)
        for start in range(0, rows, 1000):
            jobs.add_many([job(n) for n in range(start, min(start + 1000, rows))])


def measure_capture(rounds: int, found: Found) -> None:
    """CPU of the server for the same jobs, pushed, pulled and acknowledged, with its log kept and without."""
    spent: dict[str, list[float]] = {"kept": [], "bounded": []}
    for n in range(rounds):
        for name in sorted(spent, reverse=bool(n % 2)):
            spent[name].append(_serve_jobs(is_kept=name == "kept"))
    ratio, words = paired(spent["kept"], spent["bounded"])
    found.add(
        "CPU of a server that captures beside one with the bounded log, 40,000 jobs",
        words,
        "≤ 1.05",
        missed=ratio > 1.05,
    )


def _serve_jobs(*, is_kept: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--capture", f"{folder}/log", "--capture-segment-ms", "60000") if is_kept else ()
        with ServerProcess(Path(folder) / "jobs.db", *flags) as server:
            before = psutil.Process(server.pid).cpu_times()
            with Connection(f"headrace://127.0.0.1:{server.port}") as connection:
                data = (msgspec.Raw(msgspec.msgpack.encode({"n": n})) for n in range(400))
                pushes = (PushBatch(queue="q", jobs=[PushEntry(data=one)] * 100) for one in data)
                for _ in connection.stream(pushes, 8):
                    pass
                for _ in range(400):
                    pulled = connection.ask(PullBatch(queue="q", count=100))
                    ids = [msgspec.msgpack.decode(job)["id"] for job in pulled.jobs]
                    connection.ask(AcknowledgeBatch(ids=ids))
            after = psutil.Process(server.pid).cpu_times()
    return after.user + after.system - before.user - before.system


def measure_learning(spark: SparkSession, log: Path, folder: Path, events: int, rounds: int, found: Found) -> None:
    """From captured files to facts, whole and by one percent more."""
    meter = Meter()
    lake = Lake(folder / "lake")
    passes = [_learn_once(spark, log, lake, events, meter, rebuilds=rounds > 0) for _ in range(rounds + 1)]
    cold, warm = passes[0], {name: _median([one[name] for one in passes[1:] or passes]) for name in passes[0]}
    million = f"{events / 1e6:.1f} million events"
    if rounds:
        _compare_with_duckdb(log, folder, rounds, million, cold, warm, found)
    share, limit = warm["more"].cpu / warm["rebuild"].cpu, 0.25 if events < 15_000_000 else 0.10
    found.add(
        f"{million}, bronze to gold of 1 % more beside all", f"{_cost(warm['more'])}, {share:.0%}",
        f"≤ {limit:.0%}" if events > 4_000_000 else "", missed=events > 4_000_000 and share > limit,
    )  # fmt: skip
    found.add(f"{million}, most memory of Java with a heap of {HEAP}", f"{_peak_mb():,} MB")


def _compare_with_duckdb(
    log: Path, folder: Path, rounds: int, million: str, cold: dict[str, Cost], warm: dict[str, Cost], found: Found
) -> None:
    meter = Meter()
    ducks = [_duckdb_once(log, folder / "duck", meter) for _ in range(rounds)]
    duck = {name: _median([one[name] for one in ducks]) for name in ducks[0]}
    for name, words in (("ingest", "captured files to bronze"), ("first", "bronze to gold")):
        found.add(f"{million}, {words}: Spark, cold", _cost(cold[name]))
    for name, words in (("ingest", "captured files to bronze"), ("rebuild", "bronze to gold")):
        found.add(f"{million}, {words}: Spark, warm", _cost(warm[name]))
        found.add(f"{million}, {words}: DuckDB", _cost(duck[name]))
        ratio = warm[name].cpu / duck[name].cpu
        limit = 5 if name == "rebuild" else None
        found.add(
            f"{million}, {words}: Spark, warm, beside DuckDB", f"{ratio:.1f} times the CPU",
            "≤ 5" if limit else "", missed=bool(limit) and ratio > 5,
        )  # fmt: skip


def _median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(c.cpu for c in costs), statistics.median(c.wall for c in costs))


def _cost(cost: Cost) -> str:
    return f"{cost.cpu:.0f} CPU s ({cost.wall:.0f} s)"


def _learn_once(
    spark: SparkSession, log: Path, lake: Lake, total: int, meter: Meter, *, rebuilds: bool
) -> dict[str, Cost]:
    shutil.rmtree(lake.root, ignore_errors=True)
    source = {"path": str(log), "maxEventsPerTrigger": str(total - total // 100)}
    costs = {"ingest": meter.of(lambda: runs.ingest(spark, lake, source))}
    batches = lake.numbered("bronze/events")
    held = batches[max(batches)].rename(lake.root / "held-back")
    costs["first"] = meter.of(lambda: runs.derive(spark, lake))
    held.rename(batches[max(batches)])
    costs["more"] = meter.of(lambda: runs.derive(spark, lake))
    costs["rebuild"] = meter.of(lambda: runs.derive(spark, lake, rebuild=True)) if rebuilds else costs["first"]
    return costs


def _duckdb_once(log: Path, folder: Path, meter: Meter) -> dict[str, Cost]:
    """The same tables by DuckDB."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    db = secondopinion.connect()

    def copy(table: str, ms: str) -> None:
        dated = f"SELECT *, make_timestamp({ms} * 1000)::DATE AS date FROM {table}"
        db.execute(f"COPY ({dated}) TO '{folder / table}' (FORMAT parquet, PARTITION_BY (date))")

    def ingest() -> None:
        secondopinion.read_log(db, log)
        copy("events", "ts")
        db.execute("DROP TABLE events")

    def learn() -> None:
        db.execute(f"CREATE TABLE events AS SELECT * EXCLUDE (date) FROM read_parquet('{folder}/events/*/*.parquet')")
        secondopinion.tell(db)
        copy("jobs", "finished")
        copy("attempts", "ended")
        for unit in ("minute", "hour", "day"):
            secondopinion.facts(db, unit)

    return {"ingest": meter.of(ingest), "rebuild": meter.of(learn)}


def measure_silver(spark: SparkSession, lake: Lake, rounds: int, found: Found) -> None:
    """Lives of jobs in one shuffle, beside the form that first drops repeated events."""
    events = runs.read_bronze(spark, lake)
    assert events is not None

    def lives(given: DataFrame) -> DataFrame:
        return silver.judged(silver.lives_of(silver.by_life(given)))

    ways = {
        "one": lambda: consume(lives(events)),
        "two": lambda: consume(lives(events.dropDuplicates(["shard", "epoch", "seq"]))),
    }
    costs = in_turn(ways, rounds, Meter())
    ratio, words = paired(cpu(costs["one"]), cpu(costs["two"]))
    found.add("events to lives of jobs: CPU beside the form with two shuffles", words, "≤ 0.5", missed=ratio > 0.5)


def check_answers(log: Path, lake: Lake, found: Found) -> None:
    """Rows that Spark and DuckDB do not agree on."""
    db = secondopinion.ask(log)
    for table, differing in secondopinion.disagreements(db, lake.root).items():
        found.add(f"rows of {table} on which Spark and DuckDB differ", f"{differing:,}", "0", missed=differing > 0)


def _peak_mb() -> int:
    """The most memory that a Java process of ours had."""
    peaks = [0]
    for process in psutil.Process().children(recursive=True):
        if process.name() == "java":
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks += [int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM")]
    return max(peaks)


# -- the table -----------------------------------------------------------------------------------------------------


def table(parts: list[Found]) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("pyspark", "duckdb", "pyarrow"))
    when = " to ".join(sorted({min(part.date for part in parts), max(part.date for part in parts)}))
    loads = sorted(part.load for part in parts)
    lines = [
        f"Measured {when}: {versions}, Python {platform.python_version()}, `local[2]`, {os.cpu_count()} cores that "
        f"others used at the same time (load average {loads[0]:.1f} to {loads[-1]:.1f}).",
        "CPU seconds of all processes but the server; wall seconds in brackets say little here. Cold is the first pass "
        f"of a session, warm {_rounds(parts)}.",
        "",
        "| what | figure | wanted |",
        "|---|---|---|",
    ]
    for row in (row for part in parts for row in part.rows):
        mark = f" {report.MISSED}" if row.is_missed else ""
        lines.append(f"| {row.what} | {row.figure}{mark} | {row.wanted} |")
    return "\n".join(lines)


def _rounds(parts: list[Found]) -> str:
    learned = [part.rounds for part in parts if any(row.what.endswith("Spark, warm") for row in part.rows)]
    return f"the median of {learned[0]} more" if learned and learned[0] > 1 else "the one after it"


def session() -> SparkSession:
    spark = start_session("bench", master="local[2]", settings={"spark.driver.memory": HEAP})
    spark.dataSource.register(RowsSource)
    return spark


def move(rows: int, found: Found) -> None:
    """Rows out of the log and into queues."""
    with tempfile.TemporaryDirectory() as name:
        history.write(Path(name), READ_EVENTS, 1)
        spark = session()
        measure_reading(spark, Path(name), 2 * found.rounds, found)
        measure_writing(spark, rows, 2 * found.rounds, found)
        spark.stop()


def learn(events: int, found: Found) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = history.write(folder / "log", events, max(1.0, events / EVENTS_PER_DAY))
        spark = session()
        measure_learning(spark, folder / "log", folder, made, found.rounds, found)
        if found.rounds:
            check_answers(folder / "log", Lake(folder / "lake"), found)
        spark.stop()


def tell_lives(events: int, found: Found) -> None:
    """Twice as many pairs as elsewhere: they differ by a quarter, and what is wanted lies close to what is found."""
    with tempfile.TemporaryDirectory() as name:
        log, lake = Path(name) / "log", Lake(Path(name) / "lake")
        history.write(log, events, max(1.0, events / EVENTS_PER_DAY))
        spark = session()
        runs.ingest(spark, lake, {"path": str(log)})
        measure_silver(spark, lake, 2 * found.rounds + 1, found)
        spark.stop()


def measure(part: str, given: argparse.Namespace) -> None:
    """Measure one part and keep what it found."""
    found = Found(ROUNDS.get(part, given.rounds))
    if part == "capture":
        measure_capture(max(9, given.rounds), found)
    elif part == "move":
        move(given.rows, found)
    elif part.startswith("lives-"):
        tell_lives(int(part.removeprefix("lives-")), found)
    else:
        learn(int(part.removeprefix("learn-")), found)
    found.date, found.load = datetime.datetime.now(datetime.UTC).date().isoformat(), os.getloadavg()[0]
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"{part}.json").write_bytes(msgspec.json.encode(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"(default: {','.join(PARTS)})")
    parser.add_argument("--rows", type=int, default=500_000, help="rows that are written (default: 500000)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3; rows are moved twice as often)")
    parser.add_argument("--no-write", action="store_true", help="print the table, leave the page alone")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    parts = [part for part in given.parts.split(",") if part]
    if given.here:
        measure(parts[0], given)
        return
    for part in parts:
        options = ("--rows", str(given.rows), "--rounds", str(given.rounds), "--here")
        subprocess.run([sys.executable, __file__, "--parts", part, *options], check=True)
    files = [BUILD / f"{part}.json" for part in (parts if given.no_write else PARTS)]
    text = table([msgspec.json.decode(file.read_bytes(), type=Found) for file in files if file.exists()])
    print(f"\n{text}")
    if not given.no_write:
        report.write_block(BLOCK, text)


if __name__ == "__main__":
    main()
