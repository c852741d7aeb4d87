"""The worker registry: who is here, who is stale, who is gone."""

from __future__ import annotations

import pytest

from headrace.clock import ManualClock
from headrace.commands.workers import RegisterWorker
from headrace.engine.workers import WorkerRegistry
from headrace.ids import IdSource
from headrace.model import Event

TIMEOUT = 30_000


class Connection:
    """A client connection as the engine sees it."""

    def __init__(self) -> None:
        self.address = "test"
        self.is_authenticated = True
        self.held: dict[str, int] | None = {}
        self.workers: set[str] = set()
        self.auth_failures = 0
        self.wants_codes = False

    def deliver(self, event: Event, body: bytes | None) -> None:
        raise AssertionError("nobody publishes here")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> WorkerRegistry:
    return WorkerRegistry(clock, IdSource(clock), TIMEOUT)


def presented(worker_id: str | None = None, *, queue: str = "mail", concurrency: int = 2) -> RegisterWorker:
    return RegisterWorker(name="mailer", queues=[queue], worker_id=worker_id, concurrency=concurrency)


def test_a_worker_is_listed_with_what_it_said(registry: WorkerRegistry, clock: ManualClock) -> None:
    registered = registry.register(presented("w1"))
    assert registered.worker_id == "w1"
    assert registered.status == "active"
    assert registered.registered_at == float(clock.now_ms())
    clock.advance(1_500)
    (view,) = registry.list()
    assert (view.id, view.name, view.queues, view.concurrency, view.uptime) == (
        "w1",
        "mailer",
        ["mail"],
        2,
        1_500.0,
    )
    assert isinstance(view.registered_at, float)
    assert isinstance(view.last_seen, float)


def test_a_worker_without_an_id_gets_one(registry: WorkerRegistry) -> None:
    first, second = registry.register(presented()), registry.register(presented())
    assert first.worker_id
    assert first.worker_id != second.worker_id


def test_registering_again_renews_and_keeps_the_counts(registry: WorkerRegistry, clock: ManualClock) -> None:
    first = registry.register(presented("w1"))
    registry.heartbeat("w1", active_jobs=1, processed=5, failed=2)
    clock.advance(1_000)
    again = registry.register(presented("w1", concurrency=9))
    assert again.registered_at == first.registered_at
    assert (again.concurrency, again.processed_jobs, again.failed_jobs) == (9, 5, 2)
    assert registry.stats().total == 1


def test_silence_makes_a_worker_stale_and_a_heartbeat_revives_it(registry: WorkerRegistry, clock: ManualClock) -> None:
    registry.register(presented("w1"))
    clock.advance(TIMEOUT)
    assert registry.list()[0].status == "stale"
    assert registry.stats().active == 0
    assert not registry.any_for_queue("mail")
    assert registry.heartbeat("w1")
    assert registry.list()[0].status == "active"
    assert registry.any_for_queue("mail")


def test_long_silence_makes_a_worker_forgotten(registry: WorkerRegistry, clock: ManualClock) -> None:
    registry.register(presented("old"))
    clock.advance(3 * TIMEOUT - 1)
    registry.register(presented("new"))
    registry.expire()
    assert [worker.id for worker in registry.list()] == ["old", "new"]
    clock.advance(1)
    registry.expire()
    assert [worker.id for worker in registry.list()] == ["new"]
    assert not registry.heartbeat("old")


def test_setting_the_clock_makes_nobody_stale(registry: WorkerRegistry, clock: ManualClock) -> None:
    registry.register(presented("w1"))
    clock.jump(86_400_000)
    registry.expire()
    assert registry.list()[0].status == "active"


def test_workers_go_with_their_connection(registry: WorkerRegistry) -> None:
    connection = Connection()
    registry.register(presented("w1"), connection)
    registry.register(presented("w2"))
    connection.workers.add("w1")
    registry.drop(connection)
    assert [worker.id for worker in registry.list()] == ["w2"]


def test_a_worker_that_came_back_survives_the_end_of_its_old_connection(registry: WorkerRegistry) -> None:
    old, new = Connection(), Connection()
    for connection in (old, new):
        registry.register(presented("w1"), connection)
        connection.workers.add("w1")
    registry.drop(old)
    assert [worker.id for worker in registry.list()] == ["w1"]
    registry.drop(new)
    assert registry.list() == []


def test_unregistering_twice_is_noticed(registry: WorkerRegistry) -> None:
    registry.register(presented("w1"))
    assert registry.unregister("w1")
    assert not registry.unregister("w1")


def test_lists_and_questions_are_per_queue(registry: WorkerRegistry) -> None:
    registry.register(presented("w1", queue="mail"))
    registry.register(presented("w2", queue="sms"))
    assert [worker.id for worker in registry.list("sms")] == ["w2"]
    assert registry.any_for_queue("mail")
    assert not registry.any_for_queue("push")


def test_totals_outlive_workers_and_restarts_of_their_counters(registry: WorkerRegistry) -> None:
    registry.register(presented("w1"))
    registry.heartbeat("w1", active_jobs=2, processed=10, failed=1)
    registry.heartbeat("w1", active_jobs=1, processed=3, failed=0)  # the process began anew
    stats = registry.stats()
    assert (stats.total_processed, stats.total_failed, stats.active_jobs) == (13, 1, 1)
    registry.unregister("w1")
    stats = registry.stats()
    assert (stats.total, stats.total_processed, stats.total_failed, stats.active_jobs) == (0, 13, 1, 0)
