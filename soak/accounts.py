"""What the stores themselves say: how jobs ended, how workflows went, how much memory and disk everything took.

The local side is read from its event log, which has everything. On Valkey only so many ended jobs are kept, so `Watch`
looks at them every second while the run lasts. Nothing here judges; that is `verdict`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
from msgspec import Struct
from tests.serverprocess import ServerProcess
from tests.valkeyserver import ValkeyServer

import valkey
from headrace import Headrace
from headrace.errors import HeadraceError, NotFound
from headrace.workflows import Workflows
from headrace.workflows.timeline import Timeline
from soak.ledger import Start
from soak.load import JOBS, TICKS
from soak.stage import Stage

_LOOK_EVERY: Final = 1.0
_UNFINISHED: Final = ("waiting", "prioritized", "delayed", "active", "waiting-children", "paused")


class Ending(Struct):
    """The end of a job as its store has it."""

    state: str
    at: float
    attempts: int | None = None


class Account(Struct):
    """How the jobs of one side ended: each should have one ending."""

    endings: dict[str, list[Ending]]
    pushed: set[str] | None = None
    """Every job that was ever pushed, where the store can tell."""


def account_of_log(events: Iterable[dict[str, Any]]) -> Account:
    account = Account(defaultdict(list), set())
    assert account.pushed is not None
    for event in events:
        if event["queue"] != JOBS:
            continue
        if event["event"] == "pushed":
            account.pushed.add(event["job"])
        elif event["event"] == "completed" or (event["event"] == "failed" and event.get("terminal")):
            ending = Ending(event["event"], event["ts"] / 1000, event.get("attempt"))
            account.endings[event["job"]].append(ending)
    return account


class Watch:
    """Looks at the stage every second: how jobs on Valkey ended, and how large everything is."""

    def __init__(self, stage: Stage) -> None:
        self.sizes: dict[str, list[float]] = defaultdict(list)
        self.account = Account(defaultdict(list))
        self._stage = stage
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Watch:
        self._watching = self._threads.submit(self._watch)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        self._threads.shutdown()
        if kind is None:
            self._watching.result()  # a watch that saw less than all of it proves nothing

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY):
            with suppress(valkey.ConnectionError, valkey.TimeoutError, valkey.ResponseError):
                self.look_at_valkey()
            self._weigh()

    def look_at_valkey(self) -> None:
        client = self._stage.valkey.client(socket_timeout=5)
        for state in ("completed", "failed"):
            for job, score in client.zrange(f"glide:{{{JOBS}}}:{state}", 0, -1, withscores=True):
                known = self.account.endings[job]
                if not any(ending.state == state and ending.at == score / 1000 for ending in known):
                    attempts = client.hget(f"glide:{{{JOBS}}}:job:{job}", "attemptsMade")
                    known.append(Ending(state, score / 1000, int(attempts) if attempts else None))
        client.close()

    def _weigh(self) -> None:
        stage = self._stage
        weighed: dict[str, ServerProcess | ValkeyServer] = {**stage.servers, "valkey": stage.valkey}
        for name, one in weighed.items():
            with suppress(psutil.Error):
                if one.process is not None:
                    self.sizes[f"memory of {name}"].append(psutil.Process(one.process.pid).memory_info().rss)
        self.sizes["database and its log"].append(_bytes_of(stage.disk.glob("headrace.db*")))
        self.sizes["files of valkey"].append(_bytes_of(stage.valkey.folder.rglob("*.aof")))


def _bytes_of(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def unfinished_jobs(url: str) -> int:
    """How many jobs have not ended."""
    with Headrace(url).sync() as app:
        return sum(app.queue(queue).counts().get(state, 0) for queue in (JOBS, TICKS) for state in _UNFINISHED)


class Flows:
    """The timelines of started workflows, asked for until they are final."""

    def __init__(self, url: str, starts: Sequence[Start]) -> None:
        self._url = url
        self._open = [start.flow for start in starts]
        self.timelines: dict[str, Timeline | None] = dict.fromkeys(self._open)

    def unfinished(self) -> int:
        asyncio.run(self._look())
        return len(self._open)

    async def _look(self) -> None:
        async with Workflows(self._url) as flows:
            for flow in list(self._open):
                with suppress(NotFound):
                    self.timelines[flow] = found = await (await flows.get_handle(flow)).timeline()
                    if found.status.is_final:
                        self._open.remove(flow)


def wait_for_quiet(urls: dict[str, str], flows: dict[str, Flows], limit: float) -> list[str]:
    """Wait until nothing is left to do; what is left all the same when the time is over."""
    deadline = time.monotonic() + limit
    while True:
        left: list[str] = []
        for side, url in urls.items():
            try:
                if jobs := unfinished_jobs(url):
                    left.append(f"{jobs} jobs of {side}")
                if open_flows := flows[side].unfinished():
                    left.append(f"{open_flows} workflows of {side}")
            except HeadraceError as error:
                left.append(f"{side} cannot be asked: {error}")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)
