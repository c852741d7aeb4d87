"""Segment files of the event log: their names, their manifest, and repairing a folder after a crash.

The folder of a log holds

    seg-<first>-<last>.jsonl.zst   sealed: complete, compressed; all that readers in other processes see
    .open-<first>.jsonl            raw lines; the highest one is being written, lower ones wait to be sealed
    manifest.jsonl                 one line per sealed segment, oldest first; can always be rebuilt
    positions.json                 consumer name -> last seq it has read
    .gap-<first>-<last>            seqs known to be lost; stays until an event lies above them
    .retracted-<first>-<last>-<epoch>  published seqs that were withdrawn in this epoch; stays until it rises
    .corrupt-...                   what could not be read, set aside, hidden from readers
    .tmp-...                       unfinished work, removed at start

Rules. Names that begin with a dot are private. A rename is what makes a file public. Inside a segment the
seqs are dense, so line n is event first + n and nothing needs parsing to find a position; a hole can only lie
between two segments. `recover` is the only code that judges a folder, it runs before anything is written, and
it never raises because of what a file contains: it lists it in `problems`.

To add a kind of file: give it a pattern here, decide in `Recovery` what a crash beside it means, and add its
row above.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec
import zstandard

MARK_EVERY: Final = 64 * 1024  # raw bytes between two remembered line starts, so a reader never skips more
CHUNK: Final = 1024 * 1024
SKIP_AT_ONCE: Final = 4096  # lines of a sealed segment
ZSTD_LEVEL: Final = 1
LONGEST_TICK_MS: Final = 5000
"""Events that are further apart are of several ticks, and all but the last of these were committed."""

SEALED_NAME: Final = re.compile(r"seg-(\d{20})-(\d{20})\.jsonl\.zst")
RAW_NAME: Final = re.compile(r"\.open-(\d{20})\.jsonl")
GAP_NAME: Final = re.compile(r"\.gap-(\d{20})-(\d{20})")
RETRACTED_NAME: Final = re.compile(r"\.retracted-(\d{20})-(\d{20})-(\d+)")
CORRUPT_NAME: Final = re.compile(r"\.corrupt-seg-(\d{20})-(\d{20})\.jsonl\.zst")

Durable = Callable[[str], bool]
Stop = Literal["end", "torn", "damaged", "uncommitted"]


class Line(msgspec.Struct):
    """The fields every event has; the rest of the line is the business of others."""

    seq: int
    ts: int
    event: str
    epoch: int


class Sealed(msgspec.Struct, frozen=True):
    """One closed segment, exactly as its manifest line says."""

    first: int
    last: int
    count: int
    min_ts: int
    max_ts: int
    crc32: int
    raw_bytes: int
    file_bytes: int
    epoch: int

    @property
    def name(self) -> str:
        return sealed_name(self.first, self.last)


class Raw(msgspec.Struct):
    """A segment of plain lines: the open one, or one that waits to be sealed. Empty while last < first."""

    path: Path
    first: int
    last: int
    size: int = 0
    min_ts: int = 0
    max_ts: int = 0
    epoch: int = 0
    marks: list[tuple[int, int]] = []  # (seq, offset of its line), sparse

    def offset_before(self, seq: int) -> tuple[int, int]:
        """The nearest known line start at or before `seq`: (seq of that line, offset)."""
        for mark in reversed(self.marks):
            if mark[0] <= seq:
                return mark
        return self.first, 0


_line_decoder = msgspec.json.Decoder(Line)
_sealed_decoder = msgspec.json.Decoder(Sealed)
_encoder = msgspec.json.Encoder()


def sealed_name(first: int, last: int) -> str:
    return f"seg-{first:020}-{last:020}.jsonl.zst"


def raw_name(first: int) -> str:
    return f".open-{first:020}.jsonl"


def gap_name(first: int, last: int) -> str:
    return f".gap-{first:020}-{last:020}"


def create_raw(folder: Path, first: int, epoch: int) -> Raw:
    path = folder / raw_name(first)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    return Raw(path, first, first - 1, epoch=epoch)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(fd: int, block: bytes) -> None:
    """Write all of `block`, however many calls the kernel makes of it."""
    written = os.write(fd, block)
    if written != len(block):
        rest = memoryview(block)[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]


# -- reading ------------------------------------------------------------------------------------------------


def sealed_stream(stream: BinaryIO) -> io.BufferedReader:
    reader = zstandard.ZstdDecompressor().stream_reader(stream)
    return io.BufferedReader(reader, CHUNK)


def sealed_lines(path: Path, first: int, start: int) -> Iterator[bytes]:
    """Lines of a sealed segment from seq `start` on, without their newline.

    An empty line is a pause: many lines were skipped, and whoever must not wait long may give way to others.
    """
    with path.open("rb") as file:
        stream = sealed_stream(file)
        for skipped in range(first, start, SKIP_AT_ONCE):
            deque(islice(stream, min(SKIP_AT_ONCE, start - skipped)), maxlen=0)
            yield b""
        for line in stream:
            yield line[:-1]


def raw_lines(path: Path, near: tuple[int, int], start: int) -> Iterator[bytes]:
    """Lines of a raw segment from seq `start` on; `near` is a known (seq, offset) at or before it."""
    with path.open("rb") as file:
        file.seek(near[1])
        for line in islice(file, start - near[0], None):
            yield line[:-1]


def sealed_chunk(path: Path, offset: int, size: int) -> bytes:
    """A piece of the compressed file as it lies there: readers with a CPU of their own unpack it themselves."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


