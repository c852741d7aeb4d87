"""What a tick leaves behind for the engine to collect: the same for every backend.

A backend fills these while its verbs run and moves events to `_published` when they are committed.
"""

from __future__ import annotations

from headrace.model import Event


class Collection:
    def __init__(self) -> None:
        self._ready: set[str] = set()
        """Queues that may have jobs to hand out."""
        self._events: list[Event] = []
        """Of the tick that is not over yet; by their numbers, in `_bodies`, what goes with them."""
        self._bodies: dict[int, bytes] = {}
        self._published: list[Event] = []
        self._published_bodies: dict[int, bytes] = {}

    def confirm_claims(self) -> bool:
        """If the tick has changed nothing that is stored so far, its claims hold from now on, even if its commit fails.

        Whether that is so: then the replies so far need not wait for the commit.
        """
        return False

    def take_ready(self) -> set[str]:
        ready, self._ready = self._ready, set()
        return ready

    def take_events(self) -> list[Event]:
        """Events that were committed since the last call."""
        events, self._published = self._published, []
        return events

    def take_bodies(self) -> dict[int, bytes]:
        """What goes with them."""
        bodies, self._published_bodies = self._published_bodies, {}
        return bodies

    def uncommitted_events(self) -> list[Event]:
        return list(self._events)

    def body_of(self, event: Event) -> bytes | None:
        """What goes with an event of the tick that is not over yet."""
        return self._bodies.get(event.seq)
