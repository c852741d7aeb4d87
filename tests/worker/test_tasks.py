"""Functions as jobs: arguments and results by annotation, contexts, middleware, lifespans, schedules, flows."""

from __future__ import annotations

import asyncio
import enum
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, TypedDict, Unpack
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from pydantic.alias_generators import to_camel

from headrace import Flow, Headrace, JobContext, JobFailed, RateLimit, current_job
from headrace.errors import InvalidCommand
from headrace.tasks.app import Next
from tests.waiting import until
from tests.worker.conftest import MakeApp


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Order:
    number: int
    at: datetime
    colour: Colour


class Receipt(msgspec.Struct):
    order: Order
    total: float


class Item(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(alias_generator=to_camel)

    unit_price: Decimal


class Basket(pydantic.BaseModel):
    owner: str = pydantic.Field(alias="boughtBy")
    items: list[Item] = []


ORDER = Order(7, datetime(2026, 3, 1, 12, tzinfo=UTC), Colour.RED)
BASKET = Basket.model_validate({"boughtBy": "ada", "items": [{"unitPrice": "1.50"}]})


# -- arguments and results ---------------------------------------------------------------------------------------------


async def test_arguments_and_results_are_what_the_annotations_say(app: Headrace) -> None:
    seen: list[Any] = []

    @app.task()
    async def pay(order: Order, *more: int, basket: Basket, by: timedelta = timedelta(0), **rest: float) -> Receipt:
        seen.append((order, more, basket, by, rest))
        return Receipt(order, 9.5)

    async with app.worker():
        job = await pay.enqueue(ORDER, 1, 2, basket=BASKET, by=timedelta(seconds=5), tax=0.5)
        assert await job.result(timeout=10) == Receipt(ORDER, 9.5)
    assert seen == [(ORDER, (1, 2), BASKET, timedelta(seconds=5), {"tax": 0.5})]


async def test_an_iterable_comes_as_a_list_of_what_it_declares(app: Headrace) -> None:
    @app.task()
    async def spread(prices: Iterable[Decimal]) -> list[str]:
        return [repr(price) for price in prices]

    async with app.worker():
        job = await spread.enqueue((Decimal("1.50"), Decimal(2)))
        assert await job.result(timeout=10) == ["Decimal('1.50')", "Decimal('2')"]


async def test_a_result_that_is_not_what_its_task_declares_is_told_as_such(app: Headrace) -> None:
    @app.task()
    async def total() -> int:
        return "many"  # type: ignore[return-value]

    async with app.worker():
        job = await total.enqueue()
        with pytest.raises(InvalidCommand, match=r"the result of .*total is not what it declares: Expected `int`"):
            await job.result(timeout=10)


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda app, function: app.task(function), r"write @app\.task\(\) with parentheses"),
        (lambda app, function: app.cron(function), r"write @app\.cron\("),
        (lambda app, function: app.cron()(function), r"every="),
        (lambda app, function: app.cron("* * * * *", every=5)(function), r"every="),
    ],
)
def test_a_decorator_that_is_written_wrongly_is_refused_at_once(declare: Any, says: str) -> None:
    def function() -> None: ...

    app = Headrace("memory://")
    with pytest.raises(InvalidCommand, match=says):
        declare(app, function)
    assert not app.tasks


async def test_a_task_is_still_the_function_it_was(app: Headrace) -> None:
    @app.task()
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    @app.task()
    def noisy(ctx: JobContext, a: int) -> int:
        ctx.progress(50)
        ctx.log("said to nobody")
        return a

    assert add(1, b=2) == 3
    assert add.__doc__ == "Adds."
    assert noisy(4) == 4
    assert await app.queue().count() == 0


async def test_a_call_that_the_function_would_refuse_is_refused_where_it_is_made(app: Headrace) -> None:
    @app.task()
    def add(a: int, b: int = 1) -> int:
        return a + b

    with pytest.raises(InvalidCommand, match=r"add\(a: 'int', b: 'int' = 1\).*unexpected keyword argument 'c'"):
        await add.enqueue(1, c=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidCommand, match="plain values only"):
        await add.enqueue(object())  # type: ignore[arg-type]
    assert await app.queue().count() == 0


