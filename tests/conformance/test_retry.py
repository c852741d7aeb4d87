"""What failure leads to: backoff, attempts, dead letters, their retries and their end."""

from __future__ import annotations

import pytest

from headrace.backends.local import delivery, slices
from headrace.backends.local.slices import Breath, run_now
from headrace.errors import StorageUnavailable
from headrace.model import DAY_MS, Backoff, DlqConfig, DlqFilter
from tests.conformance.rig import Rig, spec, unpack


def reasons(rig: Rig) -> dict[str, str]:
    letters = rig.dead_letters("q", DlqFilter(), None)
    return {unpack(letter.job)["id"]: letter.reason for letter in letters}


class TestBackoff:
    def test_a_failed_attempt_is_retried_after_its_backoff(self, rig: Rig) -> None:
        job_id = rig.push(backoff=1000)
        rig.nack(rig.take(), "first")
        job = rig.look(job_id)
        wait = job["runAt"] - rig.clock.now_ms()
        assert job["state"] == "delayed"
        assert 1000 <= wait <= 3000
        assert (job["attempts"], job["failedReason"]) == (1, "first")
        rig.advance(int(wait) - 1)
        assert rig.pull() == []
        rig.advance(1)
        assert rig.take().job["attempts"] == 1

    @pytest.mark.parametrize("after", [0, 50, 7_200_000])
    def test_a_failure_may_say_when_the_next_attempt_is_due(self, rig: Rig, after: int) -> None:
        job_id = rig.push(backoff=1000, max_attempts=2)
        rig.nack(rig.take(), retry_after=after)
        job = rig.look(job_id)
        assert (job["attempts"], job["runAt"]) == (1, rig.clock.now_ms() + after)
        rig.advance(after)
        rig.nack(rig.take(), retry_after=after)
        assert rig.look(job_id)["state"] == "failed", "the last attempt is the last"

    def test_max_delay_caps_the_wait_exactly(self, rig: Rig) -> None:
        job_id = rig.push(backoff=Backoff("exponential", 60_000, 5000), max_attempts=9)
        for _ in range(4):
            rig.nack(rig.take())
            assert rig.look(job_id)["runAt"] == rig.clock.now_ms() + 5000
            rig.advance(5000)

    def test_fixed_backoff_does_not_grow(self, rig: Rig) -> None:
        job_id = rig.push(backoff=Backoff("fixed", 1000), max_attempts=9)
        for _ in range(5):
            rig.nack(rig.take())
            wait = rig.look(job_id)["runAt"] - rig.clock.now_ms()
            assert 800 <= wait <= 1200
            rig.advance(1200)

    def test_without_backoff_it_waits_at_once(self, rig: Rig) -> None:
        job_id = rig.push(backoff=0)
        rig.nack(rig.take())
        assert rig.state(job_id) == "waiting"
        assert rig.take().id == job_id

    def test_the_stack_is_trimmed_to_its_limit(self, rig: Rig) -> None:
        job_id = rig.push(stack_trace_limit=3)
        rig.nack(rig.take(), stack=["  one\n\n two ", "three\nfour"])
        assert rig.look(job_id)["stacktrace"] == ["one", "two", "three"]

    def test_the_timeline_keeps_its_first_and_its_latest_entries(self, rig: Rig) -> None:
        job_id = rig.push(backoff=0, max_attempts=20)
        for n in range(15):
            rig.nack(rig.take(), f"error {n}")
        timeline = rig.look(job_id)["timeline"]
        assert len(timeline) == 20
        assert timeline[0]["state"] == "waiting"
        assert [entry["error"] for entry in timeline if "error" in entry][-1] == "error 14"


