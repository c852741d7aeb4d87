"""Patience with a server that is not there yet: whoever deploys it with its workers starts them in any order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from headrace.client.client import Client
from headrace.errors import ClientError, ConfigError, HeadraceError, ProviderStoppedError, StorageUnavailable

T = TypeVar("T")

RETRY_SECONDS: Final = 1.0
AWAY: Final = (ClientError, StorageUnavailable)
"""What waiting may mend, unless it is a ConfigError as well. A wrong token is none of these."""
_TELL_AGAIN: Final = 30.0
"""Seconds after which it is logged again that the server is still away."""


class Patience:
    """Says now and then what one waits for."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        self._client = client
        self._log = log
        self._told = ""
        self._told_at = 0.0

    def bear(self, error: HeadraceError) -> None:
        """Log the error, unless it was logged just now; raise it if waiting is in vain."""
        if self._client.is_closed or isinstance(error, ConfigError):
            raise error
        if str(error) != self._told or time.monotonic() - self._told_at >= _TELL_AGAIN:
            self._told, self._told_at = str(error), time.monotonic()
            advice = getattr(error, "__notes__", ())
            self._log.warning("%s; trying again every second", "; ".join((self._told, *advice)))


async def reached(client: Client, log: logging.Logger, ask: Callable[[], Awaitable[T]]) -> T:
    """Do something as soon as the server answers. It may be done more than once."""
    patience = Patience(client, log)
    while True:
        try:
            return await ask()
        except AWAY as error:
            patience.bear(error)
        await asyncio.sleep(RETRY_SECONDS)


class Starting:
    """One start for all who ask for it at once. When none of them waits for it any more, it is cancelled."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._task: asyncio.Task[None] | None = None
        self._waiting = 0

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    async def join(self, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Return when it is done, whoever began it."""
        if self._task is not None and not self._task.done() and not self._waiting:
            await asyncio.wait([self._task])  # nobody waits for that one any more: it ends before another begins
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(start())
        task = self._task
        self._waiting += 1
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ProviderStoppedError(f"{self._what} were stopped while they were started") from None
            raise
        finally:
            self._waiting -= 1
            if not self._waiting:
                task.cancel()  # which one that is done does not notice

    async def stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
