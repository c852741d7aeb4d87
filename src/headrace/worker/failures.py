"""How an exception becomes the failure of a job: a reason people can read, and the part of the stack that is theirs."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Final

from headrace.durations import Duration, milliseconds
from headrace.errors import InvalidCommand, encodable, message_of

_MAX_REASON: Final = 2000
_MAX_LINES: Final = 50


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
    name = type(error).__name__
    return (f"{name}: {message}" if message else name)[:_MAX_REASON]


def stack_of(error: BaseException) -> list[str]:
    """The traceback in lines, from the handler down; the innermost calls win when there are too many."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/headrace/worker/" not in frame.filename] or frames
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line or ''}".rstrip(": ") for frame in own]
    return [*map(encodable, lines[-_MAX_LINES:]), reason_of(error)]
