"""The vigil: after a tick the loop stays awake for a moment before it sleeps.

A client that asks and waits in turn is back soon. Falling asleep and being woken costs the server more than the wait: a
timer is set, an interrupt comes, the caches have gone cold. How much more depends on the machine, so it is learned: the
time from the end of a tick to the next request, if the loop slept meanwhile, is the client's pause and the waking
together (the gap). Rules:

- A vigil takes at most half of that gap. So it never takes longer than what it saves.
- A vigil must pay. After one in which nobody came, more and more ticks go by without; after one in which somebody came,
  fewer.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

FIRST_GAP_S: Final = 100e-6
MAX_GAP_S: Final = 400e-6
"""Clients that take longer than this are not waited for."""
MAX_REST: Final = 63
_LONGEST_SEEN_S: Final = 2 * MAX_GAP_S
"""A longer gap counts as this one: a pause of a minute must not be remembered for as many."""
_MEMORY: Final = 1 / 8


class Vigil:
    """`begin` it when a tick has ended, `end` it when something is asked."""

    __slots__ = ("_began", "_gap", "_loop", "_rest", "_ticks_to_rest", "_until", "is_kept")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gap = FIRST_GAP_S
        """From the end of a tick to the next request while the loop sleeps, lately."""
        self._began = 0.0
        self._until = 0.0
        self.is_kept = False
        self._rest = 0
        """How many ticks go by without a vigil, as experience has it, and how many of them are still to come."""
        self._ticks_to_rest = 0

    @property
    def length_s(self) -> float:
        """How long a vigil takes at most; 0 if clients are not waited for."""
        return self._gap / 2 if self._gap <= MAX_GAP_S else 0.0

    def begin(self) -> None:
        self._began = perf_counter()
        if self._ticks_to_rest:
            self._ticks_to_rest -= 1
        elif not self.is_kept and self.length_s:
            self.is_kept = True
            self._until = self._began + self.length_s
            self._loop.call_soon(self._look)

    def end(self) -> None:
        if self.is_kept:
            self.is_kept = False
            self._pause(self._rest // 2)
        elif self._began:
            gap = min(perf_counter() - self._began, _LONGEST_SEEN_S)
            self._gap += (gap - self._gap) * _MEMORY
        self._began = 0.0

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
