"""Jobs as Valkey stores them: hashes with glide-mq's fields and our own, to and from the types of the rest of Headrace.

Every field is text. Payloads are JSON if that round-trips to the same bytes of MessagePack; otherwise those bytes
are kept in a field of their own (base64) and the JSON beside them is an approximation for Node workers.

Others write these hashes, too: an invalid value counts as absent, because a job that cannot be read would
make all that were claimed with it unreachable until their leases expire.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from headrace.backends.base import DeadLetter
from headrace.briefs import brief, brief_text
from headrace.errors import InvalidCommand
from headrace.model import (
    DEFAULT_SETTINGS,
    NIL,
    AttemptRecord,
    Backoff,
    JobLinks,
    JobSettings,
    TimelineEntry,
    intern_settings,
)
from headrace.views import brief_history, encode, encode_job, history_of

MAX_PAYLOAD_BYTES: Final = 1_048_576
_MAX_NUMBER: Final = 2**53

_from_msgpack: Final = msgspec.msgpack.Decoder().decode
_from_json: Final = msgspec.json.Decoder().decode
_to_json: Final = msgspec.json.Encoder().encode
_decode_settings: Final = msgspec.json.Decoder(JobSettings).decode
_decode_links: Final = msgspec.json.Decoder(JobLinks).decode


class Attempt(Struct):
    attempt: int
    failed_at: float
    reason: str
    started_at: float | None = None
    error: str | None = None
    duration: float = 0


class Buried(Struct):
    entered_at: float
    reason: str
    error: str | None = None
    retry_count: int = 0
    last_retry_at: float | None = None
    next_retry_at: float | None = None
    expires_at: float | None = None


class Past(Struct):
    """What happened to a job beyond the ordinary, as the functions write it."""

    timeline: list[TimelineEntry] = []
    progress: float = 0
    message: str | None = None
    stacktrace: list[str] | None = None
    failures: list[Attempt] = []
    burial: Buried | None = None
    children_completed: int = 0
    failed_children: dict[str, str] = {}
    ignored_children: dict[str, str] = {}


_decode_past: Final = msgspec.json.Decoder(Past).decode

# -- payloads ---------------------------------------------------------------------------------------------------------


def to_fields(payload: bytes, what: str = "Job data") -> tuple[bytes, bytes]:
    """JSON and, where JSON does not give the same bytes back, the payload itself in base64."""
    try:
        text = _to_json(_from_msgpack(payload))
        is_exact = encode(_from_json(text)) == payload
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        text, is_exact = b"null", False
    if max(len(text), len(payload)) > MAX_PAYLOAD_BYTES:
        raise InvalidCommand(f"{what} too large for this backend (max 1 MB)")
    return text, b"" if is_exact else base64.b64encode(payload)


def from_fields(text: bytes | None, raw: bytes | None) -> bytes:
    if raw:
        return base64.b64decode(raw)
    if not text:
        return NIL
    try:
        return encode(_from_json(_unzipped(text)))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, zlib.error):
        return b"\x80"  # as Node reads it: an empty object


def _unzipped(text: bytes) -> bytes:
    if not text.startswith(b"gz:"):
        return text
    unpacker = zlib.decompressobj(wbits=31)
    found = unpacker.decompress(base64.b64decode(text[3:]), MAX_PAYLOAD_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError("more than 1 MB")
    return found


# -- jobs -------------------------------------------------------------------------------------------------------------


class StoredJob(Struct):
    """A job read from its hash; has what `views.encode_job` asks for."""

    id: str
    queue: str
    state: str
    name: str | None
    created: int
    run_at: int
    started: int | None
    finished: int | None
    attempts: int
    priority: int
    stalls: int
    heartbeat: int
    settings: JobSettings
    links: JobLinks | None
    past: Past | None
    data: bytes
    result: bytes | None
    failed_reason: str | None
    birth: str
    token: str | None
    owner: str | None
    serial: str | None
    is_ours: bool
    successor: str | None

    @property
    def size(self) -> int:
        return len(self.data)

    def shown_id(self) -> str:
        """Ids of Node producers are numbers of one queue: elsewhere they go by `<queue>:<n>`."""
        return self.id if self.is_ours else f"{self.queue}:{self.id}"


_WORDS: Final = {"prioritized": "waiting", "group-waiting": "waiting"}


def read_hash(queue: str, flat: list[Any]) -> StoredJob | None:
    """The job of a flat reply of HGETALL; None for an empty one."""
    if not flat:
        return None
    h: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    if b"ls" in h:
        _unfold(h)
    job_id = h.get(b"id", b"").decode()
    is_ours = b"hv" in h
    created = _int(h, b"timestamp") or 0
    state = h.get(b"state", b"waiting").decode()
    run = _int(h, b"run")
    if run is None:
        run = created if is_ours else created + (_int(h, b"delay") or 0)
    past = _decode_past(h[b"hh"]) if h.get(b"hh") else None
    return StoredJob(
        job_id,
        queue,
        _WORDS.get(state, state),
        _text(h, b"name"),
        created,
        run,
        _int(h, b"processedOn"),
        _int(h, b"finishedOn"),
        _int(h, b"attemptsMade") or 0,
        _int(h, b"hp") or 0,
        _int(h, b"stalledCount") or 0,
        _int(h, b"hb") or created,
        _settings(h, is_ours=is_ours),
        _links(h),
        past,
        from_fields(h.get(b"data"), h.get(b"hd")),
        _result(h, state),
        _reason(h, past),
        h.get(b"birth", h.get(b"id", b"")).decode().rjust(36, "0"),
        _text(h, b"tok"),
        _text(h, b"own"),
        _text(h, b"ser"),
        is_ours,
        _text(h, b"next"),
    )


class Sketch(Struct, frozen=True, gc=False):
    """What a job is chosen and sorted by, without what it carries: see the function `sketch`."""

    id: str
    state: str
    created: int
    finished: int | None
    priority: int
    group: str | None
    birth: str

    @property
    def order(self) -> tuple[int, str]:
        """By creation."""
        return self.created, self.birth


def read_sketch(job_id: str, found: list[bytes | None]) -> Sketch | None:
    """One row of the reply of `sketch`; None for a job that is not there."""
    state, created, finished, priority, group, birth = found
    if created is None:
        return None
    word = (state or b"waiting").decode()
    return Sketch(
        job_id,
        _WORDS.get(word, word),
        int(_number(created) or 0),
        int(_number(finished) or 0) or None,
        int(_number(priority) or 0),
        group.decode() if group else None,
        birth.decode().rjust(36, "0") if birth else job_id.rjust(36, "0"),
    )


PLAIN_PARTICULARS: Final = 6
"""What a claim gives of a plain job: id, name, data as JSON and as it came, birth and attempts."""


def plain_job(queue: str, found: list[bytes], started: int) -> StoredJob:
    """A job with nothing out of the ordinary, just handed out."""
    job_id, created = found[0].decode(), int(found[4])
    return StoredJob(
        job_id,
        queue,
        "active",
        found[1].decode() or None,
        created,
        created,
        started,
        None,
        int(found[5]),
        0,
        0,
        started,
        DEFAULT_SETTINGS,
        None,
        None,
        from_fields(found[2], found[3]),
        None,
        None,
        job_id,
        None,
        None,
        None,
        True,
        None,
    )


def _unfold(h: dict[bytes, bytes]) -> None:
    """The times of a plain job's lease stand in one field, `<since> <length>`; after its end in none."""
    since, _, length = h.pop(b"ls").partition(b" ")
    if length:
        h[b"hb"] = since
    else:
        for field in (b"tok", b"own", b"ser"):
            h.pop(field, None)


