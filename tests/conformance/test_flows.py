"""Workflows as every backend keeps them: changed by decisions on a revision, whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.backends.base import Ack, FlowPush, NewStep
from headrace.errors import Conflict, LeaseLost, NotFound
from headrace.model import FlowStatus
from tests.conformance.rig import Held, Rig, pack, spec, unpack

DAY_MS = 86_400_000
REMOVALS = [("drain", (), "drained"), ("clean", (0, None, 100), "cleaned"), ("obliterate", (), "obliterated")]


def job(queue: str = "wf.steps", flow: str = "f", data: Any = None, **options: Any) -> FlowPush:
    return FlowPush(queue, spec(data, flow_id=flow, **options))


def step(kind: str, name: str = "", body: Any = None, attempt: int = 0) -> NewStep:
    return NewStep(kind, name, attempt, pack(body))


def start(rig: Rig, *jobs: FlowPush, flow: str = "f", workflow: str = "order", queue: str = "wf") -> Any:
    return rig.start_flow(flow, workflow, queue, [step("started", body={"n": 1})], jobs)[0]


def advance(
    rig: Rig,
    revision: int = 1,
    *jobs: FlowPush,
    flow: str = "f",
    status: FlowStatus | None = None,
    steps: tuple[NewStep, ...] = (),
    held: Held | None = None,
    drop: tuple[str, ...] = (),
    stop: tuple[str, ...] = (),
) -> Any:
    ack = None if held is None else Ack(held.id, held.token)
    return rig.advance_flow(flow, revision, status, steps, jobs, ack, drop, stop)


def log(rig: Rig, flow: str = "f", after: int = 0) -> list[tuple[int, str, str, int, Any]]:
    return [
        (one.seq, one.kind, one.step, one.attempt, unpack(one.body))
        for one in rig.wait(rig.backend.flow_steps(flow, after))
    ]


def found(rig: Rig, flow: str = "f") -> Any:
    return rig.wait(rig.backend.flow(flow))


class TestStarting:
    def test_a_flow_begins_with_its_log_and_its_jobs(self, rig: Rig) -> None:
        flow = start(rig, job(name="charge"), job("wf", name="timeout", delay=1000))
        assert (flow.id, flow.workflow, flow.queue, flow.status, flow.revision) == (
            *("f", "order", "wf"),
            *(FlowStatus.RUNNING, 1),
        )
        assert (flow.created_at, flow.updated_at, flow.ended_at) == (rig.clock.now_ms(), rig.clock.now_ms(), None)
        assert found(rig) == flow
        assert log(rig) == [(1, "started", "", 0, {"n": 1})]
        assert rig.take("wf.steps").job["name"] == "charge"
        assert rig.count("wf") == {"delayed": 1}
        assert rig.take_words() == ["flow-started", "pushed", "pushed", "pulled"]

    @pytest.mark.parametrize("queue", ["wf", "another"])
    def test_an_id_that_is_taken_gives_the_flow_that_has_it(self, rig: Rig, queue: str) -> None:
        first = start(rig)
        again = rig.start_flow("f", "other", queue, [step("started")], [job()])
        assert again == (first, False)
        assert rig.count("wf.steps") == {}
        assert len(log(rig)) == 1

    def test_a_delayed_job_of_another_queue_comes_when_its_time_has_come(self, rig: Rig) -> None:
        start(rig, job("elsewhere", delay=500))
        assert rig.pull("elsewhere") == []
        rig.advance(500)
        assert rig.pulled_ids("elsewhere")

    def test_a_long_log_keeps_its_order(self, rig: Rig) -> None:
        steps = [step("s", f"n{n}", n) for n in range(1000)]
        rig.start_flow("f", "order", "wf", steps, [])
        assert [body for *_, body in log(rig)] == list(range(1000))
        assert log(rig, after=998) == [(999, "s", "n998", 0, 998), (1000, "s", "n999", 0, 999)]

    @pytest.mark.parametrize("body", [None, b"\x00\xff", {"1": [2.5, None]}, {1: 2}, "ü" * 10, 2**63])
    def test_bodies_come_back_as_they_were(self, rig: Rig, body: Any) -> None:
        rig.start_flow("f", "order", "wf", [step("s", body=body)], [])
        assert log(rig) == [(1, "s", "", 0, body)]


class TestDeciding:
    def test_a_decision_is_carried_out_as_a_whole(self, rig: Rig) -> None:
        start(rig, job(custom_id="f-a"))
        held = rig.take("wf.steps")
        rig.take_words()
        rig.clock.advance(5)
        flow = advance(
            rig, 1, job(name="b"), status=FlowStatus.COMPENSATING, steps=(step("done", "a", 7, 2),), held=held
        )
        assert (flow.revision, flow.status, flow.updated_at) == (2, FlowStatus.COMPENSATING, rig.clock.now_ms())
        assert found(rig) == flow
        assert log(rig, after=1) == [(2, "done", "a", 2, 7)]
        assert rig.state(held.id) == "completed"
        assert rig.take("wf.steps").job["name"] == "b"
        assert rig.take_words() == ["completed", "flow-step", "flow-compensating", "pushed", "pulled"]

    def test_a_decision_without_anything_counts_too(self, rig: Rig) -> None:
        start(rig)
        assert advance(rig).revision == 2

    @pytest.mark.parametrize("status", [FlowStatus.COMPLETED, FlowStatus.FAILED, FlowStatus.CANCELLED])
    def test_an_ended_flow_stays_as_it_is(self, rig: Rig, status: FlowStatus) -> None:
        start(rig)
        ended = advance(rig, status=status, steps=(step("end", body="r"),))
        assert (ended.status, ended.ended_at) == (status, rig.clock.now_ms())
        with pytest.raises(Conflict, match="Flow f has ended"):
            advance(rig, 2, job())
        assert found(rig) == ended
        assert [kind for _, kind, *_ in log(rig)] == ["started", "end"]
        assert rig.take_words()[-1] == f"flow-{status.value}"

    def test_a_decision_on_an_old_revision_changes_nothing(self, rig: Rig) -> None:
        start(rig, job())
        held = rig.take("wf.steps")
        advance(rig)
        rig.take_words()
        with pytest.raises(Conflict, match="Flow f has changed: it is at revision 2, not 1"):
            advance(rig, 1, job("more"), steps=(step("late"),), held=held, drop=(held.id,))
        assert (found(rig).revision, len(log(rig)), rig.count("more")) == (2, 1, {})
        assert rig.state(held.id) == "active"
        assert rig.take_words() == []

    def test_a_decision_of_somebody_who_lost_the_job_changes_nothing(self, rig: Rig) -> None:
        start(rig, job(max_attempts=5), job(name="other"))
        held = rig.take("wf.steps", lease_ms=1000)
        for token, error in (("wrong", LeaseLost), (None, LeaseLost)):
            with pytest.raises(error):
                advance(rig, steps=(step("x"),), held=Held(held.id, token, {}))
        rig.advance(2000)
        while rig.take("wf.steps").id != held.id:
            pass
        with pytest.raises(LeaseLost):
            advance(rig, steps=(step("x"),), held=held)
        assert (found(rig).revision, len(log(rig))) == (1, 1)

    def test_a_lease_that_merely_ran_out_still_counts(self, rig: Rig) -> None:
        start(rig, job())
        held = rig.take("wf.steps", lease_ms=1000)
        rig.advance(2000)
        assert advance(rig, held=held).revision == 2
        assert rig.state(held.id) == "completed"

    def test_a_job_cannot_be_completed_twice(self, rig: Rig) -> None:
        start(rig, job())
        held = rig.take("wf.steps")
        advance(rig, held=held)
        with pytest.raises(LeaseLost):
            advance(rig, 2, held=held)
        with pytest.raises(NotFound):
            advance(rig, 2, held=Held("nobody", "t", {}))
        assert found(rig).revision == 2

    def test_a_flow_that_is_not_there_is_not_found(self, rig: Rig) -> None:
        with pytest.raises(NotFound, match="Flow not found: nobody"):
            advance(rig, flow="nobody")
        assert found(rig, "nobody") is None
        assert log(rig, "nobody") == []

    def test_a_job_whose_id_is_taken_is_not_pushed_again(self, rig: Rig) -> None:
        start(rig, job(custom_id="f-a"))
        advance(rig, 1, job(custom_id="f-a"))
        assert rig.count("wf.steps") == {"waiting": 1}
        assert rig.take_words()[-1] == "duplicated"

    def test_jobs_that_are_not_wanted_go_without_news(self, rig: Rig) -> None:
        start(rig, *(job(custom_id=f"f-{n}") for n in range(2)), job("wf", custom_id="f-2", delay=5000))
        start(rig, job(custom_id="g-0", flow="g"), flow="g")
        stranger = rig.push("wf.steps")
        held = rig.take("wf.steps")
        rig.take_words()
        advance(rig, drop=("f-0", "f-1", "f-2", "g-0", stranger, "nobody"))
        assert rig.take_words() == ["removed"] * 3
        assert rig.count("wf.steps") == {"waiting": 2}
        assert rig.count("wf") == {}, "no news, and no job that was to come"
        with pytest.raises(NotFound):
            rig.ack(held)

    def test_jobs_that_are_stopped_go_on_at_work_and_else_go_with_news(self, rig: Rig) -> None:
        start(rig, *(job(custom_id=f"f-{n}", name="charge", priority=n) for n in range(2)))
        advance(rig, 1, job(custom_id="f-2", name="ship", delay=5000))
        start(rig, job(custom_id="g-0", flow="g"), flow="g")
        held = rig.take("wf.steps")
        rig.take_words()
        stop = ("f-0", "f-1", "f-2", "f-2", "g-0", "nobody")
        advance(rig, 2, status=FlowStatus.COMPENSATING, stop=stop)
        assert rig.take_words() == ["flow-compensating", *["pushed", "removed"] * 2]
        assert rig.count("wf.steps") == {"active": 1, "waiting": 1}
        told = [rig.take("wf").job["data"] for _ in range(2)]
        assert [(news["news"], news["job"], news["name"]) for news in told] == [
            ("job-removed", "f-0", "charge"),
            ("job-removed", "f-2", "ship"),
        ]
        assert {news["error"] for news in told} == {"its flow was stopped"}
        assert advance(rig, 3, held=held).revision == 4


class TestNewsOfJobs:
    def told(self, rig: Rig) -> dict[str, Any]:
        held = rig.take("wf")
        assert held.job["name"] == "decide"
        assert held.job["maxAttempts"] == 100
        data: dict[str, Any] = held.job["data"]
        return data

    def lost(self, job_id: str, error: str, news: str = "job-lost") -> dict[str, Any]:
        return {"flow": "f", "news": news, "job": job_id, "name": "charge", "error": error}

    @pytest.mark.parametrize("keeps", [True, False])
    def test_the_last_failure_of_a_job_is_told(self, rig: Rig, keeps: bool) -> None:
        start(rig, job(name="charge", max_attempts=2, backoff=0, remove_on_fail=not keeps))
        held = rig.take("wf.steps")
        rig.nack(held, "once")
        assert rig.count("wf") == {}, "another attempt follows"
        rig.advance(1)
        rig.take_words()
        rig.nack(rig.take("wf.steps"), 'no "money"')
        assert rig.take_words() == ["pulled", "failed", "pushed"]
        assert self.told(rig) == self.lost(held.id, 'no "money"')

    def test_so_are_a_lost_lease_a_timeout_and_the_end_of_its_life(self, rig: Rig) -> None:
        start(rig, job(name="charge", max_attempts=1), job(name="charge", max_attempts=1, timeout=500))
        first = rig.take("wf.steps", lease_ms=1000)
        second = rig.take("wf.steps", lease_ms=60_000)
        rig.advance(600)
        assert self.told(rig) == self.lost(second.id, "Job timeout exceeded")
        rig.advance(1000)
        assert self.told(rig) == self.lost(first.id, "Lock expired at max attempts (1)")
        advance(rig, 1, job(name="charge", ttl=100, custom_id="f-ttl"))
        rig.advance(200)
        assert rig.pull("wf.steps") == []
        assert self.told(rig) == self.lost("f-ttl", "expired")

    def test_so_is_what_people_do_to_it(self, rig: Rig) -> None:
        start(rig, job(name="charge"), job(name="charge"))
        first = rig.take("wf.steps")
        rig.cancel(first.id, force=True)
        assert self.told(rig) == self.lost(first.id, "its job was cancelled", "job-removed")
        second = rig.take("wf.steps")
        rig.discard(second.id, second.token)
        assert self.told(rig) == self.lost(second.id, "its job was discarded", "job-removed")

    @pytest.mark.parametrize("options", [{}, {"delay": 1000}])
    @pytest.mark.parametrize(("verb", "asked", "done"), REMOVALS)
    def test_so_is_what_people_do_to_its_queue(
        self, rig: Rig, verb: str, asked: tuple[Any, ...], done: str, options: dict[str, Any]
    ) -> None:
        start(rig, job(name="charge", custom_id="f-charge", **options))
        getattr(rig, verb)("wf.steps", *asked)
        assert rig.count("wf.steps") == {}
        assert self.told(rig) == self.lost("f-charge", f"queue wf.steps was {done}", "job-removed")
        assert rig.count("wf") == {"active": 1}, "it is told once"

    def test_obliteration_takes_jobs_from_their_workers_and_tells(self, rig: Rig) -> None:
        start(rig, job(name="charge"))
        held = rig.take("wf.steps")
        rig.obliterate("wf.steps")
        assert self.told(rig) == self.lost(held.id, "queue wf.steps was obliterated", "job-removed")

    @pytest.mark.parametrize(("verb", "asked", "done"), REMOVALS)
    def test_the_queue_of_the_flow_keeps_what_is_still_to_be_decided(
        self, rig: Rig, verb: str, asked: tuple[Any, ...], done: str
    ) -> None:
        start(rig, job("wf", name="charge", custom_id="f-charge"), job(name="ship", custom_id="f-ship", max_attempts=1))
        rig.bury("wf.steps", "no")
        getattr(rig, verb)("wf", *asked)
        told = [self.told(rig) for _ in range(2)]
        assert self.lost("f-charge", f"queue wf was {done}", "job-removed") in told
        assert {**self.lost("f-ship", "no"), "name": "ship"} in told
        assert rig.pull("wf") == []
        assert "wf" in [one.name for one in rig.queues()]

    @pytest.mark.parametrize(("verb", "asked", "done"), REMOVALS)
    def test_jobs_that_have_ended_go_without_news(self, rig: Rig, verb: str, asked: tuple[Any, ...], done: str) -> None:
        start(rig, job(name="charge"), job(name="ship", max_attempts=1))
        rig.ack(rig.take("wf.steps"))
        rig.bury("wf.steps")
        self.told(rig)
        getattr(rig, verb)("wf.steps", *asked)
        assert rig.count("wf") == {"active": 1}

    def test_a_job_that_was_pushed_for_a_flow_counts_as_one_of_it(self, rig: Rig) -> None:
        start(rig)
        job_id = rig.push("elsewhere", name="charge", flow_id="f", max_attempts=1)
        rig.bury("elsewhere", "no")
        assert self.told(rig) == self.lost(job_id, "no")

    def test_a_flow_that_has_ended_or_never_was_hears_nothing(self, rig: Rig) -> None:
        start(rig, job(max_attempts=1))
        advance(rig, status=FlowStatus.COMPLETED)
        rig.push("wf.steps", flow_id="nobody", max_attempts=1)
        for _ in range(2):
            rig.bury("wf.steps")
        assert rig.count("wf") == {}

    def test_decisions_are_jobs_like_others(self, rig: Rig) -> None:
        start(rig, *(job(name="charge", max_attempts=1) for _ in range(3)))
        for _ in range(3):
            rig.bury("wf.steps")
        held = [rig.take("wf") for _ in range(3)]
        assert len({one.id for one in held}) == 3
        advance(rig, held=held[0])
        rig.ack(held[1], "r")
        rig.nack(held[2])
        assert rig.states(*(one.id for one in held)) == ["completed", "completed", "delayed"]


def test_a_flow_without_a_log_goes_on_after_a_restart(kept: Rig) -> None:
    kept.start_flow("f", "w", "q", [], [])
    kept.reopen()
    flow = kept.advance_flow("f", 1, None, [NewStep("first")], [], None)
    assert flow.revision == 2
    assert [step.seq for step in kept.flow_steps("f", 0)] == [1]


class TestLooking:
    def test_flows_are_listed_by_id_page_by_page(self, rig: Rig) -> None:
        for n in range(5):
            start(rig, flow=f"f{n}", workflow="order" if n % 2 else "trip", queue=f"wf{n % 2}")
        advance(rig, flow="f1", status=FlowStatus.FAILED)

        def ids(*asked: Any) -> list[str]:
            return [flow.id for flow in rig.wait(rig.backend.flows(*asked))]

        assert ids(None, None, 3, None) == ["f4", "f3", "f2"]
        assert ids(None, None, 3, "f2") == ["f1", "f0"]
        assert ids("order", None, 10, None) == ["f3", "f1"]
        assert ids(None, FlowStatus.FAILED, 10, None) == ["f1"]
        assert ids("trip", FlowStatus.FAILED, 10, None) == []

    def test_a_rare_kind_is_found_among_many(self, rig: Rig) -> None:
        rig.is_checking = False
        for n in range(1200):
            rig.wait(rig.backend.start_flow(f"f{n:04}", "order", "wf", [], []))
        rig.settle()
        advance(rig, flow="f0003", status=FlowStatus.FAILED)
        (flow,) = rig.wait(rig.backend.flows("order", FlowStatus.FAILED, 1, None))
        assert flow.id == "f0003"

    def test_old_flows_are_forgotten_and_live_ones_never(self, rig: Rig) -> None:
        start(rig, flow="live")
        start(rig, flow="old")
        advance(rig, flow="old", status=FlowStatus.COMPLETED)
        rig.clock.advance(6 * DAY_MS)
        start(rig, flow="young")
        advance(rig, flow="young", status=FlowStatus.COMPLETED)
        rig.clock.advance(DAY_MS + 1)
        rig.retire_flows()
        assert [flow.id for flow in rig.wait(rig.backend.flows(None, None, 10, None))] == ["young", "live"]
        assert found(rig, "old") is None
        assert log(rig, "old") == []
        assert start(rig, flow="old").revision == 1, "its id is free again"

    def test_the_oldest_of_too_many_are_forgotten(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("local", "valkey"):
            monkeypatch.setattr(f"headrace.backends.{module}.flows.KEPT_FLOWS", 2)
        for n in range(4):
            start(rig, flow=f"f{n}")
            advance(rig, flow=f"f{n}", status=FlowStatus.COMPLETED)
            rig.clock.advance(10)
        rig.clock.advance(10_000)
        rig.retire_flows()
        assert [flow.id for flow in rig.wait(rig.backend.flows(None, None, 10, None))] == ["f3", "f2"]
