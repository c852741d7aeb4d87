"""Several links to one server behind one channel: round robin, connected ones first, opened on demand.

Commands that wait for an event (the result of a job) are spread so that they block nobody: a few per link, and when
there are more of them, on further links that carry nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

from headrace.client.channel import Channel, Done, Hear, LinkChange, LinkHealth
from headrace.client.conversation import is_blocking
from headrace.client.line import mailbox_of
from headrace.client.link import Link
from headrace.client.policy import MAX_BLOCKING, ConnectionOptions, LinkState
from headrace.commands._base import Command, Reply

R = TypeVar("R", bound=Reply)

MAX_WAITING_LINKS: Final = 60
"""Links that carry only commands that wait for an event. Further ones queue on them."""


class Pool:
    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        # The first one finds out whether the server can be reached at all; the others may rely on it.
        self._links = [self._new_link(is_patient=number > 0) for number in range(options.pool_size)]
        self._waiting_links: list[Link] = []
        self._at_end = mailbox_of(asyncio.get_running_loop()).at_end
        self._next = 0
        self._of_this_turn: Link | None = None

    def _new_link(self, *, is_patient: bool) -> Link:
        return Link(self._options, changed=self._changed, is_patient=is_patient)

    def _changed(self, is_connected: bool) -> None:
        """Where one link got through the others can: commands may wait on them, and their next try be far off."""
        if is_connected:
            for link in self._all:
                link.hurry()

    def submit(self, command: Command[R], done: Done[R], timeout: float) -> None:
        link = self._pick_to_block() if is_blocking(type(command)) else self._pick()
        link.submit(command, done, timeout)

    def _pick(self) -> Link:
        """What is asked in one turn of the loop goes over one link: it can share a write and a commit."""
        if self._of_this_turn is None:
            self._of_this_turn = self._rotate()
            self._at_end(self._end_turn)
        return self._of_this_turn

    def _end_turn(self) -> None:
        self._of_this_turn = None

    def _rotate(self) -> Link:
        self._next = (self._next + 1) % len(self._links)
        chosen = self._links[self._next]
        if chosen.state is LinkState.CONNECTED:
            return chosen
        chosen.begin()
        connected = [link for link in self._links if link.state is LinkState.CONNECTED]
        return connected[self._next % len(connected)] if connected else chosen

    def _pick_to_block(self) -> Link:
        is_pipelined = all(link.is_pipelined for link in self._links)
        link = self._rotate()
        if is_pipelined and link.blocking < MAX_BLOCKING:
            return link
        for link in self._waiting_links:
            if link.blocking < (MAX_BLOCKING if is_pipelined else 1):
                return link
        if len(self._waiting_links) < MAX_WAITING_LINKS:
            self._waiting_links.append(self._new_link(is_patient=True))
            return self._waiting_links[-1]
        return min(self._waiting_links, key=lambda link: link.blocking)

    @property
    def _all(self) -> list[Link]:
        return self._links + self._waiting_links

    @property
    def health(self) -> list[LinkHealth]:
        return [health for link in self._all if link.is_started for health in link.health]

    def force_reconnect(self) -> None:
        for link in self._all:
            link.force_reconnect()

    def open_own(self, hear: Hear | None = None, changed: LinkChange | None = None) -> Channel:
        return Link(self._options, hear, changed)

    async def start(self) -> None:
        await self._links[0].start()

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._all))
