"""The thread in which this process talks to queues: one loop for all sockets and embedded engines.

Callers, in whatever thread or loop they live, only post work to it and get replies posted back. So a handler that
blocks its own loop delays neither heartbeats nor other callers, and the blocking and the async client share one
implementation. After a fork the child creates a line of its own, and before the interpreter exits, what is still open
on the line is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")
Work = Callable[[], None]
Closer = Callable[[], Coroutine[Any, Any, None]]


class Mailbox:
    """Work for the thread of one loop, posted from any thread. However much is posted, the loop is woken once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._work: deque[Work] = deque()
        self._is_rung = False
        self._ending: deque[Work] | None = None

    def post(self, work: Work) -> None:
        self._work.append(work)
        if not self._is_rung:
            self._is_rung = True
            self.loop.call_soon_threadsafe(self._deliver)

    def at_end(self, work: Work) -> None:
        """On the loop's own thread: do something when all that was posted meanwhile is done. It saves a turn of the
        loop, which is a system call, for each thing that collects what others bring."""
        if self._ending is None:
            self.loop.call_soon(work)
        else:
            self._ending.append(work)

    def _deliver(self) -> None:
        # Cleared first: what is posted from now on rings again, what was posted before is in the queue already.
        self._is_rung = False
        self._ending = ending = deque[Work]()
        try:
            for _ in range(len(self._work)):
                self._do(self._work.popleft())
            while ending:
                self._do(ending.popleft())
        finally:  # Ctrl-C may end it anywhere in the main thread
            self._ending = None

    def _do(self, work: Work) -> None:
        try:
            work()
        except Exception as error:  # a bug; whoever posted the rest still has to be served
            self.loop.call_exception_handler({"message": "work for a loop failed", "exception": error})


_mailboxes: Final[dict[asyncio.AbstractEventLoop, Mailbox]] = {}


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """The one mailbox of a loop: all who post to it share its wake-ups."""
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        for closed in [known for known in list(_mailboxes) if known.is_closed()]:
            _mailboxes.pop(closed, None)
        mailbox = _mailboxes[loop] = Mailbox(loop)
    return mailbox


class Line:
    """A thread with a loop. `post` and `run` may be called from any thread."""

    def __init__(self) -> None:
        self.closers: dict[object, Closer] = {}
        """What is open on the line, and how it is closed. Only to be touched there."""
        self.loop = new_loop()
        self.mailbox = mailbox_of(self.loop)
        self.post = self.mailbox.post
        self._thread = threading.Thread(target=self._run, name="headrace-line", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine on the line."""
        future: Future[T] = Future()

        def begin() -> None:
            task = self.loop.create_task(make())
            task.add_done_callback(lambda done: _copy(done, future))

        self.post(begin)
        return future

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the line's own thread, where waiting for it would deadlock."""
        return threading.current_thread() is self._thread

    async def _close_all(self) -> None:
        while self.closers:
            _, close = self.closers.popitem()
            await close()

    def stop(self) -> None:
        """Close what is open, and end the thread. What was acknowledged is kept even if this fails."""
        with contextlib.suppress(Exception):
            self.run(self._close_all).result(timeout=5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)


def _copy(done: asyncio.Task[T], future: Future[T]) -> None:
    error = None if done.cancelled() else done.exception()
    if done.cancelled():
        future.cancel()
    elif not future.set_running_or_notify_cancel():
        return  # whoever asked waits no longer
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def new_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop that is available."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    else:
        import uvloop

        return uvloop.new_event_loop()


_lock = threading.Lock()
_line: Line | None = None


def shared_line() -> Line:
    """The line of this process."""
    return _line or _make_line()


def _make_line() -> Line:
    global _line
    with _lock:
        if _line is None:
            _line = Line()
            atexit.register(_stop_line)
        return _line


def _stop_line() -> None:
    global _line
    if _line is not None:
        _line.stop()
        _line = None


def _forget_line() -> None:
    """In a forked child: the thread stayed with the parent, and so did whoever held the lock."""
    global _line, _lock
    _line, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_line)