class TestAttempts:
    def test_the_last_attempt_ends_among_the_dead_letters(self, rig: Rig) -> None:
        job_id = rig.push(max_attempts=2, backoff=0)
        rig.nack(rig.take(), "one")
        rig.advance(5)
        rig.nack(rig.take(), "two")
        assert rig.count() == {"failed": 1}
        (letter,) = rig.dead_letters("q", DlqFilter(), None)
        assert (letter.reason, letter.error) == ("max_attempts_exceeded", "two")
        assert [(a.attempt, a.reason, a.error) for a in letter.attempts] == [
            (1, "explicit_fail", "one"),
            (2, "explicit_fail", "two"),
        ]
        assert letter.expires_at == rig.clock.now_ms() + 7 * DAY_MS
        assert rig.look(job_id)["failedReason"] == "two"
        assert rig.look(job_id)["data"] is None

    def test_an_unrecoverable_failure_is_the_last(self, rig: Rig) -> None:
        job_id = rig.push(max_attempts=100)
        rig.bury()
        assert reasons(rig) == {job_id: "max_attempts_exceeded"}

    def test_remove_on_fail_leaves_no_letter(self, rig: Rig) -> None:
        by_option, by_call, kept = rig.push(remove_on_fail=True), rig.push(), rig.push(remove_on_fail=True)
        rig.nack(rig.take(), unrecoverable=True)
        rig.nack(rig.take(), unrecoverable=True, remove=True)
        rig.nack(rig.take(), unrecoverable=True, remove=False)
        assert rig.states(by_option, by_call, kept) == ["unknown", "unknown", "failed"]

    def test_a_timeout_ends_the_attempt(self, rig: Rig) -> None:
        job_id = rig.push(timeout=1000, max_attempts=2, backoff=0)
        rig.take()
        rig.advance(1100)
        job = rig.look(job_id)
        assert (job["state"], job["attempts"], job["failedReason"]) == ("waiting", 1, "Job timeout exceeded")
        rig.take(owner=None)
        rig.advance(1100)
        assert reasons(rig) == {job_id: "timeout"}

    def test_a_timeout_is_not_put_off_by_renewals(self, rig: Rig) -> None:
        job_id = rig.push(timeout=1000)
        held = rig.take()
        for _ in range(4):
            rig.advance(250)
            rig.extend(held.id, held.token, None)
        rig.advance(100)
        assert rig.look(job_id)["attempts"] == 1

    def test_discard_buries_without_an_attempt(self, rig: Rig) -> None:
        ids = [rig.push(), rig.push(delay=100), rig.push()]
        rig.take(owner=None)
        for job_id in ids:
            rig.discard(job_id, None)
        assert reasons(rig) == dict.fromkeys(ids, "unknown")
        assert rig.look(ids[0])["attempts"] == 0


