"""What producers and workers do; each is a process: `python -m soak.load PART`, where PART is a `Part` as JSON.

A producer pushes jobs of every kind and starts workflows; a worker runs both. They write down what they did (`ledger`).
To add a kind of job, write a function like `_push_plain` and put it into KINDS with its share of the pushes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from headrace import Headrace, JobContext, NewJob, Queue, Worker
from headrace.errors import HeadraceError
from headrace.propagation import Retry
from headrace.workflows import StepContext, Workflows, step, workflow
from soak.ledger import Ledger, Push, Run, Start

JOBS: Final = "jobs"
TICKS: Final = "ticks"
ATTEMPTS: Final = 20
"""Of jobs that shall complete: more than a run can cost them by killing their workers."""
DOOMED_ATTEMPTS: Final = 3
BULK: Final = 20
STEPS: Final = "abcd"
FLOW_SHARE: Final = 0.05
_PAUSE_AFTER_ERROR: Final = 0.2
_a, _b, _c, _d = (step(name) for name in STEPS)
trip = workflow("trip").step(_a).parallel(_b, _c).step(_d).build()


class Part(Struct):
    """One process of the load, and where it writes: `side` is which of the stores it works on."""

    role: str
    name: str
    url: str
    side: str
    folder: str
    seed: int
    rate: float
    lease: float

    def ledger(self, what: str) -> Ledger:
        return Ledger(Path(self.folder) / f"{what}-{self.side}.jsonl")

    @property
    def flows(self) -> Workflows:
        return Workflows(self.url, default_retry=Retry(2, backoff="fixed", delay=0.05), provider_id=self.name)


# -- producers ---------------------------------------------------------------------------------------------------------


class Added(NamedTuple):
    job: str
    key: str


class Producer:
    """Pushes at its rate, whatever happens. What failed is written off, but for jobs with an id of their own."""

    def __init__(self, part: Part, queue: Queue, flows: Workflows) -> None:
        self.queue = queue
        self.random = random.Random(f"{part.seed} {part.name}")
        self._flows = flows
        self._rate = part.rate
        self._pushes, self._starts = part.ledger("pushes"), part.ledger("starts")
        # A producer that was killed and started again must not use its names again.
        self._names = (f"{part.name}-{os.getpid()}-{number}" for number in itertools.count())

    async def work(self, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            began = time.monotonic()
            act = self._start_flow if self.random.random() < FLOW_SHARE else self._push
            try:
                count = await act()
            except HeadraceError:
                count = 1
                await asyncio.sleep(_PAUSE_AFTER_ERROR)
            await asyncio.sleep(max(0.0, count / self._rate - (time.monotonic() - began)))

    async def _push(self) -> int:
        name = self.random.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
        added = await KINDS[name].push(self)
        now = time.time()
        self._pushes.write(*(Push(one.job, name, KINDS[name].attempts, one.key, now) for one in added))
        return len(added)

    async def _start_flow(self) -> int:
        name, failing = next(self._names), self.random.choice((None, None, *STEPS))
        await self._flows.execute(trip, {"failing": failing}, id=name, timeout=300)
        self._starts.write(Start(name, failing, time.time()))
        return 2 * len(STEPS)

    def data(self, **more: Any) -> dict[str, Any]:
        return {"key": next(self._names), "seconds": self.random.choice((0, 0, 0, 0.01, 0.1, 1)), **more}

    async def add(self, data: dict[str, Any], **options: Any) -> list[Added]:
        options = {"attempts": ATTEMPTS, "backoff": "100ms", **options}
        return [Added((await self.queue.add("work", data, **options)).id, data["key"])]


async def _push_plain(producer: Producer) -> list[Added]:
    return await producer.add(producer.data(), priority=producer.random.randrange(-3, 4))


async def _push_bulk(producer: Producer) -> list[Added]:
    each = [producer.data() for _ in range(BULK)]
    options: Any = {"attempts": ATTEMPTS}
    jobs = await producer.queue.add_many([NewJob(name="work", data=data, options=options) for data in each])
    return [Added(job.id, data["key"]) for job, data in zip(jobs, each, strict=True)]


async def _push_delayed(producer: Producer) -> list[Added]:
    return await producer.add(producer.data(), delay=producer.random.uniform(0.2, 3))


async def _push_durable(producer: Producer) -> list[Added]:
    return await producer.add(producer.data(), durable=True)


async def _push_flaky(producer: Producer) -> list[Added]:
    return await producer.add(producer.data(failures=producer.random.randrange(1, 4)))


async def _push_doomed(producer: Producer) -> list[Added]:
    return await producer.add(producer.data(failures=ATTEMPTS), attempts=DOOMED_ATTEMPTS)


async def _push_once(producer: Producer) -> list[Added]:
    """Under an id of its own, until it is acknowledged twice: however often it was sent, it is one job."""
    data = producer.data()
    answers = [await _insist(producer, data), await _insist(producer, data)]
    return [Added(job, data["key"]) for job in sorted(set(answers))]


async def _insist(producer: Producer, data: dict[str, Any]) -> str:
    while True:
        try:
            return (await producer.add(data, job_id=data["key"], once=True))[0].job
        except HeadraceError:
            await asyncio.sleep(_PAUSE_AFTER_ERROR)


class Kind(NamedTuple):
    share: int
    attempts: int
    push: Callable[[Producer], Awaitable[list[Added]]]


KINDS: Final[dict[str, Kind]] = {
    "plain": Kind(40, ATTEMPTS, _push_plain),
    "bulk": Kind(3, ATTEMPTS, _push_bulk),
    "delayed": Kind(10, ATTEMPTS, _push_delayed),
    "durable": Kind(10, ATTEMPTS, _push_durable),
    "flaky": Kind(10, ATTEMPTS, _push_flaky),
    "doomed": Kind(5, DOOMED_ATTEMPTS, _push_doomed),
    "once": Kind(15, ATTEMPTS, _push_once),
}


# -- workers -----------------------------------------------------------------------------------------------------------


class OnPurpose(Exception):
    """The job was told to fail."""


@asynccontextmanager
async def _noted(ledger: Ledger, begin: Run) -> AsyncIterator[None]:
    """Write down the beginning, and how it ended before anybody else hears of it."""
    ledger.write(begin)
    outcome = "cancelled"
    try:
        yield
        outcome = "done"
    except OnPurpose:
        outcome = "failed"
        raise
    finally:
        ledger.write(msgspec.structs.replace(begin, what=outcome, at=time.time()))


def handler_of(ledger: Ledger) -> Callable[[JobContext], Awaitable[str]]:
    async def handle(ctx: JobContext) -> str:
        data = ctx.data
        slot = ctx.info.created_at if ctx.queue == TICKS else None
        begin = Run(ctx.id, "begin", ctx.attempt, os.getpid(), time.time(), data["key"], slot)
        async with _noted(ledger, begin):
            await asyncio.sleep(data.get("seconds", 0))
            if ctx.attempt <= data.get("failures", 0):
                raise OnPurpose(f"attempt {ctx.attempt} was told to fail")
        return str(data["key"])

    return handle


def implement(flows: Workflows, ledger: Ledger, rng: random.Random) -> None:
    def handler(call: str) -> Callable[[StepContext[Any]], Awaitable[str]]:
        async def run(ctx: StepContext[Any]) -> str:
            begin = Run(f"{ctx.flow_id}/{call}", "begin", 0, os.getpid(), time.time())
            async with _noted(ledger, begin):
                await asyncio.sleep(rng.choice((0, 0.01, 0.5)))
                if ctx.data["failing"] == call:
                    raise OnPurpose(f"{call} was told to fail")
            return call

        return run

    flows.register_definition_consumer(trip, {name: (handler(name), handler(f"undo-{name}")) for name in STEPS})


# -- processes ---------------------------------------------------------------------------------------------------------


async def produce(part: Part, stopped: asyncio.Event) -> None:
    async with Headrace(part.url) as app, part.flows as flows:
        print("ready", flush=True)
        await Producer(part, app.queue(JOBS), flows).work(stopped)


async def work(part: Part, stopped: asyncio.Event) -> None:
    flows = part.flows
    implement(flows, part.ledger("steps"), random.Random(f"{part.seed} {part.name}"))
    async with Headrace(part.url) as app:
        handler = handler_of(part.ledger("runs"))
        async with Worker(app.client, [JOBS, TICKS], handler, name=part.name, concurrency=12, lease=part.lease), flows:
            print("ready", flush=True)
            await stopped.wait()


async def main(part: Part) -> None:
    """Play the part until SIGTERM. Whoever starts while the store is away begins again in a moment."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    while not stopped.is_set():
        try:
            await ROLES[part.role](part, stopped)
        except HeadraceError as error:
            logging.warning("%s cannot begin: %s", part.name, error)
            await asyncio.sleep(_PAUSE_AFTER_ERROR)


ROLES: Final = {"producer": produce, "worker": work}

if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Part)))
