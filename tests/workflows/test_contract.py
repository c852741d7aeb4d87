"""EW-149 to EW-171, and the experiments X1 to X15, in process and on a file."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import msgspec
import pytest

from headrace.errors import (
    JobTimeout,
    NotFound,
    PayloadError,
    ProviderStoppedError,
    RemoteError,
    WorkflowCancelledError,
    WorkflowError,
    WorkflowRollbackError,
    WorkflowStepError,
    WorkflowTimeoutError,
)
from headrace.propagation import Retry, current_meta, propagate
from headrace.worker.failures import UnrecoverableError
from headrace.workflows import FlowStatus, StepContext, step, workflow
from tests.workflows.conftest import MakeFlows
from tests.workflows.saga import Saga, define, eventually


async def run(flows: Any, saga: Saga, data: Any = None, **options: Any) -> Any:
    """Join, start, execute once, stop; the result, or the error as a value."""
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, data, **options)
        try:
            return await handle.result(timeout=20)
        except WorkflowError as error:
            return error


async def test_ew_149_steps_run_in_order_then_on_complete(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b", "c"))
    await run(make_flows(), saga)
    assert saga.calls == ["a", "b", "c", "complete"]


async def test_ew_150_results_accumulate_by_name(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b", "c"))
    result = await run(make_flows(), saga)
    assert saga.seen["a"] == {}
    assert saga.seen["c"] == {"a": "a done", "b": "b done"}
    assert result == {"a": "a done", "b": "b done", "c": "c done"}


async def test_ew_151_parallel_steps_run_at_the_same_time(make_flows: MakeFlows) -> None:
    together = asyncio.Barrier(3)

    async def meet(ctx: StepContext[Any]) -> None:
        async with asyncio.timeout(5):
            await together.wait()

    saga = Saga(define(["a", "b", "c"]), meanwhile=dict.fromkeys("abc", meet))
    assert await run(make_flows(), saga) == {"a": "a done", "b": "b done", "c": "c done"}


async def test_ew_152_groups_follow_each_other_and_neighbours_do_not_see_each_other(make_flows: MakeFlows) -> None:
    saga = Saga(define("init", ["x", "y"], "final"))
    await run(make_flows(), saga)
    assert saga.calls[0] == "init"
    assert saga.calls[-2:] == ["final", "complete"]
    assert saga.seen["x"] == saga.seen["y"] == {"init": "init done"}
    assert set(saga.seen["final"]) == {"init", "x", "y"}


async def test_ew_153_a_failure_stops_the_flow_and_on_error_sees_what_was_done(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b", "c"), failing={"b": 9})
    await run(make_flows(), saga)
    assert "c" not in saga.calls
    assert saga.seen["error"] == {"a": "a done"}


async def test_ew_154_ew_198_the_error_names_the_step_and_keeps_its_cause(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b"), failing={"b": 9})
    error = await run(make_flows(), saga)
    assert isinstance(error, WorkflowStepError)
    assert str(error) == "Step 'b' failed: b failed"
    cause = error.__cause__
    assert isinstance(cause, RemoteError)
    assert (cause.type_name, cause.step, cause.attempt) == ("ValueError", "b", 3)
    assert "raise ValueError" in cause.remote_traceback


async def test_ew_155_rollback_runs_last_first_and_only_for_what_was_done(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b", "c", "d"), failing={"d": 9}, without_rollback=("b",))
    await run(make_flows(), saga)
    assert [call for call in saga.calls if call.startswith("undo")] == ["undo c", "undo a"]
    fine = Saga(define("a"))
    await run(make_flows(), fine)
    assert fine.calls == ["a", "complete"]
    first = Saga(define("a", "b"), failing={"a": 9})
    await run(make_flows(), first)
    assert first.calls == ["a", "a", "a", "error"]


async def test_ew_156_a_failing_rollback_does_not_stop_the_others_and_is_told(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b", "c"), failing={"c": 9, "undo b": 9})
    error = await run(make_flows(), saga)
    assert isinstance(error, WorkflowRollbackError)
    assert str(error.primary) == "Step 'c' failed: c failed"
    assert [(one.step, one.message) for one in error.rollback_errors] == [("b", "undo b failed")]  # type: ignore[attr-defined]
    assert saga.calls[-2:] == ["undo a", "error"]
    assert isinstance(saga.errors[0], WorkflowRollbackError)


async def test_one_line_sums_up_all_rollbacks(make_flows: MakeFlows, caplog: pytest.LogCaptureFixture) -> None:
    saga = Saga(define("a", "b", "c"), failing={"c": 9, "undo b": 9})
    await run(make_flows(), saga)
    lines = [record.message for record in caplog.records if "rolled back" in record.message]
    assert len(lines) == 1
    assert "1 steps were rolled back, 1 rollbacks failed" in lines[0]


async def test_ew_157_after_a_parallel_failure_siblings_and_earlier_groups_are_rolled_back(
    make_flows: MakeFlows,
) -> None:
    saga = Saga(define("a", ["x", "y", "z"]), failing={"y": 9})
    error = await run(make_flows(), saga)
    assert error.step_name == "y"
    undone = [call for call in saga.calls if call.startswith("undo")]
    assert set(undone) == {"undo x", "undo z", "undo a"}
    assert undone[-1] == "undo a"


async def test_ew_158_a_rollback_has_data_results_meta_and_logger(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b"), failing={"b": 9})
    await run(make_flows(), saga, {"n": 1}, meta={"userId": "u"})
    context = saga.contexts["undo a"]
    assert (context.data, context.step, context.results["a"]) == ({"n": 1}, "a:rollback", "a done")
    assert context.meta["userId"] == "u"
    extra = context.log.extra
    assert extra is not None
    assert (extra["userId"], extra["step"], extra["workflow"]) == ("u", "a:rollback", saga.definition.name)


async def test_ew_159_status_follows_the_flow(make_flows: MakeFlows) -> None:
    good, bad = Saga(define("a")), Saga(define("a"), failing={"a": 9})
    flows = make_flows()
    good.join(flows)
    bad.join(flows)
    async with flows:
        assert await (await flows.get_handle("nobody")).status() is FlowStatus.PENDING
        handle = await flows.execute(good.definition, None)
        await handle.result(10)
        assert await handle.status() is FlowStatus.COMPLETED
        handle = await flows.execute(bad.definition, None)
        with pytest.raises(WorkflowStepError):
            await handle.result(10)
        assert await handle.status() is FlowStatus.FAILED


async def test_ew_160_ew_186_x15_a_flow_that_takes_too_long_is_taken_back(make_flows: MakeFlows) -> None:
    async def hang(ctx: StepContext[Any]) -> None:
        await asyncio.Event().wait()

    saga = Saga(define("a", "slow", "never"), meanwhile={"slow": hang})
    error = await run(make_flows(), saga, timeout=0.3)
    assert isinstance(error, WorkflowTimeoutError)
    assert error.timeout == 5.3, "the margin of a stall is added"
    assert saga.calls == ["a", "slow", "undo a", "error"]


async def test_ew_160_a_timeout_of_zero_is_none(make_flows: MakeFlows) -> None:
    saga = Saga(define("a"))
    flows = make_flows(default_timeout=0)
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        assert (await flows.look(handle.id)).steps[0].kind == "started"
        assert await handle.result(10) == {"a": "a done"}


async def test_ew_161_nothing_is_left_waiting_after_the_end(make_flows: MakeFlows) -> None:
    from headrace.client.queue import Queue

    flows = make_flows()
    good, bad = Saga(define("a", "b")), Saga(define("a", "b"), failing={"b": 9})
    good.join(flows)
    bad.join(flows)
    async with flows:
        for saga in (good, bad):
            handle = await flows.execute(saga.definition, None, timeout=60)
            with pytest.raises(WorkflowStepError) if saga is bad else _nothing():
                await handle.result(10)
            for name in (f"workflow.{saga.definition.name}", f"workflow.{saga.definition.name}.steps"):
                counts = await Queue(flows._asked(), name).counts()
                assert not any(value for key, value in counts.items() if key != "paused"), (name, counts)


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


async def test_ew_163_ew_193_context_reaches_every_handler(make_flows: MakeFlows) -> None:
    ambient: dict[str, Any] = {}

    async def note(ctx: StepContext[Any]) -> None:
        ambient[ctx.step or "hook"] = dict(current_meta())

    saga = Saga(define("a", ["b", "c"]), meanwhile=dict.fromkeys(["a", "b", "c", "complete"], note))
    flows = make_flows()
    saga.join(flows)
    async with flows:
        with propagate(correlation_id="r-9", trace_id="t" * 32, span_id="s" * 16, tenant="acme"):
            handle = await flows.execute(saga.definition, None)
        await handle.result(10)
    assert set(ambient) == {"a", "b", "c", "hook"}
    for meta in ambient.values():
        assert (meta["correlationId"], meta["tenant"], meta["traceId"]) == ("r-9", "acme", "t" * 32)
    assert len({meta["spanId"] for meta in ambient.values()}) == 4, "each is a span of its own"
    assert saga.contexts["a"].correlation_id == "r-9"


async def test_ew_193_without_a_context_the_flow_id_correlates(
    make_flows: MakeFlows, caplog: pytest.LogCaptureFixture
) -> None:
    saga = Saga(define("a"))
    with caplog.at_level(logging.DEBUG, "headrace.workflows"):
        await run(make_flows(), saga, id="flow-x")
    assert saga.contexts["a"].correlation_id == "flow-x"
    assert any("without a context" in record.message for record in caplog.records)


async def test_ew_164_ids_start_and_stop(make_flows: MakeFlows) -> None:
    saga = Saga(define("a"))
    flows = make_flows()
    saga.join(flows)
    await flows.start()
    await flows.start()
    handle = await flows.execute(saga.definition, None)
    assert handle.id.startswith("flow-")
    await handle.result(10)
    await flows.stop()
    await flows.stop()
    await flows.start()
    assert await (await flows.execute(saga.definition, None)).result(10)
    await flows.stop()


async def test_ew_165_execute_needs_a_started_provider_and_a_workflow(make_flows: MakeFlows) -> None:
    flows = make_flows()
    with pytest.raises(ProviderStoppedError, match="not started"):
        await flows.execute(define("a"), None)
    async with flows:
        with pytest.raises(WorkflowError, match="no workflow"):
            await flows.execute("order", None)  # type: ignore[arg-type]


async def test_ew_166_x1_x2_a_step_that_fails_once_takes_nothing_back(make_flows: MakeFlows) -> None:
    saga = Saga(define("charge", "ship"), failing={"ship": 1})
    result = await run(make_flows(), saga)
    assert saga.calls == ["charge", "ship", "ship", "complete"]
    assert result == {"charge": "charge done", "ship": "ship done"}


async def test_ew_167_x3_a_step_that_always_fails_is_compensated_once(make_flows: MakeFlows) -> None:
    saga = Saga(define("charge", "ship"), failing={"ship": 99})
    await run(make_flows(), saga)
    assert saga.calls == ["charge", "ship", "ship", "ship", "undo charge", "error"]


async def test_ew_168_x13_on_complete_is_retried_then_everything_is_taken_back(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b"), failing={"complete": 9})
    error = await run(make_flows(), saga)
    assert "on_complete" in str(error)
    assert saga.calls == ["a", "b", *["complete"] * 3, "undo b", "undo a", "error"]
    once = Saga(define("a"), failing={"complete": 1})
    assert await run(make_flows(), once) == {"a": "a done"}


async def test_ew_169_x14_rollback_follows_completion_not_names(make_flows: MakeFlows) -> None:
    saga = Saga(define("b", "2", "1", "fails"), failing={"fails": 9})
    await run(make_flows(), saga)
    assert [call for call in saga.calls if call.startswith("undo")] == ["undo 1", "undo 2", "undo b"]


async def test_ew_170_rollbacks_have_their_own_policy(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b"), failing={"b": 9, "undo a": 4})
    flows = make_flows(default_retry=Retry(1), rollback_retry=Retry(5, backoff="fixed", delay=0.001))
    error = await run(flows, saga)
    assert isinstance(error, WorkflowStepError)
    assert saga.calls == ["a", "b", *["undo a"] * 5, "error"]


async def test_ew_171_x10_x12_a_step_that_returns_nothing_counts(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b", "c"), results={"b": None}, failing={"c": 9})
    await run(make_flows(), saga)
    assert saga.seen["c"] == {"a": "a done", "b": None}
    assert saga.calls[-3:] == ["undo b", "undo a", "error"]


async def test_x11_the_last_step_may_return_nothing(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b"), results={"b": None})
    assert await run(make_flows(), saga) == {"a": "a done", "b": None}


async def test_x4_a_key_and_a_parallel_group_go_together(make_flows: MakeFlows) -> None:
    saga = Saga(define(["a", "b"]))
    assert await run(make_flows(), saga, idempotency_key="order-7") == {"a": "a done", "b": "b done"}


async def test_x6_a_workflow_without_steps_is_retried_too(make_flows: MakeFlows) -> None:
    saga = Saga(define(), failing={"complete": 2})
    assert await run(make_flows(), saga) == {}
    assert saga.calls == ["complete"] * 3


async def test_ew_187_a_step_has_a_time_limit_if_it_wants_one(make_flows: MakeFlows) -> None:
    async def hang(ctx: StepContext[Any]) -> None:
        await asyncio.Event().wait()

    slow = step("slow", timeout=0.05, retry=Retry(1))
    for definition in (
        workflow("limit-single").step(step("a"), slow).build(),
        workflow("limit-parallel").parallel(step("a"), slow).build(),
    ):
        saga = Saga(definition, meanwhile={"slow": hang})
        error = await run(make_flows(), saga)
        assert error.step_name == "slow"
        assert error.__cause__.type_name == "TimeLimitExceeded"
        assert saga.calls[-2:] == ["undo a", "error"]
    within = Saga(define("a"))
    assert await run(make_flows(step_timeout=5), within) == {"a": "a done"}


async def test_an_error_of_our_own_kind_in_a_handler_is_a_failure_like_others(make_flows: MakeFlows) -> None:
    async def look(ctx: StepContext[Any]) -> None:
        if ctx.attempt < 3:
            raise NotFound("no such order")

    saga = Saga(define("a", "b"), meanwhile={"a": look})
    assert await run(make_flows(), saga) == {"a": "a done", "b": "b done"}
    assert saga.calls == ["a", "a", "a", "b", "complete"]


async def test_an_error_that_says_so_is_not_retried(make_flows: MakeFlows) -> None:
    async def give_up(ctx: StepContext[Any]) -> None:
        raise UnrecoverableError("no such account")

    saga = Saga(define("a"), meanwhile={"a": give_up})
    error = await run(make_flows(), saga)
    assert saga.calls == ["a", "error"]
    assert "no such account" in str(error)


class Order(msgspec.Struct):
    total: int


class Charge(msgspec.Struct):
    id: str


charge = step("charge", Charge)
ship = step("ship", str)
typed_order = workflow("typed-order", data=Order, result=list[str]).step(charge, ship).build()


async def test_types_are_kept_between_steps_and_threads_may_run_them(make_flows: MakeFlows) -> None:
    flows = make_flows()
    keys, threads = [], []

    @flows.implement(typed_order)
    class Code:
        @charge.execute
        def charge(self, ctx: StepContext[Order]) -> Charge:
            keys.append(ctx.idempotency_key)
            threads.append((threading.current_thread() is threading.main_thread(), dict(current_meta())))
            return Charge(f"c-{ctx.data.total}")

        @ship.execute
        async def ship(self, ctx: StepContext[Order]) -> str:
            return ctx.result(charge).id

        async def on_complete(self, ctx: StepContext[Order]) -> list[str]:
            return [ctx.result(charge).id, ctx.result(ship)]

    async with flows:
        handle = await flows.execute(typed_order, Order(5), id="o-5", meta={"userId": "u"})
        assert await handle.result(10) == ["c-5", "c-5"]
        assert keys == ["o-5-charge"]
        assert threads == [(False, {"userId": "u"})]
        with pytest.raises(PayloadError, match=r"data of workflow 'typed-order'.*total"):
            await flows.execute(typed_order, {"total": "many"})  # type: ignore[arg-type]


async def test_a_result_that_does_not_fit_fails_the_step_at_once(make_flows: MakeFlows) -> None:
    saga = Saga(workflow("unfit").step(step("a", int)).build(), results={"a": "text"})
    error = await run(make_flows(default_retry=Retry(1)), saga)
    assert error.__cause__.type_name == "PayloadError"


async def test_a_context_cannot_be_changed(make_flows: MakeFlows) -> None:
    saga = Saga(define("a"))
    await run(make_flows(), saga)
    with pytest.raises(AttributeError):
        saga.contexts["a"].data = 1  # type: ignore[misc]


# -- cancelling, signals, sleep, retry ---------------------------------------------------------------------------------


async def test_ew_202_cancelling_stops_the_flow_and_takes_it_back(make_flows: MakeFlows) -> None:
    begun, ended = asyncio.Event(), []

    async def hang(ctx: StepContext[Any]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(time.monotonic())
            raise

    saga = Saga(define("a", "b", "c"), meanwhile={"b": hang})
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        async with asyncio.timeout(5):
            await begun.wait()
        asked = time.monotonic()
        assert await handle.cancel(reason="not wanted")
        with pytest.raises(WorkflowCancelledError, match="not wanted"):
            await handle.result(10)
        assert await handle.status() is FlowStatus.CANCELLED
        assert not await handle.cancel()
        await eventually(lambda: ended)
        assert ended[0] - asked < 3.0, "a running step hears of it with the next heartbeat"
    assert saga.calls == ["a", "b", "undo a", "error"]


async def test_cancelling_without_compensation_leaves_what_was_done(make_flows: MakeFlows) -> None:
    saga = Saga(workflow("uncompensated").step(step("a")).wait("go").build())
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        await eventually(lambda: _has(handle, "waiting"))
        await handle.cancel(compensate=False)
        with pytest.raises(WorkflowCancelledError):
            await handle.result(10)
        assert saga.calls == ["a", "error"]
        again = await handle.retry()
        await again.signal("go", 1)
        assert await again.result(10) == {"a": "a done", "go": 1}
    assert saga.calls == ["a", "error", "complete"], "what was kept is not done again"


async def _has(handle: Any, kind: str) -> bool:
    return any(entry.kind == kind for entry in (await handle._provider.look(handle.id)).steps)


async def test_ew_203_a_signal_lets_a_waiting_flow_go_on(make_flows: MakeFlows) -> None:
    from headrace.errors import Refused

    saga = Saga(workflow("approval").step(step("a")).wait("approved", bool).step(step("b")).build())
    flows = make_flows()
    saga.join(flows)
    async with flows:
        early = await flows.execute(saga.definition, None)
        await early.signal("approved", True)
        assert (await early.result(10))["approved"] is True
        late = await flows.execute(saga.definition, None)
        await eventually(lambda: _has(late, "waiting"))
        with pytest.raises(Refused, match="no signal 'other'"):
            await late.signal("other")
        await late.signal("approved", False)
        assert (await late.result(10))["approved"] is False
        with pytest.raises(Refused):
            await late.signal("approved", True)


async def test_ew_203_a_signal_that_does_not_come_in_time_fails_the_flow(make_flows: MakeFlows) -> None:
    saga = Saga(workflow("impatient").step(step("a")).wait("approved", timeout=0.05).build())
    error = await run(make_flows(), saga)
    assert error.step_name == "approved"
    assert saga.calls == ["a", "undo a", "error"]


async def test_a_flow_sleeps_without_a_worker(make_flows: MakeFlows) -> None:
    saga = Saga(workflow("sleeper").step(step("a")).sleep("nap", 0.1).step(step("b")).build())
    began = time.monotonic()
    await run(make_flows(), saga)
    assert time.monotonic() - began >= 0.1
    assert saga.calls == ["a", "b", "complete"]


async def test_a_failed_flow_is_retried_from_the_first_step_that_was_not_kept(make_flows: MakeFlows) -> None:
    saga = Saga(define("kept", "undone", "fails"), failing={"fails": 3}, without_rollback=("kept",))
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None, id="order-1")
        with pytest.raises(WorkflowStepError):
            await handle.result(10)
        saga.calls.clear()
        again = await handle.retry()
        assert again.id == "order-1~2"
        assert await again.result(10) == {"kept": "kept done", "undone": "undone done", "fails": "fails done"}
        with pytest.raises(WorkflowError, match="only failed flows"):
            await again.retry()
    assert saga.calls == ["undone", "fails", "complete"]


# -- waiting and watching ----------------------------------------------------------------------------------------------


async def test_ew_197_x8_who_waits_is_told_when_the_provider_stops(make_flows: MakeFlows) -> None:
    definition = workflow("stopped").wait("never").build()
    flows, other = make_flows(), make_flows()
    async with other:
        await flows.start()
        handle = await flows.execute(definition, None)
        waiting = asyncio.create_task(handle.result())
        await asyncio.sleep(0)
        await flows.stop()
        with pytest.raises(ProviderStoppedError):
            await asyncio.wait_for(waiting, 5)
        assert await (await other.get_handle(handle.id)).status() is FlowStatus.RUNNING


async def test_a_waiter_has_its_own_patience(make_flows: MakeFlows) -> None:
    flows = make_flows()
    async with flows:
        handle = await flows.execute(workflow("patience").wait("never").build(), None)
        with pytest.raises(JobTimeout, match="it goes on"):
            await handle.result(timeout=0.05)
        assert await handle.status() is FlowStatus.RUNNING


async def test_ew_199_a_detached_timeout_sends_only_the_waiter_away(make_flows: MakeFlows) -> None:
    saga = Saga(workflow("detached").wait("go").step(step("a")).build())
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None, timeout=0.001, on_timeout="detach")
        with pytest.raises(WorkflowTimeoutError):
            await handle.result()
        await handle.signal("go")
        await eventually(lambda: _has(handle, "result"))
    assert saga.calls == ["a", "complete"]


async def test_the_log_of_a_flow_can_be_watched(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", "b"), failing={"a": 1, "b": 9})
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        async with asyncio.timeout(10):
            kinds = [f"{entry.kind}:{entry.step}" async for entry in handle.events()]
        assert kinds == [
            "started:", "attempt-failed:a", "completed:a", "attempt-failed:b", "attempt-failed:b", "failed:b",
            "compensating:b", "rolling-back:a", "rolled-back:a", "reporting:", "reported:", "ended:",
        ]  # fmt: skip
        timeline = await handle.timeline()
    bars = [(bar.step, bar.role, bar.attempt, bar.outcome) for bar in timeline.bars]
    assert bars == [
        ("a", "step", 1, "retried"), ("a", "step", 2, "completed"),
        ("b", "step", 1, "retried"), ("b", "step", 2, "retried"), ("b", "step", 3, "failed"),
        ("a", "rollback", 1, "rolled-back"),
    ]  # fmt: skip
    assert (timeline.status, timeline.cause, timeline.groups) == ("failed", "step", [["a"], ["b"]])
