"""Back-pressure: what a connection reads depends on what its client reads."""

from __future__ import annotations

import asyncio


class Valve:
    """Reads only from clients that read, and not more than can be worked off."""

    __slots__ = ("_most", "is_choked", "is_open")

    def __init__(self, most: int) -> None:
        self._most = most
        """How many requests may wait in a connection."""
        self.is_choked = False
        """Whether the client leaves unread what we send."""
        self.is_open = True

    def set(self, transport: asyncio.Transport | None, backlog: int) -> None:
        if transport is None or transport.is_closing():
            return
        wanted = not self.is_choked and backlog <= self._most
        if wanted and not self.is_open:
            transport.resume_reading()
        elif not wanted and self.is_open:
            transport.pause_reading()
        self.is_open = wanted
