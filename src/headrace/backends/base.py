"""Where jobs are stored: the contract that every backend implements, verb by verb.

Rules:
- A verb is atomic. `insert`, `complete`, `fail` and the rest apply every consequence (parents, dedup key, repeat,
  limits, dead letters, events) or none, and report an outcome; the caller keeps no invariant across an await.
- Nothing a verb did may be acknowledged before `commit` has returned. On a local backend many verbs share one commit.
- Jobs leave a backend as `Raw`: the wire map of the job, already encoded. Payloads are never decoded.
- A verb that cannot apply raises an error of headrace.errors with the text that the client will read.
- Methods are `async def` everywhere; those of a local backend never suspend (except the ones marked *sliced*, which
  yield to other work between slices).
- `now` is always read from the injected clock inside the backend.

To add a verb: declare it here with its contract, extend tests/conformance, then implement it in each backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec import UNSET, Raw, Struct, UnsetType

from headrace.clock import Alarm
from headrace.errors import HeadraceError
from headrace.model import (
    DAY_MS,
    NIL,
    CronEntry,
    DeadLetterReason,
    DlqConfig,
    DlqFilter,
    Event,
    Flow,
    FlowStatus,
    FlowStep,
    JobSpec,
    Letter,
    Log,
    RateLimit,
    StallConfig,
    Webhook,
)


class GroupDemand(Struct, frozen=True):
    """The `group` option of a pull: serve groups in turn, within these default limits."""

    concurrency: int | None = None
    limit_max: float | None = None
    limit_duration: float | None = None
    affinity: str | UnsetType | None = UNSET
    """The one group wanted; None for ungrouped jobs only; unset for any."""


class Demand(Struct, frozen=True):
    """What a puller asks for."""

    count: int = 1
    owner: str | None = None
    lease_ms: float = 30_000
    holder: dict[str, int] | None = None
    group: GroupDemand | None = None


class Claim(Struct, gc=False):
    """One job handed out: its wire map and, when the puller named an owner, the token of its lease."""

    job: bytes | Raw
    token: str | None


class SearchPage(Struct, frozen=True):
    """What a search came across; `cursor` is where to look further, None when everything was looked at."""

    jobs: list[Raw]
    examined: int
    cursor: int | None


class Ack(Struct, gc=False):
    """One completion: `result` is encoded, None when the worker gave none."""

    id: str
    token: str | None = None
    result: bytes | None = None
    remove: bool | None = None


class FamilyNode(Struct):
    """One job of a family, with the id its client chose."""

    id: str
    queue: str
    spec: JobSpec


class NewStep(Struct, gc=False):
    """An entry for the log of a flow."""

    kind: str
    step: str = ""
    attempt: int = 0
    body: Raw = Raw(NIL)


class FlowPush(Struct, gc=False):
    """A job that a flow pushes."""

    queue: str
    spec: JobSpec


class Counts(Struct, rename="camel"):
    """Jobs of a queue by state; `prioritized` is the part of `waiting` with a priority above 0."""

    waiting: int = 0
    delayed: int = 0
    active: int = 0
    completed: int = 0
    failed: int = 0
    waiting_children: int = 0
    prioritized: int = 0


class QueueSummary(Struct):
    name: str
    counts: Counts
    paused: bool
    concurrency: int | None = None
    failed_today: int = 0
    """Jobs that failed for good since midnight UTC, or since the backend was opened."""


DURATION_BUCKETS: Final = 48
"""A duration of n ms is counted in the bucket of n's bit length: bucket b has those from 2**(b-1) up to 2**b ms."""


