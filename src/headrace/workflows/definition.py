"""What a workflow is: its steps, their order and their types. Definitions hold no code and can be imported anywhere.

    charge = step("charge", Charge, retry=Retry(5), timeout=20)
    order = workflow("order", data=Order, result=Receipt).step(check).parallel(charge, reserve).step(ship).build()

A group starts when the one before it is complete; the steps of a group run in parallel. Besides steps there are
groups that only wait: `sleep` for a time, `wait` for a signal from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, TypeVar, overload

from headrace.durations import Duration, milliseconds
from headrace.errors import InvalidCommand
from headrace.propagation import Retry

D = TypeVar("D")
R = TypeVar("R")
T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])

_STEP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_WORKFLOW_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
MARK: Final = "__headrace_steps__"
"""The attribute of a function that says which steps it belongs to, and as what."""


def check_step_name(name: str) -> str:
    if not isinstance(name, str) or not _STEP_NAME.fullmatch(name):
        raise InvalidCommand(
            f"{name!r} is no name of a step: 1 to 128 letters, digits, '_' and '-', beginning with a letter or digit"
        )
    return name


@dataclass(frozen=True)
class Step(Generic[T]):
    """One step. `result` is the type of what it returns; as a decorator it marks the functions that implement it."""

    name: str
    result: type[T] | Any = Any
    retry: Retry | None = None
    timeout: Duration | None = None
    """How long one attempt may take."""
    rollback_retry: Retry | None = None
    kind: Literal["run", "sleep", "wait"] = "run"
    span: Duration | None = None
    """How long it sleeps, or waits at most for its signal."""

    def __post_init__(self) -> None:
        check_step_name(self.name)
        for what in ("timeout", "span"):
            value = getattr(self, what)
            if value is not None and milliseconds(value, f"{what} of step {self.name!r}") <= 0:
                raise InvalidCommand(f"{what} of step {self.name!r} must be more than 0")

    def execute(self, function: Handler) -> Handler:
        """Mark the method that does the step: `@charge.execute`."""
        return _marked(function, self.name, "execute")

    def rollback(self, function: Handler) -> Handler:
        """Mark the method that undoes the step: `@charge.rollback`."""
        return _marked(function, self.name, "rollback")


def _marked(function: Handler, name: str, role: str) -> Handler:
    marks = getattr(function, MARK, ())
    setattr(function, MARK, (*marks, (name, role)))
    return function


@overload
def step(
    name: str,
    result: type[T],
    *,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    rollback_retry: Retry | None = None,
) -> Step[T]: ...
@overload
def step(
    name: str,
    result: Any = ...,
    *,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    rollback_retry: Retry | None = None,
) -> Step[Any]: ...
def step(
    name: str,
    result: Any = Any,
    *,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    rollback_retry: Retry | None = None,
) -> Step[Any]:
    """A step of a workflow; what is not given here is the provider's default."""
    Retry.check(retry)
    Retry.check(rollback_retry)
    return Step(name, result, retry, timeout, rollback_retry)


@dataclass(frozen=True)
class StepGroup:
    """Steps that run in parallel (`parallel`), or a single one."""

    type: Literal["sequential", "parallel"]
    steps: tuple[Step[Any], ...]


@dataclass(frozen=True)
class WorkflowDefinition(Generic[D, R]):
    """A workflow as built: nothing about it changes any more."""

    name: str
    data: type[D] | Any
    result: type[R] | Any
    version: int
    step_groups: tuple[StepGroup, ...]
    steps: Mapping[str, Step[Any]] = field(init=False, repr=False, compare=False)
    """All steps by name, in their order."""

    def __post_init__(self) -> None:
        named = {one.name: one for group in self.step_groups for one in group.steps}
        object.__setattr__(self, "steps", MappingProxyType(named))

    def __hash__(self) -> int:
        return hash((self.name, self.version))


class WorkflowBuilder(Generic[D, R]):
    """Groups in their order. Every method gives a new builder, so one may serve as the beginning of several."""

    def __init__(self, name: str, data: Any, result: Any, version: int, groups: tuple[StepGroup, ...] = ()) -> None:
        self._name, self._data, self._result, self._version = name, data, result, version
        self._groups = groups

    def step(self, *steps: Step[Any]) -> WorkflowBuilder[D, R]:
        """Steps that run one after the other."""
        return self._with(*(StepGroup("sequential", (_checked(one),)) for one in steps))

    def parallel(self, *steps: Step[Any]) -> WorkflowBuilder[D, R]:
        """Steps that run in parallel, on any available workers."""
        if len(steps) < 2:
            raise InvalidCommand(f"a parallel group of {self._name!r} needs at least 2 steps")
        return self._with(StepGroup("parallel", tuple(_checked(one) for one in steps)))

    def sleep(self, name: str, span: Duration) -> WorkflowBuilder[D, R]:
        """Continue after a time; occupies no worker meanwhile."""
        return self._with(StepGroup("sequential", (Step(name, None, kind="sleep", span=span),)))

    def wait(self, name: str, result: Any = Any, *, timeout: Duration | None = None) -> WorkflowBuilder[D, R]:
        """Continue when the signal `name` comes; its payload is the result. On a timeout the flow fails."""
        return self._with(StepGroup("sequential", (Step(name, result, kind="wait", span=timeout),)))

    def build(self) -> WorkflowDefinition[D, R]:
        names = [one.name for group in self._groups for one in group.steps]
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise InvalidCommand(f"workflow {self._name!r} has two steps named {twice!r}")
        return WorkflowDefinition(self._name, self._data, self._result, self._version, self._groups)

    def _with(self, *groups: StepGroup) -> WorkflowBuilder[D, R]:
        return WorkflowBuilder(self._name, self._data, self._result, self._version, (*self._groups, *groups))


def _checked(given: object) -> Step[Any]:
    if not isinstance(given, Step):
        raise InvalidCommand(f"a workflow is made of steps, not of {given!r}: use step(name)")
    return given


@overload
def workflow(name: str, *, data: type[D], result: type[R], version: int = 1) -> WorkflowBuilder[D, R]: ...
@overload
def workflow(name: str, *, data: type[D], result: Any = ..., version: int = 1) -> WorkflowBuilder[D, Any]: ...
@overload
def workflow(name: str, *, data: Any = ..., result: type[R], version: int = 1) -> WorkflowBuilder[Any, R]: ...
@overload
def workflow(name: str, *, data: Any = ..., result: Any = ..., version: int = 1) -> WorkflowBuilder[Any, Any]: ...
def workflow(name: str, *, data: Any = Any, result: Any = Any, version: int = 1) -> WorkflowBuilder[Any, Any]:
    """Begin the definition of a workflow; `.build()` ends it."""
    if not isinstance(name, str) or not _WORKFLOW_NAME.fullmatch(name):
        raise InvalidCommand(
            f"{name!r} is no name of a workflow: 1 to 128 letters, digits, '_', '-' and '.', no such sign in front"
        )
    if version < 1:
        raise InvalidCommand(f"the version of workflow {name!r} must be 1 or more, not {version}")
    return WorkflowBuilder(name, data, result, version)
