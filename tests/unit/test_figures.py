"""Figures are real and the Prometheus text can be read by Prometheus' own parser."""

from __future__ import annotations

import mmap
import time

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
from headrace.engine.guessing import Guesses
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
        self.guesses = Guesses(self.clock)
        figured = (self.backend, self.clock, self.workers, self.crons, self.guesses)
        self.figures = Figures(*figured, lambda: 3, max_queues)

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

    async def buckets(self, name: str) -> dict[str, float]:
        """The values of a histogram of one queue by their upper bounds."""
        return {dict(labels)["le"]: value for (found, labels), value in (await self.series()).items() if found == name}

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
    metrics = server.figures.metrics()
    assert (metrics.total_pushed, metrics.total_pulled, metrics.total_completed) == (1.0, 1.0, 1.0)
    assert (metrics.avg_latency_ms, metrics.avg_processing_ms) == (40.0, 10.0)
    assert metrics.memory_usage_mb > 5
    assert metrics.active_connections == 3


@pytest.mark.parametrize("at_once", [1, 2, 6], ids=["one by one", "in pairs", "all"])
async def test_figures_are_the_same_however_many_jobs_a_call_has(server: Server, at_once: int) -> None:
    for _ in range(2):
        await server.push(count=3)
        server.clock.advance(40)
    claims = [claim for _ in range(0, 6, at_once) for claim in await server.backend.claim("q", Demand(at_once))]
    server.clock.advance(10)
    ids = [msgspec.msgpack.decode(claim.job)["id"] for claim in claims]
    for start in range(0, 6, at_once):
        await server.backend.complete([Ack(job_id) for job_id in ids[start : start + at_once]])
    server.backend.commit()
    metrics = server.figures.metrics()
    assert (metrics.total_pulled, metrics.total_completed) == (6.0, 6.0)
    assert (metrics.avg_latency_ms, metrics.avg_processing_ms) == (60.0, 10.0)
    figures = server.backend.queue_figures()["q"]
    assert (figures.completed, figures.run_ms, figures.wait_ms) == (6, 60, 360)
    assert sum(figures.run) == sum(figures.wait) == figures.run[4] == 6
    assert (figures.wait[6], figures.wait[7]) == (3, 3)


async def test_metrics_of_an_idle_server_divide_by_nothing(server: Server) -> None:
    metrics = server.figures.metrics()
    assert (metrics.avg_latency_ms, metrics.avg_processing_ms) == (0.0, 0.0)


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident_bytes()
    # Mapped and not allocated: the heap may have room that other tests gave back.
    with mmap.mmap(-1, 50_000_000) as ballast:
        ballast.write(b"x" * 50_000_000)
        assert resident_bytes() - before > 40_000_000


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


async def test_wrong_tokens_are_counted(server: Server) -> None:
    assert await server.value("bunqueue_auth_failures_total") == 0
    for _ in range(3):
        server.guesses.note("10.0.0.1")
    assert await server.value("bunqueue_auth_failures_total") == 3


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


# -- what operators ask for ------------------------------------------------------------------------------------------


async def test_the_oldest_waiting_job_is_told_per_queue(server: Server) -> None:
    await server.push("slow")
    server.clock.advance(90_000)
    await server.push("slow")
    await server.push("idle")
    await server.complete("idle")
    server.clock.advance(500)
    assert await server.value("bunqueue_queue_oldest_waiting_seconds", queue="slow") == 90.5
    assert await server.value("bunqueue_queue_oldest_waiting_seconds", queue="idle") == 0


async def test_a_delayed_job_is_as_old_as_its_time_is_past(server: Server) -> None:
    await server.push(delay=60_000)
    server.clock.advance(50_000)
    assert await server.value("bunqueue_queue_oldest_waiting_seconds", queue="q") == 0
    server.clock.advance(15_000)
    assert await server.value("bunqueue_queue_oldest_waiting_seconds", queue="q") == 5


async def test_a_job_that_starves_behind_priorities_is_the_oldest(server: Server) -> None:
    await server.push(priority=-5)
    server.clock.advance(10_000)
    await server.push(count=200, priority=3)
    await server.push(count=50)
    assert server.backend.oldest_waiting_ms("q") == 10_000.0
    await server.backend.claim("q", Demand(count=250))
    assert server.backend.oldest_waiting_ms("q") == 10_000.0
    await server.backend.claim("q", Demand())
    assert server.backend.oldest_waiting_ms("q") is None


