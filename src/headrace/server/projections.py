"""How the one event log looks on each wire: names and fields for TCP, WebSocket and SSE.

The TCP names are those of the protocol; the log has more events than those. WebSocket and SSE name every event as
`family:word` (`live_name`). Results and payloads travel over TCP only: what a stream shows must look the same when it
is read from the log again. To add an event: EventName in headrace.model, and its name here if its family is not `job`.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Raw, Struct

from headrace.frames import encode_frame
from headrace.model import EVENT_WORDS, Event, js_number

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
        "gap",
    )
)


def tcp_event_frame(event: Event, body: bytes | None) -> bytes | None:
    """The push frame of an event, or None when the protocol has no word for it."""
    shown = tcp_event(event, body)
    return None if shown is None else encode_frame({"type": "event", "event": shown})


def tcp_event(event: Event, body: bytes | None) -> dict[str, Any] | None:
    """What a subscriber gets of an event, or None when the protocol has no name for it."""
    if event.event not in _TCP_EVENTS:
        return None
    shown: dict[str, Any] = {
        "eventType": event.event,
        "queue": event.queue,
        "jobId": event.job,
        "timestamp": float(event.ts),
    }
    _PARTICULARS.get(event.event, _nothing)(event, body, shown)
    return shown


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
    if event.error is not None:
        shown["error"] = event.error
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


# -- WebSocket and SSE -------------------------------------------------------------------------------------------------

_LIVE_NAMES: Final = {
    "pulled": "job:active",
    "paused": "queue:paused",
    "resumed": "queue:resumed",
    "drained": "queue:drained",
    "obliterated": "queue:obliterated",
    "dlq-retried": "dlq:retried",
    "cron-fired": "cron:fired",
    "gap": "server:gap",
    **{word: word.replace("-", ":", 1) for word in EVENT_WORDS.values() if word.startswith("flow-")},
}


def live_name(word: str) -> str:
    return _LIVE_NAMES.get(word) or f"job:{word}"


SNAPSHOTS: Final = ("queue:counts", "stats:snapshot", "health:status", "storage:status")
"""What is no event of the log but a picture of the moment, made while somebody looks."""

LIVE_NAMES: Final = frozenset((*map(live_name, EVENT_WORDS.values()), *SNAPSHOTS))
FAMILIES: Final = frozenset(
    (
        "job", "queue", "dlq", "flow", "cron", "worker", "ratelimit", "concurrency", "webhook", "batch", "client",
        "auth", "cleanup", "health", "stats", "storage", "server", "memory", "config",
    )
)  # fmt: skip
"""Families that may be asked for, also those of which this server tells nothing yet."""


_UNTOLD: Final = {
    "job": "discarded priority-changed data-updated delay-changed timeout lock-expired deduplicated "
    "dependencies-resolved moved-to-delayed",
    "queue": "created removed cleaned idle threshold",
    "dlq": "added retry-all purged auto-retried expired",
    "cron": "created updated deleted missed skipped",
    "worker": "connected disconnected heartbeat idle removed-stale overloaded error",
    "ratelimit": "set cleared hit rejected",
    "concurrency": "set cleared rejected",
    "webhook": "added removed fired failed enabled disabled",
    "batch": "pushed pulled",
    "client": "connected disconnected",
    "auth": "failed",
    "cleanup": "orphans-removed stale-deps-removed",
    "storage": "backup-started backup-completed backup-failed size-warning",
    "server": "started shutdown recovered memory-warning",
    "memory": "compacted",
    "config": "stall-changed dlq-changed",
}
UNTOLD_NAMES: Final = frozenset(f"{family}:{word}" for family, words in _UNTOLD.items() for word in words.split())
"""Names of the protocol of which this server tells nothing: who asks for them among others must not get nothing."""


def is_pattern(text: str) -> bool:
    """Whether `text` is a name, `<family>:*` or `*`."""
    family, _, word = text.partition(":")
    return text == "*" or text in LIVE_NAMES or text in UNTOLD_NAMES or (family in FAMILIES and word == "*")


NOTHING: Final = frozenset(("",))
"""The patterns of somebody who wants no event."""


class Choice(Struct, frozen=True):
    """Which events somebody wants: of one queue or all, and of which names; no patterns means every name."""

    queue: str | None = None
    patterns: frozenset[str] = frozenset()

    def wants(self, name: str, queue: str) -> bool:
        if self.queue is not None and queue != self.queue:
            return False
        patterns = self.patterns
        return not patterns or "*" in patterns or name in patterns or f"{name.partition(':')[0]}:*" in patterns

    @property
    def is_of_events(self) -> bool:
        """Whether more than snapshots is wanted."""
        return any(self.wants(name, self.queue or "") for name in LIVE_NAMES.difference(SNAPSHOTS))


def event_id(event: Event) -> str:
    """The id of an event on a stream, shard (there is one) first; it outlives a restart."""
    return f"0.{event.epoch}.{event.seq}"


MAX_LIVE_ERROR: Final = 4096
"""Characters of an error that streams show; all of it is in the job."""


def live_fields(event: Event) -> dict[str, Any]:
    """What WebSocket and SSE send of an event besides its name."""
    shown: dict[str, Any] = {"queue": event.queue, "jobId": event.job, "timestamp": event.ts}
    if event.event == "progress":
        shown["progress"] = js_number(event.progress or 0)
    elif event.event == "failed":
        shown["terminal"] = bool(event.terminal)
    for name in ("error", "prev", "delay", "attempt", "worker", "name", "parent", "group", "first", "last"):
        value = getattr(event, name)
        if value is not None:
            shown[name] = value[:MAX_LIVE_ERROR] if name == "error" else value
    return shown
