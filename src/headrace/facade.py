"""The blocking facade of something that lives on an event loop, for threads.

Entering a facade runs what it wraps on a background loop, unless it runs on one already. A facade has a method
for each coroutine it offers and passes it to `_run`, together with the caller's context variables.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from headrace.errors import ProviderStoppedError

T = TypeVar("T")
_END_SECONDS: Final = 5.0


class Hosted(Protocol):
    """What a facade can stand for. `loop` is the one it runs on, None while it does not run."""

    loop: asyncio.AbstractEventLoop | None

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


H = TypeVar("H", bound=Hosted)


class SyncFacade(Generic[H]):
    def __init__(self, hosted: H) -> None:
        self._hosted = hosted
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._hosted.loop is None or not self._hosted.loop.is_running():
            self._hosted.loop = loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=loop.run_forever, name="headrace-background", daemon=True)
            self._thread.start()
            try:
                self._run(self._started())
            except BaseException:
                self._end(loop, self._thread)
                raise
        return self

    async def _started(self) -> None:
        try:
            await self._hosted.start()
        except BaseException:
            await self._hosted.stop()
            raise

    def __exit__(self, *_: object) -> None:
        loop = self._hosted.loop
        if self._thread is not None and loop is not None:
            try:
                self._run(self._hosted.stop())
            finally:
                self._end(loop, self._thread)

    def _end(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(_END_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)
        loop.close()
        self._hosted.loop = self._thread = None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._hosted.loop
        try:
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
