"""Jobs of ours in the hands of a Node worker: the worker's side is played by the very commands that it issues.

Afterwards our own view of the queue must be right.
"""

from __future__ import annotations

import json
import threading

import pytest

from headrace.model import DlqFilter
from tests.conformance import valkeykeys
from tests.conformance.rig import Rig, spec
from tests.scale import scaled
from tests.valkey.foreign import Foreign
from tests.valkey.nodeworker import NodeWorker

JOBS = scaled(300, 2000)


@pytest.fixture
def node(foreign: Foreign) -> NodeWorker:
    return NodeWorker(foreign)


def test_a_node_worker_finds_and_completes_a_job_of_ours(rig: Rig, node: NodeWorker, foreign: Foreign) -> None:
    job_id = rig.push(data={"to": "ada"}, name="mail")
    taken = node.take()
    assert taken is not None
    fields = foreign.hash(job_id)
    assert (taken[0], json.loads(fields["data"]), fields["name"]) == (job_id, {"to": "ada"}, "mail")
    assert json.loads(fields["opts"])["attempts"] == 3
    assert rig.count() == {"active": 1}
    assert rig.state(job_id) == "active"
    node.complete(*taken, {"sent": True})
    job = rig.look(job_id)
    assert (job["state"], job["returnvalue"]) == ("completed", {"sent": True})
    assert rig.count() == {"completed": 1}


def test_a_job_that_node_failed_is_a_dead_letter_that_can_come_back(rig: Rig, node: NodeWorker) -> None:
    job_id = rig.push()
    node.fail(*node.take(), "no such host", None)
    (letter,) = rig.dead_letters("q", DlqFilter(), None)
    assert (letter.error, rig.look(job_id)["failedReason"]) == ("no such host", "no such host")
    assert rig.retry_dlq("q", job_id, None, None) == 1
    assert rig.run().id == job_id


def test_a_retry_that_node_planned_is_claimed_here_in_time(rig: Rig, node: NodeWorker) -> None:
    job_id = rig.push()
    node.fail(*node.take(), "later", 300)
    assert rig.state(job_id) == "delayed"
    rig.clock.advance(300)
    held = rig.take()
    assert (held.id, held.job["attempts"]) == (job_id, 1)
    rig.ack(held)
    assert rig.count() == {"completed": 1}


def test_a_delayed_job_of_ours_that_node_promotes_is_claimed_and_cancelled_as_any(rig: Rig, node: NodeWorker) -> None:
    first, second = rig.push(delay=100), rig.push(delay=100)
    rig.clock.advance(100)
    node.promote()
    rig.cancel(second)
    assert rig.pulled_ids() == [first]


def test_a_retry_that_node_planned_ends_here_though_younger_jobs_wait(
    rig: Rig, node: NodeWorker, foreign: Foreign
) -> None:
    job_id = rig.push()
    node.fail(*node.take(), "later", 300)
    rig.clock.advance(300)
    younger = rig.push()
    held = rig.take()
    assert held.id == job_id
    rig.ack(held, "done")
    assert rig.look(job_id)["returnvalue"] == "done"
    assert rig.run().id == younger
    assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": 2, "failed": 0}


def test_a_job_of_a_list_that_was_in_the_stream_before_ends_here(rig: Rig, node: NodeWorker, foreign: Foreign) -> None:
    job_id = foreign.add(priority=2)
    foreign.client.hset(foreign.key(f"job:{job_id}"), "entry", "1-1")  # where somebody had put it
    rig.run()
    assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": 1, "failed": 0}


def test_a_job_that_node_brought_back_can_fail_here_and_be_looked_at(rig: Rig, node: NodeWorker) -> None:
    job_id = rig.push()
    node.fail(*node.take(), "no such host", None)
    node.retry(job_id)
    rig.clock.advance(1)
    rig.nack(rig.take(), "boom")
    assert [entry["state"] for entry in rig.look(job_id)["timeline"]] == ["waiting", "active", "failed", "waiting"]


def test_a_job_that_node_failed_is_shown_as_failed_when_it_comes_back(rig: Rig, node: NodeWorker) -> None:
    job_id = rig.push()
    node.fail(*node.take(), "no such host", None)
    rig.retry_dlq("q", job_id, None, None)
    assert [entry["state"] for entry in rig.look(job_id)["timeline"]] == ["waiting", "active", "failed", "waiting"]


