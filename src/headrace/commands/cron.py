"""Schedules: jobs that are pushed at set times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.commands.jobs import checked_data
from headrace.errors import NotFound
from headrace.model import (
    Backoff,
    BackoffMs,
    CronEntry,
    Dedup,
    DelayMs,
    JobName,
    JobSettings,
    MaxAttempts,
    Priority,
    QueueName,
    ShortText,
    TimeoutMs,
    UniqueKey,
    intern_settings,
    js_number,
    optional,
)

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

CronName = Annotated[str, Meta(min_length=1, max_length=1024)]
_EVERY_TEXT = "Cron repeatEvery must be a positive safe integer number of milliseconds"
RepeatEvery = Annotated[float, Meta(ge=-1e308, le=1e308, extra=dict.fromkeys(("type", "finite"), _EVERY_TEXT))]
MaxLimit = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

NOT_FOUND = "Cron job not found"


class CronJobOptions(Struct, rename="camel"):
    """How the jobs of a schedule are run: the subset of JobSettings that clients can set here."""

    max_attempts: MaxAttempts = 3
    backoff: BackoffMs | Backoff = 1000
    timeout: TimeoutMs | None = None
    delay: DelayMs = 0
    stall_timeout: TimeoutMs | None = None
    remove_on_complete: bool = False
    remove_on_fail: bool = False

    def settings(self) -> JobSettings:
        return intern_settings(
            JobSettings(
                max_attempts=self.max_attempts,
                backoff=self.backoff,
                timeout=self.timeout,
                stall_timeout=self.stall_timeout,
                remove_on_complete=self.remove_on_complete,
                remove_on_fail=self.remove_on_fail,
            )
        )


class CronView(Struct, rename="camel"):
    """A schedule as clients see it. `last_run` is the slot of the last run, left out before the first."""

    name: str
    queue: str
    schedule: str | None
    repeat_every: float | None
    next_run: float
    executions: int
    priority: int
    # Ours leaves these out; the original server writes null.
    max_limit: int | UnsetType | None = UNSET
    timezone: str | UnsetType | None = UNSET
    job_name: str | UnsetType | None = UNSET
    last_run: float | UnsetType | None = UNSET


def cron_view(entry: CronEntry) -> CronView:
    return CronView(
        name=entry.name,
        queue=entry.queue,
        schedule=entry.schedule,
        repeat_every=None if entry.repeat_every is None else js_number(entry.repeat_every),
        next_run=float(entry.next_run),
        executions=entry.executions,
        priority=entry.priority,
        max_limit=optional(entry.max_limit),
        timezone=optional(entry.timezone),
        job_name=optional(entry.job_name),
        last_run=UNSET if entry.last_slot is None else float(entry.last_slot),
    )


class CronFound(Reply):
    cron: CronView


class CronsFound(Reply):
    crons: list[CronView]


@command(
    CronFound,
    category="Cron",
    flags=Flag.WRITE,
    http="POST /crons fail=400",
    errors=(
        "Job data too large (max 10MB)",
        "Cron job must have either schedule or repeatEvery",
        _EVERY_TEXT,
        "Invalid cron expression: <detail>",
    ),
)
class Cron(Command[CronFound], tag="Cron"):
    """Create a schedule, or replace the one of this name and keep its count of runs.

    `schedule` is a cron expression in `timezone`, `repeatEvery` an interval in ms; the expression wins when
    both are given. By default a run is skipped while the job of the previous run has not ended
    (`preventOverlap`), and runs missed while the server was down are skipped (`skipMissedOnRestart`).
    """

    name: CronName
    queue: QueueName
    data: Raw
    schedule: ShortText | None = None
    repeat_every: RepeatEvery | None = None
    priority: Priority = 0
    max_limit: MaxLimit | None = None
    timezone: ShortText | None = None
    job_name: JobName | None = None
    unique_key: UniqueKey | None = None
    dedup: Dedup | None = None
    immediately: bool = False
    skip_missed_on_restart: bool = True
    skip_if_no_worker: bool = False
    prevent_overlap: bool = True
    job_options: CronJobOptions | None = None

    async def run(self, engine: Engine, peer: Peer) -> CronFound:
        self.data = checked_data(self.data)
        entry = await engine.crons.upsert(self.entry(), immediately=self.immediately)
        return CronFound(cron=cron_view(entry))

    def entry(self) -> CronEntry:
        """What is stored; the times and counts are for the scheduler to fill in."""
        options = self.job_options or CronJobOptions()
        return CronEntry(
            name=self.name,
            queue=self.queue,
            data=bytes(self.data),
            schedule=self.schedule or None,
            repeat_every=self.repeat_every,
            next_run=0,
            priority=self.priority,
            timezone=self.timezone or None,
            max_limit=self.max_limit,
            job_name=self.job_name,
            unique_key=self.unique_key or None,
            dedup=self.dedup,
            skip_missed_on_restart=self.skip_missed_on_restart,
            skip_if_no_worker=self.skip_if_no_worker,
            prevent_overlap=self.prevent_overlap,
            settings=options.settings(),
            delay=options.delay,
        )


@command(Ok, category="Cron", flags=Flag.WRITE, http="DELETE /crons/{name} fail=404", errors=(NOT_FOUND,))
class CronDelete(Command[Ok], tag="CronDelete"):
    """Delete a schedule. Jobs it has pushed already stay."""

    name: CronName

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        if not await engine.crons.delete(self.name):
            raise NotFound(NOT_FOUND)
        return Ok()


@command(CronsFound, category="Cron", http="GET /crons")
class CronList(Command[CronsFound], tag="CronList"):
    """All schedules."""

    async def run(self, engine: Engine, peer: Peer) -> CronsFound:
        return CronsFound(crons=[cron_view(entry) for entry in await engine.crons.list()])


@command(CronFound, category="Cron", http="GET /crons/{name} fail=404", errors=(NOT_FOUND,))
class CronGet(Command[CronFound], tag="CronGet"):
    """One schedule by its name."""

    name: CronName

    async def run(self, engine: Engine, peer: Peer) -> CronFound:
        entry = await engine.crons.get(self.name)
        if entry is None:
            raise NotFound(NOT_FOUND)
        return CronFound(cron=cron_view(entry))
