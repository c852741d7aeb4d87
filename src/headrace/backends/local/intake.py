"""How jobs come in: insert, families, custom ids, unique keys, dependencies.

Order inside one push: an existing custom id or a held unique key is returned and nothing is stored; otherwise the job
is created, takes its keys, and enters the index as waiting, delayed or waiting-children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import Final

from msgspec import Raw

from headrace.backends.base import FamilyNode
from headrace.backends.local.index import KeyHolder, Queue
from headrace.backends.local.job import History, Job
from headrace.backends.local.store import Store
from headrace.errors import InvalidCommand, NotFound, Refused
from headrace.model import (
    DEFAULT_SETTINGS,
    Dedup,
    Event,
    EventName,
    JobLinks,
    JobSpec,
    TimelineEntry,
    is_plain,
    links_of,
    settings_of,
)
from headrace.states import State, Verb

LINK_LATER: Final = "pending"
"""The parentId of a child whose parent is pushed after it and linked by UpdateParent."""

_ENDED: Final = (State.COMPLETED, State.FAILED)
_LOOK_SLICE: Final = 4096
_BATCH_AT_ONCE: Final = 1000
"""Jobs that are stored within one tick; a longer batch is staged."""
_WAITING: Final = State.WAITING
_DELAYED: Final = State.DELAYED


def _custom_id(spec: JobSpec) -> str | None:
    custom_id: str | None = getattr(spec, "custom_id", None)
    return custom_id


def _pending_of(job: Job) -> Set[str]:
    """The ids that it waits for."""
    return frozenset() if job.history is None else job.history.pending


class _Names:
    """The ids and keys of a batch: if none of them is taken, its jobs take them all at once in the last tick."""

    def __init__(self) -> None:
        self.custom_ids: dict[str, Job] = {}
        self.keys: dict[str, KeyHolder] = {}
        self._may_stand_for_others = False
        self.relatives: set[str] = set()
        """Jobs that they depend on, and their parents."""

    def note(self, job: Job, spec: JobSpec) -> None:
        links = job.links
        if links is None:
            return
        if links.custom_id:
            self._may_stand_for_others |= links.custom_id in self.custom_ids
            self.custom_ids[links.custom_id] = job
        if links.unique_key:
            self._may_stand_for_others |= links.unique_key in self.keys
            self.keys[links.unique_key] = KeyHolder(job, None)
        if links.dedup is not None or getattr(spec, "id_ttl", None):
            self._may_stand_for_others = True
        self.relatives.update(links.depends_on)
        if links.parent_id is not None and links.parent_id != LINK_LATER:
            self.relatives.add(links.parent_id)

    def are_new(self, queue: Queue) -> bool:
        return (
            not self._may_stand_for_others
            and queue.custom_ids.keys().isdisjoint(self.custom_ids.keys())
            and queue.keys.keys().isdisjoint(self.keys.keys())
        )

    def take(self, queue: Queue) -> None:
        queue.custom_ids.update(self.custom_ids)
        queue.keys.update(self.keys)


class Intake(Store, ABC):
    needs_sync = False
    """A job of this tick asked for `durable`."""
    sync_requests = 0
    """Durable jobs stored since this was last reset: their replies wait for the disk."""

    async def insert_one(self, queue: str, spec: JobSpec) -> str:
        now = self._clock.now_ms()
        if is_plain(spec):
            return self._admit_plain(self._queues.get(queue) or self._queue(queue), spec, now).id
        q = self._queue(queue)
        self._check_family(spec, q, frozenset())
        self._check_replacement(spec, q, getattr(spec, "depends_on", ()), {}, now)
        newest = self._job_seq
        job = self._admit(q, spec, now, None)
        if job.seq > newest:  # else it is an older job that the id or key stands for
            self._tie([job], now)
        return job.id

    async def insert_plain(self, queue: str, specs: Sequence[JobSpec]) -> list[str]:
        return self._admit_plain_batch(self._queue(queue), specs, self._clock.now_ms())

    async def insert(self, queue: str, specs: Sequence[JobSpec]) -> list[str]:
        now = self._clock.now_ms()
        self._slices.begin()
        plain = list(map(is_plain, specs[:_LOOK_SLICE]))
        for start in range(_LOOK_SLICE, len(specs), _LOOK_SLICE):
            await self._slices.breathe()
            plain += map(is_plain, specs[start : start + _LOOK_SLICE])
        q = self._queue(queue)
        if all(plain):
            if len(specs) > _BATCH_AT_ONCE:
                return await self._insert_plain_staged(q, specs, now)
            return self._admit_plain_batch(q, specs, now)
        await self._check_batch(q, specs, now)
        if len(specs) > _BATCH_AT_ONCE:
            return await self._insert_staged(self._queue(queue), specs, now)
        self._recall_ids(q, specs, now)
        newest = self._job_seq
        jobs = [
            self._admit_plain(q, spec, now) if is_one_plain else self._admit(q, spec, now, None)
            for spec, is_one_plain in zip(specs, plain, strict=True)
        ]
        # A number that is not new is that of an older job that an id or key stands for.
        self._tie([job for seq, job in {job.seq: job for job in jobs}.items() if seq > newest], now)
        return [job.id for job in jobs]

    # -- long batches --------------------------------------------------------------------------------------------------
    # Rows are written in slices, then all of them become jobs in one tick. A restart before that tick drops the rows:
    # a batch is there as a whole or not at all.

    def _open_batch(self, size: int) -> int:
        """Reserve numbers for a batch; returns the first."""
        first, last = self._job_seq + 1, self._job_seq + size
        self._job_seq = last
        self._open_batches[first] = last
        self._journal.open_batch(first, last)
        return first

    async def _stage(self, jobs: Iterable[Job], now: int) -> tuple[list[Job], list[Event]]:
        """Write the rows of a batch. Returns the jobs and their events, to save the last tick that work."""
        staged, events = [], []
        for n, job in enumerate(jobs):
            self._journal.stage(job)
            staged.append(job)
            events.append(self._push_event(job, now))
            if n & 127 == 127:
                await self._slices.breathe()
        await self._slices.rest()
        for job in staged:
            if job.queue.is_dead:  # obliterated meanwhile
                job.queue = self._queue(job.queue.name)
        return staged, events

    def _close_batch(self, first: int, jobs: list[Job]) -> None:
        """The rows are jobs with the commit of this tick."""
        self._claimed += jobs  # so that they are removed from memory if the commit fails
        self._journal.close_batch(first)
        self._closing_batches.append(first)

    def _drop_batch(self, first: int, size: int) -> None:
        """The rows are gone with the commit of this tick."""
        self._journal.drop_batch(first, first + size - 1)
        self._closing_batches.append(first)

    async def _insert_plain_staged(self, queue: Queue, specs: Sequence[JobSpec], now: int) -> list[str]:
        first = self._open_batch(len(specs))
        plain = (self._make_plain(queue, spec, now, seq, self.ids.at(now)) for seq, spec in enumerate(specs, first))
        jobs, events = await self._stage(plain, now)
        self._take_in_all(jobs, events)
        self._close_batch(first, jobs)
        return [job.id for job in jobs]

    async def _insert_staged(self, queue: Queue, specs: Sequence[JobSpec], now: int) -> list[str]:
        first = self._open_batch(len(specs))
        names = _Names()

        def make_all() -> Iterator[Job]:
            for seq, spec in enumerate(specs, first):
                links = links_of(spec)
                job = self._make(queue, spec, links, now, seq, self._new_id(links))
                names.note(job, spec)
                yield job

        jobs, events = await self._stage(make_all(), now)
        try:
            self._check_relatives(names, specs, jobs[0].queue)
        except NotFound:
            self._drop_batch(first, len(jobs))
            raise
        if names.are_new(jobs[0].queue) and self._jobs.keys().isdisjoint([job.id for job in jobs]):
            names.take(jobs[0].queue)
            self._take_in_all(jobs, events)
            found = new = jobs
        else:
            self._recall_ids(jobs[0].queue, specs, now)
            found = [self._admit_staged(job, spec, now) for job, spec in zip(jobs, specs, strict=True)]
            new = [job for job, known in zip(jobs, found, strict=True) if job is known]
        if names.relatives:
            self._tie(new, now)
        self._close_batch(first, new)
        return [job.id for job in found]

    def _admit_staged(self, job: Job, spec: JobSpec, now: int) -> Job:
        """`_admit` for a job that already has a row, which is deleted if an existing job answers for the push."""
        known = self._answering(job.queue, spec, job.links, now)
        if known is not None:
            self._journal.remove(job)
            return known
        if job.id in self._jobs:  # taken in the meantime, in another queue
            job.id = self.ids.at(now)
            self._journal.rewrite(job)
        self._take_in(job, spec, now)
        self._enter(job)
        return job

    async def _insert_family_staged(self, nodes: Sequence[FamilyNode], now: int) -> list[Raw]:
        first = self._open_batch(len(nodes))
        shown: list[Raw] = []

        def make_all() -> Iterator[Job]:
            for seq, node in enumerate(nodes, first):
                spec = node.spec
                job = self._make(self._queue(node.queue), spec, links_of(spec), now, seq, node.id)
                shown.append(self._show(job))
                yield job

        jobs, _ = await self._stage(make_all(), now)
        try:
            self._check_new(nodes, now)  # once more: others may have taken ids in the meantime
        except Refused:
            self._drop_batch(first, len(jobs))
            raise
        for job, node in zip(jobs, nodes, strict=True):
            self._take_in(job, node.spec, now)
            self._enter(job)
        self._tie(jobs, now)
        self._close_batch(first, jobs)
        return shown

    def _take_in_all(self, jobs: list[Job], events: list[Event]) -> None:
        """`_take_in` and `_enter` for unrelated jobs of one queue; their ids and keys are taken separately."""
        self._jobs.update((job.id, job) for job in jobs)
        queue = jobs[0].queue
        self._enter_all(queue, jobs)
        for seq, event in enumerate(events, self._event_seq + 1):
            event.seq = seq
        self._event_seq += len(events)
        self._events += events
        queue.figures.pushed += len(jobs)
        promises = sum(job.settings.durable for job in jobs)
        if promises:
            self.needs_sync = True
            self.sync_requests += promises
        self._totals.pushed += len(jobs)

    def _enter_all(self, queue: Queue, jobs: list[Job]) -> None:
        """`_enter` for new plain jobs: all at once if they stand behind all others."""
        if queue.is_grouped or not jobs or not queue.ready.extend(jobs):
            for job in jobs:
                self._enter(job)
        else:
            queue.waiting += len(jobs)
            self._ready.add(queue.name)

    async def insert_family(self, nodes: Sequence[FamilyNode]) -> list[Raw]:
        now = self._clock.now_ms()
        self._slices.begin()
        self._check_new(nodes, now)
        if len(nodes) > _BATCH_AT_ONCE:
            return await self._insert_family_staged(nodes, now)
        jobs = [self._admit(self._queue(node.queue), node.spec, now, node.id) for node in nodes]
        self._tie(jobs, now)
        return [self._show(job) for job in jobs]

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_new(self, nodes: Sequence[FamilyNode], now: int) -> None:
        for node in nodes:
            # Also in a queue that is being obliterated: the file has its row.
            if node.id in self._jobs or self._is_answered(node, now):
                raise Refused(f"flow job id already exists: {node.id}")

    def _is_answered(self, node: FamilyNode, now: int) -> bool:
        """Whether an existing job answers for the custom id of a member, as it would for a single push."""
        custom_id, id_ttl = _custom_id(node.spec), getattr(node.spec, "id_ttl", None)
        if not custom_id:
            return False
        known = self._queue(node.queue).custom_ids.get(custom_id)
        if known is not None and (id_ttl is not None or known.state not in _ENDED):
            return True
        return bool(id_ttl) and self._journal.tombstone(node.queue, custom_id, now) is not None

    async def _check_batch(self, queue: Queue, specs: Sequence[JobSpec], now: int) -> None:
        in_batch: set[str | None] = set()
        awaited: set[str] = set()
        for i, spec in enumerate(specs):
            if i & 1023 == 1023:
                await self._slices.breathe()
            in_batch.add(_custom_id(spec))
            awaited.update(getattr(spec, "depends_on", ()))
        keys: dict[str, str | None] = {}
        for i, spec in enumerate(specs):
            if i & 1023 == 1023:
                await self._slices.breathe()
            try:
                self._check_family(spec, queue, in_batch)
                self._check_replacement(spec, queue, awaited, keys, now)
            except (InvalidCommand, NotFound, Refused) as error:
                raise type(error)(f"jobs[{i}]: {error}") from None

    def _check_relatives(self, names: _Names, specs: Sequence[JobSpec], queue: Queue) -> None:
        """`_check_family` for a staged batch, once more: others may have removed a job between two slices."""
        near = names.custom_ids, queue.custom_ids, self._satisfied
        if all(self._find(relative) or any(relative in ids for ids in near) for relative in names.relatives):
            return
        for i, spec in enumerate(specs):
            try:
                self._check_family(spec, queue, names.custom_ids.keys())
            except NotFound as error:
                raise NotFound(f"jobs[{i}]: {error}") from None

    def _check_family(self, spec: JobSpec, queue: Queue, in_batch: Set[str | None]) -> None:
        depends_on: list[str] = getattr(spec, "depends_on", [])
        for dependency in depends_on:
            if dependency == _custom_id(spec):
                raise InvalidCommand(f"Job cannot depend on itself: {dependency}")
            if dependency in in_batch or dependency in self._satisfied:
                continue
            if self._find(dependency) is None and dependency not in queue.custom_ids:
                raise NotFound(f"Dependency job not found: {dependency}")
        parent_id: str | None = getattr(spec, "parent_id", None)
        if parent_id is not None and parent_id != LINK_LATER and self._find(parent_id) is None:
            raise NotFound(f"Parent job not found: {parent_id}")

    def _check_replacement(
        self, spec: JobSpec, queue: Queue, awaited: Collection[str], keys: dict[str, str | None], now: int
    ) -> None:
        """A job that others wait for cannot be replaced: nothing would ever release them.

        `awaited` is what the push itself depends on, `keys` has the unique keys of the batch so far and the custom ids
        of their jobs.
        """
        key: str | None = getattr(spec, "unique_key", None)
        if not key:
            return
        dedup: Dedup | None = getattr(spec, "dedup", None)
        if dedup is not None and dedup.replace:
            owner, earlier = self._to_be_replaced(queue, spec, key, now), keys.get(key)
            if owner is not None and (self._is_awaited(owner) or self._is_named(owner, awaited)):
                earlier = owner.id
            elif earlier not in awaited:
                earlier = None
            if earlier is not None:
                raise Refused(f"Cannot replace deduplicated job {earlier} because live jobs depend on it")
        keys[key] = _custom_id(spec)

    def _is_named(self, job: Job, dependencies: Collection[str]) -> bool:
        """Whether one of the dependencies means this job: ids come before custom ids."""
        custom_id = job.links.custom_id if job.links is not None else None
        return job.id in dependencies or (custom_id in dependencies and self._find(custom_id or "") is None)

    def _is_awaited(self, job: Job) -> bool:
        return any(parent.state is State.WAITING_CHILDREN for parent in self._dependents.get(job.id, ()))

    def _to_be_replaced(self, queue: Queue, spec: JobSpec, key: str, now: int) -> Job | None:
        """The job that would go if this push took its key."""
        known = queue.custom_ids.get(_custom_id(spec) or "")
        if known is not None and known.state not in _ENDED:
            return None  # that job answers for the push
        holder = queue.keys.get(key)
        if holder is None or (holder.expires is not None and holder.expires <= now):
            return None
        return None if holder.job.state is State.ACTIVE else holder.job

    # -- one job -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _make_plain(queue: Queue, spec: JobSpec, now: int, seq: int, job_id: str) -> Job:
        data = bytes(spec.data)
        created = now if spec.timestamp is None else int(spec.timestamp)
        run_at = created + int(spec.delay) if spec.delay else created
        return Job(
            seq,
            job_id,
            queue,
            data,
            spec.name,
            DEFAULT_SETTINGS,
            None,
            _WAITING if run_at <= now else _DELAYED,
            spec.priority,
            created,
            run_at,
            len(data),
        )

    def _admit_plain(self, queue: Queue, spec: JobSpec, now: int) -> Job:
        """`_admit` for the common case: no keys, no family, default settings."""
        self._job_seq = seq = self._job_seq + 1
        job = self._make_plain(queue, spec, now, seq, self.ids.at(now))
        self._jobs[job.id] = job
        self._enter(job)
        self._journal.add_plain(job)
        self._tell_pushed(job, now)
        self._totals.pushed += 1
        return job

    def _admit_plain_batch(self, queue: Queue, specs: Sequence[JobSpec], now: int) -> list[str]:
        """`_admit_plain` for many: the same steps, each for all jobs at once."""
        seq = self._job_seq
        ids = self.ids.many(now, len(specs))
        jobs = [self._make_plain(queue, specs[n], now, seq + n + 1, job_id) for n, job_id in enumerate(ids)]
        self._job_seq += len(jobs)
        self._jobs.update(zip(ids, jobs, strict=True))
        self._enter_all(queue, jobs)
        self._journal.add_plain_batch(jobs)
        for job in jobs:
            self._tell_pushed(job, now)
        self._totals.pushed += len(jobs)
        return ids

    def _admit(self, queue: Queue, spec: JobSpec, now: int, chosen_id: str | None) -> Job:
        """Store one job, or return the existing one that has its id or key."""
        links = links_of(spec)
        known = self._answering(queue, spec, links, now)
        if known is not None:
            return known
        self._job_seq += 1
        job = self._make(queue, spec, links, now, self._job_seq, chosen_id or self._new_id(links))
        self._journal.add(job)
        self._take_in(job, spec, now)
        self._enter(job)
        return job

    def _answering(self, queue: Queue, spec: JobSpec, links: JobLinks | None, now: int) -> Job | None:
        """The existing job that has the id or key of a push, if any."""
        if links is None:
            return None
        id_ttl: float | None = getattr(spec, "id_ttl", None)
        if not id_ttl and links.custom_id not in queue.custom_ids and links.unique_key not in queue.keys:
            return None
        known = self._buried(queue, links, now) if id_ttl and links.custom_id else None
        known = known or self._known(queue, links, now, answers_ended=id_ttl is not None)
        if known is not None:
            self._emit(EventName.DUPLICATED, known, now)
            queue.figures.duplicated += 1
            self._overall.duplicated += 1
        return known

    def _take_in(self, job: Job, spec: JobSpec, now: int) -> None:
        """Register a new job: lookups, keys and its `pushed` event. The caller puts it into the index."""
        self._jobs[job.id] = job
        links = job.links
        if links is not None:
            self._take_keys(job, links, now)
            id_ttl: float | None = getattr(spec, "id_ttl", None)
            if id_ttl and links.custom_id:
                self._journal.bury_id(job.queue.name, links.custom_id, job.id, now, int(id_ttl))
        self._tell_pushed(job, now)
        if job.settings.durable:
            self.needs_sync = True
            self.sync_requests += 1
        self._totals.pushed += 1

    def _make(self, queue: Queue, spec: JobSpec, links: JobLinks | None, now: int, seq: int, job_id: str) -> Job:
        job = self._make_plain(queue, spec, now, seq, job_id)
        job.settings, job.links = settings_of(spec), links
        if links is not None and links.depends_on:
            job.state = State.WAITING_CHILDREN
            timeline = [TimelineEntry("waiting-children", float(job.created))]
            job.history = History(timeline=timeline, pending=set(links.depends_on))
        return job

    def _new_id(self, links: JobLinks | None) -> str:
        if links is not None and links.custom_id and links.custom_id not in self._jobs:
            return links.custom_id
        return self.ids.next()

    def _tell_pushed(self, job: Job, now: int) -> None:
        self._event_seq = seq = self._event_seq + 1
        self._events.append(self._push_event(job, now, seq))
        job.queue.figures.pushed += 1

    def _push_event(self, job: Job, now: int, seq: int = 0) -> Event:
        """The event of a push; one that is staged has no number yet."""
        event = Event(seq, now, "pushed", self._epoch, job.queue.name, job.id, job.name, bytes=job.size)
        if job.priority:
            event.priority = job.priority
        if job.run_at > now:
            event.delay = job.run_at - now
        links = job.links
        if links is not None:
            event.parent = links.parent_id
            event.group = links.group_id
            event.tags = links.tags or None
        return event

    # -- custom ids and unique keys ------------------------------------------------------------------------------------

    def _known(self, queue: Queue, links: JobLinks, now: int, *, answers_ended: bool) -> Job | None:
        known = queue.custom_ids.get(links.custom_id) if links.custom_id else None
        if known is not None and self._is_overdue(known, now):
            known = None
        if known is not None and (answers_ended or known.state not in _ENDED):
            return known
        owner = self._key_owner(queue, links, now) if links.unique_key else None
        if owner is None and known is not None:
            # A new generation of the id replaces the old one.
            self._tell_removed(known, now)
            self._remove(known)
        return owner

    def _recall_ids(self, queue: Queue, specs: Sequence[JobSpec], now: int) -> None:
        """Look up in one go what `_buried` needs for each job of a batch."""
        ids = [custom_id for spec in specs if getattr(spec, "id_ttl", None) and (custom_id := _custom_id(spec))]
        if ids:
            self._journal.recall_ids(queue.name, ids, now)

    def _buried(self, queue: Queue, links: JobLinks, now: int) -> Job | None:
        """The job for which this id is reserved by its `idTtl`; a placeholder if that job is gone."""
        assert links.custom_id is not None
        job_id = self._journal.tombstone(queue.name, links.custom_id, now)
        if job_id is None:
            return None
        job = self._find(job_id)
        return job or Job(0, job_id, queue, None, None, DEFAULT_SETTINGS, None, State.REMOVED, 0, now, now)

    def _key_owner(self, queue: Queue, links: JobLinks, now: int) -> Job | None:
        assert links.unique_key is not None
        holder = queue.keys.get(links.unique_key)
        if holder is None:
            return None
        if holder.expires is not None and holder.expires <= now:
            del queue.keys[links.unique_key]
            return None
        if self._is_overdue(holder.job, now):
            return None
        dedup = links.dedup
        if dedup is not None and dedup.replace and self._replace_owner(holder.job, now):
            return None
        if dedup is not None and dedup.extend and dedup.ttl:
            self._hold_key_until(holder.job, holder, now + int(dedup.ttl))
        return holder.job

    def _is_overdue(self, job: Job, now: int) -> bool:
        """Whether a waiting job is past its ttl; if so it is removed now, since it must not answer for a new push."""
        return job.settings.ttl is not None and job.state is _WAITING and self._has_expired(job, now)

    @abstractmethod
    def _has_expired(self, job: Job, now: int) -> bool:
        """Remove a waiting job that is past its ttl; whether it was: see Delivery."""

    def _replace_owner(self, owner: Job, now: int) -> bool:
        """The newer job takes the key: an owner that has not started goes, an active one only loses the key.

        False for one that others wait for. Clients are refused before it comes to that (`_check_replacement`); what a
        schedule or workflow pushes is answered by the owner, as it would be without `replace`.
        """
        if owner.state is State.ACTIVE:
            self._release_key(owner)
            owner.remember().key_released = True
            self._journal.touch(owner)
        elif self._is_awaited(owner):
            return False
        else:
            self._tell_removed(owner, now)
            self._remove(owner)
        return True

    def _take_keys(self, job: Job, links: JobLinks, now: int) -> None:
        if links.custom_id:
            job.queue.custom_ids[links.custom_id] = job
        if links.unique_key:
            holder = KeyHolder(job, None)
            job.queue.keys[links.unique_key] = holder
            if job.history is not None:  # it may have had the key before
                job.history.key_released = False
                job.history.key_expires = None
            if links.dedup is not None and links.dedup.ttl:
                self._hold_key_until(job, holder, now + int(links.dedup.ttl))

    def _hold_key_until(self, job: Job, holder: KeyHolder, expires: int) -> None:
        holder.expires = expires
        job.remember().key_expires = expires
        self._journal.touch(job)

    # -- families ------------------------------------------------------------------------------------------------------

    def _tie(self, jobs: Sequence[Job], now: int) -> None:
        """Block new jobs on what they depend on, or unblock them if nothing is left; then add them to their parents.

        A parent may have thousands of them: all are added at once, except those that it named itself.
        """
        jobs = [job for job in jobs if job.state is not State.REMOVED]  # by a later one of the same batch
        families: dict[str, list[Job]] = {}
        named = {child for job in jobs if job.links is not None for child in job.links.children_ids}
        for job in jobs:
            self._await_dependencies(job, now)
            parent_id = job.links.parent_id if job.links is not None else None
            if parent_id is not None and parent_id != LINK_LATER and job.id not in named:
                families.setdefault(parent_id, []).append(job)
        for parent_id, children in families.items():
            self._adopt(parent_id, children, now)

    def _await_dependencies(self, job: Job, now: int) -> None:
        links, history = job.links, job.history
        if job.state is not State.WAITING_CHILDREN or history is None or links is None:
            return
        pending: dict[str, None] = {}
        for dependency in dict.fromkeys(links.depends_on):
            target = self._find(dependency) or job.queue.custom_ids.get(dependency)
            if target is None or target.state is State.COMPLETED:
                history.children_completed += target is not None
            elif target.id not in pending:
                pending[target.id] = None
                self._dependents.setdefault(target.id, []).append(job)
        if history.pending != pending.keys():
            history.pending = set(pending)
            self._journal.touch(job)
        if not pending:
            self._unblock(job, now, quiet=True)
        else:
            self._hear_of_failures(pending, now)

    def _hear_of_failures(self, dependencies: Iterable[str], now: int) -> None:
        """Dependencies may have failed for good before anything waited for them: apply their policy now."""
        for dependency in list(dependencies):
            target = self._find(dependency)
            if target is not None and target.state is State.FAILED:
                self._child_failed(target, self._failed_reason(target), now)

    @abstractmethod
    def _child_failed(self, job: Job, error: str | None, now: int) -> None:
        """Apply the failure policy of a child to everything that waits for it: see Settlement."""

    def _adopt(self, parent_id: str, children: Sequence[Job], now: int) -> None:
        """Add children to their parent. One that has not begun waits for them, unless they wait for it."""
        parent = self._find(parent_id)
        if parent is None:
            return
        links = parent.own_links()
        known = set(links.children_ids)
        strangers = [child.id for child in children if child.id not in known]
        links.children_ids += strangers
        if strangers:
            self._journal.touch(parent)
        if parent.state not in (State.WAITING, State.DELAYED, State.WAITING_CHILDREN):
            return
        known = set(links.depends_on).union(_pending_of(parent))
        open_children = [child for child in children if child.id not in known and child.state is not State.COMPLETED]
        awaited = [child.id for child in open_children if parent_id not in _pending_of(child)]
        if awaited:
            self._await_children(parent, awaited, now)

    def _await_children(self, parent: Job, children: Sequence[str], now: int) -> None:
        """Block a parent, unless it is, until these jobs are done, too."""
        links, history = parent.own_links(), parent.remember()
        if parent.state is not State.WAITING_CHILDREN:
            for dependency in list(history.pending):  # of an earlier life, in which it failed before they were settled
                self._drop_dependency(parent, dependency)
            self._move(parent, Verb.BLOCK)
            self._note(parent, parent.state.word, now)
            self._emit(EventName.WAITING_CHILDREN, parent, now)
        links.depends_on = list(dict.fromkeys([*links.depends_on, *children]))
        history.pending.update(children)
        for child_id in children:
            self._dependents.setdefault(child_id, []).append(parent)
        self._journal.touch(parent)

    def _drop_dependency(self, parent: Job, dependency: str) -> None:
        if parent.history is not None:
            parent.history.pending.discard(dependency)
        self._await_no_more(parent, dependency)
        self._journal.touch(parent)

    def _unblock(self, job: Job, now: int, *, quiet: bool = False) -> None:
        """Nothing is left to wait for: the job waits for a worker, or for its time."""
        self._move(job, Verb.UNBLOCK)
        if job.run_at > now:
            self._move(job, Verb.DELAY)
        self._note(job, job.state.word, now)
        self._journal.touch(job)
        if not quiet:
            self._emit(EventName.WAITING, job, now).prev = State.WAITING_CHILDREN.word
