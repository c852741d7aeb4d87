"""Wrong tokens: whoever sends them waits longer and longer, and the operator can see it.

They are counted one by one but logged in aggregate, at most one line a second: guessing must not fill a disk.
"""

from __future__ import annotations

import logging
from typing import Final

from headrace.clock import Clock

log: Final = logging.getLogger("headrace.engine")

_WINDOW_MS: Final = 60_000
_MAX_ADDRESSES: Final = 10_000
_LONGEST_WAIT_MS: Final = 2000
_TELL_EVERY_MS: Final = 1000


class Guesses:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.count = 0
        """Wrong tokens since the start."""
        self._by_address: dict[str, tuple[int, int]] = {}
        self._untold = 0
        self._last_address = ""
        self._told_mono: int | None = None

    def note(self, address: str) -> int:
        """One more wrong token; for how many ms its refusal is to be held back.

        Every one from the same address within a minute doubles that, up to two seconds.
        """
        self.count += 1
        self._untold += 1
        self._last_address = address
        self.tell()
        now = self._clock.monotonic_ms()
        since, before = self._by_address.get(address, (now, 0))
        if now - since > _WINDOW_MS:
            since, before = now, 0
        if len(self._by_address) >= _MAX_ADDRESSES:
            self._by_address.clear()
        self._by_address[address] = (since, before + 1)
        return int(min(_LONGEST_WAIT_MS, 25 * 2 ** min(before, 7)))

    def tell(self, *, is_last: bool = False) -> None:
        """Log what has not been logged yet, at most once a second. Call it about that often."""
        if not self._untold:
            return
        now = self._clock.monotonic_ms()
        if self._told_mono is not None and now - self._told_mono < _TELL_EVERY_MS and not is_last:
            return
        refused, self._untold, self._told_mono = self._untold, 0, now
        fields = {"address": self._last_address, "refused": refused}
        log.warning("wrong tokens refused: %d, the last from %s", refused, self._last_address, extra=fields)
