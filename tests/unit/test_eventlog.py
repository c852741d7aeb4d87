"""The event log on real files: dense whatever fails, whole after every crash, bounded.

Faults are real ones: kill -9 of a writing process, a full tmpfs, a file size limit, an append-only inode. The
last three need root or Linux file flags and fail with a message that says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.backends.local import locks
from headrace.backends.local.eventlog import EventLog, Log, LogLimits, MemoryLog
from headrace.model import Event
from tests.scale import scaled

EPOCH = 3
UNLIMITED = LogLimits(keep_bytes=None, cap_bytes=None)
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS = 0x80086601, 0x40086602  # linux/fs.h; Python has no names for them
FS_APPEND_FL = 0x20


def is_durable(event: str) -> bool:
    return event != "progress"


def nothing_is_durable(event: str) -> bool:
    return False


def line(seq: int, event: str = "pushed", *, ts: int | None = None, epoch: int = EPOCH, pad: int = 0) -> bytes:
    fields = {"seq": seq, "ts": 1_000 + seq if ts is None else ts, "event": event, "epoch": epoch}
    return msgspec.json.encode({**fields, "queue": "mails", "pad": "x" * pad})


def open_log(
    root: Path,
    store_seq: int,
    *,
    durable: Callable[[str], bool] = is_durable,
    limits: LogLimits = UNLIMITED,
    epoch: int = EPOCH,
) -> EventLog:
    return EventLog.open(root, store_seq=store_seq, epoch=epoch, durable=durable, limits=limits)


def append(log: Log, count: int = 1, event: str = "pushed", *, pad: int = 0, commit: bool = True) -> list[bytes]:
    first = log.last_seq + 1
    lines = [line(seq, event, epoch=log.epoch, pad=pad) for seq in range(first, first + count)]
    if isinstance(log, MemoryLog):
        events = [msgspec.json.decode(text, type=Event) for text in lines]
        log.record(events)
        lines = [msgspec.json.encode(event) for event in events]
    else:
        block = b"".join(text + b"\n" for text in lines)
        log.append(block, first_seq=first, last_seq=first + count - 1, count=count, ts=1_000 + first)
    if commit:
        log.committed = log.last_seq
    return lines


def kept(log: Log, after: int = 0, limit: int = 1_000_000) -> list[bytes]:
    return list(log.read(after, limit))


def seqs(log: Log, after: int = 0, limit: int = 1_000_000) -> list[int]:
    return [msgspec.json.decode(text)["seq"] for text in kept(log, after, limit)]


def abandon(log: EventLog) -> None:
    """What a killed process leaves: files as they are, nothing closed in order."""
    os.close(log._fd)
    log._fd = -1
    locks.release(log._lock_fd)


def roll_now(log: EventLog) -> None:
    roll = log.roll()
    assert roll is not None
    roll.run()


def keep_newest(log: EventLog, segments: int) -> int:
    """Retention, as after a roll, with room for so many closed segments; how many events went."""
    limits, before = log.limits, log._sealed
    kept_bytes = sum(sealed.file_bytes for sealed in before[max(0, len(before) - segments) :])
    log.limits = msgspec.structs.replace(limits, keep_bytes=kept_bytes)
    log._retain()
    log.limits = limits
    return sum(sealed.count for sealed in before if sealed not in log._sealed)


def shard(root: Path) -> Path:
    return root / "shard=0"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in shard(root).iterdir())


def public_names(root: Path) -> list[str]:
    return [name for name in names(root) if name.startswith("seg-")]


def manifest(root: Path) -> list[dict[str, int]]:
    return [msgspec.json.decode(text) for text in (shard(root) / "manifest.jsonl").read_bytes().splitlines()]


def unpack(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()


def open_file(root: Path) -> Path:
    return max(path for path in shard(root).iterdir() if path.name.startswith(".open-"))


# -- appending and undoing ---------------------------------------------------------------------------------


def test_a_new_log_starts_empty_in_a_folder_it_makes(tmp_path: Path) -> None:
    log = EventLog.open(tmp_path / "a" / "b", store_seq=0, epoch=EPOCH, durable=is_durable, limits=LogLimits())
    assert (log.last_seq, log.committed, log.first_seq, log.gap, log.problems) == (0, 0, 1, None, [])
    assert (tmp_path / "a" / "b" / "shard=0" / ".open-00000000000000000001.jsonl").exists()


def test_append_undo_append_leaves_dense_lines(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    first = append(log, 3)
    append(log, 2, pad=500, commit=False)
    log.undo()
    assert log.last_seq == 3
    second = append(log, 4)
    assert kept(log) == first + second
    assert open_file(tmp_path).read_bytes() == b"".join(text + b"\n" for text in first + second)


def test_readers_do_not_see_what_is_not_committed(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 3)
    append(log, 2, commit=False)
    assert seqs(log) == [1, 2, 3]
    log.committed = 4
    assert seqs(log) == [1, 2, 3, 4]


def test_a_block_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 2)
    with pytest.raises(ValueError, match=r"4\.\.4 .* do not follow event 2"):
        log.append(line(4) + b"\n", first_seq=4, last_seq=4, count=1, ts=1)
    with pytest.raises(ValueError, match="do not follow"):
        log.append(line(3) + b"\n", first_seq=3, last_seq=4, count=1, ts=1)
    assert seqs(log) == [1, 2]


def test_committed_events_cannot_be_undone(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 2)
    with pytest.raises(ValueError, match="event 2 is committed"):
        log.undo()
    assert seqs(log) == [1, 2]


def test_undo_reaches_only_one_append_back(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 2, commit=False)
    append(log, 2, commit=False)
    log.undo()
    log.undo()
    assert log.last_seq == 2


# -- disks that refuse -------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size`: the kernel writes what fits, then refuses (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def append_only(path: Path) -> Iterator[None]:
    """Meanwhile the kernel refuses to shorten the file, as after `chattr +a`."""
    with path.open("rb") as file:
        flags = array("i", [0])
        try:
            fcntl.ioctl(file, FS_IOC_GETFLAGS, flags)
            fcntl.ioctl(file, FS_IOC_SETFLAGS, array("i", [flags[0] | FS_APPEND_FL]))
        except OSError as error:
            pytest.fail(f"this test makes a file append-only: it needs root and a file system with flags ({error})")
        try:
            yield
        finally:
            fcntl.ioctl(file, FS_IOC_SETFLAGS, flags)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"this test mounts a 1 MiB tmpfs: it needs root ({done.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_short_write_that_ends_in_an_error_leaves_nothing_of_the_block(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    before = append(log, 5)
    size = open_file(tmp_path).stat().st_size
    with file_size_limit(size + 150), pytest.raises(OSError, match="too large") as refused:
        append(log, 5)
    assert refused.value.errno == errno.EFBIG
    assert open_file(tmp_path).stat().st_size == size
    log.undo()  # the caller's failure path may call it: it must not reach the committed block before
    assert kept(log) == before
    assert kept(log) + append(log, 5) == kept(log)


def append_until_refused(log: EventLog, written: list[bytes]) -> None:
    for _ in range(10_000):
        written += append(log, 16, pad=100)


def test_a_full_disk_raises_enospc_and_the_log_goes_on_when_space_returns(tiny_disk: Path) -> None:
    log = open_log(tiny_disk, 0)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"x" * 600_000)
    written: list[bytes] = []
    with pytest.raises(OSError, match="No space") as refused:
        append_until_refused(log, written)
    assert refused.value.errno == errno.ENOSPC
    assert len(written) > 100
    assert log.last_seq == len(written)
    assert kept(log) == written
    ballast.unlink()
    written += append(log, 16, pad=100)
    abandon(log)
    again = open_log(tiny_disk, len(written))
    assert (again.gap, again.problems) == (None, [])
    assert kept(again) == written


def test_a_segment_that_cannot_be_compressed_stays_readable_and_is_sealed_later(tiny_disk: Path) -> None:
    log = open_log(tiny_disk, 0)
    rng = random.Random(1)
    noise = b"".join(
        msgspec.json.encode({"seq": seq, "ts": seq, "event": "pushed", "epoch": EPOCH, "x": rng.randbytes(300).hex()})
        + b"\n"
        for seq in range(1, 801)
    )
    log.append(noise, first_seq=1, last_seq=800, count=800, ts=5)
    log.committed = 800
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"x" * (1024 * 1024 - len(noise) - 60_000))
    roll = log.roll()
    assert roll is not None
    with pytest.raises(OSError, match="No space"):
        roll.run()
    assert len(seqs(log)) == 800
    assert public_names(tiny_disk) == []
    ballast.unlink()
    append(log, 2)
    roll_now(log)
    assert len(public_names(tiny_disk)) == 2
    assert seqs(log) == list(range(1, 803))


def test_an_undo_that_the_disk_refuses_is_made_before_the_next_append(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    before = append(log, 2)
    append(log, 3, pad=50, commit=False)
    with append_only(open_file(tmp_path)):
        with pytest.raises(PermissionError):
            log.undo()
        assert log.last_seq == 2
        with pytest.raises(PermissionError):
            append(log, 1)
        with pytest.raises(PermissionError):
            log.roll()
        assert kept(log) == before
    after = append(log, 4)
    assert kept(log) == before + after
    assert open_file(tmp_path).read_bytes() == b"".join(text + b"\n" for text in before + after)


# -- recovery ----------------------------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_of_the_last_line_is_cut(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 3)
    abandon(log)
    content = open_file(tmp_path).read_bytes()
    last_line = content[:-1].rindex(b"\n") + 1
    for length in range(last_line, len(content)):
        open_file(tmp_path).write_bytes(content[:length])
        log = open_log(tmp_path, 2)
        assert (log.last_seq, log.gap, log.problems) == (2, None, [])
        append(log, 1, "progress")
        assert seqs(log) == [1, 2, 3]
        abandon(log)


def test_zeros_after_the_last_line_are_a_torn_tail(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 3)
    abandon(log)
    with open_file(tmp_path).open("ab") as file:
        file.write(b"\0" * 5000)
    log = open_log(tmp_path, 3)
    assert (log.last_seq, log.problems, seqs(log)) == (3, [], [1, 2, 3])


@pytest.mark.parametrize(
    ("events", "store_seq", "last_seq"),
    [
        (["pushed", "pushed", "pushed"], 3, 3),
        (["pushed", "pushed", "pushed"], 1, 1),
        (["pushed", "progress", "progress"], 1, 3),
        (["pushed", "progress", "pushed", "progress"], 1, 2),
        (["progress", "progress"], 0, 2),
        (["pushed"], 0, 0),
        (["progress", "pushed"], 0, 1),
    ],
)
@pytest.mark.parametrize("rolled", [False, True])
def test_the_log_is_cut_at_the_first_durable_event_above_the_store(
    tmp_path: Path, events: list[str], store_seq: int, last_seq: int, rolled: bool
) -> None:
    log = open_log(tmp_path, 0)
    for event in events:
        append(log, 1, event)
    if rolled:
        roll_now(log)
    abandon(log)
    log = open_log(tmp_path, store_seq)
    assert (log.last_seq, log.committed, log.gap) == (last_seq, last_seq, None)
    assert seqs(log) == list(range(1, last_seq + 1))
    assert log.retracted == ((last_seq + 1, len(events)) if rolled and last_seq < len(events) else None)
    append(log, 1)
    assert seqs(log) == list(range(1, last_seq + 2))


def test_a_retraction_is_told_until_the_epoch_rises(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    for _ in range(3):
        append(log, 2)
        roll_now(log)
    append(log, 1)
    abandon(log)
    for _ in range(2):
        log = open_log(tmp_path, 3)
        assert log.retracted == (4, 6)
        assert seqs(log) == [1, 2, 3]
        abandon(log)
    log = open_log(tmp_path, 3, epoch=EPOCH + 1)
    assert (log.retracted, log.problems, log.last_seq) == (None, [], 3)
    append(log, 2)
    log.close()
    assert [entry["epoch"] for entry in manifest(tmp_path)] == [EPOCH, EPOCH, EPOCH + 1]


def restored(root: Path, store_seq: int) -> EventLog:
    """The log as a server opens it on an old copy of its database, which knows of no epoch but the first."""
    log = open_log(root, store_seq)
    log.epoch += log.retracted is not None
    return log


@pytest.mark.parametrize("rolled", [False, True])
def test_every_restored_copy_begins_an_epoch_of_its_own(tmp_path: Path, rolled: bool) -> None:
    log = open_log(tmp_path, 0)
    append(log, 3)
    roll_now(log)
    for epoch in range(EPOCH, EPOCH + 3):
        assert log.epoch == epoch
        append(log, 4)
        log.set_position("lake", 7)
        if rolled:
            roll_now(log)
        abandon(log)
        log = restored(tmp_path, 3)


def test_what_a_consumer_has_read_of_the_open_segment_is_retracted_when_the_store_lost_it(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 6)
    log.set_position("lake", 5)
    log.set_position("slow", 2)
    abandon(log)
    for _ in range(2):
        log = open_log(tmp_path, 3)
        assert (log.retracted, log.last_seq, log.positions) == ((4, 5), 3, {"lake": 3, "slow": 2})
        abandon(log)
    log = open_log(tmp_path, 3, epoch=EPOCH + 1)
    assert log.retracted is None
    append(log, 2)
    log.close()
    assert [(entry["epoch"], entry["first"]) for entry in manifest(tmp_path)] == [(EPOCH, 1), (EPOCH + 1, 4)]


@pytest.mark.parametrize(("spread_ms", "retracted"), [(5000, None), (5001, (4, 6))])
def test_commits_that_the_store_lost_are_told_from_the_last_tick_of_a_crash(
    tmp_path: Path, spread_ms: int, retracted: tuple[int, int] | None
) -> None:
    log = open_log(tmp_path, 0)
    append(log, 3)
    for seq, ts, event in ((4, 2_000, "pushed"), (5, 2_001, "progress"), (6, 2_000 + spread_ms, "pushed")):
        log.append(line(seq, event, ts=ts) + b"\n", first_seq=seq, last_seq=seq, count=1, ts=ts)
    log.append(line(7, "progress", ts=90_000) + b"\n", first_seq=7, last_seq=7, count=1, ts=90_000)
    abandon(log)
    for _ in range(2):  # told until the epoch rises
        log = open_log(tmp_path, 3)
        assert (log.retracted, log.last_seq) == (retracted, 3)
        abandon(log)
    assert open_log(tmp_path, 3, epoch=EPOCH + 1).retracted is None


def test_what_was_rolled_had_been_committed(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 6)
    assert log.roll() is not None
    append(log, 2)
    abandon(log)
    log = open_log(tmp_path, 3)
    assert (log.retracted, log.last_seq) == ((4, 6), 3)
    assert "events 4..6 were committed, but the database does not have what they tell of" in log.problems[0]


def test_what_comes_after_a_restored_copy_is_kept_for_those_who_had_read_further(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 8)
    log.set_position("lake", 8)
    roll_now(log)
    abandon(log)
    log = restored(tmp_path, 3)
    append(log, 2)
    roll_now(log)
    append(log, 2)
    roll_now(log)
    keep_newest(log, 1)
    assert seqs(log, after=3) == [4, 5, 6, 7]


def test_a_segment_never_mixes_epochs(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 2)
    abandon(log)
    log = open_log(tmp_path, 2, epoch=EPOCH + 1)
    append(log, 2)
    log.close()
    assert [(entry["first"], entry["last"], entry["epoch"]) for entry in manifest(tmp_path)] == [
        (1, 2, EPOCH),
        (3, 4, EPOCH + 1),
    ]


def test_an_empty_log_beside_an_older_store_names_the_gap(tmp_path: Path) -> None:
    log = open_log(tmp_path, 500)
    assert (log.gap, log.last_seq, log.first_seq) == ((1, 500), 500, 501)
    append(log, 1, "gap")
    assert seqs(log) == [501]


@pytest.mark.parametrize("store_seq", [0, 500])
def test_a_log_is_new_until_it_has_an_event(tmp_path: Path, store_seq: int) -> None:
    for _ in range(2):
        log = open_log(tmp_path, store_seq)
        assert log.is_new
        abandon(log)
    log = open_log(tmp_path, store_seq)
    append(log, 1, "gap" if store_seq else "pushed")
    abandon(log)
    assert not open_log(tmp_path, store_seq + 1).is_new


def test_a_log_that_ends_below_the_store_names_the_gap_and_goes_on_after_it(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 5)
    abandon(log)
    log = open_log(tmp_path, 8)
    assert (log.gap, log.last_seq, log.first_seq) == ((6, 8), 8, 1)
    append(log, 2, "gap")
    roll_now(log)
    assert seqs(log) == [1, 2, 3, 4, 5, 9, 10]
    assert public_names(tmp_path)[1].startswith("seg-00000000000000000009-")
    log.close()
    again = open_log(tmp_path, 10)
    assert (again.gap, again.problems) == (None, [])


@pytest.mark.parametrize("before", [0, 5])
def test_a_gap_is_named_again_until_its_event_is_committed(tmp_path: Path, before: int) -> None:
    log = open_log(tmp_path, 0)
    if before:
        append(log, before)
    abandon(log)
    for _ in range(2):
        log = open_log(tmp_path, 8)
        assert (log.gap, log.last_seq) == ((before + 1, 8), 8)
        append(log, 1, "gap", commit=False)  # killed before the commit: `gap` is durable here
        abandon(log)
    abandon(open_log(tmp_path, 8))
    log = open_log(tmp_path, 12)
    assert log.gap == (before + 1, 12)
    append(log, 1, "gap")
    roll_now(log)
    keep_newest(log, 0)
    log.close()
    assert open_log(tmp_path, 13).gap is None


@pytest.mark.parametrize(("deleted", "gap"), [(slice(1, 2), (5, 8)), (slice(0, 2), (1, 8))])
def test_a_deleted_tail_is_a_gap(tmp_path: Path, deleted: slice, gap: tuple[int, int]) -> None:
    log = open_log(tmp_path, 0)
    fill(log, 2, events=4)
    log.close()
    for name in public_names(tmp_path)[deleted]:
        (shard(tmp_path) / name).unlink()
    log = open_log(tmp_path, 8)
    assert (log.gap, log.last_seq) == (gap, 8)
    assert all("listed in the manifest but gone" in problem for problem in log.problems)
    assert len(log.problems) == deleted.stop - deleted.start


def test_a_log_trimmed_to_nothing_is_not_a_gap(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 4)
    roll_now(log)
    assert keep_newest(log, 0) == 4
    log.close()
    log = open_log(tmp_path, 4)
    assert (log.gap, log.problems, log.last_seq, log.first_seq, log.is_new) == (None, [], 4, 5, False)


def test_damage_in_the_open_file_is_kept_aside_and_named(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 5)
    abandon(log)
    content = bytearray(open_file(tmp_path).read_bytes())
    content[content.index(b'"seq":3')] = ord("#")
    open_file(tmp_path).write_bytes(content)
    log = open_log(tmp_path, 5)
    assert (log.gap, log.last_seq) == ((3, 5), 5)
    assert "damaged after event 2" in log.problems[0]
    aside = shard(tmp_path) / ".corrupt-.open-00000000000000000001.jsonl"
    assert aside.read_bytes().count(b"\n") == 3


# -- rolling -----------------------------------------------------------------------------------------------


def test_due_by_size_and_by_age_but_not_when_empty_or_uncommitted(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0, limits=LogLimits(segment_bytes=2_000, segment_ms=1_000))
    assert not log.due(10**12)
    append(log, 1)  # ts 1001
    assert not log.due(2_000)
    assert log.due(2_001)
    append(log, 2, pad=1_000, commit=False)
    assert not log.due(1_001)
    assert log.roll() is None
    log.committed = log.last_seq
    assert log.due(1_001)


def test_rolling_publishes_a_compressed_segment_with_its_manifest_line(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    lines = append(log, 3) + append(log, 2)
    assert log.roll() is not None
    assert log.roll() is None  # nothing new since
    log.close()
    raw = b"".join(text + b"\n" for text in lines)
    name = "seg-00000000000000000001-00000000000000000005.jsonl.zst"
    assert names(tmp_path) == [".open-00000000000000000006.jsonl", "manifest.jsonl", name]
    path = shard(tmp_path) / name
    assert unpack(path) == raw
    assert manifest(tmp_path) == [
        {
            "first": 1,
            "last": 5,
            "count": 5,
            "min_ts": 1_001,
            "max_ts": 1_004,
            "crc32": zlib.crc32(raw),
            "raw_bytes": len(raw),
            "file_bytes": path.stat().st_size,
            "epoch": EPOCH,
        }
    ]


STEPS = ["compress", "publish", "record", "discard"]


@pytest.mark.parametrize("done", range(len(STEPS) + 1))
@pytest.mark.parametrize("later", [0, 2])
def test_a_crash_between_any_two_steps_of_a_roll_loses_nothing(tmp_path: Path, done: int, later: int) -> None:
    log = open_log(tmp_path, 0)
    lines = append(log, 6)
    roll = log.roll()
    assert roll is not None
    lines += append(log, later) if later else []
    for step in STEPS[:done]:
        getattr(roll, step)()
        assert kept(log) == lines
    assert public_names(tmp_path) == ([] if done < 2 else ["seg-" + f"{1:020}-{6:020}.jsonl.zst"])
    abandon(log)
    log = open_log(tmp_path, log.last_seq)
    assert (log.problems, log.gap, kept(log)) == ([], None, lines)
    assert [(entry["first"], entry["last"]) for entry in manifest(tmp_path)] == [(1, 6)]
    assert names(tmp_path) == [".open-00000000000000000007.jsonl", "manifest.jsonl", *public_names(tmp_path)]
    assert kept(log) + append(log, 1) == kept(log)


def test_a_half_written_compressed_file_is_made_again(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    lines = append(log, 200)
    roll = log.roll()
    assert roll is not None
    roll.compress()
    temporary = next(path for path in shard(tmp_path).iterdir() if path.name.startswith(".tmp-"))
    temporary.write_bytes(temporary.read_bytes()[:40])
    abandon(log)
    log = open_log(tmp_path, 200)
    assert kept(log) == lines
    assert len(public_names(tmp_path)) == 1


def test_segments_are_published_in_order_whichever_roll_runs_first(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    rolls = []
    for _ in range(3):
        append(log, 2)
        rolls.append(log.roll())
    assert rolls[2] is not None
    rolls[2].run()
    assert [entry["first"] for entry in manifest(tmp_path)] == [1, 3, 5]
    for roll in rolls:
        assert roll is not None
        roll.run()
    assert len(manifest(tmp_path)) == 3


def test_rolls_in_a_worker_thread_beside_appends_and_readers(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0, limits=LogLimits(keep_bytes=None, cap_bytes=None, segment_bytes=4_000))
    reads: list[list[int]] = []
    stopped = threading.Event()

    def read_on() -> None:
        while not stopped.is_set():
            reads.append(seqs(log))

    reader = threading.Thread(target=read_on)
    reader.start()
    threads = []
    for _ in range(400):
        append(log, 5)
        if log.due(0) and (roll := log.roll()):
            threads.append(threading.Thread(target=roll.run))
            threads[-1].start()
    for thread in threads:
        thread.join(30)
    stopped.set()
    reader.join(30)
    assert len(threads) > 20
    assert all(found == list(range(1, len(found) + 1)) for found in reads)
    assert seqs(log) == list(range(1, 2_001))
    assert log.problems == []


# -- reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["files", "memory"])
def test_reading_crosses_closed_waiting_and_open_segments(tmp_path: Path, make: str) -> None:
    log: Log = open_log(tmp_path, 0) if make == "files" else MemoryLog(epoch=EPOCH)
    lines = append(log, 4)
    if roll := log.roll():
        roll.run()
    lines += append(log, 3)
    log.roll()  # never run: waits
    lines += append(log, 5)
    for after in range(-1, 14):
        for limit in (0, 1, 4, 100):
            assert kept(log, after, limit) == lines[max(after, 0) :][:limit]


def test_a_reader_finds_its_place_in_a_large_open_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    for _ in range(60):
        append(log, 20, pad=300)
    append(log, 20, pad=300, commit=False)
    log.undo()
    append(log, 7)
    assert len(log._open.marks) >= 5
    again_from = [0, 1, 200, 640, 1_190, 1_206]
    for after in again_from:
        assert seqs(log, after, 9) == list(range(after + 1, min(after + 10, 1_208)))
    abandon(log)
    log = open_log(tmp_path, 1_207)
    assert len(log._open.marks) >= 5
    for after in again_from:
        assert seqs(log, after, 9) == list(range(after + 1, min(after + 10, 1_208)))


def test_a_place_deep_in_a_closed_segment_is_reached_with_pauses(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    lines = append(log, 10_000)
    roll_now(log)
    strolled = list(log.stroll(9_990, 5))
    assert [text for text in strolled if text] == lines[9_990:9_995]
    assert strolled.count(b"") == 3
    assert kept(log, 9_990, 5) == lines[9_990:9_995]


def test_segments_are_listed_by_position_and_given_away_as_they_lie(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 4)
    roll_now(log)
    append(log, 3)
    log.roll()  # never run: waits
    append(log, 2)
    listed = log.listed((0, 0), 10)
    assert [(one.first, one.last, one.sealed) for one in listed] == [(1, 4, True), (5, 7, False), (8, 9, False)]
    assert [one.first for one in log.listed((EPOCH, 4), 10)] == [5, 8]
    assert [one.first for one in log.listed((EPOCH, 3), 1)] == [1]
    assert log.listed((EPOCH, 9), 10) == log.listed((EPOCH + 1, 0), 10) == []
    packed = (shard(tmp_path) / public_names(tmp_path)[0]).read_bytes()
    assert log.sealed_chunk(1, 3, 5) == (packed[3:8], len(packed))
    assert log.sealed_chunk(5, 0, 5) is None
    (shard(tmp_path) / public_names(tmp_path)[0]).unlink()
    assert log.sealed_chunk(1, 0, 5) is None


def test_a_segment_damaged_while_running_is_named_and_skipped(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    for _ in range(3):
        append(log, 3)
        roll_now(log)
    path = shard(tmp_path) / public_names(tmp_path)[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    found = seqs(log)
    assert found[:3] == [1, 2, 3]
    assert found[-3:] == [7, 8, 9]
    assert any(path.name in problem for problem in log.problems)


# -- manifest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe nonsense\n{}\n", None])
def test_the_manifest_is_rebuilt_from_the_files(tmp_path: Path, damage: bytes | None) -> None:
    log = open_log(tmp_path, 0)
    for _ in range(3):
        append(log, 3)
        roll_now(log)
    log.close()
    path = shard(tmp_path) / "manifest.jsonl"
    before = manifest(tmp_path)
    path.unlink() if damage is None else path.write_bytes(damage)
    log = open_log(tmp_path, 9)
    assert seqs(log) == list(range(1, 10))
    assert len(log.problems) >= 3
    rebuilt = manifest(tmp_path)
    for entry in before + rebuilt:  # a block's one ts stands for its events; a rebuild reads each
        del entry["max_ts"]
    assert rebuilt == before
    log.close()
    assert open_log(tmp_path, 9).problems == []


def test_a_torn_manifest_line_is_replaced(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 3)
    roll_now(log)
    log.close()
    path = shard(tmp_path) / "manifest.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert seqs(open_log(tmp_path, 3)) == [1, 2, 3]
    assert manifest(tmp_path)[0]["last"] == 3


@pytest.mark.parametrize("content", [b"", b"not zstd at all", None])
def test_a_corrupt_closed_segment_is_set_aside_and_named(tmp_path: Path, content: bytes | None) -> None:
    log = open_log(tmp_path, 0)
    for _ in range(3):
        append(log, 30)
        roll_now(log)
    log.close()
    bad = public_names(tmp_path)[1]
    path = shard(tmp_path) / bad
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    log = open_log(tmp_path, 90)
    assert seqs(log) == [*range(1, 31), *range(61, 91)]
    assert bad not in names(tmp_path)
    assert f".corrupt-{bad}" in names(tmp_path)
    assert any(problem.startswith(bad) for problem in log.problems)
    assert "events 31..60 are missing" in log.problems
    assert keep_newest(log, 0) == 60
    assert f".corrupt-{bad}" not in names(tmp_path)


def test_unknown_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    open_log(tmp_path, 0).close()
    for name in ("seg-1-2.jsonl.zst", "notes.txt", ".open-x.jsonl"):
        (shard(tmp_path) / name).write_bytes(b"?")
    log = open_log(tmp_path, 0)
    append(log, 1)
    log.close()
    assert {"seg-1-2.jsonl.zst", "notes.txt", ".open-x.jsonl"} < set(names(tmp_path))


# -- retention ---------------------------------------------------------------------------------------------


def fill(log: EventLog, segments: int, events: int = 10) -> None:
    for _ in range(segments):
        append(log, events, pad=200)
        roll_now(log)


def segment_bytes(root: Path) -> int:
    return sum((shard(root) / name).stat().st_size for name in public_names(root))


def one_segment(tmp_path: Path) -> int:
    log = open_log(tmp_path / "measure", 0)
    fill(log, 1)
    log.close()
    return segment_bytes(tmp_path / "measure")


def test_the_oldest_segments_go_when_the_log_is_too_large(tmp_path: Path) -> None:
    limit = one_segment(tmp_path) * 3 + 100
    log = open_log(tmp_path, 0, limits=LogLimits(keep_bytes=limit))
    fill(log, 10)
    assert 0 < segment_bytes(tmp_path) <= limit
    assert log.first_seq > 60
    assert seqs(log) == list(range(log.first_seq, 101))
    assert manifest(tmp_path)[0]["first"] == log.first_seq
    log.close()
    again = open_log(tmp_path, 100)
    assert (again.problems, again.gap, again.first_seq) == ([], None, log.first_seq)


def test_capture_keeps_everything_up_to_the_cap(tmp_path: Path) -> None:
    limit = one_segment(tmp_path) * 3 + 100
    log = open_log(tmp_path / "all", 0, limits=LogLimits(keep_bytes=None, cap_bytes=None))
    fill(log, 8)
    assert (log.first_seq, log.problems) == (1, [])
    log = open_log(tmp_path / "capped", 0, limits=LogLimits(keep_bytes=None, cap_bytes=limit))
    fill(log, 8)
    assert log.first_seq > 40
    assert len(log.problems) == 1
    assert f"events up to {log.first_seq - 1} were dropped" in log.problems[0]


def test_nothing_above_the_lowest_position_goes_until_the_cap_wins(tmp_path: Path) -> None:
    size = one_segment(tmp_path)
    log = open_log(tmp_path, 0, limits=LogLimits(keep_bytes=size, cap_bytes=size * 6 + 100))
    log.set_position("lake", 15)
    log.set_position("audit", 40)
    fill(log, 5)
    assert log.first_seq == 11  # 11..20 holds events that "lake" has not taken
    log.close()
    log = open_log(tmp_path, 50, limits=log.limits)
    assert log.positions == {"lake": 15, "audit": 40}
    assert keep_newest(log, 0) == 0
    log.set_position("lake", 30)
    assert keep_newest(log, 0) == 20
    assert log.problems == []
    fill(log, 6)
    assert log.first_seq > 31
    assert "size cap reached" in log.problems[0]
    log.forget_position("lake")
    log.set_position("audit", 1_000)
    fill(log, 1)
    assert segment_bytes(tmp_path) <= size + 100


def test_unreadable_positions_hold_everything_back(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0, limits=LogLimits(keep_bytes=1))
    log.set_position("lake", 0)
    fill(log, 2)
    log.close()
    (shard(tmp_path) / "positions.json").write_bytes(b"{")
    log = open_log(tmp_path, 20, limits=LogLimits(keep_bytes=1))
    fill(log, 2)
    assert log.first_seq == 1
    assert "positions.json" in log.problems[0]
    log.set_position("lake", 40)
    fill(log, 1)
    assert log.first_seq == 41


def test_where_all_else_was_dropped_nothing_uncommitted_is_read(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    fill(log, 2)
    assert keep_newest(log, 0) == 20
    append(log, 1, commit=False)
    assert seqs(log) == []
    log.committed = log.last_seq
    assert seqs(log) == [21]


def test_close_seals_everything_and_can_be_repeated(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    append(log, 3)
    log.close()
    log.close()
    assert len(public_names(tmp_path)) == 1
    assert seqs(open_log(tmp_path, 3)) == [1, 2, 3]


# -- memory ------------------------------------------------------------------------------------------------


def test_the_memory_log_keeps_the_last_events_and_the_same_rules() -> None:
    log = MemoryLog(LogLimits(max_events=10), epoch=EPOCH)
    append(log, 8)
    append(log, 4, commit=False)
    assert seqs(log) == [3, 4, 5, 6, 7, 8]
    log.undo()
    log.undo()
    assert (log.last_seq, log.first_seq) == (8, 3)
    append(log, 4)
    assert (log.first_seq, seqs(log)) == (3, [3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    with pytest.raises(ValueError, match="committed"):
        log.undo()
    assert (log.roll(), log.due(10**15)) == (None, False)


# -- kill -9 -----------------------------------------------------------------------------------------------

WRITER = """
import sys, threading
from pathlib import Path
from headrace.backends.local.eventlog import EventLog, LogLimits
limits = LogLimits(segment_bytes=20_000, keep_bytes=None, cap_bytes=None)
log = EventLog.open(Path(sys.argv[1]), store_seq=0, epoch=1, durable=lambda name: False, limits=limits)
print("open", log.last_seq, flush=True)
size = turn = 0
while True:
    turn += 1
    first, size = log.last_seq + 1, size % 16 + 1
    block = b"".join(b'{"seq":%d,"ts":%d,"event":"pushed","epoch":1,"pad":"%s"}\\n' % (s, s, b"x" * (s % 90))
                     for s in range(first, first + size))
    log.append(block, first_seq=first, last_seq=first + size - 1, count=size, ts=first)
    if turn % 7 == 0:
        log.undo()
        continue
    log.committed = log.last_seq
    sys.stdout.write("%d\\n" % log.last_seq)
    sys.stdout.flush()
    if log.due(0):
        threading.Thread(target=log.roll().run).start()
