"""The Valkey backend: every verb is one call of our function library, whoever else works on the same keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

from headrace.backends.base import Counts, StorageStatus
from headrace.backends.local.eventlog import LogLimits, MemoryLog
from headrace.backends.valkey.library import ensure_libraries
from headrace.backends.valkey.records import Records
from headrace.backends.valkey.transport import Standalone, Transport
from headrace.backends.valkey.url import ValkeyUrl, parse_url
from headrace.clock import Clock, SystemClock
from headrace.errors import StorageUnavailable
from headrace.model import Event

_decode_event: Final = msgspec.json.Decoder(Event).decode
MAX_READ_BYTES: Final = 1 << 20


def transport_of(url: ValkeyUrl) -> Transport:
    return Standalone(url)


class ValkeyBackend(Records):
    is_local = False

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        max_completed: int = 50_000,
        completed_retention_ms: int | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.url = parse_url(url)
        super().__init__(transport_of(self.url), self.url.prefix, clock or SystemClock(), rng)
        self.max_completed = max_completed
        self.completed_retention_ms = completed_retention_ms
        self.problems: list[str] = []
        self.webhook_changes = 0
        self.library_owner = ""
        """The version text of the `glidemq` library, which tells whether Node owns it."""
        self._log = MemoryLog(LogLimits(), epoch=self._epoch)
        self._published: list[Event] = []
        self._published_bodies: dict[int, bytes] = {}
        self._trouble: StorageStatus | None = None

    async def open(self) -> None:
        await self._server.open()
        self.library_owner = await ensure_libraries(self._server.primaries())
        self._epoch = self._clock.now_ms()
        self._log.epoch = self._epoch
        for queue in await self._queue_names():
            self._look_at(queue, self._clock.now_ms())

    async def close(self) -> None:
        await self._server.close()

    # -- what the engine collects --------------------------------------------------------------------------------------

    def commit(self) -> None:
        """What a verb did is stored when it returns; this lets its events out."""
        events, self._events = self._events, []
        if not events:
            return
        self._log.record(events)
        self._log.committed = self._event_seq
        self._published += events
        self._published_bodies |= self._bodies
        self._bodies = {}

    def take_ready(self) -> set[str]:
        ready, self._ready = self._ready, set()
        return ready

    def take_events(self) -> list[Event]:
        events, self._published = self._published, []
        return events

    def take_bodies(self) -> dict[int, bytes]:
        bodies, self._published_bodies = self._published_bodies, {}
        return bodies

    def uncommitted_events(self) -> list[Event]:
        return list(self._events)

    def body_of(self, event: Event) -> bytes | None:
        return self._bodies.get(event.seq)

    # -- the log as readers see it -------------------------------------------------------------------------------------

    is_log_in_memory = True

    def event_window(self) -> tuple[int, int, int]:
        return self._epoch, self._log.first_seq, self._log.committed

    def read_events(self, after_seq: int, limit: int) -> list[Event]:
        events, size = [], 0
        for line in self._log.read(after_seq, limit):
            events.append(_decode_event(line))
            size += len(line)
            if size > MAX_READ_BYTES:
                break
        return events

    def log_position(self) -> tuple[int, int]:
        return self._log.first_seq, self._log.committed

    async def trim_events(self, queue: str, max_length: int) -> int:
        key = f"{self._keys.of(queue)}:events"
        return int(await self._server.call(key, "XTRIM", key, "MAXLEN", max_length))

    # -- what is kept --------------------------------------------------------------------------------------------------

    async def retire_completed(self, limit: int = 512) -> int:
        """Drop completed jobs beyond the kept number or age; how many went."""
        gone = 0
        for queue in list(self._seen):
            gone += await self._retire(queue, limit)
        return gone

    async def _retire(self, queue: str, limit: int) -> int:
        key = f"{self._keys.of(queue)}:completed"
        over = await self._server.call(key, "ZCARD", key) - self.max_completed
        doomed: list[bytes] = []
        if over > 0:
            doomed = await self._server.call(key, "ZRANGE", key, 0, min(over, limit) - 1)
        if self.completed_retention_ms is not None:
            horizon = self._clock.now_ms() - self.completed_retention_ms
            doomed += await self._server.call(key, "ZRANGEBYSCORE", key, "-inf", f"({horizon}", "LIMIT", 0, limit)
        ids = [job_id.decode() for job_id in dict.fromkeys(doomed)]
        return len(await self._remove(queue, "completed", ids, is_told=False)) if ids else 0

    # -- storage -------------------------------------------------------------------------------------------------------

    @property
    def is_degraded(self) -> bool:
        return self._trouble is not None

    def check_writable(self) -> None:
        if self._trouble is not None:
            raise StorageUnavailable(self._trouble.error or "Storage is unavailable")

    def storage_status(self) -> StorageStatus:
        return self._trouble or StorageStatus(False, None, None)

    def size_bytes(self) -> int:
        return 0

    async def compact(self) -> None:
        """Valkey looks after its own memory."""

    def total_counts(self) -> Counts:
        return Counts()

    def oldest_waiting_ms(self, queue: str) -> float | None:
        return None
