"""Notes when the whole machine stood still: virtual machines are suspended and moved, and a lease runs on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from soak.stage import MACHINE, Incident

_BEAT: Final = 0.1
_STILL: Final = 1.0
"""What a busy machine may make a beat late; more than this is a standstill."""


class Pulse:
    """Beats while it is entered, and tells of each standstill as of a fault."""

    def __init__(self, tell: Callable[[Incident], None]) -> None:
        self._tell = tell
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._last = float("inf")  # no beat yet: nothing to be late after

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT):
            self.look(time.time())

    def look(self, now: float) -> None:
        """By the wall clock, as leases on Valkey run: the monotonic one may stand still as well."""
        if now - self._last > _STILL:
            self._tell(Incident("standstill", MACHINE, self._last, now))
        self._last = now