class TestDeadLetters:
    def test_retry_brings_a_clean_job_back(self, rig: Rig) -> None:
        job_id = rig.push(data={"payload": "x" * 100})
        rig.advance(10)
        rig.bury()
        rig.advance(1000)
        assert rig.retry_dlq("q", job_id, None, None) == 1
        job = rig.look(job_id)
        assert (job["state"], job["attempts"], job["stallCount"]) == ("waiting", 0, 0)
        assert job["runAt"] == rig.clock.now_ms()
        assert job["data"] == {"payload": "x" * 100}
        assert job["completedAt"] is None
        assert rig.take().id == job_id

    def test_large_data_survives_burial_and_retry(self, rig: Rig) -> None:
        data = "x" * 40_000
        job_id = rig.push(data=data)
        rig.bury()
        assert rig.retry_dlq("q", None, None, None) == 1
        assert rig.take().job["data"] == data
        assert rig.look(job_id)["data"] == data

    def test_count_takes_the_oldest(self, rig: Rig) -> None:
        ids = rig.push_many(spec(1), spec(2), spec(3))
        second, first = rig.pull(count=2)[::-1]
        rig.nack(second, unrecoverable=True)
        rig.advance(5)
        rig.nack(first, unrecoverable=True)
        rig.advance(5)
        rig.bury()
        assert rig.retry_dlq("q", None, 2, None) == 2
        assert rig.states(*ids) == ["waiting", "waiting", "failed"]

    def test_unknown_and_foreign_ids_are_zero(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.bury()
        rig.push("other")
        assert rig.retry_dlq("other", job_id, None, None) == 0
        assert rig.retry_dlq("q", "nobody", None, None) == 0
        assert rig.retry_dlq("nowhere", None, None, None) == 0

    def test_a_rival_with_the_key_keeps_it_from_coming_back(self, rig: Rig) -> None:
        first = rig.push(unique_key="k")
        rig.bury()
        second = rig.push(unique_key="k")
        assert rig.retry_dlq("q", first, None, None) == 0
        rig.run()
        assert rig.retry_dlq("q", first, None, None) == 1
        assert rig.unique_key_owner("q", "k") == first
        assert rig.state(second) == "completed"

    def test_a_key_that_was_taken_away_is_taken_back(self, rig: Rig) -> None:
        job_id = rig.push(unique_key="k")
        rig.remove_unique_key("q", "k")
        rig.bury()
        rig.retry_dlq("q", job_id, None, None)
        assert rig.unique_key_owner("q", "k") == job_id

    def test_filters(self, rig: Rig) -> None:
        start = rig.clock.now_ms()
        failed, discarded = rig.push(), rig.push()
        rig.bury()
        rig.advance(1000)
        rig.discard(discarded, None)

        def found(count: int | None = None, **wanted: object) -> int:
            return len(rig.dead_letters("q", DlqFilter(**wanted), count))

        assert found() == 2
        assert found(1) == 1
        assert found(reason="unknown") == 1
        assert found(older_than=start) == 1
        assert found(newer_than=start + 1) == 1
        assert found(expired=True) == 0
        assert found(retriable=True) == 2
        assert found(offset=1) == 1
        assert found(limit=1) == 1
        assert rig.retry_dlq("q", None, None, DlqFilter(reason="unknown")) == 1
        assert rig.states(failed, discarded) == ["failed", "waiting"]

    def test_purge_and_removal(self, rig: Rig) -> None:
        ids = rig.push_many(spec(1), spec(2), spec(3))
        for _ in ids:
            rig.bury()
        assert rig.remove_dead_letter("other", ids[0]) is False
        assert rig.remove_dead_letter("q", ids[0]) is True
        assert rig.remove_dead_letter("q", ids[0]) is False
        assert rig.purge_dlq("q") == 2
        assert rig.states(*ids) == ["unknown"] * 3
        assert rig.purge_dlq("nowhere") == 0

    def test_stats(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2))
        rig.bury()
        first = rig.clock.now_ms()
        rig.advance(10)
        rig.discard(rig.ids_in("waiting")[0], None)
        stats = rig.dlq_stats("q")
        assert (stats.total, stats.by_queue) == (2, {"q": 2})
        assert {k: v for k, v in stats.by_reason.items() if v} == {"max_attempts_exceeded": 1, "unknown": 1}
        assert len(stats.by_reason) == 7
        assert (stats.oldest_entry, stats.newest_entry) == (first, first + 10)
        assert (stats.pending_retry, stats.expired) == (0, 0)


