"""A worker: takes jobs from queues and runs a handler for each, on the loop that calls `run`.

Async handlers run on that loop, plain functions in threads, and with `run_in="process"` in processes that can be
killed. Pulling, heartbeats and outcomes are the attendant's, on a thread of its own: a handler that blocks the loop
delays its neighbours, but does not lose its job (a warning names it).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Raw

from headrace.client.client import Client
from headrace.client.line import mailbox_of
from headrace.client.patience import AWAY, RETRY_SECONDS, Patience
from headrace.client.payloads import encode_payload
from headrace.commands.jobs import GroupPull
from headrace.durations import Duration, seconds
from headrace.errors import HeadraceError, InvalidCommand
from headrace.ids import IdSource
from headrace.signals import StopSignals
from headrace.worker.attendant import Attendant, Figures, Holding
from headrace.worker.context import SETTLED, JobContext, RunIn, place_of, set_current
from headrace.worker.failures import JobCancelled, is_final, reason_of, retry_after_ms, stack_of
from headrace.worker.processes import Call, Children, RemoteFailure, TimeLimitExceeded, check_importable

log: Final = logging.getLogger("headrace.worker")
T = TypeVar("T")

Handler = Callable[[JobContext], Any]
BatchHandler = Callable[[list[JobContext]], Any]

_FINISH_SECONDS: Final = 5.0
_CLEAN_UP_SECONDS: Final = 1.0
"""For handlers that were cancelled, to end by themselves."""
_SHORTEST_LEASE: Final = 0.01
_WATCH_EVERY: Final = 1.0
_STOPS: Final = (asyncio.CancelledError, JobCancelled)
"""What ends a handler that is stopped."""


class Worker:
    """`await worker.run()` works until it is told to stop; `async with worker:` works in the background."""

    def __init__(
        self,
        client: Client,
        queues: str | Sequence[str],
        handler: Handler | BatchHandler,
        *,
        name: str = "worker",
        concurrency: int = 10,
        lease: Duration = 30,
        drain: Duration = 25,
        batch: int | None = None,
        run_in: RunIn | None = None,
        max_jobs_per_child: int | None = None,
        fair: bool = False,
        group_concurrency: int | None = None,
        state: Any = None,
    ) -> None:
        """`lease` is how long a job stays ours without a heartbeat; `drain` is how long running jobs may take after a
        stop: what runs then still is given back at once. With `batch` the handler gets up to so many jobs in a list.
        `fair` serves the groups of a queue in turn, each with at most `group_concurrency` jobs at once.
        """
        if not isinstance(client, Client):
            raise InvalidCommand(f"a worker needs a client, such as app.client, not {client!r}")
        self.queues = _names(queues)
        if not self.queues or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidCommand("a worker needs at least one queue and a concurrency of at least 1")
        if group_concurrency is not None and group_concurrency < 1:
            raise InvalidCommand(f"group_concurrency has to be at least 1, not {group_concurrency}")
        if batch is not None and (batch < 1 or run_in == "process"):
            raise InvalidCommand("a batch has at least 1 job, and its handler runs on the loop or in a thread")
        self.name = name
        self.id = f"{name}-{IdSource().next()}"
        self.concurrency = max(concurrency, batch or 1)
        self.state = state
        self._client = client
        self._handler: Any = handler
        self._batch = batch
        self._run_in = place_of(handler, run_in)
        if self._run_in == "process":
            check_importable(handler)
        self._drain = seconds(drain, "drain")
        self._lease = seconds(lease, "lease")
        if self._lease < _SHORTEST_LEASE:
            raise InvalidCommand(
                f"lease {lease!r} is too short: a heartbeat has to come in time, give it at least 10ms"
            )
        self._group = GroupPull(concurrency=group_concurrency) if fair or group_concurrency else None
        self._children = Children(max_jobs_per_child)
        self._threads: ThreadPoolExecutor | None = None
        self._running: dict[str, tuple[JobContext, asyncio.Task[None]]] = {}
        self._life: asyncio.Task[Any] | None = None
        """The task that runs it, while it runs."""
        self._cancellations = 0
        self._stop_signals = StopSignals()
        self._failure: HeadraceError | None = None
        self._begins_jobs = self._is_beginning = False
        self._busy = 0
        """Slots that are taken. A job that was lost and came back runs twice, for a while, and takes two."""
        self._begun = asyncio.Event()
        self._stopping = asyncio.Event()
        self.ready = asyncio.Event()
        """Set when it takes jobs, or was stopped before it could."""
        self._attendant: Attendant | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def figures(self) -> Figures:
        """What it has done so far."""
        return self._attendant.figures if self._attendant is not None else Figures()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    async def run(self, *, handle_signals: bool = True) -> None:
        """Work until `stop`, or until SIGTERM or Ctrl-C if signals are handled: a second one cuts the drain short."""
        if self._life is not None:
            raise HeadraceError(f"{self.id} is already running: create another worker to run two")
        loop = asyncio.get_running_loop()
        self._life = life = asyncio.current_task()
        assert life is not None
        self._begun.set()
        self._cancellations = life.cancelling()
        self._stop_signals = StopSignals()
        self._failure = None
        try:
            with _signals(loop, self._signalled) if handle_signals else contextlib.nullcontext():
                await self._work(loop)
        except asyncio.CancelledError:
            if not self._hurries or life.cancelling() > self._cancellations + self._hurries:
                raise  # somebody else wants its task to end
        finally:
            for _ in range(self._hurries):
                life.uncancel()
            self._life = None
            self._stopping, self.ready = asyncio.Event(), asyncio.Event()  # it may run once more, on another loop
        if self._failure is not None:
            raise self._failure

    def _signalled(self, at: float) -> None:
        """The first signal stops it. Each further one cancels its task, for nobody wants to wait: only `run` ends."""
        if self._life is None or not self._stop_signals.hear(at):
            return
        if self._stop_signals.count == 1:
            self.stop()
        else:
            self._life.cancel()

    @property
    def _hurries(self) -> int:
        """How often signals have cancelled its task."""
        return max(0, self._stop_signals.count - 1)

    async def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if await self._begin(loop):
                async with self._watched(loop):
                    await self._stopping.wait()
        finally:
            await self._end()

    def _give_up(self, error: HeadraceError) -> None:
        """Nothing will come any more: whoever runs the worker has to hear of it."""
        self._failure = error
        self._stopping.set()

    def stop_pulling(self) -> None:
        """Take no more jobs, for good; running ones continue."""
        if self._attendant is not None:
            self._client.line.post(self._attendant.stop_pulling)

    def stop(self) -> None:
        """Take no more jobs, let running ones finish within `drain`, give the rest back. From any thread."""
        life = self._life
        if life is None or life.get_loop() is asyncio._get_running_loop():
            self._stopping.set()
        else:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and it has ended with it
                life.get_loop().call_soon_threadsafe(self._stopping.set)

    async def __aenter__(self) -> Worker:
        """Returns when the app's lifespan has begun, and raises what it raised: the server may come later."""
        self._begun = asyncio.Event()
        self._task = asyncio.create_task(self.run(handle_signals=False))
        self._task.add_done_callback(self._tell_of_death)
        try:
            await self._begun.wait()
        except BaseException:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if self._task.done():
            await self._task
        return self

    def _tell_of_death(self, task: asyncio.Task[None]) -> None:
        """Whoever entered it gets the error when they leave, which may be far away."""
        if self._begun.is_set() and not task.cancelled() and task.exception() is not None:
            log.error("%s failed: %s", self.id, task.exception())
        self._begun.set()

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        if not self._task.done():  # else the stop would be that of the next run
            self.stop()
        await self._task

    async def _begin(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it works now: a worker may be stopped before its server answers."""
        home = mailbox_of(loop)
        self._loop = loop
        self._variables = contextvars.copy_context()
        self._begins_jobs = True
        self._attendant = Attendant(
            self._client,
            self.queues,
            name=self.name,
            owner=self.id,
            concurrency=self.concurrency,
            lease=self._lease,
            group=self._group,
            deliver=lambda: home.post(self._begin_ready),
            lose=lambda job_id: home.post(partial(self._abandon, job_id)),
            give_up=lambda error: home.post(partial(self._give_up, error)),
        )
        has_begun = await self._reach_server(self._attendant)
        self.ready.set()
        if not has_begun:
            return False
        log.info("%s started: queues %s, concurrency %d", self.id, ", ".join(self.queues), self.concurrency)
        return True

    async def _prepare(self) -> None:
        """What a kind of worker does when its server answers, before it takes jobs. It may be asked more than once."""

    async def _reach_server(self, attendant: Attendant) -> bool:
        """A worker may be started before its server: it waits for it, and says so now and then."""
        patience = Patience(self._client, log)
        while not self._stopping.is_set():
            try:
                await self._prepare()
                await self._on_line(attendant.start)
                return True
            except AWAY as error:
                patience.bear(error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), RETRY_SECONDS)
        return False

    async def _end(self) -> None:
        """Whoever cancels this does not want to wait. Every step is begun all the same: the attendant would go on to
        take jobs, and to keep the leases of those that nobody runs any more."""
        assert self._attendant is not None
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self._end_helpers)
            steps.push_async_callback(self._on_line, partial(self._attendant.finish, _FINISH_SECONDS))
            steps.push_async_callback(self._stop_handlers)
            # Awaited: what was taken before has begun when this returns, and gets its time to end as well.
            await self._on_line(self._attendant.stop)
            await self._let_handlers_end()

    async def _let_handlers_end(self) -> None:
        if self._running:
            hint = "; Ctrl-C or SIGTERM once more to stop now" if self._stop_signals.count else ""
            text = "%s is stopping: running jobs (%d) may take %g s to finish%s"
            log.info(text, self.id, len(self._running), self._drain, hint)
            await asyncio.wait({task for _, task in self._running.values()}, timeout=self._drain)

    async def _end_helpers(self) -> None:
        """Threads that run no job, and all processes."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        await asyncio.to_thread(self._children.stop)
        log.info("%s stopped", self.id)

    async def _stop_handlers(self) -> None:
        self._begins_jobs = False
        late = list(self._running.values())
        for context, task in late:
            self._cancel(context, task)
        if late:
            log.warning("%s releases unfinished jobs: %d", self.id, len(late))
            await asyncio.wait({task for _, task in late}, timeout=_CLEAN_UP_SECONDS)

    @property
    def has_handlers_left(self) -> bool:
        """Whether a handler still runs although its job was given back, in a thread or as a coroutine that does not let
        itself be cancelled: such a process should just end."""
        if any(not task.done() for _, task in self._running.values()):
            return True
        threads = [thread for thread in threading.enumerate() if thread.name.startswith(self.thread_prefix)]
        for thread in threads:
            thread.join(_CLEAN_UP_SECONDS / 10)  # idle ones end by themselves
        return any(thread.is_alive() for thread in threads)

    @property
    def thread_prefix(self) -> str:
        """How the names of the threads begin in which handlers run."""
        return f"headrace-{self.id}"

    async def _on_line(self, make: Callable[[], Any]) -> None:
        await asyncio.wrap_future(self._client.line.run(make))

    # -- running -------------------------------------------------------------------------------------------------------

    def _begin_ready(self) -> None:
        """Begin what there is, as far as slots are free."""
        assert self._attendant is not None
        if self._is_beginning:
            return  # a job has ended within `_spawn`: the loop below goes on
        self._is_beginning = True
        try:
            while self._begins_jobs and self._busy < self.concurrency:
                holdings = self._attendant.take(min(self._batch or 1, self.concurrency - self._busy))
                if not holdings:
                    return
                self._spawn(holdings)
        finally:
            self._is_beginning = False

    def _spawn(self, holdings: list[Holding]) -> None:
        assert self._attendant is not None
        tell = self._attendant.tell
        contexts = [JobContext(holding.info, tell, self.state, holding) for holding in holdings]
        self._busy += len(holdings)
        # What one job sets in its context variables is nothing to the next one, which begins where this one ends.
        task = self._loop.create_task(self._process(holdings, contexts), context=self._variables.copy())
        if not task.done():  # with asyncio.eager_task_factory a short job has ended by now
            for context in contexts:
                self._running[context.id] = (context, task)

    async def _process(self, holdings: list[Holding], contexts: list[JobContext]) -> None:
        try:
            if self._batch is None:
                await self._process_one(holdings[0], contexts[0])
            else:
                await self._process_batch(holdings, contexts)
        finally:
            for context in contexts:
                # A job that was taken away from us may have come back meanwhile, and run again.
                if self._running.get(context.id, (None, None))[0] is context:
                    del self._running[context.id]
            self._busy -= len(holdings)
            self._attendant.end(holdings)  # type: ignore[union-attr]
            self._begin_ready()

    async def _process_one(self, holding: Holding, context: JobContext) -> None:
        set_current(context)
        try:
            result = await self._call(context)
            if result is not SETTLED:
                holding.completed(_encoded(result))
        except BaseException as error:
            self._ended_badly([holding], [context], error)

    async def _process_batch(self, holdings: list[Holding], contexts: list[JobContext]) -> None:
        try:
            results = await self._in_place(self._run_in, partial(self._handler, contexts))
            if results is None:
                results = [None] * len(holdings)
            if len(results) != len(holdings):
                raise ValueError(f"the batch handler got {len(holdings)} jobs and returned {len(results)} results")
        except BaseException as error:
            self._ended_badly(holdings, contexts, error)
            return
        for holding, result in zip(holdings, results, strict=True):
            if isinstance(result, Exception):
                self._failed(holding, result)
            else:
                self._complete(holding, result)

    def _complete(self, holding: Holding, result: Any) -> None:
        try:
            holding.completed(_encoded(result))
        except InvalidCommand as error:
            self._failed(holding, error)

    def _ended_badly(self, holdings: list[Holding], contexts: list[JobContext], error: BaseException) -> None:
        """Jobs whose handler was stopped by us are given back. Whatever else it raised is a failure: sys.exit() in a
        handler must not end the worker, nor a CancelledError of its own let the job run for ever."""
        if self._is_cancelled and isinstance(error, _STOPS):
            self.stop_pulling()  # else what is given back would come again, and run while the worker ends
        for holding, context in zip(holdings, contexts, strict=True):
            if self._has_stopped(context, error):
                context.cancel()
                holding.given_back()
            else:
                self._failed(holding, error)
        if isinstance(error, KeyboardInterrupt):
            raise error

    def _has_stopped(self, context: JobContext, error: BaseException) -> bool:
        """Whether this ended a handler because we wanted it to end."""
        return isinstance(error, _STOPS) and (context.cancelled or self._is_cancelled)

    @property
    def _is_cancelled(self) -> bool:
        """Whether whoever runs the worker was cancelled. The end of asyncio.run() cancels all tasks at once, those of
        handlers, too: that is no failure of their jobs."""
        return self._life is not None and self._life.cancelling() > self._cancellations

    async def _call(self, context: JobContext) -> Any:
        return await self._execute(context, self._run_in, self._handler, partial(self._handler, context))

    async def _execute(self, context: JobContext, run_in: RunIn, function: Any, call: Callable[[], Any]) -> Any:
        """Run `call` where it belongs, within the time its job may take. A process finds `function` by its name."""
        limit = None if context.info.timeout is None else context.info.timeout / 1000
        context.run_in = run_in
        if run_in == "process":
            return await self._in_thread(partial(self._children.run, Call.of(function, context.info), context, limit))
        return await self._in_time(context, limit, call)

    async def _in_time(self, context: JobContext, limit: float | None, call: Callable[[], Any]) -> Any:
        if limit is None:
            return await self._in_place(context.run_in, call)
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                return await self._in_place(context.run_in, call)
        except TimeoutError:
            if not deadline.expired():
                raise  # the handler's own
            context.cancel()
            raise TimeLimitExceeded(f"it ran longer than {limit:g} s") from None

    async def _in_place(self, run_in: RunIn, call: Callable[[], Any]) -> Any:
        # A plain function may give what is still to be awaited: a lambda around a coroutine function, a decorated one.
        found = await self._in_thread(call) if run_in == "thread" else call()
        return await found if inspect.isawaitable(found) else found

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """A thread cannot be stopped: who is cancelled meanwhile waits for it no longer."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix=self.thread_prefix)
        threads = self._threads
        variables = contextvars.copy_context()
        try:
            return await self._loop.run_in_executor(threads, variables.run, _contained, call)
        except asyncio.CancelledError:
            # The thread may never end: the jobs to come get others, instead of waiting behind it.
            if self._threads is threads:
                self._threads = None
                threads.shutdown(wait=False)
            raise

    def _failed(self, holding: Holding, error: BaseException) -> None:
        if isinstance(error, RemoteFailure):
            reason, later = error.reason, error.retry_after
            holding.failed(reason, error.stack, unrecoverable=error.is_unrecoverable, retry_after=later)
        else:
            reason, later = reason_of(error), retry_after_ms(error)
            stack = stack_of(error, holding.info.stack_trace_limit)
            holding.failed(reason, stack, unrecoverable=is_final(error), retry_after=later)
        extra = {"job_id": holding.info.id, "queue": holding.info.queue, "task": holding.info.name}
        log.warning("job %s of %s failed: %s", holding.info.id, holding.info.queue, reason, extra=extra)

    def _abandon(self, job_id: str) -> None:
        """The job is not ours any more: tell its handler."""
        context, task = self._running.get(job_id, (None, None))
        if context is not None and task is not None:
            if context.run_in == "process" or self._batch is not None:
                context.cancel()
            else:
                self._cancel(context, task)

    def _cancel(self, context: JobContext, task: asyncio.Task[None]) -> None:
        context.cancel()
        # Not at once: a task that is cancelled before its first step never comes to give its slot back.
        self._loop.call_soon(task.cancel)

    # -- watching the loop ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _watched(self, loop: asyncio.AbstractEventLoop) -> AsyncIterator[None]:
        """From another thread, look whether the loop answers; if not, say where it hangs."""
        ended = threading.Event()
        thread = threading.get_ident()
        watcher = threading.Thread(
            target=_watch, args=(loop, thread, ended, self._names), name="headrace-watch", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            ended.set()

    def _names(self) -> list[str]:
        """The job that has the loop; when that cannot be told, all of them."""
        running = list(self._running.values())
        at_work = asyncio.current_task(self._loop)
        chosen = [context for context, task in running if task is at_work] or [context for context, _ in running]
        return sorted({f"{context.queue}:{context.name}" for context in chosen})


async def until_ready(worker: Worker, life: asyncio.Task[None]) -> None:
    """Return when it takes jobs; raise what ended `life`, the task that runs it, before."""
    ready = asyncio.ensure_future(worker.ready.wait())
    try:
        await asyncio.wait((ready, life), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
    if life.done():
        await life


def _watch(
    loop: asyncio.AbstractEventLoop, thread: int, ended: threading.Event, names: Callable[[], list[str]]
) -> None:
    while not ended.wait(_WATCH_EVERY):
        if not names():
            continue
        answered = threading.Event()
        asked = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(answered.set)
        if answered.wait(_WATCH_EVERY):
            continue
        frame = sys._current_frames().get(thread)
        where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        running = ", ".join(names())
        while not answered.wait(_WATCH_EVERY) and not ended.is_set():
            pass
        blocked = (time.monotonic() - asked) * 1000
        log.warning("the event loop was blocked for %d ms while %s ran; it hung at\n%s", blocked, running, where)


def _contained(call: Callable[[], T]) -> T:
    """A future cannot hold a StopIteration: whoever awaits it would wait for ever."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("the handler raised StopIteration").with_traceback(error.__traceback__) from error


def _encoded(result: Any) -> Raw | None:
    return None if result is None else encode_payload(result, "a result")


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_stops: Final[dict[asyncio.AbstractEventLoop, list[Callable[[float], None]]]] = {}
"""How the workers of a loop are told of a signal, and when it came: it stops all of them."""
_replaced: Final[dict[signal.Signals, Any]] = {}
"""The handlers that were there before ours."""


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[float], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        raise HeadraceError("signals can be handled in the main thread only: write run(handle_signals=False) here")
    if not _stops:
        _handle_signals()
    stops = _stops.setdefault(loop, [])
    stops.append(stop)
    try:
        yield
    finally:
        stops.remove(stop)
        if not stops:
            del _stops[loop]
        if not _stops:
            _restore_signals()


def _handle_signals() -> None:
    """Not with the loop's own handlers: those would replace the program's, for good, and forked children would share
    them, so that the SIGTERM with which a handler ends its pool of processes would stop the worker."""
    for number in _SIGNALS:
        _replaced[number] = signal.signal(number, _stop_all)
        signal.siginterrupt(number, False)


def _restore_signals() -> None:
    while _replaced:
        number, handler = _replaced.popitem()
        if signal.getsignal(number) is _stop_all:  # else the program has set another one since
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python


def _stop_all(number: int, frame: object) -> None:
    for loop, stops in list(_stops.items()):
        for stop in list(stops):
            with contextlib.suppress(RuntimeError):  # the loop was closed with the worker in it
                loop.call_soon_threadsafe(stop, time.monotonic())


_forking = threading.local()


def _hold_signals() -> None:
    """A signal to a child that has still to be rid of our handlers waits for that: it would be lost in them."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if _replaced else ())


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _leave_signals_to_parent() -> None:
    _stops.clear()
    _restore_signals()
    _release_signals()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_leave_signals_to_parent)


def _names(queues: str | Sequence[str]) -> list[str]:
    names = [queues] if isinstance(queues, str) or not isinstance(queues, Iterable) else list(queues)
    if not all(isinstance(name, str) for name in names):
        raise InvalidCommand(f"a worker needs the names of its queues, not {queues!r}")
    return names
