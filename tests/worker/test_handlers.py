"""Workers with a handler of their own: where it runs, what it is given, what becomes of how it ends."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from headrace import (
    Backoff,
    Headrace,
    HeadraceError,
    JobContext,
    JobFailed,
    RetryLater,
    UnrecoverableError,
    Worker,
    current_job,
)
from headrace.errors import InvalidCommand
from headrace.worker.failures import stack_of
from tests.waiting import until
from tests.worker import handlers


async def test_an_async_handler_runs_on_the_loop_and_its_result_comes_back(app: Headrace, queue: str) -> None:
    threads: list[int] = []

    async def handle(job: JobContext) -> dict[str, Any]:
        threads.append(threading.get_ident())
        await asyncio.sleep(0)
        return {"doubled": job.data["n"] * 2, "name": job.name, "attempt": job.attempt}

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("twice", {"n": 21})
        assert await job.result(timeout=10) == {"doubled": 42, "name": "twice", "attempt": 1}
    assert threads == [threading.get_ident()]


async def test_a_plain_handler_runs_in_a_thread_and_holds_up_nobody(app: Headrace, queue: str) -> None:
    together = threading.Barrier(3)

    def handle(job: JobContext) -> bool:
        together.wait(10)
        return threading.current_thread() is not threading.main_thread() and current_job() is job

    async with Worker(app.client, queue, handle, concurrency=3):
        jobs = [await app.queue().add("j") for _ in range(3)]
        assert [await job.result(timeout=10) for job in jobs] == [True] * 3


async def test_a_handler_by_name_runs_in_a_process(app: Headrace, queue: str) -> None:
    async with Worker(app.client, queue, handlers.double, run_in="process"):
        job = await app.queue().add("double", 4)
        assert await job.result(timeout=20) == 8


async def test_what_a_job_sets_in_context_variables_is_nothing_to_the_next_one(app: Headrace, queue: str) -> None:
    worker_says: ContextVar[str] = ContextVar("worker_says")
    job_says: ContextVar[str] = ContextVar("job_says", default="nothing")
    seen: list[tuple[str, str]] = []

    async def handle(job: JobContext) -> None:
        seen.append((worker_says.get(), job_says.get()))
        job_says.set(job.name)

    worker_says.set("hello")
    jobs = await app.queue().add_many([("j", n) for n in range(5)])
    async with Worker(app.client, queue, handle, concurrency=2):
        for job in jobs:
            assert await job.wait(timeout=10)
    assert seen == [("hello", "nothing")] * 5


async def test_what_a_job_in_a_process_sets_in_context_variables_is_nothing_to_the_next_one(
    app: Headrace, queue: str
) -> None:
    async with Worker(app.client, queue, handlers.leave_word, run_in="process", concurrency=1):
        words = [await (await app.queue().add("j")).result(timeout=20) for _ in range(2)]
    assert words == ["nothing", "nothing"]


async def test_a_process_that_said_something_odd_gives_each_job_its_own_result(app: Headrace, queue: str) -> None:
    """Nothing that a handler passes to its context may part the questions of its process from the answers."""
    async with Worker(app.client, queue, handlers.say_odd_things, run_in="process", concurrency=1):
        jobs = [await app.queue().add("j", n, attempts=1) for n in range(3)]
        assert [await job.result(timeout=20) for job in jobs] == [0, 1, 2]
        assert [log.message for log in await jobs[2].logs()] == ["2"]


async def test_a_log_line_that_is_refused_is_told_where_the_worker_runs(
    app: Headrace, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(job: JobContext) -> None:
        job.log("opened", 5)  # type: ignore[arg-type]

    async with Worker(app.client, queue, handle):
        assert await (await app.queue().add("j")).wait(timeout=10)
        await until(lambda: "a log line of a job was refused" in caplog.text)


async def test_what_a_process_could_not_find_is_refused_at_once(app: Headrace, queue: str) -> None:
    def local(job: JobContext) -> None: ...

    with pytest.raises(InvalidCommand, match="top of a module"):
        Worker(app.client, queue, local, run_in="process")


async def test_a_batch_handler_gets_many_jobs_and_answers_each(app: Headrace, queue: str) -> None:
    sizes: list[int] = []

    async def handle(jobs: list[JobContext]) -> list[Any]:
        sizes.append(len(jobs))
        return [ValueError("odd") if job.data % 2 else job.data * 10 for job in jobs]

    added = await app.queue().add_many([("j", n) for n in range(40)])
    async with Worker(app.client, queue, handle, batch=20, concurrency=5):
        assert [await job.result(timeout=10) for job in added[::2]] == [n * 10 for n in range(0, 40, 2)]
    assert max(sizes) == 20
    info = await added[1].info()
    assert (info.attempts, info.failed_reason) == (1, "ValueError: odd")


@pytest.mark.parametrize("answer", [[1], "raise", {1: object()}])
async def test_a_batch_handler_that_answers_wrongly_fails_its_jobs(app: Headrace, queue: str, answer: Any) -> None:
    async def handle(jobs: list[JobContext]) -> Any:
        if answer == "raise":
            raise RuntimeError("no database")
        return answer if len(jobs) == 2 and isinstance(answer, list) else [answer] * len(jobs)

    jobs = [await app.queue().add("j", attempts=1) for _ in range(2)]
    async with Worker(app.client, queue, handle, batch=2):
        for job in jobs:
            with pytest.raises(JobFailed):
                await job.result(timeout=10)


async def test_a_failed_job_is_tried_again_after_its_backoff(app: Headrace, queue: str) -> None:
    tries: list[tuple[int, bool, float]] = []

    async def handle(job: JobContext) -> str:
        tries.append((job.attempt, job.is_last_attempt, asyncio.get_running_loop().time()))
        if job.attempt < 3:
            raise ConnectionError("not yet")
        return "at last"

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("j", attempts=3, backoff=Backoff.fixed(0.1))
        assert await job.result(timeout=10) == "at last"
    assert [attempt[:2] for attempt in tries] == [(1, False), (2, False), (3, True)]
    assert all(later[2] - earlier[2] > 0.04 for earlier, later in itertools.pairwise(tries))


async def test_a_job_out_of_attempts_is_a_dead_letter_with_reason_and_stack(app: Headrace, queue: str) -> None:
    def handle(job: JobContext) -> None:
        raise ValueError("no such order")

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("j", attempts=1)
        with pytest.raises(JobFailed, match="ValueError: no such order") as failed:
            await job.result(timeout=10)
    assert failed.value.reason == "ValueError: no such order"
    info = await job.info()
    assert info.stacktrace is not None
    assert any("in handle: raise ValueError" in line for line in info.stacktrace)
    assert not any("headrace/worker" in line for line in info.stacktrace)
    (letter,) = await app.queue().dlq.list()
    assert letter.error == "ValueError: no such order"


async def test_a_failure_deep_below_a_handler_keeps_the_lines_where_it_happened(app: Headrace, queue: str) -> None:
    def descend(steps: int) -> None:
        if steps == 0:
            raise ValueError("at the bottom\nof it all")
        descend(steps - 1)

    async with Worker(app.client, queue, lambda job: descend(30)):
        stack = await _stack_of_failed(await app.queue().add("j", attempts=1))
    assert len(stack) == 10
    assert stack[-1] == "ValueError: at the bottom"
    assert 'in descend: raise ValueError("at the bottom' in stack[-2]


async def test_a_failure_of_a_group_of_tasks_says_what_failed_in_it(app: Headrace, queue: str) -> None:
    async def call_bank() -> None:
        raise ConnectionError("the bank does not answer")

    async def handle(job: JobContext) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(call_bank())

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("j", attempts=1)
        stack = await _stack_of_failed(job)
    assert (await job.info()).failed_reason == stack[-1]
    assert stack[-1].endswith("(1 sub-exception): ConnectionError: the bank does not answer")
    assert any("in call_bank: raise ConnectionError" in line for line in stack)


async def test_what_led_to_an_error_is_told_before_it(app: Headrace, queue: str) -> None:
    async def handle(job: JobContext) -> None:
        try:
            job.data["amount"]
        except KeyError as error:
            raise RuntimeError("no such order") from error

    async with Worker(app.client, queue, handle):
        stack = await _stack_of_failed(await app.queue().add("j", {}, attempts=1))
    assert [line for line in stack if " in handle: " not in line] == [
        "KeyError: 'amount'",
        "RuntimeError: no such order",
    ]
    assert stack[0].endswith('in handle: job.data["amount"]')


def test_errors_that_led_to_each_other_are_told_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, ExceptionGroup("both", [first, second])
    assert stack_of(first, 10)[-1] == "ValueError: first"


async def _stack_of_failed(job: Any) -> list[str]:
    assert await job.wait(timeout=10)
    return (await job.info()).stacktrace or []


@pytest.mark.parametrize("run_in", ["thread", "process"])
async def test_a_handler_may_say_when_the_next_attempt_is_due(app: Headrace, queue: str, run_in: Any) -> None:
    async with Worker(app.client, queue, handlers.come_back_in_an_hour, run_in=run_in):
        job = await app.queue().add("j", attempts=2, backoff=Backoff("fixed", 0.001))
        await until(lambda: _is_delayed(job))
    info = await job.info()
    assert (info.attempts, info.failed_reason) == (1, "the bank is closed")
    assert 3_500_000 < info.run_at - info.created_at < 3_700_000


def test_a_time_in_the_past_is_no_time_to_retry() -> None:
    with pytest.raises(InvalidCommand, match="after"):
        RetryLater(after=-1)


async def _is_delayed(job: Any) -> bool:
    return (await job.info()).state == "delayed"


async def test_an_unrecoverable_error_is_not_tried_again(app: Headrace, queue: str) -> None:
    tries = []

    async def handle(job: JobContext) -> None:
        tries.append(job.id)
        raise UnrecoverableError("the order was withdrawn")

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("j", attempts=5)
        with pytest.raises(JobFailed, match="the order was withdrawn"):
            await job.result(timeout=10)
    assert len(tries) == 1


async def test_sys_exit_in_a_handler_fails_the_job_and_not_the_worker(app: Headrace, queue: str) -> None:
    def in_thread(job: JobContext) -> str:
        if job.data == "exit":
            sys.exit(2)
        return "alive"

    async def on_loop(job: JobContext) -> str:
        return in_thread(job)

    for handle in (in_thread, on_loop):
        async with Worker(app.client, queue, handle, concurrency=1):
            leaving = await app.queue().add("j", "exit", attempts=1)
            with pytest.raises(JobFailed, match="SystemExit: 2"):
                await leaving.result(timeout=10)
            assert await (await app.queue().add("j", "stay")).result(timeout=10) == "alive"


async def test_a_cancellation_that_a_handler_made_itself_is_a_failure(app: Headrace, queue: str) -> None:
    tries = []

    async def handle(job: JobContext) -> None:
        tries.append(job.id)
        raise asyncio.CancelledError

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("j", attempts=2, backoff=0.01)
        with pytest.raises(JobFailed, match="CancelledError"):
            await job.result(timeout=10)
    assert len(tries) == 2


async def test_an_error_whose_message_cannot_be_read_is_a_failure_like_others(app: Headrace, queue: str) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError("no message")

    async def handle(job: JobContext) -> None:
        raise Broken

    async with Worker(app.client, queue, handle) as worker:
        job = await app.queue().add("j", attempts=1)
        with pytest.raises(JobFailed, match="Broken: its message cannot be read"):
            await job.result(timeout=10)
        assert (worker.figures.completed, worker.figures.failed) == (0, 1)


async def test_a_result_that_is_no_data_is_a_failure_that_says_so(app: Headrace, queue: str) -> None:
    async with Worker(app.client, queue, lambda job: object()):
        job = await app.queue().add("j", attempts=3)
        with pytest.raises(JobFailed, match=r"a result may hold plain values only, not builtins\.object"):
            await job.result(timeout=10)


async def test_large_results_come_back_from_many_jobs_at_once(app: Headrace, queue: str) -> None:
    size = 700_000 if app.url.startswith("valkey") else 5_000_000  # there, 1 MB of text is the limit
    gate = asyncio.Event()

    async def handle(job: JobContext) -> bytes:
        await gate.wait()
        return b"x" * size

    jobs = await app.queue().add_many([("j", None)] * 4)
    worker = Worker(app.client, queue, handle)
    async with worker:
        await until(lambda: worker.figures.pulled == 4)
        gate.set()
        assert [len(await job.result(timeout=20)) for job in jobs] == [size] * 4


async def test_progress_and_logs_are_seen_before_the_job_ends(app: Headrace, queue: str) -> None:
    gate = asyncio.Event()

    async def handle(job: JobContext) -> None:
        job.progress(40, "reading")
        job.log("opened", "warn")
        await gate.wait()

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("j")

        async def is_half_way() -> bool:
            info = await job.info()
            return (info.state, info.progress, info.progress_message) == ("active", 40, "reading")

        await until(is_half_way)
        assert [(log.message, log.level) for log in await job.logs()] == [("opened", "warn")]
        gate.set()
        assert await job.wait(timeout=10)


def test_current_job_outside_of_a_job_says_so() -> None:
    with pytest.raises(HeadraceError, match="where no job runs"):
        current_job()


async def test_a_worker_shows_itself_and_is_gone_when_it_leaves(app: Headrace, queue: str) -> None:
    async def handle(job: JobContext) -> None: ...

    async def names() -> list[str]:
        return [worker.name for worker in await app.queue().workers()]

    async with Worker(app.client, queue, handle, name="mailer"):
        await until(lambda: names())
        assert await names() == ["mailer"]
    assert await names() == []


async def test_a_worker_that_is_left_at_once_ends_at_once(app: Headrace, queue: str) -> None:
    async with asyncio.timeout(5):
        async with Worker(app.client, queue, lambda job: None):
            pass


async def test_a_job_taken_in_the_moment_of_the_stop_gets_its_time_to_end(app: Headrace, queue: str) -> None:
    begun, ended = 0, 0

    async def handle(job: JobContext) -> None:
        nonlocal begun, ended
        begun += 1
        await asyncio.sleep(0.01)
        ended += 1

    await app.queue().add_many([("j", None)] * 400)
    for _ in range(10):
        async with Worker(app.client, queue, handle, concurrency=7):
            before = ended
            await until(lambda before=before: ended >= before + 10)  # type: ignore[misc]
        assert begun == ended


async def test_a_worker_may_run_again_after_it_stopped(app: Headrace, queue: str) -> None:
    worker = Worker(app.client, queue, lambda job: "done")
    for _ in range(2):
        async with worker:
            assert await (await app.queue().add("j")).result(timeout=10) == "done"


async def test_a_worker_that_could_not_begin_may_be_started_again(app: Headrace, queue: str) -> None:
    refusals = [InvalidCommand("not today")]

    class Hesitant(Worker):
        async def _prepare(self) -> None:
            if refusals:
                raise refusals.pop()

    worker = Hesitant(app.client, queue, lambda job: "done")
    await worker.__aenter__()
    await asyncio.wait([worker._task])  # type: ignore[list-item]
    with pytest.raises(InvalidCommand, match="not today"):
        await worker.__aexit__()
    async with worker:
        assert await (await app.queue().add("j")).result(timeout=10) == "done"


async def test_a_worker_that_works_cannot_be_started_again(app: Headrace, queue: str) -> None:
    worker = Worker(app.client, queue, lambda job: "done")
    async with worker:
        await worker.ready.wait()
        with pytest.raises(HeadraceError, match="already running"):
            await worker.run(handle_signals=False)
        assert await (await app.queue().add("j")).result(timeout=10) == "done"


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"queues": []},
        {"batch": 0},
        {"batch": 2, "run_in": "process"},
        {"lease": 0},
        {"lease": "1ms"},
        {"group_concurrency": 0},
    ],
)
async def test_a_worker_that_could_not_work_is_refused(app: Headrace, queue: str, wrong: dict[str, Any]) -> None:
    options = {"queues": queue, **wrong}
    with pytest.raises(InvalidCommand):
        Worker(app.client, options.pop("queues"), handlers.double, **options)


async def test_a_failure_is_told_even_if_its_text_is_no_text(app: Headrace, queue: str) -> None:
    """Python hands names of files that are no UTF-8 on as lone surrogates, and errors name their files."""

    def handle(job: JobContext) -> None:
        raise FileNotFoundError(b"invoice-\xff.pdf".decode(errors="surrogateescape"))

    async with Worker(app.client, queue, handle):
        job = await app.queue().add("read", {}, attempts=1)
        with pytest.raises(JobFailed, match=r"invoice-\\udcff\.pdf"):
            await job.result(timeout=10)


@pytest.mark.parametrize("run_in", ["loop", "thread"])
async def test_a_search_that_finds_nothing_is_a_failure_like_others(app: Headrace, queue: str, run_in: Any) -> None:
    """`next()` raises StopIteration, which no future can hold."""

    def handle(job: JobContext) -> str:
        return next(word for word in ["a", "b"] if word == job.data)

    async with Worker(app.client, queue, handle, run_in=run_in, concurrency=1):
        job = await app.queue().add("find", "c", attempts=1)
        with pytest.raises(JobFailed, match="raised StopIteration"):
            await job.result(timeout=10)
        assert await (await app.queue().add("find", "b")).result(timeout=10) == "b"


async def test_a_plain_function_that_gives_a_coroutine_is_awaited(app: Headrace, queue: str) -> None:
    """As decorators make them of coroutine functions."""

    async def handle(job: JobContext) -> str:
        await asyncio.sleep(0)
        return job.name

    async with Worker(app.client, queue, lambda job: handle(job)):
        assert await (await app.queue().add("hello")).result(timeout=10) == "hello"


async def _on_loop(job: JobContext) -> None: ...


@pytest.mark.parametrize(
    ("handler", "run_in", "says"),
    [
        (handlers.double, "threads", "run_in is 'loop', 'thread' or 'process', not 'threads'"),
        (_on_loop, "thread", "_on_loop: an async function runs on the loop, not in a thread"),
        (_on_loop, "process", "_on_loop: an async function runs on the loop, not in a process"),
    ],
)
def test_a_place_where_a_handler_cannot_run_is_refused(handler: Any, run_in: Any, says: str) -> None:
    app = Headrace("memory://")
    with pytest.raises(InvalidCommand, match=says):
        Worker(app.client, "q", handler, run_in=run_in)
    with pytest.raises(InvalidCommand, match=says):
        app.task(run_in=run_in)(handler)


async def test_a_worker_on_a_queue_that_cannot_be_ends_and_says_why(app: Headrace) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(InvalidCommand, match="Queue name contains invalid characters"):
            await Worker(app.client, "two words", lambda job: None).run(handle_signals=False)


async def test_a_handler_that_reports_in_a_loop_loses_none_of_its_last_lines(server_app: Headrace) -> None:
    """However many lines there are, the outcome comes after them, and other jobs do not wait for their end."""
    ended = threading.Event()

    @server_app.task(attempts=1)
    def chatter(ctx: JobContext, lines: int) -> int:
        for number in range(lines):
            ctx.log(f"line {number}")
        ctx.progress(99)
        return lines

    @server_app.task(attempts=1)
    def endless(ctx: JobContext) -> None:
        while not ended.is_set():
            ctx.log("still here")

    async with server_app.worker():
        job = await chatter.enqueue(15_000)
        assert await job.result(timeout=30) == 15_000
        assert [log.message for log in (await job.logs())[-2:]] == ["line 14998", "line 14999"]
        assert (await job.info()).progress == 99
        await endless.enqueue()
        try:
            assert await (await chatter.enqueue(1)).result(timeout=30) == 1
        finally:
            ended.set()


async def test_a_worker_on_a_loop_with_eager_tasks_keeps_nothing_of_jobs_that_ended_at_once(app: Headrace) -> None:
    """As asyncio.eager_task_factory of Python 3.12 does it: what does not wait has ended when its task is made."""

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        if work.__qualname__ != "Worker._process":
            return asyncio.Task(work, loop=loop, **options)
        ended = loop.create_future()
        with pytest.raises(StopIteration):
            work.send(None)
        ended.set_result(None)
        return ended

    async def handle(job: JobContext) -> str:
        return job.name

    loop = asyncio.get_running_loop()
    async with Worker(app.client, app.default_queue, handle, concurrency=500) as worker:
        loop.set_task_factory(make)
        try:
            jobs = await app.queue().add_many([(f"j{n}", None) for n in range(500)])
            assert [await job.result(timeout=10) for job in jobs] == [job.name for job in jobs]
        finally:
            loop.set_task_factory(None)
        assert worker._running == {}
