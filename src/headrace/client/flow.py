"""Families of jobs added at once: a parent runs when its children have ended. A flow is stored atomically."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from msgspec import Struct

from headrace import commands
from headrace.client.client import Client
from headrace.client.job import Job, SyncJob
from headrace.client.options import Options, wire_options
from headrace.client.payloads import encode_payload
from headrace.client.queue import JobType
from headrace.client.verbs import AsyncShell, Shell, SyncShell, verb
from headrace.errors import InvalidCommand

if TYPE_CHECKING:
    from headrace.ids import IdSource

OnFailure = Literal["block", "fail", "continue", "ignore", "remove"]

# What becomes of the parent when the child fails for good. `block`: it waits on, until the child is retried.
_POLICIES: Final[dict[OnFailure, dict[str, Any]]] = {
    "block": {},
    "fail": {"fail_parent_on_failure": True},
    "continue": {"continue_parent_on_failure": True},
    "ignore": {"ignore_dependency_on_failure": True},
    "remove": {"remove_dependency_on_failure": True},
}


class FlowJob(Struct, frozen=True, kw_only=True):
    """One job of a flow and the children that have to end before it."""

    queue: str
    name: str
    data: Any = None
    options: Options = {}
    children: Sequence[FlowJob] = ()
    on_failure: OnFailure = "fail"
    """What a final failure of this job means for its parent."""


J = TypeVar("J", Job[Any], SyncJob[Any])


class FlowTree(Struct, Generic[J], frozen=True):
    """The jobs of a flow that was added."""

    job: J
    children: list[FlowTree[J]]

    def __iter__(self) -> Iterator[J]:
        """All jobs, parents before their children."""
        yield self.job
        for child in self.children:
            yield from child


class FlowVerbs(Shell, Generic[JobType]):
    _job_type: type[JobType]

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._ids: IdSource | None = None

    @verb
    async def add(self, flow: FlowJob) -> FlowTree[JobType]:
        """Add a tree of jobs atomically."""
        entries: list[commands.families.FamilyEntry] = []
        tree = self._plan(flow, self._id_of(flow), None, entries)
        await self._ask(commands.families.PushFamily(jobs=entries))
        return tree

    @verb
    async def add_chain(self, steps: Sequence[FlowJob]) -> list[JobType]:
        """Add jobs that run one after the other; the first one given is the first to run."""
        if not steps:
            return []
        ids: list[str] = [self._id_of(step) for step in steps]
        entries: list[commands.families.FamilyEntry] = []
        jobs = [
            self._plan(step, job_id, later, entries, earlier).job
            for step, earlier, job_id, later in zip(steps, [None, *ids], ids, [*ids[1:], None], strict=False)
        ]
        await self._ask(commands.families.PushFamily(jobs=entries))
        return jobs

    def _id_of(self, flow: FlowJob) -> str:
        if not isinstance(flow, FlowJob):
            raise InvalidCommand(f"a flow is made of FlowJob(queue=..., name=..., children=[...]), not of {flow!r}")
        if given := flow.options.get("job_id"):
            return str(given)
        if self._ids is None:
            from headrace.ids import IdSource  # most programs add no flows

            self._ids = IdSource()
        return self._ids.next()

    def _plan(
        self,
        flow: FlowJob,
        job_id: str,
        parent: str | None,
        entries: list[commands.families.FamilyEntry],
        earlier: str | None = None,
    ) -> FlowTree[JobType]:
        """Add the entries of a tree; `earlier` is a job that it waits for besides its children."""
        _check(flow)
        children = [self._plan(child, self._id_of(child), job_id, entries) for child in flow.children]
        ids = tuple(child.job.id for child in children) + (() if earlier is None else (earlier,))
        options = {name: value for name, value in flow.options.items() if name != "job_id"}
        entry = commands.jobs.PushEntry(
            name=flow.name,
            data=encode_payload(flow.data),
            parent_id=parent,
            children_ids=ids,
            depends_on=ids,
            **(_POLICIES[flow.on_failure] if parent is not None else {}),
            **wire_options(options, self._client.clock.now_ms),
        )
        entries.append(commands.families.FamilyEntry(id=job_id, queue=flow.queue, input=entry))
        return FlowTree(self._job_type(self._client, job_id, flow.queue, flow.name), children)


def _check(flow: FlowJob) -> None:
    for option in ("parent", "depends_on"):
        if flow.options.get(option) is not None:
            raise InvalidCommand(f"a job of a flow cannot be given {option!r}: its place in the flow says that")
    if flow.on_failure not in _POLICIES:
        raise InvalidCommand(f"on_failure is one of {', '.join(_POLICIES)}, not {flow.on_failure!r}")


class FlowProducer(FlowVerbs[Job[Any]], AsyncShell):
    """Adds flows; the async form."""

    _job_type = Job


class SyncFlowProducer(FlowVerbs[SyncJob[Any]], SyncShell):
    """Adds flows; the blocking form."""

    _job_type = SyncJob
