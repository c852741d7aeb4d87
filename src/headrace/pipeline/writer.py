"""Idempotent writes with Spark: every row becomes one job, however often its task is repeated.

The id of a job is a hash of the pipeline's name and the row's `idColumns`, so a row that is written again (a retried
or speculative task, a replayed micro-batch, a run that was started twice) has the same id. The server deduplicates by
id, and with `idTtl` it remembers an id even when its job has been removed. Nothing here may depend on the
task, the time or randomness.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from headrace.commands.jobs import PushBatch
from headrace.commands.monitoring import Ping
from headrace.commands.queries import FoundJob, GetJobByCustomId
from headrace.errors import HeadraceError, NotFound
from headrace.model import MAX_SAFE_INTEGER, js_number
from headrace.pipeline.connection import Connection
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
_LOOKUPS_AT_ONCE: Final = 100
_encode_json: Final = msgspec.json.Encoder(enc_hook=str).encode
_encode_id: Final = msgspec.msgpack.Encoder(order="deterministic").encode
"""Not as JSON, in which NaN, infinity and null are the same."""
_decode_json: Final = msgspec.json.decode
_LONG_NUMBER: Final = re.compile(r"\d{10}")


class _Id(msgspec.Struct):
    id: str = msgspec.field(name="customId")


class _Known(msgspec.Struct, rename="camel"):
    created_at: float
    data: Any = None


_decode_ids: Final = msgspec.msgpack.Decoder(list[_Id]).decode
_decode_known: Final = msgspec.msgpack.Decoder(_Known, strict=False, ext_hook=lambda code, data: None).decode


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
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise BadOption(f"several columns are called {', '.join(twice)}: rename or drop all but one of them")
        self.data = [name for name in names if name not in JOB_COLUMNS and name != "queue"]

    def jobs(self, columns: dict[str, list[Any]]) -> list[msgspec.Struct]:
        """The jobs of rows that are given as columns of plain values."""
        fields: dict[str, Iterable[Any]] = {"data": self._payloads(columns), "customId": self._ids(columns)}
        if self.options.id_ttl:
            fields["idTtl"] = repeat(self.options.id_ttl)
        for name, wire in JOB_COLUMNS.items():
            if name in columns:
                fields[wire] = (msgspec.UNSET if value is None else value for value in columns[name])
        return list(map(_record(tuple(fields)), *fields.values()))

    def _ids(self, columns: dict[str, list[Any]]) -> Iterator[str]:
        name = self.options.pipeline
        if all(None in columns[column] for column in self.ids):
            self._refuse_nameless(columns)
        for values in zip(*(columns[column] for column in self.ids), strict=True):
            yield hashlib.blake2b(_encode_id([name, *values]), digest_size=16).hexdigest()

    def _refuse_nameless(self, columns: dict[str, list[Any]]) -> None:
        """Rows without any id would all become the same job."""
        if any(all(value is None for value in values) for values in zip(*(columns[c] for c in self.ids), strict=True)):
            raise HeadraceError(f"a row has no id: {', '.join(self.ids)} (idColumns) must not all be null")

    def _payloads(self, columns: dict[str, list[Any]]) -> Iterable[Any]:
        column = self.options.data_column
        if column is not None:
            return map(_as_json, columns[column])
        if not self.data:
            return repeat({})
        return map(_record(tuple(self.data)), *(columns[name] for name in self.data))

    def batches(self, records: Iterable[Any]) -> Iterator[PushBatch]:
        """Pushes of at most `batchSize` jobs, to one queue each."""
        waiting: dict[str, list[msgspec.Struct]] = {}
        size = self.options.batch_size
        for batch in records:
            columns = {name: _plain_values(batch.column(name)) for name in batch.schema.names}
            jobs = self.jobs(columns)
            for queue, share in _by_queue(jobs, self.options.queue, columns.get("queue")).items():
                ready = waiting.setdefault(queue, [])
                ready += share
                whole = len(ready) - len(ready) % size
                for start in range(0, whole, size):
                    yield from _within_frames(queue, ready[start : start + size])
                del ready[:whole]
        for queue, rest in waiting.items():
            if rest:
                yield from _within_frames(queue, rest)


@functools.cache
def _record(names: tuple[str, ...]) -> type[msgspec.Struct]:
    """A map with these keys. Unlike dicts, millions of them cost the garbage collector nothing."""
    keys = {f"field{n}": name for n, name in enumerate(names)}
    return msgspec.defstruct("Record", [(field, Any) for field in keys], gc=False, rename=keys)


def _plain_values(column: Any) -> list[Any]:
    """What a job's data may be is what JSON can say: dates, decimals, bytes and the like become text, maps objects."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if kinds.is_decimal(column.type):  # the same text that Python makes of it, for a tenth of the work
        column = column.cast(pa.string())
    kind = column.type
    if kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind) or kinds.is_string(kind):
        plain: list[Any] = column.to_pylist()
        is_wide = kinds.is_integer(kind) and any(map(_is_wide, pc.min_max(column).as_py().values()))
        return [*map(_narrowed, plain)] if is_wide else plain
    wanted = _in_utc(kind)
    values = (column if wanted == kind else column.cast(wanted)).to_pylist(maps_as_pydicts="strict")
    decoded: list[Any] = _from_json(_encode_json(values).decode())
    return decoded