class QueueFigures:
    """What happened in a queue since the backend was opened. All numbers only grow, except when the queue goes away.

    A tick that could not be stored stays counted: these are figures to watch, not to account by. (No Struct: counting
    happens on the hot path, where a slot is written faster.)
    """

    __slots__ = (
        "completed",
        "day",
        "duplicated",
        "expired_leases",
        "failed",
        "failed_on_day",
        "pushed",
        "retried",
        "run",
        "run_ms",
        "stalled",
        "wait",
        "wait_ms",
    )

    def __init__(self) -> None:
        self.pushed = 0
        self.completed = 0
        self.failed = 0
        """For good; attempts that are followed by another one are in `retried`."""
        self.retried = 0
        self.expired_leases = 0
        self.stalled = 0
        """Jobs whose worker fell silent without a lease that could expire."""
        self.duplicated = 0
        """Pushes that were answered by a job that is already there."""
        self.wait = [0] * DURATION_BUCKETS
        self.wait_ms = 0
        """Between being ready and being handed out: counts by duration, and the sum."""
        self.run = [0] * DURATION_BUCKETS
        self.run_ms = 0
        """Between being handed out and being completed."""
        self.day = 0
        self.failed_on_day = 0
        """The UTC day of the last failure, counted from the epoch, and how many there were on it."""

    def count_failure(self, now_ms: int) -> None:
        today = now_ms // DAY_MS
        self.failed += 1
        self.failed_on_day = self.failed_on_day + 1 if self.day == today else 1
        self.day = today

    def failed_today(self, now_ms: int) -> int:
        return self.failed_on_day if self.day == now_ms // DAY_MS else 0


class Failure(Struct, gc=False):
    """A dead letter in few words."""

    id: str
    queue: str
    failed_at: float
    error: str | None


class DeadLetter(Struct, rename="camel"):
    """A dead-letter entry as it is shown."""

    job: Raw
    entered_at: float
    reason: str
    error: str | None
    attempts: list[Any]
    retry_count: int
    last_retry_at: float | None
    next_retry_at: float | None
    expires_at: float | None

    @classmethod
    def of(cls, job: Raw, letter: Letter, attempts: list[Any]) -> DeadLetter:
        retries = letter.retry_count, letter.last_retry_at, letter.next_retry_at
        return cls(job, letter.entered_at, letter.reason, letter.error, attempts, *retries, letter.expires_at)


class SegmentInfo(Struct, rename="camel"):
    """A segment as readers see it. A sealed one never changes; one that is not may grow and be sealed."""

    first: int
    last: int
    epoch: int
    sealed: bool
    raw_bytes: int
    file_bytes: int
    first_at: float
    last_at: float


class JobScan(Struct, frozen=True):
    """Which jobs a scan is after: those with after < number <= until, in the order of their numbers.

    What numbers them is the backend's to choose: when they were pushed, or when they ended. It never changes.
    """

    queue: str | None
    states: tuple[str, ...]
    """Words of states; none stands for all."""
    after: int
    until: int
    limit: int


class ScanPage(Struct):
    rows: list[Any]
    next: int | None
    """Where the next page begins (its `after`); None when there is nothing left."""
    newest: int
    """No job has a greater number."""
    oldest: int = 0
    """A number that all jobs have passed: readers share out what is between the two."""


class ResultRow(Struct, rename="camel"):
    """What a completed job returned; `result` is left out when that was nothing."""

    id: str
    queue: str
    name: str | None
    finished_at: float
    result: Raw | UnsetType = UNSET


class DlqStats(Struct, rename="camel"):
    total: int
    by_reason: dict[str, int]
    by_queue: dict[str, int]
    pending_retry: int
    expired: int
    oldest_entry: float | None
    newest_entry: float | None

    @classmethod
    def of(cls, queue: str, letters: Sequence[Letter], now: int) -> DlqStats:
        """What the burials of a queue amount to."""
        by_reason = {reason.value: 0 for reason in DeadLetterReason}
        for burial in letters:
            by_reason[burial.reason] += 1
        entered = [burial.entered_at for burial in letters]
        return cls(
            total=len(letters),
            by_reason=by_reason,
            by_queue={queue: len(letters)} if letters else {},
            pending_retry=sum(1 for b in letters if b.next_retry_at is not None),
            expired=sum(1 for b in letters if b.expires_at is not None and b.expires_at <= now),
            oldest_entry=min(entered, default=None),
            newest_entry=max(entered, default=None),
        )


class QueueLimits(Struct):
    rate_limit: RateLimit | None
    rate_limit_ttl: float
    """ms until the next token; -2 when nothing limits."""
    concurrency_limit: int | None
    maxed: bool


JOB_ENDS: Final = frozenset(("completed", "failed", "removed", "expired"))
"""What an outcome, or an event, calls the end of a job."""


class Outcome(Struct, gc=False):
    """How a job ended, for those who wait for it."""

    state: str
    result: bytes | None = None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.state in JOB_ENDS


