"""Waiting for what happens elsewhere, in threads, processes and servers: ask until it is so, with a bound.

The bound is there to end a test that has failed. It says nothing about speed, so it is generous; a test that promises
a time measures it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

LIMIT_S: Final = 20.0
_PAUSE_S: Final = 0.01


def eventually(probe: Callable[[], T | None], within: float = LIMIT_S, every: float = _PAUSE_S) -> T:
    """What `probe` gives as soon as that is true."""
    deadline = time.monotonic() + within
    while not (found := probe()):
        assert time.monotonic() < deadline, _too_late(probe, found, within)
        time.sleep(every)
    return found


async def until(probe: Callable[[], Awaitable[Any] | Any], within: float = LIMIT_S) -> Any:
    """The same on an event loop; `probe` may be a coroutine function."""
    deadline = time.monotonic() + within
    while not (found := await _asked(probe)):
        assert time.monotonic() < deadline, _too_late(probe, found, within)
        await asyncio.sleep(_PAUSE_S)
    return found


async def _asked(probe: Callable[[], Any]) -> Any:
    answer = probe()
    return await answer if inspect.isawaitable(answer) else answer


def _too_late(probe: Callable[[], object], found: object, within: float) -> str:
    name = repr(probe)
    with suppress(OSError, TypeError):  # what is not written in Python has no source
        name = inspect.getsource(probe).strip()
    return f"not within {within:g} s, but {found!r}: {name}"
