"""Reading the event log as a stream: offsets per shard, bounded batches, and lag that shows in Spark's progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from headrace.pipeline.eventsource import (
    BEGINNING,
    EventSource,
    Position,
    check_kept,
    farthest,
    open_source,
    slices_between,
)
from headrace.pipeline.options import Options, from_offset, to_offset
from headrace.pipeline.reader import EventsPartition, partitions_of, read_events


class EventsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of events from a position on.

    `latestOffset` and `partitions` run in one process beside the driver, `read` in the tasks.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._source: EventSource | None = None
        self._target: Position | None = None
        self._held_since: float | None = None
        self._settled: Position | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}  # sockets stay where they are

    def _opened(self) -> EventSource:
        if self._source is None:
            self._source = open_source(self._options)
        return self._source

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        which = self._options.starting_offset
        newest = self._opened().newest() if which == "latest" else BEGINNING
        return to_offset(self._options.position(which, newest))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._opened().newest()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return to_offset(self._opened().newest())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_events_per_trigger is not None:
            return ReadMaxRows(options.max_events_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        options, position = self._options, from_offset(start)
        window = self._opened().window(position)
        check_kept(window, position, fail=options.fail_on_data_loss)
        if position == BEGINNING or position.epoch == window.newest.epoch:
            self._settle(position)  # positions of older epochs the server has moved back itself
        segments = window.segments
        if self._target is not None:
            segments = [piece.segment for piece in slices_between(segments, position, self._target)]
        if self._waits_for_more(sum(s.count for s in slices_between(segments, position, window.newest))):
            return start
        is_free = isinstance(limit, ReadAllAvailable)
        max_events = None if is_free else options.max_events_per_trigger
        max_bytes = None if is_free else options.max_bytes_per_trigger
        reached = farthest(segments, position, max_events, max_bytes)
        return to_offset(reached if self._target is None else min(reached, max(self._target, position)))

    def _waits_for_more(self, available: int) -> bool:
        """Whether a small batch is put off, so that it may grow: not for long, and not when all is to be read now."""
        least = self._options.min_events_per_trigger
        if least is None or self._target is not None or not 0 < available < least:
            self._held_since = None
            return False
        now = time.monotonic()
        self._held_since = self._held_since or now
        if now - self._held_since < self._options.max_trigger_delay:
            return True
        self._held_since = None
        return False

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, until = from_offset(start), from_offset(end)
        if until <= begin:
            return []
        window = self._opened().window(begin)
        check_kept(window, begin, fail=self._options.fail_on_data_loss)
        return partitions_of(slices_between(window.segments, begin, until), self._options)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, EventsPartition)
        return read_events(partition, self._options)

    def _settle(self, position: Position) -> None:
        """Tell the server how far this consumer is.

        Spark asks for the end of the next batch when the one before is committed, and also when a run begins or ends;
        `commit` it calls a batch late, and never for the last one of a run.
        """
        if self._options.consumer is not None and position != self._settled:
            self._opened().settle(self._options.consumer, position)
            self._settled = position
