"""Cancelling those who use the library, at any await: no job stays with a worker that is gone, no connection stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace import Headrace, JobContext, Worker
from headrace.frames import encode_frame
from tests.client.fakeserver import HELLO_2, FakeServer, protocol_2
from tests.waiting import until


async def _cancel_until_it_ends(task: asyncio.Task[Any]) -> None:
    """As cancel scopes do it: every await is cut short."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


async def test_a_worker_that_is_cancelled_while_it_ends_keeps_no_job_and_takes_no_more(
    app: Headrace, queue: str
) -> None:
    begun = asyncio.Event()
    ends: list[str] = []

    async def handle(job: JobContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append(job.name)
            raise

    worker = Worker(app.client, queue, handle, concurrency=1)
    running = asyncio.create_task(worker.run(handle_signals=False))
    first, second = [await app.queue().add(name) for name in ("first", "second")]
    await asyncio.wait_for(begun.wait(), 10)
    await _cancel_until_it_ends(running)

    async def is_gone() -> bool:
        jobs = [await first.info(), await second.info()]
        return not await app.queue().workers() and [job.state for job in jobs] == ["waiting"] * 2

    await until(is_gone)
    assert ends == ["first"]
    assert (await first.info()).attempts == 0


@pytest.mark.parametrize("is_answered_late", [True, False])
async def test_a_worker_that_is_cancelled_while_it_begins_asks_for_nothing(is_answered_late: bool) -> None:
    """Its server has heard from the app, and lets the connection of the worker wait for an answer."""
    greetings: list[dict[str, Any]] = []

    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        if command["cmd"] == "Hello":
            greetings.append(command)
        return None if len(greetings) == 2 else protocol_2(command)

    async def handle(job: JobContext) -> None: ...

    async with FakeServer(answer) as server, Headrace(f"headrace://127.0.0.1:{server.port}?pool_size=1") as app:
        running = asyncio.create_task(Worker(app.client, "q", handle).run(handle_signals=False))
        await until(lambda: len(greetings) == 2)
        link = server.connections[1]
        running.cancel()
        if is_answered_late:
            link.write(encode_frame({**HELLO_2, "reqId": greetings[1]["reqId"]}))
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: link.is_closing())
    assert "PULLB" not in {command["cmd"] for command in server.asked}


async def test_a_listener_that_is_cancelled_while_it_begins_leaves_no_connection_behind() -> None:
    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        return None if command["cmd"] == "SubscribeEvents" else protocol_2(command)

    async with FakeServer(answer) as server, Headrace(f"headrace://127.0.0.1:{server.port}?pool_size=1") as app:
        listening = asyncio.create_task(app.events("q").__aenter__())
        await until(lambda: server.asked[-1]["cmd"] == "SubscribeEvents")
        listening.cancel()
        wish = server.asked[-1]
        server.connections[1].write(encode_frame({"ok": True, "reqId": wish["reqId"]}))
        with pytest.raises(asyncio.CancelledError):
            await listening
        await until(lambda: server.connections[1].is_closing(), 5)
