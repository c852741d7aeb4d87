"""What clients do to single jobs: cancel, promote, delay, priority, data, progress, moves."""

from __future__ import annotations

import pytest

from headrace.errors import LeaseLost, NotFound, Refused
from tests.conformance.rig import Rig, pack, spec

STATES = ("waiting", "delayed", "active", "completed", "failed", "waiting-children")


def job_in(rig: Rig, state: str) -> str:
    """A job of queue `q` in that state, pulled without a token where it was pulled."""
    if state == "waiting-children":
        return rig.push(depends_on=[rig.push("dependencies")])
    job_id = rig.push(delay=1000 if state == "delayed" else 0)
    if state in ("active", "completed"):
        held = rig.take(owner=None)
        if state == "completed":
            rig.ack(held)
    if state == "failed":
        rig.discard(job_id, None)
    assert rig.state(job_id) == state
    return job_id


@pytest.mark.parametrize("state", STATES)
class TestWhichStatesAllowWhat:
    def test_cancel(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state in ("waiting", "delayed", "waiting-children"):
            rig.cancel(job_id)
            assert rig.state(job_id) == "unknown"
        else:
            with pytest.raises(Refused, match=r"^Job not found or cannot be cancelled$"):
                rig.cancel(job_id)
            assert rig.state(job_id) == state

    def test_promote(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state == "delayed":
            rig.promote(job_id)
            assert rig.look(job_id)["runAt"] == rig.clock.now_ms()
            assert rig.state(job_id) == "waiting"
        else:
            with pytest.raises(Refused, match=r"^Job not found or not delayed$"):
                rig.promote(job_id)

    def test_change_priority(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state in ("waiting", "delayed"):
            rig.change_priority(job_id, 7, True)
            job = rig.look(job_id)
            assert (job["priority"], job["lifo"], job["state"]) == (7, True, state)
        else:
            with pytest.raises(Refused, match=r"^Job not found or not in queue$"):
                rig.change_priority(job_id, 7, None)

    def test_move_to_delayed(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state in ("waiting", "delayed", "active"):
            rig.move_to_delayed(job_id, 500, None)
            job = rig.look(job_id)
            assert (job["state"], job["attempts"]) == ("delayed", 0)
            assert job["runAt"] == rig.clock.now_ms() + 500
        else:
            with pytest.raises(Refused, match=rf"^Job is not active \(current state: {state}\)$"):
                rig.move_to_delayed(job_id, 500, None)

    def test_change_delay(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state in ("waiting", "delayed", "active"):
            rig.change_delay(job_id, 5000, None)
            assert rig.look(job_id)["runAt"] == rig.clock.now_ms() + 5000
            rig.advance(4999)
            assert rig.state(job_id) == "delayed"
            rig.advance(1)
            assert rig.state(job_id) == "waiting"
        else:
            with pytest.raises(Refused, match=r"^Job not found or cannot change delay$"):
                rig.change_delay(job_id, 5000, None)

    def test_move_to_wait(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state in ("completed", "waiting-children"):
            with pytest.raises(Refused, match=f"^Cannot move job from state '{state}' to waiting$"):
                rig.move_to_wait(job_id, None)
        else:
            rig.move_to_wait(job_id, None)
            assert rig.state(job_id) == "waiting"
            assert rig.pulled_ids() == [job_id]

    def test_discard(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state in ("completed", "failed"):
            with pytest.raises(NotFound, match=r"^Job not found$"):
                rig.discard(job_id, None)
        else:
            rig.discard(job_id, None)
            assert rig.state(job_id) == "failed"

    def test_update(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state in ("completed", "failed"):
            with pytest.raises(Refused, match=r"^Job not found or cannot be updated$"):
                rig.update(job_id, pack("new"))
        else:
            rig.update(job_id, pack("new"))
            assert rig.look(job_id)["data"] == "new"

    def test_progress(self, rig: Rig, state: str) -> None:
        job_id = job_in(rig, state)
        if state == "active":
            rig.set_progress(job_id, 40, "nearly")
            assert rig.progress(job_id) == (40, "nearly")
        else:
            text = rf"^Job is not active \(current state: {state}\)$"
            with pytest.raises(Refused, match=text):
                rig.set_progress(job_id, 40, None)
            with pytest.raises(Refused, match=text):
                rig.progress(job_id)


UNKNOWN = (
    ("cancel", (), "Job not found or cannot be cancelled"),
    ("promote", (), "Job not found or not delayed"),
    ("change_priority", (1, None), "Job not found or not in queue"),
    ("move_to_delayed", (1, None), "Job not found"),
    ("change_delay", (1, None), "Job not found or cannot change delay"),
    ("move_to_wait", (None,), "Job not found"),
    ("move_to_waiting_children", (None,), "Job not found"),
    ("discard", (None,), "Job not found"),
    ("update", (pack(1),), "Job not found or cannot be updated"),
    ("set_progress", (1, None), "Job not found"),
    ("progress", (), "Job not found"),
    ("job", (), "Job not found"),
    ("outcome", (), "Job not found"),
    ("add_log", ("line", "info"), "Job not found"),
)


@pytest.mark.parametrize(("verb", "rest", "text"), UNKNOWN, ids=[row[0] for row in UNKNOWN])
def test_an_unknown_job_is_named_as_the_reference_does(
    rig: Rig, verb: str, rest: tuple[object, ...], text: str
) -> None:
    with pytest.raises((NotFound, Refused)) as caught:
        getattr(rig, verb)("nobody", *rest)
    assert str(caught.value) == text


@pytest.mark.parametrize("verb", ["move_to_delayed", "change_delay", "move_to_wait", "discard"])
def test_a_leased_job_wants_its_token(rig: Rig, verb: str) -> None:
    job_id = rig.push()
    held = rig.take()
    arguments = (100,) if "delay" in verb else ()
    with pytest.raises(LeaseLost, match=f"^Lock token required for job {job_id}$"):
        getattr(rig, verb)(job_id, *arguments, None)
    with pytest.raises(LeaseLost, match=f"^Invalid or expired lock token for job {job_id}$"):
        getattr(rig, verb)(job_id, *arguments, "wrong")
    getattr(rig, verb)(job_id, *arguments, held.token)
    assert rig.state(job_id) != "active"


def test_a_failed_job_does_not_wait_again_while_another_has_its_key(rig: Rig) -> None:
    failed = rig.push(unique_key="k")
    rig.bury()
    rig.push(unique_key="k")
    with pytest.raises(Refused, match=r"^Cannot move job from state 'failed' to waiting$"):
        rig.move_to_wait(failed, None)
    assert rig.state(failed) == "failed"


class TestDelays:
    def test_promote_many_takes_the_oldest(self, rig: Rig) -> None:
        ids = [rig.push(delay=9000 - n) for n in range(4)]
        rig.change_delay(ids[0], 20_000, None)
        assert rig.promote_many("q", 2) == 2
        assert rig.states(*ids) == ["waiting", "waiting", "delayed", "delayed"]
        assert rig.promote_many("q", None) == 2
        assert rig.promote_many("nowhere", None) == 0

    def test_a_delay_of_nothing_waits_at_once(self, rig: Rig) -> None:
        job_id = rig.push(delay=1000)
        rig.change_delay(job_id, 0, None)
        assert rig.state(job_id) == "waiting"

    def test_a_delayed_job_of_new_priority_matures_once(self, rig: Rig) -> None:
        """Its two entries in the order of maturity must not promote it twice."""
        job_id = rig.push(delay=1000)
        rig.change_priority(job_id, 3, None)
        rig.change_delay(job_id, 1000, None)
        rig.take_words()
        rig.advance(1000)
        assert rig.state(job_id) == "waiting"
        assert rig.take_words() == ["promoted"]

    def test_jobs_mature_by_sweep_and_tell_it(self, rig: Rig) -> None:
        rig.push(delay=1000)
        assert rig.backend.next_due_ms() == rig.clock.monotonic_ms() + 1000
        rig.backend.take_ready()
        rig.take_words()
        rig.advance(1000)
        assert rig.backend.take_ready() == {"q"}
        assert rig.take_words() == ["promoted"]


class TestProgress:
    @pytest.mark.parametrize(("given", "kept"), [(-5, 0), (0, 0), (33.5, 33.5), (100, 100), (250, 100)])
    def test_progress_is_clamped(self, rig: Rig, given: float, kept: float) -> None:
        job_id = job_in(rig, "active")
        rig.set_progress(job_id, given, None)
        assert rig.progress(job_id) == (kept, None)

    def test_an_absent_message_keeps_the_old_one(self, rig: Rig) -> None:
        job_id = job_in(rig, "active")
        rig.set_progress(job_id, 10, "first")
        rig.set_progress(job_id, 20, None)
        assert rig.progress(job_id) == (20, "first")

    def test_it_begins_at_zero(self, rig: Rig) -> None:
        assert rig.progress(job_in(rig, "active")) == (0, None)


class TestData:
    @pytest.mark.parametrize("size", [10, 40_000])
    @pytest.mark.parametrize("new_size", [20, 50_000])
    def test_data_of_any_size_is_replaced(self, rig: Rig, size: int, new_size: int) -> None:
        job_id = rig.push(data="a" * size)
        rig.update(job_id, pack("b" * new_size))
        assert rig.take().job["data"] == "b" * new_size


class TestQueries:
    def test_jobs_come_by_creation_not_by_turn(self, rig: Rig) -> None:
        ids = [rig.push(priority=n) for n in range(3)]
        assert rig.ids_in("waiting") == ids
        assert rig.ids_in("waiting", asc=False) == ids[::-1]

    def test_a_matured_job_keeps_its_place_by_creation(self, rig: Rig) -> None:
        delayed = rig.push(delay=100)
        rig.advance(50)
        early = rig.push()
        rig.advance(100)
        assert rig.ids_in("waiting") == [delayed, early]
        assert rig.ids_in(["waiting", "delayed"]) == [delayed, early]

    def test_pages(self, rig: Rig) -> None:
        ids = rig.push_many(*(spec(n) for n in range(10)))
        assert rig.ids_in("waiting", offset=3, limit=4) == ids[3:7]
        assert rig.ids_in(None, offset=8, limit=4) == ids[8:]
        assert rig.ids_in(None, offset=20) == []
        assert rig.ids_in("waiting", limit=0) == []

    def test_a_list_of_states_is_a_union_with_each_job_once(self, rig: Rig) -> None:
        ids = [rig.push(priority=1), rig.push(), rig.push(delay=5)]
        assert rig.ids_in(["waiting", "prioritized", "wait", "delayed"]) == ids
        assert rig.ids_in("prioritized") == ids[:1]
        assert rig.ids_in(["prioritized", "delayed"]) == [ids[0], ids[2]]
        assert rig.ids_in("no such state") == []
        assert rig.ids_in(None, "nowhere") == []

    def test_counts_by_priority_are_of_queued_jobs(self, rig: Rig) -> None:
        rig.push_many(spec(priority=5), spec(priority=5, delay=10), spec(priority=-3), spec())
        assert rig.counts_per_priority("q") == {"5": 2, "-3": 1, "0": 1}
        assert rig.counts_per_priority("nowhere") == {}

    def test_an_outcome_has_what_a_waiter_needs(self, rig: Rig) -> None:
        done, failed, waiting = rig.push(), rig.push(), rig.push()
        rig.run(result=[1])
        rig.bury(error="no luck")
        assert (rig.outcome(done).state, rig.outcome(done).result) == ("completed", bytes(pack([1])))
        assert (rig.outcome(failed).state, rig.outcome(failed).error) == ("failed", "no luck")
        assert rig.outcome(waiting).state == "waiting"
