"""Workflows: several steps as one saga that survives crashes and is compensated when it fails.

Reading order: `definition` (what a workflow is), `plan` (how a flow is stored), `machine` (how it continues), `ledger`
(reading and changing flows), `watch` (waiting for them), `runner` (workers that run steps), `provider` (what users
hold), `handle`, `sync`, `timeline`. `testing` is independent of these.
"""

from __future__ import annotations

from headrace.errors import (
    StepNotFoundError,
    WorkflowCancelledError,
    WorkflowError,
    WorkflowRollbackError,
    WorkflowStepError,
    WorkflowTimeoutError,
)
from headrace.model import FlowStatus
from headrace.propagation import Retry
from headrace.workflows.context import StepContext
from headrace.workflows.definition import Step, StepGroup, WorkflowDefinition, step, workflow
from headrace.workflows.handle import FlowHandle
from headrace.workflows.ledger import FlowMetrics
from headrace.workflows.provider import WorkflowProvider, Workflows
from headrace.workflows.registry import RegisteredStep, StepRegistry
from headrace.workflows.results import (
    DANGEROUS_KEYS,
    WRAPPER_VERSION,
    flatten_child_results,
    is_parallel_result_wrapper,
    is_step_result_wrapper,
)
from headrace.workflows.sync import SyncFlowHandle, SyncWorkflows
from headrace.workflows.tree import DEFAULT_TIMEOUT_MS, JOB_DATA_VERSION, FlowBuilder, get_parent_job_id

__all__ = [
    "DANGEROUS_KEYS",
    "DEFAULT_TIMEOUT_MS",
    "JOB_DATA_VERSION",
    "WRAPPER_VERSION",
    "FlowBuilder",
    "FlowHandle",
    "FlowMetrics",
    "FlowStatus",
    "RegisteredStep",
    "Retry",
    "Step",
    "StepContext",
    "StepGroup",
    "StepNotFoundError",
    "StepRegistry",
    "SyncFlowHandle",
    "SyncWorkflows",
    "WorkflowCancelledError",
    "WorkflowDefinition",
    "WorkflowError",
    "WorkflowProvider",
    "WorkflowRollbackError",
    "WorkflowStepError",
    "WorkflowTimeoutError",
    "Workflows",
    "flatten_child_results",
    "get_parent_job_id",
    "is_parallel_result_wrapper",
    "is_step_result_wrapper",
    "step",
    "workflow",
]
