"""Receipts: what was handled once under a key is not handled again, even when its job has been removed.

The handler of a keyed fire-and-forget event leaves a receipt when it succeeds. An outbox retires a key in two steps:
`prepare_retirement` blocks new emissions, `finalize_retirement` drops the receipt or, if the handler is still running,
leaves a tombstone that suppresses the receipt to come. Receipts are jobs that nobody takes, delayed beyond the week for
which they are kept: a waiting job that nobody takes looks like trouble to operators.
"""

from __future__ import annotations

from typing import Final, Literal

from headrace.client.client import Client
from headrace.client.queue import Queue
from headrace.errors import NotFound

KEPT: Final = "7d"
_BEYOND: Final = "365d"
_CLEAN_EVERY: Final = 1000

Mark = Literal["receipt", "retiring", "swallow"]


class Receipts:
    def __init__(self, client: Client, queue: str) -> None:
        self._queue = Queue(client, queue)
        self._written = 0

    async def has(self, key_id: str, *marks: Mark) -> bool:
        """Whether any of these marks (any at all if none is named) stands for the key."""
        for mark in marks or ("receipt", "retiring", "swallow"):
            if await self._queue.job(_id(key_id, mark)).state() != "unknown":
                return True
        return False

    async def write(self, key_id: str) -> None:
        """The handler succeeded."""
        if await self._drop(key_id, "swallow"):
            return
        await self._put(key_id, "receipt")

    async def prepare_retirement(self, key_id: str) -> None:
        await self._put(key_id, "retiring")

    async def finalize_retirement(self, key_id: str) -> None:
        if not await self._drop(key_id, "receipt"):
            await self._put(key_id, "swallow")
        await self._drop(key_id, "retiring")

    async def forget(self, key_id: str) -> None:
        for mark in ("receipt", "retiring", "swallow"):
            await self._drop(key_id, mark)

    async def _put(self, key_id: str, mark: Mark) -> None:
        await self._queue.add(mark, job_id=_id(key_id, mark), delay=_BEYOND)
        # With the first one, too: processes that live for less than a lot of receipts would let them pile up.
        if self._written % _CLEAN_EVERY == 0:
            await self._queue.clean(KEPT, "delayed", _CLEAN_EVERY)
        self._written += 1

    async def _drop(self, key_id: str, mark: Mark) -> bool:
        job = self._queue.job(_id(key_id, mark))
        try:
            return await job.state() != "unknown" and await job.cancel()
        except NotFound:
            return False  # somebody else was faster


def _id(key_id: str, mark: str) -> str:
    return f"{key_id}@{mark}"
