"""What a process remembers of flows may be old: no news is turned away because of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from msgspec import Raw

from headrace.commands.flows import FlowAdvance, FlowChanged, FlowFound, FlowGet
from headrace.errors import Conflict
from headrace.hooks import Hooks
from headrace.model import Flow, FlowStatus, FlowStep
from headrace.propagation import ErrorReport
from headrace.workflows.ledger import Ledger
from headrace.workflows.machine import AttemptFailed, News, RollbackLost, Run, StepDone, StepLost, begin, decide
from headrace.workflows.plan import Body, Entry, Plan, StepPlan, encode_body
from headrace.workflows.provider import log

ERROR = ErrorReport(type="ValueError", message="no")
STARTED = Entry("started", body=Body(plan=Plan("order", ((StepPlan("a"),), (StepPlan("b"),)))))


class Store:
    """Stands for a client: one flow, to which others do things behind the back of the ledger."""

    def __init__(self) -> None:
        self.log = begin(STARTED).entries
        self.revision = 1
        self.is_compensating = False
        self.may_answer = asyncio.Event()

    def happens(self, *news: News) -> None:
        for one in news:
            decision = decide(Run.of(self.log), one)
            self.log += decision.entries
            self.is_compensating = self.is_compensating or decision.status is FlowStatus.COMPENSATING
            self.revision += 1

    async def ask(self, asked: Any) -> Any:
        if isinstance(asked, FlowGet):
            steps = [
                FlowStep(n, 0.0, one.kind, one.step, one.attempt, Raw(encode_body(one.body)))
                for n, one in enumerate(self.log, 1)
            ]
            return FlowFound(flow=self._flow, steps=steps)
        assert isinstance(asked, FlowAdvance)
        await self.may_answer.wait()
        if asked.revision != self.revision:
            raise Conflict("it has changed")
        self.revision += 1
        return FlowChanged(flow=self._flow)

    @property
    def _flow(self) -> Flow:
        status = FlowStatus.COMPENSATING if self.is_compensating else FlowStatus.RUNNING
        return Flow("f", "order", "wf", status, self.revision, 0.0, 0.0)


async def test_news_of_a_flow_that_others_have_changed_is_decided_on_what_the_store_has() -> None:
    store = Store()
    ledger = Ledger(cast("Any", store), Hooks(None, log))
    await ledger.read("f")
    store.happens(StepDone("a", 1, Body(can_roll_back=True)), StepLost("b", 3, ERROR))
    # The first holds what is remembered, and makes it be forgotten; the second has waited for it meanwhile.
    first = asyncio.create_task(ledger.carry_out("f", AttemptFailed("a", 1, Body(error=ERROR))))
    second = asyncio.create_task(ledger.carry_out("f", RollbackLost("a", 1, ERROR)))
    await asyncio.sleep(0)
    store.may_answer.set()
    async with asyncio.timeout(5):
        told, decided = await asyncio.gather(first, second)
    assert [entry.kind for entry in decided.entries] == ["rollback-failed", "reporting"]
    assert [entry.kind for entry in told.entries] in ([], ["attempt-failed"])
