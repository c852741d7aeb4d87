"""When the disk refuses a tick: nothing of it remains, leases survive, writes are refused until it recovers."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from headrace.backends.base import Ack, Demand, FamilyNode, FlowPush, GroupDemand, NewStep, Totals
from headrace.backends.local import slices
from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.journal import Journal
from headrace.backends.local.slices import Breath, run_now
from headrace.clock import ManualClock
from headrace.errors import StorageUnavailable
from headrace.model import CronEntry, Dedup, DlqFilter, Event, FlowStatus, Webhook
from headrace.states import State
from tests.conformance import invariants
from tests.conformance.rig import Kind, Rig, pack, seeded, spec
from tests.conformance.snapshot import as_restarted, snapshot


class BrokenJournal(Journal):
    """The real journal on a disk that refuses when told to, before or after the rows were written."""

    refuses: str | None = None

    def commit(self, last_seq: int, totals: Totals) -> None:
        if self.refuses == "at once":
            raise StorageUnavailable("the disk refuses")
        super().commit(last_seq, totals)

    def _write_lone(self, last_seq: int, totals: Totals) -> bool:
        return self.refuses != "late" and super()._write_lone(last_seq, totals)

    def _run_statements(self) -> None:
        if self.refuses == "late":
            self.db.execute("ROLLBACK")  # as SQLite does by itself when the disk is full
            raise apsw.FullError("database or disk is full")
        super()._run_statements()

    def probe(self) -> None:
        if self.refuses is not None:
            raise StorageUnavailable("the disk still refuses")
        super().probe()


def _broken(folder: Path, clock: ManualClock) -> LocalBackend:
    backend = LocalBackend(folder / "jobs.db", clock=clock, rng=seeded())
    backend._journal = BrokenJournal(folder / "jobs.db")
    return backend


BROKEN = Kind("sqlite on a broken disk", _broken, invariants.check, is_persistent=True)


def refuse(events: list[Event]) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def step_of(flow_id: str, job_id: str) -> FlowPush:
    return FlowPush("q", spec(custom_id=job_id, flow_id=flow_id))


class World:
    """A backend with a job of every kind, and the claims of a worker."""

    def __init__(self, folder: Path) -> None:
        self.rig = rig = Rig(BROKEN, folder)
        self.holder: dict[str, int] = {}
        done = rig.push("q", "done", custom_id="done", unique_key="done")
        rig.run(result="r" * 2000)
        rig.push(data="dead", custom_id="dead")
        rig.advance(5)
        rig.bury()
        rig.push(data="dead too", custom_id="dead too")
        rig.advance(5)
        rig.bury()
        rig.push(data="x" * 30_000, custom_id="large", max_attempts=2, backoff=100)
        rig.push(data="held", custom_id="held", unique_key="held", backoff=0, group_id="g")
        rig.push(data="leased", custom_id="leased", max_attempts=1)
        claims = rig.pull(count=3, lease_ms=1000, holder=self.holder, group=GroupDemand())
        self.held = {held.id: held for held in claims}
        rig.push(data="waiting", custom_id="waiting", unique_key="k", group_id="g")
        rig.push(custom_id="urgent", priority=5)
        rig.push(custom_id="delayed", delay=500)
        rig.push(custom_id="keyed", unique_key="ttl", dedup=Dedup(ttl=9000))
        rig.push_family(
            ("child", "q", {"parent_id": "parent", "priority": 9, "fail_parent_on_failure": True}),
            ("parent", "q", {"children_ids": ["child"], "depends_on": ["child", "leased"]}),
            ("first", "family", {"parent_id": "head"}),
            ("second", "family", {"parent_id": "head"}),
            ("third", "family", {"parent_id": "head"}),
            (
                "head",
                "family",
                {"children_ids": ["first", "second", "third"], "depends_on": ["first", "second", "third"]},
            ),
        )
        rig.run("family")
        self.held |= {"second": rig.take("family"), "third": rig.take("family")}
        for flow_id, job_id in (("flow", "waiting step"), ("another", "spare")):
            rig.start_flow(flow_id, "w", "q", [NewStep("started", body=pack(1))], [step_of(flow_id, job_id)])
        rig.start_flow("ended", "w", "q", [NewStep("started", body=pack(1))], [])
        rig.advance_flow("ended", 1, FlowStatus.COMPLETED, [], [], None)
        rig.add_log("waiting", "line", "info")
        rig.set_concurrency("q", 50)
        rig.put_cron(CronEntry("c", "q", bytes(pack(1)), None, 1000.0, 5000.0))
        rig.add_webhook(Webhook("w", "https://example.com", [], None, None, 1.0))
        assert rig.states(done, *self.held) == ["completed", *["active"] * 5]

    def go(self, verb: str, *args: object, **options: object) -> object:
        """A verb within the tick that will fail: not committed."""
        return run_now(getattr(self.rig.backend, verb)(*args, **options))

    def fail_tick(self, how: str) -> None:
        journal = self.rig.backend._journal
        journal.refuses = how
        with pytest.raises(StorageUnavailable):
            self.rig.backend.commit()
        journal.refuses = None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.rig.close()


def ack(world: World, name: str, remove: bool | None = None) -> None:
    world.go("complete", [Ack(name, world.held[name].token, b"\x01", remove)])


def fail(world: World, name: str, *, unrecoverable: bool = False) -> None:
    world.go(
        "fail",
        name,
        token=world.held[name].token,
        error="boom",
        stack=["s"],
        unrecoverable=unrecoverable,
        remove=None,
    )


def claim_and_complete(world: World) -> None:
    (claim,) = world.go("claim", "q", Demand(1, "w", 1000, world.holder))
    world.go("complete", [Ack("child", claim.token)])


def claim_all(world: World) -> None:
    world.go("claim", "q", Demand(20, "w", 1000, world.holder))
    assert world.rig.backend._jobs["held"].state is State.ACTIVE


def decide(world: World, status: FlowStatus | None = None) -> None:
    ack = Ack("held", world.held["held"].token)
    steps, jobs = [NewStep("done", "a", body=pack(2))], [step_of("flow", "next step")]
    world.go("advance_flow", "flow", 1, status, steps, jobs, ack, ("waiting step",))


def wait(world: World, ms: int) -> None:
    world.rig.clock.advance(ms)
    world.go("sweep")


TICKS: dict[str, Callable[[World], object]] = {
    "push": lambda w: w.go("insert_one", "q", spec("new")),
    "push to a new queue": lambda w: w.go("insert_one", "new", spec("new")),
    "push a batch": lambda w: w.go("insert", "q", [spec(n, unique_key=f"n{n}") for n in range(200)]),
    "push a large job": lambda w: w.go("insert_one", "q", spec("z" * 50_000)),
    "push a dependent": lambda w: w.go("insert_one", "q", spec(depends_on=["waiting", "large"])),
    "push an id that is used once": lambda w: w.go("insert_one", "q", spec(custom_id="once", id_ttl=1000)),
    "push a batch of such ids": lambda w: w.go(
        "insert", "q", [spec(custom_id=f"o{n}", id_ttl=1000) for n in range(70)]
    ),
    "push a child": lambda w: w.go("insert_one", "q", spec(parent_id="parent")),
    "push a child of a job that has not begun": lambda w: w.go("insert_one", "q", spec(parent_id="waiting")),
    "new generation of a completed job": lambda w: w.go("insert_one", "q", spec("2", custom_id="done")),
    "new generation of a dead letter": lambda w: w.go("insert_one", "q", spec("2", custom_id="dead")),
    "replace the owner of a key": lambda w: w.go("insert_one", "q", spec(unique_key="k", dedup=Dedup(replace=True))),
    "replace an owner at work": lambda w: w.go("insert_one", "q", spec(unique_key="held", dedup=Dedup(replace=True))),
    "extend a key": lambda w: w.go("insert_one", "q", spec(unique_key="ttl", dedup=Dedup(ttl=90_000, extend=True))),
    "claim and complete": claim_and_complete,
    "complete": lambda w: ack(w, "held"),
    "complete and remove": lambda w: ack(w, "held", remove=True),
    "complete what others wait for": lambda w: ack(w, "leased"),
    "complete one of the children": lambda w: ack(w, "second"),
    "complete and remove one of the children": lambda w: ack(w, "second", remove=True),
    "complete the last children": lambda w: (ack(w, "third"), ack(w, "second")),
    "complete a child and let another go": lambda w: (ack(w, "second"), w.go("remove_child_dependency", "third")),
    "complete a child and cancel its parent": lambda w: (ack(w, "second"), w.go("cancel", "head")),
    "complete a large job": lambda w: ack(w, "large"),
    "fail and retry": lambda w: fail(w, "held"),
    "fail a job and hand it out again": lambda w: (fail(w, "held"), claim_all(w)),
    "put a job off for no time and hand it out again": lambda w: (
        w.go("change_delay", "held", 0, w.held["held"].token),
        claim_all(w),
    ),
    "fail and retry a large job": lambda w: fail(w, "large"),
    "fail for good": lambda w: fail(w, "leased"),
    "fail a child and its parent": lambda w: w.go("discard", "child", None),
    "let leases run out": lambda w: wait(w, 1100),
    "mature": lambda w: wait(w, 600),
    "cancel": lambda w: w.go("cancel", "waiting"),
    "cancel what is blocked": lambda w: w.go("cancel", "parent"),
    "promote": lambda w: w.go("promote", "delayed"),
    "delay": lambda w: w.go("change_delay", "waiting", 5000, None),
    "change priority": lambda w: w.go("change_priority", "waiting", 7, True),
    "progress": lambda w: w.go("set_progress", "held", 50, "half"),
    "update": lambda w: w.go("update", "waiting", pack("new")),
    "update a large job at work": lambda w: w.go("update", "large", pack("small now")),
    "make a large job small and take it away": lambda w: (
        w.go("update", "large", pack("small now")),
        w.go("cancel", "large", force=True),
    ),
    "discard": lambda w: w.go("discard", "waiting", None),
    "discard a job at work": lambda w: w.go("discard", "held", w.held["held"].token),
    "go back to waiting beside a push": lambda w: (
        w.go("move_to_wait", "held", w.held["held"].token),
        w.go("insert_one", "q", spec("new")),
    ),
    "step back for children": lambda w: w.go("move_to_waiting_children", "held", w.held["held"].token),
    "put off a job at work": lambda w: w.go("move_to_delayed", "held", 5000, w.held["held"].token),
    "let a child go": lambda w: w.go("remove_child_dependency", "child"),
    "remove unprocessed children": lambda w: w.go("remove_unprocessed_children", "parent"),
    "take a key away": lambda w: w.go("remove_unique_key", "q", "k"),
    "take a key away from a job at work": lambda w: w.go("remove_unique_key", "q", "held"),
    "retry a dead letter": lambda w: w.go("retry_dlq", "q", "dead", None, None),
    "purge the dead letters": lambda w: w.go("purge_dlq", "q"),
    "retry a completed job": lambda w: w.go("retry_completed", "q", "done", None, None),
    "clean": lambda w: w.go("clean", "q", 0, None, 1000),
    "drain": lambda w: w.go("drain", "q"),
    "obliterate": lambda w: w.go("obliterate", "q"),
    "pause": lambda w: w.go("pause", "q"),
    "pause a new queue": lambda w: w.go("pause", "new"),
    "change limits": lambda w: w.go("set_concurrency", "q", 1),
    "log": lambda w: w.go("add_log", "held", "line", "info"),
    "clear logs": lambda w: w.go("clear_logs", "waiting", None),
    "put a schedule": lambda w: w.go("put_cron", CronEntry("d", "q", b"\x01", None, 1.0, 1.0)),
    "delete a schedule": lambda w: w.go("delete_cron", "c"),
    "fire a schedule": lambda w: w.go(
        "fire_cron", CronEntry("c", "q", b"\x01", None, 1.0, 6000.0, last_slot=5000.0), spec()
    ),
    "begin a flow": lambda w: w.go("start_flow", "new", "w", "q", [NewStep("started")], [step_of("new", "new step")]),
    "carry out a decision": decide,
    "end a flow": lambda w: decide(w, FlowStatus.FAILED),
    "lose a job of a flow": lambda w: w.go("cancel", "waiting step"),
    "remove a webhook": lambda w: w.go("remove_webhook", "w"),
}
EXPIRES_LEASES = ("let leases run out",)


@pytest.mark.parametrize("how", ["at once", "late"])
@pytest.mark.parametrize("tick", TICKS)
def test_nothing_of_a_failed_tick_remains(world: World, tick: str, how: str) -> None:
    backend = world.rig.backend
    before, holder = snapshot(backend), dict(world.holder)
    TICKS[tick](world)
    world.fail_tick(how)
    after = snapshot(backend)
    if tick in EXPIRES_LEASES:
        before, after = as_restarted(before), as_restarted(after)
    else:
        assert world.holder == holder
    after["queues"].pop("new", None)  # an empty queue that was spoken of is no trace
    for part, value in before.items():
        assert after[part] == value, part
    invariants.check(backend)
    assert backend.take_events() == []


@pytest.mark.parametrize("tick", TICKS)
def test_the_same_tick_succeeds_when_the_disk_is_well_again(world: World, tick: str) -> None:
    """The failed tick left the backend as able as if it had never been: its repetition is a normal one."""
    before = len(world.rig.events)
    if tick not in EXPIRES_LEASES:
        TICKS[tick](world)
        world.fail_tick("late")
        assert world.rig.backend.probe() is True
    TICKS[tick](world)
    world.rig.settle()
    shot = as_restarted(snapshot(world.rig.backend))
    world.rig.reopen()
    again = as_restarted(snapshot(world.rig.backend))
    for part, value in shot.items():
        assert again[part] == value, part
    assert len(world.rig.events) >= before


def test_a_claim_is_taken_back_with_its_tick(world: World) -> None:
    world.go("claim", "q", Demand(1, "w", 1000, world.holder))
    world.go("insert_one", "q", spec())
    world.fail_tick("late")
    assert world.rig.state("child") == "waiting"
    assert "child" not in world.holder
    world.rig.backend.probe()
    assert world.rig.take().id == "child"


def test_a_claim_that_is_all_of_its_tick_outlives_a_log_that_refuses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is stored, and its reply has left: another worker must not get the job as well."""
    rig, backend = world.rig, world.rig.backend
    rig.take_words()
    with monkeypatch.context() as full:
        full.setattr(backend._log, "record", refuse)
        first = rig.take(holder=world.holder)
        assert (backend.is_degraded, backend.storage_status().disk_full) == (True, True)
        rig.settle()
        assert (rig.state(first.id), first.id in world.holder) == ("active", True)
        assert rig.take_words() == []
    assert backend.probe() is True
    second = rig.take()
    assert rig.take_words() == ["pulled", "pulled"]
    assert second.id != first.id
    assert rig.ack(first) == []
    assert rig.state(first.id) == "completed"


