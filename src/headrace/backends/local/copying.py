"""A consistent copy of a database file, even while its server keeps writing.

The copy is read within one snapshot, so commits made meanwhile are not in it and do not make it start over. It
is written under a temporary name and renamed when it is complete and synced to disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import apsw
from msgspec import Struct

from headrace.backends.local.segments import sync_folder
from headrace.errors import Refused, StorageUnavailable

_PAGES_AT_ONCE: Final = 1000


class Copied(Struct):
    jobs: int
    bytes: int


def copy_database(source: Path, target: Path, told: Callable[[float], None]) -> Copied:
    """Copy `source` to `target`, which must not exist; `told` hears which part is done, from 0 to 1."""
    if not source.is_file():
        raise Refused(f"{source} does not exist: name the file of the server with --data-path")
    if target.exists():
        raise Refused(f"{target} exists: a backup overwrites nothing, choose another name")
    unfinished = target.with_name(f"{target.name}.part")
    unfinished.unlink(missing_ok=True)
    try:
        jobs = _copy(source, unfinished, told)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.link(unfinished, target)  # unlike a rename it refuses to replace what came in between
        sync_folder(target.parent)
    except FileExistsError:
        raise Refused(f"{target} exists: a backup overwrites nothing, choose another name") from None
    except (apsw.Error, OSError) as error:
        raise StorageUnavailable(f"cannot copy {source} to {target}: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return Copied(jobs, target.stat().st_size)


def _copy(source: Path, target: Path, told: Callable[[float], None]) -> int:
    with closing(apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READONLY)) as reader:
        reader.set_busy_timeout(5000)
        reader.execute("BEGIN")
        (jobs,) = next(reader.execute("SELECT count(*) FROM job"))  # the snapshot begins here
        with closing(apsw.Connection(str(target))) as writer:
            with writer.backup("main", reader, "main") as backup:
                while not backup.done:
                    backup.step(_PAGES_AT_ONCE)
                    told(1 - backup.remaining / max(1, backup.page_count))
            writer.execute("PRAGMA journal_mode=DELETE")  # one file; a server turns the log on again
    return int(jobs)
