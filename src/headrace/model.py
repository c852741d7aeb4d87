"""The data model of Headrace and its limits: the options of jobs, the settings of queues, the records of events.

Rules: no I/O, no behaviour beyond small conversions. Limits are `Annotated` types declared once here and used by
every command that takes the field, so PUSH, PUSHB, PUSHF and Cron cannot diverge. A type's `extra` gives the exact
error text where the protocol reference has one. Durations and times are milliseconds.
"""

from __future__ import annotations

import enum
import operator
import re
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

DAY_MS: Final = 86_400_000
YEAR_MS: Final = 365 * DAY_MS
MAX_DATA_BYTES: Final = 10 * 1024 * 1024
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
MAX_OUTBOX_BYTES: Final = 8 * 1024 * 1024
"""With more than this to send, further commands of a connection wait for the next tick: a burst of questions with large
answers must not pile all of them up."""
MAX_TIMELINE: Final = 20
MAX_LOGS: Final = 100
MAX_ITEMS: Final = 100_000
NIL: Final = b"\xc0"
UNDEFINED: Final = b"\xd4\x00\x00"  # how JavaScript packers write a value that is not there
MAX_SAFE_INTEGER: Final = 2**53 - 1  # the last integer that JavaScript counts to
LAST_MOMENT_MS: Final = 8_640_000_000_000_000  # the end of time in JavaScript

