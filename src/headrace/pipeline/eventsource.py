"""Where events come from: a capture folder, or a server over the wire. Both list segments and yield their lines.

A position is (epoch, seq). Seqs begin again from an earlier one when the epoch rises (a restored copy of the database,
or a new one in its place), and then everything of the higher epoch lies behind every position of the lower one.

To add a place that events come from: a class with `window` and `blocks`, and its line in `open_source`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec
import zstandard

from headrace.backends.base import SegmentInfo
from headrace.backends.local.segments import read_manifest, sealed_name
from headrace.commands.eventlog import ListEventSegments, ReadEvents, ReadEventSegment, SetEventPosition
from headrace.errors import HeadraceError, NotFound
from headrace.pipeline.connection import PATIENCE_S, Connection

if TYPE_CHECKING:
    from headrace.pipeline.options import Options

BLOCK_BYTES: Final = 4 << 20
_LINES_AT_ONCE: Final = 20_000
_SEGMENTS_AT_ONCE: Final = 10_000


class Position(NamedTuple):
    """Everything up to here was read."""

    epoch: int
    seq: int


BEGINNING: Final = Position(0, 0)


class Segment(msgspec.Struct, frozen=True):
    """A stretch of the log without a hole."""

    shard: int
    epoch: int
    first: int
    last: int
    raw_bytes: int
    is_sealed: bool

    @property
    def end(self) -> Position:
        return Position(self.epoch, self.last)


class EventWindow(msgspec.Struct):
    """What can be read behind a position: the segments, the oldest seq that is kept at all, and the newest position."""

    segments: list[Segment]
    oldest: int
    newest: Position


class EventSource(Protocol):
    def newest(self) -> Position:
        """The end of the log, as far as it can be read."""

    def window(self, after: Position) -> EventWindow:
        """What there is behind `after`; cheap, also when nothing is new."""

    def blocks(self, segment: Segment, after: int, until: int) -> Iterator[bytes]:
        """Whole lines of the segment, at least those with after < seq <= until."""

    def settle(self, consumer: str, position: Position) -> None:
        """This consumer has processed everything up to `position`: it need not be kept for it."""


class EventsLost(HeadraceError):
    """What should be read next is kept no longer."""


def open_source(options: Options, patience_s: float = PATIENCE_S) -> EventSource:
    """The source that the options name: the capture folder at `path`, or a server."""
    if options.path is not None:
        return CaptureFolder(Path(options.path))
    return ServerLog(options.connect(patience_s))


class CaptureFolder:
    """Closed segments of a `--capture` folder, read as they lie there."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "shard=0"

    def newest(self) -> Position:
        return self.window(BEGINNING).newest

    def window(self, after: Position) -> EventWindow:
        if not self._folder.is_dir():
            raise HeadraceError(f"{self._folder.parent} is no capture folder: start `headrace serve --capture` with it")
        listed = read_manifest(self._folder)[0].values()
        known = [Segment(0, sealed.epoch, sealed.first, sealed.last, sealed.raw_bytes, True) for sealed in listed]
        known.sort(key=lambda segment: segment.end)
        newest = known[-1].end if known else BEGINNING
        oldest = min((segment.first for segment in known), default=1)
        return EventWindow([segment for segment in known if segment.end > after], oldest, newest)

    def blocks(self, segment: Segment, after: int, until: int) -> Iterator[bytes]:
        name = sealed_name(segment.first, segment.last)
        try:
            with (self._folder / name).open("rb") as packed:
                yield from lines_between(_unpacked(packed), segment.first, after, until)
        except FileNotFoundError:
            raise EventsLost(f"{name} is kept no longer: events {segment.first}..{segment.last} are lost") from None

    def settle(self, consumer: str, position: Position) -> None:
        """Positions are the server's to keep: a reader of the folder asks for its segments to be kept by size."""


