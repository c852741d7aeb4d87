"""The vigil: after a tick the loop stays awake for a moment before it sleeps.

A client that asks and waits in turn is back within some ten microseconds. To fall asleep and be woken costs the server
more CPU than that: a timer is set, an interrupt comes, the caches have gone cold. Rule: a vigil must pay. After one in
which nobody came, more and more ticks go by without; after one in which somebody came, fewer.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

LENGTH_S: Final = 50e-6
MAX_REST: Final = 63


class Vigil:
    """`begin` it when a tick has ended, `end` it when something is asked."""

    __slots__ = ("_loop", "_rest", "_ticks_to_rest", "_until", "is_kept")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._until = 0.0
        self.is_kept = False
        self._rest = 0
        """How many ticks go by without a vigil, as experience has it, and how many of them are still to come."""
        self._ticks_to_rest = 0

    def begin(self) -> None:
        if self._ticks_to_rest:
            self._ticks_to_rest -= 1
        elif not self.is_kept:
            self.is_kept = True
            self._until = perf_counter() + LENGTH_S
            self._loop.call_soon(self._look)

    def end(self) -> None:
        if self.is_kept:
            self.is_kept = False
            self._pause(self._rest // 2)

    def _look(self) -> None:
        """Being called is enough: with a callback pending the loop asks for news of its sockets and does not sleep."""
        if not self.is_kept:
            return
        if perf_counter() < self._until:
            self._loop.call_soon(self._look)
        else:
            self.is_kept = False
            self._pause(min(2 * self._rest + 1, MAX_REST))

    def _pause(self, ticks: int) -> None:
        self._rest = self._ticks_to_rest = ticks
