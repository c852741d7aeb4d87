"""Plain jobs that are added without a broker go to Valkey straight from the loop of who adds them."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.client.channel import EventView
from headrace.client.client import Client
from headrace.client.queue import Queue
from headrace.commands.connection import SubscribeEvents
from headrace.connect import open_client
from headrace.errors import InvalidCommand, StorageUnavailable
from headrace.nearby import Door, Nearby
from headrace.worker.context import JobContext
from headrace.worker.worker import Worker
from tests.valkeyserver import ValkeyServer
from tests.waiting import until


@pytest.fixture
def valkey(tmp_path: Path) -> Any:
    with ValkeyServer(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
async def client(valkey: ValkeyServer) -> AsyncIterator[Client]:
    client = open_client(valkey.url)
    yield client
    await asyncio.wrap_future(client.close())


def door_of(client: Client) -> Door:
    assert isinstance(client._near, Nearby)
    return client._near._doors[asyncio.get_running_loop()]


async def opened(client: Client) -> Queue:
    """A queue that takes jobs by the door from now on; two are in it."""
    queue = Queue(client, "q")
    for n in range(2):
        await queue.add("job", n)
    await until(lambda: door_of(client).is_open)
    return queue


def connections(valkey: ValkeyServer) -> int:
    return sum(1 for one in valkey.client().client_list() if one["name"] == "headrace")


async def test_a_job_that_is_added_by_the_door_is_like_any_other(client: Client) -> None:
    queue = await opened(client)
    before = door_of(client).ids._sequence, door_of(client).ids._millisecond
    job = await queue.add("mail", {"to": "ann"})
    assert (door_of(client).ids._sequence, door_of(client).ids._millisecond) != before
    info = await queue.get_job(job.id)
    assert info is not None
    assert (info.name, info.data, info.state) == ("mail", {"to": "ann"}, "waiting")
    assert client._near._backend.totals().pushed == 3  # type: ignore[union-attr]


async def test_what_is_not_plain_takes_the_usual_way(client: Client) -> None:
    queue = await opened(client)
    door_of(client).ids = None  # type: ignore[assignment]
    later = await queue.add("job", 1, delay=60)
    first = await queue.add("job", 2, priority=5)
    same = [await queue.add("job", 3, job_id="mine") for _ in range(2)]
    assert (await later.state(), await first.state()) == ("delayed", "waiting")
    assert same[0].id == same[1].id


async def test_what_is_wrong_is_refused_in_the_usual_words(client: Client) -> None:
    queue = await opened(client)
    with pytest.raises(InvalidCommand, match="too large"):
        await queue.add("job", "x" * 1_100_000)
    with pytest.raises(InvalidCommand, match="name"):
        await queue.add("n" * 10_000, 1)


async def test_jobs_of_one_loop_keep_their_order_from_the_first_on(client: Client) -> None:
    """The first ones go by the line, those after them by the door."""
    queue, ran = Queue(client, "q"), list[str]()
    adding = [asyncio.create_task(queue.add("job", 0))]
    await adding[0]
    for n in range(1, 600):
        adding.append(asyncio.create_task(queue.add("job", n)))
        if n % 7 == 0:
            await asyncio.sleep(0)
    await asyncio.wait(adding)
    assert door_of(client).is_open

    async def handle(job: JobContext) -> None:
        ran.append(job.id)

    async with Worker(client, "q", handle, concurrency=1):
        await until(lambda: len(ran) == 600)
    assert ran == [added.result().id for added in adding]


async def handled(client: Client, count: int) -> list[Any]:
    """The data of so many jobs in the order in which a worker gets them."""
    ran: list[Any] = []

    async def handle(job: JobContext) -> None:
        ran.append(job.data)

    async with Worker(client, "q", handle, concurrency=1):
        await until(lambda: len(ran) == count)
    return ran


async def test_jobs_that_take_the_line_do_not_overtake_those_at_the_door(client: Client) -> None:
    queue = await opened(client)
    adding: list[asyncio.Task[Any]] = []
    for n in range(2, 502, 5):
        adding.append(asyncio.create_task(queue.add("job", n)))
        adding.append(asyncio.create_task(queue.add("job", n + 1)))
        adding.append(asyncio.create_task(queue.add_many([("job", n + 2), ("job", n + 3)])))
        adding.append(asyncio.create_task(queue.add("job", n + 4)))
        await adding[-1] if n % 3 == 0 else await asyncio.sleep(0)
    await asyncio.gather(*adding)
    assert await handled(client, 502) == list(range(502))


async def test_a_worker_that_waits_in_the_same_process_is_woken(client: Client) -> None:
    queue, ran = await opened(client), asyncio.Queue[int]()

    async def handle(job: JobContext) -> None:
        ran.put_nowait(job.data)

    async with Worker(client, "q", handle), asyncio.timeout(10):
        assert {await ran.get() for _ in range(2)} == {0, 1}
        for n in range(5):
            await asyncio.sleep(0.05)  # so that it waits again
            await queue.add("job", n)
            assert await ran.get() == n


async def test_who_listens_in_the_same_process_hears_of_each_job_once(client: Client) -> None:
    queue, heard = await opened(client), list[EventView]()
    channel = await asyncio.wrap_future(client.connect())

    async def listen() -> Any:
        own = channel.open_own(hear=heard.append)
        done = asyncio.get_running_loop().create_future()
        own.submit(SubscribeEvents(queue="q"), done.set_result, 5)
        await done
        return own

    own = await asyncio.wrap_future(client.line.run(listen))
    added = [(await queue.add("job", n)).id for n in range(5)]
    await until(lambda: len(heard) >= 5)
    await asyncio.wrap_future(client.line.run(own.close))
    assert [event.job_id for event in heard if event.event_type == "pushed"] == added


async def test_functions_that_somebody_flushed_are_brought_back(client: Client, valkey: ValkeyServer) -> None:
    queue = await opened(client)
    valkey.client().function_flush()
    await queue.add("job", 3)
    assert (await queue.counts())["waiting"] == 3


async def test_a_server_that_is_away_is_an_error_and_one_that_is_back_is_found(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always").start()
    client = open_client(f"{server.url}?timeout=1")
    try:
        queue = await opened(client)
        server.kill()
        with pytest.raises(StorageUnavailable):
            await queue.add("job", 3)
        server.start()
        async with asyncio.timeout(10):
            while True:
                try:
                    await queue.add("job", 4)
                    break
                except StorageUnavailable:
                    await asyncio.sleep(0.05)
        assert (await queue.counts())["waiting"] == 3
    finally:
        await asyncio.wrap_future(client.close())
        server.stop()


def test_the_door_is_closed_with_its_loop_and_with_its_client(valkey: ValkeyServer) -> None:
    client = open_client(valkey.url)

    async def use() -> int:
        await opened(client)
        return connections(valkey)

    async def use_and_close() -> None:
        await opened(client)
        await asyncio.wrap_future(client.close())
        await until(lambda: connections(valkey) == 0)

    during = asyncio.run(use())
    assert connections(valkey) == during - 1
    asyncio.run(use_and_close())


async def test_a_client_that_is_closed_while_its_door_opens_leaves_nothing_behind(
    client: Client, valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue(client, "q")
    await queue.add("job", 1)
    adding = asyncio.create_task(queue.add("job", 2))
    await asyncio.sleep(0)  # it has found the door shut, and begun to open it
    door = door_of(client)
    assert door._opening is not None
    await asyncio.sleep(0)
    assert not door.is_open
    door.close()
    await adding
    await asyncio.wrap_future(client.close())
    await until(lambda: connections(valkey) == 0)
    assert not door.is_open
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_forked_child_opens_what_it_needs_anew(client: Client, valkey: ValkeyServer) -> None:
    queue = await opened(client)
    parents = client._near._backend  # type: ignore[union-attr]

    async def add() -> bool:
        await opened(client)
        return client._near._backend not in (None, parents)  # type: ignore[union-attr]

    def run() -> None:
        raise SystemExit(0 if asyncio.run(add()) else 1)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    await asyncio.to_thread(child.join, 20)
    assert child.exitcode == 0
    assert (await queue.counts())["waiting"] == 4
