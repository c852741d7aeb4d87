"""A user with no more rights than docs/valkey.md names can do everything."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import valkey
from headrace.client.events import QueueEvents
from headrace.client.queue import Queue
from headrace.connect import open_client
from headrace.errors import StorageUnavailable
from headrace.events import EventContext, Events, event
from headrace.workflows import Workflows
from headrace.workflows.testing import Saga, define
from tests.examples.pages import ROOT
from tests.valkeyserver import ValkeyServer

PAGE = (ROOT / "docs/valkey.md").read_text()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    section = PAGE.partition("## Access rights")[2].partition("<!--")[0]
    rights = re.findall(r"\+\S+?(?=[\s`])", section)
    assert "+fcall" in rights
    with ValkeyServer(tmp_path, "--appendonly", "yes") as server:
        client = server.client()
        client.execute_command("ACL", "SETUSER", "clerk", "on", ">word", "~shop:*", "&shop:hr:*", *rights)
        yield server.url.replace("://", "://clerk:word@") + "?prefix=shop"


async def test_jobs_events_and_workflows_work_with_the_rights_that_are_named(url: str) -> None:
    ask = event("ask", object, object)
    events, flows = Events(url), Workflows(url)
    saga = Saga(define("a", ["b", "c"]))
    saga.join(flows)

    @events.on(ask)
    async def handle(ctx: EventContext[Any]) -> Any:
        return ctx.data

    async with events, flows:
        assert await events.emit(ask, 1) == 1
        await events.schedule_event(ask, "often", every=60, payload=1)
        assert set(await (await flows.execute(saga.definition, None)).result(20)) == {"a", "b", "c"}
    client = open_client(url)
    try:
        job = await Queue(client, "q").add("durable", 1, durable=True)
        assert await job.state() == "waiting"
        async with QueueEvents(client, "*") as listening:
            job = await Queue(client, "q").add("heard")
            assert (await anext(aiter(listening))).job_id == job.id
    finally:
        await asyncio.wrap_future(client.close())


@pytest.mark.parametrize(
    ("taken", "text"),
    [(("-zadd", "-xgroup"), "may not use XGROUP, ZADD on shop:*"), (("resetkeys", "~shop:hr:q*"), "HSET")],
)
async def test_who_lacks_a_right_that_functions_need_is_told_at_the_start(
    url: str, taken: tuple[str, ...], text: str
) -> None:
    port = int(re.search(r":(\d+)/", url)[1])
    valkey.Valkey(port=port).execute_command("ACL", "SETUSER", "clerk", *taken)
    client = open_client(url)
    try:
        with pytest.raises(StorageUnavailable, match=re.escape(text)):
            await Queue(client, "q").add("j")
    finally:
        await asyncio.wrap_future(client.close())
