"""What a lake holds and how far behind its source it is: from folders and one question, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator

from headrace.errors import HeadraceError
from headrace.pipeline.eventsource import BEGINNING, Position, open_source
from headrace.pipeline.lake import Lake
from headrace.pipeline.options import Options, from_offset


def lines(lake: Lake, source: dict[str, str]) -> Iterator[str]:
    pointer = lake.pointer()
    batches = lake.numbered("bronze/events")
    yield f"lake       {lake.root}"
    yield f"bronze     {len(batches)} batches, {len(lake.batches_after(pointer.batch))} not told yet"
    yield f"silver     run {pointer.run}" if pointer.run else "silver     nothing yet: run `headrace pipeline facts`"
    if pointer.facts_due is not None:
        yield f"gold       facts since {pointer.facts_due or 'the beginning'} are due: run `headrace pipeline facts`"
    reached = ingested(lake)
    yield f"ingested   up to event {reached.seq:,} of epoch {reached.epoch}"
    try:
        newest = open_source(Options.parse(source).place).newest()
    except HeadraceError as error:
        yield f"source     {error}"
        return
    behind = newest.seq - reached.seq if newest > reached else 0
    yield f"source     up to event {newest.seq:,}: the lake is {behind:,} events behind"


def ingested(lake: Lake) -> Position:
    """Where the stream into bronze stands, as its checkpoint says."""
    folder = lake.checkpoint / "commits"
    done = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if not done:
        return BEGINNING
    text = (lake.checkpoint / "offsets" / str(max(done))).read_text()
    return from_offset(json.loads(text.splitlines()[-1]))
