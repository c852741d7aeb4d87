"""Time, injected. Nothing else in the package asks the operating system what time it is.

`now_ms` is wall time, for what is stored or shown; `monotonic_ms` never goes back, for leases and timers.
"""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class Alarm:
    """The earliest moment (monotonic) at which somebody has something to do.

    Whoever plans something calls `ring_by`; whoever keeps the timer compares `due_mono` with what it has set. That is
    cheaper than asking everybody for their next plan after every tick.
    """

    __slots__ = ("due_mono",)
    NEVER: Final = 1 << 62

    def __init__(self) -> None:
        self.due_mono = self.NEVER

    def ring_by(self, due_mono: int) -> None:
        if due_mono < self.due_mono:
            self.due_mono = due_mono


class ManualClock:
    """Stands still until told otherwise: the clock of the tests."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._wall = start_ms
        self._monotonic = 0

    def now_ms(self) -> int:
        return self._wall

    def monotonic_ms(self) -> int:
        return self._monotonic

    def advance(self, ms: int) -> None:
        self._wall += ms
        self._monotonic += ms

    def jump(self, ms: int) -> None:
        """Move wall time alone, as an NTP step or an operator would."""
        self._wall += ms
