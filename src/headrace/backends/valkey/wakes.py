"""Notifications from other brokers: a queue that somebody waits on here got jobs, or an awaited job has ended.

Subscribed on a connection of its own, reopened when it breaks. What is missed meanwhile is found by the slow poll of
every second (`look_after`), so a lost message costs time and never a job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from headrace.backends.valkey.connection import Connection
from headrace.backends.valkey.transport import answer, look_at_outcome
from headrace.backends.valkey.url import Address, ValkeyUrl
from headrace.errors import StorageUnavailable

_PING_EVERY_S: Final = 5.0
_PAUSE_S: Final = 0.2

Heard = Callable[[bytes, bytes], None]


class Wakes:
    """`addresses` are those of the nodes there are: any node of a cluster passes on what is published."""

    def __init__(
        self,
        url: ValkeyUrl,
        addresses: Callable[[], Sequence[Address]],
        channels: list[str],
        heard: Heard,
        mended: Callable[[], None],
    ) -> None:
        self._url = url
        self._addresses = addresses
        self._channels = channels
        self._heard = heard
        self._mended = mended
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen from now on. Who only adds jobs never does: the server need not tell them of each."""
        if self._task is None:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._begin())
                self._opening.add_done_callback(look_at_outcome)
            await asyncio.shield(self._opening)

    async def _begin(self) -> None:
        await self._subscribe()
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        for task in filter(None, (self._opening, self._task)):
            task.cancel()
            with suppress(asyncio.CancelledError, StorageUnavailable):
                await task
        if self._connection is not None:
            await self._connection.close()

    def _take(self, message: list[Any]) -> None:
        self._heard(message[1], message[2])

    async def _subscribe(self) -> None:
        """At the first node that accepts it; the one that had the connection before is asked last."""
        before, problem = self._connection, StorageUnavailable("Valkey has no nodes")
        left = None if before is None else (before.host, before.port)
        for address in sorted(self._addresses(), key=lambda address: address == left):
            if self._connection is not None:
                await self._connection.close()
            self._connection = Connection(self._url, *address, on_push=self._take)
            try:
                await answer(self._connection.call("SUBSCRIBE", *self._channels))
                return
            except StorageUnavailable as error:
                problem = error
        raise problem

    async def _keep(self) -> None:
        while True:
            if await self._is_over():
                await self._subscribe_again()

    async def _is_over(self) -> bool:
        """Whether the connection broke or its node has left the cluster, which is looked at now and then."""
        assert self._connection is not None
        try:
            await asyncio.wait_for(self._connection.lost(), _PING_EVERY_S)
        except TimeoutError:
            if (self._connection.host, self._connection.port) not in self._addresses():
                return True  # cut off from the others, maybe: then it hears nothing of what they publish
            try:
                await answer(self._connection.call("PING"))  # a server that loads its data refuses
            except StorageUnavailable:
                return True
            return False
        return True

    async def _subscribe_again(self) -> None:
        while True:
            try:
                await self._subscribe()
            except StorageUnavailable:
                await asyncio.sleep(_PAUSE_S)
            else:
                self._mended()
                return
