"""Why a flow has no result, as the error that its caller gets, wherever the flow ran."""

from __future__ import annotations

from headrace.errors import (
    WorkflowCancelledError,
    WorkflowError,
    WorkflowRollbackError,
    WorkflowStepError,
    WorkflowTimeoutError,
)
from headrace.propagation import ErrorReport
from headrace.workflows.machine import Run


def failure_of(flow_id: str, run: Run) -> Exception:
    """The failure of the flow, together with those of its rollbacks."""
    primary = _primary(flow_id, run)
    failed: list[Exception] = []
    for step, error in run.rollback_errors.items():
        rebuilt = error.rebuild()
        rebuilt.step = step
        failed.append(rebuilt)
    return WorkflowRollbackError(primary, failed) if failed else primary


def _primary(flow_id: str, run: Run) -> Exception:
    assert run.failure is not None
    report = run.failure.error or ErrorReport(type="Error")
    if run.cause == "step":
        return WorkflowStepError(run.failed_step, report.rebuild())
    if run.cause == "timeout":
        return WorkflowTimeoutError(flow_id, run.plan.timeout / 1000)
    if run.cause == "cancel":
        return WorkflowCancelledError(f"Workflow {flow_id} was cancelled" + (report.message and f": {report.message}"))
    error = WorkflowError(f"on_complete of workflow {flow_id} failed: {report.message or report.type}")
    error.__cause__ = report.rebuild()
    return error
