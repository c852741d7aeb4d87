"""The history of queues on Valkey as an event log: what brokers and Node processes wrote to the events streams.

Every queue has a stream of its own, trimmed to about a thousand entries by its writers. `Capture` follows all of
them and writes what it finds as one log in the segment format, so that the data pipeline reads it like any other.

Rules. The log is written first, then the positions; after a crash the events behind the stored positions are looked up
in the log, so nothing is captured twice. Valkey counts how many entries were ever added to a stream: if more were added
than were read and remain, the difference is recorded as a `gap` with as many seqs. The streams do not record when a job
was claimed, its hash does: a `pulled` event is made from `processedOn` if that still belongs to the attempt that ended.

To take another kind of entry: its line in `_WORDS`, and its particulars in `_particulars`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headrace.backends.local.eventlog import EventLog, LogLimits, new_epoch
from headrace.backends.local.segments import replace_file
from headrace.backends.valkey.keys import Keys
from headrace.backends.valkey.transport import Transport, answer
from headrace.errors import HeadraceError
from headrace.model import Event

_ENTRIES_AT_ONCE: Final = 1000
_LINES_AT_ONCE: Final = 10_000
_SCAN_EVERY_S: Final = 60.0
_BEGINNING: Final = "0-0"
_MOST_DIGITS: Final = 16
_WORDS: Final = {
    "added": "pushed",
    "promoted": "promoted",
    "active": "waiting",
    "progress": "progress",
    "completed": "completed",
    "retrying": "failed",
    "failed": "failed",
    "stalled": "stalled",
    "expired": "expired",
    "removed": "removed",
    "delay-changed": "delayed",
    "waiting-children": "waiting-children",
    "paused": "paused",
    "resumed": "resumed",
    "drained": "drained",
    "obliterated": "obliterated",
}
"""What an entry is called in the log; all others are `updated`, with their own word as `action`."""
_CLEARING: Final = ("drained", "obliterated")
_ABOUT_QUEUE: Final = ("paused", "resumed", *_CLEARING, "cleaned", "retried")
_ENDS_ATTEMPT: Final = ("completed", "retrying", "failed")


class CapturedEvent(Event, omit_defaults=True, gc=False):
    """An event with the id of the stream entry that it came from; of several, only the last one has it."""

    entry: str = ""


class StreamPlace(msgspec.Struct):
    """How far a stream was read: the last entry, and how many were added up to it in the stream's life."""

    entry: str = _BEGINNING
    added: int = 0


class Progress(msgspec.Struct):
    """What was read of every queue when event `seq` was the last one."""

    seq: int = 0
    streams: dict[str, StreamPlace] = {}
    epoch: int = 1
    """That of the log; older versions knew no other."""


class Entry(NamedTuple):
    queue: str
    id: str
    fields: dict[str, str]

    @property
    def ts(self) -> int:
        return int(self.id.partition("-")[0])

    @property
    def kind(self) -> str:
        return self.fields.get("event", "")

    @property
    def job(self) -> str:
        return "" if self.kind in _ABOUT_QUEUE else self.fields.get("jobId", "")


_decode_event: Final = msgspec.json.Decoder(CapturedEvent).decode


