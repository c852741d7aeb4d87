"""What others do to a queue: its event stream on Valkey, followed while somebody here listens to the queue.

Every broker and every Node process writes the stream, this one too. What this broker did it tells by itself, in more
detail, so each entry is matched with an event of our own and passed over. An entry may be read before the call that
wrote it is answered: therefore entries wait for the answers that are due, and for the end of a tick. If an entry was
told all the same, the event of our own that comes later is not told again.

Entries are read in order from where the listening began, also after a lost connection. The stream keeps about a
thousand of them; who might have missed some is told of a gap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Final

from headrace.backends.valkey.connection import Connection, ServerError
from headrace.backends.valkey.hashes import from_fields
from headrace.backends.valkey.keys import Keys
from headrace.backends.valkey.transport import Transport
from headrace.errors import StorageUnavailable
from headrace.model import Event

_READ_AT_ONCE: Final = 1000
_MANY: Final = 500
"""So many entries in one read are a sign that others may have been cut off meanwhile."""
_BEGINNING: Final = b"0-0"
_PAUSE_S: Final = 0.2
_MAX_UNMATCHED: Final = 10_000
_UNMATCHED_S: Final = 10.0

_WORDS: Final = {
    b"added": "pushed",
    b"completed": "completed",
    b"failed": "failed",
    b"retrying": "failed",
    b"removed": "removed",
    b"progress": "progress",
    b"stalled": "stalled",
}
"""Events of the stream that are told here, in our words."""
_TOLD: Final = frozenset(_WORDS.values())

log: Final = logging.getLogger("headrace.valkey")
Tell = Callable[[Event, bytes | None], None]


class Unmatched:
    """What has been seen on one side only: a bounded number, for a while."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """How often, and when last; the longest ago first."""

    def add(self, key: Hashable) -> None:
        now = time.monotonic()
        self._seen[key] = (self._seen.pop(key, (0, now))[0] + 1, now)
        while len(self._seen) > _MAX_UNMATCHED or next(iter(self._seen.values()))[1] < now - _UNMATCHED_S:
            self._seen.popitem(last=False)

    def take(self, key: Hashable) -> bool:
        count, last = self._seen.get(key, (0, 0.0))
        if count > 1:
            self._seen[key] = (count - 1, last)
        elif count:
            del self._seen[key]
        return count > 0


class Streams:
    def __init__(
        self, transport: Transport, keys: Keys, timeout_s: float, tell: Tell, wake: Callable[[], None]
    ) -> None:
        self._server = transport
        self._keys = keys
        self._block_ms = int(min(2.0, timeout_s / 2) * 1000)
        self._tell = tell
        self._wake = wake
        self._entries: list[tuple[str, bytes, list[bytes]]] = []
        """Those that are told, or passed over, when this tick has ended."""
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._heard = Unmatched()
        self._own = Unmatched()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    async def follow(self, queue: str) -> None:
        """Return when nothing can be missed any more."""
        if queue in self._followed:
            return
        key = f"{self._keys.of(queue)}:events"
        last = await self._server.call(key, "XREVRANGE", key, "+", "-", "COUNT", 1)
        if queue not in self._followed:
            cursor = last[0][0] if last else _BEGINNING
            self._followed[queue] = asyncio.create_task(self._keep_following(queue, key, cursor))

    def keep_only(self, queues: set[str]) -> None:
        """Stop following queues to which nobody listens any more."""
        for queue in self._followed.keys() - queues:
            self._followed.pop(queue).cancel()

    async def close(self) -> None:
        tasks = list(self._followed.values())
        self.keep_only(set())
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    # -- reading -------------------------------------------------------------------------------------------------------

    async def _keep_following(self, queue: str, key: str, cursor: bytes) -> None:
        reader: Connection | None = None
        is_sure = True
        try:
            while True:
                try:
                    reader = reader or self._server.reader(key)
                    entries = await self._read(reader, key, cursor)
                    if (not is_sure or len(entries) >= _MANY) and await self._is_cut(reader, key, cursor):
                        self._tell(Event(0, int(time.time() * 1000), "gap", 0, queue), None)
                    is_sure = True
                    await self._let_answers_come(key)
                except (StorageUnavailable, ServerError):
                    is_sure = False
                    await _close(reader)
                    reader = None  # in a cluster it may be another node by now
                    await asyncio.sleep(_PAUSE_S)
                    continue
                for cursor, fields in entries:
                    self._entries.append((queue, cursor, fields))
                self._wake()
        finally:
            await _close(reader)

    async def _read(self, reader: Connection, key: str, cursor: bytes) -> list[Any]:
        options = ("COUNT", _READ_AT_ONCE, "BLOCK", self._block_ms)
        reply = await reader.call("XREAD", *options, "STREAMS", key, cursor)
        return list(reply[0][1]) if reply else []

    async def _is_cut(self, reader: Connection, key: str, cursor: bytes) -> bool:
        """Whether entries behind the cursor may be gone."""
        oldest = await reader.call("XRANGE", key, "-", "+", "COUNT", 1)
        if not oldest or cursor != _BEGINNING:
            return bool(oldest) and _place(oldest[0][0]) > _place(cursor)
        flat = await reader.call("XINFO", "STREAM", key)
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        return bool(facts[b"entries-added"] > facts[b"length"])

    async def _let_answers_come(self, key: str) -> None:
        """Return when our own calls up to now have been answered and those who made them have gone on."""
        await self._server.call(key, "PING")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    # -- matching ------------------------------------------------------------------------------------------------------

    def is_told_already(self, event: Event) -> bool:
        """Whether an event of our own was told by its entry before; if not, its entry will be passed over."""
        if event.queue not in self._followed or event.event not in _TOLD:
            return False
        key = (event.queue, event.event, event.job.removeprefix(f"{event.queue}:"))
        if self._heard.take(key):
            return True
        self._own.add(key)
        return False

    def tell_heard(self) -> None:
        """Our own events of this tick are told: now those of others."""
        entries, self._entries = self._entries, []
        for queue, entry, flat in entries:
            try:
                self._hear(queue, entry, dict(zip(flat[::2], flat[1::2], strict=True)))
            except ValueError as error:
                log.warning("an entry of the events of %s cannot be read: %s", queue, error)

    def _hear(self, queue: str, entry: bytes, fields: dict[bytes, bytes]) -> None:
        word, job_id = _WORDS.get(fields.get(b"event", b"")), fields.get(b"jobId", b"").decode()
        if word is None:
            return
        key = (queue, word, job_id)
        if not self._own.take(key):
            self._heard.add(key)
            self._tell(*_event_of(queue, word, job_id, entry, fields))


async def _close(reader: Connection | None) -> None:
    if reader is not None:
        await reader.close()


def _place(entry: bytes) -> tuple[int, int]:
    ms, _, number = entry.partition(b"-")
    return int(ms), int(number)


def _event_of(
    queue: str, word: str, job_id: str, entry: bytes, fields: dict[bytes, bytes]
) -> tuple[Event, bytes | None]:
    shown_id = f"{queue}:{job_id}" if job_id.isdigit() else job_id
    event = Event(0, _place(entry)[0], word, 0, queue, shown_id)
    body = None
    if word == "completed":
        body = from_fields(fields.get(b"returnvalue"), fields.get(b"raw"))
    elif word == "failed":
        event.terminal = fields[b"event"] == b"failed"
        event.error = fields.get(b"failedReason", b"").decode()
    elif word == "progress":
        with suppress(ValueError):  # what a Node worker reports may be anything
            event.progress = float(fields.get(b"data", b""))
    return event, body
