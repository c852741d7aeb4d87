"""`headrace bench`: how fast this server answers from here, in a queue of its own that is gone afterwards.

Quick and self-contained: it answers "is this deployment as fast as it should be", while bench/ compares releases.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace import notation
from headrace.cli.output import Column, note, print_json_line, print_table
from headrace.cli.session import UsageError, add_client_flags, connected

if TYPE_CHECKING:
    from headrace.client.client import Client
    from headrace.client.queue import Queue

IN_FLIGHT: Final = 100
_COLUMNS: Final = (
    Column("WHAT"),
    Column("JOBS", is_number=True, spared=4),
    Column("JOBS/S", is_number=True),
    Column("P50", is_number=True, spared=2),
    Column("P95", is_number=True, spared=1),
    Column("P99", is_number=True, spared=3),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Push, pull and complete jobs in a queue of its own, and print rates and latencies."
    parser.add_argument(
        "--jobs",
        type=int,
        default=2000,
        metavar="N",
        help="jobs to push one by one; one at a time a tenth, in batches five times as many (default: 2000)",
    )
    parser.add_argument("--size", type=int, default=100, metavar="BYTES", help="data of a job (default: 100)")
    add_client_flags(parser)
    parser.set_defaults(run=run)


class Measured(NamedTuple):
    what: str
    jobs: int
    seconds: float
    latencies_ms: list[float]

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def run(arguments: argparse.Namespace) -> int:
    if arguments.jobs < 1 or not 0 <= arguments.size <= 1_000_000:
        raise UsageError("--jobs must be at least 1, --size between 0 and 1,000,000")
    from headrace.client.queue import Queue

    with connected(arguments, may_create=True) as client:
        name = f"headrace-bench-{os.urandom(4).hex()}"
        results = asyncio.run(_measure_all(Queue(client, name), client, arguments))
    if arguments.as_json:
        for result in results:
            print_json_line(_document(result))
    else:
        print_table(_COLUMNS, [_row(result) for result in results])
        note("times are those of one request, of `push many` those of one batch; the queue is gone again")
    return 0


def _document(result: Measured) -> dict[str, Any]:
    latencies = {f"p{share}Ms": round(result.percentile(share / 100), 3) for share in (50, 95, 99)}
    rate = round(result.jobs / result.seconds, 1)
    return {"what": result.what, "jobs": result.jobs, "seconds": round(result.seconds, 4), "perSec": rate, **latencies}


def _row(result: Measured) -> list[str]:
    latencies = [f"{result.percentile(share):.2f} ms" for share in (0.5, 0.95, 0.99)]
    return [result.what, f"{result.jobs:,}", notation.count(result.jobs / result.seconds), *latencies]


async def _measure_all(queue: Queue, client: Client, arguments: argparse.Namespace) -> list[Measured]:
    data = "x" * arguments.size
    few = max(1, arguments.jobs // 10)
    try:
        return [
            await _measure("push, one at a time", few, 1, lambda: queue.add("bench", data)),
            await _measure(f"push, {IN_FLIGHT} at once", arguments.jobs, IN_FLIGHT, lambda: queue.add("bench", data)),
            await _push_many(queue, data, arguments.jobs * 5),
            await _round_trips(queue, client, data, few),
        ]
    finally:
        await queue.obliterate()


async def _measure(what: str, number: int, at_once: int, act: Callable[[], Awaitable[Any]]) -> Measured:
    latencies: list[float] = []
    left = iter(range(number))

    async def work() -> None:
        for _ in left:
            began = time.perf_counter()
            await act()
            latencies.append((time.perf_counter() - began) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(at_once, number))))
    return Measured(what, number, time.perf_counter() - began, latencies)


async def _push_many(queue: Queue, data: str, number: int) -> Measured:
    latencies = []
    began = time.perf_counter()
    for start in range(0, number, 1000):
        batch_began = time.perf_counter()
        await queue.add_many([("bench", data)] * min(1000, number - start))
        latencies.append((time.perf_counter() - batch_began) * 1000)
    return Measured("push many", number, time.perf_counter() - began, latencies)


async def _round_trips(queue: Queue, client: Client, data: str, number: int) -> Measured:
    """From the push to a worker that waits for it, until its result is stored."""
    from headrace.client.payloads import encode_payload
    from headrace.commands.jobs import Acknowledge, Pull

    await queue.drain()
    done = encode_payload(None)

    async def trip() -> None:
        pulling = asyncio.create_task(client.ask(Pull(queue=queue.name, timeout=10_000, owner="bench")))
        job = await queue.add("bench", data)
        pulled = await pulling
        await client.ask(Acknowledge(id=job.id, token=pulled.token or None, result=done))

    return await _measure("push, pull, complete", number, 1, trip)
