"""What the load writes down, in files that outlive whoever wrote them.

Rules: a record is one line in one append, so the lines of processes that are killed are whole or not there. `begin` is
written before a handler does anything and its outcome before the store hears of it; a push is written after it was
acknowledged. Times are seconds since the epoch, of one machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")


class Push(Struct):
    """A push that was acknowledged."""

    job: str
    kind: str
    attempts: int
    key: str
    at: float


class Start(Struct):
    """A workflow whose start was acknowledged."""

    flow: str
    failing: str | None
    at: float


class Run(Struct):
    """The beginning of an execution, or its end: `done`, `failed` or `cancelled`."""

    job: str
    what: str
    attempt: int
    pid: int
    at: float
    key: str = ""
    slot: float | None = None
    """Of a job that a schedule pushed: the moment that it stands for."""


class Ledger:
    """One file of records of one kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, *records: Struct) -> None:
        os.write(self._file, b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def read(path: Path, kind: type[T]) -> list[T]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]


class Tally:
    """How many records a file has, without reading it twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.count = 0

    def renew(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                more = file.read()
            self._read += len(more)
            self.count += more.count(b"\n")
        return self.count
