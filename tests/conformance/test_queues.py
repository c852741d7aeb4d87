"""Whole queues: drain, clean, obliterate, lists, counts."""

from __future__ import annotations

from contextlib import suppress

import pytest

from headrace.backends import listing
from headrace.backends.base import Ack
from headrace.backends.local import slices
from headrace.backends.local.backend import MAX_IDLE_QUEUES
from headrace.backends.local.slices import Breath, run_now
from headrace.errors import NotFound
from headrace.model import DlqConfig, Event, StallConfig
from tests.conformance.rig import Held, Rig, spec


def one_of_each(rig: Rig) -> dict[str, str]:
    """Jobs of every state, by state; the active one is leased."""
    completed, failed, active = rig.push(), rig.push(), rig.push()
    rig.run(result=1)
    rig.bury()
    rig.take()
    waiting = rig.push()
    return {
        "completed": completed,
        "failed": failed,
        "active": active,
        "waiting": waiting,
        "prioritized": rig.push(priority=1),
        "delayed": rig.push(delay=1_000_000),
        "waiting-children": rig.push(depends_on=[waiting]),
    }


def left(rig: Rig, jobs: dict[str, str]) -> set[str]:
    return {state for state, job_id in jobs.items() if rig.state(job_id) != "unknown"}


ALL = {"completed", "failed", "active", "waiting", "prioritized", "delayed", "waiting-children"}


class TestCounts:
    def test_every_state_is_counted(self, rig: Rig) -> None:
        one_of_each(rig)
        assert rig.count() == {
            "waiting": 2,
            "delayed": 1,
            "active": 1,
            "completed": 1,
            "failed": 1,
            "waitingChildren": 1,
            "prioritized": 1,
        }
        assert rig.count("nowhere") == {}

    def test_a_matured_job_counts_as_waiting(self, rig: Rig) -> None:
        rig.push(delay=10)
        rig.clock.advance(10)
        assert rig.count() == {"waiting": 1}

    def test_queues_are_listed_with_their_counts(self, rig: Rig) -> None:
        rig.push("a")
        rig.push("b", delay=5)
        rig.pause("b")
        listed = {queue.name: (queue.counts.waiting, queue.counts.delayed, queue.paused) for queue in rig.queues()}
        assert listed == {"a": (1, 0, False), "b": (0, 1, True)}


