"""What a lake holds and how far behind its source it is: from its folders and one command, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import msgspec

from headrace.errors import HeadraceError
from headrace.notation import counted
from headrace.pipeline.eventsource import BEGINNING, Position, check_kept, open_source, slices_between
from headrace.pipeline.lake import Lake
from headrace.pipeline.options import Options, from_offset

_PATIENCE_S: Final = 1.0
"""Somebody looks at the terminal: a server that does not answer now is the answer."""


class Status(msgspec.Struct, rename="camel"):
    """What there is. `newest` and `behind` are null when the source does not answer; `problem` says why."""

    lake: str
    batches: int
    pending: int
    run: int
    facts_due: str | None
    epoch: int
    ingested: int
    newest: int | None = None
    behind: int | None = None
    problem: str | None = None


def status_of(lake: Lake, source: dict[str, str]) -> Status:
    pointer, reached = lake.pointer(), ingested(lake)
    pending = len(lake.batches_after(pointer.batch))
    batches = len(lake.numbered("bronze/events"))
    found = Status(str(lake.root), batches, pending, pointer.run, pointer.facts_due, reached.epoch, reached.seq)
    try:
        window = open_source(Options.parse(source), _PATIENCE_S).window(reached)
        check_kept(window, reached, fail=True)
    except HeadraceError as error:
        found.problem = str(error)
    else:
        found.newest = window.newest.seq
        found.behind = sum(piece.count for piece in slices_between(window.segments, reached, window.newest))
    return found


def lines(status: Status) -> Iterator[str]:
    is_empty = not (status.batches or status.run)
    yield f"lake       {status.lake}{' is empty: run `headrace pipeline run`' if is_empty else ''}"
    if not is_empty:
        yield from _layers(status)
    if status.problem is not None:
        yield f"source     {status.problem}"
    else:
        yield f"source     up to event {status.newest:,}: the lake is {counted(status.behind or 0, 'event')} behind"


def _layers(status: Status) -> Iterator[str]:
    yield f"bronze     {counted(status.batches, 'batch', 'batches')}, {status.pending:,} not in the tables yet"
    yield f"silver     run {status.run}" if status.run else "silver     nothing yet: run `headrace pipeline facts`"
    if status.facts_due is not None:
        yield f"gold       facts since {status.facts_due or 'the beginning'} are due: run `headrace pipeline facts`"
    yield f"ingested   up to event {status.ingested:,} of epoch {status.epoch}"


def ingested(lake: Lake) -> Position:
    """Where the stream into bronze stands, as its checkpoint says."""
    folder = lake.checkpoint / "commits"
    done = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if not done:
        return BEGINNING
    text = (lake.checkpoint / "offsets" / str(max(done))).read_text()
    return from_offset(json.loads(text.splitlines()[-1]))
