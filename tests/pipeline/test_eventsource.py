"""Positions, slices and limits of the event log, and reading a folder: no Spark needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from headrace.commands.eventlog import EventLines, ReadEvents
from headrace.errors import HeadraceError
from headrace.pipeline.eventsource import (
    BEGINNING,
    CaptureFolder,
    EventsLost,
    EventWindow,
    Position,
    Segment,
    ServerLog,
    Slice,
    check_kept,
    farthest,
    shared_out,
    slices_between,
)
from headrace.pipeline.options import BadOption, Options, from_offset, to_offset
from headrace.pipeline.reader import EventsReader
from tests.pipeline.history import Story, rig_at, seal
from tests.serverprocess import ServerProcess


def segment(first: int, last: int, epoch: int = 1) -> Segment:
    return Segment(0, epoch, first, last, 100 * (last - first + 1), True)


LOG = [segment(1, 10), segment(11, 30), segment(31, 40)]
CUT = [segment(1, 10), segment(11, 14), segment(15, 40, epoch=2)]  # 15.. of epoch 1 were taken back


def bounds(slices: list[Slice]) -> list[tuple[int, int, int]]:
    return [(piece.segment.epoch, piece.after, piece.until) for piece in slices]


def test_slices_begin_and_end_inside_segments() -> None:
    assert bounds(slices_between(LOG, Position(1, 5), Position(1, 33))) == [(1, 5, 10), (1, 10, 30), (1, 30, 33)]
    assert slices_between(LOG, Position(1, 33), Position(1, 33)) == []
    assert bounds(slices_between(LOG, BEGINNING, Position(1, 3))) == [(1, 0, 3)]


def test_a_new_epoch_is_read_from_where_it_begins() -> None:
    """The reader had come to event 20 of what was taken back: it goes on with event 15 of the new epoch."""
    assert bounds(slices_between(CUT, Position(1, 20), Position(2, 40))) == [(2, 14, 40)]
    assert bounds(slices_between(CUT, Position(1, 12), Position(2, 16))) == [(1, 12, 14), (2, 14, 16)]
    assert bounds(slices_between(CUT, Position(1, 12), Position(1, 14))) == [(1, 12, 14)]


@pytest.mark.parametrize(("most", "reached"), [(1, 6), (5, 10), (6, 11), (1000, 40), (None, 40)])
def test_a_batch_reaches_as_far_as_it_may(most: int | None, reached: int) -> None:
    assert farthest(LOG, Position(1, 5), max_events=most) == Position(1, reached)


def test_a_batch_is_bounded_by_bytes_but_never_empty() -> None:
    assert farthest(LOG, BEGINNING, max_bytes=1_550) == Position(1, 15)
    assert farthest(LOG, BEGINNING, max_bytes=1) == Position(1, 1)
    assert farthest([], Position(1, 7), max_events=5) == Position(1, 7)


def test_slices_are_shared_out_evenly_and_whole() -> None:
    parts = shared_out(slices_between(LOG, BEGINNING, Position(1, 40)), 3)
    assert [sum(piece.count for piece in part) for part in parts] == [14, 14, 12]
    events = [seq for part in parts for piece in part for seq in range(piece.after + 1, piece.until + 1)]
    assert events == list(range(1, 41))
    assert shared_out([], 4) == []


def test_dropped_events_are_an_error_unless_accepted() -> None:
    window = EventWindow([segment(21, 40)], 21, Position(1, 40))
    with pytest.raises(EventsLost, match=r"events 6\.\.20 were dropped"):
        check_kept(window, Position(1, 5), fail=True)
    check_kept(window, Position(1, 5), fail=False)
    check_kept(window, Position(1, 20), fail=True)
    check_kept(window, BEGINNING, fail=True)  # whoever begins now has missed nothing


def test_a_folder_gives_exactly_the_lines_that_are_asked_for(tmp_path: Path) -> None:
    rig = rig_at(tmp_path, segment_bytes=2_000)
    Story(rig, 3).go(120)
    seal(rig)
    rig.close()
    folder = CaptureFolder(tmp_path / "log")
    window = folder.window(BEGINNING)
    assert len(window.segments) > 3
    epoch, last = window.newest
    for start, end in ((0, last), (7, 8), (last - 1, last), (3, last - 3)):
        found = []
        for piece in slices_between(window.segments, Position(epoch, start), Position(epoch, end)):
            for block in folder.blocks(piece.segment, piece.after, piece.until):
                seqs = [json.loads(line)["seq"] for line in block.splitlines()]
                found += [seq for seq in seqs if piece.after < seq <= piece.until]
        assert found == list(range(start + 1, end + 1))
    (tmp_path / "log" / "shard=0" / "manifest.jsonl").rename(tmp_path / "away")
    assert folder.window(BEGINNING).segments == []
    with pytest.raises(HeadraceError, match="no capture folder"):
        CaptureFolder(tmp_path / "nowhere").window(BEGINNING)


def test_a_segment_that_is_gone_is_lost_and_not_empty(tmp_path: Path) -> None:
    with pytest.raises(EventsLost, match=r"events 1\.\.9 are lost"):
        list(CaptureFolder(tmp_path).blocks(segment(1, 9), 0, 9))


def test_a_segment_that_was_cut_short_is_lost_and_not_short(tmp_path: Path) -> None:
    rig = rig_at(tmp_path, segment_bytes=10**9)
    Story(rig, 3).go(3_000)
    seal(rig)
    rig.close()
    folder = CaptureFolder(tmp_path / "log")
    (found,) = folder.window(BEGINNING).segments
    (path,) = (tmp_path / "log" / "shard=0").glob("seg-*.zst")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(EventsLost, match="missing from their segment"):
        list(folder.blocks(found, 0, found.last))
    path.write_bytes(b"no zstandard at all")
    with pytest.raises(EventsLost, match="is damaged"):
        list(folder.blocks(found, 0, found.last))


class ShortLog:
    """A server that keeps the newest of its events only: those from `oldest` on, of 30."""

    def __init__(self, oldest: int) -> None:
        self.oldest = oldest

    def ask(self, command: ReadEvents) -> EventLines:
        first = max(command.after + 1, self.oldest)
        seqs = range(first, min(first + min(command.limit, 4), 31))
        return EventLines(lines="".join(f'{{"seq":{seq}}}\n' for seq in seqs), last=30)


@pytest.mark.parametrize(("oldest", "found"), [(11, [*range(11, 21)]), (14, [*range(14, 21)]), (25, []), (31, [])])
def test_events_that_are_dropped_while_they_are_read_are_noticed(oldest: int, found: list[int]) -> None:
    """What is left comes all the same: whoever accepts the loss wants it."""
    blocks = ServerLog(ShortLog(oldest)).blocks(Segment(0, 1, 5, 30, 1_000, False), 10, 20)  # type: ignore[arg-type]
    read: list[int] = []
    is_lost = pytest.raises(EventsLost, match="events from 11 on were dropped")
    with is_lost if oldest > 11 else nullcontext():
        for block in blocks:
            read += [json.loads(line)["seq"] for line in block.splitlines()]
    assert [seq for seq in read if seq <= 20] == found


def test_a_slice_has_no_events_of_an_epoch_that_began_since_it_was_planned(tmp_path: Path) -> None:
    """They have the same numbers as what was planned, and are read again as what they are."""
    database, copy = tmp_path / "headrace.db", tmp_path / "copy.db"
    with ServerProcess(database, "--capture", str(tmp_path / "log")) as server:
        push(server, 1)
        server.stop()
        shutil.copy(database, copy)
        server.start()
        push(server, 2)
        reader = EventsReader(Options.parse({"url": f"headrace://127.0.0.1:{server.port}"}))
        planned = reader.partitions()
        server.stop()
        shutil.copy(copy, database)
        server.start()
        push(server, 3)
        found = [row for part in planned for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["seq"] for row in found] == [1]


def push(server: ServerProcess, count: int) -> None:
    with server.client() as client:
        for _ in range(count):
            client.ok("PUSH", queue="q", data={})


def newest(server: ServerProcess) -> Position:
    with server.client() as client:
        window = client.ok("EventSegments")
    return Position(window["epoch"], window["last"])


def positions(server: ServerProcess) -> dict[str, int]:
    with server.client() as client:
        return dict(client.ok("EventSegments")["positions"])


def test_a_stream_does_not_claim_what_it_has_not_read_of_a_restored_log(tmp_path: Path) -> None:
    """Its last position is of the old epoch, in which the same numbers were other events."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from headrace.pipeline.stream import EventsStreamReader

    data, copy = tmp_path / "h.db", tmp_path / "copy.db"
    with ServerProcess(data, "--capture", str(tmp_path / "log")) as server:
        push(server, 3)
        server.stop()
        shutil.copy(data, copy)
        server.start()
        push(server, 7)
        reader = EventsStreamReader(Options.parse({"url": f"headrace://127.0.0.1:{server.port}", "consumer": "lake"}))
        read = newest(server)
        assert read.seq == 10
        reader.latestOffset(to_offset(read), ReadAllAvailable())
        assert positions(server) == {"lake": 10}
        server.stop()
        shutil.copy(copy, data)
        server.start()
        push(server, 4)
        again = EventsStreamReader(Options.parse({"url": f"headrace://127.0.0.1:{server.port}", "consumer": "lake"}))
        assert from_offset(again.latestOffset(to_offset(read), ReadAllAvailable())) == Position(read.epoch + 1, 7)
        assert positions(server) == {"lake": 3}


