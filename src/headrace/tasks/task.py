"""A function that can be enqueued. It stays callable as the function it is, and its types are kept all the way:
`await send.enqueue("a@b.c")` takes what `send` takes, and the job's result is what `send` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast

from headrace import commands
from headrace.client.job import Job
from headrace.client.options import Options, wire_options
from headrace.client.payloads import batches
from headrace.client.queue import size_of_entry
from headrace.errors import InvalidCommand
from headrace.tasks.arguments import Arguments
from headrace.worker.context import JobContext, RunIn, place_of

if TYPE_CHECKING:
    from headrace.tasks.app import Headrace

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Task(Generic[P, R, T]):
    """A function on an app. R is what calling it gives, T the result of its jobs."""

    def __init__(
        self, app: Headrace, function: Callable[..., Any], name: str, queue: str, options: Options, run_in: RunIn | None
    ) -> None:
        self.app = app
        self.function = function
        self.name = name
        self.queue = queue
        self.job_options = options
        self.run_in = place_of(function, run_in)
        self.arguments = Arguments(function)
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<Task {self.name} on {self.queue}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it here and now, as the plain function. A JobContext that it wants tells nobody."""
        if self.arguments.context_name is None or self.arguments.context_name in kwargs:
            return cast("R", self.function(*args, **kwargs))
        if any(isinstance(argument, JobContext) for argument in args):
            return cast("R", self.function(*args, **kwargs))
        bound = self.arguments.bind(args, kwargs)
        return cast("R", self.arguments.call(self.function, bound, JobContext.detached()))

    # -- enqueueing ----------------------------------------------------------------------------------------------------

    def options(self, **options: Unpack[Options]) -> Call[P, T]:
        """The same task with other options: `send.options(delay="10m").enqueue(...)`."""
        return Call(self, options)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Add a job that calls the function with these arguments."""
        call: Call[P, T] = Call(self, {})
        return await call.enqueue(*args, **kwargs)

    async def enqueue_many(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[Job[T]]:
        """Add many jobs in few commands: a tuple of positional or a dict of keyword arguments for each."""
        return await Call[P, T](self, {}).enqueue_many(calls)

    async def schedule(self, at: datetime, /, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Add a job that runs at this time, a timezone-aware datetime."""
        return await Call[P, T](self, {"at": at}).enqueue(*args, **kwargs)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature:
        """The call as a part of a flow."""
        return Signature(self, args, kwargs)

    # -- running -------------------------------------------------------------------------------------------------------

    def run_in_child(self, context: JobContext) -> Any:
        """What a process of the worker calls."""
        return self.arguments.call(self.function, self.arguments.decode(context.data), context)


class Call(Generic[P, T]):
    """A task together with options for its next jobs."""

    def __init__(self, task: Task[P, Any, T], options: Options) -> None:
        self.task = task
        self._options = {**task.app.options, **task.job_options, **options}

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Add a job that calls the function with these arguments."""
        job: Job[T] = self.job(Job, (await self.task.app.call(self.push(args, kwargs))).id)
        return job

    async def enqueue_many(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[Job[T]]:
        """Add many jobs in few commands: a tuple of positional or a dict of keyword arguments for each."""
        jobs: list[Job[T]] = []
        for push in self.pushes(calls):
            jobs += [self.job(Job, job_id) for job_id in (await self.task.app.call(push)).ids]
        return jobs

    def pushes(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> Iterator[commands.jobs.PushBatch]:
        """The commands that add many."""
        for entries in batches(map(self._entry, calls), size_of_entry):
            yield commands.jobs.PushBatch(queue=self.task.queue, jobs=entries)

    def push(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> commands.jobs.Push:
        """The command that adds the job."""
        return commands.jobs.Push(queue=self.task.queue, **self._fields(args, kwargs))

    def job(self, kind: Any, job_id: str) -> Any:
        task = self.task
        return kind(task.app.client, job_id, task.queue, task.name, task.arguments.result)

    def _entry(self, call: tuple[Any, ...] | Mapping[str, Any]) -> commands.jobs.PushEntry:
        if not isinstance(call, tuple | list | Mapping):
            raise InvalidCommand(f"the arguments of a call are a tuple or a dict, not {call!r}: write ({call!r},)")
        args, kwargs = ((), dict(call)) if isinstance(call, Mapping) else (tuple(call), {})
        return commands.jobs.PushEntry(**self._fields(args, kwargs))

    def _fields(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        task = self.task
        data = task.arguments.encode(args, kwargs, task.app.envelope(task))
        return {"name": task.name, "data": data, **wire_options(self._options, task.app.client.clock.now_ms)}


class Signature:
    """A call that has not been made yet."""

    def __init__(self, task: Task[Any, Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs

    def data(self) -> dict[str, Any]:
        return self.task.arguments.payload(self.args, self.kwargs, self.task.app.envelope(self.task))


AnyTask = Task[Any, Any, Any]
