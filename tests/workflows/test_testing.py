"""The kit for tests of workflows: fakes, failures at will, virtual time, and the same decisions as a real flow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.errors import PayloadError, WorkflowError, WorkflowTimeoutError
from headrace.worker.failures import UnrecoverableError
from headrace.workflows import FlowStatus, StepContext, WorkflowRollbackError, step, workflow
from headrace.workflows.testing import run_workflow

charge, ship = step("charge", str), step("ship")
order = workflow("order").step(charge).sleep("nap", "1d").step(ship).build()


class Code:
    @charge.execute
    async def _charge(self, ctx: StepContext[Any]) -> str:
        return f"charged {ctx.data}"

    @charge.rollback
    def _refund(self, ctx: StepContext[Any]) -> None: ...

    @ship.execute
    def _ship(self, ctx: StepContext[Any]) -> str:
        return f"shipped, {ctx.results['charge']}"

    async def on_complete(self, ctx: StepContext[Any]) -> Any:
        return ctx.results["ship"]


async def test_a_day_of_sleep_takes_no_time() -> None:
    report = await run_workflow(order, 5, code=Code)
    assert (report.status, report.result, report.seconds) == (FlowStatus.COMPLETED, "shipped, charged 5", 86_400)
    assert report.calls == ["charge", "ship", "on_complete"]


async def test_fakes_take_the_place_of_steps() -> None:
    report = await run_workflow(
        order, 5, code=Code, fakes={"charge": "free", "ship": lambda ctx: ctx.results["charge"]}
    )
    assert report.results["ship"] == "free"


async def test_neighbours_of_a_parallel_group_do_not_see_each_other() -> None:
    seen: dict[str, list[str]] = {}

    def note(ctx: StepContext[Any]) -> None:
        seen[ctx.step] = list(ctx.results)

    group = workflow("group").step(step("a")).parallel(step("x"), step("y")).step(step("z")).build()
    await run_workflow(group, fakes=dict.fromkeys("axyz", note))
    assert seen == {"a": [], "x": ["a"], "y": ["a"], "z": ["a", "x", "y"]}


async def test_failures_are_injected_and_compensated() -> None:
    report = await run_workflow(order, fakes={"charge": "c"}, fail={"ship": 2})
    assert report.status is FlowStatus.COMPLETED
    report = await run_workflow(order, fakes={"charge": "c"}, fail={"ship": 99, "charge:rollback": 99})
    assert report.calls[-3:] == ["charge:rollback"] * 3
    assert isinstance(report.error, WorkflowRollbackError)


async def test_time_may_run_out_and_signals_may_be_missing() -> None:
    report = await run_workflow(order, fakes={"charge": "c"}, timeout=60)
    assert isinstance(report.error, WorkflowTimeoutError)
    assert report.calls == ["charge", "charge:rollback"]
    waits = workflow("waits").wait("go").build()
    assert (await run_workflow(waits, signals={"go": 3})).results == {"go": 3}
    with pytest.raises(WorkflowError, match="never comes"):
        await run_workflow(waits)


async def test_a_worker_that_dies_makes_the_call_again_and_again_until_it_counts_as_failed() -> None:
    report = await run_workflow(order, code=Code, kill_after={charge: 2, "on_complete": 1})
    assert report.status is FlowStatus.COMPLETED
    assert report.calls == ["charge"] * 3 + ["ship"] + ["on_complete"] * 2
    report = await run_workflow(order, fakes={charge: "c"}, kill_after={ship: 99})
    assert report.calls == ["charge", *["ship"] * 4, "charge:rollback"]
    assert "its worker died 4 times" in str(report.error)


async def test_steps_name_themselves_and_what_is_final_is_not_tried_again() -> None:
    def refuse(ctx: StepContext[Any]) -> None:
        raise UnrecoverableError("no such order")

    report = await run_workflow(order, fakes={charge: "c", ship: refuse})
    assert report.calls == ["charge", "ship", "charge:rollback"]


async def test_a_rehearsal_refuses_what_a_real_flow_refuses() -> None:
    """The result of on_complete has a type; and what a step does to its data is its own affair."""
    first, second = step("first"), step("second")
    kinds = workflow("kinds", data=list, result=int).step(first).step(second).build()
    seen: list[Any] = []

    class Wrong:
        @first.execute
        def _first(self, ctx: StepContext[Any]) -> None:
            ctx.data.append("mine")

        @second.execute
        def _second(self, ctx: StepContext[Any]) -> None:
            seen.append(ctx.data)

        async def on_complete(self, ctx: StepContext[Any]) -> str:
            return "no number"

    report = await run_workflow(kinds, [1], code=Wrong)
    assert seen == [[1]]
    assert report.status is FlowStatus.FAILED
    assert "result of 'kinds': Expected `int`, got `str` at $" in str(report.error)
    with pytest.raises(PayloadError, match="payload of signal 'go'"):
        await run_workflow(workflow("waits").wait("go", int).build(), signals={"go": "no number"})


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError])
async def test_what_is_a_failure_to_a_worker_is_one_in_a_rehearsal(raised: type[BaseException]) -> None:
    async def fail(ctx: StepContext[Any]) -> None:
        raise raised

    report = await run_workflow(workflow("w").step(step("a"), step("b")).build(), fakes={"b": fail})
    assert report.calls == ["a", "b", "b", "b", "a:rollback"]
    assert f"Step 'b' failed: {raised.__name__}" == str(report.error)


async def test_a_rehearsal_can_be_cancelled() -> None:
    begun = asyncio.Event()

    async def hang(ctx: StepContext[Any]) -> None:
        begun.set()
        await asyncio.Event().wait()

    rehearsal = asyncio.create_task(run_workflow(workflow("w").step(step("a")).build(), fakes={"a": hang}))
    await begun.wait()
    rehearsal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rehearsal


async def test_a_step_that_takes_longer_than_its_timeout_fails_as_in_production() -> None:
    hasty = step("hasty", timeout=0.05)
    hanging = workflow("hanging").step(charge).step(hasty).build()

    async def hang(ctx: StepContext[Any]) -> None:
        await asyncio.Event().wait()

    report = await asyncio.wait_for(run_workflow(hanging, 5, fakes={charge: "charged", hasty: hang}), 10)
    assert report.status is FlowStatus.FAILED
    assert report.calls == ["charge", *["hasty"] * 3, "charge:rollback"]
    assert "it ran longer than 0.05 s" in str(report.error)


async def test_a_timeout_of_the_step_itself_is_not_taken_for_that_of_its_limit() -> None:
    patient = step("patient", timeout=60)

    async def hurried(ctx: StepContext[Any]) -> None:
        raise TimeoutError("the bank did not answer")

    report = await run_workflow(workflow("patience").step(patient).build(), fakes={patient: hurried})
    assert "the bank did not answer" in str(report.error)