class Capture:
    """Follows the events streams of all queues under a prefix. `poll` reads what is new, `close` seals the log."""

    def __init__(self, server: Transport, keys: Keys, root: Path, limits: LogLimits) -> None:
        self._server = server
        self._keys = keys
        self._root = root
        self._limits = limits
        self._queues: set[str] = set()
        self._scanned_at = float("-inf")
        self._lock = self._locked()
        self._progress = self._stored_progress()
        self.log = self._opened(0)
        self._catch_up()
        if self.log.gap is not None:
            self._write([self._gap_event("", self.log.gap)])

    @property
    def queues(self) -> int:
        return len(self._queues)

    def _locked(self) -> Any:
        self._root.mkdir(parents=True, exist_ok=True)
        file = (self._root / ".capture.lock").open("a")
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except OSError:
            file.close()
            raise HeadraceError(f"another capture writes to {self._root}: stop it, or give another folder") from None
        return file

    def _opened(self, store_seq: int) -> EventLog:
        opened = EventLog.open(
            self._root,
            store_seq=store_seq,
            epoch=self._progress.epoch,
            durable=lambda _event: False,
            limits=self._limits,
        )
        opened.committed = opened.last_seq
        if opened.is_new:
            opened.epoch = new_epoch(opened.epoch, _now_ms())
        self._progress.epoch = opened.epoch
        return opened

    # -- positions -----------------------------------------------------------------------------------------------------

    @property
    def _progress_path(self) -> Path:
        return self._root / "streams.json"

    def _stored_progress(self) -> Progress:
        try:
            return msgspec.json.decode(self._progress_path.read_bytes(), type=Progress)
        except FileNotFoundError:
            return Progress()
        except msgspec.DecodeError as error:
            raise HeadraceError(f"{self._progress_path} is unreadable ({error}): remove it to begin anew") from error

    def _catch_up(self) -> None:
        """Move the stored positions on by what the log has behind them."""
        found = self._progress
        # The end of the log may be lost: then nothing is left to read before its last seq.
        while found.seq < self.log.last_seq and (lines := list(self.log.read(found.seq, _LINES_AT_ONCE))):
            for event in map(_decode_event, lines):
                found.seq = event.seq
                place = found.streams.setdefault(event.queue, StreamPlace())
                if event.entry:
                    _move(place, event.entry)
                elif event.first is not None and event.last is not None:  # a gap
                    place.added += event.last - event.first + 1

    def _store_progress(self) -> None:
        self._progress.seq = self.log.last_seq
        replace_file(self._progress_path, msgspec.json.encode(self._progress))

    # -- reading -------------------------------------------------------------------------------------------------------

    async def poll(self) -> int:
        """Read what is new in all streams; how many entries. Zero means that everything was read."""
        await self._find_queues()
        entries = await self._read_all()
        if entries:
            self._write(self._events_of(entries, await self._starts(entries)))
            for entry in entries:
                _move(self._place(entry.queue), entry.id)
            self._store_progress()
        if self.log.due(_now_ms()) and (roll := self.log.roll()) is not None:
            roll.run()
        return len(entries)

    def _place(self, queue: str) -> StreamPlace:
        return self._progress.streams.setdefault(queue, StreamPlace())

    async def _find_queues(self) -> None:
        """Brokers list their queues. Those that only Node knows are found by their keys, which takes longer."""
        names = await self._server.call(self._keys.queues, "SMEMBERS", self._keys.queues)
        self._queues |= {name.decode() for name in names}
        if time.monotonic() - self._scanned_at < _SCAN_EVERY_S:
            return
        self._scanned_at = time.monotonic()
        start, end = self._stream("*").split("*")
        for primary in self._server.primaries():
            cursor = b""
            while cursor != b"0":
                match = ("MATCH", f"{start}*{end}", "COUNT", 1000, "TYPE", "stream")
                cursor, found = await answer(primary.call("SCAN", cursor or b"0", *match))
                self._queues |= {key.decode()[len(start) : -len(end)] for key in found}

    def _stream(self, queue: str) -> str:
        return f"{self._keys.of(queue)}:events"

    async def _read_all(self) -> list[Entry]:
        """The next entries of every stream, in the order of their time."""
        queues = sorted(self._queues)
        streams = [self._stream(queue) for queue in queues]
        bounds = [(f"({self._place(queue).entry}", "+", "COUNT", _ENTRIES_AT_ONCE) for queue in queues]
        commands = [(key, ("XRANGE", key, *bound)) for key, bound in zip(streams, bounds, strict=True)]
        replies = await self._server.call_many(commands) if commands else []
        found = {queue: entries for queue, entries in zip(queues, replies, strict=True) if entries}
        for queue, entries in found.items():
            await self._check_loss(queue, [entry_id.decode() for entry_id, _ in entries])
        return sorted(
            (_entry(queue, fields) for queue, entries in found.items() for fields in entries),
            key=lambda entry: _order(entry.id),
        )

    async def _check_loss(self, queue: str, just_read: list[str]) -> None:
        """What was added to a stream, is not there any more and was not read, is lost."""
        key, place = self._stream(queue), self._place(queue)
        flat = await self._server.call(key, "XINFO", "STREAM", key)
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        added, length = int(facts[b"entries-added"]), int(facts[b"length"])
        if added < place.added:
            place.added = 0  # the queue was obliterated, and its stream began again
        oldest = facts[b"first-entry"]  # what was read just now may have been cut since
        cut = sum(oldest is None or _order(entry) < _order(oldest[0].decode()) for entry in just_read)
        lost = added - length - place.added - cut
        if lost > 0:
            self._tell_gap(queue, lost)
            place.added += lost

    async def _starts(self, entries: Sequence[Entry]) -> dict[str, int]:
        """When the attempt that an entry ended had begun, by entry id, as far as the job's hash still has it."""
        ending = [entry for entry in entries if entry.kind in _ENDS_ATTEMPT and entry.job]
        commands = [(self._keys.of(e.queue), ("HGET", self._keys.job(e.queue, e.job), "processedOn")) for e in ending]
        found = await self._server.call_many(commands) if commands else []
        begun = [_number(value.decode(errors="replace")) if value else None for value in found]
        known = zip(ending, begun, strict=True)
        return {e.id + e.queue: started for e, started in known if started is not None and started <= e.ts}

    # -- writing -------------------------------------------------------------------------------------------------------

    def _events_of(self, entries: Sequence[Entry], starts: dict[str, int]) -> list[CapturedEvent]:
        events: list[CapturedEvent] = []
        for entry in entries:
            for ts, word, particulars in _told(entry, starts.get(entry.id + entry.queue)):
                seq = self.log.last_seq + len(events) + 1
                event = CapturedEvent(
                    seq=seq, ts=ts, event=word, epoch=self.log.epoch, queue=entry.queue, job=entry.job
                )
                for name, value in particulars.items():
                    setattr(event, name, value)
                if word in _CLEARING:
                    event.last = seq
                events.append(event)
            events[-1].entry = entry.id
        return events

    def _write(self, events: list[CapturedEvent]) -> None:
        self.log.record(list(events))
        self.log.committed = self.log.last_seq

    def _gap_event(self, queue: str, gap: tuple[int, int]) -> CapturedEvent:
        seq, epoch = self.log.last_seq + 1, self.log.epoch
        return CapturedEvent(seq=seq, ts=_now_ms(), event="gap", epoch=epoch, queue=queue, first=gap[0], last=gap[1])

    def _tell_gap(self, queue: str, lost: int) -> None:
        """Leave out as many seqs as entries were lost, and say so in the event behind them."""
        before = self.log.last_seq
        self.log.close()
        self.log = self._opened(before + lost)
        self._write([self._gap_event(queue, (before + 1, before + lost))])

    def close(self) -> None:
        self._store_progress()
        self.log.close()
        self._lock.close()


