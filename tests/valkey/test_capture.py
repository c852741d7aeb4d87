"""`headrace capture` on a real Valkey: what the streams told is in the log, once, and what they lost is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.local.eventlog import LogLimits
from headrace.backends.valkey.backend import transport_of
from headrace.backends.valkey.capture import Capture
from headrace.backends.valkey.keys import Keys
from headrace.backends.valkey.url import parse_url
from headrace.pipeline.eventsource import BEGINNING, CaptureFolder
from tests.serverprocess import ServerProcess
from tests.valkeyserver import ValkeyServer
from tests.waiting import eventually


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
def url(valkey: ValkeyServer, request: pytest.FixtureRequest) -> str:
    return f"{valkey.url}?prefix={request.node.name[:40]}"


def command(url: str, folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "headrace", "capture", str(folder), "--backend", url, *flags]


def capture_once(url: str, folder: Path) -> str:
    done = subprocess.run(command(url, folder, "--once"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def captured(folder: Path) -> list[dict[str, Any]]:
    log = CaptureFolder(folder)
    segments = log.window(BEGINNING).segments
    blocks = [block for segment in segments for block in log.blocks(segment, segment.first - 1, segment.last)]
    return [json.loads(line) for block in blocks for line in block.splitlines()]


def has_captured(folder: Path, job: str) -> bool:
    return (folder / "shard=0").is_dir() and any(event["job"] == job for event in captured(folder))


def test_a_job_on_valkey_has_a_history_that_the_pipeline_understands(url: str, tmp_path: Path) -> None:
    with ServerProcess(":memory:", "--backend", url) as server, server.client() as client:
        client.ok("PUSH", queue="mail", data={}, name="send")
        client.ok("PUSH", queue="sms", data={}, maxAttempts=1)
        client.ok("ACK", id=client.ok("PULL", queue="mail")["job"]["id"], result={"x": 1})
        client.ok("FAIL", id=client.ok("PULL", queue="sms")["job"]["id"], error="E: gone")
    assert "of 2 queues" in capture_once(url, tmp_path)
    events = captured(tmp_path)
    mail = [(event["event"], event["ts"]) for event in events if event["queue"] == "mail"]
    assert [word for word, _ in mail] == ["pushed", "pulled", "completed"]
    assert sorted(ts for _, ts in mail) == [ts for _, ts in mail]
    letter = next(event for event in events if event["event"] == "failed")
    assert (letter["queue"], letter["error"], letter["terminal"]) == ("sms", "E: gone", True)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))


@pytest.mark.parametrize(("verb", "word"), [("Drain", "drained"), ("Obliterate", "obliterated")])
def test_a_queue_that_was_emptied_is_told_as_such(url: str, tmp_path: Path, verb: str, word: str) -> None:
    with ServerProcess(":memory:", "--backend", url) as server, server.client() as client:
        for n in range(3):
            client.ok("PUSH", queue=word, data=n)
        client.ok(verb, queue=word)
    capture_once(url, tmp_path)
    *pushed, cleared = [event for event in captured(tmp_path) if event["queue"] == word]
    assert [event["event"] for event in pushed] == ["pushed"] * 3
    assert (cleared["event"], cleared.get("job", "")) == (word, "")
    assert cleared["last"] >= pushed[-1]["seq"]


def test_nothing_comes_twice_when_it_is_started_again_or_killed(url: str, valkey: ValkeyServer, tmp_path: Path) -> None:
    prefix = url.partition("prefix=")[2]
    client, total = valkey.client(), 0
    for _ in range(3):
        for _ in range(100):
            total += 1
            client.xadd(f"{prefix}:{{q}}:events", {"event": "added", "jobId": str(total), "name": "n"})
        running = subprocess.Popen(command(url, tmp_path, "--segment-ms", "100"), stdout=subprocess.PIPE)
        eventually(lambda last=str(total): has_captured(tmp_path, last))
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=10)
        (tmp_path / "streams.json").unlink()  # as if it had died before they were stored: the log knows
    capture_once(url, tmp_path)
    assert [event["job"] for event in captured(tmp_path)] == [str(n) for n in range(1, total + 1)]


def test_what_other_programs_write_does_not_end_it(url: str, valkey: ValkeyServer, tmp_path: Path) -> None:
    prefix, client = url.partition("prefix=")[2], valkey.client()
    for n, odd in enumerate(("soon", "12.5", "²", "9" * 5000, b"\xff")):
        client.hset(f"{prefix}:{{q}}:job:{n}", "processedOn", odd)
        client.xadd(f"{prefix}:{{q}}:events", {"event": "completed", "jobId": n})
        client.xadd(f"{prefix}:{{q}}:events", {"event": "delay-changed", "jobId": n, "delay": odd})
    capture_once(url, tmp_path)
    assert [event["event"] for event in captured(tmp_path)] == 5 * ["completed", "delayed"]


def test_what_a_stream_lost_before_it_was_read_is_named_as_a_gap(
    url: str, valkey: ValkeyServer, tmp_path: Path
) -> None:
    stream = f"{url.partition('prefix=')[2]}:{{q}}:events"
    client = valkey.client()
    for n in range(10):
        client.xadd(stream, {"event": "added", "jobId": str(n)})
    capture_once(url, tmp_path)
    for n in range(10, 60):
        client.xadd(stream, {"event": "added", "jobId": str(n)}, maxlen=20, approximate=False)
    capture_once(url, tmp_path)
    events = captured(tmp_path)
    (gap,) = [event for event in events if event["event"] == "gap"]
    assert (gap["queue"], gap["first"], gap["last"], gap["seq"]) == ("q", 11, 40, 41)
    assert [event["job"] for event in events if event["event"] == "pushed"] == [
        str(n) for n in (*range(10), *range(40, 60))
    ]


def test_a_gap_is_named_once_also_if_the_positions_were_not_stored_after_it(
    url: str, valkey: ValkeyServer, tmp_path: Path
) -> None:
    stream = f"{url.partition('prefix=')[2]}:{{q}}:events"
    client = valkey.client()
    for n in range(50):
        client.xadd(stream, {"event": "added", "jobId": str(n)}, maxlen=20, approximate=False)
    for n in (50, 51):
        capture_once(url, tmp_path)
        (tmp_path / "streams.json").unlink()  # as if it had died before they were stored: the log knows
        client.xadd(stream, {"event": "added", "jobId": str(n)}, maxlen=20, approximate=False)
    capture_once(url, tmp_path)
    words = [event["event"] for event in captured(tmp_path)]
    assert words == ["gap", *["pushed"] * 22]


async def test_what_is_cut_after_it_was_read_is_no_gap(url: str, valkey: ValkeyServer, tmp_path: Path) -> None:
    prefix = url.partition("prefix=")[2]
    client = valkey.client()

    def write(count: int) -> None:
        for _ in range(count):
            client.xadd(f"{prefix}:{{q}}:events", {"event": "added", "jobId": "j"}, maxlen=20, approximate=False)

    class Overtaken(Capture):
        """Others write so fast that what was just read is cut before it is counted."""

        async def _check_loss(self, queue: str, just_read: list[str]) -> None:
            write(15)
            await super()._check_loss(queue, just_read)

    server = transport_of(parse_url(url))
    await server.open()
    write(20)
    capture = Overtaken(server, Keys(prefix), tmp_path, LogLimits())
    try:
        assert [await capture.poll() for _ in range(3)] == [20, 15, 15]
    finally:
        capture.close()
        await server.close()
    assert {event["event"] for event in captured(tmp_path)} == {"pushed"}


def test_a_log_whose_end_is_lost_is_continued(url: str, valkey: ValkeyServer, tmp_path: Path) -> None:
    client = valkey.client()
    for n in range(2):
        client.xadd(f"{url.partition('prefix=')[2]}:{{q}}:events", {"event": "added", "jobId": str(n)})
        capture_once(url, tmp_path)
    (tmp_path / "streams.json").unlink()
    max((tmp_path / "shard=0").glob("seg-*")).write_bytes(b"damaged")
    capture_once(url, tmp_path)
    assert [(event["event"], event.get("job", "")) for event in captured(tmp_path)] == [
        ("pushed", "0"),
        ("gap", ""),
        ("pushed", "1"),
    ]


def test_a_second_capture_of_the_same_folder_is_refused(url: str, tmp_path: Path) -> None:
    with subprocess.Popen(command(url, tmp_path), stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert b"capturing" in running.stdout.readline()
        second = subprocess.run(command(url, tmp_path), capture_output=True, text=True, timeout=60, check=False)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    assert second.returncode == 1
    assert "another capture writes to" in second.stderr
