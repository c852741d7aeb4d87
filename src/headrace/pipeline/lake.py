"""The folders of a lake, and which of their files count. No Spark here.

    bronze/events/batch=N/event_date=D/       events, one folder per micro-batch
    silver/jobs/run=N/finished_date=D/        jobs that ended, one folder per run
    silver/attempts/run=N/ended_date=D/       likewise: gaps, late_events
    silver/open_jobs/run=N/                   jobs that have not ended: only the newest run is kept
    silver/open_attempts/run=N/               their attempts
    gold/<table>/window_date=D/               facts; a date is replaced as a whole
    state/                                    what the pipeline itself needs: not for readers
        pointer.json                          the last run that counts
        open_events/run=N/                    events that the next run processes again
        checkpoint/                           of the stream into bronze
        consumer                              the name under which servers keep events for this lake

Rules. A run writes everything to `staging/` first. It counts from the moment at which `pointer.json` names it; folders
move into place just before, and what it replaces is removed just after. Leftovers of a run that died are removed by the
next one, which does the same work again. So every reader sees plain Parquet, and nothing twice.

The lake is a folder that driver and executors reach under the same path: a local disk, or a shared file system.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec

from headrace.errors import HeadraceError

APPENDED: Final = ("silver/jobs", "silver/attempts", "silver/late_events", "silver/gaps")
"""Tables to which every run adds a folder."""
REPLACED: Final = ("silver/open_jobs", "silver/open_attempts", "state/open_events")
"""Tables of which only the newest run's folder is kept."""
GOLD: Final = ("queue_minute", "queue_hour", "queue_day", "error_signature_hour", "worker_minute")

EVERYTHING: Final = ""
_NUMBERED: Final = re.compile(r"(?:run|batch)=(\d+)")


class LakeBusy(HeadraceError):
    """Another run works on the same lake."""


class Pointer(msgspec.Struct):
    """What counts: runs from `first_run` to `run`, made of bronze batches up to `batch`."""

    run: int = 0
    batch: int = -1
    first_run: int = 0
    """The last run that rebuilt everything: what older ones wrote no longer counts, even if it is still there."""
    epochs: dict[str, int] = {}
    """The highest epoch seen per shard: a higher one makes the next run rebuild everything."""
    sla_ms: dict[str, int] = {}
    facts_due: str | None = None
    """The first hour whose facts are still to be recomputed; EVERYTHING for all of them, None for none."""
    made_at: datetime | None = None
    """When `run` was made: what is dated later comes from a clock that is ahead. None in lakes of older versions."""


