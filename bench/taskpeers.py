"""The two ends of a task queue, for one library each: `taskpeers.py LIBRARY ROLE PLACE PROOF`.

PLACE is the port of the broker or a file, PROOF the file to which every job appends one byte. ROLE is `worker`,
`producer`, or `both` for libraries that keep everything in one process. A producer reads lines `bulk N` and `one N`,
adds N jobs in the best way its library has, or one by one with an answer awaited for each, and prints `done`. Ours also
knows `rare N`: with pauses between them; how long each was under way is appended to PROOF.delays.

Workers are set up for many short jobs, as their manuals advise. To compare another library: a class like those below,
its entry in LIBRARIES, and its line in tasks.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

CONCURRENCY = 100
BATCH = 1000
PAUSE_S = 0.02

_proof = -1
_delays = -1


def note(n: int) -> None:
    """The job: prove that it ran."""
    os.write(_proof, b".")


def note_delay(seconds: float) -> None:
    """Prove it, and tell how long the job was under way. The clock is the same in all processes."""
    os.write(_delays, struct.pack("d", seconds))
    note(0)


class Library(Protocol):
    def __init__(self, place: str) -> None: ...

    def work(self) -> None:
        """Begin to work in the background."""

    def add_one_by_one(self, count: int) -> None: ...

    def add_in_bulk(self, count: int) -> None: ...


class HeadraceLibrary:
    """Producer and worker as coroutines of one loop (as `headrace worker` has it), the only one in embedded mode."""

    def __init__(self, place: str) -> None:
        from headrace import Headrace
        from headrace.client.line import new_loop

        url = f"headrace://127.0.0.1:{place}" if place.isdigit() else f"sqlite:///{place}"
        self._app = Headrace(url)
        self._loop = new_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        @self._app.task()
        async def noted(n: int) -> None:
            note(n)

        @self._app.task()
        async def timed(sent: float) -> None:
            note_delay(time.perf_counter() - sent)

        self._task, self._timed = noted, timed

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def work(self) -> None:
        worker = self._app.worker(concurrency=CONCURRENCY)
        asyncio.run_coroutine_threadsafe(worker.run(handle_signals=False), self._loop)

    def add_one_by_one(self, count: int) -> None:
        async def add() -> None:
            for n in range(count):
                await self._task.enqueue(n)

        self._run(add())

    def add_in_bulk(self, count: int) -> None:
        async def add() -> None:
            await self._task.enqueue_many([(n,) for n in range(count)])

        self._run(add())

    def add_now_and_then(self, count: int) -> None:
        """With pauses in which the worker has nothing to do."""

        async def add() -> None:
            for _ in range(count):
                await asyncio.sleep(PAUSE_S)
                await self._timed.enqueue(time.perf_counter())

        self._run(add())


class DramatiqLibrary:
    """Has no call for many jobs: one by one is its bulk."""

    def __init__(self, place: str) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker

        self._broker = RedisBroker(host="127.0.0.1", port=int(place))
        dramatiq.set_broker(self._broker)
        self._actor = dramatiq.actor(note)

    def work(self) -> None:
        import dramatiq

        dramatiq.Worker(self._broker, worker_threads=8).start()

    def add_one_by_one(self, count: int) -> None:
        for n in range(count):
            self._actor.send(n)

    add_in_bulk = add_one_by_one


class HueyLibrary:
    """Has no call for many jobs: one by one is its bulk. It deletes a job before it runs."""

    def __init__(self, place: str) -> None:
        import huey

        self._huey: Any = (
            huey.RedisHuey("bench", host="127.0.0.1", port=int(place), results=False)
            if place.isdigit()
            else huey.SqliteHuey("bench", filename=place, results=False)
        )
        self._task = self._huey.task()(note)

    def work(self) -> None:
        consumer = self._huey.create_consumer(workers=1, periodic=False, check_worker_health=False)
        consumer.start()

    def add_one_by_one(self, count: int) -> None:
        for n in range(count):
            self._task(n)

    add_in_bulk = add_one_by_one


class BunqueueLibrary:
    """The official client. With its defaults it sleeps when all slots are busy; these settings spare it that."""

    def __init__(self, place: str) -> None:
        from bunqueue import Queue

        self._port = int(place)
        self._queue = Queue("bench", host="127.0.0.1", port=self._port)

    def work(self) -> None:
        from bunqueue import Worker

        Worker(
            "bench",
            lambda job: note(job.data["n"]),
            host="127.0.0.1",
            port=self._port,
            concurrency=200,
            batch_size=200,
            ack_batch={"max_size": 200, "max_delay_ms": 5},
        )

    def add_one_by_one(self, count: int) -> None:
        for n in range(count):
            self._queue.add("note", {"n": n})

    def add_in_bulk(self, count: int) -> None:
        for start in range(0, count, BATCH):
            ns = range(start, min(start + BATCH, count))
            self._queue.add_bulk([{"name": "note", "data": {"n": n}} for n in ns])


LIBRARIES: dict[str, type[Library]] = {
    "headrace": HeadraceLibrary,
    "dramatiq": DramatiqLibrary,
    "huey": HueyLibrary,
    "bunqueue": BunqueueLibrary,
}


def main(library_name: str, role: str, place: str, proof: str) -> None:
    global _proof, _delays
    _proof, _delays = (os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for path in (proof, f"{proof}.delays"))
    library = LIBRARIES[library_name](place)
    if role in ("worker", "both"):
        library.work()
    if role == "worker":
        print("ready", flush=True)
        signal.pause()
        return
    ways: dict[str, Callable[[int], None]] = {"bulk": library.add_in_bulk, "one": library.add_one_by_one}
    if isinstance(library, HeadraceLibrary):
        ways["rare"] = library.add_now_and_then
    print("ready", flush=True)
    for line in sys.stdin:
        way, count = line.split()
        ways[way](int(count))
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
