"""The byte stream: frames split anywhere, broken frames, bombs, order, limits, tokens, TLS, deaf clients."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.steps import OK, counts, park, push
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client, send_until_closed

FORMAT = {"ok": False, "error": "Invalid command format"}
INVALID = {"ok": False, "error": "Invalid command"}
UNDEFINED = msgpack.ExtType(0, b"\x00")
MEGABYTE = 1024 * 1024


def _framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def _command(cmd: str, **fields: Any) -> bytes:
    return _framed(msgpack.packb({"cmd": cmd, **fields}))


def _memory_mb(pid: int, what: str = "VmHWM") -> float:
    """Peak (VmHWM) or present (VmRSS) memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(what)


@contextlib.contextmanager
def _serving(tmp_path: Path, *flags: str) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "headrace.db", *flags) as running:
        yield running


def _is_closed(client: Client) -> bool:
    """The server has ended the connection, politely or not; whatever is still on the way is read."""
    client.socket.settimeout(10)
    try:
        while client.socket.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    return True


# -- splitting -----------------------------------------------------------------------------------------------

STREAM = b"".join(
    [
        _command("GetState", id="a", reqId="1"),
        _command("Nonsense", reqId="2"),
        _framed(b""),
        _command("GetJobCounts", queue="split", reqId=3),
        _framed(b"\xc1\xc1"),
        _command("GetState", id="x" * 300, reqId="4"),
        _command("PULL", queue="", reqId="5"),
        _command("GetResult", id="b"),
    ]
)
REPLIES = 8


def _answers(server: ServerProcess, pieces: list[bytes]) -> list[Any]:
    with server.client() as client:
        for piece in pieces:
            client.socket.sendall(piece)
        return [client.recv() for _ in range(REPLIES)]