class Survey(msgspec.Struct):
    """What a walk over a segment's lines found, up to the first line that must not stay."""

    last: int
    size: int = 0
    min_ts: int = 0
    max_ts: int = 0
    epoch: int = 0
    crc32: int = 0
    marks: list[tuple[int, int]] = []
    stop: Stop = "end"

    def add(self, event: Line, line: bytes) -> None:
        if self.size == 0:
            self.min_ts = self.max_ts = event.ts
        if self.size - (self.marks[-1][1] if self.marks else 0) >= MARK_EVERY:
            self.marks.append((event.seq, self.size))
        self.min_ts = min(self.min_ts, event.ts)
        self.max_ts = max(self.max_ts, event.ts)
        self.crc32 = zlib.crc32(line, self.crc32)
        self.last = event.seq
        self.size += len(line)


def survey(lines: Iterable[bytes], first: int, store_seq: int, durable: Durable) -> Survey:
    """Walk the lines until one is torn, damaged, out of order, or belongs to a commit that never happened."""
    found = Survey(last=first - 1)
    try:
        for line in lines:
            if not line.endswith(b"\n"):
                found.stop = "torn"
                return found
            event = _line_decoder.decode(line)
            if event.seq != found.last + 1:
                found.stop = "damaged"
                return found
            found.epoch = event.epoch  # also of what is cut: its numbers begin again in a higher one
            if event.seq > store_seq and durable(event.event):
                found.stop = "uncommitted"
                return found
            found.add(event, line)
    except (msgspec.DecodeError, UnicodeDecodeError, zstandard.ZstdError, OSError):
        found.stop = "damaged"
    return found


def survey_raw(path: Path, first: int, store_seq: int, durable: Durable) -> Survey:
    with path.open("rb") as file:
        found = survey(file, first, store_seq, durable)
        if found.stop == "damaged" and _is_blank_after(file, found.size):
            found.stop = "torn"
    return found


def _is_blank_after(file: BinaryIO, offset: int) -> bool:
    """Power loss can leave the right length with zeros in it: that is a torn tail, not damage."""
    try:
        file.seek(offset)
        return not file.read(CHUNK).rstrip(b"\n\0")
    except OSError:
        return False


def lost_upto(path: Path, offset: int, durable: Durable) -> int | None:
    """The last of the events from `offset` on that needed a commit, if they cannot all be of one tick."""
    first = last = None
    with path.open("rb") as file, contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, OSError):
        file.seek(offset)
        for line in file:
            event = _line_decoder.decode(line)
            if durable(event.event):
                first, last = first or event, event
    return last.seq if first and last and last.ts - first.ts > LONGEST_TICK_MS else None


def survey_sealed(path: Path, first: int, store_seq: int, durable: Durable) -> Survey:
    try:
        with path.open("rb") as file:
            return survey(sealed_stream(file), first, store_seq, durable)
    except OSError:
        return Survey(last=first - 1, stop="damaged")


