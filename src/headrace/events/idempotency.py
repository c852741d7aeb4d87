"""Idempotency within one process: work is done once per id, with a bounded memory of what was done.

An id is remembered when its work has succeeded; work that raised may be tried again. A second call while the first
one runs waits for it and is skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Generic, NamedTuple, TypeVar

from headrace.durations import Duration, seconds

T = TypeVar("T")

DEFAULT_MAX_ENTRIES: Final = 10_000
DEFAULT_TTL: Final = 3600


class Processed(NamedTuple, Generic[T]):
    """Whether it was done now, or had been done before; what it gave."""

    executed: bool
    result: T | None = None


class EventIdempotency:
    """Remembers in this process which ids were handled, a bounded number for a bounded time."""

    def __init__(
        self,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        ttl: Duration = DEFAULT_TTL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_entries = max_entries
        self.ttl = seconds(ttl, "ttl")
        self._clock = clock
        self._done: OrderedDict[str, float] = OrderedDict()
        self._running: dict[str, asyncio.Event] = {}

    async def process_once(self, event_id: str, work: Callable[[], Awaitable[T]]) -> Processed[T]:
        while (running := self._running.get(event_id)) is not None:
            await running.wait()
        if self.is_processed(event_id):
            return Processed(False)
        ended = self._running[event_id] = asyncio.Event()
        try:
            result = await work()
            self.mark_processed(event_id)
            return Processed(True, result)
        finally:
            del self._running[event_id]
            ended.set()

    def is_processed(self, event_id: str) -> bool:
        done_at = self._done.get(event_id)
        if done_at is not None and self._clock() - done_at >= self.ttl:
            del self._done[event_id]
            return False
        return done_at is not None

    def mark_processed(self, event_id: str) -> None:
        self._done[event_id] = self._clock()
        self._done.move_to_end(event_id)
        while len(self._done) > self.max_entries:
            self._done.popitem(last=False)

    def clear(self) -> None:
        self._done.clear()

    def __len__(self) -> int:
        return len(self._done)
