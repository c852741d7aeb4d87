"""Workflows: a record with optimistic concurrency control, a log of its own and jobs that drive it.

The server decides nothing here. A worker reads a flow, decides, and names the revision on which the decision was
made; it is carried out atomically or refused. Those who cannot decide (a browser, a shell script) leave a request with
FlowCancel and FlowSignal: a job in the flow's own queue, for the next worker that decides on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Raw, Struct

from headrace.backends.base import Ack, FlowPush, NewStep
from headrace.commands._base import Command, Flag, Reply, command
from headrace.commands.jobs import LEASE_ERRORS, PushEntry, check_options, needs_check
from headrace.errors import Conflict, InvalidCommand, NotFound
from headrace.model import NIL, Count, Flow, FlowId, FlowStatus, FlowStep, JobId, QueueName, ShortText, Token
from headrace.views import encode

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

_NOT_FOUND: Final = "Flow not found: <id>"
_ENDED: Final = "Flow <id> has ended"
_REQUEST_ATTEMPTS: Final = 100
"""A request must not be lost because a worker was killed a few times."""


class GivenStep(Struct, rename="camel", gc=False):
    """An entry for the log of a flow."""

    kind: ShortText
    step: ShortText = ""
    attempt: Count = 0
    body: Raw = Raw(NIL)


class GivenJob(Struct, rename="camel", gc=False):
    """A job of a flow: its options are those of PUSHB, except families and repetition."""

    queue: QueueName
    input: PushEntry


class GivenAck(Struct, rename="camel", gc=False):
    """The job that ran the step, to be completed with it."""

    id: JobId
    token: Token | None = None


GivenSteps = Annotated[tuple[GivenStep, ...], Meta(max_length=1000)]
GivenJobs = Annotated[tuple[GivenJob, ...], Meta(max_length=1000)]


class FlowStarted(Reply):
    """`created` is false when the id was taken: then `flow` is the existing one."""

    flow: Flow
    created: bool


class FlowFound(Reply):
    flow: Flow
    steps: list[FlowStep]


class FlowChanged(Reply):
    flow: Flow


class FlowsFound(Reply):
    flows: list[Flow]


def _steps(given: Sequence[GivenStep]) -> list[NewStep]:
    return [NewStep(step.kind, step.step, step.attempt, step.body) for step in given]


def _pushes(flow_id: str, given: Sequence[GivenJob]) -> list[FlowPush]:
    for job in given:
        options = job.input
        if needs_check(options):
            check_options(options)
        if options.parent_id or options.depends_on or options.children_ids or options.repeat:
            raise InvalidCommand("a job of a workflow has no parent, dependencies or repetition")
        options.flow_id = flow_id
    return [FlowPush(job.queue, job.input) for job in given]


@command(FlowStarted, category="Flows", flags=Flag.WRITE, http="POST /flows fail=400")
class FlowStart(Command[FlowStarted], tag="FlowStart"):
    """Start a workflow and push its first jobs. If the id is taken, the existing flow is returned unchanged."""

    id: FlowId
    workflow: ShortText
    queue: QueueName
    steps: GivenSteps = ()
    jobs: GivenJobs = ()

    async def run(self, engine: Engine, peer: Peer) -> FlowStarted:
        flow, created = await engine.backend.start_flow(
            self.id, self.workflow, self.queue, _steps(self.steps), _pushes(self.id, self.jobs)
        )
        return FlowStarted(flow=flow, created=created)


@command(
    FlowChanged,
    category="Flows",
    flags=Flag.WRITE,
    errors=(
        _NOT_FOUND,
        _ENDED,
        "Flow <id> has changed: it is at revision <n>, not <n>",
        "a job of a workflow has no parent, dependencies or repetition",
        *LEASE_ERRORS,
    ),
)
class FlowAdvance(Command[FlowChanged], tag="FlowAdvance"):
    """Carry out a decision about a workflow, atomically.

    It appends to the log, changes the status, pushes the next jobs, completes the job of this step, and drops or stops
    others. It is refused when the flow has changed since `revision`: read it again and decide again.
    """

    id: FlowId
    revision: Count
    status: FlowStatus | None = None
    steps: GivenSteps = ()
    jobs: GivenJobs = ()
    ack: GivenAck | None = None
    drop: Annotated[tuple[JobId, ...], Meta(max_length=2000)] = ()
    """Jobs of this flow that are not wanted any more, also those at work: they go without further news."""
    stop: Annotated[tuple[JobId, ...], Meta(max_length=2000)] = ()
    """The same for jobs whose end counts all the same: those at work go on, of the others the flow is told that they
    were removed, by a job in its queue."""

    async def run(self, engine: Engine, peer: Peer) -> FlowChanged:
        ack = None if self.ack is None else Ack(self.ack.id, self.ack.token or None)
        flow = await engine.backend.advance_flow(
            self.id,
            self.revision,
            self.status,
            _steps(self.steps),
            _pushes(self.id, self.jobs),
            ack,
            self.drop,
            self.stop,
        )
        return FlowChanged(flow=flow)


async def _flow(engine: Engine, flow_id: str) -> Flow:
    flow = await engine.backend.flow(flow_id)
    if flow is None:
        raise NotFound(f"Flow not found: {flow_id}")
    return flow


async def _request(engine: Engine, flow_id: str, name: str, told: Mapping[str, object]) -> FlowChanged:
    """Leave a request for whoever decides on a flow. The same one twice counts once until it has been read."""
    flow = await _flow(engine, flow_id)
    if flow.status.is_final:
        raise Conflict(f"Flow {flow_id} has ended")
    request = PushEntry(
        data=Raw(encode({"flow": flow_id, **told})),
        name=name,
        custom_id=f"{flow_id}-step-{name}",
        max_attempts=_REQUEST_ATTEMPTS,
        remove_on_complete=True,
        remove_on_fail=True,
    )
    check_options(request)
    await engine.backend.insert_one(flow.queue, request)
    return FlowChanged(flow=flow)


@command(
    FlowChanged,
    category="Flows",
    flags=Flag.WRITE,
    http="POST /flows/{id}/cancel",
    errors=(_NOT_FOUND, _ENDED),
)
class FlowCancel(Command[FlowChanged], tag="FlowCancel"):
    """Ask the next worker that decides on a workflow to stop it.

    It is compensated unless `compensate` is false. One that is already compensating continues to do so.
    """

    id: FlowId
    compensate: bool = True
    reason: ShortText = ""

    async def run(self, engine: Engine, peer: Peer) -> FlowChanged:
        told = {"role": "cancel", "compensate": self.compensate, "reason": self.reason}
        return await _request(engine, self.id, "__cancel__", told)


@command(
    FlowChanged,
    category="Flows",
    flags=Flag.WRITE,
    http="POST /flows/{id}/signals/{name}",
    errors=(_NOT_FOUND, _ENDED),
)
class FlowSignal(Command[FlowChanged], tag="FlowSignal"):
    """Ask the next worker that decides on a workflow to deliver a signal. A signal it has no use for is ignored."""

    id: FlowId
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    payload: Raw = Raw(NIL)

    async def run(self, engine: Engine, peer: Peer) -> FlowChanged:
        told = {"role": "signal", "step": self.name, "payload": self.payload}
        return await _request(engine, self.id, f"__signal__{self.name}", told)


async def _found(engine: Engine, flow_id: str, after: int) -> FlowFound:
    return FlowFound(flow=await _flow(engine, flow_id), steps=await engine.backend.flow_steps(flow_id, after))


@command(FlowFound, category="Flows", http="GET /flows/{id} fail=404", errors=(_NOT_FOUND,))
class FlowGet(Command[FlowFound], tag="FlowGet"):
    """A workflow and its log, or the part of the log after the entry `after`."""

    id: FlowId
    after: Count = 0

    async def run(self, engine: Engine, peer: Peer) -> FlowFound:
        return await _found(engine, self.id, self.after)


@command(FlowsFound, category="Flows", http="GET /flows")
class FlowList(Command[FlowsFound], tag="FlowList"):
    """Workflows by id, in descending order, a page at a time: `before` is the last id of the previous page."""

    workflow: ShortText | None = None
    status: FlowStatus | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    before: FlowId | None = None

    async def run(self, engine: Engine, peer: Peer) -> FlowsFound:
        return FlowsFound(flows=await engine.backend.flows(self.workflow, self.status, self.limit, self.before))


@command(FlowFound, category="Flows", flags=Flag.BLOCKING, errors=(_NOT_FOUND,))
class FlowWait(Command[FlowFound], tag="FlowWait"):
    """Wait for a workflow to end or, with `revision`, to change since it, at most `timeout` ms; then as FlowGet."""

    id: FlowId
    timeout: Annotated[float, Meta(ge=0, le=600_000)] = 30_000
    revision: Count | None = None
    after: Count = 0

    async def run(self, engine: Engine, peer: Peer) -> FlowFound:
        await engine.wait_flow(self.id, self.timeout, self.revision)
        return await _found(engine, self.id, self.after)
