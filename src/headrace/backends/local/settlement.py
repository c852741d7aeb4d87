"""How jobs end: complete, fail, retry, bury, and what that means for parents, keys and successors.

`_check_lease` validates tokens, including those of expired leases; everything after it may assume that the caller
holds the job. A batch is checked as a whole before any of it is applied.
"""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from headrace.backends.base import Ack, count_minute
from headrace.backends.local.index import Queue
from headrace.backends.local.intake import Intake
from headrace.backends.local.job import Ended, History, Job
from headrace.backends.local.store import MAX_DEPARTED, MAX_SATISFIED
from headrace.backoff import retry_delay_ms
from headrace.errors import HeadraceError, LeaseLost, NotFound, StorageUnavailable
from headrace.model import (
    DEFAULT_SETTINGS,
    AttemptRecord,
    Backoff,
    Burial,
    DeadLetterReason,
    DlqConfig,
    Event,
    EventName,
    JobLinks,
    TimelineEntry,
)
from headrace.states import State, Verb, advance

_MAX_FAILURES: Final = 100
_TIDY_AFTER: Final = 1024
_EVICTION_PART: Final = 64
"""Completed jobs are evicted once they exceed the limit by this fraction (1/64)..."""
_MAX_EVICTION: Final = 2048
"""...and never more than this at once: it happens within an ACK."""
_COMPLETED: Final = State.COMPLETED
_GONE: Final = advance(State.COMPLETED, Verb.REMOVE)
_DEFAULT_DLQ: Final = DlqConfig()


def wrong_token(job_id: str, token: str | None) -> LeaseLost:
    if token:
        return LeaseLost(f"Invalid or expired lock token for job {job_id}")
    return LeaseLost(f"Lock token required for job {job_id}")


