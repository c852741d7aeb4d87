"""Schedules: functions that run at set times. Workers register them when they start; the engine stores and fires them.

    python examples/cron.py

However many workers start, a schedule of that name exists once, and each due time makes one job.
"""

from __future__ import annotations

import asyncio
import os

from headrace import Headrace, JobContext

app = Headrace(os.environ.get("HEADRACE_URL", "memory://"), queue="examples-cron")
ticks: asyncio.Queue[int] = asyncio.Queue()


@app.cron("30 2 * * *", tz="Europe/Berlin", name="examples-nightly")
async def nightly() -> None:
    """At half past two every night, in summer and in winter."""


@app.cron(every="100ms", name="examples-tick")
async def tick(ctx: JobContext) -> None:
    ticks.put_nowait(ctx.attempt)


async def main() -> None:
    async with app:
        async with app.worker():
            for number in range(1, 4):
                await asyncio.wait_for(ticks.get(), timeout=10)
                print("tick", number)

        queue = app.queue()
        for schedule in sorted(await queue.schedules(), key=lambda schedule: schedule.name):
            print(schedule.name, schedule.schedule or "every 100ms", schedule.timezone or "")
            await queue.unschedule(schedule.name)
        await queue.obliterate()


if __name__ == "__main__":
    asyncio.run(main())
