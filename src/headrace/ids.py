"""Job ids and lease tokens: UUIDv7 text, increasing within a process.

Random tails are drawn in blocks and the millisecond prefix is formatted once per millisecond: an id is on the path of
every PUSH and every PULL, and drawing it alone would be a fifth of their cost.
"""

from __future__ import annotations

import os
from typing import Final
from weakref import WeakSet

from headrace.clock import Clock, SystemClock

_BLOCK: Final = 4096
_SEQUENCES: Final = [f"{n:03x}" for n in range(0x1000)]
_sources: Final[WeakSet[IdSource]] = WeakSet()


def _draw_anew() -> None:
    """In a forked child: the tails in store are those of its parent and of its siblings."""
    for source in _sources:
        source._tails.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_draw_anew)


class IdSource:
    """Makes UUIDv7 strings whose text order is their creation order."""

    __slots__ = ("__weakref__", "_clock", "_millisecond", "_prefix", "_sequence", "_tails")

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._millisecond = 0
        self._sequence = 0
        self._prefix = ""
        self._tails: list[str] = []
        _sources.add(self)

    def next(self) -> str:
        return self.at(self._clock.now_ms())

    def at(self, now_ms: int) -> str:
        """The next id for somebody who has asked for the time already."""
        if now_ms > self._millisecond:
            self._begin(now_ms)
        else:
            self._sequence += 1
            if self._sequence >= 0x1000:
                # More than 4096 ids in one millisecond: borrow from the next one, order matters more than the stamp.
                self._begin(self._millisecond + 1)
        if not self._tails:
            self._draw()
        return self._prefix + _SEQUENCES[self._sequence] + self._tails.pop()

    def many(self, now_ms: int, count: int) -> list[str]:
        """`count` ids at once."""
        if not count:
            return []
        if now_ms > self._millisecond:
            self._begin(now_ms)
        if self._sequence + count >= len(_SEQUENCES) or len(self._tails) < count:
            return [self.at(now_ms) for _ in range(count)]
        prefix, first = self._prefix, self._sequence + 1
        self._sequence += count
        tails = self._tails[-count:]
        del self._tails[-count:]
        return [
            prefix + sequence + tail for sequence, tail in zip(_SEQUENCES[first : first + count], tails, strict=True)
        ]

    def _begin(self, millisecond: int) -> None:
        self._millisecond = millisecond
        self._sequence = 0
        stamp = f"{millisecond:012x}"
        self._prefix = f"{stamp[:8]}-{stamp[8:]}-7"

    def _draw(self) -> None:
        noise = os.urandom(8 * _BLOCK).hex()
        variant = f"-{'89ab'[int(noise[0], 16) & 3]}"
        self._tails = [f"{variant}{noise[i : i + 3]}-{noise[i + 3 : i + 15]}" for i in range(0, len(noise), 16)]
