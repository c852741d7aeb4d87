"""Reading the event log by position, recording how far a consumer has read, and trimming what is kept.

A position is a pair of epoch and seq: seqs restart from an earlier one when the epoch rises, which is rare (a
restored copy, a new database). `EventSegments` lists what there is. A closed segment is best fetched whole with
`EventSegment` and decompressed by the reader; the open segment, and small pieces, come as lines from `Events`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from headrace.backends.base import SegmentInfo
from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.errors import NotFound
from headrace.model import MAX_SAFE_INTEGER, Count, QueueName

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

Seq = Annotated[int, Meta(ge=0, le=MAX_SAFE_INTEGER)]
Consumer = Annotated[str, Meta(min_length=1, max_length=256)]


class EventWindow(Reply):
    """The newest position, the oldest seq that is kept, and how far each consumer has read."""

    shard: int
    epoch: int
    first: int
    last: int
    segments: list[SegmentInfo]
    positions: dict[str, int]


@command(EventWindow, category="Events", http="GET /event-log/segments")
class ListEventSegments(Command[EventWindow], tag="EventSegments"):
    """The segments of the event log with events after a position, oldest first."""

    epoch: Seq = 0
    after: Seq = 0
    limit: Annotated[int, Meta(ge=0, le=10_000)] = 1000

    async def run(self, engine: Engine, peer: Peer) -> EventWindow:
        epoch, first, last = engine.backend.event_window()
        segments = engine.backend.event_segments((self.epoch, self.after), self.limit)
        positions = engine.backend.event_positions()
        return EventWindow(shard=0, epoch=epoch, first=first, last=last, segments=segments, positions=positions)


class EventLines(Reply):
    """One JSON object per line. `last` is the newest seq that can be read."""

    lines: str
    last: int


@command(EventLines, category="Events", flags=Flag.BULK, http="GET /event-log")
class ReadEvents(Command[EventLines], tag="Events"):
    """Events with a seq above `after`, oldest first: at most `limit`, and about 1 MB at a time.

    The first one may have a higher seq than `after` + 1: what lies between is no longer kept.
    """

    after: Seq = 0
    limit: Annotated[int, Meta(ge=1, le=20_000)] = 1000

    async def run(self, engine: Engine, peer: Peer) -> EventLines:
        lines = await engine.backend.event_lines(self.after, self.limit)
        return EventLines(lines=lines.decode(), last=engine.backend.event_window()[2])


class SegmentChunk(Reply):
    """A piece of the compressed file, and the length of the whole in bytes."""

    data: bytes
    size: int


@command(SegmentChunk, category="Events", errors=("No closed segment begins with event <seq>",))
class ReadEventSegment(Command[SegmentChunk], tag="EventSegment"):
    """A closed segment as stored on disk: JSON lines, compressed with Zstandard.

    It comes in pieces: repeat with a higher `offset` until you have `size` bytes.
    """

    first: Seq
    offset: Seq = 0

    async def run(self, engine: Engine, peer: Peer) -> SegmentChunk:
        data, size = engine.backend.segment_chunk(self.first, self.offset)
        return SegmentChunk(data=data, size=size)


@command(
    Ok,
    category="Events",
    flags=Flag.WRITE,
    http="POST /event-log/consumers/{consumer}",
    errors=("Too many consumers of the event log (max 1000); forget those that are gone",),
)
class SetEventPosition(Command[Ok], tag="EventPosition"):
    """Record that a consumer has read all events up to `seq`; later ones are kept for it, up to the log's size cap."""

    consumer: Consumer
    seq: Seq

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        engine.backend.set_event_position(self.consumer, self.seq)
        return Ok()


@command(
    Ok,
    category="Events",
    flags=Flag.WRITE,
    http="DELETE /event-log/consumers/{consumer}",
    errors=("Consumer not found",),
)
class ForgetEventPosition(Command[Ok], tag="ForgetEventPosition"):
    """Remove a consumer: nothing is kept for it any more."""

    consumer: Consumer

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        if not engine.backend.forget_event_position(self.consumer):
            raise NotFound("Consumer not found")
        return Ok()


class Trimmed(Struct):
    removed: int


class TrimmedReply(Reply):
    data: Trimmed


@command(TrimmedReply, category="Events", flags=Flag.WRITE)
class TrimEvents(Command[TrimmedReply], tag="TrimEvents"):
    """Trim the events kept of a queue; returns how many were removed. On SQLite the log trims itself: 0."""

    queue: QueueName
    max_length: Count

    async def run(self, engine: Engine, peer: Peer) -> TrimmedReply:
        return TrimmedReply(data=Trimmed(await engine.backend.trim_events(self.queue, self.max_length)))