class StorageHealth(Struct, rename="camel"):
    disk_full: bool
    error: str | None
    since: float | None


class Totals(Struct, rename="camel"):
    """Lifetime counters; they survive restarts."""

    pushed: int = 0
    pulled: int = 0
    completed: int = 0
    failed: int = 0
    wait_ms: float = 0
    run_ms: float = 0


METRICS_MINUTES: Final = 1440
"""How far back the counts per minute go."""


def count_minute(minutes: dict[int, int], now_ms: int, count: int = 1) -> None:
    """Count jobs that finish now; the oldest minute goes when there are too many."""
    minute = now_ms // 60_000
    minutes[minute] = minutes.get(minute, 0) + count
    if len(minutes) > METRICS_MINUTES:
        del minutes[next(iter(minutes))]


class MinuteMetrics(Struct):
    """Finished jobs per minute of the last day, newest first, and how many they are together."""

    count: int
    prev_ts: float
    prev_count: int
    data: list[int]

    @classmethod
    def of(cls, minutes: Mapping[int, int], now_ms: int) -> MinuteMetrics:
        """`minutes`: how many jobs finished in which minute of the epoch; it may hold older ones."""
        this = now_ms // 60_000
        first = min((minute for minute in minutes if minute > this - METRICS_MINUTES), default=this + 1)
        data = [minutes.get(minute, 0) for minute in range(this, first - 1, -1)]
        return cls(sum(data), float((this - 1) * 60_000), minutes.get(this - 1, 0), data)


