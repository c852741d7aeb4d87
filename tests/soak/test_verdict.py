"""Who checks the checker: each promise of the soak notices when it is broken, and knows its excuses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from soak.accounts import Account, Ending, account_of_log
from soak.faults import FAULTS, plan
from soak.ledger import Ledger, Push, Run, Start
from soak.stage import Incident
from soak.verdict import (
    Execution,
    Side,
    compensation_is_right,
    every_flow_ends,
    every_push_has_one_outcome,
    executions,
    never_two_at_once,
    nothing_repeats_without_cause,
    nothing_runs_after_its_completion,
    one_job_per_id,
    outcomes_are_right,
    slots_fire_once,
)

from headrace.model import FlowStatus
from headrace.workflows.timeline import Bar, Timeline

LEASE = 6.0


def ran(began: float, ended: float, outcome: str = "done", pid: int = 1, **more: object) -> Execution:
    return Execution("j", more.get("attempt", 1), pid, began, ended, outcome, "k", None)  # type: ignore[arg-type]


def side(**known: object) -> Side:
    nothing: dict[str, object] = {"pushes": [], "starts": [], "runs": [], "steps": [], "incidents": [], "timelines": {}}
    return Side("local", LEASE, **{"account": Account({}), **nothing, **known})  # type: ignore[arg-type]


def pushed(kind: str = "plain", attempts: int = 3, key: str = "k") -> Push:
    return Push("j", kind, attempts, key, 1.0)


def ended(*endings: Ending) -> Account:
    return Account({"j": list(endings)})


COMPLETED = Ending("completed", 10.0, 1)


class TestJobs:
    @pytest.mark.parametrize(("endings", "is_kept"), [((COMPLETED,), True), ((), False), ((COMPLETED,) * 2, False)])
    def test_an_acknowledged_push_has_one_outcome(self, endings: tuple[Ending, ...], is_kept: bool) -> None:
        assert every_push_has_one_outcome(side(pushes=[pushed()], account=ended(*endings))).is_kept is is_kept

    def test_a_push_that_the_log_does_not_know_is_noticed(self) -> None:
        account = Account({"j": [COMPLETED]}, set())
        assert not every_push_has_one_outcome(side(pushes=[pushed()], account=account)).is_kept

    @pytest.mark.parametrize(
        ("kind", "ending", "is_kept"),
        [
            ("plain", COMPLETED, True),
            ("plain", Ending("failed", 1.0, 3), False),
            ("doomed", Ending("failed", 1.0, 3), True),
            ("doomed", Ending("failed", 1.0, 2), False),
            ("doomed", COMPLETED, False),
        ],
    )
    def test_the_outcome_is_that_of_its_kind(self, kind: str, ending: Ending, is_kept: bool) -> None:
        assert outcomes_are_right(side(pushes=[pushed(kind)], account=ended(ending))).is_kept is is_kept

    def test_an_id_that_became_two_jobs_is_noticed(self) -> None:
        other = Execution("other", 1, 1, 1.0, 2.0, "done", "k", None)
        assert one_job_per_id(side(pushes=[pushed("once")], runs=[ran(1, 2)])).is_kept
        assert not one_job_per_id(side(pushes=[pushed("once")], runs=[ran(1, 2), other])).is_kept

    def test_a_run_that_begins_after_the_outcome_is_noticed(self) -> None:
        assert nothing_runs_after_its_completion(side(runs=[ran(9, 9.9)], account=ended(COMPLETED))).is_kept
        assert not nothing_runs_after_its_completion(side(runs=[ran(10.1, 11)], account=ended(COMPLETED))).is_kept

    @pytest.mark.parametrize(
        ("incident", "is_kept"),
        [
            (None, False),
            (Incident("kill", "local-worker-1", 1.5, 1.6, 1), True),
            (Incident("kill", "local-worker-2", 1.5, 1.6, 2), False),
            (Incident("kill", "local-worker-1", 5, 5.1, 1), False),
            (Incident("kill", "server", 1.5, 2), True),
            (Incident("kill", "server", 0, 0.5), True),  # it may have been held since before
            (Incident("kill", "server", -9, -8), False),
            (Incident("cut", "way to server", 1.5, 2), False),
            (Incident("freeze", "server", 1.5, 2), False),
            (Incident("freeze", "server", 1.5, 1.5 + LEASE), True),
        ],
    )
    def test_a_repeat_needs_a_cause_between_the_two(self, incident: Incident | None, is_kept: bool) -> None:
        given = side(runs=[ran(1, 3), ran(2, 4, pid=2)], incidents=[incident] if incident else [])
        assert nothing_repeats_without_cause(given).is_kept is is_kept
        assert never_two_at_once(given).is_kept is is_kept

    def test_the_next_attempt_after_a_failed_one_is_no_repeat_and_the_same_one_is(self) -> None:
        failed = ran(1, 2, "failed")
        assert nothing_repeats_without_cause(side(runs=[failed, ran(3, 4, attempt=2)])).is_kept
        assert not nothing_repeats_without_cause(side(runs=[failed, ran(3, 4, attempt=1)])).is_kept

    def test_the_log_tells_of_pushes_and_last_ends_only(self) -> None:
        def event(word: str, **more: object) -> dict[str, object]:
            return {"event": word, "queue": "jobs", "job": "j", "ts": 1000, **more}

        account = account_of_log(
            [event("pushed"), event("failed", attempt=1), event("failed", attempt=2, terminal=True)]
        )
        assert (account.pushed, account.endings) == ({"j"}, {"j": [Ending("failed", 1.0, 2)]})

    def test_an_execution_without_an_end_ended_with_its_process(self, tmp_path: Path) -> None:
        begin = Run("j", "begin", 1, 7, 1.0)
        Ledger(tmp_path / "runs").write(begin)
        (one,) = executions(tmp_path / "runs", [Incident("kill", "local-worker-1", 2.5, 2.6, 7)])
        assert (one.outcome, one.ended) == ("killed", 2.5)


class TestWorkflows:
    @staticmethod
    def flow(status: FlowStatus, done: str, taken_back: str, failing: str | None) -> Side:
        bars = [Bar(step, "step", 1, outcome="completed") for step in done]
        bars += [Bar(step, "rollback", 1, outcome="rolled-back") for step in taken_back]
        line = Timeline("f", "trip", 1, status, 1, 2, [], bars, None, None)
        return side(starts=[Start("f", failing, 1.0)], timelines={"f": line})

    @pytest.mark.parametrize(
        ("status", "done", "taken_back", "failing", "is_kept"),
        [
            (FlowStatus.COMPLETED, "abcd", "", None, True),
            (FlowStatus.COMPLETED, "abc", "", None, False),
            (FlowStatus.COMPLETED, "abcd", "d", None, False),
            (FlowStatus.FAILED, "abc", "cba", "d", True),
            (FlowStatus.FAILED, "acb", "bca", "d", True),
            (FlowStatus.FAILED, "abc", "bca", "d", False),
            (FlowStatus.FAILED, "abc", "ccba", "d", False),
            (FlowStatus.FAILED, "abc", "ba", "d", False),
            (FlowStatus.FAILED, "abc", "cba", None, False),
        ],
    )
    def test_compensation(
        self, status: FlowStatus, done: str, taken_back: str, failing: str | None, is_kept: bool
    ) -> None:
        assert compensation_is_right(self.flow(status, done, taken_back, failing)).is_kept is is_kept

    def test_a_flow_that_goes_on_or_is_gone_is_noticed(self) -> None:
        assert not every_flow_ends(self.flow(FlowStatus.RUNNING, "a", "", None)).is_kept
        assert not every_flow_ends(side(timelines={"f": None})).is_kept


class TestSchedules:
    @staticmethod
    def ticks(*slots: int, incidents: tuple[Incident, ...] = ()) -> Side:
        runs = [Execution(f"j{n}", 1, 1, s, s, "done", "interval", s * 1000.0) for n, s in enumerate(slots)]
        return side(runs=runs, incidents=list(incidents))

    def test_a_slot_that_fired_twice_or_not_at_all_is_noticed(self) -> None:
        assert slots_fire_once(self.ticks(1, 2, 3)).is_kept
        assert not slots_fire_once(self.ticks(1, 2, 2, 3)).is_kept
        assert not slots_fire_once(self.ticks(1, 2, 4)).is_kept

    def test_what_fell_into_a_restart_of_the_server_is_left_out(self) -> None:
        assert slots_fire_once(self.ticks(1, 2, 4, incidents=(Incident("kill", "server", 2.5, 3.5),))).is_kept
        assert not slots_fire_once(self.ticks(1, 2, 4, incidents=(Incident("freeze", "server", 2.5, 3.5),))).is_kept


class TestPlan:
    def test_the_same_seed_makes_the_same_faults_and_a_long_run_has_all_of_them(self) -> None:
        def drawn(seed: int) -> list[object]:
            return list(plan(random.Random(seed), list(FAULTS), ["local-worker-1", "local-producer-1"], 600, 4))

        assert drawn(1) == drawn(1) != drawn(2)
        assert {one.fault for one in drawn(3)} == set(FAULTS)  # type: ignore[attr-defined]
