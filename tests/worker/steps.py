"""Reading what jobs wrote while they ran, and whether they keep their leases."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.client.client import Client
from headrace.commands.queries import GetJob
from tests.waiting import until


def lines(path: Path) -> list[str]:
    """What jobs appended to a file, each a whole line."""
    return path.read_text().splitlines() if path.exists() else []


async def is_held_for(client: Client, job_id: str, seconds: float) -> None:
    """Wait until the lease of a running job has been renewed so long after it began, by the clock of its store."""

    async def is_renewed() -> bool:
        job = msgspec.msgpack.decode((await client.ask(GetJob(id=job_id))).job)
        return bool(job["lastHeartbeat"] >= job["startedAt"] + seconds * 1000)

    await until(is_renewed)