async def test_among_very_many_priorities_the_oldest_is_found_in_the_end(server: Server) -> None:
    await server.push(count=1_000, priority=2)
    server.clock.advance(1_000)
    await server.push(priority=-5, timestamp=float(server.clock.now_ms() - 60_000))
    for _ in range(4):
        await server.push(count=1_000, priority=2)
    ages = [server.backend.oldest_waiting_ms("q") for _ in range(30)]
    assert ages == sorted(ages, key=lambda age: age or 0)
    assert ages[-1] == 60_000.0


async def test_waits_and_runs_are_counted_per_queue(server: Server) -> None:
    await server.push("q", 3)
    for wait, run in ((0, 2), (10, 300), (5_000, 20)):
        server.clock.advance(wait)
        (claim,) = await server.backend.claim("q", Demand())
        server.clock.advance(run)
        await server.backend.complete([Ack(msgspec.msgpack.decode(claim.job)["id"])])
    waits = await server.buckets("bunqueue_queue_wait_seconds_bucket")  # 0, 12 and 5312 ms
    assert (waits["0.001"], waits["0.004"], waits["0.016"], waits["4.096"], waits["16.384"]) == (1, 1, 2, 2, 3)
    assert waits["+Inf"] == await server.value("bunqueue_queue_wait_seconds_count", queue="q") == 3
    assert await server.value("bunqueue_queue_wait_seconds_sum", queue="q") == pytest.approx(5.324)
    runs = await server.buckets("bunqueue_queue_run_seconds_bucket")
    assert (runs["0.001"], runs["0.004"], runs["0.064"], runs["1.024"], runs["+Inf"]) == (0, 1, 2, 3, 3)
    assert await server.value("bunqueue_queue_run_seconds_sum", queue="q") == pytest.approx(0.322)


async def test_a_job_of_the_distant_past_fits_the_histogram(server: Server) -> None:
    await server.push(timestamp=0.0)
    await server.complete()
    waits = await server.buckets("bunqueue_queue_wait_seconds_bucket")
    assert (waits["4194.304"], waits["+Inf"]) == (0, 1)


async def test_trouble_is_counted_per_queue_and_for_the_whole_server(server: Server) -> None:
    await server.push("expiring", max_attempts=2)
    await server.push("silent", stall_timeout=6_000, max_attempts=3)
    await server.push("failing", max_attempts=2, backoff=0)
    await server.push("keyed", unique_key="k")
    await server.push("keyed", unique_key="k")
    await server.backend.claim("expiring", Demand(owner="w", lease_ms=1_000))
    await server.backend.claim("silent", Demand())
    for _ in range(2):
        (claim,) = await server.backend.claim("failing", Demand())
        job_id = msgspec.msgpack.decode(claim.job)["id"]
        await server.backend.fail(job_id, token=None, error="e", stack=None, unrecoverable=False, remove=None)
    server.clock.advance(10_000)
    await server.backend.sweep()
    series = await server.series()
    for name, queue, total in (
        ("bunqueue_queue_lease_expiries_total", "expiring", "bunqueue_lease_expiries_total"),
        ("bunqueue_queue_stalls_total", "silent", "bunqueue_jobs_stalled_total"),
        ("bunqueue_queue_duplicates_total", "keyed", "bunqueue_jobs_duplicated_total"),
        ("bunqueue_queue_failed_total", "failing", "bunqueue_jobs_failed_total"),
    ):
        shown = {labels[0][1]: value for (found, labels), value in series.items() if found == name}
        assert {key: value for key, value in shown.items() if value} == {queue: 1}, name
        assert series[total, ()] == 1
    retries = {queue: series["bunqueue_queue_retries_total", (("queue", queue),)] for queue in ("failing", "keyed")}
    assert retries == {"failing": 1, "keyed": 0}
    assert series["bunqueue_jobs_retried_total", ()] == 3  # the expired lease and the stall are retried as well
    assert series["bunqueue_queue_jobs_dlq", (("queue", "failing"),)] == 1


async def test_counters_of_the_whole_server_do_not_fall_when_a_queue_goes(server: Server) -> None:
    for _ in range(3):
        await server.push("keyed", unique_key="k")
    await server.backend.obliterate("keyed")
    server.backend.commit()
    assert await server.value("bunqueue_jobs_duplicated_total") == 2
    assert "bunqueue_queue_duplicates_total" not in {name for name, _ in await server.series()}