def _every_line_stays(_event: str) -> bool:
    return False


# -- sealing ------------------------------------------------------------------------------------------------


def compress(raw: Raw, target: Path) -> Sealed:
    """Write the compressed form of `raw` to `target`, on disk when this returns."""
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj(size=raw.size)
    crc, left = 0, raw.size
    with raw.path.open("rb") as source, target.open("wb") as sink:
        while left:
            chunk = source.read(min(CHUNK, left))
            if not chunk:
                raise OSError(f"{raw.path.name} ends {left} bytes before its last event")
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
            sink.write(packer.compress(chunk))
        sink.write(packer.flush())
        sink.flush()
        os.fsync(sink.fileno())
        file_bytes = sink.tell()
    return _describe(raw, raw.first, crc, file_bytes)


def _describe(segment: Raw | Survey, first: int, crc: int, file_bytes: int) -> Sealed:
    return Sealed(
        first=first,
        last=segment.last,
        count=segment.last - first + 1,
        min_ts=segment.min_ts,
        max_ts=segment.max_ts,
        crc32=crc,
        raw_bytes=segment.size,
        file_bytes=file_bytes,
        epoch=segment.epoch,
    )


# -- manifest -----------------------------------------------------------------------------------------------


def manifest_path(folder: Path) -> Path:
    return folder / "manifest.jsonl"