def _in_utc(kind: Any) -> Any:
    """The type with its times in UTC: those of the session's zone would be other text, and another id, elsewhere."""
    import pyarrow as pa
    import pyarrow.types as kinds

    if kinds.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if kinds.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    if kinds.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in kind])
    if kinds.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(_in_utc(kind.key_type)), kind.item_field.with_type(_in_utc(kind.item_type))
        )
    return kind


def _as_json(value: Any) -> Any:
    """Text that is JSON stands for what it says; other text, and other values, for themselves."""
    if not isinstance(value, str):
        return value
    try:
        return _from_json(value)
    except (msgspec.DecodeError, OverflowError):
        return value


def _from_json(text: str) -> Any:
    value = _decode_json(text)
    return _narrowed(value) if _LONG_NUMBER.search(text) else value


def _is_wide(value: int | None) -> bool:
    return value is not None and type(js_number(value)) is float


def _narrowed(value: Any) -> Any:
    """Whole numbers beyond 32 bits as floats, since JavaScript clients take 64-bit integers for BigInts.

    Those that a float cannot hold stay as they are if they can: a BigInt is better than another number.
    """
    kind = type(value)
    if kind is int:
        is_exact = abs(value) <= MAX_SAFE_INTEGER or abs(value) >= 2**63
        return js_number(value) if is_exact else value
    if kind is dict:
        return {key: _narrowed(item) for key, item in value.items()}
    if kind is list:
        return [_narrowed(item) for item in value]
    return value


def _by_queue(
    jobs: list[msgspec.Struct], chosen: str | None, queues: list[Any] | None
) -> dict[str, list[msgspec.Struct]]:
    if chosen is not None or queues is None:
        return {str(chosen): jobs}
    if None in queues:
        raise HeadraceError("a row names no queue: the column queue must not be null")
    shares: dict[str, list[msgspec.Struct]] = {}
    for queue, job in zip(queues, jobs, strict=True):
        shares.setdefault(str(queue), []).append(job)
    return shares


def _within_frames(queue: str, jobs: list[msgspec.Struct]) -> Iterator[PushBatch]:
    """One command, or several when the data is large."""
    encoded = msgspec.msgpack.encode(jobs)
    if len(encoded) <= _BATCH_BYTES or len(jobs) == 1:
        yield PushBatch(queue=queue, jobs=cast("Any", msgspec.Raw(encoded)))
        return
    half = len(jobs) // 2
    yield from _within_frames(queue, jobs[:half])
    yield from _within_frames(queue, jobs[half:])


def send(rows: RowsToJobs, records: Iterator[Any], *, refused_before: float | None = None) -> Written:
    """Make jobs of the records. Those that were jobs before this moment of the server are refused, if it is given."""
    sent = 0
    with rows.options.connect() as connection, rows.options.connect() as lookup:
        batches: Iterable[PushBatch] = rows.batches(records)
        if refused_before is not None:
            batches = _only_new(batches, lookup, refused_before)
        for reply in connection.stream(batches, rows.options.max_in_flight):
            sent += len(reply.ids)
    return Written(sent)


def _only_new(batches: Iterable[PushBatch], lookup: Connection, moment: float) -> Iterator[PushBatch]:
    """The batches, as long as no job of theirs is older than the moment."""
    for batch in batches:
        asked = (
            GetJobByCustomId(custom_id=job.id, queue=batch.queue)
            for job in _decode_ids(cast("msgspec.Raw", batch.jobs))
        )
        found = map(_known, lookup.outcomes(asked, _LOOKUPS_AT_ONCE))
        known = [job for job in found if job is not None and job.created_at < moment]
        if known:
            sample = ", ".join(_encode_json(job.data).decode()[:80] for job in known[:3])
            raise HeadraceError(
                f"{len(known)} rows of a batch are jobs already, such as {sample}. With onDuplicate=ignore they would "
                "stay as they are, and the rest be written"
            )
        yield batch


def _known(outcome: FoundJob | HeadraceError) -> _Known | None:
    """The job, if there is one; any other refusal is an error."""
    if isinstance(outcome, NotFound):
        return None
    if isinstance(outcome, HeadraceError):
        raise outcome
    return _decode_known(outcome.job)


def _rows_of(schema: StructType, options: Options) -> RowsToJobs:
    variants = [field.name for field in schema if field.dataType.typeName() == "variant"]
    if variants:
        name = variants[0]
        raise BadOption(
            f"the column {name} is a variant, of which only Spark can read the bytes: write to_json({name})"
        )
    return RowsToJobs(options, schema.fieldNames())


class JobsWriter(DataSourceArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._rows = _rows_of(schema, options)
        self._refused_before: float | None = None
        if options.on_duplicate == "fail":
            # A task that is tried again finds rows of its own. They are younger than this, and no reason to fail.
            with options.connect() as connection:
                self._refused_before = connection.ask(Ping()).data.time

    def write(self, iterator: Iterator[Any]) -> Written:
        return send(self._rows, iterator, refused_before=self._refused_before)


class JobsStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._rows = _rows_of(schema, options)

    def write(self, iterator: Iterator[Any]) -> Written:
        return send(self._rows, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Jobs are there when their task ends: there is nothing left to make visible."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Jobs that were written stay. The batch is tried again, and then they are known already."""
