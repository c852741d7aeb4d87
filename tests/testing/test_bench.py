"""The fixture headrace_app: a real engine in memory under the user's app, with time that stands still."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from headrace import Backoff, Dedup, Flow, Headrace, JobFailed, JobTimeout
from headrace.errors import HeadraceError
from headrace.testing.bench import AppBench
from tests.testing import shop
from tests.testing.shop import Order, for_ever, nightly, pack, pid, place, send, slow, sweep, thread_time


@pytest.fixture
def headrace_app(headrace_use: Callable[[Headrace], AppBench]) -> AppBench:
    shop.seen.clear()
    return headrace_use(shop.app)


# -- what was put in ---------------------------------------------------------------------------------------------------


async def test_calls_are_told_with_arguments_and_options(headrace_app: AppBench) -> None:
    await send.enqueue("a@b.c", subject="x")
    await send.options(delay="10m", priority=9, dedup=Dedup("k")).enqueue(to="d@e.f")
    first, second = headrace_app.enqueued(send)
    assert (first.args, first.kwargs) == (("a@b.c",), {"subject": "x"})
    assert first.options == {"timeout": 30, "backoff": Backoff("exponential", 10, 300)}
    assert (second.args, second.kwargs) == (("d@e.f",), {})
    assert second.options.items() >= {"delay": 600, "priority": 9, "dedup": "k"}.items()


@pytest.mark.parametrize("once", [True, 3600])
async def test_once_is_told_as_it_was_said(headrace_app: AppBench, once: bool | int) -> None:
    await send.options(job_id="a", once=once).enqueue("a@b.c")
    assert headrace_app.enqueued(send)[0].options["once"] == once


async def test_arguments_come_back_as_the_types_of_the_task(headrace_app: AppBench) -> None:
    await pack.enqueue(Order(7, ["tea"]))
    assert headrace_app.enqueued(pack)[0].args == (Order(7, ["tea"]),)


async def test_batches_flows_and_plain_jobs_are_told_too(headrace_app: AppBench) -> None:
    await send.enqueue_many([("a",), {"to": "b"}])
    tree = await shop.app.enqueue_flow(Flow(pack.s(Order(1, [])), children=[send.s("c")]))
    await shop.orders_queue.add("raw", {"n": 1})
    assert [call.args for call in headrace_app.enqueued(send)] == [("a",), ("b",), ("c",)]
    assert headrace_app.enqueued(pack)[0].job_id == tree.job.id
    assert headrace_app.enqueued()[-1].data == {"n": 1}


async def test_what_was_refused_is_not_told(headrace_app: AppBench) -> None:
    with pytest.raises(HeadraceError):
        await send.options(priority=10**9).enqueue("a")
    assert headrace_app.enqueued() == []


# -- running -----------------------------------------------------------------------------------------------------------


async def test_row_21_drain_runs_jobs_through_middleware_lifespan_and_encoding(headrace_app: AppBench) -> None:
    job = await pack.enqueue(Order(7, ["tea", "cups"]))
    (run,) = await headrace_app.drain()
    assert (run.job_id, run.name, run.error) == (job.id, "pack", None)
    assert await job.result() == "7: tea, cups (open)"
    assert shop.seen == ["pack 1"]
    assert [log.message for log in await job.logs()] == ["packed"]


async def test_drain_also_runs_what_becomes_ready_by_it(headrace_app: AppBench) -> None:
    job = await place.enqueue(Order(1, []))
    assert [run.name for run in await headrace_app.drain()] == ["place", "pack"]
    assert headrace_app.enqueued(pack)[0].job_id == await job.result()


async def test_a_parent_runs_after_its_children(headrace_app: AppBench) -> None:
    await shop.app.enqueue_flow(Flow(pack.s(Order(1, [])), children=[send.s("a"), send.s("b")]))
    assert [run.name for run in await headrace_app.drain()] == ["send", "send", "pack"]


async def test_drain_of_one_queue_leaves_the_others_alone(headrace_app: AppBench) -> None:
    await send.enqueue("a")
    await pack.enqueue(Order(1, []))
    assert [run.name for run in await headrace_app.drain("emails")] == ["send"]


async def test_a_task_that_enqueues_itself_for_ever_is_stopped(headrace_app: AppBench) -> None:
    await for_ever.enqueue()
    with pytest.raises(HeadraceError, match="20 jobs ran and 'for_ever' is still ready"):
        await headrace_app.drain(limit=20)
    assert (await shop.orders_queue.counts())["waiting"] == 1


async def test_a_handler_that_takes_too_long_fails(headrace_app: AppBench) -> None:
    await slow.enqueue()
    (run,) = await headrace_app.drain()
    assert isinstance(run.error, TimeoutError)


async def test_process_and_thread_tasks_leave_nothing_behind(headrace_app: AppBench) -> None:
    before = set(threading.enumerate())
    jobs = [await pid.enqueue(), await thread_time.enqueue()]
    await headrace_app.drain()
    child, _ = [await job.result() for job in jobs]
    assert child != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)
    assert set(threading.enumerate()) == before


async def test_a_job_that_is_removed_while_it_runs_does_not_end_the_drain(
    headrace_app: AppBench, caplog: pytest.LogCaptureFixture
) -> None:
    job = await sweep.enqueue()
    assert [(run.name, run.error) for run in await headrace_app.drain()] == [("sweep", None), ("send", None)]
    assert await job.state() == "unknown"
    assert f"the outcome of job {job.id} was too late" in caplog.text


async def test_an_unknown_task_is_a_dead_letter_as_in_production(headrace_app: AppBench) -> None:
    job = await shop.orders_queue.add("no-such-task")
    await headrace_app.drain()
    with pytest.raises(JobFailed, match="unknown task 'no-such-task'"):
        await job.result()


# -- time --------------------------------------------------------------------------------------------------------------


async def test_nothing_delayed_runs_before_its_time(headrace_app: AppBench) -> None:
    job = await send.options(delay="1h").enqueue("a")
    await headrace_app.advance("59m")
    assert await headrace_app.drain() == []
    await headrace_app.advance("1m")
    assert [run.job_id for run in await headrace_app.drain()] == [job.id]


@pytest.mark.parametrize("earlier", [None, "3d"])
async def test_moments_are_those_of_the_bench(headrace_app: AppBench, earlier: str | None) -> None:
    if earlier is not None:
        await headrace_app.advance(earlier)
    await send.schedule(headrace_app.now + timedelta(hours=1), "a")
    await headrace_app.advance("59m")
    assert await headrace_app.drain() == []
    await headrace_app.advance("1m")
    assert len(await headrace_app.drain()) == 1


async def test_code_under_test_may_read_the_real_time(headrace_app: AppBench) -> None:
    await send.schedule(datetime.now(UTC) + timedelta(hours=1), "a")
    await headrace_app.advance("1h")
    assert len(await headrace_app.drain()) == 1


async def test_retries_come_after_their_backoff_and_end_in_a_failure(headrace_app: AppBench) -> None:
    job = await send.enqueue("a", subject="spam")
    runs = await headrace_app.drain()
    assert await headrace_app.drain() == []
    for _ in range(2):
        await headrace_app.advance("1m")
        runs += await headrace_app.drain()
    assert [(run.attempt, str(run.error)) for run in runs] == [(n, "nobody wants this") for n in (1, 2, 3)]
    with pytest.raises(JobFailed, match="ValueError: nobody wants this"):
        await job.result()


async def test_schedules_fire_at_every_time_that_is_crossed(headrace_app: AppBench) -> None:
    noon = datetime(2040, 7, 2, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    await headrace_app.advance(noon - headrace_app.now)
    await headrace_app.enter_schedules()
    await headrace_app.advance("14h29m")
    assert await headrace_app.drain() == []
    await headrace_app.advance("1m")
    assert [run.name for run in await headrace_app.drain()] == [nightly.name]
    await headrace_app.advance("72h")
    assert [run.name for run in await headrace_app.drain()] == [nightly.name] * 3


async def test_schedules_do_not_disturb_tests_that_did_not_ask_for_them(headrace_app: AppBench) -> None:
    await headrace_app.advance("2d")
    assert await headrace_app.drain() == []


async def test_a_lease_runs_out_when_its_time_has_passed(headrace_app: AppBench) -> None:
    from headrace.commands.jobs import Pull

    await send.enqueue("a")
    await shop.app.call(Pull(queue="emails", owner="dead", lock_ttl=30_000, detach=True))
    assert await headrace_app.drain() == []
    await headrace_app.advance("2m")
    assert len(await headrace_app.drain()) == 1


async def test_a_quarter_with_a_schedule_passes_quickly(headrace_app: AppBench) -> None:
    await headrace_app.enter_schedules()
    await headrace_app.advance("90d")
    assert len(await headrace_app.drain()) in (90, 91)


# -- waiting -----------------------------------------------------------------------------------------------------------


async def test_waiting_for_a_job_that_nobody_runs_ends_with_advice(headrace_app: AppBench) -> None:
    job = await send.enqueue("a")
    with pytest.raises(JobTimeout, match=r"no worker runs: drain\(\) runs what is ready"):
        await job.result()


async def test_a_wait_with_a_timeout_ends_in_real_time(headrace_app: AppBench) -> None:
    job = await send.enqueue("a")
    assert await job.wait(timeout="100ms") is False


async def test_a_real_worker_may_run_on_the_bench(headrace_app: AppBench) -> None:
    async with shop.app.worker(["emails"]):
        job = await send.enqueue("a@b.c")
        assert await job.result(timeout=10) == 5
        delayed = await send.options(delay="1h").enqueue("a@b")
        await headrace_app.advance("1h")
        assert await delayed.result(timeout=10) == 3


# -- tests without a loop, and the app itself --------------------------------------------------------------------------


def test_plain_tests_have_the_same_bench(headrace_app: AppBench) -> None:
    with shop.app.sync() as app:
        job = app.enqueue(send.options(delay="1h"), "a@b.c")
        assert headrace_app.sync.drain() == []
        headrace_app.sync.advance("1h")
        assert len(headrace_app.sync.drain()) == 1
        assert job.result() == 5


async def test_the_sync_bench_refuses_to_run_inside_a_loop(headrace_app: AppBench) -> None:
    with pytest.raises(HeadraceError, match="here await"):
        headrace_app.sync.drain()


async def test_entering_and_leaving_the_app_keeps_the_bench(headrace_app: AppBench) -> None:
    async with shop.app:
        await send.enqueue("a")
    await send.enqueue("b")
    assert len(await headrace_app.drain()) == 2


async def test_every_bench_begins_empty(headrace_app: AppBench) -> None:
    assert headrace_app.enqueued() == []
    assert await shop.app.queues() == []


def test_afterwards_the_app_has_its_own_url_again(
    headrace_use: Callable[[Headrace], AppBench], tmp_path: object
) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    with app.sync() as real:
        real.queue("q").add("kept")
        bench = headrace_use(app)
        real.queue("q").add("only in the test")
        assert [job.name for job in bench.enqueued()] == ["only in the test"]
