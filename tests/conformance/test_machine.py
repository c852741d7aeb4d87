"""Random lives against a small model: whatever clients do in whatever order, backend and model agree.

The model is a dict of jobs and the rules of the protocol in their plainest form; it knows nothing of heaps, wheels,
files or commits. To teach it a verb: add a rule that asks the backend and changes the model, and nothing else.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.backends.base import Ack, Demand
from headrace.errors import HeadraceError, LeaseLost, NotFound, Refused
from headrace.model import Backoff, Dedup
from tests.conformance.rig import KINDS, VALKEY, Rig, spec, unpack
from tests.scale import scaled
from tests.valkeyserver import shared_server

LEASE_MS = 5_000
STALL_MS = 30_000
LATENESS_MS = 500
"""How late an expiry may be noticed; within this time the model takes what the backend did."""
RETRY_MS = 100
REFUSALS = {"not there": NotFound, "not yours": LeaseLost}
POLICIES = (
    "fail_parent_on_failure",
    "continue_parent_on_failure",
    "ignore_dependency_on_failure",
    "remove_dependency_on_failure",
)
LIVE = ("waiting", "delayed", "active", "waiting-children")


@dataclass
class Lease:
    token: str | None
    began: int
    connection: int

    @property
    def until(self) -> int:
        return self.began + (LEASE_MS if self.token else STALL_MS)


@dataclass
class ModelJob:
    number: int
    id: str
    queue: str
    state: str
    priority: int
    lifo: bool
    run_at: int
    max_attempts: int
    retry_ms: int | None
    """None: jittered, so the model takes the time that the backend chose."""
    key: str | None
    custom_id: str | None
    drops_completed: bool
    drops_failed: bool
    policy: str | None = None
    """What its failure means for those that wait for it."""
    pending: set[str] = field(default_factory=set)
    attempts: int = 0
    stalls: int = 0
    lease: Lease | None = None
    late: tuple[str | None, str] | None = None
    """The token of the last lease and how it ended: "expired" or "final"."""

    @property
    def rank(self) -> tuple[int, ...]:
        if self.lifo:
            return (-self.priority, 0, -self.number)
        return (-self.priority, 1, self.run_at, self.number)


class Seen(NamedTuple):
    queue: str
    state: str
    attempts: int
    stalls: int
    priority: int
    is_leased: bool


class Model:
    def __init__(self, chosen_time: Callable[[str], int]) -> None:
        self.now = 0
        self.chosen_time = chosen_time
        self.jobs: dict[str, ModelJob] = {}
        self.numbers = 0
        self.keys: dict[tuple[str, str], ModelJob] = {}
        self.paused: set[str] = set()
        self.departed: dict[str, str | None] = {}
        """Jobs that went with the end of their lease, and its token."""

    def of(self, queue: str, *states: str) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.queue == queue and (job.state in states or not states)]

    def custom(self, queue: str, custom_id: str | None) -> ModelJob | None:
        return next((job for job in self.of(queue) if custom_id and job.custom_id == custom_id), None)

    # -- coming ------------------------------------------------------------------------------------------------

    def known(self, queue: str, key: str | None, custom_id: str | None, *, replaces: bool = False) -> ModelJob | None:
        """The job that answers for a push, after the owner of its key and the old generation of its id have gone."""
        same = self.custom(queue, custom_id)
        if same is not None and same.state in LIVE:
            return same
        owner = self.keys.get((queue, key)) if key is not None else None
        if owner is not None and replaces:
            self.free(owner) if owner.state == "active" else self.drop(owner)
        elif owner is not None:
            return owner
        if same is not None:
            self.drop(same)
        return None

    def add(self, job: ModelJob, wanted: set[str]) -> None:
        self.jobs[job.id] = job
        job.pending = {i for i in wanted if self.jobs[i].state != "completed"}
        job.state = "waiting-children" if job.pending else self.by_time(job)
        if job.key is not None:
            self.keys[job.queue, job.key] = job
        for target in [self.jobs[i] for i in sorted(job.pending)]:
            if target.state == "failed":
                self.tell_failure(target)

    def waiting_for(self, job: ModelJob) -> list[ModelJob]:
        return [other for other in self.jobs.values() if other.state == "waiting-children" and job.id in other.pending]

    def by_time(self, job: ModelJob) -> str:
        return "delayed" if job.run_at > self.now else "waiting"

    # -- going -------------------------------------------------------------------------------------------------

    def tell_failure(self, job: ModelJob) -> None:
        """It will not complete: what that means for those that wait for it is its own choice."""
        for parent in self.waiting_for(job):
            if job.policy == "fail_parent_on_failure":
                parent.pending.discard(job.id)
                self.bury(parent, drop=parent.drops_failed)
            elif job.policy is not None:
                parent.pending -= parent.pending if job.policy == "continue_parent_on_failure" else {job.id}
                self.release(parent)

    def release(self, parent: ModelJob) -> None:
        if parent.state == "waiting-children" and not parent.pending:
            parent.state = self.by_time(parent)

    def take_away(self, job: ModelJob) -> None:
        if job.state in LIVE:
            self.tell_failure(job)
        self.drop(job)

    def drop(self, job: ModelJob) -> None:
        self.free(job)
        del self.jobs[job.id]

    def free(self, job: ModelJob) -> None:
        if job.key is not None and self.keys.get((job.queue, job.key)) is job:
            del self.keys[job.queue, job.key]

    def complete(self, job: ModelJob) -> None:
        token = job.lease.token if job.lease else job.late[0] if job.late else None
        job.late = (token, "final") if token else job.late
        job.state, job.lease = "completed", None
        self.free(job)
        for parent in list(self.jobs.values()):
            parent.pending.discard(job.id)
            self.release(parent)
        if job.drops_completed:
            self.drop(job)
            if token:
                self.departed[job.id] = token

    def fail(self, job: ModelJob, *, terminal: bool = False) -> None:
        assert job.lease is not None
        job.late = (job.lease.token, "final")
        job.lease = None
        job.attempts += 1
        if terminal or job.attempts >= job.max_attempts:
            self.bury(job, drop=job.drops_failed)
            if job.drops_failed:
                self.departed[job.id] = job.late[0]
        else:
            job.run_at = self.chosen_time(job.id) if job.retry_ms is None else self.now + job.retry_ms
            job.state = self.by_time(job)

    def bury(self, job: ModelJob, *, drop: bool) -> None:
        job.state = "failed"
        self.free(job)
        self.tell_failure(job)
        if drop:
            self.drop(job)

    def revive(self, job: ModelJob) -> bool:
        if job.key is not None and (job.queue, job.key) in self.keys:
            return False
        job.state, job.run_at, job.attempts, job.stalls, job.late = "waiting", self.now, 0, 0, None
        if job.key is not None:
            self.keys[job.queue, job.key] = job
        return True

    # -- time --------------------------------------------------------------------------------------------------

    def mature(self) -> None:
        for job in self.jobs.values():
            if job.state == "delayed" and job.run_at <= self.now:
                job.state = "waiting"

    def overdue(self) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.lease and job.lease.until <= self.now]

    def expire(self, job: ModelJob) -> None:
        """A lease ran out, or a holder without lease fell silent."""
        assert job.lease is not None
        job.stalls += 1
        is_last = job.attempts + 1 >= job.max_attempts
        if job.lease.token is None:
            self.fail(job, terminal=job.stalls >= 3 or is_last)
        elif is_last:
            self.fail(job, terminal=True)
        else:
            job.attempts += 1
            job.late, job.lease, job.state = (job.lease.token, "expired"), None, "waiting"


QUEUES = st.sampled_from(("a", "a", "b"))
PICK = st.integers(0, 10_000)
RECENT = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 5, 8, 13))
"""Which of the claims is answered, counted from the latest: old ones are answered late."""


class Machine(RuleBasedStateMachine):
    kind = KINDS[1]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-machine-"))
        self.rig = Rig(self.kind, self.folder)
        self.model = Model(lambda job_id: int(self.rig.look(job_id)["runAt"]))
        self.model.now = self.rig.clock.now_ms()
        self.holders: list[dict[str, int]] = [{}, {}]
        self.claims: list[tuple[str, str | None]] = []

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)

    def pick(self, number: int) -> str:
        ids = [*self.model.jobs, "nobody"]
        return ids[number % len(ids)]

    def let_pass(self, ms: int) -> None:
        self.rig.advance(ms)
        self.model.now += ms
        self.model.mature()
        for job in self.model.overdue():
            assert job.lease is not None
            seen = self.seen().get(job.id)
            if self.model.now >= job.lease.until + LATENESS_MS or seen is None or not seen.is_leased:
                self.model.expire(job)

    def seen(self) -> dict[str, Seen]:
        """What the backend knows of every job, looked up behind its back."""
        jobs = self.rig.backend._jobs.values()
        return {
            job.id: Seen(job.queue.name, job.state.word, job.attempts, job.stalls, job.priority, job.lease is not None)
            for job in jobs
        }

    def refused(self, verb: str, *args: Any) -> bool:
        try:
            getattr(self.rig, verb)(*args)
        except HeadraceError:
            return True
        return False

    def busy(self, queue: str) -> str:
        """The queue, or the other one if there is nothing to do in it."""
        other = "b" if queue == "a" else "a"
        return queue if self.model.of(queue, "waiting") or not self.model.of(other, "waiting") else other

    def has_waiting(self) -> bool:
        return any(job.state == "waiting" for job in self.model.jobs.values())

    # -- coming ------------------------------------------------------------------------------------------------

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.push_batch("a", count)

    @rule(
        queue=QUEUES,
        priority=st.sampled_from((0, 0, 0, -1, 2)),
        lifo=st.sampled_from((False, False, True)),
        delay=st.sampled_from((0, 0, 0, 100, 1000)),
        max_attempts=st.integers(1, 3),
        retry_ms=st.sampled_from((0, RETRY_MS)),
        key=st.sampled_from((None, None, "k0", "k1")),
        custom_id=st.sampled_from((None, None, "c0", "c1")),
        drops=st.tuples(st.booleans(), st.booleans()),
        policy=st.sampled_from((None, None, *POLICIES)),
        replaces=st.sampled_from((False, False, True)),
        wanted=st.lists(PICK, max_size=2),
    )
    def push(
        self,
        queue: str,
        priority: int,
        lifo: bool,
        delay: int,
        max_attempts: int,
        retry_ms: int,
        key: str | None,
        custom_id: str | None,
        drops: tuple[bool, bool],
        policy: str | None,
        replaces: bool,
        wanted: list[int],
    ) -> None:
        model = self.model
        model.numbers += 1
        dependencies = {i for i in map(self.pick, wanted) if i not in ("nobody", custom_id)}
        options: dict[str, Any] = {"priority": priority, "lifo": lifo, "delay": delay, "unique_key": key}
        options |= {"max_attempts": max_attempts, "custom_id": custom_id, "depends_on": sorted(dependencies)}
        options |= {"remove_on_complete": drops[0], "remove_on_fail": drops[1]}
        options["backoff"] = Backoff("fixed", 1000, RETRY_MS) if retry_ms else 0
        options |= {policy: True} if policy else {}
        options |= {"dedup": Dedup(replace=True)} if replaces else {}
        is_free = custom_id not in model.jobs
        old = model.custom(queue, custom_id)
        owner = model.keys.get((queue, key)) if replaces and key and (old is None or old.state not in LIVE) else None
        if owner is not None and owner.state != "active" and (model.waiting_for(owner) or owner.id in dependencies):
            with pytest.raises(Refused, match=f"Cannot replace deduplicated job {owner.id}"):
                self.rig.push(queue, **options)
            return
        job_id = self.rig.push(queue, **options)
        known = model.known(queue, key, custom_id, replaces=replaces)
        if known is not None:
            assert job_id == known.id
            return
        if custom_id is not None and (is_free or (old is not None and old.id == custom_id)):
            assert job_id == custom_id
        assert job_id not in model.jobs
        fields = (queue, "", priority, lifo, model.now + delay, max_attempts, retry_ms, key, custom_id)
        model.add(ModelJob(model.numbers, job_id, *fields, *drops, policy), dependencies & model.jobs.keys())

    @rule(queue=QUEUES, count=st.integers(2, 6))
    def push_batch(self, queue: str, count: int) -> None:
        for job_id in self.rig.insert(queue, [spec(n) for n in range(count)]):
            self.model.numbers += 1
            fields = (queue, "", 0, False, self.model.now, 3, None, None, None, False, False)
            self.model.add(ModelJob(self.model.numbers, job_id, *fields), set())

    # -- going -------------------------------------------------------------------------------------------------

    @precondition(has_waiting)
    @rule(queue=QUEUES, count=st.integers(1, 3), is_leased=st.booleans(), connection=st.integers(0, 1))
    def claim(self, queue: str, count: int, is_leased: bool, connection: int) -> None:
        queue = self.busy(queue)
        demand = Demand(count, "w" if is_leased else None, LEASE_MS, self.holders[connection])
        claims = self.rig.claim(queue, demand)
        waiting = sorted(self.model.of(queue, "waiting"), key=lambda job: job.rank)
        expected = [] if queue in self.model.paused else waiting[:count]
        assert [unpack(claim.job)["id"] for claim in claims] == [job.id for job in expected]
        for job, claim in zip(expected, claims, strict=True):
            assert (claim.token is not None) == is_leased
            assert unpack(claim.job)["attempts"] == job.attempts
            job.state, job.late = "active", None
            job.lease = Lease(claim.token, self.model.now, connection)
            self.claims.append((job.id, claim.token))

    def verdict(self, job_id: str, token: str | None) -> str:
        """What must become of an ACK: applied, ignored, or an error."""
        job = self.model.jobs.get(job_id)
        if job is None:
            is_known = self.model.departed.get(job_id, "") == token
            return "ignored" if is_known else "not there"
        if job.lease is not None:
            return "applied" if job.lease.token in (None, token) else "not yours"
        if job.late is None or job.late[0] != token:
            return "not there"
        is_open = job.late[1] == "expired" and job.state in ("waiting", "delayed")
        return "late" if is_open else "ignored"

    def claimed(self, back: int) -> tuple[str, str | None]:
        return self.claims[-1 - back % len(self.claims)] if self.claims else ("nobody", None)

    @precondition(has_waiting)
    @rule(queue=QUEUES, is_leased=st.booleans(), unrecoverable=st.booleans(), succeeds=st.booleans())
    def work(self, queue: str, is_leased: bool, unrecoverable: bool, succeeds: bool) -> None:
        """What a worker does: one job, to its end."""
        queue = self.busy(queue)
        self.pause(queue, False)
        self.claim(queue, 1, is_leased, 0)
        if succeeds:
            self.complete(0)
        else:
            self.fail(0, unrecoverable)

    @precondition(lambda self: self.claims)
    @rule(back=RECENT)
    def complete(self, back: int) -> None:
        job_id, token = self.claimed(back)
        expected = self.verdict(job_id, token)
        if expected in REFUSALS:
            with pytest.raises(REFUSALS[expected]):
                self.rig.complete([Ack(job_id, token)])
            return
        assert self.rig.complete([Ack(job_id, token)]) == ([0] if expected == "ignored" else [])
        if expected != "ignored":
            self.model.complete(self.model.jobs[job_id])

    @precondition(lambda self: self.claims)
    @rule(back=RECENT, unrecoverable=st.sampled_from((False, False, True)))
    def fail(self, back: int, unrecoverable: bool) -> None:
        job_id, token = self.claimed(back)
        expected = self.verdict(job_id, token)
        options = {"error": "e", "stack": None, "unrecoverable": unrecoverable, "remove": None}
        if expected in REFUSALS:
            with pytest.raises(REFUSALS[expected]):
                self.rig.fail(job_id, token=token, **options)
            return
        assert self.rig.fail(job_id, token=token, **options) == (expected == "applied")
        if expected == "applied":
            self.model.fail(self.model.jobs[job_id], terminal=unrecoverable)

    @rule(connection=st.integers(0, 1))
    def release(self, connection: int) -> None:
        self.rig.release(self.holders[connection])
        assert self.holders[connection] == {}
        for job in self.model.jobs.values():
            if job.lease is not None and job.lease.connection == connection:
                job.state, job.lease, job.late = "waiting", None, None

    # -- control -----------------------------------------------------------------------------------------------

    @rule(number=PICK, verb=st.sampled_from(("cancel", "promote", "discard", "revive_dead", "revive_done")))
    def control(self, number: int, verb: str) -> None:
        getattr(self, verb)(number)

    def cancel(self, number: int) -> None:
        job = self.model.jobs.get(self.pick(number))
        allowed = job is not None and job.state in ("waiting", "delayed", "waiting-children")
        assert self.refused("cancel", job.id if job else "nobody") != allowed
        if job is not None and allowed:
            self.model.take_away(job)

    def promote(self, number: int) -> None:
        job = self.model.jobs.get(self.pick(number))
        allowed = job is not None and job.state == "delayed"
        assert self.refused("promote", job.id if job else "nobody") != allowed
        if job is not None and allowed:
            job.run_at, job.state = self.model.now, "waiting"

    @rule(number=PICK, delay=st.sampled_from((0, 100, 1000)))
    def change_delay(self, number: int, delay: int) -> None:
        job = self.model.jobs.get(self.pick(number))
        token = job.lease.token if job is not None and job.lease is not None else None
        allowed = job is not None and job.state in ("waiting", "delayed", "active")
        assert self.refused("change_delay", job.id if job else "nobody", delay, token) != allowed
        if job is not None and allowed:
            job.run_at = self.model.now + delay
            job.state = self.model.by_time(job)
            if job.lease is not None:
                job.late, job.lease = (job.lease.token, "final"), None

    @rule(number=PICK, priority=st.sampled_from((0, 0, 1, -1)), lifo=st.sampled_from((None, True, False)))
    def change_priority(self, number: int, priority: int, lifo: bool | None) -> None:
        job = self.model.jobs.get(self.pick(number))
        allowed = job is not None and job.state in ("waiting", "delayed")
        assert self.refused("change_priority", job.id if job else "nobody", priority, lifo) != allowed
        if job is not None and allowed:
            job.priority = priority
            job.lifo = job.lifo if lifo is None else lifo

    def discard(self, number: int) -> None:
        job = self.model.jobs.get(self.pick(number))
        token = job.lease.token if job is not None and job.lease is not None else None
        allowed = job is not None and job.state in LIVE
        assert self.refused("discard", job.id if job else "nobody", token) != allowed
        if job is not None and allowed:
            if job.lease is not None:
                job.late, job.lease = (job.lease.token, "final"), None
            self.model.bury(job, drop=False)

    @rule(queue=QUEUES, is_paused=st.sampled_from((False, False, True)))
    def pause(self, queue: str, is_paused: bool) -> None:
        (self.rig.pause if is_paused else self.rig.resume)(queue)
        (self.model.paused.add if is_paused else self.model.paused.discard)(queue)

    @precondition(lambda self: len(self.model.jobs) > 5)
    @rule(queue=QUEUES, state=st.sampled_from(("drain", None, "waiting", "delayed", "completed", "failed")))
    def sweep_out(self, queue: str, state: str | None) -> None:
        many = {"drain": ("waiting", "delayed"), None: ("waiting", "delayed", "completed", "failed")}
        gone = self.model.of(queue, *many.get(state, (state,)))
        if any(
            len({job.policy for job in gone if job.id in parent.pending}) > 1 for parent in self.model.jobs.values()
        ):
            return  # which policy counts depends on which job goes first, and nobody promises an order
        if state == "drain":
            assert self.rig.drain(queue) == len(gone)
        else:
            assert sorted(self.rig.clean(queue, 0, state, 1000)) == sorted(job.id for job in gone)
        for job in gone:
            self.model.take_away(job)

    def revive_dead(self, number: int) -> None:
        job = self.model.jobs.get(self.pick(number))
        expected = int(job is not None and job.state == "failed" and self.model.revive(job))
        assert self.rig.retry_dlq(job.queue if job else "a", job.id if job else "nobody", None, None) == expected

    def revive_done(self, number: int) -> None:
        job = self.model.jobs.get(self.pick(number))
        expected = int(job is not None and job.state == "completed" and self.model.revive(job))
        queue = job.queue if job else "a"
        assert self.rig.retry_completed(queue, job.id if job else "nobody", None, None) == expected

    # -- time and trouble --------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from((1, 50, 100, 1000, LEASE_MS + LATENESS_MS, STALL_MS + LATENESS_MS)))
    def wait(self, ms: int) -> None:
        self.let_pass(ms)

    @rule()
    def reopen(self) -> None:
        if not self.kind.is_persistent:
            return
        self.rig.reopen()
        self.holders = [{}, {}]
        self.model.departed.clear()
        for job in self.model.jobs.values():
            job.late = None
            if job.lease is not None:
                job.state, job.lease = "waiting", None

    # -- agreement ---------------------------------------------------------------------------------------------

    @invariant()
    def same_jobs(self) -> None:
        assert self.seen() == {
            job.id: Seen(job.queue, job.state, job.attempts, job.stalls, job.priority, job.lease is not None)
            for job in self.model.jobs.values()
        }

    @invariant()
    def same_keys(self) -> None:
        for queue in ("a", "b"):
            for key in ("k0", "k1"):
                owner = self.model.keys.get((queue, key))
                held_by = self.rig.wait(self.rig.backend.unique_key_owner(queue, key))
                assert held_by == (owner.id if owner else None)


class MemoryMachine(Machine):
    kind = KINDS[0]


class ValkeyMachine(Machine):
    kind = VALKEY

    def seen(self) -> dict[str, Seen]:
        client = shared_server().client()
        keys = [key for key in client.keys("*}:job:*")]
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.hgetall(key)
        found = {}
        for key, h in zip(keys, pipe.execute(), strict=True):
            queue, _, job_id = key.partition("{")[2].partition("}:job:")
            numbers = (int(h.get(name, 0)) for name in ("attemptsMade", "stalledCount", "hp"))
            found[job_id] = Seen(queue, h["state"], *numbers, h["state"] == "active")
        return found


def _settings(quick: int, full: int) -> settings:
    return settings(
        max_examples=scaled(quick, full),
        stateful_step_count=50,
        suppress_health_check=list(HealthCheck),
    )


# Tens of thousands of commits wait for the disk and for their turn: minutes where the machine is shared, and several
# times as many with the full counts.
pytestmark = pytest.mark.timeout(scaled(600, 1_800))

TestSqlite = Machine.TestCase
TestSqlite.settings = _settings(120, 1000)
TestMemory = MemoryMachine.TestCase
TestMemory.settings = _settings(100, 500)
TestValkey = ValkeyMachine.TestCase
TestValkey.settings = _settings(40, 500)
