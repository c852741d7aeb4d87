"""An app as a user would have it: a URL that must never be reached in tests, tasks of every kind, a schedule."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headrace import Backoff, Headrace, JobContext


@asynccontextmanager
async def lifespan(app: Headrace) -> AsyncIterator[dict[str, str]]:
    yield {"database": "open"}


app = Headrace("headrace://shop.invalid:1", lifespan=lifespan)
orders_queue = app.queue("orders")
"""Made when the module is imported, as users do."""

seen: list[str] = []


@app.middleware
async def note(context: JobContext, call_next: Callable[[], Awaitable[Any]]) -> Any:
    seen.append(f"{context.name} {context.attempt}")
    return await call_next()


@dataclass
class Order:
    id: int
    items: list[str]


@app.task(queue="emails", attempts=3, backoff=Backoff.exponential("10s", max="5m"), timeout="30s")
async def send(to: str, *, subject: str = "hi") -> int:
    if subject == "spam":
        raise ValueError("nobody wants this")
    await asyncio.sleep(0)
    return len(to)


@app.task(queue="orders")
def pack(ctx: JobContext, order: Order) -> str:
    ctx.progress(50, "half")
    ctx.log("packed")
    return f"{order.id}: {', '.join(order.items)} ({ctx.state['database']})"


@app.task(queue="orders")
async def place(order: Order) -> str:
    job = await pack.enqueue(order)
    return job.id


@app.task(queue="orders")
async def for_ever() -> None:
    await for_ever.enqueue()


@app.task(queue="orders", timeout=0.05)
async def slow() -> None:
    await asyncio.Event().wait()


@app.task(queue="orders", run_in="process")
def pid() -> int:
    return os.getpid()


@app.task(queue="orders")
def thread_time() -> float:
    return time.thread_time()


@app.cron("30 2 * * *", tz="Europe/Berlin", queue="reports", overlap=True)
async def nightly() -> None: ...


@app.task(queue="sweeping")
async def sweep() -> None:
    """Empties its own queue, with the job that does so in it."""
    await app.queue("sweeping").obliterate()
    await send.enqueue("swept@example.com")
