"""Groups inside a queue: how many jobs they hold, how fast they run, whether they are paused.

Limits of a group apply to pulls that ask for groups to be served in turn (`group` of PULL and PULLB).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Struct

from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.commands.jobs import positive
from headrace.commands.limits import RateView, rate_view
from headrace.model import Count, GroupId, QueueName, js_number
from headrace.model import RateLimit as StoredRateLimit

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

_QUEUE_ERRORS = ("Queue name is required", "groupId is required")


class GroupCount(Struct):
    count: int


class GroupCounted(Reply):
    data: GroupCount


class GroupRateData(Struct):
    limit: RateView | None


class GroupRateFound(Reply):
    data: GroupRateData


class GroupTtl(Struct):
    ttl: float


class GroupTtlFound(Reply):
    data: GroupTtl


class GroupConcurrency(Struct):
    concurrency: float | None


class GroupConcurrencyFound(Reply):
    data: GroupConcurrency


class GroupRemoval(Struct):
    removed: int


class GroupRemoved(Reply):
    data: GroupRemoval


class GroupChange(Struct):
    changed: bool


class GroupChanged(Reply):
    data: GroupChange


class GroupPause(Struct):
    paused: bool


class GroupPaused(Reply):
    data: GroupPause


# -- counts --------------------------------------------------------------------------------------------------


@command(GroupCounted, category="Groups", errors=_QUEUE_ERRORS)
class GetGroupJobsCount(Command[GroupCounted], tag="GetGroupJobsCount"):
    """How many jobs of a group are waiting."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupCounted:
        return GroupCounted(data=GroupCount(await engine.backend.group_jobs_count(self.queue, self.group_id)))


@command(GroupCounted, category="Groups")
class GetGroupsJobsCount(Command[GroupCounted], tag="GetGroupsJobsCount"):
    """How many jobs of all groups of a queue are waiting. `maxCount` is accepted; the count is exact."""

    queue: QueueName
    max_count: Count | None = None

    async def run(self, engine: Engine, peer: Peer) -> GroupCounted:
        return GroupCounted(data=GroupCount(await engine.backend.groups_jobs_count(self.queue)))


@command(GroupCounted, category="Groups", errors=_QUEUE_ERRORS)
class GetGroupActiveCount(Command[GroupCounted], tag="GetGroupActiveCount"):
    """How many jobs of a group are active."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupCounted:
        return GroupCounted(data=GroupCount(await engine.backend.group_active_count(self.queue, self.group_id)))


# -- rate ----------------------------------------------------------------------------------------------------


@command(
    Ok,
    category="Groups",
    flags=Flag.WRITE,
    errors=(
        *_QUEUE_ERRORS,
        "max must be a positive safe integer",
        "duration must be a positive safe integer",
    ),
)
class SetGroupRateLimit(Command[Ok], tag="SetGroupRateLimit"):
    """Hand out at most `max` jobs of a group per `duration` ms."""

    queue: QueueName
    group_id: GroupId
    max: Annotated[int, positive("max")]
    duration: Annotated[int, positive("duration")]

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        limit = StoredRateLimit(self.max, self.duration)
        await engine.backend.set_group_rate_limit(self.queue, self.group_id, limit)
        return Ok()


@command(GroupRateFound, category="Groups", errors=_QUEUE_ERRORS)
class GetGroupRateLimit(Command[GroupRateFound], tag="GetGroupRateLimit"):
    """The rate limit of a group, or null."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupRateFound:
        limit = await engine.backend.group_rate_limit(self.queue, self.group_id)
        return GroupRateFound(data=GroupRateData(rate_view(limit)))


