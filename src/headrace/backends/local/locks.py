"""Locks on files and folders that one process owns at a time."""

from __future__ import annotations

import fcntl
import os
from typing import Final

_held: Final[set[int]] = set()
"""Descriptors whose files this process has locked."""


def take(fd: int) -> None:
    """Lock what `fd` has open, until `release`. OSError, with `fd` still open, when another owner has it."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _held.add(fd)


def release(fd: int) -> None:
    """Unlock and close it."""
    _held.discard(fd)
    os.close(fd)


def _leave_to_parent() -> None:
    """A forked child inherits the locks: without this a file would stay locked when only its owner has died."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _held:
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