def _now_ms() -> int:
    return int(time.time() * 1000)


def _order(entry: str) -> tuple[int, int]:
    ms, _, count = entry.partition("-")
    return int(ms), int(count or 0)


def _move(place: StreamPlace, entry: str) -> None:
    place.entry = entry
    place.added += 1


def _entry(queue: str, found: Any) -> Entry:
    entry_id, flat = found
    texts = [part.decode(errors="replace") for part in flat]
    return Entry(queue, entry_id.decode(), dict(zip(texts[::2], texts[1::2], strict=False)))


def _told(entry: Entry, started_at: int | None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The events of one entry: when, what, and its particulars."""
    if started_at is not None:
        yield started_at, "pulled", {}
    yield entry.ts, _WORDS.get(entry.kind, "updated"), _particulars(entry)
    if entry.kind == "retrying":
        yield entry.ts, "retried", {"prev": "failed", "delay": _number(entry.fields.get("delay"))}


def _particulars(entry: Entry) -> dict[str, Any]:
    fields = entry.fields
    match entry.kind:
        case "added":
            return {"name": fields.get("name") or None}
        case "active":
            return {"prev": "waiting-children"}
        case "completed":
            return {"bytes": len(fields.get("returnvalue", ""))}
        case "retrying" | "failed" as kind:
            return {"error": fields.get("failedReason"), "terminal": kind == "failed"}
        case "delay-changed":
            return {"delay": _number(fields.get("delay"))}
        case kind:
            return {} if kind in _WORDS else {"action": kind}


def _number(text: str | None) -> int | None:
    """None for what is no number: any program may write there."""
    return int(text) if text and len(text) <= _MOST_DIGITS and text.isdecimal() else None
