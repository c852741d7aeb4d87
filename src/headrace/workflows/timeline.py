"""What happened in a flow and when, as plain data: one bar per attempt, in the order of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from headrace.model import Flow, FlowStatus
from headrace.propagation import ErrorReport
from headrace.workflows.machine import Run
from headrace.workflows.plan import Entry

Outcome = Literal["completed", "failed", "retried", "running", "rolled-back", "rollback-failed", "waiting"]
_ATTEMPTS: dict[str, Outcome] = {
    "completed": "completed",
    "failed": "failed",
    "attempt-failed": "retried",
    "rolled-back": "rolled-back",
    "rollback-failed": "rollback-failed",
}


class Bar(Struct, rename="camel", omit_defaults=True):
    """One attempt at a step or at its rollback. Times are ms since the epoch."""

    step: str
    role: Literal["step", "rollback"]
    began_at: float
    ended_at: float | None = None
    attempt: int = 0
    outcome: Outcome = "running"
    error: ErrorReport | None = None
    worker: str = ""


class Timeline(Struct, rename="camel"):
    id: str
    workflow: str
    version: int
    status: FlowStatus
    began_at: float
    ended_at: float | None
    groups: list[list[str]]
    bars: list[Bar]
    error: ErrorReport | None
    cause: str | None


def timeline_of(flow: Flow, log: Sequence[Entry]) -> Timeline:
    run = Run.of(log)
    bars: list[Bar] = []
    undoing = ""
    for entry in log:
        if entry.kind == "rolling-back":
            undoing = entry.step
        elif entry.kind in _ATTEMPTS:
            bars.append(_bar(entry, is_rollback=undoing == entry.step))
        elif entry.kind in ("sleeping", "waiting"):
            bars.append(Bar(entry.step, "step", entry.at, outcome="waiting"))
    groups = [[one.name for one in group] for group in run.plan.groups]
    failure = run.failure.error if run.failure is not None else None
    return Timeline(
        flow.id,
        flow.workflow,
        run.plan.version,
        flow.status,
        flow.created_at,
        flow.ended_at,
        groups,
        bars,
        failure,
        run.cause,
    )


def _bar(entry: Entry, *, is_rollback: bool) -> Bar:
    body = entry.body
    role: Literal["step", "rollback"] = "rollback" if is_rollback or entry.kind.startswith("roll") else "step"
    began = min(body.began or entry.at, entry.at)  # the clock of the worker may be ahead of the store's
    return Bar(entry.step, role, began, entry.at, entry.attempt, _ATTEMPTS[entry.kind], body.error, body.worker)
