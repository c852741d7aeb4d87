"""Every error of Headrace, as one class hierarchy.

    HeadraceError
    ├── InvalidCommand          the request itself is wrong: a field, a limit, a combination
    │   ├── UnknownCommand
    │   └── PayloadError        data or a result does not fit its declaration
    ├── NotFound                no such job, cron, worker or webhook
    ├── Refused                 the thing exists, but not in a state that allows this
    │   ├── LeaseLost           the token is missing, wrong or expired
    │   └── Conflict            somebody else changed it meanwhile: read it again and decide again
    ├── NotAuthenticated
    ├── RateLimited
    ├── ReplyTooLarge           the reply would not fit into a frame
    ├── NotSupported            this backend cannot do it
    ├── StorageUnavailable      the disk or the engine behind the backend refuses writes
    ├── Internal                a bug of ours: logged, and reported without details
    ├── ConfigError             a setting or a URL that cannot be used; never a reply
    ├── ProtocolViolation       the byte stream cannot be trusted any more: reply, then close
    └── ClientError             raised on the client's side; never a reply
        ├── ConnectionLost      whether the command was carried out is unknown
        │   └── Unreachable     it was not sent at all
        ├── CommandTimeout
        ├── ClientClosed
        ├── JobFailed           the job whose result was wanted failed for good
        ├── JobTimeout          the job whose result was wanted did not end in time
        ├── RemoteError         an error of another process, rebuilt from text
        ├── StalledError        the worker that had it died, too often
        ├── ProviderStoppedError        events or workflows were stopped while somebody waited
        ├── UnknownEventError, EventTimeoutError, EventCancelledError
        └── WorkflowError
            ├── WorkflowStepError       a step failed for good; its cause is attached
            ├── WorkflowRollbackError   compensation failed too: a group of all errors
            ├── WorkflowTimeoutError, WorkflowCancelledError
            └── StepNotFoundError

Errors are raised where they are detected and become replies in one place (`server.driving`). The message is what
the client reads, so it follows the protocol reference verbatim where that gives a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Final, Self

_TOLD_PARTS: Final = 5
"""How many errors of a group its message tells."""


class HeadraceError(Exception):
    """Base of all errors a client may see. `status` is the HTTP code, `closes` ends the connection."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 400
    closes: ClassVar[bool] = False

    def __reduce__(self) -> tuple[object, ...]:
        """Pools of processes pickle what is raised in them. An error is rebuilt from its text, since its class takes
        other arguments."""
        return _made_again, (type(self), self.args), self.__dict__ or None


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
    """The link broke while a command was in flight: it may or may not have been carried out."""

    code = "connection_lost"

    def __init__(self, message: str = "Connection lost") -> None:
        super().__init__(message)


class Unreachable(ConnectionLost):
    """There is no connection to send the command over: nothing was sent."""

    code = "unreachable"


class CommandTimeout(ClientError, TimeoutError):
    """No reply came in time. The command may have been carried out."""

    code = "command_timeout"


class ClientClosed(ClientError):
    code = "client_closed"

    def __init__(self, message: str = "The client is closed; entering its app opens it again") -> None:
        super().__init__(message)


class JobFailed(ClientError):
    """The job ended without a result. `reason` is what its worker reported."""

    code = "job_failed"

    def __init__(self, job_id: str, reason: str) -> None:
        super().__init__(f"Job {job_id} failed: {reason}")
        self.job_id = job_id
        self.reason = reason


class JobTimeout(ClientError, TimeoutError):
    """The job did not end in time. It continues: wait again, or cancel it."""

    code = "job_timeout"


# -- of events and workflows -------------------------------------------------------------------------------------------


class RemoteError(ClientError):
    """An error that was raised in another process. `remote_traceback` is the text of its traceback there."""

    code = "remote"

    def __init__(
        self,
        type_name: str,
        message: str = "",
        *,
        step: str | None = None,
        attempt: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message
        self.step = step
        self.attempt = attempt
        self.remote_traceback = remote_traceback


class StalledError(ClientError):
    """Its worker died, or lost its lease, too often."""

    code = "stalled"


class ProviderStoppedError(ClientError):
    """Events or workflows were stopped while the caller waited; the work itself continues in the store."""

    code = "provider_stopped"


class PayloadError(InvalidCommand, ValueError):
    """A value does not fit its declared type, and no retry would help. `path` says where in it, `reason` why."""

    code = "payload"

    def __init__(self, what: str, path: str, reason: str) -> None:
        super().__init__(f"{what}: {reason} at {path}")
        self.what = what
        self.path = path
        self.reason = reason


class UnknownEventError(ClientError, KeyError):
    code = "unknown_event"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"Unknown event {name!r}; the registry has: {', '.join(known) or 'none'}")
        self.event_name = name

    # KeyError would show its argument quoted.
    __str__ = Exception.__str__


