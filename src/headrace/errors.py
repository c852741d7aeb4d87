"""Everything that can go wrong, as one tree.

    HeadraceError
    ├── InvalidCommand          the request itself is wrong: a field, a limit, a combination
    │   └── UnknownCommand
    ├── NotFound                no such job, cron, worker or webhook
    ├── Refused                 the thing exists, but not in a state that allows this
    │   └── LeaseLost           the token is missing, wrong or outlived
    ├── NotAuthenticated
    ├── RateLimited
    ├── ReplyTooLarge           the answer would not fit a frame
    ├── NotSupported            this backend cannot do it
    ├── StorageUnavailable      the disk or the engine behind the backend refuses writes
    ├── Internal                a bug of ours: logged, and told without its insides
    └── ProtocolViolation       the byte stream cannot be trusted any more: reply, then close

Errors are raised where they are noticed and become replies in one place (`server.session`). The message is what
the client reads, so it follows the protocol reference word for word where that gives a text.
"""

from __future__ import annotations

from typing import ClassVar


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


class ProtocolViolation(HeadraceError):
    code = "protocol_violation"
    closes = True
