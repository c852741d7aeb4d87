"""One engine at work in a process of its own: `flowpeers.py ENGINE FILE`, asked by lines, answering with JSON.

`alone N` runs N times one after the other and answers the times (ms); `many N M` runs N, M of them under way at once,
and answers the seconds they took, the CPU seconds of the process, and its RSS in MB. What runs is a workflow of three
steps that do nothing, or for `questions` an event whose answer is awaited.

To compare another engine: a class with `start`, `run` and `stop`, and its entry in ENGINES.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Protocol

import psutil

CONCURRENCY = 50
STEPS = ("reserve", "charge", "ship")


class Engine(Protocol):
    def __init__(self, file: str) -> None: ...
    async def start(self) -> None: ...
    async def run(self) -> object:
        """One flow, from the call to its result."""

    async def stop(self) -> None: ...


class HeadraceFlows:
    def __init__(self, file: str) -> None:
        from headrace.workflows import Workflows, step, workflow

        self._order = workflow("order").step(*map(step, STEPS)).build()
        self._flows = Workflows(f"sqlite:///{file}", concurrency=CONCURRENCY)
        self._flows.register_definition_consumer(self._order, dict.fromkeys(STEPS, nothing))

    async def start(self) -> None:
        await self._flows.start()

    async def run(self) -> object:
        return await (await self._flows.execute(self._order, None)).result()

    async def stop(self) -> None:
        await self._flows.stop()


class HeadraceQuestions:
    def __init__(self, file: str) -> None:
        from headrace.events import Events, event

        self._echo = event("bench.echo", int, int)
        self._events = Events(f"sqlite:///{file}")
        self._events.on(self._echo, concurrency=CONCURRENCY)(answer)

    async def start(self) -> None:
        await self._events.start()

    async def run(self) -> object:
        return await self._events.emit(self._echo, 1)

    async def stop(self) -> None:
        await self._events.stop()


class DbosFlows:
    def __init__(self, file: str) -> None:
        from dbos import DBOS

        self._dbos = DBOS
        DBOS(
            config={
                "name": "bench",
                "system_database_url": f"sqlite:///{file}",
                "log_level": "ERROR",
                "run_admin_server": False,
            }
        )
        steps = [DBOS.step(name=name)(_step()) for name in STEPS]

        @DBOS.workflow()
        async def order() -> None:
            for step in steps:
                await step()

        self._order = order

    async def start(self) -> None:
        self._dbos.launch()

    async def run(self) -> object:
        return await self._order()

    async def stop(self) -> None:
        self._dbos.destroy()


async def nothing(context: Any) -> None:
    """A step."""


async def answer(context: Any) -> int:
    return int(context.data)


def _step() -> Any:
    async def nothing() -> None:
        """A step."""

    return nothing


ENGINES: dict[str, type[Engine]] = {"flows": HeadraceFlows, "questions": HeadraceQuestions, "dbos": DbosFlows}


async def alone(engine: Engine, count: int) -> list[float]:
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        await engine.run()
        spent.append((time.perf_counter() - began) * 1000)
    return spent


async def many(engine: Engine, count: int, under_way: int) -> tuple[float, float, float]:
    numbers = iter(range(count))

    async def caller() -> None:
        for _ in numbers:
            await engine.run()

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(under_way)))
    spent = time.perf_counter() - began, time.process_time() - cpu
    return *spent, psutil.Process().memory_info().rss / 1e6


async def serve(engine: Engine) -> None:
    await engine.start()
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *numbers = line.split()
        ask: Any = {"alone": alone, "many": many}[word]
        print(json.dumps(await ask(engine, *map(int, numbers))), flush=True)
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(serve(ENGINES[sys.argv[1]](sys.argv[2])))
