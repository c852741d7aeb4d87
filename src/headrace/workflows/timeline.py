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
_BEFORE = ("started", "completed", "attempt-failed")
"""Entries after which an attempt at a step can begin."""


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
        [*_ended_bars(flow, log), *_open_bars(run, log)],
        failure,
        run.cause,
    )


def _ended_bars(flow: Flow, log: Sequence[Entry]) -> list[Bar]:
    """What has ended, and waits that have not."""
    bars: list[Bar] = []
    waits: dict[str, Bar] = {}
    undoing = ""
    for entry in log:
        if entry.kind == "rolling-back":
            undoing = entry.step
        elif entry.kind == "compensating":
            for wait in waits.values():
                wait.ended_at = entry.at
        elif entry.kind in ("sleeping", "waiting"):
            bars.append(waits.setdefault(entry.step, Bar(entry.step, "step", entry.at, outcome="waiting")))
        elif entry.kind in _ATTEMPTS and entry.step in waits:
            wait = waits.pop(entry.step)
            wait.ended_at, wait.outcome, wait.error = entry.at, _ATTEMPTS[entry.kind], entry.body.error
        elif entry.kind in _ATTEMPTS:
            bars.append(_bar(entry, flow.created_at, is_rollback=undoing == entry.step))
    return bars


def _bar(entry: Entry, first: float, *, is_rollback: bool) -> Bar:
    body = entry.body
    role: Literal["step", "rollback"] = "rollback" if is_rollback or entry.kind.startswith("roll") else "step"
    # The clock of the worker may not be the store's, and a retry has steps that were done before it began.
    began = min(max(body.began or entry.at, first), entry.at)
    return Bar(entry.step, role, began, entry.at, entry.attempt, _ATTEMPTS[entry.kind], body.error, body.worker)


def _open_bars(run: Run, log: Sequence[Entry]) -> list[Bar]:
    """What was to be done next and has not ended: since when it is at work nobody tells, but when it could begin."""
    neighbours = {one.name for one in run.at_work}
    bars: list[Bar] = []
    for one in run.at_work:
        if one.kind == "run" and (run.is_open(one.name) or one.name in run.unsettled):
            before = neighbours - {one.name}
            told = (entry.at for entry in log if entry.kind in _BEFORE and entry.step not in before)
            bars.append(Bar(one.name, "step", max(told)))
    if run.undoing:
        bars.append(Bar(run.undoing, "rollback", max(entry.at for entry in log if entry.step == run.undoing)))
    return bars
