"""What every provider of workflows has to do, as tests: subclass `WorkflowContract` and say how a provider is made.

    class TestMine(WorkflowContract):
        def provider(self, **options):
            return Workflows("valkey://localhost:6379/7", **options)

`provider` may be asked several times by one test, and all it gives must share a store; the store may be old and may
be shared with other tests, for every test makes up names of its own. The tests are plain ones and need pytest alone.
Numbers (EW-149) are those of the acceptance cases, X1 the experiments that show where workflows commonly go wrong.
To add a case: a method with `@case` that begins by `self.flows()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
import pytest

from headrace.client.queue import Queue
from headrace.errors import (
    JobTimeout,
    NotFound,
    PayloadError,
    ProviderStoppedError,
    Refused,
    RemoteError,
    WorkflowCancelledError,
    WorkflowError,
    WorkflowRollbackError,
    WorkflowStepError,
    WorkflowTimeoutError,
)
from headrace.model import FlowStatus
from headrace.propagation import Retry, current_meta, propagate
from headrace.worker.failures import RetryLater, UnrecoverableError
from headrace.workflows.context import StepContext
from headrace.workflows.definition import step, workflow
from headrace.workflows.provider import Workflows
from headrace.workflows.testing.saga import Saga, define, fresh

QUICK: Final = Retry(3, backoff="fixed", delay=0.005)
_LIMIT: Final = 60.0
"""Seconds that one case may take."""


def case(function: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """A test that runs on a loop of its own, without any plugin."""

    @functools.wraps(function)
    def run(self: Any) -> None:
        asyncio.run(asyncio.wait_for(function(self), _LIMIT))

    return run


async def run(flows: Workflows, saga: Saga, data: Any = None, **options: Any) -> Any:
    """Join, start, execute once, stop; the result, or the error as a value."""
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, data, **options)
        try:
            return await handle.result(timeout=20)
        except WorkflowError as error:
            return error


async def eventually(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    """Wait until it holds; a condition may be a coroutine function."""
    async with asyncio.timeout(timeout):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


async def _hang(ctx: StepContext[Any]) -> None:
    await asyncio.sleep(_LIMIT)


async def _has_delayed(queue: Queue) -> bool:
    return (await queue.counts())["delayed"] > 0


async def _has(flows: Workflows, handle: Any, kind: str) -> bool:
    return any(entry.kind == kind for entry in (await flows.look(handle.id)).steps)


class Order(msgspec.Struct):
    total: int


class Charge(msgspec.Struct):
    id: str


charge = step("charge", Charge)
ship = step("ship", str)


class WorkflowContract:
    """The cases. A subclass gives `provider`."""

    def provider(self, **options: Any) -> Workflows:
        """A provider that is not started, on the store under test; options are those of Workflows."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a provider is made")

    def flows(self, **options: Any) -> Workflows:
        return self.provider(**{"default_retry": QUICK, **options})

    @case
    async def test_ew_149_steps_run_in_order_then_on_complete(self) -> None:
        saga = Saga(define("a", "b", "c"))
        await run(self.flows(), saga)
        assert saga.calls == ["a", "b", "c", "complete"]

    @case
    async def test_ew_150_results_accumulate_by_name(self) -> None:
        saga = Saga(define("a", "b", "c"))
        result = await run(self.flows(), saga)
        assert saga.seen["a"] == {}
        assert saga.seen["c"] == {"a": "a done", "b": "b done"}
        assert result == {"a": "a done", "b": "b done", "c": "c done"}

    @case
    async def test_ew_151_parallel_steps_run_at_the_same_time(self) -> None:
        together = asyncio.Barrier(3)

        async def meet(ctx: StepContext[Any]) -> None:
            async with asyncio.timeout(5):
                await together.wait()

        saga = Saga(define(["a", "b", "c"]), meanwhile=dict.fromkeys("abc", meet))
        assert await run(self.flows(), saga) == {"a": "a done", "b": "b done", "c": "c done"}

    @case
    async def test_ew_152_groups_follow_each_other_and_neighbours_do_not_see_each_other(self) -> None:
        saga = Saga(define("init", ["x", "y"], "final"))
        await run(self.flows(), saga)
        assert saga.calls[0] == "init"
        assert saga.calls[-2:] == ["final", "complete"]
        assert saga.seen["x"] == saga.seen["y"] == {"init": "init done"}
        assert set(saga.seen["final"]) == {"init", "x", "y"}

    @case
    async def test_ew_153_a_failure_stops_the_flow_and_on_error_sees_what_was_done(self) -> None:
        saga = Saga(define("a", "b", "c"), failing={"b": 9})
        await run(self.flows(), saga)
        assert "c" not in saga.calls
        assert saga.seen["error"] == {"a": "a done"}

    @case
    async def test_ew_154_ew_198_x9_the_error_names_the_step_and_keeps_its_cause(self) -> None:
        saga = Saga(define("a", "b"), failing={"b": 9})
        error = await run(self.flows(), saga)
        assert isinstance(error, WorkflowStepError)
        assert str(error) == "Step 'b' failed: b failed"
        cause = error.__cause__
        assert isinstance(cause, RemoteError)
        assert (cause.type_name, cause.step, cause.attempt) == ("ValueError", "b", 3)
        assert "raise ValueError" in cause.remote_traceback

    @case
    async def test_ew_155_rollback_runs_last_first_and_only_for_what_was_done(self) -> None:
        saga = Saga(define("a", "b", "c", "d"), failing={"d": 9}, without_rollback=("b",))
        await run(self.flows(), saga)
        assert [call for call in saga.calls if call.startswith("undo")] == ["undo c", "undo a"]
        fine = Saga(define("a"))
        await run(self.flows(), fine)
        assert fine.calls == ["a", "complete"]
        first = Saga(define("a", "b"), failing={"a": 9})
        await run(self.flows(), first)
        assert first.calls == ["a", "a", "a", "error"]

    @case
    async def test_ew_156_a_failing_rollback_does_not_stop_the_others_and_is_told(self) -> None:
        saga = Saga(define("a", "b", "c"), failing={"c": 9, "undo b": 9})
        error = await run(self.flows(), saga)
        assert isinstance(error, WorkflowRollbackError)
        assert str(error.primary) == "Step 'c' failed: c failed"
        assert [(one.step, one.message) for one in error.rollback_errors] == [("b", "undo b failed")]  # type: ignore[attr-defined]
        assert saga.calls[-2:] == ["undo a", "error"]
        assert isinstance(saga.errors[0], WorkflowRollbackError)

    @case
    async def test_ew_157_after_a_parallel_failure_siblings_and_earlier_groups_are_rolled_back(self) -> None:
        saga = Saga(define("a", ["x", "y", "z"]), failing={"y": 9})
        error = await run(self.flows(), saga)
        assert error.step_name == "y"
        undone = [call for call in saga.calls if call.startswith("undo")]
        assert set(undone) == {"undo x", "undo z", "undo a"}
        assert undone[-1] == "undo a"

    @case
    async def test_ew_158_a_rollback_has_data_results_meta_and_logger(self) -> None:
        saga = Saga(define("a", "b"), failing={"b": 9})
        await run(self.flows(), saga, {"n": 1}, meta={"userId": "u"})
        context = saga.contexts["undo a"]
        assert (context.data, context.step, context.results["a"]) == ({"n": 1}, "a:rollback", "a done")
        assert context.meta["userId"] == "u"
        extra = context.log.extra
        assert extra is not None
        assert (extra["userId"], extra["step"], extra["workflow"]) == ("u", "a:rollback", saga.definition.name)

    @case
    async def test_ew_159_status_follows_the_flow(self) -> None:
        good, bad = Saga(define("a")), Saga(define("a"), failing={"a": 9})
        flows = self.flows()
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

    @case
    async def test_ew_160_ew_162_ew_186_ew_199_x15_a_flow_that_takes_too_long_is_taken_back_or_let_go(self) -> None:
        """All at once, for each lasts as long as a stall."""
        await asyncio.gather(
            self._late_in_a_step(),
            self._late_in_on_complete(),
            self._late_but_detached(),
            self._late_without_its_alarm(),
        )

    async def _late_in_a_step(self) -> None:
        saga = Saga(define("a", "slow", "never"), meanwhile={"slow": _hang})
        error = await run(self.flows(), saga, timeout=0.3)
        assert isinstance(error, WorkflowTimeoutError)
        assert error.timeout == 5.3, "the margin of a stall is added"
        assert saga.calls == ["a", "slow", "undo a", "error"]

    async def _late_in_on_complete(self) -> None:
        async def go_on(ctx: StepContext[Any]) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await _hang(ctx)

        saga = Saga(define("a"), meanwhile={"complete": go_on})
        error = await run(self.flows(), saga, timeout=0.1)
        assert isinstance(error, WorkflowTimeoutError), "what on_complete returns later does not count"
        assert saga.calls == ["a", "complete", "undo a", "error"]

    async def _late_but_detached(self) -> None:
        saga = Saga(workflow(fresh("detached")).wait("go").step(step("a")).build())
        flows = self.flows()
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None, timeout=0.001, on_timeout="detach")
            with pytest.raises(WorkflowTimeoutError):
                await handle.result()
            await handle.signal("go")
            await eventually(lambda: _has(flows, handle, "result"))
        assert saga.calls == ["a", "complete"]

    async def _late_without_its_alarm(self) -> None:
        """An operator took the job away that would have ended the flow."""
        saga = Saga(workflow(fresh("unguarded")).step(step("a")).wait("never").build())
        flows = self.flows()
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None, timeout=0.1)
            await eventually(functools.partial(_has, flows, handle, "waiting"))
            assert await Queue(flows.client, f"workflow.{saga.definition.name}").drain() == 1
            with pytest.raises(WorkflowTimeoutError):
                await handle.result(20)
        assert saga.calls == ["a", "undo a", "error"]

    @case
    async def test_ew_160_a_timeout_of_zero_is_none(self) -> None:
        saga = Saga(define("a"))
        flows = self.flows(default_timeout=0)
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None)
            assert (await flows.look(handle.id)).steps[0].kind == "started"
            assert await handle.result(10) == {"a": "a done"}

    @case
    async def test_ew_161_nothing_is_left_waiting_after_the_end(self) -> None:
        flows = self.flows()
        good, bad = Saga(define("a", "b")), Saga(define("a", "b"), failing={"b": 9})
        good.join(flows)
        bad.join(flows)
        async with flows:
            for saga in (good, bad):
                handle = await flows.execute(saga.definition, None, timeout=60)
                with pytest.raises(WorkflowStepError) if saga is bad else contextlib.nullcontext():
                    await handle.result(10)
                for name in (f"workflow.{saga.definition.name}", f"workflow.{saga.definition.name}.steps"):
                    counts = await Queue(flows.client, name).counts()
                    assert not any(value for key, value in counts.items() if key != "paused"), (name, counts)

    @case
    async def test_ew_163_ew_193_context_reaches_every_handler(self) -> None:
        ambient: dict[str, Any] = {}

        async def note(ctx: StepContext[Any]) -> None:
            ambient[ctx.step or "hook"] = dict(current_meta())

        saga = Saga(define("a", ["b", "c"]), meanwhile=dict.fromkeys(["a", "b", "c", "complete"], note))
        flows = self.flows()
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

    @case
    async def test_ew_164_ids_start_and_stop(self) -> None:
        saga = Saga(define("a"))
        flows = self.flows()
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

    @case
    async def test_ew_165_execute_needs_a_started_provider_and_a_workflow(self) -> None:
        flows = self.flows()
        with pytest.raises(ProviderStoppedError, match="not started"):
            await flows.execute(define("a"), None)
        async with flows:
            with pytest.raises(WorkflowError, match="no workflow"):
                await flows.execute("order", None)  # type: ignore[arg-type]

    @case
    async def test_ew_166_x1_x2_a_step_that_fails_once_takes_nothing_back(self) -> None:
        saga = Saga(define("charge", "ship"), failing={"ship": 1})
        result = await run(self.flows(), saga)
        assert saga.calls == ["charge", "ship", "ship", "complete"]
        assert result == {"charge": "charge done", "ship": "ship done"}

    @case
    async def test_ew_167_x3_a_step_that_always_fails_is_compensated_once(self) -> None:
        saga = Saga(define("charge", "ship"), failing={"ship": 99})
        await run(self.flows(), saga)
        assert saga.calls == ["charge", "ship", "ship", "ship", "undo charge", "error"]

    @case
    async def test_ew_168_x13_on_complete_is_retried_then_everything_is_taken_back(self) -> None:
        saga = Saga(define("a", "b"), failing={"complete": 9})
        error = await run(self.flows(), saga)
        assert "on_complete" in str(error)
        assert saga.calls == ["a", "b", *["complete"] * 3, "undo b", "undo a", "error"]
        once = Saga(define("a"), failing={"complete": 1})
        assert await run(self.flows(), once) == {"a": "a done"}

    @case
    async def test_ew_169_x14_rollback_follows_completion_not_names(self) -> None:
        saga = Saga(define("b", "2", "1", "fails"), failing={"fails": 9})
        await run(self.flows(), saga)
        assert [call for call in saga.calls if call.startswith("undo")] == ["undo 1", "undo 2", "undo b"]

    @case
    async def test_ew_170_rollbacks_have_their_own_policy(self) -> None:
        saga = Saga(define("a", "b"), failing={"b": 9, "undo a": 4})
        flows = self.flows(default_retry=Retry(1), rollback_retry=Retry(5, backoff="fixed", delay=0.001))
        error = await run(flows, saga)
        assert isinstance(error, WorkflowStepError)
        assert saga.calls == ["a", "b", *["undo a"] * 5, "error"]

    @case
    async def test_ew_171_x10_x12_a_step_that_returns_nothing_counts(self) -> None:
        saga = Saga(define("a", "b", "c"), results={"b": None}, failing={"c": 9})
        await run(self.flows(), saga)
        assert saga.seen["c"] == {"a": "a done", "b": None}
        assert saga.calls[-3:] == ["undo b", "undo a", "error"]

    @case
    async def test_x11_the_last_step_may_return_nothing(self) -> None:
        saga = Saga(define("a", "b"), results={"b": None})
        assert await run(self.flows(), saga) == {"a": "a done", "b": None}

    @case
    async def test_x4_a_key_and_a_parallel_group_go_together(self) -> None:
        saga = Saga(define(["a", "b"]))
        assert await run(self.flows(), saga, idempotency_key=fresh("order")) == {"a": "a done", "b": "b done"}

    @case
    async def test_x6_a_workflow_without_steps_is_retried_too(self) -> None:
        saga = Saga(define(), failing={"complete": 2})
        assert await run(self.flows(), saga) == {}
        assert saga.calls == ["complete"] * 3

    @case
    async def test_ew_187_a_step_has_a_time_limit_if_it_wants_one(self) -> None:
        slow = step("slow", timeout=0.05, retry=Retry(1))
        for definition in (
            workflow(fresh("limit-single")).step(step("a"), slow).build(),
            workflow(fresh("limit-parallel")).parallel(step("a"), slow).build(),
        ):
            saga = Saga(definition, meanwhile={"slow": _hang})
            error = await run(self.flows(), saga)
            assert error.step_name == "slow"
            assert error.__cause__.type_name == "TimeLimitExceeded"
            assert saga.calls[-2:] == ["undo a", "error"]
        within = Saga(define("a"))
        assert await run(self.flows(step_timeout=5), within) == {"a": "a done"}

    @case
    async def test_an_error_of_our_own_kind_in_a_handler_is_a_failure_like_others(self) -> None:
        async def look(ctx: StepContext[Any]) -> None:
            if ctx.attempt < 3:
                raise NotFound("no such order")

        saga = Saga(define("a", "b"), meanwhile={"a": look})
        assert await run(self.flows(), saga) == {"a": "a done", "b": "b done"}
        assert saga.calls == ["a", "a", "a", "b", "complete"]

    @case
    async def test_an_error_that_says_so_is_not_retried(self) -> None:
        async def give_up(ctx: StepContext[Any]) -> None:
            raise UnrecoverableError("no such account")

        saga = Saga(define("a"), meanwhile={"a": give_up})
        error = await run(self.flows(), saga)
        assert saga.calls == ["a", "error"]
        assert "no such account" in str(error)

    @case
    async def test_types_are_kept_between_steps_and_threads_may_run_them(self) -> None:
        typed_order = workflow(fresh("typed"), data=Order, result=list[str]).step(charge, ship).build()
        flows, order = self.flows(), fresh("order")
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
            handle = await flows.execute(typed_order, Order(5), id=order, meta={"userId": "u"})
            assert await handle.result(10) == ["c-5", "c-5"]
            assert keys == [f"{order}-charge"]
            assert threads == [(False, {"userId": "u"})]
            with pytest.raises(PayloadError, match=r"data of workflow 'typed-.*total"):
                await flows.execute(typed_order, {"total": "many"})  # type: ignore[misc]

    @case
    async def test_a_result_that_does_not_fit_fails_the_step_at_once(self) -> None:
        saga = Saga(workflow(fresh("unfit")).step(step("a", int)).build(), results={"a": "text"})
        error = await run(self.flows(default_retry=Retry(1)), saga)
        assert error.__cause__.type_name == "PayloadError"

    @case
    async def test_a_context_cannot_be_changed(self) -> None:
        saga = Saga(define("a"))
        await run(self.flows(), saga)
        with pytest.raises(AttributeError):
            saga.contexts["a"].data = 1  # type: ignore[misc]

    @case
    async def test_ew_202_cancelling_stops_the_flow_and_takes_it_back(self) -> None:
        begun, ended = asyncio.Event(), []

        async def hang(ctx: StepContext[Any]) -> None:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append(time.monotonic())
                raise

        saga = Saga(define("a", "b", "c"), meanwhile={"b": hang})
        flows = self.flows()
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

    @case
    async def test_a_step_that_completes_although_its_flow_was_cancelled_is_taken_back_before_the_end(self) -> None:
        begun, go_on = threading.Event(), threading.Event()

        def charge(ctx: StepContext[Any]) -> str:
            begun.set()
            assert go_on.wait(10)
            return "charged"

        async def ship(ctx: StepContext[Any]) -> None:
            calls.append("ship")

        async def refund(ctx: StepContext[Any]) -> None:
            calls.append(f"refund what was {ctx.results['charge']}")

        async def on_error(ctx: StepContext[Any], error: Exception) -> None:
            calls.append("error")

        calls: list[str] = []
        definition, flows = define("charge", "ship"), self.flows()
        flows.register_definition_consumer(definition, {"charge": (charge, refund), "ship": ship}, on_error=on_error)
        async with flows:
            handle = await flows.execute(definition, None)
            assert await asyncio.to_thread(begun.wait, 10)
            await handle.cancel()
            assert await handle.status() is FlowStatus.COMPENSATING, "how the step ends is not known yet"
            go_on.set()
            with pytest.raises(WorkflowCancelledError):
                await handle.result(10)
        assert calls == ["refund what was charged", "error"]

    @case
    async def test_a_step_that_fails_while_its_flow_is_taken_back_is_not_tried_again(self) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def fail(ctx: StepContext[Any]) -> None:
            begun.set()
            await go_on.wait()
            raise ValueError("no")

        saga = Saga(define("a", "b"), meanwhile={"b": fail})
        flows = self.flows(default_retry=Retry(3, delay=600))
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None)
            async with asyncio.timeout(10):
                await begun.wait()
            await handle.cancel()
            go_on.set()
            with pytest.raises(WorkflowCancelledError):
                await handle.result(10)
        assert saga.calls == ["a", "b", "undo a", "error"]

    @case
    async def test_a_flow_that_is_cancelled_before_its_step_is_begun_ends_at_once(self) -> None:
        async def fail(ctx: StepContext[Any]) -> None:
            raise ValueError("no")

        saga = Saga(define("a", "b"), meanwhile={"b": fail})
        flows = self.flows(default_retry=Retry(3, delay=600))
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None)
            queue = Queue(flows.client, f"workflow.{saga.definition.name}.steps")
            await eventually(functools.partial(_has_delayed, queue))
            await handle.cancel()
            with pytest.raises(WorkflowCancelledError):
                await handle.result(10)
        assert saga.calls == ["a", "b", "undo a", "error"]

    @case
    async def test_cancelling_without_compensation_leaves_what_was_done(self) -> None:
        saga = Saga(workflow(fresh("uncompensated")).step(step("a")).wait("go").build())
        flows = self.flows()
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None)
            await eventually(lambda: _has(flows, handle, "waiting"))
            await handle.cancel(compensate=False)
            with pytest.raises(WorkflowCancelledError):
                await handle.result(10)
            assert saga.calls == ["a", "error"]
            again = await handle.retry()
            await again.signal("go", 1)
            assert await again.result(10) == {"a": "a done", "go": 1}
        assert saga.calls == ["a", "error", "complete"], "what was kept is not done again"

    @case
    async def test_ew_203_a_signal_lets_a_waiting_flow_go_on(self) -> None:
        saga = Saga(workflow(fresh("approval")).step(step("a")).wait("approved", bool).step(step("b")).build())
        flows = self.flows()
        saga.join(flows)
        async with flows:
            early = await flows.execute(saga.definition, None)
            await early.signal("approved", True)
            assert (await early.result(10))["approved"] is True
            late = await flows.execute(saga.definition, None)
            await eventually(lambda: _has(flows, late, "waiting"))
            with pytest.raises(Refused, match="no signal 'other'"):
                await late.signal("other")
            for handle in (late, await flows.get_handle(late.id)):
                with pytest.raises(PayloadError, match="payload of signal 'approved'"):
                    await handle.signal("approved", "perhaps")
            await late.signal("approved", False)
            assert (await late.result(10))["approved"] is False
            with pytest.raises(Refused):
                await late.signal("approved", True)

    @case
    async def test_ew_203_a_signal_that_does_not_come_in_time_fails_the_flow(self) -> None:
        saga = Saga(workflow(fresh("impatient")).step(step("a")).wait("approved", timeout=0.05).build())
        error = await run(self.flows(), saga)
        assert error.step_name == "approved"
        assert saga.calls == ["a", "undo a", "error"]

    @case
    async def test_a_flow_sleeps_without_a_worker(self) -> None:
        saga = Saga(workflow(fresh("sleeper")).step(step("a")).sleep("nap", 0.1).step(step("b")).build())
        began = time.monotonic()
        await run(self.flows(), saga)
        assert time.monotonic() - began >= 0.1
        assert saga.calls == ["a", "b", "complete"]

    @case
    async def test_a_failed_flow_is_retried_from_the_first_step_that_was_not_kept(self) -> None:
        saga = Saga(define("kept", "undone", "fails"), failing={"fails": 3}, without_rollback=("kept",))
        flows = self.flows()
        saga.join(flows)
        async with flows:
            order = fresh("order")
            handle = await flows.execute(saga.definition, None, id=order)
            with pytest.raises(WorkflowStepError):
                await handle.result(10)
            saga.calls.clear()
            again = await handle.retry()
            assert again.id == f"{order}~2"
            assert await again.result(10) == {"kept": "kept done", "undone": "undone done", "fails": "fails done"}
            with pytest.raises(WorkflowError, match="only failed flows"):
                await again.retry()
        assert saga.calls == ["undone", "fails", "complete"]

    @case
    async def test_ew_197_x8_who_waits_is_told_when_the_provider_stops(self) -> None:
        definition = workflow(fresh("stopped")).wait("never").build()
        flows, other = self.flows(), self.flows()
        async with other:
            await flows.start()
            handle = await flows.execute(definition, None)
            waiting = asyncio.create_task(handle.result())
            await asyncio.sleep(0)
            await flows.stop()
            with pytest.raises(ProviderStoppedError):
                await asyncio.wait_for(waiting, 5)
            assert await (await other.get_handle(handle.id)).status() is FlowStatus.RUNNING

    @case
    async def test_a_waiter_has_its_own_patience(self) -> None:
        flows = self.flows()
        async with flows:
            handle = await flows.execute(workflow(fresh("patience")).wait("never").build(), None)
            with pytest.raises(JobTimeout, match="it goes on"):
                await handle.result(timeout=0.05)
            assert await handle.status() is FlowStatus.RUNNING

    @case
    async def test_the_log_of_a_flow_can_be_watched(self) -> None:
        saga = Saga(define("a", "b"), failing={"a": 1, "b": 9})
        flows = self.flows()
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

    @case
    async def test_ew_173_many_flows_at_once_do_not_mix(self) -> None:
        flows = self.flows()
        echo = workflow(fresh("echo")).step(step("a"), step("b")).build()

        async def say(ctx: StepContext[Any]) -> Any:
            return [ctx.step, ctx.data, dict(ctx.results)]

        flows.register_definition_consumer(echo, {"a": say, "b": say})
        async with flows:
            handles = [await flows.execute(echo, n) for n in range(50)]
            results = await asyncio.gather(*(handle.result(20) for handle in handles))
        assert [result["b"] for result in results] == [["b", n, {"a": ["a", n, {}]}] for n in range(50)]

    @case
    async def test_ew_174_an_emitter_gets_results_of_another_provider(self) -> None:
        saga = Saga(define("a"))
        emitter, consumer = self.flows(), self.flows()
        saga.join(consumer)
        async with emitter, consumer:
            assert await (await emitter.execute(saga.definition, None)).result(10) == {"a": "a done"}
            assert await (await consumer.execute(saga.definition, None)).result(10) == {"a": "a done"}

    @case
    async def test_ew_176_a_flow_waits_for_a_provider_and_one_that_joins_late_takes_it(self) -> None:
        saga = Saga(define("a", "b"))
        async with self.flows() as emitter:
            handle = await emitter.execute(saga.definition, None)
            late = self.flows()
            saga.join(late)
            async with late:
                assert await handle.result(10) == {"a": "a done", "b": "b done"}

    @case
    async def test_ew_177_ew_196_x5_x7_a_flow_is_found_by_its_id_from_anywhere(self) -> None:
        flows, other = self.flows(), self.flows()
        with_steps, without = Saga(define("a")), Saga(define())
        with_steps.join(flows)
        without.join(flows)
        async with flows, other:
            for saga, key in ((with_steps, None), (with_steps, fresh("key")), (without, None)):
                handle = await flows.execute(saga.definition, None, idempotency_key=key)
                elsewhere = await other.get_handle(handle.id)
                assert await elsewhere.result(10) == await handle.result(10)
                assert await other.get_status(handle.id) is FlowStatus.COMPLETED
            with pytest.raises(WorkflowError, match="there is no flow nobody"):
                await other.get_result("nobody")

    @case
    async def test_ew_178_flows_are_listed_by_workflow(self) -> None:
        flows = self.flows()
        one, two = Saga(define("a")), Saga(define("a"))
        one.join(flows)
        two.join(flows)
        async with flows:
            handle = await flows.execute(one.definition, None)
            await (await flows.execute(two.definition, None)).result(10)
            await handle.result(10)
            assert [flow.id for flow in await flows.list(one.definition.name)] == [handle.id]

    @case
    async def test_ew_179_the_same_key_runs_once(self) -> None:
        saga, key = Saga(define("a")), fresh("key")
        flows, other = self.flows(), self.flows()
        saga.join(flows)
        async with flows, other:
            handles = [
                await flows.execute(saga.definition, 1, idempotency_key=key),
                await other.execute(saga.definition, 2, idempotency_key=key),
            ]
            assert [await handle.result(10) for handle in handles] == [{"a": "a done"}] * 2
            assert saga.calls == ["a", "complete"]
            await (await flows.execute(saga.definition, 1, idempotency_key=fresh("key"))).result(10)
            await (await flows.execute(saga.definition, 1)).result(10)
            assert saga.calls == ["a", "complete"] * 3
            with pytest.raises(WorkflowError, match="belongs to a flow of workflow"):
                await flows.execute(define("z"), 1, idempotency_key=key)

    @case
    async def test_ew_181_a_flow_that_ends_at_once_is_not_missed(self) -> None:
        saga = Saga(define())
        flows = self.flows()
        saga.join(flows)
        async with flows:
            for _ in range(20):
                assert await (await flows.execute(saga.definition, None)).result(10) == {}

    @case
    async def test_ew_183_ew_184_policies_of_the_starter_apply_wherever_steps_run(self) -> None:
        saga = Saga(define("a"), failing={"a": 99})
        emitter, consumer = self.flows(default_retry=Retry(5, backoff="fixed", delay=0.001)), self.flows()
        saga.join(consumer, concurrency=2)
        async with emitter, consumer:
            with pytest.raises(WorkflowStepError):
                await (await emitter.execute(saga.definition, None)).result(10)
        assert saga.calls == [*["a"] * 5, "error"]

    @case
    async def test_ew_188_a_job_that_is_none_of_a_flow_is_refused_with_advice(self) -> None:
        saga = Saga(define("a"))
        flows = self.flows()
        saga.join(flows)
        async with flows:
            queue = Queue(flows.client, f"workflow.{saga.definition.name}")
            job = await queue.add("x", {"some": "data"})
            assert await job.wait(10)
            assert "start them with flows.execute()" in ((await job.info()).failed_reason or "")

    @case
    async def test_ew_201_ew_205_a_wide_group_is_one_job_per_step_and_ends_once(self) -> None:
        running: Counter[str] = Counter()
        most: Counter[str] = Counter()

        async def count(ctx: StepContext[Any]) -> None:
            running[ctx.provider_id] += 1
            most[ctx.provider_id] = max(most[ctx.provider_id], running[ctx.provider_id])
            await asyncio.sleep(0.01)
            running[ctx.provider_id] -= 1

        names = [f"s{n}" for n in range(100)]
        saga = Saga(define(names, "last"), meanwhile=dict.fromkeys(names, count))
        one, two = self.flows(concurrency=10), self.flows(concurrency=10)
        saga.join(one)
        saga.join(two)
        async with one, two:
            result = await (await one.execute(saga.definition, None)).result(30)
        assert len(result) == 101
        assert Counter(saga.calls).most_common(1)[0][1] == 1, "nothing ran twice"
        assert set(most) == {one.provider_id, two.provider_id}, "both took part"
        assert max(most.values()) <= 10, "neither ran more than it may"

    @case
    async def test_ew_175_ew_180_ew_182_failure_and_rollback_need_nothing_of_the_caller(self) -> None:
        saga = Saga(define("a", "b", "c"), failing={"c": 9, "undo b": 9})
        caller, first, second = self.flows(), self.flows(concurrency=1), self.flows(concurrency=1)
        saga.join(first)
        saga.join(second)
        async with caller:
            await first.start()
            handle = await caller.execute(saga.definition, None)
            await eventually(lambda: "b" in saga.calls)
            await second.start()
            await first.stop()
            with pytest.raises(WorkflowRollbackError) as caught:
                await handle.result(10)
            await second.stop()
        assert isinstance(caught.value.primary, WorkflowStepError)
        assert caught.value.primary.step_name == "c"
        assert [str(error) for error in caught.value.rollback_errors] == ["ValueError: undo b failed"]
        assert saga.contexts["undo a"].provider_id == second.provider_id, "whoever is there takes it back"

    @case
    async def test_ew_208_a_key_is_answered_from_the_store_when_nobody_remembers_it(self) -> None:
        saga, keys = Saga(define("a")), [fresh("key") for _ in range(5)]
        flows, other = self.flows(max_flow_states=2), self.flows()
        saga.join(flows)
        async with flows, other:
            for key in keys:
                await (await flows.execute(saga.definition, None, idempotency_key=key)).result(10)
            for provider in (flows, other):
                again = await provider.execute(saga.definition, None, idempotency_key=keys[0])
                assert await again.result(10) == {"a": "a done"}
        assert saga.calls == ["a", "complete"] * 5

    @case
    async def test_a_step_may_say_when_it_is_to_be_tried_again(self) -> None:
        async def wait(ctx: StepContext[Any]) -> None:
            if ctx.attempt == 1:
                raise RetryLater("the bank is closed", after=0.05)

        saga = Saga(define("a"), meanwhile={"a": wait})
        flows = self.flows(default_retry=Retry(2, delay=600))
        assert await run(flows, saga) == {"a": "a done"}
        assert saga.calls == ["a", "a", "complete"]

    @case
    async def test_a_flow_whose_job_an_operator_takes_away_fails_and_is_taken_back(self) -> None:
        async def pause(ctx: StepContext[Any]) -> None:
            await Queue(flows.client, f"workflow.{ctx.workflow}.steps").pause()

        for verb, done in (("drain", "drained"), ("clean", "cleaned"), ("obliterate", "obliterated")):
            saga, flows = Saga(define("a", "b"), meanwhile={"a": pause}), self.flows()
            saga.join(flows)
            async with flows:
                handle = await flows.execute(saga.definition, None, timeout=0)
                await eventually(functools.partial(_has, flows, handle, "completed"))
                queue = Queue(flows.client, f"workflow.{saga.definition.name}.steps")
                await getattr(queue, verb)()
                await queue.resume()
                with pytest.raises(WorkflowStepError, match=f"Step 'b' failed: queue {queue.name} was {done}"):
                    await handle.result(10)
            assert saga.calls == ["a", "undo a", "error"]

    @case
    async def test_a_sleep_whose_alarm_an_operator_takes_away_does_not_end_as_if_it_were_over(self) -> None:
        saga = Saga(workflow(fresh("sleeper")).step(step("a")).sleep("nap", 600).step(step("b")).build())
        flows = self.flows()
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None)
            await eventually(functools.partial(_has, flows, handle, "sleeping"))
            await Queue(flows.client, f"workflow.{saga.definition.name}").drain()
            with pytest.raises(WorkflowStepError, match=r"Step 'nap' failed: queue .* was drained"):
                await handle.result(10)
        assert saga.calls == ["a", "undo a", "error"]
