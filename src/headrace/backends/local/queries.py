"""What clients ask: jobs, states, counts, children, dead letters, figures; and how ended jobs are run again."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from headrace.backends.base import (
    Counts,
    DeadLetter,
    DlqStats,
    Failure,
    JobScan,
    MinuteMetrics,
    Outcome,
    QueueFigures,
    QueueSummary,
    ResultRow,
    ScanPage,
    SearchPage,
    Totals,
)
from headrace.backends.listing import REPLY_ROOM, TOO_MANY_JOBS, TOO_MANY_LETTERS
from headrace.backends.local.control import Control
from headrace.backends.local.eventlog import Log
from headrace.backends.local.index import Queue
from headrace.backends.local.job import Job
from headrace.backends.local.journal import LARGE_BYTES
from headrace.backends.local.search import Needle
from headrace.errors import NotFound, ReplyTooLarge
from headrace.model import DlqFilter, EventName
from headrace.states import WORDS, State

_BY_WORD: Final[dict[str, State]] = {word: state for state, word in WORDS.items() if state is not State.REMOVED}
_SORTED_AT_MOST: Final = 5_000
"""Up to so many jobs are sorted for a page; in longer queues jobs are taken in the order of their arrival."""
_SEARCHED_JOBS: Final = 50_000
_SEARCHED_BYTES: Final = 64 * 1024 * 1024
_SCAN_WINDOW: Final = 2048
"""Rows that are looked at before others have their turn."""
_SCAN_BYTES: Final = 8 << 20
_ROW_BYTES: Final = 512


class Queries(Control):
    _log: Log

    # -- one job -------------------------------------------------------------------------------------------------------

    async def job(self, job_id: str, brief: bool = False) -> Raw:
        job = self._get(job_id)
        return self._show_brief(job) if brief else self._show_whole(job)

    async def job_by_custom_id(self, custom_id: str, queue: str | None = None) -> Raw:
        job = self._find(custom_id) if queue is None else None
        if job is None or job.links is None or job.links.custom_id != custom_id:
            queues = self._queues.values() if queue is None else filter(None, [self._queues.get(queue)])
            job = next((q.custom_ids[custom_id] for q in queues if custom_id in q.custom_ids), None)
        if job is None:
            raise NotFound("Job not found")
        return self._show_whole(job)

    async def state(self, job_id: str) -> str:
        job = self._find(job_id)
        return "unknown" if job is None else job.state.word

    async def result(self, job_id: str) -> bytes | None:
        job = self._find(job_id)
        return None if job is None else self._result(job)

    async def outcome(self, job_id: str) -> Outcome:
        job = self._get(job_id)
        return Outcome(job.state.word, self._result(job), self._failed_reason(job))

    # -- lists and counts ----------------------------------------------------------------------------------------------

    async def jobs(
        self, queue: str, states: Sequence[str] | None, offset: int, limit: int, asc: bool, brief: bool = False
    ) -> list[Raw]:
        q = self._queues.get(queue)
        if q is None or limit <= 0:
            return []
        show, shown, size = self._show_brief if brief else self._show_whole, [], 0
        self._slices.begin()
        for job in self._page(q, states, offset, limit, asc):
            if not await self._is_at_hand(job):
                continue
            raw = show(job)
            size += len(raw)
            if size > REPLY_ROOM:
                raise ReplyTooLarge(TOO_MANY_JOBS)
            shown.append(raw)
        return shown

    async def _is_at_hand(self, job: Job) -> bool:
        """Give way before a large payload is read from disk for a list; False if the job was removed meanwhile."""
        if job.size > LARGE_BYTES:
            await self._slices.breathe()
        return job.state is not State.REMOVED

    def _page(self, q: Queue, states: Sequence[str] | None, offset: int, limit: int, asc: bool) -> list[Job]:
        wanted = list(WORDS.values()) if states is None else states
        if asc and _states_of(wanted) == {State.WAITING} and q.ready.is_by_age:
            return list(itertools.islice(q.ready.live(), offset, offset + limit))
        if self._total(q, wanted) > _SORTED_AT_MOST:
            page = self._page_by_arrival(q, wanted, offset, limit, asc)
            if page is not None:
                return page
        pick = heapq.nsmallest if asc else heapq.nlargest
        return pick(offset + limit, self._members(q, wanted), key=lambda job: (job.created, job.seq))[offset:]

    @staticmethod
    def _total(q: Queue, words: Sequence[str]) -> int:
        states = _states_of(words)
        counts = q.counts
        total = sum(counts[state] for state in states)
        return total + q.prioritized if _adds_prioritized(words, states) else total

    def _page_by_arrival(self, q: Queue, words: Sequence[str], offset: int, limit: int, asc: bool) -> list[Job] | None:
        """The page, found by walking over all jobs from one end; None when those of this queue are far from it."""
        is_wanted, total, last = _chooser(words), self._total(q, words), offset + limit
        end = self._jobs.values() if asc else reversed(self._jobs.values())
        # Sorting costs a job about as much as passing by five.
        walk = itertools.islice(end, 5 * total)
        found = list(itertools.islice((job for job in walk if job.queue is q and is_wanted(job)), last))
        return found[offset:] if len(found) in (last, total) else None

    async def search(
        self, queue: str, text: str, states: Sequence[str] | None, limit: int, before: int | None, brief: bool = False
    ) -> SearchPage:
        q = self._queues.get(queue)
        if q is None:
            return SearchPage([], 0, None)
        is_wanted = _chooser(list(WORDS.values()) if states is None else states)
        show = self._show_brief if brief else self._show_whole
        found: list[Raw] = []
        needle, examined, size, room = Needle(text), 0, 0, REPLY_ROOM
        self._slices.begin()
        for n, job in enumerate(reversed(list(self._jobs.values()))):
            if n & 63 == 63 or job.size > LARGE_BYTES:
                await self._slices.breathe()
            if job.queue is not q or not is_wanted(job) or (before is not None and job.seq >= before):
                continue
            examined += 1
            size += job.size
            if needle.is_in_head(job, self._failed_reason(job)) or needle.is_in_data(self._data(job)):
                raw = show(job)
                room -= len(raw)
                if room < 0:  # results are large, too
                    return SearchPage(found, examined - 1, job.seq + 1)
                found.append(raw)
            if len(found) == limit or examined == _SEARCHED_JOBS or size > _SEARCHED_BYTES:
                return SearchPage(found, examined, job.seq)
        return SearchPage(found, examined, None)

    @staticmethod
    def _members(q: Queue, words: Sequence[str]) -> Iterator[Job]:
        states = _states_of(words)
        for state in states:
            yield from q.jobs_in(state)
        if _adds_prioritized(words, states):
            yield from (job for job in q.jobs_in(State.WAITING) if job.priority > 0)

    async def scan_jobs(self, wanted: JobScan) -> ScanPage:
        """Whole jobs in push order, a page at a time. *Sliced.*"""
        return await self._scan(wanted, self._show_whole)

    async def scan_results(self, wanted: JobScan) -> ScanPage:
        """What completed jobs returned, in push order of the jobs. *Sliced.*"""
        return await self._scan(msgspec.structs.replace(wanted, states=("completed",)), self._result_row)

    async def scan_dlq(self, wanted: JobScan) -> ScanPage:
        """Dead letters with their history, in push order of the jobs. *Sliced.*"""
        return await self._scan(msgspec.structs.replace(wanted, states=("failed",)), self._letter)

    async def _scan(self, wanted: JobScan, show: Callable[[Job], Any]) -> ScanPage:
        """Pages are found by the job's number, so jobs that move between two pages are neither skipped nor repeated."""
        self._slices.begin()
        states = {_BY_WORD[word] for word in wanted.states or WORDS.values() if word in _BY_WORD}
        after, end = wanted.after, min(wanted.until, self._job_seq)
        shown: list[Any] = []
        size = 0
        for seqs in self._scan_windows(wanted.queue, after, end):
            for seq, job_id in seqs:
                job = self._find(job_id)
                after = seq
                if job is None or job.seq != seq or job.state not in states:
                    continue
                shown.append(show(job))
                size += job.size + len(job.result or b"") + _ROW_BYTES
                if len(shown) >= wanted.limit or size > _SCAN_BYTES:
                    return ScanPage(shown, after if after < end else None, self._job_seq)
            await self._slices.breathe()
        return ScanPage(shown, None, self._job_seq)

    def _scan_windows(self, queue: str | None, after: int, end: int) -> Iterator[list[tuple[int, str]]]:
        if not self._journal.keeps_jobs:
            kept = [
                (j.seq, j.id) for j in self._jobs.values() if after < j.seq <= end and queue in (None, j.queue.name)
            ]
            yield sorted(kept)
            return
        for start in range(after, end, _SCAN_WINDOW):
            yield self._journal.numbered(queue, start, min(start + _SCAN_WINDOW, end))

    def _result_row(self, job: Job) -> ResultRow:
        result = self._result(job)
        return ResultRow(
            job.id, job.queue.name, job.name, float(job.finished or 0), UNSET if result is None else Raw(result)
        )

    async def counts(self, queue: str) -> Counts:
        self._promote_due(self._clock.now_ms())
        q = self._queues.get(queue)
        return Counts() if q is None else self._counts(q)

    @staticmethod
    def _counts(q: Queue) -> Counts:
        return _as_counts(q.counts, q.prioritized)

    async def counts_per_priority(self, queue: str) -> dict[str, int]:
        q = self._queues.get(queue)
        counts: dict[str, int] = {}
        if q is not None:
            for job in itertools.chain(q.ready.live(), q.delayed.values()):
                key = str(job.priority)
                counts[key] = counts.get(key, 0) + 1
        return counts

    async def queues(self) -> list[QueueSummary]:
        self._promote_due(self._clock.now_ms())
        return [self._summary(q) for q in self._queues.values()]

    def _summary(self, q: Queue) -> QueueSummary:
        failed_today = q.figures.failed_today(self._clock.now_ms())
        return QueueSummary(q.name, self._counts(q), q.config.paused, q.config.concurrency, failed_today)

    # -- children ------------------------------------------------------------------------------------------------------

    async def children_values(self, job_id: str) -> dict[str, Raw]:
        job = self._find(job_id)
        children = job.links.children_ids if job is not None and job.links is not None else []
        values = {}
        for child in filter(None, map(self._find, children)):
            result = self._result(child) if child.state is State.COMPLETED else None
            if result is not None:
                values[f"{child.queue.name}:{child.id}"] = Raw(result)
        return values

    async def children_failures(self, job_id: str, *, ignored: bool) -> dict[str, str]:
        job = self._find(job_id)
        if job is None or job.history is None:
            return {}
        return job.history.ignored_children if ignored else job.history.failed_children

    # -- dead letters --------------------------------------------------------------------------------------------------

    async def dead_letters(
        self, queue: str, wanted: DlqFilter, count: int | None, brief: bool = False
    ) -> list[DeadLetter]:
        shown, size = [], 0
        self._slices.begin()
        for job in self._chosen_letters(queue, wanted, count):
            if not await self._is_at_hand(job) or job.state is not State.FAILED:
                continue
            letter = self._letter(job, brief)
            size += 2 * len(letter.job)
            if size > REPLY_ROOM:
                raise ReplyTooLarge(TOO_MANY_LETTERS)
            shown.append(letter)
        return shown

    def _chosen_letters(self, queue: str, wanted: DlqFilter, count: int | None) -> list[Job]:
        q = self._queues.get(queue)
        if q is None:
            return []
        now = self._clock.now_ms()
        matching = (job for job in list(q.failed.values()) if _matches(job, wanted, now))
        start = wanted.offset or 0
        limits = [n for n in (count, wanted.limit) if n is not None]
        return list(itertools.islice(matching, start, start + min(limits) if limits else None))

    def _letter(self, job: Job, brief: bool = False) -> DeadLetter:
        assert job.history is not None
        assert job.history.burial is not None
        shown = self._show_brief(job) if brief else self._show(job)
        return DeadLetter.of(shown, job.history.burial, [] if brief else list(job.history.failures))

    async def retry_dlq(self, queue: str, job_id: str | None, count: int | None, wanted: DlqFilter | None) -> int:
        q = self._queues.get(queue)
        if q is None:
            return 0
        if job_id is not None:
            chosen = [job for job in (self._find(job_id),) if job is not None and job.seq in q.failed]
        else:
            chosen = self._chosen_letters(queue, wanted or DlqFilter(), count)
        return await self._for_each(chosen, (State.FAILED,), self._revive_dead_letter)

    async def purge_dlq(self, queue: str) -> int:
        q = self._queues.get(queue)
        if q is None:
            return 0
        return await self._for_each(list(q.failed.values()), (State.FAILED,), self._drop_letter)

    async def remove_dead_letter(self, queue: str, job_id: str) -> bool:
        job = self._find(job_id)
        if job is None or job.state is not State.FAILED or job.queue.name != queue:
            return False
        return self._drop_letter(job, self._clock.now_ms())

    async def dlq_stats(self, queue: str) -> DlqStats:
        q = self._queues.get(queue)
        letters = [job.history.burial for job in q.failed.values() if job.history and job.history.burial] if q else []
        return DlqStats.of(queue, letters, self._clock.now_ms())

    async def retry_completed(self, queue: str, job_id: str | None, count: int | None, before_ms: float | None) -> int:
        q = self._queues.get(queue)
        if q is None:
            return 0
        if job_id is not None:
            chosen = [job for job in (self._find(job_id),) if job is not None and job.seq in q.completed]
        else:
            kept = (j for j in q.completed.values() if before_ms is None or (j.finished or 0) <= before_ms)
            chosen = list(itertools.islice(kept, count))
        return await self._for_each(chosen, (State.COMPLETED,), self._revive_completed)

    def _revive_completed(self, job: Job, now: int) -> bool:
        """False when the job's key belongs to another job by now."""
        if self._has_key_rival(job, now):
            return False
        if job.history is not None:
            job.history.progress = 0
        self._revive(job, now)
        self._emit(EventName.WAITING, job, now).prev = State.COMPLETED.word
        return True

    # -- figures -------------------------------------------------------------------------------------------------------

    def totals(self) -> Totals:
        return self._totals

    def queue_figures(self) -> dict[str, QueueFigures]:
        figures = {name: q.figures for name, q in self._queues.items()}
        figures[""] = self._overall
        return figures

    async def count_new_queues(self) -> None:
        """Every change is counted as it is made."""

    def total_counts(self) -> Counts:
        self._promote_due(self._clock.now_ms())
        queues = self._queues.values()
        totals = [sum(column) for column in zip(*(q.counts for q in queues), strict=True)]
        return _as_counts(totals, sum(q.prioritized for q in queues)) if totals else Counts()

    def oldest_waiting_ms(self, queue: str) -> float | None:
        q = self._queues.get(queue)
        oldest = q.ready.oldest() if q is not None and q.waiting else None
        return None if oldest is None else float(max(0, self._clock.now_ms() - oldest.run_at))

    async def latest_failures(self, queue: str | None, limit: int) -> tuple[list[Failure], int]:
        queues = self._queues.values() if queue is None else filter(None, [self._queues.get(queue)])
        holding = [q for q in queues if q.failed]
        # Within a queue dead letters stand in the order of their burial; after a restart only nearly so.
        newest = [reversed(q.failed.values()) for q in holding]
        jobs = itertools.islice(heapq.merge(*newest, key=_burial_order), limit)
        return [_failure(job) for job in sorted(jobs, key=_burial_order)], sum(len(q.failed) for q in holding)

    def log_position(self) -> tuple[int, int]:
        return self._log.first_seq, self._log.committed

    def minute_metrics(self, queue: str, kind: str) -> MinuteMetrics:
        q = self._queues.get(queue)
        return MinuteMetrics.of(q.minutes[kind] if q is not None else {}, self._clock.now_ms())


