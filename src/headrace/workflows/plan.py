"""A flow as it is stored: its plan, the entries of its log, and the jobs that drive it. No code, no I/O.

The first entry (`started`) holds everything that is known at the beginning, the plan included; so a flow can be
decided on, shown and retried by any process, with or without the code of its steps. An entry has one `Body`, of which
each kind uses a few fields; a new kind of entry is a new word and, if need be, an optional field.

Everything here is acyclic data that the garbage collector need not track (`gc=False`): with many flows running
it caused a fifth of the collections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypedDict

import msgspec
from msgspec import Raw, Struct

from headrace.client.options import Backoff
from headrace.durations import Duration, milliseconds
from headrace.errors import InvalidCommand
from headrace.model import NIL, YEAR_MS
from headrace.model import Backoff as WireBackoff
from headrace.propagation import ErrorReport, PropagationMeta, Retry
from headrace.workflows.definition import Step, WorkflowDefinition

MOST_PARALLEL: Final = 900
"""One command pushes at most 1000 jobs."""
MOST_ATTEMPTS: Final = 1000
"""Of a job, by the protocol. A job of a flow has one for each attempt and each stall, and one to tell the end."""

Cause = Literal["step", "complete", "timeout", "cancel"]


class Policy(Struct, rename="camel", omit_defaults=True, frozen=True, gc=False):
    """How often something is tried, and the pause in between (ms)."""

    attempts: int = 3
    backoff: Literal["fixed", "exponential"] = "exponential"
    delay: float = 1000
    max_delay: float | None = None

    @classmethod
    def of(cls, retry: Retry) -> Policy:
        wire = Backoff(retry.backoff, retry.delay, retry.max_delay).wire()
        return cls(retry.attempts, retry.backoff, wire.delay, wire.max_delay)

    def wire(self) -> WireBackoff:
        return WireBackoff(self.backoff, self.delay, self.max_delay)


class StepPlan(Struct, rename="camel", omit_defaults=True, frozen=True, gc=False):
    """One step of a plan. Times are ms."""

    name: str
    kind: Literal["run", "sleep", "wait"] = "run"
    retry: Policy | None = None
    rollback_retry: Policy | None = None
    timeout: float | None = None
    span: float | None = None


class Plan(Struct, rename="camel", omit_defaults=True, frozen=True, gc=False):
    """What a flow is going to do."""

    workflow: str
    groups: tuple[tuple[StepPlan, ...], ...]
    version: int = 1
    retry: Policy = Policy()
    rollback_retry: Policy = Policy()
    max_stalls: int = 3
    """How often the worker of a step may die before the step counts as failed."""
    timeout: float = 0
    """Effective, in ms: base and margin. 0: none."""
    on_timeout: Literal["cancel", "detach"] = "cancel"
    priority: int = 0

    def step(self, name: str) -> StepPlan | None:
        return next((one for group in self.groups for one in group if one.name == name), None)


def plan_of(definition: WorkflowDefinition[Any, Any], *, step_timeout: float | None = None, **options: Any) -> Plan:
    """`step_timeout` (ms) is that of steps which have none of their own."""
    groups = tuple(tuple(_step_plan(one, step_timeout) for one in group.steps) for group in definition.step_groups)
    return Plan(definition.name, groups, definition.version, **options)


def check_plan(plan: Plan) -> None:
    """Refuse what could not be read any more, and what the store would refuse only when the flow gets there."""
    try:
        _decode_plan(encode_body(plan))
    except msgspec.MsgspecError as error:
        raise InvalidCommand(f"workflow {plan.workflow!r} cannot be started like this: {error}") from None
    if plan.timeout > YEAR_MS and plan.on_timeout == "cancel":
        raise InvalidCommand(f"workflow {plan.workflow!r} may not take longer than a year; 0 is no timeout")
    for group in plan.groups:
        if len(group) > MOST_PARALLEL:
            raise InvalidCommand(f"workflow {plan.workflow!r} has a group of more than {MOST_PARALLEL} steps")
        for one in group:
            if (one.span or 0) > YEAR_MS:
                raise InvalidCommand(f"step {one.name!r} of workflow {plan.workflow!r} may not last longer than a year")
            policies = (one.retry or plan.retry, one.rollback_retry or plan.rollback_retry)
            if max(policy.attempts for policy in policies) + plan.max_stalls >= MOST_ATTEMPTS:
                raise InvalidCommand(
                    f"step {one.name!r} of workflow {plan.workflow!r} is tried too often: attempts and max_stalls must "
                    f"be less than {MOST_ATTEMPTS} together"
                )


def _step_plan(given: Step[Any], timeout: float | None) -> StepPlan:
    return StepPlan(
        given.name,
        given.kind,
        None if given.retry is None else Policy.of(given.retry),
        None if given.rollback_retry is None else Policy.of(given.rollback_retry),
        timeout if given.timeout is None else milliseconds(given.timeout),
        None if given.span is None else milliseconds(given.span),
    )


class ExecuteOptions(TypedDict, total=False):
    """What can be said by name when a flow is started."""

    id: str | None
    idempotency_key: str | None
    timeout: Duration | None
    on_timeout: Literal["cancel", "detach"]
    priority: int
    meta: PropagationMeta | None


class Body(Struct, rename="camel", omit_defaults=True, frozen=True, gc=False):
    """What an entry tells beyond its kind, step and attempt."""

    result: Raw = Raw(b"")
    """Of a step, of a signal, or of the whole flow; empty when there is none."""
    can_roll_back: bool = False
    error: ErrorReport | None = None
    cause: Cause | None = None
    compensate: bool = True
    plan: Plan | None = None
    data: Raw = Raw(b"")
    meta: Mapping[str, Any] | None = None
    retry_of: str | None = None
    worker: str = ""
    began: float = 0
    """Wall time in ms at which the attempt began."""


class Entry(Struct, frozen=True, gc=False):
    """One entry of the log."""

    kind: str
    step: str = ""
    attempt: int = 0
    body: Body = Body()
    at: float = 0


encode_body: Final = msgspec.msgpack.Encoder().encode
decode_body: Final = msgspec.msgpack.Decoder(Body).decode
_decode_plan: Final = msgspec.msgpack.Decoder(Plan).decode
NO_RESULT: Final = Raw(NIL)


def results_of(done: Mapping[str, Body]) -> Raw:
    """All results by their steps as one value; they are not decoded for it."""
    return Raw(encode_body({name: body.result or NO_RESULT for name, body in done.items()}))


class FlowJob(Struct, frozen=True, gc=False):
    """A job that a decision wants pushed."""

    role: Literal["step", "rollback", "complete", "error", "timeout", "wake"]
    step: str = ""
    delay: float = 0


ROLLBACK: Final = ":rollback"


def job_name(job: FlowJob) -> str:
    """What the job is called; names of steps cannot look like the others."""
    if job.role == "step":
        return job.step
    return f"{job.step}{ROLLBACK}" if job.role == "rollback" else f"__{job.role}__{job.step}"


def job_id(flow_id: str, job: FlowJob) -> str:
    return f"{flow_id}-step-{job_name(job)}"
