"""A flow: two pages are fetched side by side, and a report is written when both are there.

    python examples/flow.py

All of a flow is stored, or nothing. The parent waits in the state waiting-children and runs when its last child ended.
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
