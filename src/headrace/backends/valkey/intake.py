"""How jobs come in: insert, atomic flows, custom ids, unique keys, dependencies."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec
from msgspec import Raw

from headrace.backends.base import FamilyNode
from headrace.backends.local.intake import LINK_LATER
from headrace.backends.valkey.arguments import Extra, NewJob, Text, Tie, flat, pack
from headrace.backends.valkey.differences import refuse
from headrace.backends.valkey.hashes import MAX_PAYLOAD_BYTES, show, to_fields
from headrace.backends.valkey.keys import marked
from headrace.backends.valkey.library import function_of
from headrace.backends.valkey.store import Store, raise_refusal
from headrace.backends.valkey.transport import Transport
from headrace.clock import Clock
from headrace.errors import HeadraceError, StorageUnavailable
from headrace.ids import IdSource
from headrace.model import (
    DEFAULT_SETTINGS,
    Backoff,
    Dedup,
    JobLinks,
    JobSettings,
    JobSpec,
    is_plain,
    links_of,
    settings_of,
)

BULK: Final = 500
"""Jobs per call: one call should hold the server for few milliseconds."""


class Intake(Store):
    sync_requests = 0
    """A durable push returns when the disk has it: no reply has to wait any longer."""

    def __init__(self, transport: Transport, prefix: str, clock: Clock, rng: Callable[[], float]) -> None:
        super().__init__(transport, prefix, clock, rng)
        self._pushed_nearby: deque[tuple[str, str, JobSpec, int]] = deque()
        """Jobs that came by `push_nearby`, until the next tick tells of them."""

    async def insert_one(self, queue: str, spec: JobSpec) -> str:
        if queue in self._registered and self.is_plain_now(spec):
            return (await self._insert_plain(queue, [spec]))[0]
        return (await self.insert(queue, [spec]))[0]

    async def insert_plain(self, queue: str, specs: Sequence[JobSpec]) -> list[str]:
        if len(specs) > BULK:
            _check_sizes(specs)
        await self._register(queue)
        insert = self._insert_plain if all(map(_is_due_now, specs)) else self._insert_rich
        ids: list[str] = []
        for start in range(0, len(specs), BULK):
            ids += await insert(queue, specs[start : start + BULK])
        return ids

    async def _insert_plain(self, queue: str, specs: Sequence[JobSpec]) -> list[str]:
        now = self._clock.now_ms()
        args: list[Text] = []
        ids = [marked(job_id, queue) for job_id in self.ids.many(now, len(specs))]
        for job_id, spec in zip(ids, specs, strict=True):
            args += (job_id, spec.name or "", *to_fields(bytes(spec.data)))
        await self._call("insertPlain", queue, *args, now=now)
        for job_id, spec in zip(ids, specs, strict=True):
            self._tell_pushed(queue, job_id, spec, now)
        self._ready.add(queue)
        return ids

    # -- from other loops ----------------------------------------------------------------------------------------------

    @staticmethod
    def is_plain_now(spec: JobSpec) -> bool:
        return is_plain(spec) and _is_due_now(spec)

    def takes_nearby(self, queue: str) -> bool:
        """Whether plain jobs may come by `push_nearby`: the queue is known, and nobody here has to hear of them."""
        return queue in self._registered and not self._wants_bodies(queue)

    async def push_nearby(self, server: Transport, ids: IdSource, queue: str, spec: JobSpec) -> str:
        """Store a plain job over a connection of another loop, in whose thread this runs. Who waits here for jobs is
        woken as for those of other brokers; the event is told with the next tick."""
        now = self._clock.now_ms()
        job_id = marked(ids.at(now), queue)
        args = (str(now), job_id, spec.name or "", *to_fields(bytes(spec.data)))
        raise_refusal(await server.fcall(function_of("insertPlain"), [self._keys.meta(queue)], args))
        self._pushed_nearby.append((queue, job_id, spec, now))
        return job_id

    def _take_nearby(self) -> None:
        while self._pushed_nearby:
            self._tell_pushed(*self._pushed_nearby.popleft())

    # -- with settings and relatives -----------------------------------------------------------------------------------

    async def insert(self, queue: str, specs: Sequence[JobSpec]) -> list[str]:
        if all(map(is_plain, specs)):
            return await self.insert_plain(queue, specs) if specs else []
        await self._register(queue)
        if len(specs) <= BULK or any(map(_has_family, specs)):
            return await self._insert_rich(queue, specs)
        await self._check_batch(queue, specs)
        ids: list[str] = []
        for start in range(0, len(specs), BULK):
            ids += await self._insert_rich(queue, specs[start : start + BULK], "checked")
        return ids

    async def _check_batch(self, queue: str, specs: Sequence[JobSpec]) -> None:
        """Whatever may refuse one of very many jobs refuses all of them, before any part of the batch is stored."""
        _check_sizes(specs)
        await self._promises(specs)
        replacing = [(str(i), *keys) for i, keys in enumerate(map(_replacing, specs)) if keys is not None]
        for start in range(0, len(replacing), BULK):
            part = replacing[start : start + BULK]
            await self._call("checkReplacements", queue, *itertools.chain.from_iterable(part))

    async def _insert_rich(self, queue: str, specs: Sequence[JobSpec], mode: str = "jobs") -> list[str]:
        is_synced = await self._promises(specs)
        now = self._clock.now_ms()
        args: list[Text] = [mode]
        others: list[str] = []
        async with self._chosen_ids(queue, custom_ids(specs)) as free:
            for spec in specs:
                args += flat(await self._new_job(queue, spec, now, free, others))
            reply = await self._call(
                "insert", queue, *args, others=self._same_slot(queue, others), is_synced=is_synced, now=now
            )
        return [job_id.decode() for job_id in reply[0]]

    async def insert_family(self, nodes: Sequence[FamilyNode]) -> list[Raw]:
        if not nodes:
            return []
        is_synced = await self._promises([node.spec for node in nodes])
        queues = list(dict.fromkeys(node.queue for node in nodes))
        others = self._same_slot(queues[0], queues[1:])
        for queue in queues:
            await self._register(queue)
        now = self._clock.now_ms()
        homes = {node.id: node.queue for node in nodes}
        args: list[Text] = ["flow"]
        async with self._chosen_ids(queues[0], list(homes)) as free:
            for node in nodes:
                record = await self._new_job(node.queue, node.spec, now, frozenset(), [], homes=homes)
                record.id, record.queue = node.id, queues.index(node.queue) + 1
                extra = msgspec.msgpack.decode(record.extra, type=Extra)
                extra.birth, extra.is_id_free = self.ids.at(now), node.id in free
                extra.lookup = None if self._server.is_cluster else self._keys.lookup(node.id)
                record.extra = pack(extra)
                args += flat(record)
            await self._call("insert", queues[0], *args, others=others, is_synced=is_synced, now=now)
        jobs = [await self._read(node.queue, node.id) for node in nodes]
        return [show(job) for job in jobs if job is not None]

    # -- records -------------------------------------------------------------------------------------------------------

    async def _new_job(
        self,
        queue: str,
        spec: JobSpec,
        now: int,
        free: frozenset[str],
        others: list[str],
        *,
        homes: dict[str, str] | None = None,
    ) -> NewJob:
        """The record of one job; queues of relatives are added to `others`."""
        settings, links = settings_of(spec), links_of(spec)
        job_id = marked(self.ids.at(now), queue)
        extra = Extra(size=len(spec.data))
        if settings is not DEFAULT_SETTINGS:
            extra.settings, extra.opts = settings, _opts(settings)
        if links is not None:
            await self._add_links(queue, links, extra, job_id, free, others, homes or {})
        if extra.custom_id is not None:
            id_ttl: float | None = getattr(spec, "id_ttl", None)
            extra.id_ttl = None if id_ttl is None else int(id_ttl)
        data, raw = to_fields(bytes(spec.data))
        created = now if spec.timestamp is None else int(spec.timestamp)
        run_at = created + int(spec.delay)
        attempts = settings.max_attempts
        return NewJob(1, job_id, spec.name or "", data, raw, created, run_at, spec.priority, attempts, pack(extra))

    async def _add_links(
        self,
        queue: str,
        links: JobLinks,
        extra: Extra,
        job_id: str,
        free: frozenset[str],
        others: list[str],
        homes: dict[str, str],
    ) -> None:
        extra.links = links
        extra.group_id, extra.unique_key, extra.custom_id = links.group_id, links.unique_key or None, links.custom_id
        if links.custom_id is not None and not self._server.is_cluster:
            extra.lookup, extra.birth = self._keys.lookup(links.custom_id), job_id
        elif links.custom_id is not None and links.custom_id in free:
            extra.is_id_free, extra.birth = True, job_id
        if links.parent_id is not None and links.parent_id != LINK_LATER:
            extra.parent = await self._tie(queue, links.parent_id, others, homes)
        if links.flow_id is not None:
            home = await self._flow_home(links.flow_id)
            if home is not None and (home == queue or not self._server.is_cluster):
                extra.flow = self._keys.of(home)
        for dependency in dict.fromkeys(links.depends_on):
            extra.depends_on.append(await self._tie(queue, dependency, others, homes))

    @abstractmethod
    async def _flow_home(self, flow_id: str) -> str | None:
        """The queue that decides about a workflow."""

    async def _tie(self, queue: str, job_id: str, others: list[str], homes: dict[str, str]) -> Tie:
        """Where a relative is; one that cannot be found is looked for in the same queue, and refused there."""
        if job_id in homes:
            home: str | None = homes[job_id]
        else:
            place = await self._place(job_id)
            home = None if place is None else place[0]
        if home is not None and home != queue:
            others.append(home)
            return Tie(job_id, self._keys.of(home))
        return Tie(job_id)

    def _same_slot(self, queue: str, others: Sequence[str]) -> list[str]:
        """Queues that one call touches besides its own: in a cluster they live elsewhere."""
        distinct = [name for name in dict.fromkeys(others) if name != queue]
        if distinct and self._server.is_cluster:
            refuse("families across queues in a cluster")
        return distinct

    # -- chosen ids ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _chosen_ids(self, queue: str, wanted: Sequence[str]) -> AsyncIterator[frozenset[str]]:
        """In a cluster: which chosen ids may become job ids, for the call that stores the jobs. Those that no job of
        another queue has; they are noted as ours, and given up if the call fails. On one server the function that
        stores the jobs does that by itself."""
        free = await self._free_ids(queue, wanted) if wanted and self._server.is_cluster else frozenset()
        try:
            yield free
        except HeadraceError:
            if free:
                key = f"{self._keys.of(queue)}:hr:gone"
                with suppress(StorageUnavailable):
                    await self._server.call(key, "SADD", key, *free)
            raise

    async def _free_ids(self, queue: str, wanted: Sequence[str]) -> frozenset[str]:
        keys = [self._keys.lookup(custom_id) for custom_id in wanted]
        noted = await self._server.call_many([(key, ("SET", key, queue, "NX", "GET")) for key in keys])
        free = set()
        for custom_id, key, owner in zip(wanted, keys, noted, strict=True):
            if owner is None or owner.decode() == queue:
                free.add(custom_id)
                continue
            home = owner.decode()
            if not await self._exists(home, custom_id):
                await self._server.call(key, "SET", key, queue)
                free.add(custom_id)
        return frozenset(free)

    # -- telling -------------------------------------------------------------------------------------------------------

    def _tell_pushed(self, queue: str, job_id: str, spec: JobSpec, now: int) -> None:
        event = self._emit("pushed", queue, now, job_id, spec.name)
        event.bytes = len(spec.data)
        event.priority = spec.priority
        created = now if spec.timestamp is None else int(spec.timestamp)
        run_at = created + int(spec.delay)
        if run_at > now:
            event.delay = run_at - now
        self._count(event)

    async def _promises(self, specs: Sequence[JobSpec]) -> bool:
        """Whether the push has to wait for the disk; options that cannot be kept are refused."""
        is_synced = any(getattr(spec, "durable", False) for spec in specs)
        if is_synced:
            await self._require_aof()
        return is_synced

    async def _require_aof(self) -> None:
        """Durable pushes need a server that writes an append-only file and can tell when it has."""
        key = self._keys.queues
        asked = [(key, ("INFO", "persistence")), (key, ("COMMAND", "INFO", "WAITAOF"))]
        info, known = await self._server.call_many(asked)
        if b"aof_enabled:1" not in info or not known or known[0] is None:
            refuse("durable without an append-only file")


def custom_ids(specs: Iterable[JobSpec]) -> list[str]:
    return list(dict.fromkeys(filter(None, (getattr(spec, "custom_id", None) for spec in specs))))


def _is_due_now(spec: JobSpec) -> bool:
    return not spec.delay and not spec.priority and spec.timestamp is None


def _check_sizes(specs: Sequence[JobSpec]) -> None:
    """Refuse what is too large as JSON, which is six times as long as MessagePack at the most."""
    for spec in specs:
        if len(spec.data) > MAX_PAYLOAD_BYTES // 6:
            to_fields(bytes(spec.data))


def _has_family(spec: JobSpec) -> bool:
    return bool(getattr(spec, "depends_on", None)) or getattr(spec, "parent_id", None) is not None


def _replacing(spec: JobSpec) -> tuple[str, str] | None:
    """The custom id and the key of a job that takes the place of whoever holds the key."""
    dedup: Dedup | None = getattr(spec, "dedup", None)
    key: str | None = getattr(spec, "unique_key", None)
    return (getattr(spec, "custom_id", None) or "", key) if dedup is not None and dedup.replace and key else None


def _opts(settings: JobSettings) -> str:
    """What Node workers are told of the settings."""
    opts: dict[str, Any] = {"attempts": settings.max_attempts}
    if isinstance(settings.backoff, Backoff):
        opts["backoff"] = {"type": settings.backoff.type, "delay": settings.backoff.delay}
    else:
        opts["backoff"] = {"type": "exponential", "delay": settings.backoff}
    if settings.timeout:
        opts["timeout"] = settings.timeout
    if settings.remove_on_complete:
        opts["removeOnComplete"] = True
    if settings.remove_on_fail:
        opts["removeOnFail"] = True
    return msgspec.json.encode(opts).decode()
