"""Changes to one job: cancel, delay or promote it, wait for it, extend its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.commands.jobs import TOKEN_ERRORS, check_lengths, checked_data
from headrace.commands.queries import Counted
from headrace.errors import Refused
from headrace.model import DelayMs, Finite, JobId, LeaseMs, Many, Priority, Text, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

_NOT_ACTIVE = ("Job not found", "Job is not active (current state: <state>)")


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="DELETE /jobs/{id} fail=200",
    errors=("Job not found or cannot be cancelled",),
)
class Cancel(Command[Ok], tag="Cancel"):
    """Cancel a job that has not started: waiting, delayed or waiting for children.

    With `force` also an active one: its worker loses the lease and finds out with its next heartbeat.
    """

    id: JobId
    force: bool = False

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.cancel(self.id, force=self.force)
        return Ok()


@command(Ok, category="Control", flags=Flag.WRITE, http="POST /jobs/{id}/progress fail=400", errors=_NOT_ACTIVE)
class Progress(Command[Ok], tag="Progress"):
    """Report the progress of an active job. Values are clamped to 0..100; without `message` the old one stays."""

    id: JobId
    progress: Finite
    message: Text | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.set_progress(self.id, self.progress, self.message)
        return Ok()


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="PUT /jobs/{id}/data fail=400",
    errors=("Job data too large (max 10MB)", "Job not found or cannot be updated"),
)
class Update(Command[Ok], tag="Update"):
    """Replace the data of a job that has not ended."""

    id: JobId
    data: Raw

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.update(self.id, checked_data(self.data))
        return Ok()


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="PUT /jobs/{id}/priority fail=400",
    errors=("Job not found or not in queue",),
)
class ChangePriority(Command[Ok], tag="ChangePriority"):
    """Change the priority of a waiting or delayed job and, with `lifo`, its place among jobs of that priority."""

    id: JobId
    priority: Priority
    lifo: bool | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.change_priority(self.id, self.priority, self.lifo)
        return Ok()


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="POST /jobs/{id}/promote fail=400",
    errors=("Job not found or not delayed",),
)
class Promote(Command[Ok], tag="Promote"):
    """Make a delayed job ready now."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.promote(self.id)
        return Ok()


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="POST /jobs/{id}/move-to-delayed fail=400",
    errors=(*_NOT_ACTIVE, *TOKEN_ERRORS),
)
class MoveToDelayed(Command[Ok], tag="MoveToDelayed"):
    """Delay an active, waiting or delayed job by `delay` ms. Counts no attempt; an active job loses its lease."""

    id: JobId
    delay: DelayMs
    token: Token | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.move_to_delayed(self.id, self.delay, self.token or None)
        return Ok()


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="PUT /jobs/{id}/delay fail=400",
    errors=("Job not found or cannot change delay", *TOKEN_ERRORS),
)
class ChangeDelay(Command[Ok], tag="ChangeDelay"):
    """Let a job run `delay` ms from now."""

    id: JobId
    delay: DelayMs
    token: Token | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.change_delay(self.id, self.delay, self.token or None)
        return Ok()


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="POST /jobs/{id}/move-to-wait fail=400",
    errors=("Job not found", "Cannot move job from state '<state>' to waiting", *TOKEN_ERRORS),
)
class MoveToWait(Command[Ok], tag="MoveToWait"):
    """Make a job ready: release an active one, promote a delayed one, retry a failed one."""

    id: JobId
    token: Token | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.move_to_wait(self.id, self.token or None)
        return Ok()


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="POST /jobs/{id}/discard fail=400",
    errors=("Job not found", *TOKEN_ERRORS),
)
class Discard(Command[Ok], tag="Discard"):
    """Move a job that has not ended to the dead-letter queue."""

    id: JobId
    token: Token | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.discard(self.id, self.token or None)
        return Ok()


class Waited(Reply):
    completed: bool
    result: Raw | UnsetType = UNSET


@command(
    Waited,
    category="Control",
    flags=Flag.BLOCKING,
    http="POST /jobs/{id}/wait fail=200",
    errors=("Job not found", "timeout must be at most 600000"),
)
class WaitJob(Command[Waited], tag="WaitJob"):
    """Wait for a job to end, at most `timeout` ms. `completed` is false if it failed, was removed or time ran out."""

    id: JobId
    timeout: Annotated[float, Meta(ge=0, le=600_000)] = 30_000

    async def run(self, engine: Engine, peer: Peer) -> Waited:
        outcome = await engine.wait_job(self.id, self.timeout)
        if outcome is None or outcome.state != "completed":
            return Waited(completed=False)
        return Waited(completed=True, result=UNSET if outcome.result is None else Raw(outcome.result))


async def _extend(engine: Engine, job_id: str, token: str | None, duration_ms: float) -> bool:
    # Here, unlike in ACK, an empty token is a wrong one: taken as absent it would override any holder.
    return token != "" and await engine.backend.extend(job_id, token, duration_ms, force=token is None)


@command(
    Ok,
    category="Control",
    flags=Flag.WRITE,
    http="POST /jobs/{id}/extend-lock fail=400",
    errors=("Lock not found or invalid token",),
)
class ExtendLock(Command[Ok], tag="ExtendLock"):
    """Extend a lease to `duration` ms from now. Without a token this succeeds whoever holds it."""

    id: JobId
    duration: LeaseMs
    token: Token | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        if not await _extend(engine, self.id, self.token, self.duration):
            raise Refused("Lock not found or invalid token")
        return Ok()


@command(
    Counted,
    category="Control",
    flags=Flag.WRITE,
    http="POST /jobs/extend-locks fail=400",
    errors=(
        "ExtendLocks tokens length must match ids length",
        "ExtendLocks durations length must match ids length",
    ),
)
class ExtendLocks(Command[Counted], tag="ExtendLocks"):
    """Extend many leases, each to its own duration; returns how many succeeded."""

    ids: Many[JobId]
    tokens: Many[Token | None]
    durations: Many[LeaseMs]

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        check_lengths("ExtendLocks", self.ids, tokens=self.tokens, durations=self.durations)
        count = 0
        for job_id, token, duration in zip(self.ids, self.tokens, self.durations, strict=True):
            count += await _extend(engine, job_id, token, duration)
        return Counted(count=count)
