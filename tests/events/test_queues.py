"""EW-063 to EW-075: the QueueManager."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.client.client import Client
from headrace.client.queue import Queue
from headrace.errors import InvalidCommand
from headrace.events import EventContext, Events, QueueManager, Retry, event
from tests.scale import IS_FULL, scaled
from tests.serverprocess import ServerProcess
from tests.waiting import until


async def test_ew_063_064_queues_are_named_after_events_and_reused(client: Client) -> None:
    manager = QueueManager(client)
    assert manager.get_queue_name("monitor.check") == "event.monitor.check"
    assert QueueManager(client, queue_prefix="jobs").get_queue_name("x") == "jobs.x"
    assert manager.get_queue("a") is manager.get_queue("a")
    assert manager.get_queue("a") is not manager.get_queue("b")
    assert manager.get_queue("a", "g").name == "event.a.g"


async def test_ew_065_066_options_merge_from_retry_over_defaults_to_the_call(client: Client) -> None:
    async def added(manager: QueueManager, **options: Any) -> tuple[str, Any, int, int]:
        job_id = await manager.add_job("a", {"n": 1}, **options)
        info = await manager.get_queue("a").get_job(job_id)
        assert info is not None
        return info.name, info.data, info.max_attempts, info.priority

    assert await added(QueueManager(client)) == ("event", {"n": 1}, 3, 0)
    manager = QueueManager(client, default_retry=Retry(7), default_job_options={"priority": 4})
    assert (await added(manager))[2:] == (7, 4)
    manager = QueueManager(client, default_retry=Retry(7), default_job_options={"attempts": 5})
    assert (await added(manager))[2] == 5
    assert (await added(manager, attempts=2))[2] == 2


async def test_ew_067_068_069_workers_are_ready_when_registered_and_drain_when_stopped(client: Client) -> None:
    manager = QueueManager(client)
    ended: list[Any] = []
    began = asyncio.Event()

    async def handler(context: Any, worker: Any) -> None:
        began.set()
        await asyncio.sleep(0.05)
        ended.append((context.queue, context.data))

    worker = await manager.register_worker("a", handler)
    assert worker.concurrency == 10
    await manager.add_job("a", 1)
    await began.wait()
    await manager.stop()
    assert ended == [("event.a", 1)]


async def test_ew_070_071_cleaning_by_age_and_removing_by_id(client: Client) -> None:
    manager = QueueManager(client)
    ids = [await manager.add_job("a", n, job_id=f"j{n}") for n in range(3)]
    assert await manager.remove("a", "j2") is True
    assert await manager.remove("a", "j2") is False
    assert await manager.clean("a", 3600, "waiting") == []
    assert len(await manager.clean("a", 0, "waiting", limit=1)) == 1
    assert sorted(ids) == ["j0", "j1", "j2"]


class Hooks:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_job_added(self, event_name: str, job_id: str) -> None:
        self.told.append(("added", event_name))
        raise RuntimeError("hooks cannot break anything")

    def on_job_completed(self, event_name: str, job_id: str, duration_ms: float) -> None:
        self.told.append(("completed", duration_ms >= 10))
        raise RuntimeError

    def on_job_failed(self, event_name: str, job_id: str, error: BaseException) -> None:
        self.told.append(("failed", str(error)))
        raise RuntimeError


async def test_ew_072_074_metrics_hooks_are_told_and_cannot_break_a_job(client: Client) -> None:
    hooks = Hooks()
    manager = QueueManager(client, metrics=hooks, default_retry=Retry(1))

    async def handler(context: Any, worker: Any) -> None:
        await asyncio.sleep(0.02)
        if context.data == "bad":
            raise ValueError("bad")

    worker = await manager.register_worker("a", handler)
    await manager.add_job("a", "good")
    await until(lambda: worker.figures.completed == 1)
    await manager.add_job("a", "bad")
    await until(lambda: worker.figures.failed == 1)
    assert hooks.told == [("added", "a"), ("completed", True), ("added", "a"), ("failed", "bad")]
    await manager.stop()


async def test_ew_073_nothing_is_kept_per_job_without_metrics(client: Client) -> None:
    manager = QueueManager(client)
    count = scaled(500, 10_000)
    done: list[int] = []

    async def handler(context: Any, worker: Any) -> None:
        done.append(1)

    worker = await manager.register_worker("a", handler, concurrency=100)
    await manager.add_jobs("a", None, [(n, {}) for n in range(count)])
    await until(lambda: len(done) == count, within=60)
    await until(lambda: not worker._running)
    sizes = {name: len(value) for name, value in vars(manager).items() if isinstance(value, dict | list | set)}
    assert max(sizes.values()) <= 4, sizes
    await manager.stop()


async def test_ew_120_one_handler_per_event_and_group(client: Client) -> None:
    manager = QueueManager(client)

    async def handler(context: Any, worker: Any) -> None: ...

    await manager.register_worker("a", handler)
    await manager.register_worker("a", handler, group="g")
    with pytest.raises(InvalidCommand, match="already"):
        await manager.register_worker("a", handler)
    await manager.stop()


@pytest.mark.timeout(600)
async def test_ew_075_the_store_stays_bounded_however_many_events_there_were(tmp_path: Path) -> None:
    kept, count = scaled(300, 50_000), scaled(1000, 100_000)
    note = event("soak.note", int)
    seen: set[int] = set()
    limits = {} if IS_FULL else {"BUNQUEUE_MAX_COMPLETED_JOBS": str(kept)}  # in full, the default is the limit
    with ServerProcess(tmp_path / "events.db", env=limits) as server:
        events = Events(f"headrace://127.0.0.1:{server.port}")

        @events.on(note, concurrency=100)
        async def handle(ctx: EventContext[int]) -> None:
            seen.add(ctx.data)

        async with events:
            await events.emit_many(note, range(count))
            await until(lambda: len(seen) == count, 500)
            queue = events.provider.queues.get_queue("soak.note")
            await until(partial(_has_at_most, queue, kept))


async def _has_at_most(queue: Queue, kept: int) -> bool:
    counts = await queue.counts()
    return not counts["waiting"] and not counts["active"] and 0 < counts["completed"] <= kept
