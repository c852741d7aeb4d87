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
