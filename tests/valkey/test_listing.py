"""What lists read: of all jobs what they are sorted by, of those on the page everything."""

from __future__ import annotations

import asyncio

import pytest

from headrace.backends.base import QueueSummary
from headrace.engine.engine import Engine
from headrace.engine.history import History
from headrace.model import DlqFilter
from tests.conformance.rig import Rig, spec, unpack
from tests.valkey.foreign import Foreign
from tests.valkeyserver import shared_server

JOBS = 1200


def read_by(rig: Rig, work: str, *args: object) -> tuple[list[str], int]:
    """The ids of what a query returns, and how many jobs it read as a whole."""
    client = shared_server().client()
    client.config_resetstat()
    found = getattr(rig, work)(*args)
    stats = client.info("commandstats")
    ids = [unpack(getattr(row, "job", row))["id"] for row in found]
    return ids, stats.get("cmdstat_hgetall", {"calls": 0})["calls"]


@pytest.mark.parametrize("asc", [True, False])
def test_a_page_of_a_long_list_costs_the_jobs_on_it(rig: Rig, asc: bool) -> None:
    ids = rig.push_many(*(spec(n) for n in range(JOBS)))
    shown, read = read_by(rig, "jobs", "q", ["waiting"], 100, 20, asc)
    assert shown == (ids if asc else ids[::-1])[100:120]
    assert read <= 20 + 5  # and the meta of the queue


def test_a_page_of_dead_letters_costs_the_letters_on_it(rig: Rig) -> None:
    ids = rig.push_many(*(spec(n, max_attempts=1) for n in range(JOBS // 10)))
    for held in rig.pull(count=JOBS):
        rig.nack(held)
        rig.advance(1)
    shown, read = read_by(rig, "dead_letters", "q", DlqFilter(offset=50), 10)
    assert shown == ids[50:60]
    assert read <= 10 + 5
    assert read_by(rig, "dead_letters", "q", DlqFilter(), 0)[0] == []


def test_a_job_of_node_is_listed_with_the_priority_that_it_was_given_here(rig: Rig, foreign: Foreign) -> None:
    job_id = f"q:{foreign.add()}"
    rig.change_priority(job_id, 7, None)
    assert rig.look(job_id)["priority"] == 7
    assert rig.ids_in("prioritized") == [job_id]
    assert rig.counts_per_priority("q") == {"7": 1}


def test_a_queue_may_be_obliterated_while_the_history_is_sampled(rig: Rig) -> None:
    queues = [f"q{n:02}" for n in range(40)]
    history = History(rig.backend, rig.clock)
    history.start()
    for queue in queues:
        rig.push(queue)
    rig.advance(60_000)

    async def sample_meanwhile() -> None:
        sampling = asyncio.ensure_future(history.sample())
        await rig.backend.obliterate(queues[-1])
        assert not sampling.done()
        await sampling

    rig.wait(sample_meanwhile())


def test_a_queue_may_be_forgotten_while_the_metrics_are_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for queue in ("a", "b"):
        rig.push(queue)
    summarize = rig.backend._summary

    async def summarize_and_forget(queue: str) -> QueueSummary:
        summary: QueueSummary = await summarize(queue)
        rig.backend._forget_figures(queue)
        return summary

    monkeypatch.setattr(rig.backend, "_summary", summarize_and_forget)
    text = rig.wait(Engine(rig.backend, rig.clock).figures.prometheus())
    assert 'bunqueue_queue_jobs_waiting{queue="a"} 1' in text
