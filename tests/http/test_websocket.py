"""WebSocket with a real client: commands, order, events by choice, bounds, and what is released at the end."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from tests.http.test_security import UPGRADE
from tests.http.webserver import Http, WebServer


def bearer(token: str) -> Subprotocol:
    return Subprotocol("bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("="))


class Talk:
    """A connection that keeps replies and events apart."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []

    async def message(self) -> dict[str, Any]:
        return dict(json.loads(await asyncio.wait_for(self.socket.recv(), 10)))

    async def call(self, cmd: str, **fields: Any) -> dict[str, Any]:
        await self.socket.send(json.dumps({"cmd": cmd, **fields}))
        return await self.reply()

    async def reply(self) -> dict[str, Any]:
        while "ok" not in (found := await self.message()):
            self.events.append(found)
        return found

    async def take(self, count: int) -> list[dict[str, Any]]:
        while len(self.events) < count:
            self.events.append(await self.message())
        taken, self.events = self.events[:count], self.events[count:]
        return taken


@pytest.fixture
async def talk(web: WebServer, queue: str) -> AsyncIterator[Talk]:
    async with connect(f"ws://127.0.0.1:{web.http_port}/ws/queues/{queue}") as socket:
        yield Talk(socket)


async def test_commands_are_answered_as_on_tcp(talk: Talk, queue: str) -> None:
    pushed = await talk.call("PUSH", queue=queue, data={"at": 1794780368394}, reqId=7)
    assert (pushed["ok"], pushed["reqId"]) == (True, 7)
    pulled = await talk.call("PULL", queue=queue, owner="w", reqId="x")
    assert pulled["job"]["data"] == {"at": 1794780368394}
    settled = await talk.call("ACK", id=pushed["id"], token=pulled["token"], result=[1])
    assert settled == {"ok": True}
    assert (await talk.call("GetState", id=pushed["id"]))["state"] == "completed"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("{", "Invalid JSON"),
        ("", "Invalid JSON"),
        ("[1]", "Invalid command"),
        ("null", "Invalid command format"),
        ('{"cmd":5}', "Invalid command"),
        ('{"cmd":"Nope"}', "Unknown command: Nope"),
        ('{"cmd":"PUSH","queue":"a b","data":1}', "Queue name contains invalid characters"),
        ('{"cmd":"Subscribe"}', "events must be a non-empty array"),
        ('{"cmd":"Subscribe","events":[]}', "events must be a non-empty array"),
        ('{"cmd":"Subscribe","events":["job:pushed","x:y","job"]}', "Invalid: x:y, job"),
    ],
)
async def test_what_is_wrong_is_said_and_the_connection_stays(talk: Talk, message: str, error: str) -> None:
    await talk.socket.send(message)
    assert (await talk.reply())["error"] == error
    assert (await talk.call("Ping"))["ok"] is True


async def test_binary_messages_are_read_as_json(talk: Talk) -> None:
    await talk.socket.send(b'{"cmd":"Ping","reqId":[1]}')
    assert (await talk.reply())["reqId"] == [1]


async def test_a_message_may_come_in_fragments(talk: Talk) -> None:
    await talk.socket.send(['{"cmd":', '"Ping",', '"reqId":1}'])
    assert (await talk.reply())["reqId"] == 1


async def test_replies_with_a_request_id_need_not_wait_for_a_long_poll(talk: Talk, queue: str) -> None:
    await talk.socket.send(json.dumps({"cmd": "PULL", "queue": queue, "timeout": 9000, "reqId": "slow"}))
    assert (await talk.call("Ping", reqId="quick"))["reqId"] == "quick"
    assert (await talk.call("PUSH", queue=queue, data=1, reqId="push"))["reqId"] in ("push", "slow")
    assert (await talk.reply())["reqId"] in ("push", "slow")


async def test_before_any_subscribe_events_have_the_shape_of_the_protocol(talk: Talk, http: Http, queue: str) -> None:
    job = http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})["id"]
    http.ok("POST", f"/queues/{queue}.other/jobs", {"data": 1})
    http.ok("GET", f"/queues/{queue}/jobs")
    first, second = await talk.take(2)
    assert (first["eventType"], first["queue"], first["jobId"]) == ("pushed", queue, job)
    assert second["eventType"] == "pulled"


