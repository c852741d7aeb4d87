"""What steers running jobs: time limits, cancellation, groups, limits of the server, many queues, processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from headrace import Headrace, JobContext, JobFailed, Worker
from headrace.commands.queries import GetState
from tests.waiting import eventually, until
from tests.worker import handlers
from tests.worker.conftest import MakeApp
from tests.worker.steps import is_held_for, lines


@pytest.fixture
def process_app(server_app: Headrace, queue: str, monkeypatch: pytest.MonkeyPatch) -> Headrace:
    """The app with the tasks of `handlers`, which its children find there."""
    for task in handlers.app.tasks.values():
        monkeypatch.setattr(task, "app", server_app)
        monkeypatch.setattr(task, "queue", queue)
    server_app.tasks.update(handlers.app.tasks)
    return server_app


# -- time limits -------------------------------------------------------------------------------------------------------


async def test_an_async_handler_over_its_time_is_cancelled(app: Headrace) -> None:
    ends: list[str] = []

    @app.task(timeout=0.2, attempts=1)
    async def overlong() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async with app.worker():
        job = await overlong.enqueue()
        with pytest.raises(JobFailed, match=r"it ran longer than 0\.2 s|Job timeout exceeded"):
            await job.result(timeout=10)
        await until(lambda: ends == ["cancelled"])
    assert await job.state() == "failed"


async def test_a_thread_over_its_time_is_flagged_and_takes_no_place_from_others(app: Headrace) -> None:
    flagged, hangs = threading.Event(), threading.Event()

    @app.task(timeout=0.2, attempts=1)
    def overlong(ctx: JobContext) -> None:
        if ctx.wait_cancelled("20s"):
            flagged.set()
        hangs.wait(20)

    @app.task()
    def short() -> str:
        return "done"

    async with app.worker(concurrency=1):
        for _ in range(3):
            with pytest.raises(JobFailed, match=r"it ran longer|Job timeout exceeded"):
                await (await overlong.enqueue()).result(timeout=10)
        assert flagged.is_set()
        assert await (await short.enqueue()).result(timeout=5) == "done"
        hangs.set()


async def test_a_process_over_its_time_is_killed(process_app: Headrace, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with process_app.worker():
        job = await handlers.overlong.enqueue(str(marks))
        with pytest.raises(JobFailed, match=r"longer than 0\.5 s and was killed|Job timeout exceeded"):
            await job.result(timeout=20)
        await until(lambda: _is_gone(marks))


def _is_gone(marks: Path) -> bool:
    return not any(_lives(int(pid)) for pid in set(lines(marks)))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_timeout_of_the_handlers_own_is_a_plain_failure(app: Headrace) -> None:
    @app.task(timeout=5, attempts=1)
    async def impatient() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    async with app.worker():
        with pytest.raises(JobFailed, match=r"TimeoutError$"):
            await (await impatient.enqueue()).result(timeout=10)


async def test_a_job_timed_out_by_its_server_is_not_brought_back_by_its_worker(app: Headrace, queue: str) -> None:
    """A handler that was cancelled late must not give back a dead letter: that would make it run again."""
    runs: list[str] = []

    async def handle(job: JobContext) -> None:
        runs.append(job.id)
        # The loop is blocked, so that the limit here fires after that of the server.
        eventually(lambda: app.client.ask_blocking(GetState(id=job.id)).state == "failed")
        await asyncio.Event().wait()

    async with Worker(app.client, queue, handle, lease=1):
        job = await app.queue().add("j", timeout=0.2, attempts=1)
        assert await job.wait(timeout=10)
        await until(lambda: _has_ended_here(app, queue))
        assert await job.state() == "failed"
    assert await job.state() == "failed"
    assert len(runs) == 1


async def _has_ended_here(app: Headrace, queue: str) -> bool:
    return (await app.queue().counts())["active"] == 0


# -- cancellation ------------------------------------------------------------------------------------------------------


async def test_a_running_job_is_cancelled_by_force(app: Headrace) -> None:
    ends: list[str] = []
    began, flagged = threading.Event(), threading.Event()

    @app.task()
    async def on_loop() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    @app.task()
    def in_thread(ctx: JobContext) -> None:
        began.set()
        if ctx.wait_cancelled(20):
            flagged.set()

    worker = app.worker(lease=0.6)
    async with worker:
        job = await on_loop.enqueue()
        await until(began.is_set)
        assert await job.cancel() is False
        assert await job.cancel(force=True) is True
        await until(lambda: ends == ["cancelled"])
        began.clear()
        job = await in_thread.enqueue()
        await until(began.is_set)
        assert await job.cancel(force=True) is True
        await until(flagged.is_set)
        await until(lambda: worker.figures.lost == 2)
    assert await job.state() == "unknown"
    assert await app.queue().count() == 0


async def test_a_thread_whose_job_was_cancelled_takes_no_place_from_others(app: Headrace) -> None:
    began, hangs = threading.Event(), threading.Event()

    @app.task()
    def deaf() -> None:
        began.set()
        hangs.wait(20)

    @app.task()
    def short() -> str:
        return "done"

    async with app.worker(concurrency=1, lease=0.6):
        job = await deaf.enqueue()
        await until(began.is_set)
        assert await job.cancel(force=True)
        assert await (await short.enqueue()).result(timeout=5) == "done"
        hangs.set()


async def test_a_cancelled_job_in_a_process_is_killed(process_app: Headrace, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with process_app.worker(lease=0.6):
        job = await handlers.slow.enqueue(str(marks))
        await until(lambda: len(lines(marks)) > 2)
        assert await job.cancel(force=True)
        await until(lambda: _is_gone(marks))


async def test_a_program_that_a_job_in_a_process_has_started_is_killed_with_it(
    process_app: Headrace, tmp_path: Path
) -> None:
    """It would go on beside the next attempt, or after the worker has given the job back."""
    cancelled, given_back = tmp_path / "cancelled", tmp_path / "given back"
    async with process_app.worker(lease=0.6, drain=0):
        job = await handlers.run_program.enqueue(str(cancelled))
        await until(lambda: len(lines(cancelled)) == 2)
        assert await job.cancel(force=True)
        await until(lambda: _is_gone(cancelled))
        await handlers.run_program.enqueue(str(given_back))
        await until(lambda: len(lines(given_back)) == 2)
    await until(lambda: _is_gone(given_back))


async def test_a_job_cancelled_out_of_a_batch_leaves_the_others_running(app: Headrace, queue: str) -> None:
    gate = asyncio.Event()
    seen: list[list[bool]] = []

    async def handle(jobs: list[JobContext]) -> None:
        await gate.wait()
        seen.append([job.cancelled for job in jobs])

    jobs = await app.queue().add_many([("j", n) for n in range(3)])
    worker = Worker(app.client, queue, handle, batch=3, lease=6)  # a loaded machine must not cost the others theirs
    async with worker:
        await until(lambda: worker.figures.pulled == 3)
        assert await jobs[1].cancel(force=True)
        await until(lambda: worker.figures.lost == 1)
        gate.set()
        assert await jobs[0].wait(timeout=10)
        assert await jobs[2].wait(timeout=10)
    assert seen == [[False, True, False]]


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_a_long_job_keeps_its_lease_and_runs_once(app: Headrace, queue: str) -> None:
    runs: list[int] = []

    async def handle(job: JobContext) -> None:
        runs.append(job.attempt)
        await is_held_for(app.client, job.id, 1.5)

    async with Worker(app.client, queue, handle, lease=1), Worker(app.client, queue, handle, lease=1):
        job = await app.queue().add("j")
        assert await job.wait(timeout=10)
    assert runs == [1]
    assert (await job.info()).stall_count == 0


async def test_row_06_a_handler_that_blocks_the_loop_keeps_its_job_and_is_named(
    server_app: Headrace, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[str] = []
    sated = asyncio.Event()

    @server_app.task()
    async def greedy() -> None:
        runs.append("greedy")
        began = time.monotonic()
        eventually(lambda: time.monotonic() - began > 2.5)  # the loop is blocked: that is the point
        sated.set()

    @server_app.task()
    async def patient() -> None:
        await sated.wait()

    with caplog.at_level(logging.WARNING, "headrace.worker"):
        async with server_app.worker(lease=1):
            jobs = [await patient.enqueue(), await greedy.enqueue()]
            for job in jobs:
                assert await job.wait(timeout=20)
        await until(lambda: "blocked" in caplog.text)
    assert runs == ["greedy"]
    assert (await jobs[1].info()).stall_count == 0
    (warning,) = [record.getMessage() for record in caplog.records if "blocked" in record.getMessage()]
    assert "greedy" in warning.split(";")[0]
    assert "patient" not in warning.split(";")[0]
    assert "eventually(lambda: time.monotonic() - began > 2.5)" in warning


async def test_a_job_that_finds_no_slot_goes_to_a_worker_that_has_one(make_app: MakeApp, queue: str) -> None:
    """With one question waiting at each queue, a busy worker may be handed a job it has no slot for."""
    gate = asyncio.Event()
    done: list[str] = []

    async def busy(job: JobContext) -> None:
        if job.queue.endswith("a"):
            await gate.wait()
        done.append(f"busy {job.queue[-1]}")

    async def idle(job: JobContext) -> None:
        done.append(f"idle {job.queue[-1]}")

    app = make_app()
    names = [f"{queue}.a", f"{queue}.b"]
    first = Worker(app.client, names, busy, concurrency=1)
    async with first:
        await until(lambda: _waits(app, names))
        await app.queue(names[0]).add("j")
        await until(lambda: first.figures.pulled == 1)
        job = await app.queue(names[1]).add("j")
        async with Worker(app.client, names[1], idle):
            assert await job.wait(timeout=5)
            assert (await job.info()).attempts == 0
        gate.set()
    assert done == ["idle b", "busy a"]


async def _waits(app: Headrace, names: list[str]) -> bool:
    return all([await app.queue(name).workers() for name in names])


# -- limits and turns --------------------------------------------------------------------------------------------------


async def test_groups_take_turns_in_a_fair_worker(app: Headrace, queue: str) -> None:
    order: list[str] = []

    async def handle(job: JobContext) -> None:
        order.append(str(job.info.group_id))

    for group in ("loud", "quiet"):
        for _ in range(20 if group == "loud" else 3):
            await app.queue().add("j", group=group)
    async with Worker(app.client, queue, handle, concurrency=1, fair=True):
        await until(lambda: len(order) == 23)
    assert order[:6].count("quiet") == 3


async def test_a_group_has_at_most_its_share_of_a_worker(app: Headrace, queue: str) -> None:
    at_once: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def handle(job: JobContext) -> None:
        group = str(job.info.group_id)
        at_once[group] += 1
        most[group] = max(most[group], at_once[group])
        await asyncio.sleep(0.02)
        at_once[group] -= 1

    jobs = [await app.queue().add("j", group=group) for group in "ab" for _ in range(8)]
    async with Worker(app.client, queue, handle, concurrency=8, group_concurrency=2):
        for job in jobs:
            assert await job.wait(timeout=10)
    assert most == {"a": 2, "b": 2}


async def test_the_concurrency_of_a_queue_holds_over_workers(app: Headrace, queue: str) -> None:
    at_once, most = 0, 0

    async def handle(job: JobContext) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02)
        at_once -= 1

    await app.queue().limit_concurrency(3)
    jobs = await app.queue().add_many([("j", n) for n in range(30)])
    async with Worker(app.client, queue, handle), Worker(app.client, queue, handle):
        for job in jobs:
            assert await job.wait(timeout=10)
    assert most == 3


async def test_a_paused_queue_gives_nothing_until_it_is_resumed(app: Headrace, queue: str) -> None:
    async with Worker(app.client, queue, lambda job: "ran"):
        await app.queue().pause()
        job = await app.queue().add("j")
        assert not await job.wait(timeout=0.3)
        await app.queue().resume()
        assert await job.result(timeout=5) == "ran"


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_no_queue_of_many_starves(app: Headrace, queue: str, concurrency: int) -> None:
    """Two queues have hundreds of jobs; what is pushed to a third, found empty before, does not wait for their end."""
    order: list[str] = []

    async def handle(job: JobContext) -> None:
        order.append(job.queue[-1])
        await asyncio.sleep(0.002)

    names = [f"{queue}.{letter}" for letter in "abc"]
    for name in names[:2]:
        await app.queue(name).add_many([("j", None)] * 300)
    async with Worker(app.client, names, handle, concurrency=concurrency, drain=0.1):
        await until(lambda: len(order) > 40)
        job = await app.queue(names[2]).add("j")
        assert await job.wait(timeout=10)
        assert len(order) < 400
    assert min(order[:40].count("a"), order[:40].count("b")) >= 10


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_a_task_in_a_process_tells_and_returns_as_everywhere(process_app: Headrace) -> None:
    async with process_app.worker():
        job = await handlers.parsed.enqueue("4")  # type: ignore[call-arg, arg-type]
        assert await job.result(timeout=20) == [5, 1, True]
        info = await job.info()
        assert (info.progress, info.progress_message) == (50, "half")
        assert [log.message for log in await job.logs()] == ["from afar"]


async def test_how_processes_fail(process_app: Headrace) -> None:
    async with process_app.worker():
        jobs = [
            (await handlers.hopeless.enqueue(), "it is not there"),
            (await handlers.exits.enqueue(), r"process of the handler died \(exit code 3\)"),
            (await handlers.shot.enqueue(), r"process of the handler died \(exit code -9\)"),
            (await process_app.queue().add("parsed", {"args": ["x"]}, attempts=4), "argument 'number' of parsed"),
            (await handlers.known_by_another_name.enqueue(), r"_undecorated is the function and not its task"),
        ]
        for job, reason in jobs:
            with pytest.raises(JobFailed, match=reason):
                await job.result(timeout=20)
        assert (await jobs[3][0].info()).attempts == 1


async def test_processes_are_kept_and_renewed_after_so_many_jobs(process_app: Headrace) -> None:
    async with process_app.worker(concurrency=1, max_jobs_per_child=2):
        pids = [await (await handlers.process_id.enqueue()).result(timeout=20) for _ in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_a_process_that_was_killed_while_it_was_idle_costs_no_job_an_attempt(process_app: Headrace) -> None:
    async with process_app.worker(concurrency=1):
        pid = await (await handlers.process_id.enqueue()).result(timeout=20)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert await (await handlers.process_id.options(attempts=1).enqueue()).result(timeout=20) != pid
