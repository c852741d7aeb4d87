"""Spark's data source `headrace`: events, jobs, results and dead letters as tables; tables as jobs.

spark.read.format("headrace").option("kind", "dlq").load()
spark.readStream.format("headrace").option("maxEventsPerTrigger", 100_000).load()
df.write.format("headrace").mode("append").option("queue", "mail").option("idColumns", "order_id").save()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from headrace.pipeline.options import BadOption, Options
from headrace.pipeline.schemas import EVENTS, columns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class HeadraceSource(DataSource):
    """See docs/pipeline.md for all options."""

    takes_filters = True
    """Whether conditions are left to the server. Spark refuses such sources in sessions that do not allow it."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    @property
    def _parsed(self) -> Options:
        return Options.parse(dict(self.options))

    def schema(self) -> str:
        from headrace.pipeline.reader import SCANS, chosen_columns

        options = self._parsed
        table = EVENTS if options.kind == "events" else SCANS[options.kind].table
        kinds = columns(table)
        return ", ".join(f"{name} {kinds[name]}" for name in chosen_columns(options, table))

    def reader(self, schema: StructType) -> DataSourceReader:
        from headrace.pipeline.reader import reader_of

        options = self._parsed
        return reader_of(options, takes_filters=self.takes_filters and options.pushdown == "auto")

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from headrace.pipeline.stream import EventsStreamReader

        if self._parsed.kind != "events":
            raise BadOption("only events can be read as a stream: leave out the option kind")
        return EventsStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from headrace.pipeline.writer import JobsWriter

        if overwrite:
            raise BadOption('jobs are added and never replaced: write with mode("append")')
        return JobsWriter(self._parsed, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from headrace.pipeline.writer import JobsStreamWriter

        if overwrite:
            raise BadOption('jobs are added and never replaced: write with outputMode("append") or "update"')
        if self._parsed.on_duplicate == "fail":
            raise BadOption("a stream repeats batches after a break, so duplicates are in order: leave out onDuplicate")
        return JobsStreamWriter(self._parsed, schema)


class FoundSource(HeadraceSource):
    """The same, as Spark finds it by itself, in sessions where it was not registered."""

    takes_filters = False