async def test_before_any_subscribe_the_end_of_a_flow_is_not_told_as_that_of_a_job(talk: Talk, queue: str) -> None:
    await talk.call("FlowStart", id=f"{queue}-flow", workflow="w", queue=queue, steps=[], jobs=[])
    ended = await talk.call("FlowAdvance", id=f"{queue}-flow", revision=1, status="completed")
    assert ended["ok"] is True
    assert [event["eventType"] for event in await talk.take(2)] == ["flow-started", "flow-completed"]


async def test_names_of_which_this_server_tells_nothing_may_be_chosen_among_others(talk: Talk, queue: str) -> None:
    names = ["dlq:added", "job:pushed", "queue:created", "worker:connected"]
    assert (await talk.call("Subscribe", events=names))["subscribed"] == names
    await talk.call("PUSH", queue=queue, data=1)
    (event,) = await talk.take(1)
    assert event["event"] == "job:pushed"


async def test_chosen_events_are_told_by_name(talk: Talk, http: Http, queue: str) -> None:
    reply = await talk.call("Subscribe", events=["job:active", "queue:*"], reqId=1)
    assert reply == {"ok": True, "subscribed": ["job:active", "queue:*"], "reqId": 1}
    job = http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})["id"]
    http.ok("GET", f"/queues/{queue}/jobs")
    http.ok("POST", f"/queues/{queue}/pause")
    names: dict[str, dict[str, Any]] = {}
    while not {"job:active", "queue:paused", "queue:counts"} <= set(names):
        event = await talk.message()
        names[event["event"]] = event
    assert "job:pushed" not in names
    assert names["job:active"]["data"] == {"queue": queue, "jobId": job, "attempt": 1}
    assert isinstance(names["job:active"]["ts"], int)
    counted = names["queue:counts"]["data"]
    assert {"queue", "waiting", "prioritized", "active", "completed", "failed", "delayed"} <= set(counted)


async def test_unsubscribing_ends_some_or_all(talk: Talk, http: Http, queue: str) -> None:
    await talk.call("Subscribe", events=["job:pushed", "job:active"])
    left = await talk.call("Unsubscribe", events=["job:pushed"], reqId="u")
    assert left == {"ok": True, "subscribed": ["job:active"], "reqId": "u"}
    http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})
    http.ok("GET", f"/queues/{queue}/jobs")
    assert (await talk.message())["event"] == "job:active"
    assert (await talk.call("Unsubscribe"))["subscribed"] == []
    http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})
    assert (await talk.call("Unsubscribe", events=[]))["subscribed"] == []
    await talk.call("Ping")
    assert talk.events == []


async def test_jobs_wait_again_when_the_connection_closes(web: WebServer, http: Http, queue: str) -> None:
    async with connect(f"ws://127.0.0.1:{web.http_port}/ws") as socket:
        talk = Talk(socket)
        job = (await talk.call("PUSH", queue=queue, data=1, reqId=1))["id"]
        await talk.call("PULL", queue=queue, reqId=2)
        assert http.ok("GET", f"/jobs/{job}/state")["state"] == "active"
    for _ in range(200):
        if http.ok("GET", f"/jobs/{job}/state")["state"] == "waiting":
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the job was not released")


async def test_a_message_beyond_1_mb_closes_the_connection(talk: Talk) -> None:
    await talk.socket.send(json.dumps({"cmd": "Ping", "pad": "x" * 900_000}))
    assert (await talk.reply())["ok"] is True
    with pytest.raises(ConnectionClosed):
        await talk.call("Ping", pad="x" * 1_100_000)
    assert talk.socket.close_code == 1009


async def test_broken_frames_close_the_connection(web: WebServer) -> None:
    async with connect(f"ws://127.0.0.1:{web.http_port}/ws") as socket:
        transport = socket.transport
        transport.write(b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 5)


