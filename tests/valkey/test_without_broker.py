"""Python on shared queues without any broker: the engine runs in the process, the queues are on Valkey."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from headrace.backends.valkey.backend import ValkeyBackend
from headrace.client.client import Client
from headrace.client.queue import Queue
from headrace.clock import SystemClock
from headrace.commands import REGISTRY
from headrace.commands.jobs import PushEntry
from headrace.config import ConfigError
from headrace.connect import open_client
from headrace.errors import InvalidCommand, StorageUnavailable
from headrace.server.ticker import Ticker
from headrace.worker.context import JobContext
from headrace.worker.worker import Worker
from tests.conformance.rig import pack
from tests.ports import free_port
from tests.valkey.foreign import Foreign
from tests.valkeyserver import shared_server
from tests.waiting import until


def command(name: str, **fields: Any) -> Any:
    return REGISTRY[name].type(**fields)


async def still_waits(task: asyncio.Task[Any]) -> bool:
    ended, _ = await asyncio.wait({task}, timeout=0.1)
    return not ended


@pytest.fixture
def prefix() -> str:
    """The default one, which other programs look below; nothing is there yet."""
    shared_server().client().flushall()
    return "glide"


async def test_one_process_adds_and_the_other_works(clients: list[Client]) -> None:
    producer, worker = clients
    pulling = asyncio.create_task(worker.ask(command("PULL", queue="q", owner="w", timeout=10_000), 15))
    assert await still_waits(pulling)
    added = await producer.ask(command("PUSH", queue="q", data=pack({"n": 1})))
    pulled = await pulling
    assert msgspec.msgpack.decode(bytes(pulled.job))["data"] == {"n": 1}
    waiting = asyncio.create_task(producer.ask(command("WaitJob", id=added.id, timeout=10_000), 15))
    assert await still_waits(waiting)
    await worker.ask(command("ACK", id=added.id, token=pulled.token, result=pack("done")))
    assert msgspec.msgpack.decode(bytes((await waiting).result)) == "done"


async def test_a_server_that_is_not_there_is_named() -> None:
    client = open_client(f"valkey://127.0.0.1:{free_port()}?timeout=1")
    with pytest.raises(StorageUnavailable, match="cannot be reached"):
        await client.ask(command("PUSH", queue="q", data=pack(1)))
    await asyncio.wrap_future(client.close())


def test_a_wrong_url_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match="valkey://host:6379"):
        open_client("valkeyy://host")


async def test_a_log_line_that_is_too_large_is_at_fault_and_not_its_job(clients: list[Client]) -> None:
    """Workers warn of lines that are refused, but not of those whose job is gone."""
    job = await Queue(clients[0], "q").add("a")
    with pytest.raises(InvalidCommand, match="Log line too large"):
        await job.log("é" * 600_000)


async def test_a_worker_that_reports_back_and_pulls_at_once_gets_each_job_once(clients: list[Client]) -> None:
    """Both commands are under way together: what the second one takes must not be given back by the first."""
    worker = clients[0]
    await worker.ask(command("PUSHB", queue="q", jobs=[PushEntry(data=pack(n)) for n in range(4)]))
    release = command("ReleaseLeases", owner="w", queues=["q"])
    pull = command("PULLB", queue="q", count=4, owner="w")
    released, pulled = await asyncio.gather(worker.ask(release), worker.ask(pull))
    assert (released.count, len(pulled.jobs)) == (0, 4)
    assert (await worker.ask(command("PULLB", queue="q", count=4, owner="w"))).jobs == []
    assert (await worker.ask(release)).count == 4


async def test_a_client_that_was_closed_during_a_sweep_sweeps_no_more(
    clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    async def close_during_a_sweep() -> Ticker:
        peer: Any = await clients[0].channel()
        peer.home.ticker._sweep()
        await peer.close()
        return peer.home.ticker  # type: ignore[no-any-return]

    ticker = await asyncio.wrap_future(clients[0].line.run(close_during_a_sweep))
    await until(lambda: not ticker._is_sweeping)
    assert ticker._timer is None or ticker._timer.cancelled()
    assert "sweep" not in caplog.text


async def test_who_waits_for_a_job_learns_of_its_end_though_the_message_is_lost(clients: list[Client]) -> None:
    here, there = clients
    plain = shared_server().client()
    await there.ask(command("PUSH", queue="q", data=pack(1)))
    pulled = await there.ask(command("PULL", queue="q", owner="w"))
    job_id = msgspec.msgpack.decode(pulled.job)["id"]
    waiting = asyncio.create_task(here.ask(command("WaitJob", id=job_id, timeout=500), 10))
    await until(lambda: plain.hget("glide:{q}:meta", "hrAwaited"))
    plain.hdel("glide:{q}:meta", "hrAwaited")
    await there.ask(command("ACK", id=job_id, token=pulled.token, result=pack("r")))
    waited = await waiting
    assert (waited.completed, msgspec.msgpack.decode(waited.result)) == (True, "r")


@pytest.mark.parametrize("place", ["here", "there"])
async def test_who_waits_for_a_job_that_is_cancelled_before_others_know_of_it_is_told_that_it_ended(
    clients: list[Client], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = clients[0], clients[0 if place == "here" else 1]
    announce = ValkeyBackend.announce_awaited
    added = await here.ask(command("PUSH", queue="q", data=pack(1)))

    async def announce_late(backend: ValkeyBackend, job_id: str, timeout_ms: float) -> bool:
        other.line.post(lambda: other.submit(command("Cancel", id=job_id), lambda _: None, 5))
        while await backend.state(job_id) != "unknown":
            pass
        return await announce(backend, job_id, timeout_ms)

    monkeypatch.setattr(ValkeyBackend, "announce_awaited", announce_late)
    waited = await here.ask(command("WaitJob", id=added.id, timeout=5000), 10)
    assert waited.completed is False


@pytest.mark.alone
@pytest.mark.parametrize("adder", ["our client", "our library"])
async def test_an_idle_worker_begins_urgent_last_in_and_delayed_jobs_at_once(clients: list[Client], adder: str) -> None:
    """Weakness 2: a worker of Node's sees these up to five seconds late."""
    producer, other = clients
    begun: asyncio.Queue[float] = asyncio.Queue()
    foreign = Foreign(shared_server().client(), "glide", SystemClock())
    queue, waits = Queue(producer, "idle"), []

    async def begin(job: JobContext) -> None:
        begun.put_nowait(time.monotonic())

    async with Worker(other, "idle", begin, concurrency=3) as worker:
        await worker.ready.wait()
        for given in [{"priority": 3}, {"lifo": True}, {"delay": 50}] * 4:
            await asyncio.sleep(0.03)  # so that it is idle again
            began = time.monotonic()
            if adder == "our client":
                await queue.add("job", None, **({"delay": 0.05} if "delay" in given else given))
            else:
                foreign.add(queue="idle", **({} if "lifo" in given else given), more=("1",) if "lifo" in given else ())
            waits.append(await asyncio.wait_for(begun.get(), 10) - began - given.get("delay", 0) / 1000)
    assert sorted(waits)[len(waits) // 2] < 0.05
    assert max(waits) < 0.5


async def test_a_program_that_has_just_started_counts_all_jobs(clients: list[Client]) -> None:
    """As `headrace stats` does: it asks once, and ends."""
    for queue in ("q", "r"):
        await clients[0].ask(command("PUSH", queue=queue, data=pack(1)))
    assert (await clients[1].ask(command("Stats"))).stats.waiting == 2
