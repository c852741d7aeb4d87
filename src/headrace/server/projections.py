"""How the one event log looks on each wire. The TCP names are those of the protocol; the log knows more than they."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec
from msgspec import Raw

from headrace.model import Event, js_number

_encode: Final = msgspec.msgpack.Encoder().encode
_HEADER: Final = struct.Struct(">I")

# Events of the log that the TCP protocol knows; the others are for the lake, SSE and WebSocket.
_TCP_EVENTS: Final = frozenset(
    (
        "pushed",
        "duplicated",
        "pulled",
        "progress",
        "completed",
        "failed",
        "retried",
        "stalled",
        "delayed",
        "removed",
        "paused",
        "resumed",
        "waiting",
        "waiting-children",
        "drained",
    )
)


def tcp_event_frame(event: Event, body: bytes | None) -> bytes | None:
    """The push frame of an event, or None when the protocol has no word for it."""
    if event.event not in _TCP_EVENTS:
        return None
    shown: dict[str, Any] = {
        "eventType": event.event,
        "queue": event.queue,
        "jobId": event.job,
        "timestamp": float(event.ts),
    }
    _PARTICULARS.get(event.event, _nothing)(event, body, shown)
    payload = _encode({"type": "event", "event": shown})
    return _HEADER.pack(len(payload)) + payload


def _nothing(event: Event, body: bytes | None, shown: dict[str, Any]) -> None:
    pass


def _progress(event: Event, body: bytes | None, shown: dict[str, Any]) -> None:
    value = js_number(event.progress or 0)
    shown["progress"] = value
    shown["data"] = {"progress": value, "message": event.action}


def _completed(event: Event, body: bytes | None, shown: dict[str, Any]) -> None:
    if body is not None:
        shown["data"] = Raw(body)


def _failed(event: Event, body: bytes | None, shown: dict[str, Any]) -> None:
    shown["error"] = event.error or ""
    shown["terminal"] = bool(event.terminal)
    if body is not None:
        shown["data"] = Raw(body)


def _with_prev(event: Event, body: bytes | None, shown: dict[str, Any]) -> None:
    if event.prev is not None:
        shown["prev"] = event.prev


def _delayed(event: Event, body: bytes | None, shown: dict[str, Any]) -> None:
    shown["delay"] = js_number(event.delay or 0)


def _stalled(event: Event, body: bytes | None, shown: dict[str, Any]) -> None:
    shown["data"] = {"stallCount": event.stalls, "action": event.action}


_PARTICULARS: Final = {
    "progress": _progress,
    "completed": _completed,
    "failed": _failed,
    "retried": _with_prev,
    "removed": _with_prev,
    "waiting": _with_prev,
    "delayed": _delayed,
    "stalled": _stalled,
}
