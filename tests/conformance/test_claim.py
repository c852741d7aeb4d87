"""Which job is next: order, pause, limits, time to live, groups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Ack, GroupDemand
from headrace.backends.local import delivery
from headrace.model import RateLimit
from tests.conformance.rig import LOCAL_KINDS, Rig, spec


class TestOrder:
    def test_plain_jobs_leave_in_the_order_of_their_coming(self, rig: Rig) -> None:
        ids = rig.push_many(*(spec(n) for n in range(50)))
        assert rig.pulled_ids() == ids

    def test_a_higher_priority_goes_first_and_a_negative_one_last(self, rig: Rig) -> None:
        low, plain, high, higher = (rig.push(priority=n) for n in (-5, 0, 1, 9))
        assert rig.pulled_ids() == [higher, high, plain, low]

    def test_lifo_jobs_go_before_fifo_jobs_newest_first(self, rig: Rig) -> None:
        fifo = [rig.push(), rig.push()]
        lifo = [rig.push(lifo=True), rig.push(lifo=True)]
        high = rig.push(priority=1)
        assert rig.pulled_ids() == [high, lifo[1], lifo[0], *fifo]

    def test_a_delayed_job_queues_by_the_time_it_matures(self, rig: Rig) -> None:
        delayed = rig.push(delay=100)
        early = rig.push()
        rig.advance(50)
        rig.push_many(spec("still early"))
        rig.advance(100)
        late = rig.push()
        ids = rig.pulled_ids()
        assert ids[0] == early
        assert ids[2:] == [delayed, late]

    def test_a_matured_job_is_claimable_before_any_sweep(self, rig: Rig) -> None:
        job_id = rig.push(delay=100)
        assert rig.pulled_ids() == []
        rig.clock.advance(100)
        assert rig.pulled_ids() == [job_id]

    def test_a_job_that_is_not_due_blocks_nobody(self, rig: Rig) -> None:
        rig.push(priority=100, delay=1000)
        plain = rig.push()
        assert rig.pulled_ids() == [plain]

    def test_a_released_job_goes_before_what_came_after_it(self, rig: Rig) -> None:
        first, second, third = (rig.push() for _ in range(3))
        held: dict[str, int] = {}
        rig.pull(count=2, holder=held)
        rig.release(held)
        assert rig.pulled_ids() == [first, second, third]

    def test_a_job_put_off_and_back_goes_behind_those_that_waited(self, rig: Rig) -> None:
        first, moved, third = (rig.push() for _ in range(3))
        rig.move_to_delayed(moved, 100, None)
        rig.advance(100)
        last = rig.push()
        assert rig.pulled_ids() == [first, third, moved, last]

    def test_a_changed_priority_counts_at_once(self, rig: Rig) -> None:
        first, second, third = (rig.push() for _ in range(3))
        rig.change_priority(third, 5, None)
        rig.change_priority(first, -1, None)
        assert rig.pulled_ids() == [third, second, first]

    def test_a_priority_changed_and_changed_back_keeps_the_place(self, rig: Rig) -> None:
        ids = [rig.push() for _ in range(4)]
        rig.change_priority(ids[1], 5, None)
        rig.change_priority(ids[1], 0, None)
        assert rig.pulled_ids() == ids

    def test_order_survives_thousands_of_cancelled_jobs(self, rig: Rig) -> None:
        rig.is_checking = False
        ids = rig.push_many(*(spec(n, priority=n % 3) for n in range(3000)))
        kept = ids[::10]
        for job_id in set(ids) - set(kept):
            rig.cancel(job_id)
        rig.is_checking = True
        wanted = [job_id for p in (2, 1, 0) for n, job_id in enumerate(ids) if n % 10 == 0 and n % 3 == p]
        assert rig.pulled_ids() == wanted

    def test_two_claims_never_get_the_same_job(self, rig: Rig) -> None:
        ids = rig.push_many(*(spec(n) for n in range(100)))
        rig.is_checking = False
        taken: list[str] = []
        while got := rig.pulled_ids(count=7):
            taken += got
        assert taken == ids


class TestAnswer:
    def test_an_owner_gets_a_token_and_others_none(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2))
        assert rig.take(owner="w").token
        assert rig.take(owner=None).token is None

    def test_an_unknown_or_empty_queue_gives_nothing(self, rig: Rig) -> None:
        assert rig.pull("nowhere") == []
        rig.push()
        rig.run()
        assert rig.pull() == []

    @pytest.mark.parametrize("options", [{}, {"max_attempts": 5}], ids=["plain", "with settings"])
    def test_one_claim_takes_no_more_than_a_reply_holds(
        self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
    ) -> None:
        monkeypatch.setattr(delivery, "CLAIM_BYTES", 100_000)
        ids = local_rig.push_many(*(spec("x" * 20_000, **options) for _ in range(20)))
        assert local_rig.pulled_ids() == ids[:5]
        if local_rig.kind.is_persistent:
            local_rig.reopen()
            assert local_rig.pulled_ids() == ids[:5]
        monkeypatch.setattr(delivery, "CLAIM_BYTES", 1)
        assert local_rig.pulled_ids() == ids[5:6]

    def test_the_job_shows_when_it_was_started(self, rig: Rig) -> None:
        rig.push()
        rig.advance(25)
        job = rig.take().job
        assert job["startedAt"] == rig.clock.now_ms()
        assert job["attempts"] == 0
        assert [entry["state"] for entry in job["timeline"]] == ["waiting", "active"]
        assert "state" not in job


class TestTimeToLive:
    def test_an_expired_job_is_gone_when_it_would_be_pulled(self, rig: Rig) -> None:
        expired, fresh = rig.push(ttl=100), rig.push()
        rig.advance(101)
        assert rig.pulled_ids() == [fresh]
        assert rig.state(expired) == "unknown"
        assert "expired" in rig.take_words()

    def test_a_pull_of_one_passes_over_expired_jobs(self, rig: Rig) -> None:
        for _ in range(3):
            rig.push(ttl=100)
        fresh = rig.push()
        rig.advance(101)
        assert rig.take().id == fresh

    def test_the_last_moment_still_counts(self, rig: Rig) -> None:
        job_id = rig.push(ttl=100)
        rig.advance(100)
        assert rig.pulled_ids() == [job_id]

    @pytest.mark.parametrize("name", [{"custom_id": "x"}, {"custom_id": "x", "id_ttl": 0}, {"unique_key": "x"}])
    def test_an_expired_job_does_not_stand_for_a_new_one(self, rig: Rig, name: dict[str, Any]) -> None:
        rig.push(data="late", ttl=100, **name)
        rig.advance(100)
        rig.push(data="dropped", **name)
        rig.advance(1)
        again = rig.push(data="again", **name)
        assert [word for word in rig.take_words() if word != "waiting"] == ["pushed", "duplicated", "expired", "pushed"]
        (held,) = rig.pull(count=9)
        assert (held.id, held.job["data"]) == (again, "again")


class TestPause:
    def test_a_paused_queue_gives_nothing_and_keeps_its_jobs_waiting(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.pause("q")
        assert rig.is_paused("q") is True
        assert rig.pull() == []
        assert rig.state(job_id) == "waiting"
        rig.resume("q")
        assert rig.pulled_ids() == [job_id]

    def test_pause_and_resume_are_told_once(self, rig: Rig) -> None:
        for verb in (rig.pause, rig.pause, rig.resume, rig.resume):
            verb("q")
        assert rig.take_words() == ["paused", "resumed"]

    def test_resume_wakes_parked_pulls(self, rig: Rig) -> None:
        rig.push()
        rig.pause("q")
        rig.backend.take_ready()
        rig.resume("q")
        assert "q" in rig.backend.take_ready()


class TestConcurrency:
    def test_what_is_active_already_counts(self, rig: Rig) -> None:
        rig.push_many(*(spec(n) for n in range(5)))
        held = rig.pull(count=2)
        rig.set_concurrency("q", 3)
        assert len(rig.pull(count=5)) == 1
        assert rig.limits("q").maxed is True
        rig.backend.take_ready()
        rig.ack(held[0])
        assert "q" in rig.backend.take_ready()
        assert len(rig.pull(count=5)) == 1

    def test_lowering_it_stops_nobody(self, rig: Rig) -> None:
        rig.push_many(*(spec(n) for n in range(4)))
        held = rig.pull(count=3)
        rig.set_concurrency("q", 1)
        assert rig.count()["active"] == 3
        for one in held:
            assert rig.pull() == []
            rig.ack(one)
        assert len(rig.pull(count=4)) == 1

    def test_clearing_it_lets_all_out(self, rig: Rig) -> None:
        rig.push_many(*(spec(n) for n in range(4)))
        rig.set_concurrency("q", 1)
        rig.pull(count=4)
        rig.set_concurrency("q", None)
        assert len(rig.pull(count=4)) == 3


class TestRateLimit:
    def test_tokens_come_back_one_by_one(self, rig: Rig) -> None:
        rig.push_many(*(spec(n) for n in range(6)))
        rig.set_rate_limit("q", 2, 1000, None)
        assert len(rig.pull(count=6)) == 2
        assert rig.pull() == []
        assert rig.limits("q").rate_limit_ttl == 500
        rig.advance(500)
        assert len(rig.pull(count=6)) == 1
        rig.advance(10_000)
        assert len(rig.pull(count=6)) == 2

    def test_a_refill_wakes_parked_pulls_in_time(self, rig: Rig) -> None:
        rig.push_many(*(spec(n) for n in range(2)))
        rig.set_rate_limit("q", 1, 1000, None)
        rig.pull()
        rig.backend.take_ready()
        assert rig.pull() == []
        due = rig.backend.next_due_ms()
        assert due == rig.clock.monotonic_ms() + 1000
        rig.advance(1000)
        assert "q" in rig.backend.take_ready()
        assert len(rig.pull()) == 1

    def test_an_empty_queue_costs_no_token(self, rig: Rig) -> None:
        rig.set_rate_limit("q", 1, 60_000, None)
        for _ in range(3):
            assert rig.pull() == []
        rig.push()
        assert len(rig.pull()) == 1

    def test_zero_blocks_everything(self, rig: Rig) -> None:
        rig.push()
        rig.set_rate_limit("q", 0, 1000, None)
        rig.advance(100_000)
        assert rig.pull() == []
        rig.clear_rate_limit("q")
        assert len(rig.pull()) == 1

    def test_a_limit_with_a_ttl_goes_by_itself(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2), spec(3))
        rig.set_rate_limit("q", 1, 1_000_000, 5000)
        assert len(rig.pull(count=3)) == 1
        rig.advance(5001)
        assert rig.limits("q").rate_limit is None
        assert len(rig.pull(count=3)) == 2


GROUPED = GroupDemand()


class TestGroups:
    def test_groups_take_turns_after_the_ungrouped_jobs(self, rig: Rig) -> None:
        a = [rig.push(group_id="a") for _ in range(3)]
        b = [rig.push(group_id="b") for _ in range(2)]
        loose = rig.push()
        assert rig.pulled_ids(group=GROUPED) == [loose, a[0], b[0], a[1], b[1], a[2]]

    def test_ungrouped_jobs_go_first_also_when_pushed_later(self, rig: Rig) -> None:
        """From the first grouped pull on, later pushes must stand in the same order."""
        first = rig.push(group_id="a")
        assert rig.pulled_ids(count=1, group=GROUPED) == [first]
        grouped = rig.push(priority=9, group_id="a")
        loose = rig.push()
        assert rig.pulled_ids(group=GROUPED) == [loose, grouped]

    def test_priority_counts_within_a_group(self, rig: Rig) -> None:
        low, high = rig.push(group_id="a"), rig.push(group_id="a", priority=3)
        assert rig.pulled_ids(group=GROUPED) == [high, low]

    def test_plain_pulls_ignore_groups(self, rig: Rig) -> None:
        rig.set_group_concurrency("q", "a", 1)
        ids = [rig.push(group_id="a") for _ in range(3)]
        assert rig.pulled_ids() == ids

    def test_plain_and_grouped_pulls_share_one_order(self, rig: Rig) -> None:
        a = [rig.push(group_id="a") for _ in range(3)]
        b = [rig.push(group_id="b") for _ in range(3)]
        assert rig.pulled_ids(count=1, group=GROUPED) == [a[0]]
        assert rig.pulled_ids(count=2) == [a[1], a[2]]
        assert rig.pulled_ids(group=GROUPED) == b

    def test_a_failed_job_of_a_group_queues_by_its_new_time(self, rig: Rig) -> None:
        first, second = rig.push(group_id="a", backoff=0), rig.push(group_id="a")
        held = rig.take(group=GROUPED)
        assert held.id == first
        rig.advance(10)
        rig.nack(held)
        third = rig.push(group_id="a")
        assert rig.pulled_ids(group=GROUPED) == [second, first, third]

    def test_very_many_groups_that_have_become_empty_are_passed_over_quickly(self, tmp_path: Path) -> None:
        rig = Rig(LOCAL_KINDS[0], tmp_path)
        rig.is_checking = False
        for generation in "first", "second":
            rig.insert("q", [spec(group_id=f"{generation}-{n}") for n in range(20_000)])
            began = time.process_time()
            pulled = [held for _ in range(20) for held in rig.pull(count=1000, group=GROUPED)]
            assert (len(pulled), time.process_time() - began < 10) == (20_000, True)
            rig.complete([Ack(held.id, held.token) for held in pulled])
        rig.close()

    def test_the_demand_sets_the_concurrency_of_each_group(self, rig: Rig) -> None:
        a = [rig.push(group_id="a") for _ in range(3)]
        b = [rig.push(group_id="b") for _ in range(3)]
        demand = GroupDemand(concurrency=1)
        held = rig.pull(count=10, group=demand)
        assert [one.id for one in held] == [a[0], b[0]]
        assert rig.group_active_count("q", "a") == 1
        rig.ack(held[1])
        assert rig.pulled_ids(group=demand) == [b[1]]

    def test_jobs_that_ran_before_the_first_grouped_pull_count_in_their_group(self, rig: Rig) -> None:
        first, second = rig.push(group_id="a"), rig.push(group_id="a")
        held = rig.take()
        assert held.id == first
        assert rig.pull(group=GroupDemand(concurrency=1)) == []
        rig.ack(held)
        assert rig.pulled_ids(group=GroupDemand(concurrency=1)) == [second]

    def test_a_group_has_limits_of_its_own(self, rig: Rig) -> None:
        for _ in range(5):
            rig.push(group_id="a")
        assert rig.set_group_concurrency("q", "a", 2) is False
        assert rig.group_concurrency("q", "a") == 2
        assert len(rig.pull(count=10, group=GroupDemand(concurrency=4))) == 2
        assert rig.set_group_concurrency("q", "a", None) is True
        assert len(rig.pull(count=10, group=GroupDemand(concurrency=4))) == 2

    def test_the_rate_of_a_group(self, rig: Rig) -> None:
        for _ in range(5):
            rig.push(group_id="a")
        rig.set_group_rate_limit("q", "a", RateLimit(2, 1000))
        assert rig.group_rate_limit("q", "a") == RateLimit(2, 1000)
        assert len(rig.pull(count=10, group=GROUPED)) == 2
        assert rig.group_rate_limit_ttl("q", "a") == 500
        rig.advance(500)
        assert len(rig.pull(count=10, group=GROUPED)) == 1

    def test_an_empty_group_does_not_forget_its_rate(self, rig: Rig) -> None:
        demand = GroupDemand(limit_max=1, limit_duration=10_000)
        rig.push(group_id="a")
        rig.ack(rig.take(group=demand))
        assert rig.pull(group=demand) == []
        rig.push(group_id="a")
        assert rig.pull(group=demand) == []
        rig.advance(10_000)
        assert len(rig.pull(group=demand)) == 1

    def test_a_group_can_be_held_back_for_a_while(self, rig: Rig) -> None:
        rig.push()
        rig.pull(group=GROUPED)
        rig.rate_limit_group("q", "a", 1000)
        assert rig.pull(group=GROUPED) == []
        assert rig.group_rate_limit_ttl("q", "a") == 1000
        job_id = rig.push(group_id="a")
        assert rig.pull(group=GROUPED) == []
        assert rig.backend.next_due_ms() == rig.clock.monotonic_ms() + 1000
        rig.advance(1000)
        assert rig.pulled_ids(group=GROUPED) == [job_id]

    def test_a_paused_group_is_passed_over(self, rig: Rig) -> None:
        a, b = rig.push(group_id="a"), rig.push(group_id="b")
        assert rig.pause_group("q", "a", True) is True
        assert rig.pause_group("q", "a", True) is False
        assert rig.pulled_ids(group=GROUPED) == [b]
        assert rig.pause_group("q", "a", False) is True
        assert rig.pulled_ids(group=GROUPED) == [a]

    def test_affinity_serves_one_group_only(self, rig: Rig) -> None:
        loose, a, b = rig.push(), rig.push(group_id="a"), rig.push(group_id="b")
        assert rig.pulled_ids(group=GroupDemand(affinity="b")) == [b]
        assert rig.pulled_ids(group=GroupDemand(affinity=None)) == [loose]
        assert rig.pulled_ids(group=GroupDemand(affinity="b")) == []
        assert rig.pulled_ids(group=GROUPED) == [a]

    def test_groups_are_counted_before_and_after_grouped_pulls(self, rig: Rig) -> None:
        for _ in range(2):
            rig.push(group_id="a", delay=0)
        rig.push(group_id="b", delay=1000)
        rig.push()
        for _ in range(2):
            assert rig.group_jobs_count("q", "a") == 2
            assert rig.group_jobs_count("q", "b") == 1
            assert rig.groups_jobs_count("q") == 3
            rig.pull(group=GROUPED)  # takes the ungrouped job
        assert rig.group_active_count("q", "a") == 1

    @pytest.mark.parametrize("way", ["ack", "release", "cancel"])
    def test_a_group_counts_right_however_its_job_ends(self, rig: Rig, way: str) -> None:
        rig.push(group_id="a")
        held: dict[str, int] = {}
        one = rig.take(holder=held, group=GroupDemand(concurrency=1))
        if way == "ack":
            rig.ack(one)
        else:
            rig.release(held)
        if way == "cancel":
            rig.cancel(one.id)
        rig.push(group_id="a")
        assert len(rig.pull(group=GroupDemand(concurrency=1))) == 1
