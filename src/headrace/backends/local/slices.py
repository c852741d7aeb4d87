"""Cooperative yielding: long work is done in slices, so that no command blocks the event loop for long.

A verb that may touch very many jobs awaits `Slices.breathe` every so often. Whoever drives the coroutine gets the
`Breath` object out of it and resumes it in a later turn of the loop (see `server.driving`). Where nothing drives it
that way (tests, recovery) `run_now` runs a coroutine to completion at once.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator
from typing import Any, Final, TypeVar

from headrace.errors import StorageUnavailable

T = TypeVar("T")

SLICE_SECONDS: Final = 0.010


class Breath:
    """Yielded by a sliced verb: resume me in the next turn of the loop."""

    def __await__(self) -> Generator[Breath, None, None]:
        yield self


class Slices:
    def __init__(self) -> None:
        self._began = 0.0
        self.is_broken = False
        """Storage fails: whoever is between two slices must not go on."""

    def begin(self) -> None:
        self._began = time.perf_counter()

    async def rest(self) -> None:
        """Yield now, so that what follows has a turn of its own."""
        self._began = 0.0
        await self.breathe()

    async def breathe(self) -> None:
        """Yield if this slice has lasted long enough."""
        if time.perf_counter() - self._began > SLICE_SECONDS:
            await Breath()
            if self.is_broken:
                raise StorageUnavailable("Storage became unavailable; the command was stopped half way")
            self._began = time.perf_counter()


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that suspends on nothing but `Breath`, driven to completion at once."""
    while True:
        try:
            pending = work.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        if not isinstance(pending, Breath):
            work.close()
            raise RuntimeError(f"a local verb suspended on {pending!r}")
