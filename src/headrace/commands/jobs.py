"""The core of the protocol: jobs go in, are handed out, and end.

JobOptions holds every option of a job once, so PUSH, the entries of PUSHB and the inputs of PUSHF cannot
diverge. What a field's type cannot express (sizes, combinations) is in the check_* functions, one per
concern. `data` and `result` are opaque: they are copied as encoded bytes and never decoded.

To add a job option: add it to JobSettings or JobLinks in headrace.model and, with its limits, to JobOptions;
a unit test keeps the two equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import UNSET, Meta, MsgspecError, Raw, Struct, UnsetType, field, json, msgpack, structs

from headrace.backends.base import Ack, Claim, Demand, GroupDemand
from headrace.backends.listing import REPLY_ROOM
from headrace.commands._base import Alike, BurstReplies, Command, Flag, Reply, command, short_form
from headrace.errors import HeadraceError, InvalidCommand, Refused
from headrace.model import (
    MAX_DATA_BYTES,
    MAX_OUTBOX_BYTES,
    MAX_SAFE_INTEGER,
    MAX_STACK,
    MAX_TEXT,
    NIL,
    UNDEFINED,
    AnyText,
    Backoff,
    BackoffMs,
    CustomId,
    Dedup,
    DelayMs,
    FlowId,
    GroupId,
    JobData,
    JobId,
    JobName,
    LeaseMs,
    Many,
    ManyFixed,
    MaxAttempts,
    PollMs,
    Priority,
    QueueName,
    RawOrNull,
    Repeat,
    ShortQueueName,
    ShortText,
    TimeoutMs,
    TimestampMs,
    Token,
    TtlMs,
    UniqueKey,
    is_plain,
)

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


def positive(name: str) -> Meta:
    """The limits of a whole number from 1 upwards, with the reference's one text for all faults."""
    kinds = ("type", "finite", "integer", "ge", "le")
    return Meta(ge=1, le=MAX_SAFE_INTEGER, extra=dict.fromkeys(kinds, f"{name} must be a positive safe integer"))


# -- options of a job ----------------------------------------------------------------------------------------


class JobOptions(Command[Any], tag=False, kw_only=True):
    """All options of a job when it is pushed."""

    data: JobData
    name: JobName | None = None
    priority: Priority = 0
    delay: DelayMs = 0
    timestamp: TimestampMs | None = None
    # How it is run: the fields of JobSettings.
    max_attempts: MaxAttempts = 3
    backoff: BackoffMs | Backoff = 1000
    ttl: TtlMs | None = None
    timeout: TimeoutMs | None = None
    stall_timeout: TimeoutMs | None = None
    lifo: bool = False
    remove_on_complete: bool = False
    remove_on_fail: bool = False
    durable: bool = False
    stack_trace_limit: Annotated[int, Meta(ge=0, le=10_000)] = 10
    keep_logs: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    size_limit: Annotated[int, Meta(ge=0, le=MAX_DATA_BYTES)] | None = None
    fail_parent_on_failure: bool = False
    remove_dependency_on_failure: bool = False
    continue_parent_on_failure: bool = False
    ignore_dependency_on_failure: bool = False
    # What ties it to others: the fields of JobLinks.
    unique_key: UniqueKey | None = None
    custom_id: CustomId | None = None
    parent_id: JobId | None = None
    group_id: GroupId | None = None
    depends_on: ManyFixed[JobId] = ()
    children_ids: ManyFixed[JobId] = ()
    tags: ManyFixed[ShortText] = ()
    repeat: Repeat | None = None
    dedup: Dedup | None = None
    debounce_id: ShortText | None = None
    debounce_ttl: TtlMs | None = None
    flow_id: FlowId | None = None
    # If given, the custom id also stands for a job that has ended: as long as that job is kept, and for at least this
    # long after the push.
    id_ttl: TtlMs | None = None
    # How many jobs its group may hold at most; asked only while pushing.
    group_max_size: Annotated[int, positive("groupMaxSize")] | None = None


class PushEntry(JobOptions, tag=False):
    """One job of a batch or a flow. Its own id is called `customId` here, `jobId` in PUSH."""


def checked_data(data: Raw) -> Raw:
    """The payload of a job, within its limit. JavaScript's undefined counts as null."""
    if len(data) > MAX_DATA_BYTES:
        raise InvalidCommand("Job data too large (max 10MB)")
    return Raw(NIL) if len(data) == len(UNDEFINED) and bytes(data) == UNDEFINED else data


