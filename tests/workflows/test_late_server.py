"""Events and workflows that are started before their server, as in a deployment of everything at once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from headrace.errors import NotAuthenticated, ProviderStoppedError, StorageUnavailable
from headrace.events import EventContext, Events, event
from headrace.propagation import Retry
from headrace.workflows import StepContext, Workflows, step, workflow
from tests.serverprocess import ServerProcess
from tests.waiting import until

doubled = event("doubled", int, int)
doubling = workflow("doubling", data=int, result=dict).step(step("double", int)).build()

Hosted = Events | Workflows


@pytest.fixture(params=[Events, Workflows])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def url_of(server: ServerProcess, token: str = "") -> str:
    return f"headrace://127.0.0.1:{server.port}{token and '?token=' + token}"


def has_told(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    return lambda: "trying again" in caplog.text


async def test_handlers_that_are_started_before_the_server_work_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = ServerProcess(tmp_path / "late.db")
    events, flows = Events(url_of(server)), Workflows(url_of(server))

    @events.on(doubled, retry=Retry(1))
    async def double(ctx: EventContext[int]) -> int:
        return ctx.data * 2

    async def double_step(ctx: StepContext[int]) -> int:
        return ctx.data * 2

    flows.register_definition_consumer(doubling, {"double": double_step})
    starting = [asyncio.ensure_future(one.start()) for one in (events, flows, flows)]
    await until(has_told(caplog))
    assert not any(one.done() for one in starting)
    with server:
        await asyncio.wait_for(asyncio.gather(*starting), 30)
        assert await events.emit(doubled, 4) == 8
        assert await (await flows.execute(doubling, 4)).result() == {"double": 8}
        await events.stop()
        await flows.stop()


async def test_a_start_that_waits_ends_when_it_is_stopped_or_cancelled(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hosted: Hosted = kind("headrace://127.0.0.1:1")
    before = asyncio.all_tasks()
    starting = asyncio.ensure_future(hosted.start())
    await until(has_told(caplog))
    await asyncio.wait_for(hosted.stop(), 10)
    with pytest.raises(ProviderStoppedError, match="stopped while they were started"):
        await starting
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hosted.start(), 0.1)
    await until(lambda: asyncio.all_tasks() == before)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), hosted:
            pass
    await hosted.stop()
    assert asyncio.all_tasks() == before


async def test_a_start_that_was_given_up_can_be_tried_again_at_once(kind: Any) -> None:
    """Nobody has stopped it, so it must not say so."""
    hosted: Hosted = kind("headrace://127.0.0.1:1")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hosted.start(), 0.1)
    await hosted.stop()


def test_a_start_that_failed_can_be_tried_again_on_another_loop(kind: Any, tmp_path: Path) -> None:
    hosted: Hosted = kind(f"sqlite:///{tmp_path}/nowhere/jobs.db")
    for _ in range(2):
        with pytest.raises(StorageUnavailable, match="there is no folder"):
            asyncio.run(hosted.start())


async def test_waiting_for_the_server_mends_neither_a_wrong_token_nor_a_wrong_path(kind: Any, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "closed.db", "--auth-tokens", "right") as server:
        for wrong in (url_of(server), url_of(server, "wrong")):
            with pytest.raises(NotAuthenticated):
                await asyncio.wait_for(kind(wrong).start(), 10)
    with pytest.raises(StorageUnavailable, match="there is no folder"):
        await asyncio.wait_for(kind(f"sqlite:///{tmp_path}/nowhere/jobs.db").start(), 10)


async def test_who_waits_for_a_port_that_speaks_something_else_is_told_what_to_do(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1") as web:
        hosted: Hosted = kind(f"headrace://127.0.0.1:{web.sockets[0].getsockname()[1]}")
        starting = asyncio.ensure_future(hosted.start())
        await until(has_told(caplog))
        assert "a URL names the TCP port" in caplog.text
        await hosted.stop()
        with pytest.raises(ProviderStoppedError):
            await starting


def test_the_blocking_form_waits_as_well(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    server = ServerProcess(tmp_path / f"{uuid4()}.db")
    entered = threading.Event()

    def enter() -> None:
        with kind(url_of(server)).sync():
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert not entered.wait(0.5)
    with server:
        assert entered.wait(30)
        thread.join(30)
    assert "trying again" in caplog.text
