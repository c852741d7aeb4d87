"""What travels with work from process to process: context, errors and retry policies. Events and workflows share it.

Context is one ContextVar that holds an immutable mapping (the *meta*). Whoever sends a message puts `capture()` into
it, whoever handles one runs inside `restored(meta)`; so the ids of a request reach every handler it caused, over any
number of hops. The keys `correlationId`, `traceId`, `spanId` and `parentSpanId` have a meaning here, all others belong
to the application. Every message is a span of its own: `capture` gives it a new id whose parent is the current span,
and invents no trace where there is none.

Errors travel as `ErrorReport`, which is text: an error of another process is rebuilt as a RemoteError with its
type, message, step, attempt and traceback, and is never unpickled.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from msgspec import Struct

from headrace.client.options import Backoff, Options
from headrace.client.payloads import decode_payload, encode_payload
from headrace.durations import Duration
from headrace.errors import InvalidCommand, RemoteError, encodable, message_of

PropagationMeta = Mapping[str, Any]

NO_META: Final[PropagationMeta] = MappingProxyType({})
_current: Final[ContextVar[PropagationMeta]] = ContextVar("headrace_meta", default=NO_META)

# Python spellings of the keys that mean something here; keys of the application travel as they are written.
_SPELLINGS: Final = {
    "correlation_id": "correlationId",
    "trace_id": "traceId",
    "span_id": "spanId",
    "parent_span_id": "parentSpanId",
}

# -- context -----------------------------------------------------------------------------------------------------------


def current_meta() -> PropagationMeta:
    """What travels with everything that is sent from here; in a handler it is the meta of its message."""
    return _current.get()


@contextlib.contextmanager
def propagate(meta: PropagationMeta | None = None, /, **keys: Any) -> Iterator[PropagationMeta]:
    """Add keys to the current meta for the time of the block: `with propagate(correlation_id="r-9", tenant="t1"):`"""
    given = {_SPELLINGS.get(key, key): value for key, value in keys.items()}
    with restored({**_current.get(), **(meta or {}), **given}) as merged:
        yield merged


@contextlib.contextmanager
def restored(meta: PropagationMeta | None) -> Iterator[PropagationMeta]:
    """Run the block inside the context of a message: exactly its meta, whatever was current here."""
    frozen = MappingProxyType(dict(meta)) if meta else NO_META
    token = _current.set(frozen)
    try:
        yield frozen
    finally:
        _current.reset(token)


def capture(meta: PropagationMeta | None = None) -> dict[str, Any]:
    """The meta for a message that is sent now: the current one (or the one given) with a span of its own.

    Keys whose value is None are left out. Empty when there is nothing to carry.
    """
    current = _current.get() if meta is None else meta
    kept = {key: value for key, value in current.items() if value is not None}
    if "traceId" in kept:
        parent = kept.pop("spanId", None)
        kept.pop("parentSpanId", None)
        kept["spanId"] = new_span_id()
        if parent is not None:
            kept["parentSpanId"] = parent
    return kept


def carried(meta: PropagationMeta | None, what: str) -> dict[str, Any]:
    """The meta as it arrives in other processes: handlers that run in this one are to find the same.

    `what` carries it, and is named in errors.
    """
    if not meta:
        return {}
    for key in meta:
        if not isinstance(key, str):
            raise InvalidCommand(f"the context of {what} has texts as keys, not {key!r}")
    arrived: dict[str, Any] = decode_payload(encode_payload(dict(meta), f"the context of {what}"))
    return arrived


def new_span_id() -> str:
    return secrets.token_hex(8)


_RECORD_KEYS: Final = frozenset((*logging.makeLogRecord({}).__dict__, "message", "asctime"))


def log_fields(meta: PropagationMeta) -> dict[str, Any]:
    """The keys that a log record can have as attributes. It has a few of its own, `name` and `args` among them, and
    logging refuses others of that name."""
    return {key: value for key, value in meta.items() if key not in _RECORD_KEYS}


class PropagationFilter(logging.Filter):
    """Adds the keys of the current meta to log records: `handler.addFilter(PropagationFilter())`.

    `record.meta` has all of them; each is an attribute of its own, too, unless the record has one of that name.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        meta = _current.get()
        record.meta = dict(meta)
        vars(record).update(log_fields(meta))
        return True


