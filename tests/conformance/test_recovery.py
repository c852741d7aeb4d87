"""A restart on the same file: everything is as it was, and what was active waits again."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing, suppress

import msgspec
import pytest

from headrace.backends.base import Ack, GroupDemand, JobScan
from headrace.backends.local import slices
from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.journal import FileLocked
from headrace.backends.local.slices import Breath, run_now
from headrace.errors import HeadraceError, StorageUnavailable
from headrace.model import (
    DAY_MS,
    Backoff,
    CronEntry,
    Dedup,
    DlqConfig,
    DlqFilter,
    RateLimit,
    Repeat,
    StallConfig,
    Webhook,
)
from tests.conformance.rig import Rig, pack, spec, unpack
from tests.conformance.snapshot import as_restarted, snapshot
from tests.scale import scaled


def restart(rig: Rig) -> None:
    """Reopen and compare everything with what was there before."""
    before = as_restarted(snapshot(rig.backend))
    rig.reopen()
    after = as_restarted(snapshot(rig.backend))
    for part, value in before.items():
        assert after[part] == value, part


class TestJobs:
    def test_every_option_comes_back(self, kept: Rig) -> None:
        kept.push(
            data={"a": [1, 2]},
            name="named",
            priority=-7,
            delay=5000,
            max_attempts=9,
            backoff=Backoff("fixed", 100, 2000),
            ttl=1_000_000,
            timeout=2000,
            stall_timeout=3000,
            lifo=True,
            remove_on_complete=True,
            stack_trace_limit=2,
            keep_logs=5,
            unique_key="k",
            custom_id="x",
            group_id="g",
            tags=["t"],
            repeat=Repeat(every=1000, limit=5),
            dedup=Dedup(ttl=9000, extend=True),
        )
        shown = kept.look("x")
        restart(kept)
        assert kept.look("x") == shown

    def test_states_counts_and_order_come_back(self, kept: Rig) -> None:
        for n in range(30):
            kept.push(data=n, priority=n % 3, lifo=n % 5 == 0, delay=100 if n % 7 == 0 else 0)
            kept.clock.advance(n % 2)
        for _ in range(3):
            kept.run(result="r")
        kept.bury()
        counts = kept.count()
        restart(kept)
        assert kept.count() == counts

    def test_an_active_job_waits_at_once_with_nothing_counted(self, kept: Rig) -> None:
        first, second = kept.push(backoff=0), kept.push()
        kept.advance(10)
        kept.nack(kept.take())
        held = kept.pull(count=2)
        restart(kept)
        assert kept.count() == {"waiting": 2}
        job = kept.look(first)
        assert (job["attempts"], job["stallCount"], job["startedAt"]) == (1, 0, None)
        with pytest.raises(Exception, match=r"^Job not found or not in processing state"):
            kept.ack(held[0])
        assert kept.pulled_ids() == [second, first]

    @pytest.mark.parametrize("size", [10, 16_000, 20_000, 300_000])
    def test_payloads_and_results_of_any_size_come_back(self, kept: Rig, size: int) -> None:
        waiting, done, dead = (kept.push(data="d" * size, priority=p) for p in (0, 2, 1))
        kept.run(result="r" * size)
        kept.bury()
        restart(kept)
        for job_id in (waiting, done, dead):
            assert kept.look(job_id)["data"] == "d" * size
        assert kept.look(done)["returnvalue"] == "r" * size
        kept.retry_dlq("q", dead, None, None)
        restart(kept)
        assert kept.take().job["data"] == "d" * size

    def test_the_size_of_large_payloads_comes_back(self, kept: Rig) -> None:
        """Pages of scans are cut by it: without it a page of large jobs would not fit into memory."""
        for n in range(4):
            kept.push(data=bytes(4 << 20), custom_id=f"large{n}")
        kept.reopen()
        page = kept.scan_jobs(JobScan(None, (), 0, 2**53, 1000))
        assert 0 < len(page.rows) < 4
        assert page.next is not None

    def test_the_history_comes_back(self, kept: Rig) -> None:
        job_id = kept.push(backoff=0)
        held = kept.take()
        kept.set_progress(job_id, 30, "step")
        kept.nack(held, "first error", stack=["at a", "at b"])
        timeline = kept.look(job_id)["timeline"]
        restart(kept)
        job = kept.look(job_id)
        assert job["timeline"] == timeline
        assert (job["progress"], job["progressMessage"], job["stacktrace"]) == (30, "step", ["at a", "at b"])

    def test_delayed_jobs_mature_on_time(self, kept: Rig) -> None:
        job_id = kept.push(delay=1000)
        kept.advance(400)
        restart(kept)
        kept.advance(599)
        assert kept.state(job_id) == "delayed"
        kept.advance(1)
        assert kept.state(job_id) == "waiting"

    def test_what_matured_while_nobody_ran_is_there_at_once(self, kept: Rig) -> None:
        job_id = kept.push(delay=1000)
        kept.clock.advance(2000)
        kept.reopen()
        assert kept.pulled_ids() == [job_id]

    def test_removed_jobs_stay_away(self, kept: Rig) -> None:
        gone = [kept.push(remove_on_complete=True), kept.push(data="x" * 20_000), kept.push()]
        kept.run()
        kept.cancel(gone[1])
        kept.clean("q", 0, None, 10)
        restart(kept)
        assert kept.states(*gone) == ["unknown"] * 3

    def test_a_job_made_and_gone_in_one_tick_leaves_nothing(self, kept: Rig) -> None:
        job_id = run_now(kept.backend.insert_one("q", spec(1)))
        run_now(kept.backend.add_log(job_id, "line", "info"))
        run_now(kept.backend.cancel(job_id))
        kept.settle()
        restart(kept)
        assert kept.state(job_id) == "unknown"

    def test_completed_jobs_keep_the_order_of_their_completion(self, kept: Rig) -> None:
        kept.push_many(*(spec(n) for n in range(4)))
        held = kept.pull(count=4)
        for n in (2, 0, 3, 1):
            kept.advance(5)
            kept.ack(held[n])
        restart(kept)
        kept.backend.max_completed = 2
        kept.retire_completed()
        kept.settle()
        assert kept.states(*(one.id for one in held)) == ["unknown", "completed", "unknown", "completed"]


class TestJobsThatCompletedTogether:
    """Their rows stay as they are: one row elsewhere says which have completed."""

    def complete(self, kept: Rig, count: int = 10) -> list[str]:
        kept.push_many(*(spec(n) for n in range(count)))
        held = kept.pull(count=count)
        kept.complete([Ack(one.id, one.token) for one in held])
        return [one.id for one in held]

    def test_come_back_completed(self, kept: Rig) -> None:
        ids = self.complete(kept)
        (rows,) = stored(kept, "SELECT count(*) FROM completion")
        assert rows == (1,)
        restart(kept)
        assert kept.states(*ids) == ["completed"] * 10

    def test_one_that_runs_again_waits_after_a_restart(self, kept: Rig) -> None:
        ids = self.complete(kept)
        kept.retry_completed("q", ids[4], None, None)
        kept.settle()
        restart(kept)
        assert kept.states(*ids[3:6]) == ["completed", "waiting", "completed"]
        kept.run(result="again")
        restart(kept)
        assert kept.look(ids[4])["returnvalue"] == "again"

    def test_their_numbers_are_not_given_to_new_jobs(self, kept: Rig) -> None:
        ids = self.complete(kept)
        kept.retry_completed("q", ids[0], None, None)
        kept.clean("q", 0, "completed", 100)
        assert kept.states(*ids) == ["waiting", *["unknown"] * 9]
        restart(kept)
        new = [kept.push() for _ in range(20)]
        restart(kept)
        assert kept.states(ids[0], *new) == ["waiting"] * 21

    def test_those_that_are_gone_leave_nothing_behind(self, kept: Rig) -> None:
        kept.backend.max_completed = 7
        for _ in range(10):
            self.complete(kept, 5)
        kept.retire_completed()
        kept.settle()
        assert stored(kept, "SELECT count(*) FROM completion") == [(2,)]
        kept.clean("q", 0, "completed", 10)
        kept.settle()
        restart(kept)
        assert stored(kept, "SELECT count(*) FROM completion") == [(0,)]


def stored(rig: Rig, sql: str) -> list[tuple[object, ...]]:
    rig.settle()
    with closing(sqlite3.connect(f"file:{rig.backend._journal.path}?mode=ro", uri=True)) as db:
        return db.execute(sql).fetchall()


class TestKeys:
    def test_keys_and_ids_are_held_as_before(self, kept: Rig) -> None:
        owner = kept.push(unique_key="k", custom_id="x")
        kept.nack(kept.take())
        done = kept.push(unique_key="other", custom_id="done")
        kept.run()
        restart(kept)
        assert kept.push(unique_key="k") == owner
        assert kept.push(custom_id="x") == owner
        assert kept.unique_key_owner("q", "other") is None
        assert kept.state(done) == "completed"

    def test_ttls_go_on(self, kept: Rig) -> None:
        owner = kept.push(unique_key="k", dedup=Dedup(ttl=1000))
        kept.advance(600)
        restart(kept)
        assert kept.push(unique_key="k") == owner
        kept.advance(400)
        assert kept.push(unique_key="k") != owner

    def test_an_extended_ttl_is_kept(self, kept: Rig) -> None:
        owner = kept.push(unique_key="k", dedup=Dedup(ttl=1000))
        kept.advance(900)
        kept.push(unique_key="k", dedup=Dedup(ttl=5000, extend=True))
        restart(kept)
        kept.advance(4000)
        assert kept.push(unique_key="k") == owner

    def test_a_key_whose_time_is_over_does_not_push_its_new_owner_out(self, kept: Rig) -> None:
        older = kept.push(unique_key="k")
        kept.bury()
        kept.push(unique_key="k", dedup=Dedup(ttl=1000))
        kept.advance(2000)
        assert kept.retry_dlq("q", older, None, None) == 1
        restart(kept)
        assert kept.push(unique_key="k") == older

    def test_a_key_taken_away_stays_away(self, kept: Rig) -> None:
        job_id = kept.push(unique_key="k")
        kept.remove_unique_key("q", "k")
        restart(kept)
        assert kept.push(unique_key="k") != job_id

    def test_a_replaced_owner_at_work_does_not_get_its_key_back(self, kept: Rig) -> None:
        kept.push(unique_key="k")
        kept.take()
        second = kept.push(unique_key="k", dedup=Dedup(replace=True))
        restart(kept)
        assert kept.unique_key_owner("q", "k") == second

    def test_the_key_of_a_revived_job_is_held(self, kept: Rig) -> None:
        job_id = kept.push(unique_key="k")
        kept.remove_unique_key("q", "k")
        kept.bury()
        kept.retry_dlq("q", job_id, None, None)
        restart(kept)
        assert kept.unique_key_owner("q", "k") == job_id


class TestFamilies:
    def test_pending_dependencies_are_waited_for(self, kept: Rig) -> None:
        first, second = kept.push(), kept.push()
        last = kept.push("other", depends_on=[first, second])
        kept.run()
        restart(kept)
        assert kept.state(last) == "waiting-children"
        kept.run()
        assert kept.state(last) == "waiting"
        assert kept.look(last)["childrenCompleted"] == 2

    def test_children_that_completed_are_not_waited_for_again(self, kept: Rig) -> None:
        """Whatever became of them since, and of whatever size the family is."""
        children = [f"c{n}" for n in range(50)]
        nodes = [(child, "q", {"parent_id": "top"}) for child in children]
        kept.push_family(*nodes, ("top", "tops", {"depends_on": children, "children_ids": children}))
        kept.run()
        kept.ack(kept.take(), remove=True)
        restart(kept)
        kept.run()
        kept.clean("q", 0, "completed", 1000)
        restart(kept)
        assert kept.look("top")["childrenCompleted"] == 3
        kept.move_to_delayed(kept.ids_in("waiting")[0], 5, None)
        kept.run()
        kept.discard("c49", None)
        kept.remove_child_dependency("c49")
        restart(kept)
        kept.advance(10)
        for _ in range(45):
            kept.run()
        assert kept.state("top") == "waiting"
        assert kept.look("top")["childrenCompleted"] == 49
        restart(kept)
        assert kept.run("tops").id == "top"

    def test_policies_still_apply(self, kept: Rig) -> None:
        kept.push_family(
            ("c", "q", {"parent_id": "p", "fail_parent_on_failure": True}),
            ("p", "q", {"children_ids": ["c"], "depends_on": ["c"]}),
        )
        restart(kept)
        kept.bury()
        assert kept.state("p") == "failed"

    def test_ties_made_later_are_kept(self, kept: Rig) -> None:
        child, parent = kept.push(data={}), kept.push("parents", depends_on=[kept.push("other")])
        kept.update_parent(child, parent)
        restart(kept)
        kept.run("other")
        assert kept.state(parent) == "waiting-children"
        kept.run(result=5)
        assert kept.state(parent) == "waiting"
        assert unpack(kept.children_values(parent)[f"q:{child}"]) == 5

    def test_failures_that_were_passed_over_are_remembered(self, kept: Rig) -> None:
        kept.push_family(
            ("c", "q", {"parent_id": "p", "ignore_dependency_on_failure": True}),
            ("d", "q", {"parent_id": "p", "continue_parent_on_failure": True}),
            ("p", "parents", {"children_ids": ["c", "d"], "depends_on": ["c", "d"]}),
        )
        kept.bury(error="one")
        kept.bury(error="two")
        restart(kept)
        assert kept.children_failures("p", ignored=True) == {"q:c": "one"}
        assert kept.children_failures("p", ignored=False) == {"q:d": "two"}


class TestDeadLetters:
    def test_letters_come_back_in_the_order_of_their_burial(self, kept: Rig) -> None:
        kept.push_many(*(spec(n, max_attempts=1) for n in range(3)))
        held = kept.pull(count=3)
        for n in (1, 2, 0):
            kept.advance(10)
            kept.nack(held[n], f"error {n}")
        letters = kept.dead_letters("q", DlqFilter(), None)
        restart(kept)
        again = kept.dead_letters("q", DlqFilter(), None)
        assert [letter.error for letter in again] == ["error 1", "error 2", "error 0"]
        for before, after in zip(letters, again, strict=True):
            assert msgspec.structs.replace(before, job=after.job) == after
        assert kept.retry_dlq("q", None, 1, None) == 1
        assert kept.state(held[1].id) == "waiting"

    def test_plans_for_letters_go_on(self, kept: Rig) -> None:
        kept.set_dlq_config("q", DlqConfig(auto_retry=True, auto_retry_interval=1000, max_age=5000))
        retried = kept.push()
        kept.bury()
        kept.advance(500)
        restart(kept)
        assert kept.backend.next_due_ms() == kept.clock.monotonic_ms() + 500
        kept.advance(500)
        assert kept.state(retried) == "waiting"
        kept.set_dlq_config("q", DlqConfig(max_age=5000))
        kept.bury()
        restart(kept)
        kept.advance(5000)
        assert kept.state(retried) == "unknown"

    @pytest.mark.parametrize(
        ("config", "left"),
        [
            (DlqConfig(max_age=1000), {}),
            (DlqConfig(max_age=None), {"failed": 300}),
            (DlqConfig(max_age=None, auto_retry=True), {"waiting": 300}),
        ],
    )
    def test_a_config_that_had_reached_some_letters_counts_for_all(
        self, kept: Rig, monkeypatch: pytest.MonkeyPatch, config: DlqConfig, left: dict[str, int]
    ) -> None:
        kept.is_checking = False
        for _ in kept.push_many(*(spec(n) for n in range(300))):
            kept.bury()
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        work = kept.backend.set_dlq_config("q", config)
        assert isinstance(work.send(None), Breath)
        kept.settle()
        work.close()
        kept.is_checking = True
        kept.reopen()
        restart(kept)  # what was planned is stored
        kept.advance(7 * DAY_MS)
        assert kept.count() == left


class TestRecords:
    def test_settings_of_queues_come_back(self, kept: Rig) -> None:
        kept.pause("q")
        kept.set_concurrency("q", 3)
        kept.set_rate_limit("q", 5, 1000, None)
        kept.set_stall_config("q", StallConfig(max_stalls=9))
        kept.set_dlq_config("q", DlqConfig(max_entries=9))
        kept.set_group_rate_limit("q", "g", RateLimit(1, 10))
        kept.set_group_concurrency("q", "g", 4)
        kept.pause_group("q", "g", True)
        restart(kept)
        assert kept.is_paused("q") is True
        assert kept.limits("q").concurrency_limit == 3
        assert kept.limits("q").rate_limit == RateLimit(5, 1000)
        assert kept.is_group_paused("q", "g") is True

    def test_a_limit_with_a_ttl_ends_after_the_restart(self, kept: Rig) -> None:
        kept.push()
        kept.set_rate_limit("q", 0, 1000, 5000)
        restart(kept)
        assert kept.pull() == []
        kept.advance(5001)
        assert len(kept.pull()) == 1

    def test_logs_schedules_and_webhooks_come_back(self, kept: Rig) -> None:
        job_id = kept.push()
        kept.add_log(job_id, "line", "warn")
        kept.put_cron(CronEntry("c", "q", bytes(pack(1)), "* * * * *", None, 5.0, max_limit=3))
        kept.add_webhook(Webhook("w", "https://example.com", ["job.failed"], "q", "s", 1.0))
        restart(kept)
        assert [log.message for log in kept.logs(job_id)] == ["line"]
        assert kept.cron("c").max_limit == 3
        assert kept.webhooks()[0].secret == "s"

    def test_totals_go_on(self, kept: Rig) -> None:
        kept.push()
        kept.run()
        restart(kept)
        kept.push()
        assert (kept.backend.totals().pushed, kept.backend.totals().completed) == (2, 1)


class TestEvents:
    def test_numbers_go_on_without_gap(self, kept: Rig) -> None:
        kept.push()
        kept.run()
        for _ in range(3):
            restart(kept)
            kept.push()
        seqs = [event.seq for event in kept.events]
        assert seqs == list(range(1, len(seqs) + 1))


class TestDamage:
    def test_a_crash_amid_long_commands_is_not_taken_for_lost_commits(
        self, kept: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What they do in one tick they tell with one time, however long ago each of them began."""
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        for queue in ("a", "b"):
            kept.push_many(*(spec(n, delay=DAY_MS) for n in range(300)), queue=queue)
        epoch, _, last = kept.backend.event_window()
        works = [kept.backend.promote_many(queue, None) for queue in ("a", "b")]
        assert isinstance(works[0].send(None), Breath)
        kept.settle()
        kept.clock.advance(6000)
        assert all(isinstance(work.send(None), Breath) for work in works)
        kept.backend._log.record(kept.backend.uncommitted_events())  # and before the commit the process is killed
        kept.reopen()
        assert (kept.backend.problems, kept.backend.event_window()) == ([], (epoch, 1, last + 128))

    def test_a_job_whose_payload_is_lost_holds_up_nobody(self, kept: Rig) -> None:
        lost, next_one = kept.push(data=bytes(20_000)), kept.push()
        kept.is_checking = False
        kept.backend._journal.later("DELETE FROM payload")
        kept.settle()
        with pytest.raises(StorageUnavailable, match=f"the payload of job {lost} is missing"):
            kept.pull()
        assert kept.take().id == next_one

    def test_an_unreadable_row_is_named_and_passed_over(self, kept: Rig) -> None:
        good, bad = kept.push(), kept.push(unique_key="k")
        kept.close()
        with sqlite3.connect(kept.folder / "jobs.db") as file:
            file.execute("UPDATE job SET links = x'ff' WHERE id = ?", (bad,))
        kept.is_checking = False
        kept.backend = kept.kind.make(kept.folder, kept.clock)
        run_now(kept.backend.open())
        assert kept.states(good, bad) == ["waiting", "unknown"]
        assert len(kept.backend.problems) == 1
        assert "unreadable" in kept.backend.problems[0]
        assert kept.push() not in (good, bad)

    def test_a_second_owner_of_the_file_is_refused(self, kept: Rig) -> None:
        with pytest.raises(FileLocked, match="is in use by process"):
            run_now(LocalBackend(kept.folder / "jobs.db").open())


