"""What clients do to single jobs and whole queues: cancel, delay, promote, pause, drain, clean, limits, groups."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from headrace.backends.base import QueueLimits
from headrace.backends.listing import Listing
from headrace.backends.local.control import CLEANABLE, PLACES
from headrace.backends.valkey.arguments import Text, plain
from headrace.backends.valkey.delivery import Delivery
from headrace.backends.valkey.hashes import Sketch, to_fields
from headrace.errors import Refused
from headrace.model import DlqConfig, RateLimit, StallConfig

STATES: Final = tuple(state.word for state in PLACES)
_SLICE: Final = 200


class Control(Delivery):
    # -- one job -------------------------------------------------------------------------------------------------------

    async def _act(self, verb: str, job_id: str, *args: Text, missing: str = "Job not found") -> list[Any]:
        """One verb of one job: its queue is found, the id is the first argument."""
        queue, own_id = await self._locate(job_id, missing)
        return await self._call(verb, queue, own_id, *args)

    async def cancel(self, job_id: str, *, force: bool = False) -> None:
        await self._act("cancel", job_id, plain(force), missing="Job not found or cannot be cancelled")

    async def release_leases(self, queue: str, owner: str, keep: Collection[str]) -> int:
        prefix = f"{queue}:"
        kept = [job_id.removeprefix(prefix) for job_id in keep]
        return int((await self._call("releaseLeases", queue, owner, *kept))[0])

    async def resume_leases(self, queue: str, owner: str, held: Mapping[str, str], lease_ms: float) -> int:
        """Leases are stored here, so no broker forgets them when it restarts: there is nothing to resume."""
        return 0

    async def set_progress(self, job_id: str, progress: float, message: str | None) -> None:
        shown = plain(min(100, max(0, progress)))
        await self._act("progress", job_id, shown, plain(message is not None), message or "")

    async def progress(self, job_id: str) -> tuple[float, str | None]:
        job = await self._get(job_id)
        if job.state != "active":
            raise Refused(f"Job is not active (current state: {job.state})")
        return (job.past.progress, job.past.message) if job.past else (0, None)

    async def update(self, job_id: str, data: Raw) -> None:
        place = await self._place(job_id)
        if place is None:
            raise Refused("Job not found or cannot be updated")
        text, raw = to_fields(bytes(data))
        await self._call("update", *place, text, raw, str(len(data)))

    async def change_priority(self, job_id: str, priority: int, lifo: bool | None) -> None:
        await self._act("changePriority", job_id, str(priority), plain(lifo), missing="Job not found or not in queue")

    async def promote(self, job_id: str) -> None:
        queue, own_id = await self._locate(job_id, "Job not found or not delayed")
        await self._call("promote", queue, "one", own_id)

    async def promote_many(self, queue: str, count: int | None) -> int:
        jobs = sorted(await self._sketches(queue, ["delayed"]), key=lambda job: job.order)[:count]
        promoted = 0
        for start in range(0, len(jobs), _SLICE):
            reply = await self._call("promote", queue, "many", *(job.id for job in jobs[start : start + _SLICE]))
            promoted += reply[0]
        return promoted

    async def move_to_delayed(self, job_id: str, delay_ms: float, token: str | None) -> None:
        queue, own_id = await self._locate(job_id)
        await self._call("delay", queue, "move", own_id, plain(delay_ms), token or "")

    async def change_delay(self, job_id: str, delay_ms: float, token: str | None) -> None:
        queue, own_id = await self._locate(job_id, "Job not found or cannot change delay")
        await self._call("delay", queue, "change", own_id, plain(delay_ms), token or "")

    async def move_to_wait(self, job_id: str, token: str | None) -> None:
        await self._act("moveToWait", job_id, token or "")

    async def move_to_waiting_children(self, job_id: str, token: str | None) -> bool:
        await self._act("moveToWaitingChildren", job_id, token or "")
        self._let_go(job_id)
        return True

    async def discard(self, job_id: str, token: str | None) -> None:
        queue, own_id = await self._locate(job_id)
        job = await self._read(queue, own_id) if self._wants_bodies(queue) else None
        before = self._event_seq
        await self._call("discard", queue, own_id, token or "")
        for event in self._told_since(before):
            if job is not None and event.event == "failed" and event.job == job_id:
                self._attach(event, job.data)
        self._let_go(job_id)

    # -- one queue -----------------------------------------------------------------------------------------------------

    async def pause(self, queue: str) -> None:
        await self._register(queue)
        await self._call("setPaused", queue, "1")

    async def resume(self, queue: str) -> None:
        await self._call("setPaused", queue, "0")

    async def is_paused(self, queue: str) -> bool:
        return await self._meta(queue, "paused") == b"1"

    async def _meta(self, queue: str, field: str) -> bytes | None:
        key = self._keys.meta(queue)
        found: bytes | None = await self._server.call(key, "HGET", key, field)
        return found

    async def _remove(self, queue: str, states: str, ids: Sequence[str], *, is_told: bool, why: str = "") -> list[str]:
        """`why` is for workflows that wait for the end of these jobs."""
        removed: list[str] = []
        for start in range(0, len(ids), _SLICE):
            part = ids[start : start + _SLICE]
            reply = await self._call("remove", queue, states, plain(is_told), why, *part)
            removed += [job_id.decode() for job_id in reply[0]]
        return removed

    async def drain(self, queue: str) -> int:
        ids = await self._ids_in(queue, "waiting") + await self._ids_in(queue, "delayed")
        removed = await self._remove(queue, "waiting,delayed", ids, is_told=False, why=f"queue {queue} was drained")
        count = len(removed)
        if count:
            await self._call("announce", queue, "drained", str(count))
        return count

    async def obliterate(self, queue: str) -> None:
        if queue not in await self._queue_names():
            return
        # Parents go first: one whose child is removed before it might be released, and run.
        ids = dict.fromkeys([job_id for state in reversed(STATES) for job_id in await self._ids_in(queue, state)])
        why = f"queue {queue} was obliterated"
        removed = await self._remove(queue, "any", list(ids), is_told=False, why=why)
        for job_id in removed:
            self._let_go(job_id)
        while await self._sweep_queue(queue):
            pass  # it forgets some of their chosen ids each time
        (is_empty,) = await self._call("obliterate", queue, str(len(removed)))
        if is_empty:
            self._know(self._registered - {queue})
            self._dues.pop(queue, None)
            await self._server.call(self._keys.queues, "SREM", self._keys.queues, queue)
            await self._enter_again(queue)
        self._forget_figures(queue)

    async def clean(self, queue: str, grace_ms: float, state: str | None, limit: int) -> list[str]:
        before = self._clock.now_ms() - grace_ms
        states = [cleaned.word for cleaned in CLEANABLE.get(state, ())]
        jobs = [job for word in states for job in await self._sketches(queue, [word]) if _age_of(job) <= before]
        if state == "prioritized":
            jobs = [job for job in jobs if job.priority > 0]
        chosen = Listing()
        for job in itertools.takewhile(lambda _: chosen.has_room, jobs[:limit]):
            chosen.add(job.id)
        why = f"queue {queue} was cleaned"
        removed = await self._remove(queue, ",".join(states), chosen.ids, is_told=True, why=why)
        if removed:
            await self._call("announce", queue, "cleaned", str(len(removed)))
        return removed

    @abstractmethod
    async def _ids_in(self, queue: str, state: str) -> list[str]:
        """Ids of jobs that may be in this state."""

    @abstractmethod
    async def _sketches(self, queue: str, states: Sequence[str]) -> list[Sketch]:
        """All jobs that are in one of these states."""

    # -- settings of a queue -------------------------------------------------------------------------------------------

    async def stall_config(self, queue: str) -> StallConfig:
        text = await self._meta(queue, "hrStall")
        return StallConfig() if text is None else msgspec.json.decode(text, type=StallConfig)

    async def set_stall_config(self, queue: str, config: StallConfig) -> None:
        await self._register(queue)
        await self._call("setStalls", queue, msgspec.json.encode(config))

    async def dlq_config(self, queue: str) -> DlqConfig:
        text = await self._meta(queue, "hrDlq")
        return DlqConfig() if text is None else msgspec.json.decode(text, type=DlqConfig)

    async def set_dlq_config(self, queue: str, config: DlqConfig) -> None:
        await self._register(queue)
        await self._call("setDeadLetters", queue, msgspec.json.encode(config))

    async def set_rate_limit(self, queue: str, limit: float, duration_ms: float, ttl_ms: float | None) -> None:
        await self._register(queue)
        until = "" if ttl_ms is None else str(self._clock.now_ms() + int(ttl_ms))
        fields = ("rateLimitMax", plain(limit), "rateLimitDuration", plain(duration_ms), "hrLimitUntil", until)
        await self._call("setMeta", queue, *fields)

    async def clear_rate_limit(self, queue: str) -> None:
        await self._call("setMeta", queue, "rateLimitMax", "", "rateLimitDuration", "", "hrLimitUntil", "")

    async def set_concurrency(self, queue: str, limit: int | None) -> None:
        await self._register(queue)
        # For Node 0 means no limit, so holding everything back is a field of its own.
        fields = ("globalConcurrency", plain(limit or None), "hrHold", "1" if limit == 0 else "")
        await self._call("setMeta", queue, *fields)

    async def limits(self, queue: str) -> QueueLimits:
        most, duration, until, ttl, concurrency, maxed = await self._call("limits", queue)
        limit = RateLimit(float(most), float(duration), float(until) if until else None) if most else None
        return QueueLimits(limit, float(ttl), int(concurrency) if concurrency else None, bool(maxed))

    # -- unique keys ---------------------------------------------------------------------------------------------------

    async def unique_key_owner(self, queue: str, key: str) -> str | None:
        reply = await self._call("uniqueKeyOwner", queue, key)
        return reply[0].decode() or None

    async def remove_unique_key(self, queue: str, key: str) -> int:
        return int((await self._call("removeUniqueKey", queue, key))[0])

    async def remove_job_unique_key(self, job_id: str) -> bool:
        place = await self._place(job_id)
        return place is not None and bool((await self._call("removeJobUniqueKey", *place))[0])

    # -- groups --------------------------------------------------------------------------------------------------------

    async def group_jobs_count(self, queue: str, group: str) -> int:
        jobs = await self._sketches(queue, ["waiting", "delayed"])
        return sum(1 for job in jobs if job.group == group)

    async def groups_jobs_count(self, queue: str) -> int:
        jobs = await self._sketches(queue, ["waiting", "delayed"])
        return sum(1 for job in jobs if job.group is not None)

    async def group_active_count(self, queue: str, group: str) -> int:
        key = f"{self._keys.of(queue)}:hr:groups-active"
        return int(await self._server.call(key, "HGET", key, group) or 0)

    async def _group_config(self, queue: str, group: str) -> dict[str, Any]:
        key = f"{self._keys.of(queue)}:hr:group-config"
        text = await self._server.call(key, "HGET", key, group)
        found: dict[str, Any] = msgspec.json.decode(text) if text else {}
        return found

    async def _set_group(self, queue: str, group: str, *fields: Text) -> bool:
        await self._register(queue)
        return bool((await self._call("setGroup", queue, group, *fields))[0])

    async def set_group_rate_limit(self, queue: str, group: str, limit: RateLimit | None) -> bool:
        most, duration = ("", "") if limit is None else (plain(limit.max), plain(limit.duration))
        return await self._set_group(queue, group, "max", most, "duration", duration)

    async def group_rate_limit(self, queue: str, group: str) -> RateLimit | None:
        config = await self._group_config(queue, group)
        return RateLimit(config["max"], config["duration"]) if "max" in config else None

    async def group_rate_limit_ttl(self, queue: str, group: str) -> float:
        return float((await self._call("groupWait", queue, group))[0])

    async def rate_limit_group(self, queue: str, group: str, duration_ms: float) -> None:
        await self._register(queue)
        await self._call("holdGroup", queue, group, plain(duration_ms))

    async def set_group_concurrency(self, queue: str, group: str, limit: int | None) -> bool:
        return await self._set_group(queue, group, "concurrency", plain(limit))

    async def group_concurrency(self, queue: str, group: str) -> int | None:
        return (await self._group_config(queue, group)).get("concurrency")

    async def pause_group(self, queue: str, group: str, paused: bool) -> bool:
        return await self._set_group(queue, group, "paused", "1" if paused else "") != paused

    async def is_group_paused(self, queue: str, group: str) -> bool:
        return bool((await self._group_config(queue, group)).get("paused"))

    # -- families ------------------------------------------------------------------------------------------------------

    async def remove_unprocessed_children(self, parent_id: str) -> None:
        await self._act("removeUnprocessedChildren", parent_id)

    async def remove_child_dependency(self, child_id: str) -> bool:
        child = await self._get(child_id, f"Job not found: {child_id}")
        parent_id = child.links.parent_id if child.links is not None else None
        place = await self._place(parent_id) if parent_id is not None else None
        home = place[0] if place is not None else child.queue
        self._same_slot(child.queue, [home])
        return bool((await self._call("removeChildDependency", child.queue, child.id, others=[home]))[0])


def _age_of(job: Sketch) -> float:
    return job.finished if job.finished is not None else job.created