async def test_data_that_does_not_fit_makes_a_dead_letter_that_names_the_parameter(app: Headrace) -> None:
    runs = []

    @app.task(attempts=5)
    def add(a: int, order: Order | None = None) -> None:
        runs.append(a)

    wrong = [
        ({"args": ["one"]}, "argument 'a' of .*add: Expected `int`, got `str`"),
        ({"args": [1], "kwargs": {"order": {"number": "x"}}}, "argument 'order' of .*add: .*number"),
        ({}, "does not fit .*missing a required argument: 'a'"),
        ({"args": 5}, "does not fit"),
        ({"args": [1], "kwargs": [2]}, "does not fit"),
        ("text", r'does not fit .*; arguments stand in \{"args": \[...\], "kwargs": \{...\}\}'),
        ({"a": 1}, r'does not fit .*; arguments stand in \{"args": \[...\], "kwargs": \{...\}\}'),
    ]
    jobs = [await app.queue().add("add", data, attempts=5) for data, _ in wrong]
    async with app.worker():
        for job, (_, reason) in zip(jobs, wrong, strict=True):
            with pytest.raises(JobFailed, match=reason):
                await job.result(timeout=10)
    assert runs == []
    assert len(await app.queue().dlq.list()) == len(wrong)


async def test_an_unknown_task_is_a_dead_letter_that_says_so(app: Headrace) -> None:
    @app.task()
    def known() -> None: ...

    async with app.worker():
        job = await app.queue().add("renamed", attempts=5)
        with pytest.raises(JobFailed, match="unknown task 'renamed': this worker knows known"):
            await job.result(timeout=10)
    assert (await job.info()).attempts == 1
    (letter,) = await app.queue().dlq.list()
    assert letter.error is not None
    assert "unknown task" in letter.error


async def test_many_calls_go_in_few_commands_and_keep_their_order(app: Headrace) -> None:
    seen: list[int] = []

    @app.task()
    async def note(n: int) -> int:
        seen.append(n)
        return n

    jobs = await note.enqueue_many([(n,) if n % 2 else {"n": n} for n in range(1200)])
    async with app.worker(concurrency=1):
        assert await jobs[-1].result(timeout=30) == 1199
    assert seen == list(range(1200))


@pytest.mark.parametrize("wrong", ["text", 5, None])
async def test_a_call_that_is_no_list_of_arguments_is_refused(app: Headrace, wrong: Any) -> None:
    @app.task()
    async def note(n: str) -> None: ...

    with pytest.raises(InvalidCommand, match="a tuple or a dict"):
        await note.enqueue_many([("fine",), wrong])
    with pytest.raises(InvalidCommand, match="at least one queue"):
        app.worker([])


async def test_options_of_app_task_and_call_add_up(make_app: MakeApp) -> None:
    app = make_app(attempts=7, priority=1)

    @app.task(priority=2, timeout="3s")
    def work() -> None: ...

    info = await (await work.options(priority=5, tags=["a"]).enqueue()).info()
    assert (info.max_attempts, info.priority, info.timeout, info.tags) == (7, 5, 3000, ["a"])
    later = await (await work.schedule(datetime.now(UTC) + timedelta(hours=1))).info()
    assert later.state == "delayed"
    with pytest.raises(InvalidCommand, match="zone"):
        await work.schedule(datetime.now())
    moment = datetime.now(UTC) + timedelta(hours=2)
    blocking = await asyncio.to_thread(app.sync().schedule, work, moment)
    assert abs((await asyncio.to_thread(blocking.info)).run_at - moment.timestamp() * 1000) < 60_000


async def test_a_thread_enqueues_with_the_sync_face(app: Headrace) -> None:
    @app.task()
    def add(a: int, b: int) -> int:
        return a + b

    def script() -> list[int]:
        sync = app.sync()
        jobs = [sync.enqueue(add, 1, b=2), sync.enqueue(add.options(priority=3), 3, 4)]
        jobs += sync.enqueue_many(add, [(5, 6), {"a": 7, "b": 8}])
        assert app.default_queue in [line.name for line in sync.queues()]
        return [job.result(timeout=10) for job in jobs]

    async with app.worker():
        assert await asyncio.to_thread(script) == [3, 7, 11, 15]


