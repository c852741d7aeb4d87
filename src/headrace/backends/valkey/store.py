"""What all verbs on Valkey are made of: calling a function, processing its news, knowing which queue a job is in.

Rules:
- A verb is one function call; all that is remembered about a job is where it is. Whatever is kept in memory (known
  queues, places of jobs, times of next checks) is a hint that another broker may have made stale.
- Every reply ends with the news of the call (events, queues with jobs to hand out, when to check again): `_call`
  processes it.
- Events are numbered by this broker alone: they record what it did, not what all brokers did.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from headrace.backends.base import DURATION_BUCKETS, QueueFigures, Totals, count_minute
from headrace.backends.collection import Collection
from headrace.backends.valkey.arguments import Text
from headrace.backends.valkey.hashes import StoredJob, read_hash
from headrace.backends.valkey.keys import Keys, mark, mark_of
from headrace.backends.valkey.library import function_of
from headrace.backends.valkey.transport import FunctionMissing, Transport
from headrace.clock import Alarm, Clock
from headrace.errors import NotFound, StorageUnavailable, error_of
from headrace.ids import IdSource
from headrace.model import CronEntry, Event

T = TypeVar("T")

_LEAVING: Final = frozenset(("completed", "failed", "stalled", "released", "delayed", "waiting-children", "removed"))
_MAX_PLACES: Final = 200_000


_decode_news: Final = msgspec.msgpack.Decoder(tuple[list[Event], list[str], float | bool]).decode


def raise_refusal(reply: list[Any]) -> None:
    """Raise what a function refused; its reply is then a mark, the kind and the text."""
    if len(reply) == 3 and reply[0] == b"!":
        raise error_of(reply[1].decode(), reply[2].decode())


class InHand(Struct, gc=False):
    """A plain job that was handed out here, with what is told when it ends."""

    queue: str
    name: str | None
    attempts: int
    started: int
    owner: str | None


class Store(Collection, ABC):
    def __init__(self, transport: Transport, prefix: str, clock: Clock, rng: Callable[[], float]) -> None:
        super().__init__()
        self._server = transport
        self._keys = Keys(prefix)
        self._clock = clock
        self._rng = rng
        self.ids = IdSource(clock)
        self.alarm = Alarm()
        self.broker = f"headrace-{secrets.token_hex(6)}"
        self._serial = 0
        self._registered: set[str] = set()
        """Queues that are in the list of all queues, as far as is known here."""
        self._marks: dict[str, list[str]] = {}
        """Those of them that a mark at the end of a job id stands for."""
        self._unlisted: set[str] = set()
        """Queues that another broker took from the list: the slow round sees whether they have jobs all the same."""
        self._places: dict[str, str] = {}
        """The queues of jobs that were handed out here and have not left these hands, as far as is known."""
        self._flow_homes: dict[str, str] = {}
        self._flow_queues: set[str] = set()
        """Queues that have workflows, as far as is known here."""
        self._holders: dict[str, dict[str, int]] = {}
        """Who counts a job among those it holds: taken off when the job leaves its hands."""
        self._in_hand: dict[str, InHand] = {}
        """Plain jobs that were handed out here and have not ended yet, as far as this broker knows."""
        self._lost: dict[str, set[str]] = {}
        """Tokens and serials of claims whose answers were lost, by queue: if they were carried out, nobody knows."""
        self._dues: dict[str, int] = {}
        self._claimed_at: dict[str, int] = {}
        self._next_registration = 0
        self._event_seq = 0
        self._epoch = 1
        self._watched: dict[str, int] = {}
        self.wants_bodies = False
        self._waiting_until: dict[tuple[str, str], int] = {}
        """Until when other brokers know that somebody waits here, by queue and by what for."""
        self._totals = Totals()
        self._counted: dict[str, list[int]] = {}
        """What `counts` said of each queue when it was last asked, by the slow round at the latest."""
        self._schedules: dict[str, CronEntry] | None = None
        """As they were when all of them were last read, by name."""
        self._webhooks: list[bytes] | None = None
        """As they were last read."""
        self._round: list[str] = []
        self._unretired: set[str] = set()
        """Queues that may have more completed jobs than are kept, as far as is known here."""
        self.events_kept: int | None = None
        """How long event streams are to be, if somebody said so."""
        self._figures: dict[str, QueueFigures] = {"": QueueFigures()}
        self._minutes: dict[tuple[str, str], dict[int, int]] = {}

    # -- calling -------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        verb: str,
        queue: str,
        *args: Text,
        others: Sequence[str] = (),
        is_synced: bool = False,
        now: int | None = None,
    ) -> list[Any]:
        """One function call on one queue: its reply without the news, which is taken in."""
        keys = [self._keys.meta(name) for name in (queue, *others)]
        given = (str(self._clock.now_ms() if now is None else now), *args)
        reply = await self._fcall(verb, keys, given, is_synced=is_synced)
        raise_refusal(reply)
        news = reply.pop()
        if news:
            self._take_news(queue, news)
        return list(reply)

    async def _fcall(self, name: str, keys: Sequence[str], args: Sequence[Text], *, is_synced: bool = False) -> Any:
        function = function_of(name)
        call = self._server.fcall_synced if is_synced else self._server.fcall
        try:
            return await call(function, keys, args)
        except FunctionMissing:
            # Somebody flushed the functions, this is another server than before, or it has those of a newer Headrace,
            # which is an error. Nothing was done yet.
            await self.load_libraries()
            return await call(function, keys, args)

    @abstractmethod
    async def load_libraries(self) -> None: ...

    def _take_news(self, queue: str, blob: bytes) -> None:
        events, ready, due = _decode_news(blob)
        for one in events:
            self._record(one)
        self._ready.update(ready)
        if due is not False:  # of one of them; a sweep that comes early learns when the next one is due
            for name in {queue, *(one.queue for one in events)}:
                self._look_at(name, int(due))

    def _look_at(self, queue: str, wall_ms: int) -> None:
        """Have the queue swept at that wall time."""
        known = self._dues.get(queue)
        if known is None or wall_ms < known:
            self._dues[queue] = wall_ms
        self.alarm.ring_by(wall_ms - self._clock.now_ms() + self._clock.monotonic_ms())

    # -- events --------------------------------------------------------------------------------------------------------

    def _emit(self, word: str, queue: str, ts: int, job: str = "", name: str | None = None) -> Event:
        return self._number(Event(0, ts, word, 0, queue, job, name))

    def _number(self, event: Event) -> Event:
        self._event_seq += 1
        event.seq, event.epoch = self._event_seq, self._epoch
        self._events.append(event)
        return event

    def _told_since(self, seq: int) -> list[Event]:
        """What was told behind this number. Not by place: ticks end while a call is under way, and take events out."""
        return [event for event in self._events if event.seq > seq]

    def _record(self, event: Event) -> None:
        """One event as a function tells it: it has no number yet."""
        self._number(event)
        self._count(event)
        if event.event == "completed":
            event.delay = None
        if event.event in _LEAVING:
            self._let_go(event.job)

    def _let_go(self, job_id: str) -> None:
        self._in_hand.pop(job_id, None)
        self._places.pop(job_id, None)
        holder = self._holders.pop(job_id, None)
        if holder is not None:
            holder.pop(job_id, None)

    def _attach(self, event: Event, body: bytes | None) -> None:
        if body is not None and self._wants_bodies(event.queue):
            self._bodies[event.seq] = body

    def _wants_bodies(self, queue: str) -> bool:
        return self.wants_bodies or bool(self._watched.get(queue))

    def watch(self, queue: str, change: int) -> None:
        """A live subscriber of the queue came (+1) or went (-1)."""
        self._watched[queue] = self._watched.get(queue, 0) + change

    # -- figures -------------------------------------------------------------------------------------------------------

    def _figures_of(self, queue: str) -> QueueFigures:
        figures = self._figures.get(queue)
        if figures is None:
            figures = self._figures[queue] = QueueFigures()
        return figures

    def _forget_figures(self, queue: str) -> None:
        self._figures.pop(queue, None)
        for kind in ("completed", "failed"):
            self._minutes.pop((queue, kind), None)

    def _count(self, event: Event) -> None:
        figures, overall, totals = self._figures_of(event.queue), self._figures[""], self._totals
        if event.event == "pushed":
            totals.pushed += 1
            figures.pushed += 1
        elif event.event == "completed":
            totals.completed += 1
            figures.completed += 1
            self._count_run(figures, event.delay)
            count_minute(self._minutes.setdefault((event.queue, "completed"), {}), event.ts)
        elif event.event == "failed" and event.terminal:
            totals.failed += 1
            figures.count_failure(event.ts)
            count_minute(self._minutes.setdefault((event.queue, "failed"), {}), event.ts)
        elif event.event == "retried":
            figures.retried += 1
            overall.retried += 1
        elif event.event == "duplicated":
            figures.duplicated += 1
            overall.duplicated += 1
        elif event.event == "stalled":
            figures.stalled += 1
            overall.stalled += 1

    def _count_run(self, figures: QueueFigures, ran: int | None) -> None:
        if ran is not None and ran >= 0:
            self._totals.run_ms += ran
            figures.run_ms += ran
            figures.run[min(ran.bit_length(), DURATION_BUCKETS - 1)] += 1

    def _count_wait(self, queue: str, waited: int) -> None:
        figures, waited = self._figures_of(queue), max(0, waited)
        self._totals.pulled += 1
        self._totals.wait_ms += waited
        figures.wait_ms += waited
        figures.wait[min(waited.bit_length(), DURATION_BUCKETS - 1)] += 1

    # -- nodes that are away -------------------------------------------------------------------------------------------

    async def _or_last_seen(self, key: str, read: Callable[[], Awaitable[T]], seen: T | None) -> T:
        """What is read or, while the node of a cluster that has the key is away and others are there, what was last
        seen of it; upkeep calls that node every second, so nobody else need wait for it.

        For lists of what there is: an error would hide the rest, and a gap would look as if these were gone.
        """
        if seen is None or not self._server.is_cluster:
            return await read()
        try:
            if not self._server.is_away(key):
                return await read()
        except StorageUnavailable:
            pass
        await self._server.refresh()  # raises if nobody is there
        return seen

    # -- which queue ---------------------------------------------------------------------------------------------------

    async def _register(self, queue: str) -> None:
        """Enter a queue in the list of all queues, once."""
        if queue not in self._registered:
            await self._server.call(self._keys.queues, "SADD", self._keys.queues, queue)
            self._enter(queue)
            await self._cap_events([queue])

    def _know(self, queues: set[str]) -> None:
        """These are all queues."""
        if queues != self._registered:
            self._registered, self._marks = set(), {}
            for queue in sorted(queues):
                self._enter(queue)

    def _enter(self, queue: str) -> None:
        """One more queue, unless somebody else entered it meanwhile. What is known of the others stays as it is."""
        if queue not in self._registered:
            self._registered.add(queue)
            self._marks.setdefault(mark(queue), []).append(queue)
            self._unretired.add(queue)

    async def _cap_events(self, queues: Sequence[str]) -> None:
        """Note in the meta of queues how many events are kept, for all who write them by our functions."""
        if self.events_kept is None:
            return
        keys = [self._keys.meta(queue) for queue in queues]
        await self._server.call_many([(key, ("HSET", key, "hrEvents", self.events_kept)) for key in keys])

    async def _queue_names(self) -> list[str]:
        """All queues that any broker has entered."""
        before = set(self._registered)
        found = await self._server.call(self._keys.queues, "SMEMBERS", self._keys.queues)
        meanwhile = self._registered - before
        self._know({name.decode() for name in found} | meanwhile)
        self._unlisted |= before - self._registered
        return sorted(self._registered)

    def _remember(self, job_id: str, queue: str) -> None:
        if len(self._places) >= _MAX_PLACES:
            self._places.clear()
        self._places[job_id] = queue

    async def _place(self, job_id: str) -> tuple[str, str] | None:
        """The queue of a job and its id there; None when it cannot be told."""
        queue = await self._marked_queue(job_id) or await self._noted_queue(job_id)
        if queue is not None:
            return queue, job_id
        name, _, own_id = job_id.rpartition(":")
        if name and (own_id.isdigit() or (own_id and await self._exists(name, own_id))):
            return name, own_id
        return None

    async def _held_place(self, job_id: str) -> tuple[str, str] | None:
        """The same for a job that was probably handed out here, which saves the question. Nobody else may rely on that:
        an id that somebody chose may be that of a job in another queue by now."""
        queue = self._places.get(job_id)
        return (queue, job_id) if queue is not None else await self._place(job_id)

    async def _exists(self, queue: str, job_id: str) -> bool:
        return bool(await self._server.call(self._keys.meta(queue), "EXISTS", self._keys.job(queue, job_id)))

    async def _marked_queue(self, job_id: str) -> str | None:
        sign = mark_of(job_id)
        if sign is None:
            return None
        if sign not in self._marks:
            await self._queue_names()
        names = self._marks.get(sign, [])
        if len(names) < 2:
            return names[0] if names else None
        for name in names:
            if await self._exists(name, job_id):
                return name
        return None

    async def _noted_queue(self, job_id: str) -> str | None:
        key = self._keys.lookup(job_id)
        noted = await self._server.call(key, "GET", key)
        return None if noted is None else str(noted.decode())

    async def _locate(self, job_id: str, text: str = "Job not found") -> tuple[str, str]:
        place = await self._place(job_id)
        if place is None:
            raise NotFound(text)
        return place

    async def _read(self, queue: str, job_id: str) -> StoredJob | None:
        key = self._keys.job(queue, job_id)
        return read_hash(queue, await self._server.call(key, "HGETALL", key))

    async def _read_many(self, queue: str, ids: Sequence[str]) -> list[StoredJob]:
        """Those of the jobs that are there, in the order of the ids."""
        found: list[StoredJob] = []
        for start in range(0, len(ids), 500):
            keys = [self._keys.job(queue, job_id) for job_id in ids[start : start + 500]]
            replies = await self._server.call_many([(key, ("HGETALL", key)) for key in keys])
            found += [job for reply in replies if (job := read_hash(queue, reply)) is not None]
        return found

    async def _find(self, job_id: str) -> StoredJob | None:
        place = await self._place(job_id)
        return None if place is None else await self._read(*place)

    async def _get(self, job_id: str, text: str = "Job not found") -> StoredJob:
        job = await self._find(job_id)
        if job is None:
            raise NotFound(text)
        return job
