"""Back-pressure: what a connection reads depends on what its client reads."""

from __future__ import annotations

from collections.abc import Sized
from typing import Final, Protocol

MAX_BACKLOG_BYTES: Final = 8 * 1024 * 1024


class Waiting(Protocol):
    """The part of a session that must not grow without end."""

    @property
    def backlog(self) -> Sized: ...
    @property
    def backlog_bytes(self) -> int: ...


class Readable(Protocol):
    """The part of a transport that is turned on and off."""

    def is_closing(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Valve:
    """Reads only from clients that read, and no more than can be processed."""

    __slots__ = ("_most", "is_behind", "is_choked", "is_open")

    def __init__(self, most: int) -> None:
        self._most = most
        """How many requests may wait in a connection; their bytes are limited, too."""
        self.is_choked = False
        """Whether the client does not read what it is sent."""
        self.is_behind = False
        """Whether received data is still to be processed."""
        self.is_open = True

    def set(self, transport: Readable | None, session: Waiting) -> None:
        if transport is None or transport.is_closing():
            return
        wanted = (
            not self.is_choked
            and not self.is_behind
            and len(session.backlog) <= self._most
            and session.backlog_bytes <= MAX_BACKLOG_BYTES
        )
        if wanted and not self.is_open:
            transport.resume_reading()
        elif not wanted and self.is_open:
            transport.pause_reading()
        self.is_open = wanted
