"""Everything that can go wrong, as one tree.

    HeadraceError
    ├── InvalidCommand          the request itself is wrong: a field, a limit, a combination
    │   └── UnknownCommand
    ├── NotFound                no such job, cron, worker or webhook
    ├── Refused                 the thing exists, but not in a state that allows this
    │   ├── LeaseLost           the token is missing, wrong or outlived
    │   └── Conflict            somebody else changed it meanwhile: look again and decide anew
    ├── NotAuthenticated
    ├── RateLimited
    ├── ReplyTooLarge           the answer would not fit a frame
    ├── NotSupported            this backend cannot do it
    ├── StorageUnavailable      the disk or the engine behind the backend refuses writes
    ├── Internal                a bug of ours: logged, and told without its insides
    ├── ConfigError             a setting or a URL that cannot be used; never a reply
    ├── ProtocolViolation       the byte stream cannot be trusted any more: reply, then close
    └── ClientError             noticed on this side of the wire; never a reply
        ├── ConnectionLost      what became of the command is unknown
        │   └── Unreachable     it was not sent at all
        ├── CommandTimeout
        ├── ClientClosed
        ├── JobFailed           the job whose result was wanted failed for good
        └── JobTimeout          the job whose result was wanted did not end in time

Errors are raised where they are noticed and become replies in one place (`server.session`). The message is what
the client reads, so it follows the protocol reference word for word where that gives a text.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Final


class HeadraceError(Exception):
    """Base of all errors a client may see. `status` is the HTTP code, `closes` ends the connection."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 400
    closes: ClassVar[bool] = False


class InvalidCommand(HeadraceError):
    code = "invalid_command"


class UnknownCommand(InvalidCommand):
    code = "unknown_command"

    def __init__(self, name: str) -> None:
        super().__init__(f"Unknown command: {name}")


class NotFound(HeadraceError):
    code = "not_found"
    status = 404


class Refused(HeadraceError):
    code = "refused"
    status = 409


class LeaseLost(Refused):
    code = "lease_lost"


class Conflict(Refused):
    code = "conflict"


class NotAuthenticated(HeadraceError):
    code = "not_authenticated"
    status = 401

    def __init__(self, message: str = "Not authenticated") -> None:
        super().__init__(message)


class RateLimited(HeadraceError):
    code = "rate_limited"
    status = 429

    def __init__(self) -> None:
        super().__init__("Rate limit exceeded")


class ReplyTooLarge(HeadraceError):
    code = "reply_too_large"
    status = 413


class NotSupported(HeadraceError):
    code = "not_supported"
    status = 501


class StorageUnavailable(HeadraceError):
    code = "storage_unavailable"
    status = 503


class Internal(HeadraceError):
    code = "internal"
    status = 500

    def __init__(self) -> None:
        super().__init__("Internal server error")


class ConfigError(HeadraceError):
    code = "config"


class ProtocolViolation(HeadraceError):
    code = "protocol_violation"
    closes = True


# -- on the client's side ----------------------------------------------------------------------------------------------


class ClientError(HeadraceError):
    code = "client"


class ConnectionLost(ClientError, ConnectionError):
    """The link broke while a command was under way: it may or may not have been carried out."""

    code = "connection_lost"

    def __init__(self, message: str = "Connection lost") -> None:
        super().__init__(message)


class Unreachable(ConnectionLost):
    """There is no connection that the command could have been sent over: nothing was done."""

    code = "unreachable"


class CommandTimeout(ClientError, TimeoutError):
    """No reply came in time. The command may have been carried out."""

    code = "command_timeout"


class ClientClosed(ClientError):
    code = "client_closed"

    def __init__(self, message: str = "The client is closed") -> None:
        super().__init__(message)


class JobFailed(ClientError):
    """The job ended without a result. `reason` is what its worker reported."""

    code = "job_failed"

    def __init__(self, job_id: str, reason: str) -> None:
        super().__init__(f"Job {job_id} failed: {reason}")
        self.job_id = job_id
        self.reason = reason


class JobTimeout(ClientError, TimeoutError):
    """The job did not end in time. It goes on: ask again, or cancel it."""

    code = "job_timeout"


# -- errors out of replies ---------------------------------------------------------------------------------------------


def error_of(code: str | None, text: str) -> HeadraceError:
    """The error that a reply tells of. Other servers of the protocol send no code: then the text has to do."""
    if not code:
        code = next((known for beginning, known in _CODE_BY_TEXT if text.startswith(beginning)), "")
    kind = _kinds().get(code, Refused)
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


# The first beginning that fits counts.
_CODE_BY_TEXT: Final = (
    ("Not authenticated", NotAuthenticated.code),
    ("Invalid token", NotAuthenticated.code),
    ("Unknown command", UnknownCommand.code),
    ("Rate limit exceeded", RateLimited.code),
    ("Job not found or", Refused.code),
    ("Job not found", NotFound.code),
    ("Invalid or expired lock token", LeaseLost.code),
    ("Lock token required", LeaseLost.code),
)


@cache
def _kinds() -> dict[str, type[HeadraceError]]:
    kinds = {}
    waiting = HeadraceError.__subclasses__()
    while waiting:
        kind = waiting.pop()
        if "code" in vars(kind):  # an error that only carries more than its parent is told as its parent
            kinds[kind.code] = kind
        waiting.extend(kind.__subclasses__())
    return kinds
