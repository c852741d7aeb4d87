"""Deduplication keys: who holds one, and how to free it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.commands._base import Command, Flag, Removal, Removed, Reply, command
from headrace.model import JobId, QueueName, UniqueKey

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


class KeyOwner(Struct, rename="camel"):
    job_id: str | None


class KeyOwnerFound(Reply):
    data: KeyOwner


class KeysRemoved(Struct):
    count: int


class KeysRemovedReply(Reply):
    data: KeysRemoved


@command(KeyOwnerFound, category="Dedup")
class GetDeduplicationJobId(Command[KeyOwnerFound], tag="GetDeduplicationJobId"):
    """The job that holds a `uniqueKey` of a queue, or null."""

    queue: QueueName
    deduplication_id: UniqueKey

    async def run(self, engine: Engine, peer: Peer) -> KeyOwnerFound:
        owner = await engine.backend.unique_key_owner(self.queue, self.deduplication_id)
        return KeyOwnerFound(data=KeyOwner(owner))


@command(KeysRemovedReply, category="Dedup", flags=Flag.WRITE)
class RemoveDeduplicationKey(Command[KeysRemovedReply], tag="RemoveDeduplicationKey"):
    """Free a `uniqueKey` of a queue, so that the next push with it creates a new job; 1 if it was held."""

    queue: QueueName
    deduplication_id: UniqueKey

    async def run(self, engine: Engine, peer: Peer) -> KeysRemovedReply:
        count = await engine.backend.remove_unique_key(self.queue, self.deduplication_id)
        return KeysRemovedReply(data=KeysRemoved(count))


@command(Removed, category="Dedup", flags=Flag.WRITE)
class RemoveJobDeduplicationKey(Command[Removed], tag="RemoveJobDeduplicationKey"):
    """Free the `uniqueKey` that a job holds; returns whether it held one."""

    id: JobId

    async def run(self, engine: Engine, peer: Peer) -> Removed:
        return Removed(data=Removal(await engine.backend.remove_job_unique_key(self.id)))
