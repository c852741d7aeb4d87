"""Reading with Spark: events by position, and jobs, results and dead letters by number. Arrow batches, not rows.

Readers are pickled and sent to the executors: they hold options only, and open what they need when they read.
Where there is nothing to read, one partition says so: of none Spark makes one of its own, which says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from pyspark.sql.datasource import DataSourceReader, EqualTo, Filter, InputPartition

from headrace.commands._base import Command
from headrace.commands.scans import ScanDeadLetters, ScanJobs, ScanResults
from headrace.model import QueueName
from headrace.pipeline.eventsource import (
    EventsLost,
    EventSource,
    Slice,
    check_kept,
    open_source,
    shared_out,
    slices_between,
)
from headrace.pipeline.options import BadOption, Options
from headrace.pipeline.schemas import EVENTS, JOB_ROWS, LETTER_ROWS, RESULT_ROWS, arrow, columns

ROWS_PER_BATCH = 20_000
EVENTS_PER_PARTITION = 500_000


class EventsPartition(InputPartition):
    """A stretch of the log for one task."""

    def __init__(self, slices: list[Slice]) -> None:
        super().__init__(slices)
        self.slices = slices


def partitions_of(slices: list[Slice], options: Options) -> list[EventsPartition]:
    total = sum(piece.count for piece in slices)
    count = options.num_partitions or -(-total // EVENTS_PER_PARTITION)
    return [EventsPartition(part) for part in shared_out(slices, count)]


def read_events(partition: EventsPartition, options: Options) -> Iterator[Any]:
    """The partition's events as Arrow batches."""
    from headrace.pipeline.arrow import chosen, events_table

    source = open_source(options)
    wanted = chosen_columns(options, EVENTS)
    for piece in partition.slices:
        for lines in _blocks(source, piece, options):
            table = events_table(lines, piece.segment.shard)
            kept = chosen(table, piece, options.queue).select(wanted)
            yield from kept.to_batches(max_chunksize=ROWS_PER_BATCH)


def _blocks(source: EventSource, piece: Slice, options: Options) -> Iterator[bytes]:
    try:
        yield from source.blocks(piece.segment, piece.after, piece.until)
    except EventsLost:
        if options.fail_on_data_loss:
            raise


def chosen_columns(options: Options, table: str) -> list[str]:
    """The columns that were asked for: Spark does not push projections down to Python sources."""
    known = list(columns(table))
    if options.columns is None:
        return known
    wanted = [name.strip() for name in options.columns.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise BadOption(f"the option columns names {unknown or 'nothing'}; there are {', '.join(known)}")
    return [name for name in known if name in wanted]


class EventsReader(DataSourceReader):
    """Events between two positions, as they were when the query was planned."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        source = open_source(options)
        newest = source.newest()
        start = options.position(options.starting_offset, newest)
        end = options.position(options.ending_offset, newest)
        window = source.window(start)
        check_kept(window, start, fail=options.fail_on_data_loss)
        return partitions_of(slices_between(window.segments, start, end), options) or [EventsPartition([])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, EventsPartition)
        return read_events(partition, self._options)


class Scan(NamedTuple):
    """How a kind of rows is asked for: the command, the field of its reply, the table, and a row of it."""

    command: Callable[..., Command[Any]]
    field: str
    table: str
    row: str


SCANS = {
    "jobs": Scan(ScanJobs, "jobs", JOB_ROWS, "job_row"),
    "results": Scan(ScanResults, "results", RESULT_ROWS, "result_row"),
    "dlq": Scan(ScanDeadLetters, "entries", LETTER_ROWS, "letter_row"),
}


class NumbersPartition(InputPartition):
    """Jobs with after < number <= until."""

    def __init__(self, after: int, until: int) -> None:
        super().__init__((after, until))
        self.after = after
        self.until = until


class ScanReader(DataSourceReader):
    """Jobs, results or dead letters as the server has them now."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._scan = SCANS[options.kind]

    def partitions(self) -> Sequence[InputPartition]:
        with self._options.connect() as connection:
            found = connection.ask(self._scan.command(limit=1, until=0, **self._filter()))
        count, oldest = self._options.num_partitions or 2, found.oldest
        bounds = [oldest + (found.newest - oldest) * part // count for part in range(count + 1)]
        parts = [NumbersPartition(after, until) for after, until in pairwise(bounds) if until > after]
        return parts or [NumbersPartition(oldest, oldest)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, NumbersPartition)
        import pyarrow as pa

        from headrace.pipeline import arrow as rows

        make: Callable[[Any], dict[str, Any]] = getattr(rows, self._scan.row)
        schema = arrow(self._scan.table, chosen_columns(self._options, self._scan.table))
        for page in self._pages(partition):
            yield pa.RecordBatch.from_pylist([make(found) for found in page], schema=schema)

    def _filter(self) -> dict[str, Any]:
        options = self._options
        given = {"queue": options.queue, "state": options.state}
        return {name: value for name, value in given.items() if value is not None}

    def _pages(self, partition: NumbersPartition) -> Iterator[list[Any]]:
        wanted = {"until": partition.until, "limit": self._options.fetch_size, **self._filter()}
        after: int | msgspec.UnsetType = partition.after
        with self._options.connect() as connection:
            while after is not msgspec.UNSET:
                page = connection.ask(self._scan.command(after=after, **wanted))
                if found := getattr(page, self._scan.field):
                    yield found
                after = page.next


# -- conditions that the server checks -----------------------------------------------------------------------------


class _TakesFilters(DataSourceReader):
    """Takes `queue = 'mail'` and `state = 'waiting'` out of a query, where the options do not say otherwise."""

    _options: Options

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        usable = ("queue", "state") if self._options.kind == "jobs" else ("queue",)
        for given in filters:
            name = ".".join(given.attribute) if isinstance(given, EqualTo) else ""
            is_free = name in usable and getattr(self._options, name) is None
            if isinstance(given, EqualTo) and is_free and _is_name(given.value):
                self._options = msgspec.structs.replace(self._options, **{name: given.value})
            else:
                yield given


def _is_name(value: Any) -> bool:
    """Whether the server takes it for the name of a queue: what it would refuse is a condition that no row fulfils."""
    try:
        msgspec.convert(value, QueueName)
    except msgspec.ValidationError:
        return False
    return True


class FilteringEventsReader(_TakesFilters, EventsReader):
    pass


class FilteringScanReader(_TakesFilters, ScanReader):
    pass


def reader_of(options: Options, *, takes_filters: bool) -> DataSourceReader:
    if options.kind == "events":
        return (FilteringEventsReader if takes_filters else EventsReader)(options)
    return (FilteringScanReader if takes_filters else ScanReader)(options)
