"""A handle to wait for a flow, watch it or stop it; any process can get one by the id."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.client.payloads import decode_payload
from headrace.durations import Duration, seconds
from headrace.errors import JobTimeout, NotFound, Refused, WorkflowError, WorkflowTimeoutError
from headrace.model import FlowStatus
from headrace.tasks.arguments import fitted
from headrace.workflows.context import signal_payload
from headrace.workflows.definition import WorkflowDefinition
from headrace.workflows.failures import failure_of
from headrace.workflows.ledger import entry_of, record_of
from headrace.workflows.machine import Cancelled, Run, Signalled
from headrace.workflows.plan import Entry
from headrace.workflows.timeline import Timeline, timeline_of

if TYPE_CHECKING:
    from headrace.workflows.provider import Workflows

R = TypeVar("R")


class FlowHandle(Generic[R]):
    """One flow, from any process: how it stands, what it gave, and what can be done about it."""

    def __init__(self, provider: Workflows, flow_id: str, definition: WorkflowDefinition[Any, R] | None = None) -> None:
        self.id = flow_id
        self._provider = provider
        self._definition = definition

    def __repr__(self) -> str:
        return f"<FlowHandle {self.id}>"

    async def status(self) -> FlowStatus:
        """Its status; an unknown flow is pending."""
        try:
            return (await self._provider.look(self.id)).flow.status
        except NotFound:
            return FlowStatus.PENDING

    async def result(self, timeout: Duration | None = None) -> R:
        """The result of the flow; raises the error with which it failed.

        `timeout` concerns this caller alone: it raises JobTimeout, and the flow continues.
        """
        patience = None if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        try:
            found = await self._provider.wait_end(self.id, patience)
        except NotFound:
            raise WorkflowError(f"there is no flow {self.id}: it was never started, or is forgotten") from None
        run = record_of(found).run
        if not found.flow.status.is_final:
            if patience is not None and time.monotonic() >= patience:
                raise JobTimeout(f"Flow {self.id} did not end within {timeout}; it goes on")
            if run.failure is not None:  # still compensating, but the failure is known
                raise failure_of(self.id, run)
            raise WorkflowTimeoutError(self.id, run.plan.timeout / 1000)
        return self._outcome(run)

    def _outcome(self, run: Run) -> R:
        if run.status is not FlowStatus.COMPLETED:
            raise failure_of(self.id, run)
        value = decode_payload(run.result)
        definition = self._definition or self._implemented(run)
        if definition is None or value is None:
            return value  # type: ignore[no-any-return]
        return fitted(value, definition.result, f"result of {definition.name!r}")  # type: ignore[no-any-return]

    def _implemented(self, run: Run) -> WorkflowDefinition[Any, Any] | None:
        return self._provider.definition_of(run.plan.workflow, run.plan.version)

    async def events(self) -> AsyncIterator[Entry]:
        """The entries of its log, past and future, until it has ended."""
        revision = seen = 0
        while True:
            found = await self._provider.wait_change(self.id, revision, seen)
            for step in found.steps:
                yield entry_of(step)
            seen += len(found.steps)
            revision = found.flow.revision
            if found.flow.status.is_final:
                return

    async def timeline(self) -> Timeline:
        """What happened when: for people, the dashboard and tests."""
        found = await self._provider.look(self.id)
        return timeline_of(found.flow, [entry_of(step) for step in found.steps])

    async def cancel(self, *, compensate: bool = True, reason: str = "") -> bool:
        """Stop it: no further step is started, running ones are told to stop, and completed ones are compensated.

        False if it has ended or is already compensating.
        """
        decision = await self._provider.carry_out(self.id, Cancelled(reason, compensate))
        return bool(decision.entries)

    async def signal(self, name: str, payload: Any = None) -> None:
        """Send it a signal that it waits for, or will wait for. Refused if it never will, or already has it."""
        definition = self._definition or self._implemented(record_of(await self._provider.look(self.id)).run)
        given = signal_payload(definition, name, payload)
        decision = await self._provider.carry_out(self.id, Signalled(name, given))
        if not decision.entries:
            raise Refused(f"Flow {self.id} does not take the signal: {decision.refusal}")

    async def retry(self) -> FlowHandle[R]:
        """Start it again where it failed, as a new flow: groups that were not rolled back do not run again."""
        return await self._provider.retry(self.id)