async def test_commits_and_lag_have_histograms_of_their_own(server: Server) -> None:
    server.figures.observe_tick(0.5, None)
    server.figures.observe_tick(0.5, 0.003)
    server.figures.observe_lag(0.2)
    server.figures.observe_lag(-0.001)
    assert await server.value("bunqueue_commit_duration_seconds_count") == 1
    assert await server.value("bunqueue_commit_duration_seconds_bucket", le="0.005") == 1
    assert await server.value("bunqueue_event_loop_lag_seconds_count") == 2
    assert await server.value("bunqueue_event_loop_lag_seconds_bucket", le="0.1") == 1
    assert await server.value("bunqueue_event_loop_lag_seconds_sum") == pytest.approx(0.2)


async def test_connections_and_deliveries_are_told_by_kind(server: Server) -> None:
    server.figures.transports["websocket"] = lambda: 7
    server.figures.deliveries.succeeded += 2
    server.figures.deliveries.refused += 1
    assert await server.value("bunqueue_connections", transport="tcp") == 3
    assert await server.value("bunqueue_connections", transport="websocket") == 7
    assert server.figures.metrics().active_connections == 10
    assert await server.value("bunqueue_webhook_deliveries_total", outcome="succeeded") == 2
    assert await server.value("bunqueue_webhook_deliveries_total", outcome="refused") == 1
    assert await server.value("bunqueue_webhook_deliveries_total", outcome="failed") == 0


async def test_the_event_log_tells_where_it_is(server: Server) -> None:
    await server.push(count=4)
    await server.complete()
    assert await server.value("bunqueue_event_log_seq") == 6
    assert await server.value("bunqueue_event_log_events") == 6


async def test_every_family_has_the_type_its_name_promises(server: Server) -> None:
    await server.push()
    families = list(text_string_to_metric_families(await server.figures.prometheus()))
    assert {family.type for family in families} == {"gauge", "counter", "histogram"}
    for family in families:
        assert family.documentation, family.name
        is_counted = any(sample.name.endswith("_total") for sample in family.samples)
        assert is_counted == (family.type == "counter"), family.name
        assert (f"{family.name}_bucket" in {sample.name for sample in family.samples}) == (family.type == "histogram")


async def test_a_scrape_of_a_thousand_queues_holds_the_loop_for_less_than_50_ms() -> None:
    server = Server(max_queues=1_000)
    await server.backend.open()
    for n in range(1_000):
        await server.push(f"queue-{n}", 3)
        await server.backend.claim(f"queue-{n}", Demand())
    spent = []
    for _ in range(5):
        began = time.process_time()
        text = await server.figures.prometheus()
        spent.append(time.process_time() - began)
    assert text.count("\n") > 40_000
    assert min(spent) < 0.05
    await server.backend.close()


async def test_the_newest_failures_of_all_queues_come_first(server: Server) -> None:
    for n in range(6):
        await server.push(f"q{n % 2}")
        server.clock.advance(1_000)
        (claim,) = await server.backend.claim(f"q{n % 2}", Demand())
        job_id = msgspec.msgpack.decode(claim.job)["id"]
        await server.backend.fail(job_id, token=None, error=f"e{n}", stack=None, unrecoverable=True, remove=None)
    failures, total = await server.backend.latest_failures(None, 4)
    assert [(failure.queue, failure.error) for failure in failures] == [
        ("q1", "e5"),
        ("q0", "e4"),
        ("q1", "e3"),
        ("q0", "e2"),
    ]
    assert total == 6
    assert await server.backend.latest_failures("nowhere", 4) == ([], 0)


async def test_failures_of_today_end_with_the_day(server: Server) -> None:
    for hours in (0, 1, 24):
        server.clock.advance(hours * 3_600_000)
        await server.push()
        (claim,) = await server.backend.claim("q", Demand())
        job_id = msgspec.msgpack.decode(claim.job)["id"]
        await server.backend.fail(job_id, token=None, error="e", stack=None, unrecoverable=True, remove=None)
        (queue,) = await server.backend.queues()
        assert queue.failed_today == (2 if hours == 1 else 1)
    server.clock.advance(24 * 3_600_000)
    (queue,) = await server.backend.queues()
    assert (queue.failed_today, queue.counts.failed) == (0, 3)
