"""The envelope in which an event travels, and the options of an emission.

Wire names are camel case. Two ids are easily mixed up: `subscription_id` (wire: correlationId) is who waits for the
answer to this one emission; `correlation_id` (meta.correlationId) is the request that all of it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypedDict

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from headrace.client.job import JobInfo
from headrace.durations import Duration
from headrace.errors import InvalidCommand, PayloadError
from headrace.model import NIL
from headrace.propagation import PropagationMeta

EVENT_MESSAGE_VERSION: Final = "1"
JOB_NAME: Final = "event"


class EventMessage(Struct, rename="camel", kw_only=True):
    """One emission. Optional keys are absent, not null; other emitters may leave out an empty payload or meta."""

    version: str = EVENT_MESSAGE_VERSION
    event_id: str
    event_name: str
    payload: Raw = Raw(NIL)
    meta: dict[str, Any] = {}
    subscription_id: str = msgspec.field(name="correlationId")
    causation_id: str | UnsetType = UNSET
    timestamp: float
    idempotency_key: str | UnsetType = UNSET


_encode: Final = msgspec.msgpack.Encoder().encode


def encode_message(message: EventMessage | ScheduledMessage) -> Raw:
    # Its payload is encoded already, so it must not go through what encodes values of users.
    return Raw(_encode(message))


class ScheduledMessage(Struct, rename="camel", kw_only=True):
    """What a schedule stores: the envelope of each run is made from it and the time the run was due."""

    version: str = EVENT_MESSAGE_VERSION
    event_name: str
    payload: Raw
    meta: dict[str, Any]
    schedule_id: str

    def at(self, due_ms: float) -> EventMessage:
        run = f"{self.schedule_id}@{due_ms:.0f}"
        return EventMessage(
            event_id=run,
            event_name=self.event_name,
            payload=self.payload,
            meta=self.meta,
            subscription_id=run,
            timestamp=due_ms,
        )


class _Version(Struct, rename="camel"):
    version: str = ""
    schedule_id: str | None = None


_decode_version: Final = msgspec.msgpack.Decoder(_Version, strict=False).decode
_decode: Final = msgspec.msgpack.Decoder(EventMessage, strict=False).decode
_decode_scheduled: Final = msgspec.msgpack.Decoder(ScheduledMessage, strict=False).decode


def message_of(info: JobInfo) -> EventMessage:
    """The envelope in a job. The version is looked at before anything else."""
    what = f"job {info.id} of {info.queue}"
    try:
        found = _decode_version(info.encoded_data)
        if found.version != EVENT_MESSAGE_VERSION:
            raise PayloadError(what, "$.version", f"version {found.version!r} is not known here")
        if found.schedule_id is not None:
            return _decode_scheduled(info.encoded_data).at(info.created_at)
        return _decode(info.encoded_data)
    except msgspec.MsgspecError as error:
        raise PayloadError(what, "$", f"no event message: {error}") from None


def check_key(key: str | None) -> None:
    """Refuse an idempotency key that no job could have as its id."""
    if key is not None and (not isinstance(key, str) or not key or ":" in key):
        raise InvalidCommand(f"idempotency key {key!r}: give a text without ':'")


class Emission(TypedDict, total=False):
    """What can be said by name when an event is emitted."""

    delay: Duration | None
    timeout: Duration | None
    expires: Duration | None
    key: str | None
    causation_id: str | None
    meta: PropagationMeta | None
    expects_result: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EmitOptions:
    """How one event is emitted, for providers. Spans are as everywhere: seconds, timedelta or text."""

    delay: Duration | None = None
    """0 and less mean now."""
    causation_id: str | None = None
    timeout: Duration | None = None
    """How long the caller waits for an answer; 0 is forever, None the default of the provider."""
    idempotency_key: str | None = None
    expects_result: bool = True
    expires: Duration | None = None
    """Drop it if it has not started by then. By default questions expire with their caller's timeout."""
