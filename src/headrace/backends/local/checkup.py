"""What `headrace doctor` checks: the file, and whether a server could read all of its rows.

It opens the file as a server would, which includes crash recovery; jobs and settings stay as they are, and so does the
event log.
"""

from __future__ import annotations

from pathlib import Path

import apsw
from msgspec import Struct

from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.journal import Journal
from headrace.backends.local.slices import run_now
from headrace.errors import StorageUnavailable


class Report(Struct):
    facts: list[str] = []
    problems: list[str] = []


def examine(path: Path) -> Report:
    """Facts and problems of a database file. StorageUnavailable when a server has it open."""
    report = Report()
    if not path.exists():
        report.problems.append(f"{path} does not exist: start a server with `headrace serve --data-path {path}`")
        return report
    journal = Journal(path)
    try:
        journal.open()
    except StorageUnavailable as error:
        report.problems.append(str(error))
        return report
    try:
        _check_file(journal, report)
    finally:
        journal.close()
    if not report.problems:
        _check_contents(path, report)
    return report


def _check_file(journal: Journal, report: Report) -> None:
    try:
        for (verdict,) in journal.db.execute("PRAGMA integrity_check(20)"):
            if verdict != "ok":
                report.problems.append(f"SQLite finds the file damaged: {verdict}")
        report.facts.append(f"{journal.path}: {journal.size_bytes():,} bytes")
        orphans = next(journal.db.execute("SELECT count(*) FROM payload WHERE seq NOT IN (SELECT seq FROM job)"))[0]
        if orphans:
            report.problems.append(f"{orphans} payloads belong to no job")
        missing = next(
            journal.db.execute("SELECT count(*) FROM job WHERE data IS NULL AND seq NOT IN (SELECT seq FROM payload)")
        )[0]
        if missing:
            report.problems.append(f"{missing} jobs have lost their payload")
    except apsw.Error as error:
        report.problems.append(f"SQLite cannot read the file: {error}")


def _check_contents(path: Path, report: Report) -> None:
    """Load the file as a server would; what it would pass over or take back is a problem."""
    backend = LocalBackend(path)
    try:
        backend.look()
        for queue in run_now(backend.queues()):
            n = queue.counts
            report.facts.append(
                f"queue {queue.name}: {n.waiting:,} waiting, {n.delayed:,} delayed, {n.waiting_children:,} blocked, "
                f"{n.completed:,} completed, {n.failed:,} failed{', paused' if queue.paused else ''}"
            )
        report.problems += backend.problems
    except StorageUnavailable as error:
        report.problems.append(str(error))
    finally:
        run_now(backend.close())
