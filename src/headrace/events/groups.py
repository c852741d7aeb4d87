"""The consumer groups of an event: a small registry in the store, read by emitters.

Each group is a job that nobody takes, in a queue of its own, so it lives wherever jobs live. It is delayed for a
year: a waiting job that nobody takes looks like trouble to operators. Emitters keep a copy and subscribe to changes.
A group that joins gets the events that are emitted from then on; it stays until it is removed, so its events wait for
it while none of its workers runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.client.options import Backoff, Options
from headrace.client.queue import Queue
from headrace.commands.control import ChangeDelay
from headrace.errors import HeadraceError
from headrace.model import YEAR_MS
from headrace.propagation import Retry

log: Final = logging.getLogger("headrace.events")
_PAGE: Final = 1000
_MAX_GROUPS: Final = 100_000


class Subscriber(Struct, rename="camel", omit_defaults=True):
    """One group of one event. `group` is None for the default one. The retry policy is its handler's wish."""

    event: str
    group: str | None = None
    attempts: int | None = None
    backoff: str | None = None
    delay_ms: float | None = None
    max_delay_ms: float | None = None

    def options(self) -> Options:
        if self.attempts is None:
            return {}
        longest = None if self.max_delay_ms is None else self.max_delay_ms / 1000
        kind: Any = self.backoff
        return {"attempts": self.attempts, "backoff": Backoff(kind, (self.delay_ms or 0) / 1000, longest)}


def subscriber(event: str, group: str | None, retry: Retry | None) -> Subscriber:
    if retry is None:
        return Subscriber(event, group)
    backoff = Backoff(retry.backoff, retry.delay, retry.max_delay).wire()
    return Subscriber(event, group, retry.attempts, retry.backoff, backoff.delay, backoff.max_delay)


class GroupRegistry:
    def __init__(self, client: Client, queue: str) -> None:
        self._client = client
        self._queue = Queue(client, queue)
        self._groups: dict[str, tuple[Subscriber, ...]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()

    async def start(self) -> None:
        listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.ensure_future(self._listen(listening))
        try:
            await listening
        except BaseException:
            await self.stop()
            raise

    def of(self, event_name: str) -> tuple[Subscriber, ...]:
        """The groups of an event, the default one first, then in the order in which they joined."""
        return self._groups.get(event_name, ())

    async def join(self, wanted: Subscriber) -> None:
        job = await self._queue.add("group", wanted, job_id=self._id(wanted.event, wanted.group))
        await job.update(wanted)
        await self._client.ask(ChangeDelay(id=job.id, delay=YEAR_MS))
        await self._load()

    async def leave(self, event_name: str, group: str | None) -> bool:
        job = self._queue.job(self._id(event_name, group))
        left = await job.state() != "unknown" and await job.cancel()
        await self._load()
        return left

    def _id(self, event_name: str, group: str | None) -> str:
        return f"{group or ''}@{event_name}@{self._queue.name}"

    async def _listen(self, listening: asyncio.Future[None]) -> None:
        try:
            async with QueueEvents(self._client, self._queue.name) as events:
                await self._load()
                listening.set_result(None)
                async for _ in events:
                    with contextlib.suppress(HeadraceError):  # the next event, or the gap after it, brings another try
                        await self._load()
        except HeadraceError as error:
            if listening.done():
                log.warning("lost the connection that reports changes of event groups: %s", error)
            else:
                listening.set_exception(error)

    async def _load(self) -> None:
        async with self._loading:  # one after the other: what was read later is what counts
            self._groups = await self._read()

    async def _read(self) -> dict[str, tuple[Subscriber, ...]]:
        found: dict[str, list[Subscriber]] = {}
        for offset in range(0, _MAX_GROUPS, _PAGE):
            page = await self._queue.get_jobs(limit=_PAGE, offset=offset)
            for job in page:
                try:
                    known = msgspec.convert(job.data, Subscriber, strict=False)
                except msgspec.ValidationError as error:
                    log.warning("job %s of %s is no group and left out: %s", job.id, self._queue.name, error)
                else:
                    found.setdefault(known.event, []).append(known)
            if len(page) < _PAGE:
                break
        return {
            event: tuple(sorted(groups, key=lambda known: known.group is not None)) for event, groups in found.items()
        }

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
