"""The wire format of a job: one MessagePack map, spliced from encoded fragments.

A job on the wire has about forty keys, nearly all of them the same for nearly all jobs. So the map is joined from
fragments: settings are shared objects whose fragment is encoded once, links and history have a constant fragment
while a job has none, and only ids, times and counters are packed per reply. Payloads are spliced in as they came.

To add a field to the job object: add it to the view struct of its part; counts follow by themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from headrace.model import DEFAULT_SETTINGS, NIL, Backoff, JobLinks, JobSettings, Repeat, TimelineEntry, js_number

encode: Final = msgspec.msgpack.Encoder().encode
_decode_object: Final = msgspec.msgpack.Decoder(dict[str, Raw]).decode
_pack_float: Final = struct.Struct(">d").pack


def with_entries(data: bytes, entries: dict[str, str]) -> bytes | None:
    """An encoded object with these entries; the others stay as they are. None if it is no map with texts as keys."""
    try:
        return encode(_decode_object(data) | entries)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _number(value: float | None) -> int | float | None:
    return None if value is None else js_number(value)


class SettingsView(Struct, rename="camel"):
    max_attempts: int
    backoff: int | float
    backoff_config: dict[str, Any] | None
    ttl: int | float | None
    timeout: int | float | None
    stall_timeout: int | float | None
    lifo: bool
    remove_on_complete: bool
    remove_on_fail: bool
    durable: bool
    stack_trace_limit: int
    keep_logs: int | None
    size_limit: int | None
    fail_parent_on_failure: bool
    remove_dependency_on_failure: bool
    continue_parent_on_failure: bool
    ignore_dependency_on_failure: bool


class LinksView(Struct, rename="camel"):
    unique_key: str | None
    custom_id: str | None
    parent_id: str | None
    group_id: str | None
    depends_on: list[str]
    children_ids: list[str]
    tags: list[str]
    repeat: dict[str, Any] | None
    deduplication_ttl: int | float | None
    deduplication_extend: bool
    deduplication_replace: bool
    debounce_id: str | None
    debounce_ttl: int | float | None


class HistoryView(Struct, rename="camel"):
    children_completed: int
    progress: int | float
    progress_message: str | None
    stacktrace: list[str] | None
    timeline: list[TimelineEntry]


def _body(view: Struct) -> bytes:
    """The entries of an encoded struct, without the map header."""
    return encode(view)[1 if len(view.__struct_fields__) < 16 else 3 :]


def _backoff_view(backoff: float | Backoff) -> tuple[int | float, dict[str, Any] | None]:
    if not isinstance(backoff, Backoff):
        return js_number(backoff), None
    config: dict[str, Any] = {"type": backoff.type, "delay": js_number(backoff.delay)}
    if backoff.max_delay is not None:
        config["maxDelay"] = js_number(backoff.max_delay)
    return js_number(backoff.delay), config


def _settings_body(s: JobSettings) -> bytes:
    backoff, config = _backoff_view(s.backoff)
    return _body(
        SettingsView(
            s.max_attempts,
            backoff,
            config,
            _number(s.ttl),
            _number(s.timeout),
            _number(s.stall_timeout),
            s.lifo,
            s.remove_on_complete,
            s.remove_on_fail,
            s.durable,
            s.stack_trace_limit,
            s.keep_logs,
            s.size_limit,
            s.fail_parent_on_failure,
            s.remove_dependency_on_failure,
            s.continue_parent_on_failure,
            s.ignore_dependency_on_failure,
        )
    )


def _repeat_view(repeat: Repeat | None) -> dict[str, Any] | None:
    if repeat is None:
        return None
    values = msgspec.to_builtins(repeat)
    return {"count": 0} | {k: js_number(v) if isinstance(v, float) else v for k, v in values.items()}


def _links_body(k: JobLinks) -> bytes:
    dedup = k.dedup
    return _body(
        LinksView(
            k.unique_key,
            k.custom_id,
            k.parent_id,
            k.group_id,
            k.depends_on,
            k.children_ids,
            k.tags,
            _repeat_view(k.repeat),
            _number(dedup.ttl) if dedup else None,
            dedup.extend if dedup else False,
            dedup.replace if dedup else False,
            k.debounce_id,
            _number(k.debounce_ttl),
        )
    )


_NO_LINKS_BODY: Final = _links_body(JobLinks())
_DEFAULT_BODY: Final = _settings_body(DEFAULT_SETTINGS) + _NO_LINKS_BODY
_settings_bodies: Final[dict[int, tuple[JobSettings, bytes]]] = {}
_MAX_BODIES: Final = 4096

_SETTINGS_COUNT: Final = len(SettingsView.__struct_fields__)
_LINKS_COUNT: Final = len(LinksView.__struct_fields__)
_HISTORY_COUNT: Final = len(HistoryView.__struct_fields__)


def _shared_settings_body(settings: JobSettings) -> bytes:
    # Keyed by identity: hashing all fields would cost more than encoding them. The settings object is kept beside its
    # body so that its id cannot be reused while it is here.
    known = _settings_bodies.get(id(settings))
    if known is not None:
        return known[1]
    if len(_settings_bodies) >= _MAX_BODIES:
        _settings_bodies.clear()
    body = _settings_body(settings)
    _settings_bodies[id(settings)] = (settings, body)
    return body


_ID: Final = encode("id")
_QUEUE: Final = encode("queue")
_DATA: Final = encode("data")
_CREATED: Final = encode("createdAt") + b"\xcb"
_RUN_AT: Final = encode("runAt") + b"\xcb"
_HEARTBEAT: Final = encode("lastHeartbeat") + b"\xcb"
_STARTED: Final = encode("startedAt")
_COMPLETED: Final = encode("completedAt")
_ATTEMPTS: Final = encode("attempts")
_PRIORITY: Final = encode("priority")
_STALLS: Final = encode("stallCount")
_NAME: Final = encode("name")
_STATE: Final = encode("state")
_RETURN: Final = encode("returnvalue")
_REASON: Final = encode("failedReason")
_DATA_BYTES: Final = encode("dataBytes")
_FIXED_COUNT: Final = 11 + _SETTINGS_COUNT + _LINKS_COUNT + _HISTORY_COUNT

_PLAIN_HISTORY: Final = (
    encode("childrenCompleted")
    + b"\x00"
    + encode("progress")
    + b"\x00"
    + encode("progressMessage")
    + NIL
    + encode("stacktrace")
    + NIL
    + encode("timeline")
)
_TIMELINE_STATE: Final = b"\x82" + encode("state")
_TIMELINE_TIME: Final = encode("timestamp") + b"\xcb"
_WORDS: Final = {word: encode(word) for word in ("waiting", "delayed", "waiting-children", "active", "completed")}
_SMALL_INTS: Final = [encode(n) for n in range(128)]
_HEADERS: Final = [b"\xde" + n.to_bytes(2, "big") for n in range(128)]


def _integer(value: int) -> bytes:
    return _SMALL_INTS[value] if 0 <= value < 128 else encode(value)


def plain_history(first_state: str, created: float, started: float | None, completed: float | None) -> bytes:
    """History of a job to which nothing out of the ordinary happened."""
    parts = [
        _PLAIN_HISTORY,
        b"\x91" if started is None else b"\x92" if completed is None else b"\x93",
        _TIMELINE_STATE,
        _WORDS[first_state],
        _TIMELINE_TIME,
        _pack_float(created),
    ]
    if started is not None:
        parts += (_TIMELINE_STATE, _WORDS["active"], _TIMELINE_TIME, _pack_float(started))
        if completed is not None:
            parts += (_TIMELINE_STATE, _WORDS["completed"], _TIMELINE_TIME, _pack_float(completed))
    return b"".join(parts)


def rich_history(view: HistoryView) -> bytes:
    return _body(view)


def brief_history(children_completed: int, progress: float, message: str | None) -> bytes:
    """History as a list of many jobs shows it: how far each is, not how it got there."""
    return rich_history(HistoryView(children_completed, progress, message, None, []))


class JobRecord(Protocol):
    """What any backend must know of a job to show it."""

    id: str
    name: str | None
    created: int
    run_at: int
    started: int | None
    finished: int | None
    attempts: int
    priority: int
    stalls: int
    settings: JobSettings
    links: JobLinks | None

    @property
    def heartbeat(self) -> int: ...


class PastRecord(Protocol):
    """What any backend must know of what happened to a job beyond the ordinary."""

    timeline: list[TimelineEntry]
    progress: float
    message: str | None
    stacktrace: list[str] | None
    children_completed: int


def history_of(job: JobRecord, past: PastRecord | None) -> bytes:
    if past is None:
        first = "delayed" if job.run_at > job.created else "waiting"
        return plain_history(first, job.created, job.started, job.finished)
    return rich_history(
        HistoryView(past.children_completed, past.progress, past.message, past.stacktrace, past.timeline)
    )


# A fresh job on its way to a worker: the keys and values of its times and counters in one packing.
_TIME_KEYS: Final = (_CREATED, _RUN_AT, _HEARTBEAT, _STARTED + b"\xcb")
_TIMES: Final = struct.Struct(">" + "".join(f"{len(key)}sd" for key in _TIME_KEYS)).pack
_NO_COUNTERS: Final = b"".join((_COMPLETED, NIL, _ATTEMPTS, b"\0", _PRIORITY, b"\0", _STALLS, b"\0"))
_STORY_KEYS: Final = (
    _PLAIN_HISTORY + b"\x92" + _TIMELINE_STATE + _WORDS["waiting"] + _TIMELINE_TIME,
    _TIMELINE_STATE + _WORDS["active"] + _TIMELINE_TIME,
)
_STORY: Final = struct.Struct(">" + "".join(f"{len(key)}sd" for key in _STORY_KEYS)).pack
_HEAD: Final = _HEADERS[_FIXED_COUNT] + _ID


def _fresh_tail(created: int, started: int) -> bytes:
    """Everything behind the payload of a fresh job."""
    keys = _TIME_KEYS
    times = _TIMES(keys[0], created, keys[1], created, keys[2], started, keys[3], started)
    return times + _NO_COUNTERS + _DEFAULT_BODY + _STORY(_STORY_KEYS[0], created, _STORY_KEYS[1], started)


class ClaimedRecord(JobRecord, Protocol):
    history: Any
    data: bytes | None
    """None when it must be read from the file first."""


_Claimed = TypeVar("_Claimed", bound=ClaimedRecord)


def encode_claimed(
    jobs: Sequence[_Claimed], queue: bytes, started: int, show: Callable[[_Claimed], Raw]
) -> list[bytes | Raw]:
    """`show` for each of these jobs, by a short way for what nearly every PULL answers: a fresh one.

    That is one with default settings and no name, links, history, priority or delay. Jobs pushed and pulled in bursts
    share their milliseconds, and so everything behind their payload.
    """
    before_data = _QUEUE + queue + _DATA
    tails: dict[int, bytes] = {}
    views: list[bytes | Raw] = []
    for job in jobs:
        created, data = job.created, job.data
        if (
            data is None
            or job.settings is not DEFAULT_SETTINGS
            or job.history is not None
            or job.links is not None
            or job.name is not None
            or job.run_at != created
            or job.priority
            or job.attempts
            or job.stalls
        ):
            views.append(show(job))
            continue
        tail = tails.get(created)
        if tail is None:
            tail = tails[created] = _fresh_tail(created, started)
        views.append(b"".join((_HEAD, encode(job.id), before_data, data, tail)))
    return views


def encode_job(
    job: JobRecord,
    queue: bytes,
    data: bytes,
    history: bytes,
    state: str | None = None,
    result: bytes | None = None,
    failed_reason: str | None = None,
    data_bytes: int | None = None,
) -> Raw:
    """The wire map of a job; `queue`, `data`, `history` and `result` come encoded.

    The last four are for queries; `data_bytes` is the length of the payload where `data` may be but its beginning.
    """
    extra = b""
    count = _FIXED_COUNT
    if job.name is not None:
        count += 1
        extra = _NAME + encode(job.name)
    if state is not None:
        count += 1
        extra += _STATE + encode(state)
        if result is not None:
            count += 1
            extra += _RETURN + result
        if failed_reason is not None:
            count += 1
            extra += _REASON + encode(failed_reason)
        if data_bytes is not None:
            count += 1
            extra += _DATA_BYTES + encode(data_bytes)
    started, finished = job.started, job.finished
    return Raw(
        b"".join(
            (
                _HEADERS[count],
                _ID,
                encode(job.id),
                _QUEUE,
                queue,
                _DATA,
                data,
                _CREATED,
                _pack_float(job.created),
                _RUN_AT,
                _pack_float(job.run_at),
                _HEARTBEAT,
                _pack_float(job.heartbeat),
                _STARTED,
                NIL if started is None else b"\xcb" + _pack_float(started),
                _COMPLETED,
                NIL if finished is None else b"\xcb" + _pack_float(finished),
                _ATTEMPTS,
                _integer(job.attempts),
                _PRIORITY,
                _integer(job.priority),
                _STALLS,
                _integer(job.stalls),
                _shared_settings_body(job.settings),
                _NO_LINKS_BODY if job.links is None else _links_body(job.links),
                history,
                extra,
            )
        )
    )
