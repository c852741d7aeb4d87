"""Typed events with answers, on queues: emit here, handle anywhere, get the answer back.

Reading order: `definitions` and `message` (what an event is), `subscription` (what its emitter holds), `context` (what
its handler receives), `queues`, `completion`, `groups`, `receipts` and `schedules` (the building blocks), `provider`
(built from them), `app` (what users hold). `idempotency` and `testing` are independent of these.
"""

from headrace.events.app import Emitter, Events, SyncEvents
from headrace.events.completion import CompletionTracker
from headrace.events.context import EventContext
from headrace.events.definitions import EventCatalogue, EventDefinition, EventRegistry, event
from headrace.events.idempotency import EventIdempotency, Processed
from headrace.events.message import EVENT_MESSAGE_VERSION, EmitOptions, EventMessage
from headrace.events.provider import DEFAULT_TIMEOUT_MS, EventProvider
from headrace.events.queues import QueueManager, QueueMetrics
from headrace.events.schedules import ScheduledEventManager, ScheduleInfo
from headrace.events.subscription import EventSubscription
from headrace.propagation import Retry, current_meta, propagate

__all__ = [
    "DEFAULT_TIMEOUT_MS",
    "EVENT_MESSAGE_VERSION",
    "CompletionTracker",
    "EmitOptions",
    "Emitter",
    "EventCatalogue",
    "EventContext",
    "EventDefinition",
    "EventIdempotency",
    "EventMessage",
    "EventProvider",
    "EventRegistry",
    "EventSubscription",
    "Events",
    "Processed",
    "QueueManager",
    "QueueMetrics",
    "Retry",
    "ScheduleInfo",
    "ScheduledEventManager",
    "SyncEvents",
    "current_meta",
    "event",
    "propagate",
]
