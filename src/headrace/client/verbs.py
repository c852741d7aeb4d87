"""One implementation for two interfaces: every operation is written once and works in coroutines and in threads.

A verb is a coroutine function that awaits nothing but `self._ask(command)` (and private coroutines that do the same).
On an AsyncShell calling it gives the coroutine. On a SyncShell `_ask` blocks instead of suspending, so the coroutine
ends at its first step and calling the verb gives the result. The types follow: `await queue.pause()` and
`queue.pause()` are both checked.

To add an operation: a method with @verb in the class that both interfaces share; nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from headrace.client.client import Client
from headrace.commands._base import Command, Reply
from headrace.durations import Duration

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R", bound=Reply)


class Shell:
    """Holds the client. `_ask` is the only difference between the async and the blocking interface."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _ask(self, command: Command[R], timeout: float | None = None) -> R:
        raise NotImplementedError


class AsyncShell(Shell):
    async def _ask(self, command: Command[R], timeout: float | None = None) -> R:
        return await self._client.ask(command, timeout)

    async def call(self, command: Command[R], timeout: Duration | None = None) -> R:
        """Send any command of `headrace.commands`; the type of the reply follows from it."""
        return await self._client.ask(command, timeout)


class SyncShell(Shell):
    async def _ask(self, command: Command[R], timeout: float | None = None) -> R:
        return self._client.ask_blocking(command, timeout)

    def call(self, command: Command[R], timeout: Duration | None = None) -> R:
        """Send any command of `headrace.commands`; the type of the reply follows from it."""
        return self._client.ask_blocking(command, timeout)


class verb(Generic[S, P, T]):  # noqa: N801 - used as a decorator
    """Makes a method of a shared class fit the shell it is called on."""

    def __init__(self, function: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> None:
        self._function: Any = function
        self.__wrapped__ = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, shell: AsyncShell, owner: type[Any]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, shell: SyncShell, owner: type[Any]) -> Callable[P, T]: ...
    @overload
    def __get__(self, shell: None, owner: type[Any]) -> verb[S, P, T]: ...
    def __get__(self, shell: Any, owner: type[Any]) -> Any:
        if shell is None:
            return self
        bound = self._function.__get__(shell, owner)
        return bound if isinstance(shell, AsyncShell) else functools.partial(_finish, bound)


def _finish(bound: Callable[..., Coroutine[Any, Any, T]], *args: Any, **options: Any) -> T:
    work = bound(*args, **options)
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError(f"{bound.__qualname__} waits for something other than a reply")
