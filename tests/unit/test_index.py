"""Order in memory against its plainest description: a sorted list."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.backends.local.index import DueOrder, LeaseWheel, Queue, ReadyOrder
from headrace.backends.local.job import Job, Lease
from headrace.clock import Alarm
from headrace.model import DEFAULT_SETTINGS, intern_settings
from headrace.states import State

LIFO = intern_settings(msgspec.structs.replace(DEFAULT_SETTINGS, lifo=True))
QUEUE = Queue("q")


def make(seq: int, *, priority: int = 0, lifo: bool = False, run_at: int = 0, created: int | None = None) -> Job:
    settings_ = LIFO if lifo else DEFAULT_SETTINGS
    born = run_at if created is None else created
    return Job(seq, f"j{seq}", QUEUE, b"", None, settings_, None, State.WAITING, priority, born, run_at)


def rank(job: Job) -> tuple[int, ...]:
    if job.settings.lifo:
        return (-job.priority, 0, -job.seq)
    return (-job.priority, 1, job.run_at, job.seq)


class ReadyMachine(RuleBasedStateMachine):
    """Every way in which a job can enter, leave and come back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = ReadyOrder()
        self.waiting: list[Job] = []
        self.away: list[Job] = []
        self.seq = 0
        self.now = 0

    def enter(self, job: Job) -> None:
        job.state = State.WAITING
        self.waiting.append(job)
        self.ready.push(job)

    def leave(self, number: int) -> Job:
        job = self.waiting.pop(number % len(self.waiting))
        job.state = State.DELAYED
        self.ready.note_removed(job)
        return job

    @rule(
        step=st.integers(0, 2), priority=st.sampled_from((0, 0, 0, 1, -1)), lifo=st.sampled_from((False, False, True))
    )
    def push(self, step: int, priority: int, lifo: bool) -> None:
        self.seq += 1
        self.now += step
        self.enter(make(self.seq, priority=priority, lifo=lifo, run_at=self.now))

    @rule(count=st.integers(2, 5))
    def push_many(self, count: int) -> None:
        for _ in range(count):
            self.push(0, 0, False)

    @rule(back=st.integers(1, 5))
    def push_with_an_earlier_time(self, back: int) -> None:
        self.seq += 1
        self.enter(make(self.seq, run_at=max(0, self.now - back)))

    @rule()
    def pop(self) -> None:
        expected = min(self.waiting, key=rank, default=None)
        assert self.ready.peek() is expected
        assert self.ready.pop() is expected
        if expected is not None:
            self.waiting.remove(expected)
            expected.state = State.ACTIVE
            self.away.append(expected)

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 1000))
    def remove(self, number: int) -> None:
        self.leave(number).state = State.REMOVED

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 1000))
    def put_off(self, number: int) -> None:
        self.away.append(self.leave(number))

    @precondition(lambda self: self.away)
    @rule(number=st.integers(0, 1000), is_later=st.booleans())
    def come_back(self, number: int, is_later: bool) -> None:
        job = self.away.pop(number % len(self.away))
        if is_later:
            self.now += 1
            job.run_at = self.now
        self.enter(job)

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 1000), priority=st.sampled_from((0, 1)), lifo=st.booleans())
    def change(self, number: int, priority: int, lifo: bool) -> None:
        job = self.leave(number)
        job.priority = priority
        job.settings = LIFO if lifo else DEFAULT_SETTINGS
        self.enter(job)

    @invariant()
    def the_best_is_first(self) -> None:
        assert self.ready.peek() is min(self.waiting, key=rank, default=None)

    @invariant()
    def all_are_there_once(self) -> None:
        live = list(self.ready.live())
        assert sorted(job.seq for job in live) == sorted(job.seq for job in self.waiting)
        if self.ready.is_by_age:
            assert live == sorted(live, key=lambda job: (job.created, job.seq))


TestReadyOrder = ReadyMachine.TestCase
TestReadyOrder.settings = settings(max_examples=150, stateful_step_count=40)


class TestCompaction:
    def test_removed_jobs_do_not_pile_up(self) -> None:
        ready = ReadyOrder()
        jobs = [make(n, priority=n % 2) for n in range(20_000)]
        for job in jobs:
            ready.push(job)
        for job in jobs[:19_000]:
            job.state = State.REMOVED
            ready.note_removed(job)
        assert len(ready._fifo) + len(ready._heap) < 5000
        assert len(ready._void) < 5000
        left = []
        while (job := ready.pop()) is not None:
            left.append(job)
        assert left == sorted(jobs[19_000:], key=rank)

    def test_a_job_that_leaves_and_comes_back_stands_there_once(self) -> None:
        """Whenever the order is rebuilt: a job that stood there twice would be handed out twice by one pull."""
        order = ReadyOrder()
        jobs = [make(n, run_at=n) for n in range(1, 1501)]
        for job in jobs:
            order.push(job)
        for job in jobs[:1025]:
            order.note_removed(job)
            job.state = State.FAILED
        for job in jobs[:1025]:
            job.state, job.run_at = State.WAITING, 5000
            order.push(job)
        assert [job.seq for job in order.pop_plain(9999, 0)] == [*range(1026, 1501), *range(1, 1026)]

    def test_a_tail_that_is_put_off_does_not_send_others_to_the_heap(self) -> None:
        ready = ReadyOrder()
        first, second = make(1, run_at=1), make(2, run_at=2)
        ready.push(first)
        ready.push(second)
        second.state = State.DELAYED
        second.run_at = 10_000
        ready.note_removed(second)
        ready.push(make(3, run_at=3))
        assert not ready._heap


