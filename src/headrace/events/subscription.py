"""What an emitter holds: a future that is settled once, with an answer or with an error.

It can be awaited by many, now or later, or by nobody: nothing warns about an error that was never retrieved. A timeout
or a cancellation while waiting concerns only the one who waits; the event is unaffected. A subscription
belongs to the loop it was created on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, TypeVar, cast
from uuid import uuid4

from headrace.durations import Duration, positive_seconds
from headrace.errors import EventTimeoutError

R = TypeVar("R")
log: Final = logging.getLogger("headrace.events")
_PENDING: Final = object()


class EventSubscription(Generic[R]):
    """What `emit` returns: await it for the answer, or ignore it."""

    def __init__(self, subscription_id: str | None = None, event_id: str = "") -> None:
        self.id = subscription_id or str(uuid4())
        self.event_id = event_id
        self._value: Any = _PENDING
        self._error: BaseException | None = None
        self._on_value: Callable[[R], object] | None = None
        self._on_error: Callable[[BaseException], object] | None = None
        self._on_end: list[Callable[[EventSubscription[R]], object]] = []
        self._waiters: list[asyncio.Future[None]] = []

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def is_resolved(self) -> bool:
        """Whether the answer is there."""
        return self._value is not _PENDING

    @property
    def is_rejected(self) -> bool:
        """Whether there is an error instead."""
        return self._error is not None

    @property
    def is_settled(self) -> bool:
        """Whether there is either."""
        return self.is_resolved or self.is_rejected

    def result(self) -> R:
        """The answer, or the error raised; InvalidStateError while there is neither."""
        if self._error is not None:
            raise self._error
        if not self.is_resolved:
            raise asyncio.InvalidStateError("the event has not been answered yet")
        return cast("R", self._value)

    # -- settling ------------------------------------------------------------------------------------------------------

    def resolve(self, value: R) -> None:
        """The first settlement counts; later ones are ignored."""
        if not self.is_settled:
            self._value = value
            self._settled()

    def reject(self, error: BaseException) -> None:
        """End it with an error; later settlements are ignored."""
        if not self.is_settled:
            self._error = error
            self._settled()

    def _settled(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._tell_value()
        self._tell_error()
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            _guarded(callback, self)

    def _tell_value(self) -> None:
        callback = self._on_value
        if self.is_resolved and callback is not None:
            self._on_value = None
            _guarded(callback, self._value)

    def _tell_error(self) -> None:
        callback = self._on_error
        if self._error is not None and callback is not None:
            self._on_error = None
            _guarded(callback, self._error)

    # -- hearing of it -------------------------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[R], object]) -> EventSubscription[R]:
        """Call back with the answer; the last callback given counts."""
        self._on_value = callback
        self._tell_value()
        return self

    def on_error(self, callback: Callable[[BaseException], object]) -> EventSubscription[R]:
        """Call back with the error; the last callback given counts."""
        self._on_error = callback
        self._tell_error()
        return self

    catch = on_error

    def add_done_callback(self, callback: Callable[[EventSubscription[R]], object]) -> None:
        """Call back with this subscription once it is settled; any number of them."""
        if self.is_settled:
            _guarded(callback, self)
        else:
            self._on_end.append(callback)

    def __await__(self) -> Generator[Any, None, R]:
        return self.wait().__await__()

    async def wait(self, timeout: Duration | None = None) -> R:
        """The answer. A timeout concerns this waiter alone; 0 or less means none."""
        if self.is_settled:
            return self.result()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        limit = positive_seconds(timeout, "timeout") or None
        try:
            async with asyncio.timeout(limit):
                await waiter
        except TimeoutError:
            raise EventTimeoutError(f"EventSubscription timeout after {(limit or 0) * 1000:g}ms") from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return self.result()


def _guarded(callback: Callable[[Any], object], argument: Any) -> None:
    try:
        callback(argument)
    except Exception:
        log.exception("a callback of an event's subscription failed")