def check_options(options: JobOptions) -> None:
    """What the types of the fields cannot say about one job."""
    options.data = checked_data(options.data)
    if options.repeat is not None:
        from headrace.schedules import check_repeat  # calendars and time zones: few jobs need them

        has_relatives = bool(options.parent_id or options.depends_on or options.children_ids)
        check_repeat(options.repeat, has_job_id=bool(options.custom_id), has_relatives=has_relatives)
    if options.custom_id and options.custom_id in options.depends_on:
        raise InvalidCommand(f"Job cannot depend on itself: {options.custom_id}")


def needs_check(options: JobOptions) -> bool:
    """Whether check_options or check_group_room could find anything: this one test spares nearly all jobs both."""
    size = len(options.data)
    return (
        options.repeat is not None
        or options.group_max_size is not None
        or bool(options.depends_on)
        or size > MAX_DATA_BYTES
        or size == len(UNDEFINED)
    )


_UNUSUAL: Final = [attrgetter(name) for name in ("repeat", "group_max_size", "depends_on")]
_data: Final = attrgetter("data")


def batch_needs_check(entries: Sequence[JobOptions]) -> bool:
    """`needs_check` of any entry, without a call for each of them."""
    sizes = list(map(len, map(_data, entries)))
    if len(UNDEFINED) in sizes or max(sizes, default=0) > MAX_DATA_BYTES:
        return True
    return any(any(map(option, entries)) for option in _UNUSUAL)


def check_batch(entries: Sequence[JobOptions]) -> None:
    """check_options for each entry; an error names the entry."""
    for index, entry in enumerate(entries):
        if needs_check(entry):
            try:
                check_options(entry)
            except InvalidCommand as error:
                raise InvalidCommand(f"jobs[{index}]: {error}") from None


async def check_group_room(engine: Engine, queue: str, entries: Sequence[JobOptions]) -> None:
    """Refuse jobs that would make a group larger than they allow it to be."""
    sizes: dict[str, int] = {}
    for entry in entries:
        group, most = entry.group_id, entry.group_max_size
        if group is None or most is None:
            continue
        if group not in sizes:
            sizes[group] = await engine.backend.group_jobs_count(queue, group)
        if sizes[group] >= most:
            raise Refused(f"Group {group} has reached its maximum size of {most}")
        sizes[group] += 1


def check_lengths(name: str, ids: Sequence[object], **parallel: Sequence[object] | None) -> None:
    """Lists that go with `ids` item by item must be as long, or absent."""
    for what, values in parallel.items():
        if values is not None and len(values) != len(ids):
            raise InvalidCommand(f"{name} {what} length must match ids length")


# -- pushing -------------------------------------------------------------------------------------------------


class Pushed(Reply):
    id: str


_OK_ID: Final = b"\xa2ok\xc3\xa2id"
_encode: Final = msgpack.Encoder().encode


class PushedBatch(Reply):
    ids: list[str]


@command(
    Pushed,
    category="Core",
    flags=Flag.WRITE,
    http="POST /queues/{queue}/jobs fail=400 alias=attempts:maxAttempts",
    errors=(
        "Job data too large (max 10MB)",
        "Dependency job not found: <id>",
        "Parent job not found: <id>",
        "repeat requires exactly one of every or pattern",
        "repeat.every must be a positive finite number",
        "Invalid repeat pattern: <detail>",
        "repeat jobs cannot use JobOptions.jobId; use repeat.jobId instead",
        "repeat jobs cannot participate in parent or dependency relationships",
        "Group <id> has reached its maximum size of <n>",
        "Cannot replace deduplicated job <id> because live jobs depend on it",
    ),
)
class Push(JobOptions, tag_field="cmd", tag="PUSH", kw_only=True):
    """Add one job to a queue. If its `jobId` or `uniqueKey` is taken, the id of the job that has it is returned."""

    queue: QueueName
    custom_id: CustomId | None = field(default=None, name="jobId")

    async def run(self, engine: Engine, peer: Peer) -> Pushed:
        if needs_check(self):
            check_options(self)
            await check_group_room(engine, self.queue, (self,))
        return Pushed(id=await engine.backend.insert_one(self.queue, self))

    @staticmethod
    async def together(commands: Sequence[Push], engine: Engine, peer: Peer) -> BurstReplies:
        plain = list(itertools.takewhile(is_plain, commands))
        return await _push_together(plain, engine)


