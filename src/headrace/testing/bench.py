"""A test bench for one app: its tasks and queues as they are, on an engine in memory whose clock stands still.

Nothing is faked but the clock: commands, leases, retries, schedules, middleware and the encoding of arguments are those
of production. `advance` advances time, `drain` runs what is ready, `enqueued` lists what was enqueued.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

from headrace.client.channel import Channel, Done, Hear
from headrace.client.job import decode_job
from headrace.client.options import given_options
from headrace.client.payloads import decode_payload
from headrace.clock import ManualClock, SystemClock
from headrace.commands._base import Command
from headrace.commands.control import Waited, WaitJob
from headrace.commands.families import PushFamily
from headrace.commands.jobs import JobOptions, PullBatch, Push, PushBatch
from headrace.durations import Duration, milliseconds
from headrace.embedded import EmbeddedEngine, LocalPeer
from headrace.errors import HeadraceError, JobTimeout, LeaseLost, NotFound
from headrace.server.ticker import Ticker
from headrace.tasks.app import Headrace
from headrace.tasks.task import AnyTask
from headrace.tasks.worker import TaskWorker
from headrace.worker.attendant import Holding
from headrace.worker.context import JobContext
from headrace.worker.worker import log

T = TypeVar("T")

MAX_STEPS: Final = 100_000
"""Moments at which something falls due that one `advance` may cross."""
MAX_RUNS: Final = 1000
_GRACE: Final = 1.0
"""Seconds after which a wait for a job that nobody will run is called off."""


class BenchClock(ManualClock):
    """Starts now and stands still until it is advanced."""

    def __init__(self) -> None:
        super().__init__(SystemClock().now_ms())


class ShiftedClock(SystemClock):
    """The time that code under test reads, moved on as far as the bench: `at=datetime.now(UTC) + an_hour` means an
    hour of the bench's time."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def now_ms(self) -> int:
        return super().now_ms() + self._clock.monotonic_ms()


class StillTicker(Ticker):
    """Ends ticks as usual, but sets no timer: `advance` does what is due."""

    def _set_timer(self) -> None:
        """Nothing happens by itself."""

    def advance(self, clock: ManualClock, span_ms: int) -> None:
        """Go from one due time to the next, as time would."""
        end = clock.monotonic_ms() + span_ms
        for _ in range(MAX_STEPS):
            due = self._engine.next_due()
            if due > end:
                break
            clock.advance(max(0, due - clock.monotonic_ms()))
            self._sweep()
        else:
            raise HeadraceError(f"more than {MAX_STEPS} things fall due within this time: advance in smaller steps")
        clock.advance(end - clock.monotonic_ms())
        self._sweep()


@dataclass(frozen=True)
class Enqueued:
    """A job as it was put in. `args` and `kwargs` are what its task will be called with."""

    job_id: str
    queue: str
    name: str
    data: Any
    options: dict[str, Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job_id: str, queue: str, push: JobOptions) -> Enqueued:
        return cls(job_id, queue, push.name or "default", decode_payload(push.data), given_options(push))

    def as_call(self, task: AnyTask) -> Enqueued:
        bound = task.arguments.decode(self.data)
        return Enqueued(self.job_id, self.queue, self.name, self.data, self.options, bound.args, bound.kwargs)


class BenchEngine(EmbeddedEngine):
    """An engine in memory that records what is enqueued."""

    ticker_type = StillTicker
    ticker: StillTicker

    def __init__(self) -> None:
        self.clock = BenchClock()
        super().__init__(None, self.clock)
        self.enqueued: list[Enqueued] = []

    async def open(self) -> Channel:
        await self.start()
        return self.open_peer(owns_home=True)

    def open_peer(self, hear: Hear | None = None, *, owns_home: bool = False) -> LocalPeer:
        peer = BenchPeer(self, hear, owns_home)
        self._peers.add(peer)
        return peer

    @property
    def has_workers(self) -> bool:
        return self.engine.workers.stats().total > 0

    def note(self, command: Command[Any], reply: Any) -> None:
        if isinstance(command, Push):
            self.enqueued.append(Enqueued.of(reply.id, command.queue, command))
        elif isinstance(command, PushBatch):
            for job_id, entry in zip(reply.ids, command.jobs, strict=True):
                self.enqueued.append(Enqueued.of(job_id, command.queue, entry))
        elif isinstance(command, PushFamily):
            self.enqueued += [Enqueued.of(entry.id, entry.queue, entry.input) for entry in command.jobs]


