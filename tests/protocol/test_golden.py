"""Frames as the official clients send them, and replies byte for byte as they must look on the wire."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from msgspec import Raw

from headrace.commands import REGISTRY
from headrace.wire import Undecodable, decode_command
from tests.protocol.steps import JOB_SHAPE, push
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden" / "requests.jsonl").read_text(encoding="utf-8").splitlines()
]


# Two were recorded while the clients tried what must be refused: the text belongs to the frame.
WRONG = {"not a name": "Queue name contains invalid characters", "1.5": "jobs[0]: priority must be an integer"}


def _ids(entry: dict[str, str]) -> str:
    return f"{entry['client']}-{entry['cmd']}"


def _sent(frame: bytes) -> dict[str, Any]:
    # JavaScript packs an invalid date as a timestamp of one byte, which the test's own decoder does not take.
    frame = frame.replace(b"\xd4\xff", b"\xd4\x00")
    return dict(msgpack.unpackb(frame, strict_map_key=False))


def _why_wrong(sent: dict[str, Any]) -> str | None:
    if sent.get("queue") == "not a name":
        return WRONG["not a name"]
    jobs = sent.get("jobs") or [{}]
    return WRONG["1.5"] if jobs[0].get("priority") == 1.5 else None


RIGHT = [entry for entry in GOLDEN if _why_wrong(_sent(bytes.fromhex(entry["hex"]))) is None]


def test_recorded_mistakes_are_refused_with_their_text() -> None:
    found = set()
    for entry in GOLDEN:
        frame = bytes.fromhex(entry["hex"])
        text = _why_wrong(_sent(frame))
        if text is not None:
            found.add(text)
            with pytest.raises(Undecodable, match=re.escape(text)):
                decode_command(frame)
    assert found == set(WRONG.values())


@pytest.mark.parametrize("entry", RIGHT, ids=_ids)
def test_a_recorded_frame_decodes_to_its_command(entry: dict[str, str]) -> None:
    frame = bytes.fromhex(entry["hex"])
    sent = _sent(frame)
    command = decode_command(frame)
    assert type(command) is REGISTRY[entry["cmd"]].type
    assert msgpack.unpackb(bytes(command.req_id)) == sent["reqId"]


@pytest.mark.parametrize("entry", RIGHT, ids=_ids)
def test_what_a_recorded_frame_says_arrives_in_the_fields(entry: dict[str, str]) -> None:
    frame = bytes.fromhex(entry["hex"])
    sent = _sent(frame)
    command = decode_command(frame)
    fields = zip(type(command).__struct_fields__, type(command).__struct_encode_fields__, strict=True)
    for name, wire_name in fields:
        if wire_name in sent and isinstance(sent[wire_name], str | int | float) and wire_name != "reqId":
            value = getattr(command, name)
            if isinstance(value, Raw):
                value = msgpack.unpackb(bytes(value))
            assert value == sent[wire_name], wire_name


# -- replies byte for byte -----------------------------------------------------------------------------------


def _str(text: str) -> bytes:
    return bytes(msgpack.packb(text))


def _float(value: float) -> bytes:
    return b"\xcb" + struct.pack(">d", value)


@pytest.fixture
def raw(server: ServerProcess) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


def _reply(client: Client, cmd: str, **fields: Any) -> bytes:
    """The whole frame, length and all, that answers a command."""
    client.send(cmd, **fields)
    body = client.recv_frame()
    return struct.pack(">I", len(body)) + body


def _framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def _same_map(frame: bytes, expected: dict[str, bytes]) -> None:
    """The frame is one map with exactly these encoded values, in whatever order."""
    (length,) = struct.unpack(">I", frame[:4])
    body = frame[4:]
    assert length == len(body)
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(body)
    count = unpacker.read_map_header()
    found = {}
    for _ in range(count):
        key = unpacker.unpack()
        start = unpacker.tell()
        unpacker.skip()
        found[key] = body[start : unpacker.tell()]
    assert unpacker.tell() == len(body)
    assert found == expected


def test_the_reply_to_push_byte_for_byte(raw: Client, queue: str) -> None:
    frame = _reply(raw, "PUSH", queue=queue, data=1, jobId="golden-1", reqId="7")
    assert len(frame) == 4 + 1 + len(b"\xa2ok\xc3") + len(b"\xa2id\xa8golden-1") + len(b"\xa5reqId\xa17")
    assert frame[4:5] == b"\x83"
    _same_map(frame, {"ok": b"\xc3", "id": b"\xa8golden-1", "reqId": b"\xa17"})


def test_the_reply_to_ack_byte_for_byte(raw: Client, queue: str) -> None:
    job_id = push(raw, queue)
    raw.ok("PULL", queue=queue)
    assert _reply(raw, "ACK", id=job_id) == _framed(b"\x81\xa2ok\xc3")
    push(raw, queue, jobId="golden-ack")
    raw.ok("PULL", queue=queue)
    _same_map(_reply(raw, "ACK", id="golden-ack", reqId=5), {"ok": b"\xc3", "reqId": b"\x05"})


def test_an_error_byte_for_byte(raw: Client) -> None:
    frame = _reply(raw, "GetJob", id="nobody", reqId="1")
    _same_map(frame, {"ok": b"\xc2", "error": _str("Job not found"), "reqId": b"\xa11"})


def test_a_pulled_job_byte_for_byte(raw: Client, queue: str) -> None:
    created = 1_700_000_000_123.0
    raw.ok("PUSH", queue=queue, data={"to": "a@b"}, jobId="golden-pull", timestamp=created, name="mail")
    before = time.time() * 1000
    frame = _reply(raw, "PULL", queue=queue, owner="w", reqId="1")
    reply = msgpack.unpackb(frame[4:])
    started, token = reply["job"]["startedAt"], reply["token"]
    assert before - 2 <= started <= time.time() * 1000 + 2
    timeline = [{"state": "waiting", "timestamp": created}, {"state": "active", "timestamp": started}]
    expected = dict.fromkeys(JOB_SHAPE, b"\xc0")
    expected |= dict.fromkeys([key for key, types in JOB_SHAPE.items() if types == (bool,)], b"\xc2")
    expected |= dict.fromkeys([key for key, types in JOB_SHAPE.items() if types == (list,)], b"\x90")
    expected |= dict.fromkeys(["attempts", "priority", "progress", "childrenCompleted", "stallCount"], b"\x00")
    expected |= {
        "id": _str("golden-pull"),
        "customId": _str("golden-pull"),
        "name": _str("mail"),
        "queue": _str(queue),
        "data": b"\x81\xa2to\xa3a@b",
        "createdAt": _float(created),
        "runAt": _float(created),
        "lastHeartbeat": _float(started),
        "startedAt": _float(started),
        "maxAttempts": b"\x03",
        "backoff": b"\xcd\x03\xe8",
        "stackTraceLimit": b"\x0a",
        "timeline": msgpack.packb(timeline),
    }
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame[4:])
    parts = {}
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        start = unpacker.tell()
        unpacker.skip()
        parts[key] = frame[4 + start : 4 + unpacker.tell()]
    _same_map(_framed(parts.pop("job")), expected)
    assert parts == {"ok": b"\xc3", "token": _str(token), "reqId": b"\xa11"}


def test_an_event_byte_for_byte(server: ServerProcess, raw: Client, queue: str) -> None:
    with server.client() as listener:
        listener.ok("SubscribeEvents", queue=queue)
        push(raw, queue, jobId="golden-event")
        body = listener.recv_frame()
    event = msgpack.unpackb(body)["event"]
    expected = {
        "type": "event",
        "event": {
            "eventType": "pushed",
            "queue": queue,
            "jobId": "golden-event",
            "timestamp": event["timestamp"],
        },
    }
    assert body == msgpack.packb(expected)


def test_no_reply_holds_a_64_bit_integer(raw: Client, queue: str) -> None:
    """JavaScript clients read those as BigInt and fail: large numbers travel as float64."""
    raw.ok("PUSH", queue=queue, data=1, jobId="golden-64", ttl=31_536_000_000, dedup={"ttl": 31_536_000_000})
    raw.ok("SetDlqConfig", queue=queue, config={"maxAge": 31_536_000_000, "autoRetryInterval": 31_536_000_000})
    raw.ok("SetGroupRateLimit", queue=queue, groupId="g", max=2**52, duration=2**52)
    raw.ok("SetGroupConcurrency", queue=queue, groupId="g", concurrency=2**52)
    raw.ok("RateLimit", queue=queue, limit=2**52, duration=31_536_000_000)
    raw.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=2**45)
    raw.ok("RegisterWorker", name="w", queues=[queue], pid=2**31 - 1)
    questions = {
        "GetJob": {"id": "golden-64"},
        "GetDlqConfig": {"queue": queue},
        "GetGroupRateLimit": {"queue": queue, "groupId": "g"},
        "GetGroupConcurrency": {"queue": queue, "groupId": "g"},
        "GetQueueLimits": {"queue": queue},
        "CronGet": {"name": queue},
        "ListWorkers": {},
        "DashboardOverview": {},
        "Stats": {},
        "Metrics": {},
        "Ping": {},
    }
    for cmd, fields in questions.items():
        frame = _reply(raw, cmd, **fields)
        _assert_no_wide_integers(msgpack.unpackb(frame[4:]), cmd)


def _assert_no_wide_integers(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _assert_no_wide_integers(item, f"{where}.{key}")
    elif isinstance(value, list):
        for item in value:
            _assert_no_wide_integers(item, where)
    elif isinstance(value, int):
        assert -(2**31) <= value < 2**32, where


def test_small_replies_fit_one_packet(raw: Client) -> None:
    """A reply and its length leave in one write: a client that reads once gets all of it."""
    raw.send("Ping")
    raw.socket.settimeout(5)
    data = raw.socket.recv(65_536, socket.MSG_PEEK)
    assert len(data) == 4 + struct.unpack(">I", data[:4])[0]
    raw.recv()
