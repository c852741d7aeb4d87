"""The client through both of its faces, behind one: a test body awaits every verb, whichever face it was made for.

`AsyncFace` hands out the objects for coroutines as they are. `SyncFace` hands out those for threads, each verb of which
then runs in a thread. So one body tests both, and cannot use what only one of them has.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.client.channel import EventView
from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.client.flow import FlowProducer, FlowTree, SyncFlowProducer
from headrace.client.job import decode_job
from headrace.client.payloads import encode_payload
from headrace.client.queue import Queue, SyncQueue
from headrace.client.verbs import SyncShell, verb
from headrace.commands import jobs
from tests.waiting import until

BOUND_S = 10.0


class AsyncFace:
    def __init__(self, client: Client) -> None:
        self.client = client

    def queue(self, name: str, **defaults: Any) -> Any:
        return Queue(self.client, name, defaults or None)  # type: ignore[arg-type]

    def flows(self) -> Any:
        return FlowProducer(self.client)

    def listen(self, queue: str) -> Any:
        return _AsyncEars(QueueEvents(self.client, queue))

    def close(self) -> None:
        pass


class SyncFace:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.threads = ThreadPoolExecutor(max_workers=256)

    def queue(self, name: str, **defaults: Any) -> Any:
        return _Threaded(SyncQueue(self.client, name, defaults or None), self.threads)  # type: ignore[arg-type]

    def flows(self) -> Any:
        return _Threaded(SyncFlowProducer(self.client), self.threads)

    def listen(self, queue: str) -> Any:
        return _SyncEars(QueueEvents(self.client, queue))

    def close(self) -> None:
        self.threads.shutdown()


class _Threaded:
    """Something made for threads, with verbs that can be awaited."""

    def __init__(self, shell: SyncShell, threads: ThreadPoolExecutor) -> None:
        self._shell = shell
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._shell, name)
        if name != "call" and not isinstance(inspect.getattr_static(self._shell, name, None), verb):
            return (lambda *args: self._wrap(value(*args))) if callable(value) else self._wrap(value)

        async def run(*args: Any, **options: Any) -> Any:
            loop = asyncio.get_running_loop()
            return self._wrap(await loop.run_in_executor(self._threads, lambda: value(*args, **options)))

        return run

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, SyncShell):
            return _Threaded(value, self._threads)
        if isinstance(value, FlowTree):
            return FlowTree(self._wrap(value.job), [self._wrap(child) for child in value.children])
        return [self._wrap(item) for item in value] if isinstance(value, list) else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Threaded) and other._shell == self._shell

    def __hash__(self) -> int:
        return hash(self._shell)


class _AsyncEars:
    def __init__(self, events: QueueEvents) -> None:
        self.events = events

    async def __aenter__(self) -> _AsyncEars:
        await self.events.__aenter__()
        self._iterator = aiter(self.events)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.events.__aexit__(*error)
        async with asyncio.timeout(BOUND_S):
            _ = [event async for event in self._iterator]  # the iteration ends with the listening

    async def next(self) -> EventView:
        async with asyncio.timeout(BOUND_S):
            return await anext(self._iterator)


class _SyncEars:
    def __init__(self, events: QueueEvents) -> None:
        self.events = events

    async def __aenter__(self) -> _SyncEars:
        await asyncio.to_thread(self.events.__enter__)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.events.__exit__, *error)
        async with asyncio.timeout(BOUND_S):
            await asyncio.to_thread(list, self.events)  # the iteration ends with the listening

    async def next(self) -> EventView:
        return await asyncio.to_thread(self.events.get, BOUND_S)


# -- the part of a worker ----------------------------------------------------------------------------------------------


async def reaches(ask: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Ask until the answer is the one that is wanted."""

    async def is_reached() -> bool:
        return bool(await ask() == wanted)

    await until(is_reached)


async def pull(queue: Any) -> tuple[str, str]:
    """The id and token of the next job."""
    pulled = await queue.call(jobs.PullBatch(queue=queue.name, count=1, timeout=5000, owner="tests"))
    return decode_job(pulled.jobs[0]).id, pulled.tokens[0]


async def complete(queue: Any, result: Any = None) -> str:
    """Run the next job: it returns `result`."""
    job_id, token = await pull(queue)
    await queue.call(jobs.Acknowledge(id=job_id, token=token, result=encode_payload(result)))
    return job_id


async def bury(queue: Any, reason: str = "it broke") -> str:
    """Run the next job: it fails for good."""
    job_id, token = await pull(queue)
    await queue.call(jobs.Fail(id=job_id, token=token, error=reason, unrecoverable=True))
    return job_id