# -- errors ------------------------------------------------------------------------------------------------------------

_MAX_MESSAGE: Final = 2_000
_MAX_TRACEBACK: Final = 16_000
_OURS: Final = os.path.dirname(__file__)


def _traceback(error: BaseException) -> Iterator[str]:
    """The traceback from the first frame that is not ours: how we came to call a handler is nobody's concern."""
    told = traceback.TracebackException.from_exception(error)
    theirs = list(itertools.dropwhile(lambda frame: frame.filename.startswith(_OURS), told.stack))
    if theirs:
        told.stack = traceback.StackSummary.from_list(theirs)
    return told.format()


class ErrorReport(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """An error as it crosses processes: texts and numbers."""

    type: str
    message: str = ""
    step: str | None = None
    attempt: int | None = None
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, *, step: str | None = None, attempt: int | None = None) -> ErrorReport:
        """A RemoteError is passed on as what it was where it happened."""
        if isinstance(error, RemoteError):
            return cls(
                type=error.type_name,
                message=error.message,
                step=error.step or step,
                attempt=error.attempt or attempt,
                traceback=error.remote_traceback,
            )
        text = encodable("".join(_traceback(error)))
        return cls(
            type=type(error).__name__,
            message=message_of(error)[:_MAX_MESSAGE],
            step=step,
            attempt=attempt,
            traceback=text[-_MAX_TRACEBACK:],
        )

    @classmethod
    def of_reason(cls, reason: str, stack: list[str] | None = None, *, attempt: int | None = None) -> ErrorReport:
        """Out of what a failed job tells: `ValueError: no such order`, and the lines of its traceback.

        The last line names the type, also when the reason is a type without a message, or a message without its type.
        """
        name, colon, message = reason.partition(": ")
        last_name, _, last_message = stack[-1].partition(": ") if stack else ("", "", "")
        if last_name.isidentifier() and last_message and reason.startswith(last_message):
            name, message = last_name, reason
        elif not (name.isidentifier() and (colon or name == last_name)):
            name, message = "Error", reason
        return cls(type=name, message=message, attempt=attempt, traceback="\n".join(stack or ())[-_MAX_TRACEBACK:])

    def rebuild(self) -> RemoteError:
        return RemoteError(
            self.type, self.message, step=self.step, attempt=self.attempt, remote_traceback=self.traceback
        )


def is_stall(reason: str) -> bool:
    """Whether a job failed because its worker died or hung: the words are those of the backends."""
    return reason == "stalled" or reason.startswith(("Lock expired", "Job stalled"))


# -- retry -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retry:
    """How often something is tried and how long to wait in between: `Retry(5, backoff="fixed", delay=2)`."""

    attempts: int = 3
    backoff: Literal["fixed", "exponential"] = "exponential"
    delay: Duration = 1
    max_delay: Duration | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.attempts, int) or self.attempts < 1:
            raise InvalidCommand(f"Retry needs at least 1 attempt, not {self.attempts!r}")
        if self.backoff not in ("fixed", "exponential"):
            raise InvalidCommand(f"Retry knows the backoffs 'fixed' and 'exponential', not {self.backoff!r}")
        Backoff(self.backoff, self.delay, self.max_delay).wire()

    @staticmethod
    def check(given: object) -> None:
        """Refuse what is given in place of one: 3 could be three attempts, or three more after the first."""
        if not isinstance(given, Retry | None):
            raise InvalidCommand(f"a retry is Retry(attempts, ...), not {given!r}")

    def options(self) -> Options:
        """The same as options of a job."""
        return {"attempts": self.attempts, "backoff": Backoff(self.backoff, self.delay, self.max_delay)}
