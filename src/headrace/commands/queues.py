"""Changes to a whole queue, and its settings: when a job counts as stalled, what happens to dead letters.

A Set command takes any part of the settings and leaves the rest as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.commands.queries import Counted, JobCounts, job_counts
from headrace.model import (
    YEAR_MS,
    AutoRetryMs,
    Count,
    DlqAgeMs,
    DlqConfig,
    GracePeriodMs,
    MaxAutoRetries,
    MaxEntries,
    MaxStalls,
    QueueName,
    ShortText,
    StallConfig,
    StallIntervalMs,
)

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

Config = TypeVar("Config", bound=Struct)


def merged(config: Config, change: Struct) -> Config:
    """`config` with the fields that `change` gives."""
    given = {name: getattr(change, name) for name in change.__struct_fields__}
    return structs.replace(config, **{name: value for name, value in given.items() if value is not UNSET})


@command(Ok, category="Control", flags=Flag.WRITE, http="POST /queues/{queue}/pause")
class Pause(Command[Ok], tag="Pause"):
    """Hand out no more jobs of a queue. Active jobs continue; the pause survives a restart."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.pause(self.queue)
        return Ok()


@command(Ok, category="Control", flags=Flag.WRITE, http="POST /queues/{queue}/resume")
class Resume(Command[Ok], tag="Resume"):
    """Hand out jobs of a queue again; waiting pulls are served at once."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.resume(self.queue)
        return Ok()


class Paused(Reply):
    paused: bool


@command(Paused, category="Control", http="GET /queues/{queue}/paused")
class IsPaused(Command[Paused], tag="IsPaused"):
    """Whether a queue is paused."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Paused:
        return Paused(paused=await engine.backend.is_paused(self.queue))


@command(Counted, category="Control", flags=Flag.WRITE | Flag.BULK, http="POST /queues/{queue}/drain")
class Drain(Command[Counted], tag="Drain"):
    """Remove all waiting and delayed jobs of a queue; returns how many there were."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        return Counted(count=await engine.backend.drain(self.queue))


@command(Ok, category="Control", flags=Flag.WRITE | Flag.BULK, http="POST /queues/{queue}/obliterate")
class Obliterate(Command[Ok], tag="Obliterate"):
    """Remove a queue with everything in it, active jobs, dead letters, limits and settings included."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.obliterate(self.queue)
        return Ok()


class Cleaned(Reply):
    count: int
    ids: list[str]


@command(Cleaned, category="Control", flags=Flag.WRITE | Flag.BULK, http="POST /queues/{queue}/clean")
class Clean(Command[Cleaned], tag="Clean"):
    """Remove jobs older than `grace` ms, at most `limit`. Active ones stay.

    Without a `state` waiting, delayed, completed and failed ones are removed, not those that wait for children.
    It removes no more than one reply can list (64 MB of ids, about 1.7 million): repeat it for the rest.
    """

    queue: QueueName
    grace: Annotated[float, Meta(ge=0, le=100 * YEAR_MS)]
    state: ShortText | None = None
    limit: Count = 1000

    async def run(self, engine: Engine, peer: Peer) -> Cleaned:
        ids = await engine.backend.clean(self.queue, self.grace, self.state, self.limit)
        return Cleaned(count=len(ids), ids=ids)


@command(Counted, category="Control", flags=Flag.WRITE | Flag.BULK, http="POST /queues/{queue}/promote-jobs")
class PromoteJobs(Command[Counted], tag="PromoteJobs"):
    """Make delayed jobs ready now: all, or the `count` oldest."""

    queue: QueueName
    count: Count | None = None

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        return Counted(count=await engine.backend.promote_many(self.queue, self.count))


class QueueLine(Struct):
    name: str
    waiting: int
    delayed: int
    active: int
    paused: bool


class QueueList(Reply):
    queues: list[QueueLine]


@command(QueueList, category="Control", http="GET /queues")
class ListQueues(Command[QueueList], tag="ListQueues"):
    """All queues with what is in them."""

    async def run(self, engine: Engine, peer: Peer) -> QueueList:
        return QueueList(
            queues=[
                QueueLine(queue.name, queue.counts.waiting, queue.counts.delayed, queue.counts.active, queue.paused)
                for queue in await engine.backend.queues()
            ]
        )


class QueueCounts(Struct):
    name: str
    paused: bool
    counts: JobCounts


class QueueCountsList(Reply):
    queues: list[QueueCounts]


@command(QueueCountsList, category="Control", http="GET /queues/summary lift=queues")
class SummarizeQueues(Command[QueueCountsList], tag="QueuesSummary"):
    """All queues with how many of their jobs are in each state."""

    async def run(self, engine: Engine, peer: Peer) -> QueueCountsList:
        queues = await engine.backend.queues()
        return QueueCountsList(queues=[QueueCounts(q.name, q.paused, job_counts(q.counts)) for q in queues])


# -- settings ------------------------------------------------------------------------------------------------


class StallConfigChange(Struct, rename="camel"):
    enabled: bool | UnsetType = UNSET
    stall_interval: StallIntervalMs | UnsetType = UNSET
    max_stalls: MaxStalls | UnsetType = UNSET
    grace_period: GracePeriodMs | UnsetType = UNSET


class DlqConfigChange(Struct, rename="camel"):
    """`maxAge` null keeps dead letters whatever their age."""

    auto_retry: bool | UnsetType = UNSET
    auto_retry_interval: AutoRetryMs | UnsetType = UNSET
    max_auto_retries: MaxAutoRetries | UnsetType = UNSET
    max_age: DlqAgeMs | UnsetType | None = UNSET
    max_entries: MaxEntries | UnsetType = UNSET


class StallSettings(Reply):
    config: StallConfig


class DlqSettings(Reply):
    config: DlqConfig


@command(StallSettings, category="Control", http="GET /queues/{queue}/stall-config")
class GetStallConfig(Command[StallSettings], tag="GetStallConfig"):
    """When an active job of this queue counts as stalled."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> StallSettings:
        return StallSettings(config=await engine.backend.stall_config(self.queue))


@command(Ok, category="Control", flags=Flag.WRITE, http="PUT /queues/{queue}/stall-config whole=config")
class SetStallConfig(Command[Ok], tag="SetStallConfig"):
    """Change when an active job of this queue counts as stalled."""

    queue: QueueName
    config: StallConfigChange

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        config = merged(await engine.backend.stall_config(self.queue), self.config)
        await engine.backend.set_stall_config(self.queue, config)
        return Ok()


@command(DlqSettings, category="DLQ", http="GET /queues/{queue}/dlq-config")
class GetDlqConfig(Command[DlqSettings], tag="GetDlqConfig"):
    """How long dead letters of this queue are kept, and whether they are retried automatically."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> DlqSettings:
        return DlqSettings(config=await engine.backend.dlq_config(self.queue))


@command(Ok, category="DLQ", flags=Flag.WRITE | Flag.BULK, http="PUT /queues/{queue}/dlq-config whole=config")
class SetDlqConfig(Command[Ok], tag="SetDlqConfig"):
    """Change how long dead letters of this queue are kept, and whether they are retried automatically."""

    queue: QueueName
    config: DlqConfigChange

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        config = merged(await engine.backend.dlq_config(self.queue), self.config)
        await engine.backend.set_dlq_config(self.queue, config)
        return Ok()
