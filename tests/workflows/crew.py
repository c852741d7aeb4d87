"""Worker processes for tests that kill them: `python -m tests.workflows.crew URL FOLDER` runs the workflow below.

Every call appends a line to FOLDER/calls. A step hangs while the file FOLDER/hang-STEP exists, and fails at random for
flows whose data says how often.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.propagation import Retry, current_meta
from headrace.workflows import StepContext, Workflows, step, workflow
from tests.waiting import eventually

RETRY = Retry(2, backoff="fixed", delay=0.01)
a, b, c, d, e = (step(name) for name in "abcde")
trip = workflow("trip").step(a).parallel(b, c).step(d).build()


def note(folder: Path, call: str, ctx: StepContext[Any]) -> None:
    line = f"{ctx.flow_id} {call} {os.getpid()} {current_meta().get('correlationId', '-')}\n"
    with open(folder / "calls", "a") as file:
        file.write(line)


def join(flows: Workflows, folder: Path) -> None:
    async def call(name: str, ctx: StepContext[Any]) -> Any:
        note(folder, name, ctx)
        while (folder / f"hang-{name}").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # what it waits for is outside of this process
        if random.random() < (ctx.data or {}).get("failing", 0):
            raise ValueError(f"{name} failed in {os.getpid()}")
        await asyncio.sleep((ctx.data or {}).get("pause", 0))
        return os.getpid()

    def handler(name: str) -> Any:
        async def run(ctx: StepContext[Any]) -> Any:
            return await call(name, ctx)

        return run

    async def on_error(ctx: StepContext[Any], error: Exception) -> None:
        note(folder, "error", ctx)

    async def on_complete(ctx: StepContext[Any]) -> Any:
        note(folder, "complete", ctx)
        return dict(ctx.results)

    steps = {name: (handler(name), handler(f"undo-{name}")) for name in "abcd"}
    flows.register_definition_consumer(trip, steps, on_complete=on_complete, on_error=on_error)


async def work(url: str, folder: Path) -> None:
    flows = Workflows(url, default_retry=RETRY, concurrency=5, provider_id=f"crew-{os.getpid()}")
    join(flows, folder)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with flows:
        print("ready", flush=True)
        await stopped.wait()


async def start_and_hang(url: str) -> None:
    async with Workflows(url, default_retry=RETRY) as flows:
        print((await flows.execute(trip, {}, timeout=60)).id, flush=True)
        await asyncio.Event().wait()


def start_and_die(url: str, folder: Path) -> str:
    """Have a process start a flow, and kill it; the id of the flow."""
    command = [sys.executable, "-m", "tests.workflows.crew", url, str(folder), "start"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    flow_id = process.stdout.readline().strip()
    process.kill()
    process.communicate(timeout=10)
    return flow_id


class Hand:
    """One worker process."""

    def __init__(self, url: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.workflows.crew", url, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=40)


@contextmanager
def crew(url: str, folder: Path, count: int) -> Iterator[list[Hand]]:
    hands: list[Hand] = []
    try:
        for _ in range(count):
            hands.append(Hand(url, folder))
        yield hands
    finally:
        for hand in hands:
            hand.kill()


def calls(folder: Path) -> list[tuple[str, str, int, str]]:
    """Flow, call, pid and correlation id of every call so far."""
    if not (folder / "calls").exists():
        return []
    rows = [line.split() for line in (folder / "calls").read_text().splitlines()]
    return [(flow, call, int(pid), correlation) for flow, call, pid, correlation in rows]


def wait_call(folder: Path, call: str) -> None:
    """Wait until a call of this name was made."""
    eventually(lambda: call in {name for _, name, _, _ in calls(folder)})


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(start_and_hang(sys.argv[1]) if sys.argv[3:] else work(sys.argv[1], Path(sys.argv[2])))