_QUEUE_NAME: Final = r"^[a-zA-Z0-9_\-.:]+$(?!\n)"
_QUEUE_TEXTS: Final = {
    "required": "Queue name is required",
    "min_length": "Queue name is required",
    "max_length": "Queue name too long (max 256 characters)",
    "pattern": "Queue name contains invalid characters",
}
QueueName = Annotated[str, Meta(min_length=1, max_length=256, pattern=_QUEUE_NAME, extra=_QUEUE_TEXTS)]
ShortQueueName = Annotated[str, Meta(max_length=256)]
"""The same without its pattern, which costs as much as decoding the rest of a short command: see is_queue_name."""
is_queue_name: Final = re.compile(_QUEUE_NAME).search
EVERY_QUEUE: Final = "*"
WatchedQueue = Annotated[
    str, Meta(min_length=1, max_length=256, pattern=r"^(\*|[a-zA-Z0-9_\-.:]+)$(?!\n)", extra=_QUEUE_TEXTS)
]
"""A queue, or EVERY_QUEUE."""
JobName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        extra=dict.fromkeys(
            ("type", "min_length", "max_length"),
            "Job name must be a non-empty string of at most 256 characters",
        ),
    ),
]
JobId = Annotated[str, Meta(min_length=1, max_length=1024)]
FlowId = Annotated[str, Meta(min_length=1, max_length=256)]
CustomId = Annotated[str, Meta(max_length=1024, extra={"unicode": "custom ID must be well-formed Unicode"})]
Token = Annotated[str, Meta(max_length=256)]
MENDED: Final = "mended"
"""In the `extra` of a type: invalid Unicode in the text is replaced, not refused, as only people read it."""
_MENDED: Final = {MENDED: True}
MAX_TEXT: Final = 1_048_576
MAX_STACK: Final = 100
Text = Annotated[str, Meta(max_length=MAX_TEXT, extra=_MENDED)]
AnyText = Annotated[str, Meta(extra=_MENDED)]
"""A text that is truncated, not refused, when it is too long: it reports something that has already happened."""
ShortText = Annotated[str, Meta(max_length=1024)]
GroupId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00]*$",
        extra={"pattern": "groupId must not contain NUL characters"},
    ),
]
UniqueKey = Annotated[str, Meta(max_length=1024)]
Priority = Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
DelayMs = Annotated[float, Meta(ge=0, le=YEAR_MS)]
TtlMs = Annotated[float, Meta(ge=0, le=YEAR_MS)]
TimeoutMs = Annotated[float, Meta(ge=0, le=DAY_MS)]
BackoffMs = Annotated[float, Meta(ge=0, le=DAY_MS)]
MaxAttempts = Annotated[int, Meta(ge=1, le=1000)]
LeaseMs = Annotated[float, Meta(ge=1, le=YEAR_MS)]
PollMs = Annotated[float, Meta(ge=0, le=60_000)]
TimestampMs = Annotated[float, Meta(ge=0, le=LAST_MOMENT_MS)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Position = Annotated[int, Meta(ge=-MAX_SAFE_INTEGER, le=MAX_SAFE_INTEGER)]
Finite = Annotated[float, Meta(ge=-1e308, le=1e308)]
"""Any number but NaN and the infinities, which an unbounded float would let through."""
StallIntervalMs = Annotated[float, Meta(ge=1, le=DAY_MS)]
MaxStalls = Annotated[int, Meta(ge=1, le=1000)]
GracePeriodMs = Annotated[float, Meta(ge=0, le=DAY_MS)]
AutoRetryMs = Annotated[float, Meta(ge=1, le=YEAR_MS)]
MaxAutoRetries = Annotated[int, Meta(ge=0, le=1000)]
DlqAgeMs = Annotated[float, Meta(ge=1, le=100 * YEAR_MS)]
MaxEntries = Annotated[int, Meta(ge=1, le=2**31 - 1)]


Item = TypeVar("Item")
Many = Annotated[list[Item], Meta(max_length=MAX_ITEMS)]
"""A list in a command. Each has a bound, or one frame could become tens of millions of objects."""
ManyFixed = Annotated[tuple[Item, ...], Meta(max_length=MAX_ITEMS)]
RawOrNull = Annotated[Raw, Meta(extra={"nullable": True})]
"""An encoded value or null. (msgspec does not decode into `Raw | None`.)"""
NULL_IF_NAMED: Final = "null_if_named"
"""In the `extra` of a type: absent counts as null when a `name` is sent."""
JobData = Annotated[Raw, Meta(extra={NULL_IF_NAMED: True})]
"""A payload. The official JavaScript client leaves out data that is `undefined`, but it always sends a name."""


class Backoff(Struct, frozen=True, rename="camel"):
    """How long to wait before attempt n+1."""

    type: Annotated[
        Literal["fixed", "exponential"],
        Meta(extra=dict.fromkeys(("required", "choice"), "backoff.type must be 'fixed' or 'exponential'")),
    ]
    delay: BackoffMs
    max_delay: BackoffMs | None = None


class Dedup(Struct, frozen=True, rename="camel"):
    """What happens when a job is pushed whose `uniqueKey` another job holds."""

    ttl: TtlMs | None = None
    extend: bool = False
    replace: bool = False


class Repeat(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A job that pushes its own successor when it completes."""

    every: float | None = None
    limit: Count | None = None
    count: Count = 0
    pattern: Annotated[str, Meta(max_length=256)] | None = None
    start_date: TimestampMs | None = None
    end_date: TimestampMs | None = None
    tz: ShortText | None = None
    immediately: bool | None = None
    prev_millis: TimestampMs | None = None
    offset: float | None = None
    job_id: CustomId | None = None


class JobSettings(Struct, frozen=True, rename="camel", omit_defaults=True):
    """How a job is run. Equal settings are shared between jobs, so a default job carries none of its own."""

    max_attempts: int = 3
    backoff: float | Backoff = 1000
    ttl: float | None = None
    timeout: float | None = None
    stall_timeout: float | None = None
    lifo: bool = False
    remove_on_complete: bool = False
    remove_on_fail: bool = False
    durable: bool = False
    stack_trace_limit: int = 10
    keep_logs: int | None = None
    size_limit: int | None = None
    fail_parent_on_failure: bool = False
    remove_dependency_on_failure: bool = False
    continue_parent_on_failure: bool = False
    ignore_dependency_on_failure: bool = False


class JobLinks(Struct, rename="camel", omit_defaults=True):
    """What ties a job to others: keys, family, group. Most jobs have none."""

    unique_key: str | None = None
    custom_id: str | None = None
    parent_id: str | None = None
    group_id: str | None = None
    depends_on: list[str] = []
    children_ids: list[str] = []
    tags: list[str] = []
    repeat: Repeat | None = None
    dedup: Dedup | None = None
    debounce_id: str | None = None
    debounce_ttl: float | None = None
    flow_id: str | None = None
    """The workflow that must hear of it when this job ends without success."""


class JobSpec(Protocol):
    """What a backend reads of a push: the attributes of JobSettings and JobLinks and these."""

    data: Raw
    name: str | None
    priority: int
    delay: float
    timestamp: float | None
    # mypy reads the remaining attributes through settings_of and links_of


DEFAULT_SETTINGS: Final = JobSettings()
_settings_tuple: Final = operator.attrgetter(*JobSettings.__struct_fields__)
_links_tuple: Final = operator.attrgetter(*JobLinks.__struct_fields__)
_NO_LINKS: Final = tuple(() if value == [] else value for value in _links_tuple(JobLinks()))
_SHARED_SETTINGS: Final[dict[tuple[Any, ...], JobSettings]] = {_settings_tuple(DEFAULT_SETTINGS): DEFAULT_SETTINGS}
_MAX_SHARED: Final = 4096
_options_tuple: Final = operator.attrgetter(*JobSettings.__struct_fields__, *JobLinks.__struct_fields__)
_PLAIN: Final = _settings_tuple(DEFAULT_SETTINGS) + _NO_LINKS


def is_plain(spec: object) -> bool:
    """Whether `spec` asks for nothing but defaults: one comparison instead of two lookups on the hot path."""
    return bool(_options_tuple(spec) == _PLAIN)


def settings_of(spec: object) -> JobSettings:
    """The shared settings object equal to what `spec` asks for."""
    key = _settings_tuple(spec)
    shared = _SHARED_SETTINGS.get(key)
    return shared if shared is not None else intern_settings(JobSettings(*key))


def intern_settings(settings: JobSettings) -> JobSettings:
    """The one object that stands for these settings, the same whoever came first."""
    key = _settings_tuple(settings)
    shared = _SHARED_SETTINGS.get(key)
    if shared is not None:
        return shared
    if len(_SHARED_SETTINGS) >= _MAX_SHARED:
        _SHARED_SETTINGS.clear()
        _SHARED_SETTINGS[_settings_tuple(DEFAULT_SETTINGS)] = DEFAULT_SETTINGS
    shared = _SHARED_SETTINGS[key] = _canonical(settings)
    return shared


def _canonical(settings: JobSettings) -> JobSettings:
    """1000 and 1000.0 are equal, but not when they are encoded, and only the very default is left out there."""
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=JobSettings)
    pairs = zip(_settings_tuple(stored), _settings_tuple(DEFAULT_SETTINGS), strict=True)
    return JobSettings(*[default if value == default else value for value, default in pairs])


def links_of(spec: object) -> JobLinks | None:
    """The links that `spec` asks for, or None for the common job without any."""
    values = _links_tuple(spec)
    if values == _NO_LINKS:
        return None
    links = JobLinks(*values)
    links.custom_id = links.custom_id or None
    links.depends_on = list(links.depends_on)
    links.children_ids = list(links.children_ids)
    links.tags = list(links.tags)
    return links


class TimelineEntry(Struct, omit_defaults=True):
    state: str
    timestamp: float
    error: str | None = None
    attempt: int | None = None
    worker: str | None = None
    """Who began the attempt, if it gave a name."""


class AttemptRecord(Struct, rename="camel"):
    """One failed attempt, as a dead-letter entry shows it."""

    attempt: int
    started_at: float | None
    failed_at: float
    reason: str
    error: str | None
    duration: float


class Burial(Struct, rename="camel"):
    """Why and when a job entered the dead-letter queue, and what is planned for it."""

    entered_at: float
    reason: str
    error: str | None
    retry_count: int = 0
    last_retry_at: float | None = None
    next_retry_at: float | None = None
    expires_at: float | None = None


class DeadLetterReason(enum.StrEnum):
    EXPLICIT_FAIL = "explicit_fail"
    MAX_ATTEMPTS_EXCEEDED = "max_attempts_exceeded"
    TIMEOUT = "timeout"
    STALLED = "stalled"
    TTL_EXPIRED = "ttl_expired"
    WORKER_LOST = "worker_lost"
    UNKNOWN = "unknown"


class StallConfig(Struct, rename="camel"):
    """When an active job counts as abandoned."""

    enabled: bool = True
    stall_interval: StallIntervalMs = 30_000
    max_stalls: MaxStalls = 3
    grace_period: GracePeriodMs = 5_000


class DlqConfig(Struct, rename="camel"):
    """What happens to dead letters by themselves."""

    auto_retry: bool = False
    auto_retry_interval: AutoRetryMs = 3_600_000
    max_auto_retries: MaxAutoRetries = 3
    max_age: DlqAgeMs | None = 7 * DAY_MS
    max_entries: MaxEntries = 10_000


class Letter(Protocol):
    """What is known of a dead letter, in whatever form a backend keeps it."""

    reason: str
    entered_at: float
    error: str | None
    retry_count: int
    last_retry_at: float | None
    next_retry_at: float | None
    expires_at: float | None


class DlqFilter(Struct, rename="camel"):
    """Which dead letters are meant."""

    reason: ShortText | None = None
    older_than: float | None = None
    newer_than: float | None = None
    retriable: bool | None = None
    expired: bool | None = None
    limit: Count | None = None
    offset: Count | None = None

    def matches(self, letter: Letter, now: int) -> bool:
        expired = letter.expires_at is not None and letter.expires_at <= now
        tests = (
            self.reason is None or letter.reason == self.reason,
            self.older_than is None or letter.entered_at <= self.older_than,
            self.newer_than is None or letter.entered_at >= self.newer_than,
            self.retriable is None or (not expired) == self.retriable,
            self.expired is None or expired == self.expired,
        )
        return all(tests)


class RateLimit(Struct, rename="camel"):
    """`max` jobs per `duration`, as a token bucket; cleared by itself at `until` when given."""

    max: float
    duration: float
    until: float | None = None


class Log(Struct):
    timestamp: float
    level: str
    message: str


class CronEntry(Struct, rename="camel", omit_defaults=False):
    """A schedule as it is stored, with what each run pushes."""

    name: str
    queue: str
    data: bytes
    schedule: str | None
    repeat_every: float | None
    next_run: float
    priority: int = 0
    timezone: str | None = None
    max_limit: int | None = None
    executions: int = 0
    last_slot: float | None = None
    job_name: str | None = None
    unique_key: str | None = None
    dedup: Dedup | None = None
    skip_missed_on_restart: bool = True
    skip_if_no_worker: bool = False
    prevent_overlap: bool = True
    settings: JobSettings = DEFAULT_SETTINGS
    delay: float = 0
    created_at: float = 0


class Webhook(Struct, rename="camel"):
    id: str
    url: str
    events: list[str]
    queue: str | None
    secret: str | None
    created_at: float
    last_triggered: float | None = None
    success_count: int = 0
    failure_count: int = 0
    enabled: bool = True
    dropped_count: int = 0
    """The part of the failures that was never tried: too much was waiting."""
    last_error: str | None = None
    """Why the last delivery failed; None when it succeeded."""


class FlowStatus(enum.StrEnum):
    """How a workflow stands. The last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    COMPENSATING = "compensating"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (FlowStatus.COMPLETED, FlowStatus.FAILED, FlowStatus.CANCELLED)


class Flow(Struct, rename="camel", frozen=True, gc=False):
    """One run of a workflow. Everything else about it is in its log of steps."""

    id: str
    workflow: str
    queue: str
    """The queue of the jobs that decide how it continues."""
    status: FlowStatus
    revision: int
    """Counts the changes. A change names the revision that it was decided on."""
    created_at: float
    updated_at: float
    ended_at: float | None = None


class FlowStep(Struct, rename="camel", omit_defaults=True, gc=False):
    """One entry in the log of a flow: what happened, in the words of whoever runs it. `body` is opaque."""

    seq: int
    at: float
    kind: str
    step: str = ""
    attempt: int = 0
    body: Raw = Raw(NIL)


class EventName(enum.IntEnum):
    """What can happen, as recorded in the event log. Codes are stored: never renumber."""

    PUSHED = 1
    DUPLICATED = 2
    PULLED = 3
    PROGRESS = 4
    COMPLETED = 5
    FAILED = 6
    RETRIED = 7
    DELAYED = 8
    PROMOTED = 9
    STALLED = 10
    RELEASED = 11
    EXPIRED = 12
    REMOVED = 13
    DLQ_RETRIED = 14
    WAITING_CHILDREN = 15
    PAUSED = 16
    RESUMED = 17
    DRAINED = 18
    OBLITERATED = 19
    CRON_FIRED = 20
    WAITING = 21
    UPDATED = 22
    FLOW_STARTED = 23
    FLOW_STEP = 24
    FLOW_COMPENSATING = 25
    FLOW_COMPLETED = 26
    FLOW_FAILED = 27
    FLOW_CANCELLED = 28
    GAP = 99


EVENT_WORDS: Final[dict[EventName, str]] = {name: name.name.lower().replace("_", "-") for name in EventName}

# Claims are not written to the store (after a crash active jobs simply wait again), so these events may stand in
# the log without a commit behind them.
UNCOMMITTED_EVENTS: Final = frozenset(
    EVENT_WORDS[n] for n in (EventName.PULLED, EventName.RELEASED, EventName.DUPLICATED, EventName.GAP)
)


class Event(Struct, omit_defaults=True, gc=False):
    """One line of the event log: what happened to which job, and when."""

    seq: int
    ts: int
    event: str
    epoch: int
    queue: str
    job: str = ""
    name: str | None = None
    attempt: int | None = None
    worker: str | None = None
    priority: int = 0
    delay: int | None = None
    progress: float | None = None
    error: str | None = None
    parent: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    bytes: int | None = None
    prev: str | None = None
    terminal: bool | None = None
    stalls: int | None = None
    action: str | None = None
    first: int | None = None
    last: int | None = None


def js_number(value: float) -> int | float:
    """A number as JavaScript clients may read it: never a 64-bit integer, which they take for a BigInt."""
    if isinstance(value, float):
        if not value.is_integer():
            return value
        value = int(value)
    return value if -(2**31) <= value < 2**32 else float(value)


def optional(value: Any) -> Any | UnsetType:
    """Leave a reply field out where the reference leaves it undefined."""
    return UNSET if value is None else value
