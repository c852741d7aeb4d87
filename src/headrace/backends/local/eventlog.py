"""The one event log: every state change as one JSON line with a dense seq, in segment files.

It is on the commit path, so `append` is one `os.write` and some integer arithmetic. The order of a tick is
log first, store second:

    log.append(block, ...)        the lines are in the file, readers do not see them yet
    journal commits last_seq      fails? log.undo()
    log.committed = log.last_seq  readers see them

Rules. The log never has a hole or a repeated seq, whatever call failed: a truncation that failed is owed,
and done before the next write. Readers never see beyond `committed`. Only committed events are sealed, and
only sealed files are public. Everything runs on the event loop's thread except `Roll.run` (made for a worker
thread) and the iterator of `read` (safe in one): old segments must be decompressed, so take long replays there,
and keep one iterator rather than asking again page by page.

What is in the folder and what a crash leaves behind is up to `segments.py`. To add a step to the
closing of a segment: give `Roll` a method, call it in `_seal`, and say in `segments.Recovery` what its
absence means.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import zstandard

from headrace.backends.base import SegmentInfo
from headrace.backends.local import locks, segments
from headrace.backends.local.segments import MARK_EVERY, Raw, Recovered, Sealed
from headrace.errors import StorageUnavailable
from headrace.model import Event

_encode_lines: Final = msgspec.json.Encoder().encode_lines
_encode_line: Final = msgspec.json.Encoder().encode
_decode_event: Final = msgspec.json.Decoder(Event).decode
MIB: Final = 1024 * 1024
MAX_READ_BYTES: Final = MIB
"""Lines of the log that one reading takes into memory: an error may be long."""
MAX_PROBLEMS: Final = 100
PROBE_BYTES: Final = 4096
UNREADABLE_POSITIONS: Final = "(unreadable positions.json)"


class LogLimits(msgspec.Struct, frozen=True):
    """How large the log may get. The default is small and bounded; capture sets keep_bytes=None.

    `keep_bytes` respects registered consumer positions, `cap_bytes` does not.
    """

    segment_bytes: int = 64 * MIB  # raw
    segment_ms: int = 60_000
    keep_bytes: int | None = 256 * MIB  # all sealed files together, compressed
    cap_bytes: int | None = 1024 * MIB
    max_events: int = 100_000  # MemoryLog only


def _info(segment: Raw | Sealed, *, is_sealed: bool) -> SegmentInfo:
    raw_bytes = segment.raw_bytes if isinstance(segment, Sealed) else segment.size
    file_bytes = segment.file_bytes if isinstance(segment, Sealed) else segment.size
    times = float(segment.min_ts), float(segment.max_ts)
    return SegmentInfo(segment.first, segment.last, segment.epoch, is_sealed, raw_bytes, file_bytes, *times)


def _unreadable(error: OSError) -> StorageUnavailable:
    return StorageUnavailable(f"Storage error: the event log cannot be read ({error}). Check the disk of the server.")


def _locked(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        locks.take(fd)
    except OSError:
        os.close(fd)
        raise StorageUnavailable(
            f"another server writes its event log to {folder.parent}: stop it, or give each a folder of its own"
        ) from None
    return fd


def decode_events(lines: Iterable[bytes]) -> list[Event]:
    """The events of these lines, or the first of them: not many more than MAX_READ_BYTES."""
    events, size = [], 0
    for line in lines:
        events.append(_decode_event(line))
        size += len(line)
        if size > MAX_READ_BYTES:
            break
    return events


def new_epoch(before: int, now_ms: int) -> int:
    """For a log that begins: higher than that of any log before it, as far as clocks can tell."""
    return max(before + 1, now_ms)


class EventLog:
    """The log in `<root>/shard=0/`. See the module's rules."""

    def __init__(self, folder: Path, found: Recovered, limits: LogLimits, lock_fd: int) -> None:
        self.folder = folder
        self._lock_fd = lock_fd
        self.epoch = found.epoch
        self.limits = limits
        self.last_seq = found.last_seq
        self.committed = found.last_seq
        self.gap = found.gap
        self.retracted = found.retracted
        self.is_new = found.is_new
        self.problems = found.problems
        self._sealed = found.sealed
        self._rolls = [Roll(self, raw) for raw in found.waiting]
        self._open = found.open
        self._fd = os.open(found.open.path, os.O_WRONLY | os.O_APPEND)
        self._next_mark = MARK_EVERY
        self._before_append: tuple[int, int, int, int] | None = None  # last_seq, size, min_ts, max_ts
        self._owes_cut = False
        self.is_full = False
        """Whether the open segment is large enough to be rolled at once."""
        self._positions = self._read_positions()
        self._catalog = threading.Lock()  # guards _sealed, _rolls, _open, _fd and the manifest; never held long
        self._sealing = threading.Lock()  # one segment is sealed at a time, in order
        self._place_next_mark()

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        store_seq: int,
        epoch: int,
        durable: Callable[[str], bool],
        limits: LogLimits,
    ) -> EventLog:
        """Open or create the log and make it agree with a store whose last commit recorded `store_seq`.

        A torn last line goes, and so does everything from the first event above `store_seq` whose name is
        `durable`: its commit never happened. A log that ends below `store_seq` continues after it, with `gap`
        telling the lost seqs; the caller writes the `gap` event. `retracted` tells seqs that had been
        published and were taken back: the caller must raise the epoch (set `log.epoch` before it appends).
        `log.epoch` is higher than `epoch` if the folder has events of a higher one; the caller stores it.
        A log that `is_new` needs an epoch of its own (`new_epoch`): one that it replaces had the same numbers.
        """
        folder = root / "shard=0"
        folder.mkdir(parents=True, exist_ok=True)
        lock_fd = _locked(folder)
        try:
            found = segments.recover(folder, store_seq=store_seq, epoch=epoch, durable=durable)
            log = cls(folder, found, limits, lock_fd)
        except BaseException:
            locks.release(lock_fd)
            raise
        log._seal_waiting()
        return log

    # -- writing ------------------------------------------------------------------------------------------

    def record(self, events: list[Event]) -> None:
        """`append` of events that are not encoded yet."""
        last = events[-1]
        block = _encode_lines(events)
        self.append(block, first_seq=events[0].seq, last_seq=last.seq, count=len(events), ts=last.ts)

    def append(self, block: bytes, *, first_seq: int, last_seq: int, count: int, ts: int) -> None:
        """Write whole lines at the end. On OSError nothing of the block is in the log."""
        last = self.last_seq
        if first_seq != last + 1 or count != last_seq - last:
            raise ValueError(f"events {first_seq}..{last_seq} ({count}) do not follow event {last}")
        if self._owes_cut:
            self._cut()
        raw = self._open
        size = raw.size
        try:
            written = os.write(self._fd, block)
            if written != len(block):
                segments.write_whole(self._fd, block[written:])
        except OSError:
            self._take_back_partial_write()
            raise
        self._before_append = (last, size, raw.min_ts, raw.max_ts)
        if not size:
            raw.min_ts = raw.max_ts = ts
            raw.epoch = self.epoch
        elif ts > raw.max_ts:
            raw.max_ts = ts
        elif ts < raw.min_ts:
            raw.min_ts = ts
        if size >= self._next_mark:
            raw.marks.append((first_seq, size))
            self._next_mark = size + MARK_EVERY
        raw.size = size + len(block)
        raw.last = self.last_seq = last_seq
        self.is_full = raw.size >= self.limits.segment_bytes

    def _take_back_partial_write(self) -> None:
        self._before_append = None  # an undo now must not reach the append before this one
        self._owes_cut = True
        try:
            self._cut()
        except OSError:
            return  # the write's own error is the one to report; the cut is owed

    def undo(self) -> None:
        """Cut the last append back, because its commit failed. Harmless when that append itself failed.

        On OSError the events are gone from the log's point of view all the same, and the cut is owed.
        """
        before = self._before_append
        if before is None:
            return
        if self.committed > before[0]:
            raise ValueError(f"event {self.committed} is committed and cannot be undone")
        raw = self._open
        self.last_seq, raw.size, raw.min_ts, raw.max_ts = before
        raw.last = self.last_seq
        self._before_append = None
        self._place_next_mark()
        self._owes_cut = True
        self._cut()

    def _cut(self) -> None:
        os.ftruncate(self._fd, self._open.size)
        self._owes_cut = False

    def probe(self) -> None:
        """Whether the file takes writes again: a piece of a line, cut off at once. OSError while it does not.

        A crash in between leaves a torn line, which the next start cuts off.
        """
        if self._owes_cut:
            self._cut()
        self._owes_cut = True
        segments.write_whole(self._fd, b" " * PROBE_BYTES)
        self._cut()

    def _place_next_mark(self) -> None:
        marks = self._open.marks
        while marks and marks[-1][1] >= self._open.size:
            marks.pop()
        self._next_mark = (marks[-1][1] if marks else 0) + MARK_EVERY

    # -- closing segments ---------------------------------------------------------------------------------

    def due(self, now_ms: int) -> bool:
        """Whether the open segment is large or old enough to be rolled."""
        raw, limits = self._open, self.limits
        if not raw.size or self.committed < self.last_seq:
            return False
        return raw.size >= limits.segment_bytes or now_ms - raw.min_ts >= limits.segment_ms

    def roll(self) -> Roll | None:
        """Go on in a new open file. None if there is nothing to close, or if its end is not committed yet.

        On OSError nothing has changed.
        """
        if not self._open.size or self.committed < self.last_seq:
            return None
        if self._owes_cut:
            self._cut()
        fresh = segments.create_raw(self.folder, self.last_seq + 1, self.epoch)
        fd = os.open(fresh.path, os.O_WRONLY | os.O_APPEND)
        self._forget_gap_marker()
        roll = Roll(self, self._open)
        with self._catalog:
            os.close(self._fd)
            self._fd, self._open, self._rolls = fd, fresh, [*self._rolls, roll]
        self._before_append = None
        self._next_mark = MARK_EVERY
        self.is_full = False
        return roll

    def _forget_gap_marker(self) -> None:
        """The gap event is committed, and once its segment is trimmed nothing else would tell so."""
        if self.gap is not None:
            (self.folder / segments.gap_name(*self.gap)).unlink(missing_ok=True)

    def _seal_waiting(self) -> None:
        """Finish what an earlier process left, or an earlier attempt. What fails stays readable and waits."""
        try:
            if rolls := self._rolls:
                rolls[-1].run()
            else:
                self._retain()
        except OSError as error:
            self._note(f"segments wait to be compressed: {error}")

    def close(self) -> None:
        """Seal everything and let go of the files. Safe to call twice."""
        if self._fd < 0:
            return
        try:
            self.roll()
        except OSError as error:
            self._note(f"the open segment stays open: {error}")
        self._seal_waiting()
        with self._catalog:
            os.close(self._fd)
            self._fd = -1
        locks.release(self._lock_fd)

    # -- reading ------------------------------------------------------------------------------------------

    @property
    def first_seq(self) -> int:
        """The oldest seq still kept; last_seq + 1 when there is none."""
        with self._catalog:
            if self._sealed:
                return self._sealed[0].first
            return self._rolls[0].raw.first if self._rolls else self._open.first

    def read(self, after_seq: int, limit: int) -> Iterator[bytes]:
        """Lines with seq > after_seq, oldest first, without their newline, at most `limit`.

        Seqs jump where events were trimmed or lost; each line tells its own. StorageUnavailable while the disk
        cannot be read.
        """
        return filter(None, self.stroll(after_seq, limit))

    def stroll(self, after_seq: int, limit: int) -> Iterator[bytes]:
        """`read` with empty lines in between, at which a reader in the loop may give way to others."""
        stop = self.committed
        seq, lost_path = after_seq + 1, None
        while limit > 0 and seq <= stop and (found := self._find(seq)) is not None:
            first, last, path, lines = found
            seq = max(seq, first)
            if seq > stop:
                return  # all that is committed was dropped, and what follows it is of a tick that is not over
            end = min(last, stop, seq + limit - 1)
            try:
                for line in lines(seq):
                    yield line
                    if line:
                        seq, limit = seq + 1, limit - 1
                    if seq > end:
                        break
            except FileNotFoundError:
                # Sealed or trimmed since we looked: look again, but only once per file.
                if path != lost_path:
                    lost_path = path
                    continue
            except OSError as error:  # they are there, and may be read when the disk works again
                raise _unreadable(error) from error
            except zstandard.ZstdError as error:
                self._note(f"{path.name}: {error}")
            if limit > 0:
                if seq <= min(last, stop):
                    self._note(f"{path.name}: events {seq}..{min(last, stop)} cannot be read")
                seq = last + 1

    def listed(self, after: tuple[int, int], limit: int) -> list[SegmentInfo]:
        """Segments with events behind the position `after` (epoch, seq), oldest first, at most `limit`."""
        with self._catalog:
            raws = [*(roll.raw for roll in self._rolls), self._open]
            listed = [
                _info(segment, is_sealed=True) for segment in self._sealed if (segment.epoch, segment.last) > after
            ]
        listed += [_info(raw, is_sealed=False) for raw in raws if raw.size and (raw.epoch, raw.last) > after]
        return listed[:limit]

    def sealed_chunk(self, first: int, offset: int, size: int) -> tuple[bytes, int] | None:
        """Bytes of the sealed segment that begins with event `first`, and its whole length; None if there is none."""
        with self._catalog:
            sealed = next((sealed for sealed in self._sealed if sealed.first == first), None)
        if sealed is None:
            return None
        try:
            return segments.sealed_chunk(self.folder / sealed.name, offset, size), sealed.file_bytes
        except FileNotFoundError:
            return None  # trimmed since we looked
        except OSError as error:
            raise _unreadable(error) from error

    def _find(self, seq: int) -> tuple[int, int, Path, Callable[[int], Iterator[bytes]]] | None:
        """The segment with `seq`, or the next one after it: first, last, path, and lines from a seq on."""
        with self._catalog:
            for sealed in self._sealed:
                if sealed.last >= seq:
                    return self._found_sealed(sealed)
            for raw in [*(roll.raw for roll in self._rolls), self._open]:
                if raw.last >= seq:
                    return self._found_raw(raw)
        return None

    def _found_sealed(self, sealed: Sealed) -> tuple[int, int, Path, Callable[[int], Iterator[bytes]]]:
        path = self.folder / sealed.name
        return sealed.first, sealed.last, path, lambda seq: segments.sealed_lines(path, sealed.first, seq)

    def _found_raw(self, raw: Raw) -> tuple[int, int, Path, Callable[[int], Iterator[bytes]]]:
        return (
            raw.first,
            raw.last,
            raw.path,
            lambda seq: segments.raw_lines(raw.path, raw.offset_before(seq), seq),
        )

    # -- retention ----------------------------------------------------------------------------------------

    def set_position(self, name: str, seq: int) -> None:
        """Register that consumer `name` has taken everything up to `seq`; what is above it is kept for it."""
        positions = {key: value for key, value in self._positions.items() if key != UNREADABLE_POSITIONS}
        self._store_positions({**positions, name: seq})

    def forget_position(self, name: str) -> None:
        """The consumer is gone for good; nothing is kept for it any more."""
        self._store_positions({key: value for key, value in self._positions.items() if key != name})

    @property
    def positions(self) -> dict[str, int]:
        return dict(self._positions)

    def _store_positions(self, positions: dict[str, int]) -> None:
        segments.store_positions(self.folder, positions)
        self._positions = positions

    def _read_positions(self) -> dict[str, int]:
        try:
            return segments.read_positions(self.folder)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self.problems.append(f"positions.json: unreadable ({error}); keeping everything up to the cap")
            return {UNREADABLE_POSITIONS: 0}

    def _retain(self) -> None:
        with self._catalog:
            count, capped_to = self._excess()
            self._drop_oldest(count)
        if capped_to:
            what = "size cap reached: "
            self.problems[:] = [problem for problem in self.problems if not problem.startswith(what)]
            self._note(f"{what}events up to {capped_to} were dropped before they had to go or were taken")

    def _excess(self) -> tuple[int, int]:
        """How many of the oldest segments must go, and the last seq that only the cap drove out (or 0)."""
        limits = self.limits
        lowest = min(self._positions.values(), default=None)
        total = sum(sealed.file_bytes for sealed in self._sealed)
        count = capped_to = 0
        for sealed in self._sealed:
            is_over = limits.keep_bytes is not None and total > limits.keep_bytes
            is_free = is_over and (lowest is None or sealed.last <= lowest)
            is_capped = limits.cap_bytes is not None and total > limits.cap_bytes
            if not is_free and not is_capped:
                break
            capped_to = capped_to if is_free else sealed.last
            total -= sealed.file_bytes
            count += 1
        return count, capped_to

    def _drop_oldest(self, count: int) -> None:
        """Delist, then delete: a listed file that is missing must mean that something went wrong."""
        if not count:
            return
        dropped, kept = self._sealed[:count], self._sealed[count:]
        segments.rewrite_manifest(self.folder, kept)
        self._sealed = kept
        for sealed in dropped:
            # A roll may not have come to its last step: left alone, its raw file would bring the events back.
            (self.folder / segments.raw_name(sealed.first)).unlink(missing_ok=True)
            (self.folder / sealed.name).unlink(missing_ok=True)
        segments.remove_corrupt(self.folder, upto=dropped[-1].last)

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
            del self.problems[:-MAX_PROBLEMS]


