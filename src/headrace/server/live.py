"""Fan-out of live events to many listeners: the hub behind SSE and WebSocket.

The engine notifies the hub of every commit. Events are collected for up to FLUSH_S and encoded once: listeners with
the same selection get the very same bytes, so a thousand of them cost one encoding and a thousand writes. While nobody
listens an event costs a place in `_recent`, from which reconnecting listeners are served without reading the log.

Rules: slow readers are bounded: an SSE stream is cut off, a WebSocket loses messages and learns how many. No event is
lost silently: what the log no longer holds is announced as a `gap`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import msgspec

from headrace.commands._base import Command
from headrace.commands.monitoring import Health, Stats, StorageStatus
from headrace.commands.queries import job_counts
from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.engine.peer import Peer
from headrace.model import Event
from headrace.server.jsonwire import plain
from headrace.server.projections import MAX_LIVE_ERROR, Choice, event_id, live_fields, live_name

log: Final = logging.getLogger("headrace.server")

FLUSH_S: Final = 0.1
MAX_UNREAD: Final = 1024 * 1024
"""Bytes that a listener may leave unread."""
_MAX_RECENT: Final = 10_000
_REPLAY_CHUNK: Final = 2000
_JOIN_WITH: Final = 200
"""A listener that has so few events to catch up with may join. Before that it reads at its own pace and is not cut off
for what it has not read yet."""
_MAX_COUNTED_QUEUES: Final = 200
"""Queues whose counts one flush shows at most; the others follow in the next."""
_STATS_S: Final = 5.0
_HEALTH_EVERY: Final = 2
_STORAGE_EVERY: Final = 6


class Happening(msgspec.Struct):
    """One thing to tell: an event of the log, or a snapshot (`id` is empty)."""

    name: str
    queue: str
    ts: int
    id: str
    fields: dict[str, Any]


def happening(event: Event) -> Happening:
    number = event_id(event) if event.seq else ""  # those of another broker are not in our log
    return Happening(live_name(event.event), event.queue, event.ts, number, live_fields(event))


class Listener(Protocol):
    """Somebody who listens: knows its choice, and how one thing is written for it."""

    choice: Choice

    def write(self, frames: bytes, count: int) -> None:
        """Send frames, or drop them when too much is unread."""

    def beat(self) -> None:
        """Show a sign of life."""


Writer = Callable[[Happening], bytes]


class Hub:
    def __init__(self, engine: Engine, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._settings = settings
        self._loop = loop
        self._listeners: dict[Writer, dict[Choice, set[Listener]]] = {}
        self._count = 0
        self._pending: list[Event] = []
        self._recent: deque[Event] = deque(maxlen=_MAX_RECENT)
        self._changed: dict[str, None] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._beat_timer: asyncio.TimerHandle | None = None
        self._stats_timer: asyncio.TimerHandle | None = None
        self._rounds = 0
        self._replays: set[asyncio.Task[None]] = set()
        engine.listen(self._on_events)
        engine.listen_to_others(self._on_event_of_others)

    # -- who listens ---------------------------------------------------------------------------------------------------

    def join(self, listener: Listener, writer: Writer) -> None:
        """From the next flush on the listener gets what it chose."""
        self._listeners.setdefault(writer, {}).setdefault(listener.choice, set()).add(listener)
        self._count += 1
        if listener.choice.is_of_events:
            self._engine.watch_all(+1)
        if self._stats_timer is None:
            self._stats_timer = self._loop.call_later(_STATS_S, self._tell_stats)
        if self._beat_timer is None:
            self._beat_timer = self._loop.call_later(self._settings.live_heartbeat_ms / 1000, self._beat)

    def leave(self, listener: Listener, writer: Writer) -> None:
        groups = self._listeners.get(writer, {})
        group = groups.get(listener.choice, set())
        if listener in group:
            group.discard(listener)
            self._count -= 1
            if listener.choice.is_of_events:
                self._engine.watch_all(-1)
            if not group:
                del groups[listener.choice]

    def close(self) -> None:
        for timer in (self._flush_timer, self._beat_timer, self._stats_timer):
            if timer is not None:
                timer.cancel()
        for replay in self._replays:
            replay.cancel()

    # -- what happens --------------------------------------------------------------------------------------------------

    def _on_events(self, events: list[Event], _: dict[int, bytes]) -> None:
        if not events:
            return
        self._recent.extend(
            [
                event if event.error is None and event.action is None and event.tags is None else _lean(event)
                for event in events
            ]
        )
        if self._count:
            told = self._engine.told_already
            self._collect([event for event in events if event.seq not in told] if told else events)

    def _on_event_of_others(self, event: Event) -> None:
        if self._count:
            self._collect([event])

    def _collect(self, events: list[Event]) -> None:
        self._pending += events
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Tell everybody what has been collected."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        events, self._pending = self._pending, []
        for event in events:
            if event.queue:
                self._changed[event.queue] = None
        self._tell([happening(event) for event in events] if self._wants_any(events) else [])
        self._engine.run(self._tell_counts())

    def _wants_any(self, events: list[Event]) -> bool:
        """Most pages want snapshots alone: then nothing is made of the events."""
        return any(self._wants(*pair) for pair in {(live_name(event.event), event.queue) for event in events})

    async def _tell_counts(self) -> None:
        now = self._engine.clock.now_ms()
        wanted = [queue for queue in self._changed if self._wants("queue:counts", queue)]
        # Taken out before anything is counted: on Valkey that takes its time, and others may begin meanwhile.
        self._changed = dict.fromkeys(wanted[_MAX_COUNTED_QUEUES:])
        if self._changed and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_S, self.flush)
        shown = []
        for queue in wanted[:_MAX_COUNTED_QUEUES]:
            counts = msgspec.to_builtins(job_counts(await self._engine.backend.counts(queue)))
            shown.append(Happening("queue:counts", queue, now, "", {"queue": queue, **counts, "timestamp": now}))
        self._tell(shown)

    def _wants(self, name: str, queue: str) -> bool:
        return any(choice.wants(name, queue) for groups in self._listeners.values() for choice in groups)

    def _tell(self, happenings: list[Happening]) -> None:
        """One encoding per way of writing, one joined text per choice."""
        if not happenings:
            return
        for writer, groups in self._listeners.items():
            frames: dict[int, bytes] = {}
            for choice, group in list(groups.items()):
                chosen = [index for index, told in enumerate(happenings) if choice.wants(told.name, told.queue)]
                for index in chosen:
                    if index not in frames:
                        frames[index] = writer(happenings[index])
                if chosen:
                    text = b"".join([frames[index] for index in chosen])
                    for listener in list(group):
                        listener.write(text, len(chosen))

    # -- snapshots and signs of life -----------------------------------------------------------------------------------

    def _tell_stats(self) -> None:
        self._stats_timer = self._loop.call_later(_STATS_S, self._tell_stats) if self._count else None
        self._rounds += 1
        due: list[tuple[str, Command[Any]]] = [("stats:snapshot", Stats())]
        if self._rounds % _HEALTH_EVERY == 0:
            due.append(("health:status", Health()))
        if self._rounds % _STORAGE_EVERY == 0:
            due.append(("storage:status", StorageStatus()))
        self._engine.run(self._tell_replies(due))

    async def _tell_replies(self, due: list[tuple[str, Command[Any]]]) -> None:
        now = self._engine.clock.now_ms()
        for name, command in due:
            if self._wants(name, ""):
                reply = plain(msgspec.msgpack.encode(await command.run(self._engine, _NOBODY)))
                fields = reply.get("stats") or reply.get("data") or reply
                self._tell([Happening(name, "", now, "", {**fields, "timestamp": now})])

    def _beat(self) -> None:
        self._beat_timer = None
        if self._count:
            self._beat_timer = self._loop.call_later(self._settings.live_heartbeat_ms / 1000, self._beat)
        for groups in list(self._listeners.values()):
            for group in list(groups.values()):
                for listener in list(group):
                    listener.beat()

    # -- the past ------------------------------------------------------------------------------------------------------

    def replay(self, listener: Replayed, writer: Writer, after: Position) -> None:
        """Tell the listener everything since `after` and then let it join."""
        task = self._loop.create_task(self._replay(listener, writer, after))
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    async def _replay(self, listener: Replayed, writer: Writer, after: Position) -> None:
        try:
            await self._catch_up(listener, writer, self._begin_of(listener, writer, after))
        except Exception:
            log.exception("a replay of events failed")
            listener.cut_off("its replay failed")

    def _begin_of(self, listener: Replayed, writer: Writer, after: Position) -> int:
        """The seq after which to begin. Numbers of another epoch of the log mean nothing in this one: start over."""
        epoch, first, last = self._engine.backend.event_window()
        if after.epoch == epoch and after.seq <= last:
            return after.seq
        lost = _gap(writer, f"{after.epoch}.{after.seq}", f"{epoch}.{first}", self._engine.clock.now_ms())
        listener.write_past(lost)
        return first - 1

    async def _catch_up(self, listener: Replayed, writer: Writer, after: int) -> None:
        while listener.is_open:
            self.flush()
            first_recent = self._recent[0].seq if self._recent else self._engine.backend.event_window()[2] + 1
            if after + 1 >= first_recent:
                events = [event for event in self._recent if event.seq > after]
                if len(events) <= _JOIN_WITH:
                    self._write_replay(listener, writer, events, after)
                    self.join(listener, writer)
                    return
                events = events[:_REPLAY_CHUNK]
            else:
                events = await self._read(after)
            if not events:
                lost = _gap(writer, str(after + 1), str(first_recent - 1), self._engine.clock.now_ms())
                listener.write_past(lost)
                after = first_recent - 1
                continue
            after = self._write_replay(listener, writer, events, after)
            await listener.drained()

    async def _read(self, after: int) -> list[Event]:
        backend = self._engine.backend
        if backend.is_log_in_memory:
            return backend.read_events(after, _REPLAY_CHUNK)
        return await self._loop.run_in_executor(None, backend.read_events, after, _REPLAY_CHUNK)

    def _write_replay(self, listener: Replayed, writer: Writer, events: Iterable[Event], after: int) -> int:
        """Write those of the events that the listener chose; the seq of the last."""
        frames = []
        for event in events:
            if event.seq > after + 1:
                frames.append(_gap(writer, str(after + 1), str(event.seq - 1), event.ts))
            after = event.seq
            if listener.choice.wants(live_name(event.event), event.queue):
                frames.append(writer(happening(event)))
        if frames:
            listener.write_past(b"".join(frames))
        return after


class Replayed(Listener, Protocol):
    """A listener that can be told of the past."""

    is_open: bool

    def write_past(self, frames: bytes) -> None:
        """Send a piece of the past; `drained` is awaited before the next."""

    async def drained(self) -> None:
        """Wait until the listener has read most of what it was sent."""

    def cut_off(self, reason: str) -> None: ...


class Position(msgspec.Struct, frozen=True):
    """Where in the log a listener was."""

    epoch: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> Position | None:
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
            return None
        return cls(int(parts[1]), int(parts[2]))


def _lean(event: Event) -> Event:
    """The event without what streams do not show, and with a bounded error: ten thousand of them are kept."""
    error = event.error and event.error[:MAX_LIVE_ERROR]
    return msgspec.structs.replace(event, error=error, action=None, tags=None)


def _gap(writer: Writer, first: str, last: str, now_ms: int) -> bytes:
    """Events between these are lost to the listener: they are kept no longer, or were never this log's."""
    return writer(Happening("gap", "", now_ms, "", {"from": first, "to": last, "timestamp": now_ms}))


class _Nobody:
    """Asks for snapshots on behalf of all listeners."""

    address = ""
    is_authenticated = True
    held: dict[str, int] | None = None
    auth_failures = 0
    wants_codes = False
    is_waiting = False

    def __init__(self) -> None:
        self.workers: set[str] = set()

    def deliver(self, event: Event, body: bytes | None) -> None: ...


_NOBODY: Final[Peer] = _Nobody()