@command(GroupRemoved, category="Groups", flags=Flag.WRITE, errors=_QUEUE_ERRORS)
class RemoveGroupRateLimit(Command[GroupRemoved], tag="RemoveGroupRateLimit"):
    """Remove the rate limit of a group; 1 if there was one, else 0."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupRemoved:
        removed = await engine.backend.set_group_rate_limit(self.queue, self.group_id, None)
        return GroupRemoved(data=GroupRemoval(int(removed)))


@command(GroupTtlFound, category="Groups", errors=_QUEUE_ERRORS)
class GetGroupRateLimitTtl(Command[GroupTtlFound], tag="GetGroupRateLimitTtl"):
    """How many ms until a group may run again; -2 when nothing holds it back."""

    queue: QueueName
    group_id: GroupId
    max_jobs: Count | None = None

    async def run(self, engine: Engine, peer: Peer) -> GroupTtlFound:
        ttl = await engine.backend.group_rate_limit_ttl(self.queue, self.group_id)
        return GroupTtlFound(data=GroupTtl(float(ttl)))


@command(
    Ok,
    category="Groups",
    flags=Flag.WRITE,
    errors=(*_QUEUE_ERRORS, "duration must be a positive safe integer"),
)
class RateLimitGroup(Command[Ok], tag="RateLimitGroup"):
    """Suspend a group for `duration` ms from now."""

    queue: QueueName
    group_id: GroupId
    duration: Annotated[int, positive("duration")]

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.rate_limit_group(self.queue, self.group_id, self.duration)
        return Ok()


# -- concurrency ---------------------------------------------------------------------------------------------


@command(
    Ok,
    category="Groups",
    flags=Flag.WRITE,
    errors=(*_QUEUE_ERRORS, "concurrency must be a positive safe integer"),
)
class SetGroupConcurrency(Command[Ok], tag="SetGroupConcurrency"):
    """Allow at most `concurrency` active jobs of a group."""

    queue: QueueName
    group_id: GroupId
    concurrency: Annotated[int, positive("concurrency")]

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.set_group_concurrency(self.queue, self.group_id, self.concurrency)
        return Ok()


@command(GroupConcurrencyFound, category="Groups", errors=_QUEUE_ERRORS)
class GetGroupConcurrency(Command[GroupConcurrencyFound], tag="GetGroupConcurrency"):
    """How many jobs of a group may be active at once, or null."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupConcurrencyFound:
        limit = await engine.backend.group_concurrency(self.queue, self.group_id)
        return GroupConcurrencyFound(data=GroupConcurrency(None if limit is None else js_number(limit)))


@command(GroupRemoved, category="Groups", flags=Flag.WRITE, errors=_QUEUE_ERRORS)
class RemoveGroupConcurrency(Command[GroupRemoved], tag="RemoveGroupConcurrency"):
    """Remove the limit of active jobs of a group; 1 if there was one, else 0."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupRemoved:
        removed = await engine.backend.set_group_concurrency(self.queue, self.group_id, None)
        return GroupRemoved(data=GroupRemoval(int(removed)))


# -- rest ----------------------------------------------------------------------------------------------------


@command(GroupChanged, category="Groups", flags=Flag.WRITE, errors=_QUEUE_ERRORS)
class PauseGroup(Command[GroupChanged], tag="PauseGroup"):
    """Hand out no more jobs of a group; returns whether it was running."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupChanged:
        return GroupChanged(data=GroupChange(await engine.backend.pause_group(self.queue, self.group_id, True)))


@command(GroupChanged, category="Groups", flags=Flag.WRITE, errors=_QUEUE_ERRORS)
class ResumeGroup(Command[GroupChanged], tag="ResumeGroup"):
    """Hand out jobs of a group again; returns whether it was paused."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupChanged:
        return GroupChanged(data=GroupChange(await engine.backend.pause_group(self.queue, self.group_id, False)))


@command(GroupPaused, category="Groups", errors=_QUEUE_ERRORS)
class IsGroupPaused(Command[GroupPaused], tag="IsGroupPaused"):
    """Whether a group is paused."""

    queue: QueueName
    group_id: GroupId

    async def run(self, engine: Engine, peer: Peer) -> GroupPaused:
        return GroupPaused(data=GroupPause(await engine.backend.is_group_paused(self.queue, self.group_id)))