def _int(h: dict[bytes, bytes], field: bytes) -> int | None:
    value = _number(h.get(field))
    return None if value is None else int(value)


def _number(value: Any) -> float | None:
    """A number that every wire can carry."""
    try:
        number = float(value or "nan")
    except (TypeError, ValueError):
        return None
    return number if abs(number) <= _MAX_NUMBER else None


def _text(h: dict[bytes, bytes], field: bytes) -> str | None:
    value = h.get(field)
    return value.decode(errors="replace") if value else None


def _settings(h: dict[bytes, bytes], *, is_ours: bool) -> JobSettings:
    blob = h.get(b"hs")
    if blob:
        return intern_settings(_decode_settings(blob))
    return DEFAULT_SETTINGS if is_ours else _settings_of_opts(h.get(b"opts", b"{}"))


def _settings_of_opts(text: bytes) -> JobSettings:
    """What a Node producer asked for, in our words."""
    try:
        opts = _from_json(text)
    except (msgspec.DecodeError, RecursionError):
        opts = {}
    if not isinstance(opts, dict):
        opts = {}
    backoff: float | Backoff = 0
    asked = opts.get("backoff")
    if isinstance(asked, dict):
        kind = asked.get("type")
        backoff = Backoff(kind if kind in ("fixed", "exponential") else "fixed", _number(asked.get("delay")) or 0)
    return intern_settings(
        JobSettings(
            max_attempts=max(1, int(_number(opts.get("attempts")) or 1)),
            backoff=backoff,
            timeout=_number(opts.get("timeout")),
            lifo=bool(opts.get("lifo")),
            remove_on_complete=opts.get("removeOnComplete") is True,
            remove_on_fail=opts.get("removeOnFail") is True,
        )
    )


