"""What can be asked and told about one job, and waiting for its end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headrace.commands import jobs
from headrace.errors import JobFailed, JobTimeout, LeaseLost, NotFound, Refused
from tests.client.faces import bury, complete, pull


async def test_a_result_that_is_there_is_given_at_once(q: Any) -> None:
    job = await q.add("sum")
    await complete(q, {"sum": 3})
    assert await job.result() == {"sum": 3}
    assert (await job.info()).result == {"sum": 3}
    assert await job.wait(0) is True


async def test_a_result_is_waited_for(q: Any) -> None:
    job = await q.add("sum")
    waiting = asyncio.create_task(job.result("10s"))
    await complete(q, [1, 2])
    assert await waiting == [1, 2]


async def test_a_job_without_a_result_gives_none(q: Any) -> None:
    job = await q.add("sum")
    job_id, token = await pull(q)
    await q.call(jobs.Acknowledge(id=job_id, token=token))
    assert await job.result(5) is None


async def test_a_failure_is_raised_with_its_reason(q: Any) -> None:
    job = await q.add("sum")
    waiting = asyncio.create_task(job.result(10))
    await bury(q, "no such account")
    with pytest.raises(JobFailed, match="no such account") as failed:
        await waiting
    assert (failed.value.job_id, failed.value.reason) == (job.id, "no such account")
    assert await job.wait(0) is True
    with pytest.raises(JobFailed):
        await job.result(0)


async def test_a_job_that_takes_too_long_goes_on(q: Any) -> None:
    job = await q.add("sum")
    began = time.monotonic()
    with pytest.raises(JobTimeout, match="it goes on"):
        await job.result(0.2)
    assert 0.15 < time.monotonic() - began < 5
    assert await job.wait("100ms") is False
    await complete(q, "late")
    assert await job.result() == "late"


async def test_a_job_that_was_removed_has_no_result(q: Any) -> None:
    job = await q.add("sum", remove_on_complete=True)
    await complete(q, 1)
    with pytest.raises(NotFound):
        await job.result(1)


async def test_two_hundred_waits_hold_up_nobody(q: Any) -> None:
    added = await q.add_many([("n", number) for number in range(200)])
    waiting = [asyncio.create_task(job.result(20)) for job in added]
    other = [q.count() for _ in range(50)]
    async with asyncio.timeout(5):
        assert await asyncio.gather(*other) == [200] * 50
    assert not any(task.done() for task in waiting)
    for _ in added:
        await complete(q, "done")
    assert await asyncio.gather(*waiting) == ["done"] * 200


async def test_a_caller_that_gives_up_waiting_leaves_the_job_alone(q: Any) -> None:
    job = await q.add("sum")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await job.wait(0.3)
    assert await job.state() == "waiting"


async def test_lines_are_logged_in_order(q: Any) -> None:
    job = await q.add("sum")
    await job.log("began")
    await job.log("odd", level="warn")
    await job.log("loud", level="shout")
    lines = [(line.message, line.level) for line in await job.logs()]
    assert lines == [("began", "info"), ("odd", "warn"), ("loud", "info")]


async def test_progress_of_a_running_job_is_seen(q: Any) -> None:
    job = await q.add("sum")
    await pull(q)
    await job.set_progress(40, "nearly")
    info = await job.info()
    assert (info.progress, info.progress_message, info.state) == (40, "nearly", "active")


async def test_a_job_that_has_not_begun_is_cancelled(q: Any) -> None:
    job = await q.add("sum")
    assert await job.cancel() is True
    assert await job.state() == "unknown"
    with pytest.raises(NotFound, match=f"Job not found: {job.id}"):
        await job.cancel()


async def test_a_job_that_runs_is_too_late_to_cancel(q: Any) -> None:
    job = await q.add("sum")
    await pull(q)
    assert await job.cancel() is False
    assert await job.state() == "active"


async def test_a_delayed_job_is_promoted_or_put_off(q: Any) -> None:
    job = await q.add("sum", delay="1h")
    await job.set_delay("2h")
    info = await job.info()
    assert info.run_at - time.time() * 1000 == pytest.approx(7_200_000, abs=10_000)
    await job.promote()
    assert await job.state() == "waiting"


async def test_a_waiting_job_is_changed(q: Any) -> None:
    job = await q.add("sum", {"x": 1})
    await job.update({"x": 2})
    await job.set_priority(9)
    info = await job.info()
    assert (info.data, info.priority) == ({"x": 2}, 9)


async def test_a_job_is_made_a_dead_letter_and_retried(q: Any) -> None:
    job = await q.add("sum")
    await job.discard()
    assert await job.state() == "failed"
    await job.retry()
    assert await job.state() == "waiting"
    with pytest.raises(NotFound, match="is no dead letter of"):
        await job.retry()


async def test_a_handle_needs_no_question(q: Any) -> None:
    job = await q.add("sum", 5)
    assert (await q.job(job.id).info()).data == 5
    assert q.job(job.id) == job
    assert await q.job("nobody").state() == "unknown"


async def test_errors_are_of_the_same_kind_everywhere(q: Any) -> None:
    with pytest.raises(NotFound, match="Job not found"):
        await q.job("nobody").info()
    with pytest.raises(NotFound):
        await q.job("nobody").result(1)
    job = await q.add("sum")
    with pytest.raises(Refused, match="not active") as refused:
        await job.set_progress(1)
    assert type(refused.value) is Refused
    job_id, _ = await pull(q)
    with pytest.raises(LeaseLost, match="Invalid or expired lock token"):
        await q.call(jobs.Acknowledge(id=job_id, token="another"))
    with pytest.raises(Refused, match="not delayed"):
        await job.promote()