def _states_of(words: Sequence[str]) -> set[State]:
    return {State.WAITING if word == "wait" else _BY_WORD[word] for word in words if word in _BY_WORD or word == "wait"}


def _adds_prioritized(words: Sequence[str], states: set[State]) -> bool:
    return "prioritized" in words and State.WAITING not in states


def _chooser(words: Sequence[str]) -> Callable[[Job], bool]:
    """A test for the jobs that these words mean."""
    states = _states_of(words)
    if _adds_prioritized(words, states):
        return lambda job: job.state in states or (job.state is State.WAITING and job.priority > 0)
    return lambda job: job.state in states


def _as_counts(n: list[int], prioritized: int) -> Counts:
    return Counts(
        waiting=n[State.WAITING],
        delayed=n[State.DELAYED],
        active=n[State.ACTIVE],
        completed=n[State.COMPLETED],
        failed=n[State.FAILED],
        waiting_children=n[State.WAITING_CHILDREN],
        prioritized=prioritized,
    )


def _burial_order(job: Job) -> int:
    return -(job.finished or 0)


def _failure(job: Job) -> Failure:
    burial = job.history.burial if job.history is not None else None
    error = burial.error if burial is not None else None
    return Failure(job.id, job.queue.name, float(job.finished or 0), error)


def _matches(job: Job, wanted: DlqFilter, now: int) -> bool:
    burial = job.history.burial if job.history is not None else None
    return burial is not None and wanted.matches(burial, now)