@short_form(Push)
class ShortPush(Command[Pushed], tag="PUSH", kw_only=True, forbid_unknown_fields=True):
    """A PUSH without any of the thirty options: decoded in half the time, and plain without a look at each of them."""

    queue: ShortQueueName
    data: JobData
    name: JobName | None = None
    priority: Priority = 0
    delay: DelayMs = 0
    timestamp: TimestampMs | None = None

    async def run(self, engine: Engine, peer: Peer) -> Pushed:
        return await Push(**structs.asdict(self)).run(engine, peer)

    @staticmethod
    async def together(commands: Sequence[ShortPush], engine: Engine, peer: Peer) -> BurstReplies:
        return await _push_together(commands, engine)


async def _push_together(pushes: Sequence[Push | ShortPush], engine: Engine) -> BurstReplies:
    """Push the first ones of these plain jobs at once: as many as go to one queue with data as it should be."""
    alike = 0
    for push in pushes:
        size = len(push.data)
        if size > MAX_DATA_BYTES or size == len(UNDEFINED) or push.queue != pushes[0].queue:
            break
        alike += 1
    if alike < 2:
        return []
    job_ids = await engine.backend.insert_plain(pushes[0].queue, pushes[:alike])
    return Alike(alike, 2, _OK_ID, list(map(_encode, job_ids)))


@command(
    PushedBatch,
    category="Core",
    flags=Flag.WRITE | Flag.BULK,
    http="POST /queues/{queue}/jobs/bulk fail=400 alias=attempts:maxAttempts",
    errors=("jobs[<i>]: <error of PUSH>", "jobs[<i>]: Job cannot depend on itself: <id>"),
)
class PushBatch(Command[PushedBatch], tag="PUSHB"):
    """Add many jobs to a queue atomically. Jobs may depend on each other by `customId`, in any order."""

    queue: QueueName
    jobs: Many[PushEntry]

    async def run(self, engine: Engine, peer: Peer) -> PushedBatch:
        if batch_needs_check(self.jobs):
            check_batch(self.jobs)
            await check_group_room(engine, self.queue, self.jobs)
        return PushedBatch(ids=await engine.backend.insert(self.queue, self.jobs))


# -- handing out ---------------------------------------------------------------------------------------------


class GroupPullLimit(Struct, frozen=True):
    max: Annotated[int, positive("group.limit.max")]
    duration: Annotated[int, positive("group.limit.duration")]


class GroupPull(Struct, frozen=True):
    """Serve groups in turn, each within these limits unless it has its own.

    `affinity` names the one group wanted; null stands for the jobs without a group, absence for any.
    """

    concurrency: Annotated[int, positive("group.concurrency")] | None = None
    limit: GroupPullLimit | None = None
    affinity: GroupId | UnsetType | None = UNSET

    def demand(self) -> GroupDemand:
        limit = self.limit
        return GroupDemand(
            concurrency=self.concurrency,
            limit_max=limit.max if limit else None,
            limit_duration=limit.duration if limit else None,
            affinity=self.affinity,
        )


_NO_JOB: Final = Raw(NIL)
_OK_JOB: Final = b"\xa2ok\xc3\xa3job"
_TOKEN: Final = b"\xa5token"


class Pulled(Reply):
    """`job` is null when there was none. `token` is there when an owner was named: null when there was no job."""

    job: RawOrNull
    token: str | UnsetType | None = UNSET


class PulledBatch(Reply):
    jobs: list[Raw]
    tokens: list[str | None] | UnsetType = UNSET


class _Identified(Struct):
    id: str


_identify = msgpack.Decoder(_Identified).decode
_JSON_GROWTH: Final = 6
"""At most: `false` with its comma, or a control character, is one byte as MessagePack."""


def _json_size(job: bytes | Raw) -> int:
    """How long it is as JSON, for HTTP; where that is hard to say, how long it may be."""
    try:
        return len(json.encode(msgpack.decode(job))) + 1
    except (MsgspecError, TypeError, ValueError, RecursionError):
        return _JSON_GROWTH * len(job)


async def _fitting(engine: Engine, claims: list[Claim], room: int, *, as_json: bool = False) -> list[Claim]:
    """As many of these jobs as have room, one at least; the others wait again."""
    growth = _JSON_GROWTH if as_json else 1
    if sum([len(claim.job) for claim in claims]) * growth <= room:
        return claims
    size_of: Callable[[bytes | Raw], int] = _json_size if as_json else len
    sizes = itertools.accumulate(size_of(claim.job) for claim in claims)
    fitting = max(1, sum(size <= room for size in sizes))
    for claim in claims[fitting:]:
        await engine.backend.move_to_wait(_identify(claim.job).id, claim.token)
    return claims[:fitting]


