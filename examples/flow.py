"""A flow: two pages are fetched side by side, and a report is written when both are there.

    python examples/flow.py

A flow is stored atomically. The parent is in the state waiting-children until its last child has ended, then it runs.
"""

from __future__ import annotations

import asyncio
import os

from headrace import Flow, Headrace, Job, JobContext

app = Headrace(os.environ.get("HEADRACE_URL", "memory://"))


@app.task(queue="examples-pages")
async def fetch(url: str) -> int:
    return len(url)


@app.task(queue="examples-reports")
async def report(ctx: JobContext, title: str) -> str:
    sizes = await app.queue(ctx.queue).job(ctx.id).children_values()
    return f"{title}: {len(sizes)} pages, {sum(sizes.values())} characters"


async def main() -> None:
    async with app:
        pages = [fetch.s("https://example.com/a"), fetch.s("https://example.com/long")]
        tree = await app.enqueue_flow(Flow(report.s("daily"), children=pages))
        print("before:", await tree.job.state())
        async with app.worker():
            print(await tree.job.result(timeout=10))
        await clean_up(tree.job)


async def clean_up(job: Job[str]) -> None:
    print("after:", await job.state())
    for queue in ("examples-pages", "examples-reports"):
        await app.queue(queue).obliterate()


if __name__ == "__main__":
    asyncio.run(main())
