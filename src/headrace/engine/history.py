"""The server's recent history in bounded memory, for charts.

Once a second `sample` checks the time; whenever a step of 5 s is over it reads the counters of the backend and
writes one value per series. There are three spans with steps of their own (15 minutes, an hour, a day), each a ring
buffer of steps; a span takes its differences from its own last step, so percentiles are those of the step
and not averages of averages. Steps begin at whole multiples of their length in wall time.

All queues together have a track, and so has each of the MAX_TRACKED busiest queues: about 45 KB per track, so 2.3 MB at
most. For every other queue only the last counters are remembered, for its rates (about 0.3 KB per queue).
Nothing is persisted: history starts empty after a restart.

To add a series: a name in SERIES and its value in `Span._values`; HistorySeries in commands.dashboard shows it.
"""

from __future__ import annotations

import heapq
import operator
from array import array
from collections.abc import Sequence
from math import isnan, nan
from typing import Final

from msgspec import Struct

from headrace.backends.base import DURATION_BUCKETS, Backend, Counts, QueueFigures
from headrace.clock import Clock
from headrace.commands.dashboard import HistoryRates, HistorySeries, HistoryView, QueueSeries
from headrace.errors import StorageUnavailable

STEP_MS: Final = 5_000
SPANS: Final[dict[str, tuple[int, int]]] = {
    "15m": (STEP_MS, 180),
    "1h": (20_000, 180),
    "24h": (300_000, 288),
}
"""Length of a step in ms and number of steps; every length is a multiple of STEP_MS."""
SERIES: Final = ("in", "out", "failed", "waiting", "active", "wait_p50", "wait_p95", "run_p95")
MAX_TRACKED: Final = 50
_FADING: Final = 0.95
"""What is left of a queue's heat after each step: about a minute until half of it is gone."""


class Reading(Struct, gc=False):
    """Counters of a queue, or of all of them, at one moment."""

    pushed: int
    completed: int
    failed: int
    waiting: int
    active: int
    wait: list[int]
    run: list[int]


class Mark(Struct):
    """Counters of every queue at one moment, for rates: pushed, completed, failed; those of all under ""."""

    mono: int
    counters: dict[str, tuple[int, int, int]]


class Pace(Struct, frozen=True):
    """How a queue has been doing in the last seconds."""

    in_per_sec: float = 0.0
    out_per_sec: float = 0.0
    failed_per_sec: float = 0.0
    p95_wait_ms: float | None = None


_STILL: Final = Pace()


class Span:
    """One resolution of one track: a ring of the last `length` steps before the step `index`."""

    __slots__ = ("_base", "_base_mono", "_rings", "index", "length", "slots", "step_ms")

    def __init__(self, step_ms: int, slots: int, base: Reading, index: int, mono: int) -> None:
        self.step_ms = step_ms
        self.slots = slots
        self.length = 0
        self.index = index
        """Number of the current step, counted from the epoch."""
        self._base = base
        self._base_mono = mono
        self._rings = {name: array("d", bytes(8 * slots)) for name in SERIES}

    def is_over(self, now: int) -> bool:
        return now // self.step_ms != self.index

    def close(self, reading: Reading, now: int, mono: int) -> None:
        """Write down the step that is over and begin the one of `now`."""
        index, elapsed = now // self.step_ms, mono - self._base_mono
        if index < self.index or (index - self.index - 2) * self.step_ms > elapsed:
            self.length = 0  # the wall clock was set: what is there would be dated wrongly
            self.index = index - 1
        values = self._values(reading, max(1, elapsed) / 1000)
        for _ in range(min(index - self.index, self.slots)):  # more than one only if nobody looked for a while
            self._put(values)
        self.index = index
        self._base, self._base_mono = reading, mono

    def _values(self, reading: Reading, seconds: float) -> tuple[float, ...]:
        base = self._base
        wait, run = _risen(reading.wait, base.wait), _risen(reading.run, base.run)
        return (
            max(0, reading.pushed - base.pushed) / seconds,
            max(0, reading.completed - base.completed) / seconds,
            max(0, reading.failed - base.failed) / seconds,
            reading.waiting,
            reading.active,
            percentile(wait, 0.5),
            percentile(wait, 0.95),
            percentile(run, 0.95),
        )

    def _put(self, values: Sequence[float]) -> None:
        at = self.index % self.slots
        for ring, value in zip(self._rings.values(), values, strict=True):
            ring[at] = value
        self.index += 1
        self.length = min(self.length + 1, self.slots)

    @property
    def start_ms(self) -> int:
        return (self.index - self.length) * self.step_ms

    def values(self, name: str) -> list[float]:
        ring, first, last = self._rings[name], (self.index - self.length) % self.slots, self.index % self.slots
        if not self.length:
            return []
        values = ring[first:last] if first < last else ring[first:] + ring[:last]
        return [float(f"{value:.6g}") for value in values]  # more digits would be noise

    def durations(self, name: str) -> list[float | None]:
        return [None if isnan(value) else value for value in self.values(name)]

    def recent(self, name: str, steps: int) -> float | None:
        """The newest duration of the last so many steps."""
        newest = (value for value in reversed(self.durations(name)[-steps:]) if value is not None)
        return next(newest, None)