_wish: Final = attrgetter("queue", "owner", "lock_ttl", "detach", "group")
_PULL_ERRORS = ("timeout must be at most 60000", "timeout must be at least 0")


@command(
    Pulled,
    category="Core",
    flags=Flag.WRITE | Flag.BLOCKING,
    http="GET /queues/{queue}/jobs fail=200",
    errors=_PULL_ERRORS,
)
class Pull(Command[Pulled], tag="PULL"):
    """Take the next job of a queue, waiting up to `timeout` ms for one.

    With `owner` the job is leased for `lockTtl` ms and must be settled with the token that comes with it. A
    job goes back to its queue when the connection that pulled it closes, unless `detach` was set.
    """

    queue: QueueName
    timeout: PollMs = 0
    owner: ShortText | None = None
    lock_ttl: LeaseMs = 30_000
    detach: bool = False
    group: GroupPull | None = None

    async def run(self, engine: Engine, peer: Peer) -> Pulled:
        holder = None if self.detach else peer.held
        group = self.group.demand() if self.group is not None else None
        demand = Demand(1, self.owner or None, self.lock_ttl, holder, group)
        claims = await engine.pull(self.queue, demand, self.timeout)
        return _pulled(claims[0] if claims else None, with_token=bool(self.owner))

    @staticmethod
    async def together(commands: Sequence[Pull], engine: Engine, peer: Peer) -> BurstReplies:
        first = commands[0]
        _, group = next(itertools.groupby(map(_wish, commands)))
        alike = len(list(group))
        if alike < 2 or first.group is not None:
            return []
        demand = Demand(alike, first.owner or None, first.lock_ttl, None if first.detach else peer.held)
        claims = await _fitting(engine, await engine.backend.claim(first.queue, demand), MAX_OUTBOX_BYTES)
        if not first.owner:
            return Alike(len(claims), 2, _OK_JOB, [claim.job for claim in claims])
        ends = [b"".join((claim.job, _TOKEN, _encode(claim.token))) for claim in claims]
        return Alike(len(claims), 3, _OK_JOB, ends)


@short_form(Pull)
class ShortPull(Pull, tag="PULL"):
    """The same; the queue name is checked by the decoder."""

    queue: ShortQueueName


def _pulled(claim: Claim | None, *, with_token: bool) -> Pulled:
    if claim is None:
        return Pulled(job=_NO_JOB, token=None if with_token else UNSET)
    return Pulled(job=Raw(claim.job), token=claim.token if with_token else UNSET)


@command(
    PulledBatch,
    category="Core",
    flags=Flag.WRITE | Flag.BLOCKING,
    http="POST /queues/{queue}/jobs/pull-batch fail=200",
    errors=(*_PULL_ERRORS, "count must be at least 1", "count must be at most 1000"),
)
class PullBatch(Command[PulledBatch], tag="PULLB"):
    """Take up to `count` jobs. With `timeout` it waits for the first one and then takes what is ready.

    As with PULL they go back to their queue when the connection closes, unless `detach` was set.
    """

    queue: QueueName
    count: Annotated[int, Meta(ge=1, le=1000)]
    timeout: PollMs = 0
    owner: ShortText | None = None
    lock_ttl: LeaseMs = 30_000
    detach: bool = False
    group: GroupPull | None = None

    async def run(self, engine: Engine, peer: Peer) -> PulledBatch:
        group = self.group.demand() if self.group is not None else None
        holder = None if self.detach else peer.held
        demand = Demand(self.count, self.owner or None, self.lock_ttl, holder, group)
        pulled = await engine.pull(self.queue, demand, self.timeout)
        claims = await _fitting(engine, pulled, REPLY_ROOM, as_json=peer.held is None)
        tokens = [claim.token for claim in claims] if self.owner else UNSET
        return PulledBatch(jobs=[Raw(claim.job) for claim in claims], tokens=tokens)


# -- settling ------------------------------------------------------------------------------------------------


class NotApplied(Struct):
    """The lease had already expired: nothing was changed."""

    applied: bool = False
    reason: str = "already-finalized"


class Settled(Reply):
    """`data` is only there when the command came too late."""

    data: NotApplied | UnsetType = UNSET


_OK: Final = msgpack.encode(Settled())[1:]


class Ignored(Struct, rename="camel"):
    ignored_indices: list[int]
    ignored_ids: list[str]


class SettledBatch(Reply):
    data: Ignored | UnsetType = UNSET


