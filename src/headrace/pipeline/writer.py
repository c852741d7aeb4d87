"""Writing with Spark: every row becomes one job, however often its task is repeated.

The id of a job is a hash of the pipeline's name and the row's `idColumns`, so a row that is written again (a retried
or speculative task, a replayed micro-batch, a run that was started twice) has the same id. The server refuses an id
that it knows, and with `idTtl` it knows it even when the job is long done and gone. Nothing here may depend on the
task, the time or chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from headrace.pipeline.connection import Address, Connection
from headrace.pipeline.options import BadOption, Options

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

JOB_COLUMNS: Final = {
    "priority": "priority",
    "delay_ms": "delay",
    "max_attempts": "maxAttempts",
    "job_name": "name",
    "tags": "tags",
    "group_id": "groupId",
}
"""Columns that say how the job is run; all others are its data, unless `dataColumn` names the one that is."""
_BATCH_BYTES: Final = 8 << 20
_encode_json: Final = msgspec.json.Encoder(enc_hook=str, order="deterministic").encode
_decode_json: Final = msgspec.json.decode


@dataclass
class Written(WriterCommitMessage):
    """How many rows a task sent."""

    rows: int


class RowsToJobs:
    """How rows become jobs: the same for batches and streams."""

    def __init__(self, options: Options, names: Sequence[str]) -> None:
        if options.queue is None and "queue" not in names:
            raise BadOption("to write, name the queue: the option queue, or a column called queue")
        if not options.id_columns:
            raise BadOption(
                "to write, name the columns that tell one row from another: the option idColumns, such as order_id. "
                "The job's id is made from them, so that a repeated task adds nothing twice"
            )
        self.options = options
        self.ids = [name.strip() for name in options.id_columns.split(",")]
        needed = [*self.ids, *([options.data_column] if options.data_column else [])]
        missing = [name for name in needed if name not in names]
        if missing:
            raise BadOption(f"the columns {', '.join(missing)} are not in the data: {', '.join(names)}")
        self.data = [name for name in names if name not in JOB_COLUMNS and name != "queue"]

    def job_id(self, row: dict[str, Any]) -> str:
        key = _encode_json([self.options.pipeline, *(row[name] for name in self.ids)])
        return hashlib.blake2b(key, digest_size=16).hexdigest()

    def job(self, row: dict[str, Any]) -> dict[str, Any]:
        job = {wire: row[name] for name, wire in JOB_COLUMNS.items() if row.get(name) is not None}
        job["data"] = self._payload(row)
        job["customId"] = self.job_id(row)
        if self.options.id_ttl:
            job["idTtl"] = self.options.id_ttl
        return job

    def _payload(self, row: dict[str, Any]) -> Any:
        column = self.options.data_column
        value = {name: row[name] for name in self.data} if column is None else row[column]
        if column is not None and isinstance(value, str):
            try:
                return _decode_json(value)
            except msgspec.DecodeError:
                return value
        # Dates, decimals and the like become text; what a job's data may be is what JSON can say.
        return _decode_json(_encode_json(value))

    def batches(self, records: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """PUSHB commands of at most `batchSize` jobs, one queue each."""
        waiting: dict[str, list[dict[str, Any]]] = {}
        for batch in records:
            for row in batch.to_pylist():
                queue = str(self.options.queue or row["queue"])
                jobs = waiting.setdefault(queue, [])
                jobs.append(self.job(row))
                if len(jobs) >= self.options.batch_size:
                    yield from _within_frames(queue, waiting.pop(queue))
        for queue, jobs in waiting.items():
            yield from _within_frames(queue, jobs)


def _within_frames(queue: str, jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One command, or several when the data is large."""
    size = len(msgspec.msgpack.encode(jobs))
    parts = min(len(jobs), -(-size // _BATCH_BYTES))
    step = -(-len(jobs) // parts)
    for start in range(0, len(jobs), step):
        yield {"cmd": "PUSHB", "queue": queue, "jobs": jobs[start : start + step]}


def send(rows: RowsToJobs, records: Iterator[Any]) -> Written:
    options = rows.options
    sent = 0
    with Connection(Address.parse(options.place["url"], options.access_token)) as connection:
        for reply in connection.stream(rows.batches(records), options.max_in_flight):
            sent += len(reply["ids"])
    return Written(sent)


class JobsWriter(DataSourceArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._rows = RowsToJobs(options, schema.fieldNames())

    def write(self, iterator: Iterator[Any]) -> Written:
        return send(self._rows, iterator)


class JobsStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._rows = RowsToJobs(options, schema.fieldNames())

    def write(self, iterator: Iterator[Any]) -> Written:
        return send(self._rows, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Jobs are there when their task ends: there is nothing left to make visible."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Jobs that were written stay. The batch is tried again, and then they are known already."""
