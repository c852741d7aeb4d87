"""What others do to queues: their event streams on Valkey, followed while somebody here listens to them.

Every broker and every Node process writes to the stream, this one too. What this broker did it emits itself, in more
detail, so an entry that matches an event of our own is skipped. An entry may be read before the reply of the call that
wrote it has arrived: therefore entries wait for outstanding replies, and for the end of a tick. If an entry was
emitted nevertheless, our own event that comes later is not emitted again.

Entries are read in order from where the subscription began, also after a lost connection; all streams of a server over
one connection, which is why it is reopened when a queue is added. The stream keeps about a thousand
of them; subscribers that may have missed some get a `gap`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Final

from headrace.backends.valkey.connection import Connection, ServerError
from headrace.backends.valkey.hashes import from_fields
from headrace.backends.valkey.keys import Keys
from headrace.backends.valkey.transport import Transport
from headrace.errors import StorageUnavailable
from headrace.model import Event

_READ_AT_ONCE: Final = 1000
_READ_OF_EACH: Final = 10
"""Entries of one queue in a read of many."""
_MAX_FOLLOWED: Final = 1000
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
"""Events of the stream that are emitted here, by our names."""
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
        """Those that are emitted, or skipped, when this tick has ended."""
        self._cursors: dict[str, bytes] = {}
        """The queues that are followed, and the last entry that was read of each."""
        self._unsure: set[str] = set()
        """Queues of which entries may have been cut off since the last read."""
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._looked_at: bytes | None = None
        """When all queues were last asked for; None while only some are followed."""
        self._heard = Unmatched()
        self._own = Unmatched()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    async def follow(self, *queues: str) -> None:
        """Return when nothing can be missed any more."""
        new = [queue for queue in queues if queue not in self._cursors]
        keys = [self._key(queue) for queue in new]
        last = await self._server.call_many([(key, ("XREVRANGE", key, "+", "-", "COUNT", 1)) for key in keys])
        self._begin({queue: entries[0][0] if entries else _BEGINNING for queue, entries in zip(new, last, strict=True)})

    async def follow_all(self, queues: Sequence[str]) -> None:
        """Follow these, which are all. A queue that was not among them last time is new: nothing of it is missed."""
        before = self._looked_at
        key = self._key(queues[0] if queues else "")
        seconds, micros = await self._server.call(key, "TIME")
        self._looked_at = f"{int(seconds) * 1000 + int(micros) // 1000}-0".encode()
        if before is None and len(queues) > _MAX_FOLLOWED:
            log.warning("events of other brokers are told for %d of %d queues only", _MAX_FOLLOWED, len(queues))
        wanted = [queue for queue in queues[:_MAX_FOLLOWED] if queue not in self._cursors]
        if before is None:
            await self.follow(*wanted)
        else:
            self._begin(dict.fromkeys(wanted, before))

    def follow_all_no_more(self) -> None:
        """Queues that come are not followed by themselves any more."""
        self._looked_at = None

    def _begin(self, cursors: dict[str, bytes]) -> None:
        for queue, cursor in cursors.items():
            self._cursors.setdefault(queue, cursor)
        for group in dict.fromkeys(map(self._group, cursors)):
            # A read that waits does not learn of another stream. It is given up, and nothing is lost: entries count as
            # read when they have been taken over.
            self._end(group)
            self._readers[group] = asyncio.create_task(self._keep_reading(group))

    def _end(self, group: str) -> None:
        task = self._readers.pop(group, None)
        if task is not None:
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def keep_only(self, queues: set[str]) -> None:
        """Stop following queues to which nobody listens any more."""
        for queue in self._cursors.keys() - queues:
            del self._cursors[queue]
        for group in self._readers.keys() - set(map(self._group, self._cursors)):
            self._end(group)

    async def close(self) -> None:
        self.keep_only(set())
        if self._leaving:
            await asyncio.wait(self._leaving)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _key(self, queue: str) -> str:
        return f"{self._keys.of(queue)}:events"

    def _group(self, queue: str) -> str:
        """Queues that are read together have the same; in a cluster a read reaches one slot only."""
        return queue if self._server.is_cluster else ""

    async def _keep_reading(self, group: str) -> None:
        reader: Connection | None = None
        try:
            while queues := [queue for queue in self._cursors if self._group(queue) == group]:
                try:
                    reader = reader or self._server.reader(self._key(queues[0]))
                    found = await self._read(reader, queues)
                    await self._let_answers_come(self._key(queues[0]))
                except (StorageUnavailable, ServerError):
                    self._unsure.update(queues)
                    await _close(reader)
                    reader = None  # in a cluster it may be another node by now
                    await asyncio.sleep(_PAUSE_S)
                    continue
                self._take_over(found)
        finally:
            await _close(reader)

    def _take_over(self, found: dict[str, list[Any]]) -> None:
        for queue, entries in found.items():
            if queue in self._cursors:
                self._cursors[queue] = entries[-1][0]
                self._entries += [(queue, entry, fields) for entry, fields in entries]
        if found:
            self._wake()

    async def _read(self, reader: Connection, queues: list[str]) -> dict[str, list[Any]]:
        """New entries by queue."""
        most = max(_READ_OF_EACH, _READ_AT_ONCE // len(queues))
        keys, cursors = map(self._key, queues), [self._cursors[queue] for queue in queues]
        options = ("COUNT", most, "BLOCK", self._block_ms)
        reply = await reader.call("XREAD", *options, "STREAMS", *keys, *cursors)
        by_key = dict(reply or ())
        found = {queue: entries for queue in queues if (entries := by_key.get(self._key(queue).encode()))}
        for queue, cursor in zip(queues, cursors, strict=True):
            # So many entries are a sign that others may have been cut off meanwhile.
            is_behind = queue in self._unsure or 2 * len(found.get(queue, ())) >= most
            if is_behind and await self._is_cut(reader, self._key(queue), cursor):
                self._tell(Event(0, int(time.time() * 1000), "gap", 0, queue), None)
        self._unsure.difference_update(queues)
        return found

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
        is_followed = event.queue in self._cursors or self._looked_at is not None  # or will be, with the next look
        if not is_followed or event.event not in _TOLD:
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
