"""The timeline of a flow, drawn from its log."""

from __future__ import annotations

from headrace.model import Flow, FlowStatus
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