def append_manifest(folder: Path, sealed: Sealed) -> None:
    fd = os.open(manifest_path(folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        try:
            write_whole(fd, _encoder.encode(sealed) + b"\n")
        except OSError:
            os.ftruncate(fd, size)  # half a line would swallow the next one
            raise
    finally:
        os.close(fd)


def rewrite_manifest(folder: Path, sealed: Iterable[Sealed]) -> None:
    replace_file(manifest_path(folder), _encoder.encode_lines(list(sealed)))


def replace_file(path: Path, content: bytes) -> None:
    """Swap a small file's content: a reader, or a crash, sees the old or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(content)
    temporary.replace(path)


def last_sealed(folder: Path) -> int:
    """The last event of all closed segments, by their names; 0 when there is none."""
    matches = (SEALED_NAME.fullmatch(entry.name) for entry in os.scandir(folder))
    return max((int(match[2]) for match in matches if match), default=0)


def read_manifest(folder: Path) -> tuple[dict[str, Sealed], bytes, int]:
    """The readable lines by segment name, the raw content, and how many lines were unreadable."""
    try:
        content = manifest_path(folder).read_bytes()
    except FileNotFoundError:
        return {}, b"", 0
    except OSError:
        return {}, b"", 1
    found, unreadable = {}, 0
    for line in content.splitlines():
        try:
            sealed = _sealed_decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            unreadable += 1
        else:
            found[sealed.name] = sealed
    return found, content, unreadable


def remove_corrupt(folder: Path, *, upto: int) -> None:
    """What was kept aside goes with the segments around it."""
    for entry in list(os.scandir(folder)):
        match = CORRUPT_NAME.fullmatch(entry.name)
        if match and int(match[2]) <= upto:
            Path(entry.path).unlink(missing_ok=True)


# -- consumers ----------------------------------------------------------------------------------------------


def store_positions(folder: Path, positions: dict[str, int]) -> None:
    replace_file(folder / "positions.json", _encoder.encode(positions))


def read_positions(folder: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode((folder / "positions.json").read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}


# -- recovery -----------------------------------------------------------------------------------------------


class Recovered(msgspec.Struct):
    """A whole folder: dense segments, one open file at the end, and what had to be given up."""

    sealed: list[Sealed]
    waiting: list[Raw]
    open: Raw
    last_seq: int
    epoch: int
    """The store's, or a higher one that the folder has: a store that was restored does not know of it."""
    gap: tuple[int, int] | None
    retracted: tuple[int, int] | None
    problems: list[str]
    is_new: bool
    """Nothing is left of any event, and none is known to have been dropped."""


def recover(folder: Path, *, store_seq: int, epoch: int, durable: Durable) -> Recovered:
    """Make the folder whole again and tell what is in it. Only a disk that refuses makes this raise."""
    return Recovery(folder, store_seq, epoch, durable).run()


def lost_commits(folder: Path, store_seq: int, durable: Durable) -> tuple[int, int] | None:
    """The events that `recover` would take back although they were committed. Nothing is changed."""
    names = sorted(entry.name for entry in os.scandir(folder))
    sealed = [(int(match[1]), int(match[2])) for name in names if (match := SEALED_NAME.fullmatch(name))]
    for first, last in sealed:
        if last > store_seq:
            found = survey_sealed(folder / sealed_name(first, last), first, store_seq, durable)
            if found.stop == "uncommitted":
                return found.last + 1, sealed[-1][1]
    raws = [int(match[1]) for name in names if (match := RAW_NAME.fullmatch(name))]
    for first in raws:
        path = folder / raw_name(first)
        found = survey_raw(path, first, store_seq, durable)
        if found.stop == "uncommitted":
            upto = raws[-1] - 1 if raws[-1] > first else lost_upto(path, found.size, durable)
            return None if upto is None else (found.last + 1, upto)
    return None


class Recovery:
    """The steps of `recover`, in the order in which they run. Each may be interrupted and run again."""

    def __init__(self, folder: Path, store_seq: int, epoch: int, durable: Durable) -> None:
        self.folder = folder
        self.store_seq = store_seq
        self.store_epoch = self.epoch = epoch
        self.durable = durable
        self.problems: list[str] = []
        self.retracted: tuple[int, int] | None = None
        self.sealed: list[Sealed] = []
        self.raws: list[Raw] = []
        self.is_new = False
        self.names = sorted(entry.name for entry in os.scandir(folder))

    def run(self) -> Recovered:
        self._remove_unfinished()
        listed, content, unreadable = read_manifest(self.folder)
        if unreadable:
            self.problems.append(f"manifest.jsonl: {unreadable} unreadable lines; rebuilt from the files")
        self._check_sealed(listed)
        lost_firsts = self._name_missing(listed)
        self._recall_retraction()
        self._cut_sealed()
        self._check_raws()
        self._take_back_read()
        opened, gap = self._place_open(lost_firsts)
        waiting = [raw for raw in self.raws if raw.size and raw is not opened]
        self._name_holes([*self.sealed, *waiting, opened])
        self._store_manifest(content)
        return Recovered(
            self.sealed, waiting, opened, opened.last, self.epoch, gap, self.retracted, self.problems, self.is_new
        )

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, list[int]]]:
        for name in self.names:
            if match := pattern.fullmatch(name):
                yield name, [int(group) for group in match.groups()]

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def _remove_unfinished(self) -> None:
        for name in self.names:
            if name.startswith(".tmp-"):
                self._remove(name)

    def _check_sealed(self, listed: dict[str, Sealed]) -> None:
        end = 0
        for name, (first, last) in self._matching(SEALED_NAME):
            sealed = self._trusted(listed.get(name), name) or self._reread(name, first, last)
            if sealed is not None and first <= end:
                self._hide(name, f"repeats events from {first} to {min(end, last)}")
            elif sealed is not None:
                self.sealed.append(sealed)
                self.epoch = max(self.epoch, sealed.epoch)
                end = last

    def _trusted(self, sealed: Sealed | None, name: str) -> Sealed | None:
        """The manifest's word is taken when the size agrees; reading everything would make starts slow."""
        if sealed is None:
            return None
        try:
            return sealed if (self.folder / name).stat().st_size == sealed.file_bytes else None
        except OSError:
            return None

    def _reread(self, name: str, first: int, last: int) -> Sealed | None:
        path = self.folder / name
        found = survey_sealed(path, first, self.store_seq, _every_line_stays)
        raw_is_here = raw_name(first) in self.names
        if found.stop == "end" and found.last == last and last >= first:
            if not raw_is_here:  # with its raw file beside it, only the last steps of sealing were missing
                self.problems.append(f"{name}: not as the manifest says; read again and listed anew")
            return _describe(found, first, found.crc32, path.stat().st_size)
        if raw_is_here:
            self._remove(name)  # it is made again from the raw file
        else:
            self._hide(name, f"unreadable after event {found.last}")
        return None

    def _hide(self, name: str, why: str) -> None:
        self.problems.append(f"{name}: {why}; kept aside as .corrupt-{name}")
        with contextlib.suppress(OSError):
            (self.folder / name).rename(self.folder / f".corrupt-{name}")

    def _name_missing(self, listed: dict[str, Sealed]) -> list[int]:
        """Segments that the manifest lists and nobody has: trimming delists before it deletes."""
        kept = {sealed.name for sealed in self.sealed}
        missing = [sealed for name, sealed in listed.items() if name not in kept]
        gone = [sealed for sealed in missing if sealed.name not in self.names]
        self.problems.extend(f"{sealed.name}: listed in the manifest but gone" for sealed in gone)
        return [sealed.first for sealed in missing if raw_name(sealed.first) not in self.names]

    def _recall_retraction(self) -> None:
        """Report a retraction until the epoch is higher: the caller may have died before it raised it."""
        for name, (first, last, epoch) in self._matching(RETRACTED_NAME):
            if epoch < self.store_epoch:
                self._remove(name)
            else:
                self.retracted = (first, last)
                self.epoch = max(self.epoch, epoch)

    def _cut_sealed(self) -> None:
        """Take back published events of a commit that the store lost (power loss, restored backup)."""
        for sealed in [sealed for sealed in self.sealed if sealed.last > self.store_seq]:
            found = survey_sealed(self.folder / sealed.name, sealed.first, self.store_seq, self.durable)
            if found.stop == "uncommitted":
                self._retract(sealed, found)
                return
            if found.last != sealed.last:
                self._hide(sealed.name, f"unreadable after event {found.last}")
                self.sealed.remove(sealed)

    def _retract(self, cut: Sealed, found: Survey) -> None:
        self._mark_retracted(found.last + 1, self.sealed[-1].last)
        place = self.sealed.index(cut)
        # Later files go first: after a crash in here the next start must meet the same first cut.
        for sealed in reversed(self.sealed[place + 1 :]):
            self._remove(sealed.name)
        for name, (raw_first,) in self._matching(RAW_NAME):
            if raw_first > cut.first:
                self._remove(name)
        self._unpack_prefix(cut, found)
        self._remove(cut.name)
        del self.sealed[place:]
        self.names = sorted(entry.name for entry in os.scandir(self.folder))

    def _mark_retracted(self, first: int, last: int) -> None:
        self.retracted = (first, last)
        (self.folder / f".retracted-{first:020}-{last:020}-{self.epoch}").touch()
        self.problems.append(
            f"events {first}..{last} were committed, but the database does not have what they tell of: it is an older "
            "copy, or has lost its write-ahead log; they were taken back"
        )

    def _take_back_read(self) -> None:
        """The open segment can be read over the wire: what a consumer has of it and the store lost is retracted, too.

        The consumer's position moves back with the log, or what now gets these seqs would not be kept for it.
        """
        end = max([self.store_seq, *(sealed.last for sealed in self.sealed), *(raw.last for raw in self.raws)])
        try:
            positions = read_positions(self.folder)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return  # `EventLog` reports it, and keeps everything
        if (reached := max(positions.values(), default=0)) > end:
            if self.retracted is None:
                self._mark_retracted(end + 1, reached)
            store_positions(self.folder, {name: min(seq, end) for name, seq in positions.items()})

    def _unpack_prefix(self, cut: Sealed, found: Survey) -> None:
        temporary = self.folder / f".tmp-{raw_name(cut.first)}"
        with (self.folder / cut.name).open("rb") as source, temporary.open("wb") as sink:
            for line in islice(sealed_stream(source), found.last - cut.first + 1):
                sink.write(line)
            sink.flush()
            os.fsync(sink.fileno())
        temporary.replace(self.folder / raw_name(cut.first))

    def _check_raws(self) -> None:
        end = self.sealed[-1].last if self.sealed else 0
        is_cut = False
        for name, (first,) in self._matching(RAW_NAME):
            if is_cut or any(sealed.first == first for sealed in self.sealed):
                self._remove(name)  # after the cut, or sealed already
                continue
            if first <= end:
                self._hide(name, f"repeats events from {first} on")
                continue
            raw, stop = self._check_raw(name, first)
            self.raws.append(raw)
            end = max(end, raw.last)
            is_cut = stop == "uncommitted"

    def _check_raw(self, name: str, first: int) -> tuple[Raw, Stop]:
        path = self.folder / name
        found = survey_raw(path, first, self.store_seq, self.durable)
        size = path.stat().st_size
        if found.stop == "damaged":
            self.problems.append(f"{name}: damaged after event {found.last}; {size - found.size} bytes kept aside")
            self._keep_aside(path, found.size)
        self.epoch = max(self.epoch, found.epoch)
        if found.stop == "uncommitted" and self.retracted is None and (last := self._lost_upto(path, first, found)):
            self._mark_retracted(found.last + 1, last)
        if size != found.size:
            os.truncate(path, found.size)
        raw = Raw(path, first, found.last, found.size, found.min_ts, found.max_ts, found.epoch, found.marks)
        return raw, found.stop

    def _lost_upto(self, path: Path, first: int, found: Survey) -> int | None:
        """How far the store had been, if it lost commits. A crash leaves one tick without its commit, at the end."""
        newest = max(other for _, (other,) in self._matching(RAW_NAME))
        return newest - 1 if newest > first else lost_upto(path, found.size, self.durable)

    def _keep_aside(self, path: Path, offset: int) -> None:
        with contextlib.suppress(OSError), path.open("rb") as source:
            source.seek(offset)
            with path.with_name(f".corrupt-{path.name}").open("wb") as sink:
                while piece := source.read(CHUNK):
                    sink.write(piece)

    def _place_open(self, lost_firsts: list[int]) -> tuple[Raw, tuple[int, int] | None]:
        """Find or make the open file at the log's end; a missing stretch before that end is the gap."""
        kept = [raw.last for raw in self.raws if raw.size] + [sealed.last for sealed in self.sealed]
        named_end = self.raws[-1].first - 1 if self.raws else 0
        end = max([self.store_seq, named_end, *kept])
        if kept:
            lost_from = max(kept) + 1
        else:
            marked = [bounds[0] for _, bounds in self._matching(GAP_NAME)]
            lost_from = min([*marked, *lost_firsts, named_end + 1])
        gap = (lost_from, end) if lost_from <= end else None
        self.is_new = lost_from == 1
        self._mark_gap(gap)
        opened = self._reusable(end) or create_raw(self.folder, end + 1, self.epoch)
        for raw in self.raws:
            if not raw.size and raw.path != opened.path:
                raw.path.unlink()
        return opened, gap

    def _reusable(self, end: int) -> Raw | None:
        """The last raw file, if writing may go on in it. A segment never mixes epochs."""
        if not self.raws or self.raws[-1].last != end or self.retracted:
            return None
        raw = self.raws[-1]
        if not raw.size:
            raw.epoch = self.epoch
        return raw if raw.epoch == self.epoch else None

    def _mark_gap(self, gap: tuple[int, int] | None) -> None:
        """Remember the gap in a file name until an event lies above it: the caller may die before that."""
        marker = gap_name(*gap) if gap else ""
        if marker:
            (self.folder / marker).touch()
        for name, _ in self._matching(GAP_NAME):
            if name != marker:
                self._remove(name)

    def _name_holes(self, segments: list[Sealed | Raw]) -> None:
        for before, after in pairwise(segments):
            is_empty = after.last < after.first
            if after.first > before.last + 1 and not is_empty and not self._begins_with_gap(after):
                self.problems.append(f"events {before.last + 1}..{after.first - 1} are missing")

    def _begins_with_gap(self, segment: Sealed | Raw) -> bool:
        try:
            if isinstance(segment, Raw):
                line = next(raw_lines(segment.path, (segment.first, 0), segment.first))
            else:
                line = next(sealed_lines(self.folder / segment.name, segment.first, segment.first))
            return _line_decoder.decode(line).event == "gap"
        except (StopIteration, OSError, zstandard.ZstdError, msgspec.DecodeError):
            return False

    def _store_manifest(self, content: bytes) -> None:
        wanted = _encoder.encode_lines(self.sealed)
        if wanted != content:
            try:
                replace_file(manifest_path(self.folder), wanted)
            except OSError as error:
                self.problems.append(f"manifest.jsonl: could not be rewritten ({error.strerror})")