async def test_a_task_of_another_app_is_refused_by_the_sync_face_and_in_flows(app: Headrace) -> None:
    """Its jobs would be where no worker knows them, and their handles would ask where they are not."""
    other = Headrace("memory://elsewhere")

    @app.task()
    def here() -> None: ...

    @other.task()
    def there(n: int) -> None: ...

    sync = app.sync()
    for enqueue in (
        lambda: sync.enqueue(there, 1),
        lambda: sync.enqueue(there.options(priority=1), 1),
        lambda: sync.enqueue_many(there, [(1,)]),
        lambda: sync.schedule(there, datetime.now(UTC), 1),
        lambda: sync.enqueue_flow(Flow(here.s(), [there.s(1)])),
    ):
        with pytest.raises(InvalidCommand, match="'there' is a task of another app, that of memory://elsewhere"):
            await asyncio.to_thread(enqueue)
    with pytest.raises(InvalidCommand, match="another app"):
        await app.enqueue_flow(Flow(here.s(), [Flow(here.s(), [there.s(1)])]))
    with pytest.raises(InvalidCommand, match=r"is no task: give what @app\.task\(\) has made"):
        await asyncio.to_thread(sync.enqueue, here.function)  # type: ignore[arg-type]
    assert await app.queue().count() == 0
    await other.close()


async def test_apps_of_one_url_may_enqueue_the_tasks_of_each_other(make_app: MakeApp) -> None:
    web, jobs = make_app(), make_app()

    @jobs.task()
    def add(a: int, b: int) -> int:
        return a + b

    async with jobs.worker():
        job = await asyncio.to_thread(web.sync().enqueue, add, 1, 2)
        assert await asyncio.to_thread(job.result, 10) == 3


async def test_declarations_that_cannot_work_are_refused(app: Headrace) -> None:
    @app.task(name="taken")
    def first() -> None: ...

    with pytest.raises(InvalidCommand, match="there is a task 'taken' already"):

        @app.task(name="taken")
        def second() -> None: ...

    with pytest.raises(InvalidCommand, match="an async function runs on the loop"):

        @app.task(run_in="process")
        async def third() -> None: ...

    with pytest.raises(InvalidCommand, match="top of a module"):

        @app.task(run_in="process")
        def fourth() -> None: ...

    @dataclass
    class Local: ...

    with pytest.raises(InvalidCommand, match=r"annotations of .*fifth cannot be read: name 'Local' is not defined"):

        @app.task()
        def fifth(value: Local) -> None: ...

    for no_function in (partial(print, "x"), Colour.RED, classmethod(print)):
        with pytest.raises(InvalidCommand, match="is no function: write one that calls it"):
            app.task()(no_function)  # type: ignore[call-overload]
    assert app.tasks.keys() == {"taken"}


class Mixed(enum.Enum):
    WORD = "word"
    NUMBER = 1


class Setting(TypedDict, total=False):
    colour: Colour


def test_an_annotation_that_nothing_can_be_converted_to_is_refused_where_it_is_written() -> None:
    """Every job would become a dead letter, far away from what is wrong."""
    app = Headrace("memory://")

    def models(value: Basket | Item) -> None: ...
    def texts(value: str | UUID = "") -> None: ...
    def inside(value: list[dict[str, Order | Receipt]]) -> None: ...
    def mixed(*value: Mixed) -> None: ...

    for function in (models, texts, inside, mixed):
        with pytest.raises(
            InvalidCommand, match=rf"argument 'value' of .*{function.__name__} cannot be read.*one type"
        ):
            app.task()(function)
    assert not app.tasks


def test_generators_methods_and_scheduled_tasks_with_arguments_are_refused_where_they_are_written() -> None:
    app = Headrace("memory://")

    def lines() -> Iterable[int]:
        yield 1

    async def pages() -> AsyncIterator[int]:
        yield 1

    for generator in (lines, pages):
        with pytest.raises(InvalidCommand, match="is a generator, and calling one runs none of its code"):
            app.task()(generator)

    class Shop:
        def pack(self, n: int) -> int:
            return n

    with pytest.raises(InvalidCommand, match=r"Shop\.pack is a method"):
        app.task()(Shop.pack)
    with pytest.raises(InvalidCommand, match=r"a schedule gives no arguments, and its task needs some: .*'n'"):
        app.cron(every=60)(Shop().pack)
    assert not app.tasks
    assert app.task()(Shop().pack)(4) == 4


