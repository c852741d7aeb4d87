"""What the data pipeline costs, in CPU seconds of all its processes, beside DuckDB, rows and a plain client.

    python bench/pipeline.py --events 500000 --rounds 3

CPU time is taken from the process tree (Java, Python workers), since wall time depends on what else the machine does. A
round runs everything once, in turn; the first round is told apart as cold. Results go to standard output as Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition

import history

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.pipeline import secondopinion
from tests.serverprocess import ServerProcess

from headrace.pipeline import runs
from headrace.pipeline.connection import Address, Connection
from headrace.pipeline.lake import Lake
from headrace.pipeline.options import Options
from headrace.pipeline.reader import EventsPartition, EventsReader, _blocks, open_place
from headrace.pipeline.schemas import EVENTS, columns
from headrace.pipeline.session import start_session
from headrace.pipeline.source import HeadraceSource
from headrace.pipeline.writer import RowsToJobs, Written

COLUMNS = "seq,ts,event,queue,job_id,attempt,worker"


class Meter:
    """CPU seconds and wall seconds of a piece of work; the server's own are left out."""

    def __init__(self, without: int | None = None) -> None:
        self._without = without
        self._me = psutil.Process()

    def _cpu(self) -> float:
        total = 0.0
        for process in [self._me, *self._me.children(recursive=True)]:
            if process.pid == self._without:
                continue
            try:
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
            except psutil.NoSuchProcess:
                continue
        return total

    def of(self, work: Callable[[], object]) -> tuple[float, float]:
        cpu, wall = self._cpu(), time.perf_counter()
        work()
        return self._cpu() - cpu, time.perf_counter() - wall


# -- the row path, for comparison ----------------------------------------------------------------------------------


class RowsReader(EventsReader):
    """The same events, one tuple at a time."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, EventsPartition)
        options = self._options
        decode = msgspec.json.Decoder().decode
        names = COLUMNS.split(",")
        fields = {"job_id": "job"}
        source = open_place(options)
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

        def commands() -> Iterator[dict[str, Any]]:
            while batch := list(itertools.islice(iterator, rows.options.batch_size)):
                values = {name: [row[name] for row in batch] for name in batch[0].__fields__}
                yield {"cmd": "PUSHB", "queue": rows.options.queue, "jobs": rows.jobs(values)}

        with Connection(Address.parse(rows.options.place["url"])) as connection:
            for reply in connection.stream(commands(), rows.options.max_in_flight):
                sent += len(reply["ids"])
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


_: type[DataSource] = RowsSource


# -- measurements --------------------------------------------------------------------------------------------------


def consume(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def compare_reading(spark: SparkSession, log: Path, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"arrow": [], "rows": []}
    meter = Meter()
    for n in range(rounds + 1):
        for kind, name in sorted({"arrow": "headrace", "rows": "headrace_rows"}.items(), reverse=bool(n % 2)):
            reader = spark.read.format(name).option("path", str(log)).option("numPartitions", "2")
            frame = reader.option("columns", COLUMNS).load()
            cpu, _ = meter.of(lambda frame=frame: consume(frame))
            if n:
                found[kind].append(cpu)
    return found


def compare_writing(spark: SparkSession, rows: int, rounds: int) -> dict[str, list[float]]:
    """CPU of whoever writes; the server's is left out. Each round has queues of its own."""
    found: dict[str, list[float]] = {"arrow": [], "rows": [], "client": []}
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder) / "write.db") as server:
        url = f"headrace://127.0.0.1:{server.port}"
        meter = Meter(server.pid)
        frame = (
            spark.range(0, rows, 1, 2).selectExpr("id", "concat('user-', id) AS user", "id * 2.5 AS amount").persist()
        )
        frame.count()
        for n in range(rounds + 1):
            ways: dict[str, Callable[[], object]] = {
                "arrow": lambda n=n: _save(frame, "headrace", url, f"a{n}"),
                "rows": lambda n=n: _save(frame, "headrace_rows", url, f"r{n}"),
                "client": lambda n=n: _push_plainly(url, rows, f"c{n}"),
            }
            for kind, way in sorted(ways.items(), reverse=bool(n % 2)):
                cpu, _ = meter.of(way)
                if n:
                    found[kind].append(cpu)
    return found


