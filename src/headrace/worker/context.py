"""What a handler receives about the job it runs: its identity, how to report progress, whether to stop.

`progress` and `log` return at once: what they report is sent in order, before the outcome of the job. `current_job()`
returns the same object anywhere in the code that the handler calls.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, Literal, Protocol, get_args

from headrace import commands
from headrace.client.job import JobInfo
from headrace.commands._base import Command
from headrace.durations import Duration, seconds
from headrace.errors import HeadraceError, InvalidCommand

Tell = Callable[[Command[Any]], None]
RunIn = Literal["loop", "thread", "process"]
"""Where a handler runs: on the loop of its worker, in a thread, or in a process that can be killed."""


def place_of(function: Any, run_in: RunIn | None) -> RunIn:
    """Where a function runs: where it is told to, else a coroutine function on the loop and any other in a thread."""
    if not callable(function):
        raise InvalidCommand(f"a handler is a function, not {function!r}")
    is_async = inspect.iscoroutinefunction(function)
    name = getattr(function, "__name__", function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidCommand(f"{name} is a generator, and calling one runs none of its code: return a list instead")
    if run_in is None:
        return "loop" if is_async else "thread"
    if run_in not in get_args(RunIn):
        raise InvalidCommand(f"run_in is 'loop', 'thread' or 'process', not {run_in!r}")
    if is_async and run_in != "loop":
        raise InvalidCommand(f"{name}: an async function runs on the loop, not in a {run_in}")
    return run_in


SETTLED: Final = object()
"""What a handler returns that had its job completed by a command of its own, together with something else."""


class Lease(Protocol):
    """What proves that a job is ours; it is renewed, and replaced when the server was restarted."""

    token: str | None
    is_settling: bool


class JobContext:
    """The running job. Safe to use from the handler's own thread, and from threads it starts."""

    def __init__(self, info: JobInfo, tell: Tell, state: Any = None, lease: Lease | None = None) -> None:
        self.info = info
        self._lease = lease
        self.state = state
        """What the app's lifespan yielded."""
        self._tell = tell
        self.run_in: RunIn = "loop"
        self.log_fields: dict[str, str] = {}
        """What log records of this job say besides its id (see `worker.logs`)."""
        self._is_cancelled = False

    @classmethod
    def detached(cls) -> JobContext:
        """The context of a task that is called as a plain function: it reports to nobody."""
        return cls(JobInfo(id="", state="active"), lambda command: None)

    @property
    def id(self) -> str:
        """The id of the job, the same in every attempt."""
        return self.info.id

    @property
    def queue(self) -> str:
        """The queue it came from."""
        return self.info.queue

    @property
    def name(self) -> str:
        """Its name: that of its task, if it has one."""
        return self.info.name

    @property
    def data(self) -> Any:
        """Its data as plain values, decoded on each access: changing them has no side effect."""
        return self.info.data

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        return self.info.attempts + 1

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure now is final."""
        return self.attempt >= self.info.max_attempts

    @property
    def token(self) -> str | None:
        """The token of the lease under which the job runs now."""
        return None if self._lease is None else self._lease.token

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """For the time of a command that ends the job as part of something else: its end is not taken for a loss."""
        if self._lease is not None:
            self._lease.is_settling = True
        try:
            yield
        except BaseException:
            if self._lease is not None:
                self._lease.is_settling = False
            raise

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled, timed out or is being given back: a handler in a thread should check it."""
        return self._is_cancelled

    def wait_cancelled(self, timeout: Duration | None = None) -> bool:
        """Sleep until the job is cancelled, at most for `timeout`; whether it was. For handlers in threads."""
        # Created by the first caller, because few jobs need it and short ones would pay for it. `cancelled` is checked
        # afterwards, because `cancel` sets it first and looks for the event then.
        event: threading.Event = vars(self).setdefault("_cancelling", threading.Event())
        return self._is_cancelled or event.wait(None if timeout is None else seconds(timeout, "timeout"))

    def cancel(self) -> None:
        """Say in `cancelled` that the handler should end; the worker does so."""
        self._is_cancelled = True
        if "_cancelling" in vars(self):
            vars(self)["_cancelling"].set()

    def progress(self, percent: float, message: str | None = None) -> None:
        """Report progress. Returns at once; sent before the outcome of the job."""
        self._tell(commands.control.Progress(id=self.id, progress=percent, message=message))

    def log(self, message: str, level: Literal["info", "warn", "error"] = "info") -> None:
        """Add a line to the log of the job. Returns at once; sent before its outcome."""
        self._tell(commands.logs.AddLog(id=self.id, message=message, level=level))


_current: ContextVar[JobContext | None] = ContextVar("headrace_job", default=None)


def current_job() -> JobContext:
    """The job that runs here. Raises HeadraceError outside of a job."""
    job = _current.get()
    if job is None:
        raise HeadraceError("current_job() was called where no job runs")
    return job


running_job = _current.get


set_current = _current.set
