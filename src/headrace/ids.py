"""Job ids and lease tokens: UUIDv7 text, increasing within a process.

Random tails are drawn in blocks and the millisecond prefix is formatted once per millisecond: an id is on the path of
every PUSH and every PULL, and drawing it alone would be a fifth of their cost.
"""

from __future__ import annotations

import os
from typing import Final

from headrace.clock import Clock, SystemClock

_BLOCK: Final = 4096
_SEQUENCE_SPAN: Final = 0x1000


class IdSource:
    """Makes UUIDv7 strings whose text order is their creation order."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._millisecond = 0
        self._sequence = 0
        self._prefix = ""
        self._tails: list[str] = []

    def next(self) -> str:
        now = self._clock.now_ms()
        if now > self._millisecond:
            self._begin(now)
        else:
            self._sequence += 1
            if self._sequence >= _SEQUENCE_SPAN:
                # More than 4096 ids in one millisecond: borrow from the next one, order matters more than the stamp.
                self._begin(self._millisecond + 1)
        if not self._tails:
            self._draw()
        return f"{self._prefix}{self._sequence:03x}{self._tails.pop()}"

    def _begin(self, millisecond: int) -> None:
        self._millisecond = millisecond
        self._sequence = 0
        stamp = f"{millisecond:012x}"
        self._prefix = f"{stamp[:8]}-{stamp[8:]}-7"

    def _draw(self) -> None:
        noise = os.urandom(8 * _BLOCK).hex()
        variants = "89ab"
        for i in range(0, len(noise), 16):
            tail = noise[i : i + 16]
            variant = variants[int(tail[0], 16) & 3]
            self._tails.append(f"-{variant}{tail[1:4]}-{tail[4:]}")
