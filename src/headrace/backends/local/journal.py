"""The SQLite side of the local backend: one transaction per tick, one owner per file.

During a tick the backend marks jobs as new, changed or gone and queues other statements; `commit` writes all of it in
one transaction. Rows are built at commit time from the jobs as they are then, so a job pushed, failed and retried
within a tick costs one row. WAL with synchronous=NORMAL survives the death of the process; `sync` adds what a power
cut demands. In memory mode the job tables are not written at all, the small ones live in an in-memory database.

Errors: anything SQLite refuses, to write or to read, leaves as StorageUnavailable with a text for operators; the
transaction is rolled back first. To change the schema, add the next file in sql/ and nothing else.
"""

from __future__ import annotations

import errno
import operator
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from headrace.backends.base import Totals
from headrace.backends.local import locks
from headrace.backends.local.job import Job
from headrace.errors import ConfigError, StorageUnavailable
from headrace.model import DEFAULT_SETTINGS, EventName
from headrace.states import State

LARGE_BYTES: Final = 16_384
"""Payloads above this are kept in a table of their own and not in memory."""

SMALL_RESULT_BYTES: Final = 1024
"""Results up to this stay in memory with their job."""

_PRAGMAS: Final = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=OFF",
    "PRAGMA cache_size=-16384",
    "PRAGMA wal_autocheckpoint=2000",
    "PRAGMA journal_size_limit=67108864",
)
_COLUMNS: Final = (
    "seq, id, queue, state, priority, created, run_at, finished, attempts, stalls, name, data, settings, links, "
    "history, result"
)
_FIELDS: Final = (*_COLUMNS.split(", "), "length")
_INSERT: Final = f"INSERT OR REPLACE INTO job ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
_UPDATE: Final = (
    "UPDATE job SET state=?, priority=?, run_at=?, finished=?, attempts=?, stalls=?, settings=?, links=?, history=?, "
    "result=? WHERE seq=?"
)
_PLAIN_VALUES: Final = "(?,?,?,?,?,?,?,0,0,?,?)"
_INSERT_PLAIN: Final = (
    "INSERT INTO job (seq, id, queue, state, priority, created, run_at, attempts, stalls, name, data) "
    f"VALUES {_PLAIN_VALUES}"
)
_ROWS_AT_ONCE: Final = 32
_INSERT_MANY: Final = _INSERT_PLAIN + f", {_PLAIN_VALUES}" * (_ROWS_AT_ONCE - 1)
_FINISH: Final = f"UPDATE job SET state={State.COMPLETED:d}, finished=?, result=? WHERE seq=?"
_FINISH_RANGE: Final = "INSERT OR REPLACE INTO completion (finished, first, last) VALUES (?,?,?)"
_IDLE: Final = "NOT EXISTS (SELECT 1 FROM job WHERE seq BETWEEN first AND last)"
_WORTH_A_RANGE: Final = 4
_INSERT_LONE: Final = _INSERT_PLAIN.replace("name, data)", "name, data, mark)").replace("0,0,?,?)", "0,0,?,?,?)")
_FINISH_LONE: Final = f"UPDATE job SET state={State.COMPLETED:d}, finished=?, result=?, mark=? WHERE seq=?"
_MARK: Final = struct.Struct(">QQQQQdd")
"""The mark in a row: number of the last event, then the counters. Of fixed size, so that it is replaced in place, and
ordered so that the newest compares as the greatest."""
_seq: Final = operator.attrgetter("seq")
_ending: Final = operator.attrgetter("finished", "result")
_WAITING: Final = int(State.WAITING)
_ACTIVE: Final = State.ACTIVE
_BURY_ID: Final = "INSERT OR REPLACE INTO tombstone VALUES (?,?,?,?)"
_FORGET_IDS: Final = (
    "DELETE FROM tombstone WHERE (queue, id) IN (SELECT queue, id FROM tombstone WHERE expires <= ? LIMIT ?)"
)
_IDS_AT_ONCE: Final = 64
_RECALL_IDS: Final = (
    f"SELECT id, job FROM tombstone WHERE queue=? AND expires>? AND id IN ({','.join('?' * _IDS_AT_ONCE)})"
)
_SIZE: Final = "ifnull(length(data), (SELECT length(payload.data) FROM payload WHERE payload.seq=job.seq))"
_PROBE_BYTES: Final = 16_384
_LONE_COMMITS: Final = 256
_LEAST_ROOM_BYTES: Final = 65_536
_encode: Final = msgspec.msgpack.Encoder().encode

Row = tuple[Any, ...]
_NO_COMPLETION: Final = (sys.maxsize, sys.maxsize, 0)