class Settlement(Intake):
    max_completed = 50_000
    _limited_until: set[str]
    """Queues whose rate limit ends by itself."""

    # -- completing ----------------------------------------------------------------------------------------------------

    async def complete(self, acks: Sequence[Ack]) -> list[int]:
        if len(acks) == 1:
            ack = acks[0]
            only = self._check_lease(ack.id, ack.token, late_allowed=True)
            if only is None:
                return [0]
            now = self._clock.now_ms()
            if not self._complete_plain(only, ack, now):
                self._complete(only, ack, now)
            self._evict_completed()
            self._count_alike(only.queue, only.started, 1, now)
            return []
        jobs: list[Job | None] = []
        seen: set[str] = set()
        for ack in acks:
            job = self._check_lease(ack.id, ack.token, late_allowed=True)
            if job is not None and ack.id in seen:
                raise NotFound(f"Job not found or not in processing state: {ack.id}")
            seen.add(ack.id)
            jobs.append(job)
        now = self._clock.now_ms()
        ignored = []
        done: list[Job] = []
        for i, (ack, job) in enumerate(zip(acks, jobs, strict=True)):
            if job is None:
                ignored.append(i)
                continue
            if not self._complete_plain(job, ack, now):
                self._complete(job, ack, now)
            done.append(job)
        self._count_completed(done, now)
        return ignored

    async def complete_each(self, acks: Sequence[Ack]) -> list[bool | HeadraceError]:
        now = self._clock.now_ms()
        outcomes: list[bool | HeadraceError] = []
        done: list[Job] = []
        for ack in acks:
            job = self._jobs.get(ack.id)
            if job is not None and self._complete_plain(job, ack, now):
                done.append(job)
                outcomes.append(True)
                continue
            try:
                job = self._check_lease(ack.id, ack.token, late_allowed=True)
            except HeadraceError as error:
                outcomes.append(error)
                continue
            if job is not None:
                self._complete(job, ack, now)
                done.append(job)
            outcomes.append(job is not None)
        self._count_completed(done, now)
        return outcomes

    def _complete_plain(self, job: Job, ack: Ack, now: int) -> bool:
        """`_check_lease` and `_complete` for a job with nothing but defaults; False when it is no such job.

        With the claim this is the hottest transition, so `_move` is spelled out: a lease means ACTIVE.
        """
        lease, queue = job.lease, job.queue
        if (
            lease is None
            or (lease.token is not None and lease.token != ack.token)
            or job.settings is not DEFAULT_SETTINGS
            or job.links is not None
            or job.history is not None
            or ack.remove is not None
            or job.id in self._dependents
            or queue.is_grouped
            or queue.is_dead
            or queue.config.concurrency is not None
        ):
            return False
        seq = job.seq
        if self._journal.keeps_jobs:
            self._ended_leases.append((seq, lease, job.started))
            self._journal.finish(job)
        if lease.bucket is not None:
            del lease.bucket.jobs[seq]
        if lease.holder is not None:
            lease.holder.pop(job.id, None)
        del queue.active[seq]
        job.lease = None
        job.state = _COMPLETED
        job.finished = now
        queue.completed[seq] = self._completed[seq] = job
        if lease.token is not None:
            job.ended = Ended(lease.token, finalized=True)
        self._event_seq = number = self._event_seq + 1
        event = Event(
            number, now, "completed", self._epoch, queue.name, job.id, job.name, job.attempts + 1, lease.owner
        )
        self._events.append(event)
        if ack.result is not None:
            job.result = ack.result
            event.bytes = len(ack.result)
            self._attach(event, job, ack.result)
        return True

    def _check_lease(self, job_id: str, token: str | None, *, late_allowed: bool) -> Job | None:
        """The job if the caller may end its attempt; None if that attempt was finalised before.

        A lease that merely ran out still counts for an ACK (`late_allowed`) while nobody else has the job.
        """
        job = self._jobs.get(job_id)
        if job is None or job.queue.is_dead:
            if self._departed.get(job_id, "") == (token or None):
                return None
            raise NotFound(f"Job not found or not in processing state: {job_id}")
        lease = job.lease
        if lease is not None:
            if lease.token is None or lease.token == token:
                return job
            raise wrong_token(job_id, token)
        ended = job.ended
        if ended is None or ended.token != (token or None):
            raise NotFound(f"Job not found or not in processing state: {job_id}")
        may_end = late_allowed and job.state in (State.WAITING, State.DELAYED)  # a client may have buried it since
        return job if not ended.finalized and may_end else None

    def _complete(self, job: Job, ack: Ack, now: int) -> None:
        lease = job.lease
        token, worker = (ack.token, None) if lease is None else (lease.token, lease.owner)
        repeated = self._data(job) if job.links is not None and job.links.repeat is not None else b""
        if job.result is not ack.result:
            job.result = ack.result
        job.finished = now
        if job.history is not None:
            self._note(job, "completed", now)
        if job.links is not None:
            self._release_key(job)
        self._move(job, Verb.COMPLETE)
        event = self._emit(EventName.COMPLETED, job, now)
        event.attempt, event.worker = job.attempts + 1, worker
        if ack.result is not None:
            event.bytes = len(ack.result)
            self._attach(event, job, ack.result)
        if job.links is not None:
            self._succeed_repeat(job, repeated, now)
        self._child_done(job, now)
        remove = job.settings.remove_on_complete if ack.remove is None else ack.remove
        if remove:
            self._satisfied[job.id] = None
            if len(self._satisfied) > MAX_SATISFIED:
                self._satisfied.popitem(last=False)
            self._remove(job)
        else:
            self._journal.finish(job)
        if token is not None:
            self._end_lease(job, token)

    def _end_lease(self, job: Job, token: str | None) -> None:
        """Remember a lease that is over, to answer a late ACK or FAIL. The job may have been removed with it."""
        if job.state is not State.REMOVED:
            job.ended = Ended(token, finalized=True)
            return
        self._departed[job.id] = token
        if len(self._departed) > MAX_DEPARTED:
            self._departed.popitem(last=False)

    def _evict_completed(self) -> None:
        """Only the newest completed jobs are kept.

        Many at a time: a tick that only completes a job has a short commit of its own, and neighbours are deleted from
        the file with one statement.
        """
        excess = len(self._completed) - self.max_completed
        if excess > self.max_completed // _EVICTION_PART:
            for job in list(itertools.islice(self._completed.values(), min(excess, _MAX_EVICTION))):
                if job.links is None and job.seq not in self._logged:
                    # _remove spelled out: in the long run one job goes for each that completes.
                    del job.queue.completed[job.seq], self._completed[job.seq], self._jobs[job.id]
                    job.state = _GONE
                    self._journal.remove(job)
                else:
                    self._remove(job)

    def _count_completed(self, jobs: list[Job], now: int) -> None:
        self._evict_completed()
        queue, started, count = None, None, 0
        for job in jobs:
            if job.started == started and job.queue is queue:  # a burst shares its millisecond
                count += 1
                continue
            if queue is not None:
                self._count_alike(queue, started, count, now)
            queue, started, count = job.queue, job.started, 1
        if queue is not None:
            self._count_alike(queue, started, count, now)

    def _count_alike(self, queue: Queue, started: int | None, count: int, now: int) -> None:
        """Count jobs of a queue that were started together and are completed now."""
        totals, figures = self._totals, queue.figures
        totals.completed += count
        figures.completed += count
        count_minute(queue.minutes["completed"], now, count)
        if started is not None and now >= started:
            ran = now - started
            totals.run_ms += ran * count
            figures.run_ms += ran * count
            figures.run[ran.bit_length()] += count

    # -- failing -------------------------------------------------------------------------------------------------------

    async def fail(
        self,
        job_id: str,
        *,
        token: str | None,
        error: str | None,
        stack: list[str] | None,
        unrecoverable: bool,
        remove: bool | None,
        retry_after: float | None = None,
    ) -> bool:
        job = self._check_lease(job_id, token, late_allowed=False)
        if job is None:
            return False
        now = self._clock.now_ms()
        if stack:
            lines = [line.strip() for text in stack for line in text.splitlines() if line.strip()]
            job.remember().stacktrace = lines[: job.settings.stack_trace_limit]
        reason = DeadLetterReason.EXPLICIT_FAIL
        self._end_attempt(
            job, now, error=error, reason=reason, terminal=unrecoverable, remove=remove, retry_after=retry_after
        )
        return True

    def _end_attempt(
        self,
        job: Job,
        now: int,
        *,
        error: str | None,
        reason: DeadLetterReason,
        terminal: bool = False,
        remove: bool | None = None,
        retry_after: float | None = None,
    ) -> None:
        """One attempt is over without success: another one after the backoff, or the dead-letter queue."""
        lease = job.lease
        job.attempts += 1
        self._record_failure(job, now, reason, error)
        terminal = terminal or job.attempts >= job.settings.max_attempts
        event = self._emit(EventName.FAILED, job, now)
        event.attempt = job.attempts
        event.worker = lease.owner if lease else None
        event.error = error
        event.terminal = terminal
        self._attach_data(event, job)
        if terminal:
            if reason is DeadLetterReason.EXPLICIT_FAIL:
                reason = DeadLetterReason.MAX_ATTEMPTS_EXCEEDED
            self._bury_or_remove(job, now, reason, error, remove=remove)
        else:
            self._retry(job, now, retry_after)
        self._end_lease(job, lease.token if lease else None)

    def _record_failure(self, job: Job, now: int, reason: DeadLetterReason, error: str | None) -> None:
        history = job.remember()
        started = job.started
        history.failures.append(
            AttemptRecord(
                job.attempts,
                None if started is None else float(started),
                float(now),
                reason.value,
                error,
                float(now - started) if started is not None else 0.0,
            )
        )
        del history.failures[:-_MAX_FAILURES]
        self._note(job, "failed", now, error=error, attempt=job.attempts)

    def _retry(self, job: Job, now: int, after_ms: float | None) -> None:
        job.run_at = now + (self._backoff_ms(job) if after_ms is None else int(after_ms))
        self._move(job, Verb.RETRY)
        self._settle_time(job, now)
        job.started = None
        self._note(job, "waiting", now, attempt=job.attempts + 1)
        self._journal.touch(job)
        job.queue.figures.retried += 1
        self._overall.retried += 1
        event = self._emit(EventName.RETRIED, job, now)
        event.prev = "failed"
        event.attempt = job.attempts + 1
        event.delay = job.run_at - now

    def _backoff_ms(self, job: Job) -> int:
        backoff = job.settings.backoff
        if not isinstance(backoff, Backoff):
            backoff = Backoff("exponential", backoff)
        return retry_delay_ms(
            job.attempts, delay_ms=backoff.delay, kind=backoff.type, max_delay_ms=backoff.max_delay, rng=self._rng
        )

    # -- dead letters --------------------------------------------------------------------------------------------------

    def _dlq_config(self, queue: Queue) -> DlqConfig:
        return queue.config.dlq or _DEFAULT_DLQ

    def _bury_or_remove(
        self,
        job: Job,
        now: int,
        reason: DeadLetterReason,
        error: str | None,
        *,
        remove: bool | None = None,
        is_discarded: bool = False,
    ) -> None:
        """The job failed for good: apply its policy to parents, and bury it, or remove it if so configured."""
        self._totals.failed += 1
        count_minute(job.queue.minutes["failed"], now)
        job.queue.figures.count_failure(now)
        self._release_key(job)
        if is_discarded:
            self._tell_flow_of_removal(job, "its job was discarded", now)
        else:
            self._tell_flow(job, error or reason.value, now)
        if job.settings.remove_on_fail if remove is None else remove:
            self._child_failed(job, error, now)
            self._remove(job)
        else:
            self._bury(job, now, reason, error)
            self._child_failed(job, error, now)

    @abstractmethod
    def _tell_flow(self, job: Job, error: str, now: int) -> None:
        """A job of a workflow failed for good: push a job that decides how the workflow continues."""

    @abstractmethod
    def _tell_flow_of_removal(self, job: Job, why: str, now: int) -> None:
        """The same for a job that a client removed."""

    def _bury(self, job: Job, now: int, reason: DeadLetterReason, error: str | None) -> None:
        history = job.remember()
        config = self._dlq_config(job.queue)
        previous = history.burial
        history.burial = Burial(
            entered_at=float(now),
            reason=reason.value,
            error=error,
            retry_count=previous.retry_count if previous else 0,
            last_retry_at=previous.last_retry_at if previous else None,
        )
        history.burial.expires_at = self._expiry(history.burial, config)
        self._plan_auto_retry(history.burial, config, now)
        job.finished = now
        self._move(job, Verb.BURY)
        self._journal.touch(job)
        self._watch_burial(job)
        while len(job.queue.failed) > config.max_entries:
            self._remove(next(iter(job.queue.failed.values())))

    @staticmethod
    def _expiry(burial: Burial, config: DlqConfig) -> float | None:
        return None if config.max_age is None else burial.entered_at + int(config.max_age)

    @staticmethod
    def _is_retried(burial: Burial, config: DlqConfig) -> bool:
        return config.auto_retry and burial.retry_count < config.max_auto_retries

    def _plan_auto_retry(self, burial: Burial, config: DlqConfig, now: int) -> None:
        if self._is_retried(burial, config):
            burial.next_retry_at = float(now + int(config.auto_retry_interval * 2 ** max(0, burial.retry_count - 1)))
        else:
            burial.next_retry_at = None

    def _plan_anew(self, job: Job, now: int) -> bool:
        """Have the config count for a letter that is there; whether that changed anything."""
        burial = job.history.burial if job.history else None
        if burial is None:
            return False
        watched, before = self._dues_of(job), (burial.expires_at, burial.next_retry_at)
        config = self._dlq_config(job.queue)
        burial.expires_at = self._expiry(burial, config)
        self._plan_auto_retry(burial, config, now)
        if (burial.expires_at, burial.next_retry_at) == before:
            return False
        self._journal.touch(job)
        self._watch_burial(job, watched)
        return True

    def _is_planned(self, job: Job) -> bool:
        """Whether a letter expires, and is retried or not, as the config says; the interval may be an older one."""
        burial = job.history.burial if job.history else None
        if burial is None:
            return True
        config = self._dlq_config(job.queue)
        is_retried = burial.next_retry_at is not None
        return burial.expires_at == self._expiry(burial, config) and is_retried == self._is_retried(burial, config)

    @staticmethod
    def _dues_of(letter: Job | None) -> list[int]:
        """When a dead letter is retried or removed by itself."""
        burial = letter.history.burial if letter is not None and letter.history else None
        if burial is None:
            return []
        return [int(due) for due in (burial.next_retry_at, burial.expires_at) if due is not None]

    def _watch_burial(self, job: Job, watched: Sequence[int] = ()) -> None:
        for due in self._dues_of(job):
            if due not in watched:
                heapq.heappush(self._burials, (due, job.seq))
                self._ring_at(due)
        if len(self._burials) > self._most_burials + _TIDY_AFTER:
            self._tidy_burials()

    def _tidy_burials(self) -> None:
        """Drop entries of letters that were retried, removed or evicted: they would stay until they are due."""
        buried = {seq for queue in self._queues.values() for seq in queue.failed}
        self._burials = list({entry for entry in self._burials if entry[1] in buried})
        heapq.heapify(self._burials)
        self._most_burials = 2 * len(self._burials)

    async def _tidy_burials_slowly(self) -> None:
        """The same in slices, and without entries for times that have changed. What is due meanwhile waits for it."""
        letters: dict[int, Job] = {}
        for queue in self._queues.values():
            letters.update(queue.failed)
        old, self._burials = self._burials[::-1], []
        self._slices.begin()
        try:
            while old:
                entry = old.pop()
                if entry[0] in self._dues_of(letters.get(entry[1])):
                    heapq.heappush(self._burials, entry)
                if len(old) % 1024 == 0:
                    await self._slices.breathe()
        finally:
            for entry in old:  # a failing disk may end it halfway
                heapq.heappush(self._burials, entry)
        self._most_burials = 2 * len(self._burials)

    def _next_burial_ms(self) -> int | None:
        return self._burials[0][0] if self._burials else None

    def _tend_dead_letters(self, now: int, most: int) -> None:
        """Retry letters whose automatic retry is due, and remove those that are too old; at most so many at once."""
        done = 0
        while done < most and self._burials and self._burials[0][0] <= now:
            _, seq = heapq.heappop(self._burials)
            job = next((q.failed[seq] for q in self._queues.values() if seq in q.failed), None)
            if job is None or job.history is None or job.history.burial is None:
                continue
            done += 1
            burial = job.history.burial
            if burial.expires_at is not None and burial.expires_at <= now:
                self._drop_letter(job, now)
            elif burial.next_retry_at is not None and burial.next_retry_at <= now:
                self._retry_by_itself(job, burial, now)

    def _drop_letter(self, job: Job, now: int) -> bool:
        self._tell_removed(job, now)
        self._remove(job)
        return True

    def _retry_by_itself(self, job: Job, burial: Burial, now: int) -> None:
        is_revived = False
        with suppress(StorageUnavailable):  # its payload cannot be read
            is_revived = self._revive_dead_letter(job, now)
        if not is_revived:
            # That, or another job has its key at the moment: try again later.
            burial.next_retry_at = float(now + int(self._dlq_config(job.queue).auto_retry_interval))
            self._journal.touch(job)
            self._watch_burial(job)

    def _revive_dead_letter(self, job: Job, now: int) -> bool:
        """RetryDlq of one job; False when its key belongs to another job by now."""
        if self._has_key_rival(job, now):
            return False
        self._revive(job, now)
        burial = job.remember().burial
        if burial is not None:
            burial.retry_count += 1
            burial.last_retry_at = float(now)
            burial.next_retry_at = None
        self._emit(EventName.DLQ_RETRIED, job, now).prev = State.FAILED.word
        return True

    @staticmethod
    def _has_key_rival(job: Job, now: int) -> bool:
        """Whether another job holds the uniqueKey that this one would take back."""
        key = job.links.unique_key if job.links is not None else None
        holder = job.queue.keys.get(key) if key else None
        return holder is not None and (holder.expires is None or holder.expires > now)

    def _revive(self, job: Job, now: int) -> None:
        """Back to waiting with a clean slate, from completed or failed."""
        job.remember()
        if self._journal.keeps_jobs and job.data is None:
            job.data = self._journal.data(job)
            self._journal.rewrite(job)
        job.attempts = 0
        job.stalls = 0
        job.run_at = now
        job.finished = None
        job.started = None
        job.result = None
        job.ended = None
        self._move(job, Verb.REVIVE)
        if job.links is not None:
            self._take_keys(job, job.links, now)
        self._note(job, "waiting", now)
        self._journal.touch(job)

    # -- families ------------------------------------------------------------------------------------------------------

    def _child_done(self, job: Job, now: int) -> None:
        for parent in self._dependents.pop(job.id, ()):
            history = parent.history
            if history is None or job.id not in history.pending:
                continue
            history.pending.remove(job.id)
            history.children_completed += 1
            self._journal.settle(parent, job.id)
            if not history.pending and parent.state is State.WAITING_CHILDREN:
                self._unblock(parent, now)

    def _child_failed(self, job: Job, error: str | None, now: int) -> None:
        """Apply the failure policy of a child to everything that waits for it.

        A parent that fails because of it fails its own parents in turn. Chains may be thousands of jobs long, so this
        is a work list and not recursion.
        """
        self._bad_news.append((job, error))
        if len(self._bad_news) > 1:
            return  # the call that processes the list is already running
        try:
            while self._bad_news:
                self._apply_policy(*self._bad_news[0], now)
                self._bad_news.popleft()
        finally:
            self._bad_news.clear()

    def _apply_policy(self, job: Job, error: str | None, now: int) -> None:
        """One step of `_child_failed`. Without a policy those that wait stay blocked."""
        settings = job.settings
        waiting = [parent for parent in self._dependents.get(job.id, ()) if not parent.queue.is_dead]
        text = error or "failed"
        key = f"{job.queue.name}:{job.id}"
        for parent in waiting:
            history = parent.remember()
            if settings.fail_parent_on_failure:
                self._drop_dependency(parent, job.id)
                self._fail_parent(parent, f"Child job {job.id} failed: {text}", now)
            elif settings.continue_parent_on_failure:
                history.failed_children[key] = text
                for dependency in list(history.pending):
                    self._drop_dependency(parent, dependency)
                self._after_drop(parent, now)
            elif settings.ignore_dependency_on_failure:
                history.ignored_children[key] = text
                self._drop_dependency(parent, job.id)
                self._after_drop(parent, now)
            elif settings.remove_dependency_on_failure:
                self._drop_dependency(parent, job.id)
                self._after_drop(parent, now)

    def _fail_parent(self, parent: Job, error: str, now: int) -> None:
        if parent.state is not State.WAITING_CHILDREN:
            return
        event = self._emit(EventName.FAILED, parent, now)
        event.error = error
        event.terminal = True
        self._attach_data(event, parent)
        self._note(parent, "failed", now, error=error)
        self._bury_or_remove(parent, now, DeadLetterReason.UNKNOWN, error)

    def _after_drop(self, parent: Job, now: int) -> None:
        if parent.state is State.WAITING_CHILDREN and parent.history is not None and not parent.history.pending:
            self._unblock(parent, now)

    # -- repetition ----------------------------------------------------------------------------------------------------

    def _succeed_repeat(self, job: Job, data: bytes, now: int) -> None:
        """A completed repeat job pushes its successor."""
        assert job.links is not None
        repeat = job.links.repeat
        if repeat is None or self._has_key_rival(job, now):
            return  # another job took the key over while this one ran, and continues in its place
        from headrace.schedules import next_repeat  # calendars and time zones: few jobs need them

        planned = repeat.prev_millis if repeat.prev_millis is not None else float(job.run_at)
        run_at = next_repeat(msgspec.structs.replace(repeat, prev_millis=planned), now)
        if run_at is None:
            return
        following = msgspec.structs.replace(repeat, count=repeat.count + 1, prev_millis=float(run_at))
        links: JobLinks = msgspec.structs.replace(
            job.links, repeat=following, custom_id=None, depends_on=[], children_ids=[]
        )
        self._job_seq += 1
        successor = Job(
            self._job_seq,
            self.ids.next(),
            job.queue,
            data,
            job.name,
            job.settings,
            links,
            State.DELAYED if run_at > now else State.WAITING,
            job.priority,
            now,
            run_at,
            len(data),
        )
        successor.history = History(timeline=[TimelineEntry(successor.state.word, float(now))])
        self._jobs[successor.id] = successor
        job.remember().successor = successor.id
        self._take_keys(successor, links, now)
        self._enter(successor)
        self._journal.add(successor)
        self._tell_pushed(successor, now)
        self._totals.pushed += 1
