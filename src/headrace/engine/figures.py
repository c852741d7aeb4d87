"""What the server can say about itself in numbers: Stats, Metrics and the Prometheus text.

Counters are plain integers that others keep (backend totals, worker registry); this module reads them when
asked. Only durations are collected here (`observe_tick`), and a few samples of the counters for rates (`sample`).

To add a metric: add a line to the block it belongs to in `prometheus`. Names that the reference has and that
mean something here are kept; those of its runtime and its backups are left out.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from headrace import __version__
from headrace.backends.base import Backend, Counts, QueueSummary
from headrace.clock import Clock
from headrace.commands.monitoring import ServerMetrics, ServerStats
from headrace.engine.crons import Crons
from headrace.engine.workers import WorkerRegistry

WINDOW_MS: Final = 10_000
SAMPLE_MS: Final = 1_000
MAX_QUEUES: Final = 100
KINDS: Final = ("push", "pull", "ack")
BOUNDS: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_MEGABYTE: Final = 1024 * 1024
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Histogram:
    """Durations in buckets; each observation lands in one, the text adds them up."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times


class Figures:
    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        workers: WorkerRegistry,
        crons: Crons,
        connections: Callable[[], int],
        max_queues: int = MAX_QUEUES,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._workers = workers
        self._crons = crons
        self._connections = connections
        self._max_queues = max_queues
        self._started_ms = clock.monotonic_ms()
        self._started_at = clock.now_ms() / 1000
        self._histograms = {kind: Histogram() for kind in KINDS}
        self._observed = (0, 0, 0)
        self._samples: deque[tuple[int, int, int]] = deque()

    def start(self) -> None:
        """Counters survive restarts; only what comes from now on is observed."""
        totals = self._backend.totals()
        self._observed = (totals.pushed, totals.pulled, totals.completed)

    def observe_tick(self, seconds: float) -> None:
        """Every command of a tick took as long as the tick: from its first byte to its commit."""
        totals = self._backend.totals()
        now = (totals.pushed, totals.pulled, totals.completed)
        for kind, before, after in zip(KINDS, self._observed, now, strict=True):
            if after > before:
                self._histograms[kind].observe(seconds, after - before)
        self._observed = now

    def sample(self) -> None:
        """Remember the counters of this moment for rates. Call it about once a second."""
        now = self._clock.monotonic_ms()
        samples = self._samples
        if samples and now - samples[-1][0] < SAMPLE_MS:
            return
        totals = self._backend.totals()
        samples.append((now, totals.pushed, totals.pulled))
        while len(samples) > 1 and now - samples[1][0] >= WINDOW_MS:
            samples.popleft()

    def uptime_ms(self) -> int:
        return self._clock.monotonic_ms() - self._started_ms

    def rates(self) -> tuple[float, float]:
        """Pushes and pulls per second over the last WINDOW_MS."""
        self.sample()
        then, pushed, pulled = self._samples[0]
        # A server that has only just started would seem to be very busy.
        seconds = max(1.0, (self._clock.monotonic_ms() - then) / 1000)
        totals = self._backend.totals()
        return round((totals.pushed - pushed) / seconds, 2), round((totals.pulled - pulled) / seconds, 2)

    async def stats(self) -> ServerStats:
        counts = _sum(await self._backend.queues())
        push_per_sec, pull_per_sec = self.rates()
        return ServerStats(
            queued=counts.waiting,
            waiting=counts.waiting,
            processing=counts.active,
            active=counts.active,
            delayed=counts.delayed,
            dlq=counts.failed,
            completed=counts.completed,
            failed=self._backend.totals().failed,
            uptime=float(self.uptime_ms()),
            push_per_sec=push_per_sec,
            pull_per_sec=pull_per_sec,
        )

    async def metrics(self) -> ServerMetrics:
        totals = self._backend.totals()
        return ServerMetrics(
            total_pushed=float(totals.pushed),
            total_pulled=float(totals.pulled),
            total_completed=float(totals.completed),
            total_failed=float(totals.failed),
            avg_latency_ms=_average(totals.wait_ms, totals.pulled),
            avg_processing_ms=_average(totals.run_ms, totals.completed + totals.failed),
            memory_usage_mb=round(resident_bytes() / _MEGABYTE, 2),
            sqlite_size_mb=round(self._backend.size_bytes() / _MEGABYTE, 2),
            active_connections=self._connections(),
        )

    # -- Prometheus ------------------------------------------------------------------------------------------

    async def prometheus(self) -> str:
        queues = await self._backend.queues()
        text = _Text()
        self._write_jobs(text, _sum(queues))
        self._write_queues(text, queues)
        await self._write_workers(text)
        await self._write_storage(text)
        self._write_process(text)
        for kind, histogram in self._histograms.items():
            text.histogram(f"bunqueue_{kind}_duration_seconds", f"Time spent in a {kind}", histogram)
        return text.render()

    def _write_jobs(self, text: _Text, counts: Counts) -> None:
        for state, count in _by_state(counts, with_completed=True):
            text.gauge(f"bunqueue_jobs_{state}", f"Jobs that are {state}", count)
        totals = self._backend.totals()
        text.counter("bunqueue_jobs_pushed_total", "Jobs pushed", totals.pushed)
        text.counter("bunqueue_jobs_pulled_total", "Jobs handed out", totals.pulled)
        text.counter("bunqueue_jobs_completed_total", "Jobs completed", totals.completed)
        text.counter("bunqueue_jobs_failed_total", "Jobs failed", totals.failed)

    def _write_queues(self, text: _Text, queues: list[QueueSummary]) -> None:
        # A series per queue name is a promise to whoever stores them: the busiest queues are worth it.
        shown = sorted(queues, key=lambda queue: (-_load(queue.counts), queue.name))[: self._max_queues]
        series: dict[str, list[tuple[str, int]]] = {}
        for queue in sorted(shown, key=lambda queue: queue.name):
            for state, count in _by_state(queue.counts, with_completed=False):
                series.setdefault(state, []).append((queue.name, count))
        for state, values in series.items():
            name = f"bunqueue_queue_jobs_{state}"
            text.labelled("gauge", name, f"Jobs of a queue that are {state}", "queue", values)
        text.gauge("bunqueue_queue_metrics_exported", "Queues with series of their own", len(shown))
        text.gauge(
            "bunqueue_queue_metrics_omitted", "Queues left out of the series", len(queues) - len(shown)
        )

    async def _write_workers(self, text: _Text) -> None:
        stats = self._workers.stats()
        text.gauge("bunqueue_workers_registered", "Workers registered", stats.total)
        text.gauge("bunqueue_workers_active", "Workers heard of lately", stats.active)
        text.gauge("bunqueue_worker_active_jobs", "Jobs that workers say they run", stats.active_jobs)
        text.gauge(
            "bunqueue_worker_concurrency_slots", "Jobs that workers could run", stats.concurrency_slots
        )
        text.counter("bunqueue_workers_processed_total", "Jobs workers say they did", stats.total_processed)
        text.counter("bunqueue_workers_failed_total", "Jobs workers say they failed", stats.total_failed)
        crons = await self._crons.list()
        text.gauge("bunqueue_cron_jobs_registered", "Schedules", len(crons))

    async def _write_storage(self, text: _Text) -> None:
        webhooks = await self._backend.webhooks()
        enabled = sum(webhook.enabled for webhook in webhooks)
        text.gauge("bunqueue_webhooks_registered", "Webhooks", len(webhooks))
        text.gauge("bunqueue_webhooks_enabled", "Webhooks that are switched on", enabled)
        status = self._backend.storage_status()
        text.gauge("bunqueue_storage_degraded", "1 while writes are refused", int(status.error is not None))
        text.gauge("bunqueue_storage_disk_full", "1 while the disk is full", int(status.disk_full))
        text.gauge("bunqueue_storage_bytes", "Size of the store", self._backend.size_bytes())

    def _write_process(self, text: _Text) -> None:
        resident = resident_bytes()
        text.gauge("bunqueue_uptime_seconds", "Time since start", self.uptime_ms() / 1000)
        text.gauge("bunqueue_process_resident_memory_bytes", "Memory of this process", resident)
        text.gauge("process_resident_memory_bytes", "Memory of this process", resident)
        text.gauge("process_start_time_seconds", "When this process started", self._started_at)
        text.counter("process_cpu_seconds_total", "CPU time of this process", time.process_time())
        text.labelled("gauge", "bunqueue_build_info", "Version of this server", "version", [(__version__, 1)])
        open_now = [("tcp", self._connections())]
        text.labelled("gauge", "bunqueue_connections", "Open connections", "transport", open_now)