class EventTimeoutError(ClientError, TimeoutError):
    code = "event_timeout"


class EventCancelledError(ClientError):
    code = "event_cancelled"


class WorkflowError(ClientError):
    """A flow did not end as its definition promises."""

    code = "workflow"


class WorkflowStepError(WorkflowError):
    """A step failed for good. `__cause__` is why: the error itself, or a RemoteError."""

    code = "workflow_step"

    def __init__(self, step_name: str, cause: BaseException) -> None:
        super().__init__(f"Step '{step_name}' failed: {getattr(cause, 'message', None) or cause}")
        self.step_name = step_name
        self.__cause__ = cause


class WorkflowRollbackError(WorkflowError, ExceptionGroup[Exception]):
    """A flow failed, and steps could not be compensated. `primary` is the failure, the rest came after it."""

    code = "workflow_rollback"
    primary: Exception
    rollback_errors: tuple[Exception, ...]

    def __new__(cls, primary: Exception, rollback_errors: Sequence[Exception]) -> Self:
        text = f"{primary}; {len(rollback_errors)} rollback(s) failed"
        group = ExceptionGroup.__new__(cls, text, [primary, *rollback_errors])
        group.primary, group.rollback_errors = primary, tuple(rollback_errors)
        return group

    def __init__(self, primary: Exception, rollback_errors: Sequence[Exception]) -> None:
        """All is set by `__new__`, which groups of exceptions need."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.primary, self.rollback_errors), self.__dict__


class WorkflowTimeoutError(WorkflowError, TimeoutError):
    """`timeout` is the effective time in seconds."""

    code = "workflow_timeout"

    def __init__(self, flow_id: str, timeout: float) -> None:
        super().__init__(f"Workflow {flow_id} timed out after {timeout * 1000:g}ms")
        self.flow_id = flow_id
        self.timeout = timeout


class WorkflowCancelledError(WorkflowError):
    """Somebody cancelled the flow."""

    code = "workflow_cancelled"


class StepNotFoundError(WorkflowError, LookupError):
    """No code was registered for a step of the workflow."""

    code = "step_not_found"

    def __init__(self, workflow: str, step: str) -> None:
        super().__init__(f"Step '{step}' of workflow '{workflow}' is not registered")
        self.workflow = workflow
        self.step = step


# -- errors out of replies ---------------------------------------------------------------------------------------------


def message_of(error: BaseException) -> str:
    """What an error says, or that it cannot be read: the class may be anybody's."""
    try:
        said = encodable(str(error))
    except Exception:
        return "its message cannot be read"
    if not isinstance(error, BaseExceptionGroup):
        return said
    parts = [f"{type(part).__name__}: {message_of(part)}" for part in islice(_parts_of(error), _TOLD_PARTS)]
    return f"{said}: {'; '.join(parts)}"


def _parts_of(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """The errors of a group and of the groups in it: by itself it tells only how many there are."""
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop()
        if isinstance(error, BaseExceptionGroup):
            waiting += reversed(error.exceptions)
        else:
            yield error


def encodable(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot encode; file names that are not UTF-8 contain them."""
    return text.encode(errors="backslashreplace").decode()


def error_of(code: str | None, text: str) -> HeadraceError:
    """The error that a reply carries. Other servers of the protocol send no code: then it is derived from the text."""
    if not code:
        code = next((known for beginning, known in _CODE_BY_TEXT if text.startswith(beginning)), "")
    return _made_again(_kinds().get(code, Refused), (text,))


def _made_again(kind: type[HeadraceError], args: tuple[object, ...]) -> HeadraceError:
    error = kind.__new__(kind)
    Exception.__init__(error, *args)
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
        if "code" in vars(kind):  # an error that only adds fields to its parent is sent as its parent
            kinds[kind.code] = kind
        waiting.extend(kind.__subclasses__())
    return kinds
