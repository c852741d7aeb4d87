"""What the functions of our library are given: records whose field order is the order of the arguments.

`docs/valkey.md` shows these as tables, and a test compares them with what the Lua files read. Every record is flattened
with `flat`: text and bytes as they are, numbers as plain decimals, True as 1, False as 0, None as the empty string.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.model import JobLinks, JobSettings, Repeat

Text = str | bytes


class Tie(Struct, rename="camel", omit_defaults=True):
    """Another job that a new one names; without `queue` (a key prefix) it is in the same queue."""

    id: str
    queue: str | None = None


class Extra(Struct, rename="camel", omit_defaults=True):
    """What only some jobs have, as one MessagePack map."""

    custom_id: str | None = None
    id_ttl: int | None = None
    """Given: the custom id stands for an ended job, too, and this long whatever becomes of the job."""
    is_id_free: bool = False
    """In a cluster: whether no job of another queue has the id, as far as the client knows."""
    lookup: str | None = None
    """Elsewhere: the key that says which queue has the id, for the function itself to look at and to write."""
    birth: str | None = None
    group_id: str | None = None
    unique_key: str | None = None
    settings: JobSettings | None = None
    links: JobLinks | None = None
    opts: str | None = None
    size: int | None = None
    parent: Tie | None = None
    depends_on: list[Tie] = []
    flow: str | None = None
    """The key prefix of the queue that decides about the workflow it belongs to."""


class NewJob(Struct):
    """One job of `insert` (after `now` and the mode) and of `fireCron`."""

    queue: int
    """Which of the keys is the meta of its queue, from 1."""
    id: str
    name: str
    data: bytes
    raw: bytes
    """The payload as it came, where JSON cannot hold it exactly."""
    timestamp: int
    run_at: int
    priority: int
    max_attempts: int
    extra: bytes


class PlainJob(Struct):
    """One job of `insertPlain`: default settings, due now, priority 0."""

    id: str
    name: str
    data: bytes
    raw: bytes


class Ending(Struct):
    """One plain job of `completeAndClaim`; no returnvalue is the empty text."""

    id: str
    token: str | None
    returnvalue: bytes


class Completion(Struct):
    """One job of `complete` (after `now`, the mode and the plans of successors)."""

    queue: int
    id: str
    token: str | None
    returnvalue: bytes
    raw: bytes
    remove: bool | None


class Claiming(Struct):
    """What one puller asks for: `claim` and `completeAndClaim`."""

    count: int
    owner: str | None
    token: str
    serial: int | None
    """Jobs are numbered from here on, where somebody may give them back without a token."""
    lease_ms: int


class Failing(Struct):
    """`fail`, after `now`."""

    id: str
    token: str | None
    error: str | None
    stack: bytes
    is_terminal: bool
    remove: bool | None
    luck: float
    has_error: bool
    retry_after: int | None


class Renewal(Struct):
    """One job of `extend`, after `now`."""

    id: str
    token: str | None
    duration_ms: int | None
    is_forced: bool


class FlowEntry(Struct):
    """One entry for the log of a workflow: `startFlow`, `advanceFlow`."""

    kind: str
    step: str
    packed: bytes
    """What is kept: time, kind, step, attempt and body as MessagePack."""


class FlowStarting(Struct):
    """`startFlow`, after `now`: then as many entries of the log, then jobs."""

    id: str
    workflow: str
    mark: str
    """How ids of jobs in its queue end."""
    registry: str
    """The key where the queue of this flow is noted; empty in a cluster, where it is in another slot."""
    noted: bytes
    entries: int


class FlowAdvancing(Struct):
    """`advanceFlow`, after `now`: then as many completions, entries of the log, ids of jobs to drop and ids of
    jobs to stop, then jobs."""

    id: str
    revision: int
    status: str | None
    acks: int
    entries: int
    drops: int
    stops: int


class Successor(Struct, rename={"repeat": "repeat_"}, omit_defaults=True):
    """When a repeat job runs again: part of `complete`. Without `run` it ends here."""

    run: int | None = None
    id: str = ""
    repeat: Repeat | None = None
    size: int = 0


FUNCTIONS: Final[dict[str, tuple[str, str]]] = {
    "advanceFlow": (
        "id revision status acks entries drops stops Completion? FlowEntry* id* NewJob*",
        "Carry out a decision about a workflow that is still at this revision: its log, its status, the job of this "
        "step, jobs to drop, to stop and to push.",
    ),
    "announce": ("event count", "Tell of a drain or a clean."),
    "announceWaiting": (
        "field untilMs",
        "Until when a broker waits for jobs (`hrParked`), for the end of one (`hrAwaited`) or for a workflow "
        "(`hrWatched`).",
    ),
    "cancel": ("id isForced", "Withdraw a job that has not begun, or with `isForced` one at work."),
    "changePriority": ("id priority lifo", "Another priority, and LIFO or not."),
    "checkReplacements": (
        "(index customId key)*",
        "Refuse jobs of a long batch that would replace one that others wait for (`dedup.replace`).",
    ),
    "claim": ("broker group Claiming", "Hand out jobs under leases: pause, limits, order and groups in one step."),
    "complete": ("mode plans Completion*", "Complete jobs: `all` or none, or `each` by itself."),
    "completeAndClaim": (
        "broker count Claiming* (size Ending*)*",
        "Complete lots of plain jobs, each all or none, then hand out jobs to all who asked.",
    ),
    "counts": ("", "Jobs by state."),
    "delay": ("mode id delayMs token", "Put a job off: `move` or `change`, which also takes delayed jobs."),
    "discard": ("id token", "Bury a job without an attempt."),
    "extend": ("Renewal*", "Renew leases, note heartbeats."),
    "fail": ("id token error stack isTerminal remove luck hasError retryAfter", "End an attempt: retry or bury."),
    "fireCron": ("name slot progress NewJob?", "Advance a schedule and push its job, once per slot."),
    "fireScheduler": (
        "name before after jobName data opts attempts priority ttl lifo schedulerName",
        "Fire a schedule that Node wrote, if it still reads `before`; without `after` it is over.",
    ),
    "flows": ("workflow status limit before", "Workflows by id, the last ones first, and where to go on."),
    "groupWait": ("group", "How long a group is held back."),
    "holdGroup": ("group durationMs", "Hold a group back."),
    "insert": (
        "mode NewJob*",
        "Store `jobs`, a whole family (`flow`) or a part of a batch that was `checked` before, all or none.",
    ),
    "insertPlain": ("PlainJob*", "Store jobs that have nothing but a name and a payload."),
    "limits": ("", "Rate and concurrency limit, and whether they hold now."),
    "log": ("id line", "Append a log line."),
    "lookAfter": (
        "luck idleMs maxStalls",
        "What the slow round asks of a queue: `sweep`, `reclaim` up to the first cursor, schedules of Node, `counts`.",
    ),
    "moveToWait": ("id token", "Give back, promote or revive a job."),
    "moveToWaitingChildren": ("id token", "Step back until the children are done."),
    "obliterate": ("count", "Forget an emptied queue; if jobs came meanwhile, its settings only. Whether it is gone."),
    "progress": ("id progress hasMessage message", "Note how far a job is; counts as a sign of life."),
    "promote": ("mode id*", "Delayed jobs wait at once: `one` must be delayed, of `many` those that are."),
    "putCron": (
        "name seen progress entry",
        "Store a schedule if it is still as far as the caller saw it (`seen`, empty for none).",
    ),
    "reclaim": ("idleMs maxStalls cursor", "Take over what a dead Node worker had; returns the cursor."),
    "release": ("(id lease)*", "Give jobs back that are held by this token or serial."),
    "releaseLeases": ("owner id*", "Give back what is leased to an owner, but for the ids."),
    "releaseLost": ("lease*", "Give back what was handed out in answers that were lost: by token or serial."),
    "remove": (
        "states isTold why id*",
        "Remove those of the jobs that are in one of the states; workflows that wait for them are told why.",
    ),
    "removeChildDependency": ("childId", "Untie a child; keys: meta of both queues."),
    "removeJobUniqueKey": ("id", "Take its key from a job."),
    "removeUniqueKey": ("key", "Take a key from its owner."),
    "removeUnprocessedChildren": ("parentId", "Withdraw the children that have not begun."),
    "retireFlows": ("kept keptMs limit", "Forget the oldest of the ended workflows; their ids."),
    "revive": ("state id*", "Bring completed or failed jobs back."),
    "setDeadLetters": ("config", "Dead-letter settings, as JSON; letters are planned anew."),
    "setGroup": ("group (setting value)*", "Settings of a group."),
    "setMeta": ("(field value)*", "Set fields of the meta; an empty value removes one."),
    "setPaused": ("paused", "Pause or resume the queue."),
    "setStalls": ("config", "Stall settings, as JSON."),
    "sketch": ("id*", "What jobs are chosen and sorted by: state, times, priority, group and birth."),
    "startFlow": (
        "id workflow mark registry noted entries FlowEntry* NewJob*",
        "Begin a workflow with its first jobs, or find the one that has this id.",
    ),
    "sweep": ("luck", "What time demands: promote, expire, stall, time out, tend dead letters."),
    "uniqueKeyOwner": ("key", "Who holds a key."),
    "update": ("id data raw size", "Replace the payload."),
    "updateParent": ("childId parentId data raw", "Tie a child to a parent; keys: meta of both queues."),
}
"""What each function is given after `now`, and what it does; the same words stand where the Lua file registers it."""

RECORDS: Final[dict[str, type[Struct]]] = {
    "NewJob": NewJob,
    "PlainJob": PlainJob,
    "Claiming": Claiming,
    "Completion": Completion,
    "Ending": Ending,
    "Renewal": Renewal,
    "FlowEntry": FlowEntry,
    "fail": Failing,
    "startFlow": FlowStarting,
    "advanceFlow": FlowAdvancing,
}


def flat(record: Struct) -> list[Text]:
    return [plain(getattr(record, field)) for field in record.__struct_fields__]


def plain(value: Any) -> Text:
    if isinstance(value, str | bytes):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and not value.is_integer():
        return repr(value)
    return str(int(value))


pack = msgspec.msgpack.Encoder().encode
