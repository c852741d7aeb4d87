"""What a worker costs while nothing happens, and how soon it begins when something does."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import psutil
import pytest

from headrace import Headrace, JobContext, Worker
from headrace.worker.attendant import Attendant
from tests.client.proxy import Proxy
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import until
from tests.worker.workerprocess import Marks, WorkerProcess

SOON_S = 0.002
PATIENCE_S = 15.0
"""A shared machine is slow for seconds at a time, but what is the worker's doing comes each time."""


@pytest.mark.parametrize("queues", [1, 3])
@pytest.mark.alone
async def test_row_23_an_idle_worker_begins_a_job_within_two_milliseconds(
    app: Headrace, queue: str, queues: int
) -> None:
    names = [f"{queue}.{n}" for n in range(queues)]
    waits: list[float] = []

    async def handle(job: JobContext) -> None:
        waits.append(time.perf_counter() - job.data)

    async def sample(count: int) -> float:
        waits.clear()
        for n in range(count):
            job = await app.queue(names[n % queues]).add("j", time.perf_counter())
            assert await job.wait(timeout=10)
        return statistics.median(waits)

    async with Worker(app.client, names, handle):
        best, until_then = await sample(20), time.monotonic() + PATIENCE_S
        while best >= SOON_S and time.monotonic() < until_then:
            best = min(best, await sample(40))
    assert best < SOON_S


async def test_short_jobs_in_a_row_share_their_outcomes(
    app: Headrace, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast they come one by one, a worker that keeps up speaks at most once in a millisecond."""
    spoken = 0

    def counted(attendant: Attendant) -> None:
        nonlocal spoken
        spoken += 1
        flush(attendant)

    flush = Attendant._flush
    monkeypatch.setattr(Attendant, "_flush", counted)
    ended: set[int] = set()

    async def handle(job: JobContext) -> None:
        ended.add(job.data)

    async with Worker(app.client, queue, handle, concurrency=50) as worker:
        await worker.ready.wait()
        began = time.monotonic()
        for n in range(300):
            await app.queue(queue).add("j", n)
        await until(lambda: len(ended) == 300, 20)
        await until(lambda: worker.figures.completed == 300, 20)
        elapsed_ms = (time.monotonic() - began) * 1000
    assert 0 < spoken <= elapsed_ms + 10


class CountingProxy(Proxy):
    """Knows how much went through."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.chunks = 0
        self.last_at = 0.0

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.chunks += 1
            self.last_at = time.monotonic()
            writer.write(data)
        writer.close()


@pytest.mark.alone
async def test_row_22_an_idle_worker_says_nothing_but_that_it_lives(
    server: ServerProcess, marks: Marks, queue: str, tmp_path: Path
) -> None:
    """One heartbeat and its answer in ten seconds; nothing is polled, however many queues there are."""
    seconds = scaled(6, 30)
    async with CountingProxy(server.port) as proxy:
        queues = ",".join(f"{queue}.{n}" for n in range(3))
        with WorkerProcess(f"headrace://127.0.0.1:{proxy.port}", marks, "--queues", queues) as worker:
            await until(lambda: "started: queues" in worker.said(), 20)
            await until(lambda: time.monotonic() - proxy.last_at > 0.5)  # it has said what it says on arrival
            process = psutil.Process(worker.pid)
            cpu, chunks = sum(process.cpu_times()[:2]), proxy.chunks
            await asyncio.sleep(seconds)
            spent = sum(process.cpu_times()[:2]) - cpu
            assert proxy.chunks - chunks <= 2 * (1 + seconds // 10)
            # psutil counts in hundredths of a second: one of them is not 0.5 % of the quick run.
            assert spent <= max(0.005 * seconds, 0.03)