class TestKeeping:
    def test_auto_retry_doubles_its_interval_and_gives_up(self, rig: Rig) -> None:
        rig.set_dlq_config("q", DlqConfig(auto_retry=True, auto_retry_interval=1000, max_auto_retries=3))
        job_id = rig.push()
        for wait in (1000, 1000, 2000):
            rig.bury()
            (letter,) = rig.dead_letters("q", DlqFilter(), None)
            assert letter.next_retry_at == rig.clock.now_ms() + wait
            rig.advance(wait - 1)
            assert rig.state(job_id) == "failed"
            rig.advance(1)
            assert rig.state(job_id) == "waiting"
        rig.bury()
        (letter,) = rig.dead_letters("q", DlqFilter(), None)
        assert (letter.retry_count, letter.next_retry_at) == (3, None)
        assert len(letter.attempts) == 4

    def test_auto_retry_waits_for_a_rival_to_give_up_the_key(self, rig: Rig) -> None:
        rig.set_dlq_config("q", DlqConfig(auto_retry=True, auto_retry_interval=1000))
        first = rig.push(unique_key="k")
        rig.bury()
        rig.push(unique_key="k", delay=0)
        rig.advance(1000)
        assert rig.state(first) == "failed"
        rig.run()
        rig.advance(1000)
        assert rig.state(first) == "waiting"

    def test_letters_are_dropped_when_too_old(self, rig: Rig) -> None:
        rig.set_dlq_config("q", DlqConfig(max_age=1000))
        job_id = rig.push()
        rig.bury()
        rig.advance(999)
        assert rig.state(job_id) == "failed"
        rig.advance(1)
        assert rig.state(job_id) == "unknown"

    def test_a_new_config_counts_for_letters_that_are_there(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.bury()
        rig.set_dlq_config("q", DlqConfig(max_age=500))
        assert rig.dlq_config("q").max_age == 500
        rig.advance(500)
        assert rig.state(job_id) == "unknown"

    def test_the_oldest_letters_go_when_there_are_too_many(self, rig: Rig) -> None:
        rig.set_dlq_config("q", DlqConfig(max_entries=2))
        ids = rig.push_many(*(spec(n) for n in range(4)))
        for _ in ids:
            rig.bury()
            rig.advance(1)
        assert rig.states(*ids) == ["unknown", "unknown", "failed", "failed"]


def test_letters_that_were_pushed_out_are_not_remembered(local_rig: Rig) -> None:
    local_rig.is_checking = False
    local_rig.set_dlq_config("q", DlqConfig(max_entries=10, auto_retry=True))
    for _ in range(2000):
        local_rig.push()
        local_rig.bury()
    assert len(local_rig.backend._burials) < 2000
    local_rig.advance(3_600_000)
    assert local_rig.count() == {"waiting": 10}


def test_a_new_config_reaches_many_letters_in_slices(local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two slices others have their turn: the newest config counts for all, and letters may be gone."""
    local_rig.is_checking = False
    ids = local_rig.push_many(*(spec(n) for n in range(300)))
    for _ in ids:
        local_rig.bury()
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    work = local_rig.backend.set_dlq_config("q", DlqConfig(max_age=1000))
    assert isinstance(work.send(None), Breath)
    local_rig.retry_dlq("q", ids[-1], None, None)
    run_now(local_rig.backend.set_dlq_config("q", DlqConfig(max_age=5000)))
    run_now(work)
    local_rig.is_checking = True
    local_rig.advance(4999)
    assert local_rig.count() == {"failed": 299, "waiting": 1}
    local_rig.advance(1)
    assert local_rig.count() == {"waiting": 1}


def test_a_config_that_changes_often_leaves_nothing_behind(local_rig: Rig) -> None:
    for _ in local_rig.push_many(*(spec(n) for n in range(20))):
        local_rig.bury()
    for n in range(100):
        local_rig.set_dlq_config("q", DlqConfig(auto_retry=True, auto_retry_interval=5000 + n))
    assert len(local_rig.backend._burials) <= 100
    local_rig.advance(5098)
    assert local_rig.count() == {"failed": 20}
    local_rig.advance(1)
    assert local_rig.count() == {"waiting": 20}


def test_a_config_that_could_not_be_applied_leaves_the_limit_of_tidying(
    local_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_rig.is_checking = False
    for _ in local_rig.push_many(*(spec(n) for n in range(300))):
        local_rig.bury()
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    most = local_rig.backend._most_burials
    work = local_rig.backend.set_dlq_config("q", DlqConfig(max_age=1000))
    assert isinstance(work.send(None), Breath)
    with pytest.raises(StorageUnavailable):
        work.throw(StorageUnavailable("the disk fails"))
    assert local_rig.backend._most_burials == most


def test_an_age_in_fractions_of_a_millisecond_is_cut(local_rig: Rig) -> None:
    local_rig.push()
    local_rig.bury()
    local_rig.set_dlq_config("q", DlqConfig(max_age=1000.5))
    local_rig.advance(999)
    assert local_rig.count() == {"failed": 1}
    local_rig.advance(1)
    assert local_rig.count() == {}


def test_letters_are_not_forgotten_when_tidying_is_interrupted(local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    local_rig.is_checking = False
    for _ in local_rig.push_many(*(spec(n) for n in range(1100))):
        local_rig.bury()
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    known = sorted(local_rig.backend._burials)
    work = local_rig.backend._tidy_burials_slowly()
    assert isinstance(work.send(None), Breath)
    with pytest.raises(StorageUnavailable):
        work.throw(StorageUnavailable("the disk fails"))
    assert sorted(local_rig.backend._burials) == known


def test_letters_that_are_due_together_go_in_several_sweeps(local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PROMOTE_SLICE", 2)
    local_rig.set_dlq_config("q", DlqConfig(max_age=1000))
    for _ in local_rig.push_many(*(spec(n) for n in range(5))):
        local_rig.bury()
    left = []
    local_rig.advance(5000)
    while (due := local_rig.backend.next_due_ms()) is not None and due <= local_rig.clock.monotonic_ms():
        assert due == local_rig.clock.monotonic_ms(), "a sweep that comes late waits for the sockets first"
        left.append(local_rig.count())
        local_rig.sweep()
    assert left == [{"failed": 3}, {"failed": 1}]
    assert local_rig.count() == {}


class TestRetryCompleted:
    def test_a_completed_job_runs_again(self, rig: Rig) -> None:
        job_id = rig.push(data="d")
        held = rig.take()
        rig.set_progress(job_id, 50, None)
        rig.ack(held, "result")
        rig.advance(100)
        assert rig.retry_completed("q", job_id, None, None) == 1
        job = rig.look(job_id)
        assert (job["state"], job["progress"], job["completedAt"], job["data"]) == ("waiting", 0, None, "d")
        assert "returnvalue" not in job
        assert rig.take().id == job_id

    def test_oldest_completion_first(self, rig: Rig) -> None:
        ids = rig.push_many(spec(1), spec(2), spec(3))
        held = rig.pull(count=3)
        for n in (2, 0, 1):
            rig.advance(10)
            rig.ack(held[n])
        assert rig.retry_completed("q", None, 2, None) == 2
        assert rig.states(*ids) == ["waiting", "completed", "waiting"]

    def test_only_those_completed_before(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2))
        rig.run()
        then = rig.clock.now_ms()
        rig.advance(10)
        rig.run()
        assert rig.retry_completed("q", None, None, then) == 1

    def test_wrong_queue_or_state_is_zero(self, rig: Rig) -> None:
        job_id, waiting = rig.push(), rig.push()
        rig.run()
        assert rig.retry_completed("other", job_id, None, None) == 0
        assert rig.retry_completed("q", waiting, None, None) == 0

    def test_the_key_of_a_rival_is_not_stolen(self, rig: Rig) -> None:
        first = rig.push(unique_key="k")
        rig.run()
        second = rig.push(unique_key="k")
        assert rig.retry_completed("q", first, None, None) == 0
        assert rig.unique_key_owner("q", "k") == second
        rig.run()
        assert rig.retry_completed("q", None, None, None) == 1

    def test_the_timeline_tells_the_first_life(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.run()
        rig.advance(1000)
        rig.retry_completed("q", job_id, None, None)
        states = [entry["state"] for entry in rig.look(job_id)["timeline"]]
        assert states == ["waiting", "active", "completed", "waiting"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_number_of_attempts_is_exact(rig: Rig, number: int) -> None:
    rig.push(max_attempts=number, backoff=0)
    runs = 0
    while got := rig.pull():
        runs += 1
        rig.nack(got[0])
    assert runs == number