class BenchPeer(LocalPeer):
    home: BenchEngine

    def submit(self, command: Command[Any], done: Done[Any], timeout: float) -> None:
        if isinstance(command, WaitJob):
            super().submit(command, self._in_real_time(command, done), timeout)
        elif isinstance(command, Push | PushBatch | PushFamily):
            super().submit(command, partial(self._noted, command, done), timeout)
        else:
            super().submit(command, done, timeout)

    def _noted(self, command: Command[Any], done: Done[Any], outcome: Any) -> None:
        if not isinstance(outcome, HeadraceError):
            self.home.note(command, outcome)
        done(outcome)

    def _in_real_time(self, wait: WaitJob, done: Done[Any]) -> Done[Any]:
        """The clock stands still, so that a deadline by it would never come."""
        waiting = [done]

        def end(outcome: Any) -> None:
            if waiting:
                waiting.pop()(outcome)

        def look() -> None:
            if not self.home.has_workers:
                end(JobTimeout(f"Job {wait.id} has not ended and no worker runs: drain() runs what is ready"))

        self._loop.call_later(_GRACE, look)
        self._loop.call_later((wait.timeout or 0) / 1000, end, Waited(completed=False))
        return end


@dataclass(frozen=True)
class Run:
    """A job that `drain` ran, and what its handler raised."""

    job_id: str
    queue: str
    name: str
    attempt: int
    error: BaseException | None


class Drainer(TaskWorker):
    """Runs jobs one after the other, in the loop that asks for it."""

    def __init__(self, app: Headrace, queues: Sequence[str]) -> None:
        super().__init__(app, queues, concurrency=1, name="drain")
        self._errors: dict[str, BaseException] = {}

    async def drain(self, limit: int) -> list[Run]:
        self._loop = asyncio.get_running_loop()
        runs: list[Run] = []
        async with self._app.alive() as self.state:
            try:
                while (holding := await self._next()) is not None:
                    if len(runs) == limit:
                        holding.given_back()
                        await self._client.ask(_outcome_of(holding))
                        raise HeadraceError(
                            f"{limit} jobs ran and {holding.info.name!r} is still ready: if no task enqueues itself "
                            "for ever, allow more with drain(limit=...)"
                        )
                    runs.append(await self._run_one(holding))
            finally:
                self._put_away()
        return runs

    async def _next(self) -> Holding | None:
        """A ready job. The queues take turns, in the order of their names."""
        for _ in self.queues:
            queue = self.queues.pop(0)
            self.queues.append(queue)
            pulled = await self._client.ask(PullBatch(queue=queue, count=1, owner=self.id, detach=True))
            if pulled.jobs:
                return Holding(decode_job(pulled.jobs[0]), pulled.tokens[0] if pulled.tokens else None)
        return None

    async def _run_one(self, holding: Holding) -> Run:
        context = JobContext(holding.info, self._tell, self.state)
        await asyncio.create_task(self._process_one(holding, context))
        try:
            await self._client.ask(_outcome_of(holding))
        except (NotFound, LeaseLost) as error:  # it was cancelled or taken away while it ran: as with a worker
            log.warning("the outcome of job %s was too late: %s", holding.info.id, error)
        info = holding.info
        return Run(info.id, info.queue, info.name, context.attempt, self._errors.pop(info.id, None))

    def _tell(self, command: Any) -> None:
        self._client.line.post(partial(self._client.submit, command, lambda outcome: None, self._client.timeout))

    def _failed(self, holding: Holding, error: BaseException) -> None:
        self._errors[holding.info.id] = error
        super()._failed(holding, error)

    def _put_away(self) -> None:
        """Leave neither threads nor processes behind, but for handlers that outlived their time limit."""
        self._children.stop()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            for thread in self._threads._threads:
                thread.join(_GRACE)


