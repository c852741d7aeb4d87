"""How an exception becomes the failure of a job: a reason people can read, and the part of the stack that is theirs."""

from __future__ import annotations

import traceback
from typing import Final

from headrace.errors import InvalidCommand

_MAX_REASON: Final = 2000
_MAX_LINES: Final = 50


class UnrecoverableError(Exception):
    """Raise it in a handler to make the job a dead letter at once: no further attempt would do better."""


class JobCancelled(BaseException):
    """The job was taken away while its handler ran; there is nothing to report any more."""


def is_final(error: BaseException) -> bool:
    """Whether no further attempt would do better: it was said so, or the data of the job is wrong."""
    return isinstance(error, UnrecoverableError | InvalidCommand)


def reason_of(error: BaseException) -> str:
    """`ValueError: no such order`; the message alone when it was raised to tell the reason."""
    message = str(error)
    if isinstance(error, UnrecoverableError) and message:
        return message[:_MAX_REASON]
    name = type(error).__name__
    return (f"{name}: {message}" if message else name)[:_MAX_REASON]


def stack_of(error: BaseException) -> list[str]:
    """The traceback in lines, from the handler down; the innermost calls win when there are too many."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/headrace/worker/" not in frame.filename] or frames
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line or ''}".rstrip(": ") for frame in own]
    return [*lines[-_MAX_LINES:], reason_of(error)]