class _Text:
    """Writes the Prometheus text format."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def render(self) -> str:
        return "\n".join(self._lines) + "\n"

    def gauge(self, name: str, meaning: str, value: float) -> None:
        self._head("gauge", name, meaning)
        self._lines.append(f"{name} {value}")

    def counter(self, name: str, meaning: str, value: float) -> None:
        self._head("counter", name, meaning)
        self._lines.append(f"{name} {value}")

    def labelled(
        self, kind: str, name: str, meaning: str, label: str, values: Iterable[tuple[str, float]]
    ) -> None:
        self._head(kind, name, meaning)
        self._lines += [f'{name}{{{label}="{escaped(key)}"}} {value}' for key, value in values]

    def histogram(self, name: str, meaning: str, histogram: Histogram) -> None:
        self._head("histogram", name, meaning)
        running = 0
        for bound, count in zip((*BOUNDS, "+Inf"), histogram.counts, strict=True):
            running += count
            self._lines.append(f'{name}_bucket{{le="{bound}"}} {running}')
        self._lines += [f"{name}_sum {histogram.total}", f"{name}_count {running}"]

    def _head(self, kind: str, name: str, meaning: str) -> None:
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def escaped(value: str) -> str:
    """A label value between its quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resident_bytes() -> int:
    """Physical memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


def _sum(queues: Iterable[QueueSummary]) -> Counts:
    total = Counts()
    for queue in queues:
        for name in Counts.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(queue.counts, name))
    return total


def _by_state(counts: Counts, *, with_completed: bool) -> list[tuple[str, int]]:
    rows = [
        ("waiting", counts.waiting),
        ("prioritized", counts.prioritized),
        ("delayed", counts.delayed),
        ("active", counts.active),
        ("dlq", counts.failed),
    ]
    return [*rows, ("completed", counts.completed)] if with_completed else rows


def _load(counts: Counts) -> int:
    return counts.waiting + counts.delayed + counts.active + counts.failed


def _average(total: float, count: int) -> float:
    return round(total / count, 2) if count else 0.0
