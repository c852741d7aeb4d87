"""Events in one process: round trip of a question, questions per second, emissions per second.

    .venv/bin/python bench/events.py [--count 2000] [--sqlite FILE]

The round trip is one caller at a time (p50 and p99); the rates are with 100 questions under way and with batches.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from headrace.events import EventContext, Events, event

echo = event("bench.echo", int, int)
note = event("bench.note", int)
UNDER_WAY = 100


async def round_trips(events: Events, count: int) -> list[float]:
    taken = []
    for n in range(count):
        began = time.perf_counter()
        await events.emit(echo, n)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


async def questions_per_second(events: Events, count: int) -> float:
    numbers = iter(range(count))

    async def caller() -> None:
        for n in numbers:
            await events.emit(echo, n)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(UNDER_WAY)))
    return count / (time.perf_counter() - began)


async def emissions_per_second(events: Events, count: int) -> float:
    began = time.perf_counter()
    await events.emit_many(note, range(count))
    return count / (time.perf_counter() - began)


async def measure(url: str, count: int) -> None:
    events = Events(url)

    @events.on(echo, concurrency=UNDER_WAY)
    async def answer(ctx: EventContext[int]) -> int:
        return ctx.data

    async with events:
        await round_trips(events, 100)
        taken = statistics.quantiles(await round_trips(events, count), n=100)
        rate = await questions_per_second(events, count * 2)
        told = await emissions_per_second(events, count * 5)
    print(
        f"{url}: round trip p50 {taken[49]:.2f} ms, p99 {taken[98]:.2f} ms; {rate:.0f} questions/s; {told:.0f} emits/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--sqlite", help="a file to measure on, beside memory")
    given: Any = parser.parse_args()
    asyncio.run(measure("memory://bench", given.count))
    if given.sqlite:
        asyncio.run(measure(f"sqlite:///{given.sqlite}", given.count))


if __name__ == "__main__":
    main()
