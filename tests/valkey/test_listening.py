"""Listening to a queue on Valkey: what others do to it is heard, too, each thing once, whoever did it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from websockets.sync.client import connect

from headrace.client.channel import EventView
from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.commands import REGISTRY
from tests.conformance.rig import pack, unpack
from tests.http.test_websocket import HELLO, masked
from tests.http.webserver import SseClient, WebServer
from tests.valkeyserver import shared_server
from tests.wireclient import Client as WireClient


async def ask(client: Client, name: str, **fields: Any) -> Any:
    return await client.ask(REGISTRY[name].type(**fields))


async def push(client: Client, data: Any = None, queue: str = "q", **options: Any) -> str:
    return str((await ask(client, "PUSH", queue=queue, data=pack(data), **options)).id)


async def take(client: Client, queue: str = "q") -> tuple[str, str]:
    reply = await ask(client, "PULL", queue=queue, owner="w", timeout=5000)
    return unpack(reply.job)["id"], reply.token


async def hear(events: QueueEvents, until: str, job_id: str = "") -> list[EventView]:
    """What comes, up to this event."""
    heard: list[EventView] = []
    async with asyncio.timeout(10):
        async for event in events:
            heard.append(event)
            if event.event_type == until and job_id in ("", event.job_id):
                break
    return heard


async def test_what_another_process_does_is_heard(clients: list[Client]) -> None:
    here, there = clients
    async with QueueEvents(here, "q") as events:
        job_id = await push(there, 1, max_attempts=2, backoff=0)
        _, token = await take(there)
        await ask(there, "Progress", id=job_id, progress=50)
        await ask(there, "FAIL", id=job_id, token=token, error="once")
        _, token = await take(there)
        await ask(there, "FAIL", id=job_id, token=token, error="twice")
        gone = await push(there)
        await ask(there, "Cancel", id=gone)
        heard = await hear(events, "removed")
    assert [(event.event_type, event.job_id) for event in heard] == [
        *((word, job_id) for word in ("pushed", "progress", "failed", "failed")),
        *((word, gone) for word in ("pushed", "removed")),
    ]
    assert heard[1].progress == 50
    assert [(event.error, event.terminal) for event in heard[2:4]] == [("once", False), ("twice", True)]


@pytest.mark.parametrize("result", [{"n": [1, None, "ü", 2.0]}, b"\x00\xff", None, "", {1: 2}])
async def test_a_result_arrives_as_it_was_given(clients: list[Client], result: Any) -> None:
    here, there = clients
    async with QueueEvents(here, "q") as events:
        await push(there)
        job_id, token = await take(there)
        await ask(there, "ACK", id=job_id, token=token, result=pack(result))
        *_, completed = await hear(events, "completed")
    assert (completed.job_id, completed.data) == (job_id, result)


async def test_everything_is_told_once_whoever_did_it(clients: list[Client]) -> None:
    async def work(client: Client, count: int) -> None:
        for n in range(count):
            await push(client, n)
            job_id, token = await take(client)
            for progress in (10, 20, 30):
                await ask(client, "Progress", id=job_id, progress=progress)
            await ask(client, "ACK", id=job_id, token=token, result=pack(n))

    here, there = clients
    async with QueueEvents(here, "q") as events:
        await asyncio.gather(work(here, 40), work(there, 40))
        last = await push(there, "last")
        heard = await hear(events, "pushed", last)
    told = Counter(event.event_type for event in heard if event.job_id != last)
    assert (told["pushed"], told["progress"], told["completed"]) == (80, 240, 80)
    assert len({event.job_id for event in heard if event.event_type == "completed"}) == 80


async def test_a_lost_connection_loses_no_event(clients: list[Client]) -> None:
    here, there = clients
    async with QueueEvents(here, "q") as events:
        first = await push(there)
        await hear(events, "pushed", first)
        shared_server().client().client_kill_filter(_type="normal", skipme=True)
        await eventually_push(there)
        last = await eventually_push(there)
        heard = await hear(events, "pushed", last)
    assert [event.event_type for event in heard] == ["pushed", "pushed"]


async def eventually_push(client: Client) -> str:
    async with asyncio.timeout(5):
        while True:
            try:
                return await push(client)
            except Exception:
                await asyncio.sleep(0.01)  # its connection was cut, too


async def test_who_may_have_missed_something_is_told_of_a_gap(clients: list[Client], prefix: str) -> None:
    here, there = clients
    plain, stream = shared_server().client(), f"{prefix}:{{q}}:events"
    async with QueueEvents(here, "q") as events:
        await hear(events, "pushed", await push(there))
        plain.client_kill_filter(_type="normal", skipme=True)
        for _ in range(3):
            plain.xadd(stream, {"event": "added", "jobId": "7", "name": ""})
        plain.xtrim(stream, maxlen=1, approximate=False)
        heard = await hear(events, "pushed")
    assert [(event.event_type, event.job_id) for event in heard] == [("gap", ""), ("pushed", "q:7")]


async def test_an_entry_that_cannot_be_read_harms_nobody(clients: list[Client], prefix: str) -> None:
    here, there = clients
    stream = f"{prefix}:{{q}}:events"
    async with QueueEvents(here, "q") as events:
        plain = shared_server().client()
        plain.xadd(stream, {"event": "completed", "jobId": "1", "returnvalue": "{", "raw": "no base64!"})
        plain.xadd(stream, {"event": "failed", "jobId": b"\xff\xfe", "failedReason": "x"})
        plain.xadd(stream, {"what": "else"})
        last = await push(there)
        heard = await hear(events, "pushed", last)
    assert [event.event_type for event in heard] == ["pushed"]


async def test_who_listens_to_all_queues_hears_what_other_processes_do_to_any(clients: list[Client]) -> None:
    here, there = clients
    await push(there, queue="known")
    async with QueueEvents(here, "*") as events:
        pushed = [("known", await push(there, queue="known")), ("new", await push(there, queue="new"))]
        pushed.append(("own", await push(here, queue="own")))
        heard = await hear_all(events, len(pushed))
        assert {(event.queue, event.job_id) for event in heard} == set(pushed)
        assert {event.event_type for event in heard} == {"pushed"}


async def hear_all(events: QueueEvents, count: int) -> list[EventView]:
    heard: list[EventView] = []
    async with asyncio.timeout(10):
        async for event in events:
            heard.append(event)
            if len(heard) == count:
                break
    return heard


async def test_who_listens_to_all_queues_is_told_once_whoever_did_it(clients: list[Client]) -> None:
    queues = [f"q{n}" for n in range(20)]

    async def work(client: Client, queue: str) -> None:
        for n in range(5):
            await push(client, n, queue)
            job_id, token = await take(client, queue)
            await ask(client, "ACK", id=job_id, token=token, result=pack(n))

    here, there = clients
    async with QueueEvents(here, "*") as events, QueueEvents(here, "q3") as one:
        await asyncio.gather(*(work(client, queue) for client in clients for queue in queues))
        await push(there, "last", "q3")
        last = await push(there, "last", "zzz")
        heard = await hear(events, "pushed", last)
        of_one = await hear(one, "pushed")
        while sum(event.event_type == "pushed" for event in of_one) < 11:
            of_one += await hear(one, "pushed")
    told = Counter((event.queue, event.event_type) for event in heard if event.event_type in ("pushed", "completed"))
    assert told == {(queue, word): 10 for queue in queues for word in ("pushed", "completed")} | {
        ("q3", "pushed"): 11,
        ("zzz", "pushed"): 1,
    }
    assert Counter(event.event_type for event in of_one)["completed"] == 10


def test_a_stream_of_one_broker_tells_what_happens_at_another(prefix: str) -> None:
    backend = ("--backend", f"{shared_server().url}?prefix={prefix}")
    with (
        WebServer(":memory:", *backend) as here,
        WebServer(":memory:", *backend) as there,
        SseClient(here.http_port, "/events?events=job:*") as stream,
        here.client() as own,
        there.client() as other,
    ):
        seen = {stream.take(1)[0].data["jobId"]: None for client in (own, other) for _ in [push_plain(client)]}
        job_id = push_plain(other)
        pulled = own.ok("PULL", queue="q", owner="w")
        assert pulled["job"]["id"] in seen
        own.ok("ACK", id=pulled["job"]["id"], token=pulled["token"])
        events = stream.take(3)
        assert [(event.name, event.data["queue"]) for event in events if event.id == ""] == [("job:pushed", "q")]
        assert {(event.name, event.data["jobId"]) for event in events} == {
            ("job:pushed", job_id),
            ("job:active", pulled["job"]["id"]),
            ("job:completed", pulled["job"]["id"]),
        }
        last = push_plain(other)
        assert [event.data["jobId"] for event in stream.take(1)] == [last], "each is told once"


def test_a_websocket_of_one_broker_tells_what_happens_at_another(prefix: str) -> None:
    backend = ("--backend", f"{shared_server().url}?prefix={prefix}")
    with (
        WebServer(":memory:", *backend) as here,
        WebServer(":memory:", *backend) as there,
        connect(f"ws://127.0.0.1:{here.http_port}/ws") as socket,
        here.client() as own,
        there.client() as other,
    ):
        for client in (own, other):
            job_id = push_plain(client)
            event = json.loads(socket.recv(timeout=10))
            assert (event["eventType"], event["queue"], event["jobId"]) == ("pushed", "q", job_id)


def push_plain(client: WireClient) -> str:
    return str(client.ok("PUSH", queue="q", data=1)["id"])


def test_counts_are_told_while_others_are_counted(prefix: str) -> None:
    """Every choice of a listener tells what has changed before: here five of them while ten queues are counted."""
    choice = masked({"cmd": "Subscribe", "events": ["queue:counts"]})
    with WebServer(":memory:", "--backend", f"{shared_server().url}?prefix={prefix}") as web:
        with web.raw() as listening, web.client() as client:
            listening.send(HELLO + choice)
            listening.until(b'"ok":true')
            for n in range(10):
                client.send("PUSH", queue=f"q{n}", data=0, reqId=n)
            assert all(client.recv()["ok"] for _ in range(10))
            listening.send(choice * 5)
            told = listening.until(b'"queue":"q9"')
        assert all(b'"queue":"q%d"' % n in told for n in range(10))