class TestDrain:
    def test_waiting_and_delayed_jobs_go(self, rig: Rig) -> None:
        jobs = one_of_each(rig)
        assert rig.drain("q") == 3
        assert left(rig, jobs) == {"completed", "failed", "active", "waiting-children"}
        assert rig.drain("q") == 0
        assert rig.drain("nowhere") == 0

    def test_keys_and_ids_are_free_again(self, rig: Rig) -> None:
        rig.push(custom_id="x", unique_key="k")
        rig.drain("q")
        assert rig.push(data="new", custom_id="x", unique_key="k") == "x"
        assert rig.look("x")["data"] == "new"

    def test_a_long_drain_gives_way_and_spares_what_came_in_between(
        self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        local_rig.is_checking = False
        local_rig.push_many(*(spec(n) for n in range(5000)))
        work = local_rig.backend.drain("q")
        assert isinstance(work.send(None), Breath)
        held = local_rig.pull(count=3)
        new = local_rig.push()
        count = run_now(work)
        local_rig.is_checking = True
        local_rig.settle()
        assert count + len(held) == 5000
        assert local_rig.state(new) == "waiting"
        assert local_rig.count() == {"waiting": 1, "active": 3}


class TestClean:
    @pytest.mark.parametrize(
        ("state", "gone"),
        [
            (None, {"waiting", "prioritized", "delayed", "completed", "failed"}),
            ("waiting", {"waiting", "prioritized"}),
            ("wait", {"waiting", "prioritized"}),
            ("prioritized", {"prioritized"}),
            ("delayed", {"delayed"}),
            ("completed", {"completed"}),
            ("failed", {"failed"}),
            ("waiting-children", {"waiting-children"}),
            ("active", set()),
            ("nonsense", set()),
        ],
    )
    def test_which_states_are_cleaned(self, rig: Rig, state: str | None, gone: set[str]) -> None:
        jobs = one_of_each(rig)
        removed = rig.clean("q", 0, state, 1000)
        assert {job_id for word, job_id in jobs.items() if word in gone} == set(removed)
        assert left(rig, jobs) == ALL - gone

    def test_the_grace_spares_what_is_young(self, rig: Rig) -> None:
        old = rig.push()
        rig.advance(1000)
        young = rig.push()
        assert rig.clean("q", 1000, "waiting", 1000) == [old]
        assert rig.state(young) == "waiting"

    def test_finished_jobs_are_as_old_as_their_end(self, rig: Rig) -> None:
        done, failed = rig.push(), rig.push()
        rig.advance(1000)
        rig.run()
        rig.bury()
        assert rig.clean("q", 500, None, 1000) == []
        rig.advance(500)
        assert sorted(rig.clean("q", 500, None, 1000)) == sorted([done, failed])

    def test_the_limit_is_kept(self, rig: Rig) -> None:
        rig.push_many(*(spec(n) for n in range(10)))
        assert len(rig.clean("q", 0, "waiting", 4)) == 4
        assert rig.count() == {"waiting": 6}
        assert rig.clean("nowhere", 0, None, 10) == []


class TestObliterate:
    def test_everything_goes_and_settings_return_to_defaults(self, rig: Rig) -> None:
        jobs = one_of_each(rig)
        rig.pause("q")
        rig.set_concurrency("q", 1)
        rig.set_rate_limit("q", 1, 1000, None)
        rig.set_stall_config("q", StallConfig(max_stalls=9))
        rig.set_dlq_config("q", DlqConfig(max_entries=9))
        rig.obliterate("q")
        assert left(rig, jobs) == set()
        assert rig.queues() == []
        assert rig.is_paused("q") is False
        assert (rig.limits("q").rate_limit, rig.limits("q").concurrency_limit) == (None, None)
        assert (rig.stall_config("q"), rig.dlq_config("q")) == (StallConfig(), DlqConfig())
        rig.push()
        assert len(rig.pull()) == 1

    def test_an_active_job_cannot_be_completed_any_more(self, rig: Rig) -> None:
        rig.push()
        holder: dict[str, int] = {}
        held = rig.take(holder=holder)
        rig.obliterate("q")
        assert holder == {}
        with pytest.raises(NotFound):
            rig.ack(held)

    def test_an_unknown_queue_is_nothing(self, rig: Rig) -> None:
        rig.obliterate("nowhere")
        assert rig.take_words() == []

    def test_other_queues_stay(self, rig: Rig) -> None:
        rig.push("a", custom_id="x")
        other = rig.push("b", depends_on=["x"])
        rig.obliterate("a")
        assert rig.state(other) == "waiting-children"

    def test_work_goes_on_between_its_slices(self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """Retention, leases and pushes do their part while a large queue is being taken down."""
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        local_rig.is_checking = False
        local_rig.push_many(*(spec(n, custom_id=f"c{n}", remove_on_fail=True, max_attempts=1) for n in range(2000)))
        held: list[Held] = local_rig.pull(count=1000, lease_ms=1000)
        for one in held[:500]:
            local_rig.ack(one)
        work = local_rig.backend.obliterate("q")
        assert isinstance(work.send(None), Breath)
        local_rig.backend.max_completed = 0
        local_rig.retire_completed()  # completed jobs of the dying queue
        local_rig.advance(2000)  # its leases run out and their jobs are dropped
        again = local_rig.push(data="new", custom_id="c1")
        assert local_rig.count() == {"waiting": 1}
        run_now(work)
        local_rig.is_checking = True
        local_rig.settle()
        assert local_rig.count() == {"waiting": 1}
        assert local_rig.look(again)["data"] == "new"
        assert local_rig.state("c2") == "unknown"


class TestVeryManyQueues:
    def test_those_without_jobs_settings_and_listeners_are_forgotten(self, local_rig: Rig) -> None:
        rig = local_rig
        for n in range(MAX_IDLE_QUEUES - 5):
            rig.backend._queue(f"idle {n}")
        rig.push("used")
        rig.pause("paused")
        rig.backend.watch("watched", +1)
        rig.retire_queues()
        assert len(rig.queues()) == MAX_IDLE_QUEUES - 2
        for n in range(3):
            rig.backend._queue(f"one more {n}")
        rig.retire_queues()
        assert {queue.name for queue in rig.queues()} == {"used", "paused", "watched"}

    def test_a_long_batch_finds_its_queue_again(self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = local_rig
        monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
        rig.backend._most_queues = 0
        work = rig.backend.insert("q", [spec(n, unique_key=str(n)) for n in range(1500)])
        with suppress(StopIteration):
            while isinstance(work.send(None), Breath):
                rig.retire_queues()
                rig.backend._most_queues = 0
        rig.settle()
        assert rig.count()["waiting"] == 1500
        assert [held.job["data"] for held in rig.pull(count=3)] == [0, 1, 2]


def test_clean_removes_no_more_than_one_reply_can_list(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "REPLY_ROOM", 100)
    kept = set(rig.push_many(*[spec(n) for n in range(10)]))
    while kept:
        removed = rig.clean("q", 0, None, 1000)
        assert len(removed) == min(3, len(kept))  # 39 bytes each, and the last one begins below the limit
        assert kept >= set(removed)
        kept -= set(removed)
        assert set(rig.ids_in("waiting")) == kept


def _all_delayed(rig: Rig) -> None:
    rig.insert("q", [spec(n, delay=1000) for n in range(300)])


def _all_dead(rig: Rig) -> None:
    rig.insert("q", [spec(n) for n in range(300)])
    for job_id in rig.ids_in("waiting"):
        rig.discard(job_id, None)


def _all_done(rig: Rig) -> None:
    rig.insert("q", [spec(n) for n in range(300)])
    rig.complete([Ack(held.id, held.token) for held in rig.pull(count=300)])


LONG = {
    "promote": (_all_delayed, lambda rig: rig.backend.promote_many("q", None), lambda rig, ids: rig.cancel(ids[-1])),
    "retry the dead": (
        _all_dead,
        lambda rig: rig.backend.retry_dlq("q", None, None, None),
        lambda rig, ids: rig.remove_dead_letter("q", ids[-1]),
    ),
    "purge the dead": (
        _all_dead,
        lambda rig: rig.backend.purge_dlq("q"),
        lambda rig, ids: rig.retry_dlq("q", ids[-1], None, None),
    ),
    "retry the completed": (
        _all_done,
        lambda rig: rig.backend.retry_completed("q", None, None, None),
        lambda rig, ids: rig.retry_completed("q", ids[-1], None, None),
    ),
    "clean": (
        _all_delayed,
        lambda rig: rig.backend.clean("q", 0, None, 1000),
        lambda rig, ids: (rig.promote(ids[-1]), rig.take()),
    ),
}


@pytest.mark.parametrize("verb", LONG)
def test_what_is_done_to_many_jobs_is_done_in_slices(
    local_rig: Rig, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Between two slices others have their turn, and what they did counts."""
    local_rig.is_checking = False
    prepare, begin, meddle = LONG[verb]
    prepare(local_rig)
    ids = local_rig.ids_in(None)
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    work = begin(local_rig)
    assert isinstance(work.send(None), Breath)
    meddle(local_rig, ids)
    local_rig.is_checking = True
    done = run_now(work)
    local_rig.settle()
    assert (len(done) if isinstance(done, list) else done) == 299


@pytest.mark.parametrize("verb", ["drain", "obliterate"])
def test_who_reads_the_log_knows_who_is_left_whatever_happened_while_a_queue_was_emptied(
    local_rig: Rig, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    local_rig.is_checking = False
    local_rig.push_many(*(spec(n, delay=1000) for n in range(300)))
    local_rig.push_many(*(spec(n) for n in range(300)))
    work = getattr(local_rig.backend, verb)("q")
    assert isinstance(work.send(None), Breath)
    if verb == "drain":
        local_rig.pull(count=20, holder=(given_back := {}))
        local_rig.release(given_back)
        kept = local_rig.take().id
    local_rig.advance(1000)  # the delayed ones are told of as promoted
    new = local_rig.push(delay=5)
    run_now(work)
    local_rig.is_checking = True
    local_rig.settle()
    left = {new, kept} if verb == "drain" else {new}
    assert left_by_the_log(local_rig.events) == left == set(local_rig.ids_in(None))


@pytest.mark.parametrize("verb", ["drain", "obliterate"])
@pytest.mark.parametrize("turns", [1, 4])
def test_emptying_a_queue_goes_on_after_a_crash(
    kept: Rig, monkeypatch: pytest.MonkeyPatch, verb: str, turns: int
) -> None:
    """The log must not go on to show jobs that are gone, nor a queue come back half and without its pause."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    kept.is_checking = False
    kept.push_many(*(spec(n, delay=1000) for n in range(300)))
    kept.push()
    at_work = kept.take().id
    kept.push_many(*(spec(n) for n in range(600)))
    kept.pause("q")
    work = getattr(kept.backend, verb)("q")
    for _ in range(turns):
        assert isinstance(work.send(None), Breath)
        kept.settle()
    kept.advance(1000)  # the delayed ones are told of as promoted
    new = kept.push()
    kept.is_checking = True
    kept.reopen()
    left = set(kept.ids_in(None))
    assert left_by_the_log(kept.events) == left
    assert new in left
    if verb == "drain":
        assert at_work in left
        assert kept.is_paused("q")
    else:
        assert left == {new}
    kept.reopen()
    assert set(kept.ids_in(None)) == left


def test_the_log_tells_what_draining_took_of_jobs_whose_claims_a_restart_forgot(kept: Rig) -> None:
    kept.push_many(spec(1), spec(2), spec(3))
    kept.pull(count=2)
    kept.reopen()
    at_work = kept.take().id
    assert kept.drain("q") == 2
    assert left_by_the_log(kept.events) == {at_work} == set(kept.ids_in(None))


def test_a_parent_that_goes_with_its_child_is_no_obstacle_to_emptying_after_a_crash(
    kept: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    kept.push(custom_id="parent", remove_on_fail=True)
    kept.move_to_waiting_children("parent", kept.take().token)
    other = kept.push("others")
    kept.push(depends_on=[other], parent_id="parent", fail_parent_on_failure=True)
    kept.push(depends_on=[other])  # goes in the first slice
    kept.is_checking = False
    work = kept.backend.obliterate("q")
    assert isinstance(work.send(None), Breath)
    kept.settle()
    kept.is_checking = True
    kept.reopen()
    assert kept.ids_in(None) == []


def left_by_the_log(events: list[Event]) -> set[str]:
    """As the data pipeline sees it."""
    newest: dict[str, Event] = {}
    for event in events:
        if event.last is not None:
            spared = ("pulled",) if event.event == "drained" else ()
            newest = {
                job: told
                for job, told in newest.items()
                if told.seq > event.last or (told.event in spared and told.seq >= (event.first or 0))
            }
        elif event.event == "removed":
            del newest[event.job]
        elif event.job:
            newest[event.job] = event
    return set(newest)


def test_settings_of_an_obliterated_queue_do_not_come_back(kept: Rig) -> None:
    kept.pause("q")
    kept.set_rate_limit("q", 1, 1000, 500)
    kept.obliterate("q")
    kept.set_concurrency("q", 5)
    kept.advance(1000)  # the limit of the old queue would have ended here
    kept.reopen()
    assert kept.is_paused("q") is False
    assert kept.limits("q").concurrency_limit == 5