def _outcome_of(holding: Holding) -> Command[Any]:
    outcome = holding.outcome
    assert outcome is not None
    outcome.token = holding.token
    return outcome


class AppBench:
    """An app under test. Its methods are for async tests; `bench.sync` has the same ones for plain tests."""

    def __init__(self, app: Headrace, engine: BenchEngine) -> None:
        self.app = app
        self._engine = engine

    @property
    def sync(self) -> SyncAppBench:
        return SyncAppBench(self)

    @property
    def now(self) -> datetime:
        """The current time of the bench."""
        return datetime.fromtimestamp(self._engine.clock.now_ms() / 1000, UTC)

    def enqueued(self, task: AnyTask | None = None) -> list[Enqueued]:
        """What was enqueued during this test, in order: the calls of one task, or all jobs."""
        jobs = list(self._engine.enqueued)
        if task is None:
            return jobs
        return [job.as_call(task) for job in jobs if (job.queue, job.name) == (task.queue, task.name)]

    async def advance(self, span: Duration) -> None:
        """Advance time: delays and backoffs end, schedules fire, leases and deadlines expire. It runs no job."""
        span_ms = int(milliseconds(span, "advance"))

        async def move() -> None:
            self._engine.ticker.advance(self._engine.clock, span_ms)

        await asyncio.wrap_future(self.app.client.line.run(move))

    async def drain(self, *queues: str, limit: int = MAX_RUNS) -> list[Run]:
        """Run what is ready, and what becomes ready as a result, one by one in this loop; returns what ran.

        Jobs that fail are retried as in production: after their backoff, which `advance` lets pass. Without names the
        queues of the app's tasks are meant.
        """
        return await Drainer(self.app, queues or self._queues()).drain(limit)

    def _queues(self) -> list[str]:
        return sorted({task.queue for task in self.app.tasks.values()})

    async def enter_schedules(self) -> None:
        """Let the schedules and rate limits of the app count, as a worker does when it starts. Without it they do not,
        so that a test means the same at every time of day."""
        await self.app.enter_schedules(self._queues())


class SyncAppBench:
    """The bench for tests without a loop: each call runs one."""

    def __init__(self, bench: AppBench) -> None:
        self._bench = bench

    def advance(self, span: Duration) -> None:
        _run(self._bench.advance(span))

    def enter_schedules(self) -> None:
        _run(self._bench.enter_schedules())

    def drain(self, *queues: str, limit: int = MAX_RUNS) -> list[Run]:
        return _run(self._bench.drain(*queues, limit=limit))


def _run(work: Coroutine[Any, Any, T]) -> T:
    if asyncio._get_running_loop() is not None:
        work.close()
        raise HeadraceError("headrace_app.sync is for tests without a loop: here await the methods of headrace_app")
    # With a factory the runner leaves the current loop of the thread, which may be a fixture's, as it is.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


@contextlib.contextmanager
def put_on_bench(app: Headrace) -> Iterator[AppBench]:
    """Everything that talks through the app's client reaches an engine of this test, until the end of the block."""
    client, state = app.enter(), app.state
    engine = BenchEngine()
    client.divert(engine.open, ShiftedClock(engine.clock)).result()
    try:
        client.connect().result()
        yield AppBench(app, engine)
    finally:
        client.divert(None).result()
        app.state = state
        app.leave(keep_open=True)