def test_an_option_that_cannot_be_read_is_refused_where_it_is_written() -> None:
    app = Headrace("memory://")
    with pytest.raises(InvalidCommand, match="unknown job option 'retries'; there are: at, "):
        app.task(retries=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidCommand, match="timeout 'soon' is not understood"):
        app.cron(every=60, timeout="soon")
    with pytest.raises(InvalidCommand, match=r"unknown job option 'token'.*belong into connection="):
        Headrace("memory://", token="secret")  # type: ignore[call-arg]


async def test_keyword_arguments_may_be_declared_as_a_typed_dict(app: Headrace) -> None:
    @app.task()
    async def paint(**setting: Unpack[Setting]) -> str:
        return type(setting["colour"]).__name__

    async with app.worker():
        assert await (await paint.enqueue(colour=Colour.RED)).result(timeout=10) == "Colour"


# -- the context -------------------------------------------------------------------------------------------------------


async def test_the_context_comes_first_or_by_keyword_and_from_anywhere_below(app: Headrace) -> None:
    @app.task()
    async def first(ctx: JobContext, n: int) -> list[Any]:
        return [ctx.name, n, current_job() is ctx]

    @app.task()
    def by_keyword(n: int, *, job: JobContext) -> list[Any]:
        return [job.name, n, current_job() is job]

    @app.task()
    def in_the_middle(n: int, ctx: JobContext, m: int = 3) -> list[Any]:
        return [ctx.name, n, m]

    async with app.worker():
        assert await (await first.enqueue(1)).result(timeout=10) == ["first", 1, True]
        assert await (await by_keyword.enqueue(2)).result(timeout=10) == ["by_keyword", 2, True]  # type: ignore[call-arg]
        assert await (await in_the_middle.enqueue(2, m=4)).result(timeout=10) == ["in_the_middle", 2, 4]  # type: ignore[call-arg]


async def test_middleware_surrounds_every_job_the_first_outermost(app: Headrace) -> None:
    steps: list[str] = []

    @app.middleware
    async def outer(ctx: JobContext, call_next: Next) -> Any:
        steps.append("outer in")
        try:
            return await call_next()
        finally:
            steps.append("outer out")

    @app.middleware
    async def inner(ctx: JobContext, call_next: Next) -> Any:
        steps.append("inner in")
        return [await call_next(), "and more"]

    @app.task()
    def work(fail: bool) -> str:
        steps.append("work")
        if fail:
            raise ValueError("no")
        return "done"

    async with app.worker():
        assert await app.queue().job((await work.enqueue(False)).id).result(timeout=10) == ["done", "and more"]
        with pytest.raises(JobFailed):
            await (await work.options(attempts=1).enqueue(True)).result(timeout=10)
    assert steps == ["outer in", "inner in", "work", "outer out"] * 2


async def test_a_lifespan_surrounds_the_worker_and_its_state_reaches_jobs(make_app: MakeApp) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Headrace) -> AsyncIterator[dict[str, int]]:
        steps.append("open")
        yield {"pool": 5}
        steps.append("closed")

    app = make_app(lifespan=lifespan)

    @app.task()
    def work(ctx: JobContext) -> int:
        steps.append("work")
        return int(ctx.state["pool"])

    async with app.worker():
        assert await (await work.enqueue()).result(timeout=10) == 5
    assert steps == ["open", "work", "closed"]


async def test_a_worker_left_while_its_lifespan_opens_ends(make_app: MakeApp) -> None:
    @asynccontextmanager
    async def lifespan(app: Headrace) -> AsyncIterator[None]:
        await asyncio.sleep(0.05)
        yield

    app = make_app(lifespan=lifespan)
    app.task()(print)
    async with asyncio.timeout(10):
        async with app.worker():
            pass


