"""The interop plan, row by row: Python and Node on the same queues, with Node's half played by a plain client.

Rows that have a module of their own: 1, 7 and 8 test_node_workers, 2 and 27 test_library, 3, 6, 20 and 29 test_workers,
9, 10 and 14 to 16 test_producers, 24 test_producers (pauses), 30 test_workers (events).

The checklist for a worker on a shared queue, item by item: 1 (libraries, group from 0) test_library and row 5; 2
(registration) test_workers; 3 (pause, capacity, lists before the stream, list-active) test_producers, test_fleet,
test_weaknesses (order) and test_workers (lists); 4 (one activation; jobs that are not ours) test_weaknesses (fencing);
5 (signs of life) rows 21 and 22; 6 (rate limit) row 26; 7 (gz, timeout, attempts, backoff, what is kept) test_producers
and test_workers; 8 (results, parents by queue name) test_workers, rows 9 to 11; 9 (promotion, schedules, due times)
row 12 and 25, test_schedulers; 10 (taking over) test_workers; 11 (texts and numbers) test_workers (completion),
test_node_workers; 12 (shutdown) test_workers (listed while they live) and tests/worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import valkey
from headrace.errors import NotFound
from tests.conformance.rig import CLUSTER, Rig, spec
from tests.valkey.foreign import Foreign
from tests.valkey.nodeworker import NodeWorker
from tests.valkeyserver import shared_cluster

LOCK_MS = 30_000


@pytest.fixture
def node(foreign: Foreign) -> NodeWorker:
    return NodeWorker(foreign)


def ours(rig: Rig) -> dict[str, int]:
    """Our counts by the words and in the shape of Node's."""
    found = rig.count()
    return {state: found.get(state, 0) for state in ("waiting", "active", "delayed", "completed", "failed")}


def test_row_4_queue_events_tell_of_every_job_with_the_fields_of_a_node_run(rig: Rig, foreign: Foreign) -> None:
    ids = [foreign.add({"n": n}, name="mail") for n in range(20)] + rig.push_many(
        *(spec(n, name="mail") for n in range(20))
    )
    for n in range(40):
        rig.run(result={"n": n})
    told = foreign.events()
    assert [e for e in told if e["event"] == "added"] == [
        {"event": "added", "jobId": job_id, "name": "mail"} for job_id in ids
    ]
    assert [e for e in told if e["event"] == "completed"] == [
        {"event": "completed", "jobId": job_id, "returnvalue": f'{{"n":{n}}}'} for n, job_id in enumerate(ids)
    ]


