"""Jobs that have ended, a page at a time: by when they ended, which their sets are sorted by.

The number of a job is the millisecond of its end times 4096, plus twelve bits of its id. It stays while the job does:
a page begins where the last one ended, whatever happens in between, and ranges of numbers can be read side by side.
Jobs with the same number are never split between pages, so a page may have a few more than requested. Its cost
depends on its size, not on that of the sets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from msgspec import UNSET, Raw

from headrace.backends.base import JobScan, ResultRow, ScanPage
from headrace.backends.valkey.differences import refuse
from headrace.backends.valkey.flows import Flows
from headrace.backends.valkey.hashes import StoredJob, letter, show_whole

_TIES: Final = 4096
_MAX_BYTES: Final = 8 << 20
_ROW_BYTES: Final = 512
_SLICE: Final = 100


class Place(NamedTuple):
    """Where an ended job is, in the order of numbers."""

    number: int
    queue: str
    id: str


class Reach(NamedTuple):
    """What was found of one set, and up to which number that is all there is."""

    places: list[Place]
    is_whole: bool
    end: int


class Scans(Flows):
    async def scan_jobs(self, wanted: JobScan) -> ScanPage:
        if wanted.states not in (("completed",), ("failed",)):
            refuse("scans of jobs that have not ended")
        return await self._scan(wanted.states[0], wanted, show_whole)

    async def scan_results(self, wanted: JobScan) -> ScanPage:
        return await self._scan("completed", wanted, _result_row)

    async def scan_dlq(self, wanted: JobScan) -> ScanPage:
        return await self._scan("failed", wanted, letter)

    async def _scan(self, state: str, wanted: JobScan, show: Callable[[StoredJob], Any]) -> ScanPage:
        queues = await self._queue_names() if wanted.queue is None else [wanted.queue]
        ends = [await self._end_of(queue, state, at) for queue in queues for at in (0, -1)]
        reaches = [await self._reach(queue, state, wanted) for queue in queues]
        end = min([reach.end for reach in reaches if not reach.is_whole], default=wanted.until)
        places = sorted(place for reach in reaches for place in reach.places if place.number <= end)
        page = places[: _page_length(places, wanted.limit)]
        rows, shown = await self._rows(state, page, show)
        is_last = shown == len(places) and all(reach.is_whole for reach in reaches)
        return ScanPage(rows, None if is_last or not shown else places[shown - 1].number, *_bounds(ends))

    async def _end_of(self, queue: str, state: str, at: int) -> int | None:
        """When the first (0) or the last (-1) of these jobs ended."""
        key = f"{self._keys.of(queue)}:{state}"
        found = await self._server.call(key, "ZRANGE", key, at, at, "WITHSCORES")
        return int(float(found[1])) if found else None

    async def _reach(self, queue: str, state: str, wanted: JobScan) -> Reach:
        """Jobs of one set behind `after`: as many as wanted and one more, and all that ended with the last of them."""
        key = f"{self._keys.of(queue)}:{state}"
        first, last = wanted.after // _TIES, wanted.until // _TIES
        found = await self._ends_between(key, first, first)
        more = await self._ends_between(key, f"({first}", last, "LIMIT", 0, wanted.limit + 1) if last > first else []
        is_whole, end = len(more) <= wanted.limit, wanted.until
        if not is_whole:
            cut = more[-1][1]
            more = [one for one in more if one[1] < cut] + await self._ends_between(key, cut, cut)
            end = min(end, (cut + 1) * _TIES - 1)
        places = [Place(at * _TIES + zlib.crc32(job_id) % _TIES, queue, job_id.decode()) for job_id, at in found + more]
        return Reach([place for place in places if wanted.after < place.number <= end], is_whole, end)

    async def _ends_between(self, key: str, low: str | int, high: int, *options: str | int) -> list[tuple[bytes, int]]:
        flat = await self._server.call(key, "ZRANGEBYSCORE", key, low, high, "WITHSCORES", *options)
        return [(job_id, int(float(score))) for job_id, score in zip(flat[::2], flat[1::2], strict=True)]

    async def _rows(self, state: str, page: list[Place], show: Callable[[StoredJob], Any]) -> tuple[list[Any], int]:
        """The rows of these jobs, as far as they fit one reply, and how many of the places that is."""
        rows, size, at = list[Any](), 0, 0
        while at < len(page) and size < _MAX_BYTES:
            end = _page_length(page, at + _SLICE)
            for job in await self._in_order(page[at:end]):
                if job.state == state:
                    rows.append(show(job))
                    size += len(job.data) + len(job.result or b"") + _ROW_BYTES
            at = end
        return rows, at

    async def _in_order(self, places: list[Place]) -> list[StoredJob]:
        found: dict[tuple[str, str], StoredJob] = {}
        for queue in dict.fromkeys(place.queue for place in places):
            ids = [place.id for place in places if place.queue == queue]
            found |= {(queue, job.id): job for job in await self._read_many(queue, ids)}
        return [found[place.queue, place.id] for place in places if (place.queue, place.id) in found]


def _bounds(ends: list[int | None]) -> tuple[int, int]:
    """The newest and the oldest number that jobs which ended then can have."""
    known = [end for end in ends if end is not None]
    return ((max(known) + 1) * _TIES - 1, min(known) * _TIES - 1) if known else (0, 0)


def _page_length(places: list[Place], length: int) -> int:
    """So many, and those that have the number of the last one."""
    while 0 < length < len(places) and places[length].number == places[length - 1].number:
        length += 1
    return min(length, len(places))


def _result_row(job: StoredJob) -> ResultRow:
    result = UNSET if job.result is None else Raw(job.result)
    return ResultRow(job.shown_id(), job.queue, job.name, float(job.finished or 0), result)