@pytest.mark.parametrize("verb", ["cancel", "move_to_delayed", "change_priority"])
def test_no_node_worker_finds_a_job_that_was_taken_out_of_the_stream(
    rig: Rig, node: NodeWorker, foreign: Foreign, verb: str
) -> None:
    """Node's own functions do not note where in the stream a job is."""
    ids = [foreign.add() for _ in range(3)]
    for job_id in ids:
        foreign.client.hdel(foreign.key(f"job:{job_id}"), "entry")
    arguments = {"change_priority": (3, None), "move_to_delayed": (1000, None)}.get(verb, ())
    getattr(rig, verb)(f"q:{ids[1]}", *arguments)
    assert [node.take()[0], node.take()[0]] == [ids[0], ids[2]]
    assert node.take() is None


def test_a_delayed_job_that_node_ran_before_its_time_does_not_run_again(rig: Rig, node: NodeWorker) -> None:
    job_id = rig.push(delay=1000, priority=1)
    node.promote_job(job_id)
    node.complete(*node.take(), "done")
    rig.advance(1000)
    assert rig.pull() == []
    assert rig.look(job_id)["returnvalue"] == "done"


def test_a_lock_that_is_shorter_than_the_lease_is_no_reason_to_take_a_job_over(
    rig: Rig, foreign: Foreign, node: NodeWorker
) -> None:
    job_id = foreign.add(opts='{"lockDuration":5000}')
    held = rig.take(lease_ms=30_000)
    for _ in range(2):
        rig.advance(29_000)
        assert node.reclaim(lock_ms=5000) == []
        assert rig.extend(held.id, held.token, None)
    rig.clock.advance(30_000)
    assert node.reclaim(lock_ms=5000) == [job_id]


class TestSlots:
    """An ordered job that Node started keeps its slot until it ends, and nothing in its hash says so."""

    OPTS = '{"attempts":3}'

    def _start_as_node(self, foreign: Foreign, node: NodeWorker) -> tuple[str, str]:
        for _ in range(2):
            foreign.add(ordering="k", opts=self.OPTS)
        taken = node.take()
        assert taken is not None
        return taken

    def _assert_free(self, rig: Rig, foreign: Foreign) -> None:
        assert rig.run().id == "q:2"
        assert foreign.client.hget(foreign.key("group:k"), "active") == "0"

    @pytest.mark.parametrize("end", ["ack", "bury", "cancel"])
    def test_a_retry_of_node_ends_here(self, rig: Rig, foreign: Foreign, node: NodeWorker, end: str) -> None:
        node.fail(*self._start_as_node(foreign, node), "later", 100)
        rig.pull()
        if end == "cancel":
            rig.cancel("q:1")
        rig.clock.advance(100)
        if end == "ack":
            assert rig.run().id == "q:1"
        elif end == "bury":
            assert rig.bury().id == "q:1"
        self._assert_free(rig, foreign)

    @pytest.mark.parametrize("stalls", [0, 1])
    def test_a_job_of_a_dead_node_worker_ends_here(
        self, rig: Rig, foreign: Foreign, node: NodeWorker, stalls: int
    ) -> None:
        _, entry = self._start_as_node(foreign, node)
        foreign.client.hset(foreign.key("job:1"), "stalledCount", stalls)
        foreign.client.xclaim(foreign.key("stream"), "workers", node.name, 0, [entry], idle=60_000, justid=True)
        rig.clock.advance(60_000)
        rig.wait(rig.backend._register("q"))
        rig.look_after()
        if not stalls:
            assert rig.run().id == "q:1"
        self._assert_free(rig, foreign)

    def test_a_hole_that_is_closed_while_node_has_the_slot_holds_nobody_up(
        self, rig: Rig, foreign: Foreign, node: NodeWorker
    ) -> None:
        taken = self._start_as_node(foreign, node)
        foreign.add(ordering="k")
        assert rig.pull(count=2) == []
        foreign.client.zrem(foreign.key("groupq:k"), "2")  # as library 93 removes it, and its hash
        foreign.client.delete(foreign.key("job:2"))
        foreign.client.hset(foreign.key("group:k"), mapping={"skip:2": "1", "active": "0"})
        foreign.client.xack(foreign.key("stream"), "workers", taken[1])
        foreign.client.xdel(foreign.key("stream"), taken[1])
        last = foreign.add(ordering="k")
        assert [rig.run().id, rig.run().id] == ["q:3", f"q:{last}"]

    def test_one_that_was_started_here_and_ended_by_node_gives_its_slot_back_once(
        self, rig: Rig, foreign: Foreign, node: NodeWorker
    ) -> None:
        for _ in range(3):
            foreign.add(ordering="k", opts=self.OPTS)
        held = rig.take()
        rig.move_to_wait(held.id, held.token)
        node.complete(*node.take(), None)
        assert rig.take().id == "q:2"
        rig.clean("q", 0, "completed", 10)
        assert rig.pull() == []

    def test_one_that_comes_back_from_the_dead_takes_a_slot_again(self, rig: Rig, foreign: Foreign) -> None:
        foreign.add(ordering="k")
        rig.bury()
        rig.retry_dlq("q", "q:1", None, None)
        held = rig.take()
        foreign.add(ordering="k")
        assert rig.pull() == []
        rig.ack(held)
        self._assert_free(rig, foreign)


