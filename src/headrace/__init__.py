"""Headrace: a job queue that speaks the bunqueue protocol, loses nothing it acknowledged, and feeds a lake.

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

# How logs are shown is the application's choice; without one nothing is printed.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headrace.client.channel import EventView as EventView
    from headrace.client.events import QueueEvents as QueueEvents
    from headrace.client.flow import FlowJob as FlowJob
    from headrace.client.flow import FlowProducer as FlowProducer
    from headrace.client.job import Job as Job
    from headrace.client.job import JobInfo as JobInfo
    from headrace.client.job import SyncJob as SyncJob
    from headrace.client.options import Backoff as Backoff
    from headrace.client.options import Dedup as Dedup
    from headrace.client.options import RateLimit as RateLimit
    from headrace.client.queue import NewJob as NewJob
    from headrace.client.queue import Queue as Queue
    from headrace.client.queue import SyncQueue as SyncQueue
    from headrace.errors import ConnectionLost as ConnectionLost
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.errors import JobFailed as JobFailed
    from headrace.errors import JobTimeout as JobTimeout
    from headrace.events.app import Events as Events
    from headrace.events.context import EventContext as EventContext
    from headrace.events.definitions import event as event
    from headrace.tasks.app import Flow as Flow
    from headrace.tasks.app import Headrace as Headrace
    from headrace.tasks.app import SyncHeadrace as SyncHeadrace
    from headrace.tasks.task import Task as Task
    from headrace.worker.context import JobContext as JobContext
    from headrace.worker.context import current_job as current_job
    from headrace.worker.failures import RetryLater as RetryLater
    from headrace.worker.failures import UnrecoverableError as UnrecoverableError
    from headrace.worker.logs import JobFields as JobFields
    from headrace.worker.worker import Worker as Worker
    from headrace.workflows.context import StepContext as StepContext
    from headrace.workflows.definition import Step as Step
    from headrace.workflows.definition import step as step
    from headrace.workflows.definition import workflow as workflow
    from headrace.workflows.handle import FlowHandle as FlowHandle
    from headrace.workflows.provider import Workflows as Workflows

_HOMES = {
    "headrace.client.channel": ("EventView",),
    "headrace.client.events": ("QueueEvents",),
    "headrace.client.flow": ("FlowJob", "FlowProducer"),
    "headrace.client.job": ("Job", "JobInfo", "SyncJob"),
    "headrace.client.options": ("Backoff", "Dedup", "RateLimit"),
    "headrace.client.queue": ("NewJob", "Queue", "SyncQueue"),
    "headrace.errors": ("ConnectionLost", "HeadraceError", "JobFailed", "JobTimeout"),
    "headrace.events.app": ("Events",),
    "headrace.events.context": ("EventContext",),
    "headrace.events.definitions": ("event",),
    "headrace.tasks.app": ("Flow", "Headrace", "SyncHeadrace"),
    "headrace.tasks.task": ("Task",),
    "headrace.workflows.definition": ("Step", "step", "workflow"),
    "headrace.workflows.context": ("StepContext",),
    "headrace.workflows.handle": ("FlowHandle",),
    "headrace.workflows.provider": ("Workflows",),
    "headrace.worker.context": ("JobContext", "current_job"),
    "headrace.worker.failures": ("RetryLater", "UnrecoverableError"),
    "headrace.worker.logs": ("JobFields",),
    "headrace.worker.worker": ("Worker",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
