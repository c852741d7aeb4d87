"""How often a program was told to stop: once means when its work is done, twice means now."""

from __future__ import annotations

from typing import Final

_ECHO_SECONDS: Final = 1.0


class StopSignals:
    """Counts SIGTERM and Ctrl-C. One that follows at once is an echo and does not count: such a signal often goes to
    all processes of a group, and whoever started this one passes it on as well."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0.0

    def hear(self, at: float) -> bool:
        """Whether a signal that came at this time (seconds, of any clock) counts."""
        if self.count and at - self._last < _ECHO_SECONDS:
            return False
        self.count += 1
        self._last = at
        return True
