"""Events, EventSegments, EventSegment, EventPosition and ForgetEventPosition: the log as readers elsewhere see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.protocol.steps import OK, complete, push
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client


def events_after(client: Client, after: int, limit: int = 1000) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.ok("Events", after=after, limit=limit)["lines"].splitlines()]


@pytest.fixture(scope="module")
def capturing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Closes a segment ten times a second, as far as anything happens."""
    folder = tmp_path_factory.mktemp("capture")
    flags = ("--capture", str(folder / "log"), "--capture-segment-ms", "100")
    with ServerProcess(folder / "headrace.db", *flags) as running:
        yield running


def sealed(client: Client) -> list[dict[str, Any]]:
    return [segment for segment in client.ok("EventSegments")["segments"] if segment["sealed"]]


def test_events_come_in_order_from_any_place(client: Client, queue: str) -> None:
    start = client.ok("EventSegments")["last"]
    ids = [push(client, queue) for _ in range(5)]
    events = events_after(client, start)
    assert [event["job"] for event in events] == ids
    assert [event["seq"] for event in events] == list(range(start + 1, start + 6))
    assert [event["job"] for event in events_after(client, start + 2, limit=2)] == ids[2:4]
    assert events_after(client, start + 5) == []


def test_a_position_behind_the_end_gives_nothing_and_the_end(client: Client, queue: str) -> None:
    push(client, queue)
    last = client.ok("EventSegments")["last"]
    assert client.ok("Events", after=last + 1_000_000) == {**OK, "lines": "", "last": last}


def test_the_open_segment_is_listed_with_its_bounds(client: Client, queue: str) -> None:
    push(client, queue)
    window = client.ok("EventSegments")
    newest = window["segments"][-1]
    assert (newest["sealed"], newest["last"], newest["epoch"]) == (False, window["last"], window["epoch"])
    assert newest["rawBytes"] == newest["fileBytes"] > 0
    assert isinstance(newest["firstAt"], float)
    assert client.ok("EventSegments", epoch=window["epoch"], after=window["last"])["segments"] == []
    assert client.ok("EventSegments", limit=0)["segments"] == []


def test_segments_of_an_older_epoch_are_behind_every_position_of_a_newer_one(client: Client, queue: str) -> None:
    push(client, queue)
    window = client.ok("EventSegments")
    assert client.ok("EventSegments", epoch=window["epoch"] + 1)["segments"] == []
    assert client.ok("EventSegments", epoch=window["epoch"] - 1, after=10**9)["segments"] != []


def test_a_closed_segment_comes_as_it_lies_on_disk(capturing: ServerProcess, queue: str) -> None:
    with capturing.client() as client:
        push(client, queue)
        complete(client, queue)
        segment = eventually(lambda: sealed(client)[-1:])[0]
        chunk = client.ok("EventSegment", first=segment["first"])
        assert chunk["size"] == segment["fileBytes"] == len(chunk["data"])
        half = chunk["size"] // 2
        assert client.ok("EventSegment", first=segment["first"], offset=half)["data"] == chunk["data"][half:]
        assert client.ok("EventSegment", first=segment["first"], offset=10**9)["data"] == b""
        lines = zstandard.ZstdDecompressor().stream_reader(chunk["data"]).read().splitlines()
        seqs = [json.loads(line)["seq"] for line in lines]
        assert seqs == list(range(segment["first"], segment["last"] + 1))
        assert [event["seq"] for event in events_after(client, segment["first"], len(seqs) - 1)] == seqs[1:]


def test_a_segment_that_is_not_closed_or_not_there_is_refused(client: Client, queue: str) -> None:
    push(client, queue)
    first = client.ok("EventSegments")["segments"][-1]["first"]
    assert client.error("EventSegment", first=first) == f"No closed segment begins with event {first}"
    assert client.error("EventSegment", first=9_999_999) == "No closed segment begins with event 9999999"


def test_positions_are_listed_bounded_and_forgotten(client: Client, queue: str) -> None:
    push(client, queue)
    last = client.ok("EventSegments")["last"]
    assert client.call("EventPosition", consumer="lake", seq=last - 1) == OK
    assert client.ok("EventSegments")["positions"] == {"lake": last - 1}
    client.ok("EventPosition", consumer="lake", seq=10**12)
    assert client.ok("EventSegments")["positions"]["lake"] >= last  # nobody has read what is not written
    assert client.call("ForgetEventPosition", consumer="lake") == OK
    assert client.ok("EventSegments")["positions"] == {}
    assert client.error("ForgetEventPosition", consumer="lake") == "Consumer not found"


def test_there_is_a_limit_to_consumers(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "consumers.db") as server, server.client() as client:
        for n in range(1000):
            client.send("EventPosition", consumer=f"c{n}", seq=0)
        assert all(client.recv()["ok"] for _ in range(1000))
        refusal = "Too many consumers of the event log (max 1000); forget those that are gone"
        assert client.error("EventPosition", consumer="one more", seq=0) == refusal
        client.ok("EventPosition", consumer="c7", seq=0)
        client.ok("ForgetEventPosition", consumer="c7")
        client.ok("EventPosition", consumer="one more", seq=0)


def test_the_memory_log_is_read_in_the_same_way() -> None:
    with ServerProcess(":memory:") as server, server.client() as client:
        jobs = [push(client, "q") for _ in range(3)]
        window = client.ok("EventSegments")
        assert [(s["first"], s["last"], s["sealed"]) for s in window["segments"]] == [(1, 3, False)]
        assert [event["job"] for event in events_after(client, 1)] == jobs[1:]
        client.ok("EventPosition", consumer="lake", seq=2)
        assert client.ok("EventSegments", epoch=window["epoch"], after=3)["segments"] == []
