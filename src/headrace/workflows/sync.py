"""Workflows without async: the same methods, each of which blocks until it is done.

with flows.sync() as sync:
    receipt = sync.execute(process_order, Order(...), id="order-42").result(timeout=10)
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from headrace.durations import Duration
from headrace.facade import SyncFacade
from headrace.model import Flow, FlowStatus
from headrace.workflows.definition import WorkflowDefinition
from headrace.workflows.handle import FlowHandle
from headrace.workflows.plan import Entry, ExecuteOptions
from headrace.workflows.timeline import Timeline

if TYPE_CHECKING:
    from headrace.workflows.provider import Workflows

D = TypeVar("D")
R = TypeVar("R")


class SyncWorkflows(SyncFacade[Any]):
    """The blocking form of Workflows: every method blocks until it is done."""

    _hosted: Workflows

    def execute(
        self, definition: WorkflowDefinition[D, R], data: D, **options: Unpack[ExecuteOptions]
    ) -> SyncFlowHandle[R]:
        """Start a flow."""
        return SyncFlowHandle(self, self._run(self._hosted.execute(definition, data, **options)))

    @overload
    def get_handle(self, flow_id: str, definition: WorkflowDefinition[Any, R]) -> SyncFlowHandle[R]: ...
    @overload
    def get_handle(self, flow_id: str, definition: None = None) -> SyncFlowHandle[Any]: ...
    def get_handle(self, flow_id: str, definition: WorkflowDefinition[Any, Any] | None = None) -> SyncFlowHandle[Any]:
        """A flow that was started anywhere."""
        return SyncFlowHandle(self, FlowHandle(self._hosted, flow_id, definition))

    def get_status(self, flow_id: str) -> FlowStatus:
        """The status of a flow; an unknown one is pending."""
        return self._run(self._hosted.get_status(flow_id))

    def get_result(self, flow_id: str, timeout: Duration | None = None) -> Any:
        """The result of a flow; raises the error with which it failed."""
        return self._run(self._hosted.get_result(flow_id, timeout))

    def list(self, workflow: str | None = None, **filters: Any) -> builtins.list[Flow]:
        """Flows by id, the highest first: `status`, `limit` and `before` as elsewhere."""
        return self._run(self._hosted.list(workflow, **filters))


class SyncFlowHandle(Generic[R]):
    """The blocking form of a flow handle."""

    def __init__(self, face: SyncWorkflows, handle: FlowHandle[R]) -> None:
        self.id = handle.id
        self._face = face
        self._handle = handle

    def status(self) -> FlowStatus:
        """Its status; an unknown flow is pending."""
        return self._face._run(self._handle.status())

    def result(self, timeout: Duration | None = None) -> R:
        """The result of the flow; raises the error with which it failed."""
        return self._face._run(self._handle.result(timeout))

    def events(self) -> Iterator[Entry]:
        """The entries of its log, past and future, until it has ended."""
        entries = self._handle.events()
        while (entry := self._face._run(_next_of(entries))) is not None:
            yield entry

    def timeline(self) -> Timeline:
        """What happened when."""
        return self._face._run(self._handle.timeline())

    def cancel(self, *, compensate: bool = True, reason: str = "") -> bool:
        """Stop and compensate it; False if it has ended or is already compensating."""
        return self._face._run(self._handle.cancel(compensate=compensate, reason=reason))

    def signal(self, name: str, payload: Any = None) -> None:
        """Send it a signal that it waits for, or will wait for."""
        self._face._run(self._handle.signal(name, payload))

    def retry(self) -> SyncFlowHandle[R]:
        """Start it again where it failed, as a new flow."""
        return SyncFlowHandle(self._face, self._face._run(self._handle.retry()))


async def _next_of(entries: Any) -> Entry | None:
    return await anext(entries, None)
