"""Notifications from other brokers: a queue that somebody waits on here got jobs, or an awaited job has ended.

Subscribed on a connection of its own, reopened when it breaks. What is missed meanwhile is found by the slow poll of
every second (`look_after`), so a lost message costs time and never a job.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from headrace.backends.valkey.connection import Connection
from headrace.backends.valkey.transport import answer
from headrace.backends.valkey.url import ValkeyUrl
from headrace.errors import StorageUnavailable

_PING_EVERY_S: Final = 5.0
_PAUSE_S: Final = 0.2

Heard = Callable[[bytes, bytes], None]


class Wakes:
    def __init__(self, url: ValkeyUrl, channels: list[str], heard: Heard, mended: Callable[[], None]) -> None:
        self._url = url
        self._hosts = itertools.cycle(url.hosts)
        self._connection = self._new_connection()
        self._channels = channels
        self._heard = heard
        self._mended = mended
        self._task: asyncio.Task[None] | None = None

    def _new_connection(self) -> Connection:
        """To the next of the given hosts: any node of a cluster passes on what is published."""
        return Connection(self._url, *next(self._hosts), on_push=self._take)

    async def open(self) -> None:
        """Listen from now on. Who only adds jobs never does: the server need not tell them of each."""
        if self._task is None:
            await answer(self._connection.call("SUBSCRIBE", *self._channels))
            self._task = self._task or asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._connection.close()

    def _take(self, message: list[Any]) -> None:
        self._heard(message[1], message[2])

    async def _keep(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._connection.lost(), _PING_EVERY_S)
            except TimeoutError:
                await self._ping()
                continue
            await self._subscribe_again()

    async def _ping(self) -> None:
        try:
            await answer(self._connection.call("PING"))  # a server that loads its data refuses
        except StorageUnavailable:
            await self._subscribe_again()

    async def _subscribe_again(self) -> None:
        while True:
            try:
                await answer(self._connection.call("SUBSCRIBE", *self._channels))
            except StorageUnavailable:
                await asyncio.sleep(_PAUSE_S)
                await self._connection.close()
                self._connection = self._new_connection()
            else:
                self._mended()
                return