"""


def killed_writer(root: Path, blocks: int) -> tuple[int, int]:
    """Run the writer, kill -9 after `blocks` reported appends; (seq it started at, last seq it reported)."""
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        started = int(process.stdout.readline().split()[1])
        report = [process.stdout.readline() for _ in range(blocks)]
        process.kill()
        report += process.stdout.read().splitlines(keepends=True)
    return started, max(int(text) for text in report if text.endswith(b"\n"))


def expected_line(seq: int) -> bytes:
    return b'{"seq":%d,"ts":%d,"event":"pushed","epoch":1,"pad":"%s"}' % (seq, seq, b"x" * (seq % 90))


def test_kill_9_leaves_a_dense_prefix_with_every_append_that_returned(tmp_path: Path) -> None:
    rng = random.Random(2)
    reported = 0
    for _ in range(scaled(6, 40)):
        started, last = killed_writer(tmp_path, blocks=rng.randrange(1, 600))
        assert started >= reported
        reported = max(reported, last)
        log = open_log(tmp_path, 0, durable=nothing_is_durable, epoch=1)
        assert log.last_seq >= reported
        assert (log.problems, log.gap) == ([], None)
        assert kept(log) == [expected_line(seq) for seq in range(1, log.last_seq + 1)]
        abandon(log)
    assert len(public_names(tmp_path)) >= 3


# -- against a model ---------------------------------------------------------------------------------------


class LogMachine(RuleBasedStateMachine):
    """Random appends, undos, rolls, half-made rolls, trims and crashes; the model is a list of lines."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.model: list[bytes] = []
        self.events: list[str] = []
        self.tail = 0  # lines of an append whose commit is open
        self.store_seq = 0
        self.trimmed = 0
        self.waiting: list[object] = []
        self.log = open_log(self.root, 0)

    def teardown(self) -> None:
        abandon(self.log)
        self.folder.cleanup()

    @precondition(lambda self: not self.tail)
    @rule(
        events=st.lists(st.sampled_from(["pushed", "progress"]), min_size=1, max_size=6),
        pad=st.integers(0, 90),
    )
    def append(self, events: list[str], pad: int) -> None:
        first = self.log.last_seq + 1
        lines = [line(seq, event, pad=pad) for seq, event in enumerate(events, first)]
        block = b"".join(text + b"\n" for text in lines)
        last = first + len(lines) - 1
        self.log.append(block, first_seq=first, last_seq=last, count=len(lines), ts=first)
        self.model += lines
        self.events += events
        self.tail = len(lines)

    @precondition(lambda self: self.tail)
    @rule()
    def commit(self) -> None:
        # The store records last_seq only if the block needed a commit.
        if any(map(is_durable, self.events[-self.tail :])):
            self.store_seq = self.log.last_seq
        self.log.committed = self.log.last_seq
        self.tail = 0

    @precondition(lambda self: self.tail)
    @rule()
    def undo(self) -> None:
        self.log.undo()
        del self.model[-self.tail :]
        del self.events[-self.tail :]
        self.tail = 0

    @rule(steps=st.integers(0, 5))
    def roll(self, steps: int) -> None:
        roll = self.log.roll()
        if roll is None:
            return
        if steps == 5:
            roll.run()
        elif len(self.log._rolls) == 1:
            for step in STEPS[:steps]:
                getattr(roll, step)()

    @rule(segments=st.integers(0, 4))
    def retain(self, segments: int) -> None:
        self.trimmed += keep_newest(self.log, segments)

    @rule(torn=st.integers(0, 40))
    def crash(self, torn: int) -> None:
        abandon(self.log)
        if torn:
            with open_file(self.root).open("ab") as file:
                file.write(line(self.log.last_seq + 1)[:torn])
        while self.tail and any(map(is_durable, self.events[-self.tail :])):
            self.model.pop()
            self.events.pop()
            self.tail -= 1
        self.tail = 0
        self.log = open_log(self.root, self.store_seq)

    @precondition(lambda self: not self.tail)
    @rule()
    def close(self) -> None:
        self.log.close()
        self.log = open_log(self.root, self.store_seq)
        listed = [entry["first"] for entry in manifest(self.root)] if public_names(self.root) else []
        assert listed == [int(name[4:24]) for name in public_names(self.root)]

    @invariant()
    def reads_what_the_model_has(self) -> None:
        visible = self.model[: len(self.model) - self.tail]
        assert self.log.last_seq == len(self.model)
        assert kept(self.log, 0) == visible[self.trimmed :]
        assert self.log.first_seq == self.trimmed + 1
        assert (self.log.gap, self.log.retracted, self.log.problems) == (None, None, [])


LogMachine.TestCase.settings = settings(max_examples=scaled(100, 600), stateful_step_count=40)
test_random_use_and_crashes_agree_with_a_list = LogMachine.TestCase
