"""The engine's view of a connection, whatever the transport."""

from __future__ import annotations

from typing import Protocol

from headrace.model import Event


class Peer(Protocol):
    """One client connection. Every transport gives the engine one of these per connection."""

    address: str
    is_authenticated: bool
    held: dict[str, int] | None
    """Jobs this connection pulled: id -> lease serial. They go back to their queues when it closes. None for a
    transport whose requests are not tied to a connection (HTTP)."""
    workers: set[str]
    """Ids of the workers registered over this connection; they vanish with it."""
    auth_failures: int
    wants_codes: bool
    """Whether its errors say of which kind they are."""

    @property
    def is_waiting(self) -> bool:
        """Whether one of its commands is running."""

    def deliver(self, event: Event, body: bytes | None) -> None:
        """Queue one event frame for this connection."""
