"""How jobs go out and come back unfinished: claim, leases, release, and what happens as time passes.

A claim is not written to disk: after a crash every active job simply waits again. Deadlines of leases are monotonic,
so that a step of the wall clock neither expires nor prolongs them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from headrace.backends.base import Claim, Demand, GroupDemand, QueueFigures
from headrace.backends.local.index import Bucket, Group, Queue
from headrace.backends.local.job import Ended, Job, Lease
from headrace.backends.local.journal import LARGE_BYTES, Unreadable
from headrace.backends.local.settlement import Settlement
from headrace.backends.local.slices import run_now
from headrace.backends.local.store import UNGROUPED, group_of
from headrace.buckets import TokenBucket
from headrace.errors import StorageUnavailable
from headrace.model import (
    DEFAULT_SETTINGS,
    MAX_FRAME_BYTES,
    DeadLetterReason,
    Event,
    EventName,
    RateLimit,
    StallConfig,
)
from headrace.states import State, Verb
from headrace.views import encode_claimed

PROMOTE_SLICE: Final = 1000
CLAIM_BYTES: Final = MAX_FRAME_BYTES

# Members of an enum are looked up through its metaclass; on the hot path they are plain globals.
_ACTIVE: Final = State.ACTIVE


class Delivery(Settlement):
    # -- claiming ------------------------------------------------------------------------------------------------------

    async def claim(self, queue: str, demand: Demand) -> list[Claim]:
        q = self._queues.get(queue)
        if q is None:
            return []
        now = self._clock.now_ms()
        if self._due:
            self._promote_due(now)
        config = q.config
        if config.paused or not q.waiting:
            return []
        mono = self._clock.monotonic_ms()
        is_limited = config.concurrency is not None or config.rate_limit is not None
        room = self._room(q, demand.count, mono) if is_limited else demand.count
        # All plain jobs of one claim share the time of their next check.
        silence = demand.lease_ms if demand.owner is not None else _DEFAULT_SILENCE
        bucket = self._wheel.bucket_at(mono + int(silence)) if config.stall is None and room > 0 else None
        claims: list[Claim] = []
        if bucket is not None and room > 1 and not q.is_grouped and demand.group is None:
            claims = self._hand_out_plain(q, q.ready.pop_plain(room, LARGE_BYTES), demand, now, mono, bucket)
            room -= len(claims)
        if room > 0 and q.waiting:
            try:
                claims += self._hand_out(q, self._next_jobs(q, room, demand, now, mono), demand, now, mono, bucket)
            except StorageUnavailable:
                if not claims:
                    raise
        if q.bucket is not None and claims:
            q.bucket.take(mono, len(claims))
        return claims

    def _next_jobs(self, q: Queue, room: int, demand: Demand, now: int, mono: int) -> Iterator[Job]:
        """Up to `room` jobs, best first. Each must be handed out before the next is asked for: groups take turns.

        It ends sooner when they are so large together that one reply would not hold more.
        """
        size = 0
        while room > 0 and size < CLAIM_BYTES:
            job = q.ready.pop() if demand.group is None else self._next_of_groups(q, demand.group, mono)
            if job is None:
                return
            if job.settings.ttl is None or not self._has_expired(job, now):
                room -= 1
                size += job.size
                yield job

    def _room(self, q: Queue, wanted: int, mono: int) -> int:
        """How many jobs the limits of the queue allow now; sets a timer if the rate limit is the reason."""
        room = wanted
        if q.config.concurrency is not None:
            room = min(room, q.config.concurrency - len(q.active))
        limit = q.config.rate_limit
        if limit is not None:
            room = min(room, int(self._bucket(q, limit, mono).peek(mono) + 1e-9))
            if room <= 0 and q.bucket is not None:
                wait = q.bucket.wait_ms(mono)
                if wait is not None:
                    self._wake_at(q, mono + max(1, wait))
        return room

    def _bucket(self, q: Queue, limit: RateLimit, mono: int) -> TokenBucket:
        if q.bucket is None:
            q.bucket = TokenBucket.full(limit.max, limit.duration, mono)
        return q.bucket

    def _has_expired(self, job: Job, now: int) -> bool:
        ttl = job.settings.ttl
        if ttl is None or now <= job.created + ttl:
            return False
        self._emit(EventName.EXPIRED, job, now)
        self._tell_flow(job, "expired", now)
        self._child_failed(job, "expired", now)
        self._remove(job, Verb.EXPIRE)
        return True

    def _hand_out_plain(
        self, q: Queue, jobs: list[Job], demand: Demand, now: int, mono: int, bucket: Bucket
    ) -> list[Claim]:
        """`_hand_out` for jobs with nothing but defaults in a queue without groups: by far the most.

        None of them depends on the one before, so indexes and counters are brought up to date once for all.
        """
        count = len(jobs)
        if not count:
            return []
        owner, lease_ms, holder, epoch, name = demand.owner, demand.lease_ms, demand.holder, self._epoch, q.name
        self._lease_serial = serial = self._lease_serial + 1
        until, seq, events = mono + int(lease_ms), self._event_seq, self._events
        tokens: list[str] | list[None] = [None] * count if owner is None else self.ids.many(now, count)
        lease = Lease(serial, None, owner, lease_ms, until, None, now, mono, mono, holder, bucket)
        for job, token in zip(jobs, tokens, strict=True):
            seq += 1
            job.state = _ACTIVE
            job.started = now
            if job.ended is not None:  # reading costs far less than writing
                job.ended = None
            if token is not None:
                lease = Lease(serial, token, owner, lease_ms, until, None, now, mono, mono, holder, bucket)
            job.lease = lease
            if job.history is not None:
                self._note(job, "active", now, worker=owner)
            events.append(Event(seq, now, "pulled", epoch, name, job.id, job.name, job.attempts + 1, owner))
        if holder is not None:
            holder.update(dict.fromkeys([job.id for job in jobs], serial))
        self._event_seq = seq
        q.waiting -= count
        seqs = [job.seq for job in jobs]
        q.active.update(zip(seqs, jobs, strict=True))
        bucket.jobs.update(zip(seqs, jobs, strict=True))
        return self._claims(q, jobs, tokens, now)

    def _hand_out(
        self, q: Queue, jobs: Iterator[Job], demand: Demand, now: int, mono: int, usual: Bucket | None
    ) -> list[Claim]:
        """Lease jobs to the puller; `usual` is the bucket in which plain jobs of this claim await their next check."""
        # _move inlined: this is a hot transition, and the jobs have already been popped from the ready order.
        owner, lease_ms, holder = demand.owner, demand.lease_ms, demand.holder
        self._lease_serial = serial = self._lease_serial + 1
        until = mono + int(lease_ms)
        claimed: list[Job] = []
        tokens: list[str | None] = []
        for job in jobs:
            token = self.ids.at(now) if owner is not None else None
            timeout = job.settings.timeout
            q.waiting -= 1
            if job.priority > 0:
                q.prioritized -= 1
            job.state = _ACTIVE
            q.active[job.seq] = job
            job.started = now
            if job.ended is not None:
                job.ended = None
            timeout_mono = mono + int(timeout) if timeout else None
            place = usual if job.settings is DEFAULT_SETTINGS else None
            job.lease = Lease(serial, token, owner, lease_ms, until, timeout_mono, now, mono, mono, holder, place)
            if holder is not None:
                holder[job.id] = serial
            if q.is_grouped:
                self._leave_turn(q, job)
            if place is not None:
                place.jobs[job.seq] = job
            else:
                self._wheel.add(job, self._next_look(job))
            if job.history is not None:
                self._note(job, "active", now, worker=owner)
            self._event_seq = seq = self._event_seq + 1
            pulled = Event(seq, now, "pulled", self._epoch, q.name, job.id, job.name, job.attempts + 1, owner)
            self._events.append(pulled)
            claimed.append(job)
            tokens.append(token)
        return self._claims(q, claimed, tokens, now)

    def _claims(self, q: Queue, jobs: list[Job], tokens: Sequence[str | None], now: int) -> list[Claim]:
        """The claims for jobs that were just leased; updates the figures."""
        self._claimed += jobs
        self._totals.pulled += len(jobs)
        times = [job.run_at for job in jobs]
        if len(set(times)) == 1:  # a burst shares its millisecond
            self._count_wait(q.figures, now - times[0], len(times))
        else:
            for run_at, alike in itertools.groupby(times):
                self._count_wait(q.figures, now - run_at, len(list(alike)))
        try:
            views = encode_claimed(jobs, q.encoded_name, now, self._show)
        except Unreadable:  # a large payload: nobody gets these jobs, so nobody may be waited for
            run_now(self.release({job.id: job.lease.serial for job in jobs if job.lease is not None}))
            self._ready.discard(q.name)  # parked pulls would fail the same way, again and again
            raise
        return list(map(Claim, views, tokens))

    def _count_wait(self, figures: QueueFigures, waited: int, count: int) -> None:
        waited = max(0, waited)  # the wall clock may have been set back
        self._totals.wait_ms += waited * count
        figures.wait_ms += waited * count
        figures.wait[waited.bit_length()] += count

    # -- groups --------------------------------------------------------------------------------------------------------

    def _next_of_groups(self, q: Queue, demand: GroupDemand, mono: int) -> Job | None:
        """Ungrouped jobs first, then one job of each group in turn, within the limits of the groups."""
        if not q.is_grouped:
            self._begin_groups(q)
        wanted = demand.affinity
        if isinstance(wanted, str):
            return self._next_of_group(q, wanted, demand, mono)
        job = self._group(q, UNGROUPED).ready.peek()
        if job is not None or wanted is None:
            return job
        for _ in range(len(q.turn)):
            name = q.turn[0]
            q.turn.rotate(-1)
            job = self._next_of_group(q, name, demand, mono)
            if job is not None:
                return job
        return None

    def _next_of_group(self, q: Queue, name: str, demand: GroupDemand, mono: int) -> Job | None:
        group = q.groups.get(name)
        job = group.ready.peek() if group is not None else None
        if group is None or job is None:
            if group is not None and self._is_idle(q, name, group, mono):
                if q.turn[-1] == name:  # it is when it has just had its turn, and there may be very many groups
                    q.turn.pop()
                else:
                    q.turn.remove(name)
                del q.groups[name]
            return None
        return job if self._group_may_run(q, name, group, demand, mono) else None

    def _is_idle(self, q: Queue, name: str, group: Group, mono: int) -> bool:
        """Whether an empty group may be dropped: nothing is active, configured or held back."""
        if group.active or group.held_until > mono or self._has_group_settings(q, name):
            return False
        bucket = group.bucket
        return bucket is None or bucket.peek(mono) >= bucket.capacity

    def _leave_turn(self, q: Queue, job: Job) -> None:
        """The job was claimed, by whatever kind of pull: remove it from both orders."""
        q.ready.note_removed(job)
        group = self._group(q, group_of(job))
        group.ready.note_removed(job)
        group.active += 1

    def _begin_groups(self, q: Queue) -> None:
        """First pull that asks for groups: sort what is there; from now on pushes keep it sorted."""
        q.is_grouped = True
        for job in sorted(q.ready.live(), key=lambda job: (job.run_at, job.seq)):
            self._group(q, group_of(job)).ready.push(job)
        for job in q.active.values():
            self._group(q, group_of(job)).active += 1

    @staticmethod
    def _has_group_settings(q: Queue, name: str) -> bool:
        config = q.config
        return name in config.group_limits or name in config.group_concurrency or name in config.paused_groups

    def _group_may_run(self, q: Queue, name: str, group: Group, demand: GroupDemand, mono: int) -> bool:
        config = q.config
        if name in config.paused_groups:
            return False
        if group.held_until > mono:
            self._wake_at(q, group.held_until)
            return False
        concurrency = config.group_concurrency.get(name, demand.concurrency)
        if concurrency is not None and group.active >= concurrency:
            return False
        limit = config.group_limits.get(name)
        if limit is None and demand.limit_max is not None and demand.limit_duration is not None:
            limit = RateLimit(demand.limit_max, demand.limit_duration)
        return limit is None or self._take_group_token(q, group, limit, mono)

    def _take_group_token(self, q: Queue, group: Group, limit: RateLimit, mono: int) -> bool:
        if group.bucket is None or group.bucket_of != (limit.max, limit.duration):
            group.bucket = TokenBucket.full(limit.max, limit.duration, mono)
            group.bucket_of = (limit.max, limit.duration)
        if group.bucket.take(mono):
            return True
        wait = group.bucket.wait_ms(mono)
        if wait is not None:
            self._wake_at(q, mono + max(1, wait))
        return False

    # -- releasing -----------------------------------------------------------------------------------------------------

    async def release(self, held: dict[str, int]) -> None:
        now = self._clock.now_ms()
        for job_id, serial in list(held.items()):
            job = self._find(job_id)
            if job is None or job.lease is None or job.lease.serial != serial:
                continue
            event = self._emit(EventName.RELEASED, job, now)
            event.worker, event.attempt = job.lease.owner, job.attempts + 1
            self._back_to_waiting(job)
            self._ended_leases.pop()  # nobody works on it any more: it waits even if this tick fails
            job.ended = None

    async def release_leases(self, queue: str, owner: str, keep: Collection[str]) -> int:
        q = self._queues.get(queue)
        lost = {
            job.id: job.lease.serial
            for job in (q.active.values() if q is not None else ())
            if job.lease is not None and job.lease.owner == owner and job.id not in keep
        }
        await self.release(lost)
        return len(lost)

    async def resume_leases(self, queue: str, owner: str, held: Mapping[str, str], lease_ms: float) -> int:
        now, mono = self._clock.now_ms(), self._clock.monotonic_ms()
        demand = Demand(1, owner, lease_ms)
        resumed = 0
        for job_id, token in held.items():
            job = self._find(job_id)
            if job is None or job.queue.name != queue or job.state is not State.WAITING:
                continue
            if not job.queue.is_grouped:  # otherwise `_hand_out` does it
                job.queue.ready.note_removed(job)
            self._hand_out(job.queue, iter((job,)), demand, now, mono, None)
            assert job.lease is not None
            job.lease = replace(job.lease, token=token)
            resumed += 1
        return resumed

    def _back_to_waiting(self, job: Job) -> None:
        """RELEASE: in front of what came after it, with no attempt counted."""
        self._move(job, Verb.RELEASE)
        self._claimed.append(job)
        job.started = None

    def _hold(self, job: Job, lease: Lease, started: int | None) -> None:
        """Restore the lease of an active job."""
        job.lease, job.started = lease, started
        if lease.holder is not None:
            lease.holder[job.id] = lease.serial
        if job.queue.is_grouped:
            self._group(job.queue, group_of(job)).active += 1
        self._wheel.add(job, self._next_look(job))

    async def extend(self, job_id: str, token: str | None, duration_ms: float | None, *, force: bool = False) -> bool:
        job = self._find(job_id)
        if job is None or job.lease is None:
            return False
        lease = job.lease
        if token and lease.token != token:
            return False
        now, mono = self._clock.now_ms(), self._clock.monotonic_ms()
        length_ms, until_mono = lease.length_ms, lease.until_mono
        if token or force:
            length_ms = length_ms if duration_ms is None else duration_ms
            until_mono = mono + int(length_ms)
        job.lease = lease = replace(
            lease, heartbeat_ms=now, heartbeat_mono=mono, length_ms=length_ms, until_mono=until_mono
        )
        look = self._next_look(job)
        if lease.bucket is None or look // self._wheel.GRAIN < lease.bucket.number:
            self._wheel.discard(job)
            self._wheel.add(job, look)
        return True

    # -- what time does ------------------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """The earliest moment (monotonic) at which `sweep` has work."""
        mono = self._clock.monotonic_ms()
        shift = mono - self._clock.now_ms()
        dues = [due for due in (self._wheel.next_due(), self._wakes[0][0] if self._wakes else None) if due is not None]
        # What one sweep leaves to the next is due now: were it late, the loop would seem to have been held up.
        dues += [max(due + shift, mono) for due in (self._due.next_due(), self._next_burial_ms()) if due is not None]
        return min(dues, default=None)

    async def sweep(self) -> None:
        now, mono = self._clock.now_ms(), self._clock.monotonic_ms()
        self._promote_due(now)
        while self._wakes and self._wakes[0][0] <= mono:
            _, name = heapq.heappop(self._wakes)
            queue = self._queues.get(name)
            if queue is not None:
                queue.wake_mono = 0
                self._ready.add(name)
        for job in self._wheel.pop_due(mono):
            self._look_at(job, now, mono)
        self._tend_dead_letters(now, PROMOTE_SLICE)
        self._expire_rate_limits(now)

    def _promote_due(self, now: int) -> None:
        if self._slices.is_broken:
            return  # queries get here too, and must not fail while the disk refuses writes
        for job in self._due.pop_due(now, PROMOTE_SLICE):
            self._move(job, Verb.PROMOTE)
            self._journal.touch(job)
            self._emit(EventName.PROMOTED, job, now)

    def _expire_rate_limits(self, now: int) -> None:
        for name in list(self._limited_until):
            queue = self._queues.get(name)
            limit = queue.config.rate_limit if queue is not None else None
            if queue is None or limit is None or limit.until is None:
                self._limited_until.discard(name)
            elif limit.until <= now:
                self._limited_until.discard(name)
                queue.config.rate_limit = None
                queue.bucket = None
                self._save_queue(queue)
                self._ready.add(name)

    def _stall_config(self, queue: Queue) -> StallConfig:
        return queue.config.stall or _DEFAULT_STALL

    def _next_look(self, job: Job) -> int:
        """When an active job must be checked: end of lease, timeout or stall, whichever comes first."""
        lease = job.lease
        assert lease is not None
        if lease.timeout_mono is None and job.settings.stall_timeout is None and job.queue.config.stall is None:
            return lease.until_mono if lease.token is not None else lease.heartbeat_mono + _DEFAULT_SILENCE
        looks = [lease.until_mono] if lease.token is not None else []
        if lease.timeout_mono is not None:
            looks.append(lease.timeout_mono)
        stall = self._stall_mono(job, lease)
        if stall is not None:
            looks.append(stall)
        return min(looks, default=lease.heartbeat_mono + 3_600_000)

    def _stall_mono(self, job: Job, lease: Lease) -> int | None:
        """When silence counts as a stall. A valid lease protects its holder, unless a stall timeout was configured."""
        config = self._stall_config(job.queue)
        if not config.enabled:
            return None
        asked = job.settings.stall_timeout is not None or job.queue.config.stall is not None
        if lease.token is not None and not asked:
            return None
        silence = job.settings.stall_timeout or config.stall_interval
        return max(lease.heartbeat_mono + int(silence), lease.started_mono + int(config.grace_period))

    def _look_at(self, job: Job, now: int, mono: int) -> None:
        lease = job.lease
        if lease is None or job.state is not State.ACTIVE:
            return
        stall = self._stall_mono(job, lease)
        if lease.timeout_mono is not None and lease.timeout_mono <= mono:
            self._end_attempt(job, now, error="Job timeout exceeded", reason=DeadLetterReason.TIMEOUT)
        elif lease.token is not None and lease.until_mono <= mono:
            self._expire_lease(job, now)
        elif stall is not None and stall <= mono:
            self._stall(job, now)
        else:
            self._wheel.add(job, self._next_look(job))

    def _expire_lease(self, job: Job, now: int) -> None:
        """The holder did not renew in time: hand the job to somebody else, without backoff."""
        lease = job.lease
        assert lease is not None
        job.stalls += 1
        job.queue.figures.expired_leases += 1
        self._overall.expired_leases += 1
        is_last = job.attempts + 1 >= job.settings.max_attempts
        self._tell_stall(job, now, is_last=is_last)
        if is_last:
            error = f"Lock expired at max attempts ({job.attempts + 1})"
            self._end_attempt(job, now, error=error, reason=DeadLetterReason.STALLED, terminal=True)
            return
        job.attempts += 1
        job.queue.figures.retried += 1
        self._overall.retried += 1
        self._note(job, "waiting", now, error="lock expired", attempt=job.attempts + 1)
        self._back_to_waiting(job)
        self._ended_leases.pop()  # it is over even if this tick fails
        job.ended = Ended(lease.token, finalized=False)
        self._journal.touch(job)

    def _stall(self, job: Job, now: int) -> None:
        job.stalls += 1
        job.queue.figures.stalled += 1
        self._overall.stalled += 1
        is_hopeless = job.stalls >= self._stall_config(job.queue).max_stalls
        is_last = job.attempts + 1 >= job.settings.max_attempts
        self._tell_stall(job, now, is_last=is_hopeless or is_last)
        if is_hopeless:
            error, reason = f"Job stalled {job.stalls} times", DeadLetterReason.STALLED
            self._end_attempt(job, now, error=error, reason=reason, terminal=True)
        elif is_last:
            error = f"Job stalled at max attempts ({job.attempts + 1})"
            self._end_attempt(job, now, error=error, reason=DeadLetterReason.MAX_ATTEMPTS_EXCEEDED, terminal=True)
        else:
            self._end_attempt(job, now, error="stalled", reason=DeadLetterReason.STALLED)

    def _tell_stall(self, job: Job, now: int, *, is_last: bool) -> None:
        event = self._emit(EventName.STALLED, job, now)
        event.stalls = job.stalls
        event.attempt = job.attempts + 1
        event.worker = job.lease.owner if job.lease else None
        event.action = "dlq" if is_last else "retry"


_DEFAULT_STALL: Final = StallConfig()
_DEFAULT_SILENCE: Final = int(_DEFAULT_STALL.stall_interval)
