"""The blocking facade of something that lives on an event loop, for threads.

Entering a facade runs what it wraps on a background loop, unless it runs on one already. Any number of threads may
enter: the first one starts it, and the last one to leave stops it. A facade has a method for each coroutine it offers
and passes it to `_run`, together with the caller's context variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextvars import ContextVar
from typing import Any, Final, Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

from headrace.errors import ProviderStoppedError

T = TypeVar("T")
_END_SECONDS: Final = 5.0


class Hosted(Protocol):
    """What a facade can stand for. `loop` is the one it runs on, None while it does not run."""

    loop: asyncio.AbstractEventLoop | None

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


H = TypeVar("H", bound=Hosted)


class _Background:
    """The loop of one hosted thing, with a thread of its own while somebody is inside."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def check_process(self) -> None:
        """In a forked child whoever waited for the loop would wait for ever."""
        if self._thread is not None and self._process != os.getpid():
            raise RuntimeError(
                "what is entered before a fork keeps its thread in the parent process: "
                "enter it after the fork, in each process"
            )

    def enter(self, hosted: Hosted) -> bool:
        """Whether the caller counts, and has to leave. It does not where the loop is that of somebody else."""
        self.check_process()
        if _within.get() is self:
            return False  # a handler: the end waits for it, so it must not wait for the end
        with self._lock:
            if self._users == 0:
                if hosted.loop is not None and hosted.loop.is_running():
                    return False
                self._start(hosted)
            self._users += 1
            return True

    def leave(self, hosted: Hosted) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop(hosted)

    def _start(self, hosted: Hosted) -> None:
        async def started() -> None:
            _within.set(self)
            try:
                await hosted.start()
            except BaseException:
                await hosted.stop()
                raise

        self._process = os.getpid()
        self._loop = hosted.loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="headrace-background", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(started(), loop).result()
        except BaseException:
            self._end(hosted)
            raise

    def _stop(self, hosted: Hosted) -> None:
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(hosted.stop(), self._loop).result()
        finally:
            self._end(hosted)

    def _end(self, hosted: Hosted) -> None:
        assert self._loop is not None
        assert self._thread is not None
        loop, thread = self._loop, self._thread
        self._loop = self._thread = hosted.loop = None
        with contextlib.suppress(TimeoutError):  # something does not let itself be cancelled: it ends with the process
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(_END_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)
        if not thread.is_alive():
            loop.close()


_within: ContextVar[_Background | None] = ContextVar("headrace_background", default=None)
"""Set for what a hosted thing runs: its handlers, in threads as well."""
_backgrounds: Final[WeakKeyDictionary[Hosted, _Background]] = WeakKeyDictionary()


class SyncFacade(Generic[H]):
    def __init__(self, hosted: H) -> None:
        self._hosted = hosted
        self._background = _backgrounds.setdefault(hosted, _Background())
        self._counted: list[bool] = []
        """For each time it was entered, whether that has to be left."""

    def __enter__(self) -> Self:
        self._counted.append(self._background.enter(self._hosted))
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted.pop():
            self._background.leave(self._hosted)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._hosted.loop
        try:
            self._background.check_process()
            if loop is None:
                raise RuntimeError(f"{type(self).__name__} does not run: enter it first, with a `with` statement")
            if loop is _running_loop():
                raise RuntimeError("this loop would wait for itself: await the method without .sync() here")
        except RuntimeError:
            work.close()
            raise
        try:
            return asyncio.run_coroutine_threadsafe(work, loop).result()
        except CancelledError:
            raise ProviderStoppedError(f"{type(self).__name__} was stopped by another thread meanwhile") from None


async def _cancel_others() -> None:
    """Threads may wait for what still runs here: without the loop they would wait for ever."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
