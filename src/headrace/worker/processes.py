"""Handlers in separate processes: they use other cores, and can be killed when they run too long.

A child is started with `spawn`, imports the function by its name, and runs one job at a time. Both sides exchange
encoded data, as over any other wire: nothing is pickled. A child is replaced after `max_jobs` jobs, and when it was
killed or died. It leads a group of processes, and the programs that its job has started are killed with it.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from headrace.client.job import JobInfo
from headrace.client.payloads import encode_payload
from headrace.errors import InvalidCommand
from headrace.worker.context import JobContext, set_current
from headrace.worker.failures import (
    JobCancelled,
    UnrecoverableError,
    is_final,
    reason_of,
    retry_after_ms,
    stack_of,
)

_GLANCE: Final = 0.05
"""Seconds between two looks at whether the job was cancelled."""


class Call(Struct):
    """What a child is asked: run this function with the context of this job."""

    module: str
    function: str
    is_task: bool
    info: JobInfo

    @classmethod
    def of(cls, function: Any, info: JobInfo) -> Call:
        return cls(function.__module__, function.__qualname__, hasattr(function, "run_in_child"), info)


class Answer(Struct, kw_only=True, omit_defaults=True):
    """What a child says: how the call ended, or in between a thing to tell the server."""

    kind: Literal["begun", "done", "failed", "progress", "log"]
    result: Raw = Raw(b"")
    reason: str = ""
    stack: list[str] = []
    is_unrecoverable: bool = False
    retry_after: float | None = None
    # As the handler gave them: the server says what is wrong with them, as it does to other handlers.
    percent: Any = 0
    message: Any = None
    level: Any = "info"


_END: Final = ("done", "failed")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_call: Final = msgspec.msgpack.Decoder(Call).decode
_decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
_BEGUN: Final = _encode(Answer(kind="begun"))


class ChildDied(RuntimeError):
    """The process of a handler ended without an answer: it was killed, ran out of memory or called exit."""


class NeverBegun(ChildDied):
    """It ended before it took the call: nothing was tried."""


class TimeLimitExceeded(TimeoutError):
    """The handler ran longer than its job may, and was stopped."""


class RemoteFailure(Exception):
    """What was raised in the child: its reason and stack, as texts."""

    def __init__(self, reason: str, stack: list[str], is_unrecoverable: bool, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stack = stack
        self.is_unrecoverable = is_unrecoverable
        self.retry_after = retry_after


class Child:
    """One process and the pipe to it. Used by one thread at a time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="headrace-child", daemon=True)
        self._process.start()
        theirs.close()
        # A worker that ends without a stop has to kill it: multiprocessing would ask it to end, and wait.
        Finalize(self, _kill_group, args=(self._process,), exitpriority=0)
        self.jobs = 0
        self.is_free = True
        """Whether it waits for a call: what it says otherwise belongs to the last one."""
        self._has_begun = False

    def run(self, call: Call, context: JobContext, limit: float | None) -> Raw:
        """The encoded result of the call. The child is killed when the limit passes or the job is cancelled."""
        self.jobs += 1
        self.is_free = self._has_begun = False
        self._send(call)
        deadline = float("inf") if limit is None else time.monotonic() + limit
        while True:
            if self._pipe.poll(_GLANCE):
                answer = self._receive()
                if answer.kind == "begun":
                    self._has_begun = True
                    continue
                self.is_free = answer.kind in _END
                if answer.kind == "done":
                    return answer.result
                if answer.kind == "failed":
                    raise RemoteFailure(answer.reason, answer.stack, answer.is_unrecoverable, answer.retry_after)
                _pass_on(answer, context)
            if context.cancelled:
                self.kill()
                raise JobCancelled
            if time.monotonic() > deadline:
                self.kill()
                raise TimeLimitExceeded(f"it ran longer than {limit:g} s and was killed")

    def _send(self, call: Call) -> None:
        try:
            self._pipe.send_bytes(_encode(call))
        except OSError:
            raise self._death() from None

    def _receive(self) -> Answer:
        try:
            return _decode_answer(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None

    def _death(self) -> ChildDied:
        self._process.join(5)
        text = f"the process of the handler died (exit code {self._process.exitcode})"
        return ChildDied(text) if self._has_begun else NeverBegun(text)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """Its pipe ends with it: whoever waits for an answer learns so."""
        _kill_group(self._process)
        self._process.join(5)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(b"")
        self._process.join(2)
        if self._process.is_alive():
            self.kill()


def _kill_group(process: SpawnProcess) -> None:
    """Kill a child and what it has started: that would go on with the job while somebody else begins it again."""
    if process.pid is not None and process.is_alive():  # as long as nobody has waited for it, its number is its own
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has not come to make a group of its own
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


class Children:
    """Idle children, kept for the next call. As many exist as calls run at once."""

    def __init__(self, max_jobs: int | None = None) -> None:
        self._max_jobs = max_jobs
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._is_stopped = False
        self._lock = threading.Lock()

    def run(self, call: Call, context: JobContext, limit: float | None) -> Raw:
        idle = self._idle_child()
        if idle is not None:
            try:
                return self._run_in(idle, call, context, limit)
            except NeverBegun:  # it was about to die when it was chosen
                if self._is_stopped:
                    raise
        return self._run_in(Child(), call, context, limit)

    def _run_in(self, child: Child, call: Call, context: JobContext, limit: float | None) -> Raw:
        with self._lock:
            self._busy.add(child)
        try:
            return child.run(call, context, limit)
        finally:
            self._keep(child)

    def _idle_child(self) -> Child | None:
        """One that lives: the system may have killed it while it had nothing to do."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
        return None

    def _keep(self, child: Child) -> None:
        is_spent = self._max_jobs is not None and child.jobs >= self._max_jobs
        with self._lock:
            self._busy.discard(child)
            if child.is_free and child.is_alive and not is_spent:
                self._idle.append(child)
        if not child.is_free:
            child.kill()
        elif is_spent:
            child.stop()

    def stop(self) -> None:
        """End all of them; those that still run a job are killed."""
        with self._lock:
            self._is_stopped = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for child in busy:
            child.kill()
        for child in idle:
            child.stop()


def _pass_on(answer: Answer, context: JobContext) -> None:
    if answer.kind == "progress":
        context.progress(answer.percent, answer.message)
    else:
        context.log(answer.message or "", answer.level)


# -- in the child ------------------------------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    # Ctrl-C reaches the whole group of processes, and so does systemd's SIGTERM: the worker decides what becomes of its
    # children. A handler, because what is ignored would be ignored by the programs that a job starts, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _left_to_worker)
    os.setpgrp()
    threading.Thread(target=_end_with_parent, name="headrace-parent", daemon=True).start()
    while (call := _next_call(pipe)) is not None:
        pipe.send_bytes(_BEGUN)
        context = _ChildContext(call.info, pipe)
        # In a copy: what a job sets in its context variables is nothing to the next one.
        answer = contextvars.copy_context().run(_answer, context, call)
        _flush_streams()
        context.say(answer)
    os._exit(0)


def _flush_streams() -> None:
    """Let out what the job printed: its process may be killed at any time after it, and even its own end is sudden."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or not be there at all
            stream.flush()


def _left_to_worker(number: int, frame: object) -> None:
    """A signal that the worker got as well."""


def _end_with_parent() -> None:
    """A worker that was killed lost its jobs: somebody else will run them, so nobody must go on with them here."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(os.getpid(), signal.SIGKILL)


def _next_call(pipe: Connection) -> Call | None:
    try:
        asked = pipe.recv_bytes()
    except (EOFError, OSError):
        return None
    return _decode_call(asked) if asked else None


def _answer(context: JobContext, call: Call) -> Answer:
    set_current(context)
    try:
        return Answer(kind="done", result=encode_payload(_function_of(call)(context), "a result"))
    except Exception as error:
        return Answer(
            kind="failed",
            reason=reason_of(error),
            stack=stack_of(error, call.info.stack_trace_limit),
            is_unrecoverable=is_final(error),
            retry_after=retry_after_ms(error),
        )


class _ChildContext(JobContext):
    """Tells through the pipe what the context of the parent tells the server. Threads of the handler may tell as well,
    but not when it has ended: it would be taken for news of the next job."""

    def __init__(self, info: JobInfo, pipe: Connection) -> None:
        super().__init__(info, lambda command: None)
        self._pipe = pipe
        self._lock = threading.Lock()
        self._has_ended = False

    def progress(self, percent: float, message: str | None = None) -> None:
        self.say(Answer(kind="progress", percent=percent, message=message))

    def log(self, message: str, level: Literal["info", "warn", "error"] = "info") -> None:
        self.say(Answer(kind="log", message=message, level=level))

    def say(self, answer: Answer) -> None:
        encoded = _encode(answer)
        with self._lock:
            if not self._has_ended:
                self._has_ended = answer.kind in _END
                self._pipe.send_bytes(encoded)


def check_importable(function: Callable[..., Any]) -> None:
    """Refuse functions that a process of its own could not find."""
    name = getattr(function, "__qualname__", None)
    if name is None or "<" in name:
        raise InvalidCommand(
            f"{name or function!r} cannot run in a process of its own: define it at the top of a module"
        )


def _function_of(call: Call) -> Callable[[JobContext], Any]:
    """The function behind a name; a task gives the one that reads its arguments."""
    found: Any = importlib.import_module(call.module)
    for part in call.function.split("."):
        found = getattr(found, part)
    if not call.is_task:
        return found  # type: ignore[no-any-return]
    if not hasattr(found, "run_in_child"):
        raise UnrecoverableError(
            f"{call.module}.{call.function} is the function and not its task: a process finds a task by the name of "
            "its function, so decorate it with @app.task(...) where it is defined"
        )
    return found.run_in_child  # type: ignore[no-any-return]