class Roll:
    """A closed segment on its way from raw lines to a public compressed file.

    A crash between any two steps loses nothing: the raw file goes last, and `segments.Recovery` redoes
    the rest.
    """

    def __init__(self, log: EventLog, raw: Raw) -> None:
        self.raw = raw
        self._log = log
        self._sealed: Sealed | None = None
        self._temporary = log.folder / f".tmp-{raw.path.name}.zst"

    def run(self) -> None:
        """Seal this segment, after any older one that still waits; then apply retention. For a worker thread.

        On OSError the segment stays readable as it is, and the next roll tries it again.
        """
        log = self._log
        with log._sealing:
            for roll in [roll for roll in log._rolls if roll.raw.first <= self.raw.first]:
                roll._seal()
            log._retain()

    def _seal(self) -> None:
        self.compress()
        self.publish()
        self.record()
        self.discard()

    def compress(self) -> None:
        self._sealed = segments.compress(self.raw, self._temporary)

    def publish(self) -> None:
        """The rename is the moment at which other processes see the segment."""
        self._temporary.replace(self._log.folder / self._described().name)
        segments.sync_folder(self._log.folder)

    def record(self) -> None:
        log, sealed = self._log, self._described()
        with log._catalog:
            segments.append_manifest(log.folder, sealed)
            log._sealed = [*log._sealed, sealed]
            log._rolls = [roll for roll in log._rolls if roll is not self]

    def discard(self) -> None:
        self.raw.path.unlink(missing_ok=True)

    def _described(self) -> Sealed:
        if self._sealed is None:
            raise RuntimeError("compress comes first")
        return self._sealed