class ServerLog:
    """The log of a running server: closed segments as they lie on its disk, the rest as lines."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def newest(self) -> Position:
        reply = self._connection.ask(ListEventSegments(limit=0))
        return Position(reply.epoch, reply.last)

    def window(self, after: Position) -> EventWindow:
        segments: list[Segment] = []
        while True:
            asked = ListEventSegments(epoch=after.epoch, after=after.seq, limit=_SEGMENTS_AT_ONCE)
            reply = self._connection.ask(asked)
            segments += [_segment(reply.shard, found) for found in reply.segments]
            newest = Position(reply.epoch, reply.last)
            if newest < after:
                raise HeadraceError(
                    f"the server's event log ends with event {newest.seq:,} of epoch {newest.epoch}, but event "
                    f"{after.seq:,} of epoch {after.epoch} was read from it: it is the log of another database, or an "
                    "older copy of that log; begin another lake"
                )
            if len(reply.segments) < _SEGMENTS_AT_ONCE:
                return EventWindow(segments, reply.first, newest)
            after = segments[-1].end

    def blocks(self, segment: Segment, after: int, until: int) -> Iterator[bytes]:
        if segment.is_sealed:
            yield from lines_between(_unpacked(_Fetched(self._connection, segment)), segment.first, after, until)
            return
        yield from self._lines(max(after, segment.first - 1), until)

    def _lines(self, after: int, until: int) -> Iterator[bytes]:
        """What there is, and then an error if it was not all: a short log may drop events while they are read."""
        missing: int | None = None
        while after < until:
            reply = self._connection.ask(ReadEvents(after=after, limit=min(_LINES_AT_ONCE, until - after)))
            lines = reply.lines.encode()
            if not lines or _first_seq(lines) > after + 1:
                missing = missing or after + 1
            if not lines:
                break
            yield lines
            after = _last_seq(lines)
        if missing is not None:
            raise EventsLost(f"events from {missing} on were dropped while they were read")

    def settle(self, consumer: str, position: Position) -> None:
        self._connection.ask(SetEventPosition(consumer=consumer, seq=position.seq))


def _segment(shard: int, found: SegmentInfo) -> Segment:
    return Segment(shard, found.epoch, found.first, found.last, found.raw_bytes, found.sealed)


class _Seq(msgspec.Struct):
    seq: int


_decode_seq: Final = msgspec.json.Decoder(_Seq).decode


def _first_seq(lines: bytes) -> int:
    return _decode_seq(lines[: lines.find(b"\n")]).seq


def _last_seq(lines: bytes) -> int:
    return _decode_seq(lines[lines.rstrip(b"\n").rfind(b"\n") + 1 :]).seq


class _Fetched:
    """A closed segment of a server as a file to read from, fetched piece by piece."""

    def __init__(self, connection: Connection, segment: Segment) -> None:
        self._connection = connection
        self._segment = segment
        self._offset = 0
        self._left = b""

    def read(self, size: int) -> bytes:
        if not self._left:
            self._left = self._fetch()
            self._offset += len(self._left)
        given, self._left = self._left[:size], self._left[size:]
        return given

    def _fetch(self) -> bytes:
        first = self._segment.first
        try:
            return self._connection.ask(ReadEventSegment(first=first, offset=self._offset)).data
        except NotFound as error:
            raise EventsLost(f"events {first}..{self._segment.last} cannot be read any more: {error}") from error


def _unpacked(packed: Any) -> Iterator[bytes]:
    """Decompressed pieces that end with whole lines."""
    reader = zstandard.ZstdDecompressor().stream_reader(packed)
    rest = b""
    try:
        while piece := reader.read(BLOCK_BYTES):
            whole = piece.rfind(b"\n") + 1
            if whole:
                yield rest + piece[:whole]
                rest = piece[whole:]
            else:
                rest += piece
    except zstandard.ZstdError as error:
        raise EventsLost(f"a segment of the event log is damaged: {error}") from error


def lines_between(blocks: Iterator[bytes], first: int, after: int, until: int) -> Iterator[bytes]:
    """Blocks with wanted lines. Line n of a segment is event first + n, so counting is enough to pass others over, and
    to notice that a file was cut short: decompression does not report it."""
    for block in blocks:
        if first > until:
            return
        last = first + block.count(b"\n") - 1
        if last > after:
            yield block
        first = last + 1
    if first <= until:
        raise EventsLost(f"events {first}..{until} are missing from their segment")


# -- planning -------------------------------------------------------------------------------------------------------


class Slice(msgspec.Struct, frozen=True):
    """The events of one segment with after < seq <= until."""

    segment: Segment
    after: int
    until: int

    @property
    def count(self) -> int:
        return self.until - self.after


def slices_between(segments: list[Segment], start: Position, end: Position) -> list[Slice]:
    """What lies behind `start` and not behind `end`."""
    slices = []
    for segment in segments:
        after = max(start.seq, segment.first - 1) if segment.epoch == start.epoch else segment.first - 1
        until = min(end.seq, segment.last) if segment.epoch == end.epoch else segment.last
        if segment.epoch <= end.epoch and until > after and segment.end > start:
            slices.append(Slice(segment, after, until))
    return slices


def farthest(
    segments: list[Segment], start: Position, max_events: int | None = None, max_bytes: int | None = None
) -> Position:
    """How far a batch from `start` on may reach. It has one event at least if there is any, so that it gets on."""
    position, events, size = start, 0, 0.0
    for piece in slices_between(segments, start, segments[-1].end if segments else start):
        segment = piece.segment
        per_event = max(1.0, segment.raw_bytes / (segment.last - segment.first + 1))
        room = piece.count if max_events is None else max_events - events
        room = min(room, piece.count if max_bytes is None else int((max_bytes - size) / per_event))
        taken = min(piece.count, max(room, 0 if events else 1))
        if not taken:
            break
        position = Position(segment.epoch, piece.after + taken)
        events, size = events + taken, size + taken * per_event
        if taken < piece.count:
            break
    return position


def check_kept(window: EventWindow, start: Position, *, fail: bool) -> None:
    """Refuse to go on behind events that were dropped before they were read, or in another log, if so wanted."""
    if not fail or start == BEGINNING or window.newest <= start:
        return
    if start.seq and any(segment.first == 1 and segment.epoch > start.epoch for segment in window.segments):
        raise EventsLost(
            f"event {start.seq:,} of epoch {start.epoch} was read, but this event log begins with another epoch: it is "
            "that of another database. Begin another lake, or set failOnDataLoss to false (--accept-loss) to go on "
            "with this log."
        )
    if window.oldest > start.seq + 1:
        raise EventsLost(
            f"events {start.seq + 1}..{window.oldest - 1} were dropped before they were read. Set failOnDataLoss to "
            "false (--accept-loss) to go on without them, or have more kept: --capture-max-bytes, or a registered "
            "consumer."
        )


def shared_out(slices: list[Slice], count: int) -> list[list[Slice]]:
    """The slices in `count` parts or less, of about as many events each, in their order."""
    total = sum(piece.count for piece in slices)
    share = max(1, -(-total // max(1, count)))
    parts: list[list[Slice]] = []
    room = 0
    for piece in slices:
        while piece.count:
            if not room:
                parts.append([])
                room = share
            taken = min(room, piece.count)
            parts[-1].append(Slice(piece.segment, piece.after, piece.after + taken))
            piece = Slice(piece.segment, piece.after + taken, piece.until)
            room -= taken
    return parts
