"""The server's statistics: Stats, Metrics and the Prometheus text.

Counters are plain integers that others keep (backend, queues, worker registry, wrong tokens); this module reads them
on request. Only durations of ticks are collected here (`observe_tick`, `observe_lag`), and a few samples of the
counters for rates (`sample`). Webhook deliveries are counted in `deliveries`; other transports report their open
connections in `transports`.

To add a metric: add a line to the block it belongs to in `prometheus`; per queue: a row in QUEUE_COUNTERS. Names that
the reference has and that mean something here are kept; those of its runtime and its backups are left out. Series per
queue are a cardinality risk, so only the `max_queues` most loaded queues have any, and totals over
all queues do not depend on which ones those are.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final

from msgspec import Struct

from headrace import __version__
from headrace.backends.base import Backend, Counts, QueueFigures, QueueSummary
from headrace.clock import Clock
from headrace.commands.monitoring import ServerMetrics, ServerStats
from headrace.engine.crons import Crons
from headrace.engine.guessing import Guesses
from headrace.engine.workers import WorkerRegistry

WINDOW_MS: Final = 10_000
SAMPLE_MS: Final = 1_000
MAX_QUEUES: Final = 100
KINDS: Final = ("push", "pull", "ack")
BOUNDS: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

QUEUE_COUNTERS: Final = (
    ("pushed", "bunqueue_queue_pushed_total", "Jobs pushed to a queue"),
    ("completed", "bunqueue_queue_completed_total", "Jobs of a queue that completed"),
    ("failed", "bunqueue_queue_failed_total", "Jobs of a queue that failed for good"),
    ("retried", "bunqueue_queue_retries_total", "Failed attempts of a queue that are followed by another one"),
    ("expired_leases", "bunqueue_queue_lease_expiries_total", "Leases of a queue that ran out"),
    ("stalled", "bunqueue_queue_stalls_total", "Jobs of a queue whose worker fell silent"),
    ("duplicated", "bunqueue_queue_duplicates_total", "Pushes answered by a job that was there already"),
)
_SHOWN_BUCKETS: Final = tuple((bucket, f'{2**bucket / 1000}"}} ') for bucket in range(0, 23, 2))
"""Of the buckets of a queue's durations those that are shown, with what follows `le="`: from 1 ms to over an hour."""

_MEGABYTE: Final = 1024 * 1024
_TICKS_AT_ONCE: Final = 100
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


class Deliveries(Struct):
    """What became of webhook deliveries since the server started."""

    succeeded: int = 0
    failed: int = 0
    """Given up after the last try."""
    retried: int = 0
    """Tries that failed and are followed by another one."""
    refused: int = 0
    """Not sent: the address is not allowed."""
    dropped: int = 0
    """Not sent: too many were in flight."""


