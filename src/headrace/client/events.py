"""Live events of a queue: `async for event in events` or `for event in events`.

Events come over a connection of their own. After a reconnect a `gap` event says that events in between were missed.
A listener that is too slow loses the oldest events, and gets a `gap` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue as queues
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any, Final

from headrace import commands
from headrace.client.channel import Channel, EventView
from headrace.client.client import Client
from headrace.durations import Duration, seconds
from headrace.errors import ClientClosed, CommandTimeout, HeadraceError, RateLimited, StorageUnavailable

MAX_UNHEARD: Final = 10_000
_RETRY_AFTER: Final = 1.0


class _Ear:
    """A coroutine that waits for events, woken from any thread, once however many come meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awake = asyncio.Event()
        self._is_rung = False

    def ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._awake.set)

    async def wait(self) -> None:
        await self._awake.wait()
        self._awake.clear()
        self._is_rung = False


class QueueEvents:
    """The events of one queue from the moment it is entered (`async with` or `with`) until it is left."""

    def __init__(self, client: Client, queue: str) -> None:
        self._client = client
        self.queue = queue
        self._channel: Channel | None = None
        self._heard: deque[EventView] = deque()
        self._lock = threading.Condition()
        self._ears: list[_Ear] = []
        self._is_entered = False
        self._is_closed = False

    # -- on the line ---------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        home = await self._client.channel()
        channel = home.open_own(self._hear, self._changed)
        try:
            await channel.start()
            await self._subscribe(channel)
            if self._is_closed or self._client.is_closed:
                raise ClientClosed("nobody wants to hear these events any more")
        except BaseException:
            await channel.close()
            raise
        self._channel = channel
        self._client.at_end.add(self._end)

    @property
    def _wish(self) -> commands.connection.SubscribeEvents:
        return commands.connection.SubscribeEvents(queue=self.queue)

    async def _subscribe(self, channel: Channel) -> None:
        subscribed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        channel.submit(self._wish, subscribed.set_result, self._client.timeout)
        outcome = await subscribed
        if isinstance(outcome, HeadraceError):
            raise outcome

    def _changed(self, is_connected: bool) -> None:
        """A link that was lost comes back by itself and knows nothing: subscribe again."""
        if is_connected and self._channel is not None:
            self._channel.submit(self._wish, self._resumed, self._client.timeout)

    def _resumed(self, outcome: object) -> None:
        if not isinstance(outcome, HeadraceError):
            self._hear(EventView(event_type="gap", queue=self.queue, timestamp=time.time() * 1000))
        # The same link, not lost: nobody else would try again.
        elif isinstance(outcome, CommandTimeout):
            self._changed(True)
        elif isinstance(outcome, StorageUnavailable | RateLimited):
            asyncio.get_running_loop().call_later(_RETRY_AFTER, self._changed, True)

    def _hear(self, event: EventView) -> None:
        with self._lock:
            if len(self._heard) >= MAX_UNHEARD:
                self._heard.clear()
                self._heard.append(EventView(event_type="gap", queue=self.queue, timestamp=time.time() * 1000))
            self._heard.append(event)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()
            ears = list(self._ears)
        for ear in ears:
            ear.ring()

    async def _close(self) -> None:
        self._client.at_end.discard(self._end)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # -- for threads ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> QueueEvents:
        try:
            self._begin().result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end().result()

    def get(self, timeout: Duration | None = None) -> EventView:
        """The next event. Raises queue.Empty if none came in time, ClientClosed when the listening has ended."""
        self._check_entered()
        span = None if timeout is None else seconds(timeout, "timeout")
        with self._lock:
            if not self._lock.wait_for(lambda: self._heard or self._is_closed, span):
                raise queues.Empty
            if not self._heard:
                raise ClientClosed
            return self._heard.popleft()

    def __iter__(self) -> Iterator[EventView]:
        while True:
            try:
                yield self.get()
            except ClientClosed:
                return

    # -- for coroutines ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> QueueEvents:
        try:
            await asyncio.wrap_future(self._begin())
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wrap_future(self._end())

    async def __aiter__(self) -> AsyncIterator[EventView]:
        self._check_entered()
        ear = _Ear()
        self._ears.append(ear)
        try:
            while True:
                while (event := self._take()) is not None:
                    yield event
                if self._is_closed:
                    return
                await ear.wait()
        finally:
            self._ears.remove(ear)

    def _take(self) -> EventView | None:
        with self._lock:
            return self._heard.popleft() if self._heard else None

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def _check_entered(self) -> None:
        """Without it a listener that was never entered would wait for ever."""
        if not self._is_entered:
            raise HeadraceError("nothing is heard before it is entered: `async with app.events(...) as events:`")

    def _begin(self) -> Future[None]:
        self._is_entered, self._is_closed = True, False
        return self._client.line.run(self._open)

    def _end(self) -> Future[None]:
        """Also for one that is being opened: whoever entered it may have been cancelled meanwhile."""
        self._is_closed = True
        self._wake()
        return self._client.line.run(self._close)
