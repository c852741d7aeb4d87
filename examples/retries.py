"""Retries and dead letters: a job fails, is tried again, becomes a dead letter, and is retried by hand.

    python examples/retries.py

The other one fails for good at once: another attempt would not help.
"""

from __future__ import annotations

import asyncio
import os

from headrace import Backoff, Headrace, JobContext, JobFailed, UnrecoverableError

app = Headrace(os.environ.get("HEADRACE_URL", "memory://"), queue="examples-charges")
bank_is_open = asyncio.Event()


@app.task(attempts=3, backoff=Backoff.fixed("50ms"))
async def charge(ctx: JobContext, amount: int) -> str:
    if amount < 0:
        raise UnrecoverableError("amount must not be negative")  # no further attempt
    if not bank_is_open.is_set():
        print("attempt", ctx.attempt, "of 3")
        raise ConnectionError("the bank does not answer")
    return f"charged {amount}"


async def main() -> None:
    async with app, app.worker():
        jobs = [await charge.enqueue(12), await charge.enqueue(-5)]
        for job in jobs:
            try:
                await job.result(timeout=10)
            except JobFailed as error:
                print("failed:", error.reason)

        bank_is_open.set()
        await jobs[0].retry()
        print("after the retry:", await jobs[0].result(timeout=10))

        charges = app.queue()
        print("dead letters:", len(await charges.dlq.list()))
        await charges.obliterate()


if __name__ == "__main__":
    asyncio.run(main())
