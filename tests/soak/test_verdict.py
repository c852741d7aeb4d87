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
    FLOW_LEASE,
    Evidence,
    Execution,
    Line,
    Side,
    bronze_is_complete,
    compensation_is_right,
    every_flow_ends,
    every_push_has_one_outcome,
    executions,
    judge,
    log_is_whole,
    never_two_at_once,
    nobody_ended_by_itself,
    nothing_is_left,
    nothing_repeats_without_cause,
    nothing_runs_after_its_completion,
    one_job_per_id,
    outcomes_are_right,
    sizes_are_flat,
    slots_fire_once,
    steps_repeat_only_with_cause,
    table,
)

from headrace.model import FlowStatus
from headrace.workflows.timeline import Bar, Timeline

LEASE = 6.0


def ran(began: float, ended: float, outcome: str = "done", pid: int = 1, **more: object) -> Execution:
    return Execution("j", more.get("attempt", 1), pid, began, ended, outcome, "k", None)  # type: ignore[arg-type]


def side(**known: object) -> Side:
    nothing: dict[str, object] = {"pushes": [], "starts": [], "runs": [], "steps": [], "incidents": [], "timelines": {}}
    also = {"account": Account({}), "scheduled_until": 0.0}
    return Side("local", LEASE, **{**also, **nothing, **known})  # type: ignore[arg-type]


def evidence(**known: object) -> Evidence:
    nothing: dict[str, object] = {"sides": [], "sizes": {}, "deaths": [], "logs": [], "left": [], "log_events": []}
    return Evidence(**{**nothing, **known})  # type: ignore[arg-type]


def pushed(kind: str = "plain") -> Push:
    return Push("j", kind, 3, "k", 1.0)


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
            (Incident("standstill", "machine", 1.5, 2), False),
            (Incident("standstill", "machine", 0.5 - LEASE, 0.5), True),  # it may have been held since before
            (Incident("standstill", "machine", -9 - LEASE, -9), False),
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

    def test_a_step_that_runs_again_needs_a_cause(self) -> None:
        twice = [ran(1, 2), ran(3, 4)]
        assert steps_repeat_only_with_cause(side(steps=[ran(1, 2, "failed"), ran(3, 4)])).is_kept
        assert not steps_repeat_only_with_cause(side(steps=twice)).is_kept
        frozen = Incident("freeze", "server", 1.5, 1.5 + FLOW_LEASE)
        assert steps_repeat_only_with_cause(side(steps=twice, incidents=[frozen])).is_kept


class TestSchedules:
    @staticmethod
    def ticks(*slots: int, incidents: tuple[Incident, ...] = (), until: float = 5.0) -> Side:
        runs = [Execution(f"j{n}", 1, 1, s, s, "done", "interval", s * 1000.0) for n, s in enumerate(slots)]
        runs += [Execution(f"c{s}", 1, 1, s, s, "done", "cron", s * 1000.0) for s in range(0, int(until), 2)]
        return side(runs=runs, incidents=list(incidents), scheduled_until=until)

    def test_a_slot_that_fired_twice_or_not_at_all_is_noticed(self) -> None:
        assert slots_fire_once(self.ticks(1, 2, 3)).is_kept
        assert not slots_fire_once(self.ticks(1, 2, 2, 3)).is_kept
        assert not slots_fire_once(self.ticks(1, 2, 4)).is_kept

    def test_a_schedule_that_stops_firing_or_never_does_is_noticed(self) -> None:
        assert slots_fire_once(self.ticks(1, 2, 3, 4, until=5.5)).is_kept
        assert not slots_fire_once(self.ticks(1, 2, 3, until=8)).is_kept
        assert not slots_fire_once(self.ticks()).is_kept

    def test_what_fell_into_a_restart_of_the_server_is_left_out(self) -> None:
        assert slots_fire_once(self.ticks(1, 2, 4, incidents=(Incident("kill", "server", 2.5, 3.5),))).is_kept
        assert not slots_fire_once(self.ticks(1, 2, 4, incidents=(Incident("freeze", "server", 2.5, 3.5),))).is_kept


class TestWhole:
    """What belongs to no side."""

    def test_what_is_left_is_noticed(self) -> None:
        assert nothing_is_left(evidence()).is_kept
        assert not nothing_is_left(evidence(left=["2 jobs of local"])).is_kept

    def test_a_process_that_ended_or_stumbled_is_noticed(self, tmp_path: Path) -> None:
        log = tmp_path / "server.log"
        log.write_text("WARNING a client went away\n")
        assert nobody_ended_by_itself(evidence(logs=[log])).is_kept
        assert not nobody_ended_by_itself(evidence(logs=[log], deaths=["server ended by itself with 1"])).is_kept
        log.write_text("Traceback (most recent call last):\n")
        assert not nobody_ended_by_itself(evidence(logs=[log])).is_kept

    @pytest.mark.parametrize(
        ("seqs", "is_kept"), [([1, 2, 3], True), ([1, 3], False), ([1, 2, 2], False), ([2, 3], False), ([], True)]
    )
    def test_a_hole_in_the_log_and_a_repeat_are_noticed(self, seqs: list[int], is_kept: bool) -> None:
        assert log_is_whole(evidence(log_events=seqs)).is_kept is is_kept

    @pytest.mark.parametrize(
        ("bronze", "problems", "is_kept"), [(2, [], True), (1, [], False), (3, [], False), (2, ["it failed"], False)]
    )
    def test_a_lake_that_is_not_the_log_is_noticed(self, bronze: int, problems: list[str], is_kept: bool) -> None:
        given = evidence(log_events=[1, 2], bronze_events=bronze, pipeline_problems=problems)
        (line,) = bronze_is_complete(given)
        assert line.is_kept is is_kept

    @pytest.mark.parametrize(("last", "is_kept"), [(100, True), (110, True), (140, False)])
    def test_what_grows_without_end_is_noticed(self, last: int, is_kept: bool) -> None:
        samples = [1e6 * (100 if at < 30 else last) for at in range(40)]
        (line,) = sizes_are_flat(evidence(sizes={"memory of server": samples}))
        assert line.is_kept is is_kept

    def test_every_promise_of_every_side_has_its_line_and_a_broken_one_says_what_happened(self) -> None:
        sides = [side(pushes=[pushed()], account=Account({}, {"j"})), side(scheduled_until=0.0)]
        lines = judge(evidence(sides=sides, bronze_events=0, sizes={"memory of server": []}))
        assert len(lines) == 2 * 10 + 5
        assert lines[0] == Line(
            "local: every acknowledged push has exactly one outcome",
            "1 acknowledged; 0 completed, 0 dead letters",
            ["j has no outcome"],
        )
        told = table(lines)
        assert told.startswith("FAIL  local: every acknowledged push")
        assert "        j has no outcome\n" in told


class TestPlan:
    def test_the_same_seed_makes_the_same_faults_and_a_long_run_has_all_of_them(self) -> None:
        def drawn(seed: int) -> list[object]:
            return list(plan(random.Random(seed), list(FAULTS), ["local-worker-1", "local-producer-1"], 600, 4))

        assert drawn(1) == drawn(1) != drawn(2)
        assert {one.fault for one in drawn(3)} == set(FAULTS)  # type: ignore[attr-defined]
