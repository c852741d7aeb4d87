"""The core of the conformance suite on a cluster of three primaries, and what is different there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Ack, FlowPush
from headrace.backends.valkey.cluster import Cluster
from headrace.backends.valkey.library import function_of
from headrace.backends.valkey.url import parse_url
from headrace.client.events import QueueEvents
from headrace.client.queue import Queue
from headrace.connect import open_client
from headrace.errors import Conflict, NotFound, NotSupported, StorageUnavailable
from headrace.events import Events, event
from headrace.model import FlowStatus
from tests.conformance import test_claim, test_finish, test_insert, test_leases, test_records, test_retry
from tests.conformance.rig import CLUSTER, Rig, spec
from tests.valkey.core import core_of
from tests.valkeyserver import shared_cluster

LEFT_OUT = (
    "test_a_living_job_answers_for_its_id",  # this one and the next have families across queues
    "test_children_of_one_run_are_not_those_of_the_next",
)

globals().update(core_of((test_claim, test_finish, test_insert, test_leases, test_records, test_retry), LEFT_OUT))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(CLUSTER, tmp_path)
    yield rig
    rig.close()


@pytest.fixture
async def members() -> AsyncIterator[Cluster]:
    cluster = Cluster(parse_url(shared_cluster().url))
    await cluster.open()
    yield cluster
    await cluster.close()


def test_queues_of_every_slot_range_work_side_by_side(rig: Rig) -> None:
    queues = [f"queue{n}" for n in range(30)]
    ids = {queue: rig.push(queue, queue) for queue in queues}
    held = [node.client().dbsize() for node in shared_cluster().nodes]
    assert all(held), "a primary has nothing"
    for queue in queues:
        assert rig.run(queue).id == ids[queue]
        assert rig.state(ids[queue]) == "completed"
    assert [summary.name for summary in rig.queues()] == sorted(queues)


def test_the_libraries_are_on_every_primary(rig: Rig) -> None:
    for node in shared_cluster().nodes:
        names = str(node.client().function_list())
        assert "glidemq" in names
        assert "headrace" in names


def test_families_within_a_queue_work_and_across_queues_are_refused_by_name(rig: Rig) -> None:
    child = rig.push("a")
    parent = rig.push("a", depends_on=[child])
    rig.run("a")
    assert rig.state(parent) == "waiting"
    with pytest.raises(NotSupported, match="families across queues in a cluster"):
        rig.push("b", depends_on=[parent])


def test_acknowledgements_of_several_queues_in_one_batch(rig: Rig) -> None:
    held = []
    for queue in ("a", "b", "c"):
        rig.push(queue)
        held.append(rig.take(queue))
    assert rig.complete([Ack(one.id, one.token) for one in held]) == []


def test_workflows_within_a_queue_work_and_across_queues_are_refused_by_name(rig: Rig) -> None:
    rig.start_flow("f", "order", "wf", [], [FlowPush("wf", spec(flow_id="f", max_attempts=1))])
    rig.bury("wf")
    news = rig.take("wf")
    assert news.job["name"] == "decide"
    assert rig.advance_flow("f", 1, FlowStatus.FAILED, [], [], Ack(news.id, news.token)).status is FlowStatus.FAILED
    with pytest.raises(NotSupported, match="workflows across queues in a cluster"):
        rig.start_flow("g", "order", "wf", [], [FlowPush("wf.steps", spec(flow_id="g"))])
    assert rig.wait(rig.backend.flow("g")) is None
    rig.push("other", flow_id="f", max_attempts=1)
    assert rig.state(rig.bury("other").id) == "failed"


async def test_who_listens_to_all_queues_hears_those_of_every_node(rig: Rig) -> None:
    url = f"{shared_cluster().url}?prefix={rig.backend.url.prefix}"
    here, there = open_client(f"{url}&timeout=5"), open_client(f"{url}&timeout=6")
    try:
        for n in range(4):
            await Queue(there, f"q{n}").add("early")
        async with QueueEvents(here, "*") as events, asyncio.timeout(20):
            added = {(await Queue(there, f"q{n}").add("job")).id for n in range(8)}
            heard = [(await anext(aiter(events))).job_id for _ in added]
        assert set(heard) == added
    finally:
        for client in (here, there):
            await asyncio.wrap_future(client.close())


async def test_a_question_is_answered_by_another_process(rig: Rig) -> None:
    """The options differ, so the two share nothing."""
    url = f"{shared_cluster().url}?prefix={rig.backend.url.prefix}"
    asking, answering = Events(f"{url}&timeout=5"), Events(f"{url}&timeout=6")
    questions = [event(f"ask{n}", int, int) for n in range(5)]
    for question in questions:
        answering.on(question)(lambda ctx: ctx.data * 10)
    async with asking, answering:
        answers = await asyncio.gather(*(asking.emit(q, n, timeout=20).wait() for n, q in enumerate(questions)))
    assert answers == [0, 10, 20, 30, 40]


async def test_the_map_is_read_anew_after_somebody_gave_up_waiting_for_it(members: Cluster) -> None:
    waiting = asyncio.create_task(members.refresh())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert members._reading is not None
    await members._reading
    known, members._slots = members._slots, []
    await members.refresh()
    assert members._slots == known


async def test_many_who_find_the_map_old_read_it_once(members: Cluster) -> None:
    known = members._slots
    members._slots = [(first, last, known[0][2]) for first, last, _ in known]
    before = _asked_for_slots()
    await members.call_many([(f"k{n}", ("GET", f"k{n}")) for n in range(100)])
    assert members._slots == known
    assert 1 <= _asked_for_slots() - before <= 4


async def test_a_durable_call_follows_its_slot(rig: Rig, members: Cluster) -> None:
    known = members._slots
    members._slots = [(first, last, known[0][2]) for first, last, _ in known]
    for n in range(6):
        # These servers have no append-only file: whoever gets so far has found its node.
        with pytest.raises(StorageUnavailable, match="appendonly"):
            await members.fcall_synced(function_of("counts"), [f"p:{{q{n}}}:meta"], ["0"])
    assert members._slots == known


def test_a_child_whose_parent_is_out_of_reach_ends_all_the_same(rig: Rig) -> None:
    """Newer versions of glide-mq have families across queues in a cluster; its parent hears from Node."""
    queues = [f"q{n}" for n in range(6)]
    for queue in queues:
        rig.push(queue)
        held = rig.take(queue)
        key = rig.backend._keys.job(queue, held.id)
        ties = ("HSET", key, "parentId", "1", "parentQueue", f"{queue}-parents")
        rig.wait(rig.backend._server.call(key, *ties))
        rig.wait(rig.backend._server.call(key, "HDEL", key, "hv", "ls"))
        rig.wait(rig.backend._server.call(key, "HSET", key, "hb", rig.clock.now_ms()))
        own = f"{queue}:{held.id}"
        rig.complete([Ack(own, held.token)])
        assert rig.state(own) == "completed"


def test_an_id_that_no_job_got_is_forgotten(rig: Rig) -> None:
    """Which queue an id leads to is noted before the jobs are stored, in another slot."""
    rig.push("q", custom_id="first", unique_key="k")
    assert rig.push("q", custom_id="second", unique_key="k") == "first"
    with pytest.raises(NotFound, match="Dependency job not found"):
        rig.push("q", custom_id="third", depends_on=["nowhere"])
    with pytest.raises(NotSupported, match="workflows across queues in a cluster"):
        rig.start_flow("f", "order", "wf", [], [FlowPush("wf.steps", spec(flow_id="f", custom_id="fourth"))])
    rig.start_flow("g", "order", "wf", [], [])
    with pytest.raises(Conflict):
        rig.advance_flow("g", 7, None, [], [FlowPush("wf", spec(flow_id="g", custom_id="fifth"))], None)
    rig.look_after()
    keys = [key for node in shared_cluster().nodes for key in node.client().keys(f"{rig.backend.url.prefix}:*")]
    assert [key for key in keys if ":hr:queue-of:" in key] == [f"{rig.backend.url.prefix}:hr:queue-of:first"]
    assert not [key for key in keys if key.endswith(":hr:gone")]
    assert [key for key in keys if ":fr:" in key] == [rig.backend._keys.flow_registry("g")]
    assert [summary.name for summary in rig.queues()] == ["q", "wf"]
    assert rig.state("first") == "waiting"


def test_an_id_that_is_pushed_again_while_it_is_forgotten_leads_to_its_job(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.push("q", custom_id="mine")
    rig.cancel("mine")
    call_many = rig.backend._server.call_many

    async def be_outrun(commands: list[tuple[str, tuple[str, ...]]]) -> list[Any]:
        if any(command[0] == "DEL" for _, command in commands):
            monkeypatch.undo()
            await rig.backend.insert("q", [spec(custom_id="mine")])
        return await call_many(commands)

    monkeypatch.setattr(rig.backend._server, "call_many", be_outrun)
    rig.look_after()
    assert rig.backend._server.call_many == call_many, "nothing was forgotten"
    assert rig.state("mine") == "waiting"


async def test_a_node_that_has_left_is_not_asked_and_let_go(members: Cluster) -> None:
    visits: list[object] = []
    async with await asyncio.start_server(lambda reader, writer: visits.append(writer), "127.0.0.1", 0) as mute:
        left = mute.sockets[0].getsockname()
        members._nodes = {left: members._node(left), **members._nodes}
        async with asyncio.timeout(5):
            await members.refresh()
        assert left not in members._nodes
        assert not visits


def _asked_for_slots() -> int:
    statistics = (node.client().info("commandstats") for node in shared_cluster().nodes)
    return sum(found.get("cmdstat_cluster|slots", {"calls": 0})["calls"] for found in statistics)
