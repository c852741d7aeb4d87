"""Parked commands: order, deadlines, cancellation."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.backends.base import Demand
from headrace.clock import Alarm
from headrace.engine.waiters import Waiter, Waiters

DEMAND = Demand()


class Parked:
    """Waiters with a list of what each of them was given."""

    def __init__(self) -> None:
        self.waiters = Waiters(Alarm())
        self.given: list[tuple[str, Any]] = []

    def drive(self, name: str, waiter: Waiter) -> Waiter:
        waiter.resume = lambda value: self.given.append((name, value))
        return waiter

    def pull(self, name: str, queue: str = "q", deadline: int = 1000) -> Waiter:
        return self.drive(name, self.waiters.park_pull(queue, DEMAND, deadline))

    def job(self, name: str, job_id: str = "j", deadline: int = 1000) -> Waiter:
        return self.drive(name, self.waiters.park_job(job_id, deadline))

    def order(self, queue: str = "q") -> list[Waiter]:
        return list(self.waiters.pulls(queue))


@pytest.fixture
def parked() -> Parked:
    return Parked()


def test_pulls_are_served_in_the_order_of_their_coming(parked: Parked) -> None:
    first, second, third = parked.pull("1"), parked.pull("2"), parked.pull("3")
    for number, waiter in enumerate(parked.waiters.pulls("q")):
        if number < 2:
            waiter.finish(number)
    assert parked.given == [("1", 0), ("2", 1)]
    assert parked.order() == [third]
    assert first.is_over
    assert second.is_over


def test_those_who_got_nothing_keep_their_order(parked: Parked) -> None:
    waiters = [parked.pull(str(n)) for n in range(4)]
    for waiter in parked.waiters.pulls("q"):
        if waiter is waiters[1]:
            waiter.finish("x")
    assert parked.order() == [waiters[0], waiters[2], waiters[3]]


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


def test_everybody_who_waits_for_a_job_hears_of_it(parked: Parked) -> None:
    parked.job("1")
    parked.job("2")
    parked.job("3", "other")
    assert parked.waiters.has_jobs
    for waiter in parked.waiters.take_job("j"):
        waiter.finish("done")
    assert parked.given == [("1", "done"), ("2", "done")]
    assert parked.waiters.take_job("j") == []
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
    assert parked.given == []
    assert parked.order() == [staying]
    assert parked.waiters.take_job("j") == []


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
