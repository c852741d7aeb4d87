"""Clocks: wall time may jump, monotonic time never goes back, and the manual one moves only when told."""

from __future__ import annotations

import time

from headrace.clock import Clock, ManualClock, SystemClock


def test_the_manual_clock_stands_still() -> None:
    clock = ManualClock(5_000)
    assert [clock.now_ms(), clock.now_ms()] == [5_000, 5_000]
    assert clock.monotonic_ms() == clock.monotonic_ms()


def test_advancing_moves_both_times() -> None:
    clock = ManualClock(5_000)
    before = clock.monotonic_ms()
    clock.advance(1_500)
    assert clock.now_ms() == 6_500
    assert clock.monotonic_ms() - before == 1_500


def test_a_jump_moves_wall_time_alone() -> None:
    clock = ManualClock(5_000)
    before = clock.monotonic_ms()
    clock.jump(-4_000)
    assert clock.now_ms() == 1_000
    assert clock.monotonic_ms() == before
    clock.jump(3_600_000)
    assert clock.now_ms() == 3_601_000
    assert clock.monotonic_ms() == before


def test_two_manual_clocks_do_not_share_their_time() -> None:
    first, second = ManualClock(), ManualClock()
    first.advance(10)
    assert first.now_ms() - second.now_ms() == 10


def test_the_system_clock_tells_wall_time_in_whole_milliseconds() -> None:
    earliest = time.time_ns() // 1_000_000
    now = SystemClock().now_ms()
    assert isinstance(now, int)
    assert earliest <= now <= time.time_ns() // 1_000_000


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_ms() for _ in range(10_000)]
    assert readings == sorted(readings)
    earliest = time.monotonic_ns() // 1_000_000
    assert earliest <= clock.monotonic_ms() <= time.monotonic_ns() // 1_000_000


def test_both_are_clocks() -> None:
    def reading(clock: Clock) -> tuple[int, int]:
        return clock.now_ms(), clock.monotonic_ms()

    assert reading(ManualClock(7)) == (7, 0)
    assert len(reading(SystemClock())) == 2