def test_both_kinds_of_workers_share_a_queue_and_no_job_runs_twice(
    rig: Rig, node: NodeWorker, foreign: Foreign
) -> None:
    ids = rig.push_many(*(spec(n) for n in range(JOBS)))
    done: list[str] = []

    def work_as_node() -> None:
        while (taken := node.take()) is not None:
            node.complete(*taken, None)
            done.append(taken[0])

    thread = threading.Thread(target=work_as_node)
    thread.start()
    ours = []
    while held := rig.pull(count=5):
        for one in held:
            rig.ack(one)
            ours.append(one.id)
    thread.join(30)
    assert sorted(done + ours) == sorted(ids)
    assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": JOBS, "failed": 0}


def test_our_own_books_are_right_after_both_worked(rig: Rig, node: NodeWorker) -> None:
    rig.push_many(*(spec(n) for n in range(10)))
    for n in range(3):
        taken = node.take()
        node.complete(*taken, n) if n else node.fail(*taken, "x", None)
        rig.run()
    valkeykeys.check(rig.backend)
    assert rig.count() == {"waiting": 4, "completed": 5, "failed": 1}


def test_a_job_deep_in_a_long_stream_is_found_without_reading_the_stream(rig: Rig, foreign: Foreign) -> None:
    client, stream = foreign.client, foreign.key("stream")
    pipe = client.pipeline(transaction=False)
    for n in range(5000):
        pipe.xadd(stream, {"jobId": f"old{n}", "name": "work"}, id=f"{n + 1}-0")
    pipe.execute()
    seconds, micros = client.time()
    job_id = foreign.add(timestamp=seconds * 1000 + micros // 1000)
    client.hdel(foreign.key(f"job:{job_id}"), "entry")  # Node's library does not note it
    client.config_resetstat()
    rig.cancel(f"q:{job_id}")
    assert client.info("commandstats")["cmdstat_xrange"]["calls"] <= 2
    assert client.xlen(stream) == 5000


class TestParkedByNode:
    """Jobs that a Node worker found out of turn and put aside."""

    @pytest.fixture
    def parked(self, rig: Rig, foreign: Foreign, node: NodeWorker) -> list[str]:
        ids = [foreign.add(ordering="k") for _ in range(3)]
        node.take()
        assert node.take() is None
        return [f"q:{job_id}" for job_id in ids[1:]]

    def test_they_count_as_waiting_and_are_listed(self, rig: Rig, parked: list[str]) -> None:
        assert rig.count() == {"waiting": 2, "active": 1}
        assert rig.ids_in("waiting") == parked

    def test_a_drained_queue_has_none_of_them_left(self, rig: Rig, foreign: Foreign, parked: list[str]) -> None:
        assert rig.drain("q") == 2
        assert rig.count() == {"active": 1}
        assert not foreign.client.exists(foreign.key("groupq:k"))

    def test_nothing_of_them_is_left_when_the_queue_is_obliterated(
        self, rig: Rig, foreign: Foreign, parked: list[str]
    ) -> None:
        rig.pause("q")  # which enters it in the list of queues
        rig.obliterate("q")
        assert foreign.client.keys(foreign.key("job:*")) == []