@settings(max_examples=scaled(60, 400))
@given(cuts=st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_frames_split_at_any_byte_give_the_same_replies(server: ServerProcess, cuts: list[int]) -> None:
    bounds = [0, *sorted(set(cuts)), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(bounds)]
    assert _answers(server, pieces) == _answers(server, [STREAM])


def test_a_stream_of_single_bytes_gives_the_same_replies(server: ServerProcess) -> None:
    assert _answers(server, [STREAM[i : i + 1] for i in range(len(STREAM))]) == _answers(server, [STREAM])


# -- broken frames -------------------------------------------------------------------------------------------


def _mutate(frame: bytes, rng: random.Random) -> bytes:
    body = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body)) if body else 0
        kind = rng.randrange(4)
        if kind == 0 and body:
            body[at] = rng.randrange(256)
        elif kind == 1 and body:
            del body[at : at + rng.randint(1, 8)]
        elif kind == 2:
            body[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            body[at:] = rng.choice([b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1"])
    return bytes(body)


def _samples() -> list[bytes]:
    job = {"data": {"a": [1, 2.5, None, "x"]}, "priority": 5, "dependsOn": [], "backoff": {"type": "fixed", "delay": 5}}
    commands: list[dict[str, Any]] = [
        {"cmd": "PUSH", "queue": "fuzz", "reqId": "1", **job},
        {"cmd": "PUSHB", "queue": "fuzz", "jobs": [job, {"data": 1}], "reqId": "2"},
        {"cmd": "PULL", "queue": "fuzz", "owner": "w", "lockTtl": 1000, "reqId": 3},
        {"cmd": "ACKB", "ids": ["a", "b"], "tokens": ["", "t"], "results": [1, UNDEFINED], "reqId": "4"},
        {"cmd": "GetJobs", "queue": "fuzz", "state": ["waiting"], "limit": 5, "reqId": "5"},
        {"cmd": "PUSHF", "jobs": [{"id": "f", "queue": "fuzz", "input": job}], "reqId": "6"},
        {"cmd": "Cron", "name": "fuzz", "queue": "fuzz", "data": 1, "schedule": "0 0 1 1 *", "reqId": "7"},
        {"cmd": "SetDlqConfig", "queue": "fuzz", "config": {"maxAge": 5e9}, "reqId": "8"},
        {"cmd": "Ping", "reqId": "9"},
    ]
    return [bytes(msgpack.packb(command)) for command in commands]


def test_mutated_frames_hurt_neither_the_server_nor_others(server: ServerProcess, client: Client) -> None:
    rng = random.Random(20_240_601)
    samples = _samples()
    with server.client() as victim:
        for n in range(scaled(500, 5000)):
            # Every frame gets one reply, whatever is in it: a long poll cannot come of these samples for long.
            victim.send_frame(_mutate(rng.choice(samples), rng))
            # Request ids and payloads come back as they were sent, broken characters included.
            body = victim.recv_frame()
            reply = msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogateescape")
            assert isinstance(reply["ok"], bool)
            assert reply.get("error") != "Internal server error", reply
            if n % 100 == 0:
                assert client.ok("Ping")["data"]["pong"] is True
        assert victim.ok("Ping")["data"]["pong"] is True
    client.ok("Obliterate", queue="fuzz")


BOMBS = {
    "nested arrays": b"\x91" * 30,
    "nested maps": b"\x81\xa1a" * 10,
    "very deep": b"\x91" * 5_000_000,
    "deep data": b"\x83\xa3cmd\xa4PUSH\xa5queue\xa1q\xa4data" + b"\x91" * 2_000_000 + b"\xc0",
    "array": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 25,
    "map": b"\xdf\xff\xff\xff\xff" + b"\xc0" * 25,
    "str": b"\xdb\xff\xff\xff\xff" + b"a" * 25,
    "bin": b"\xc6\xff\xff\xff\xff" + b"a" * 25,
    "ext": b"\xc9\xff\xff\xff\xff\x05" + b"a" * 24,
    "array of a field": b"\x82\xa3cmd\xa4ACKB\xa3ids\xdd\xff\xff\xff\xff",
    "array of payloads": b"\x83\xa3cmd\xa5PUSHB\xa5queue\xa1q\xa4jobs\xdd\xff\xff\xff\xff",
    "map of data": b"\x83\xa3cmd\xa4PUSH\xa5queue\xa1q\xa4data\xdf\xff\xff\xff\xff",
    "str of a field": b"\x82\xa3cmd\xa6GetJob\xa2id\xdb\xff\xff\xff\xff",
    "many empty maps": b"\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000,
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_bomb_costs_little_memory_and_time(server: ServerProcess, client: Client, name: str) -> None:
    client.ok("Ping")
    before = _memory_mb(server.pid, "VmRSS")
    with server.client() as bomber:
        began = server.cpu_s
        bomber.send_frame(BOMBS[name])
        reply = bomber.recv()
        assert server.cpu_s - began < 0.5
        assert reply["ok"] is False
        assert reply["error"] in ("Invalid command format", "Invalid command")
        assert bomber.ok("Ping")["data"]["pong"] is True
    assert _memory_mb(server.pid) < before + 100
    assert client.ok("Ping")["data"]["pong"] is True


MANY = 5_000_000
_EMPTY = b"\xdd" + struct.pack(">I", MANY) + b"\x80" * MANY
_NAMES = b"".join(b"\xa4%04x\xc0" % n for n in range(0x10000))
HEAVY = {
    "objects for a number": (
        b"\x84\xa3cmd\xa4PUSH\xa5queue\xa1q\xa4data\xc0\xa8priority" + _EMPTY,
        "priority must be a number",
    ),
    "objects for a text": (b"\x82\xa3cmd\xa6GetJob\xa2id" + _EMPTY, "id must be a string"),
    "objects for ids": (b"\x82\xa3cmd\xa4ACKB\xa3ids" + _EMPTY, "ids must have at most 100000 items"),
    "objects for jobs": (
        b"\x83\xa3cmd\xa5PUSHB\xa5queue\xa1q\xa4jobs" + _EMPTY,
        "jobs must have at most 100000 items",
    ),
    "a list for a name": (b"\x81\xa3cmd" + _EMPTY, "Invalid command"),
    "very many fields": (
        b"\xdf" + struct.pack(">I", 0x10002) + b"\xa3cmd\xa6GetJob\xa2id\x05" + _NAMES,
        "An object must have at most 10000 fields",
    ),
}


@pytest.mark.parametrize("name", list(HEAVY))
def test_what_is_wrong_is_found_without_making_objects_of_it(tmp_path: Path, name: str) -> None:
    frame, error = HEAVY[name]
    with _serving(tmp_path) as server, server.client(timeout=30) as client:
        client.error("GetJob", id=5)
        before = _memory_mb(server.pid)
        client.send_frame(frame)
        assert client.recv()["error"] == error
        assert _memory_mb(server.pid) < before + 60


def test_a_frame_above_64_mb_is_refused_from_its_length(server: ServerProcess) -> None:
    limit = 64 * MEGABYTE
    with server.client() as client:
        client.socket.sendall(struct.pack(">I", limit + 1))
        error = f"Frame too large: {limit + 1} bytes exceeds maximum 67108864"
        assert client.recv() == {"ok": False, "error": error}
        assert _is_closed(client)


def test_an_honest_frame_below_the_limit_arrives_whole(server: ServerProcess) -> None:
    with server.client(timeout=30) as client:
        jobs = [{"data": "x" * (9 * MEGABYTE)} for _ in range(5)]
        assert len(client.ok("PUSHB", queue="large", jobs=jobs)["ids"]) == 5
        client.ok("Obliterate", queue="large")


def test_frames_before_a_frame_that_is_too_large_are_answered(server: ServerProcess) -> None:
    with server.client() as client:
        client.socket.sendall(_command("Ping", reqId="1") + struct.pack(">I", 2**32 - 1))
        assert client.recv()["reqId"] == "1"
        assert client.recv()["error"] == "Frame too large: 4294967295 bytes exceeds maximum 67108864"
        assert _is_closed(client)


def test_who_goes_on_sending_behind_it_still_gets_every_reply(server: ServerProcess) -> None:
    """Closing a socket with unread input would reset the connection, and what the client has not read is lost."""
    with server.client(timeout=30) as client:
        job_id = client.ok("PUSH", queue="large", data="x" * MEGABYTE)["id"]
        asked = [_command("GetJob", id=job_id, reqId=n) for n in range(20)]
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.socket.sendall(b"".join(asked) + struct.pack(">I", 2**32 - 1))
        sending = threading.Thread(target=send_until_closed, args=(client.socket, bytes(65_536)))
        sending.start()
        replies = [client.recv() for _ in range(21)]  # the error need not wait for those before it
        assert [reply["reqId"] for reply in replies if reply["ok"]] == list(range(20))
        assert [reply["error"] for reply in replies if not reply["ok"]] == [
            "Frame too large: 4294967295 bytes exceeds maximum 67108864"
        ]
        sending.join(timeout=30)
        assert _is_closed(client)
    with server.client() as client:
        client.ok("Obliterate", queue="large")


def test_who_reads_slowly_is_not_cut_off_while_it_reads(server: ServerProcess) -> None:
    with server.client(timeout=30) as client:
        job_id = client.ok("PUSH", queue="slow", data="x" * 9 * MEGABYTE)["id"]
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.socket.sendall(_command("GetJob", id=job_id) + struct.pack(">I", 2**32 - 1))
        unread = 9 * MEGABYTE
        while chunk := client.socket.recv(65_536):
            unread -= len(chunk)
            time.sleep(0.02)  # a slow client: it takes three seconds in all
        assert unread < 0
    with server.client() as client:
        client.ok("Obliterate", queue="slow")


def test_who_never_closes_loses_its_jobs_all_the_same(server: ServerProcess) -> None:
    with server.client() as client, server.client() as other:
        job_id = client.ok("PUSH", queue="left", data=1)["id"]
        assert client.ok("PULL", queue="left")["job"]["id"] == job_id
        client.socket.sendall(struct.pack(">I", 2**32 - 1))
        assert "Frame too large" in client.recv()["error"]
        eventually(lambda: other.ok("GetState", id=job_id)["state"] == "waiting", within=5)
        other.ok("Obliterate", queue="left")


@pytest.mark.parametrize(
    ("body", "reply"),
    [
        (b"", FORMAT),
        (b"\xc0", FORMAT),
        (b"\xc1", FORMAT),
        (msgpack.packb({"cmd": "Ping"})[:-1], FORMAT),
        (msgpack.packb({"cmd": "Ping"}) + b"\xc0", FORMAT),
        (msgpack.packb({"cmd": "Ping", "x": 1}) + msgpack.packb({"cmd": "Ping"}), FORMAT),
        (b"\x81\xa3cmd\xa2\xff\xff", FORMAT),
        (msgpack.packb([]), INVALID),
        (msgpack.packb("Ping"), INVALID),
        (msgpack.packb(5), INVALID),
        (msgpack.packb({}), INVALID),
        (msgpack.packb({"cmd": ""}), INVALID),
        (msgpack.packb({"cmd": 5}), INVALID),
        (msgpack.packb({"cmd": None, "reqId": "1"}), {**INVALID, "reqId": "1"}),
        (msgpack.packb({"reqId": "9"}), {**INVALID, "reqId": "9"}),
        (msgpack.packb({"cmd": "Nope", "reqId": 3}), {"ok": False, "error": "Unknown command: Nope", "reqId": 3}),
    ],
)
def test_what_is_no_command_is_refused_and_the_connection_stays(
    client: Client, body: bytes, reply: dict[str, Any]
) -> None:
    client.send_frame(body)
    assert client.recv() == reply
    assert client.ok("Ping")["data"]["pong"] is True


HALF = "cut \ud83d"
"""A text that JavaScript cut in the middle of a character. Its packer writes short ones as they are: no UTF-8."""


def _call_with_halves(client: Client, cmd: str, **fields: Any) -> dict[str, Any]:
    client.send_frame(msgpack.packb({"cmd": cmd, "reqId": "1", **fields}, unicode_errors="surrogatepass"))
    reply: dict[str, Any] = client.recv()
    assert reply.pop("reqId") == "1"
    return reply


def test_half_a_character_in_what_people_read_is_replaced(client: Client, queue: str) -> None:
    job_id = push(client, queue, backoff=60_000, data=1)
    client.ok("PULL", queue=queue)
    assert _call_with_halves(client, "Progress", id=job_id, progress=5, message=HALF) == OK
    assert _call_with_halves(client, "AddLog", id=job_id, message=HALF)["ok"] is True
    assert _call_with_halves(client, "FAIL", id=job_id, error=HALF, stack=[HALF, "at b"]) == OK
    job = client.ok("GetJob", id=job_id)["job"]
    (line,) = client.ok("GetLogs", id=job_id)["data"]["logs"]
    for text in (job["progressMessage"], job["failedReason"], job["stacktrace"][0], line["message"]):
        assert text.rstrip("\ufffd") == "cut "
        assert text != "cut "


@pytest.mark.parametrize(
    ("cmd", "fields", "error"),
    [
        ("PUSH", {"data": 1, "jobId": HALF}, "custom ID must be well-formed Unicode"),
        ("PUSH", {"data": 1, "name": HALF}, "name must be well-formed Unicode"),
        ("PUSHB", {"jobs": [{"data": 1, "uniqueKey": HALF}]}, "jobs[0]: uniqueKey must be well-formed Unicode"),
        ("PUSH", {"data": 1, "tags": ["a", HALF]}, "tags[1] must be well-formed Unicode"),
        ("GetJob", {"id": HALF}, "id must be well-formed Unicode"),
        ("PUSH", {"data": 1, HALF: 1, "priority": "x"}, "Invalid command format"),
    ],
)
def test_half_a_character_elsewhere_is_refused_by_name(
    client: Client, queue: str, cmd: str, fields: dict[str, Any], error: str
) -> None:
    assert _call_with_halves(client, cmd, queue=queue, **fields) == {"ok": False, "error": error}
    assert counts(client, queue) == {}


def test_half_a_character_in_a_payload_comes_back_as_it_was(client: Client, queue: str) -> None:
    assert _call_with_halves(client, "PUSH", queue=queue, data=HALF)["ok"] is True
    client.send("PULL", queue=queue)
    assert HALF.encode(errors="surrogatepass") in client.recv_frame()


def test_keys_that_are_no_strings_are_ignored_or_refused(client: Client) -> None:
    client.send_frame(msgpack.packb({"cmd": "Ping", 7: "seven", "reqId": "1"}))
    reply = client.recv()
    assert reply["ok"] is True or reply["error"] in ("Invalid command", "Invalid command format")
    assert client.ok("Ping")


@pytest.mark.parametrize(
    "req_id",
    ["7", "", 7, -(2**40), 2**63, 2.5, None, True, [1, "a"], {"a": 1}, b"\x00\xff", UNDEFINED],
    ids=repr,
)
@pytest.mark.parametrize("cmd", ["Ping", "Nonsense", "GetJob", "Clean"])
def test_a_request_id_comes_back_unchanged_in_type(client: Client, req_id: object, cmd: str) -> None:
    """In a success, an unknown command, a refusal by the engine and one by the decoder."""
    client.send(cmd, reqId=req_id, id="nobody", queue=5)
    reply = client.recv()
    assert "reqId" in reply
    assert reply["reqId"] == req_id
    assert type(reply["reqId"]) is type(req_id)


def test_a_request_without_id_is_answered_without_one(client: Client) -> None:
    for cmd in ("Ping", "Nonsense", "GetJob"):
        assert "reqId" not in client.call(cmd)


def test_a_frame_that_makes_no_progress_ends_its_connection(tmp_path: Path) -> None:
    with (
        _serving(tmp_path, "--tcp-idle-timeout-ms", "200") as server,
        server.client() as stuck,
        server.client() as idle,
    ):
        idle.ok("Ping")
        stuck.ok("Ping")
        began = time.monotonic()
        stuck.socket.sendall(_command("Ping")[:-1])
        assert _is_closed(stuck)
        assert 0.15 <= time.monotonic() - began < 2
        assert idle.ok("Ping")["data"]["pong"] is True
        with server.client() as slow:
            frame = _command("Ping")
            for n in range(0, len(frame), 4):  # slower than the timeout as a whole, but never silent that long
                slow.socket.sendall(frame[n : n + 4])
                idle.call("PULL", queue="none", timeout=100)
            assert slow.recv()["ok"] is True


# -- order ---------------------------------------------------------------------------------------------------


def test_pipelined_commands_are_answered_in_order(client: Client, queue: str) -> None:
    count = 500
    client.socket.sendall(
        b"".join(_command("PUSH", queue=queue, data=n, reqId=n) for n in range(count))
        + b"".join(_command("GetState", id=str(n), reqId=count + n) for n in range(count))
    )
    assert [client.recv()["reqId"] for _ in range(2 * count)] == list(range(2 * count))
    assert counts(client, queue) == {"waiting": count}


@pytest.mark.parametrize("req_id", [{}, {"reqId": None}, {"reqId": UNDEFINED}], ids=["none", "nil", "undefined"])
def test_requests_without_id_behind_a_long_poll_are_answered_in_order(
    server: ServerProcess, client: Client, queue: str, req_id: dict[str, Any]
) -> None:
    with server.client() as old:
        old.send("PULL", queue=queue, timeout=10_000, **req_id)
        old.send("GetState", id="second", **req_id)
        old.send("Ping", **req_id)
        eventually(lambda: push(client, queue))
        assert "job" in old.recv()
        assert old.recv()["id"] == "second"
        assert old.recv()["data"]["pong"] is True


def test_requests_with_id_overtake_a_long_poll(server: ServerProcess, client: Client, queue: str) -> None:
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000)
        assert poller.call("GetState", id="x", reqId="2")["reqId"] == "2"
        push(client, queue)
        assert poller.recv()["reqId"] == "parked"


def test_fifty_commands_wait_at_once_and_further_ones_after_them(
    server: ServerProcess, client: Client, queue: str
) -> None:
    with server.client() as poller:
        for n in range(60):
            poller.send("PULL", queue=f"{queue}.{n}", timeout=10_000, reqId=n)
        poller.send("Ping", reqId="ping")
        # The 51st poll is not parked yet: a job for it stays where it is, one for the 50th is taken.
        push(client, f"{queue}.55")
        push(client, f"{queue}.49")
        assert poller.recv()["reqId"] == 49
        assert counts(client, f"{queue}.55") == {"waiting": 1}
        for n in range(6):
            push(client, f"{queue}.{n}")
        got = [poller.recv()["reqId"] for _ in range(7)]
        assert set(got) == {*range(6), 55}
        for n in range(6, 49):
            push(client, f"{queue}.{n}")
        assert "ping" in [poller.recv()["reqId"] for _ in range(44)]


# -- large replies and clients that do not read --------------------------------------------------------------


def test_a_reply_above_64_mb_becomes_an_error_that_says_what_to_do(server: ServerProcess) -> None:
    with server.client(timeout=60) as client:
        for _ in range(8):
            push(client, "huge", data="x" * (9 * MEGABYTE))
        reply = client.call("GetJobs", queue="huge", reqId="1")
        error = "Reply exceeds 64 MB: ask for fewer jobs with a lower limit"
        assert reply == {"ok": False, "error": error, "reqId": "1"}
        assert len(client.ok("GetJobs", queue="huge", limit=2)["jobs"]) == 2
        client.ok("Obliterate", queue="huge")


def test_clean_removes_no_more_than_its_reply_can_list(server: ServerProcess) -> None:
    with server.client(timeout=60) as client:
        for batch in range(17):  # ids are counted in characters; these have 4 KB each
            ids = [f"{batch}-{n}-".ljust(1024, "\N{ROCKET}") for n in range(1000)]
            client.ok("PUSHF", jobs=[{"id": job_id, "queue": "huge", "input": {"data": 1}} for job_id in ids])
        removed = client.ok("Clean", queue="huge", grace=0, limit=100_000)
        assert removed["count"] == len(removed["ids"])
        assert 16_000 < removed["count"] < 17_000
        assert counts(client, "huge") == {"waiting": 17_000 - removed["count"]}
        assert client.ok("Clean", queue="huge", grace=0, limit=100_000)["count"] == 17_000 - removed["count"]


@pytest.mark.parametrize("owner", [{}, {"owner": "w"}], ids=["plain", "leased"])
def test_a_batch_pull_takes_no_more_than_a_reply_can_hold(server: ServerProcess, owner: dict[str, str]) -> None:
    with server.client(timeout=60) as client:
        ids = [push(client, "huge", data="x" * (9 * MEGABYTE)) for _ in range(8)]
        reply = client.ok("PULLB", queue="huge", count=8, **owner)
        assert [job["id"] for job in reply["jobs"]] == ids[:7]
        assert len(reply.get("tokens", ids[:7])) == 7
        assert counts(client, "huge") == {"active": 7, "waiting": 1}
        (left,) = client.ok("PULLB", queue="huge", count=8)["jobs"]
        assert (left["id"], left["attempts"]) == (ids[7], 0)
        client.ok("Obliterate", queue="huge")


def test_many_pulls_at_once_of_jobs_that_are_large_are_all_answered(server: ServerProcess) -> None:
    with server.client(timeout=60) as client:
        ids = [push(client, "huge", data="x" * (9 * MEGABYTE)) for _ in range(10)]
        client.socket.sendall(b"".join(_command("PULL", queue="huge", owner="w", reqId=n) for n in range(10)))
        replies = [client.recv() for _ in range(10)]
        assert [reply["job"]["id"] for reply in replies] == ids
        assert counts(client, "huge") == {"active": 10}
        client.ok("Obliterate", queue="huge")


def test_large_commands_behind_a_long_poll_are_not_read_without_end(tmp_path: Path) -> None:
    with _serving(tmp_path) as server, server.client() as client, server.client(timeout=3) as greedy:
        before = _memory_mb(server.pid)
        greedy.send("PULL", queue="none", timeout=60_000)
        pushes = _command("PUSH", queue="q", data="x" * (5 * MEGABYTE)) * 30
        with pytest.raises(TimeoutError):
            greedy.socket.sendall(pushes)
        assert _memory_mb(server.pid) < before + 100
        assert client.ok("Ping")["data"]["pong"] is True


def test_a_frame_that_we_do_not_read_is_not_one_that_stands_still(tmp_path: Path) -> None:
    with _serving(tmp_path, "--tcp-idle-timeout-ms", "1000") as server, server.client() as client:
        last = _command("GetState", id="last")
        head = _command("PULL", queue="none", timeout=2500) + _command("Ping") * 300 + last[:7]
        client.socket.sendall(head)
        assert client.recv()["job"] is None
        client.socket.sendall(last[7:])
        assert [client.recv()["ok"] for _ in range(300)] == [True] * 300
        assert client.recv()["id"] == "last"


def test_a_client_that_asks_and_does_not_read_costs_bounded_memory(tmp_path: Path) -> None:
    with _serving(tmp_path) as server, server.client(timeout=30) as client:
        for _ in range(4):
            push(client, "q", data="x" * (MEGABYTE // 2))
        before = _memory_mb(server.pid)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            questions = _command("GetJobs", queue="q") * 1000  # two megabytes each
            with contextlib.suppress(TimeoutError, ConnectionError):
                deaf.settimeout(3)
                deaf.sendall(questions)
            worst = 0.0
            for _ in range(50):
                worst = max(worst, client.call("PULL", queue="none", timeout=10)["ok"] and _ping_ms(client))
            assert worst < 500
            assert _memory_mb(server.pid) < before + 200
        assert client.ok("Ping")["data"]["pong"] is True


def _ping_ms(client: Client) -> float:
    began = time.monotonic()
    client.ok("Ping")
    return (time.monotonic() - began) * 1000


def test_a_listener_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    flags = ("--tcp-max-write-queue-bytes", str(4 * MEGABYTE))
    with _serving(tmp_path, *flags) as server, server.client(timeout=30) as client:
        before = _memory_mb(server.pid)
        deaf = server.client()
        deaf.ok("SubscribeEvents", queue="q")
        connected = client.ok("Metrics")["metrics"]["activeConnections"]

        def tell() -> bool:
            push(client, "q", removeOnComplete=True)
            job = client.ok("PULL", queue="q")["job"]
            client.ok("ACK", id=job["id"], result="x" * MEGABYTE)
            return bool(client.ok("Metrics")["metrics"]["activeConnections"] < connected)

        eventually(tell, within=20)
        assert _memory_mb(server.pid) < before + 100
        deaf.close()


# -- rate limit, tokens, TLS ---------------------------------------------------------------------------------


def test_the_rate_limit_of_a_connection_refuses_what_is_too_much(tmp_path: Path) -> None:
    flags = ("--rate-limit-max-requests", "5", "--rate-limit-window-ms", "400")
    with _serving(tmp_path, *flags) as server, server.client() as client, server.client() as other:
        client.socket.sendall(b"".join(_command("Ping", reqId=n) for n in range(8)))
        replies = [client.recv() for _ in range(8)]
        assert [reply["reqId"] for reply in replies] == list(range(8))
        assert [reply["ok"] for reply in replies] == [True] * 5 + [False] * 3
        assert {reply.get("error") for reply in replies[5:]} == {"Rate limit exceeded"}
        assert other.ok("Ping")["data"]["pong"] is True
        eventually(lambda: client.call("Ping")["ok"], every=0.05)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = Path(tmp_path_factory.mktemp("guarded")) / "headrace.db"
    with ServerProcess(path, "--auth-tokens", "first-token,second-token") as running:
        yield running


def test_nothing_is_answered_before_authentication(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        for cmd in ("Ping", "Hello", "PUSH", "SubscribeEvents", "Nonsense", "Stats"):
            reply = client.call(cmd, queue="q", data=1, reqId=cmd)
            assert reply == {"ok": False, "error": "Not authenticated", "reqId": cmd}
        client.send_value([1])
        assert client.recv()["ok"] is False
        assert client.call("Auth", token="first-token", reqId="a") == {**OK, "reqId": "a"}
        assert client.ok("Ping")["data"]["pong"] is True
        assert counts(client, "q") == {}


def test_any_of_several_tokens_opens_the_connection(guarded: ServerProcess) -> None:
    for token in ("first-token", "second-token"):
        with guarded.client() as client:
            assert client.call("Auth", token=token) == OK
            assert client.ok("Stats")


@pytest.mark.parametrize("token", ["", "first-token ", "first-token,second-token", "ünïcode", "x" * 100_000])
def test_a_wrong_token_is_refused(guarded: ServerProcess, token: str) -> None:
    with guarded.client() as client:
        assert client.error("Auth", token=token) == "Invalid token"
        assert client.error("Ping") == "Not authenticated"


def test_a_missing_or_odd_token_is_refused(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        assert client.error("Auth") == "Invalid token"
        assert client.error("Auth", token=None) == "Invalid token"
        client.error("Auth", token=5)
        assert client.error("Ping") == "Not authenticated"


def test_a_later_failure_does_not_close_what_is_open(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        client.ok("Auth", token="first-token")
        assert client.error("Auth", token="wrong") == "Invalid token"
        assert client.ok("Ping")["data"]["pong"] is True


def test_a_stranger_cannot_have_a_large_frame_kept(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        client.socket.sendall(struct.pack(">I", MEGABYTE) + b"x")
        assert client.recv() == {"ok": False, "error": "Not authenticated"}
        assert _is_closed(client)


def test_a_large_frame_may_follow_the_token_at_once(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        large = _command("PUSH", queue="large", data="x" * MEGABYTE, reqId=2)
        client.socket.sendall(_command("Auth", token="first-token", reqId=1) + large)
        assert [client.recv()["ok"], client.recv()["ok"]] == [True, True]
        client.ok("Obliterate", queue="large")


def test_five_wrong_tokens_are_all_that_one_connection_may_try(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        guesses = [f"guess-{n}" for n in range(5)] + ["first-token"]
        client.socket.sendall(b"".join(_command("Auth", token=token, reqId=token) for token in guesses))
        assert client.recv()["ok"] is False
        assert _is_closed(client)


def test_who_shows_no_token_in_time_is_sent_away(guarded: ServerProcess, server: ServerProcess) -> None:
    with (
        guarded.client(timeout=15) as silent,
        guarded.client(timeout=15) as talking,
        guarded.client(timeout=1) as deaf,
        guarded.client(timeout=15) as known,
        server.client() as welcome,  # where there are no tokens, nobody has to show one
    ):
        began = time.monotonic()
        known.ok("Auth", token="first-token")
        with contextlib.suppress(TimeoutError):
            while True:  # until the replies that it does not read are in the way
                deaf.socket.sendall(_command("Ping") * 1000)
        assert talking.error("Ping") == "Not authenticated"
        for stranger in (silent, talking):
            assert stranger.recv() == {"ok": False, "error": "Not authenticated within 10 seconds"}
            assert _is_closed(stranger)
        assert 9 < time.monotonic() - began < 14
        eventually(lambda: known.ok("Health")["connections"]["tcp"] == 1)
        assert known.ok("Ping")["data"]["pong"] is True
        assert welcome.ok("Ping")["data"]["pong"] is True


@pytest.mark.alone
def test_guessing_tokens_becomes_slower_and_ends_the_connection(tmp_path: Path) -> None:
    with _serving(tmp_path, "--auth-tokens", "right") as server, server.client() as client:
        waits: list[float] = []
        with contextlib.suppress(ConnectionError):
            for n in range(20):
                began = time.monotonic()
                assert client.error("Auth", token=f"guess-{n}") == "Invalid token"
                waits.append(time.monotonic() - began)
        assert 3 <= len(waits) <= 10
        assert waits[-1] > 4 * waits[0]
        with server.client() as honest:
            began = time.monotonic()
            assert honest.call("Auth", token="right") == OK
            assert time.monotonic() - began < waits[-1]


def test_tls_serves_the_same_protocol_and_plain_text_gets_nothing(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    assert openssl, "openssl makes the certificate of this test"
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    with _serving(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        context = ssl.create_default_context(cafile=str(cert))
        client = Client(server.port)
        client.socket = context.wrap_socket(client.socket, server_hostname="localhost")
        with client:
            job_id = push(client, "q", data="x" * MEGABYTE)
            assert client.ok("GetState", id=job_id)["state"] == "waiting"
            job = client.ok("PULL", queue="q")["job"]
            assert len(job["data"]) == MEGABYTE
        with server.client() as plain:
            plain.socket.sendall(_command("Ping"))
            with pytest.raises(ConnectionError):
                plain.recv_frame()
