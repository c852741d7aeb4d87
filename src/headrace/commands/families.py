"""Parents and children: whole families pushed at once, links made later, and the results of the children.

A family is checked as a graph before anything is stored (`check_family`). The links are those of the fields
`parentId`, `childrenIds` and `dependsOn`; copies that clients keep inside `data` are ignored, because data is
never decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Raw, Struct, msgpack

from headrace.backends.base import FamilyNode
from headrace.backends.listing import REPLY_ROOM
from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.commands.jobs import TOKEN_ERRORS, PushEntry, checked_data
from headrace.errors import InvalidCommand, Refused
from headrace.model import JobId, Many, QueueName, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

MAX_FAMILY_JOBS = 10_000
_SHOWN_BYTES = 1024
"""By how much the map of a job in the reply may be longer than the job in the command, generously."""
_TOO_LARGE = "flow too large: its reply would exceed 64 MB"
_encode: Final = msgpack.Encoder().encode


class FamilyEntry(Struct):
    """One job of a family, with the id that its client chose."""

    id: JobId
    queue: QueueName
    input: PushEntry


class FamilyJobs(Struct):
    jobs: list[Raw]


class PushedFamily(Reply):
    data: FamilyJobs


# -- checking a family ---------------------------------------------------------------------------------------


def check_family(entries: list[FamilyEntry]) -> None:
    """Refuse a family that is not a clean graph: every edge known on both sides, no cycle."""
    if len(entries) > MAX_FAMILY_JOBS:
        raise InvalidCommand(f"flow exceeds the {MAX_FAMILY_JOBS} job limit")
    if len(_encode(entries)) + _SHOWN_BYTES * len(entries) > REPLY_ROOM:
        raise InvalidCommand(_TOO_LARGE)
    family: dict[str, PushEntry] = {}
    for entry in entries:
        _check_member_id(entry, family)
        _check_member_options(entry.input)
        family[entry.id] = entry.input
    for job_id, options in family.items():
        _check_dependencies(job_id, options, family)
        _check_children(job_id, options, family)
    _check_parents(family)
    _check_acyclic(family)


def _check_member_id(entry: FamilyEntry, family: dict[str, PushEntry]) -> None:
    if ":" in entry.id:
        raise InvalidCommand("flow job id cannot contain a colon")
    if entry.id in family:
        raise InvalidCommand(f"duplicate flow job id: {entry.id}")
    if entry.input.custom_id is not None and entry.input.custom_id != entry.id:
        raise InvalidCommand(f"custom id does not match planned id: {entry.id}")


def _check_member_options(options: PushEntry) -> None:
    options.data = checked_data(options.data)
    if options.repeat is not None:
        raise InvalidCommand("repeat is not supported inside an atomic flow")
    if options.unique_key is not None or options.dedup is not None:
        raise InvalidCommand("deduplication is not supported inside an atomic flow")
    if options.debounce_id is not None or options.debounce_ttl is not None:
        raise InvalidCommand("debounce is not supported inside an atomic flow")
    policies = (
        options.fail_parent_on_failure
        + options.remove_dependency_on_failure
        + options.continue_parent_on_failure
        + options.ignore_dependency_on_failure
    )
    if policies > 1:
        raise InvalidCommand("flow failure policies are mutually exclusive")
    if policies and options.parent_id is None:
        raise InvalidCommand("a flow failure policy requires a parent")


def _check_dependencies(job_id: str, options: PushEntry, family: dict[str, PushEntry]) -> None:
    if len(set(options.depends_on)) != len(options.depends_on):
        raise InvalidCommand(f"duplicate dependency in flow job: {job_id}")
    for dependency in options.depends_on:
        if dependency not in family:
            raise InvalidCommand(f"flow dependency not found: {dependency}")
        if dependency == job_id:
            raise InvalidCommand(f"flow job cannot depend on itself: {job_id}")


def _check_children(job_id: str, options: PushEntry, family: dict[str, PushEntry]) -> None:
    if len(set(options.children_ids)) != len(options.children_ids):
        raise InvalidCommand(f"duplicate child in flow job: {job_id}")
    depends_on = set(options.depends_on)
    for child in options.children_ids:
        if child not in depends_on:
            raise InvalidCommand(f"flow child is missing from dependencies: {child}")
        if family[child].parent_id != job_id:
            raise InvalidCommand(f"flow child {child} does not point back to parent {job_id}")


def _check_parents(family: dict[str, PushEntry]) -> None:
    """Every child is among the children of its parent; `_check_children` has seen to the other direction."""
    owned = {child for options in family.values() for child in options.children_ids}
    for job_id, options in family.items():
        if options.parent_id is None:
            continue
        if options.parent_id not in family:
            raise InvalidCommand(f"flow parent not found: {options.parent_id}")
        if job_id not in owned:
            raise InvalidCommand(f"flow parent {options.parent_id} does not own child {job_id}")


def _check_acyclic(family: dict[str, PushEntry]) -> None:
    unmet = {job_id: len(options.depends_on) for job_id, options in family.items()}
    dependents: dict[str, list[str]] = {}
    for job_id, options in family.items():
        for dependency in options.depends_on:
            dependents.setdefault(dependency, []).append(job_id)
    ready = [job_id for job_id, count in unmet.items() if count == 0]
    settled = 0
    while ready:
        settled += 1
        for dependent in dependents.get(ready.pop(), ()):
            unmet[dependent] -= 1
            if unmet[dependent] == 0:
                ready.append(dependent)
    if settled != len(family):
        raise InvalidCommand("flow contains a dependency cycle")


@command(
    PushedFamily,
    category="Families",
    flags=Flag.WRITE | Flag.BULK,
    errors=(
        f"flow exceeds the {MAX_FAMILY_JOBS} job limit",
        _TOO_LARGE,
        "duplicate flow job id: <id>",
        "flow dependency not found: <id>",
        "flow contains a dependency cycle",
        "flow child <id> does not point back to parent <id>",
        "flow failure policies are mutually exclusive",
        "repeat is not supported inside an atomic flow",
        "deduplication is not supported inside an atomic flow",
    ),
)
class PushFamily(Command[PushedFamily], tag="PUSHF"):
    """Add a whole family of jobs, over any number of queues, all or none."""

    jobs: Many[FamilyEntry]

    async def run(self, engine: Engine, peer: Peer) -> PushedFamily:
        check_family(self.jobs)
        nodes = [FamilyNode(entry.id, entry.queue, entry.input) for entry in self.jobs]
        return PushedFamily(data=FamilyJobs(await engine.backend.insert_family(nodes)))


# -- links and outcomes --------------------------------------------------------------------------------------


@command(
    Ok,
    category="Families",
    flags=Flag.WRITE,
    errors=(
        "Child job not found: <id>",
        "Parent job not found: <id>",
        "Parent job <id> is not linkable",
        "A flow job cannot be its own parent",
        "Child job <id> already belongs to parent <id>",
    ),
)
class UpdateParent(Command[Ok], tag="UpdateParent"):
    """Make one job the child of another, also when it was pushed with the parent still `pending`."""

    child_id: JobId
    parent_id: JobId

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.update_parent(self.child_id, self.parent_id)
        return Ok()


class Moved(Struct):
    moved: bool = True


class MovedToChildren(Reply):
    data: Moved


@command(
    MovedToChildren,
    category="Families",
    flags=Flag.WRITE,
    errors=("Job is not active", *TOKEN_ERRORS),
)
class MoveToWaitingChildren(Command[MovedToChildren], tag="MoveToWaitingChildren"):
    """Move an active parent back to waiting for its children."""

    id: JobId
    token: Token | None = None

    async def run(self, engine: Engine, peer: Peer) -> MovedToChildren:
        if not await engine.backend.move_to_waiting_children(self.id, self.token or None):
            raise Refused("Job is not active")
        return MovedToChildren(data=Moved())


class ChildrenErrors(Reply):
    values: dict[str, str]


@command(ChildrenErrors, category="Families")
class GetFailedChildrenValues(Command[ChildrenErrors], tag="GetFailedChildrenValues"):
    """Errors of failed children in spite of which the parent continued, by `<queue>:<id>`."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> ChildrenErrors:
        return ChildrenErrors(values=await engine.backend.children_failures(self.id, ignored=False))


@command(ChildrenErrors, category="Families")
class GetIgnoredChildrenFailures(Command[ChildrenErrors], tag="GetIgnoredChildrenFailures"):
    """Errors of failed children whose failure was ignored, by `<queue>:<id>`."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> ChildrenErrors:
        return ChildrenErrors(values=await engine.backend.children_failures(self.id, ignored=True))


class DependencyRemoved(Reply):
    removed: bool


@command(
    DependencyRemoved,
    category="Families",
    flags=Flag.WRITE,
    errors=("Job not found: <id>", "Job <id> has no parent"),
)
class RemoveChildDependency(Command[DependencyRemoved], tag="RemoveChildDependency"):
    """Make the parent of this job no longer wait for it."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> DependencyRemoved:
        return DependencyRemoved(removed=await engine.backend.remove_child_dependency(self.id))


@command(Ok, category="Families", flags=Flag.WRITE)
class RemoveUnprocessedChildren(Command[Ok], tag="RemoveUnprocessedChildren"):
    """Remove the children of a job that have not started."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.remove_unprocessed_children(self.id)
        return Ok()
