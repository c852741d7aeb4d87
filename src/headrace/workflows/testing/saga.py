"""A workflow that records what is called, and fails where it is told to."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headrace.workflows.context import StepContext
from headrace.workflows.definition import WorkflowDefinition, step, workflow
from headrace.workflows.provider import Workflows


def fresh(word: str) -> str:
    """A name that no store has seen."""
    return f"{word}-{secrets.token_hex(4)}"


def define(*groups: str | list[str], name: str = "", **options: Any) -> WorkflowDefinition[Any, Any]:
    """A text is a step, a list is a parallel group."""
    builder = workflow(name or fresh("saga"), **options)
    for group in groups:
        builder = builder.step(step(group)) if isinstance(group, str) else builder.parallel(*map(step, group))
    return builder.build()


class Saga:
    """Handlers for every step of a definition. `failing` says how often a step, rollback or hook fails first."""

    def __init__(
        self,
        definition: WorkflowDefinition[Any, Any],
        *,
        failing: Mapping[str, int] | None = None,
        without_rollback: tuple[str, ...] = (),
        results: Mapping[str, Any] | None = None,
        meanwhile: Mapping[str, Callable[[StepContext[Any]], Awaitable[Any]]] | None = None,
    ) -> None:
        self.definition = definition
        self.calls: list[str] = []
        self.seen: dict[str, dict[str, Any]] = {}
        self.contexts: dict[str, StepContext[Any]] = {}
        self.errors: list[Exception] = []
        self._failing = Counter(failing or {})
        self._without = without_rollback
        self._results = results or {}
        self._meanwhile = meanwhile or {}

    def join(self, flows: Workflows, **options: Any) -> None:
        steps = {}
        for name, one in self.definition.steps.items():
            if one.kind == "run":
                rollback = () if name in self._without else (self._handler(f"undo {name}"),)
                steps[name] = (self._handler(name), *rollback)
        flows.register_definition_consumer(
            self.definition, steps, on_complete=self._handler("complete"), on_error=self._on_error, **options
        )

    def _handler(self, call: str) -> Callable[[StepContext[Any]], Awaitable[Any]]:
        async def run(context: StepContext[Any]) -> Any:
            self.calls.append(call)
            self.seen[call] = dict(context.results)
            self.contexts[call] = context
            if call in self._meanwhile:
                await self._meanwhile[call](context)
            if self._failing[call] > 0:
                self._failing[call] -= 1
                raise ValueError(f"{call} failed")
            return dict(context.results) if call == "complete" else self._results.get(call, f"{call} done")

        return run

    async def _on_error(self, context: StepContext[Any], error: Exception) -> None:
        self.errors.append(error)
        await self._handler("error")(context)
