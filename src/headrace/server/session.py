"""One connection without its socket: frames in, commands run, replies collected until the tick is committed.

Rules:
- Replies of a tick wait in `_replies` until the commit that contains them; `take` hands them to the shell, `spoil`
  turns them into errors when the commit failed.
- Commands that do not wait are answered in the order in which they came. A command that waits (long poll) is answered
  when it is done, unless it came without reqId: then everything behind it waits too, as a client of protocol 1 cannot
  tell replies apart.
- At most MAX_IN_FLIGHT commands wait at once; what comes on top stays in the backlog.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from msgspec import Raw

from headrace.backends.local.slices import Breath
from headrace.commands._base import BY_TYPE, Command, Flag, Reply
from headrace.engine.engine import Engine
from headrace.engine.waiters import Waiter
from headrace.errors import HeadraceError, NotAuthenticated, ProtocolViolation, StorageUnavailable
from headrace.model import MAX_FRAME_BYTES, Event
from headrace.server.projections import tcp_event_frame
from headrace.wire import Frames, Undecodable, decode_command, encode_error, encode_reply

log: Final = logging.getLogger("headrace.server")

MAX_IN_FLIGHT: Final = 50
MAX_AUTH_FAILURES: Final = 5

Work = Coroutine[Any, Any, Reply]


class Budget:
    """The optional limit of commands per connection and window."""

    __slots__ = ("_left", "_limit", "_until_ms", "_window_ms")

    def __init__(self, limit: int, window_ms: int) -> None:
        self._limit = limit
        self._window_ms = window_ms
        self._left = limit
        self._until_ms = 0

    def spend(self, now_ms: Callable[[], int]) -> bool:
        if self._left > 0 and self._until_ms:
            self._left -= 1
            return True
        now = now_ms()
        if now >= self._until_ms:
            self._until_ms = now + self._window_ms
            self._left = self._limit
        self._left -= 1
        return self._left >= 0

    def renew(self, now_ms: int) -> None:
        if now_ms >= self._until_ms:
            self._until_ms = now_ms + self._window_ms
            self._left = self._limit


class Session:
    """Implements engine.peer.Peer for a lasting connection."""

    def __init__(
        self,
        engine: Engine,
        address: str,
        *,
        stir: Callable[[Session], None],
        later: Callable[[Callable[[], None]], object],
        budget: Budget | None = None,
    ) -> None:
        self.address = address
        self.is_authenticated = not engine.tokens
        self.held: dict[str, int] | None = {}
        self.workers: set[str] = set()
        self.auth_failures = 0
        self.is_closing = False
        self.unsent_bytes = 0
        self._engine = engine
        self._stir = stir
        self._later = later
        self._budget = budget
        self._frames = Frames()
        self._backlog: deque[bytes] = deque()
        self._replies: list[bytes] = []
        self._request_ids: list[bytes | Raw] = []
        self._waiting: dict[Work, Waiter | None] = {}
        self._is_in_order = False
        self._subscription: str | None = None
        self._durable: dict[int, bytes] = {}
        """Replies of this tick (index -> reqId) that must not leave before the disk has their write."""

    # -- incoming ------------------------------------------------------------------------------------------------------

    @property
    def has_partial_frame(self) -> bool:
        return self._frames.is_partial

    @property
    def backlog_size(self) -> int:
        return len(self._backlog)

    def receive(self, data: bytes) -> None:
        """Run everything that `data` completes."""
        try:
            frames = self._frames.feed(data)
        except ProtocolViolation as error:
            self._refuse(error, b"")
            self.is_closing = True
            return
        if self._budget is not None:
            self._budget.renew(self._engine.clock.monotonic_ms())
        backlog = self._backlog
        for frame in frames:
            if backlog or self._is_in_order or len(self._waiting) >= MAX_IN_FLIGHT:
                backlog.append(frame)
            else:
                self._run(frame)

    def _run(self, frame: bytes) -> None:
        try:
            command = decode_command(frame)
        except Undecodable as error:
            self._refuse(error, error.req_id)
            return
        except Exception:
            log.exception("a frame could not be decoded")
            self._answer(encode_error("Invalid command format", b""), b"")
            return
        req_id = command.req_id
        try:
            if self._budget is not None and not self._budget.spend(self._engine.clock.monotonic_ms):
                self._answer(encode_error("Rate limit exceeded", req_id), req_id)
                return
            if not self.is_authenticated and not BY_TYPE[type(command)].flags & Flag.OPEN:
                raise NotAuthenticated
            if self._engine.backend.is_degraded and BY_TYPE[type(command)].flags & Flag.WRITE:
                self._engine.backend.check_writable()
            work = command.run(self._engine, self)
            suspended = work.send(None)
        except StopIteration as done:
            self._answer(encode_reply(done.value, req_id), req_id)
            if self._engine.backend.sync_requests:
                self._note_durable(req_id)
        except Exception as error:
            self._fail(error, req_id, command)
        else:
            self._suspend(work, suspended, command)

    def _note_durable(self, req_id: bytes | Raw) -> None:
        self._engine.backend.sync_requests = 0
        self._durable[len(self._replies) - 1] = bytes(req_id)

    def _fail(self, error: Exception, req_id: bytes | Raw, command: Command[Any]) -> None:
        if not isinstance(error, HeadraceError):
            log.exception("%s failed", type(command).__name__, exc_info=error)
            self._answer(encode_error("Internal server error", req_id), req_id)
            return
        self._refuse(error, req_id)
        if self.auth_failures >= MAX_AUTH_FAILURES:
            self.is_closing = True

    def _refuse(self, error: HeadraceError, req_id: bytes | Raw) -> None:
        self._answer(encode_error(str(error), req_id), req_id)

    # -- waiting commands ----------------------------------------------------------------------------------------------

    def _suspend(self, work: Work, suspended: object, command: Command[Any]) -> None:
        req_id = bytes(command.req_id)  # copied: a view would keep the whole receive buffer alive
        if not req_id:
            self._is_in_order = True
        self._drive_on(work, suspended, command, req_id)

    def _drive_on(self, work: Work, suspended: object, command: Command[Any], req_id: bytes) -> None:
        """Arrange for a suspended command to be continued: a waiter when it is served, a breath in the next turn."""

        def resume(value: Any) -> None:
            self._resume(work, value, command, req_id)

        if isinstance(suspended, Waiter):
            self._waiting[work] = suspended
            suspended.resume = resume
        elif isinstance(suspended, Breath):
            self._waiting[work] = None
            self._later(lambda: resume(None))
            self._stir(self)  # what the slice did so far is committed with this tick
        else:
            work.close()
            raise RuntimeError(f"{type(command).__name__} suspended on {suspended!r}")

    def _resume(self, work: Work, value: Any, command: Command[Any], req_id: bytes) -> None:
        if work not in self._waiting:
            return
        try:
            suspended = work.send(value)
        except StopIteration as done:
            self._answer(encode_reply(done.value, req_id), req_id)
            if self._engine.backend.sync_requests:
                self._note_durable(req_id)
        except Exception as error:
            self._fail(error, req_id, command)
        else:
            self._drive_on(work, suspended, command, req_id)
            return
        del self._waiting[work]
        if not req_id:
            self._is_in_order = False
        if self._backlog:
            self._later(self._work_off_backlog)

    def _work_off_backlog(self) -> None:
        while self._backlog and not self._is_in_order and len(self._waiting) < MAX_IN_FLIGHT:
            self._run(self._backlog.popleft())

    # -- outgoing ------------------------------------------------------------------------------------------------------

    def _answer(self, frame: bytes, req_id: bytes | Raw) -> None:
        if len(frame) > MAX_FRAME_BYTES + 4:
            frame = encode_error("Reply exceeds 64 MB: ask for less with a lower limit", req_id)
        if not self._replies:
            self._stir(self)
        self._replies.append(frame)
        self._request_ids.append(req_id)

    def take(self) -> bytes:
        """Everything that may leave now: called after the commit."""
        replies = self._replies
        out = replies[0] if len(replies) == 1 else b"".join(replies)
        self._replies = []
        self._request_ids = []
        return out

    @property
    def is_durable(self) -> bool:
        return bool(self._durable)

    def take_held(self) -> tuple[list[bytes], dict[int, bytes]]:
        """The replies of this tick one by one, and which of them promise that the disk has their write."""
        held = (self._replies, self._durable)
        self._replies, self._request_ids, self._durable = [], [], {}
        return held

    def spoil(self, error: StorageUnavailable) -> None:
        """The commit failed: every reply of the tick becomes that error."""
        text = str(error)
        self._replies = [encode_error(text, req_id) for req_id in self._request_ids if req_id is not EVENT]
        self._durable = {}

    def subscribe(self, queue: str | None) -> None:
        if self._subscription is not None:
            self._engine.unsubscribe(self._subscription, self)
        self._subscription = queue
        if queue is not None:
            self._engine.subscribe(queue, self)

    def deliver(self, event: Event, body: bytes | None) -> None:
        frame = tcp_event_frame(event, body)
        if frame is not None:
            if not self._replies:
                self._stir(self)
            self._replies.append(frame)
            self._request_ids.append(EVENT)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The connection is gone: nothing may be given to it any more."""
        self.is_closing = True
        self._backlog.clear()
        for work, waiter in list(self._waiting.items()):
            if waiter is not None:
                self._engine.cancel(waiter)
            work.close()
        self._waiting.clear()
        self.subscribe(None)
        self._replies.clear()
        self._request_ids.clear()


EVENT: Final = Raw(b"\xc0")
"""Stands in the list of request ids for a pushed event, which has none."""
