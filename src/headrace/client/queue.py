"""A queue as its users see it: add jobs, inspect them, manage them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypedDict, TypeVar, Unpack

import msgspec

from headrace import commands
from headrace.client.client import Client
from headrace.client.job import Job, JobInfo, SyncJob, decode_job
from headrace.client.options import Options, RateLimit, wire_options
from headrace.client.payloads import batches, encode_payload
from headrace.client.verbs import AsyncShell, Shell, SyncShell, verb
from headrace.durations import Duration, milliseconds
from headrace.errors import InvalidCommand, NotFound

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from headrace.backends.base import DeadLetter, DlqStats
    from headrace.model import DlqConfig, StallConfig

JobType = TypeVar("JobType", Job[Any], SyncJob[Any])

State = Literal["waiting", "prioritized", "delayed", "active", "completed", "failed", "waiting-children"]

_SCHEDULED_OPTIONS: Final = frozenset(
    ("priority", "attempts", "backoff", "timeout", "delay", "stall_timeout", "remove_on_complete", "remove_on_fail")
)


class NewJob(msgspec.Struct, kw_only=True):
    """One of the jobs that are added together."""

    name: str | None = None
    data: Any = None
    options: Options = {}


class StallChange(TypedDict, total=False):
    enabled: bool
    stall_interval: Duration
    max_stalls: int
    grace_period: Duration


class DlqChange(TypedDict, total=False):
    auto_retry: bool
    auto_retry_interval: Duration
    max_auto_retries: int
    max_age: Duration | None
    """None keeps dead letters whatever their age."""
    max_entries: int


class QueueVerbs(Shell, Generic[JobType]):
    """All operations on a queue. `_job_type` is the matching (async or blocking) handle on a job."""

    _job_type: type[JobType]

    def __init__(self, client: Client, name: str, defaults: Options | None = None) -> None:
        if not isinstance(client, Client):
            raise InvalidCommand(f"a queue needs a client, as app.queue({name!r}) gives it, not {client!r}")
        super().__init__(client)
        self.name = name
        self.defaults: Options = defaults or {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def job(self, job_id: str, name: str = "") -> JobType:
        """A handle on a job of this queue, without a round trip."""
        return self._job_type(self._client, job_id, self.name, name)

    # -- adding --------------------------------------------------------------------------------------------------------

    @verb
    async def add(self, name: str, data: Any = None, **options: Unpack[Options]) -> JobType:
        """Add one job. If its `job_id` or `dedup` key is taken, the job that has it is returned."""
        fields = wire_options({**self.defaults, **options}, self._client.clock.now_ms)
        push = commands.jobs.Push(queue=self.name, name=name, data=encode_payload(data), **fields)
        return self.job((await self._ask(push)).id, name)

    @verb
    async def add_many(self, new: Iterable[NewJob | tuple[str, Any]]) -> list[JobType]:
        """Add many jobs in few commands, in this order. Each command is atomic."""
        added: list[JobType] = []
        for entries in batches(map(self._entry, new), size_of_entry):
            ids = (await self._ask(commands.jobs.PushBatch(queue=self.name, jobs=entries))).ids
            added += [self.job(job_id, entry.name or "") for job_id, entry in zip(ids, entries, strict=True)]
        return added

    def _entry(self, job: NewJob | tuple[str, Any]) -> commands.jobs.PushEntry:
        if isinstance(job, tuple) and len(job) == 2:
            job = NewJob(name=job[0], data=job[1])
        if not isinstance(job, NewJob):
            raise InvalidCommand(f"add_many takes pairs of name and data, and NewJob for more than that, not {job!r}")
        fields = wire_options({**self.defaults, **job.options}, self._client.clock.now_ms)
        return commands.jobs.PushEntry(name=job.name, data=encode_payload(job.data), **fields)

    # -- looking -------------------------------------------------------------------------------------------------------

    @verb
    async def get_job(self, job_id: str) -> JobInfo | None:
        """A job by its id or by the `job_id` it was added with; None when there is none."""
        try:
            return decode_job((await self._ask(commands.queries.GetJob(id=job_id))).job)
        except NotFound:
            pass
        try:
            return decode_job((await self._ask(commands.queries.GetJobByCustomId(custom_id=job_id))).job)
        except NotFound:
            return None

    @verb
    async def get_jobs(
        self, *states: State, limit: int = 100, offset: int = 0, newest_first: bool = False
    ) -> list[JobInfo]:
        """Jobs in these states (all if none is named), a page at a time."""
        wanted: list[str] | None = list(states) or None
        found = await self._ask(
            commands.queries.GetJobs(queue=self.name, state=wanted, limit=limit, offset=offset, asc=not newest_first)
        )
        return [decode_job(job) for job in found.jobs]

    @verb
    async def counts(self) -> dict[str, int]:
        """How many jobs there are by state. `prioritized` is a part of `waiting`."""
        counts = (await self._ask(commands.queries.GetJobCounts(queue=self.name))).counts
        return msgspec.to_builtins(counts)  # type: ignore[no-any-return]

    @verb
    async def count(self) -> int:
        """How many jobs it holds, whatever their state."""
        return (await self._ask(commands.queries.CountJobs(queue=self.name))).count

    @verb
    async def counts_per_priority(self) -> dict[int, int]:
        """How many jobs wait or are delayed, by priority."""
        found = await self._ask(commands.queries.GetCountsPerPriority(queue=self.name))
        return {int(priority): count for priority, count in found.counts.items()}

    @verb
    async def workers(self) -> list[commands.workers.WorkerView]:
        """The workers that have registered for it."""
        return (await self._ask(commands.workers.ListWorkers(queue=self.name))).data.workers

    # -- steering ------------------------------------------------------------------------------------------------------

    @verb
    async def pause(self) -> None:
        """Hand out no more jobs; running ones continue. Survives a restart."""
        await self._ask(commands.queues.Pause(queue=self.name))

    @verb
    async def resume(self) -> None:
        """Hand out jobs again."""
        await self._ask(commands.queues.Resume(queue=self.name))

    @verb
    async def is_paused(self) -> bool:
        """Whether it hands out no jobs."""
        return (await self._ask(commands.queues.IsPaused(queue=self.name))).paused

    @verb
    async def drain(self) -> int:
        """Remove all jobs that wait or are delayed."""
        return (await self._ask(commands.queues.Drain(queue=self.name))).count

    @verb
    async def obliterate(self) -> None:
        """Remove the queue with everything in it."""
        await self._ask(commands.queues.Obliterate(queue=self.name))

    @verb
    async def clean(self, older_than: Duration = 0, state: State | None = None, limit: int = 1000) -> list[str]:
        """Remove jobs that are older than this: waiting, delayed, completed and failed ones, or those of one state.
        Active ones stay. Returns their ids.

        It removes no more than one reply can list (64 MB of ids): call it again for the rest.
        """
        grace = milliseconds(older_than, "older_than")
        return (await self._ask(commands.queues.Clean(queue=self.name, grace=grace, state=state, limit=limit))).ids

    @verb
    async def promote_all(self, count: int | None = None) -> int:
        """Make delayed jobs ready now: all, or the `count` oldest."""
        return (await self._ask(commands.queues.PromoteJobs(queue=self.name, count=count))).count

    @verb
    async def retry_completed(self, job_id: str | None = None) -> int:
        """Run completed jobs again."""
        return (await self._ask(commands.dlq.RetryCompleted(queue=self.name, id=job_id))).count

    # -- limits --------------------------------------------------------------------------------------------------------

    @verb
    async def limit_rate(self, limit: RateLimit | None, ttl: Duration | None = None) -> None:
        """Hand out at most so many jobs per duration, across all workers; None lifts the limit."""
        if limit is None:
            await self._ask(commands.limits.RateLimitClear(queue=self.name))
            return
        if not isinstance(limit, RateLimit):
            raise InvalidCommand(f"limit_rate takes a RateLimit, such as RateLimit(100, per='1s'), not {limit!r}")
        span = milliseconds(limit.per, "per")
        lasting = None if ttl is None else milliseconds(ttl, "ttl")
        await self._ask(commands.limits.RateLimit(queue=self.name, limit=limit.max, duration=span, ttl=lasting))

    @verb
    async def limit_concurrency(self, limit: int | None) -> None:
        """Run at most so many jobs at once, across all workers; None lifts the limit."""
        if limit is None:
            await self._ask(commands.limits.ClearConcurrency(queue=self.name))
        else:
            await self._ask(commands.limits.SetConcurrency(queue=self.name, limit=limit))

    @verb
    async def limits(self) -> commands.limits.LimitsView:
        """Its limits of rate and concurrency."""
        return (await self._ask(commands.limits.GetQueueLimits(queue=self.name))).data.limits

    @verb
    async def set_stalls(self, **change: Unpack[StallChange]) -> None:
        """Change when an active job without a lease counts as stalled."""
        await self._ask(
            commands.queues.SetStallConfig(queue=self.name, config=_change(commands.queues.StallConfigChange, change))
        )

    @verb
    async def stalls(self) -> StallConfig:
        """When an active job without a lease counts as stalled."""
        return (await self._ask(commands.queues.GetStallConfig(queue=self.name))).config

    # -- schedules -----------------------------------------------------------------------------------------------------

    @verb
    async def schedule(
        self,
        name: str,
        data: Any = None,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str | ZoneInfo | None = None,
        job_name: str | None = None,
        limit: int | None = None,
        overlap: bool = False,
        catch_up: bool = False,
        **options: Unpack[Options],
    ) -> commands.cron.CronView:
        """Create or replace a schedule; names are unique over all queues.

        `overlap` lets a run start before the previous one has ended; `catch_up` makes up for runs missed in a downtime.
        `options` are those of its jobs. The queue's defaults apply where schedules support them.
        """
        if (cron is None) == (every is None):
            raise InvalidCommand("a schedule has either a cron expression or an interval (every=...)")
        if strange := options.keys() - _SCHEDULED_OPTIONS:
            known = ", ".join(sorted(_SCHEDULED_OPTIONS))
            raise InvalidCommand(f"a schedule cannot give its jobs {min(strange)!r}; it can give: {known}")
        given = {name: value for name, value in self.defaults.items() if name in _SCHEDULED_OPTIONS}
        fields = wire_options({**given, **options}, self._client.clock.now_ms)
        priority = fields.pop("priority", 0)
        asked = commands.cron.Cron(
            name=name,
            queue=self.name,
            data=encode_payload(data),
            schedule=cron,
            repeat_every=None if every is None else milliseconds(every, "every"),
            timezone=None if tz is None else str(tz),
            job_name=job_name or name,
            priority=priority,
            max_limit=limit,
            prevent_overlap=not overlap,
            skip_missed_on_restart=not catch_up,
            job_options=commands.cron.CronJobOptions(**fields) if fields else None,
        )
        return (await self._ask(asked)).cron

    @verb
    async def schedules(self) -> list[commands.cron.CronView]:
        """Its schedules, and when each is due next."""
        return [found for found in (await self._ask(commands.cron.CronList())).crons if found.queue == self.name]

    @verb
    async def unschedule(self, name: str) -> bool:
        """Remove a schedule; False if there was none."""
        try:
            await self._ask(commands.cron.CronDelete(name=name))
        except NotFound:
            return False
        return True


class DlqVerbs(Shell):
    """The dead letters of a queue."""

    def __init__(self, client: Client, queue: str) -> None:
        super().__init__(client)
        self.queue = queue

    @verb
    async def list(self, limit: int = 100, offset: int = 0, *, brief: bool = False) -> list[DeadLetter]:
        """Dead letters with their reasons, a page at a time. `brief`: only the beginning of their data, no attempts."""
        asked = commands.dlq.PageDeadLetters(queue=self.queue, limit=limit, offset=offset, brief=brief)
        return (await self._ask(asked)).entries

    @verb
    async def stats(self) -> DlqStats:
        """How many there are, by reason, and how old they are."""
        return (await self._ask(commands.dlq.GetDlqStats(queue=self.queue))).data.stats

    @verb
    async def retry(self, job_id: str | None = None, *, limit: int | None = None, reason: str | None = None) -> int:
        """Retry dead letters: one, the oldest, those with a reason, or all. Returns how many."""
        chosen = None if reason is None else commands.dlq.GivenFilter(reason=reason)
        asked = commands.dlq.RetryDeadLetters(queue=self.queue, job_id=job_id, count=limit, filter=chosen)
        return (await self._ask(asked)).count

    @verb
    async def remove(self, job_id: str) -> bool:
        """Remove one; False if there was no such dead letter."""
        return (await self._ask(commands.dlq.RemoveDeadLetter(queue=self.queue, job_id=job_id))).data.removed

    @verb
    async def purge(self) -> int:
        """Remove all of them."""
        return (await self._ask(commands.dlq.PurgeDeadLetters(queue=self.queue))).count

    @verb
    async def configure(self, **change: Unpack[DlqChange]) -> None:
        """Change how long dead letters are kept and whether they are retried automatically."""
        await self._ask(
            commands.queues.SetDlqConfig(queue=self.queue, config=_change(commands.queues.DlqConfigChange, change))
        )

    @verb
    async def config(self) -> DlqConfig:
        """How long dead letters are kept and whether they are retried automatically."""
        return (await self._ask(commands.queues.GetDlqConfig(queue=self.queue))).config


class Dlq(DlqVerbs, AsyncShell): ...


class SyncDlq(DlqVerbs, SyncShell): ...


class Queue(QueueVerbs[Job[Any]], AsyncShell):
    """A queue, async: `await queue.add("send", {"to": "a@b.c"})`."""

    _job_type = Job

    @property
    def dlq(self) -> Dlq:
        """Its dead letters."""
        return Dlq(self._client, self.name)


class SyncQueue(QueueVerbs[SyncJob[Any]], SyncShell):
    """A queue, blocking: `queue.add("send", {"to": "a@b.c"})`."""

    _job_type = SyncJob

    @property
    def dlq(self) -> SyncDlq:
        """Its dead letters."""
        return SyncDlq(self._client, self.name)


_SPANS: Final = frozenset(("stall_interval", "grace_period", "auto_retry_interval", "max_age"))


def _change(kind: type[Any], change: Mapping[str, Any]) -> Any:
    fields = {}
    for name, value in change.items():
        if name not in kind.__struct_fields__:
            raise InvalidCommand(f"unknown setting {name!r}; there are: {', '.join(kind.__struct_fields__)}")
        fields[name] = milliseconds(value, name) if name in _SPANS and value is not None else value
    return kind(**fields)


def size_of_entry(entry: commands.jobs.PushEntry) -> int:
    return len(entry.data)
