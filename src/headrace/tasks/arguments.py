"""Calls as data: the arguments of a task as a payload, and the payload as arguments of the types it declares.

A payload is a map {args, kwargs}; either part is left out when it is empty, and what the app adds (a trace, say) is
stored beside them. Values are converted by annotation: dataclasses, msgspec structs, pydantic models, datetimes, enums
and containers of them. What does not fit is refused with the name of the parameter, before the function runs.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Raw

from headrace.client.payloads import decode_payload, encode_payload
from headrace.errors import InvalidCommand, PayloadError
from headrace.worker.context import JobContext

_PARTS: Final = ("args", "kwargs")
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ArgumentMismatch(InvalidCommand):
    """The data of a job, or its result, does not fit the signature of its task: no further attempt would help."""

    code = "argument_mismatch"


class Arguments:
    """The parameters of one function; the one annotated as JobContext is filled in by the worker."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__qualname__
        signature = inspect.signature(function)
        hints = _type_hints(function)
        self.context_name = next(
            (name for name, hint in hints.items() if hint is JobContext and name != "return"), None
        )
        parameters = [p for name, p in signature.parameters.items() if name != self.context_name]
        self._signature = signature.replace(parameters=parameters)
        self._types = {p.name: _held_by(p, hints.get(p.name, Any)) for p in parameters}
        for name, wanted in self._types.items():
            self._check_readable(name, wanted)
        self._returns = hints.get("return", Any)
        self._context_at = _place(signature, self.context_name)
        is_plain = all(p.kind in _POSITIONAL for p in parameters)
        required = sum(p.default is p.empty for p in parameters)
        self._counts = range(required, len(parameters) + 1) if is_plain else range(0)
        """How many arguments a call without keywords may have, where nothing else has to be looked at."""

    def _check_readable(self, name: str, wanted: Any) -> None:
        """Refuse a type that nothing can be converted to: every job would become a dead letter."""
        try:
            msgspec.msgpack.Decoder(wanted)
        except (NameError, AttributeError):
            pass  # it names types that are defined further down: that may be known when a job comes
        except TypeError as error:
            raise InvalidCommand(
                f"argument {name!r} of {self._name} cannot be read from data: {error}. Annotate it with one type, or "
                "not at all: then the task gets plain values"
            ) from None

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        if not kwargs and len(args) in self._counts:
            return inspect.BoundArguments(self._signature, dict(zip(self._types, args, strict=False)))
        return self._signature.bind(*args, **kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._bound(args, kwargs)
        except TypeError as error:
            raise InvalidCommand(f"{self._name}{self._signature}: {error}") from None

    def payload(self, args: tuple[Any, ...], kwargs: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """A call as data. One that the function would refuse is refused here, at the call."""
        self.bind(args, kwargs)
        call: dict[str, Any] = dict(more)
        if args:
            call["args"] = args
        if kwargs:
            call["kwargs"] = kwargs
        return call

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], more: Mapping[str, Any]) -> Raw:
        return encode_payload(self.payload(args, kwargs, more))

    def decode(self, data: Any) -> inspect.BoundArguments:
        """The arguments that a payload stands for."""
        call = data if isinstance(data, dict) else {}
        try:
            bound = self._bound(_list(call.get("args", ())), _map(call.get("kwargs", {})))
        except TypeError as error:
            told = f"the data of the job does not fit {self._name}{self._signature}: {error}"
            if data and call.keys().isdisjoint(_PARTS):  # whoever pushed it by hand cannot know
                told += '; arguments stand in {"args": [...], "kwargs": {...}}'
            raise ArgumentMismatch(told) from None
        for name, value in bound.arguments.items():
            bound.arguments[name] = self._convert(name, value)
        return bound

    def _convert(self, name: str, value: Any) -> Any:
        try:
            return converted(value, self._types[name])
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            raise ArgumentMismatch(f"argument {name!r} of {self._name}: {error}") from None

    def call(self, function: Callable[..., Any], bound: inspect.BoundArguments, context: JobContext) -> Any:
        """Call the function, with the context where it wants it."""
        if self.context_name is None:
            return function(*bound.args, **bound.kwargs)
        args = bound.args
        if self._context_at is not None and self._context_at <= len(args):
            return function(*args[: self._context_at], context, *args[self._context_at :], **bound.kwargs)
        return function(*args, **bound.kwargs, **{self.context_name: context})

    def result(self, encoded: Raw | bytes) -> Any:
        """The result of a job as the type that the function declares."""
        value = decode_payload(encoded)
        try:
            return converted(value, self._returns)
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            raise ArgumentMismatch(f"the result of {self._name} is not what it declares: {error}") from None


def _place(signature: inspect.Signature, name: str | None) -> int | None:
    """Where a parameter stands among the positional ones; None when it is given by keyword, or there is none."""
    positional = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
    return positional.index(name) if name in positional else None


def _held_by(parameter: inspect.Parameter, hint: Any) -> Any:
    """The type of what a parameter holds: all that is left over, in the case of *args and **kwargs."""
    if typing.get_origin(hint) is typing.Unpack:
        return typing.get_args(hint)[0]
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return list[hint]
    return dict[str, hint] if parameter.kind is inspect.Parameter.VAR_KEYWORD else hint


def _list(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"args has to be a list, not {value!r}")
    return value


def _map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"kwargs has to be a map, not {value!r}")
    return value


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidCommand(
            f"the annotations of {function.__qualname__} cannot be read: {error}. A task converts its arguments by "
            "them, so import their types at run time (not below TYPE_CHECKING, nor inside a function)"
        ) from None


def converted(value: Any, wanted: Any) -> Any:
    return value if wanted is Any else msgspec.convert(value, wanted, strict=False, dec_hook=_foreign)


def fitted(value: Any, wanted: Any, what: str) -> Any:
    """The same for what is read somewhere else than in a signature: PayloadError says where it does not fit."""
    try:
        return converted(value, wanted)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise PayloadError(what, *_fault(error)) from None


def _fault(error: Exception) -> tuple[str, str]:
    """Path and reason, out of the errors of msgspec and pydantic."""
    faults = getattr(error.__cause__ or error, "errors", None)
    if faults is not None:
        first = faults()[0]
        return ".".join(("$", *map(str, first["loc"]))), str(first["msg"])
    reason, is_told, path = str(error).rpartition(" - at `")
    return (path.removesuffix("`"), reason) if is_told else ("$", path)


def _foreign(wanted: Any, value: Any) -> Any:
    """What msgspec does not know: pydantic models read themselves, and any iterable may be a list."""
    kind = typing.get_origin(wanted) or wanted
    validate = getattr(kind, "model_validate", None)
    if validate is not None:
        return validate(value, **_names_count(validate))
    if kind is Iterable and typing.get_args(wanted):
        return converted(value, types.GenericAlias(list, typing.get_args(wanted)))
    if isinstance(value, kind):
        return value
    raise TypeError(
        f"a {kind.__name__} cannot be made from data; use a dataclass, a msgspec struct or a pydantic model"
    )


@cache
def _names_count(validate: Callable[..., Any]) -> dict[str, bool]:
    """Models are sent by the names of their fields, whatever aliases they have; before pydantic 2.11 only a setting of
    the model lets it read them so."""
    return {"by_name": True} if "by_name" in inspect.signature(validate).parameters else {}
