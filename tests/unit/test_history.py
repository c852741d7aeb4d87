"""The history says what happened when, forgets what is too old, and follows the busiest queues only."""

from __future__ import annotations

from math import isnan

import msgspec
import pytest

from headrace.backends.base import DURATION_BUCKETS, Ack, Demand
from headrace.backends.local.backend import LocalBackend
from headrace.clock import ManualClock
from headrace.commands.jobs import PushEntry
from headrace.engine import history as module
from headrace.engine.history import SPANS, STEP_MS, History, percentile

NIL = msgspec.Raw(b"\xc0")
START = 1_700_000_100_000  # a whole multiple of every step


class Server:
    """A backend with its history, and time that is moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.backend = LocalBackend(clock=self.clock)
        self.history = History(self.backend, self.clock)

    async def push(self, queue: str = "q", count: int = 1, **options: object) -> None:
        await self.backend.insert(queue, [PushEntry(data=NIL, **options) for _ in range(count)])  # type: ignore[arg-type]
        self.backend.commit()

    async def claim(self, queue: str = "q", count: int = 1) -> list[str]:
        claims = await self.backend.claim(queue, Demand(count=count))
        return [msgspec.msgpack.decode(claim.job)["id"] for claim in claims]

    async def complete(self, ids: list[str]) -> None:
        await self.backend.complete([Ack(job_id) for job_id in ids])
        self.backend.commit()

    async def fail(self, job_id: str) -> None:
        await self.backend.fail(job_id, token=None, error="boom", stack=None, unrecoverable=True, remove=None)
        self.backend.commit()

    async def pass_time(self, ms: int) -> None:
        """As the engine's maintenance does it: a look every second."""
        for _ in range(ms // 1000):
            self.clock.advance(1000)
            await self.history.sample()


@pytest.fixture
async def server():
    made = Server()
    await made.backend.open()
    made.history.start()
    yield made
    await made.backend.close()


def test_every_span_is_made_of_whole_base_steps() -> None:
    assert all(step % STEP_MS == 0 for step, _ in SPANS.values())
    assert {window: step * slots for window, (step, slots) in SPANS.items()} == {
        "15m": 15 * 60_000,
        "1h": 3_600_000,
        "24h": 24 * 3_600_000,
    }


async def test_nothing_is_shown_before_the_first_step_is_over(server: Server) -> None:
    await server.push(count=3)
    await server.pass_time(4_000)
    view = server.history.view("15m", None, 10)
    assert view.series.pushed == []
    assert view.queues == {}
    assert (view.step, view.start) == (5_000.0, float(START))


async def test_a_step_has_rates_counts_and_percentiles(server: Server) -> None:
    await server.push(count=20)
    server.clock.advance(100)
    ids = await server.claim(count=10)
    server.clock.advance(900)
    await server.complete(ids[:5])
    await server.fail(ids[5])
    await server.pass_time(4_000)
    view = server.history.view("15m", None, 10)
    assert view.start == float(START)
    series = view.series
    assert (series.pushed, series.out, series.failed) == ([4.0], [1.0], [0.2])
    assert (series.waiting, series.active) == ([10.0], [4.0])
    (p50,), (p95,), (run,) = series.wait_p50, series.wait_p95, series.run_p95
    assert 64 <= (p50 or 0) <= (p95 or 0) <= 128
    assert 512 <= (run or 0) <= 1024


async def test_a_quiet_step_has_zeros_and_no_durations(server: Server) -> None:
    await server.push()
    await server.complete(await server.claim())
    await server.pass_time(10_000)
    series = server.history.view("15m", None, 10).series
    assert series.pushed == [0.2, 0.0]
    assert series.wait_p95[0] is not None
    assert (series.wait_p50[1], series.wait_p95[1], series.run_p95[1]) == (None, None, None)


async def test_longer_windows_sum_up_the_same_jobs(server: Server) -> None:
    for _ in range(4):
        await server.push(count=10)
        await server.pass_time(5_000)
    assert server.history.view("15m", None, 10).series.pushed == [2.0] * 4
    hour = server.history.view("1h", None, 10)
    assert (hour.step, hour.series.pushed, hour.series.waiting) == (20_000.0, [2.0], [40.0])
    await server.pass_time(280_000)
    day = server.history.view("24h", None, 10)
    assert day.step == 300_000.0
    assert day.series.pushed == [0.133333]  # more digits would only be noise on the wire


async def test_the_ring_forgets_the_oldest_step_and_start_moves_with_it(server: Server) -> None:
    step, slots = SPANS["15m"]
    await server.push(count=5)
    await server.pass_time(step)
    assert server.history.view("15m", None, 10).series.pushed[0] == 1.0
    await server.pass_time(step * slots)
    view = server.history.view("15m", None, 10)
    assert len(view.series.pushed) == slots
    assert sum(view.series.pushed) == 0.0
    assert view.start == float(START + step)
    assert view.start + slots * step == float(server.clock.now_ms())


async def test_what_was_counted_before_the_start_is_not_history(server: Server) -> None:
    await server.push(count=50)
    again = History(server.backend, server.clock)
    again.start()
    server.clock.advance(5_000)
    await again.sample()
    assert again.view("15m", None, 10).series.pushed == [0.0]
    assert again.pace("q", server.backend.queue_figures()["q"]).in_per_sec == 0.0


async def test_time_nobody_looked_at_is_filled_evenly(server: Server) -> None:
    await server.push(count=30)
    server.clock.advance(15_000)
    await server.history.sample()
    assert server.history.view("15m", None, 10).series.pushed == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("jump", [-3_600_000, 3_600_000])
async def test_a_clock_that_was_set_begins_the_history_anew(server: Server, jump: int) -> None:
    await server.push(count=5)
    await server.pass_time(60_000)
    server.clock.jump(jump)
    await server.pass_time(5_000)
    view = server.history.view("15m", None, 10)
    assert len(view.series.pushed) <= 2
    assert view.start <= server.clock.now_ms() <= view.start + 3 * view.step


async def test_each_queue_has_series_as_long_as_the_servers(server: Server) -> None:
    await server.push("early", 5)
    await server.pass_time(10_000)
    await server.push("late", 10)
    await server.pass_time(5_000)
    view = server.history.view("15m", None, 10)
    assert list(view.queues) == ["late", "early"]
    assert view.queues["early"].pushed == [1.0, 0.0, 0.0]
    assert view.queues["late"].pushed == [0.0, 0.0, 2.0]
    assert view.queues["late"].waiting == [0.0, 0.0, 10.0]
    assert view.oldest == {"early": 15_000.0, "late": 5_000.0}


async def test_one_queue_can_be_asked_for(server: Server) -> None:
    await server.push("a", 5)
    await server.push("b", 10)
    await server.pass_time(5_000)
    view = server.history.view("15m", "b", 10)
    assert view.series.pushed == [2.0]
    assert view.queues == {}
    assert view.oldest == {"b": 5_000.0}
    assert view.rates.in_per_sec == 2.0


async def test_a_queue_without_history_has_empty_series(server: Server) -> None:
    await server.pass_time(10_000)
    view = server.history.view("1h", "nowhere", 10)
    assert (view.series.pushed, view.series.run_p95, view.oldest) == ([], [], {})
    assert view.rates.in_per_sec == 0.0


async def test_only_as_many_queues_are_shown_as_asked_for(server: Server) -> None:
    for n in range(1, 5):
        await server.push(f"q{n}", n)
    await server.pass_time(5_000)
    assert list(server.history.view("15m", None, 2).queues) == ["q4", "q3"]
    assert server.history.view("15m", None, 0).queues == {}


async def test_busier_queues_take_the_place_of_idle_ones(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TRACKED", 3)
    for name, count in (("a", 1), ("b", 2), ("c", 3)):
        await server.push(name, count)
    await server.pass_time(5_000)
    await server.push("quiet", 1)
    await server.push("loud", 50)
    await server.pass_time(5_000)
    shown = set(server.history.view("15m", None, 10).queues)
    assert len(shown) == 3
    assert "loud" in shown
    assert "a" not in shown


async def test_a_queue_that_is_gone_has_no_history(server: Server) -> None:
    await server.push("gone", 5)
    await server.pass_time(5_000)
    await server.backend.obliterate("gone")
    server.backend.commit()
    await server.pass_time(5_000)
    view = server.history.view("15m", None, 10)
    assert view.queues == {}
    assert min(view.series.pushed) == 0.0


async def test_the_pace_is_that_of_the_last_seconds(server: Server) -> None:
    for _ in range(20):
        await server.push(count=3)
        await server.complete(await server.claim(count=2))
        await server.pass_time(1_000)
    pace = server.history.pace("q", server.backend.queue_figures()["q"])
    assert (pace.in_per_sec, pace.out_per_sec, pace.failed_per_sec) == (3.0, 2.0, 0.0)
    assert pace.p95_wait_ms is not None
    await server.pass_time(60_000)
    pace = server.history.pace("q", server.backend.queue_figures()["q"])
    assert (pace.in_per_sec, pace.out_per_sec, pace.p95_wait_ms) == (0.0, 0.0, None)


async def test_durations_from_before_a_track_began_are_left_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TRACKED", 0)
    await server.push(count=100)
    server.clock.advance(3_000)
    await server.claim(count=100)
    await server.pass_time(5_000)
    monkeypatch.setattr(module, "MAX_TRACKED", 1)
    await server.push(count=2)
    await server.pass_time(5_000)
    await server.claim()
    await server.pass_time(5_000)
    p95 = server.history.view("15m", "q", 0).series.wait_p95
    assert p95[0] is None
    assert p95[1] is not None


def test_a_percentile_lies_within_its_bucket() -> None:
    buckets = [0] * DURATION_BUCKETS
    buckets[3], buckets[10] = 95, 5  # 4..7 ms, 512..1023 ms
    assert 4 <= percentile(buckets, 0.5) <= 8
    assert 4 <= percentile(buckets, 0.95) <= 8
    assert 512 < percentile(buckets, 0.96) <= 1024
    assert isnan(percentile([0] * DURATION_BUCKETS, 0.5))


def test_a_percentile_grows_with_its_share() -> None:
    buckets = [n % 5 for n in range(DURATION_BUCKETS)]
    values = [percentile(buckets, share / 100) for share in range(1, 101)]
    assert values == sorted(values)
