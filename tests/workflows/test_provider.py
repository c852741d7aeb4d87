"""What a provider keeps, tells and lets be replaced: EW-190 to EW-192, EW-207, hooks, parts, and its sync facade."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from pathlib import Path
from typing import Any, TypedDict
from uuid import UUID

import msgspec
import psutil
import pytest
from pydantic import BaseModel

from headrace.client.options import RateLimit
from headrace.client.queue import Queue
from headrace.commands.flows import FlowFound
from headrace.errors import (
    InvalidCommand,
    JobTimeout,
    PayloadError,
    ProviderStoppedError,
    Refused,
    StalledError,
    WorkflowError,
    WorkflowRollbackError,
    WorkflowStepError,
)
from headrace.facade import SyncFacade
from headrace.propagation import Retry, current_meta, propagate
from headrace.worker.failures import UnrecoverableError
from headrace.workflows import FlowStatus, StepContext, StepRegistry, Workflows, context, step, watch, workflow
from headrace.workflows.ledger import Ledger
from headrace.workflows.runner import FlowWorker
from headrace.workflows.testing import Saga, define
from headrace.workflows.testing.contract import QUICK, eventually
from headrace.workflows.watch import FlowWatch
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.workflows.conftest import MakeFlows

# -- what is kept ------------------------------------------------------------------------------------------------------


async def test_ew_190_nothing_is_kept_here_of_flows_that_have_ended(make_flows: MakeFlows) -> None:
    """There is no delay after which local states go, and no timer per flow: there are none."""
    good, bad = Saga(define("a", "b")), Saga(define("a"), failing={"a": 9})
    made: list[Ledger] = []

    class Seen(Ledger):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    flows = make_flows(flow_producer_class=Seen)
    good.join(flows)
    bad.join(flows)
    async with flows:
        before = len(asyncio.all_tasks())
        for saga, timeout in ((good, 60), (bad, 60), (good, 0)):
            handle = await flows.execute(saga.definition, None, timeout=timeout)
            await asyncio.gather(handle.result(10), return_exceptions=True)
        assert not made[0]._records
        assert len(asyncio.all_tasks()) == before


async def test_a_provider_remembers_as_many_flows_as_it_may(make_flows: MakeFlows) -> None:
    made: list[Ledger] = []

    class Seen(Ledger):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    flows = make_flows(flow_producer_class=Seen, max_flow_states=3)
    waits = workflow("waits").wait("go").build()
    async with flows:
        handles = [await flows.execute(waits, n) for n in range(10)]
        assert len(made[0]._records) == 3
        await handles[0].signal("go")
    assert not made[0]._records


@pytest.mark.alone
@pytest.mark.timeout(1200)
async def test_ew_207_memory_is_flat_over_many_flows(tmp_path: Path) -> None:
    count = scaled(600, 50_000)
    flows = Workflows(f"sqlite:///{tmp_path}/flows.db", concurrency=50)
    names = ("reserve", "charge", "ship")
    order = workflow("order").step(*map(step, names)).build()

    async def nothing(ctx: StepContext[Any]) -> None:
        """A step."""

    room = asyncio.Semaphore(50)

    async def one() -> None:
        async with room:
            await (await flows.execute(order, None)).result(60)

    async def run(many: int) -> float:
        for _ in range(many // 100):
            await asyncio.gather(*(one() for _ in range(100)))
        return psutil.Process().memory_info().rss / 1e6

    flows.register_definition_consumer(order, dict.fromkeys(names, nothing))
    async with flows:
        size = await run(count // 2)
        objects = _objects()
        more_size = await run(count // 2)
        # Timers of waits that are over go when they would have rung.
        await eventually(lambda: _objects() - objects < count / 10)
    assert more_size - size < 30, f"{size:.0f} MB became {more_size:.0f} MB"


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_ew_191_parts_are_made_once_and_end_in_their_order(url: str) -> None:
    told: list[str] = []

    class Hand(FlowWorker):
        def stop_pulling(self) -> None:
            told.append(f"stop {self.queues[0].rpartition('.')[2]}")
            super().stop_pulling()

        async def run(self, **options: Any) -> None:
            try:
                await super().run(**options)
            finally:
                told.append(f"end {self.queues[0].rpartition('.')[2]}")

    class Watch(FlowWatch):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            told.append("watch")

        def stop(self) -> None:
            told.append("end watch")
            super().stop()

    class Producer(Ledger):
        def stop(self) -> None:
            told.append("end producer")
            super().stop()

    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(ctx: StepContext[Any]) -> None:
        begun.set()
        await go_on.wait()

    saga = Saga(define("a", name="order"), meanwhile={"a": hold})
    flows = Workflows(url, worker_class=Hand, queue_events_class=Watch, flow_producer_class=Producer)
    saga.join(flows)
    await flows.stop()
    assert told == [], "stopping what was never started is nothing"
    await flows.start()
    results = [asyncio.create_task((await flows.execute(saga.definition, None)).result(10)) for _ in range(3)]
    async with asyncio.timeout(10):
        await begun.wait()
    stopping = asyncio.create_task(flows.stop())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(stopping, 20)
    assert told == [
        "watch", "stop steps", "stop order", "end steps", "end order", "end watch", "end producer",
    ]  # fmt: skip
    assert saga.calls.count("a") >= 1
    ends = await asyncio.gather(*results, return_exceptions=True)
    assert all(isinstance(end, dict | ProviderStoppedError) for end in ends), "every waiter is settled"


async def test_who_stops_a_provider_that_is_being_stopped_waits_for_its_end(make_flows: MakeFlows) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(ctx: StepContext[Any]) -> None:
        begun.set()
        await go_on.wait()

    saga = Saga(define("a"), meanwhile={"a": hold})
    flows, other = make_flows(), make_flows()
    saga.join(flows)
    async with other:
        await flows.start()
        await flows.execute(saga.definition, None)
        async with asyncio.timeout(10):
            await begun.wait()
        first, second = (asyncio.create_task(flows.stop()) for _ in range(2))
        await asyncio.wait({second}, timeout=0.05)
        assert not second.done()
        go_on.set()
        await asyncio.wait_for(asyncio.gather(first, second), 10)
        assert await other.get_status("nobody") is FlowStatus.PENDING, "the client they share is let go of once"


async def test_ew_192_stopping_when_the_server_is_gone_is_quiet_and_bounded(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    unhandled: list[Any] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    server = ServerProcess(tmp_path / "flows.db")
    with server:
        saga = Saga(workflow("gone").wait("never").build())
        flows = Workflows(f"headrace://127.0.0.1:{server.port}", default_retry=QUICK)
        saga.join(flows)
        await flows.start()
        handle = await flows.execute(saga.definition, None)
        waiting = asyncio.create_task(handle.result())
        await asyncio.sleep(0)
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(15):
            await flows.stop()
            with pytest.raises(ProviderStoppedError):
                await waiting
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []


# -- what is told and replaced -----------------------------------------------------------------------------------------


async def test_metrics_are_told_of_flows_and_steps(make_flows: MakeFlows) -> None:
    told: list[tuple[Any, ...]] = []

    class Metrics:
        def __getattr__(self, hook: str) -> Any:
            return lambda *given: told.append((hook.removeprefix("on_"), *given))

    saga = Saga(define("a", "b", name="order"), failing={"b": 3})
    flows = make_flows(metrics=Metrics())
    saga.join(flows)
    async with flows:
        with pytest.raises(WorkflowStepError):
            await (await flows.execute(saga.definition, None, id="f")).result(10)
    assert {entry[1:3] for entry in told} == {("order", "f")}
    assert [(entry[0], entry[3] if len(entry) > 4 else None) for entry in told] == [
        ("flow_started", None), ("step_completed", "a"), *[("step_failed", "b")] * 3,
        ("step_completed", "a:rollback"), ("step_completed", ""), ("flow_ended", FlowStatus.FAILED),
    ]  # fmt: skip
    assert all(entry[-1] >= 0 for entry in told if entry[0] in ("step_completed", "flow_ended"))
    assert [str(entry[-1]) for entry in told if entry[0] == "step_failed"] == ["b failed"] * 3


async def test_a_metrics_hook_that_fails_or_is_missing_breaks_nothing(
    make_flows: MakeFlows, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def on_step_completed(self, *told: Any) -> None:
            raise OSError("no statsd")

    saga = Saga(define("a"))
    flows = make_flows(metrics=Broken(), logger=logging.getLogger("mine"))
    saga.join(flows)
    async with flows:
        assert await (await flows.execute(saga.definition, None)).result(10) == {"a": "a done"}
    assert {record.name for record in caplog.records if "on_step_completed failed" in record.message} == {"mine"}


async def test_queue_class_and_registry_are_the_users(make_flows: MakeFlows) -> None:
    limits: list[tuple[str, RateLimit]] = []

    class Noted(Queue):
        async def limit_rate(self, limit: RateLimit) -> None:  # type: ignore[override]
            limits.append((self.name, limit))

    registry = StepRegistry()
    saga = Saga(define("a", name="slow"))
    flows = make_flows(queue_class=Noted, step_registry=registry)
    saga.join(flows, rate_limit=RateLimit(5))
    async with flows:
        assert registry.has("slow", "a")
        assert flows.step_registry is registry
    assert limits == [("workflow.slow.steps", RateLimit(5))]


# -- threads -----------------------------------------------------------------------------------------------------------


def test_the_sync_facade_does_what_the_other_one_does(url: str) -> None:
    flows = Workflows(url, default_retry=QUICK)
    saga = Saga(workflow("asked").step(step("a")).wait("go").build())
    bad = Saga(define("a"), failing={"a": 3})
    threads: list[Any] = []

    async def note(ctx: StepContext[Any]) -> None:
        threads.append((threading.current_thread() is threading.main_thread(), current_meta()["tenant"]))

    saga._meanwhile = {"a": note}
    saga.join(flows)
    bad.join(flows)
    with pytest.raises(RuntimeError, match="does not run"):
        flows.sync().get_status("nobody")
    with flows.sync() as face:
        with propagate(tenant="t1"):
            flow = face.execute(saga.definition, None, id="f")
        with pytest.raises(JobTimeout):
            flow.result(timeout=0.01)
        flow.signal("go", 7)
        assert flow.result(timeout=10) == face.get_result("f") == {"a": "a done", "go": 7}
        assert flow.status() is face.get_handle("f").status() is face.get_status("f") is FlowStatus.COMPLETED
        assert [entry.kind for entry in flow.events()][-1] == "result"
        assert flow.timeline().bars[0].step == "a"
        assert not flow.cancel()
        assert [found.id for found in face.list("asked")] == ["f"]
        failed = face.execute(bad.definition, None)
        with pytest.raises(WorkflowStepError):
            failed.result(timeout=10)
        assert failed.retry().result(timeout=10) == {"a": "a done"}
    assert threads == [(False, "t1")]
    with pytest.raises(RuntimeError, match="does not run"):
        flow.status()


async def test_the_sync_facade_refuses_to_wait_for_its_own_loop(make_flows: MakeFlows) -> None:
    async with make_flows() as flows:
        with pytest.raises(RuntimeError, match=r"without \.sync"):
            flows.sync().get_status("f")
        assert await asyncio.to_thread(flows.sync().get_status, "f") is FlowStatus.PENDING


def test_who_waits_in_a_thread_is_told_when_another_one_leaves_the_face() -> None:
    class Nothing:
        loop: asyncio.AbstractEventLoop | None = None

        async def start(self) -> None:
            """It has nothing to start."""

        async def stop(self) -> None:
            """It forgets those who wait."""

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(ProviderStoppedError, match="by another thread"):
            face._run(forever())
        told.set()

    begun, told = threading.Event(), threading.Event()
    with SyncFacade(Nothing()) as face:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert begun.wait(10)
    assert told.wait(10)


async def test_a_provider_whose_workers_cannot_begin_says_why(url: str) -> None:
    class Broken(FlowWorker):
        async def _prepare(self) -> None:
            raise PermissionError("not here")

    flows = Workflows(url, worker_class=Broken)
    Saga(define("a")).join(flows)
    async with asyncio.timeout(10):
        with pytest.raises(PermissionError, match="not here"):
            await flows.start()
    with pytest.raises(ProviderStoppedError):
        await flows.get_status("f")


async def test_a_worker_that_dies_is_told_and_does_not_keep_the_provider_from_stopping(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Mortal(FlowWorker):
        async def run(self, **options: Any) -> None:
            await super().run(**options)
            raise OSError("gone")

    flows = Workflows(url, worker_class=Mortal)
    Saga(define("a")).join(flows)
    async with flows:
        pass
    assert flows.loop is None
    assert [record.message for record in caplog.records if "worker failed" in record.message] == [
        "a workflow worker failed: gone"
    ] * 2


def test_a_face_whose_start_fails_leaves_no_thread() -> None:
    flows = Workflows("sqlite:////nowhere/at/all/flows.db")
    with pytest.raises(Exception, match="nowhere"), flows.sync():
        pass
    assert flows.loop is None
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-background"]


async def test_an_option_that_execute_does_not_know_is_named(make_flows: MakeFlows) -> None:
    async with make_flows() as flows:
        with pytest.raises(TypeError, match="'timeot'; there are: id, idempotency_key, timeout"):
            await flows.execute(define("a"), None, timeot=5)  # type: ignore[call-arg]


async def test_what_the_store_would_refuse_half_way_is_refused_at_the_beginning(make_flows: MakeFlows) -> None:
    impossible = {
        "longer than a year": workflow("w").step(step("a")).sleep("nap", "366d").build(),
        "tried too often": workflow("w").step(step("a"), step("b", retry=Retry(997))).build(),
        "more than 900": define("a", [f"s{n}" for n in range(901)]),
    }
    async with make_flows() as flows:
        for text, definition in impossible.items():
            with pytest.raises(InvalidCommand, match=text):
                await flows.execute(definition, None)
        for option, text in (
            ({"on_timeout": "cancle"}, "cancle.*onTimeout"),
            ({"priority": "high"}, "priority"),
            ({"timeout": "365d"}, "longer than a year; 0 is no timeout"),  # and a stall is added
        ):
            with pytest.raises(InvalidCommand, match=text):
                await flows.execute(define("a"), None, **option)  # type: ignore[arg-type]
        await flows.execute(workflow("w").step(step("a"), step("b", retry=Retry(996))).build(), None)


async def test_a_flow_whose_log_could_not_be_read_any_more_fails_instead(
    make_flows: MakeFlows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MOST_LOG_BYTES", 3000)
    saga = Saga(define("a", "b", "c"), results=dict.fromkeys("abc", "x" * 1000))
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        with pytest.raises(WorkflowStepError, match=r"result of step 'c': .* more than 3000 bytes"):
            await handle.result(10)
        with pytest.raises(PayloadError, match="too many"):
            await flows.execute(saga.definition, "x" * 10_485_761)
    assert saga.calls == ["a", "b", "c", "undo b", "undo a", "error"]


async def test_neighbours_that_fill_the_log_together_fail_the_flow_too(
    make_flows: MakeFlows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them fits when it begins."""
    monkeypatch.setattr(context, "MOST_LOG_BYTES", 2500)
    together = asyncio.Barrier(3)

    async def meet(ctx: StepContext[Any]) -> None:
        async with asyncio.timeout(10):
            await together.wait()

    saga = Saga(define(["a", "b", "c"]), results=dict.fromkeys("abc", "x" * 1000), meanwhile=dict.fromkeys("abc", meet))
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        with pytest.raises(WorkflowStepError, match="more than 2500 bytes"):
            await handle.result(10)
    assert len([call for call in saga.calls if call.startswith("undo")]) == 2


