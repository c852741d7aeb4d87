"""A workflow as OriJS's tree of jobs: children run before their parent, so the first step is the deepest leaf.

Pure, and an export only: flows that run here are driven by their log, with a job of its own for every parallel step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.workflows.definition import StepGroup

JOB_DATA_VERSION: Final = "1"
PARALLEL: Final = "__parallel__"
DEFAULT_TIMEOUT_MS: Final = 30_000
_DAY_S: Final = 86_400
_KEPT: Final = {
    "removeOnComplete": {"age": 7 * _DAY_S, "count": 10_000},
    "removeOnFail": {"age": 30 * _DAY_S, "count": 10_000},
}


@dataclass(frozen=True, slots=True)
class FlowJobDefinition:
    """One job of a tree, in the words of the wire."""

    name: str
    queue_name: str
    data: Mapping[str, Any]
    opts: Mapping[str, Any]
    children: tuple[FlowJobDefinition, ...] = ()


def get_parent_job_id(flow_id: str, idempotency_key: str | None = None) -> str:
    """The id of the root, known before anything is added."""
    return idempotency_key or flow_id


def workflow_queue(name: str, prefix: str = "workflow", version: int = 1) -> str:
    """Every version has its own queues: a worker never takes a job that only another version has the code for."""
    return f"{prefix}.{name}" if version == 1 else f"{prefix}.{name}:v{version}"


def steps_queue(queue: str) -> str:
    """Where the steps and rollbacks of flows go that are decided on in this queue."""
    return f"{queue}.steps"


class FlowBuilder:
    """Builds trees for one prefix of queue names. `step_options` (attempts, backoff, priority) go to every step."""

    def __init__(self, prefix: str = "workflow", step_options: Mapping[str, Any] | None = None) -> None:
        self._prefix = prefix
        self._step_options = dict(step_options or {})

    def build_flow(
        self,
        workflow: str,
        flow_id: str,
        data: Any,
        groups: Sequence[StepGroup],
        *,
        meta: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> FlowJobDefinition:
        carried = {"meta": dict(meta)} if meta is not None else {}
        children: tuple[FlowJobDefinition, ...] = ()
        for group in groups:
            names = [step.name for step in group.steps]
            if group.type == "parallel":
                names = [f"{PARALLEL}:{','.join(names)}"]
            for name in names:
                children = (self._step(workflow, flow_id, data, name, carried, idempotency_key, children),)
        root = {"type": "workflow", "version": JOB_DATA_VERSION, "flowId": flow_id, "workflowData": data}
        return FlowJobDefinition(
            workflow,
            workflow_queue(workflow, self._prefix),
            {**root, "stepResults": {}, **carried},
            {"jobId": get_parent_job_id(flow_id, idempotency_key), **_KEPT},
            children,
        )

    def _step(
        self,
        workflow: str,
        flow_id: str,
        data: Any,
        name: str,
        carried: Mapping[str, Any],
        key: str | None,
        children: tuple[FlowJobDefinition, ...],
    ) -> FlowJobDefinition:
        # A colon separates the parts of keys in stores of this kind, so ids of parallel groups have a hyphen instead.
        own_id = {"jobId": f"{key}-step-{name.replace(':', '-')}"} if key else {}
        step = {"type": "step", "version": JOB_DATA_VERSION, "flowId": flow_id, "stepName": name, "workflowData": data}
        return FlowJobDefinition(
            name,
            steps_queue(workflow_queue(workflow, self._prefix)),
            {**step, **carried},
            {"failParentOnFailure": True, **_KEPT, **self._step_options, **own_id},
            children,
        )
