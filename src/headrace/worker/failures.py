"""How an exception becomes the failure of a job: a reason people can read, and the part of the stack that is theirs."""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Final

from headrace.durations import Duration, milliseconds
from headrace.errors import InvalidCommand, encodable, message_of
from headrace.model import MAX_STACK

_MAX_REASON: Final = 2000
_MAX_ERRORS: Final = 20
"""How many errors that led to each other are told."""
_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__))
_PLUMBING: Final = tuple(os.path.join(_PACKAGE, folder, "") for folder in ("worker", "tasks"))
"""How we came to call a handler is nobody's concern."""


class UnrecoverableError(Exception):
    """Raise it in a handler to make the job a dead letter at once: no further attempt would do better."""


class RetryLater(Exception):
    """Raise it in a handler to end this attempt as failed and say when the next one is due, whatever the backoff."""

    def __init__(self, reason: str = "", *, after: Duration) -> None:
        """`after` counts from now."""
        self.after_ms = milliseconds(after, "after")
        super().__init__(reason or f"to be tried again after {self.after_ms / 1000:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        """Pools of processes pickle what is raised in them."""
        return partial(RetryLater, after=self.after_ms / 1000), self.args


class JobCancelled(BaseException):
    """The job was taken away while its handler ran; there is nothing to report any more."""


def is_final(error: BaseException) -> bool:
    """Whether no further attempt would do better: it was said so, or the data of the job is wrong."""
    return isinstance(error, UnrecoverableError | InvalidCommand)


def retry_after_ms(error: BaseException) -> float | None:
    """When the next attempt is due, if the handler has said so."""
    return error.after_ms if isinstance(error, RetryLater) else None


def reason_of(error: BaseException) -> str:
    """`ValueError: no such order`; the message alone when it was raised to tell the reason."""
    message = message_of(error)
    if isinstance(error, UnrecoverableError | RetryLater) and message:
        return message[:_MAX_REASON]
    return _named(error)


def _named(error: BaseException) -> str:
    name, message = type(error).__name__, message_of(error)
    return (f"{name}: {message}" if message else name)[:_MAX_REASON]


def stack_of(error: BaseException, limit: int) -> list[str]:
    """Its traceback in as many lines as its job keeps, from the handler down, and before it what led to it. The last
    lines win when there are too many: they say where it happened, and the very last one what it was."""
    return list(deque(map(encodable, _lines(error, set())), maxlen=min(limit, MAX_STACK)))


def _lines(error: BaseException, told: set[int]) -> Iterator[str]:
    if id(error) in told or len(told) == _MAX_ERRORS:
        return
    told.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _lines(before, told)
    yield from _frames(error)
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _lines(part, told)
    yield _named(error).partition("\n")[0]


def _frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_PLUMBING)] or frames
    return [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line or ''}".rstrip(": ") for frame in own]
