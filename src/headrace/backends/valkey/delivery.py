"""How jobs go out and come back unfinished: claim, leases, release, and what happens as time passes."""

from __future__ import annotations

import asyncio
import os
import socket
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from headrace.backends.base import Claim, Counts, Demand, GroupDemand
from headrace.backends.valkey.arguments import Claiming, Renewal, Text, flat
from headrace.backends.valkey.connection import Unreachable
from headrace.backends.valkey.hashes import PLAIN_PARTICULARS, StoredJob, plain_job, read_hash, show
from headrace.backends.valkey.schedulers import firing
from headrace.backends.valkey.settlement import Settlement
from headrace.backends.valkey.store import InHand
from headrace.backends.valkey.transport import all_of
from headrace.backends.valkey.turns import split_claims
from headrace.errors import StorageUnavailable

RECLAIM_IDLE_MS: Final = 30_000
"""After this silence an entry that a Node worker took is looked at."""
WORKER_TTL_MS: Final = 30_000
"""For how long a broker stands among the workers of a queue after its last sign of life."""
_MAX_STALLS: Final = 1
_RECLAIMS: Final = 20
"""Calls for what dead Node workers of a queue had: a round sees two thousand of its pending jobs."""
_SILENCE_MS: Final = 30_000
"""When a plain job that is held without a lease is looked at: the default of StallConfig."""
ROUND_CALLS: Final = 10
_MAX_LOST: Final = 10_000
_ROUND_SLICE: Final = 20
_SPREAD_S: Final = 0.5
"""The slices of one call are spread over this time: whoever asks for something meanwhile waits for one, not for all."""
_STANDSTILL_MS: Final = 1000
"""An answer that takes longer was not only slow: short leases are handed out under load, too."""
_ANNOUNCE_MS: Final = 30_000
"""How much longer than needed others are told that somebody waits: the next pull need not say it again."""


class _Named(Struct):
    id: str


