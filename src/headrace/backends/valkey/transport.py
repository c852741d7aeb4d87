"""Where a call goes: to the one server, or to the primary of a cluster that has the slot of its key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from headrace.backends.valkey.connection import Answered, Argument, Connection, ServerError, is_lasting
from headrace.backends.valkey.url import Address, ValkeyUrl
from headrace.errors import StorageUnavailable

PATIENCE_S: Final = 60.0
"""How long a program that is just starting waits for a server that starts, too."""
_AGAIN_S: Final = 0.5

Command = tuple[Argument, ...]
log: Final = logging.getLogger("headrace.valkey")
T = TypeVar("T")


class Transport(Protocol):
    is_cluster: bool

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def primaries(self) -> list[Connection]: ...

    def addresses(self) -> list[Address]:
        """Where they are."""

    async def refresh(self) -> None:
        """Find out which nodes there are now; it raises if there is nobody to ask."""

    def is_away(self, key: str) -> bool:
        """Whether the node that has `key` could not be reached the last time."""

    def reader(self, key: str) -> Connection:
        """A connection of its own to where `key` is, for calls that block."""

    async def call(self, key: str, *command: Argument) -> Any:
        """One command, sent where `key` is."""

    async def call_many(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """Several commands, each with the key that says where; errors of the server are raised."""

    async def call_each(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """The same with errors among the replies; it raises only if there is nobody to ask."""

    async def fcall(self, function: str, keys: Sequence[str], args: Sequence[Argument]) -> Any: ...

    async def fcall_synced(self, function: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """`fcall` that returns when the server's append-only file has the writes."""


class Standalone:
    is_cluster = False

    def __init__(self, url: ValkeyUrl) -> None:
        self._url = url
        self._connection = Connection(url, *url.hosts[0])
        self._syncing = Syncing(Connection(url, *url.hosts[0]))

    async def open(self) -> None:
        await answer(self._connection.call("PING"))

    async def close(self) -> None:
        await self._connection.close()
        await self._syncing.close()

    def primaries(self) -> list[Connection]:
        return [self._connection]

    def addresses(self) -> list[Address]:
        return [self._url.hosts[0]]

    async def refresh(self) -> None:
        """There is one, if it is there."""
        await self.open()

    def is_away(self, key: str) -> bool:
        return self._connection.is_away

    def reader(self, key: str) -> Connection:
        return Connection(self._url, *self._url.hosts[0])

    async def call(self, key: str, *command: Argument) -> Any:
        return await answer(self._connection.call(*command))

    async def call_many(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        return list(await answer(self._connection.call_many([command for _, command in commands])))

    async def call_each(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        return await self._connection.call_each([command for _, command in commands])

    async def fcall(self, function: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return await answer(self._connection.call("FCALL", function, len(keys), *keys, *args))

    async def fcall_synced(self, function: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return await answer(self._syncing.call("FCALL", function, len(keys), *keys, *args))


class Syncing:
    """Calls that return when the append-only file has what they wrote.

    They have a connection of their own, because waiting for the disk holds up everything behind it. Those that come
    meanwhile share the next wait.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._coming: list[tuple[Command, Answered]] = []
        self._running: asyncio.Task[None] | None = None

    async def call(self, *command: Argument) -> Any:
        done: Answered = asyncio.get_running_loop().create_future()
        self._coming.append((command, done))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await done

    async def _run(self) -> None:
        wait = ("WAITAOF", 1, 0, int(self._connection.timeout_s * 900))
        while self._coming:
            calls, self._coming = self._coming, []
            replies: list[Any]
            try:
                *replies, synced = await self._connection.call_each([*(command for command, _ in calls), wait])
            except Exception as error:  # whatever it was, callers wait for their replies
                replies = [synced := error] * len(calls)
            if isinstance(synced, list) and synced[0] < 1:
                synced = StorageUnavailable("Storage error: not synced to disk in time")
            for (_, done), reply in zip(calls, replies, strict=True):
                problem = next((one for one in (reply, synced) if isinstance(one, BaseException)), None)
                if done.done():
                    continue
                if problem is None:
                    done.set_result(reply)
                else:
                    done.set_exception(problem)
        self._running = None

    @property
    def is_idle(self) -> bool:
        return self._running is None

    async def close(self) -> None:
        await self._connection.close()


async def patiently(begin: Callable[[], Awaitable[None]], patience_s: float = PATIENCE_S) -> None:
    """`begin` again while the server is away, loading its data or changing its role, but not for ever."""
    loop = asyncio.get_running_loop()
    deadline, is_told = loop.time() + patience_s, False
    while True:
        try:
            return await begin()
        except StorageUnavailable as error:
            if is_lasting(error) or loop.time() >= deadline:
                raise
            if not is_told:
                log.warning("waiting up to %g s for Valkey: %s", patience_s, error)
                is_told = True
        await asyncio.sleep(_AGAIN_S)


async def all_of(*works: Awaitable[T]) -> list[T]:
    """What these give or, once all have ended, the first failure: a node that is away must not hold up the others."""
    outcomes: list[T] = []
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        outcomes.append(outcome)
    return outcomes


def look_at_outcome(shared: asyncio.Task[None]) -> None:
    """Nobody may be left who waits for it: that it failed is no bug then, and not to be logged as one."""
    if not shared.cancelled():
        shared.exception()


async def answer(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except ServerError as error:
        raise refusal(error) from error


class FunctionMissing(StorageUnavailable):
    """The server does not have our functions (any more)."""


def refusal(error: Exception) -> StorageUnavailable:
    kind = FunctionMissing if "Function not found" in str(error) else StorageUnavailable
    return kind(f"Valkey refused: {error}")