def test_row_5_both_count_the_same_in_every_phase(rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
    rig.push_many(*(spec(n) for n in range(6)))
    foreign.add(delay=100)
    assert foreign.counts() == ours(rig) == {"waiting": 6, "active": 0, "delayed": 1, "completed": 0, "failed": 0}
    mine, theirs = rig.pull(count=2), [node.take(), node.take()]
    assert foreign.counts() == ours(rig) == {"waiting": 2, "active": 4, "delayed": 1, "completed": 0, "failed": 0}
    rig.ack(mine[0])
    rig.nack(mine[1], unrecoverable=True)
    node.complete(*theirs[0], None)
    node.fail(*theirs[1], "x", None)
    assert foreign.counts() == ours(rig) == {"waiting": 2, "active": 0, "delayed": 1, "completed": 2, "failed": 2}
    rig.clock.advance(100)
    for _ in range(3):
        rig.run()
    assert foreign.counts() == ours(rig) == {"waiting": 0, "active": 0, "delayed": 0, "completed": 5, "failed": 2}
    assert foreign.client.get(foreign.key("list-active")) in (None, "0")


def test_row_11_a_nested_flow_releases_its_parent_exactly_once(rig: Rig, foreign: Foreign) -> None:
    inner, leaf = foreign.flow([{}])
    for job_id in (leaf, inner):
        assert rig.run().id == f"q:{job_id}"  # the inner flow is over before the outer one is added
    outer, child = foreign.flow([{}], extras=(foreign.key(inner),))
    assert foreign.hash(outer)["state"] == "waiting-children"
    assert rig.run().id == f"q:{child}"
    fields = foreign.hash(outer)
    assert (fields["state"], int(fields["depsCompleted"])) == (
        "waiting",
        foreign.client.scard(foreign.key(f"deps:{outer}")),
    )
    assert rig.pulled_ids() == [f"q:{outer}"]
    assert [e for e in foreign.events() if e == {"event": "active", "jobId": outer}] == [
        {"event": "active", "jobId": outer}
    ]


def test_row_12_delayed_jobs_of_ours_reach_a_node_worker_by_the_time_they_are_due(
    rig: Rig, foreign: Foreign, node: NodeWorker
) -> None:
    ids = {delay: rig.push(delay=delay) for delay in (300, 100, 200)}
    order = []
    for _ in range(3):
        rig.clock.advance(100)
        node.promote()
        order.append(node.take()[0])
    assert order == [ids[100], ids[200], ids[300]]


def test_row_13_priorities_reach_either_worker_in_order(rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
    for_node = {priority: foreign.add(priority=priority) for priority in (3, 2, 1)}
    node.promote()
    assert [node.take()[0] for _ in range(3)] == [for_node[priority] for priority in (1, 2, 3)]
    for_us = {priority: foreign.add(priority=priority) for priority in (3, 2, 1)}
    assert rig.pulled_ids() == [f"q:{for_us[priority]}" for priority in (1, 2, 3)]


def test_row_15_a_numeric_custom_id_moves_the_counter_for_both(rig: Rig, foreign: Foreign) -> None:
    assert foreign.add(custom_id="10") == "10"
    rig.push(custom_id="11")
    assert (foreign.add(custom_id="10"), foreign.add(custom_id="11")) == ("duplicate", "duplicate")
    assert foreign.add() == "12"


def test_row_17_an_ordering_key_holds_over_both_kinds_of_workers(rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
    ids = [foreign.add(ordering="k") for _ in range(50)]
    order: list[str] = []
    while len(order) < len(ids):
        before = len(order)
        if held := rig.pull(count=3):
            (one,) = held
            assert node.take() is None, "two of a key at once"
            order.append(one.id.removeprefix("q:"))
            rig.ack(one)
        if taken := node.take():
            assert rig.pull(count=3) == [], "two of a key at once"
            order.append(taken[0])
            node.complete(*taken, None)
        assert len(order) > before
    assert order == ids


def test_row_18_the_window_of_a_group_counts_the_starts_of_both(rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
    for _ in range(4):
        foreign.add(ordering="k", concurrency=4, rate_max=2, rate_duration=1000)
    taken = node.take()
    assert taken is not None
    started = {"rateWindowStart": rig.clock.now_ms(), "rateCount": 1}  # as moveToActive counts it
    foreign.client.hset(foreign.key("group:k"), mapping=started)
    assert len(rig.pull(count=4)) == 1
    rig.advance(999)
    assert rig.pull(count=4) == []
    rig.advance(1)
    assert len(rig.pull(count=4)) == 2


def test_row_19_a_time_to_live_of_ours_ends_the_job_at_a_node_worker(
    rig: Rig, foreign: Foreign, node: NodeWorker
) -> None:
    job_id = rig.push(ttl=50)
    rig.clock.advance(51)
    assert node.take() is None
    assert (foreign.hash(job_id)["state"], foreign.hash(job_id)["failedReason"]) == ("failed", "expired")
    assert rig.state(job_id) == "failed"
    assert foreign.events()[-1] == {"event": "expired", "jobId": job_id}


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "rich"])
class TestSilence:
    """A worker of ours holds a job; it is dead or slow, and a Node worker looks for stalled jobs."""

    def _push(self, rig: Rig, is_plain: bool) -> str:
        return rig.push() if is_plain else rig.push(backoff=5)

    def test_row_21_a_job_of_a_dead_worker_is_taken_over_by_node(
        self, rig: Rig, foreign: Foreign, node: NodeWorker, is_plain: bool
    ) -> None:
        job_id = self._push(rig, is_plain)
        rig.take(lease_ms=LOCK_MS)
        rig.clock.advance(LOCK_MS)
        assert node.reclaim() == [job_id]
        node.complete(*node.take(), "done")
        assert {"event": "stalled", "jobId": job_id} in foreign.events()
        assert rig.look(job_id)["returnvalue"] == "done"
        rig.sweep()
        assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": 1, "failed": 0}

    def test_row_22_a_job_that_is_renewed_runs_once_however_long_it_takes(
        self, rig: Rig, foreign: Foreign, node: NodeWorker, is_plain: bool
    ) -> None:
        self._push(rig, is_plain)
        held = rig.take(lease_ms=LOCK_MS)
        for _ in range(9):
            rig.advance(LOCK_MS // 3)
            assert rig.extend(held.id, held.token, None) is True
            assert node.reclaim() == []
        rig.ack(held)
        assert [e["event"] for e in foreign.events()] == ["added", "completed"]

    @pytest.mark.parametrize("step", ["waiting", "active", "completed"])
    def test_row_23_a_late_end_is_refused_however_far_node_has_come(
        self, rig: Rig, foreign: Foreign, node: NodeWorker, is_plain: bool, step: str
    ) -> None:
        job_id = self._push(rig, is_plain)
        late = rig.take(lease_ms=LOCK_MS)
        rig.clock.advance(LOCK_MS)
        node.reclaim()
        if step != "waiting":
            taken = node.take()
        if step == "completed":
            node.complete(*taken, "theirs")
        with pytest.raises(NotFound):
            rig.ack(late, "ours")
        with pytest.raises(NotFound):
            rig.nack(late)
        assert rig.extend(late.id, late.token, None) is False
        rig.sweep()
        assert foreign.hash(job_id)["state"] == step
        assert foreign.counts()[step] == sum(foreign.counts().values()) == 1


def test_row_25_a_schedule_fires_each_slot_once_whoever_ticks(rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
    template = {"name": "report", "data": {}, "opts": {}}
    entry = {"every": 1000, "iterationCount": 0, "template": template, "nextRun": rig.clock.now_ms()}
    foreign.client.hset(foreign.key("schedulers"), "s", json.dumps(entry, separators=(",", ":")))
    rig.wait(rig.backend._register("q"))
    for n in range(20):
        for tick in (rig.look_after, node.tick_schedulers) if n % 3 else (node.tick_schedulers, rig.look_after):
            tick()
        rig.clock.advance(1000)
    assert json.loads(foreign.client.hget(foreign.key("schedulers"), "s"))["iterationCount"] == 20
    assert len(rig.pulled_ids()) == 20


def test_row_26_limits_that_node_set_are_obeyed(rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
    rig.push_many(*(spec(n) for n in range(20)))
    foreign.client.hset(foreign.key("meta"), "globalConcurrency", 3)
    taken = node.take()
    held = rig.pull(count=10)
    assert len(held) == 2, "one slot is Node's"
    assert rig.pull(count=10) == []
    node.complete(*taken, None)
    for one in held:
        rig.ack(one)
    foreign.client.hset(foreign.key("meta"), mapping={"rateLimitMax": 4, "rateLimitDuration": 1000})
    foreign.client.hdel(foreign.key("meta"), "globalConcurrency")
    assert len(rig.pull(count=10)) == 4
    assert rig.pull(count=10) == []
    rig.advance(1000)
    assert len(rig.pull(count=10)) == 4


class TestCluster:
    """Row 28: rows 1 to 6 on three primaries, with a queue in each of their slot ranges."""

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        rig = Rig(CLUSTER, tmp_path)
        yield rig
        rig.close()

    @pytest.fixture
    def foreign(self, rig: Rig) -> Foreign:
        client: Any = valkey.ValkeyCluster(host="127.0.0.1", port=shared_cluster().nodes[0].port, decode_responses=True)
        return Foreign(client, rig.backend.url.prefix, rig.clock)

    def test_row_28_jobs_of_either_side_are_worked_on_and_counted_in_every_slot_range(
        self, rig: Rig, foreign: Foreign
    ) -> None:
        names = (f"queue{n}" for n in range(100))
        queues = {foreign.client.keyslot(foreign.key("id", name)) // 5462: name for name in names}.values()
        assert len(queues) == 3
        for queue in queues:
            theirs, mine = foreign.add({"n": 1}, queue=queue), rig.push(queue, {"n": 2})
            assert [rig.run(queue, {"ok": True}).id for _ in range(2)] == [f"{queue}:{theirs}", mine]
            assert foreign.hash(theirs, queue)["returnvalue"] == '{"ok":true}'
            assert foreign.counts(queue) == {"waiting": 0, "active": 0, "delayed": 0, "completed": 2, "failed": 0}
            words = [event["event"] for event in foreign.events(queue)]
            assert words == ["added", "added", "completed", "completed"]
            assert sum(int(n) for n in foreign.client.hgetall(foreign.key("metrics:completed", queue)).values()) == 2
        rig.look_after()
        assert all(foreign.client.exists(foreign.key(f"w:{rig.backend.broker}", queue)) for queue in queues)