async def test_a_slow_client_loses_events_and_is_told_how_many(web: WebServer, queue: str) -> None:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", web.http_port))
    async with connect(f"ws://127.0.0.1:{web.http_port}/ws/queues/{queue}", sock=raw, max_queue=1) as slow:
        talk = Talk(slow)
        await talk.call("Subscribe", events=["job:pushed"])
        slow.transport.pause_reading()
        with web.http(timeout=30) as http:
            for _ in range(80):
                jobs = [{"data": 0, "name": "n" * 250} for _ in range(500)]
                http.ok("POST", f"/queues/{queue}/jobs/bulk", {"jobs": jobs})
                await asyncio.sleep(0.02)
            slow.transport.resume_reading()
            told = dropped = 0
            while not dropped or told + dropped < 40_000:
                event = await talk.message()
                told += event["event"] == "job:pushed"
                dropped += event["data"].get("count", 0) if event["event"] == "dropped" else 0
            assert told + dropped == 40_000
            assert (await talk.call("Ping"))["ok"] is True


HELLO = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def masked(message: object) -> bytes:
    """A message as a client frames it."""
    text = json.dumps(message).encode()
    size = b"\xff" + len(text).to_bytes(8, "big")
    if len(text) < 65_536:
        size = bytes((0x80 | len(text),)) if len(text) < 126 else b"\xfe" + len(text).to_bytes(2, "big")
    return b"\x81" + size + bytes(4) + text


def test_a_client_that_asks_without_end_is_not_read_without_end(web: WebServer, http: Http, queue: str) -> None:
    before = http.ok("GET", "/health")["memory"]["rss"]
    with web.raw(timeout=3) as raw:
        polls = [{"cmd": "PULL", "queue": queue, "timeout": 60_000, "reqId": n} for n in range(60)]
        raw.send(HELLO + b"".join(map(masked, polls)))
        assert b"101 Switching Protocols" in raw.head()
        large = masked({"cmd": "Ping", "pad": "x" * 500_000}) * 200
        with pytest.raises(TimeoutError):
            raw.send(large)
        assert http.ok("GET", "/health")["memory"]["rss"] - before < 60


def test_what_was_not_read_for_a_while_is_answered_in_the_end(web: WebServer, http: Http, queue: str) -> None:
    with web.raw() as raw:
        raw.send(HELLO + masked({"cmd": "PULL", "queue": queue, "timeout": 60_000}))
        assert b"101 Switching Protocols" in raw.head()
        raw.send(b"".join(masked({"cmd": "GetState", "id": f"n{n}"}) for n in range(1000)))
        http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})
        assert b'"id":"n999"' in raw.until(b'"id":"n999"')


def test_a_fault_does_not_cost_the_replies_to_what_was_asked_before_it(web: WebServer, queue: str) -> None:
    with web.raw() as raw:
        raw.send(HELLO)
        assert b"101 Switching Protocols" in raw.head()
        raw.send(masked({"cmd": "PUSH", "queue": queue, "data": 1, "reqId": "last"}) + b"\xff\xff\xff\xff")
        assert b'"ok":true' in raw.until(b'"reqId":"last"}')
        raw.until(b"\x88")
        assert raw.is_ended()


def test_a_client_that_goes_on_sending_is_told_why_it_is_hung_up_on(web: WebServer) -> None:
    with web.raw() as raw:
        raw.send(HELLO)
        assert b"101 Switching Protocols" in raw.head()
        raw.send(masked("x" * 3_000_000))
        raw.until(b"\x88\x02" + (1009).to_bytes(2, "big"))
        assert raw.is_ended()


def test_who_names_no_requests_gets_every_reply_in_its_turn(web: WebServer, queue: str) -> None:
    with web.raw() as raw:
        raw.send(HELLO)
        assert b"101 Switching Protocols" in raw.head()
        subscribe = {"cmd": "Subscribe", "events": ["job:pushed"]}
        poll = {"cmd": "PULL", "queue": queue, "timeout": 300}
        raw.send(masked(poll) + masked(subscribe) + b"\x81\x81" + bytes(4) + b"{" + masked({"cmd": "Ping"}))
        replies = raw.until(b'"pong":true')
        marks = [b'"job":null', b'"subscribed":["job:pushed"]', b"Invalid JSON", b'"pong":true']
        assert sorted(marks, key=replies.index) == marks


