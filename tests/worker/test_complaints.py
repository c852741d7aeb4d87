"""What users of other queues complain about, a test for each that concerns workers and tasks.

The names give the row of the list of complaints. Rows that are answered elsewhere:

  3  also test_faults.test_all_jobs_complete_under_workers_that_are_killed_again_and_again
  5  also test_faults.test_a_network_that_breaks_every_second_makes_no_job_run_twice
  6  test_control.test_row_06_a_handler_that_blocks_the_loop_keeps_its_job_and_is_named
  9  also tests/unit/test_schedules.py
  16 also test_lifecycle.test_what_runs_after_the_drain_is_given_back_at_once
  18 an outbox is not part of this layer
  20 tests/typing: test_row_20_checkers_know_what_tasks_take_and_give
  21 tests/testing: test_row_21_drain_runs_jobs_through_middleware_lifespan_and_encoding, and its neighbours
  22 test_idle.test_row_22_an_idle_worker_says_nothing_but_that_it_lives
  23 test_idle.test_row_23_an_idle_worker_begins_a_job_within_two_milliseconds
  24 tests/packaging: test_row_24_every_other_module_can_be_imported_without_extras; and tests/interop
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import psutil
import pytest

from headrace import Dedup, Flow, Headrace, JobContext, JobFailed, RateLimit
from headrace.testing.bench import AppBench
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import until
from tests.worker.conftest import MakeApp
from tests.worker.steps import is_held_for
from tests.worker.workerprocess import Marks, WorkerProcess


async def test_row_01_a_job_longer_than_its_lease_and_one_with_a_delay_run_once(app: Headrace) -> None:
    runs: Counter[str] = Counter()

    @app.task()
    async def long(ctx: JobContext) -> None:
        runs["long"] += 1
        await is_held_for(app.client, ctx.id, 1.5)

    @app.task()
    async def delayed() -> None:
        runs["delayed"] += 1

    async with app.worker(lease=1), app.worker(lease=1):
        jobs = [await long.enqueue(), await delayed.options(delay=1.2).enqueue()]
        for job in jobs:
            assert await job.wait(timeout=10)
    assert runs == {"long": 1, "delayed": 1}


async def test_row_02_delayed_jobs_stay_in_the_store_and_a_worker_holds_no_more_than_it_runs(app: Headrace) -> None:
    gate = asyncio.Event()

    @app.task()
    async def work() -> None:
        await gate.wait()

    await work.options(delay=60).enqueue_many([()] * 500)
    await work.enqueue_many([()] * 500)
    worker = app.worker(concurrency=5)
    async with worker:
        await until(lambda: worker.figures.pulled >= 5)
        for _ in range(20):  # on the same link: what the worker may have asked for in between was answered before
            await app.queue().counts()
        assert worker.figures.pulled == 5
        counts = await app.queue().counts()
        assert (counts["active"], counts["waiting"], counts["delayed"]) == (5, 495, 500)
        gate.set()


async def test_row_03_a_job_survives_kill_9_of_its_worker(server: ServerProcess, marks: Marks) -> None:
    url = f"headrace://127.0.0.1:{server.port}"
    async with Headrace(url, queue=marks.queue) as app:
        with WorkerProcess(url, marks, "--lease", "500ms") as worker:
            job = await app.queue().add("work", {"args": [1, 1.0]})
            await until(lambda: marks.begun() == [1], 20)
            worker.kill()
        with WorkerProcess(url, marks):
            assert await job.result(timeout=20) == 1
        assert (await job.info()).attempts == 1


@pytest.mark.alone
async def test_row_04_recovery_takes_the_lease_and_not_the_time_limit(server: ServerProcess, marks: Marks) -> None:
    url = f"headrace://127.0.0.1:{server.port}"
    async with Headrace(url, queue=marks.queue) as app:
        with WorkerProcess(url, marks, "--lease", "500ms") as worker:
            job = await app.queue().add("work", {"args": [1, 30.0]}, timeout="2h")
            await until(lambda: marks.begun() == [1], 20)
            worker.kill()
            died = time.monotonic()
            await until(lambda: _waits(app, job.id), 10)
            assert time.monotonic() - died < 2.0


async def _waits(app: Headrace, job_id: str) -> bool:
    return await app.queue().job(job_id).state() == "waiting"


async def test_row_05_a_worker_goes_on_after_its_server_was_away(tmp_path: Path, marks: Marks) -> None:
    with ServerProcess(tmp_path / "headrace.db") as server:
        url = f"headrace://127.0.0.1:{server.port}"
        async with Headrace(url, queue=marks.queue) as app:
            with WorkerProcess(url, marks):
                for n in range(2):
                    job = await app.queue().add("work", {"args": [n]}, durable=True)
                    assert await job.result(timeout=20) == n
                    server.kill()
                    server.start()
                    await until(lambda: _is_reachable(app), 20)


async def _is_reachable(app: Headrace) -> bool:
    try:
        return bool(await app.queue().workers())
    except ConnectionError:
        return False


async def test_row_07_coroutines_and_plain_functions_are_tasks_alike(app: Headrace) -> None:
    @app.task()
    async def on_loop() -> bool:
        return threading.current_thread() is threading.main_thread()

    @app.task()
    def in_thread() -> bool:
        return threading.current_thread() is threading.main_thread()

    async with app.worker():
        assert await (await on_loop.enqueue()).result(timeout=10) is True
        assert await (await in_thread.enqueue()).result(timeout=10) is False


@pytest.mark.alone
async def test_row_08_a_worker_does_not_grow_with_the_jobs_it_has_done(server: ServerProcess, marks: Marks) -> None:
    url = f"headrace://127.0.0.1:{server.port}"
    jobs = scaled(4000, 100_000)
    async with Headrace(url, queue=marks.queue) as app:
        with WorkerProcess(url, Marks(Path("/dev/null"), marks.queue), "--concurrency", "100") as worker:
            sizes = []
            for _ in range(3):
                added = await app.queue().add_many([("work", {"args": [1]})] * jobs)
                assert await added[-1].wait(timeout=100)
                sizes.append(psutil.Process(worker.pid).memory_info().rss)
    assert sizes[2] - sizes[1] < 3_000_000


@pytest.mark.parametrize("last_day", [datetime(2040, 3, 24), datetime(2040, 10, 27)], ids=["gap", "repeated hour"])
async def test_row_09_a_nightly_job_runs_once_a_night_when_clocks_change(
    headrace_use: Callable[[Headrace], AppBench], last_day: datetime
) -> None:
    app = Headrace("memory://")

    @app.cron("30 2 * * *", tz="Europe/Berlin", overlap=True)
    async def nightly() -> None: ...

    bench = headrace_use(app)
    await bench.advance(last_day.replace(hour=12, tzinfo=ZoneInfo("Europe/Berlin")) - bench.now)
    await bench.enter_schedules()
    for _ in range(3):
        await bench.advance("1d")
        assert len(await bench.drain()) == 1


async def test_row_10_a_schedule_entered_by_two_workers_fires_once_per_slot(make_app: MakeApp) -> None:
    slots: Counter[int] = Counter()
    apps = [make_app(), make_app()]
    for app in apps:

        @app.cron(every=0.3)
        async def tick(ctx: JobContext) -> None:
            slots[int(ctx.info.created_at) // 150] += 1

    async with apps[0].worker(), apps[1].worker():
        await until(lambda: len(slots) >= 3)
    assert set(slots.values()) == {1}
    assert len(await apps[0].queue().schedules()) == 1


async def test_row_11_a_second_job_with_the_same_key_is_the_first_one(app: Headrace) -> None:
    @app.task()
    def work() -> None: ...

    first = await work.options(dedup="k").enqueue()
    assert await work.options(dedup="k").enqueue() == first
    assert await work.options(dedup=Dedup("other")).enqueue() != first


async def test_row_12_a_rate_limit_is_that_of_the_queue_and_not_of_each_worker(make_app: MakeApp) -> None:
    apps = [make_app() for _ in range(3)]
    for app in apps:

        @app.task()
        async def call() -> None: ...

    await apps[0].queue().limit_rate(RateLimit(2, per=0.2))
    async with apps[0].worker(), apps[1].worker(), apps[2].worker():
        jobs = await apps[0].tasks["call"].enqueue_many([()] * 7)
        for job in jobs:
            assert await job.wait(timeout=10)
        started = [(await job.info()).started_at or 0 for job in jobs]
    # 2 at once, then one every 100 ms: by the clock of the store, which hands them out.
    assert max(started) - min(started) >= 490


async def test_row_13_a_tenant_with_many_jobs_does_not_hold_up_the_others(app: Headrace) -> None:
    order: list[str] = []

    @app.task()
    async def work(tenant: str) -> None:
        order.append(tenant)

    await work.options(group="big").enqueue_many([("big",)] * 100)
    await work.options(group="small").enqueue("small")
    async with app.worker(concurrency=1, fair=True):
        await until(lambda: "small" in order)
    assert order.index("small") <= 2


async def test_row_14_an_urgent_job_overtakes_those_that_wait(app: Headrace) -> None:
    order: list[int] = []

    @app.task()
    async def work(n: int) -> None:
        order.append(n)

    for n, priority in enumerate((0, 1, 5, 3)):
        await work.options(priority=priority).enqueue(n)
    async with app.worker(concurrency=1):
        await until(lambda: len(order) == 4)
    assert order == [2, 3, 1, 0]


async def test_row_15_a_cancelled_job_stops_and_stays_cancelled_over_a_restart(tmp_path: Path, marks: Marks) -> None:
    with ServerProcess(tmp_path / "headrace.db") as server:
        url = f"headrace://127.0.0.1:{server.port}"
        async with Headrace(url, queue=marks.queue) as app:
            waiting = await app.queue().add("work", {"args": [1]}, delay=60)
            with WorkerProcess(url, marks, "--lease", "500ms"):
                running = await app.queue().add("work", {"args": [2, 30.0]})
                await until(lambda: marks.begun() == [2], 20)
                assert await waiting.cancel()
                assert await running.cancel(force=True)
                server.kill()
                server.start()
                job = await app.queue().add("work", {"args": [3]})
                assert await job.result(timeout=20) == 3
                assert [await running.state(), await waiting.state()] == ["unknown", "unknown"]
    assert marks.begun() == [2, 3]
    assert marks.ended() == [3]


async def test_row_16_a_deploy_neither_loses_nor_doubles_jobs(server: ServerProcess, marks: Marks) -> None:
    url = f"headrace://127.0.0.1:{server.port}"
    jobs, deploys = scaled(150, 2000), scaled(3, 15)
    async with Headrace(url, queue=marks.queue) as app:
        await app.queue().add_many([("work", {"args": [n, 0.1]}) for n in range(jobs)])
        for deploy in range(deploys):
            with WorkerProcess(url, marks, "--concurrency", "5") as worker:
                share = jobs * (deploy + 1) // (deploys + 2)
                await until(lambda share=share: len(marks.ended()) > share, 60)  # type: ignore[misc]
                assert worker.stop() == 0
        with WorkerProcess(url, marks) as worker:
            await until(lambda: len(marks.ended()) == jobs, 60)
            assert worker.stop() == 0
    assert Counter(marks.begun()) == Counter(range(jobs))


async def test_row_17_a_parent_always_hears_of_its_children(app: Headrace) -> None:
    @app.task(attempts=1)
    async def part(n: int) -> int:
        if n < 0:
            raise ValueError("broken")
        return n

    @app.task()
    async def total() -> str:
        return "together"

    async with app.worker():
        fine = await app.enqueue_flow(Flow(total.s(), [part.s(n) for n in range(50)]))
        assert await fine.job.result(timeout=20) == "together"
        broken = await app.enqueue_flow(Flow(total.s(), [part.s(1), part.s(-1)]))
        with pytest.raises(JobFailed):
            await broken.job.result(timeout=20)
        forgiving = await app.enqueue_flow(Flow(total.s(), [Flow(part.s(-1), on_failure="ignore"), part.s(1)]))
        assert await forgiving.job.result(timeout=20) == "together"


async def test_row_19_and_25_every_worker_has_a_record_of_its_own_that_goes_with_it(
    server: ServerProcess, marks: Marks
) -> None:
    url = f"headrace://127.0.0.1:{server.port}"
    async with Headrace(url, queue=marks.queue) as app:

        async def pids() -> set[int]:
            return {worker.pid for worker in await app.queue().workers()}

        with WorkerProcess(url, marks) as first, WorkerProcess(url, marks) as second:
            await until(lambda: _has(pids, {first.pid, second.pid}), 20)
            first.kill()
            await until(lambda: _has(pids, {second.pid}), 20)


async def _has(pids: object, wanted: set[int]) -> bool:
    return await pids() == wanted  # type: ignore[operator, no-any-return]