TOKEN_ERRORS = ("Lock token required for job <id>", "Invalid or expired lock token for job <id>")
LEASE_ERRORS = (*TOKEN_ERRORS, "Job not found or not in processing state: <id>")


def given_result(result: Raw | UnsetType) -> bytes | None:
    """The encoded result. Null is one; an absent key and JavaScript's undefined are none."""
    if isinstance(result, UnsetType):
        return None
    encoded = bytes(result)
    return None if encoded == UNDEFINED else encoded


@command(Settled, category="Core", flags=Flag.WRITE, http="POST /jobs/{id}/ack fail=400", errors=LEASE_ERRORS)
class Acknowledge(Command[Settled], tag="ACK"):
    """Complete a job. `token` must be the one that came with it, if it was pulled with an owner."""

    id: JobId
    result: Raw | UnsetType = UNSET
    token: Token | None = None
    remove_on_complete: bool | None = None

    async def run(self, engine: Engine, peer: Peer) -> Settled:
        ack = Ack(self.id, self.token or None, given_result(self.result), self.remove_on_complete)
        ignored = await engine.backend.complete((ack,))
        return Settled(data=NotApplied()) if ignored else Settled()

    @staticmethod
    async def together(commands: Sequence[Acknowledge], engine: Engine, peer: Peer) -> BurstReplies:
        acks = [
            Ack(c.id, c.token or None, None if c.result is UNSET else given_result(c.result), c.remove_on_complete)
            for c in commands
        ]
        outcomes = await engine.backend.complete_each(acks)
        if outcomes.count(True) == len(outcomes):
            return Alike(len(outcomes), 1, _OK)
        return [
            outcome if isinstance(outcome, HeadraceError) else Settled() if outcome else Settled(data=NotApplied())
            for outcome in outcomes
        ]


@command(
    SettledBatch,
    category="Core",
    flags=Flag.WRITE,
    http="POST /jobs/ack-batch fail=400",
    errors=(
        *LEASE_ERRORS,
        "ACKB tokens length must match ids length",
        "ACKB results length must match ids length",
        "ACKB removeOnCompletes length must match ids length",
    ),
)
class AcknowledgeBatch(Command[SettledBatch], tag="ACKB"):
    """Complete many jobs atomically. Those whose lease had already expired are listed and left alone."""

    ids: Many[JobId]
    results: Many[Raw] | None = None
    tokens: Many[Token | None] | None = None
    remove_on_completes: Many[bool | None] | None = None

    async def run(self, engine: Engine, peer: Peer) -> SettledBatch:
        ignored = await engine.backend.complete(self.acks())
        if not ignored:
            return SettledBatch()
        return SettledBatch(data=Ignored(ignored, [self.ids[index] for index in ignored]))

    def acks(self) -> list[Ack]:
        ids, tokens, results, removes = self.ids, self.tokens, self.results, self.remove_on_completes
        check_lengths("ACKB", ids, tokens=tokens, results=results, removeOnCompletes=removes)
        if tokens is None and results is None and removes is None:
            return list(map(Ack, ids))
        return [
            Ack(
                job_id,
                tokens[i] or None if tokens else None,
                given_result(results[i]) if results else None,
                # The reference reads false and null alike here: the job's own setting decides.
                True if removes and removes[i] else None,
            )
            for i, job_id in enumerate(ids)
        ]


@command(Settled, category="Core", flags=Flag.WRITE, http="POST /jobs/{id}/fail fail=400", errors=LEASE_ERRORS)
class Fail(Command[Settled], tag="FAIL"):
    """End an attempt as failed: the job is retried after its backoff, or becomes a dead letter.

    `unrecoverable` makes it a dead letter at once; `retryAfter` (ms) replaces the backoff this once.
    Long texts are truncated, not refused: 100 lines of `stack` are kept, and 1,048,576 characters of each and of
    `error`.
    """

    id: JobId
    error: AnyText | None = None
    token: Token | None = None
    stack: Many[AnyText] | None = None
    unrecoverable: bool = False
    remove_on_fail: bool | None = None
    retry_after: DelayMs | None = None

    async def run(self, engine: Engine, peer: Peer) -> Settled:
        applied = await engine.backend.fail(
            self.id,
            token=self.token or None,
            error=None if self.error is None else self.error[:MAX_TEXT],
            stack=None if self.stack is None else [line[:MAX_TEXT] for line in self.stack[:MAX_STACK]],
            unrecoverable=self.unrecoverable,
            remove=self.remove_on_fail,
            retry_after=self.retry_after,
        )
        return Settled() if applied else Settled(data=NotApplied())