@pytest.mark.parametrize("depth", range(900, 1000, 5))
async def test_deep_messages_are_answered_or_refused_and_the_connection_stays(talk: Talk, depth: int) -> None:
    await talk.socket.send('{"cmd":"PUSH","queue":"deep","data":' + "[" * depth + "]" * depth + "}")
    assert "ok" in await talk.reply()
    assert (await talk.call("Ping"))["ok"] is True


class TestHandshake:
    async def test_a_cap_is_kept(self) -> None:
        with WebServer(":memory:", "--max-ws-clients", "1") as web:
            async with connect(f"ws://127.0.0.1:{web.http_port}/ws"):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(f"ws://127.0.0.1:{web.http_port}/ws")
                assert refused.value.response.status_code == 503
                assert b"Too many WebSocket connections" in (refused.value.response.body or b"")

    async def test_a_failed_upgrade_is_400(self, http: Http) -> None:
        answer = http.get("/ws")
        assert (answer.status, answer.error) == (400, "WebSocket upgrade failed")
        headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        assert http.call("GET", "/ws", headers={**headers, "Sec-WebSocket-Key": "short"}).status == 400

    async def test_a_client_of_another_version_is_told_ours(self, http: Http) -> None:
        answer = http.call("GET", "/ws", headers={**UPGRADE, "Sec-WebSocket-Version": "8"})
        assert (answer.status, answer.error) == (426, "WebSocket version must be 13")
        assert (answer.headers["sec-websocket-version"], answer.headers["upgrade"]) == ("13", "websocket")

    async def test_tokens_open_it(self, guarded: WebServer) -> None:
        url = f"ws://127.0.0.1:{guarded.http_port}/ws"
        with pytest.raises(InvalidStatus) as refused:
            await connect(url)
        assert refused.value.response.status_code == 401
        async with connect(url, additional_headers={"Authorization": "Bearer sesame"}) as socket:
            assert (await Talk(socket).call("Stats"))["ok"] is True

    async def test_a_token_may_come_as_a_subprotocol(self, guarded: WebServer) -> None:
        url = f"ws://127.0.0.1:{guarded.http_port}/ws"
        for token in ("sesame", "open-up"):
            offers = [Subprotocol("headrace"), bearer(token)]
            async with connect(url, subprotocols=offers) as socket:
                assert socket.subprotocol == "headrace"
                assert (await Talk(socket).call("Stats"))["ok"] is True

    @pytest.mark.parametrize(
        "offer", ["bearer.d3Jvbmc", "bearer.c2VzYW1", "bearer.", "bearer.sesame", "bearer.!", "sesame"]
    )
    async def test_a_wrong_token_does_not_open_it_in_that_way_either(self, guarded: WebServer, offer: str) -> None:
        with guarded.http() as http:
            answer = http.call("GET", "/ws", headers={**UPGRADE, "Sec-WebSocket-Protocol": f"headrace, {offer}"})
            assert (answer.status, answer.error) == (401, "Unauthorized")

    @pytest.mark.alone
    async def test_guessing_by_subprotocol_is_slowed_down_too(self) -> None:
        with WebServer(":memory:", "--auth-tokens", "sesame") as web, web.http() as http:
            spent = []
            for number in range(5):
                began = time.monotonic()
                offers = {"Sec-WebSocket-Protocol": f"headrace, {bearer(f'guess{number}')}"}
                assert http.call("GET", "/ws", headers={**UPGRADE, **offers}).status == 401
                http.close()
                spent.append(time.monotonic() - began)
            assert spent[4] > 0.3
            assert spent[4] > 4 * spent[0]

    async def test_a_subprotocol_opens_nothing_but_a_websocket(self, guarded: WebServer) -> None:
        with guarded.http() as http:
            assert http.get("/stats", Sec_WebSocket_Protocol=str(bearer("sesame"))).status == 401

    async def test_a_token_in_the_query_string_is_not_looked_at(self, guarded: WebServer) -> None:
        with guarded.http() as http:
            assert http.call("GET", "/ws?token=sesame", headers=UPGRADE).status == 401

    async def test_frames_may_follow_the_upgrade_at_once(self, web: WebServer) -> None:
        with web.raw() as raw:
            raw.send(HELLO + masked({"cmd": "Ping"}))
            assert b"101 Switching Protocols" in raw.head()
            assert b'"pong":true' in raw.until(b'"ok":true}')

    async def test_however_many_follow_it_all_are_answered(self, web: WebServer) -> None:
        with web.raw() as raw:
            raw.send(HELLO + b"".join(masked({"cmd": "Ping", "pad": "x" * 1000, "reqId": n}) for n in range(300)))
            assert b"101 Switching Protocols" in raw.head()
            assert raw.until(b'"reqId":299}').count(b'"pong":true') == 300

    async def test_a_refusal_reaches_a_client_that_has_sent_much_behind_its_upgrade(self, web: WebServer) -> None:
        with web.raw() as raw:
            raw.send(HELLO.replace(b"-Version: 13", b"-Version: 12") + b"x" * 3_000_000)
            assert raw.answer().status == 426
            assert raw.is_ended()

    async def test_a_stop_says_goodbye(self) -> None:
        web = WebServer(":memory:").start()
        async with connect(f"ws://127.0.0.1:{web.http_port}/ws") as socket:
            await asyncio.get_running_loop().run_in_executor(None, web.stop)
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(socket.recv(), 5)
            assert socket.close_code == 1001

    async def test_a_stop_answers_what_was_asked_before_it_says_goodbye(self, tmp_path: Path) -> None:
        """A poll holds up what was asked after it. The stop ends the poll, so all of that is still to be done then."""
        web = WebServer(tmp_path / "stop.db").start()
        async with connect(f"ws://127.0.0.1:{web.http_port}/ws") as socket:
            talk = Talk(socket)
            await talk.call("Unsubscribe")
            await socket.send(json.dumps({"cmd": "PULL", "queue": "empty", "timeout": 60_000}))
            for _ in range(4):
                await socket.send(json.dumps({"cmd": "PUSHB", "queue": "q", "jobs": [{"data": 0}] * 10_000}))
            await asyncio.wait_for(await socket.ping(), 10)  # answered when all of it has come
            await asyncio.get_running_loop().run_in_executor(None, web.stop)
            assert (await talk.reply())["job"] is None
            assert [len((await talk.reply())["ids"]) for _ in range(4)] == [10_000] * 4
            with pytest.raises(ConnectionClosed):
                await talk.reply()
            assert socket.close_code == 1001
        with web, web.client() as client:
            assert client.ok("Count", queue="q")["count"] == 40_000

    async def test_a_stop_does_not_wait_for_who_only_listens_and_does_not_read(self) -> None:
        web = WebServer(":memory:").start()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", web.http_port))
        with deaf, web.client() as client:
            deaf.sendall(HELLO)
            assert deaf.recv(12) == b"HTTP/1.1 101"
            for _ in range(40):
                client.ok("PUSHB", queue="q", jobs=[{"data": 0, "name": "n" * 250}] * 500)
                await asyncio.sleep(0.02)
            began = time.monotonic()
            web.stop()
            assert time.monotonic() - began < 5

    async def test_pings_are_answered_and_silence_is_not_forgiven(self) -> None:
        with WebServer(":memory:", "--live-heartbeat-ms", "100") as web:
            async with connect(f"ws://127.0.0.1:{web.http_port}/ws") as alive:
                with web.raw() as silent:
                    silent.send(HELLO)
                    assert await asyncio.get_running_loop().run_in_executor(None, silent.is_closed)
                with web.raw() as silent:  # also when it wants no events any more
                    chosen = masked({"cmd": "Subscribe", "events": ["job:*"]}) + masked({"cmd": "Unsubscribe"})
                    silent.send(HELLO + chosen)
                    assert await asyncio.get_running_loop().run_in_executor(None, silent.is_closed)
                assert (await Talk(alive).call("Ping"))["ok"] is True
                await asyncio.wait_for(await alive.ping(), 5)
