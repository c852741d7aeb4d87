"""The app: one object created from a URL that holds tasks, schedules and middleware, and creates queues and workers.

    app = Headrace("sqlite:///jobs.db")

    @app.task(queue="emails", attempts=5)
    async def send(to: str, *, subject: str = "hi") -> int: ...

Creating an app does not connect; `async with app` (or the first call) does.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Final, Never, ParamSpec, TypeVar, Unpack, overload

from msgspec import Struct

from headrace import commands
from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.client.flow import FlowJob, FlowProducer, FlowTree, OnFailure, SyncFlowProducer
from headrace.client.job import Job, SyncJob
from headrace.client.options import Options, RateLimit, wire_options
from headrace.client.queue import Queue, SyncQueue
from headrace.client.verbs import AsyncShell, SyncShell
from headrace.connect import chosen_url, open_client, release_client
from headrace.durations import Duration
from headrace.errors import InvalidCommand
from headrace.tasks.task import AnyTask, Call, Signature, Task
from headrace.worker.context import JobContext, RunIn
from headrace.worker.failures import UnrecoverableError

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from headrace.commands.queues import QueueLine
    from headrace.tasks.worker import TaskWorker

P = ParamSpec("P")
T = TypeVar("T")

Next = Callable[[], Awaitable[Any]]
Middleware = Callable[[JobContext, Next], Awaitable[Any]]
Lifespan = Callable[["Headrace"], AbstractAsyncContextManager[Any]]
Carrier = Callable[[AnyTask], Mapping[str, Any]]
"""Returns what is sent along with the arguments of a call, such as a trace context."""

DEFAULT_QUEUE: Final = "default"


class Schedule(Struct, frozen=True):
    task: AnyTask
    cron: str | None
    every: Duration | None
    tz: str | None
    catch_up: bool
    overlap: bool


class Flow(Struct, frozen=True):
    """A call that runs when those of its children have ended."""

    call: Signature
    children: Sequence[Flow | Signature] = ()
    on_failure: OnFailure = "fail"
    options: Options = {}

    def plan(self, app: Headrace) -> FlowJob:
        if not isinstance(self.call, Signature):
            raise InvalidCommand(f"a flow is made of calls, such as Flow(pack.s(order)), not of {self.call!r}")
        task = self.call.task
        _check_own(app, task)
        return FlowJob(
            queue=task.queue,
            name=task.name,
            data=self.call.data(),
            options={**task.app.options, **task.job_options, **self.options},
            children=[_as_flow(child).plan(app) for child in self.children],
            on_failure=self.on_failure,
        )


def _as_flow(given: Flow | Signature) -> Flow:
    return given if isinstance(given, Flow) else Flow(given)


class TaskDecorator:
    """What `app.task(...)` returns: turns a function into a task and keeps its types."""

    def __init__(self, make: Callable[[Callable[..., Any]], AnyTask]) -> None:
        self._make = make

    @overload
    def __call__(
        self, function: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, T]]
    ) -> Task[P, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]]) -> Task[P, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[JobContext, P], T]) -> Task[P, T, T]: ...
    @overload
    def __call__(self, function: Callable[P, T]) -> Task[P, T, T]: ...
    def __call__(self, function: Callable[..., Any]) -> AnyTask:
        return self._make(function)


class Headrace(AsyncShell):
    """Tasks and queues behind one URL, async; `app.sync()` is the blocking form."""

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str = DEFAULT_QUEUE,
        lifespan: Lifespan | None = None,
        connection: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Without a URL that of HEADRACE_URL counts, else a server on this machine. `options` are those of every job,
        `connection` those of the connection (see docs/client.md)."""
        unknown = options.keys() - Options.__annotations__
        _check_options(options, "; those of the connection belong into connection={...}" if unknown else "")
        self.url = chosen_url(url)
        self._connection = dict(connection or {})
        super().__init__(open_client(self.url, **self._connection))
        self.default_queue = queue
        self.options = options
        self.tasks: dict[str, AnyTask] = {}
        self.schedules: dict[str, Schedule] = {}
        self.rate_limits: dict[str, RateLimit] = {}
        self.state: Any = None
        self.lifespan = lifespan
        self._middleware: list[Middleware] = []
        self._carriers: list[Carrier] = []
        self._users = 0
        self._users_lock = threading.Lock()
        self._has_client = True
        """Whether the client counts us: others of the same URL share it."""

    @property
    def client(self) -> Client:
        """The client underneath: for a `Worker` of your own, for `health` and `force_reconnect`."""
        return self._client

    def enter(self) -> Client:
        """Count one more user of the app; one that was closed is opened again."""
        with self._users_lock:
            if self._client.is_closed:
                self._let_go()
            if not self._has_client:
                self._client = open_client(self.url, **self._connection)
                self._has_client = True
            self._users += 1
            return self._client

    def leave(self, *, keep_open: bool = False) -> Future[None] | None:
        """Count one user less. The last one closes the app, unless it is kept open; the future ends with that."""
        with self._users_lock:
            self._users -= 1
            return None if self._users > 0 or keep_open else self._let_go()

    def let_go(self) -> Future[None] | None:
        """Close the client if no other app uses it, whoever is in this one; the future ends with that."""
        with self._users_lock:
            return self._let_go()

    def _let_go(self) -> Future[None] | None:
        had_client, self._has_client = self._has_client, False
        return release_client(self._client) if had_client else None

    async def __aenter__(self) -> Headrace:
        client = self.enter()
        try:
            await asyncio.wrap_future(client.connect())
        except BaseException:
            self.leave(keep_open=True)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await _closed(self.leave())

    async def close(self) -> None:
        """Close the app: calls in flight fail, listeners end, and its workers end with ClientClosed."""
        await _closed(self.let_go())

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def task(
        self,
        *bare: Never,
        name: str | None = None,
        queue: str | None = None,
        run_in: RunIn | None = None,
        rate_limit: RateLimit | None = None,
        **options: Unpack[Options],
    ) -> TaskDecorator:
        """Turn a function into a task. `rate_limit` applies to its queue, across all workers."""
        if bare:
            raise InvalidCommand("write @app.task() with parentheses, even if there is nothing in them")

        _check_options(options)
        if not isinstance(rate_limit, RateLimit | None):
            raise InvalidCommand(f"rate_limit is a RateLimit, such as RateLimit(100, per='1s'), not {rate_limit!r}")

        def make(function: Callable[..., Any]) -> AnyTask:
            if not callable(function) or not hasattr(function, "__qualname__"):
                raise InvalidCommand(f"{function!r} is no function: write one that calls it, and make that a task")
            if _is_method(function):
                raise InvalidCommand(
                    f"{function.__qualname__} is a method, and a worker has no object to call it on: write a function, "
                    "or make the method of an object a task, as in app.task()(shop.pack)"
                )
            chosen = queue or self.default_queue
            task: AnyTask = Task(self, function, name or function.__name__, chosen, options, run_in)
            if task.run_in == "process":
                from headrace.worker.processes import check_importable  # few tasks need it

                check_importable(function)
            if task.name in self.tasks:
                raise InvalidCommand(f"there is a task {task.name!r} already: give this one another name=")
            self.tasks[task.name] = task
            if rate_limit is not None:
                self.rate_limits[chosen] = rate_limit
            return task

        return TaskDecorator(make)

    def cron(
        self,
        cron: str | None = None,
        *,
        every: Duration | None = None,
        tz: str | ZoneInfo | None = None,
        name: str | None = None,
        catch_up: bool = False,
        overlap: bool = False,
        queue: str | None = None,
        run_in: RunIn | None = None,
        **options: Unpack[Options],
    ) -> TaskDecorator:
        """Turn a function into a task that runs on a schedule, which workers register when they start."""
        if (cron is None) == (every is None) or not isinstance(cron, str | None):
            raise InvalidCommand('write @app.cron("30 2 * * *"), or @app.cron(every="15m") for an interval')
        decorate = self.task(name=name, queue=queue, run_in=run_in, **options)

        def make(function: Callable[..., Any]) -> AnyTask:
            task = decorate(function)
            try:
                task.arguments.bind((), {})
            except InvalidCommand as error:
                del self.tasks[task.name]
                raise InvalidCommand(f"a schedule gives no arguments, and its task needs some: {error}") from None
            zone = None if tz is None else str(tz)
            self.schedules[task.name] = Schedule(task, cron, every, zone, catch_up, overlap)
            return task

        return TaskDecorator(make)

    def middleware(self, function: Middleware) -> Middleware:
        """Run `function(context, call_next)` around every job; the first one registered is the outermost."""
        self._middleware.append(function)
        return function

    def carry(self, carrier: Carrier) -> None:
        """Send something along with the arguments of every call."""
        self._carriers.append(carrier)

    def envelope(self, task: AnyTask) -> dict[str, Any]:
        return {key: value for carrier in self._carriers for key, value in carrier(task).items()}

    # -- queues, flows, events -----------------------------------------------------------------------------------------

    def queue(self, name: str | None = None) -> Queue:
        """A queue by its name, or the default one of the app. No command is sent yet."""
        return Queue(self._client, name or self.default_queue, self.options)

    @property
    def flows(self) -> FlowProducer:
        """Adds trees and chains of jobs."""
        return FlowProducer(self._client)

    async def enqueue_flow(self, flow: Flow) -> FlowTree[Job[Any]]:
        """Add a tree of calls atomically; a parent runs when its children have ended."""
        return await self.flows.add(_as_flow(flow).plan(self))

    def events(self, queue: str | None = None) -> QueueEvents:
        """`async with app.events("emails") as events: async for event in events: ...`"""
        return QueueEvents(self._client, queue or self.default_queue)

    async def queues(self) -> list[QueueLine]:
        """All queues, with their figures."""
        return (await self.call(commands.queues.ListQueues())).queues

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[Any]:
        """Run the app's lifespan around something; yields what it yields, which is also `app.state` meanwhile."""
        if self.lifespan is None:
            yield self.state
            return
        async with self.lifespan(self) as state:
            self.state = state
            yield state

    # -- workers -------------------------------------------------------------------------------------------------------

    def worker(
        self,
        queues: str | Sequence[str] | None = None,
        *,
        concurrency: int = 10,
        lease: Duration = 30,
        drain: Duration = 25,
        name: str = "worker",
        max_jobs_per_child: int | None = None,
        fair: bool = False,
        group_concurrency: int | None = None,
    ) -> TaskWorker:
        """A worker for the queues of the app's tasks, or for those named."""
        from headrace.tasks.worker import TaskWorker

        known = sorted({task.queue for task in self.tasks.values()})
        return TaskWorker(
            self,
            (known or [self.default_queue]) if queues is None else queues,
            concurrency=concurrency,
            lease=lease,
            drain=drain,
            name=name,
            max_jobs_per_child=max_jobs_per_child,
            fair=fair,
            group_concurrency=group_concurrency,
        )

    def sync(self) -> SyncHeadrace:
        """The blocking form of the app: for Flask, Django, scripts, notebooks."""
        return SyncHeadrace(self)

    async def enter_schedules(self, queues: Sequence[str]) -> None:
        """Register the schedules and rate limits of these queues; workers do so when they start."""
        for schedule in self.schedules.values():
            if schedule.task.queue in queues:
                try:
                    await self._enter(schedule)
                except InvalidCommand as error:  # the worker starts far from where it is written
                    raise InvalidCommand(f"The schedule {schedule.task.name!r} is refused: {error}") from None
        for queue, limit in self.rate_limits.items():
            if queue in queues:
                await self.queue(queue).limit_rate(limit)

    async def _enter(self, schedule: Schedule) -> None:
        task = schedule.task
        await self.queue(task.queue).schedule(
            task.name,
            cron=schedule.cron,
            every=schedule.every,
            tz=schedule.tz,
            job_name=task.name,
            overlap=schedule.overlap,
            catch_up=schedule.catch_up,
            **task.job_options,
        )

    async def run_job(self, context: JobContext, run: Callable[[AnyTask], Awaitable[Any]]) -> Any:
        """Find the task of a job and run it through the middleware."""
        task = self.tasks.get(context.name)
        if task is None:
            known = ", ".join(sorted(self.tasks)) or "none"
            raise UnrecoverableError(f"unknown task {context.name!r}: this worker knows {known}")
        return await self._through(context, task, run, 0)

    async def _through(
        self, context: JobContext, task: AnyTask, run: Callable[[AnyTask], Awaitable[Any]], at: int
    ) -> Any:
        if at == len(self._middleware):
            return await run(task)
        return await self._middleware[at](context, lambda: self._through(context, task, run, at + 1))


