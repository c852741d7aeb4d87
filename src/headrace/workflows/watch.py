"""Waiting for flows: for their end, or for the next thing that happens to them.

A FlowWait parks at the store for a second, and longer the longer a flow lasts; a limited number of
them are parked at once, for a server parks few commands per connection. When the watch ends, everybody who still waits
gets an error; the flows themselves continue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from headrace.client.client import Client
from headrace.commands.flows import FlowFound, FlowGet, FlowWait
from headrace.commands.monitoring import Ping
from headrace.errors import ClientError, ConnectionLost, ProviderStoppedError, StorageUnavailable
from headrace.workflows.ledger import record_of

T = TypeVar("T")

_MOST_WAITING: Final = 100
_SLICE: Final = 1.0
_LONGEST_SLICE: Final = 10.0
_PAUSE: Final = 0.1
_LAST_LOOK: Final = 2.0
"""Seconds for the answer to who has run out of time."""


class FlowWatch:
    """Made on the loop of those who wait."""

    def __init__(self, client: Client, stall: float) -> None:
        self._client = client
        self._stall = stall
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slots = asyncio.Semaphore(_MOST_WAITING)

    async def wait_end(self, flow_id: str, patience: float | None) -> FlowFound:
        """The flow at its end; or as it is when patience (monotonic) or its own time is over."""
        return await self._until_ended(self._wait_end(flow_id, patience))

    async def wait_change(self, flow_id: str, revision: int, after: int) -> FlowFound:
        """The flow when it is beyond this revision, or as it is after a while, with its log from behind `after`."""
        asked = FlowWait(id=flow_id, timeout=_SLICE * 1000, revision=revision, after=after)
        return await self._until_ended(self._ask(asked))

    def stop(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _wait_end(self, flow_id: str, patience: float | None) -> FlowFound:
        deadline, span, own = patience, _SLICE, None
        while True:
            left = span if deadline is None else min(span, max(0.0, deadline - time.monotonic()))
            found = await self._ask_by(FlowWait(id=flow_id, timeout=left * 1000), deadline)
            if found.flow.status.is_final or (deadline is not None and time.monotonic() >= deadline):
                return found
            # Where many wait, those who have no slot must not hear of their end too late.
            span = _SLICE if self._slots.locked() else min(2 * span, _LONGEST_SLICE)
            own = await self._own_deadline(found) if own is None else own
            deadline = min((end for end in (patience, own) if end is not None), default=None)

    async def _own_deadline(self, found: FlowFound) -> float | None:
        """When waiting is pointless although nobody ended the flow: perhaps there is no worker at all. None: never, or
        not known yet. The clock of the store counts, for ours may differ."""
        plan = record_of(found).run.plan
        if not plan.timeout:
            return None
        margin = self._stall * 1000 if plan.on_timeout == "cancel" else 0
        due = found.flow.created_at + plan.timeout + margin
        try:
            now = (await self._client.ask(Ping())).data.time
        except ClientError:
            return None
        return time.monotonic() + max(0.0, due - now) / 1000

    async def _ask_by(self, asked: FlowWait, deadline: float | None) -> FlowFound:
        """Wait, and at the deadline (monotonic) just look: others may have all the slots until long after it."""
        limit = asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic()) + _PAUSE)
        try:
            async with limit:
                return await self._ask(asked)
        except TimeoutError:
            if not limit.expired():
                raise
            return await self._client.ask(FlowGet(id=asked.id), _LAST_LOOK)

    async def _ask(self, asked: FlowWait) -> FlowFound:
        """Server and store may be away for as long as a command may take; the flow is not."""
        async with self._slots:
            try:
                return await self._client.ask(asked, asked.timeout / 1000 + self._client.timeout)
            except (ConnectionLost, StorageUnavailable):
                given_up = time.monotonic() + self._client.timeout
            while True:
                await asyncio.sleep(_PAUSE)
                try:
                    return await self._client.ask(FlowGet(id=asked.id, after=asked.after))
                except (ConnectionLost, StorageUnavailable):
                    if time.monotonic() > given_up:
                        raise

    async def _until_ended(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ProviderStoppedError("the workflow provider was stopped; the flow goes on in the store")
        finally:
            task.cancel()
