"""CPU-bound work: a task in a process of its own uses another core, and can be killed when it takes too long.

    python examples/process_task.py

The process imports this module to find the function, so it must not run anything when it is imported.
"""

from __future__ import annotations

import asyncio
import os

from headrace import Headrace, JobContext, JobFailed

app = Headrace(os.environ.get("HEADRACE_URL", "memory://"), queue="examples-primes")


@app.task(run_in="process", timeout="30s")
def primes(ctx: JobContext, below: int) -> int:
    sieve = bytearray([1]) * below
    sieve[:2] = b"\0\0"
    for number in range(2, int(below**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, below, number)))
    ctx.progress(100, "done")
    return sum(sieve)


@app.task(run_in="process", timeout="300ms", attempts=1)
def endless() -> None:
    while True:
        pass


async def main() -> None:
    async with app, app.worker(concurrency=2):
        job, hopeless = await primes.enqueue(100_000), await endless.enqueue()
        print("primes:", await job.result(timeout=30))
        try:
            await hopeless.result(timeout=30)
        except JobFailed:
            print("the endless one was stopped")
        await app.queue().obliterate()


if __name__ == "__main__":
    asyncio.run(main())
