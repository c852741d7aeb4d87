"""The basics: a task, a job, its result; delay, priority, a batch, progress.

    python examples/quickstart.py

HEADRACE_URL moves the jobs out of memory: sqlite:///jobs.db for a file, headrace://localhost:6789 for a server.
"""

from __future__ import annotations

import asyncio
import os

from headrace import Backoff, Headrace, JobContext

app = Headrace(os.environ.get("HEADRACE_URL", "memory://"))


@app.task(queue="examples-emails", attempts=5, backoff=Backoff.exponential("50ms", max="5m"), timeout="30s")
async def send(to: str, *, subject: str = "hi") -> str:
    return f"{subject!r} sent to {to}"


@app.task(queue="examples-emails")
def count(ctx: JobContext, words: list[str]) -> int:
    """A plain function runs in a thread. It gets the context because one of its parameters is annotated with it."""
    for done, _ in enumerate(words, start=1):
        ctx.progress(100 * done / len(words), f"{done} of {len(words)}")
    return len(words)


async def main() -> None:
    print(await send("ada@example.com"))  # still a function: runs here and now

    async with app, app.worker():
        job = await send.enqueue("ada@example.com", subject="welcome")
        print(await job.result(timeout=10))

        later = await send.options(delay="100ms", priority=9).enqueue("grace@example.com")
        print("state:", await later.state())
        print(await later.result(timeout=10))

        jobs = await count.enqueue_many([(["one"],), (["one", "two"],)])
        print("counted:", [await job.result(timeout=10) for job in jobs])
        print("progress:", (await jobs[1].info()).progress_message)

        await app.queue("examples-emails").obliterate()


if __name__ == "__main__":
    asyncio.run(main())