class TestManyAtOnce:
    def test_jobs_that_belong_behind_all_others_are_added(self) -> None:
        order = ReadyOrder()
        order.push(make(1, run_at=5))
        assert order.extend([make(2, run_at=5), make(3, run_at=5)])
        assert [job.seq for job in order.pop_plain(9, 0)] == [1, 2, 3]

    @pytest.mark.parametrize("newest", [{"seq": 1, "run_at": 6}, {"seq": 4, "run_at": 5}])
    def test_jobs_that_belong_before_another_one_are_not(self, newest: dict[str, int]) -> None:
        order = ReadyOrder()
        order.push(make(**newest))
        assert not order.extend([make(2, run_at=5), make(3, run_at=5)])
        assert [job.seq for job in order.pop_plain(9, 0)] == [newest["seq"]]


class TestDueOrder:
    @given(st.lists(st.integers(0, 50), max_size=60), st.integers(0, 60))
    @settings(max_examples=60)
    def test_jobs_fall_due_in_the_order_of_their_time(self, times: list[int], now: int) -> None:
        due = DueOrder()
        jobs = [make(n, run_at=at) for n, at in enumerate(times)]
        for job in jobs:
            job.state = State.DELAYED
            due.push(job)
        assert due.next_due() == min(times, default=None)
        expected = sorted((job for job in jobs if job.run_at <= now), key=lambda job: (job.run_at, job.seq))
        assert due.pop_due(now, 1000) == expected
        for job in expected:
            job.state = State.WAITING
        assert due.next_due() == min((at for at in times if at > now), default=None)

    def test_a_changed_time_counts_and_the_old_one_does_not(self) -> None:
        due, job = DueOrder(), make(1, run_at=10)
        job.state = State.DELAYED
        due.push(job)
        job.run_at = 50
        due.push(job)
        assert due.next_due() == 50
        assert due.pop_due(20, 10) == []
        assert due.pop_due(50, 10) == [job]

    def test_two_entries_of_one_job_are_one_job(self) -> None:
        due, job = DueOrder(), make(1, run_at=10)
        job.state = State.DELAYED
        due.push(job)
        due.push(job)
        assert due.pop_due(10, 10) == [job]
        assert due.next_due() is None

    def test_jobs_that_are_gone_do_not_pile_up(self) -> None:
        due = DueOrder()
        kept = [make(n, run_at=n) for n in range(10)]
        for job in kept:
            job.state = State.DELAYED
            due.push(job)
        for n in range(10, 20_000):
            job = make(n, run_at=10**12)
            job.state = State.DELAYED
            due.push(job)
            due.note_removed()
            job.state = State.REMOVED
        assert len(due._heap) < 2000
        assert due.pop_due(10**12, 100) == kept

    def test_the_limit_leaves_the_rest_for_later(self) -> None:
        due = DueOrder()
        jobs = [make(n, run_at=n) for n in range(10)]
        for job in jobs:
            job.state = State.DELAYED
            due.push(job)
        assert due.pop_due(100, 4) == jobs[:4]
        assert due.pop_due(100, 100) == jobs[4:]


def leased(seq: int) -> Job:
    job = make(seq)
    job.state = State.ACTIVE
    job.lease = Lease(seq, "t", "w", 1000, 0, None, 0, 0, 0, None)
    return job


class TestLeaseWheel:
    @given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
    @settings(max_examples=60)
    def test_nobody_is_early_and_nobody_more_than_a_grain_late(self, dues: list[int]) -> None:
        wheel = LeaseWheel(Alarm())
        jobs = {n: leased(n) for n in range(len(dues))}
        for n, due in enumerate(dues):
            wheel.add(jobs[n], due)
        for now in range(0, 5200, 32):
            for job in wheel.pop_due(now):
                due = dues[job.seq]
                assert due <= now <= due + 2 * wheel.GRAIN + 32
                del jobs[job.seq]
        assert not jobs
        assert wheel.next_due() is None

    def test_who_leaves_is_not_looked_at(self) -> None:
        wheel, staying, leaving = LeaseWheel(Alarm()), leased(1), leased(2)
        wheel.add(staying, 100)
        wheel.add(leaving, 100)
        wheel.discard(leaving)
        wheel.discard(leaving)
        assert wheel.pop_due(1000) == [staying]

    def test_an_empty_bucket_rings_no_alarm(self) -> None:
        wheel, early, late = LeaseWheel(Alarm()), leased(1), leased(2)
        wheel.add(early, 100)
        wheel.add(late, 10_000)
        wheel.discard(early)
        due = wheel.next_due()
        assert due is not None
        assert due >= 10_000

    def test_a_job_may_come_again_after_its_bucket_was_emptied(self) -> None:
        wheel, job = LeaseWheel(Alarm()), leased(1)
        wheel.add(job, 100)
        assert wheel.pop_due(200) == [job]
        wheel.add(job, 100)
        assert wheel.pop_due(200) == [job]


@pytest.mark.parametrize("state", [state for state in State if state is not State.REMOVED])
def test_every_state_has_its_place(state: State) -> None:
    assert list(Queue("q").jobs_in(state)) == []
