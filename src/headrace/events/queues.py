"""QueueManager: one queue per event (`event.{name}`) and consumer group (`event.{name}.{group}`), and their workers.

Options of a job are merged from the retry default, then the manager's defaults, then the call; the later ones win.
Leases are 5 s: when a worker dies silently, another one has its events within twice that time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, cast

from headrace.client.client import Client
from headrace.client.options import Options, wire_options
from headrace.client.payloads import encode_payload
from headrace.client.queue import NewJob, Queue, State
from headrace.commands.families import FamilyEntry, PushFamily
from headrace.commands.jobs import PushEntry
from headrace.durations import Duration
from headrace.errors import InvalidCommand
from headrace.events.message import JOB_NAME
from headrace.hooks import Hooks
from headrace.propagation import Retry
from headrace.worker.context import JobContext, RunIn
from headrace.worker.worker import Worker, until_ready

DEFAULT_CONCURRENCY: Final = 10
LEASE_SECONDS: Final = 5.0

JobHandler = Callable[[JobContext, "EventWorker"], Awaitable[Any]]


class QueueMetrics(Protocol):
    """Hooks that are called for every job; all are optional, and none can break a job."""

    def on_job_added(self, event_name: str, job_id: str) -> None: ...
    def on_job_completed(self, event_name: str, job_id: str, duration_ms: float) -> None: ...
    def on_job_failed(self, event_name: str, job_id: str, error: BaseException) -> None: ...


class EventWorker(Worker):
    """A worker of one event and group. Handlers are given it, to run what blocks in its threads."""

    def __init__(self, client: Client, queue: str, handler: JobHandler, **options: Any) -> None:
        super().__init__(client, queue, cast("Any", handler), run_in="loop", **options)

    async def start(self) -> None:
        """Return when jobs can come; raise what ended it before."""
        await self.__aenter__()
        assert self._task is not None
        try:
            await until_ready(self, self._task)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """Take no more events, let those that run end, give the rest back."""
        await self.__aexit__()

    async def _call(self, context: JobContext) -> Any:
        return await self._execute(context, "loop", None, lambda: self._handler(context, self))

    async def run_in_place(self, run_in: RunIn, call: Callable[[], Any]) -> Any:
        return await self._in_place(run_in, call)

    def has_failed(self, context: JobContext, error: BaseException) -> bool:
        """Whether a handler failed, be it by sys.exit() or a CancelledError of its own: not if we have stopped it."""
        return not isinstance(error, KeyboardInterrupt | GeneratorExit) and not self._has_stopped(context, error)


class QueueManager:
    """The queues of events and the workers on them."""

    def __init__(
        self,
        client: Client,
        *,
        queue_prefix: str = "event",
        default_retry: Retry | None = None,
        default_job_options: Options | None = None,
        default_worker_options: dict[str, Any] | None = None,
        metrics: Any = None,
        queue_class: type[Queue] = Queue,
        worker_class: type[EventWorker] = EventWorker,
        logger: logging.Logger | None = None,
    ) -> None:
        self.queue_prefix = queue_prefix
        self._client = client
        self.defaults: Options = {**(default_retry or Retry()).options(), **(default_job_options or {})}
        self._worker_options = {"concurrency": DEFAULT_CONCURRENCY, "lease": LEASE_SECONDS}
        self._worker_options |= default_worker_options or {}
        self._queue_class = queue_class
        self._worker_class = worker_class
        self._hooks = Hooks(metrics, logger or logging.getLogger("headrace.events"))
        self._queues: dict[str, Queue] = {}
        self._workers: dict[str, EventWorker] = {}

    # -- queues --------------------------------------------------------------------------------------------------------

    def get_queue_name(self, event_name: str, group: str | None = None) -> str:
        return ".".join(part for part in (self.queue_prefix, event_name, group) if part)

    def get_queue(self, event_name: str, group: str | None = None) -> Queue:
        name = self.get_queue_name(event_name, group)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = self._queue_class(self._client, name)
        return queue

    def job_id(self, event_name: str, group: str | None, key: str) -> str:
        """The id under which a keyed event is found. Ids are one space for all queues, keys one for each event."""
        return f"{key}@{self.get_queue_name(event_name, group)}"

    async def add_job(self, event_name: str, data: Any, group: str | None = None, **options: Any) -> str:
        """Add one job; its id, or that of the job which has the same id already."""
        queue = self.get_queue(event_name, group)
        job = await queue.add(JOB_NAME, data, **cast("Options", {**self.defaults, **options}))
        self._hooks.tell("on_job_added", event_name, job.id)
        return job.id

    async def add_to_groups(
        self, event_name: str, data: Any, jobs: Sequence[tuple[str | None, dict[str, Any]]]
    ) -> None:
        """Add one event for several groups: all get it, or none. Each needs an id among its options."""
        encoded = encode_payload(data)
        entries = []
        for group, given in jobs:
            options = {**self.defaults, **given}
            job_id = options.pop("job_id")
            fields = wire_options(options, self._client.clock.now_ms)
            entry = PushEntry(name=JOB_NAME, data=encoded, **fields)
            entries.append(FamilyEntry(id=job_id, queue=self.get_queue_name(event_name, group), input=entry))
        await self._client.ask(PushFamily(jobs=entries))
        for entry_ in entries:
            self._hooks.tell("on_job_added", event_name, entry_.id)

    async def add_jobs(self, event_name: str, group: str | None, jobs: Sequence[tuple[Any, dict[str, Any]]]) -> None:
        """Add many events in few commands."""
        new = [
            NewJob(name=JOB_NAME, data=data, options=cast("Options", {**self.defaults, **options}))
            for data, options in jobs
        ]
        for job in await self.get_queue(event_name, group).add_many(new):
            self._hooks.tell("on_job_added", event_name, job.id)

    async def remove(self, event_name: str, job_id: str, group: str | None = None) -> bool:
        """Withdraw a job that has not begun. False: there is none, or it is too late."""
        job = self.get_queue(event_name, group).job(job_id)
        return await job.state() in ("waiting", "prioritized", "delayed") and await job.cancel()

    async def clean(self, event_name: str, older_than: Duration, state: State, limit: int = 1000) -> list[str]:
        return await self.get_queue(event_name).clean(older_than, state, limit)

    # -- workers -------------------------------------------------------------------------------------------------------

    async def register_worker(
        self, event_name: str, handler: JobHandler, group: str | None = None, **options: Any
    ) -> EventWorker:
        """Handle the events of a queue; returns when they can come."""
        name = self.get_queue_name(event_name, group)
        if name in self._workers:
            raise InvalidCommand(f"event {event_name!r} has a handler of group {group or 'default'} here already")

        async def measured(context: JobContext, worker: EventWorker) -> Any:
            return await self._measured(event_name, handler, context, worker)

        worker = self._worker_class(self._client, name, measured, name=name, **{**self._worker_options, **options})
        self._workers[name] = worker
        try:
            await worker.start()
        except BaseException:
            self._workers.pop(name, None)
            raise
        return worker

    async def close_worker(self, event_name: str, group: str | None = None) -> None:
        """Handle the events of a queue no more."""
        worker = self._workers.pop(self.get_queue_name(event_name, group), None)
        if worker is not None:
            await worker.close()

    async def _measured(self, event_name: str, handler: JobHandler, context: JobContext, worker: EventWorker) -> Any:
        began = time.perf_counter()
        try:
            result = await handler(context, worker)
        except BaseException as error:
            if worker.has_failed(context, error):
                self._hooks.tell("on_job_failed", event_name, context.id, error)
            raise
        self._hooks.tell("on_job_completed", event_name, context.id, (time.perf_counter() - began) * 1000)
        return result

    def stop_pulling(self) -> None:
        """Take no more events; handlers that run go on."""
        for worker in self._workers.values():
            worker.stop_pulling()

    async def stop(self) -> None:
        """Workers first, waiting for what they run; then the queues."""
        workers, self._workers = self._workers, {}
        # One that died was told of already, and keeps nobody else from ending.
        await asyncio.gather(*(worker.close() for worker in workers.values()), return_exceptions=True)
        self._queues.clear()
