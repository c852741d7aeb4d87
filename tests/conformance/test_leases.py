"""Who holds a job and for how long: expiry, renewal, stalls, release, timers."""

from __future__ import annotations

import pytest

from headrace.errors import NotFound
from headrace.model import DlqFilter, StallConfig
from tests.conformance.rig import Held, Rig, spec


class TestExpiry:
    def test_an_unrenewed_lease_gives_the_job_to_the_next(self, rig: Rig) -> None:
        job_id = rig.push()
        first = rig.take(lease_ms=1000)
        rig.advance(999)
        assert rig.state(job_id) == "active"
        rig.advance(100)
        assert rig.state(job_id) == "waiting"
        second = rig.take()
        assert second.token != first.token
        assert (second.job["attempts"], second.job["stallCount"]) == (1, 1)

    def test_redelivery_is_due_within_half_a_second(self, rig: Rig) -> None:
        rig.push()
        rig.take(lease_ms=1000)
        due = rig.backend.next_due_ms()
        assert due is not None
        assert 1000 <= due - rig.clock.monotonic_ms() <= 1500

    def test_the_last_attempt_is_buried(self, rig: Rig) -> None:
        job_id = rig.push(max_attempts=1)
        rig.take(lease_ms=1000)
        rig.take_words()
        rig.advance(1100)
        (letter,) = rig.dead_letters("q", DlqFilter(), None)
        assert (letter.reason, letter.error) == ("stalled", "Lock expired at max attempts (1)")
        assert rig.state(job_id) == "failed"
        assert rig.take_words() == ["stalled", "failed"]

    def test_who_waits_for_the_end_hears_of_it(self, rig: Rig) -> None:
        rig.push(max_attempts=1)
        rig.take(lease_ms=1000)
        rig.advance(1100)
        assert [event.terminal for event in rig.events if event.event == "failed"] == [True]

    def test_a_step_of_the_wall_clock_changes_nothing(self, local_rig: Rig) -> None:
        job_id = local_rig.push()
        local_rig.take(lease_ms=10_000)
        local_rig.clock.jump(3_600_000)
        local_rig.sweep()
        assert local_rig.state(job_id) == "active"
        local_rig.clock.jump(-7_200_000)
        local_rig.advance(10_100)
        assert local_rig.state(job_id) == "waiting"

    def test_without_owner_there_is_no_lease_to_run_out(self, rig: Rig) -> None:
        rig.set_stall_config("q", StallConfig(enabled=False))
        job_id = rig.push()
        rig.take(owner=None, lease_ms=1000)
        rig.advance(86_000_000)
        assert rig.state(job_id) == "active"

    def test_many_leases_run_out_each_at_its_time(self, rig: Rig) -> None:
        ids = rig.push_many(*(spec(n) for n in range(20)))
        for n, _ in enumerate(ids, 1):
            rig.take(lease_ms=n * 100)
        for n in range(1, 21):
            rig.advance(100)
            left = rig.count().get("active", 0)
            assert 20 - n <= left <= 20 - n + 1  # at most one wheel turn late
        rig.advance(100)
        assert rig.count() == {"waiting": 20}


