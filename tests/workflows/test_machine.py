"""The decision function alone: random outcomes in random order, and what must hold at every moment of every run.

The letters are those of the invariants: (a) compensation begins at most once, after the final failure; (b) a completed
step is rolled back at most once; (c) one end; (d) a flow always ends while its jobs are served; (e) results are never
lost; (f) the log is linear in the number of steps; (g) nothing of a flow is at work when it has ended.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from headrace.client.payloads import decode_payload, encode_payload
from headrace.model import FlowStatus
from headrace.propagation import ErrorReport
from headrace.workflows.machine import (
    Cancelled,
    Completed,
    CompleteLost,
    Decision,
    News,
    Reported,
    RollbackDone,
    RollbackLost,
    Run,
    Signalled,
    StepDone,
    StepLost,
    TimedOut,
    Woken,
    begin,
    decide,
)
from headrace.workflows.plan import Body, Entry, FlowJob, Plan, StepPlan
from tests.scale import scaled

ERROR = ErrorReport(type="ValueError", message="no")


def plan(*groups: str, kind: str = "run", **options: object) -> Plan:
    made = tuple(tuple(StepPlan(name, kind if name.startswith("w") else "run") for name in group) for group in groups)
    return Plan("order", made, **options)  # type: ignore[arg-type]


class World:
    """Plays the store and the workers: jobs that were pushed, news in any order, every decision applied at once."""

    def __init__(self, of: Plan, seed: int, *, failing: float = 0.2, stray: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.failing, self.stray = failing, stray
        self.is_enough = self.random.random() < 0.5
        self.log: list[Entry] = []
        self.jobs: list[FlowJob] = []
        self.old: list[News] = []
        self.ends: list[FlowStatus] = []
        self.begun: list[FlowJob] = []
        self.unbegun: list[FlowJob] = []
        """Jobs that were stopped before a worker had them: the store tells the flow."""
        self.carry_out(begin(Entry("started", body=Body(plan=of))))

    def carry_out(self, decision: Decision) -> None:
        assert not self.ends or not decision.entries, "nothing is written after the end"
        self.log += decision.entries
        for job in decision.drop:
            self.jobs = [one for one in self.jobs if (one.role, one.step) != (job.role, job.step)]
        for job in decision.stop:
            if job in self.jobs and self.random.random() < 0.5:  # else a worker has it
                self.jobs.remove(job)
                self.unbegun.append(job)
        self.jobs += decision.jobs
        self.begun += decision.jobs
        if decision.status is not None and decision.status.is_final:
            self.ends.append(decision.status)

    @property
    def run(self) -> Run:
        return Run.of(self.log)

    def news_of(self, job: FlowJob) -> News:
        fails = self.random.random() < self.failing
        if job.role == "step":
            body = Body(result=encode_payload(f"result of {job.step}"), can_roll_back=self.random.random() < 0.8)
            done = StepDone(job.step, 1, body, self.is_enough)
            if fails:
                self.old.append(done)  # its worker may only have been cut off, and be heard of later
            return StepLost(job.step, 3, ERROR) if fails else done
        if job.role == "rollback":
            return RollbackLost(job.step, 3, ERROR) if fails else RollbackDone(job.step)
        if job.role == "complete":
            return CompleteLost(ERROR) if fails else Completed(encode_payload("all"))
        if job.role == "error":
            return Reported(ERROR if fails else None)
        return TimedOut() if job.role == "timeout" else Woken(job.step)

    def serve(self, rounds: int = 500) -> None:
        for _ in range(rounds):
            if not self.jobs and not self.unbegun:
                return
            if self.unbegun and self.random.random() < 0.5:
                self.carry_out(decide(self.run, StepLost(self.unbegun.pop().step, 0, ERROR)))
            if self.old and self.random.random() < self.stray:
                self.carry_out(decide(self.run, self.random.choice(self.old)))  # at least once: it comes again
            if self.random.random() < self.stray / 5:
                self.carry_out(decide(self.run, Cancelled("enough", self.random.random() < 0.8)))
            if self.jobs:
                news = self.news_of(self.jobs.pop(self.random.randrange(len(self.jobs))))
                self.old.append(news)
                self.carry_out(decide(self.run, news))

    def check(self) -> None:
        kinds = Counter(entry.kind for entry in self.log)
        assert kinds["compensating"] <= 1, "(a)"
        assert kinds["completed"] == len(self.run.done), "a step is completed once"
        undone = Counter(entry.step for entry in self.log if entry.kind in ("rolled-back", "rollback-failed"))
        assert all(count == 1 for count in undone.values()), "(b)"
        assert set(undone) <= set(self.run.done), "(b) only what was done is undone"
        assert kinds["reported"] <= 1
        assert kinds["reporting"] <= 1
        assert kinds["result"] + kinds["ended"] == len(self.ends) <= 1, "(c)"
        for entry in self.log:
            if entry.kind == "completed" and entry.body.result:
                assert self.run.done[entry.step].result == entry.body.result, "(e)"
        steps = sum(len(group) for group in self.run.plan.groups)
        assert len(self.log) <= 6 + 4 * steps, "(f)"

    def check_end(self) -> None:
        assert len(self.ends) == 1, f"(d) it hangs: {[(e.kind, e.step) for e in self.log]}"
        run = self.run
        if self.ends[0] is FlowStatus.COMPLETED:
            assert run.failure is None, "(a) a flow that completes has taken nothing back"
            assert not run.failed
            assert set(run.done) == {one.name for group in run.plan.groups for one in group}
            return
        assert run.failure is not None
        if run.failure.compensate:
            assert not [job for job in (*self.jobs, *self.unbegun) if job.role == "step"], "(g)"
            begun = {job.step for job in self.begun if job.role == "step"}
            assert begun == run.done.keys() | run.failed.keys(), "(g) how a step ended is known of all that were begun"
        wanted = {step for step, body in run.done.items() if body.can_roll_back} if run.failure.compensate else set()
        assert set(run.undone) == wanted
        assert run.has_reported


groups_of_names = st.lists(st.integers(1, 4), max_size=5).map(
    lambda sizes: [[f"s{at}x{n}" for n in range(size)] for at, size in enumerate(sizes)]
)


@settings(max_examples=scaled(200, 5000))
@given(groups=groups_of_names, seed=st.integers(0, 2**32), has_timeout=st.booleans())
def test_whatever_happens_a_flow_keeps_its_promises(groups: list[list[str]], seed: int, has_timeout: bool) -> None:
    made = tuple(tuple(StepPlan(name) for name in group) for group in groups)
    world = World(Plan("order", made, timeout=1000 if has_timeout else 0), seed)
    world.serve()
    world.check()
    world.check_end()


@settings(max_examples=scaled(50, 1000))
@given(groups=groups_of_names, seed=st.integers(0, 2**32))
def test_without_failures_a_flow_completes_with_all_results(groups: list[list[str]], seed: int) -> None:
    made = tuple(tuple(StepPlan(name) for name in group) for group in groups)
    world = World(Plan("order", made), seed, failing=0, stray=0)
    world.serve()
    assert world.ends == [FlowStatus.COMPLETED]
    names = [name for group in groups for name in group]
    assert {name: decode_payload(body.result) for name, body in world.run.done.items()} == {
        name: f"result of {name}" for name in names
    }


@settings(max_examples=scaled(50, 1000))
@given(groups=groups_of_names, seed=st.integers(0, 2**32))
def test_the_log_read_bit_by_bit_is_the_log_read_at_once(groups: list[list[str]], seed: int) -> None:
    made = tuple(tuple(StepPlan(name) for name in group) for group in groups)
    world = World(Plan("order", made), seed)
    world.serve()
    half = len(world.log) // 2
    at_once, later = world.run, Run.of(world.log[:half]).after(world.log[half:])
    assert vars(at_once) == vars(later)


def done(step: str) -> StepDone:
    return StepDone(step, 1, Body(result=encode_payload(step), can_roll_back=True))


def play(of: Plan, *news: News) -> tuple[list[Entry], Decision]:
    decision = begin(Entry("started", body=Body(plan=of)))
    log = list(decision.entries)
    for one in news:
        decision = decide(Run.of(log), one)
        log += decision.entries
    return log, decision


def story(log: list[Entry]) -> list[str]:
    return [f"{entry.kind}:{entry.step}" if entry.step else entry.kind for entry in log[1:]]


def test_rollbacks_run_in_reverse_order_of_completion_whatever_the_names() -> None:
    news = [done("b"), done("2"), done("1"), StepLost("x", 3, ERROR)]
    log, decision = play(plan("b", "2", "1", "x"), *news)
    assert decision.jobs == [FlowJob("rollback", "1")]
    for step, following in (("1", "2"), ("2", "b")):
        decision = decide(Run.of(log), RollbackDone(step))
        log += decision.entries
        assert decision.jobs == [FlowJob("rollback", following)]


@pytest.mark.parametrize("again", [RollbackDone("b"), RollbackLost("b", 3, ERROR)])
def test_a_rollback_that_is_told_twice_counts_once(again: News) -> None:
    log, decision = play(plan("a", "b", "x"), done("a"), done("b"), StepLost("x", 3, ERROR), RollbackDone("b"))
    assert decision.jobs == [FlowJob("rollback", "a")]
    assert decide(Run.of(log), again) == Decision(), "else `a` would be rolled back twice"


def test_steps_see_what_earlier_groups_returned_and_not_their_neighbours() -> None:
    log, _ = play(plan("a", "bc"), done("a"), done("b"))
    assert list(Run.of(log).before) == ["a"]


def test_siblings_of_a_failed_step_run_to_their_end_first() -> None:
    log, decision = play(plan("abc"), StepLost("b", 3, ERROR), done("c"))
    assert decision.status is None
    assert decision.jobs == []
    decision = decide(Run.of(log), StepLost("a", 3, ErrorReport(type="OSError")))
    assert decision.status is FlowStatus.COMPENSATING
    assert decision.entries[1].step == "a", "the first failure in the order of the definition is told"
    assert decision.jobs == [FlowJob("rollback", "c")]


@pytest.mark.parametrize("news", [TimedOut(), Cancelled()])
def test_a_flow_that_is_stopped_stops_the_steps_at_work_and_drops_other_jobs(news: News) -> None:
    _log, decision = play(plan("a", "bc", timeout=1000), done("a"), done("b"), news)
    assert decision.stop == [FlowJob("step", "c")]
    assert decision.drop == [FlowJob("timeout")]
    assert decision.jobs == [FlowJob("rollback", "b")]


def test_a_step_that_ends_while_its_flow_is_taken_back_is_taken_back_too() -> None:
    log, decision = play(plan("a", "bc"), done("a"), Cancelled(), done("b"), RollbackDone("a"))
    assert decision.jobs == [FlowJob("rollback", "b")]
    assert decide(Run.of(log), RollbackDone("b")).jobs == [], "how c ends is not known yet"
    log, decision = play(plan("a"), Cancelled())
    assert decision.jobs == [], "on_error waits for the end of a"
    decision = decide(Run.of(log), done("a"))
    assert decision.jobs == [FlowJob("rollback", "a")]
    log += decision.entries
    decision = decide(Run.of(log), RollbackDone("a"))
    assert decision.jobs == [FlowJob("error")]
    log += decision.entries
    assert decide(Run.of(log), Reported()).status is FlowStatus.CANCELLED


def test_a_step_that_was_stopped_need_not_be_taken_back() -> None:
    log, decision = play(plan("a"), TimedOut(), StepLost("a", 1, ERROR))
    assert decision.jobs == [FlowJob("error")]
    assert decide(Run.of(log), StepLost("a", 1, ERROR)) == Decision(), "once"


def test_a_step_that_was_given_up_and_is_done_all_the_same_is_taken_back() -> None:
    """Its worker was cut off for so long that it counted as dead."""
    log, decision = play(plan("ab"), StepLost("a", 3, ERROR), done("a"))
    assert decision.jobs == []
    decision = decide(Run.of(log), done("b"))
    assert decision.status is FlowStatus.COMPENSATING, "it fails nevertheless"
    assert decision.jobs == [FlowJob("rollback", "b")]
    log += decision.entries
    assert decide(Run.of(log), RollbackDone("b")).jobs == [FlowJob("rollback", "a")]
    log, decision = play(plan("a"), StepLost("a", 3, ERROR), done("a"))
    assert decision.jobs == [FlowJob("rollback", "a")], "also when nothing but on_error was left to do"
    decision = decide(Run.of(log), Reported())
    assert decision.status is None, "the end waits for the rollback"
    log += decision.entries
    assert decide(Run.of(log), Reported()) == Decision(), "on_error counts once"
    assert decide(Run.of(log), RollbackDone("a")).status is FlowStatus.FAILED


def test_cancelling_without_compensation_only_reports() -> None:
    _log, decision = play(plan("a", "b"), done("a"), Cancelled(compensate=False))
    assert decision.jobs == [FlowJob("error")]
    assert decision.drop == [FlowJob("step", "b")], "nobody has to know how it ends"


def test_a_timeout_during_on_complete_wins_and_cannot_be_overturned() -> None:
    log, decision = play(plan("a", timeout=9), done("a"), TimedOut())
    assert decision.drop == [FlowJob("complete"), FlowJob("timeout")]
    assert decide(Run.of(log), Completed(encode_payload(1))) == Decision()


def test_without_on_complete_the_last_step_ends_the_flow() -> None:
    def last(step: str) -> StepDone:
        return StepDone(step, 1, Body(result=encode_payload(step)), is_enough=True)

    log, decision = play(plan("a", "bc", timeout=9), last("a"), last("c"), last("b"))
    assert story(log) == ["completed:a", "completed:c", "completed:b", "result"]
    assert decision.status is FlowStatus.COMPLETED
    assert decision.jobs == []
    assert decision.drop == [FlowJob("timeout")]
    assert decode_payload(Run.of(log).result) == {"a": "a", "c": "c", "b": "b"}
    _log, decision = play(plan("a", "b"), last("a"), StepLost("b", 3, ERROR))
    assert decision.status is FlowStatus.COMPENSATING, "a failure is no end, whoever says it"


def test_a_signal_may_come_before_its_wait_after_it_and_only_once() -> None:
    of = plan("a", ["wait"], "b", kind="wait")
    early, decision = play(of, Signalled("wait", encode_payload("yes")), done("a"))
    assert story(early) == ["signalled:wait", "completed:a", "completed:wait"]
    assert decision.jobs == [FlowJob("step", "b")]
    after, decision = play(of, done("a"), Signalled("wait", encode_payload("yes")))
    assert story(after) == ["completed:a", "waiting:wait", "signalled:wait", "completed:wait"]
    assert decision.drop == [FlowJob("wake", "wait")], "nobody waits for its time limit any more"
    assert decode_payload(Run.of(after).done["wait"].result) == "yes"
    assert "already" in decide(Run.of(after), Signalled("wait", Raw(b"\xc0"))).refusal
    assert "no signal" in decide(Run.of(after), Signalled("other", Raw(b"\xc0"))).refusal


def test_a_wait_that_lasts_too_long_fails_the_flow() -> None:
    of = Plan("order", ((StepPlan("a"),), (StepPlan("ok", "wait", span=50),)))
    log, decision = play(of, done("a"), Woken("ok"))
    assert decision.jobs == [FlowJob("rollback", "a")]
    assert "too late" in decide(Run.of(log), Signalled("ok", Raw(b"\xc0"))).refusal


def test_a_sleep_is_a_delayed_job() -> None:
    of = Plan("order", ((StepPlan("nap", "sleep", span=50),), (StepPlan("a"),)))
    log, decision = play(of)
    assert decision.jobs == [FlowJob("wake", "nap", 50)]
    assert decide(Run.of(log), Woken("nap")).jobs == [FlowJob("step", "a")]
