"""Queries about jobs. None of them changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from headrace.backends.base import Counts
from headrace.commands._base import Command, Flag, Reply, command
from headrace.model import Count, CustomId, JobId, Many, QueueName, ShortText

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


SearchText = Annotated[str, Meta(max_length=200)]


class FoundJob(Reply):
    job: Raw


class JobState(Reply):
    id: str
    state: str


class JobResult(Reply):
    """`result` is left out when the job has none."""

    id: str
    result: Raw | UnsetType = UNSET


class JobList(Reply):
    jobs: list[Raw]


class JobCounts(Struct):
    """Jobs by state. `prioritized` is a part of `waiting`.

    Jobs of a paused queue stay `waiting`, so `paused` is always 0.
    """

    waiting: int
    prioritized: int
    delayed: int
    active: int
    completed: int
    failed: int
    waiting_children: int = field(name="waiting-children")
    paused: int = 0


class CountsByState(Reply):
    counts: JobCounts


class CountsByPriority(Reply):
    queue: str
    counts: dict[str, int]


class Counted(Reply):
    """How many there are, or how many were affected."""

    count: int


class JobProgress(Reply):
    progress: float
    message: str | None


class Values(Struct):
    values: dict[str, Raw]


class ChildrenValues(Reply):
    data: Values


def job_counts(counts: Counts) -> JobCounts:
    return JobCounts(
        waiting=counts.waiting,
        prioritized=counts.prioritized,
        delayed=counts.delayed,
        active=counts.active,
        completed=counts.completed,
        failed=counts.failed,
        waiting_children=counts.waiting_children,
    )


@command(FoundJob, category="Query", http="GET /jobs/{id} fail=404", errors=("Job not found",))
class GetJob(Command[FoundJob], tag="GetJob"):
    """A job in any state, with its result or the reason of its failure.

    With `brief` it has no `returnvalue`, stack trace and timeline, and of a payload of more than 1,000 bytes only the
    beginning; `dataBytes` says how long it is.
    """

    id: JobId
    brief: bool = False

    async def run(self, engine: Engine, peer: Peer) -> FoundJob:
        return FoundJob(job=await engine.backend.job(self.id, self.brief))


@command(JobState, category="Query", http="GET /jobs/{id}/state fail=404")
class GetState(Command[JobState], tag="GetState"):
    """The state of a job; `unknown` when there is no such job."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> JobState:
        return JobState(id=self.id, state=await engine.backend.state(self.id))


@command(JobResult, category="Query", http="GET /jobs/{id}/result fail=404")
class GetResult(Command[JobResult], tag="GetResult"):
    """What the worker returned. The key is left out when it returned nothing or there is no such job."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> JobResult:
        result = await engine.backend.result(self.id)
        return JobResult(id=self.id, result=UNSET if result is None else Raw(result))


def _states(given: str | list[str] | None) -> list[str] | None:
    """The states to list: an empty list or name stands for all of them, as no list does."""
    return [given] if isinstance(given, str) and given else given or None


@command(
    JobList, category="Query", flags=Flag.BULK, http="GET /queues/{queue}/jobs/list alias=status:state,states:state"
)
class GetJobs(Command[JobList], tag="GetJobs"):
    """Jobs of a queue in order of creation, a page at a time. Several states give the union, none gives all jobs.

    With `brief` each is shown as GetJob shows it with `brief`: large payloads do not fill the reply.
    """

    queue: QueueName
    state: ShortText | Many[ShortText] | None = None
    limit: Count = 100
    offset: Count = 0
    asc: bool = True
    brief: bool = False

    async def run(self, engine: Engine, peer: Peer) -> JobList:
        states = _states(self.state)
        jobs = await engine.backend.jobs(self.queue, states, self.offset, self.limit, self.asc, self.brief)
        return JobList(jobs=jobs)


class JobsFound(Reply):
    """The jobs that were found; `examined` is how many were looked at, `cursor` where to look further, if anywhere."""

    jobs: list[Raw]
    examined: int
    cursor: int | None


@command(JobsFound, category="Query", flags=Flag.BULK, http="GET /queues/{queue}/jobs/search")
class SearchJobs(Command[JobsFound], tag="SearchJobs"):
    """Jobs of a queue with a text or number in their id, name, tags, error or data, the newest first.

    One request examines a bounded number of jobs; pass `cursor` of the reply in the next one to continue.
    Without a text all jobs are found. `brief` as in GetJobs.
    """

    queue: QueueName
    text: SearchText = ""
    state: ShortText | Many[ShortText] | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 25
    cursor: Count | None = None
    brief: bool = False

    async def run(self, engine: Engine, peer: Peer) -> JobsFound:
        states = _states(self.state)
        page = await engine.backend.search(self.queue, self.text, states, self.limit, self.cursor, self.brief)
        return JobsFound(jobs=page.jobs, examined=page.examined, cursor=page.cursor)


@command(CountsByState, category="Query", http="GET /queues/{queue}/counts")
class GetJobCounts(Command[CountsByState], tag="GetJobCounts"):
    """How many jobs of a queue are in each state."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> CountsByState:
        return CountsByState(counts=job_counts(await engine.backend.counts(self.queue)))


@command(CountsByPriority, category="Query", http="GET /queues/{queue}/priority-counts")
class GetCountsPerPriority(Command[CountsByPriority], tag="GetCountsPerPriority"):
    """How many waiting and delayed jobs a queue has of each priority."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> CountsByPriority:
        return CountsByPriority(queue=self.queue, counts=await engine.backend.counts_per_priority(self.queue))


@command(FoundJob, category="Query", http="GET /jobs/custom/{customId} fail=404", errors=("Job not found",))
class GetJobByCustomId(Command[FoundJob], tag="GetJobByCustomId"):
    """The job that was pushed with this `jobId`, in any state for as long as it is kept.

    Several queues may each have a job of that id: `queue` says which one is meant, else any of them is returned.
    """

    custom_id: CustomId
    queue: QueueName | None = None

    async def run(self, engine: Engine, peer: Peer) -> FoundJob:
        return FoundJob(job=await engine.backend.job_by_custom_id(self.custom_id, self.queue))


@command(Counted, category="Query", http="GET /queues/{queue}/count")
class CountJobs(Command[Counted], tag="Count"):
    """How many jobs a queue holds in all states together."""

    queue: QueueName

    async def run(self, engine: Engine, peer: Peer) -> Counted:
        counts = await engine.backend.counts(self.queue)
        queued = counts.waiting + counts.delayed + counts.waiting_children
        return Counted(count=queued + counts.active + counts.completed + counts.failed)


@command(
    JobProgress,
    category="Query",
    http="GET /jobs/{id}/progress fail=404",
    errors=("Job not found", "Job is not active (current state: <state>)"),
)
class GetProgress(Command[JobProgress], tag="GetProgress"):
    """How far an active job is, in percent, and what its worker said about it."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> JobProgress:
        progress, message = await engine.backend.progress(self.id)
        return JobProgress(progress=progress, message=message)


@command(ChildrenValues, category="Query", http="GET /jobs/{id}/children fail=404")
class GetChildrenValues(Command[ChildrenValues], tag="GetChildrenValues"):
    """The results of a job's completed children by `<queue>:<id>`; empty when there is no such job."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> ChildrenValues:
        return ChildrenValues(data=Values(await engine.backend.children_values(self.id)))
