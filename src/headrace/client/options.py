"""The options of a job when it is added: Python names and units in, wire fields out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypedDict, TypeVar

from msgspec import Struct

from headrace import model
from headrace.client.job import JobVerbs
from headrace.durations import Duration, milliseconds, moment_ms
from headrace.errors import InvalidCommand

T = TypeVar("T")


class Backoff(Struct, frozen=True):
    """How long a failed job waits before its next attempt. The server adds jitter to both kinds."""

    kind: Literal["fixed", "exponential"]
    delay: Duration
    max: Duration | None = None

    @classmethod
    def fixed(cls, delay: Duration) -> Backoff:
        """The same `delay` every time."""
        return cls("fixed", delay)

    @classmethod
    def exponential(cls, delay: Duration = 1, max: Duration | None = None) -> Backoff:
        """Twice `delay` after the first failure, then four times, and so on, up to `max` (an hour if not given)."""
        return cls("exponential", delay, max)

    def wire(self) -> model.Backoff:
        longest = None if self.max is None else milliseconds(self.max, "backoff.max")
        return model.Backoff(self.kind, milliseconds(self.delay, "backoff.delay"), longest)


class Dedup(Struct, frozen=True):
    """Prevent a second job with the same key.

    simple: while the first one has not ended. throttle: for `ttl` from the first one on. debounce: the newest
    replaces the one that waits, and `ttl` restarts; it is refused while other jobs depend on the one that waits.
    """

    key: str
    mode: Literal["simple", "throttle", "debounce"] = "simple"
    ttl: Duration | None = None

    def wire(self) -> model.Dedup | None:
        if self.mode not in ("simple", "throttle", "debounce"):
            raise InvalidCommand(f"dedup mode is one of simple, throttle, debounce, not {self.mode!r}")
        if self.mode != "simple" and self.ttl is None:
            raise InvalidCommand(f"dedup mode {self.mode!r} needs a ttl")
        ttl = None if self.ttl is None else milliseconds(self.ttl, "dedup.ttl")
        replaces = self.mode == "debounce"
        return None if ttl is None else model.Dedup(ttl, extend=replaces, replace=replaces)


class RateLimit(Struct, frozen=True):
    """At most `max` jobs per duration, across all workers."""

    max: float
    per: Duration = 1


class Options(TypedDict, total=False):
    """Options of a job. Durations are seconds, timedelta or text such as "30s"."""

    priority: int
    delay: Duration
    at: datetime
    """Run it at this time, instead of after a delay."""
    attempts: int
    backoff: Backoff | Duration
    timeout: Duration
    """How long one attempt may take."""
    ttl: Duration
    """How long the job may wait before it is too late to run it."""
    job_id: str
    """An id of your own: adding it again returns the existing job, if it has not ended."""
    once: bool | Duration
    """With a job_id: a job that has ended answers too, for as long as it is kept; nothing runs again. A span: at least
    for that long, even when the job is gone."""
    dedup: Dedup | str
    group: str
    tags: Sequence[str]
    lifo: bool
    durable: bool
    """Acknowledge only when it is synced to disk: survives a power cut."""
    depends_on: Sequence[str | JobVerbs[Any]]
    """Jobs that have to end first, or their ids."""
    parent: str | JobVerbs[Any]
    remove_on_complete: bool
    remove_on_fail: bool
    keep_logs: int
    stall_timeout: Duration


def _span(name: str) -> Callable[[Any], float]:
    return lambda value: milliseconds(value, name)


def _backoff(value: Backoff | Duration) -> Any:
    return value.wire() if isinstance(value, Backoff) else milliseconds(value, "backoff")


def _once(value: bool | Duration) -> float | None:
    """0 says "as long as the job is kept"."""
    if isinstance(value, bool):
        return 0 if value else None
    return milliseconds(value, "once")


def _texts(value: Iterable[T]) -> tuple[T, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidCommand(f"a list of texts is wanted, not {value!r}: write [{value!r}]")
    return tuple(value)


def _ids(value: Sequence[str | JobVerbs[Any]]) -> tuple[str, ...]:
    return tuple(map(_id, _texts([value] if isinstance(value, JobVerbs) else value)))


def _id(value: str | JobVerbs[Any]) -> str:
    return value.id if isinstance(value, JobVerbs) else value


def _same(value: Any) -> Any:
    """The other side checks it, in the same words over a socket and in this process."""
    return value


# Python name -> wire field and how its value gets there.
_FIELDS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "priority": ("priority", _same),
    "delay": ("delay", _span("delay")),
    "attempts": ("max_attempts", _same),
    "backoff": ("backoff", _backoff),
    "timeout": ("timeout", _span("timeout")),
    "ttl": ("ttl", _span("ttl")),
    "job_id": ("custom_id", str),
    "once": ("id_ttl", _once),
    "group": ("group_id", str),
    "tags": ("tags", _texts),
    "lifo": ("lifo", _same),
    "durable": ("durable", _same),
    "depends_on": ("depends_on", _ids),
    "parent": ("parent_id", _id),
    "remove_on_complete": ("remove_on_complete", _same),
    "remove_on_fail": ("remove_on_fail", _same),
    "keep_logs": ("keep_logs", _same),
    "stall_timeout": ("stall_timeout", _span("stall_timeout")),
}


_SPANS: Final = frozenset(("delay", "backoff", "timeout", "ttl", "once", "stall_timeout"))


def given_options(push: Any) -> dict[str, Any]:
    """The other way round: what was said about a job that is pushed, by the names above. Spans are seconds."""
    defaults = dict(
        zip(push.__struct_fields__[-len(push.__struct_defaults__) :], push.__struct_defaults__, strict=True)
    )
    said = {name: getattr(push, field) for name, (field, _) in _FIELDS.items()}
    said = {name: value for name, value in said.items() if value != defaults[_FIELDS[name][0]]}
    if push.unique_key is not None:
        said["dedup"] = push.unique_key
    given = {name: _in_seconds(value) if name in _SPANS else value for name, value in said.items()}
    return given | {"once": given["once"] or True} if "once" in given else given


def _in_seconds(span: Any) -> Any:
    if isinstance(span, model.Backoff):
        return Backoff(span.type, span.delay / 1000, None if span.max_delay is None else span.max_delay / 1000)
    return span / 1000


def wire_options(options: Mapping[str, Any], now_ms: Callable[[], float]) -> dict[str, Any]:
    """The fields of a push. Options that are None count as not given; unknown ones are refused by name."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name == "at":
            fields["delay"] = max(0, moment_ms(value) - now_ms())
        elif name == "dedup":
            dedup = Dedup(value) if isinstance(value, str) else value
            if not isinstance(dedup, Dedup):
                raise InvalidCommand(f"dedup is a key or a Dedup, not {value!r}")
            fields["unique_key"], fields["dedup"] = dedup.key, dedup.wire()
        elif name in _FIELDS:
            field, convert = _FIELDS[name]
            fields[field] = convert(value)
        else:
            raise InvalidCommand(f"unknown job option {name!r}; there are: at, dedup, {', '.join(_FIELDS)}")
    return fields