def _links(h: dict[bytes, bytes]) -> JobLinks | None:
    blob = h.get(b"hl")
    if blob:
        return _decode_links(blob)
    parent = _text(h, b"parentId")
    return JobLinks(parent_id=parent) if parent else None


def _result(h: dict[bytes, bytes], state: str) -> bytes | None:
    if state != "completed" or b"hn" in h:
        return None
    return from_fields(h.get(b"returnvalue"), h.get(b"hr"))


def _reason(h: dict[bytes, bytes], past: Past | None) -> str | None:
    """Why the job failed last: from its history or, if a Node worker failed it, from glide-mq's own field."""
    if past is not None and past.burial is not None and past.burial.error is not None:
        return past.burial.error
    timeline = past.timeline if past is not None else []
    found = next((entry.error for entry in reversed(timeline) if entry.error is not None), None)
    is_told_there = past is None or b"hv" not in h
    return found or (_text(h, b"failedReason") if is_told_there else None)


# -- showing ----------------------------------------------------------------------------------------------------------


def show(job: StoredJob) -> Raw:
    """The job as a puller sees it."""
    return encode_job(_renamed(job), encode(job.queue), job.data, history_of(job, job.past))


def show_whole(job: StoredJob) -> Raw:
    """The job as a query sees it: with state, returnvalue, failedReason and who works on it."""
    if job.past is None and job.owner is not None and job.started is not None:
        first = TimelineEntry("delayed" if job.run_at > job.created else "waiting", float(job.created))
        active = TimelineEntry("active", float(job.started), worker=job.owner)
        job = msgspec.structs.replace(job, past=Past(timeline=[first, active]))
    return encode_job(
        _renamed(job),
        encode(job.queue),
        job.data,
        history_of(job, job.past),
        state=job.state,
        result=job.result,
        failed_reason=job.failed_reason,
    )


def show_brief(job: StoredJob) -> Raw:
    """The job as a list of many shows it."""
    past = job.past or Past()
    return encode_job(
        _renamed(job),
        encode(job.queue),
        brief(job.data),
        brief_history(past.children_completed, past.progress, brief_text(past.message)),
        state=job.state,
        failed_reason=brief_text(job.failed_reason),
        data_bytes=len(job.data),
    )


def _renamed(job: StoredJob) -> StoredJob:
    return job if job.is_ours else msgspec.structs.replace(job, id=job.shown_id())


def burial_of(job: StoredJob) -> Buried:
    """What is noted of it; little, if a Node worker failed it."""
    known = job.past.burial if job.past is not None else None
    return known or Buried(float(job.finished or 0), "unknown", job.failed_reason)


def letter(job: StoredJob, is_brief: bool = False) -> DeadLetter:
    if is_brief:
        return DeadLetter.of(show_brief(job), burial_of(job), [])
    attempts = [
        AttemptRecord(a.attempt, a.started_at, a.failed_at, a.reason, a.error, a.duration)
        for a in (job.past or Past()).failures
    ]
    return DeadLetter.of(show(job), burial_of(job), attempts)