class Lake:
    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        # A name of its own: executors of a driver that was killed may still write for a moment.
        self._staging_name = uuid4().hex

    def path(self, table: str) -> Path:
        return self.root / table

    @property
    def checkpoint(self) -> Path:
        return self.root / "state" / "checkpoint"

    def check_checkpoint(self) -> None:
        """Refuse to begin again with batch 0 in a lake that has batches: new events would hide behind their numbers."""
        if self.numbered("bronze/events") and not (self.checkpoint / "offsets").is_dir():
            raise HeadraceError(
                f"{self.root} has events, but {self.checkpoint}, which says how far they go, is gone: bring it back, "
                "or begin another lake"
            )

    @property
    def _pointer_path(self) -> Path:
        return self.root / "state" / "pointer.json"

    def pointer(self) -> Pointer:
        try:
            return msgspec.json.decode(self._pointer_path.read_bytes(), type=Pointer)
        except FileNotFoundError:
            return Pointer()
        except msgspec.DecodeError as error:
            advice = "remove it, and the next run makes everything anew"
            raise HeadraceError(f"{self._pointer_path} is unreadable ({error}): {advice}") from error

    def store_pointer(self, pointer: Pointer) -> None:
        _store(self._pointer_path, msgspec.json.format(msgspec.json.encode(pointer)))

    def consumer(self) -> str:
        """The name under which servers keep events for this lake.

        It is the lake's own: with one name for two lakes, what the faster one has read would be dropped before the
        slower one has. A copy of a lake gets a new one when the file is removed.
        """
        path = self.root / "state" / "consumer"
        if not path.exists():
            _store(path, f"lake-{uuid4().hex[:12]}".encode())
        return path.read_text()

    @contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """One run at a time: two would take the same batches for theirs."""
        folder = self.root / "state"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{what}.lock").open("a") as file:
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except OSError:
                raise LakeBusy(f"another `{what}` works on {self.root}: wait for it, or stop it") from None
            yield

    # -- numbered folders ------------------------------------------------------------------------------------------

    def numbered(self, table: str) -> dict[int, Path]:
        """The folders run=N or batch=N of a table, by number."""
        folder = self.root / table
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        return {int(match[1]): path for path in found if (match := _NUMBERED.fullmatch(path.name))}

    def batches_after(self, batch: int) -> dict[int, Path]:
        """Bronze batches that no run has taken yet."""
        return {number: path for number, path in self.numbered("bronze/events").items() if number > batch}

    def committed(self, table: str) -> list[Path]:
        """The folders of a silver table that count."""
        counting = _counting(table, self.pointer())
        return [path for number, path in self.numbered(table).items() if number in counting and _has_rows(path)]

    # -- a run -----------------------------------------------------------------------------------------------------

    def staging(self, table: str) -> Path:
        return self.root / "staging" / self._staging_name / table

    def clean_up(self, pointer: Pointer) -> None:
        """Remove what does not count: what a run that died has left, and what later runs replaced."""
        shutil.rmtree(self.root / "staging", ignore_errors=True)
        for table in (*APPENDED, *REPLACED):
            for number, path in self.numbered(table).items():
                if number not in _counting(table, pointer):
                    shutil.rmtree(path)

    def publish(self, pointer: Pointer) -> None:
        """Move a staged run into place and let it count; then remove what it replaces."""
        name = f"run={pointer.run}"
        for table in (*APPENDED, *REPLACED):
            staged = self.staging(table)
            if staged.is_dir() and _has_rows(staged):
                target = self.root / table / name
                target.parent.mkdir(parents=True, exist_ok=True)
                staged.rename(target)
        self.store_pointer(pointer)
        self.clean_up(pointer)

    def publish_dates(self, table: str, staged: Path, since: str | None) -> None:
        """Replace the dates of a gold table from `since` on (all of them if None) by the staged ones.

        Each goes by two renames: whoever reads meanwhile may meet a date of before or of now, hardly ever none.
        """
        target, away = self.root / table, self.staging("replaced") / table
        target.mkdir(parents=True, exist_ok=True)
        away.mkdir(parents=True, exist_ok=True)
        old = {path.name for path in target.glob("window_date=*") if since is None or path.name[12:] >= since}
        new = {path.name for path in staged.glob("window_date=*")}
        for name in sorted(old | new):
            if name in old:
                (target / name).rename(away / name)
            if name in new:
                (staged / name).rename(target / name)

    def publish_batch(self, batch: int, staged: Path) -> None:
        """A micro-batch, whole: it takes the place of what an earlier try has left."""
        target = self.root / "bronze/events" / f"batch={batch}"
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.rename(target)

    def staging_batch(self, batch: int) -> Path:
        """Where a micro-batch is written before it counts; what dead drivers have left there goes."""
        folder = self.root / "staging-bronze"
        for old in list(folder.glob("*")) if folder.is_dir() else []:
            if old.name != self._staging_name:
                shutil.rmtree(old, ignore_errors=True)
        return folder / self._staging_name / f"batch={batch}"


def _counting(table: str, pointer: Pointer) -> range:
    """The runs whose folders of a table count."""
    return range(pointer.run if table in REPLACED else pointer.first_run, pointer.run + 1)


def _store(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _has_rows(folder: Path) -> bool:
    return next(folder.rglob("*.parquet"), None) is not None