def test_if_the_disk_fails_again_only_its_event_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = world.rig
    rig.take_words()
    with monkeypatch.context() as full:
        full.setattr(rig.backend._log, "record", refuse)
        held = rig.take(holder=world.holder)
    assert rig.backend.probe() is True
    world.go("insert_one", "q", spec())
    world.fail_tick("late")
    assert (rig.state(held.id), held.id in world.holder) == ("active", True)
    assert rig.backend.probe() is True
    assert rig.ack(held) == []
    assert rig.take_words() == ["completed"]


def test_a_job_that_is_read_again_does_not_take_a_key_that_another_has_by_now(world: World) -> None:
    rig = world.rig
    rig.advance(10_000)  # the key of "keyed" is free
    rig.push(custom_id="heir", unique_key="ttl")
    world.go("change_priority", "keyed", 3, None)
    world.fail_tick("late")
    assert rig.unique_key_owner("q", "ttl") == "heir"
    rig.backend.probe()
    rig.settle()
    rig.reopen()
    assert rig.unique_key_owner("q", "ttl") == "heir"


def test_a_query_that_the_disk_refuses_takes_its_tick_along(world: World) -> None:
    """It ran what the tick had queued, and nobody knows how much of that is left."""
    before = snapshot(world.rig.backend)
    world.go("insert_one", "q", spec("new", custom_id="new"))
    world.go("add_log", "held", "line", "info")
    world.rig.backend._journal.refuses = "late"
    with pytest.raises(StorageUnavailable):
        world.go("logs", "held")
    world.rig.backend._journal.refuses = None
    world.go("insert_one", "q", spec("newer", custom_id="newer"))
    with pytest.raises(StorageUnavailable):
        world.rig.backend.commit()
    world.rig.backend.probe()
    world.rig.settle()
    assert snapshot(world.rig.backend) == before
    world.rig.reopen()
    assert world.rig.states("new", "newer") == ["unknown", "unknown"]


