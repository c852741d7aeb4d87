"""`--capture`: what was acknowledged is in the folder, once, whatever happened to the server, and gaps have a name."""

from __future__ import annotations

import json
import shutil
import zlib
from contextlib import closing, suppress
from pathlib import Path

import apsw
import pytest
import zstandard

from tests.integration.eventfolder import assert_dense, read_log
from tests.integration.test_crash import (
    QUEUE,
    check_ends,
    check_pushes,
    compare_events,
    settle_uncertain,
    stored_by_number,
    wait_until_idle,
)
from tests.integration.traffic import Ledger, Traffic
from tests.protocol.steps import complete, push
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

KILLS = scaled(5, 20)


def shard(log: Path) -> Path:
    return log / "shard=0"


def published(log: Path) -> dict[str, int]:
    """Every public segment and the checksum of its bytes."""
    found = {}
    for path in shard(log).glob("seg-*.jsonl.zst"):
        with suppress(FileNotFoundError):  # retention took it just now
            found[path.name] = zlib.crc32(path.read_bytes())
    return found


def capturing(folder: Path, *flags: str) -> ServerProcess:
    capture = ("--capture", str(folder / "log"), "--capture-segment-ms", "100")
    return ServerProcess(folder / "headrace.db", *capture, "--max-completed-jobs", "1000000", *flags)


@pytest.mark.timeout(scaled(120, 600))
def test_kill_9_while_capturing_loses_no_acknowledged_change_and_changes_no_published_segment(tmp_path: Path) -> None:
    ledger = Ledger()
    before: dict[str, int] = {}
    with capturing(tmp_path) as server:
        for _ in range(KILLS):
            Traffic(server, ledger, QUEUE).until_killed(500)
            server.start()
            with server.client() as client:
                stored = stored_by_number(client)
                check_pushes(ledger, stored)
                check_ends(ledger, stored)
                compare_events(ledger, stored, read_log(tmp_path / "log"))
                settle_uncertain(ledger, stored)
                wait_until_idle(client)
            ledger.held.clear()
            now = published(tmp_path / "log")
            assert {name: now.get(name) for name in before} == before
            before = now
    events = read_log(tmp_path / "log")
    assert_dense(events)
    assert {event["epoch"] for event in events} == {events[0]["epoch"]}
    assert "gap" not in {event["event"] for event in events}
    assert len(before) >= KILLS  # a stop seals, and so does every start after a kill


def test_the_manifest_lists_what_is_published(tmp_path: Path) -> None:
    with capturing(tmp_path) as server, server.client() as client:
        for _ in range(3):
            push(client, "q")
            complete(client, "q")
            count = len(published(tmp_path / "log"))
            eventually(lambda count=count: len(published(tmp_path / "log")) > count)
    lines = (shard(tmp_path / "log") / "manifest.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert [f"seg-{seg['first']:020}-{seg['last']:020}.jsonl.zst" for seg in listed] == sorted(
        published(tmp_path / "log")
    )
    assert sum(seg["count"] for seg in listed) == len(read_log(tmp_path / "log")) == 9
    assert not list(shard(tmp_path / "log").glob(".tmp-*"))


def test_what_was_lost_with_the_folder_is_named_by_a_gap_event(tmp_path: Path) -> None:
    with capturing(tmp_path) as server:
        with server.client() as client:
            for _ in range(4):
                push(client, "q")
        server.stop()
        shutil.rmtree(tmp_path / "log")
        server.start()
        with server.client() as client:
            push(client, "q")
    gap, pushed = read_log(tmp_path / "log")
    assert (gap["event"], gap["first"], gap["last"], gap["seq"]) == ("gap", 1, 4, 5)
    assert (pushed["event"], pushed["seq"]) == ("pushed", 6)


def test_every_restored_copy_of_the_database_begins_a_new_epoch(tmp_path: Path) -> None:
    with capturing(tmp_path) as server:
        with server.client() as client:
            kept = push(client, "q")
        server.stop()
        shutil.copy(tmp_path / "headrace.db", tmp_path / "copy.db")
        server.start()
        with server.client() as client:
            push(client, "q")
        for _ in range(2):
            server.stop()
            shutil.copy(tmp_path / "copy.db", tmp_path / "headrace.db")
            server.start()
            with server.client() as client:
                new = push(client, "q")
    events = read_log(tmp_path / "log")
    assert [event["job"] for event in events] == [kept, new]
    assert [event["seq"] for event in events] == [1, 2]
    assert events[1]["epoch"] == events[0]["epoch"] + 2


