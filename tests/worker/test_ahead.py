"""A worker with few slots takes several short jobs at a time: they run one by one, and none is kept from others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from headrace import Headrace, JobContext, Worker
from headrace.client.job import Job
from headrace.worker.attendant import Attendant, Holding
from tests.waiting import until
from tests.worker.conftest import MakeApp

JOBS = 200
SLOW = JOBS // 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many jobs workers have asked each time."""
    asked: list[int] = []
    pull = Attendant._pull

    def noted(attendant: Attendant, queue: str, count: int, wait: int) -> None:
        asked.append(count)
        pull(attendant, queue, count, wait)

    monkeypatch.setattr(Attendant, "_pull", noted)
    return asked


@pytest.mark.alone  # how far a worker asks ahead depends on how long jobs take
async def test_one_slot_runs_short_jobs_in_order_and_one_at_a_time_with_few_questions(
    app: Headrace, asked: list[int]
) -> None:
    ran: list[int] = []
    running, most = 0, 0

    @app.task()
    async def short(n: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        ran.append(n)
        running -= 1

    await short.enqueue_many([{"n": n} for n in range(JOBS)])
    async with app.worker(concurrency=1) as worker:
        await until(lambda: worker.figures.completed == JOBS)
    assert most == 1
    assert ran == list(range(JOBS))
    assert len(asked) < JOBS / 2
    assert asked[0] == 1
    assert max(asked) <= 8


async def test_one_quick_job_among_long_ones_takes_no_others_along(app: Headrace, asked: list[int]) -> None:
    async def handle(job: JobContext) -> None:
        if job.data != 10:
            await asyncio.sleep(0.02)

    queue = app.queue()
    await queue.add_many([("job", n) for n in range(20)])
    async with Worker(app.client, queue.name, handle, concurrency=1) as worker:
        await until(lambda: worker.figures.completed == 20)
    assert set(asked) == {1}


async def test_jobs_behind_one_that_takes_long_go_to_an_idle_worker(app: Headrace, make_app: MakeApp) -> None:
    release, ran = asyncio.Event(), Counter[str]()
    queue, other = app.queue(), make_app()

    async def first(job: JobContext) -> None:
        ran["first"] += 1
        if job.data["n"] == SLOW:
            await release.wait()

    async def second(job: JobContext) -> None:
        ran["second"] += 1

    await queue.add_many([("job", {"n": n}) for n in range(JOBS)])
    async with Worker(app.client, queue.name, first, concurrency=1):
        await until(lambda: ran["first"] == SLOW + 1)
        async with Worker(other.client, queue.name, second, concurrency=1):
            await until(lambda: ran.total() == JOBS)
        release.set()
    assert ran == {"first": SLOW + 1, "second": JOBS - SLOW - 1}


@pytest.mark.parametrize("slow", [50, 53, 56, 59])
async def test_the_outcome_of_a_job_is_told_while_the_next_one_blocks_the_loop(slow: int, tmp_path: Path) -> None:
    """Whichever of the jobs in hand it is, the last one included."""
    release, ran = threading.Event(), []
    app = Headrace(f"memory://{tmp_path.name}")

    @app.task()
    async def short(n: int) -> None:
        if n == slow:
            release.wait(20)
        ran.append(n)

    async def work() -> None:
        async with app.worker(concurrency=1):
            await until(lambda: len(ran) == JOBS, 30)

    async def is_waiting(job: Job[Any]) -> bool:
        return bool(await job.state() == "waiting")

    jobs = await short.enqueue_many([{"n": n} for n in range(JOBS)])
    working = asyncio.create_task(asyncio.to_thread(asyncio.run, work()))
    try:
        assert await jobs[slow - 1].wait(timeout=10)
        assert await jobs[slow].state() == "active"
        await until(lambda: is_waiting(jobs[slow + 1]))
    finally:
        release.set()
        await working
        await app.close()
    assert sorted(ran) == list(range(JOBS))


async def test_a_job_that_is_lost_before_it_takes_its_first_step_gives_its_slot_back(tmp_path: Path) -> None:
    class Hasty(Worker):
        """Hears that a job is lost in the moment in which it begins."""

        def _spawn(self, holdings: list[Holding]) -> None:
            super()._spawn(holdings)
            if holdings[0].info.data == 0:
                self._abandon(holdings[0].info.id)
                holdings[0].info.data = 1

    ran: list[int] = []

    async def handle(job: JobContext) -> None:
        ran.append(job.data)
        await asyncio.sleep(0)

    async with Headrace(f"memory://{tmp_path.name}") as app, Hasty(app.client, "q", handle, concurrency=1):
        for n in (0, 2, 3):
            await app.queue("q").add("job", n)
        await until(lambda: {2, 3} <= set(ran))


async def test_what_a_job_tells_goes_out_before_its_outcome_even_if_the_line_looks_just_then(tmp_path: Path) -> None:
    app = Headrace(f"memory://{tmp_path.name}")
    looking = threading.Event()

    def look_when_it_has_ended() -> None:
        """As the line does when it settles another job in the moment in which this one ends."""
        looking.set()
        deadline = time.monotonic() + 10
        while not attendant._ended and time.monotonic() < deadline:
            time.sleep(0.001)
        attendant._settle()

    async def handle(job: JobContext) -> None:
        app.client.line.post(look_when_it_has_ended)
        assert looking.wait(10)
        job.progress(50, "half")

    async with app, Worker(app.client, "q", handle, concurrency=1) as worker:
        await worker.ready.wait()
        assert worker._attendant is not None
        attendant = worker._attendant
        job = await app.queue("q").add("job")
        await job.result(timeout=20)
        assert (await job.info()).progress_message == "half"


async def test_what_comes_after_the_stop_is_not_seen_where_handlers_run(tmp_path: Path) -> None:
    seen: list[Holding] = []

    async def handle(job: JobContext) -> None:
        raise AssertionError

    class Watched(deque[Holding]):
        def extend(self, new: Iterable[Holding]) -> None:
            super().extend(new)
            seen.extend(self)  # as a handler that ends just now would

    async with Headrace(f"memory://{tmp_path.name}") as app, Worker(app.client, "q", handle) as worker:
        await worker.ready.wait()
        attendant = worker._attendant
        assert attendant is not None
        attendant._ready = Watched()
        await until(lambda: bool(attendant._asked))
        worker.stop_pulling()
        job = await app.queue("q").add("job")
        await until(lambda: worker.figures.pulled == 1 and not attendant._held)
        assert await job.state() == "waiting"
    assert not seen
