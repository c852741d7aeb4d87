"""How fast flows of three steps that do nothing run on an embedded SQLite file, and how long one alone takes.

    .venv/bin/python bench/workflows.py [--flows 2000] [--inflight 100] [--rounds 3]

Wall time and CPU time of the whole process (engine, client, worker and handlers share it), and how much memory the last
half of a round added.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from typing import Any

import psutil

from headrace.workflows import Workflows, step, workflow

STEPS = [step(name) for name in ("reserve", "charge", "ship")]
order = workflow("order").step(*STEPS).build()


async def nothing(context: Any) -> None:
    """A step."""


async def round_of(flows: Workflows, count: int, inflight: int) -> tuple[float, float, float]:
    """Flows per second, CPU ms per flow, MB that the second half added."""
    room = asyncio.Semaphore(inflight)
    process = psutil.Process()

    async def one() -> None:
        async with room:
            await (await flows.execute(order, None)).result()

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one() for _ in range(count // 2)))
    half = process.memory_info().rss
    await asyncio.gather(*(one() for _ in range(count - count // 2)))
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    return count / spent, cpu * 1000 / count, (process.memory_info().rss - half) / 1e6


async def alone(flows: Workflows, count: int = 200) -> float:
    """The median of a single flow, ms."""
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        await (await flows.execute(order, None)).result()
        spent.append((time.perf_counter() - began) * 1000)
    return statistics.median(spent)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flows", type=int, default=2000)
    parser.add_argument("--inflight", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flows = Workflows(f"sqlite:///{folder}/flows.db", concurrency=50)
        flows.register_definition_consumer(order, {one.name: nothing for one in STEPS})
        async with flows:
            print(f"one flow alone: p50 {await alone(flows):.2f} ms")
            for _ in range(asked.rounds):
                speed, cpu, grown = await round_of(flows, asked.flows, asked.inflight)
                print(f"{speed:8.0f} flows/s   {cpu:.2f} ms CPU per flow   {grown:+.1f} MB in the second half")


if __name__ == "__main__":
    asyncio.run(main())
