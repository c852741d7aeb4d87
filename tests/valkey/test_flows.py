"""Workflows on Valkey between brokers: who waits hears of changes elsewhere, one of many decisions counts, and a flow
is found by the registry or without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.backends.valkey.backend import ValkeyBackend
from headrace.backends.valkey.keys import Keys
from headrace.client.client import Client
from headrace.commands import REGISTRY
from headrace.errors import Conflict
from headrace.model import FlowStatus
from tests.conformance.rig import Rig
from tests.valkeyserver import shared_server
from tests.waiting import until


@pytest.fixture
def url(prefix: str) -> str:
    return f"{shared_server().url}?prefix={prefix}"


@pytest.fixture
async def backends(url: str) -> AsyncIterator[list[ValkeyBackend]]:
    opened = [ValkeyBackend(url) for _ in range(3)]
    for backend in opened:
        await backend.open()
    yield opened
    for backend in opened:
        await backend.close()


async def ask(client: Client, name: str, **fields: Any) -> Any:
    return await client.ask(REGISTRY[name].type(**fields), 15)


async def waiting(client: Client, queue: str, url: str) -> None:
    """Return when others know that somebody waits for a flow of this queue."""
    plain, key = shared_server().client(), Keys(url.rpartition("=")[2]).meta(queue)
    await until(lambda: plain.hget(key, "hrWatched"))


async def test_who_waits_hears_of_changes_and_of_the_end_at_another_broker(clients: list[Client], url: str) -> None:
    here, there = clients
    await ask(there, "FlowStart", id="f", workflow="w", queue="wf")
    change = asyncio.create_task(ask(here, "FlowWait", id="f", timeout=10_000, revision=1))
    end = asyncio.create_task(ask(here, "FlowWait", id="f", timeout=10_000))
    await waiting(here, "wf", url)
    await ask(there, "FlowAdvance", id="f", revision=1)
    async with asyncio.timeout(5):
        assert (await change).flow.revision == 2
    assert not end.done()
    await ask(there, "FlowAdvance", id="f", revision=2, status=FlowStatus.COMPLETED)
    async with asyncio.timeout(5):
        assert (await end).flow.status is FlowStatus.COMPLETED


async def test_a_change_between_the_look_and_the_waiting_is_not_missed(clients: list[Client]) -> None:
    here, there = clients
    for n in range(20):
        await ask(there, "FlowStart", id=f"f{n}", workflow="w", queue=f"wf{n}")
        wait = asyncio.create_task(ask(here, "FlowWait", id=f"f{n}", timeout=10_000))
        await ask(there, "FlowAdvance", id=f"f{n}", revision=1, status=FlowStatus.FAILED)
        async with asyncio.timeout(5):
            assert (await wait).flow.status is FlowStatus.FAILED


async def test_of_decisions_on_one_revision_one_is_carried_out(backends: list[ValkeyBackend]) -> None:
    async def decide(backend: ValkeyBackend, revision: int) -> bool:
        try:
            await backend.advance_flow("f", revision, None, [], [], None)
        except Conflict:
            return False
        return True

    await backends[0].start_flow("f", "w", "wf", [], [])
    for revision in range(1, 21):
        outcomes = await asyncio.gather(*(decide(backend, revision) for backend in backends * 3))
        assert outcomes.count(True) == 1


@pytest.mark.parametrize("queues", [["wf"] * 3, ["wf", "other", "third"]])
async def test_of_those_who_begin_one_id_one_does(backends: list[ValkeyBackend], queues: list[str]) -> None:
    for n in range(20):
        begun = await asyncio.gather(
            *(
                backend.start_flow(f"f{n}", queue, queue, [], [])
                for backend, queue in zip(backends, queues, strict=True)
            )
        )
        assert [is_new for _, is_new in begun].count(True) == 1
        assert len({flow.queue for flow, _ in begun}) == 1


class TestRegistry:
    def entry(self, rig: Rig, flow: str = "f") -> str:
        return Keys(rig.backend.url.prefix).flow_registry(flow)

    def test_it_names_the_flow_its_workflow_and_its_queue(self, rig: Rig) -> None:
        rig.start_flow("f", "order", "wf", [], [])
        key = self.entry(rig)
        assert key.startswith(f"{rig.backend.url.prefix}:fr:")
        assert key.rpartition(":")[2].isalnum()
        assert json.loads(shared_server().client().get(key)) == {"flow": "f", "workflow": "order", "queue": "wf"}

    @pytest.mark.parametrize("other", [None, {"flow": "g", "workflow": "order", "queue": "elsewhere"}])
    def test_without_an_entry_or_with_that_of_another_id_the_flow_is_found_all_the_same(
        self, rig: Rig, other: Any
    ) -> None:
        for name in ("order", "trip"):
            rig.start_flow(name, name, f"workflow.{name}", [], [])
        plain = shared_server().client()
        for name in ("order", "trip"):
            if other is None:
                plain.delete(self.entry(rig, name))
            else:
                plain.set(self.entry(rig, name), json.dumps(other))
        rig.backend._flow_homes.clear()
        for name in ("order", "trip"):
            assert rig.wait(rig.backend.flow(name)).queue == f"workflow.{name}"
        assert rig.advance_flow("trip", 1, None, [], [], None).revision == 2
        assert rig.start_flow("trip", "trip", "workflow.trip", [], [])[1] is False

    def test_it_goes_with_its_flow(self, rig: Rig) -> None:
        rig.start_flow("f", "order", "wf", [], [])
        rig.advance_flow("f", 1, FlowStatus.COMPLETED, [], [], None)
        rig.clock.advance(8 * 86_400_000)
        rig.retire_flows()
        left = shared_server().client().keys(f"{rig.backend.url.prefix}:*")
        assert self.entry(rig) not in left
        assert [key for key in left if ":hr:flow:" in key or ":hr:flow-log:" in key or ":hr:flows" in key] == []
