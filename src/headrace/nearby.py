"""Pushes that bypass the line: a plain job goes to Valkey straight from the caller's own loop.

The line is another thread. For a caller that adds jobs one by one, the round trip to that thread costs more than all
the rest. Valkey holds all state, so for the simplest command a connection on the caller's own loop will do, as if
it belonged to another process.

Rules: whatever is not a plain push to a queue that the engine knows and nobody here listens to goes over the line, and
so does every push while another push of this loop is in flight there: it must not overtake that one. For the same
reason a push over the line waits until the direct ones before it are done. A door (a direct connection) that cannot be
opened, or whose server lacks our functions, is no error: the line reports what is wrong, or fixes it. A door is closed
with its client, or with its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Final

from headrace.backends.valkey.backend import ValkeyBackend, transport_of
from headrace.backends.valkey.transport import FunctionMissing, Transport
from headrace.client.line import Line, shared_line
from headrace.commands.families import PushFamily
from headrace.commands.jobs import Push, PushBatch, Pushed, check_options
from headrace.errors import HeadraceError, StorageUnavailable
from headrace.ids import IdSource
from headrace.views import encode
from headrace.wire import decode_command

_RETRY_AFTER: Final = 1.0

Usual = Callable[[], Awaitable[Any]]


class Door:
    """A way to Valkey from one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: Transport) -> None:
        self.loop = loop
        self.server = server
        self.ids = IdSource()
        self.is_open = False
        self.on_line = 0
        """Pushes of this loop that take the line, or wait for that."""
        self._inside = 0
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._turn = asyncio.Lock()
        self._retry_at = 0.0
        self._opening: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._stay: AsyncGenerator[None, None] | None = None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count a direct push while it is in flight."""
        self._inside += 1
        self._is_free.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._is_free.set()

    async def let_pass(self) -> None:
        """Wait until the direct pushes in flight are done. Callers continue in the order in which they came."""
        async with self._turn:
            await self._is_free.wait()

    def begin(self) -> None:
        """Open it soon; nobody waits for that."""
        if self._opening is None and monotonic() >= self._retry_at:
            self._opening = self.loop.create_task(self._open())

    async def _open(self) -> None:
        self._stay = self._staying()
        try:
            await anext(self._stay)
            self.is_open = True
        except StorageUnavailable:
            self._retry_at = monotonic() + _RETRY_AFTER
        finally:
            self._opening = None

    async def _staying(self) -> AsyncGenerator[None, None]:
        """Suspended while the door is open. A loop that ends closes its generators, and so the connection."""
        try:
            await self.server.open()
            yield
        finally:
            self.is_open = False
            await self.server.close()

    def close(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop has ended, and the door with it
            self.loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._leaving = self.loop.create_task(self._leave(self._opening))

    async def _leave(self, opening: asyncio.Task[None] | None) -> None:
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
        if self._stay is not None:
            await self._stay.aclose()  # which is refused while it is being opened


class Nearby:
    """The doors of one client."""

    def __init__(self) -> None:
        self._backend: ValkeyBackend | None = None
        """That of the client's engine, on the line; None while there is none."""
        self._line: Line | None = None
        self._doors: dict[asyncio.AbstractEventLoop, Door] = {}

    def open(self, backend: ValkeyBackend) -> None:
        self._backend, self._line = backend, shared_line()

    async def ask(self, command: Any, usual: Usual) -> Any:
        """The answer to a command, by the door if it can be had there."""
        backend = self._backend if self._line is shared_line() else None  # in a forked child nobody attends to it
        if backend is None or not isinstance(command, Push | PushBatch | PushFamily):
            return await usual()
        door = self._door_here(backend)
        if isinstance(command, Push) and not door.on_line and backend.takes_nearby(command.queue):
            pushed = await self._push(backend, door, command)
            if pushed is not None:
                return pushed
        door.on_line += 1
        try:
            await door.let_pass()
            return await usual()
        finally:
            door.on_line -= 1

    async def _push(self, backend: ValkeyBackend, door: Door, command: Push) -> Pushed | None:
        if not door.is_open:
            door.begin()
            return None
        try:
            checked = decode_command(encode(command))
            if not isinstance(checked, Push) or not backend.is_plain_now(checked):
                return None
            check_options(checked)
        except (TypeError, ValueError, OverflowError, RecursionError, HeadraceError):
            return None  # the usual way refuses it with the right words
        try:
            with door.passing():
                return Pushed(id=await backend.push_nearby(door.server, door.ids, checked.queue, checked))
        except FunctionMissing:
            return None

    def _door_here(self, backend: ValkeyBackend) -> Door:
        loop = asyncio.get_running_loop()
        door = self._doors.get(loop)
        if door is None:
            for ended in [known for known in list(self._doors) if known.is_closed()]:
                self._doors.pop(ended, None)
            door = self._doors[loop] = Door(loop, transport_of(backend.url))
        return door

    def close(self) -> None:
        self._backend = None
        while self._doors:
            self._doors.popitem()[1].close()
