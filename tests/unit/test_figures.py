"""Figures are real and the Prometheus text can be read by Prometheus' own parser."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.backends.base import Ack, Demand
from headrace.backends.local.backend import LocalBackend
from headrace.clock import ManualClock
from headrace.commands.jobs import PushEntry
from headrace.commands.workers import RegisterWorker
from headrace.engine.crons import Crons
from headrace.engine.figures import BOUNDS, Figures, escaped, resident_bytes
from headrace.engine.workers import WorkerRegistry
from headrace.ids import IdSource

NIL = msgspec.Raw(b"\xc0")


class Server:
    """A backend with what reads its figures."""

    def __init__(self, max_queues: int = 100) -> None:
        self.clock = ManualClock()
        self.backend = LocalBackend(clock=self.clock)
        self.workers = WorkerRegistry(self.clock, IdSource(self.clock))
        self.crons = Crons(self.backend, self.clock, self.workers)
        self.figures = Figures(self.backend, self.clock, self.workers, self.crons, lambda: 3, max_queues)

    async def push(self, queue: str = "q", count: int = 1, **options: object) -> None:
        await self.backend.insert(queue, [PushEntry(data=NIL, **options) for _ in range(count)])  # type: ignore[arg-type]
        self.backend.commit()

    async def complete(self, queue: str = "q") -> None:
        (claim,) = await self.backend.claim(queue, Demand())
        job = msgspec.msgpack.decode(claim.job)
        await self.backend.complete([Ack(job["id"])])
        self.backend.commit()

    async def series(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        families = text_string_to_metric_families(await self.figures.prometheus())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    async def value(self, name: str, **labels: str) -> float:
        return (await self.series())[name, tuple(sorted(labels.items()))]


@pytest.fixture
async def server():
    made = Server()
    await made.backend.open()
    yield made
    await made.backend.close()


async def test_stats_count_jobs_under_both_sets_of_names(server: Server) -> None:
    await server.push(count=3)
    await server.push(delay=60_000)
    await server.complete()
    await server.backend.claim("q", Demand())
    server.clock.advance(2_000)
    stats = await server.figures.stats()
    assert (stats.queued, stats.processing, stats.delayed, stats.completed, stats.dlq) == (1, 1, 1, 1, 0)
    assert (stats.waiting, stats.active) == (stats.queued, stats.processing)
    assert stats.uptime == 2_000.0


async def test_rates_cover_the_last_seconds_only(server: Server) -> None:
    server.figures.sample()
    await server.push(count=50)
    for _ in range(10):
        server.clock.advance(1_000)
        server.figures.sample()
    assert server.figures.rates() == (5.0, 0.0)
    for _ in range(10):
        server.clock.advance(1_000)
        server.figures.sample()
    assert server.figures.rates() == (0.0, 0.0)


async def test_rates_of_a_server_that_just_started_are_zero(server: Server) -> None:
    assert server.figures.rates() == (0.0, 0.0)


async def test_metrics_give_averages_of_what_really_happened(server: Server) -> None:
    await server.push()
    server.clock.advance(40)
    (claim,) = await server.backend.claim("q", Demand())
    server.clock.advance(10)
    await server.backend.complete([Ack(msgspec.msgpack.decode(claim.job)["id"])])
    metrics = await server.figures.metrics()
    assert (metrics.total_pushed, metrics.total_pulled, metrics.total_completed) == (1.0, 1.0, 1.0)
    assert (metrics.avg_latency_ms, metrics.avg_processing_ms) == (40.0, 10.0)
    assert metrics.memory_usage_mb > 5
    assert metrics.active_connections == 3


async def test_metrics_of_an_idle_server_divide_by_nothing(server: Server) -> None:
    metrics = await server.figures.metrics()
    assert (metrics.avg_latency_ms, metrics.avg_processing_ms) == (0.0, 0.0)


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident_bytes()
    ballast = bytearray(b"x" * 50_000_000)
    assert resident_bytes() - before > 40_000_000
    assert len(ballast) == 50_000_000


async def test_the_text_is_valid_and_says_what_is_there(server: Server) -> None:
    await server.push("mail", count=2, priority=1)
    await server.push("sms")
    await server.complete("sms")
    server.workers.register(RegisterWorker(name="w", queues=["mail"], concurrency=4, worker_id="w"))
    server.workers.heartbeat("w", processed=7)
    assert await server.value("bunqueue_jobs_waiting") == 2
    assert await server.value("bunqueue_jobs_prioritized") == 2
    assert await server.value("bunqueue_jobs_pushed_total") == 3
    assert await server.value("bunqueue_jobs_completed_total") == 1
    assert await server.value("bunqueue_queue_jobs_waiting", queue="mail") == 2
    assert await server.value("bunqueue_worker_concurrency_slots") == 4
    assert await server.value("bunqueue_workers_processed_total") == 7
    assert await server.value("bunqueue_connections", transport="tcp") == 3
    assert await server.value("bunqueue_storage_degraded") == 0
    assert await server.value("process_resident_memory_bytes") > 5_000_000


async def test_every_series_is_declared_once(server: Server) -> None:
    await server.push()
    text = await server.figures.prometheus()
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert text.endswith("\n")


async def test_names_that_mean_nothing_here_are_left_out(server: Server) -> None:
    text = await server.figures.prometheus()
    for absent in ("bun_version", "heap", "backup"):
        assert absent not in text


async def test_queues_beyond_the_cap_are_counted_not_listed() -> None:
    server = Server(max_queues=2)
    await server.backend.open()
    for queue, count in (("small", 1), ("large", 9), ("medium", 5)):
        await server.push(queue, count)
    shown = {labels[0][1] for name, labels in await server.series() if name == "bunqueue_queue_jobs_waiting"}
    assert shown == {"large", "medium"}
    assert await server.value("bunqueue_queue_metrics_exported") == 2
    assert await server.value("bunqueue_queue_metrics_omitted") == 1
    await server.backend.close()


async def test_durations_land_in_their_buckets_and_below(server: Server) -> None:
    for seconds in (0.00005, 0.001, 0.02, 30.0):
        await server.push("timed", 1)
        server.figures.observe_tick(seconds)
    buckets = {
        labels[0][1]: value
        for (name, labels), value in (await server.series()).items()
        if name == "bunqueue_push_duration_seconds_bucket"
    }
    assert len(buckets) == len(BOUNDS) + 1
    assert (buckets["0.0001"], buckets["0.001"], buckets["0.025"], buckets["10.0"]) == (1, 2, 3, 3)
    assert buckets["+Inf"] == 4
    assert await server.value("bunqueue_push_duration_seconds_count") == 4
    assert await server.value("bunqueue_push_duration_seconds_sum") == pytest.approx(30.02105)


@pytest.mark.parametrize("label", ['a"b', "a\\b", "a\nb", "plain"])
def test_label_values_survive_the_parser(label: str) -> None:
    (family,) = text_string_to_metric_families(f'# TYPE m gauge\nm{{l="{escaped(label)}"}} 1\n')
    assert family.samples[0].labels == {"l": label}
