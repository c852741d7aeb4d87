"""Serving parked pulls on a remote backend: one loop of claims per queue, for as long as somebody waits there.

A claim in flight is never cancelled. If the client that waited for it is gone when it lands, its jobs are given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from headrace.engine.waiters import Waiters
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.backends.valkey.backend import ValkeyBackend

log: Final = logging.getLogger("headrace.engine")


class ClaimLoops:
    def __init__(
        self, backend: ValkeyBackend, waiters: Waiters, start: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._backend = backend
        self._waiters = waiters
        self._start = start
        self._running: set[str] = set()
        self._again: set[str] = set()
        self._refused: set[str] = set()
        """Queues whose last claim failed, which was told."""

    def wake(self, queue: str) -> None:
        """The queue may have jobs: claim for those who wait, unless a claim is already in flight."""
        if queue in self._running:
            self._again.add(queue)
        elif self._waiters.parked_pulls(queue):
            self._running.add(queue)
            self._start(self._run(queue))

    async def _run(self, queue: str) -> None:
        try:
            while True:
                self._again.discard(queue)
                await self._serve(queue)
                if queue not in self._again:
                    break
        finally:
            self._running.discard(queue)
            self._backend.on_wake()  # a claim without jobs may have learned when the next one is due

    async def _serve(self, queue: str) -> None:
        for waiter in self._waiters.parked_pulls(queue):
            assert waiter.demand is not None
            if waiter.is_over:
                continue  # it was served or gave up while we claimed for those before it
            try:
                claims = await self._backend.claim(queue, waiter.demand)
            except HeadraceError as error:
                if queue not in self._refused:  # told once: it is tried every second
                    self._refused.add(queue)
                    log.warning("parked pulls of %s wait on: %s", queue, error)
                return
            self._refused.discard(queue)
            if not claims:
                if waiter.demand.group is None:
                    return
            elif waiter in self._waiters.parked_pulls(queue):
                self._waiters.serve(waiter, claims)
            else:
                await self._backend.release_claims(queue, claims)