def test_a_stream_registers_with_no_server_whose_log_is_another(tmp_path: Path) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from headrace.pipeline.stream import EventsStreamReader

    with ServerProcess(tmp_path / "other.db") as server:
        push(server, 1)
        reader = EventsStreamReader(Options.parse({"url": f"headrace://127.0.0.1:{server.port}", "consumer": "lake"}))
        with pytest.raises(HeadraceError, match="the log of another database"):
            reader.latestOffset(to_offset(Position(newest(server).epoch, 20)), ReadAllAvailable())
        assert positions(server) == {}


def test_a_log_that_replaced_another_is_refused_or_read_from_its_start(tmp_path: Path) -> None:
    """Also when it has grown past what was read of the one before."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from headrace.pipeline.stream import EventsStreamReader

    with ServerProcess(tmp_path / "h.db") as server:
        source = {"url": f"headrace://127.0.0.1:{server.port}", "consumer": "lake"}
        push(server, 5)
        read = newest(server)
        server.stop()
        for path in tmp_path.glob("h.db*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        server.start()
        assert EventsStreamReader(Options.parse(source)).latestOffset(to_offset(read), ReadAllAvailable())
        push(server, 12)
        with pytest.raises(EventsLost, match=f"event 5 of epoch {read.epoch} was read, .* another database"):
            EventsStreamReader(Options.parse(source)).latestOffset(to_offset(read), ReadAllAvailable())
        reader = EventsStreamReader(Options.parse(source | {"failOnDataLoss": "false"}))
        end = reader.latestOffset(to_offset(read), ReadAllAvailable())
        planned = reader.partitions(to_offset(read), end)
        found = [row for part in planned for batch in reader.read(part) for row in batch.to_pylist()]
        assert positions(server) == {}  # it has read nothing of this log before
        reader.latestOffset(end, ReadAllAvailable())
        assert positions(server) == {"lake": 12}
    assert [row["seq"] for row in found] == list(range(1, 13))
    assert {row["epoch"] for row in found} == {from_offset(end).epoch} != {read.epoch}


def test_a_stream_that_began_at_the_end_of_an_empty_log_takes_no_restart_for_another_database(tmp_path: Path) -> None:
    """A log that is still empty when its server starts begins anew."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from headrace.pipeline.stream import EventsStreamReader

    with ServerProcess(tmp_path / "h.db") as server:
        options = Options.parse({"url": f"headrace://127.0.0.1:{server.port}", "startingOffset": "latest"})
        start = EventsStreamReader(options).initialOffset()
        server.stop()
        server.start()
        push(server, 3)
        end = newest(server)
        assert end.epoch > from_offset(start).epoch
        assert from_offset(EventsStreamReader(options).latestOffset(start, ReadAllAvailable())) == end