class MemoryLog:
    """The same log for `:memory:` servers: the last `max_events` events, no files, nothing to recover."""

    def __init__(self, limits: LogLimits | None = None, *, epoch: int = 0, store_seq: int = 0) -> None:
        self.limits = limits or LogLimits()
        self.epoch = epoch
        self.last_seq = self.committed = store_seq
        self.gap: tuple[int, int] | None = None
        self.retracted: tuple[int, int] | None = None
        self.problems: list[str] = []
        self.positions: dict[str, int] = {}
        self.is_full = False
        self._events: deque[Event] = deque(maxlen=self.limits.max_events)
        self._last_count = 0

    @property
    def first_seq(self) -> int:
        return self.last_seq - len(self._events) + 1

    def record(self, events: list[Event]) -> None:
        """Keep events as they are: they are encoded only if somebody reads them."""
        self._events.extend(events)
        self.last_seq += len(events)
        self._last_count = len(events)

    def undo(self) -> None:
        if self._last_count and self.committed > self.last_seq - self._last_count:
            raise ValueError(f"event {self.committed} is committed and cannot be undone")
        for _ in range(min(self._last_count, len(self._events))):
            self._events.pop()
        self.last_seq -= self._last_count
        self._last_count = 0

    def probe(self) -> None:
        """Memory takes every write."""

    def due(self, now_ms: int) -> bool:
        return False

    def roll(self) -> Roll | None:
        return None

    def read(self, after_seq: int, limit: int) -> Iterator[bytes]:
        first = self.first_seq
        start = max(after_seq + 1, first) - first
        stop = min(self.committed + 1 - first, start + max(0, limit))
        return map(_encode_line, list(islice(self._events, start, max(start, stop))))

    def stroll(self, after_seq: int, limit: int) -> Iterator[bytes]:
        return self.read(after_seq, limit)

    def listed(self, after: tuple[int, int], limit: int) -> list[SegmentInfo]:
        if not self._events or (self.epoch, self.committed) <= after or limit < 1:
            return []
        return [SegmentInfo(self.first_seq, self.committed, self.epoch, False, 0, 0, 0.0, 0.0)]

    def sealed_chunk(self, first: int, offset: int, size: int) -> tuple[bytes, int] | None:
        return None

    def set_position(self, name: str, seq: int) -> None:
        self.positions[name] = seq

    def forget_position(self, name: str) -> None:
        self.positions.pop(name, None)

    def close(self) -> None:
        """Nothing to let go of."""


Log = EventLog | MemoryLog