class Backend(Protocol):
    # -- life of the backend ---------------------------------------------------------------------------------------
    @property
    def is_local(self) -> bool:
        """Whether verbs never suspend, so that dispatch may run them without a task."""

    alarm: Alarm
    """Rung by whatever plans something: the engine's timer follows it."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def take_ready(self) -> set[str]:
        """Queues that may have become claimable since the last call: their parked pulls deserve a try."""

    def take_events(self) -> list[Event]:
        """Events of the ticks committed since the last call."""

    def take_bodies(self) -> dict[int, bytes]:
        """Results and data that go with those events, by seq; only where somebody watches."""

    def next_due_ms(self) -> int | None:
        """Monotonic time at which `sweep` has something to do, or None."""

    async def sweep(self) -> None:
        """Do what time demands: promote, expire leases, time out, stall, retry dead letters, drop what is too old."""

    # -- storing and handing out -----------------------------------------------------------------------------------
    async def insert_one(self, queue: str, spec: JobSpec) -> str:
        """`insert` of a single job: the hot path."""

    async def insert_plain(self, queue: str, specs: Sequence[JobSpec]) -> list[str]:
        """`insert` of a few jobs that ask for nothing but defaults (model.is_plain): nothing can refuse them."""

    async def insert(self, queue: str, specs: Sequence[JobSpec]) -> list[str]:
        """Store jobs, all or none; ids in input order. *Sliced* for very long batches.

        A known jobId or a held uniqueKey gives the id of the job that is already there.
        """

    async def insert_family(self, nodes: Sequence[FamilyNode]) -> list[Raw]:
        """Store a whole family, all or none. *Sliced* for very large ones."""

    async def claim(self, queue: str, demand: Demand) -> list[Claim]:
        """Move up to `demand.count` ready jobs to ACTIVE, best first.

        Atomic: two callers never receive the same job. [] when paused, limited or empty.
        """

    async def complete(self, acks: Sequence[Ack]) -> list[int]:
        """Complete jobs, all or none; indices of those whose lease had been finalised already (ignored)."""

    async def complete_each(self, acks: Sequence[Ack]) -> list[bool | HeadraceError]:
        """`complete` of each by itself: whether it was applied, or why it was refused."""

    async def fail(
        self,
        job_id: str,
        *,
        token: str | None,
        error: str | None,
        stack: list[str] | None,
        unrecoverable: bool,
        remove: bool | None,
        retry_after: float | None = None,
    ) -> bool:
        """End an attempt as failed: retry or bury. False when the lease was finalised before.

        `retry_after` (ms) takes the place of the backoff."""

    async def release(self, held: dict[str, int]) -> None:
        """Give back the jobs (id -> lease serial) of a closed connection, counting no attempt."""

    async def release_leases(self, queue: str, owner: str, keep: Collection[str]) -> int:
        """Give back the jobs of a queue that are leased to `owner`, but for those whose ids are in `keep`; how many."""

    async def resume_leases(self, queue: str, owner: str, held: Mapping[str, str], lease_ms: float) -> int:
        """Lease those of these jobs (id -> token) that wait to `owner` again, under the tokens it has; how many."""

    async def extend(self, job_id: str, token: str | None, duration_ms: float | None, *, force: bool = False) -> bool:
        """Renew a lease by `duration_ms`, or by its own length. Without token: only the heartbeat is noted, unless
        `force`. False when the job is not active or the token is wrong."""

    # -- queries ---------------------------------------------------------------------------------------------------
    # What is asked for in brief has the beginning of the payload, its length in `dataBytes`, and neither returnvalue,
    # stack trace, timeline nor attempts: any number of jobs fits one frame, whatever they carry.
    async def job(self, job_id: str, brief: bool = False) -> Raw:
        """The job with state, returnvalue and failedReason. NotFound: Job not found."""

    async def job_by_custom_id(self, custom_id: str, queue: str | None = None) -> Raw:
        """The job of this queue, or of any, that was pushed with this id. NotFound: Job not found."""

    async def state(self, job_id: str) -> str:
        """`unknown` for an id that is not there."""

    async def result(self, job_id: str) -> bytes | None: ...

    async def outcome(self, job_id: str) -> Outcome:
        """State, result and error for WaitJob. NotFound: Job not found."""

    async def scan_jobs(self, wanted: JobScan) -> ScanPage:
        """Jobs by number, as whole maps: what partitioned readers need. *Sliced.*"""

    async def scan_results(self, wanted: JobScan) -> ScanPage:
        """`ResultRow`s of completed jobs. *Sliced.*"""

    async def scan_dlq(self, wanted: JobScan) -> ScanPage:
        """`DeadLetter`s. *Sliced.*"""

    async def jobs(
        self, queue: str, states: Sequence[str] | None, offset: int, limit: int, asc: bool, brief: bool = False
    ) -> list[Raw]:
        """Jobs by creation; a list of states is a union. ReplyTooLarge when they would not fit one frame.
        *Sliced* where payloads have to be read: jobs that go meanwhile are left out.

        In a long queue the order may be that of arrival, which differs where clients gave a `timestamp`.
        """

    async def search(
        self, queue: str, text: str, states: Sequence[str] | None, limit: int, before: int | None, brief: bool = False
    ) -> SearchPage:
        """Jobs with `text` in id, name, tags, error or payload, newest first; sliced.

        Looks at a bounded number of jobs, at those before the cursor `before` if it is given.
        """

    async def counts(self, queue: str) -> Counts: ...

    async def counts_per_priority(self, queue: str) -> dict[str, int]:
        """Waiting and delayed jobs by priority, keys as text."""

    async def queues(self) -> list[QueueSummary]: ...

    async def progress(self, job_id: str) -> tuple[float, str | None]: ...

    async def children_values(self, job_id: str) -> dict[str, Raw]:
        """Results of completed children by `<queue>:<id>`; {} for an unknown id."""

    async def children_failures(self, job_id: str, *, ignored: bool) -> dict[str, str]:
        """Errors of failed children that the parent went on without."""

    # -- control of one job ----------------------------------------------------------------------------------------
    async def cancel(self, job_id: str, *, force: bool = False) -> None:
        """Withdraw a job that has not begun; with `force` also one that is active, whose worker loses its lease."""

    async def set_progress(self, job_id: str, progress: float, message: str | None) -> None: ...

    async def update(self, job_id: str, data: Raw) -> None: ...

    async def change_priority(self, job_id: str, priority: int, lifo: bool | None) -> None: ...

    async def promote(self, job_id: str) -> None: ...

    async def promote_many(self, queue: str, count: int | None) -> int:
        """Promote all delayed jobs, or the `count` oldest. *Sliced.*"""

    async def move_to_delayed(self, job_id: str, delay_ms: float, token: str | None) -> None: ...

    async def change_delay(self, job_id: str, delay_ms: float, token: str | None) -> None: ...

    async def move_to_wait(self, job_id: str, token: str | None) -> None: ...

    async def move_to_waiting_children(self, job_id: str, token: str | None) -> bool: ...

    async def discard(self, job_id: str, token: str | None) -> None: ...

    # -- control of one queue --------------------------------------------------------------------------------------
    async def pause(self, queue: str) -> None: ...

    async def resume(self, queue: str) -> None: ...

    async def is_paused(self, queue: str) -> bool: ...

    async def drain(self, queue: str) -> int:
        """Remove waiting and delayed jobs. *Sliced.*"""

    async def obliterate(self, queue: str) -> None:
        """Remove the queue with everything in it; limits and configs return to defaults. *Sliced.*"""

    async def clean(self, queue: str, grace_ms: float, state: str | None, limit: int) -> list[str]:
        """Remove jobs older than `grace_ms`; ids of those removed, no more than one reply can list. Never touches
        active jobs. *Sliced.*"""

    # -- dead letters and completed jobs ---------------------------------------------------------------------------
    async def dead_letters(
        self, queue: str, wanted: DlqFilter, count: int | None, brief: bool = False
    ) -> list[DeadLetter]:
        """Those that `wanted` describes, `count` at most. ReplyTooLarge and slices as of `jobs`."""

    async def retry_dlq(self, queue: str, job_id: str | None, count: int | None, wanted: DlqFilter | None) -> int:
        """How many wait again. *Sliced.*"""

    async def purge_dlq(self, queue: str) -> int:
        """*Sliced.*"""

    async def remove_dead_letter(self, queue: str, job_id: str) -> bool: ...

    async def dlq_stats(self, queue: str) -> DlqStats: ...

    async def retry_completed(self, queue: str, job_id: str | None, count: int | None, before_ms: float | None) -> int:
        """How many wait again. *Sliced.*"""

    # -- settings of a queue ---------------------------------------------------------------------------------------
    async def stall_config(self, queue: str) -> StallConfig: ...

    async def set_stall_config(self, queue: str, config: StallConfig) -> None: ...

    async def dlq_config(self, queue: str) -> DlqConfig: ...

    async def set_dlq_config(self, queue: str, config: DlqConfig) -> None: ...

    async def set_rate_limit(self, queue: str, limit: float, duration_ms: float, ttl_ms: float | None) -> None: ...

    async def clear_rate_limit(self, queue: str) -> None: ...

    async def set_concurrency(self, queue: str, limit: int | None) -> None:
        """None clears it. Jobs that are active already count."""

    async def limits(self, queue: str) -> QueueLimits: ...

    # -- deduplication ---------------------------------------------------------------------------------------------
    async def unique_key_owner(self, queue: str, key: str) -> str | None: ...

    async def remove_unique_key(self, queue: str, key: str) -> int: ...

    async def remove_job_unique_key(self, job_id: str) -> bool: ...

    # -- families --------------------------------------------------------------------------------------------------
    async def update_parent(self, child_id: str, parent_id: str) -> None: ...

    async def remove_child_dependency(self, child_id: str) -> bool: ...

    async def remove_unprocessed_children(self, parent_id: str) -> None: ...

    # -- groups ----------------------------------------------------------------------------------------------------
    async def group_jobs_count(self, queue: str, group: str) -> int: ...

    async def groups_jobs_count(self, queue: str) -> int: ...

    async def group_active_count(self, queue: str, group: str) -> int: ...

    async def set_group_rate_limit(self, queue: str, group: str, limit: RateLimit | None) -> bool:
        """None removes it; whether there was one."""

    async def group_rate_limit(self, queue: str, group: str) -> RateLimit | None: ...

    async def group_rate_limit_ttl(self, queue: str, group: str) -> float:
        """ms until the group may run again; -2 when nothing holds it back."""

    async def rate_limit_group(self, queue: str, group: str, duration_ms: float) -> None:
        """Hold the group back for `duration_ms` from now."""

    async def set_group_concurrency(self, queue: str, group: str, limit: int | None) -> bool: ...

    async def group_concurrency(self, queue: str, group: str) -> int | None: ...

    async def pause_group(self, queue: str, group: str, paused: bool) -> bool:
        """Whether it changed."""

    async def is_group_paused(self, queue: str, group: str) -> bool: ...

    # -- logs ------------------------------------------------------------------------------------------------------
    async def add_log(self, job_id: str, message: str, level: str) -> None: ...

    async def logs(self, job_id: str) -> list[Log]: ...

    async def clear_logs(self, job_id: str, keep: int | None) -> None: ...

    # -- schedules and webhooks ------------------------------------------------------------------------------------
    async def put_cron(self, entry: CronEntry, known: CronEntry | None = None) -> bool:
        """Store a schedule in place of `known`. False, with nothing changed, when the stored one is another: somebody
        changed or fired it meanwhile."""

    async def cron(self, name: str) -> CronEntry | None: ...

    async def crons(self) -> list[CronEntry]: ...

    async def delete_cron(self, name: str) -> bool: ...

    async def fire_cron(self, entry: CronEntry, spec: JobSpec | None) -> str | None:
        """Store the advanced entry and push its job in one transition; the id, or None for a skipped run.

        Refused (None, nothing changed) when the stored slot was fired by somebody else."""

    webhook_changes: int
    """Counts up with every change to a webhook, so that whoever delivers need not compare them all."""

    async def add_webhook(self, webhook: Webhook) -> None: ...

    async def webhooks(self) -> list[Webhook]: ...

    async def change_webhook(self, webhook_id: str, change: Callable[[Webhook], Webhook]) -> Webhook | None:
        """Store what `change` makes of the stored webhook; None if there is none. Nobody's change is overwritten: it is
        called again when somebody else was faster."""

    async def remove_webhook(self, webhook_id: str) -> bool: ...

    # -- workflows -------------------------------------------------------------------------------------------------
    async def start_flow(
        self, flow_id: str, workflow: str, queue: str, steps: Sequence[NewStep], jobs: Sequence[FlowPush]
    ) -> tuple[Flow, bool]:
        """Begin a flow and push its first jobs, or give the one that has this id; whether it is new."""

    async def advance_flow(
        self,
        flow_id: str,
        revision: int,
        status: FlowStatus | None,
        steps: Sequence[NewStep],
        jobs: Sequence[FlowPush],
        ack: Ack | None,
        drop: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> Flow:
        """Append to the log of a flow, change its status, push its next jobs, complete the job that made the step and
        drop jobs of the flow, at work or not, without telling anybody. Jobs to be stopped are removed unless they are
        at work, and the flow is told.

        All of it or nothing: Conflict when the flow has changed since `revision` or has ended, LeaseLost when the job
        is not the caller's any more."""

    async def flow(self, flow_id: str) -> Flow | None: ...

    async def flow_steps(self, flow_id: str, after: int) -> list[FlowStep]:
        """The log of a flow behind the entry number `after`."""

    async def flows(
        self, workflow: str | None, status: FlowStatus | None, limit: int, before: str | None
    ) -> list[Flow]:
        """Flows by id, last ones first; ids that begin with the time they were made come newest first. `before` is the
        last id of the page before."""

    async def retire_flows(self) -> None:
        """Forget the oldest of the ended flows where there are too many of them or they are too old."""

    # -- figures ---------------------------------------------------------------------------------------------------
    def totals(self) -> Totals: ...

    def minute_metrics(self, queue: str, kind: str) -> MinuteMetrics: ...

    def queue_figures(self) -> dict[str, QueueFigures]:
        """Figures of every queue, and of all queues that ever were under the name \"\", which no queue can have; there
        only the counters of rare things are kept. The figures may be live: read them at once, change nothing."""

    async def count_new_queues(self) -> None:
        """Have `total_counts` tell of all queues: a program that has just started may not have seen them yet."""

    def total_counts(self) -> Counts:
        """Jobs of all queues by state."""

    def oldest_waiting_ms(self, queue: str) -> float | None:
        """How long the oldest waiting job of a queue has been ready; None when none waits.

        Cheap whatever the queue holds. It never says too much; where very many jobs with priorities wait it may say too
        little until it has come across the oldest one."""

    async def latest_failures(self, queue: str | None, limit: int) -> tuple[list[Failure], int]:
        """The newest dead letters of one or all queues, newest first, and how many there are altogether.

        Costs as much as the letters it gives, however many there are."""

    def log_position(self) -> tuple[int, int]:
        """The first seq that the event log still has and the last one that is committed."""

    def storage_status(self) -> StorageHealth: ...

    def size_bytes(self) -> int: ...

    async def compact(self) -> None:
        """Give memory and file space back where that is cheap."""

    async def trim_events(self, queue: str, max_length: int) -> int: ...
