"""Hearing what happens in a queue, through both faces and wherever it lives."""

from __future__ import annotations

import asyncio
import queue as queues
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from headrace.client import events as listening
from headrace.client.channel import decode_event
from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.client.queue import Queue
from headrace.connect import open_client
from headrace.errors import ClientClosed, HeadraceError, InvalidCommand
from tests.client.faces import bury, complete, pull
from tests.client.fakeserver import FakeServer, protocol_2
from tests.waiting import until


async def heard_until(ears: Any, last: str) -> list[Any]:
    heard = []
    while not heard or heard[-1].event_type != last:
        heard.append(await ears.next())
    return heard


async def test_the_life_of_a_job_is_heard_in_order(face: Any, q: Any) -> None:
    async with face.listen(q.name) as ears:
        job = await q.add("send", {"x": 1})
        await complete(q, {"sent": True})
        heard = await heard_until(ears, "completed")
    assert [event.event_type for event in heard if event.event_type in ("pushed", "pulled", "completed")] == [
        "pushed",
        "pulled",
        "completed",
    ]
    assert {event.job_id for event in heard} == {job.id}
    assert {event.queue for event in heard} == {q.name}
    assert heard[-1].is_final
    assert not heard[0].is_final
    assert heard[0].timestamp > 1_700_000_000_000


async def test_a_final_failure_is_told_from_one_that_is_tried_again(face: Any, q: Any) -> None:
    async with face.listen(q.name) as ears:
        await q.add("send")
        await bury(q, "broken")
        failed = (await heard_until(ears, "failed"))[-1]
    assert (failed.error, failed.terminal, failed.is_final) == ("broken", True, True)


async def test_progress_is_heard(face: Any, q: Any) -> None:
    job = await q.add("send")
    async with face.listen(q.name) as ears:
        await pull(q)
        await job.set_progress(30, "a third")
        told = (await heard_until(ears, "progress"))[-1]
    assert told.progress == 30


def test_an_event_is_told_without_a_result_that_python_cannot_hold() -> None:
    """It ended the connection of every listener."""
    for odd in (b"\x81\x80\x01", b"\xa1\xff", b"\xd7\xff" + b"\xff" * 8):
        told = {"eventType": "completed", "queue": "mail", "jobId": "7", "data": Raw(odd)}
        event = decode_event(msgspec.msgpack.encode(told))
        assert (event.event_type, event.job_id, event.data, event.is_final) == ("completed", "7", None, True)


async def test_other_queues_are_not_heard(face: Any, q: Any) -> None:
    other = face.queue(f"{q.name}.other")
    async with face.listen(q.name) as ears:
        await other.add("quiet")
        mine = await q.add("loud")
        assert (await ears.next()).job_id == mine.id


async def test_two_listeners_hear_the_same(face: Any, q: Any) -> None:
    async with face.listen(q.name) as one, face.listen(q.name) as two:
        job = await q.add("send")
        assert (await one.next()).job_id == (await two.next()).job_id == job.id


async def test_a_slow_listener_is_told_that_it_missed_something(
    face: Any, q: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "MAX_UNHEARD", 50)
    async with face.listen(q.name) as ears:
        added = await q.add_many([("n", number) for number in range(120)])
        await until(lambda: ears.events._heard and ears.events._heard[-1].job_id == added[-1].id)
        assert (await ears.next()).event_type == "gap"
        heard = [await ears.next()]
        while heard[-1].job_id != added[-1].id:
            heard.append(await ears.next())
    assert [event.job_id for event in heard] == [job.id for job in added[-len(heard) :]]
    assert len(heard) <= 50


async def test_listening_to_an_impossible_queue_is_refused(face: Any) -> None:
    with pytest.raises(InvalidCommand, match="Queue name contains invalid characters"):
        async with face.listen("no spaces"):
            pass


def test_a_thread_waits_no_longer_than_it_wants(shared_client: Any, queue: str) -> None:
    with QueueEvents(shared_client, queue) as events, pytest.raises(queues.Empty):
        events.get(timeout="50ms")


async def test_many_listeners_share_one_ear_and_each_event_goes_to_one_of_them(face: Any, q: Any) -> None:
    count = 500
    async with face.listen(q.name) as ears:
        together: list[Any] = []

        def in_a_thread() -> None:
            while len(together) < count:
                with suppress(queues.Empty):
                    together.append(ears.events.get(timeout=0.05))

        async def in_a_loop() -> None:
            async for event in ears.events:
                together.append(event)

        threads = [asyncio.create_task(asyncio.to_thread(in_a_thread)) for _ in range(2)]
        loops = [asyncio.create_task(in_a_loop()) for _ in range(2)]
        await q.add_many([("n", number) for number in range(count)])
        await asyncio.wait_for(asyncio.gather(*threads), 20)
    await asyncio.wait_for(asyncio.gather(*loops), 5)
    assert len({event.job_id for event in together}) == count == len(together)


async def test_a_listener_can_be_entered_again(shared_client: Any, queue: str) -> None:
    events = QueueEvents(shared_client, queue)
    for number in range(2):
        async with events:
            job = await Queue(shared_client, queue).add("n", number)
            assert (await asyncio.wait_for(anext(aiter(events)), 5)).job_id == job.id


async def test_whoever_waits_is_let_go_when_the_listening_ends(shared_client: Any, queue: str) -> None:
    events = QueueEvents(shared_client, queue)
    await events.__aenter__()

    async def all_of_them() -> list[Any]:
        return [event async for event in events]

    in_loop = asyncio.create_task(all_of_them())
    in_thread = asyncio.create_task(asyncio.to_thread(list, events))
    await asyncio.sleep(0)
    await events.__aexit__()
    assert await asyncio.wait_for(asyncio.gather(in_loop, in_thread), 5) == [[], []]
    with pytest.raises(ClientClosed):
        events.get(timeout=1)


async def test_a_listener_that_comes_back_before_the_storage_of_its_server_hears_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "_RETRY_AFTER", 0.01)
    subscribed = 0

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        nonlocal subscribed
        subscribed += command["cmd"] == "SubscribeEvents"
        if command["cmd"] == "SubscribeEvents" and subscribed == 2:
            away = {"ok": False, "code": "storage_unavailable", "error": "away"}
            return {**away, "reqId": command["reqId"]}
        return protocol_2(command)

    async with FakeServer(answer) as server:
        client = open_client(f"headrace://127.0.0.1:{server.port}")
        async with QueueEvents(client, "q") as events:
            for connection in server.connections:
                connection.transport.abort()
            assert (await asyncio.wait_for(anext(aiter(events)), 10)).event_type == "gap"
        await asyncio.wrap_future(client.close())
    assert subscribed == 3


async def test_a_listener_that_was_not_entered_says_so_instead_of_waiting_for_ever(shared_client: Client) -> None:
    events = QueueEvents(shared_client, "q")
    async with asyncio.timeout(5):
        with pytest.raises(HeadraceError, match="async with"):
            await anext(aiter(events))
        with pytest.raises(HeadraceError, match="async with"):
            await asyncio.to_thread(events.get)
