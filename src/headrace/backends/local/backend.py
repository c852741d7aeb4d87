"""The local backend: verbs over an in-memory index, with SQLite and the event log behind one commit per tick.

Memory is authoritative while the process runs. `commit` makes a tick durable in this order: append its events to the
log, commit its rows (with the log's position) to SQLite, let readers see the events. If either fails, the whole tick is
rolled back: the log is truncated, the jobs it touched are dropped and reloaded from their rows, and writes are
refused (`StorageUnavailable`) until a probe succeeds.

A tick that only claimed jobs stores nothing. Its replies leave before the commit (`confirm_claims`), which nothing
takes back: if the log refuses, the events stay in memory and precede those of the next tick.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headrace.backends.base import SegmentInfo, StorageHealth
from headrace.backends.local.control import PLACES, QUEUED
from headrace.backends.local.eventlog import (
    MAX_READ_BYTES,
    EventLog,
    LogLimits,
    MemoryLog,
    Roll,
    decode_events,
    new_epoch,
)
from headrace.backends.local.flows import Flows
from headrace.backends.local.index import KeyHolder, QueueConfig
from headrace.backends.local.job import History, Job, Lease
from headrace.backends.local.journal import LARGE_BYTES, Journal, Row, describe, is_full
from headrace.backends.local.segments import last_sealed, lost_commits
from headrace.backends.local.store import Clearing
from headrace.clock import Clock, SystemClock
from headrace.errors import NotFound, Refused, StorageUnavailable
from headrace.model import (
    DEFAULT_SETTINGS,
    UNCOMMITTED_EVENTS,
    CronEntry,
    Event,
    EventName,
    JobLinks,
    JobSettings,
    Webhook,
    intern_settings,
)
from headrace.states import State

_STATES: Final = {int(state): state for state in State}
_decode_settings: Final = msgspec.msgpack.Decoder(JobSettings).decode
_decode_links: Final = msgspec.msgpack.Decoder(JobLinks).decode
_decode_history: Final = msgspec.msgpack.Decoder(History).decode

BOUNDED_LOG: Final = LogLimits(segment_bytes=8 << 20, segment_ms=3_600_000, keep_bytes=64 << 20)
"""What is kept of the event log when nobody asked for capture: enough to replay the recent past."""

SEGMENT_CHUNK_BYTES: Final = 2 << 20
MAX_CONSUMERS: Final = 1000
MAX_IDLE_QUEUES: Final = 10_000
_EVENTS_AT_ONCE: Final = 10_000
_RETIRED_AT_ONCE: Final = 512
_event_name: Final = attrgetter("event")


class _Unread(NamedTuple):
    """What a failed tick had touched, until it is read back from the file."""

    jobs: list[int]
    leases: dict[int, tuple[Lease, int | None]]
    """Those that the tick had ended, with the begin of the work."""
    queues: list[str]


class LocalBackend(Flows):
    is_local: Final[Literal[True]] = True

    def __init__(
        self,
        path: Path | None = None,
        *,
        clock: Clock | None = None,
        log_root: Path | None = None,
        log_limits: LogLimits = BOUNDED_LOG,
        max_completed: int = 50_000,
        completed_retention_ms: int | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(Journal(path), clock or SystemClock(), rng)
        self.max_completed = max_completed
        self.completed_retention_ms = completed_retention_ms
        self.problems: list[str] = []
        self._most_queues = MAX_IDLE_QUEUES
        """The number of queues above which unused ones are looked for."""
        self._crons: dict[str, CronEntry] = {}
        self._webhooks: dict[str, Webhook] = {}
        self.webhook_changes = 0
        self._limited_until = set()
        self._log_root = log_root or (path.with_name(path.name + "-events") if path is not None else None)
        self._log_limits = log_limits
        self._log: EventLog | MemoryLog = MemoryLog()
        self._committed_seq = 0
        self._unstored = 0
        """So many of the first events of this tick are known to be of nothing that is stored."""
        self._trouble: StorageHealth | None = None
        self._unread: _Unread | None = None
        self.is_degraded = False

    # -- opening -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            self._open()
            self.commit()
            with self._journal.recovering():
                self._finish_clearings()
            with suppress(StorageUnavailable):  # a full disk: it is tried again when there is room
                self.commit()
        except BaseException:
            await self.close()  # so that a second attempt gets the same error, and not that the file is in use
            raise

    def _open(self) -> None:
        self._journal.open()
        collecting = gc.isenabled()
        gc.disable()  # a million new objects would be walked again and again, and none of them is garbage
        try:
            with self._journal.recovering():
                store_seq, self._epoch, self._totals = self._journal.mark()
                self._open_log(store_seq)
                self._load()
        finally:
            if collecting:
                gc.enable()

    def look(self) -> None:
        """Load what the file holds, but open no event log and store no changes of jobs: for `headrace doctor`."""
        self._journal.open()
        with self._journal.recovering():
            store_seq, _, _ = self._journal.mark()
            self._journal.clearings()
            self._load()
        self._compare_log(store_seq)

    def _compare_log(self, store_seq: int) -> None:
        if self._log_root is None or not (folder := self._log_root / "shard=0").is_dir():
            return
        try:
            self._refuse_foreign_log(self._log_root, store_seq)
            lost = lost_commits(folder, store_seq, _needs_commit)
        except OSError as error:
            self.problems.append(f"the event log cannot be read: {error}")
            return
        if lost is not None:
            self.problems.append(
                f"the event log has events {lost[0]}..{lost[1]}, which were committed, but the database does not have "
                "what they tell of: it is an older copy, or has lost its write-ahead log; a start takes them back"
            )

    def _open_log(self, store_seq: int) -> None:
        if self._log_root is None:
            # Nothing of an earlier life is left: readers of that one must not take these numbers for theirs.
            self._epoch = self._clock.now_ms()
            self._log = MemoryLog(self._log_limits, epoch=self._epoch, store_seq=store_seq)
        else:
            self._refuse_foreign_log(self._log_root, store_seq)
            self._log = EventLog.open(
                self._log_root,
                store_seq=store_seq,
                epoch=self._epoch,
                durable=_needs_commit,
                limits=self._log_limits,
            )
            self.problems += self._log.problems
            # Readers may have seen events that are taken back now, or those of a log that was here before: the same
            # numbers begin again in a new epoch.
            epoch = self._log.epoch + (self._log.retracted is not None)
            if self._log.is_new:
                epoch = new_epoch(self._log.epoch, self._clock.now_ms())
            if epoch != self._epoch:
                self._epoch = self._log.epoch = self._journal.new_epoch = epoch
        self._event_seq = self._committed_seq = max(store_seq, self._log.last_seq)
        self._log.committed = self._event_seq
        self._first_event = self._event_seq + 1
        gap = self._log.gap
        if gap is not None:
            event = self._emit_queue(EventName.GAP, "", self._clock.now_ms())
            event.first, event.last = gap

    def _refuse_foreign_log(self, root: Path, store_seq: int) -> None:
        """A database that never had an event has no closed segments: these are another's, and would be taken back."""
        folder = root / "shard=0"
        if not store_seq and folder.is_dir() and (last := last_sealed(folder)):
            raise StorageUnavailable(
                f"{self._journal.path} has no events yet, but {root} has those of another database, up to event "
                f"{last:,}: put that database back, or remove the folder to begin anew, or name another one"
            )

    def _load(self) -> None:
        for name, value in self._journal.records("queue"):
            self._load_queue(name, value)
        self._load_small_tables()
        self._open_batches = self._journal.drop_unfinished_batches()
        self._job_seq = max((self._journal.drop_idle_completions(), *self._open_batches.values()))
        for row in self._journal.rows():
            if not self._open_batches or not self._is_staged(row[0]):
                self._take_back_job(self._read_row(row))
        self._order_finished()
        self._finish_planning()
        for queue in self._queues.values():
            for job in list(queue.blocked.values()):
                self._wait_again_for_children(job)
        self._logged = self._journal.logged_jobs()
        self._ready.clear()

    def _load_queue(self, name: str, value: bytes) -> None:
        try:
            config = msgspec.msgpack.decode(value, type=QueueConfig)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.problems.append(f"settings of queue {name} are unreadable and were left out: {error}")
            return
        queue = self._queue(name)
        queue.config = config
        if config.rate_limit is not None and config.rate_limit.until is not None:
            self._limited_until.add(name)

    def _load_small_tables(self) -> None:
        self._crons = dict(self._decoded("cron", CronEntry))
        self._webhooks = dict(self._decoded("webhook", Webhook))
        self._load_flows()
        self.webhook_changes += 1

    def _decoded(self, kind: str, shape: Any) -> Iterable[tuple[str, Any]]:
        for key, value in self._journal.records(kind):
            try:
                yield key, msgspec.msgpack.decode(value, type=shape)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.problems.append(f"{kind} {key} is unreadable and was left out: {error}")

    def _read_row(self, row: Row) -> Job | None:
        """A job from its row; an unreadable row is reported and skipped, never raised."""
        try:
            return self._job_of(row)
        except (msgspec.DecodeError, ValueError, TypeError, KeyError) as error:
            self.problems.append(f"job row {row[0]} is unreadable and was left out: {error}")
            self._job_seq = max(self._job_seq, int(row[0]))
            return None

    def _take_back_job(self, job: Job | None) -> None:
        """Put a job from the file into its place in memory."""
        if job is None:
            return
        if job.id in self._jobs:
            self.problems.append(f"job row {job.seq} repeats the id {job.id} and was left out")
            return
        self._jobs[job.id] = job
        self._job_seq = max(self._job_seq, job.seq)
        if job.links is not None:
            self._take_back_keys(job, job.links)
        self._enter(job)
        if job.state is State.FAILED:
            self._watch_burial(job)

    def _job_of(self, row: Row) -> Job:
        (seq, job_id, queue, state, priority, created, run_at, finished, attempts, stalls, name, *rest) = row
        data, settings, links, history, result, length = rest
        job = Job(
            seq,
            job_id,
            self._queue(queue),
            data,
            name,
            DEFAULT_SETTINGS if settings is None else intern_settings(_decode_settings(settings)),
            None if links is None else _decode_links(links),
            _STATES[state],
            priority,
            created,
            run_at,
            LARGE_BYTES + 1 if length is None else length,
            finished,
            attempts,
            stalls,
            result,
            None if history is None else _decode_history(history),
        )
        settled = self._journal.settled(seq)
        if settled:
            completed = job.remember()
            completed.pending.difference_update(settled)
            completed.children_completed += len(settled)
        return job

    def _take_back_keys(self, job: Job, links: JobLinks) -> None:
        if links.custom_id:
            job.queue.custom_ids[links.custom_id] = job
        if not links.unique_key or job.state in (State.COMPLETED, State.FAILED):
            return
        history = job.history
        if history is None or not history.key_released:
            expires = history.key_expires if history is not None else None
            if expires is None or expires > self._clock.now_ms():  # else another job may have it by now
                job.queue.keys[links.unique_key] = KeyHolder(job, expires)

    def _order_finished(self) -> None:
        """Finished jobs are evicted, shown and retried in the order of their end; rows come in push order."""
        for queue in self._queues.values():
            for place in (queue.completed, queue.failed):
                _sort_by_end(place)
        _sort_by_end(self._completed)

    def _finish_planning(self) -> None:
        """Have the config count for letters that SetDlqConfig, which works in slices, did not reach any more."""
        now = self._clock.now_ms()
        for queue in self._queues.values():
            if queue.config.dlq is None:
                continue  # never set, or left out as unreadable: nothing to judge letters by
            for letter in queue.failed.values():
                if not self._is_planned(letter):
                    self._plan_anew(letter, now)

    def _wait_again_for_children(self, job: Job) -> None:
        history = job.remember()
        if not history.pending:
            return  # it was blocked before it had children, and waits for the first to be pushed
        for dependency in list(history.pending):
            target = self._find(dependency)
            if target is not None and target.state is State.COMPLETED:
                history.pending.remove(dependency)
                self._journal.touch(job)
            else:
                self._dependents.setdefault(dependency, []).append(job)
        if not history.pending:
            self._unblock(job, self._clock.now_ms(), quiet=True)

    def _finish_clearings(self) -> None:
        """Continue emptying queues where a crash or a failing disk interrupted it: no event has reported it yet."""
        under_way = {(clearing.queue, clearing.since) for clearing in self._clearings}
        for event, name, since, last, spared in self._journal.clearings():
            clearing = Clearing(event, name, since)
            if (name, since) in under_way:
                continue
            if since + 1 < self._log.first_seq:
                self.problems.append(
                    f"{clearing.why} in part only: the event log does not reach back to where it began"
                )
                self._journal.close_clearing(event, name, since)
                continue
            doomed = self._left_to_clear(clearing, last, set(spared))
            for job in reversed(doomed):
                if job.state is not State.REMOVED:  # with one that it waited for
                    self._clear_away(clearing, job, self._clock.now_ms())
            self._tell_cleared(clearing, len(doomed))
            self._forget_unused(name)

    def _left_to_clear(self, clearing: Clearing, last: int, spared: set[int]) -> list[Job]:
        """Of a queue that is drained, what was told since may have come back from a worker or from the dead letters:
        it stays. Of one that is obliterated nothing stays but what was pushed since."""
        told = self._told_after(clearing.since, clearing.queue)
        clearing.newly_told.update(told)
        is_drained = clearing.event is EventName.DRAINED
        stays = {job_id for job_id, word in told.items() if is_drained or word == "pushed"}
        queue = self._queue(clearing.queue)
        jobs = [job for state in (QUEUED if is_drained else PLACES) for job in queue.jobs_in(state)]
        return [job for job in jobs if job.seq <= last and job.seq not in spared and job.id not in stays]

    def _told_after(self, seq: int, queue: str) -> dict[str, str]:
        """The jobs of a queue with events after this one, and what the first of these says."""
        told: dict[str, str] = {}
        while events := self.read_events(seq, _EVENTS_AT_ONCE):
            for event in events:
                if event.queue == queue:
                    told.setdefault(event.job, event.event)
            seq = events[-1].seq
        return told

    def _forget_unused(self, name: str) -> None:
        queue = self._queues[name]
        if not any(queue.counts) and not queue.watchers and queue.config == QueueConfig():
            queue.is_dead = True  # for who is between two slices
            del self._queues[name]

    async def close(self) -> None:
        self._log.close()
        self._journal.close()
        # By hand, for jobs are not seen by the garbage collector: a program may open and close its file often.
        for queue in self._queues.values():
            queue.clear()
        self._wheel.clear()

    # -- the tick ------------------------------------------------------------------------------------------------------

    def confirm_claims(self) -> bool:
        if not self._journal.keeps_jobs or not self._events or self._is_dirty:
            return False
        self._claimed = []
        self._serial_before = self._lease_serial
        self._unstored = len(self._events)
        return True

    @property
    def _is_dirty(self) -> bool:
        """Whether the file has to learn of this tick."""
        if self._journal.is_dirty:
            return True
        if not self._journal.keeps_jobs:
            return False
        unknown = itertools.islice(self._events, self._unstored, None)
        return not UNCOMMITTED_EVENTS.issuperset(map(_event_name, unknown))

    def commit(self) -> None:
        """Make everything since the last commit durable, or roll it all back and raise StorageUnavailable."""
        events, dirty = self._events, self._is_dirty
        if not events and not dirty:
            self._end_tick()
            return
        appended = False
        try:
            if events:
                self._log.record(events)
                appended = True
                if self._log.is_full:
                    self.alarm.ring_by(self._clock.monotonic_ms())  # the sweep looks after the log
            if dirty:
                self._journal.commit(self._event_seq, self._totals)
        except Exception as error:  # whatever it was: the next tick must find everything as this one found it
            if not dirty:
                self._put_off(error)
                return
            self._take_back(appended, error)
            text = str(error) if isinstance(error, StorageUnavailable) else describe(error)
            raise StorageUnavailable(text) from error
        for first in self._closing_batches:
            del self._open_batches[first]
        self._log.committed = self._committed_seq = self._event_seq
        self._published = events if not self._published else self._published + events
        self._published_bodies |= self._bodies
        self._end_tick()

    def _end_tick(self) -> None:
        if self._closing_batches:
            self._closing_batches = []
        for clearing in self._clearings:
            clearing.look_at(self._events)
        self._events = []
        self._unstored = 0
        self._claimed = []
        self._ended_leases = []
        self._serial_before = self._lease_serial
        if self._bodies:
            self._bodies = {}
        if self._journal.recalled:
            self._journal.recalled = {}
        if self._touched_queues:
            self._touched_queues.clear()
            self._obliterated.clear()

    def _put_off(self, error: Exception) -> None:
        """The log has refused events that nothing depends on: try again with the next tick."""
        events = self._events
        self._end_tick()
        self._events, self._unstored = events, len(events)
        self._degrade(error)

    def _take_back(self, appended: bool, error: Exception) -> None:
        """The tick failed: nothing of it may remain in the log, in the file or in memory."""
        touched = {job.seq: job for job in (*self._journal.touched(), *self._claimed)}
        if appended:
            with suppress(OSError):  # remembered by the log: it cuts itself before the next append
                self._log.undo()
        self._journal.rollback()
        self._event_seq = self._committed_seq
        for queue in self._obliterated:
            self._raise(queue)
        for job in touched.values():
            self._detach(job)
        # Only now: detaching a job ends its lease, if the tick had not ended it before.
        leases = {seq: (held, began) for seq, held, began in self._ended_leases if held.serial <= self._serial_before}
        self._unread = _Unread(sorted(touched), leases, list(self._touched_queues))
        self._unread_ids = {job.id for job in touched.values()}
        with suppress(StorageUnavailable):  # a disk that cannot even be read: the probe tries again
            self._read_back()
        self._end_tick()
        self._degrade(error)

    def _read_back(self) -> None:
        """Take what the failed tick had touched from the file again; StorageUnavailable leaves all of it for later."""
        if self._unread is None:
            return
        seqs, leases, queues = self._unread
        rows = self._journal.rows_of(seq for seq in seqs if not self._is_staged(seq))
        jobs = [job for row in rows if (job := self._read_row(row)) is not None]
        self._logged = self._journal.logged_jobs()
        self._reload_small(queues)
        self._unread, self._unread_ids = None, set()
        for job in jobs:
            self._take_back_job(job)
            if job.seq in leases:
                self._hold_again(job, *leases[job.seq])
            elif job.state is State.WAITING_CHILDREN:
                self._wait_again_for_children(job)
        self._order_finished()

    def _is_staged(self, seq: int) -> bool:
        return any(first <= seq <= last for first, last in self._open_batches.items())

    def _detach(self, job: Job) -> None:
        """Remove it from memory, whatever the tick did to it."""
        if self._jobs.get(job.id) is job:  # else it was removed, or a row of a batch that never became a job
            self._release_key(job)
            self._leave(job)
            job.state = State.REMOVED
        self._forget(job)

    def _hold_again(self, job: Job, lease: Lease, started: int | None) -> None:
        """Its worker still holds the job: the ACK that failed with the disk may be repeated."""
        if job.state is State.WAITING:
            self._leave(job)
            job.state = State.ACTIVE
            self._enter(job)
            self._hold(job, lease, started)

    def _reload_small(self, queues: list[str]) -> None:
        _, _, self._totals = self._journal.mark()
        self._load_small_tables()
        stored = dict(self._journal.records("queue"))
        for name in queues:
            queue = self._queue(name)
            queue.config, queue.bucket = QueueConfig(), None
            if name in stored:
                self._load_queue(name, stored[name])

    # -- trouble -------------------------------------------------------------------------------------------------------

    def _degrade(self, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error, StorageUnavailable) else error
        text = str(error) if isinstance(error, StorageUnavailable) else describe(error)
        if self._trouble is None:
            self._trouble = StorageHealth(is_full(cause), text, float(self._clock.now_ms()))
        self.is_degraded = True
        self._slices.is_broken = True

    def check_writable(self) -> None:
        """Refuse before anything changes while the disk is known to refuse."""
        if self._trouble is not None:
            raise StorageUnavailable(self._trouble.error or "Storage is unavailable")

    def probe(self) -> bool:
        """Try to write again; True when storage is healthy."""
        if self._trouble is None:
            return True
        try:
            self._journal.probe()
            self._log.probe()
            self._read_back()
        except (StorageUnavailable, OSError):
            return False
        self._trouble = None
        self.is_degraded = self._slices.is_broken = False
        self._finish_clearings()
        return True

    def storage_status(self) -> StorageHealth:
        return self._trouble or StorageHealth(False, None, None)

    # -- the disk ------------------------------------------------------------------------------------------------------

    def take_sync(self) -> bool:
        """Whether a write of this tick asked to be safe against a power cut."""
        needed, self.needs_sync = self.needs_sync, False
        return needed and self._journal.keeps_jobs

    def sync(self) -> None:
        """fdatasync; runs in a worker thread."""
        self._journal.sync()

    def mend_sync(self) -> None:
        """Recover from a failed sync, or raise StorageUnavailable."""
        self._journal.mend_sync()

    def roll_log(self) -> Roll | None:
        """A closed segment to be compressed in a worker thread, when one is due."""
        try:
            return self._log.roll() if self._log.due(self._clock.now_ms()) else None
        except OSError:
            return None  # the open segment grows on; the next sweep tries again

    def publish(self, roll: Roll) -> None:
        """Compress and publish a closed segment; runs in a worker thread.

        Readers must never see a published segment taken back, so the rows behind it go to disk first.
        """
        self.sync()
        roll.run()

    # -- the log as readers see it -------------------------------------------------------------------------------------

    @property
    def is_log_in_memory(self) -> bool:
        """Then it must be read in the loop, which is quick; else in a worker thread."""
        return isinstance(self._log, MemoryLog)

    def event_window(self) -> tuple[int, int, int]:
        """The epoch, the oldest seq still kept and the newest that is committed."""
        return self._epoch, self._log.first_seq, self._committed_seq

    def read_events(self, after_seq: int, limit: int) -> list[Event]:
        """Committed events with seq > after_seq, oldest first: at most `limit`, and not many more than MAX_READ_BYTES.

        Seqs jump where events are kept no longer.
        """
        return decode_events(self._log.read(after_seq, limit))

    async def event_lines(self, after_seq: int, limit: int) -> bytes:
        """The lines of committed events with seq > after_seq, each with its newline; bounds as of `read_events`.

        *Sliced*: a place deep inside a compressed segment is reached by unpacking all before it.
        """
        self._slices.begin()
        lines: list[bytes] = []
        size = 0
        for n, line in enumerate(self._log.stroll(after_seq, limit)):
            if line:
                lines.append(line)
                size += len(line)
            if size > MAX_READ_BYTES:
                break
            if not line or n % 1024 == 1023:
                await self._slices.breathe()
        return b"".join([line + b"\n" for line in lines])

    def event_segments(self, after: tuple[int, int], limit: int) -> list[SegmentInfo]:
        """Segments with events behind the position (epoch, seq), oldest first."""
        return self._log.listed(after, limit)

    def segment_chunk(self, first: int, offset: int) -> tuple[bytes, int]:
        """A piece of a sealed segment from `offset` on, as compressed, and the length of the whole."""
        found = self._log.sealed_chunk(first, offset, SEGMENT_CHUNK_BYTES)
        if found is None:
            raise NotFound(f"No closed segment begins with event {first}")
        return found

    def event_positions(self) -> dict[str, int]:
        """Who reads the log, and the last seq that each has taken."""
        return dict(self._log.positions)

    def set_event_position(self, consumer: str, seq: int) -> None:
        """What is above the position is kept for this consumer, up to the cap."""
        positions = self._log.positions
        if consumer not in positions and len(positions) >= MAX_CONSUMERS:
            raise Refused(f"Too many consumers of the event log (max {MAX_CONSUMERS}); forget those that are gone")
        try:
            self._log.set_position(consumer, min(seq, self._committed_seq))
        except OSError as error:
            raise StorageUnavailable(describe(error)) from error

    def forget_event_position(self, consumer: str) -> bool:
        if consumer not in self._log.positions:
            return False
        try:
            self._log.forget_position(consumer)
        except OSError as error:
            raise StorageUnavailable(describe(error)) from error
        return True

    def watch(self, queue: str, change: int) -> None:
        """A live subscriber of the queue came (+1) or went (-1)."""
        self._queue(queue).watchers += change

    async def retire_completed(self) -> None:
        """Drop completed jobs beyond the kept number or age."""
        horizon = None
        if self.completed_retention_ms is not None:
            horizon = self._clock.now_ms() - self.completed_retention_ms
        for job in list(itertools.islice(self._completed.values(), _RETIRED_AT_ONCE)):
            if len(self._completed) <= self.max_completed and (horizon is None or (job.finished or 0) >= horizon):
                return
            self._remove(job)

    async def retire_queues(self) -> None:
        """Forget those without jobs and settings if there are very many: some programs have one for every user."""
        if len(self._queues) > self._most_queues:
            for name in list(self._queues):
                self._forget_unused(name)
            self._most_queues = max(MAX_IDLE_QUEUES, 2 * len(self._queues))

    def retire_tombstones(self) -> None:
        """Drop the oldest custom ids whose `idTtl` is over, if there are any."""
        self._journal.forget_ids(self._clock.now_ms(), _RETIRED_AT_ONCE)

    def size_bytes(self) -> int:
        return self._journal.size_bytes()

    async def compact(self) -> None:
        gc.collect()

    async def trim_events(self, queue: str, max_length: int) -> int:
        """The log is one for all queues and bounded by itself: single queues cannot be cut out of it."""
        return 0


def _needs_commit(event: str) -> bool:
    return event not in UNCOMMITTED_EVENTS


def _sort_by_end(jobs: dict[int, Job]) -> None:
    ordered = sorted(jobs.values(), key=lambda job: (job.finished or 0, job.seq))
    jobs.clear()
    jobs.update((job.seq, job) for job in ordered)
