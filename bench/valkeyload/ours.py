"""One phase of Headrace on a Valkey that is running: `ours.py PORT QUEUE PHASE COUNT CONCURRENCY`.

As an application would do it: `Queue` and `Worker` on `valkey://`, no broker in between. Prints what the phase took as
JSON: CPU seconds of this process and of the server, and how many commands the server ran. A short run of the same kind
goes before it, so that neither side pays for what is compiled or connected once.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

import valkey
from headrace.client.queue import Queue
from headrace.connect import open_client
from headrace.worker.worker import Worker

WARM_UP = 200
IN_FLIGHT = 500
JOB_SECONDS = 0.003


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Server:
    """What the server says about itself."""

    def __init__(self, port: int) -> None:
        self._client = valkey.Valkey(port=port)

    def cpu_seconds(self) -> float:
        used = self._client.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    def commands(self) -> tuple[int, int]:
        """Calls of functions, and commands that these ran."""
        calls = {name: int(row["calls"]) for name, row in self._client.info("commandstats").items()}
        functions = calls.get("cmdstat_fcall", 0)
        asked = functions + calls.get("cmdstat_info", 0) + calls.get("cmdstat_ping", 0)
        return functions, sum(calls.values()) - asked


async def add_bulk(queue: Queue, count: int, concurrency: int) -> None:
    await queue.add_many(("job", {"n": n}) for n in range(count))


async def add_one_by_one(queue: Queue, count: int, concurrency: int) -> None:
    for n in range(count):
        await queue.add("job", {"n": n})


async def add_together(queue: Queue, count: int, concurrency: int) -> None:
    """Single calls, many of them in flight: what a pipeline is."""
    for start in range(0, count, IN_FLIGHT):
        await asyncio.gather(*(queue.add("job", {"n": n}) for n in range(start, min(start + IN_FLIGHT, count))))


async def work(queue: Queue, count: int, concurrency: int, seconds: float = 0) -> None:
    done, left = asyncio.Event(), count

    async def handle(job: Any) -> None:
        nonlocal left
        if seconds:
            await asyncio.sleep(seconds)
        left -= 1
        if left == 0:
            done.set()

    async with Worker(queue._client, queue.name, handle, concurrency=concurrency):
        await done.wait()


async def work_slowly(queue: Queue, count: int, concurrency: int) -> None:
    """Each job takes a while: the worker takes them one by one."""
    await work(queue, count, concurrency, JOB_SECONDS)


Phase = Callable[[Queue, int, int], Awaitable[None]]
PHASES: dict[str, Phase] = {"bulk": add_bulk, "single": add_one_by_one, "together": add_together, "work": work}
PHASES["slow"] = work_slowly


async def main(port: int, name: str, phase: str, count: int, concurrency: int) -> None:
    client, server = open_client(f"valkey://127.0.0.1:{port}"), Server(port)
    warm, queue = Queue(client, f"warm-{phase}"), Queue(client, name)
    if phase in ("work", "slow"):
        await add_bulk(warm, WARM_UP, 0)
    if phase == "slow":
        await add_bulk(queue, count, 0)
    await PHASES[phase](warm, WARM_UP, concurrency)
    before = cpu_seconds(), server.cpu_seconds(), server.commands()
    await PHASES[phase](queue, count, concurrency)
    after = cpu_seconds(), server.cpu_seconds(), server.commands()
    functions, inner = (new - old for old, new in zip(before[2], after[2], strict=True))
    spent = {"client": after[0] - before[0], "server": after[1] - before[1], "functions": functions, "inner": inner}
    print(json.dumps(spent))
    await asyncio.wrap_future(client.close())


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
