"""Records of a file, one at a time: JSON lines or CSV. Whatever the size of the file, one record is in memory.

A record knows the line it ends on, for messages, and how far into the file it reaches, for progress.
"""

from __future__ import annotations

import codecs
import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from headrace.cli.session import UsageError
from headrace.errors import InvalidCommand

_SUFFIXES: Final = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv"}
_MAX_CELL: Final = 16 * 1024 * 1024


class Record(NamedTuple):
    value: Any
    line: int
    end: int
    """Bytes of the file up to its end."""


def open_records(path: str) -> BinaryIO:
    if path == "-":
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def format_of(path: str, given: str | None) -> str:
    known = given or _SUFFIXES.get(Path(path).suffix.lower())
    if known is None and path != "-":
        raise UsageError(f"is {path} JSON lines or CSV? Say so with --format jsonl or --format csv")
    return known or "jsonl"


def read_records(source: Iterable[bytes], kind: str) -> Iterator[Record]:
    return _json_lines(source) if kind == "jsonl" else _csv_rows(source)


def at_line(line: int, problem: object) -> InvalidCommand:
    return InvalidCommand(f"line {line}: {problem}")


def _json_lines(source: Iterable[bytes]) -> Iterator[Record]:
    decode = msgspec.json.Decoder().decode
    end = 0
    for number, line in enumerate(source, 1):
        end += len(line)
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not text.strip():
            continue
        try:
            yield Record(decode(text), number, end)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise at_line(number, f"not JSON: {error}") from None


def _csv_rows(source: Iterable[bytes]) -> Iterator[Record]:
    read = _Counted(source)
    csv.field_size_limit(_MAX_CELL)
    rows = csv.DictReader(read)
    try:
        for row in rows:
            if None in row:
                raise at_line(rows.line_num, f"more cells than the {len(rows.fieldnames or ())} columns of the header")
            yield Record(row, rows.line_num, read.end)
    except (csv.Error, UnicodeError) as error:
        raise at_line(rows.line_num, error) from None


class _Counted:
    """Lines of text, and how many bytes they were."""

    def __init__(self, source: Iterable[bytes]) -> None:
        self._lines = iter(source)
        self.end = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        # Spreadsheets begin their files with a byte order mark.
        text = line.decode("utf-8-sig" if self.end == 0 else "utf-8")
        self.end += len(line)
        return text
