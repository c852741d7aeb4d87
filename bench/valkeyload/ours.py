"""One phase of Headrace on a Valkey that is running: `ours.py URL PHASE COUNT CONCURRENCY`.

Prints the CPU seconds of this process, spent between the start and the end of the phase. A worker sends the completion
of a job together with the claim of the next one, as BullMQ does it in one script.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec import Raw

from headrace.backends.base import Ack, Claim, Demand
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.commands.jobs import PushEntry


class _Named(msgspec.Struct):
    id: str


_id_of = msgspec.msgpack.Decoder(_Named).decode


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def jobs(count: int) -> list[Any]:
    return [PushEntry(data=Raw(msgspec.msgpack.encode({"n": n})), name="job") for n in range(count)]


async def add_bulk(backend: ValkeyBackend, load: SimpleNamespace) -> None:
    await backend.insert("bench", load.jobs)


async def add_one_by_one(backend: ValkeyBackend, load: SimpleNamespace) -> None:
    for job in load.jobs:
        await backend.insert_one("bench", job)


async def work(backend: ValkeyBackend, load: SimpleNamespace) -> None:
    async def slot() -> None:
        claims = await backend.claim("bench", Demand(1, "bench"))
        while claims:
            claims = await finish_and_claim(claims[0])

    async def finish_and_claim(claim: Claim) -> list[Claim]:
        ack = Ack(_id_of(bytes(claim.job)).id, claim.token, b"\xc0")
        _, claims = await asyncio.gather(backend.complete([ack]), backend.claim("bench", Demand(1, "bench")))
        return claims

    await asyncio.gather(*(slot() for _ in range(load.concurrency)))


async def main(url: str, phase: str, count: int, concurrency: int) -> None:
    backend = ValkeyBackend(url)
    await backend.open()
    load = SimpleNamespace(jobs=jobs(count), concurrency=concurrency)
    before = cpu_seconds()
    await {"bulk": add_bulk, "single": add_one_by_one, "work": work}[phase](backend, load)
    print(cpu_seconds() - before)
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
