"""The functions that implement the steps of workflows in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from headrace.errors import InvalidCommand, StepNotFoundError
from headrace.worker.context import place_of
from headrace.workflows.definition import MARK, WorkflowDefinition, check_step_name

StepHandler = Callable[..., Any]
RollbackHandler = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RegisteredStep:
    """The functions that run a step and roll it back."""

    handler: StepHandler
    rollback: RollbackHandler | None = None


class StepRegistry(Mapping[str, Mapping[str, RegisteredStep]]):
    """Steps by workflow and name. Registering a step again replaces it."""

    def __init__(self) -> None:
        self._workflows: dict[str, dict[str, RegisteredStep]] = {}

    def register(self, workflow: str, step: str, handler: StepHandler, rollback: RollbackHandler | None = None) -> None:
        """Register the functions that run a step and roll it back."""
        self._workflows.setdefault(workflow, {})[check_step_name(step)] = RegisteredStep(handler, rollback)

    def get_step(self, workflow: str, step: str) -> RegisteredStep:
        """Both functions of a step; StepNotFoundError when there is none."""
        try:
            return self._workflows[workflow][step]
        except KeyError:
            raise StepNotFoundError(workflow, step) from None

    def get(self, workflow: str, step: Any = None) -> Any:
        """The handler of a step; without a step all steps of the workflow, as of any mapping."""
        return self._workflows.get(workflow) if step is None else self.get_step(workflow, step).handler

    def get_rollback(self, workflow: str, step: str) -> RollbackHandler | None:
        """The rollback of the step, if it has one."""
        return self._workflows[workflow][step].rollback if self.has(workflow, step) else None

    def has(self, workflow: str, step: str) -> bool:
        """Whether the step is registered."""
        return step in self._workflows.get(workflow, {})

    def get_workflow_steps(self, workflow: str) -> list[str]:
        """The names of the registered steps."""
        return list(self._workflows.get(workflow, {}))

    def clear(self) -> None:
        """Forget all steps."""
        self._workflows.clear()

    def __getitem__(self, workflow: str) -> Mapping[str, RegisteredStep]:
        return self._workflows[workflow]

    def __iter__(self) -> Iterator[str]:
        return iter(self._workflows)

    def __len__(self) -> int:
        return len(self._workflows)


@dataclass(frozen=True, slots=True)
class Implementation:
    """The code of one version of a workflow."""

    definition: WorkflowDefinition[Any, Any]
    steps: Mapping[str, RegisteredStep]
    on_complete: Callable[..., Any] | None = None
    on_error: Callable[..., Any] | None = None

    @classmethod
    def of(cls, definition: WorkflowDefinition[Any, Any], home: Any) -> Implementation:
        """Read an object whose methods are marked with `@step.execute` and `@step.rollback`; a class is made first."""
        if inspect.isclass(home):
            home = _made(definition, home)
        found: dict[str, dict[str, Callable[..., Any]]] = {}
        for attribute in dir(type(home)):
            for name, role in getattr(getattr(type(home), attribute), MARK, ()):
                code = getattr(home, attribute)
                if found.setdefault(name, {}).setdefault(role, code) != code:
                    raise InvalidCommand(
                        f"workflow {definition.name!r} has two methods for the {role} of step {name!r}: "
                        f"{found[name][role].__name__} and {attribute}"
                    )
        return cls.checked(definition, found, getattr(home, "on_complete", None), getattr(home, "on_error", None))

    @classmethod
    def checked(
        cls,
        definition: WorkflowDefinition[Any, Any],
        found: Mapping[str, Mapping[str, Any]],
        on_complete: Callable[..., Any] | None,
        on_error: Callable[..., Any] | None,
    ) -> Implementation:
        wanted = [name for name, step in definition.steps.items() if step.kind == "run"]
        missing = [name for name in wanted if "execute" not in found.get(name, {})]
        if missing:
            raise InvalidCommand(f"workflow {definition.name!r} has no code for: {', '.join(missing)}")
        strange = [name for name in found if name not in wanted]
        if strange:
            raise InvalidCommand(f"workflow {definition.name!r} has no step: {', '.join(strange)}")
        for name, roles in found.items():
            wrong = [
                code for role, code in roles.items() if not callable(code) and (code is not None or role == "execute")
            ]
            if wrong:
                raise InvalidCommand(f"the code of step {name!r} of workflow {definition.name!r} is none: {wrong[0]!r}")
        for code in (*(code for roles in found.values() for code in roles.values()), on_complete, on_error):
            if code is not None:
                place_of(code, None)  # a rollback that is a generator would be taken for done without having run
        steps = {name: RegisteredStep(found[name]["execute"], found[name].get("rollback")) for name in wanted}
        return cls(definition, steps, on_complete, on_error)


def _made(definition: WorkflowDefinition[Any, Any], home: type[Any]) -> Any:
    try:
        return cast("Callable[[], Any]", home)()
    except TypeError as error:
        raise InvalidCommand(
            f"{home.__name__} cannot be made without arguments ({error}): "
            f"give an object instead, flows.implement({definition.name!r} definition)({home.__name__}(...))"
        ) from error
