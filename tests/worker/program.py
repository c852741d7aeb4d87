"""An app for workers in processes of their own. Its jobs write down when they begin and end, one line each."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from headrace import Headrace, JobContext

app = Headrace(queue=os.environ.get("HEADRACE_TEST_QUEUE", "marks"))
_marks = Path(os.environ.get("HEADRACE_TEST_MARKS", os.devnull))


def _mark(what: str, n: int, attempt: int = 0) -> None:
    # One write in append mode is whole, however many processes do so, if it lies within one page of the file. Else it
    # may be seen, and cut short by a kill, between two pages. 64 bytes divide every page.
    line = f"{what} {n} {os.getpid()} {attempt} {time.time()}"
    with _marks.open("a") as file:
        file.write(f"{line:<63}\n")


@app.task(attempts=50, backoff=0)
async def work(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    _mark("begin", n, ctx.attempt)
    await asyncio.sleep(seconds)
    _mark("end", n, ctx.attempt)
    return n


@app.task(attempts=50, backoff=0)
async def work_uncancelled(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    """Catches all that there is, as a loop around something flaky does."""
    _mark("begin", n, ctx.attempt)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(BaseException):
            await asyncio.sleep(end - time.monotonic())
    _mark("end", n, ctx.attempt)
    return n


@app.task(attempts=50, backoff=0)
async def work_by_thread(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    return await asyncio.to_thread(work_in_thread.function, ctx, n, seconds)


@app.task(attempts=50, backoff=0)
def work_in_thread(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    _mark("begin", n, ctx.attempt)
    time.sleep(seconds)
    print(f"job {n} ends")
    _mark("end", n, ctx.attempt)
    return n


@app.task(attempts=50, backoff=0, run_in="process")
def work_in_process(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    return work_in_thread.function(ctx, n, seconds)  # type: ignore[no-any-return]


@asynccontextmanager
async def _lifespan(app: Headrace) -> AsyncIterator[None]:
    """Needs a while to end."""
    _mark("begin", 0)
    yield
    await asyncio.sleep(1)
    _mark("end", 0)


app_with_lifespan = Headrace(queue=app.default_queue, lifespan=_lifespan)


@app_with_lifespan.task()
async def nothing() -> None: ...
