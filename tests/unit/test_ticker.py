"""The timer of the ticker, where ticks end without it."""

from __future__ import annotations

import asyncio

from headrace.clock import ManualClock
from headrace.embedded import EmbeddedEngine


async def test_a_timer_that_comes_late_sweeps_once_however_many_ticks_end_meanwhile() -> None:
    clock = ManualClock()
    home = EmbeddedEngine(None, clock)
    await home.start()
    ticker = home.ticker
    assert ticker._timer is not None
    ticker._timer.cancel()
    clock.advance(10_000)
    ticker._on_time()
    sweep = ticker._timer
    for _ in range(5):
        ticker.schedule()
        await asyncio.sleep(0)
        assert not ticker._is_scheduled
    assert ticker._timer is sweep
    await home.stop()
    assert sweep.cancelled()
