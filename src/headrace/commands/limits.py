"""How fast and how many at once: limits of a whole queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.model import MAX_SAFE_INTEGER, YEAR_MS, Count, QueueName, TtlMs
from headrace.model import RateLimit as StoredRateLimit

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

_NOT_A_NUMBER = dict.fromkeys(("type", "finite"), "limit must be a finite number")
JobsPerDuration = Annotated[float, Meta(ge=0, le=MAX_SAFE_INTEGER, extra=_NOT_A_NUMBER)]
JobsAtOnce = Annotated[int, Meta(ge=0, le=2**31 - 1, extra=_NOT_A_NUMBER)]


@command(
    Ok,
    category="Rate",
    flags=Flag.WRITE,
    http="PUT /queues/{queue}/rate-limit fail=200",
    errors=("limit must be a finite number",),
)
class RateLimit(Command[Ok], tag="RateLimit"):
    """Hand out at most `limit` jobs per `duration` ms. 0 hands out none; with `ttl` the limit expires by itself."""

    queue: QueueName
    limit: JobsPerDuration
    duration: Annotated[float, Meta(ge=1, le=YEAR_MS)] = 1000
    ttl: TtlMs | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.set_rate_limit(self.queue, self.limit, self.duration, self.ttl)
        return Ok()


@command(Ok, category="Rate", flags=Flag.WRITE, http="DELETE /queues/{queue}/rate-limit fail=200")
class RateLimitClear(Command[Ok], tag="RateLimitClear"):
    """Remove the rate limit of a queue."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.clear_rate_limit(self.queue)
        return Ok()


@command(
    Ok,
    category="Rate",
    flags=Flag.WRITE,
    http="PUT /queues/{queue}/concurrency fail=200 alias=concurrency:limit",
    errors=("limit must be a finite number",),
)
class SetConcurrency(Command[Ok], tag="SetConcurrency"):
    """Allow at most `limit` active jobs of a queue. Jobs that are already active count."""

    queue: QueueName
    limit: JobsAtOnce

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.set_concurrency(self.queue, self.limit)
        return Ok()


@command(Ok, category="Rate", flags=Flag.WRITE, http="DELETE /queues/{queue}/concurrency fail=200")
class ClearConcurrency(Command[Ok], tag="ClearConcurrency"):
    """Remove the concurrency limit of a queue."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.set_concurrency(self.queue, None)
        return Ok()


class RateView(Struct):
    max: float
    duration: float


def rate_view(limit: StoredRateLimit | None) -> RateView | None:
    return None if limit is None else RateView(float(limit.max), float(limit.duration))


class LimitsView(Struct, rename="camel"):
    """`rateLimitTtl` is the time in ms until the next job may go, -2 when nothing limits."""

    rate_limit: RateView | None
    rate_limit_ttl: float
    concurrency_limit: int | None
    maxed: bool


class LimitsData(Struct):
    limits: LimitsView


class LimitsFound(Reply):
    data: LimitsData


@command(LimitsFound, category="Rate", http="GET /queues/{queue}/limits")
class GetQueueLimits(Command[LimitsFound], tag="GetQueueLimits"):
    """The limits of a queue, and whether they hold jobs back now. `maxJobs` is accepted and has no effect."""

    queue: QueueName
    max_jobs: Count | None = None

    async def run(self, engine: Engine, peer: Peer) -> LimitsFound:
        limits = await engine.backend.limits(self.queue)
        view = LimitsView(
            rate_limit=rate_view(limits.rate_limit),
            rate_limit_ttl=float(limits.rate_limit_ttl),
            concurrency_limit=limits.concurrency_limit,
            maxed=limits.maxed,
        )
        return LimitsFound(data=LimitsData(view))