class Life:
    """Random verbs over every kind of job; what a verb refuses is part of the life."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)

    def step(self) -> None:
        verbs = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        target = self.rng.choice([*self.rig.backend._jobs, "nobody"])
        with suppress(HeadraceError):
            self.rng.choice(verbs)(target)

    def do_push(self, _: str) -> None:
        self.rig.push(data="x" * self.rng.choice((5, 20_000)), delay=self.rng.choice((0, 0, 50)), backoff=10)

    def do_push_with_keys(self, _: str) -> None:
        self.rig.push(unique_key=f"k{self.rng.randrange(4)}", custom_id=f"c{self.rng.randrange(6)}")

    def do_push_ordered(self, _: str) -> None:
        lifo = self.rng.random() < 0.3
        self.rig.push(priority=self.rng.randrange(3), group_id=self.rng.choice("ab"), lifo=lifo)

    def do_push_dependent(self, target: str) -> None:
        self.rig.push(depends_on=[target], continue_parent_on_failure=True)

    def do_complete(self, _: str) -> None:
        for held in self.rig.pull(count=2):
            self.rig.ack(held, "result")

    def do_fail(self, _: str) -> None:
        for held in self.rig.pull(count=2, group=GroupDemand()):
            self.rig.nack(held, unrecoverable=self.rng.random() < 0.4)

    def do_pull(self, _: str) -> None:
        self.rig.pull()

    def do_cancel(self, target: str) -> None:
        self.rig.cancel(target)

    def do_change_priority(self, target: str) -> None:
        self.rig.change_priority(target, self.rng.randrange(4), None)

    def do_change_delay(self, target: str) -> None:
        self.rig.change_delay(target, self.rng.choice((0, 80)), None)

    def do_retry(self, _: str) -> None:
        self.rig.retry_dlq("q", None, 1, None)

    def do_log(self, target: str) -> None:
        self.rig.add_log(target, "line", "info")

    def do_update(self, target: str) -> None:
        self.rig.update(target, pack("y" * self.rng.choice((5, 30_000))))

    def do_wait(self, _: str) -> None:
        self.rig.advance(self.rng.choice((1, 60, 400)))


@pytest.mark.parametrize("seed", range(scaled(6, 60)))
def test_a_busy_life_with_many_restarts(kept: Rig, seed: int) -> None:
    """Nothing differs after a restart but what was active."""
    life = Life(kept, seed)
    kept.is_checking = False
    for _ in range(10):
        for _ in range(12):
            life.step()
        kept.kind.check(kept.backend)
        restart(kept)