async def test_a_step_that_is_tried_often_does_not_fill_the_log_with_tracebacks(make_flows: MakeFlows) -> None:
    """They would take the room of the results, and all of them are read for every further attempt."""
    tried = step("tried", retry=Retry(100, backoff="fixed", delay=0.001))
    definition, flows = workflow("often").step(tried).build(), make_flows()

    async def attempt(ctx: StepContext[Any]) -> int:
        if ctx.attempt < 100:
            raise ValueError("not yet\n" * 2000)
        return ctx.attempt

    flows.register_definition_consumer(definition, {"tried": attempt})
    async with flows:
        handle = await flows.execute(definition, None, timeout=0)
        assert await handle.result(60) == {"tried": 100}
        log = [entry async for entry in handle.events()]
        size = sum(len(step.body) for step in (await flows.look(handle.id)).steps)
    errors = [entry.body.error for entry in log if entry.kind == "attempt-failed" and entry.body.error is not None]
    assert (len(errors), size < 1.5 * 1024 * 1024) == (99, True)
    assert all("not yet" in error.message for error in errors)
    assert ("not yet" in errors[0].traceback, errors[-1].traceback) == (True, "")


async def test_a_signal_for_which_the_log_has_no_room_is_refused(
    make_flows: MakeFlows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MOST_LOG_BYTES", 2500)
    async with make_flows() as flows:
        handle = await flows.execute(workflow("large").wait("go").wait("on").build(), None)
        with pytest.raises(Refused, match=r"payload of signal 'go': .* more than 2500 bytes"):
            await handle.signal("go", "x" * 2000)
        await handle.signal("go", "x" * 900)
        with pytest.raises(Refused, match="more than 2500 bytes"):
            await handle.signal("on", "x" * 900)


async def test_a_plain_function_may_give_what_is_still_to_be_awaited(make_flows: MakeFlows) -> None:
    """Without that a rollback would count as made, and nothing be undone."""
    calls: list[str] = []

    async def note(what: str) -> str:
        calls.append(what)
        return what

    async def fail(ctx: StepContext[Any]) -> None:
        raise UnrecoverableError("no")

    flows, definition = make_flows(), define("charge", "ship")
    flows.register_definition_consumer(
        definition,
        {"charge": (lambda ctx: note("charge"), lambda ctx: note("refund")), "ship": fail},
        on_error=lambda ctx, error: note("error"),
    )
    async with flows:
        with pytest.raises(WorkflowStepError, match="Step 'ship' failed"):
            await (await flows.execute(definition, None)).result(10)
    assert calls == ["charge", "refund", "error"]


async def test_who_is_impatient_does_not_wait_for_a_slot(
    make_flows: MakeFlows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_MOST_WAITING", 1)
    monkeypatch.setattr(watch, "_SLICE", 60.0)
    async with make_flows() as flows:
        handle = await flows.execute(workflow("patience").wait("never").build(), None, timeout=0)
        patient = asyncio.create_task(handle.result())
        await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            with pytest.raises(JobTimeout):
                await handle.result(timeout=0.05)
        patient.cancel()


async def test_a_flow_that_takes_itself_back_for_long_says_why_it_failed(
    make_flows: MakeFlows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its waiters are sent away when its time is over; it did not fail because of that."""
    go_on = asyncio.Event()

    async def hold(ctx: StepContext[Any]) -> None:
        await go_on.wait()

    async def soon(self: FlowWatch, found: FlowFound) -> float:
        return time.monotonic() + 0.05

    monkeypatch.setattr(FlowWatch, "_own_deadline", soon)
    saga = Saga(define("a", "b"), failing={"b": 9}, meanwhile={"undo a": hold})
    flows = make_flows()
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        await eventually(lambda: "undo a" in saga.calls)
        monkeypatch.setattr(watch, "_SLICE", 0.01)
        with pytest.raises(WorkflowStepError, match="Step 'b' failed"):
            await handle.result()
        assert await handle.status() is FlowStatus.COMPENSATING
        go_on.set()


async def test_a_start_during_a_stop_waits_for_it_and_starts_again(make_flows: MakeFlows) -> None:
    saga = Saga(define("a"))
    flows = make_flows()
    saga.join(flows)
    await flows.start()
    stopping = asyncio.create_task(flows.stop())
    await asyncio.sleep(0)
    await flows.start()
    await stopping
    assert await (await flows.execute(saga.definition, None)).result(10) == {"a": "a done"}
    await flows.stop()


async def test_a_retry_from_the_shell_reaches_the_workers_of_a_provider_with_a_prefix(make_flows: MakeFlows) -> None:
    saga = Saga(define("a", version=2), failing={"a": 3})
    flows, shell = make_flows(queue_prefix="ours"), make_flows()
    saga.join(flows)
    async with flows, shell:
        handle = await flows.execute(saga.definition, None)
        with pytest.raises(WorkflowStepError):
            await handle.result(10)
        assert await (await shell.retry(handle.id)).result(10) == {"a": "a done"}


async def test_a_retry_whose_id_somebody_else_uses_is_refused(make_flows: MakeFlows) -> None:
    saga = Saga(define("a"), failing={"a": 3})
    flows = make_flows()
    saga.join(flows)
    async with flows:
        failed = await flows.execute(saga.definition, None, id="batch~1")
        with pytest.raises(WorkflowStepError):
            await failed.result(10)
        await (await flows.execute(saga.definition, None, id="batch~2")).result(10)
        with pytest.raises(WorkflowError, match="'batch~2' belongs to another flow"):
            await failed.retry()


async def test_a_key_of_the_context_that_log_records_have_of_their_own_breaks_no_logger(make_flows: MakeFlows) -> None:
    async def speak(ctx: StepContext[Any]) -> None:
        ctx.log.warning("said")

    saga = Saga(define("a"), meanwhile={"a": speak})
    flows = make_flows()
    saga.join(flows)
    async with flows:
        with propagate(name="ada", message="hi", args=1):
            handle = await flows.execute(saga.definition, None)
        assert await handle.result(10) == {"a": "a done"}


@pytest.mark.parametrize("remembered", [0, 256])
async def test_the_context_of_a_flow_is_the_same_wherever_its_steps_run(make_flows: MakeFlows, remembered: int) -> None:
    """A provider that remembers nothing reads it as one in another process does."""
    saga = Saga(define("a"))
    flows = make_flows(max_flow_states=remembered)
    saga.join(flows)
    user = UUID(int=7)
    async with flows:
        with propagate(user=user, roles={"admin"}, account=6_500_000_000):
            await (await flows.execute(saga.definition, None)).result(10)
        assert saga.contexts["a"].meta == {"user": str(user), "roles": ["admin"], "account": 6_500_000_000}
        for strange in ({"user": object()}, {"user": 2**64}, {7: "user"}):
            with propagate(strange), pytest.raises(InvalidCommand, match="the context of a flow"):
                await flows.execute(saga.definition, None)


async def test_who_waits_long_asks_less_and_less_and_hears_at_once(
    make_flows: MakeFlows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SLICE", 0.01)
    asked: list[float] = []

    class Watch(FlowWatch):
        async def _ask(self, given: Any) -> Any:
            asked.append(given.timeout)
            return await super()._ask(given)

    flows = make_flows(queue_events_class=Watch)
    saga = Saga(workflow("long").wait("go").build())
    saga.join(flows)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        waiting = asyncio.create_task(handle.result())
        await eventually(lambda: len(asked) == 6)
        await handle.signal("go", 1)
        assert await asyncio.wait_for(waiting, 5) == {"go": 1}
    assert asked[:6] == pytest.approx([10, 20, 40, 80, 160, 320])


async def test_without_on_complete_a_flow_ends_with_its_last_step(make_flows: MakeFlows) -> None:
    flows = make_flows()
    plain = workflow("plain").step(step("a")).parallel(step("b"), step("c")).build()

    async def echo(ctx: StepContext[Any]) -> Any:
        return None if ctx.step == "b" else ctx.step

    flows.register_definition_consumer(plain, dict.fromkeys("abc", echo))
    async with flows:
        handle = await flows.execute(plain, None)
        assert await handle.result(10) == {"a": "a", "b": None, "c": "c"}
        kinds = [entry.kind for entry in (await flows.look(handle.id)).steps]
    assert kinds == ["started", "completed", "completed", "completed", "result"]


# -- whatever a handler raises, whatever it returns --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "rollback", "complete", "error"])
@pytest.mark.parametrize(
    "raised",
    [SystemExit(3), asyncio.CancelledError("its own"), BaseExceptionGroup("two", [SystemExit(1)]), StalledError("far")],
    ids=lambda error: type(error).__name__,
)
async def test_every_kind_of_error_has_the_same_attempts(where: str, raised: BaseException) -> None:
    """A step that asks an event whose worker died meets a StalledError that is none of its own."""
    calls: list[str] = []

    async def call(name: str, is_wrong: bool) -> None:
        calls.append(name)
        if is_wrong:
            raise raised

    flows = Workflows("memory://any-error", default_retry=Retry(2, backoff="fixed", delay=0.001))
    first, second = step("first"), step("second", retry=Retry(1) if where != "step" else None)
    flows.register_definition_consumer(
        workflow("any-error").step(first).step(second).build(),
        {
            "first": (lambda ctx: call("first", False), lambda ctx: call("rollback", where == "rollback")),
            "second": lambda ctx: call("step", where == "step") if where in ("step", "complete") else 1 / 0,
        },
        on_complete=lambda ctx: call("complete", where == "complete"),
        on_error=lambda ctx, error: call("error", where == "error"),
    )
    async with flows:
        handle = await flows.execute(flows.definition_of("any-error", 1), None)  # type: ignore[arg-type]
        with pytest.raises((WorkflowError, WorkflowStepError, WorkflowRollbackError)):
            await handle.result(10)
        attempts = [entry.body.error async for entry in handle.events() if entry.kind == "attempt-failed"]
    assert calls.count(where) == 2
    if where in ("step", "rollback"):
        assert [error.type for error in attempts if error is not None] == [type(raised).__name__]


class _Fare(msgspec.Struct):
    price: int


class _Booking(BaseModel):
    seats: list[int]


class _Seat(TypedDict):
    row: int


async def test_types_of_data_and_results_may_be_typed_dicts() -> None:
    seat = step("seat", _Seat)
    ride = workflow("ride", data=_Seat, result=_Seat).step(seat).build()
    flows = Workflows("memory://typed-dicts")
    flows.register_definition_consumer(ride, {"seat": lambda ctx: ctx.data}, on_complete=lambda ctx: ctx.result(seat))
    async with flows:
        assert await (await flows.execute(ride, {"row": 7})).result(10) == {"row": 7}
        with pytest.raises(PayloadError, match=r"data of workflow 'ride': Expected `int`, got `str` at \$\.row"):
            await flows.execute(ride, {"row": "seven"})  # type: ignore[typeddict-item]
        booked: Any = workflow("booked", data=_Booking).step(seat).build()
        with pytest.raises(
            PayloadError, match=r"data of workflow 'booked': Input should be .* integer at \$\.seats\.0"
        ):
            await flows.execute(booked, {"seats": ["x"]})


async def test_an_object_whose_fields_are_wrong_is_refused_where_it_is_given() -> None:
    """Else the step is done, and all that read its result fail: its own rollback, too."""
    wrong: Any = "much"
    fare = step("fare", _Fare)
    ride = workflow("ride", data=_Fare).step(fare).build()
    flows = Workflows("memory://wrong-fields", default_retry=QUICK)
    flows.register_definition_consumer(ride, {"fare": lambda ctx: _Fare(wrong)})
    async with flows:
        with pytest.raises(PayloadError, match=r"data of workflow 'ride': Expected `int`, got `str` at \$\.price"):
            await flows.execute(ride, _Fare(wrong))
        with pytest.raises(WorkflowStepError, match=r"result of step 'fare': Expected `int`, got `str` at \$\.price"):
            await (await flows.execute(ride, _Fare(5))).result(10)


async def test_a_result_that_is_no_data_is_called_by_its_name() -> None:
    flows = Workflows("memory://no-data", default_retry=QUICK)
    flows.register_definition_consumer(define("a", name="no-data"), {"a": lambda ctx: object()})
    async with flows:
        handle = await flows.execute(define("a", name="no-data"), None)
        with pytest.raises(WorkflowStepError, match="result of step 'a' may hold plain values only, not"):
            await handle.result(10)


async def test_a_rollback_that_hangs_is_ended_by_a_forced_cancel_of_its_job(make_flows: MakeFlows) -> None:
    hangs = asyncio.Event()

    async def hang(ctx: StepContext[Any]) -> None:
        hangs.set()
        await asyncio.Event().wait()

    flows = make_flows(default_retry=Retry(1))
    order = define("charge", "ship", name="hanging")
    flows.register_definition_consumer(order, {"charge": (lambda ctx: 1, hang), "ship": lambda ctx: 1 / 0})
    async with flows:
        handle = await flows.execute(order, None, id="order-2", timeout=0)
        await asyncio.wait_for(hangs.wait(), 10)
        assert (
            await Queue(flows.client, "workflow.hanging.steps").job("order-2-step-charge:rollback").cancel(force=True)
        )
        with pytest.raises(WorkflowRollbackError) as failed:
            await handle.result(10)
        assert [str(error) for error in failed.value.rollback_errors] == ["JobRemoved: its job was cancelled"]
        assert await handle.status() is FlowStatus.FAILED