async def test_entering_a_worker_that_is_cancelled_while_its_lifespan_opens_closes_it(make_app: MakeApp) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Headrace) -> AsyncIterator[None]:
        try:
            steps.append("open")
            await asyncio.Event().wait()
            yield
        finally:
            steps.append("closed")

    async def enter() -> None:
        async with make_app(lifespan=lifespan).worker():
            pytest.fail("it cannot have begun")

    entering = asyncio.create_task(enter())
    await until(lambda: steps)
    entering.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait([entering])
    assert (entering.cancelled(), steps) == (True, ["open", "closed"])


# -- schedules, limits, flows ------------------------------------------------------------------------------------------


async def test_schedules_are_entered_by_workers_and_keep_their_phase(app: Headrace) -> None:
    runs: list[int] = []

    @app.cron(every=0.3, attempts=2, priority=4)
    async def tick(ctx: JobContext) -> None:
        runs.append(ctx.info.max_attempts)

    @app.cron("30 2 * * *", tz=ZoneInfo("Europe/Berlin"), name="nightly")
    def at_night() -> None: ...

    for _ in range(2):
        async with app.worker():
            await until(lambda: len(runs) >= 1)
    before = {schedule.name: schedule.next_run for schedule in await app.queue().schedules()}
    assert before.keys() == {"tick", "nightly"}
    async with app.worker():
        pass
    after = {schedule.name: schedule.next_run for schedule in await app.queue().schedules()}
    assert after["nightly"] == before["nightly"]
    assert set(runs) == {2}


async def test_a_schedule_keeps_firing_under_workers_that_are_restarted_more_often(app: Headrace) -> None:
    @app.cron(every=0.4)
    async def tick() -> None: ...

    async def restart() -> bool:
        async with app.worker():
            await asyncio.sleep(0.05)
        return any((await app.queue().counts()).values())  # on a busy machine no worker lives long enough to run it

    await until(restart)


async def test_an_option_that_no_schedule_carries_is_refused_when_the_worker_starts(app: Headrace) -> None:
    @app.cron(every=60, group="g")
    def tick() -> None: ...

    with pytest.raises(InvalidCommand, match="cannot give its jobs 'group'"):
        await app.worker().run(handle_signals=False)


async def test_a_schedule_that_is_refused_when_the_worker_starts_is_named(app: Headrace) -> None:
    app.cron("30 2 * * *")(print)

    @app.cron("0 25 * * *")
    async def nightly() -> None: ...

    with pytest.raises(InvalidCommand, match="The schedule 'nightly' is refused: Invalid cron expression"):
        await app.worker().run(handle_signals=False)


async def test_the_rate_limit_of_a_task_holds_over_all_workers(make_app: MakeApp) -> None:
    apps = [make_app(), make_app()]
    for app in apps:

        @app.task(rate_limit=RateLimit(2, per=0.2))
        async def call() -> None: ...

    async with apps[0].worker(), apps[1].worker():
        await until(lambda: _has_limit(apps[0]))
        jobs = await apps[0].tasks["call"].enqueue_many([()] * 8)
        for job in jobs:
            await job.result(timeout=10)
        started = [(await job.info()).started_at or 0 for job in jobs]
    # 2 at once, then one every 100 ms: eight take at least 0.6 s, however many workers there are.
    assert max(started) - min(started) >= 590


async def _has_limit(app: Headrace) -> bool:
    return (await app.queue().limits()).rate_limit is not None


async def test_a_flow_of_tasks_runs_children_first_and_gives_the_parent_their_results(app: Headrace) -> None:
    @app.task()
    async def part(n: int) -> int:
        return n * n

    @app.task()
    async def total(ctx: JobContext) -> int:
        values = await app.queue().job(ctx.id).children_values()
        return sum(values.values())

    async with app.worker():
        tree = await app.enqueue_flow(Flow(total.s(), [part.s(2), Flow(part.s(3)), part.s(4)]))
        assert await tree.job.result(timeout=10) == 29


def test_making_an_app_connects_to_nothing_and_starts_no_thread() -> None:
    program = """
        import threading
        from headrace import Headrace
        app = Headrace("headrace://127.0.0.1:1")

        @app.task()
        def work(n: int) -> int:
            return n + 1

        assert work(1) == 2
        assert threading.active_count() == 1
        print("quiet")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.stderr) == ("quiet\n", "")


def test_a_worker_takes_the_name_of_one_queue_as_it_is() -> None:
    assert Headrace("memory://").worker("emails").queues == ["emails"]
