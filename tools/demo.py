"""The guided tour: a server, half a minute of varied work, then the data pipeline and its report.

    python tools/demo.py                 everything goes to ./demo, which is made anew
    python tools/demo.py --seconds 10    a shorter shift

A small shop: mails (many, quick), images (slow, sometimes broken), reports that wait for their images, a cron tick, and
orders as a workflow that takes back what it did when the goods are too heavy. Every step is the public interface: what
stands here can be copied. The report is about the demo's own history.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from headrace import Backoff, Flow, Headrace, UnrecoverableError
from headrace.workflows import Retry, StepContext, Workflows, step, workflow

FOLDER = Path("demo")
PROMISED_MS = 200
SLOTS = {"mail": 4, "image": 2, "report": 1, "housekeeping": 1}
"""The queues of the shop, and how many jobs of each run at once."""
TELL_EVERY_S = 5.0
chance = random.Random(7)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace", *arguments]


# -- the server ----------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    def __init__(self) -> None:
        self.port, self.http_port = free_port(), free_port()
        self.url = f"headrace://127.0.0.1:{self.port}"
        ports = ("--tcp-port", str(self.port), "--http-port", str(self.http_port))
        kept = ("--data-path", str(FOLDER / "headrace.db"), "--capture", str(FOLDER / "log"))
        shown = ("--report", str(FOLDER / "report.html"), "--log-level", "warning")
        self._process = subprocess.Popen(headrace("serve", *ports, *kept, *shown), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit("demo: the server did not start; what it said is above")
        print(line.strip())

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(40)


# -- the work ------------------------------------------------------------------------------------------------------


class Order(msgspec.Struct):
    id: int
    kilos: int


reserve, charge, ship = step("reserve", str), step("charge", str), step("ship", str, retry=Retry(2, delay=0.1))
fulfil = workflow("fulfil", data=Order, result=str).step(reserve).step(charge).step(ship).build()


def shop(app: Headrace, flows: Workflows) -> None:
    """What the workers of the shop can do."""

    @app.task(queue="mail", name="send", attempts=3, backoff=Backoff.fixed("300ms"))
    async def send(number: int) -> None:
        await asyncio.sleep(chance.uniform(0.002, 0.02))
        if chance.random() < 0.06:
            raise TimeoutError(f"no answer from 10.0.0.{number % 9} after {number} ms")

    @app.task(queue="image", name="resize", attempts=2, backoff=Backoff.fixed("500ms"))
    async def resize(number: int) -> int:
        await asyncio.sleep(chance.uniform(0.05, 0.25))
        if number % 17 == 0:
            raise UnrecoverableError(f"'picture-{number}.png' is not a picture")
        return number

    @app.task(queue="report", name="compile")
    async def compile_report(day: int) -> str:
        await asyncio.sleep(0.1)
        return f"report {day}"

    @app.cron(every="2s", name="demo-tick", queue="housekeeping")
    async def tick() -> None:
        await asyncio.sleep(0.01)

    @flows.implement(fulfil)
    class Fulfil:
        @reserve.execute
        async def _reserve(self, ctx: StepContext[Order]) -> str:
            return f"shelf {ctx.data.id}"

        @reserve.rollback
        async def _release(self, ctx: StepContext[Order]) -> None:
            await asyncio.sleep(0.01)

        @charge.execute
        async def _charge(self, ctx: StepContext[Order]) -> str:
            return f"charge {ctx.data.id}"

        @charge.rollback
        async def _refund(self, ctx: StepContext[Order]) -> None:
            await asyncio.sleep(0.01)

        @ship.execute
        async def _ship(self, ctx: StepContext[Order]) -> str:
            if ctx.data.kilos > 90:
                raise ValueError(f"order {ctx.data.id} is too heavy: {ctx.data.kilos} kg")
            return f"label {ctx.data.id}"


async def produce(app: Headrace, flows: Workflows, ends: float) -> None:
    """Arrivals, in a rush from time to time."""
    send, resize, compile_report = (app.tasks[name] for name in ("send", "resize", "compile"))
    number = 0
    while time.monotonic() < ends:
        number += 1
        rush = 60 if number % 40 < 8 else 12
        await send.enqueue_many([(number * 100 + n,) for n in range(rush)])
        if number % 5 == 0:
            await resize.enqueue(number)
        if number % 50 == 0:
            # Of the pictures of the first reports none is broken: these get done, and a later one does not.
            pictures = [resize.s(4 * number + n) for n in (1, 2, 3)]
            await app.enqueue_flow(Flow(compile_report.s(number), children=pictures))
        if number % 25 == 0:
            await flows.execute(fulfil, Order(number, chance.randint(1, 120)), id=f"order-{number}")
        await asyncio.sleep(0.1)


async def tell(app: Headrace, began: float) -> None:
    """A line now and then, so that the shift is not silent."""
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        counts = [await app.queue(queue).counts() for queue in SLOTS]
        done, waiting, failed = (sum(one[state] for one in counts) for state in ("completed", "waiting", "failed"))
        passed = time.monotonic() - began
        print(f"{passed:4.0f} s  {done:6,} jobs done, {waiting:4,} waiting, {failed:3,} failed for good", flush=True)


async def work(url: str, seconds: float) -> None:
    app, flows = Headrace(url), Workflows(url)
    shop(app, flows)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app)
        await stack.enter_async_context(flows)
        for queue, slots in SLOTS.items():
            await stack.enter_async_context(app.worker(queues=[queue], concurrency=slots))
        telling = asyncio.create_task(tell(app, began))
        await produce(app, flows, began + seconds)
        await asyncio.sleep(2)  # let the last ones end; some stay, as on any evening
        telling.cancel()


# -- the tour ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30)
    given = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    say("a server that keeps its history")
    server = Server()
    try:
        say(f"a shift of {given.seconds:.0f} s; watch it at http://localhost:{server.http_port}/")
        asyncio.run(work(server.url, given.seconds))
        say("where it stands")
        subprocess.run(headrace("queues", "--url", server.url), check=True)
        say("the pipeline: events, jobs, facts")
        lake = ("--lake", str(FOLDER / "lake"))
        source = ("--url", server.url, "--sla", str(PROMISED_MS))
        subprocess.run(headrace("pipeline", "run", *lake, *source), check=True)
        subprocess.run(headrace("pipeline", "report", *lake, "--out", str(FOLDER / "report.html")), check=True)
    finally:
        server.stop()
    say("done")
    print(f"report       {FOLDER / 'report.html'}")
    print(f"tables       {FOLDER / 'lake'} (Parquet: DuckDB, Polars and Spark read it)")
    print(f"look around  .venv/bin/headrace serve --data-path {FOLDER}/headrace.db --report {FOLDER}/report.html")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"\ndemo: stopped; what was made so far is in {FOLDER}")
