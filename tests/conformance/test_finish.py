"""How jobs end: completion, failure, tokens that come late, batches, results, what is kept."""

from __future__ import annotations

import pytest

from headrace.backends.base import Ack
from headrace.backends.local import settlement
from headrace.errors import LeaseLost, NotFound
from tests.conformance.rig import Rig, pack, spec


class TestCompletion:
    def test_a_completed_job_is_kept_with_its_result(self, rig: Rig) -> None:
        job_id = rig.push(data="in")
        rig.advance(10)
        held = rig.take()
        rig.advance(10)
        assert rig.ack(held, {"answer": 42}) == []
        job = rig.look(job_id)
        assert (job["state"], job["returnvalue"], job["data"]) == ("completed", {"answer": 42}, "in")
        assert job["completedAt"] == rig.clock.now_ms()
        assert [entry["state"] for entry in job["timeline"]] == ["waiting", "active", "completed"]
        assert rig.count() == {"completed": 1}

    def test_null_is_a_result_and_absence_is_none(self, rig: Rig) -> None:
        with_null, without = rig.push(), rig.push()
        rig.run(result=None)
        rig.run()
        assert rig.result(with_null) == b"\xc0"
        assert rig.result(without) is None
        assert "returnvalue" in rig.look(with_null)
        assert "returnvalue" not in rig.look(without)

    def test_a_large_result_comes_back_whole(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.run(result="r" * 50_000)
        assert rig.look(job_id)["returnvalue"] == "r" * 50_000

    def test_remove_on_complete_leaves_nothing(self, rig: Rig) -> None:
        job_id = rig.push(remove_on_complete=True)
        rig.run(result=1)
        assert rig.state(job_id) == "unknown"
        assert rig.count() == {}
        with pytest.raises(NotFound):
            rig.job(job_id)

    def test_the_acknowledgement_may_overrule_what_is_kept(self, rig: Rig) -> None:
        dropped, kept = rig.push(), rig.push(remove_on_complete=True)
        rig.ack(rig.take(), remove=True)
        rig.ack(rig.take(), remove=False)
        assert rig.states(dropped, kept) == ["unknown", "completed"]

    def test_only_the_newest_completed_jobs_are_kept(self, rig: Rig) -> None:
        rig.backend.max_completed = 3
        ids = [rig.push() for _ in range(6)]
        for _ in ids:
            rig.run()
        rig.retire_completed()
        rig.settle()
        assert rig.states(*ids) == ["unknown"] * 3 + ["completed"] * 3

    def test_completed_jobs_are_kept_for_a_time(self, rig: Rig) -> None:
        rig.backend.completed_retention_ms = 1000
        old, new = rig.push(), rig.push()
        rig.run()
        rig.advance(900)
        rig.run()
        rig.advance(200)
        rig.retire_completed()
        rig.settle()
        assert rig.states(old, new) == ["unknown", "completed"]

    def test_only_the_latest_removed_jobs_are_remembered(self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """For jobs that depend on them and acknowledgements that come late: not without end."""
        monkeypatch.setattr(settlement, "MAX_SATISFIED", 2)
        monkeypatch.setattr(settlement, "MAX_DEPARTED", 2)
        forgotten, _, known = [(local_rig.push(remove_on_complete=True), local_rig.run())[1] for _ in range(3)]
        assert local_rig.state(local_rig.push(depends_on=[known.id])) == "waiting"
        assert local_rig.ack(known) == [0]
        with pytest.raises(NotFound):
            local_rig.push(depends_on=[forgotten.id])
        with pytest.raises(NotFound):
            local_rig.ack(forgotten)

    def test_metrics_per_minute_are_those_of_the_last_day(self, rig: Rig) -> None:
        """Also when the clock was at 1970 before it was set: a value for each minute since then would be millions."""
        rig.push_many(spec(1), spec(2), spec(3))
        rig.run()
        rig.advance(50 * 365 * 86_400_000)
        rig.run()
        rig.advance(2 * 60_000)
        rig.run()
        metrics = rig.backend.minute_metrics("q", "completed")
        assert (metrics.data, metrics.count) == ([1, 0, 1], 2)

    def test_totals_count_what_happened(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2), spec(3))
        rig.advance(100)
        held = rig.pull(count=2)
        rig.advance(50)
        rig.ack(held[0])
        rig.nack(held[1], unrecoverable=True)
        totals = rig.backend.totals()
        assert (totals.pushed, totals.pulled, totals.completed, totals.failed) == (3, 2, 1, 1)
        assert (totals.wait_ms, totals.run_ms) == (200, 50)
        assert rig.backend.minute_metrics("q", "completed").count == 1
        assert rig.backend.minute_metrics("q", "failed").count == 1


class TestTokens:
    def test_a_leased_job_wants_its_token(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.take()
        with pytest.raises(LeaseLost, match=f"^Lock token required for job {job_id}$"):
            rig.complete([Ack(job_id)])
        with pytest.raises(LeaseLost, match=f"^Invalid or expired lock token for job {job_id}$"):
            rig.complete([Ack(job_id, "wrong")])
        with pytest.raises(LeaseLost, match=f"^Lock token required for job {job_id}$"):
            rig.fail(job_id, token=None, error=None, stack=None, unrecoverable=False, remove=None)
        assert rig.state(job_id) == "active"

    def test_a_job_pulled_without_owner_needs_none(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.take(owner=None)
        assert rig.complete([Ack(job_id)]) == []
        assert rig.state(job_id) == "completed"

    @pytest.mark.parametrize("moment", ["unknown", "waiting", "delayed", "completed", "failed"])
    def test_what_is_not_active_cannot_be_completed(self, rig: Rig, moment: str) -> None:
        job_id = "nobody" if moment == "unknown" else rig.push(delay=1000 if moment == "delayed" else 0)
        if moment in ("completed", "failed"):
            held = rig.take(owner=None)
            (rig.ack if moment == "completed" else lambda h: rig.discard(h.id, None))(held)
        text = f"^Job not found or not in processing state: {job_id}$"
        with pytest.raises(NotFound, match=text):
            rig.complete([Ack(job_id, "some token")])
        with pytest.raises(NotFound, match=text):
            rig.fail(job_id, token="t", error=None, stack=None, unrecoverable=False, remove=None)

    def test_a_late_ack_counts_while_nobody_else_has_the_job(self, rig: Rig) -> None:
        job_id = rig.push()
        late = rig.take(lease_ms=1000)
        rig.advance(1100)
        assert rig.state(job_id) == "waiting"
        assert rig.ack(late, "in the end") == []
        assert rig.look(job_id)["returnvalue"] == "in the end"
        assert rig.pull() == []

    def test_a_late_fail_is_not_applied(self, rig: Rig) -> None:
        job_id = rig.push()
        late = rig.take(lease_ms=1000)
        rig.advance(1100)
        assert rig.nack(late) is False
        assert rig.state(job_id) == "waiting"
        assert rig.look(job_id)["attempts"] == 1  # the lost lease

    def test_late_answers_are_refused_when_somebody_else_has_the_job(self, rig: Rig) -> None:
        job_id = rig.push()
        late = rig.take(lease_ms=1000)
        rig.advance(1100)
        current = rig.take()
        for answer in (rig.ack, rig.nack):
            with pytest.raises(LeaseLost, match=f"^Invalid or expired lock token for job {job_id}$"):
                answer(late)
        assert rig.ack(current) == []

    def test_a_token_that_did_not_count_is_not_remembered(self, rig: Rig) -> None:
        job_id = rig.push()
        late = rig.take(lease_ms=1000)
        rig.advance(1100)
        rig.pull(owner=None)  # whoever completes it now needs no token
        assert rig.ack(late) == []
        with pytest.raises(NotFound, match=f"^Job not found or not in processing state: {job_id}$"):
            rig.ack(late)

    @pytest.mark.parametrize("end", ["timeout", "fail", "complete"])
    def test_an_answer_after_the_end_is_ignored(self, rig: Rig, end: str) -> None:
        job_id = rig.push(timeout=500 if end == "timeout" else None)
        held = rig.take()
        if end == "timeout":
            rig.advance(600)
        elif end == "fail":
            rig.nack(held)
        else:
            rig.ack(held)
        before = rig.state(job_id)
        assert rig.ack(held) == [0]
        assert rig.nack(held) is False
        assert rig.state(job_id) == before

    def test_a_released_job_is_nobodys(self, rig: Rig) -> None:
        job_id = rig.push()
        holder: dict[str, int] = {}
        held = rig.take(holder=holder)
        rig.release(holder)
        for answer in (rig.ack, rig.nack):
            with pytest.raises(NotFound, match=f"^Job not found or not in processing state: {job_id}$"):
                answer(held)

    def test_a_late_ack_of_a_job_that_was_buried_meanwhile_is_ignored(self, rig: Rig) -> None:
        job_id = rig.push(unique_key="k")
        late = rig.take(lease_ms=1000)
        rig.advance(1100)
        rig.discard(job_id, None)
        assert rig.ack(late) == [0]
        assert rig.state(job_id) == "failed"

    def test_an_expired_lease_that_nobody_collected_is_still_valid(self, rig: Rig) -> None:
        rig.push()
        held = rig.take(lease_ms=1000)
        rig.clock.advance(5000)  # no sweep
        assert rig.ack(held) == []


class TestBatches:
    def test_all_or_none(self, rig: Rig) -> None:
        ids = rig.push_many(spec(1), spec(2), spec(3))
        held = rig.pull(count=3)
        good = [Ack(one.id, one.token) for one in held]
        for bad in (Ack(held[2].id, "wrong"), Ack(held[2].id), Ack("nobody")):
            with pytest.raises((LeaseLost, NotFound)):
                rig.complete([*good[:2], bad])
            assert rig.states(*ids) == ["active"] * 3
        assert rig.complete(good) == []
        assert rig.count() == {"completed": 3}

    def test_results_go_to_their_jobs(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2))
        held = rig.pull(count=2)
        rig.complete([Ack(one.id, one.token, bytes(pack(n))) for n, one in enumerate(held)])
        assert [rig.look(one.id)["returnvalue"] for one in held] == [0, 1]

    def test_those_that_ended_before_are_named_and_left_alone(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2), spec(3))
        held = rig.pull(count=3)
        rig.nack(held[1], unrecoverable=True)
        assert rig.complete([Ack(one.id, one.token) for one in held]) == [1]
        assert rig.states(*(one.id for one in held)) == ["completed", "failed", "completed"]

    def test_the_same_job_twice_is_refused(self, rig: Rig) -> None:
        job_id = rig.push()
        held = rig.take()
        with pytest.raises(NotFound):
            rig.complete([Ack(held.id, held.token), Ack(held.id, held.token)])
        assert rig.state(job_id) == "active"

    def test_an_empty_batch_is_fine(self, rig: Rig) -> None:
        assert rig.complete([]) == []


def test_a_revived_job_that_is_claimed_without_a_lease_needs_no_token(rig: Rig) -> None:
    """The token of its earlier run means nothing any more."""
    job_id = rig.push()
    rig.run()
    assert rig.retry_completed("q", job_id, None, None) == 1
    (held,) = rig.pull(owner=None)
    assert (held.id, held.token) == (job_id, None)
    rig.advance(1000)
    rig.discard(job_id, None)
    assert rig.state(job_id) == "failed"
