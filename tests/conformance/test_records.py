"""What is kept beside the jobs: logs, schedules, webhooks, repeating jobs."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.model import CronEntry, Dedup, Repeat, Webhook
from tests.conformance.rig import Rig, pack, spec


class TestLogs:
    def test_lines_come_back_in_order_with_level_and_time(self, rig: Rig) -> None:
        job_id = rig.push()
        for n, level in enumerate(("info", "warn", "error")):
            rig.add_log(job_id, f"line {n}", level)
            rig.advance(1)
        logs = rig.logs(job_id)
        assert [(log.level, log.message) for log in logs] == [
            ("info", "line 0"),
            ("warn", "line 1"),
            ("error", "line 2"),
        ]
        assert logs[1].timestamp == logs[0].timestamp + 1
        assert rig.logs("nobody") == []

    def test_only_the_last_hundred_are_kept(self, rig: Rig) -> None:
        rig.is_checking = False
        job_id = rig.push()
        for n in range(130):
            rig.add_log(job_id, str(n), "info")
        assert [log.message for log in rig.logs(job_id)] == [str(n) for n in range(30, 130)]

    def test_keep_logs_is_enforced(self, rig: Rig) -> None:
        few, none = rig.push(keep_logs=2), rig.push(keep_logs=0)
        for n in range(5):
            rig.add_log(few, str(n), "info")
            rig.add_log(none, str(n), "info")
        assert [log.message for log in rig.logs(few)] == ["3", "4"]
        assert rig.logs(none) == []

    def test_clearing_keeps_the_newest(self, rig: Rig) -> None:
        job_id = rig.push()
        for n in range(5):
            rig.add_log(job_id, str(n), "info")
        rig.clear_logs(job_id, 2)
        assert [log.message for log in rig.logs(job_id)] == ["3", "4"]
        rig.clear_logs(job_id, None)
        assert rig.logs(job_id) == []

    def test_finished_jobs_take_lines_and_removed_ones_leave_none(self, rig: Rig) -> None:
        job_id = rig.push(custom_id="x")
        rig.run()
        rig.add_log(job_id, "afterwards", "info")
        assert len(rig.logs(job_id)) == 1
        rig.clean("q", 0, "completed", 10)
        rig.push(custom_id="x")
        assert rig.logs("x") == []

    def test_logs_go_with_the_completed_jobs_that_are_not_kept(self, rig: Rig) -> None:
        rig.backend.max_completed = 1
        old, new = rig.push(), rig.push()
        rig.add_log(old, "line", "info")
        rig.run()
        rig.run()
        rig.retire_completed()
        rig.settle()
        assert rig.states(old, new) == ["unknown", "completed"]
        assert rig.logs(old) == []

    def test_lines_of_this_tick_are_seen(self, rig: Rig) -> None:
        job_id = rig.push()
        rig.wait(rig.backend.add_log(job_id, "now", "info"))
        assert [log.message for log in rig.wait(rig.backend.logs(job_id))] == ["now"]
        rig.settle()
        assert [log.message for log in rig.logs(job_id)] == ["now"]


def cron(name: str = "c", **fields: object) -> CronEntry:
    given = {"queue": "q", "data": bytes(pack(1)), "schedule": None, "repeat_every": 1000.0, "next_run": 5000.0}
    return CronEntry(name, **{**given, **fields})


class TestCrons:
    def test_they_are_stored_by_name(self, rig: Rig) -> None:
        rig.put_cron(cron("a"))
        rig.put_cron(cron("b"))
        rig.put_cron(cron("a", queue="other"))
        assert [(entry.name, entry.queue) for entry in rig.crons()] == [("a", "other"), ("b", "q")]
        assert rig.cron("nobody") is None
        assert rig.delete_cron("a") is True
        assert rig.delete_cron("a") is False
        assert [entry.name for entry in rig.crons()] == ["b"]

    def test_a_run_stores_the_entry_and_its_job_together(self, rig: Rig) -> None:
        rig.put_cron(cron())
        job_id = rig.fire_cron(cron(last_slot=5000.0, next_run=6000.0, executions=1), spec("tick"))
        assert rig.look(job_id)["data"] == "tick"
        assert rig.cron("c").next_run == 6000
        assert rig.take_words() == ["pushed", "cron-fired"]

    def test_a_slot_that_was_fired_is_refused(self, rig: Rig) -> None:
        rig.put_cron(cron())
        assert rig.fire_cron(cron(last_slot=5000.0, next_run=6000.0), spec()) is not None
        assert rig.fire_cron(cron(last_slot=5000.0, next_run=9000.0), spec()) is None
        assert rig.cron("c").next_run == 6000
        assert rig.count() == {"waiting": 1}

    def test_a_skipped_run_only_moves_on(self, rig: Rig) -> None:
        rig.put_cron(cron())
        assert rig.fire_cron(cron(last_slot=5000.0, next_run=6000.0), None) is None
        assert rig.cron("c").next_run == 6000
        assert rig.count() == {}

    def test_a_deleted_schedule_does_not_fire(self, rig: Rig) -> None:
        assert rig.fire_cron(cron(last_slot=5000.0), spec()) is None
        assert rig.crons() == []


class TestWebhooks:
    def test_they_are_stored_changed_and_removed(self, rig: Rig) -> None:
        hook = Webhook("w1", "https://example.com", ["job.completed"], None, "secret", 1.0)
        rig.add_webhook(hook)
        assert rig.webhooks() == [hook]
        changed = rig.change_webhook("w1", lambda stored: replace(stored, enabled=False))
        assert rig.webhooks() == [changed]
        assert (changed.secret, changed.enabled) == ("secret", False)
        assert rig.change_webhook("w2", lambda stored: stored) is None
        assert rig.remove_webhook("w1") is True
        assert rig.remove_webhook("w1") is False
        assert rig.webhooks() == []


class TestRepeat:
    def test_a_completed_job_pushes_its_successor_in_phase(self, rig: Rig) -> None:
        start = rig.clock.now_ms()
        first = rig.push(data="d", name="n", priority=2, repeat=Repeat(every=1000))
        rig.advance(300)
        rig.run()
        (second,) = rig.ids_in("delayed")
        job = rig.look(second)
        assert second != first
        assert (job["runAt"], job["data"], job["name"], job["priority"]) == (start + 1000, "d", "n", 2)
        assert job["repeat"]["count"] == 1

    def test_slots_that_passed_are_left_out(self, rig: Rig) -> None:
        start = rig.clock.now_ms()
        rig.push(repeat=Repeat(every=1000))
        rig.advance(3500)
        rig.run()
        assert rig.look(rig.ids_in("delayed")[0])["runAt"] == start + 4000

    def test_limit_is_the_number_of_repetitions_after_the_first(self, rig: Rig) -> None:
        rig.push(repeat=Repeat(every=1000, limit=2))
        runs = 0
        while got := rig.pull():
            rig.ack(got[0])
            runs += 1
            rig.advance(1000)
        assert runs == 3
        assert rig.count() == {"completed": 3}

    def test_a_failed_job_is_retried_and_then_repeats(self, rig: Rig) -> None:
        rig.push(repeat=Repeat(every=1000), backoff=0)
        rig.nack(rig.take())
        assert rig.count() == {"waiting": 1}
        rig.run()
        assert rig.count() == {"completed": 1, "delayed": 1}

    def test_a_dead_letter_does_not_repeat(self, rig: Rig) -> None:
        rig.push(repeat=Repeat(every=1000))
        rig.bury()
        assert rig.count() == {"failed": 1}

    def test_the_key_goes_over_to_the_successor(self, rig: Rig) -> None:
        rig.push(repeat=Repeat(every=1000), unique_key="k")
        rig.run()
        (second,) = rig.ids_in("delayed")
        assert rig.unique_key_owner("q", "k") == second

    def test_a_rival_that_took_the_key_goes_on_alone(self, rig: Rig) -> None:
        rig.push(repeat=Repeat(every=1000), unique_key="k")
        held = rig.take()
        rival = rig.push(repeat=Repeat(every=1000), unique_key="k", dedup=Dedup(replace=True))
        rig.ack(held)
        assert rig.unique_key_owner("q", "k") == rival
        assert rig.count() == {"completed": 1, "waiting": 1}

    def test_update_of_a_completed_job_changes_its_successor(self, rig: Rig) -> None:
        first = rig.push(data="old", repeat=Repeat(every=1000))
        rig.run()
        rig.update(first, pack("new"))
        assert rig.look(rig.ids_in("delayed")[0])["data"] == "new"
        assert rig.look(first)["data"] == "old"

    def test_update_of_a_completed_job_leaves_other_repeating_jobs_alone(self, rig: Rig) -> None:
        first, second = (rig.push(data=data, repeat=Repeat(every=1000)) for data in ("a", "b"))
        rig.run()
        rig.run()
        rig.update(second, pack("new b"))
        assert sorted(rig.look(job_id)["data"] for job_id in rig.ids_in("delayed")) == ["a", "new b"]
        rig.update(first, pack("new a"))
        assert sorted(rig.look(job_id)["data"] for job_id in rig.ids_in("delayed")) == ["new a", "new b"]

    def test_children_of_one_run_are_not_those_of_the_next(self, rig: Rig) -> None:
        first = rig.push(repeat=Repeat(every=1000))
        held = rig.take()
        child = rig.push("children", parent_id=first)
        rig.ack(held)
        assert rig.look(first)["childrenIds"] == [child]
        assert rig.look(rig.ids_in("delayed")[0])["childrenIds"] == []

    def test_a_job_without_result_kept_repeats_too(self, rig: Rig) -> None:
        rig.push(data="x" * 40_000, repeat=Repeat(every=1000), remove_on_complete=True)
        rig.run()
        (second,) = rig.ids_in("delayed")
        assert rig.look(second)["data"] == "x" * 40_000