class Delivery(Settlement):
    on_wake: Callable[[], None]

    async def claim(self, queue: str, demand: Demand) -> list[Claim]:
        if demand.count <= 0:
            return []
        if queue in self._lost:
            await self._give_back_lost(queue)
        now = self._clock.now_ms()
        self._claimed_at[queue] = now
        asked = Claiming(demand.count, demand.owner, self.ids.at(now), self._next_serial(demand), int(demand.lease_ms))
        try:
            if demand.group is None:
                now, found = await self._claim_in_turn(queue, asked)
            else:
                reply = await self._call("claim", queue, self.broker, _group(demand.group), *flat(asked), now=now)
                found = split_claims(reply[0])
        except Unreachable:
            raise
        except StorageUnavailable:
            self._note_lost(queue, asked)
            raise
        if not found:
            return []
        lease_ms = int(demand.lease_ms) if demand.owner is not None else _SILENCE_MS
        if self._clock.now_ms() - now > max(lease_ms / 2, _STANDSTILL_MS):
            # This process or its machine was suspended while the answer was under way: the lease is over or will soon
            # be, and others may have these jobs. As good as lost: the next claim gives back what nobody has taken.
            self._note_lost(queue, asked)
            self._ready.add(queue)
            return []
        self._look_at(queue, now + lease_ms)
        claims = []
        for nth, one in enumerate(found, 1):
            is_plain = len(one) == PLAIN_PARTICULARS
            job = self._plain_claim(queue, one, asked, nth, now) if is_plain else read_hash(queue, one)
            if job is not None:
                claims.append(self._handed_out(job, demand, now))
        if claims:
            with suppress(StorageUnavailable):  # the next claim tries again; these jobs are handed out
                await self._register(queue)
        return claims

    def _note_lost(self, queue: str, asked: Claiming) -> None:
        lost = self._lost.setdefault(queue, set())
        if len(lost) < _MAX_LOST:  # beyond that leases have to end by themselves
            lost.add(asked.token)
            if asked.serial is not None:
                lost.update(f"{self.broker}:{asked.serial + nth}" for nth in range(1, asked.count + 1))

    async def _give_back_lost(self, queue: str) -> None:
        lost = self._lost.pop(queue, None)
        if lost is None:
            return  # a claim did it meanwhile
        try:
            await self._call("releaseLost", queue, *lost)
        except StorageUnavailable:
            self._lost.setdefault(queue, set()).update(lost)
            raise

    def _next_serial(self, demand: Demand) -> int | None:
        """A lease that a worker holds by name and token needs no number."""
        if demand.holder is None and demand.owner is not None:
            return None
        base, self._serial = self._serial, self._serial + demand.count
        return base

    def _plain_claim(self, queue: str, found: list[bytes], asked: Claiming, nth: int, now: int) -> StoredJob:
        job = plain_job(queue, found, now)
        job.owner, job.token = asked.owner, asked.token if nth == 1 else f"{asked.token}:{nth}"
        if asked.serial is not None:
            job.serial = f"{self.broker}:{asked.serial + nth}"
        self._take_in_hand(job.id, InHand(queue, job.name, job.attempts, now, asked.owner))
        return job

    def _handed_out(self, job: StoredJob, demand: Demand, now: int) -> Claim:
        shown_id = job.shown_id()
        if job.is_ours:
            self._remember(shown_id, job.queue)
        if demand.holder is not None and job.serial is not None:
            serial = int(job.serial.rpartition(":")[2])
            demand.holder[shown_id] = serial
            self._holders[shown_id] = demand.holder
        event = self._emit("pulled", job.queue, now, shown_id, job.name)
        event.attempt = job.attempts + 1
        event.worker = demand.owner
        self._count_wait(job.queue, now - job.run_at)
        return Claim(show(job), job.token if demand.owner is not None else None)

    # -- giving back ---------------------------------------------------------------------------------------------------

    async def release(self, held: dict[str, int]) -> None:
        by_queue: dict[str, list[Text]] = {}
        for shown_id, serial in list(held.items()):
            place = await self._held_place(shown_id)
            if place is not None:
                by_queue.setdefault(place[0], []).extend((place[1], f"{self.broker}:{serial}"))
        for queue, args in by_queue.items():
            await self._call("release", queue, *args)
        for shown_id in list(held):
            if self._holders.get(shown_id) is held:
                del self._holders[shown_id]
        held.clear()

    async def release_claims(self, queue: str, claims: Sequence[Claim]) -> None:
        """Jobs that were claimed for somebody who is gone: they wait again."""
        for claim in claims:
            shown_id = msgspec.msgpack.decode(bytes(claim.job), type=_Named).id
            job = await self._find(shown_id)
            if job is not None and (claim.token or (job.serial or "").startswith(self.broker)):
                await self._call("release", queue, job.id, claim.token or job.serial or "")
            self._let_go(shown_id)

    # -- who waits here ------------------------------------------------------------------------------------------------

    async def announce_waiting(self, queue: str, timeout_ms: float) -> bool:
        """Tell other brokers that a pull waits for jobs of the queue; False when they know already."""
        return await self._announce(queue, "hrParked", timeout_ms)

    async def announce_awaited(self, job_id: str, timeout_ms: float) -> bool:
        """Tell other brokers that somebody waits for the end of a job."""
        queue, _ = await self._locate(job_id)
        return await self._announce(queue, "hrAwaited", timeout_ms)

    async def _announce(self, queue: str, field: str, timeout_ms: float) -> bool:
        now = self._clock.now_ms()
        if self._waiting_until.get((queue, field), 0) >= now + timeout_ms:
            return False
        await self._listen()
        until = now + int(timeout_ms) + _ANNOUNCE_MS
        reply = await self._call("announceWaiting", queue, field, str(until))
        self._waiting_until[queue, field] = until
        if reply[0]:
            await self._register(queue)
        return True

    async def _withdraw_announcements(self) -> None:
        """Take away what was announced of waits that are over, unless another broker has renewed it."""
        now = self._clock.now_ms()
        over = [(what, until) for what, until in self._waiting_until.items() if until <= now]
        await all_of(*(self._call("announceWaiting", queue, field, "0") for (queue, field), _ in over))
        for what, until in over:
            if self._waiting_until.get(what) == until:
                del self._waiting_until[what]

    @abstractmethod
    async def _listen(self) -> None:
        """Hear from other brokers from now on."""

    async def extend(self, job_id: str, token: str | None, duration_ms: float | None, *, force: bool = False) -> bool:
        place = await self._held_place(job_id)
        if place is None:
            return False
        duration = None if duration_ms is None else int(duration_ms)
        reply = await self._call("extend", place[0], *flat(Renewal(place[1], token, duration, force)))
        return bool(reply[0][0])

    # -- what time does ------------------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """The earliest moment (monotonic) at which `sweep` has work."""
        due = min(self._dues.values(), default=None)
        return None if due is None else due - self._clock.now_ms() + self._clock.monotonic_ms()

    async def sweep(self) -> None:
        now = self._clock.now_ms()
        due = [queue for queue, at in self._dues.items() if at <= now]
        for queue in due:
            del self._dues[queue]
            self._ready.add(queue)
        await all_of(*map(self._sweep_queue, due))

    async def _sweep_queue(self, queue: str) -> int:
        """Do what time demands of a queue; how many ids of removed jobs were forgotten with it."""
        (gone,) = await self._call("sweep", queue, repr(self._rng()))
        await self._after_sweep(queue, gone)
        return len(gone)

    async def _after_sweep(self, queue: str, gone: list[bytes]) -> None:
        self.on_wake()  # what was done is told at once, also while other queues wait for a node that is away
        if gone:
            await self._forget_places(queue, [job_id.decode() for job_id in gone])

    async def _forget_places(self, queue: str, gone: list[str]) -> None:
        """Jobs with chosen ids were removed: their lookup keys may go, unless a new job has the id by now."""
        jobs = [(self._keys.job(queue, job_id), self._keys.lookup(job_id)) for job_id in gone]
        exist = await self._server.call_many([(job, ("EXISTS", job)) for job, _ in jobs])
        free = [key for (_, key), exists in zip(jobs, exist, strict=True) if not exists]
        owners = await self._server.call_many([(key, ("GET", key)) for key in free])
        ours = [key for key, owner in zip(free, owners, strict=True) if owner == queue.encode()]
        await self._server.call_many([(key, ("DEL", key)) for key in ours])
        # A push that found the key before it went may have stored a job since.
        exist = await self._server.call_many([(job, ("EXISTS", job)) for job, key in jobs if key in ours])
        back = [key for key, exists in zip(ours, exist, strict=True) if exists]
        await self._server.call_many([(key, ("SET", key, queue, "NX")) for key in back])
        key = f"{self._keys.of(queue)}:hr:gone"
        await self._server.call(key, "SREM", key, *gone)

    async def look_after(self) -> None:
        """The slow round: what other brokers planned and did not live to do, and jobs of dead Node workers.

        Called every second. A few queues are looked at each time, many by and by: within ROUND_CALLS calls all of them.
        When a node is away, that is raised after those of the others were looked at.
        """
        if not self._round:
            self._round = await self._next_round()
        size = max(_ROUND_SLICE, len(self._registered) // ROUND_CALLS + 1)
        names, self._round = self._round[:size], self._round[size:]
        self._unretired.update(names)
        lost = map(self._give_back_lost, list(self._lost))
        slices = [names[start : start + _ROUND_SLICE] for start in range(0, len(names), _ROUND_SLICE)]
        looks = [self._look_after_slice(part, nth / len(slices)) for nth, part in enumerate(slices)]
        await all_of(*lost, *looks, self._register_worker(), self._withdraw_announcements())

    async def _look_after_slice(self, queues: list[str], share: float) -> None:
        """At its time, not when the slice before is done: that one may wait for a node that is away."""
        await asyncio.sleep(share * _SPREAD_S)
        await all_of(*map(self._look_after_queue, queues))

    async def _next_round(self) -> list[str]:
        with suppress(StorageUnavailable):  # the node that has the list may be away, and theirs be there
            await self._queue_names()
        for queue in list(self._unlisted):
            with suppress(StorageUnavailable):  # then the next round does it
                if not await self._enter_again(queue):
                    self._forget_figures(queue)
                self._unlisted.discard(queue)
        self._counted = {name: counted for name, counted in self._counted.items() if name in self._registered}
        return sorted(self._registered)

    async def _look_after_queue(self, queue: str) -> None:
        limits = (str(RECLAIM_IDLE_MS), str(_MAX_STALLS))
        reply = await self._call("lookAfter", queue, repr(self._rng()), *limits)
        gone, cursor, schedulers, self._counted[queue] = reply
        await self._after_sweep(queue, gone)
        for _ in range(_RECLAIMS):
            if cursor == b"0-0":
                break
            (cursor,) = await self._call("reclaim", queue, *limits, cursor)
        with suppress(StorageUnavailable):  # out of memory, which what is done besides makes room for
            await self._cap_events([queue])
            await self._fire_schedulers(queue, schedulers)

    async def _enter_again(self, queue: str) -> bool:
        """A queue left the list: somebody obliterated it, maybe while jobs were pushed to it. Whether it is back."""
        if any(msgspec.structs.astuple(await self.counts(queue))):
            await self._register(queue)
        return queue in self._registered

    async def _count_jobs(self, queue: str) -> list[int]:
        """What the function `counts` says of a queue."""
        (counted,) = await self._call("counts", queue)
        if queue in self._registered:
            self._counted[queue] = counted
        return list(counted)

    @abstractmethod
    async def counts(self, queue: str) -> Counts: ...

    async def _fire_schedulers(self, queue: str, entries: list[bytes]) -> None:
        """Schedules that Node processes wrote: whoever is first fires them, Node workers or we."""
        now = self._clock.now_ms()
        for name, text in zip(entries[::2], entries[1::2], strict=True):
            fire = firing(name, text, now)
            if fire is not None:
                await self._call("fireScheduler", queue, *fire, now=now)

    async def _register_worker(self) -> None:
        """Be among the workers that Node's getWorkers lists, for queues that somebody pulled from lately."""
        now = self._clock.now_ms()
        if now < self._next_registration:
            return
        self._next_registration = now + WORKER_TTL_MS // 2
        self._claimed_at = {queue: at for queue, at in self._claimed_at.items() if now - at < WORKER_TTL_MS}
        active = Counter(map(self._places.get, self._holders))
        shown = {"addr": socket.gethostname(), "pid": os.getpid(), "startedAt": self._epoch}
        commands = []
        for queue in self._claimed_at:
            shown["activeJobs"] = active[queue]
            key = f"{self._keys.of(queue)}:w:{self.broker}"
            commands.append((key, ("SET", key, msgspec.json.encode(shown), "PX", WORKER_TTL_MS)))
        with suppress(StorageUnavailable):  # out of memory, too
            await self._server.call_many(commands)

    async def _unregister_worker(self) -> None:
        keys = [f"{self._keys.of(queue)}:w:{self.broker}" for queue in self._claimed_at]
        await self._server.call_many([(key, ("DEL", key)) for key in keys])


def _group(demand: GroupDemand) -> bytes:
    asked: dict[str, Any] = {}
    if demand.concurrency is not None:
        asked["concurrency"] = demand.concurrency
    if demand.limit_max is not None and demand.limit_duration is not None:
        asked |= {"limitMax": demand.limit_max, "limitDuration": demand.limit_duration}
    if demand.affinity is None:
        asked["isUngrouped"] = True
    elif demand.affinity is not UNSET:
        asked["affinity"] = demand.affinity
    return msgspec.json.encode(asked)