class TestRenewal:
    def test_renewing_in_time_keeps_the_job(self, rig: Rig) -> None:
        rig.push()
        held = rig.take(lease_ms=1000)
        for _ in range(10):
            rig.advance(900)
            assert rig.extend(held.id, held.token, None) is True
        assert rig.ack(held) == []

    def test_a_duration_becomes_the_length_of_the_lease(self, rig: Rig) -> None:
        job_id = rig.push()
        held = rig.take(lease_ms=1000)
        rig.extend(held.id, held.token, 5000)
        rig.advance(4900)
        assert rig.state(job_id) == "active"
        rig.extend(held.id, held.token, None)
        rig.advance(4900)
        assert rig.state(job_id) == "active"
        rig.advance(200)
        assert rig.state(job_id) == "waiting"

    def test_a_shorter_duration_counts_too(self, rig: Rig) -> None:
        job_id = rig.push()
        held = rig.take(lease_ms=60_000)
        rig.extend(held.id, held.token, 500)
        rig.advance(600)
        assert rig.state(job_id) == "waiting"

    def test_a_wrong_token_or_a_job_that_is_not_active_is_false(self, rig: Rig) -> None:
        job_id = rig.push()
        assert rig.extend(job_id, None, 1000) is False
        held = rig.take(lease_ms=1000)
        assert rig.extend(job_id, "wrong", 1000) is False
        rig.ack(held)
        assert rig.extend(job_id, held.token, 1000) is False
        assert rig.extend("nobody", None, 1000) is False

    def test_without_token_only_the_heartbeat_is_noted(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.take(lease_ms=1000)
        rig.advance(500)
        assert rig.extend(job_id, None, 5000) is True
        assert rig.look(job_id)["lastHeartbeat"] == rig.clock.now_ms()
        rig.advance(600)
        assert rig.state(job_id) == "waiting"

    def test_force_renews_without_token(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.take(lease_ms=1000)
        assert rig.extend(job_id, None, 5000, force=True) is True
        rig.advance(4900)
        assert rig.state(job_id) == "active"


class TestStalls:
    def test_silence_without_lease_is_a_stall(self, rig: Rig) -> None:
        job_id = rig.push(backoff=0)
        rig.take(owner=None)
        rig.advance(29_900)
        assert rig.state(job_id) == "active"
        rig.advance(200)
        job = rig.look(job_id)
        assert (job["state"], job["attempts"], job["stallCount"]) == ("waiting", 1, 1)
        assert job["failedReason"] == "stalled"

    def test_a_heartbeat_prevents_it(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.take(owner=None)
        for _ in range(5):
            rig.advance(20_000)
            rig.extend(job_id, None, None)
        assert rig.state(job_id) == "active"

    def test_progress_counts_as_a_heartbeat(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.take(owner=None)
        for n in range(5):
            rig.advance(20_000)
            rig.set_progress(job_id, n, None)
        assert rig.state(job_id) == "active"

    @pytest.mark.parametrize("sign", ["heartbeat", "progress"])
    def test_a_sign_of_life_is_that_of_one_job_only(self, rig: Rig, sign: str) -> None:
        """Jobs that were pulled together live and stall each for itself."""
        job_ids = [rig.push() for _ in range(4)]
        rig.pull(count=4, owner=None)
        rig.advance(20_000)
        if sign == "heartbeat":
            rig.extend(job_ids[1], None, None)
        else:
            rig.set_progress(job_ids[1], 50, None)
        rig.advance(10_100)
        assert [rig.look(job_id)["stallCount"] for job_id in job_ids] == [1, 0, 1, 1]
        assert rig.state(job_ids[1]) == "active"
        rig.advance(20_000)
        assert rig.look(job_ids[1])["stallCount"] == 1

    def test_a_valid_lease_protects_its_holder(self, rig: Rig) -> None:
        """A worker that renews less often than the stall interval is not robbed of its job by default."""
        job_id = rig.push()
        rig.take(lease_ms=600_000)
        rig.advance(500_000)
        assert rig.state(job_id) == "active"

    def test_unless_the_queue_asks_for_stalls_by_name(self, rig: Rig) -> None:
        job_id = rig.push(backoff=0)
        rig.take(lease_ms=600_000)
        rig.set_stall_config("q", StallConfig(stall_interval=1000, grace_period=0))
        rig.advance(1100)
        assert rig.look(job_id)["stallCount"] == 1

    def test_or_the_job_does(self, rig: Rig) -> None:
        job_id = rig.push(stall_timeout=6000, backoff=0)
        rig.take(lease_ms=600_000)
        rig.advance(5900)
        assert rig.state(job_id) == "active"
        rig.advance(200)
        assert rig.state(job_id) == "waiting"

    def test_the_grace_period_spares_a_young_attempt(self, rig: Rig) -> None:
        rig.set_stall_config("q", StallConfig(stall_interval=100, grace_period=5000))
        job_id = rig.push()
        rig.take()
        rig.advance(4900)
        assert rig.state(job_id) == "active"
        rig.advance(200)
        assert rig.state(job_id) != "active"

    def test_too_many_stalls_bury_the_job(self, rig: Rig) -> None:
        rig.set_stall_config("q", StallConfig(stall_interval=1000, grace_period=0, max_stalls=2))
        job_id = rig.push(max_attempts=10, backoff=0)
        for _ in range(2):
            rig.take()
            rig.advance(1100)
        (letter,) = rig.dead_letters("q", DlqFilter(), None)
        assert (letter.reason, letter.error) == ("stalled", "Job stalled 2 times")
        assert rig.state(job_id) == "failed"
        assert [event.action for event in rig.events if event.event == "stalled"] == ["retry", "dlq"]

    def test_a_stall_on_the_last_attempt_buries_the_job(self, rig: Rig) -> None:
        rig.set_stall_config("q", StallConfig(stall_interval=1000, grace_period=0))
        rig.push(max_attempts=1)
        rig.take()
        rig.advance(1100)
        (letter,) = rig.dead_letters("q", DlqFilter(), None)
        assert (letter.reason, letter.error) == ("max_attempts_exceeded", "Job stalled at max attempts (1)")

    def test_switched_off_nothing_stalls(self, rig: Rig) -> None:
        rig.set_stall_config("q", StallConfig(enabled=False, stall_interval=1000, grace_period=0))
        job_id = rig.push(stall_timeout=1000)
        rig.take(lease_ms=3_600_000)
        rig.advance(3_000_000)
        assert rig.state(job_id) == "active"

    def test_the_config_has_defaults(self, rig: Rig) -> None:
        assert rig.stall_config("q") == StallConfig()
        rig.set_stall_config("q", StallConfig(max_stalls=7))
        assert rig.stall_config("q").max_stalls == 7


class TestRelease:
    def test_jobs_of_a_closed_connection_wait_again_without_an_attempt(self, rig: Rig) -> None:
        ids = rig.push_many(spec(1), spec(2))
        holder: dict[str, int] = {}
        rig.pull(count=2, holder=holder)
        assert sorted(holder) == sorted(ids)
        rig.release(holder)
        assert holder == {}
        assert rig.count() == {"waiting": 2}
        assert [rig.look(job_id)["attempts"] for job_id in ids] == [0, 0]

    def test_the_token_of_a_closed_connection_is_worth_nothing(self, rig: Rig) -> None:
        rig.push()
        holder: dict[str, int] = {}
        held = rig.take(holder=holder)
        rig.release(holder)
        with pytest.raises(NotFound):
            rig.ack(held)
        assert rig.count() == {"waiting": 1}

    def test_what_was_settled_is_not_held_any_more(self, rig: Rig) -> None:
        rig.push_many(*(spec(n) for n in range(4)))
        holder: dict[str, int] = {}
        held: list[Held] = rig.pull(count=4, holder=holder)
        rig.ack(held[0])
        rig.nack(held[1])
        rig.move_to_delayed(held[2].id, 1000, held[2].token)
        assert list(holder) == [held[3].id]

    def test_a_job_that_went_to_somebody_else_stays_there(self, rig: Rig) -> None:
        job_id = rig.push()
        first: dict[str, int] = {}
        rig.take(holder=first, lease_ms=1000)
        stale = dict(first)
        rig.advance(1100)
        second: dict[str, int] = {}
        rig.take(holder=second)
        rig.release(stale)
        assert rig.state(job_id) == "active"
        assert first == {}
        assert list(second) == [job_id]

    def test_move_to_wait_gives_a_job_back(self, rig: Rig) -> None:
        job_id = rig.push()
        held = rig.take()
        rig.move_to_wait(job_id, held.token)
        assert rig.look(job_id)["attempts"] == 0
        assert rig.take().id == job_id