def test_a_tick_that_fails_for_any_other_reason_is_taken_back_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(world.rig.backend)
    world.go("insert_one", "q", spec("new"))
    with monkeypatch.context() as patch:
        patch.setattr(world.rig.backend._journal, "commit", lambda *_: 1 // 0)
        with pytest.raises(StorageUnavailable, match="nothing was stored"):
            world.rig.backend.commit()
    assert snapshot(world.rig.backend) == before
    assert world.rig.backend.probe() is True
    world.rig.push()


def test_a_rate_limit_that_was_not_stored_does_not_count(world: World) -> None:
    rig = world.rig
    rig.set_rate_limit("limited", 1, 1000, None)
    rig.push_many(*(spec(n) for n in range(9)), queue="limited")
    world.go("set_rate_limit", "limited", 100, 1000, None)
    assert len(world.go("claim", "limited", Demand(3, "w", 1000, world.holder))) == 3
    world.fail_tick("late")
    rig.backend.probe()
    rig.settle()
    assert len(rig.pull("limited", 5)) == 1


def test_the_holder_may_repeat_its_ack(world: World) -> None:
    ack(world, "held")
    world.fail_tick("at once")
    world.rig.backend.probe()
    ack(world, "held")
    world.rig.settle()
    assert world.rig.state("held") == "completed"


def test_a_parent_still_hears_of_its_child(world: World) -> None:
    ack(world, "leased")
    world.fail_tick("late")
    world.rig.backend.probe()
    ack(world, "leased")
    world.rig.settle()
    world.rig.cancel("urgent")
    world.rig.run()
    assert world.rig.state("parent") == "waiting"


def test_degraded_refuses_and_a_probe_recovers(world: World) -> None:
    backend = world.rig.backend
    assert backend.storage_status().error is None
    world.go("insert_one", "q", spec())
    world.fail_tick("late")
    status = backend.storage_status()
    assert (backend.is_degraded, status.disk_full) == (True, True)
    assert status.error is not None
    assert "Storage is full" in status.error
    assert status.since == world.rig.clock.now_ms()
    with pytest.raises(StorageUnavailable, match="Storage is full"):
        backend.check_writable()
    backend._journal.refuses = "late"
    assert backend.probe() is False
    backend._journal.refuses = None
    assert backend.probe() is True
    assert (backend.is_degraded, backend.storage_status().error) == (False, None)
    backend.check_writable()
    world.rig.push()


def test_queries_answer_while_the_disk_refuses(world: World) -> None:
    """Counting promotes what is due, but must not make a tick dirty that can only fail."""
    world.go("insert_one", "q", spec())
    world.fail_tick("late")
    world.rig.backend._journal.refuses = "at once"
    world.rig.clock.advance(1000)
    assert run_now(world.rig.backend.counts("q")).delayed == 1
    assert [queue.name for queue in run_now(world.rig.backend.queues())] == ["q", "family"]
    assert len(run_now(world.rig.backend.dead_letters("q", DlqFilter(), None))) == 2
    world.rig.backend.commit()
    world.rig.backend._journal.refuses = None
    world.rig.backend.probe()
    world.rig.settle()
    assert world.rig.state("delayed") == "delayed"
    world.rig.sweep()
    assert world.rig.state("delayed") == "waiting"


def test_numbers_of_events_are_given_again(world: World) -> None:
    last = world.rig.events[-1].seq
    world.go("insert_one", "q", spec())
    world.go("insert_one", "q", spec())
    world.fail_tick("late")
    world.rig.backend.probe()
    world.rig.push()
    assert world.rig.events[-1].seq == last + 1


BATCHES = {
    "plain": [spec(n) for n in range(5000)],
    "with keys": [spec(n, unique_key=f"n{n}") for n in range(1001)],
}


@pytest.mark.parametrize("batch", BATCHES)
def test_a_verb_between_two_slices_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch, batch: str) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    before = snapshot(world.rig.backend)
    work = world.rig.backend.insert("q", BATCHES[batch])
    assert isinstance(work.send(None), Breath)
    world.go("insert_one", "q", spec("makes the tick dirty"))
    world.fail_tick("late")
    with pytest.raises(StorageUnavailable, match="stopped half way"):
        run_now(work)
    world.rig.backend.probe()
    world.rig.settle()
    assert snapshot(world.rig.backend) == before


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_an_obliteration_that_is_stopped_is_finished_when_the_disk_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Unless its first slice was not stored: then nothing has happened. None of it comes back with a restart."""
    rig = world.rig
    rig.insert("q", [spec(n, group_id=f"g{n % 3}", unique_key=f"n{n}") for n in range(900)])
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    work = rig.backend.obliterate("q")
    for _ in range(turns):
        work.send(None)
        rig.backend.commit()
        rig.backend.take_events()
    work.send(None)
    world.go("insert_one", "q", spec("new", custom_id="new", unique_key="new"))
    if turns:
        world.go("claim", "q", Demand(1, "w", 1000, world.holder))
        rig.backend.commit()
        world.go("set_progress", "new", 50, None)
    world.fail_tick("late")
    with pytest.raises(StorageUnavailable, match="stopped half way"):
        run_now(work)
    rig.backend.probe()
    rig.backend.commit()
    rig.backend.take_events()
    invariants.check(rig.backend)
    left = {job.id for job in rig.backend._jobs.values() if job.queue.name == "q" and job.name != "decide"}
    assert left == {"new"} if turns else len(left) > 900
    run_now(rig.backend.obliterate("q"))
    rig.backend.commit()
    rig.backend.take_events()
    invariants.check(rig.backend)
    run_now(rig.backend.close())
    rig.backend = rig.kind.make(rig.folder, rig.clock)
    run_now(rig.backend.open())
    assert {job.queue.name for job in rig.backend._jobs.values()} <= {"q", "family"}
    assert [job.id for job in rig.backend._jobs.values() if job.queue.name == "q" and job.name != "decide"] == []


LONG: dict[str, Callable[[LocalBackend], Any]] = {
    "plain": lambda backend: backend.insert("q", BATCHES["plain"]),
    "with keys": lambda backend: backend.insert("q", BATCHES["with keys"]),
    "with keys that are taken": lambda backend: backend.insert(
        "q", [*BATCHES["with keys"], spec(unique_key="k"), *(spec(custom_id="waiting", delay=d) for d in (0, 9))]
    ),
    "family": lambda backend: backend.insert_family(
        [
            FamilyNode("top", "q", spec(depends_on=["m0", "m1"], children_ids=["m0", "m1"])),
            *(FamilyNode(f"m{n}", "q", spec(n, parent_id="top")) for n in range(2)),
            *(FamilyNode(f"m{n}", "q", spec("x" * 20_000 if n == 7 else n)) for n in range(2, 1100)),
        ]
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_batch_is_there_as_a_whole_or_not_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever slice it is in when the server dies."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    before = as_restarted(snapshot(world.rig.backend))
    for turns in (1, 5, 7):
        work = LONG[kind](world.rig.backend)
        for _ in range(turns):
            assert isinstance(work.send(None), Breath)
            world.rig.backend.commit()
        work.close()
        world.rig.reopen()
        assert as_restarted(snapshot(world.rig.backend)) == before
    size = sum(world.rig.count().values())
    run_now(LONG[kind](world.rig.backend))
    world.rig.settle()
    counts = world.rig.count()
    assert sum(counts.values()) - size >= 1001
    world.rig.reopen()
    assert world.rig.count()["completed"] == counts["completed"]
    assert sum(world.rig.count().values()) == sum(counts.values())


@pytest.mark.parametrize("refusal", ["at once", "late"])
@pytest.mark.parametrize("kind", LONG)
def test_a_long_batch_whose_last_tick_fails_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, refusal: str
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 1e-9)
    before = snapshot(world.rig.backend)
    work = LONG[kind](world.rig.backend)
    with contextlib.suppress(StopIteration):
        while work.send(None):
            world.rig.backend.commit()
    world.fail_tick(refusal)
    world.rig.backend.probe()
    world.rig.settle()
    assert snapshot(world.rig.backend) == before
    world.rig.reopen()
    assert as_restarted(snapshot(world.rig.backend)) == as_restarted(before)


def test_a_family_is_admitted_within_one_tick(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: a server that dies has all of it or nothing."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    work = world.rig.backend.insert_family([FamilyNode(f"member-{n}", "q", spec(n)) for n in range(1000)])
    breaths = list(work.__await__())
    assert breaths == []
