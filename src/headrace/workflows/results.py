"""Wrapping results as OriJS's job trees do, and unwrapping them.

A tree of jobs keeps the result of each step in a wrapper that also carries everything before it. Headrace keeps results
in the log of the flow and needs none of this to run; it is here to read and write trees of other implementations. Keys
that cause prototype pollution in JavaScript are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict, TypeGuard

WRAPPER_VERSION: Final = "1"
DANGEROUS_KEYS: Final = frozenset(("__proto__", "constructor", "prototype"))

StepResultWrapper = TypedDict(
    "StepResultWrapper",
    {"__version": str, "__stepName": str, "__stepResult": Any, "__priorResults": dict[str, Any]},
)
ParallelResultWrapper = TypedDict(
    "ParallelResultWrapper",
    {"__version": str, "__parallelResults": dict[str, Any], "__priorResults": dict[str, Any]},
)


def is_step_result_wrapper(value: object) -> TypeGuard[StepResultWrapper]:
    """Whether this is the result of a step in its wrapper."""
    return isinstance(value, Mapping) and "__stepName" in value and "__stepResult" in value


def is_parallel_result_wrapper(value: object) -> TypeGuard[ParallelResultWrapper]:
    """Whether these are the results of a parallel group in their wrapper."""
    return isinstance(value, Mapping) and "__parallelResults" in value


def wrap_step_result(name: str, result: Any, prior: Mapping[str, Any]) -> StepResultWrapper:
    return {"__version": WRAPPER_VERSION, "__stepName": name, "__stepResult": result, "__priorResults": dict(prior)}


def wrap_parallel_results(results: Mapping[str, Any], prior: Mapping[str, Any]) -> ParallelResultWrapper:
    return {"__version": WRAPPER_VERSION, "__parallelResults": dict(results), "__priorResults": dict(prior)}


def flatten_child_results(children: Mapping[str, Any]) -> dict[str, Any]:
    """Results by step out of the wrapped results of child jobs; what is no wrapper is passed over."""
    flat: dict[str, Any] = {}
    for value in children.values():
        if is_step_result_wrapper(value):
            flat.update(sanitized(value.get("__priorResults") or {}))
            name = value["__stepName"]
            flat[f"_sanitized_{name}" if name in DANGEROUS_KEYS else name] = sanitized(value["__stepResult"])
        elif is_parallel_result_wrapper(value):
            flat.update(sanitized(value.get("__priorResults") or {}))
            flat.update(sanitized(value["__parallelResults"]))
    return flat


def sanitized(value: Any) -> Any:
    """The same value without dangerous keys, at any depth."""
    if isinstance(value, Mapping):
        return {key: sanitized(item) for key, item in value.items() if key not in DANGEROUS_KEYS}
    if isinstance(value, list | tuple):
        return [sanitized(item) for item in value]
    return value
