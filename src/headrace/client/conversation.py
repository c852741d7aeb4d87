"""One side of a connection without its socket: handshake, numbering, matching replies to commands.

The handshake: Hello first; a server that answers `Not authenticated` gets the token and another Hello. A server of
protocol 1, or one that does not know Hello, gets one command at a time. Until the handshake is over commands wait,
later they wait while the window is full.

Rules: no I/O and no clock. The shell (`link`) sends what `take` returns, feeds `receive`, and calls `lose` at the end.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from headrace.client.channel import Done, is_unwanted
from headrace.client.payloads import without_absent
from headrace.client.policy import MAX_WAITING, ConnectionOptions
from headrace.commands._base import BY_TYPE, Command, Flag, Reply
from headrace.commands.connection import CAPABILITIES, ERROR_CODES, PROTOCOL_VERSION, Auth, Hello
from headrace.errors import (
    HeadraceError,
    InvalidCommand,
    NotAuthenticated,
    ProtocolViolation,
    Refused,
    UnknownCommand,
    Unreachable,
    error_of,
)
from headrace.frames import HEADER, Frames
from headrace.model import MAX_FRAME_BYTES

R = TypeVar("R", bound=Reply)

_encode: Final = msgspec.msgpack.Encoder().encode
_encode_into: Final = msgspec.msgpack.Encoder().encode_into


@functools.cache
def is_blocking(command: type[Command[Any]]) -> bool:
    """Whether a command waits for an event. Cached, because it is needed for every command and flags are slow."""
    return bool(BY_TYPE[command].flags & Flag.BLOCKING)


class Question(Generic[R]):
    """A command in flight, and who waits for its reply."""

    __slots__ = ("command", "deadline", "done", "is_blocking", "is_over", "number", "send_by", "timeout")

    def __init__(self, command: Command[R], done: Done[R]) -> None:
        self.command = command
        self.done = done
        self.is_blocking = is_blocking(type(command))
        self.is_over = False
        self.number = 0
        self.timeout = 0.0
        self.deadline = float("inf")
        self.send_by = float("inf")
        """When it is too late to send it."""

    @property
    def due(self) -> float:
        """When it is given up, as things stand."""
        return self.deadline if self.number else min(self.deadline, self.send_by)

    def end(self, outcome: R | HeadraceError) -> None:
        if not self.is_over:
            self.is_over = True
            self.done(outcome)


class _Envelope(Struct, rename="camel"):
    ok: bool = True
    req_id: int | None = None
    error: str | None = None
    code: str | None = None
    event: Raw = Raw(b"")


_open: Final = msgspec.msgpack.Decoder(_Envelope, strict=False).decode


@functools.cache
def reply_decoder(command: type[Command[Any]]) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(BY_TYPE[command].reply, strict=False).decode


class Conversation:
    def __init__(self, options: ConnectionOptions, on_event: Callable[[Raw], None]) -> None:
        self._options = options
        self._on_event = on_event
        self._frames = Frames()
        self._out = bytearray()
        self._waiting: deque[Question[Any]] = deque()
        self._asked: dict[int, Question[Any]] = {}
        self._blocking = 0
        self._last_number = 0
        self._window = 0
        self.is_ready = False
        self.failure: HeadraceError | None = None
        """Why the greeting did not succeed."""

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._asked)

    @property
    def blocking(self) -> int:
        """How many commands that wait for an event are in flight here, or queued."""
        return self._blocking

    @property
    def is_pipelined(self) -> bool:
        """Whether replies may overtake each other, as negotiated in the handshake."""
        return self._window > 1

    def ask(self, question: Question[Any]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            question.end(Unreachable(f"{MAX_WAITING} commands wait for this connection already"))
            return
        self._waiting.append(question)
        self._blocking += question.is_blocking
        if self.is_ready:
            self._send_waiting()

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    def take(self) -> bytearray:
        """The bytes to send now."""
        out, self._out = self._out, bytearray()
        return out

    def _send_waiting(self) -> None:
        while self._waiting and len(self._asked) < self._window:
            self._send(self._waiting.popleft())

    def _send(self, question: Question[Any]) -> None:
        self._last_number += 1
        question.command.req_id = Raw(_encode(self._last_number))
        out = self._out
        start = len(out)
        out += b"\0\0\0\0"
        try:
            _encode_into(question.command, out, start + 4)
            size = len(out) - start - 4
            if size > MAX_FRAME_BYTES:  # the server would hang up, on all that is under way here
                raise ValueError(f"it has {size} bytes, and {MAX_FRAME_BYTES} are the most")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            del out[start:]
            self._blocking -= question.is_blocking
            question.end(InvalidCommand(f"{type(question.command).__name__} cannot be sent: {error}"))
            return
        HEADER.pack_into(out, start, size)
        question.number = self._last_number
        self._asked[question.number] = question

    def overdue(self, now: float) -> list[Question[Any]]:
        """Those that timed out. One that was sent keeps its place in the window: its reply may still come."""
        late = [question for question in self._open() if question.due <= now]
        if any(question.number == 0 for question in late):
            self._put_back(question for question in self.take_waiting() if question.due > now)
        return late

    def next_deadline(self) -> float:
        return min((question.due for question in self._open()), default=float("inf"))

    def _open(self) -> Iterator[Question[Any]]:
        return (question for question in (*self._asked.values(), *self._waiting) if not question.is_over)

    def _put_back(self, waiting: Iterable[Question[Any]]) -> None:
        for question in waiting:
            self._waiting.append(question)
            self._blocking += question.is_blocking

    # -- the greeting --------------------------------------------------------------------------------------------------

    def greet(self) -> None:
        hello = Hello(protocol_version=PROTOCOL_VERSION, capabilities=[*CAPABILITIES, ERROR_CODES])
        self._say(hello, self._greeted)

    def _say(self, command: Command[R], done: Done[R]) -> None:
        """Ask ahead of everything that waits."""
        self._send(Question(command, done))

    def _greeted(self, outcome: Any) -> None:
        if isinstance(outcome, NotAuthenticated):
            self._authenticate()
        elif isinstance(outcome, UnknownCommand):
            self._begin(1)
        elif isinstance(outcome, HeadraceError):
            self.failure = outcome
        else:
            self._begin(outcome.protocol_version)

    def _authenticate(self) -> None:
        try:
            token = self._options.current_token()
        except Exception as error:  # somebody else's function
            self.failure = NotAuthenticated(f"The function that returns the token failed: {error!r}")
            return
        if token is None:
            self.failure = NotAuthenticated("The server requires a token: ?token=... in the URL, or HEADRACE_TOKEN")
        else:
            self._say(Auth(token=token), self._authenticated)

    def _authenticated(self, outcome: Any) -> None:
        if isinstance(outcome, HeadraceError):
            self.failure = outcome
        else:
            self.greet()

    def _begin(self, version: int) -> None:
        self.is_ready = True
        self._window = self._options.max_in_flight if version >= 2 and self._options.pipelining else 1
        # What callers gave up while there was no connection is not sent: they may have tried again each time.
        self._put_back(question for question in self.take_waiting() if not is_unwanted(question.done))
        self._send_waiting()

    # -- hearing -------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._hear(frame)
        if self._frames.violation is not None:
            if data.startswith(b"HTTP/"):
                raise ProtocolViolation("That port speaks HTTP; the port for clients is 6789 unless it was changed")
            raise self._frames.violation

    def _hear(self, frame: bytes) -> None:
        try:
            envelope = _open(frame)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(f"The server sent something that is no reply: {error}") from None
        if envelope.event and envelope.req_id is None:
            self._on_event(envelope.event)
            return
        question = self._match(envelope.req_id)
        if question is not None:
            self._blocking -= question.is_blocking
            question.end(self._outcome(frame, envelope, question.command))
            if self._waiting and self.is_ready:
                self._send_waiting()

    def _match(self, number: int | None) -> Question[Any] | None:
        if number is not None:
            return self._asked.pop(number, None)
        # Protocol 1 echoes no number: it answers one command at a time.
        return self._asked.pop(next(iter(self._asked))) if len(self._asked) == 1 else None

    def _outcome(self, frame: bytes, envelope: _Envelope, command: Command[Any]) -> Any:
        if not envelope.ok:
            return error_of(envelope.code, envelope.error or "Refused without a reason")
        decode = reply_decoder(type(command))
        try:
            return decode(frame)
        except msgspec.MsgspecError:
            return self._outcome_slowly(frame, command, decode)

    def _outcome_slowly(self, frame: bytes, command: Command[Any], decode: Callable[[bytes], Any]) -> Any:
        try:
            return decode(without_absent(frame, 2))
        except msgspec.MsgspecError as error:
            return Refused(f"The reply to {type(command).__name__} is not understood: {error}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def lose(self, error: HeadraceError) -> None:
        """The link is gone: what was sent on it is lost; what only waited may be sent on the next one."""
        asked, self._asked = self._asked, {}
        for question in asked.values():
            self._blocking -= question.is_blocking
            question.end(error)

    def take_waiting(self) -> list[Question[Any]]:
        """Those that were not sent."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self._blocking -= sum(question.is_blocking for question in waiting)
        return [question for question in waiting if not question.is_over]

    def end(self, error: HeadraceError) -> None:
        """Nobody will send or receive anything here any more."""
        for question in self.take_waiting():
            question.end(error)
        self.lose(error)
