"""Dead letters, and rerunning completed jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Raw, Struct

from headrace.backends.base import DeadLetter, DlqStats
from headrace.commands._base import Command, Flag, Removal, Removed, Reply, command
from headrace.commands.queries import Counted
from headrace.model import Count, DlqFilter, Finite, JobId, QueueName, TimestampMs

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


class GivenFilter(DlqFilter, rename="camel"):
    """A filter as clients give it: the times are real numbers, and these moments belong to both sides."""

    older_than: Finite | None = None
    newer_than: Finite | None = None


class DeadLetters(Reply):
    """`jobs` alone, and the same jobs with the history of their failure in `entries`."""

    jobs: list[Raw]
    entries: list[DeadLetter]


@command(DeadLetters, category="DLQ", flags=Flag.BULK)
class ListDeadLetters(Command[DeadLetters], tag="Dlq"):
    """The dead letters of a queue, all or those that `filter` describes."""

    queue: QueueName
    count: Count | None = None
    filter: GivenFilter | None = None

    async def run(self, engine: Engine, peer: Peer) -> DeadLetters:
        entries = await engine.backend.dead_letters(self.queue, self.filter or DlqFilter(), self.count)
        return DeadLetters(jobs=[entry.job for entry in entries], entries=entries)


class DeadLetterPage(Reply):
    """Some of the dead letters with their history; `total` is how many the queue has."""

    entries: list[DeadLetter]
    total: int


@command(DeadLetterPage, category="DLQ", flags=Flag.BULK, http="GET /queues/{queue}/dlq")
class PageDeadLetters(Command[DeadLetterPage], tag="DlqPage"):
    """The dead letters of a queue, a page at a time.

    With `brief` their jobs are shown as GetJob shows them with `brief`, and `attempts` is empty.
    """

    queue: QueueName
    limit: Count = 100
    offset: Count = 0
    brief: bool = False

    async def run(self, engine: Engine, peer: Peer) -> DeadLetterPage:
        wanted = DlqFilter(limit=self.limit, offset=self.offset)
        entries = await engine.backend.dead_letters(self.queue, wanted, None, self.brief)
        return DeadLetterPage(entries=entries, total=(await engine.backend.dlq_stats(self.queue)).total)


@command(Counted, category="DLQ", flags=Flag.WRITE | Flag.BULK, http="POST /queues/{queue}/dlq/retry")
class RetryDeadLetters(Command[Counted], tag="RetryDlq"):
    """Retry dead letters with fresh attempts: one, those of `ids`, the `count` oldest, those of a filter, or all."""

    queue: QueueName
    job_id: JobId | None = None
    count: Count | None = None
    filter: GivenFilter | None = None
    ids: Annotated[list[JobId], Meta(max_length=1000)] | None = None

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        if self.ids is not None:
            return Counted(count=sum([await engine.backend.retry_dlq(self.queue, i, None, None) for i in self.ids]))
        return Counted(count=await engine.backend.retry_dlq(self.queue, self.job_id, self.count, self.filter))


@command(Counted, category="DLQ", flags=Flag.WRITE | Flag.BULK, http="POST /queues/{queue}/dlq/purge")
class PurgeDeadLetters(Command[Counted], tag="PurgeDlq"):
    """Remove all dead letters of a queue; returns how many there were."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        return Counted(count=await engine.backend.purge_dlq(self.queue))


@command(Removed, category="DLQ", flags=Flag.WRITE, http="DELETE /queues/{queue}/dlq/{jobId}")
class RemoveDeadLetter(Command[Removed], tag="RemoveDlqJob"):
    """Remove one dead letter; returns whether it existed."""

    queue: QueueName
    job_id: JobId

    async def run(self, engine: Engine, peer: Peer) -> Removed:
        return Removed(data=Removal(await engine.backend.remove_dead_letter(self.queue, self.job_id)))


class DlqStatsData(Struct):
    stats: DlqStats


class DlqFigures(Reply):
    data: DlqStatsData


@command(DlqFigures, category="DLQ", http="GET /queues/{queue}/dlq/stats lift=data")
class GetDlqStats(Command[DlqFigures], tag="GetDlqStats"):
    """How many dead letters a queue has, by reason, and how old they are."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> DlqFigures:
        return DlqFigures(data=DlqStatsData(await engine.backend.dlq_stats(self.queue)))


@command(Counted, category="DLQ", flags=Flag.WRITE | Flag.BULK, http="POST /queues/{queue}/retry-completed")
class RetryCompleted(Command[Counted], tag="RetryCompleted"):
    """Run completed jobs again: one, the `count` oldest, those completed up to `timestamp`, or all."""

    queue: QueueName
    id: JobId | None = None
    count: Count | None = None
    timestamp: TimestampMs | None = None

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        retried = await engine.backend.retry_completed(self.queue, self.id, self.count, self.timestamp)
        return Counted(count=retried)
