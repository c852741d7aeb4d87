"""The Valkey backend: every verb is one call of our function library, whoever else works on the same keys."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

import msgspec
from msgspec import Struct

from headrace.backends.base import Counts, Outcome, StorageHealth
from headrace.backends.local.eventlog import MemoryLog, Roll, decode_events
from headrace.backends.valkey.hashes import from_fields
from headrace.backends.valkey.library import check_rights, ensure_libraries, is_own_glidemq
from headrace.backends.valkey.queries import QUEUES_AT_ONCE, as_counts
from headrace.backends.valkey.refused import Refused
from headrace.backends.valkey.streams import Streams
from headrace.backends.valkey.transport import PATIENCE_S, Standalone, Transport, all_of, answer, patiently
from headrace.backends.valkey.url import ValkeyUrl, parse_url
from headrace.backends.valkey.wakes import Wakes
from headrace.clock import Clock, SystemClock
from headrace.errors import StorageUnavailable
from headrace.model import Event

POLL_MS: Final = 150
RETIRED_AT_ONCE: Final = 10_000
"""Completed jobs of a queue that go in one second: more than a broker completes in that time."""

log: Final = logging.getLogger("headrace.valkey")


class Ended(Struct):
    """The end of a job as a function publishes it."""

    queue: str
    job: str
    state: str
    error: str | None = None
    value: str | None = None
    raw: str | None = None


_decode_ended: Final = msgspec.json.Decoder(Ended).decode


def _nobody(*_: object) -> None:
    """Nobody listens."""


def transport_of(url: ValkeyUrl) -> Transport:
    if not url.is_cluster:
        return Standalone(url)
    from headrace.backends.valkey.cluster import Cluster  # needs valkey-py for the slots of keys

    return Cluster(url)


class ValkeyBackend(Refused):
    is_local: Final[Literal[False]] = False

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
        self.events_kept = self.url.events
        self.max_completed = max_completed
        self.completed_retention_ms = completed_retention_ms
        self.problems: list[str] = []
        self._trouble: StorageHealth | None = None
        self.webhook_changes = 0
        self.library_owner = ""
        """The version text of the `glidemq` library, which tells whether Node owns it."""
        self._log = MemoryLog(epoch=self._epoch)
        self.on_wake: Callable[[], None] = _nobody
        """Called when another broker brought news: the server should end a tick."""
        self.on_end: Callable[[str, Outcome], None] = _nobody
        """Called with the id and the outcome of a job that ended at another broker."""
        self.on_flow: Callable[[str, bool], None] = _nobody
        """Called with the id of a workflow that was changed at another broker, and whether it has ended."""
        self.on_event: Callable[[Event, bytes | None], None] = _nobody
        """Called with what somebody else did to a queue that is followed here, and the result that goes with it."""
        self.watching_all = 0
        """How many listen to all queues."""
        self._streams = Streams(
            self._server,
            self._keys,
            self.url.timeout_s,
            lambda event, body: self.on_event(event, body),
            lambda: self.on_wake(),
        )
        channels = [self._keys.wake, self._keys.ended, self._keys.flow_changes]
        self._wakes = Wakes(self.url, self._server.addresses, channels, self._hear, self._hear_all)

    async def wait_for_server(self, patience_s: float = PATIENCE_S) -> None:
        """Return when `open` will find a server that can be worked with. Raise what prevents that, if waiting for it to
        pass does not help or takes too long."""
        try:
            await patiently(self._prepare, patience_s)
        except BaseException:
            await self._server.close()
            raise

    async def open(self) -> None:
        try:
            await self._prepare()
            await self._check_eviction()
            with suppress(StorageUnavailable):  # out of memory: it is noted when there is room
                await self._cap_events(sorted(self._registered))
        except BaseException:
            await self._server.close()
            raise
        self._epoch = self._clock.now_ms()
        self._log.epoch = self._epoch
        for queue in self._registered:
            self._look_at(queue, self._clock.now_ms())

    async def _prepare(self) -> None:
        await self._server.open()
        await self.load_libraries()
        await answer(check_rights(self._server.primaries(), self.url.prefix))
        await self._queue_names()

    async def _check_eviction(self) -> None:
        for primary in self._server.primaries():
            policy = re.search(rb"maxmemory_policy:(allkeys\S+)", await answer(primary.call("INFO", "memory")))
            if policy:
                log.warning("Valkey may drop jobs: its maxmemory-policy is %s, not noeviction", policy[1].decode())

    async def close(self) -> None:
        await self._streams.close()
        await self._wakes.close()
        with suppress(StorageUnavailable):
            await self._unregister_worker()
        await self._server.close()

    async def load_libraries(self) -> None:
        self.library_owner = await ensure_libraries(self._server.primaries())

    async def look_after(self) -> None:
        await self._find_server()
        await all_of(
            self._follow_watched(),
            self._look_at_webhooks(),
            super().look_after(),
            self.load_libraries(),  # a Node process may have replaced `glidemq`, or brought none and flushed ours
        )

    async def _find_server(self) -> None:
        """Note whether there is anybody to ask, for probes: one primary of a cluster that is away is no such case."""
        try:
            await self._server.refresh()
        except StorageUnavailable as error:
            if self._trouble is None:
                self._trouble = StorageHealth(False, str(error), float(self._clock.now_ms()))
            raise
        self._trouble = None

    async def _follow_watched(self) -> None:
        watched = {queue for queue, listeners in self._watched.items() if listeners > 0}
        if self.watching_all > 0:
            watched.update(await self.follow_all())
        else:
            self._streams.follow_all_no_more()
        self._streams.keep_only(watched)

    @property
    def poll_ms(self) -> int | None:
        """How often parked pulls must ask: Node's library wakes no broker for what it adds."""
        return None if is_own_glidemq(self.library_owner) else POLL_MS

    # -- other brokers -------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        await self._wakes.open()

    def _hear(self, channel: bytes, message: bytes) -> None:
        name = channel.decode()
        try:
            if name == self._keys.wake:
                self._ready.add(message.decode())
            elif name == self._keys.flow_changes:
                change, _, flow_id = message.decode().partition(" ")
                self.on_flow(flow_id, change == "ended")
            else:
                self._hear_of_end(_decode_ended(message))
        except ValueError as error:
            log.warning("a message on %s cannot be read: %s", name, error)
        self.on_wake()

    def _hear_of_end(self, ended: Ended) -> None:
        value = None if ended.value is None else from_fields(ended.value.encode(), (ended.raw or "").encode())
        self.on_end(ended.job, Outcome(ended.state, value, ended.error))

    async def follow(self, queue: str) -> None:
        """Have `on_event` called for what others do to the queue, from now on while somebody watches it."""
        await self._streams.follow(queue)

    async def follow_all(self) -> list[str]:
        """The same for all queues there are, and those that come while `watching_all` says that somebody listens."""
        queues = await self._queue_names()
        await self._streams.follow_all(queues)
        return queues

    def is_told_already(self, event: Event) -> bool:
        """Whether an event of our own reached the listeners of its queue by the stream that all brokers write."""
        return self._streams.is_told_already(event)

    def tell_heard(self) -> None:
        """Have `on_event` called for what was heard: after the events of this tick, among which its own are."""
        self._streams.tell_heard()

    def _hear_all(self) -> None:
        """Messages may have been lost: every queue deserves a look."""
        self._ready.update(self._registered)
        self.on_wake()

    # -- what the engine collects --------------------------------------------------------------------------------------

    def commit(self) -> None:
        """What a verb did is stored when it returns; this lets its events out."""
        self._take_nearby()
        events, self._events = self._events, []
        if not events:
            return
        self._log.record(events)
        self._log.committed = self._event_seq
        self._published += events
        self._published_bodies |= self._bodies
        self._bodies = {}

    # -- the log as readers see it -------------------------------------------------------------------------------------

    is_log_in_memory = True

    def event_window(self) -> tuple[int, int, int]:
        return self._epoch, self._log.first_seq, self._log.committed

    def read_events(self, after_seq: int, limit: int) -> list[Event]:
        return decode_events(self._log.read(after_seq, limit))

    def log_position(self) -> tuple[int, int]:
        return self._log.first_seq, self._log.committed

    async def trim_events(self, queue: str, max_length: int) -> int:
        key = f"{self._keys.of(queue)}:events"
        return int(await self._server.call(key, "XTRIM", key, "MAXLEN", max_length))

    # -- what is kept --------------------------------------------------------------------------------------------------

    async def retire_completed(self, limit: int = RETIRED_AT_ONCE) -> int:
        """Drop completed jobs beyond the kept number or age; how many went.

        Only queues that the slow round came by since the last time are asked, and those where some went then.
        """
        queues, self._unretired = list(self._unretired), set()
        keys = [f"{self._keys.of(queue)}:completed" for queue in queues]
        kept = await self._server.call_each([(key, ("ZCARD", key)) for key in keys])
        gone = 0
        for queue, count in zip(queues, kept, strict=True):
            if not isinstance(count, int):
                continue  # an error: the slow round tells which node is away
            if count > self.max_completed or (count and self.completed_retention_ms is not None):
                retired = await self._retire(queue, count - self.max_completed, limit)
                if retired:
                    self._unretired.add(queue)
                gone += retired
        return gone

    async def _retire(self, queue: str, over: int, limit: int) -> int:
        key = f"{self._keys.of(queue)}:completed"
        doomed: list[bytes] = []
        if over > 0:
            doomed = await self._server.call(key, "ZRANGE", key, 0, min(over, limit) - 1)
        if self.completed_retention_ms is not None:
            horizon = self._clock.now_ms() - self.completed_retention_ms
            doomed += await self._server.call(key, "ZRANGEBYSCORE", key, "-inf", f"({horizon}", "LIMIT", 0, limit)
        ids = [job_id.decode() for job_id in dict.fromkeys(doomed)]
        return len(await self._remove(queue, "completed", ids, is_told=False)) if ids else 0

    # -- storage -------------------------------------------------------------------------------------------------------

    is_degraded = False
    """Every call answers for itself: a server that is away fails the calls made meanwhile."""

    def check_writable(self) -> None:
        """Only the server can tell."""

    def probe(self) -> bool:
        return True

    def storage_status(self) -> StorageHealth:
        """As the last slow round, every second, found it."""
        return self._trouble or StorageHealth(False, None, None)

    def size_bytes(self) -> int:
        return 0

    # What a local backend does between a tick and its reply: here a reply leaves when the server has answered.

    def take_sync(self) -> bool:
        return False

    def sync(self) -> None: ...

    def mend_sync(self) -> None: ...

    def roll_log(self) -> Roll | None:
        return None

    def publish(self, roll: Roll) -> None: ...

    async def compact(self) -> None:
        """Valkey looks after its own memory."""

    async def count_new_queues(self) -> None:
        new = [queue for queue in self._registered if queue not in self._counted]
        for start in range(0, len(new), QUEUES_AT_ONCE):
            part = new[start : start + QUEUES_AT_ONCE]
            with suppress(StorageUnavailable):  # those of a node that is away are counted when it is back
                there = [queue for queue in part if not self._server.is_away(self._keys.meta(queue))]
                await all_of(*map(self._count_jobs, there))

    def total_counts(self) -> Counts:
        """As each queue was last counted."""
        return as_counts([*map(sum, zip(*self._counted.values(), strict=True))])

    def oldest_waiting_ms(self, queue: str) -> float | None:
        return None