def _check_options(options: Options, hint: str = "") -> None:
    """Refuse what can be told without a server, where it is written and not where the first job is added."""
    try:
        wire_options(options, lambda: 0)
    except InvalidCommand as error:
        raise InvalidCommand(f"{error}{hint}") from None


def _is_method(function: Callable[..., Any]) -> bool:
    """Whether this is a function in the body of a class that wants the object, or the class, first."""
    first = next(iter(inspect.signature(function).parameters), None)
    return first in ("self", "cls") and "." in function.__qualname__.rpartition("<locals>.")[2]


def _check_own(app: Headrace, task: AnyTask) -> None:
    """Refuse a task whose jobs live elsewhere: here no worker would know them, and their handles would ask there."""
    if task.app.client is not app.client:
        from headrace.notation import place

        raise InvalidCommand(f"{task.name!r} is a task of another app, that of {place(task.app.url)}: enqueue it there")


async def _closed(closing: Future[None] | None) -> None:
    if closing is not None:
        await asyncio.wrap_future(closing)


class SyncHeadrace(SyncShell):
    """The blocking form of an app: `with app.sync() as s: s.enqueue(send, "a@b.c").result(timeout=5)`."""

    def __init__(self, app: Headrace) -> None:
        super().__init__(app.client)
        self._app = app

    def __enter__(self) -> SyncHeadrace:
        self._client = self._app.enter()
        try:
            self._client.connect().result()
        except BaseException:
            self._app.leave(keep_open=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if (closing := self._app.leave()) is not None:
            closing.result()

    def close(self) -> None:
        """Close the app: calls in flight fail, listeners end, and its workers end with ClientClosed."""
        if (closing := self._app.let_go()) is not None:
            closing.result()

    def enqueue(self, task: Task[P, Any, T] | Call[P, T], *args: P.args, **kwargs: P.kwargs) -> SyncJob[T]:
        """Add a job for a task, or for `task.options(...)`."""
        call = self._call_of(task)
        job: SyncJob[T] = call.job(SyncJob, self.call(call.push(args, kwargs)).id)
        return job

    def enqueue_many(
        self, task: Task[P, Any, T] | Call[P, T], calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]
    ) -> list[SyncJob[T]]:
        """Add many jobs in few commands: a tuple of positional or a dict of keyword arguments for each."""
        call = self._call_of(task)
        return [call.job(SyncJob, job_id) for push in call.pushes(calls) for job_id in self.call(push).ids]

    def schedule(self, task: Task[P, Any, T], at: datetime, /, *args: P.args, **kwargs: P.kwargs) -> SyncJob[T]:
        """Add a job that runs at this time, a timezone-aware datetime."""
        return self.enqueue(task.options(at=at), *args, **kwargs)

    def _call_of(self, task: Task[P, Any, T] | Call[P, T]) -> Call[P, T]:
        if not isinstance(task, Task | Call):
            raise InvalidCommand(f"{task!r} is no task: give what @app.task() has made of a function")
        call = task if isinstance(task, Call) else Call(task, {})
        _check_own(self._app, call.task)
        return call

    def queue(self, name: str | None = None) -> SyncQueue:
        """A queue by its name, or the default one of the app. No command is sent yet."""
        return SyncQueue(self._client, name or self._app.default_queue, self._app.options)

    @property
    def flows(self) -> SyncFlowProducer:
        """Adds trees and chains of jobs."""
        return SyncFlowProducer(self._client)

    def enqueue_flow(self, flow: Flow) -> FlowTree[SyncJob[Any]]:
        """Add a tree of calls atomically; a parent runs when its children have ended."""
        return self.flows.add(_as_flow(flow).plan(self._app))

    def queues(self) -> list[QueueLine]:
        """All queues, with their figures."""
        return self.call(commands.queues.ListQueues()).queues

    def events(self, queue: str | None = None) -> QueueEvents:
        """`with app.sync().events("emails") as events: for event in events: ...`"""
        return QueueEvents(self._client, queue or self._app.default_queue)
