"""One TCP connection without its socket: frames in, commands run, replies collected until the tick is committed.

Rules:
- The replies of a tick wait in `_out` for its commit; `take` hands them to the shell, `spoil` turns them into errors
  when the commit failed.
- Commands that do not block are answered in order. A command that blocks (long poll) is answered when it is done,
  unless it has no reqId: then everything behind it waits too, because such a client cannot match replies to commands.
- At most MAX_IN_FLIGHT commands wait at once, and at most MAX_PER_TICK are answered in one tick, so that a client that
  pipelines without end does not hold up the others. What comes on top stays in the backlog. When that has more than
  MAX_BACKLOG commands, the shell reads no further.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from msgspec import Raw, Struct

from headrace.commands._base import TOGETHER, Alike, BurstReplies, Command, ErrorReply
from headrace.engine.engine import MAX_AUTH_FAILURES, Engine
from headrace.errors import (
    HeadraceError,
    Internal,
    NotAuthenticated,
    RateLimited,
    ReplyTooLarge,
    StorageUnavailable,
)
from headrace.frames import Frames
from headrace.model import MAX_FRAME_BYTES, MAX_OUTBOX_BYTES, NIL, UNDEFINED, Event
from headrace.server.driving import Driver, Work
from headrace.server.projections import tcp_event_frame
from headrace.wire import Undecodable, append_alike, append_reply, decode_command, decode_commands

log: Final = logging.getLogger("headrace.server")

MAX_IN_FLIGHT: Final = 50
MAX_BACKLOG: Final = 200
MAX_STRANGERS_FRAME: Final = 256 * 1024
"""The largest frame accepted before authentication: the longest token fits."""
MAX_BURST: Final = 128
MAX_PER_TICK: Final = 8 * MAX_BURST
_req_id: Final = attrgetter("req_id")
TOO_LARGE: Final = ReplyTooLarge("Reply exceeds 64 MB: ask for less with a lower limit")
NO_ID: Final = (b"", NIL, UNDEFINED)
"""Request ids that identify no reply."""


class Held(NamedTuple):
    """Replies that wait for a sync: the bytes, and where in them (start, end, reqId) durability is promised."""

    out: bytearray
    durable: list[tuple[int, int, bytes]]

    def without_promises(self, error: StorageUnavailable) -> bytearray:
        """The same replies with every promise replaced by an error: the sync failed."""
        kept = bytearray()
        at = 0
        for start, end, req_id in self.durable:
            kept += self.out[at:start]
            append_reply(kept, ErrorReply.of(error), req_id)
            at = end
        return kept + self.out[at:]


class Budget:
    """The optional limit of commands per connection and window."""

    __slots__ = ("_left", "_limit", "_until_ms", "_window_ms")

    def __init__(self, limit: int, window_ms: int) -> None:
        self._limit = limit
        self._window_ms = window_ms
        self._left = limit
        self._until_ms = 0

    def grant(self, wanted: int, now_ms: int) -> int:
        """How many of `wanted` commands may run; the others are refused and not counted."""
        if now_ms >= self._until_ms:
            self._until_ms = now_ms + self._window_ms
            self._left = self._limit
        granted = min(wanted, self._left)
        self._left -= granted
        return granted

    def refund(self, count: int) -> None:
        """These were granted and have to wait: they are granted again when they run."""
        self._left += count


class Session(Driver[bytes | Raw]):
    """Implements engine.peer.Peer for a lasting connection; the key of a command is its request id."""

    def __init__(
        self,
        engine: Engine,
        address: str,
        *,
        stir: Callable[[], None],
        later: Callable[[Callable[[], None]], object],
        budget: Budget | None = None,
    ) -> None:
        super().__init__(engine, address, stir=stir, later=later, held={})
        self.is_closing = False
        self._budget = budget
        self.frames = Frames()
        self.backlog: deque[bytes] = deque()
        """Commands received that must wait for those before them."""
        self._out = bytearray()
        self._request_ids: list[bytes | Raw] = []
        self._is_in_order = False
        self._room = MAX_OUTBOX_BYTES
        self._durable: list[tuple[int, int, bytes]] = []

    # -- incoming ------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a command was received that is not answered yet."""
        return bool(self._waiting or self.backlog)

    @property
    def backlog_bytes(self) -> int:
        return sum(map(len, self.backlog))

    def receive(self, data: bytes) -> None:
        """Run everything that `data` completes."""
        self._take_in(self.frames.feed(data))
        if self.frames.violation is not None:
            self._refuse(self.frames.violation, b"")
            self.is_closing = True
        elif not self.is_authenticated and self.frames.awaited > MAX_STRANGERS_FRAME:
            self._refuse(NotAuthenticated(), b"")
            self.is_closing = True

    def receive_frame(self, frame: bytes) -> None:
        """Run one command that came in another way (WebSocket)."""
        self._take_in([frame])

    def _take_in(self, frames: list[bytes]) -> None:
        if self.backlog:
            self.backlog.extend(frames)
        elif len(frames) == 1 and not self._must_wait() and self._granted(1):
            self._start_or_refuse(self._decode(frames[0]))
        else:
            self._run(frames)

    def _run(self, frames: list[bytes]) -> None:
        """Run these in bursts. As soon as one has to wait, it and everything behind it go to the backlog."""
        for start in range(0, len(frames), MAX_BURST):
            burst = frames[start : start + MAX_BURST]
            granted = self._granted(len(burst))
            done = self._run_burst(burst[:granted])
            if done == granted:
                done += self._refuse_rate(burst[granted:])
            elif self._budget is not None:
                self._budget.refund(granted - done)
            if done < len(burst):
                self.backlog.extendleft(reversed(frames[start + done :]))
                return

    def _granted(self, wanted: int) -> int:
        """How many of `wanted` commands are within the rate limit."""
        return wanted if self._budget is None else self._budget.grant(wanted, self._engine.clock.monotonic_ms())

    def _run_burst(self, frames: list[bytes]) -> int:
        """Commands of one kind in a row are run together as far as that goes, all others one by one; how many ran."""
        if self._must_wait():
            return 0
        at = 0
        for kind, run in itertools.groupby(self._decode_all(frames), type):
            commands = list(run)
            done = self._run_together(commands) if kind in TOGETHER and len(commands) > 1 else 0
            for n in range(done, len(commands)):
                if self._must_wait():
                    return at + n
                self._start_or_refuse(commands[n])
            at += len(commands)
        return at

    def _must_wait(self) -> bool:
        """Whether the next command cannot run yet: it is held up, or this tick has no room for more replies."""
        return (
            self._is_in_order
            or len(self._waiting) >= MAX_IN_FLIGHT
            or len(self._out) > self._room
            or len(self._request_ids) >= MAX_PER_TICK
        )

    @property
    def _is_held_up(self) -> bool:
        """Whether the next command has to wait for one that is suspended."""
        return self._is_in_order or len(self._waiting) >= MAX_IN_FLIGHT

    def _run_together(self, commands: list[Any]) -> int:
        """Run the first ones with one call of the backend; how many were answered."""
        if not self.is_authenticated or self._backend.is_degraded or not self._backend.is_local or self._must_wait():
            return 0
        request_ids = list(map(_req_id, commands))
        if not all(request_ids):
            return 0
        work = TOGETHER[type(commands[0])](commands, self._engine, self)
        try:
            work.send(None)
        except StopIteration as done:
            replies = done.value
        except HeadraceError as error:
            replies = [error] * len(commands)
        except Exception:
            log.exception("%s failed", type(commands[0]).__name__)
            replies = [Internal()] * len(commands)
        return self._answer_all(replies, request_ids)

    def _answer_all(self, replies: BurstReplies, request_ids: list[Raw]) -> int:
        """`_answer` for the first of these, as many as there are replies."""
        if not isinstance(replies, Alike):
            for reply, req_id in zip(replies, request_ids, strict=False):
                self._answer(ErrorReply.of(reply, self) if isinstance(reply, HeadraceError) else reply, req_id)
            return len(replies)
        if replies.count:
            if not self._out:
                self._stir()
            answered = request_ids[: replies.count]
            append_alike(self._out, replies, answered)
            self._request_ids += answered
        return replies.count

    def _refuse_rate(self, frames: list[bytes]) -> int:
        """Refuse these, but not without end in one tick; how many were answered."""
        for done, frame in enumerate(frames):
            if self._must_wait():
                return done
            self._refuse(RateLimited(), bytes(self._decode(frame).req_id))
        return len(frames)

    def _decode_all(self, frames: list[bytes]) -> Sequence[Command[Any] | Undecodable]:
        try:
            return decode_commands(frames)
        except Exception:  # at least one is not valid: decode them one by one to find out which, and why
            return [self._decode(frame) for frame in frames]

    def _decode(self, frame: bytes) -> Command[Any] | Undecodable:
        try:
            return decode_command(frame)
        except Undecodable as error:
            return error
        except Exception:
            log.exception("a frame could not be decoded")
            return Undecodable("Invalid command format")

    def _start_or_refuse(self, command: Command[Any] | Undecodable) -> None:
        if isinstance(command, Undecodable):
            if command.name == "Auth" and self._engine.tokens:
                self._engine.guesses.note(self.address)  # no token, or not even a text
            self._refuse(self._without_hints(command), command.req_id)
        else:
            self._start(command, command.req_id)

    def _without_hints(self, error: Undecodable) -> HeadraceError:
        """Before authentication an error must not reveal which commands exist."""
        return error if self.is_authenticated or error.name in ("", "Auth") else NotAuthenticated()

    def _fail(self, error: Exception, key: bytes | Raw, command: Command[Any]) -> None:
        super()._fail(error, key, command)
        if self.auth_failures >= MAX_AUTH_FAILURES:
            self.is_closing = True

    def _refuse(self, error: HeadraceError, key: bytes | Raw) -> None:
        self._answer(ErrorReply.of(error, self), key)

    # -- waiting commands ----------------------------------------------------------------------------------------------

    def _suspend(self, work: Work, suspended: object, command: Command[Any], key: bytes | Raw) -> None:
        req_id = bytes(key)  # copied: a view would keep the whole receive buffer in memory
        if req_id in NO_ID:
            self._is_in_order = True
        self._drive_on(work, suspended, command, req_id)

    def _ended(self, key: bytes | Raw) -> None:
        if key in NO_ID:
            self._is_in_order = False
        if self.backlog:
            self._later(self._work_off_backlog)

    def choke(self, choked: bool) -> None:
        """The client does not read its replies: send nothing more until it does."""
        self._room = -1 if choked else MAX_OUTBOX_BYTES
        if self.backlog and not choked:
            self._later(self._work_off_backlog)

    def _work_off_backlog(self) -> None:
        while self.backlog and not self._must_wait():
            # What may have to wait is taken one by one: a burst that stops halfway is decoded again later.
            count = MAX_BURST if self._backend.is_local and not self._waiting else 1
            self._run([self.backlog.popleft() for _ in range(min(count, len(self.backlog)))])

    # -- outgoing ------------------------------------------------------------------------------------------------------

    def _answer(self, reply: Struct, key: bytes | Raw) -> None:
        """Put a reply into the outbox of this tick."""
        out = self._out
        start = len(out)
        if append_reply(out, reply, key) > MAX_FRAME_BYTES:
            del out[start:]
            append_reply(out, ErrorReply.of(TOO_LARGE, self), key)
        self._request_ids.append(key)
        if self._backend.sync_requests:
            self._backend.sync_requests = 0
            self._durable.append((start, len(out), bytes(key)))
        if not start:
            self._stir()

    @property
    def owes_replies(self) -> bool:
        """Whether something leaves with this tick or a later one, long polls and what they hold up aside."""
        return bool(self._out or self.is_at_work or (self.backlog and not self._is_held_up))

    def take(self) -> bytearray:
        """Everything that may leave now: called after the commit."""
        out = self._out
        self._out = bytearray()
        self._request_ids = []
        if self._durable:
            self._durable = []  # nobody held them back: memory has no disk
        if self.backlog:
            self._later(self._work_off_backlog)
        return out

    @property
    def is_durable(self) -> bool:
        """Whether a reply of this tick promises that the disk has its write."""
        return bool(self._durable)

    def take_held(self) -> Held:
        durable, self._durable = self._durable, []
        return Held(self.take(), durable)

    def spoil(self, error: StorageUnavailable) -> None:
        """The commit failed: every reply of the tick becomes that error."""
        reply = ErrorReply.of(error, self)
        self._out = bytearray()
        for req_id in self._request_ids:
            append_reply(self._out, reply, req_id)
        self._durable = []

    def deliver(self, event: Event, body: bytes | None) -> None:
        frame = tcp_event_frame(event, body)
        if frame is not None:
            if not self._out:
                self._stir()
            self._out += frame

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The connection was lost: it gets no more replies or jobs."""
        self.is_closing = True
        self.backlog.clear()
        self._give_up()
        self._engine.unsubscribe(self)
        self._out.clear()
        self._request_ids.clear()
