"""Workflows on Valkey: a record, an append-only log and the jobs that belong to it, changed by one function call.

A flow is stored with the queue that decides about it. The registry says which queue that is, one key per flow under
a hash of its id; the entry names the flow, so that hash collisions are detected. Without an entry (somebody
deleted it) every queue that has flows is searched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from headrace.backends.base import Ack, FlowPush, NewStep
from headrace.backends.local.flows import KEPT_FLOWS, KEPT_FLOWS_MS, RETIRE_EVERY_MS, RETIRED_AT_ONCE
from headrace.backends.valkey.arguments import Completion, FlowAdvancing, FlowEntry, FlowStarting, Text, flat, pack
from headrace.backends.valkey.differences import refuse
from headrace.backends.valkey.hashes import to_fields
from headrace.backends.valkey.intake import custom_ids
from headrace.backends.valkey.keys import mark
from headrace.backends.valkey.records import Records
from headrace.backends.valkey.transport import all_of
from headrace.errors import NotFound
from headrace.model import NIL, Flow, FlowStatus, FlowStep

_MAX_HOMES: Final = 100_000
_FIELDS: Final = ("workflow", "status", "revision", "created", "updated", "ended")


class Registered(Struct):
    """What the registry says of a flow, as JSON."""

    flow: str
    workflow: str
    queue: str


class Entry(Struct, array_like=True):
    """One entry of a log as it is kept; its number is its place."""

    at: int
    kind: str
    step: str = ""
    attempt: int = 0
    body: Raw = Raw(NIL)


_decode_registered: Final = msgspec.json.Decoder(Registered).decode
_decode_entry: Final = msgspec.msgpack.Decoder(Entry).decode


class Flows(Records):
    _next_retirement = 0

    # -- changing ------------------------------------------------------------------------------------------------------

    async def start_flow(
        self, flow_id: str, workflow: str, queue: str, steps: Sequence[NewStep], jobs: Sequence[FlowPush]
    ) -> tuple[Flow, bool]:
        queues = await self._queues_of(queue, jobs)
        noted = msgspec.json.encode(Registered(flow_id, workflow, queue))
        known = await self._known_in_cluster(flow_id, noted) if self._server.is_cluster else None
        if known is not None:
            return known, False
        registry = "" if self._server.is_cluster else self._keys.flow_registry(flow_id)
        await self._register_flow_queue(queue)
        self._note_home(flow_id, queue)
        now = self._clock.now_ms()
        args = flat(FlowStarting(flow_id, workflow, mark(queue), registry, noted, len(steps))) + _entries(steps, now)
        options = await self._options_of(queues, jobs)
        async with self._jobs_of(queues, jobs, now) as records:
            record, home = await self._call("startFlow", queue, *args, *records, **options, now=now)
        self._note_home(flow_id, home.decode() or queue)
        return _flow_of(flow_id, self._flow_homes[flow_id], record), not home

    async def advance_flow(
        self,
        flow_id: str,
        revision: int,
        status: FlowStatus | None,
        steps: Sequence[NewStep],
        jobs: Sequence[FlowPush],
        ack: Ack | None,
        drop: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> Flow:
        queue = await self._flow_home(flow_id)
        if queue is None:
            raise NotFound(f"Flow not found: {flow_id}")
        now = self._clock.now_ms()
        queues = await self._queues_of(queue, jobs)
        acks = [] if ack is None else await self._ack_of(queues, ack)
        word = None if status is None else status.value
        args = flat(FlowAdvancing(flow_id, revision, word, int(ack is not None), len(steps), len(drop), len(stop)))
        args += [*acks, *_entries(steps, now), *drop, *stop]
        options = await self._options_of(queues, jobs)
        async with self._jobs_of(queues, jobs, now) as records:
            (record,) = await self._call("advanceFlow", queue, *args, *records, **options, now=now)
        if ack is not None:
            self._let_go(ack.id)
        return _flow_of(flow_id, queue, record)

    async def _options_of(self, queues: Sequence[str], jobs: Sequence[FlowPush]) -> dict[str, Any]:
        """How the call is made: with which other queues, and whether it waits for the disk."""
        self._check_slots(queues)
        return {"others": queues[1:], "is_synced": await self._promises([push.spec for push in jobs])}

    async def _queues_of(self, queue: str, jobs: Sequence[FlowPush]) -> list[str]:
        """The queue of the flow, then those of its jobs."""
        queues = list(dict.fromkeys([queue, *(push.queue for push in jobs)]))
        self._check_slots(queues)
        for name in queues:
            await self._register(name)
        return queues

    def _check_slots(self, queues: Sequence[str]) -> None:
        if len(queues) > 1 and self._server.is_cluster:
            refuse("workflows across queues in a cluster")

    async def _ack_of(self, queues: list[str], ack: Ack) -> list[Text]:
        """The job that made the step; one that cannot be found is looked for in the flow's queue, and refused there."""
        place = await self._held_place(ack.id)
        home, own_id = (queues[0], ack.id) if place is None else place
        if home not in queues:
            queues.append(home)
        value, raw = (b"", b"") if ack.result is None else to_fields(ack.result, "Result")
        return flat(Completion(queues.index(home) + 1, own_id, ack.token or None, value, raw, ack.remove))

    @asynccontextmanager
    async def _jobs_of(self, queues: Sequence[str], jobs: Sequence[FlowPush], now: int) -> AsyncIterator[list[Text]]:
        """The records of these jobs, for the call that stores them. In a cluster all of them are in the first queue."""
        args: list[Text] = []
        async with self._chosen_ids(queues[0], custom_ids(push.spec for push in jobs)) as free:
            for push in jobs:
                record = await self._new_job(push.queue, push.spec, now, free, [])
                record.queue = queues.index(push.queue) + 1
                args += flat(record)
            yield args

    # -- where flows are -----------------------------------------------------------------------------------------------

    async def _known_in_cluster(self, flow_id: str, noted: bytes) -> Flow | None:
        """The flow that has this id. The function cannot reach the registry there, so a new one is noted here."""
        known = await self.flow(flow_id)
        if known is None:
            key = self._keys.flow_registry(flow_id)
            await self._server.call(key, "SET", key, noted)
        return known

    async def _register_flow_queue(self, queue: str) -> None:
        if queue not in self._flow_queues:
            await self._server.call(self._keys.flow_queues, "SADD", self._keys.flow_queues, queue)
            self._flow_queues.add(queue)

    def _note_home(self, flow_id: str, queue: str) -> None:
        if len(self._flow_homes) >= _MAX_HOMES:
            self._flow_homes.clear()
        self._flow_homes[flow_id] = queue

    async def _flow_home(self, flow_id: str) -> str | None:
        known = self._flow_homes.get(flow_id) or await self._registered_home(flow_id)
        if known is None:
            found = await self._search_flow(flow_id)
            known = None if found is None else found.queue
        return known

    async def _registered_home(self, flow_id: str) -> str | None:
        key = self._keys.flow_registry(flow_id)
        text = await self._server.call(key, "GET", key)
        entry = None if text is None else _decode_registered(text)
        if entry is None or entry.flow != flow_id:
            return None
        self._note_home(flow_id, entry.queue)
        return entry.queue

    async def _search_flow(self, flow_id: str) -> Flow | None:
        """Look into every queue that has flows."""
        for queue in await self._all_flow_queues():
            flow = await self._read_flow(queue, flow_id)
            if flow is not None:
                self._note_home(flow_id, queue)
                return flow
        return None

    async def _all_flow_queues(self) -> list[str]:
        found = await self._server.call(self._keys.flow_queues, "SMEMBERS", self._keys.flow_queues)
        self._flow_queues = {name.decode() for name in found}
        return sorted(self._flow_queues)

    # -- looking -------------------------------------------------------------------------------------------------------

    async def flow(self, flow_id: str) -> Flow | None:
        queue = self._flow_homes.get(flow_id) or await self._registered_home(flow_id)
        flow = None if queue is None else await self._read_flow(queue, flow_id)
        return flow or await self._search_flow(flow_id)

    async def _read_flow(self, queue: str, flow_id: str) -> Flow | None:
        key = self._keys.flow(queue, flow_id)
        record = await self._server.call(key, "HMGET", key, *_FIELDS)
        return None if record[0] is None else _flow_of(flow_id, queue, record)

    async def flow_steps(self, flow_id: str, after: int) -> list[FlowStep]:
        queue = await self._flow_home(flow_id)
        if queue is None:
            return []
        key = self._keys.flow_log(queue, flow_id)
        entries = map(_decode_entry, await self._server.call(key, "LRANGE", key, after, -1))
        return [
            FlowStep(seq, float(entry.at), entry.kind, entry.step, entry.attempt, entry.body)
            for seq, entry in enumerate(entries, after + 1)
        ]

    async def flows(
        self, workflow: str | None, status: FlowStatus | None, limit: int, before: str | None
    ) -> list[Flow]:
        found: list[Flow] = []
        for queue in await self._all_flow_queues():
            found += await self._flows_in(queue, workflow, status, limit, before)
        return sorted(found, key=lambda flow: flow.id, reverse=True)[:limit]

    async def _flows_in(
        self, queue: str, workflow: str | None, status: FlowStatus | None, limit: int, before: str | None
    ) -> list[Flow]:
        found: list[Flow] = []
        cursor = before or ""
        while True:
            asked = (workflow or "", "" if status is None else status.value, str(limit - len(found)), cursor)
            records, rest = await self._call("flows", queue, *asked)
            found += [_flow_of(record[-1].decode(), queue, record) for record in records]
            if not rest or len(found) >= limit:
                return found
            cursor = rest.decode()

    async def announce_watched(self, queue: str, timeout_ms: float) -> None:
        """Tell other brokers that somebody waits for a flow of this queue."""
        await self._announce(queue, "hrWatched", timeout_ms)

    async def retire_flows(self) -> None:
        mono = self._clock.monotonic_ms()
        if mono < self._next_retirement:
            return
        self._next_retirement = mono + RETIRE_EVERY_MS
        await all_of(*map(self._retire_flows_of, await self._all_flow_queues()))

    async def _retire_flows_of(self, queue: str) -> None:
        asked = (str(KEPT_FLOWS), str(KEPT_FLOWS_MS), str(RETIRED_AT_ONCE))
        (gone,) = await self._call("retireFlows", queue, *asked)
        keys = [self._keys.flow_registry(flow_id.decode()) for flow_id in gone]
        await self._server.call_many([(key, ("UNLINK", key)) for key in keys])


def _entries(steps: Sequence[NewStep], now: int) -> list[Text]:
    args: list[Text] = []
    for step in steps:
        packed = pack(Entry(now, step.kind, step.step, step.attempt, step.body))
        args += flat(FlowEntry(step.kind, step.step, packed))
    return args


def _flow_of(flow_id: str, queue: str, record: Sequence[bytes]) -> Flow:
    workflow, status, revision, created, updated, ended = record[: len(_FIELDS)]
    return Flow(
        flow_id,
        workflow.decode(),
        queue,
        FlowStatus(status.decode()),
        int(revision),
        float(created),
        float(updated),
        float(ended) if ended else None,
    )
