"""Conversion of what the wire carries into Arrow batches: event lines, jobs, results, dead letters."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from headrace.backends.base import DeadLetter, ResultRow
from headrace.client.job import decode_job
from headrace.pipeline.eventsource import Slice
from headrace.pipeline.schemas import EVENTS, arrow
from headrace.server.jsonwire import packed_to_json

_NAMES: Final = {
    "job_id": "job",
    "job_name": "name",
    "delay_ms": "delay",
    "parent_id": "parent",
    "group_id": "group",
    "first_seq": "first",
    "last_seq": "last",
}
"""Columns whose field in the log is called otherwise."""
_MADE: Final = ("shard", "ts", "payload_bytes", "result_bytes", "extra")
"""Columns that are more than a field of the log."""
_schema: Final = arrow(EVENTS)
_LINE_FIELDS: Final = pa.schema(
    [(_NAMES.get(field.name, field.name), field.type) for field in _schema if field.name not in _MADE]
    + [("ts", pa.int64()), ("bytes", pa.int64())]
)
_encode_json: Final = msgspec.json.Encoder(enc_hook=str).encode
_NULL: Final = b"null"


def events_table(lines: bytes, shard: int) -> Any:
    """Event lines as a table of all columns."""
    read = pj.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    try:
        found = pj.read_json(pa.BufferReader(lines), read, _parsing("infer"))
    except pa.ArrowInvalid:
        # Fields that a newer server added and that look different from line to line.
        found = pj.read_json(pa.BufferReader(lines), read, _parsing("ignore"))
    kind, size = found["event"], found["bytes"]
    made = {
        "shard": pa.array([shard], pa.int32()).take(pa.array([0] * len(found))),
        "ts": pc.multiply(found["ts"], 1000).cast(pa.timestamp("us", "UTC")),
        "job_id": found["job"],
        "payload_bytes": _where(pc.is_in(kind, pa.array(["pushed", "updated"])), size),
        "result_bytes": _where(pc.equal(kind, "completed"), size),
        "priority": pc.fill_null(found["priority"], 0),
        "extra": _unknown_fields(found),
    }
    columns = [made[name] if name in made else found[_NAMES.get(name, name)] for name in _schema.names]
    return pa.table(columns, schema=_schema)


def _parsing(unexpected: str) -> Any:
    return pj.ParseOptions(explicit_schema=_LINE_FIELDS, unexpected_field_behavior=unexpected)


def _where(condition: Any, value: Any) -> Any:
    return pc.if_else(condition, value, pa.scalar(None, value.type))


def _unknown_fields(found: Any) -> Any:
    unknown = [name for name in found.column_names if name not in _LINE_FIELDS.names]
    if not unknown:
        return pa.nulls(len(found), pa.string())
    rows = found.select(unknown).to_pylist()
    known = ({name: value for name, value in row.items() if value is not None} for row in rows)
    return pa.array([_encode_json(fields).decode() if fields else None for fields in known], pa.string())


def chosen(table: Any, piece: Slice, queue: str | None) -> Any:
    """The events of a slice, of one queue if it is named.

    Lines are asked for by seq. If the log was rolled back since the slice was planned, they are of a higher epoch and
    belong to a later slice.
    """
    seq = table["seq"]
    wanted = pc.and_(pc.greater(seq, piece.after), pc.less_equal(seq, piece.until))
    wanted = pc.and_(wanted, pc.equal(table["epoch"], piece.segment.epoch))
    if queue is not None:
        wanted = pc.and_(wanted, pc.equal(table["queue"], queue))
    return table.filter(wanted)


def json_text(payload: bytes | msgspec.Raw) -> str | None:
    """A payload as JSON. Whatever clients have put into it, one job must not make all the others unreadable."""
    text = packed_to_json(bytes(payload)) if payload else _NULL
    return None if text == _NULL else text.decode()


def _time(value: Any) -> int | None:
    return None if value is None else int(value * 1000)


def job_row(encoded: msgspec.Raw) -> dict[str, Any]:
    job = decode_job(encoded)
    return {
        "queue": job.queue,
        "job_id": job.id,
        "job_name": job.given_name,
        "state": job.state,
        "data": json_text(job.encoded_data),
        "result": json_text(job.encoded_result),
        "failed_reason": job.failed_reason,
        "priority": job.priority,
        "attempts": job.attempts,
        "max_attempts": job.max_attempts,
        "created_at": _time(job.created_at),
        "run_at": _time(job.run_at),
        "started_at": _time(job.started_at),
        "finished_at": _time(job.completed_at),
        "parent_id": job.parent_id,
        "group_id": job.group_id,
        "tags": job.tags or None,
    }


def result_row(found: ResultRow) -> dict[str, Any]:
    return {
        "queue": found.queue,
        "job_id": found.id,
        "job_name": found.name,
        "finished_at": _time(found.finished_at),
        "result": None if found.result is msgspec.UNSET else json_text(found.result),
    }


def letter_row(letter: DeadLetter) -> dict[str, Any]:
    job = decode_job(letter.job)
    return {
        "queue": job.queue,
        "job_id": job.id,
        "job_name": job.given_name,
        "data": json_text(job.encoded_data),
        "reason": letter.reason,
        "error": letter.error,
        "entered_at": _time(letter.entered_at),
        "attempts": len(letter.attempts),
        "retry_count": letter.retry_count,
        "expires_at": _time(letter.expires_at),
    }