class FileLocked(StorageUnavailable):
    """Another process owns the database file."""


class WrongFile(StorageUnavailable, ConfigError):
    """There can be no database at this path: waiting for it is in vain."""


class Unreadable(StorageUnavailable):
    """The disk does not give back what is stored, or gives back something else."""


class Journal:
    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.keeps_jobs = path is not None
        self.plain: dict[int, Job] = {}
        self.new: dict[int, Job] = {}
        self.changed: dict[int, Job] = {}
        self.finished: dict[int, Job] = {}
        self.rewritten: dict[int, Job] = {}
        self.gone: dict[int, Job] = {}
        self._staged: dict[int, Job] = {}
        self._settled: dict[int, tuple[Job, list[str]]] = {}
        """Parents whose rows stay as they are, by seq, and those of their children that completed in this tick."""
        self._with_settled: set[int] = set()
        """Parents that have rows in the table `settled`."""
        self._tombstones: dict[tuple[str, str], tuple[str, int]] = {}
        """Custom ids that this tick used with an `idTtl` (queue, id -> job id, expiry)."""
        self._now = 0
        """When the last of them was used."""
        self.recalled: dict[tuple[str, str], str | None] = {}
        """Tombstones in the file that this tick has looked up, valid until it ends."""
        self._statements: list[tuple[str, Row]] = []
        self.new_epoch: int | None = None
        """Stored with the next commit, but no reason for one: the disk may be full when a server starts."""
        self._refusal: StorageUnavailable | None = None
        """Why this tick can no longer be committed."""
        self._db: apsw.Connection | None = None
        self._lock_fd: int | None = None
        self._wal_fd: int | None = None
        self._lost_sync = False
        self._in_transaction = False
        self._writer: apsw.Cursor | None = None
        """For statements that are a commit by themselves: one that stays spares them a new one each time."""
        self._reader: apsw.Cursor | None = None
        self._reader_left = 0

    # -- opening and closing -----------------------------------------------------------------------------------------

    def open(self) -> None:
        if self.path is not None:
            self._take_lock(self.path)
        try:
            self._db = apsw.Connection(":memory:" if self.path is None else str(self.path))
            self._db.set_busy_timeout(5000)
            self._refuse_strangers()
            for pragma in _PRAGMAS:
                self._db.execute(pragma)
            self._migrate()
            self._with_settled = {seq for (seq,) in self._db.execute("SELECT DISTINCT parent FROM settled")}
        except apsw.Error as error:
            self.close()
            why = "the disk is full; free some space and start again" if self._is_disk_full() else error
            raise StorageUnavailable(f"cannot open {self.path}: {why}") from error

    def _is_disk_full(self) -> bool:
        """Whether there is no room for the index of the write-ahead log: SQLite calls that an I/O error."""
        if self.path is None:
            return False
        disk = os.statvfs(self.path.parent)
        return disk.f_bavail * disk.f_frsize < _LEAST_ROOM_BYTES

    def _refuse_strangers(self) -> None:
        """A database with tables but without our version belongs to another program: leave it untouched."""
        (version,) = next(self.db.execute("PRAGMA user_version"))
        (tables,) = next(self.db.execute("SELECT count(*) FROM sqlite_master"))
        if tables and not version:
            self.close()
            raise WrongFile(f"{self.path} is the database of another program: name another file")

    def _take_lock(self, path: Path) -> None:
        if path.is_dir():
            raise WrongFile(f"cannot open {path}: it is a folder; name a file in it, such as {path / 'headrace.db'}")
        if not path.parent.is_dir():
            raise WrongFile(f"cannot open {path}: there is no folder {path.parent}; make it first or name another file")
        if not _size(path) and _size(wal := path.with_name(path.name + "-wal")):
            # SQLite would delete it.
            raise StorageUnavailable(
                f"cannot open {path}: the file is missing or empty, but its write-ahead log {wal} is there, with the "
                "newest jobs; put the file back beside it, or move the log away to begin with an empty file"
            )
        lock_path = path.with_name(path.name + ".lock")
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageUnavailable(f"cannot open {lock_path}: {error.strerror}") from error
        try:
            locks.take(fd)
        except OSError:
            owner = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise FileLocked(
                f"{path} is in use by process {owner}, and one process owns a file: stop that one, or run "
                "`headrace serve` on the file and connect everybody else to its URL."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd

    def _migrate(self) -> None:
        db = self.db
        (version,) = next(db.execute("PRAGMA user_version"))
        scripts = schema_scripts()
        if version > len(scripts):
            raise StorageUnavailable(
                f"{self.path} was written by a newer Headrace (schema {version}, this one knows {len(scripts)}): "
                "upgrade Headrace or open another file."
            )
        for number, script in enumerate(scripts[version:], version + 1):
            with db:
                db.execute(script)
                db.execute(f"PRAGMA user_version={number}")
        with db:
            db.execute("INSERT OR IGNORE INTO mark VALUES (1, 0, 1, ?)", (_encode(Totals()),))

    @property
    def db(self) -> apsw.Connection:
        if self._db is None:
            raise StorageUnavailable("the database is closed")
        return self._db

    def close(self) -> None:
        self._drop_reader()
        if self._db is not None:
            self._db.close()
            self._db = self._writer = None
        if self._wal_fd is not None:
            os.close(self._wal_fd)
        if self._lock_fd is not None:
            locks.release(self._lock_fd)
        self._wal_fd = self._lock_fd = None

    # -- marking -------------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        if self.keeps_jobs:
            self.new[job.seq] = job

    def add_plain(self, job: Job) -> None:
        """A new job with nothing but defaults: half of its columns need not be written."""
        if self.keeps_jobs:
            (self.plain if job.size <= LARGE_BYTES else self.new)[job.seq] = job

    def add_plain_batch(self, jobs: list[Job]) -> None:
        if self.keeps_jobs:
            self.plain.update((job.seq, job) for job in jobs if job.size <= LARGE_BYTES)
            self.new.update((job.seq, job) for job in jobs if job.size > LARGE_BYTES)

    def stage(self, job: Job) -> None:
        """A row of a long batch: written with this tick, but not a job before the whole batch is."""
        if self.keeps_jobs:
            self._staged[job.seq] = job

    def open_batch(self, first: int, last: int) -> None:
        if self.keeps_jobs:
            self.later("INSERT INTO batch VALUES (?,?)", first, last)

    def close_batch(self, first: int) -> None:
        if self.keeps_jobs:
            self.later("DELETE FROM batch WHERE first=?", first)

    def drop_batch(self, first: int, last: int) -> None:
        """Delete the rows of an open batch with this tick."""
        self.later("DELETE FROM job WHERE seq BETWEEN ? AND ?", first, last)
        self.later("DELETE FROM payload WHERE seq BETWEEN ? AND ?", first, last)
        self.close_batch(first)

    def drop_unfinished_batches(self) -> dict[int, int]:
        """At start: delete the rows of incomplete batches. Returns those (first -> last) that a full disk retains."""
        batches = {first: last for first, last in self.db.execute("SELECT first, last FROM batch")}
        if not batches:
            return {}
        try:
            with self.db:
                for bounds in batches.items():
                    self.db.execute("DELETE FROM job WHERE seq BETWEEN ? AND ?", bounds)
                    self.db.execute("DELETE FROM payload WHERE seq BETWEEN ? AND ?", bounds)
                self.db.execute("DELETE FROM batch")
        except apsw.FullError:
            return batches
        return {}

    def drop_idle_completions(self) -> int:
        """At start: delete completions of jobs that are gone. Returns the greatest seq that the remaining ones cover.

        New jobs must get numbers above it, or they would count as completed.
        """
        with suppress(apsw.FullError), self.db:
            self.db.execute(f"DELETE FROM completion WHERE {_IDLE}")
        (last,) = next(self.db.execute("SELECT max(last) FROM completion"))
        return last or 0

    def open_clearing(self, event: EventName, queue: str, since: int, last: int, spared: list[int]) -> None:
        if self.keeps_jobs:
            row = (queue, int(event), since, last, _encode(spared))
            self.later("INSERT OR REPLACE INTO clearing VALUES (?,?,?,?,?)", *row)

    def close_clearing(self, event: EventName, queue: str, since: int) -> None:
        if self.keeps_jobs:
            self.later("DELETE FROM clearing WHERE queue=? AND event=? AND since=?", queue, int(event), since)

    def clearings(self) -> list[tuple[EventName, str, int, int, list[int]]]:
        """The open ones, with the arguments of `open_clearing`."""
        rows = self._fetch("SELECT event, queue, since, last, spared FROM clearing")
        decode = msgspec.msgpack.Decoder(list[int]).decode
        try:
            return [(EventName(event), *rest, decode(spared)) for event, *rest, spared in rows]
        except ValueError as error:
            raise Unreadable(f"Storage error: which queues were being emptied cannot be read ({error}).") from error

    def _is_new(self, job: Job) -> bool:
        """Whether the job has no row yet; it is no longer plain then, as something happened to it."""
        if job.seq in self.plain:
            self.new[job.seq] = self.plain.pop(job.seq)
            return True
        return job.seq in self.new

    def touch(self, job: Job) -> None:
        """State, counters, history or result of the job changed."""
        if self.keeps_jobs and not self._is_new(job) and job.seq not in self.rewritten:
            self.finished.pop(job.seq, None)
            self.changed[job.seq] = job

    def finish(self, job: Job) -> None:
        """The job completed. A plain one that was stored before needs only a narrow update."""
        if not self.keeps_jobs:
            return
        seq = job.seq
        is_marked = seq in self.plain or seq in self.new or seq in self.changed or seq in self.rewritten
        if job.history is None and not is_marked:
            self.finished[seq] = job
        else:
            self.touch(job)

    def rewrite(self, job: Job) -> None:
        """Its payload changed too."""
        if self.keeps_jobs and not self._is_new(job):
            self.changed.pop(job.seq, None)
            self.finished.pop(job.seq, None)
            self.rewritten[job.seq] = job

    def settle(self, parent: Job, child_id: str) -> None:
        """A child completed, and its parent waits for others. That is recorded in a table of its own: the row of the
        parent names all children, and rewriting it for each of them would be expensive."""
        seq = parent.seq
        if not self.keeps_jobs or self._is_new(parent) or seq in self.changed or seq in self.rewritten:
            return
        if seq in self._settled:
            self._settled[seq][1].append(child_id)
        else:
            self._settled[seq] = parent, [child_id]

    def bury_id(self, queue: str, custom_id: str, job_id: str, now: int, ttl_ms: int) -> None:
        """Reserve the custom id for this job for so long, whatever happens to the job."""
        self._now = now
        self._tombstones[queue, custom_id] = job_id, now + ttl_ms

    def remove(self, job: Job) -> None:
        if self.keeps_jobs:
            self.changed.pop(job.seq, None)
            self.finished.pop(job.seq, None)
            if self.rewritten.pop(job.seq, None) is not None:
                self.later("DELETE FROM payload WHERE seq=?", job.seq)  # it may have been larger before
            if self._is_new(job):
                del self.new[job.seq]
            elif self._staged.pop(job.seq, None) is None:
                self.gone[job.seq] = job

    def later(self, sql: str, *params: Any) -> None:
        """A statement for the commit of this tick."""
        self._statements.append((sql, params))

    def put_record(self, kind: str, key: str, value: bytes) -> None:
        self.later("INSERT OR REPLACE INTO record VALUES (?,?,?)", kind, key, value)

    def drop_record(self, kind: str, key: str) -> None:
        self.later("DELETE FROM record WHERE kind=? AND key=?", kind, key)

    @property
    def is_dirty(self) -> bool:
        return bool(
            self.plain
            or self._staged
            or self.new
            or self.finished
            or self.changed
            or self.gone
            or self._statements
            or self.rewritten
            or self._settled
            or self._tombstones
            or self._in_transaction
        )

    def touched(self) -> list[Job]:
        marked = (self.plain, self.new, self.finished, self.changed, self.rewritten, self.gone)
        return [job for jobs in marked for job in jobs.values()] + [parent for parent, _ in self._settled.values()]

    # -- the commit ----------------------------------------------------------------------------------------------------

    def commit(self, last_seq: int, totals: Totals) -> None:
        """Write everything marked in one transaction. StorageUnavailable, with nothing written, when that fails."""
        if self._refusal is not None:
            raise self._refusal
        try:
            if self._write_lone(last_seq, totals):
                return
            self._begin()
            self._write_jobs()
            noted, over = self._write_settled()
            if self._tombstones:
                self._write_tombstones()
            self._run_statements()
            mark = (last_seq, _encode(totals), self.new_epoch)
            self.db.execute("UPDATE mark SET last_seq=?, totals=?, epoch=ifnull(?, epoch)", mark)
            self.db.execute("COMMIT")
            self.new_epoch = None
            self._with_settled -= over
            self._with_settled |= noted
        except (apsw.Error, OSError) as error:
            raise StorageUnavailable(describe(error)) from error  # the caller reads `touched`, then rolls back
        self._forget()

    def _write_lone(self, last_seq: int, totals: Totals) -> bool:
        """The whole commit if nothing but one plain job was pushed or completed; False, with nothing done, if more was.

        One statement is a transaction by itself, and its row carries the mark: two thirds of the cost of the long way.
        """
        if self._in_transaction or len(self.plain) + len(self.finished) != 1:
            return False
        if self.new or self.changed or self.rewritten or self.gone or self._staged or self._statements:
            return False
        if self._settled or self._tombstones or self.new_epoch is not None:
            return False
        mark = _MARK.pack(last_seq, *msgspec.structs.astuple(totals))
        if self.plain:
            (job,) = self.plain.values()
            self._run_lone(_INSERT_LONE, (*_plain_row(job), mark))
            self.plain = {}
        else:
            (job,) = self.finished.values()
            self._run_lone(_FINISH_LONE, (job.finished, job.result, mark, job.seq))
            self.finished = {}
            _unload(job)
        return True

    def _run_lone(self, sql: str, params: Row) -> None:
        """Run the one statement, and keep a query open at its first row for the next: with it a commit takes two locks
        on the file, without it six.

        No checkpoint gets past the reader, so that one commit in many is made without; and with it SQLite does not wait
        for others who write.
        """
        if not self._reader_left:
            self._drop_reader()
        if self._writer is None:
            self._writer = self.db.cursor()
        try:
            self._writer.execute(sql, params)
        except apsw.BusyError:
            if self._reader is None:
                raise
            self._drop_reader()
            self._writer.execute(sql, params)
        if self._reader is not None:
            self._reader_left -= 1
        else:
            self._reader_left = _LONE_COMMITS
            with suppress(apsw.Error):  # the commit is done, with or without a reader
                self._reader = self.db.cursor().execute("SELECT 1 FROM mark UNION ALL SELECT 1 FROM mark")

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.close(force=True)
            self._reader = None

    def _begin(self) -> None:
        if not self._in_transaction:
            self._drop_reader()
            self.db.execute("BEGIN IMMEDIATE")
            self._in_transaction = True

    def _write_jobs(self) -> None:
        db = self.db
        if self.plain:
            self._insert_plain(list(self.plain.values()))
        if self._staged:
            plain = [job for job in self._staged.values() if _is_plain(job)]
            self._insert_plain(plain)
            if len(plain) < len(self._staged):
                self._insert_whole([job for job in self._staged.values() if not _is_plain(job)])
        if self.new or self.rewritten:
            self._insert_whole([*self.new.values(), *self.rewritten.values()])
            shrunk = [(job.seq,) for job in self.rewritten.values() if job.size <= LARGE_BYTES]
            db.executemany("DELETE FROM payload WHERE seq=?", shrunk)
        if self.finished:
            self._finish_jobs()
        if self.changed:
            db.executemany(_UPDATE, map(_changes, self.changed.values()))
        if self.gone:
            runs = list(_runs(sorted(self.gone)))
            db.executemany("DELETE FROM job WHERE seq BETWEEN ? AND ?", runs)
            db.executemany(f"DELETE FROM completion WHERE last BETWEEN ? AND ? AND {_IDLE}", runs)
            large_gone = [(job.seq,) for job in self.gone.values() if job.size > LARGE_BYTES]
            if large_gone:
                db.executemany("DELETE FROM payload WHERE seq=?", large_gone)

    def _finish_jobs(self) -> None:
        """Complete plain jobs. Neighbours that ended in the same millisecond without result share one statement."""
        single: list[Row] = []
        run: list[Job] = []
        jobs = sorted(self.finished.values(), key=_seq)
        if jobs[-1].seq - jobs[0].seq == len(jobs) - 1 and set(map(_ending, jobs)) == {(jobs[0].finished, None)}:
            jobs, run = [], jobs  # an ACKB of what a PULLB gave: seen at once instead of job by job
        for job in jobs:
            if run and (job.seq != run[-1].seq + 1 or job.finished != run[-1].finished or job.result is not None):
                self._finish_run(run, single)
                run = []
            if job.result is None:
                run.append(job)
            else:
                single.append((job.finished, job.result, job.seq))
        self._finish_run(run, single)
        self.db.executemany(_FINISH, single)

    def _finish_run(self, run: list[Job], single: list[Row]) -> None:
        if len(run) < _WORTH_A_RANGE:
            single += [(job.finished, None, job.seq) for job in run]
        else:
            self.db.execute(_FINISH_RANGE, (run[0].finished, run[0].seq, run[-1].seq))

    def _insert_whole(self, jobs: list[Job]) -> None:
        self.db.executemany(_INSERT, map(_row, jobs))
        large = [(job.seq, job.data) for job in jobs if job.size > LARGE_BYTES and job.data is not None]
        if large:
            self.db.executemany("INSERT OR REPLACE INTO payload VALUES (?,?)", large)

    def _insert_plain(self, jobs: list[Job]) -> None:
        """Many rows per statement as long as there are many: that saves a third of SQLite's work per row."""
        whole = len(jobs) - len(jobs) % _ROWS_AT_ONCE
        for start in range(0, whole, _ROWS_AT_ONCE):
            values: list[Any] = []
            for job in jobs[start : start + _ROWS_AT_ONCE]:
                values += _plain_row(job)
            self.db.execute(_INSERT_MANY, values)
        if whole < len(jobs):
            self.db.executemany(_INSERT_PLAIN, map(_plain_row, jobs[whole:]))

    def _write_settled(self) -> tuple[set[int], set[int]]:
        """Record children that completed. A parent whose row is rewritten or deleted no longer needs these records.

        Returns the parents that have records now, and those that no longer have any.
        """
        if not self._settled and not self._with_settled:
            return set(), set()
        whole = self.changed.keys() | self.rewritten.keys() | self.gone.keys()
        noted, over = self._settled.keys() - whole, self._with_settled & whole
        self.db.executemany("DELETE FROM settled WHERE parent=?", [(seq,) for seq in over])
        rows = [(seq, child) for seq in noted for child in self._settled[seq][1]]
        self.db.executemany("INSERT OR REPLACE INTO settled VALUES (?,?)", rows)
        return noted, over

    def _write_tombstones(self) -> None:
        """Also delete up to two expired ones for each that is written, so that they cannot pile up."""
        self.db.executemany(_BURY_ID, [(*key, *value) for key, value in self._tombstones.items()])
        self.db.execute(_FORGET_IDS, (self._now, 2 * len(self._tombstones)))

    def _run_statements(self) -> None:
        for sql, params in self._statements:
            self.db.execute(sql, params)
        self._statements.clear()

    def run_early(self) -> None:
        """Execute queued statements now, inside the transaction of this tick, so that a query can see them.

        If that fails the tick is lost: some of them ran, or SQLite has rolled all of it back by itself.
        """
        if self._statements and self._refusal is None:
            try:
                self._begin()
                self._run_statements()
            except apsw.Error as error:
                self._refusal = StorageUnavailable(describe(error))
                self._refusal.__cause__ = error
        if self._refusal is not None:
            raise self._refusal

    def rollback(self) -> None:
        """Roll the transaction back and discard everything that was marked in this tick."""
        self._drop_reader()  # after a disk error SQLite refuses everything until the last reader is gone
        db = self._db
        if db is not None and db.in_transaction:
            # SQLite rolled back by itself when the error was severe; a second failure changes nothing.
            with suppress(apsw.Error):
                db.execute("ROLLBACK")
        self._statements.clear()
        self._forget()

    def _forget(self) -> None:
        self._in_transaction = False
        self._refusal = None
        if self._tombstones:
            self._tombstones = {}
        if self._settled:
            self._settled = {}
        for jobs in (self.new, self.finished, self.changed, self.rewritten):
            for job in jobs.values():
                if job.size > LARGE_BYTES or job.finished is not None:
                    _unload(job)
        for job in self._staged.values():
            if job.size > LARGE_BYTES:
                job.data = None
        self._staged = {}
        self.plain, self.new, self.finished, self.changed, self.rewritten, self.gone = {}, {}, {}, {}, {}, {}

    def probe(self) -> None:
        """Try to write; raises while the disk still refuses.

        It writes something new (SQLite writes nothing for a row that stays the same) and not too little: a disk with
        a few bytes left is not a healthy one.
        """
        try:
            with self.db:
                self.db.execute(
                    "INSERT INTO log (job, at, level, message) VALUES (0, 0, 'info', ?)", ("." * _PROBE_BYTES,)
                )
            with self.db:
                self.db.execute("DELETE FROM log WHERE job=0")
        except (apsw.Error, OSError) as error:
            raise StorageUnavailable(describe(error)) from error

    def sync(self) -> None:
        """fdatasync of the write-ahead log: what was committed survives a power cut. Runs in a worker thread."""
        if self.path is None:
            return
        if self._wal_fd is None:
            self._wal_fd = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(self._wal_fd)
        except OSError:
            self._lost_sync = True
            raise

    def mend_sync(self) -> None:
        """After a failed sync the system may take pages for written that never were, so a later sync proves nothing:
        only a whole checkpoint, which writes them again into the main file, does. Nothing to do otherwise."""
        if not self._lost_sync:
            return
        self._drop_reader()
        try:
            (busy, _, _) = next(self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        except apsw.Error as error:
            raise StorageUnavailable(str(error)) from error
        self._lost_sync = bool(busy)
        if busy:
            raise StorageUnavailable("the write-ahead log is in use")

    # -- reading -------------------------------------------------------------------------------------------------------

    def _fetch(self, sql: str, *params: Any) -> Iterator[Row]:
        """Rows as they are asked for; Unreadable instead of what SQLite raises when it cannot read them."""
        try:
            yield from self.db.execute(sql, params)
        except apsw.Error as error:
            raise Unreadable(
                f"Storage error: the database cannot be read ({error}). Check the disk of the server; if that is "
                "healthy, `headrace doctor` tells what is damaged."
            ) from error

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Report anything that cannot be read while loading as damage, naming the file."""
        try:
            yield
        except (apsw.Error, Unreadable, msgspec.DecodeError, UnicodeDecodeError, struct.error) as unreadable:
            error = unreadable.__cause__ if isinstance(unreadable, Unreadable) else unreadable
            raise StorageUnavailable(
                f"{self.path} is damaged ({error}): see `headrace doctor --data-path {self.path}`, restore a copy "
                "or open another file."
            ) from error

    def mark(self) -> tuple[int, int, Totals]:
        """Number of the last stored event, epoch and counters: those of the table or of the row that is newer."""
        last_seq, epoch, totals = next(self._fetch("SELECT last_seq, epoch, totals FROM mark"))
        (newest,) = next(self._fetch("SELECT max(mark) FROM job"))
        if newest is not None:
            row_seq, *counters = _MARK.unpack(newest)
            if row_seq > last_seq:
                return row_seq, epoch, Totals(*counters)
        return last_seq, epoch, msgspec.msgpack.decode(totals, type=Totals)

    def rows(self) -> Iterator[Row]:
        """Every stored job in push order; payloads of finished jobs stay on disk."""
        completions = self._fetch("SELECT first, last, finished FROM completion ORDER BY last")
        first, last, finished = next(completions, _NO_COMPLETION)
        for row in self._fetch(
            "SELECT seq, id, queue, state, priority, created, run_at, finished, attempts, stalls, name, "
            "CASE WHEN state IN (4, 5) THEN NULL ELSE data END, settings, links, history, "
            f"CASE WHEN length(result) > {SMALL_RESULT_BYTES} THEN NULL ELSE result END, {_SIZE} "
            "FROM job ORDER BY seq"
        ):
            while last < row[0]:
                first, last, finished = next(completions, _NO_COMPLETION)
            yield row if row[0] < first else _completed_row(row, finished)

    def rows_of(self, seqs: Iterable[int]) -> list[Row]:
        """The stored jobs among those numbers."""
        return [row for seq in seqs if (row := self._row(seq)) is not None]

    def _row(self, seq: int) -> Row | None:
        row = next(self._fetch(f"SELECT {_COLUMNS}, {_SIZE} FROM job WHERE seq=?", seq), None)
        sql = "SELECT first, last, finished FROM completion WHERE last >= ? ORDER BY last LIMIT 1"
        first, _, finished = next(self._fetch(sql, seq), _NO_COMPLETION)
        return row if row is None or seq < first else _completed_row(row, finished)

    def data(self, job: Job) -> bytes:
        """The payload of a job that does not hold it in memory."""
        table = "payload" if job.size > LARGE_BYTES else "job"
        found = next(self._fetch(f"SELECT data FROM {table} WHERE seq=?", job.seq), None)
        if found is None or found[0] is None:
            raise StorageUnavailable(f"the payload of job {job.id} is missing from the database")
        return bytes(found[0])

    def result(self, job: Job) -> bytes | None:
        found = next(self._fetch("SELECT result FROM job WHERE seq=?", job.seq), None)
        return None if found is None or found[0] is None else bytes(found[0])

    def numbered(self, queue: str | None, after: int, until: int) -> list[tuple[int, str]]:
        """Number and id of the stored jobs with after < seq <= until, of one queue or of all."""
        sql = "SELECT seq, id FROM job WHERE seq > ? AND seq <= ?"
        if queue is None:
            return list(self._fetch(f"{sql} ORDER BY seq", after, until))
        return list(self._fetch(f"{sql} AND queue = ? ORDER BY seq", after, until, queue))

    def settled(self, seq: int) -> list[str]:
        """Children of a parent that completed after its row was written."""
        if seq not in self._with_settled:
            return []
        return [child for (child,) in self._fetch("SELECT child FROM settled WHERE parent=?", seq)]

    def tombstone(self, queue: str, custom_id: str, now: int) -> str | None:
        """The job for which a custom id is reserved, if any."""
        fresh = self._tombstones.get((queue, custom_id))
        if fresh is not None:
            return fresh[0]
        if (queue, custom_id) in self.recalled:
            return self.recalled[queue, custom_id]
        sql = "SELECT job FROM tombstone WHERE queue=? AND id=? AND expires>?"
        found = next(self._fetch(sql, queue, custom_id, now), None)
        return None if found is None else str(found[0])

    def recall_ids(self, queue: str, custom_ids: Sequence[str], now: int) -> None:
        """Look up what `tombstone` will be asked for in this tick: many together cost far less than one by one."""
        self.recalled.update(((queue, custom_id), None) for custom_id in custom_ids)
        for start in range(0, len(custom_ids), _IDS_AT_ONCE):
            some = custom_ids[start : start + _IDS_AT_ONCE]
            nothing = [None] * (_IDS_AT_ONCE - len(some))
            found = self._fetch(_RECALL_IDS, queue, now, *some, *nothing)
            self.recalled.update(((queue, custom_id), job_id) for custom_id, job_id in found)

    def forget_ids(self, now: int, limit: int) -> None:
        """Drop some of the custom ids whose `idTtl` is over, if there are any."""
        if next(self._fetch("SELECT 1 FROM tombstone WHERE expires <= ? LIMIT 1", now), None) is not None:
            self.later(_FORGET_IDS, now, limit)

    def records(self, kind: str) -> Iterator[tuple[str, bytes]]:
        yield from self._fetch("SELECT key, value FROM record WHERE kind=?", kind)

    def select(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Rows as they are now, with what this tick has changed so far."""
        self.run_early()
        return list(self._fetch(sql, *params))

    def logs(self, seq: int) -> list[tuple[int, str, str]]:
        return self.select("SELECT at, level, message FROM log WHERE job=? ORDER BY entry", seq)

    def logged_jobs(self) -> set[int]:
        return {seq for (seq,) in self._fetch("SELECT DISTINCT job FROM log")}

    def size_bytes(self) -> int:
        if self.path is None:
            return 0
        return sum(_size(Path(f"{self.path}{suffix}")) for suffix in ("", "-wal", "-shm"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def schema_scripts() -> list[str]:
    folder = Path(__file__).with_name("sql")
    names = sorted(entry.name for entry in folder.iterdir() if re.fullmatch(r"\d{4}_\w+\.sql", entry.name))
    return [(folder / name).read_text(encoding="utf-8") for name in names]


def describe(error: Exception) -> str:
    """What an operator needs to know about a failed write."""
    if is_full(error):
        return "Storage is full: nothing was stored. Free disk space; the server resumes by itself."
    return f"Storage error: nothing was stored ({error}). The server resumes when the disk accepts writes again."


def is_full(error: BaseException | None) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, apsw.FullError)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of every run of neighbours in a sorted list."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _completed_row(row: Row, finished: int) -> Row:
    """The row as it would be if its completion had been written into it."""
    fields = dict(zip(_FIELDS, row, strict=True))
    if fields["history"] is not None or fields["finished"] is not None:
        return row
    return tuple((fields | {"state": int(State.COMPLETED), "finished": finished, "data": None}).values())


def _unload(job: Job) -> None:
    """Large and finished payloads are read back from the file on demand, large results too."""
    job.data = None
    if job.result is not None and len(job.result) > SMALL_RESULT_BYTES:
        job.result = None


def _stored_state(job: Job) -> int:
    return int(State.WAITING) if job.state is State.ACTIVE else int(job.state)


def _settings_blob(job: Job) -> bytes | None:
    return None if job.settings is DEFAULT_SETTINGS else _encode(job.settings)


def _is_plain(job: Job) -> bool:
    """Whether a new job needs none of the columns that `_plain_row` leaves out."""
    is_bare = job.links is None and job.history is None and job.settings is DEFAULT_SETTINGS
    return is_bare and job.size <= LARGE_BYTES


def _plain_row(job: Job) -> Row:
    state = job.state
    return (
        job.seq,
        job.id,
        job.queue.name,
        _WAITING if state is _ACTIVE else state,
        job.priority,
        job.created,
        job.run_at,
        job.name,
        job.data,
    )


def _row(job: Job) -> Row:
    return (
        job.seq,
        job.id,
        job.queue.name,
        _stored_state(job),
        job.priority,
        job.created,
        job.run_at,
        job.finished,
        job.attempts,
        job.stalls,
        job.name,
        job.data if job.size <= LARGE_BYTES else None,
        _settings_blob(job),
        None if job.links is None else _encode(job.links),
        None if job.history is None else _encode(job.history),
        job.result,
    )


def _changes(job: Job) -> Row:
    return (
        _stored_state(job),
        job.priority,
        job.run_at,
        job.finished,
        job.attempts,
        job.stalls,
        _settings_blob(job),
        None if job.links is None else _encode(job.links),
        None if job.history is None else _encode(job.history),
        job.result,
        job.seq,
    )
