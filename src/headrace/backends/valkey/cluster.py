"""A Valkey cluster: every call goes to the primary that has the slot of its key.

The slot map is read from any node that answers and read again when a node says that a slot has moved (MOVED, ASK),
cannot be reached, or refuses because the cluster is changing. Nodes may disagree, because one of them was cut off from
the others: who knows of a move is asked first, who refuses is asked last, and who was right is asked again. Connections
to nodes without slots are closed. A call is retried only if the node refused it, or could not be reached and another
one has its slots now: one whose reply was lost may have been carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from valkey.crc import key_slot

from headrace.backends.valkey.connection import Argument, Connection, ServerError, Unreachable
from headrace.backends.valkey.transport import Command, Syncing, look_at_outcome, refusal
from headrace.backends.valkey.url import Address, ValkeyUrl
from headrace.errors import StorageUnavailable

_TRIES: Final = 8
_PAUSE_S: Final = 0.1
_MOVED: Final = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN")


class Cluster:
    is_cluster = True

    def __init__(self, url: ValkeyUrl) -> None:
        self._url = url
        self._nodes: dict[Address, Connection] = {}
        self._syncing: dict[Address, Syncing] = {}
        self._slots: list[tuple[int, int, Address]] = []
        self._source: Address | None = None
        """Who told of them."""
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._read_slots()

    async def close(self) -> None:
        connections: list[Connection | Syncing] = [*self._nodes.values(), *self._syncing.values()]
        for connection in connections:
            await connection.close()

    def primaries(self) -> list[Connection]:
        return [self._node(address) for address in self.addresses()]

    def addresses(self) -> list[Address]:
        return list(dict.fromkeys(address for _, _, address in self._slots)) or list(self._url.hosts)

    def is_away(self, key: str) -> bool:
        return self._node(self._address_of(key)).is_away

    def reader(self, key: str) -> Connection:
        return Connection(self._url, *self._address_of(key))

    # -- calling -------------------------------------------------------------------------------------------------------

    async def call(self, key: str, *command: Argument) -> Any:
        return await self._routed(key, lambda address: self._node(address).call(*command))

    async def call_many(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        return list(await asyncio.gather(*(self.call(key, *command) for key, command in commands)))

    async def call_each(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        calls = (self.call(key, *command) for key, command in commands)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    async def fcall(self, function: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return await self.call(keys[0], "FCALL", function, len(keys), *keys, *args)

    async def fcall_synced(self, function: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        command = ("FCALL", function, len(keys), *keys, *args)
        return await self._routed(keys[0], lambda address: self._sync_node(address).call(*command))

    async def _routed(self, key: str, call: Any) -> Any:
        for attempt in range(_TRIES):
            address = self._address_of(key)
            try:
                return await call(address)
            except ServerError as error:
                if not str(error).startswith(_MOVED) or attempt == _TRIES - 1:
                    raise refusal(error) from error
                await asyncio.sleep(_PAUSE_S * attempt)
                is_informed = str(error).startswith(("MOVED", "ASK"))
                await self.refresh(**{"first" if is_informed else "last": address})
            except Unreachable:
                await self.refresh(last=address)
                if self._address_of(key) == address or attempt == _TRIES - 1:
                    raise  # nobody has taken its place yet
        raise AssertionError("the last try returns or raises")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _address_of(self, key: str) -> Address:
        slot = key_slot(key.encode())
        for first, last, address in self._slots:
            if first <= slot <= last:
                return address
        raise StorageUnavailable(f"no node of the cluster has slot {slot}")

    def _node(self, address: Address) -> Connection:
        if address not in self._nodes:
            self._nodes[address] = Connection(self._url, *address)
        return self._nodes[address]

    def _sync_node(self, address: Address) -> Syncing:
        if address not in self._syncing:
            self._syncing[address] = Syncing(Connection(self._url, *address))
        return self._syncing[address]

    async def refresh(self, *, first: Address | None = None, last: Address | None = None) -> None:
        """Read the map again, once for all who ask for it meanwhile. One node may be worth asking first, or last."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_slots(first, last))
            self._reading.add_done_callback(look_at_outcome)
        await asyncio.shield(self._reading)

    async def _read_slots(self, first: Address | None = None, last: Address | None = None) -> None:
        problem: Exception | None = None
        known = dict.fromkeys(filter(None, [first, self._source, *self.addresses(), *self._url.hosts]))
        for address in sorted(known, key=lambda address: address == last):
            try:
                ranges = await self._node(address).call("CLUSTER", "SLOTS")
            except (StorageUnavailable, ServerError) as error:
                problem = error
                continue
            if ranges:
                self._slots = [(int(r[0]), int(r[1]), _address(r[2], address)) for r in ranges]
                self._source = address
                await self._let_go_departed()
                return
        if problem is None:
            raise StorageUnavailable("the cluster is not formed yet: no node has slots")
        raise StorageUnavailable(f"no node of the cluster answers: {problem}") from problem

    async def _let_go_departed(self) -> None:
        """Close connections to nodes without slots, but for the source of the map; those that still have to answer
        somebody are left for next time."""
        wanted = {*self.addresses(), self._source}
        for connections in (self._nodes, self._syncing):
            for address in [one for one, node in connections.items() if one not in wanted and node.is_idle]:
                await connections.pop(address).close()


def _address(node: list[Any], asked: Address) -> Address:
    host = node[0].decode() if node[0] else asked[0]
    return (host or asked[0], int(node[1]))
