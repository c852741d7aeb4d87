"""The SQLite side: schema, versions, one owner, and rows that are built when the tick ends."""

from __future__ import annotations

import contextlib
import errno
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from headrace.backends.base import Totals
from headrace.backends.local.index import Queue
from headrace.backends.local.job import Job
from headrace.backends.local.journal import LARGE_BYTES, FileLocked, Journal, describe, is_full, schema_scripts
from headrace.errors import StorageUnavailable
from headrace.model import DEFAULT_SETTINGS
from headrace.states import State

QUEUE = Queue("q")
Fault = Callable[[Path, Journal], contextlib.AbstractContextManager[None]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal(path)
    journal.open()
    yield journal
    journal.close()


def make(seq: int, data: bytes = b"\x01", **fields: object) -> Job:
    given = {"state": State.WAITING, "priority": 0, "created": 1, "run_at": 1}
    job = Job(seq, f"j{seq}", QUEUE, data, None, DEFAULT_SETTINGS, None, **{**given, **fields})
    job.size = len(data)
    return job


def commit(journal: Journal, seq: int = 1) -> None:
    journal.commit(seq, Totals(pushed=seq))


def ask(path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return list(connection.execute(sql))
    finally:
        connection.close()


class TestIdsThatAreUsedOnce:
    def test_a_batch_of_them_is_looked_up_at_once(self, journal: Journal) -> None:
        for n in range(100):
            journal.bury_id("q", f"id{n}", f"job{n}", now=0, ttl_ms=10)
        commit(journal)
        asked = [f"id{n}" for n in range(50, 150)]
        journal.recall_ids("q", asked, now=5)
        known = [journal.tombstone("q", custom_id, now=5) for custom_id in asked]
        assert known == [*(f"job{n}" for n in range(50, 100)), *[None] * 50]
        assert journal.tombstone("other", "id50", now=5) is None
        journal.bury_id("q", "id149", "new", now=5, ttl_ms=10)
        assert journal.tombstone("q", "id149", now=5) == "new"
        journal.rollback()
        assert journal.tombstone("q", "id149", now=5) is None

    def test_those_whose_time_is_over_go_as_fast_as_new_ones_come(self, path: Path, journal: Journal) -> None:
        for now in range(50):
            for n in range(20):
                journal.bury_id("q", f"{now}-{n}", "job", now=now, ttl_ms=10)
            commit(journal)
        assert ask(path, "SELECT count(*) < 250 FROM tombstone") == [(1,)]


class TestOpening:
    def test_a_new_file_gets_the_newest_schema(self, path: Path, journal: Journal) -> None:
        assert ask(path, "PRAGMA user_version") == [(len(schema_scripts()),)]
        assert ask(path, "SELECT last_seq, epoch FROM mark") == [(0, 1)]

    def test_an_old_file_is_brought_forward_step_by_step(self, path: Path) -> None:
        db = apsw.Connection(str(path))
        db.execute(schema_scripts()[0])
        db.execute("PRAGMA user_version=1")
        db.execute("INSERT INTO job VALUES (7,'old','q',1,0,1,1,NULL,0,0,NULL,x'01',NULL,NULL,NULL,NULL)")
        db.close()
        journal = Journal(path)
        journal.open()
        assert [row[1] for row in journal.rows()] == ["old"]
        journal.close()
        assert ask(path, "PRAGMA user_version") == [(len(schema_scripts()),)]

    def test_a_newer_file_is_refused_and_left_alone(self, path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version=999")
        connection.close()
        journal = Journal(path)
        with pytest.raises(StorageUnavailable, match="newer Headrace"):
            journal.open()
        journal.close()
        assert ask(path, "PRAGMA user_version") == [(999,)]
        assert ask(path, "SELECT name FROM sqlite_master") == []

    def test_a_second_owner_is_refused_with_the_name_of_the_first(self, path: Path, journal: Journal) -> None:
        with pytest.raises(FileLocked, match=r"in use by process \d+"):
            Journal(path).open()

    def test_the_lock_ends_with_its_owner(self, path: Path) -> None:
        for _ in range(3):
            journal = Journal(path)
            journal.open()
            journal.close()

    def test_what_is_no_database_is_refused(self, path: Path) -> None:
        path.write_bytes(b"this is no database at all" * 100)
        with pytest.raises(StorageUnavailable, match="cannot open"):
            Journal(path).open()
        path.unlink()
        journal = Journal(path)  # the refusal kept no lock
        journal.open()
        journal.close()

    def test_a_folder_is_no_file_and_a_missing_one_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable, match="it is a folder; name a file in it"):
            Journal(tmp_path).open()
        assert not tmp_path.with_name(f"{tmp_path.name}.lock").exists()
        with pytest.raises(StorageUnavailable, match=f"no folder {tmp_path / 'gone'}"):
            Journal(tmp_path / "gone" / "jobs.db").open()

    def test_the_database_of_another_program_stays_as_it_is(self, path: Path) -> None:
        with contextlib.closing(apsw.Connection(str(path))) as other:
            other.execute("CREATE TABLE users (name)")
        before = path.read_bytes()
        for _ in range(2):  # the refusal kept no lock
            with pytest.raises(StorageUnavailable, match="the database of another program"):
                Journal(path).open()
        assert path.read_bytes() == before

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable, match="nowhere"):
            Journal(tmp_path / "nowhere" / "jobs.db").open()

    def test_the_write_ahead_log_is_on(self, path: Path, journal: Journal) -> None:
        assert next(journal.db.execute("PRAGMA journal_mode")) == ("wal",)


class TestSchema:
    GOOD = "1,'i','q',1,0,1,1,NULL,0,0,NULL,x'01',NULL,NULL,NULL,NULL,NULL"

    @pytest.mark.parametrize(
        ("column", "value"),
        [(3, "3"), (3, "7"), (3, "0"), (4, "1000001"), (8, "-1"), (9, "-1"), (7, "5"), (1, "NULL"), (0, "'x'")],
    )
    def test_rows_that_make_no_sense_are_refused(self, journal: Journal, column: int, value: str) -> None:
        fields = self.GOOD.split(",")
        journal.db.execute(f"INSERT INTO job VALUES ({self.GOOD})")
        journal.db.execute("DELETE FROM job")
        fields[column] = value
        with pytest.raises(apsw.Error):
            journal.db.execute(f"INSERT INTO job VALUES ({','.join(fields)})")

    @pytest.mark.parametrize("state", [4, 5])
    def test_a_finished_job_has_an_end(self, journal: Journal, state: int) -> None:
        with pytest.raises(apsw.ConstraintError):
            journal.db.execute(f"INSERT INTO job VALUES ({self.GOOD.replace(',1,0,', f',{state},0,', 1)})")

    def test_only_known_records_and_levels(self, journal: Journal) -> None:
        for sql in (
            "INSERT INTO record VALUES ('odd', 'k', x'00')",
            "INSERT INTO log (job, at, level, message) VALUES (1, 1, 'debug', 'm')",
            "INSERT INTO mark VALUES (2, 0, 1, x'00')",
        ):
            with pytest.raises(apsw.ConstraintError):
                journal.db.execute(sql)


class TestTicks:
    def test_a_row_is_what_the_job_is_at_the_end_of_the_tick(self, path: Path, journal: Journal) -> None:
        job = make(1)
        journal.add(job)
        job.priority = 5
        journal.touch(job)
        commit(journal)
        assert ask(path, "SELECT seq, id, priority, data FROM job") == [(1, "j1", 5, b"\x01")]

    def test_a_plain_job_is_stored_whole(self, path: Path, journal: Journal) -> None:
        for seq in range(1, 101):
            journal.add_plain(make(seq, bytes([seq])))
        commit(journal)
        assert len(ask(path, "SELECT seq FROM job")) == 100
        assert ask(path, "SELECT seq, id, queue, state, data FROM job WHERE seq=77") == [(77, "j77", "q", 1, b"M")]

    def test_changed_and_removed(self, path: Path, journal: Journal) -> None:
        first, second = make(1), make(2)
        for job in (first, second):
            journal.add(job)
        commit(journal)
        first.attempts = 3
        journal.touch(first)
        journal.remove(second)
        commit(journal, 2)
        assert ask(path, "SELECT seq, attempts FROM job") == [(1, 3)]

    def test_made_and_gone_in_one_tick_is_never_written(self, path: Path, journal: Journal) -> None:
        for add in (journal.add, journal.add_plain):
            job = make(1)
            add(job)
            journal.touch(job)
            journal.remove(job)
        assert not journal.is_dirty
        commit(journal)
        assert ask(path, "SELECT count(*) FROM job") == [(0,)]

    def test_an_active_job_is_written_as_waiting(self, path: Path, journal: Journal) -> None:
        journal.add(make(1, state=State.ACTIVE))
        commit(journal)
        assert ask(path, "SELECT state FROM job") == [(1,)]

    def test_a_large_payload_lives_apart_and_leaves_memory(self, path: Path, journal: Journal) -> None:
        job = make(1, b"x" * (LARGE_BYTES + 1))
        journal.add(job)
        commit(journal)
        assert job.data is None
        assert ask(path, "SELECT data FROM job") == [(None,)]
        assert journal.data(job) == b"x" * (LARGE_BYTES + 1)
        journal.remove(job)
        commit(journal, 2)
        assert ask(path, "SELECT count(*) FROM payload") == [(0,)]

    def test_a_payload_that_shrinks_leaves_nothing_apart(self, path: Path, journal: Journal) -> None:
        job = make(1, b"x" * (LARGE_BYTES + 1))
        journal.add(job)
        commit(journal)
        job.data, job.size = b"\x02", 1
        journal.rewrite(job)
        commit(journal, 2)
        assert ask(path, "SELECT data FROM job") == [(b"\x02",)]
        assert ask(path, "SELECT count(*) FROM payload") == [(0,)]

    def test_a_finished_job_keeps_its_payload_in_the_file_only(self, journal: Journal) -> None:
        job = make(1)
        journal.add(job)
        commit(journal)
        job.state, job.finished, job.result = State.COMPLETED, 5, b"r" * 2000
        journal.finish(job)
        commit(journal, 2)
        assert (job.data, job.result) == (None, None)
        assert journal.data(job) == b"\x01"
        assert journal.result(job) == b"r" * 2000

    def test_the_mark_moves_with_every_commit(self, journal: Journal) -> None:
        journal.add(make(1))
        commit(journal, 41)
        last_seq, epoch, totals = journal.mark()
        assert (last_seq, epoch, totals.pushed) == (41, 1, 41)

    def test_a_lone_push_or_completion_carries_the_mark_in_its_row(self, path: Path, journal: Journal) -> None:
        job = make(1)
        journal.add_plain(job)
        commit(journal, 7)
        assert journal.mark() == (7, 1, Totals(pushed=7))
        job.state, job.finished = State.COMPLETED, 5
        journal.finish(job)
        commit(journal, 8)
        assert journal.mark() == (8, 1, Totals(pushed=8))
        assert ask(path, "SELECT state, finished FROM job") == [(State.COMPLETED, 5)]
        assert ask(path, "SELECT last_seq FROM mark") == [(0,)], "one page is enough"

    def test_the_newest_mark_counts_wherever_it_is(self, path: Path, journal: Journal) -> None:
        first, second = make(1), make(2)
        for seq, job in ((300, first), (70_000, second)):
            journal.add_plain(job)
            commit(journal, seq)
        first.attempts = 1
        journal.touch(first)
        commit(journal, 70_001)
        assert journal.mark()[0] == 70_001
        journal.add_plain(make(3))
        commit(journal, 70_002)
        assert journal.mark()[0] == 70_002

    def test_a_row_that_goes_does_not_take_the_newest_mark_along(self, path: Path, journal: Journal) -> None:
        job = make(1)
        journal.add_plain(job)
        commit(journal, 7)
        journal.remove(job)
        commit(journal, 8)
        assert ask(path, "SELECT count(*) FROM job") == [(0,)]
        assert journal.mark() == (8, 1, Totals(pushed=8))

    def test_a_new_epoch_asks_for_no_commit_and_is_stored_with_the_next_that_succeeds(self, journal: Journal) -> None:
        journal.new_epoch = 9
        assert not journal.is_dirty
        journal.add(make(1, priority=1_000_001))
        with pytest.raises(StorageUnavailable):
            commit(journal, 7)
        journal.rollback()
        assert journal.mark() == (0, 1, Totals())
        journal.add_plain(make(1))
        commit(journal, 7)
        journal.add_plain(make(2))
        commit(journal, 8)
        assert journal.mark() == (8, 9, Totals(pushed=8))

    def test_a_lone_push_that_fails_leaves_nothing(self, path: Path, journal: Journal) -> None:
        journal.add_plain(make(1, priority=1_000_001))
        with pytest.raises(StorageUnavailable, match="nothing was stored"):
            commit(journal, 7)
        journal.rollback()
        assert ask(path, "SELECT count(*) FROM job") == [(0,)]
        assert journal.mark()[0] == 0

    def test_a_statement_that_fails_leaves_nothing_of_the_tick(self, path: Path, journal: Journal) -> None:
        journal.add(make(1))
        journal.put_record("no such kind", "k", b"v")
        with pytest.raises(StorageUnavailable, match="nothing was stored"):
            commit(journal)
        assert [job.seq for job in journal.touched()] == [1]
        journal.rollback()
        assert not journal.is_dirty
        assert ask(path, "SELECT count(*) FROM job") == [(0,)]
        journal.add(make(2))
        commit(journal)
        assert ask(path, "SELECT seq FROM job") == [(2,)]

    def test_log_lines_of_the_tick_can_be_read(self, journal: Journal) -> None:
        journal.later("INSERT INTO log (job, at, level, message) VALUES (?,?,?,?)", 1, 5, "info", "m")
        assert journal.logs(1) == [(5, "info", "m")]
        journal.rollback()
        assert journal.logs(1) == []

    def test_memory_mode_keeps_no_jobs(self) -> None:
        journal = Journal(None)
        journal.open()
        journal.add(make(1))
        journal.touch(make(1))
        journal.remove(make(1))
        assert not journal.is_dirty
        assert journal.size_bytes() == 0
        journal.close()


class TestReader:
    """A commit keeps a query open so that the next ones take fewer locks; nobody else may feel that."""

    def test_the_write_ahead_log_stays_small_over_thousands_of_commits(self, path: Path, journal: Journal) -> None:
        for seq in range(1, 6001):
            journal.add_plain(make(seq, b"x" * 1000))
            commit(journal, seq)
        log = path.with_name(path.name + "-wal")
        assert log.stat().st_size < 4096 * (2000 + 3 * 256)

    def test_a_commit_waits_for_another_writer(self, path: Path, journal: Journal) -> None:
        journal.add_plain(make(1))
        commit(journal)
        other = subprocess.Popen(
            [sys.executable, "-c", _OTHER_WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"locked\n"
            journal.add_plain(make(2))
            commit(journal, 2)
        assert ask(path, "SELECT count(*) FROM job") == [(2,)]
        assert ask(path, "SELECT count(*) FROM log") == [(1,)]


_OTHER_WRITER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
db.execute("INSERT INTO log (job, at, level, message) VALUES (1, 0, 'info', 'by another process')")
print("locked", flush=True)
time.sleep(0.3)
db.execute("COMMIT")
"""


@contextlib.contextmanager
def locked(path: Path, journal: Journal) -> Iterator[None]:
    """Somebody else writes, for longer than a commit waits."""
    journal.db.set_busy_timeout(10)
    with contextlib.closing(apsw.Connection(str(path))) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@contextlib.contextmanager
def full(path: Path, journal: Journal) -> Iterator[None]:
    """The file may have no more pages."""
    (pages,) = next(journal.db.execute("PRAGMA page_count"))
    journal.db.execute(f"PRAGMA max_page_count={pages}")
    yield
    journal.db.execute("PRAGMA max_page_count=1000000")


@contextlib.contextmanager
def broken(path: Path, journal: Journal) -> Iterator[None]:
    """The system refuses to write any further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name(path.name + "-wal").stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestLoneCommits:
    """A commit of one job tidies up after that job only, and its cursor stays."""

    LONG = b"x" * 10_000

    def test_it_leaves_nothing_for_the_next_tick(self, journal: Journal) -> None:
        jobs = [make(seq) for seq in (1, 2)]
        for job, result in zip(jobs, (b"r" * 1024, b"r" * 1025), strict=True):
            journal.add_plain(job)
            commit(journal, job.seq)
            assert (job.data, journal.is_dirty, journal.touched()) == (b"\x01", False, [])
            job.state, job.finished, job.result = State.COMPLETED, 5, result
            journal.finish(job)
            commit(journal, job.seq + 10)
            assert (journal.is_dirty, journal.touched()) == (False, [])
            assert (job.data, journal.data(job), journal.result(job)) == (None, b"\x01", result)
        assert [job.result for job in jobs] == [b"r" * 1024, None]

    @pytest.mark.parametrize("refuses", [locked, full, broken])
    @pytest.mark.parametrize("is_push", [True, False], ids=["push", "completion"])
    def test_a_refused_one_is_told_whole_and_holds_up_nobody(
        self, path: Path, journal: Journal, refuses: Fault, is_push: bool
    ) -> None:
        stored, job = make(1), make(2, self.LONG)
        journal.add_plain(stored)
        commit(journal, 1)
        if is_push:
            journal.add_plain(job)
        else:
            job = stored
            job.state, job.finished, job.result = State.COMPLETED, 5, self.LONG
            journal.finish(job)
        with refuses(path, journal):
            with pytest.raises(StorageUnavailable, match="nothing was stored"):
                commit(journal, 2)
            assert journal.touched() == [job]
            assert job.data is not None
            journal.rollback()
            assert (journal.is_dirty, journal.touched()) == (False, [])
        with contextlib.closing(apsw.Connection(str(path))) as other:
            assert list(other.execute("SELECT seq, state FROM job")) == [(1, State.WAITING)]
            (is_busy, _, _) = next(other.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
            assert not is_busy, "a statement is still open"
        journal.probe()
        assert journal.mark()[0] == 1
        journal.add_plain(make(3))
        commit(journal, 3)
        assert [row[0] for row in journal.rows()] == [1, 3]
        assert journal.mark()[0] == 3

    def test_the_file_may_be_closed_or_change_in_between(self, path: Path, journal: Journal) -> None:
        def push(seq: int) -> None:
            journal.add_plain(make(seq))
            commit(journal, seq)

        push(1)
        journal.close()
        journal.open()
        push(2)
        with contextlib.closing(apsw.Connection(str(path))) as other:
            other.execute("CREATE INDEX another ON job (created)")
        push(3)
        journal.add(make(4))
        commit(journal, 4)
        push(5)
        journal.rollback()
        journal.db.execute("VACUUM")
        push(6)
        assert [row[0] for row in journal.rows()] == [1, 2, 3, 4, 5, 6]
        assert journal.mark()[0] == 6


class TestErrors:
    @pytest.mark.parametrize(
        "full",
        [apsw.FullError("database or disk is full"), OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "full")],
        ids=["sqlite", "disk", "quota"],
    )
    def test_a_full_disk_is_told_as_such(self, full: Exception) -> None:
        assert is_full(full)
        assert "Free disk space" in describe(full)

    def test_an_error_that_is_no_full_disk_is_told_as_it_is(self) -> None:
        assert not is_full(OSError(5, "Input/output error"))
        assert "Input/output error" in describe(OSError(5, "Input/output error"))

    def test_a_closed_file_says_so(self, journal: Journal) -> None:
        journal.close()
        with pytest.raises(StorageUnavailable, match="closed"):
            journal.mark()


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_a_mistake_of_ours_while_loading_is_not_called_damage(tmp_path: Path, error: type[Exception]) -> None:
    with pytest.raises(error, match="ours"), Journal(tmp_path / "h.db").recovering():
        raise error("ours")
