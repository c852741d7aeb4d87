"""Whether the jobs of an atomic flow fit together. Pure: looks only at the flow itself.

Edges must be declared on both sides: a parent lists its children and depends on them, a child names its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace.backends.base import FlowNode
from headrace.errors import InvalidCommand

MAX_FLOW_JOBS: Final = 10_000
_POLICIES: Final = (
    "fail_parent_on_failure",
    "remove_dependency_on_failure",
    "continue_parent_on_failure",
    "ignore_dependency_on_failure",
)


def check_flow(nodes: Sequence[FlowNode]) -> None:
    if len(nodes) > MAX_FLOW_JOBS:
        raise InvalidCommand(f"flow exceeds the {MAX_FLOW_JOBS} job limit")
    by_id: dict[str, FlowNode] = {}
    for node in nodes:
        if node.id in by_id:
            raise InvalidCommand(f"duplicate flow job id: {node.id}")
        by_id[node.id] = node
    for node in nodes:
        _check_options(node.spec)
        _check_edges(node, by_id)
    _check_acyclic(by_id)


def _check_options(spec: Any) -> None:
    if spec.repeat is not None:
        raise InvalidCommand("repeat is not supported inside an atomic flow")
    if spec.unique_key or spec.dedup is not None:
        raise InvalidCommand("deduplication is not supported inside an atomic flow")
    if sum(bool(getattr(spec, policy)) for policy in _POLICIES) > 1:
        raise InvalidCommand("flow failure policies are mutually exclusive")


def _check_edges(node: FlowNode, by_id: dict[str, FlowNode]) -> None:
    spec: Any = node.spec
    for dependency in spec.depends_on:
        if dependency not in by_id:
            raise InvalidCommand(f"flow dependency not found: {dependency}")
    for child_id in spec.children_ids:
        child: Any = by_id.get(child_id)
        if child is None:
            raise InvalidCommand(f"flow dependency not found: {child_id}")
        if child.spec.parent_id != node.id:
            raise InvalidCommand(f"flow child {child_id} does not point back to parent {node.id}")
    parent: Any = by_id.get(spec.parent_id) if spec.parent_id else None
    if spec.parent_id and (parent is None or node.id not in parent.spec.children_ids):
        raise InvalidCommand(f"flow child {node.id} does not point back to parent {spec.parent_id}")


def _check_acyclic(by_id: dict[str, FlowNode]) -> None:
    """Take away jobs that depend on nothing left, until none is left: what cannot be taken is a cycle."""
    open_edges: dict[str, int] = {}
    dependents: dict[str, list[str]] = {}
    for node in by_id.values():
        spec: Any = node.spec
        unique = set(spec.depends_on)
        open_edges[node.id] = len(unique)
        for dependency in unique:
            dependents.setdefault(dependency, []).append(node.id)
    free = [job_id for job_id, count in open_edges.items() if count == 0]
    taken = 0
    while free:
        taken += 1
        for dependent in dependents.get(free.pop(), ()):
            open_edges[dependent] -= 1
            if open_edges[dependent] == 0:
                free.append(dependent)
    if taken != len(by_id):
        raise InvalidCommand("flow contains a dependency cycle")