class Track:
    """Everything remembered about one queue, or about all of them together."""

    __slots__ = ("heat", "last", "spans")

    def __init__(self, reading: Reading, now: int, mono: int) -> None:
        self.heat = 0.0
        self.last = reading
        self.spans = {
            window: Span(step_ms, slots, reading, now // step_ms, mono) for window, (step_ms, slots) in SPANS.items()
        }

    def note(self, reading: Reading, now: int, mono: int) -> None:
        self.last = reading
        for span in self.spans.values():
            if span.is_over(now):
                span.close(reading, now, mono)


class History:
    """See the module's description. `sample` feeds it; `view` and `pace` read it."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._step = 0
        self._total = Track(_NO_READING, 0, 0)
        self._tracks: dict[str, Track] = {}
        self._wait = self._run = _NO_DURATIONS
        """Durations in all queues while they had a track: adding up every queue would be felt where there are many."""
        self._marks = (Mark(0, {}), Mark(0, {}))
        """The last two moments at which the counters of all queues were read."""

    def start(self) -> None:
        """Counters survive restarts; only what comes from now on has a history."""
        now, mono = self._clock.now_ms(), self._clock.monotonic_ms()
        self._step = now // STEP_MS
        self._total = Track(self._read_total(), now, mono)
        mark = self._mark(mono)
        self._marks = (mark, mark)

    async def sample(self) -> None:
        """Call it about once a second: does nothing until a step is over."""
        now = self._clock.now_ms()
        if now // STEP_MS == self._step:
            return
        self._step = now // STEP_MS
        mono = self._clock.monotonic_ms()
        # A copy: a queue may be obliterated while others are counted.
        figures, mark = dict(self._backend.queue_figures()), self._mark(mono)
        self._follow_busiest(figures, mark, now)
        for name, track in self._tracks.items():
            try:
                counts = await self._backend.counts(name)
            except StorageUnavailable:
                continue  # the node that has it is away: its step is written down when it is back
            reading = _reading(figures[name], counts)
            self._wait = _added(self._wait, _risen(reading.wait, track.last.wait))
            self._run = _added(self._run, _risen(reading.run, track.last.run))
            track.note(reading, now, mono)
        self._total.note(self._read_total(), now, mono)
        self._marks = (self._marks[1], mark)

    def _read_total(self) -> Reading:
        totals, counts = self._backend.totals(), self._backend.total_counts()
        return Reading(
            totals.pushed, totals.completed, totals.failed, counts.waiting, counts.active, self._wait, self._run
        )

    def _mark(self, mono: int) -> Mark:
        totals = self._backend.totals()
        counters = {name: _counters(entry) for name, entry in self._backend.queue_figures().items()}
        counters[""] = (totals.pushed, totals.completed, totals.failed)
        return Mark(mono, counters)

    # -- which queues have a track -------------------------------------------------------------------------------------

    def _follow_busiest(self, figures: dict[str, QueueFigures], mark: Mark, now: int) -> None:
        """Keep the tracks to the busiest queues: newcomers that are busier than the idlest ones take their place."""
        self._tracks = {name: track for name, track in self._tracks.items() if name in figures}
        moved = self._moved(mark)
        for name, track in self._tracks.items():
            track.heat = track.heat * _FADING + moved.pop(name, 0)
        for name in heapq.nlargest(MAX_TRACKED, moved, key=moved.__getitem__):
            if not self._make_room(moved[name]):
                break
            self._tracks[name] = self._begin(name, figures[name], now, mark.mono)
            self._tracks[name].heat = moved[name]

    def _moved(self, mark: Mark) -> dict[str, int]:
        """How many jobs came or went since the last mark, for queues where any did."""
        before = self._marks[1].counters
        changed = {name: now for name, now in mark.counters.items() if now != before.get(name, _NOTHING) and name}
        return {name: max(0, sum(now) - sum(before.get(name, _NOTHING))) for name, now in changed.items()}

    def _begin(self, name: str, figures: QueueFigures, now: int, mono: int) -> Track:
        """A track that begins with the last mark. Durations of older jobs are not known apart: they are left out."""
        mark = self._marks[1]
        known = mark.counters.get(name)
        durations = _NO_DURATIONS if known is None else None
        base = Reading(*(known or _NOTHING), 0, 0, durations or figures.wait.copy(), durations or figures.run.copy())
        return Track(base, now - (mono - mark.mono), mark.mono)

    def _make_room(self, heat: float) -> bool:
        if len(self._tracks) < MAX_TRACKED:
            return True
        idlest = min(self._tracks, key=lambda name: self._tracks[name].heat)
        if self._tracks[idlest].heat >= heat:
            return False
        del self._tracks[idlest]
        return True

    # -- reading -------------------------------------------------------------------------------------------------------

    def pace(self, queue: str, figures: QueueFigures | None) -> Pace:
        """Rates of a queue over the last 5 to 10 seconds, and how long its jobs waited within the last minute."""
        if figures is None:
            return _STILL
        track = self._tracks.get(queue)
        p95 = None if track is None else track.spans["15m"].recent("wait_p95", 60_000 // STEP_MS)
        return Pace(*self._rates(queue, _counters(figures)), p95)

    def _rates(self, name: str, now: tuple[int, int, int]) -> tuple[float, float, float]:
        mark = self._marks[0]
        # A server that has only just started would seem to be very busy.
        seconds = max(1.0, (self._clock.monotonic_ms() - mark.mono) / 1000)
        before = mark.counters.get(name, _NOTHING)
        pushed, completed, failed = (round(max(0, b - a) / seconds, 2) for a, b in zip(before, now, strict=True))
        return pushed, completed, failed

    def view(self, window: str, queue: str | None, top: int) -> HistoryView:
        """What DashboardHistory shows."""
        now = self._clock.now_ms()
        track = self._total if queue is None else self._tracks.get(queue) or Track(_NO_READING, now, 0)
        span = track.spans[window]
        shown = self._busiest(window, top) if queue is None else []
        oldest = {name: self._backend.oldest_waiting_ms(name) for name in ([queue] if queue is not None else shown)}
        return HistoryView(
            window=window,
            step=float(span.step_ms),
            start=float(span.start_ms),
            series=_series(span),
            queues={name: _queue_series(self._tracks[name].spans[window], span.length) for name in shown},
            oldest={name: age for name, age in oldest.items() if age is not None},
            rates=HistoryRates(*self._rates_of(queue)),
            timestamp=float(now),
        )

    def _rates_of(self, queue: str | None) -> tuple[float, float, float]:
        if queue is None:
            totals = self._backend.totals()
            return self._rates("", (totals.pushed, totals.completed, totals.failed))
        figures = self._backend.queue_figures().get(queue)
        return (0.0, 0.0, 0.0) if figures is None else self._rates(queue, _counters(figures))

    def _busiest(self, window: str, top: int) -> list[str]:
        """Tracked queues, those with most jobs within the window first."""

        def jobs(name: str) -> float:
            span = self._tracks[name].spans[window]
            return sum(sum(span.values(series)) for series in ("in", "out", "failed"))

        return heapq.nlargest(top, self._tracks, key=jobs)


_NOTHING: Final = (0, 0, 0)
_NO_DURATIONS: Final = [0] * DURATION_BUCKETS
_NO_READING: Final = Reading(0, 0, 0, 0, 0, _NO_DURATIONS, _NO_DURATIONS)


def _counters(figures: QueueFigures) -> tuple[int, int, int]:
    return figures.pushed, figures.completed, figures.failed


def _reading(figures: QueueFigures, counts: Counts) -> Reading:
    return Reading(*_counters(figures), counts.waiting, counts.active, figures.wait.copy(), figures.run.copy())


def _series(span: Span) -> HistorySeries:
    return HistorySeries(
        pushed=span.values("in"),
        out=span.values("out"),
        failed=span.values("failed"),
        waiting=span.values("waiting"),
        active=span.values("active"),
        wait_p50=span.durations("wait_p50"),
        wait_p95=span.durations("wait_p95"),
        run_p95=span.durations("run_p95"),
    )


def _queue_series(span: Span, length: int) -> QueueSeries:
    """Series of a queue, as long as those of the server: a queue that came later had nothing before."""
    lists = [
        [0.0] * (length - span.length) + span.values(name)[-length:] for name in ("in", "out", "failed", "waiting")
    ]
    return QueueSeries(*lists)


def _added(some: list[int], more: list[int]) -> list[int]:
    return list(map(operator.add, some, more))


def _risen(now: list[int], before: list[int]) -> list[int]:
    return [max(0, difference) for difference in map(operator.sub, now, before)]


def percentile(buckets: list[int], share: float) -> float:
    """The duration in ms that `share` of those counted do not exceed, evenly spread within a bucket; NaN for none."""
    rank = share * sum(buckets)
    if not rank:
        return nan
    for bucket, count in enumerate(buckets):
        if rank <= count:
            low = 2 ** (bucket - 1) if bucket else 0
            return round(low + (float(2**bucket) - low) * rank / count, 1)
        rank -= count
    return float(2 ** (len(buckets) - 1))  # only rounding leads here
