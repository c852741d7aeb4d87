"""An app for workers in processes of their own. Its jobs write down when they begin and end, one line each."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from headrace import Headrace, JobContext

app = Headrace(queue=os.environ.get("HEADRACE_TEST_QUEUE", "marks"))
_marks = Path(os.environ.get("HEADRACE_TEST_MARKS", os.devnull))


def _mark(ctx: JobContext, what: str, n: int) -> None:
    # One write in append mode is whole, however many processes do so.
    with _marks.open("a") as file:
        file.write(f"{what} {n} {os.getpid()} {ctx.attempt} {time.time()}\n")


@app.task(attempts=50, backoff=0)
async def work(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    _mark(ctx, "begin", n)
    await asyncio.sleep(seconds)
    _mark(ctx, "end", n)
    return n


@app.task(attempts=50, backoff=0)
def work_in_thread(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    _mark(ctx, "begin", n)
    time.sleep(seconds)
    _mark(ctx, "end", n)
    return n


@app.task(attempts=50, backoff=0, run_in="process")
def work_in_process(ctx: JobContext, n: int, seconds: float = 0.0) -> int:
    return work_in_thread.function(ctx, n, seconds)  # type: ignore[no-any-return]