class Figures:
    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        workers: WorkerRegistry,
        crons: Crons,
        guesses: Guesses,
        connections: Callable[[], int],
        max_queues: int = MAX_QUEUES,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._workers = workers
        self._crons = crons
        self._guesses = guesses
        self.transports: dict[str, Callable[[], int]] = {"tcp": connections}
        """How many connections there are, by the kind of transport."""
        self.deliveries = Deliveries()
        self._max_queues = max_queues
        self._started_ms = clock.monotonic_ms()
        self._started_at = clock.now_ms() / 1000
        self._histograms = {kind: Histogram() for kind in KINDS}
        self._commits = Histogram()
        self._lags = Histogram()
        self._observed = (0, 0, 0)
        self._ticks: list[tuple[float, float | None, tuple[int, int, int]]] = []
        self._samples: deque[tuple[int, int, int]] = deque()

    def start(self) -> None:
        """Counters survive restarts; only what comes from now on is observed."""
        totals = self._backend.totals()
        self._observed = (totals.pushed, totals.pulled, totals.completed)

    def observe_tick(self, seconds: float, commit_seconds: float | None = None) -> None:
        """Every command of a tick took as long as the tick: from its first byte to its commit.

        `commit_seconds` is the part of it that the commit took, None when there was nothing to commit.
        """
        totals = self._backend.totals()
        self._ticks.append((seconds, commit_seconds, (totals.pushed, totals.pulled, totals.completed)))
        if len(self._ticks) == _TICKS_AT_ONCE:
            self._count_ticks()

    def _count_ticks(self) -> None:
        """Sort ticks into buckets, many at once: a lone tick finds nothing of this code in the caches."""
        for seconds, commit_seconds, now in self._ticks:
            if commit_seconds is not None:
                self._commits.observe(commit_seconds)
            for histogram, before, after in zip(self._histograms.values(), self._observed, now, strict=True):
                if after > before:
                    histogram.observe(seconds, after - before)
            self._observed = now
        self._ticks.clear()

    def observe_lag(self, seconds: float) -> None:
        """A timer fired so much later than it was set for: something held the loop up."""
        self._lags.observe(max(0.0, seconds))

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
        await self._backend.count_new_queues()
        counts = self._backend.total_counts()
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

    def metrics(self) -> ServerMetrics:
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
            active_connections=sum(count() for count in self.transports.values()),
        )

    # -- Prometheus ------------------------------------------------------------------------------------------

    async def prometheus(self) -> str:
        self._count_ticks()
        queues = await self._backend.queues()
        text = _Text()
        self._write_jobs(text, self._backend.total_counts())
        self._write_queues(text, queues)
        await self._write_workers(text)
        await self._write_storage(text)
        self._write_process(text)
        text.histogram("bunqueue_commit_duration_seconds", "Time spent in a commit", self._commits)
        text.histogram("bunqueue_event_loop_lag_seconds", "How late timers fire", self._lags)
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
        rare = self._backend.queue_figures()[""]
        text.counter("bunqueue_jobs_retried_total", "Failed attempts that are followed by another one", rare.retried)
        text.counter("bunqueue_jobs_stalled_total", "Jobs whose worker fell silent", rare.stalled)
        text.counter("bunqueue_jobs_duplicated_total", "Pushes answered by a job that was there", rare.duplicated)
        text.counter("bunqueue_lease_expiries_total", "Leases that ran out", rare.expired_leases)

    def _write_queues(self, text: _Text, queues: list[QueueSummary]) -> None:
        shown = sorted(self.busiest(queues, self._max_queues), key=lambda queue: queue.name)
        labels = [f'queue="{escaped(queue.name)}"' for queue in shown]
        by_state = [_by_state(queue.counts, with_completed=False) for queue in shown]
        for column in zip(*by_state, strict=True):
            name, meaning = f"bunqueue_queue_jobs_{column[0][0]}", f"Jobs of a queue that are {column[0][0]}"
            text.per_queue("gauge", name, meaning, labels, [count for _, count in column])
        text.gauge("bunqueue_queue_metrics_exported", "Queues with series of their own", len(shown))
        text.gauge("bunqueue_queue_metrics_omitted", "Queues left out of the series", len(queues) - len(shown))
        ages = [(self._backend.oldest_waiting_ms(queue.name) or 0) / 1000 for queue in shown]
        meaning = "How long the oldest waiting job has been ready; 0 when none waits"
        text.per_queue("gauge", "bunqueue_queue_oldest_waiting_seconds", meaning, labels, ages)
        figures = self._backend.queue_figures()
        # One that was just obliterated, here or by another broker, has none any more.
        self._write_queue_figures(text, labels, [figures.get(queue.name) or QueueFigures() for queue in shown])

    @staticmethod
    def _write_queue_figures(text: _Text, labels: list[str], rows: list[QueueFigures]) -> None:
        for field, name, meaning in QUEUE_COUNTERS:
            text.per_queue("counter", name, meaning, labels, [getattr(row, field) for row in rows])
        waits = [(row.wait, row.wait_ms) for row in rows]
        text.durations("bunqueue_queue_wait_seconds", "Time from being ready to being handed out", labels, waits)
        runs = [(row.run, row.run_ms) for row in rows]
        text.durations("bunqueue_queue_run_seconds", "Time from being handed out to being completed", labels, runs)

    @staticmethod
    def busiest(queues: list[QueueSummary], count: int) -> list[QueueSummary]:
        """The queues that hold most jobs, completed ones not counted; most first."""
        return sorted(queues, key=lambda queue: (-_load(queue.counts), queue.name))[:count]

    async def _write_workers(self, text: _Text) -> None:
        stats = self._workers.stats()
        text.gauge("bunqueue_workers_registered", "Workers registered", stats.total)
        text.gauge("bunqueue_workers_active", "Workers heard of lately", stats.active)
        text.gauge("bunqueue_worker_active_jobs", "Jobs that workers say they run", stats.active_jobs)
        text.gauge("bunqueue_worker_concurrency_slots", "Jobs that workers could run", stats.concurrency_slots)
        text.counter("bunqueue_workers_processed_total", "Jobs workers say they did", stats.total_processed)
        text.counter("bunqueue_workers_failed_total", "Jobs workers say they failed", stats.total_failed)
        crons = await self._crons.list()
        text.gauge("bunqueue_cron_jobs_registered", "Schedules", len(crons))

    async def _write_storage(self, text: _Text) -> None:
        webhooks = await self._backend.webhooks()
        enabled = sum(webhook.enabled for webhook in webhooks)
        text.gauge("bunqueue_webhooks_registered", "Webhooks", len(webhooks))
        text.gauge("bunqueue_webhooks_enabled", "Webhooks that are switched on", enabled)
        deliveries = [(name, getattr(self.deliveries, name)) for name in Deliveries.__struct_fields__]
        meaning = "Webhook deliveries by what became of them"
        text.labelled("counter", "bunqueue_webhook_deliveries_total", meaning, "outcome", deliveries)
        first, last = self._backend.log_position()
        text.gauge("bunqueue_event_log_seq", "Last event of the log", last)
        text.gauge("bunqueue_event_log_events", "Events that the log still has", last - first + 1)
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
        open_now = [(transport, count()) for transport, count in self.transports.items()]
        text.labelled("gauge", "bunqueue_connections", "Open connections", "transport", open_now)
        text.counter("bunqueue_auth_failures_total", "Wrong tokens that were refused", self._guesses.count)


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

    def labelled(self, kind: str, name: str, meaning: str, label: str, values: Iterable[tuple[str, float]]) -> None:
        self._head(kind, name, meaning)
        self._lines += [f'{name}{{{label}="{escaped(key)}"}} {value}' for key, value in values]

    def histogram(self, name: str, meaning: str, histogram: Histogram) -> None:
        self._head("histogram", name, meaning)
        running = 0
        for bound, count in zip((*BOUNDS, "+Inf"), histogram.counts, strict=True):
            running += count
            self._lines.append(f'{name}_bucket{{le="{bound}"}} {running}')
        self._lines += [f"{name}_sum {histogram.total}", f"{name}_count {running}"]

    def per_queue(self, kind: str, name: str, meaning: str, labels: list[str], values: Sequence[float]) -> None:
        """`labels` are written once and used for many series: there may be a thousand queues."""
        self._head(kind, name, meaning)
        self._lines += [f"{name}{{{label}}} {value}" for label, value in zip(labels, values, strict=True)]

    def durations(self, name: str, meaning: str, labels: list[str], rows: list[tuple[list[int], int]]) -> None:
        """A histogram per queue from buckets by bit length (see DURATION_BUCKETS) and the sum in ms."""
        self._head("histogram", name, meaning)
        lines = self._lines
        for label, (buckets, total_ms) in zip(labels, rows, strict=True):
            head = f'{name}_bucket{{{label},le="'
            running = list(accumulate(buckets))
            lines += [f"{head}{bound}{running[bucket]}" for bucket, bound in _SHOWN_BUCKETS]
            count = running[-1]
            lines += [
                f'{head}+Inf"}} {count}',
                f"{name}_sum{{{label}}} {total_ms / 1000}",
                f"{name}_count{{{label}}} {count}",
            ]

    def _head(self, kind: str, name: str, meaning: str) -> None:
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def escaped(value: str) -> str:
    """A label value between its quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resident_bytes() -> int:
    """Physical memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


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