def test_a_copy_restored_without_the_log_begins_a_new_epoch(tmp_path: Path) -> None:
    """Whoever has read event 3 of the log that is gone could not tell it from the next event 3."""
    with capturing(tmp_path) as server:
        with server.client() as client:
            push(client, "q")
        server.stop()
        shutil.copy(tmp_path / "headrace.db", tmp_path / "copy.db")
        server.start()
        with server.client() as client:
            push(client, "q")
            push(client, "q")
            read = client.ok("EventSegments")
        server.stop()
        shutil.copy(tmp_path / "copy.db", tmp_path / "headrace.db")
        shutil.rmtree(tmp_path / "log")
        for _ in range(2):
            server.start()
            with server.client() as client:
                epoch = client.ok("EventSegments")["epoch"]
                push(client, "q")
            server.stop()
    gap, *pushed = read_log(tmp_path / "log")
    assert (gap["event"], gap["first"], gap["last"]) == ("gap", 1, 1)
    assert [event["seq"] for event in pushed] == [3, 4]
    assert {event["epoch"] for event in [gap, *pushed]} == {epoch}
    assert epoch > read["epoch"]


def test_a_database_of_an_older_version_keeps_the_epoch_of_its_log(tmp_path: Path) -> None:
    """Those began every log with epoch 1."""
    with capturing(tmp_path) as server:
        with server.client() as client:
            push(client, "q")
        server.stop()
        with closing(apsw.Connection(str(tmp_path / "headrace.db"))) as database:
            database.execute("UPDATE mark SET epoch=1")
        (segment,) = shard(tmp_path / "log").glob("seg-*")
        (line,) = read_log(tmp_path / "log")
        segment.write_bytes(zstandard.compress(json.dumps({**line, "epoch": 1}).encode() + b"\n"))
        (shard(tmp_path / "log") / "manifest.jsonl").unlink()
        for _ in range(2):
            server.start()
            with server.client() as client:
                push(client, "q")
            server.stop()
    assert [(event["epoch"], event["seq"]) for event in read_log(tmp_path / "log")] == [(1, 1), (1, 2), (1, 3)]


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with capturing(tmp_path) as server, server.client() as client:
        push(client, "q")
        other = ServerProcess(tmp_path / "other.db")
        with other, other.client() as stranger:
            push(stranger, "q")
        with pytest.raises(RuntimeError, match=f"another server writes its event log to {tmp_path / 'log'}"):
            ServerProcess(tmp_path / "other.db", "--capture", str(tmp_path / "log")).start()
        push(client, "q")
    assert [event["seq"] for event in read_log(tmp_path / "log")] == [1, 2]


def test_the_log_of_a_database_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    with capturing(tmp_path) as server:
        with server.client() as client:
            push(client, "q")
            push(client, "q")
        server.stop()
        (tmp_path / "headrace.db").rename(tmp_path / "aside.db")
        with pytest.raises(RuntimeError, match=f"{tmp_path / 'log'} has those of another database, up to event 2"):
            server.start()
        assert [event["seq"] for event in read_log(tmp_path / "log")] == [1, 2]
        (tmp_path / "aside.db").rename(tmp_path / "headrace.db")
        server.start()
        with server.client() as client:
            push(client, "q")
    assert [event["seq"] for event in read_log(tmp_path / "log")] == [1, 2, 3]


def make_segments(client: Client, log: Path, count: int) -> None:
    for _ in range(count):
        known = set(published(log))
        push(client, "q")
        eventually(lambda known=known: set(published(log)) - known)


def test_only_what_every_consumer_has_taken_goes(tmp_path: Path) -> None:
    with capturing(tmp_path, "--capture-keep-bytes", "0") as server, server.client() as client:
        client.ok("EventPosition", consumer="lake", seq=0)
        client.ok("EventPosition", consumer="audit", seq=0)
        make_segments(client, tmp_path / "log", 4)
        assert len(published(tmp_path / "log")) == 4
        client.ok("EventPosition", consumer="lake", seq=3)
        client.ok("EventPosition", consumer="audit", seq=2)
        make_segments(client, tmp_path / "log", 1)  # retention comes with the next closed segment
        eventually(lambda: client.ok("EventSegments")["first"] == 3)
        client.ok("ForgetEventPosition", consumer="audit")
        make_segments(client, tmp_path / "log", 1)
        eventually(lambda: client.ok("EventSegments")["first"] == 4)


def test_without_a_limit_everything_is_kept(tmp_path: Path) -> None:
    with capturing(tmp_path) as server, server.client() as client:
        client.ok("EventPosition", consumer="lake", seq=10)
        make_segments(client, tmp_path / "log", 3)
        assert client.ok("EventSegments")["first"] == 1
