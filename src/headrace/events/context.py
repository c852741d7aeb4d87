"""What a handler receives: the event, its context, and a way to emit events that name this one as their cause."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from msgspec import UNSET

from headrace.events.definitions import EventDefinition
from headrace.events.message import Emission, EventMessage
from headrace.events.subscription import EventSubscription
from headrace.propagation import PropagationMeta, current_meta, log_fields
from headrace.worker.context import JobContext

if TYPE_CHECKING:
    from headrace.events.app import Events, SyncEvents

D = TypeVar("D")
X = TypeVar("X")
Y = TypeVar("Y")


@dataclass(frozen=True)
class EventContext(Generic[D]):
    """One event at its handler. Immutable."""

    event_id: str
    event_name: str
    data: D
    timestamp: float
    """When it was emitted, or due if a schedule made it: ms since the epoch."""
    subscription_id: str
    causation_id: str | None
    """The id of the event that caused this one."""
    meta: PropagationMeta
    job: JobContext
    log: logging.LoggerAdapter[logging.Logger] = field(repr=False)
    _events: Events = field(repr=False)

    @property
    def correlation_id(self) -> str | None:
        """The request that all of this belongs to."""
        return self.meta.get("correlationId")

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        return self.job.attempt

    def emit(self, definition: EventDefinition[X, Y], data: X, **options: Unpack[Emission]) -> EventSubscription[Y]:
        """Emit an event that this one caused."""
        options.setdefault("causation_id", self.event_id)
        return self._events.emit(definition, data, **options)

    def sync(self) -> SyncEvents:
        """For handlers that are plain functions: `ctx.sync().emit(...)` waits."""
        return self._events.sync()


_cause: ContextVar[str | None] = ContextVar("headrace_cause", default=None)

set_cause = _cause.set
current_cause: Callable[[], str | None] = _cause.get
"""The event that is handled here, for emissions that do not go through its context."""


def context_of(message: EventMessage, data: Any, job: JobContext, events: Events, logger_name: str | None) -> Any:
    name = logger_name or f"Event:{message.event_name}"
    meta = current_meta()
    return EventContext(
        event_id=message.event_id,
        event_name=message.event_name,
        data=data,
        timestamp=message.timestamp,
        subscription_id=message.subscription_id,
        causation_id=None if message.causation_id is UNSET else message.causation_id,
        meta=meta,
        job=job,
        log=logging.LoggerAdapter(logging.getLogger(name), log_fields(meta)),
        _events=events,
    )
