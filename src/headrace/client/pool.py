"""Several links to one server behind one channel: round robin, connected ones first, made when they are needed."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

from headrace.client.channel import Channel, Hear, LinkChange
from headrace.client.conversation import Done
from headrace.client.link import Link, describe
from headrace.client.policy import ConnectionOptions, LinkState
from headrace.commands._base import BY_TYPE, Command, Flag, Reply

R = TypeVar("R", bound=Reply)

MAX_LINKS: Final = 64
"""Commands that wait for an event may need more links than the pool has; never more than this."""


class Pool:
    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._links = [Link(options) for _ in range(options.pool_size)]
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._of_this_turn: Link | None = None

    def submit(self, command: Command[R], done: Done[R], timeout: float) -> None:
        blocks = bool(BY_TYPE[type(command)].flags & Flag.BLOCKING)
        (self._pick_to_block() if blocks else self._pick()).submit(command, done, timeout)

    def _pick(self) -> Link:
        """What is asked in one turn of the loop goes over one link: it can share a write and a commit."""
        if self._of_this_turn is None:
            self._of_this_turn = self._rotate()
            self._loop.call_soon(self._end_turn)
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
        link = self._rotate()
        if link.has_room_to_block:
            return link
        free = [link for link in self._links if link.has_room_to_block]
        if not free and len(self._links) < MAX_LINKS:
            free = [Link(self._options)]
            self._links += free
        return free[0] if free else link

    @property
    def health(self) -> list[dict[str, Any]]:
        return [describe(link) for link in self._links if link.is_started]

    def force_reconnect(self) -> None:
        for link in self._links:
            link.force_reconnect()

    def open_own(self, hear: Hear | None = None, changed: LinkChange | None = None) -> Channel:
        return Link(self._options, hear, changed)

    async def start(self) -> None:
        await self._links[0].start()

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links))