def test_offsets_are_written_per_shard() -> None:
    assert to_offset(Position(2, 7)) == {"0": {"epoch": 2, "seq": 7}}
    assert from_offset(to_offset(Position(2, 7))) == Position(2, 7)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": "jbos"}, "kind must be one of events, jobs, results, dlq"),
        ({"nonsense": "1"}, "nonsense"),
        ({"maxEventsPerTrigger": "0"}, "maxEventsPerTrigger must be at least 1"),
        ({"maxEventsPerTrigger": "many"}, "wrong option"),
        ({"path": "a", "url": "headrace://b"}, "either path or url"),
        ({"path": "a", "kind": "jobs"}, "events only"),
        ({"kind": "jobs", "state": "wating"}, "one of waiting, delayed, active, completed, failed, waiting-children"),
        ({"kind": "dlq", "state": "failed"}, "state is for jobs"),
        ({"batchSize": "0"}, "batchSize must be between 1 and 10000"),
        ({"numPartitions": "1000000000"}, "numPartitions must be between 0 and 10000"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(BadOption, match=text):
        Options.parse(given)


def test_a_wrong_offset_is_shown_with_a_right_one() -> None:
    with pytest.raises(BadOption, match='"epoch": 1, "seq": 42'):
        Options.parse({"startingOffset": "yesterday"}).position("yesterday", BEGINNING)


def test_importing_headrace_imports_no_spark() -> None:
    modules = "headrace, headrace.pipeline, headrace.cli.pipeline, headrace.pipeline.status, headrace.pipeline.lake"
    code = f"import sys, {modules}; sys.exit('pyspark' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
