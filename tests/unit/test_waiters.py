"""Parked commands: order, deadlines, cancellation."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from headrace.backends.base import Demand, GroupDemand
from headrace.clock import Alarm
from headrace.engine.waiters import Waiter, Waiters
from headrace.errors import StorageUnavailable

DEMAND = Demand()


class Parked:
    """Waiters with a list of what each of them was given."""

    def __init__(self) -> None:
        self.waiters = Waiters(Alarm())
        self.given: list[tuple[str, Any]] = []

    def drive(self, name: str, waiter: Waiter) -> Waiter:
        waiter.resume = lambda value: self.given.append((name, value))
        return waiter

    def pull(self, name: str, queue: str = "q", deadline: int = 1000, demand: Demand = DEMAND) -> Waiter:
        return self.drive(name, self.waiters.park_pull(queue, demand, deadline))

    def serve(self, *claims: Any) -> None:
        """Offer these to pulls of the queue, one after the other; then there is nothing more."""
        left = iter(claims)
        self.waiters.serve_pulls("q", lambda queue, demand: next(left, []))

    def job(self, name: str, job_id: str = "j", deadline: int = 1000) -> Waiter:
        return self.drive(name, self.waiters.park_job(job_id, deadline))

    def order(self, queue: str = "q") -> list[Waiter]:
        return self.waiters.parked_pulls(queue)


@pytest.fixture
def parked() -> Parked:
    return Parked()


def test_pulls_are_served_in_the_order_of_their_coming(parked: Parked) -> None:
    first, second, third = parked.pull("1"), parked.pull("2"), parked.pull("3")
    parked.serve(["a"], ["b"])
    assert parked.given == [("1", ["a"]), ("2", ["b"])]
    assert parked.order() == [third]
    assert first.is_over
    assert second.is_over


def test_those_who_were_served_are_not_kept_until_their_deadlines(parked: Parked) -> None:
    last = parked.pull("last", "other")
    for n in range(20_000):
        parked.pull(str(n))
        parked.serve(["a"])
    assert sum(isinstance(kept, Waiter) for kept in gc.get_objects()) < 5000
    assert parked.waiters.expired(1000) == [last]


def test_nobody_is_asked_behind_one_who_got_nothing(parked: Parked) -> None:
    waiters = [parked.pull(str(n)) for n in range(3)]
    parked.serve([], ["a"])
    assert parked.given == []
    assert parked.order() == waiters


def test_those_who_got_nothing_for_their_group_keep_their_places(parked: Parked) -> None:
    grouped = Demand(group=GroupDemand(affinity="g"))
    waiters = [parked.pull(str(n), demand=grouped if n in (0, 2) else DEMAND) for n in range(5)]
    parked.serve([], ["a"], [], [])
    assert parked.given == [("1", ["a"])]
    assert parked.order() == [waiters[0], waiters[2], waiters[3], waiters[4]]


def test_those_who_leave_or_come_while_others_are_served_are_no_trouble(parked: Parked) -> None:
    first = parked.pull("1", demand=Demand(group=GroupDemand(affinity="g")))
    second, third = parked.pull("2"), parked.pull("3")

    def leave_and_come(value: Any) -> None:
        parked.waiters.cancel(third)
        parked.pull("4")

    second.resume = leave_and_come
    parked.serve([], ["a"], ["not for who comes now"])
    assert [waiter.demand for waiter in parked.order()] == [first.demand, DEMAND]
    assert parked.given == []
    parked.serve(["b"], ["c"])
    assert parked.given == [("1", ["b"]), ("4", ["c"])]
    assert parked.waiters.pulled_queues() == []


def test_a_claim_that_fails_costs_nobody_the_place(parked: Parked) -> None:
    waiters = [parked.pull(str(n)) for n in range(2)]

    def refuse(queue: str, demand: Demand) -> list[Any]:
        raise StorageUnavailable("no")

    with pytest.raises(StorageUnavailable):
        parked.waiters.serve_pulls("q", refuse)
    assert parked.order() == waiters


def test_queues_do_not_know_each_other(parked: Parked) -> None:
    here, there = parked.pull("1", "a"), parked.pull("2", "b")
    assert parked.order("a") == [here]
    assert parked.order("b") == [there]
    assert parked.order("c") == []


def test_a_waiter_is_resumed_once(parked: Parked) -> None:
    waiter = parked.pull("1")
    waiter.finish("a")
    waiter.finish("b")
    assert parked.given == [("1", "a")]


def test_what_a_waiter_was_given_is_not_kept_until_its_deadline(parked: Parked) -> None:
    parked.pull("idle", "other")
    served, cancelled = parked.pull("1"), parked.pull("2")
    parked.serve(["a large job"])
    parked.waiters.cancel(cancelled)
    for waiter in (served, cancelled):
        assert (waiter.value, waiter.resume) == (None, None)


def test_everybody_who_waits_for_a_job_hears_of_it(parked: Parked) -> None:
    parked.job("1")
    parked.job("2")
    parked.job("3", "other")
    assert parked.waiters.has_jobs
    parked.waiters.finish_job("j", "done")
    parked.waiters.finish_job("j", "again")
    assert parked.given == [("1", "done"), ("2", "done")]
    assert parked.waiters.has_jobs


def test_time_runs_out_for_each_at_its_deadline(parked: Parked) -> None:
    late, early = parked.pull("late", deadline=300), parked.job("early", deadline=100)
    assert parked.waiters.next_due() == 100
    assert parked.waiters.expired(99) == []
    assert parked.waiters.expired(100) == [early]
    assert parked.waiters.next_due() == 300
    assert parked.waiters.expired(1000) == [late]
    assert parked.waiters.next_due() is None
    assert parked.order() == []
    assert not parked.waiters.has_jobs


def test_who_was_served_does_not_run_out(parked: Parked) -> None:
    parked.pull("1", deadline=100).finish("x")
    assert parked.waiters.next_due() is None
    assert parked.waiters.expired(1000) == []


def test_a_cancelled_waiter_gets_nothing(parked: Parked) -> None:
    gone, staying = parked.pull("gone"), parked.pull("staying")
    waiting = parked.job("waiting")
    parked.waiters.cancel(gone)
    parked.waiters.cancel(waiting)
    gone.finish("x")
    parked.waiters.finish_job("j", "x")
    assert parked.given == []
    assert parked.order() == [staying]


def test_parking_rings_the_alarm_in_time() -> None:
    alarm = Alarm()
    waiters = Waiters(alarm)
    waiters.park_pull("q", DEMAND, 500)
    waiters.park_pull("q", DEMAND, 200)
    assert alarm.due_mono <= 200


def test_a_waiter_served_before_it_is_awaited_has_its_value_ready(parked: Parked) -> None:
    waiter = parked.waiters.park_job("j", 100)
    waiter.finish("early")

    async def command() -> object:
        return await waiter

    with pytest.raises(StopIteration) as done:
        command().send(None)
    assert done.value.value == "early"


def test_awaiting_hands_the_waiter_to_the_driver(parked: Parked) -> None:
    async def command() -> object:
        return await parked.waiters.park_pull("q", DEMAND, 100)

    work = command()
    assert isinstance(work.send(None), Waiter)
    with pytest.raises(StopIteration) as done:
        work.send("value")
    assert done.value.value == "value"


def test_at_the_end_everybody_is_sent_away(parked: Parked) -> None:
    waiters = [parked.pull("1", deadline=5), parked.job("2", deadline=3)]
    assert set(parked.waiters.everybody()) == set(waiters)
    assert parked.order() == []
    assert parked.waiters.next_due() is None