def _save(frame: DataFrame, name: str, url: str, queue: str) -> None:
    frame.write.format(name).mode("append").options(url=url, queue=queue, idColumns="id").save()


def _push_plainly(url: str, rows: int, queue: str) -> None:
    """The same jobs in the same batches from one Python program that has them already."""
    make = RowsToJobs(Options.parse({"url": url, "queue": queue, "idColumns": "id"}), ["id", "user", "amount"])

    def commands() -> Iterator[dict[str, Any]]:
        for start in range(0, rows, 1000):
            ids = list(range(start, min(start + 1000, rows)))
            values = {"id": ids, "user": [f"user-{n}" for n in ids], "amount": [n * 2.5 for n in ids]}
            yield {"cmd": "PUSHB", "queue": queue, "jobs": make.jobs(values)}

    with Connection(Address.parse(url)) as connection:
        for _ in connection.stream(commands(), 8):
            pass


def compare_learning(spark: SparkSession, log: Path, folder: Path, rounds: int) -> list[tuple[str, float, float]]:
    """From captured files to facts, whole and by one percent more; Spark and DuckDB."""
    rows: list[tuple[str, float, float]] = []
    meter = Meter()
    total = len(secondopinion.ask(log).execute("SELECT seq FROM events").fetchall())
    for n in range(rounds):
        how = "cold" if n == 0 else "warm"
        rows += [(f"Spark, {how}: {what}", *cost) for what, cost in _learn_once(spark, log, folder, total, meter)]
    for n in range(rounds):
        rows.append((f"DuckDB, round {n + 1}: files to facts", *meter.of(lambda: _duckdb_facts(log))))
    return rows


def _learn_once(
    spark: SparkSession, log: Path, folder: Path, total: int, meter: Meter
) -> list[tuple[str, tuple[float, float]]]:
    lake = Lake(folder / "lake")
    source = {"path": str(log), "maxEventsPerTrigger": str(total - total // 100)}
    ingest = meter.of(lambda: runs.ingest(spark, lake, source))
    last = max(lake.numbered("bronze/events"))
    held = lake.numbered("bronze/events")[last].rename(folder / "held-back")
    tell = meter.of(lambda: runs.tell(spark, lake))
    held.rename(lake.path("bronze/events") / f"batch={last}")
    more = meter.of(lambda: runs.tell(spark, lake))
    again = meter.of(lambda: runs.tell(spark, lake, rebuild=True))
    shutil.rmtree(lake.root)
    return [("ingest", ingest), ("facts of 99 %", tell), ("facts of 1 % more", more), ("rebuild", again)]


def _duckdb_facts(log: Path) -> None:
    db = secondopinion.ask(log)
    for unit in ("hour", "day"):
        secondopinion.facts(db, unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        events = history.write(log, given.events, 3.0)
        spark = start_session("bench", master="local[2]", settings={"spark.driver.memory": "3g"})
        spark.dataSource.register(RowsSource)
        print(f"{events:,} events, {given.rows:,} rows, {given.rounds} rounds; CPU seconds\n")
        _print_ratios("read", compare_reading(spark, log, given.rounds))
        _print_ratios("write", compare_writing(spark, given.rows, given.rounds))
        print("\n| from captured files to facts | CPU s | wall s |\n|---|---|---|")
        for name, cpu, wall in compare_learning(spark, log, Path(folder), given.rounds):
            print(f"| {name} | {cpu:.1f} | {wall:.1f} |", flush=True)
        spark.stop()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(f"\nlargest process: {peak:,} MB")


def _print_ratios(what: str, found: dict[str, list[float]]) -> None:
    for kind, values in found.items():
        print(f"{what} {kind}: median {statistics.median(values):.2f} s of {[round(value, 2) for value in values]}")
    ratios = [rows / arrow for rows, arrow in zip(found["rows"], found["arrow"], strict=True)]
    print(f"{what}: rows cost {statistics.median(ratios):.2f} times Arrow", flush=True)


if __name__ == "__main__":
    main()
