"""What an event is: its name, the types of its data and of its answer. Definitions need no handlers to be imported.

The type chooses how values are read: msgspec structs, dataclasses, TypedDicts, pydantic models, or anything else that
msgspec converts. An event without a result type is fire-and-forget; one with a result type is a question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, overload

from msgspec import Raw

from headrace.client.payloads import decode_payload, encode_payload
from headrace.durations import Duration, seconds
from headrace.errors import InvalidCommand, UnknownEventError
from headrace.tasks.arguments import fitted

D = TypeVar("D")
R = TypeVar("R")

_NAME: Final = re.compile(r"[A-Za-z0-9_\-.]{1,200}")


@dataclass(frozen=True)
class EventDefinition(Generic[D, R]):
    """Made by `event`. `key` derives the idempotency key from the data; `ttl` is how long an event is worth keeping."""

    name: str
    data_type: Any = Any
    result_type: Any = None
    key: Callable[[D], str] | None = None
    ttl: Duration | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidCommand(f"event name {self.name!r}: use letters, digits, dots, dashes and underscores")
        if self.ttl is not None:
            seconds(self.ttl, "ttl")

    @property
    def expects_result(self) -> bool:
        return self.result_type is not None and self.result_type is not type(None)

    def encode_data(self, data: D) -> Raw:
        """The data as bytes, refused here when a handler would refuse it."""
        encoded = encode_payload(data, f"data of event {self.name}")
        self.read_data(decode_payload(encoded))
        return encoded

    def read_data(self, value: Any) -> D:
        return fitted(value, self.data_type, f"data of event {self.name}")  # type: ignore[no-any-return]

    def check_result(self, value: Any) -> Any:
        """What a handler returned, if it may. Fire-and-forget events have no answer: theirs is dropped."""
        if not self.expects_result:
            return None
        plain = decode_payload(encode_payload(value, f"result of event {self.name}"))
        self.read_result(plain)
        return plain

    def read_result(self, value: Any) -> R:
        wanted = self.result_type if self.expects_result else Any
        return fitted(value, wanted, f"result of event {self.name}")  # type: ignore[no-any-return]


@overload
def event(
    name: str, data: type[D], result: None = None, *, key: Callable[[D], str] | None = None, ttl: Duration | None = None
) -> EventDefinition[D, None]: ...
@overload
def event(
    name: str, data: type[D], result: type[R], *, key: Callable[[D], str] | None = None, ttl: Duration | None = None
) -> EventDefinition[D, R]: ...
@overload
def event(
    name: str, data: Any = ..., result: Any = None, *, key: Callable[[Any], str] | None = None, ttl: Any = None
) -> EventDefinition[Any, Any]: ...
def event(name: str, data: Any = Any, result: Any = None, *, key: Any = None, ttl: Any = None) -> Any:
    """Define an event: `order_placed = event("order.placed", OrderPlaced)`."""
    return EventDefinition(name, data, result, key, ttl)


AnyEvent = EventDefinition[Any, Any]


class EventCatalogue(Mapping[str, AnyEvent]):
    """The events of an application, fixed; in the order in which they were added."""

    def __init__(self, events: Mapping[str, AnyEvent]) -> None:
        self._events = MappingProxyType(dict(events))

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in the order in which they were added."""
        return tuple(self._events)

    def __getitem__(self, name: str) -> AnyEvent:
        try:
            return self._events[name]
        except KeyError:
            raise UnknownEventError(name, self._events) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def __contains__(self, name: object) -> bool:
        return name in self._events


class EventRegistry:
    """Collects events: `EventRegistry().event(order_placed).use(billing_events).build()`."""

    def __init__(self) -> None:
        self._events: dict[str, AnyEvent] = {}

    def event(self, definition: AnyEvent) -> EventRegistry:
        """Add an event; its name must be new."""
        if definition.name in self._events:
            raise InvalidCommand(f"event {definition.name!r} is in the registry already")
        self._events[definition.name] = definition
        return self

    def use(self, add: Callable[[EventRegistry], object]) -> EventRegistry:
        """Let a function add its events."""
        add(self)
        return self

    def build(self) -> EventCatalogue:
        """The events so far, fixed."""
        return EventCatalogue(self._events)
