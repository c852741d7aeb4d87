"""The timeline of a flow, drawn from its log."""

from __future__ import annotations

from headrace.model import Flow, FlowStatus
from headrace.workflows import step, workflow
from headrace.workflows.machine import begin
from headrace.workflows.plan import Body, Entry, plan_of
from headrace.workflows.testing import define
from headrace.workflows.timeline import timeline_of


def test_nothing_ends_before_it_began_whatever_the_clock_of_its_worker_says() -> None:
    started = begin(Entry("started", body=Body(plan=plan_of(define("a", "b"))))).entries
    log = [
        *started,
        Entry("completed", "a", 1, Body(began=1000.9), 1000),
        Entry("completed", "b", 1, Body(began=990), 1007),
    ]
    bars = timeline_of(Flow("f", "w", "q", FlowStatus.RUNNING, 3, 990, 1007), log).bars
    assert [(bar.step, bar.began_at, bar.ended_at) for bar in bars] == [("a", 1000, 1000), ("b", 990, 1007)]


def test_a_wait_is_one_bar_for_as_long_as_it_lasted_and_what_is_at_work_is_shown() -> None:
    plan = plan_of(workflow("w").step(step("a")).wait("go").parallel(step("b"), step("c")).build())
    log = [
        Entry("started", body=Body(plan=plan), at=1000),
        Entry("completed", "a", 1, Body(began=400, can_roll_back=True), 1000),  # kept by a retry
        Entry("waiting", "go", at=1000),
    ]
    flow = Flow("f", "w", "q", FlowStatus.RUNNING, 3, 1000, 1007)

    def bars() -> list[tuple[str, str, float, float | None, str]]:
        found = timeline_of(flow, log).bars
        return [(bar.step, bar.role, bar.began_at, bar.ended_at, bar.outcome) for bar in found]

    kept = ("a", "step", 1000, 1000, "completed")
    assert bars() == [kept, ("go", "step", 1000, None, "waiting")]
    log += [Entry("signalled", "go", at=5000), Entry("completed", "go", at=5000)]
    waited = ("go", "step", 1000, 5000, "completed")
    assert bars() == [kept, waited, ("b", "step", 5000, None, "running"), ("c", "step", 5000, None, "running")]
    log += [Entry("completed", "b", 1, Body(began=5001), 6000), Entry("attempt-failed", "c", 1, Body(began=5001), 7000)]
    assert bars()[2:] == [
        ("b", "step", 5001, 6000, "completed"),
        ("c", "step", 5001, 7000, "retried"),
        ("c", "step", 7000, None, "running"),
    ]
    log += [Entry("compensating", at=8000, body=Body(cause="cancel")), Entry("rolling-back", "a", at=8000)]
    assert bars()[-2:] == [("c", "step", 7000, None, "running"), ("a", "rollback", 8000, None, "running")]


def test_a_wait_ends_when_its_flow_is_stopped() -> None:
    started = begin(Entry("started", body=Body(plan=plan_of(workflow("w").wait("go").build())))).entries
    log = [*started, Entry("compensating", at=70, body=Body(cause="cancel")), Entry("ended", at=90)]
    (bar,) = timeline_of(Flow("f", "w", "q", FlowStatus.CANCELLED, 3, 0, 90, 90), log).bars
    assert (bar.ended_at, bar.outcome) == (70, "waiting")
