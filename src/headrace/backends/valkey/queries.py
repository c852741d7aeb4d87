"""What clients ask: jobs, states, counts, children, dead letters, figures; and how ended jobs are run again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from headrace.backends.base import (
    Counts,
    DeadLetter,
    DlqStats,
    Failure,
    MinuteMetrics,
    Outcome,
    QueueFigures,
    QueueSummary,
    Totals,
)
from headrace.backends.listing import REPLY_ROOM, TOO_MANY_JOBS, TOO_MANY_LETTERS
from headrace.backends.valkey.control import STATES, Control
from headrace.backends.valkey.hashes import (
    Buried,
    Sketch,
    StoredJob,
    burial_of,
    letter,
    read_sketch,
    show_brief,
    show_whole,
)
from headrace.backends.valkey.transport import all_of
from headrace.errors import NotFound, ReplyTooLarge
from headrace.model import DlqFilter

T = TypeVar("T")

_ENTRIES_AT_ONCE: Final = 5000
_JOBS_AT_ONCE: Final = 100
"""Each may carry a megabyte, and its result another."""
_KEYS_AT_ONCE: Final = 1000
QUEUES_AT_ONCE: Final = 100
_SKETCHED_AT_ONCE: Final = 500
_RANK_LENGTH: Final = 60


class Queries(Control):
    # -- one job -------------------------------------------------------------------------------------------------------

    async def job(self, job_id: str, brief: bool = False) -> Raw:
        job = await self._get(job_id)
        return show_brief(job) if brief else show_whole(job)

    async def job_by_custom_id(self, custom_id: str, queue: str | None = None) -> Raw:
        job = await self._find(custom_id) if queue is None else None
        if job is None or job.links is None or job.links.custom_id != custom_id:
            job = await self._by_custom_id(custom_id, await self._queue_names() if queue is None else [queue])
        if job is None:
            raise NotFound("Job not found")
        return show_whole(job)

    async def _by_custom_id(self, custom_id: str, names: list[str]) -> StoredJob | None:
        keys = [f"{self._keys.of(name)}:hr:ids" for name in names]
        found = await self._server.call_many([(key, ("HGET", key, custom_id)) for key in keys])
        for name, job_id in zip(names, found, strict=True):
            if job_id is not None:
                return await self._read(name, job_id.decode())
        return None

    async def state(self, job_id: str) -> str:
        job = await self._find(job_id)
        return "unknown" if job is None else job.state

    async def result(self, job_id: str) -> bytes | None:
        job = await self._find(job_id)
        return None if job is None else job.result

    async def outcome(self, job_id: str) -> Outcome:
        job = await self._get(job_id)
        return Outcome(job.state, job.result, job.failed_reason)

    # -- lists and counts ----------------------------------------------------------------------------------------------

    async def _ids_in(self, queue: str, state: str) -> list[str]:
        p, meta = self._keys.of(queue), self._keys.meta(queue)
        if state == "waiting":
            return await self._waiting_ids(queue)
        if state == "active":
            return await self._active_ids(queue)
        if state == "delayed":
            asked = [(meta, ("ZRANGE", f"{p}:scheduled", 0, -1)), (meta, ("ZRANGE", f"{p}:hr:delayed", 0, -1))]
            both = await self._server.call_many(asked)
            return [job_id.decode() for job_id in itertools.chain(*both)]
        if state == "waiting-children":
            return [job_id.decode() for job_id in await self._server.call(meta, "SMEMBERS", f"{p}:hr:blocked")]
        return [job_id.decode() for job_id in await self._server.call(meta, "ZRANGE", f"{p}:{state}", 0, -1)]

    async def _waiting_ids(self, queue: str) -> list[str]:
        p, meta = self._keys.of(queue), self._keys.meta(queue)
        ready, lifo, priority, scheduled = await self._server.call_many(
            [
                (meta, ("ZRANGE", f"{p}:hr:ready", 0, -1)),
                (meta, ("LRANGE", f"{p}:lifo", 0, -1)),
                (meta, ("LRANGE", f"{p}:priority", 0, -1)),
                (meta, ("ZRANGEBYSCORE", f"{p}:scheduled", 2**42, "+inf")),
            ]
        )
        listed = [job_id.decode() for job_id in (*lifo, *priority, *scheduled, *await self._parked_ids(queue))]
        return [*(member[_RANK_LENGTH:].decode() for member in ready), *listed, *await self._streamed_ids(queue)]

    async def _parked_ids(self, queue: str) -> list[bytes]:
        """Those that wait for the turn of their ordering key, whoever parked them."""
        key, ids, cursor = f"{self._keys.of(queue)}:ordering", list[bytes](), b""
        while cursor != b"0":
            cursor, found = await self._server.call(key, "HSCAN", key, cursor or b"0", "COUNT", _KEYS_AT_ONCE)
            groups = [f"{self._keys.of(queue)}:groupq:{name.decode()}" for name in found[::2]]
            for parked in await self._server.call_many([(group, ("ZRANGE", group, 0, -1)) for group in groups]):
                ids += parked
        return ids

    async def _active_ids(self, queue: str) -> list[str]:
        key = f"{self._keys.of(queue)}:hr:active"
        active = await self._server.call(key, "ZRANGE", key, 0, -1)
        return list(dict.fromkeys([*(job_id.decode() for job_id in active), *await self._streamed_ids(queue)]))

    async def _streamed_ids(self, queue: str) -> list[str]:
        """Those in the stream, which wait or are being worked on. It may be very long, so it is read in parts."""
        key, after, ids = f"{self._keys.of(queue)}:stream", "-", list[str]()
        while True:
            entries = await self._server.call(key, "XRANGE", key, after, "+", "COUNT", _ENTRIES_AT_ONCE)
            ids += map(_job_of, entries)
            if len(entries) < _ENTRIES_AT_ONCE:
                return ids
            after = f"({entries[-1][0].decode()}"

    async def _sketches(self, queue: str, states: Sequence[str]) -> list[Sketch]:
        known: dict[str, None] = {}
        for state in states:
            known.update(dict.fromkeys(await self._ids_in(queue, state)))
        ids, found = list(known), list[Sketch]()
        for start in range(0, len(ids), _SKETCHED_AT_ONCE):
            part = ids[start : start + _SKETCHED_AT_ONCE]
            (rows,) = await self._call("sketch", queue, *part)
            sketches = map(read_sketch, part, rows)
            found += [job for job in sketches if job is not None and job.state in states]
        return found

    async def _show_all(
        self,
        queue: str,
        states: dict[str, str],
        show: Callable[[StoredJob], T],
        size_of: Callable[[T], int],
        too_large: str,
    ) -> list[T]:
        """The jobs of these ids, but for those that are gone or in another state by now."""
        ids, shown, size = list(states), list[T](), 0
        for start in range(0, len(ids), _JOBS_AT_ONCE):
            for job in await self._read_many(queue, ids[start : start + _JOBS_AT_ONCE]):
                if job.state == states.get(job.id):
                    shown.append(show(job))
                    size += size_of(shown[-1])
                    if size > REPLY_ROOM:
                        raise ReplyTooLarge(too_large)
        return shown

    async def jobs(
        self, queue: str, states: Sequence[str] | None, offset: int, limit: int, asc: bool, brief: bool = False
    ) -> list[Raw]:
        if limit <= 0:
            return []
        chosen = await self._chosen(queue, STATES if states is None else states)
        page = sorted(chosen, key=lambda job: job.order, reverse=not asc)[offset : offset + limit]
        states_of = {job.id: job.state for job in page}
        return await self._show_all(queue, states_of, show_brief if brief else show_whole, len, TOO_MANY_JOBS)

    async def _chosen(self, queue: str, words: Sequence[str]) -> list[Sketch]:
        states = {word for word in words if word in STATES}
        if "wait" in words:
            states.add("waiting")
        only_prioritized = "prioritized" in words and "waiting" not in states
        jobs = await self._sketches(queue, sorted(states | ({"waiting"} if only_prioritized else set())))
        return [job for job in jobs if not (only_prioritized and job.state == "waiting" and job.priority <= 0)]

    async def counts(self, queue: str) -> Counts:
        return as_counts(await self._count_jobs(queue))

    async def counts_per_priority(self, queue: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for job in await self._sketches(queue, ["waiting", "delayed"]):
            counts[str(job.priority)] = counts.get(str(job.priority), 0) + 1
        return counts

    async def queues(self) -> list[QueueSummary]:
        names = await self._or_last_seen(self._keys.queues, self._queue_names, sorted(self._registered))
        found: list[QueueSummary] = []
        for start in range(0, len(names), QUEUES_AT_ONCE):
            found += await all_of(*map(self._summary, names[start : start + QUEUES_AT_ONCE]))
        return found

    async def _summary(self, name: str) -> QueueSummary:
        count, seen = partial(self._count_jobs, name), self._counted.get(name)
        found = await self._or_last_seen(self._keys.meta(name), count, seen)
        failed_today = self._figures_of(name).failed_today(self._clock.now_ms())
        concurrency = None if found[8] < 0 else int(found[8])
        return QueueSummary(name, as_counts(found), bool(found[7]), concurrency, failed_today)

    # -- children ------------------------------------------------------------------------------------------------------

    async def children_values(self, job_id: str) -> dict[str, Raw]:
        parent = await self._find(job_id)
        values: dict[str, Raw] = {}
        for child_id in parent.links.children_ids if parent is not None and parent.links is not None else []:
            child = await self._find(child_id)
            if child is not None and child.result is not None:
                values[f"{child.queue}:{child.id}"] = Raw(child.result)
        return values

    async def children_failures(self, job_id: str, *, ignored: bool) -> dict[str, str]:
        job = await self._find(job_id)
        if job is None or job.past is None:
            return {}
        return job.past.ignored_children if ignored else job.past.failed_children

    # -- dead letters --------------------------------------------------------------------------------------------------

    async def dead_letters(
        self, queue: str, wanted: DlqFilter, count: int | None, brief: bool = False
    ) -> list[DeadLetter]:
        states = dict.fromkeys(await self._chosen_letters(queue, wanted, count), "failed")
        show = partial(letter, is_brief=brief)
        return await self._show_all(queue, states, show, lambda one: 2 * len(one.job), TOO_MANY_LETTERS)

    async def _letters(self, queue: str) -> list[tuple[str, Buried]]:
        """All dead letters: their ids, and what is noted of their burials."""
        ids = await self._ids_in(queue, "failed")
        found: list[tuple[str, Buried]] = []
        for start in range(0, len(ids), _JOBS_AT_ONCE):
            jobs = await self._read_many(queue, ids[start : start + _JOBS_AT_ONCE])
            found += [(job.id, burial_of(job)) for job in jobs if job.state == "failed"]
        return found

    async def _chosen_letters(self, queue: str, wanted: DlqFilter, count: int | None) -> list[str]:
        start = wanted.offset or 0
        limits = [n for n in (count, wanted.limit) if n is not None]
        end = start + min(limits) if limits else None
        if msgspec.structs.replace(wanted, offset=None, limit=None) == DlqFilter():
            key = f"{self._keys.of(queue)}:failed"
            ids = await self._server.call(key, "ZRANGE", key, start, -1 if end is None else end - 1) if end != 0 else []
            return [job_id.decode() for job_id in ids]
        now = self._clock.now_ms()
        return [job_id for job_id, burial in await self._letters(queue) if wanted.matches(burial, now)][start:end]

    async def retry_dlq(self, queue: str, job_id: str | None, count: int | None, wanted: DlqFilter | None) -> int:
        if job_id is not None:
            place = await self._place(job_id)
            return await self._revive(queue, "failed", [place[1]]) if place is not None and place[0] == queue else 0
        chosen = await self._chosen_letters(queue, wanted or DlqFilter(), count)
        return await self._revive(queue, "failed", chosen)

    async def purge_dlq(self, queue: str) -> int:
        ids = await self._ids_in(queue, "failed")
        return len(await self._remove(queue, "failed", ids, is_told=True))

    async def remove_dead_letter(self, queue: str, job_id: str) -> bool:
        place = await self._place(job_id)
        if place is None or place[0] != queue:
            return False
        return bool(await self._remove(queue, "failed", [place[1]], is_told=True))

    async def dlq_stats(self, queue: str) -> DlqStats:
        letters = [burial for _, burial in await self._letters(queue)]
        return DlqStats.of(queue, letters, self._clock.now_ms())

    async def retry_completed(self, queue: str, job_id: str | None, count: int | None, before_ms: float | None) -> int:
        if job_id is not None:
            place = await self._place(job_id)
            return await self._revive(queue, "completed", [place[1]]) if place is not None and place[0] == queue else 0
        key, most = f"{self._keys.of(queue)}:completed", "+inf" if before_ms is None else str(int(before_ms))
        ids = await self._server.call(key, "ZRANGEBYSCORE", key, "-inf", most)
        return await self._revive(queue, "completed", [job_id.decode() for job_id in ids][:count])

    async def latest_failures(self, queue: str | None, limit: int) -> tuple[list[Failure], int]:
        newest: list[StoredJob] = []
        total = 0
        for name in await self._queue_names() if queue is None else [queue]:
            key = f"{self._keys.of(name)}:failed"
            ids, count = await self._server.call_many(
                [(key, ("ZREVRANGE", key, 0, max(0, limit - 1))), (key, ("ZCARD", key))]
            )
            newest += await self._read_many(name, [job_id.decode() for job_id in ids])
            total += count
        newest.sort(key=lambda job: -(job.finished or 0))
        shown = [Failure(job.shown_id(), job.queue, float(job.finished or 0), job.failed_reason) for job in newest]
        return shown[:limit], total

    # -- figures -------------------------------------------------------------------------------------------------------

    def totals(self) -> Totals:
        self._take_nearby()
        return self._totals

    def queue_figures(self) -> dict[str, QueueFigures]:
        self._take_nearby()
        return self._figures

    def minute_metrics(self, queue: str, kind: str) -> MinuteMetrics:
        return MinuteMetrics.of(self._minutes.get((queue, kind), {}), self._clock.now_ms())


def _job_of(entry: Any) -> str:
    fields = entry[1]
    return str(fields[fields.index(b"jobId") + 1].decode())


def as_counts(counted: Sequence[int]) -> Counts:
    """Of what the function `counts` says, which has more behind them."""
    return Counts(*counted[: len(Counts.__struct_fields__)])
