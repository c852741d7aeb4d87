"""EW-030 to EW-044: definitions, the registry, starting and stopping."""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
from pydantic import BaseModel

from headrace.errors import InvalidCommand, PayloadError, ProviderStoppedError, RemoteError, UnknownEventError
from headrace.events import Emitter, EventContext, EventRegistry, Events, event
from headrace.propagation import Retry
from tests.events.conftest import Order, Verdict, check, placed
from tests.waiting import until


def test_ew_030_the_registry_keeps_order_and_may_be_empty() -> None:
    assert len(EventRegistry().build()) == 0
    built = EventRegistry().event(placed).event(check).build()
    assert built.names == ("order.placed", "fraud.check")


def test_ew_031_a_duplicate_name_is_refused_by_name() -> None:
    with pytest.raises(InvalidCommand, match=r"order\.placed"):
        EventRegistry().event(placed).event(event("order.placed", int))


def test_ew_032_use_composes_and_a_built_catalogue_does_not_change() -> None:
    registry = EventRegistry().use(lambda r: r.event(placed))
    built = registry.build()
    registry.event(check)
    assert built.names == ("order.placed",)
    assert len(registry.build()) == 2


async def test_ew_033_unknown_events_are_refused_before_any_io() -> None:
    events = Events("headrace://localhost:1", registry=EventRegistry().event(placed).build())
    with pytest.raises(UnknownEventError, match=r"fraud\.check.*order\.placed"):
        events.emit(check, Order())
    with pytest.raises(UnknownEventError):
        events.on("no.such")


async def test_ew_034_036_038_concurrent_starts_ready_every_handler_once_and_stop_is_idempotent(events: Events) -> None:
    for group in ("a", "b"):
        events.on(placed, group=group)(lambda ctx: None)
    await asyncio.gather(events.start(), events.start())
    workers = events.provider.queues._workers
    assert sorted(workers) == ["event.order.placed.a", "event.order.placed.b"]
    await events.start()
    await events.stop()
    await events.stop()
    assert not events.provider.is_started


async def test_ew_035_failing_handlers_are_told_together_and_a_new_start_tries_again(events: Events) -> None:
    for group in ("a", "b"):
        events.on(placed, group=group)(lambda ctx: None)
    subscribe = events.provider.subscribe
    fails = True

    async def flaky(*args: Any, **options: Any) -> None:
        if fails:
            raise OSError("no room")
        await subscribe(*args, **options)

    events.provider.subscribe = flaky  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as caught:
        await events.start()
    assert len(caught.value.exceptions) == 2
    fails = False
    await events.start()
    assert len(events.provider.queues._workers) == 2


async def test_a_start_that_is_cancelled_or_stopped_half_way_leaves_nothing_behind(url: str) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    for n in range(30):
        events = Events(url)
        events.on(check)(lambda ctx: Verdict(ok=True))
        starting = asyncio.create_task(events.__aenter__())
        await asyncio.sleep(n / 5000)
        if n % 2:
            starting.cancel()
        else:
            await events.stop()
        await asyncio.gather(starting, return_exceptions=True)
        await events.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        if not starting.cancelled() and (error := starting.exception()) is not None:
            assert isinstance(error, ProviderStoppedError)
    del events, starting
    gc.collect()
    assert complaints == []


async def test_ew_037_a_late_handler_that_fails_reaches_the_callback(
    memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[BaseException] = []

    def told(error: BaseException) -> None:
        seen.append(error)
        raise RuntimeError("ignored")

    events = Events(memory, on_registration_error=told)
    async with events:
        events.on(placed, no_such_option=1)(lambda ctx: None)
        await until(lambda: seen)
        assert isinstance(seen[0], TypeError)
    assert [record for record in caplog.records if record.levelno == logging.ERROR]


def test_ew_039_a_service_can_depend_on_the_emitter_alone() -> None:
    emitter: Emitter = Events()
    assert emitter
    assert {name for name in vars(Emitter) if not name.startswith("_")} == {"emit"}


async def test_ew_040_bad_data_is_refused_where_it_is_emitted_and_where_it_is_handled(events: Events) -> None:
    ran: list[Any] = []
    errors: list[BaseException] = []
    strict = event("strict", Order, Verdict)
    loose = event("strict", dict, Verdict)
    events.on(strict, on_error=lambda ctx, error: errors.append(error))(ran.append)
    emitter = Events(events.url)
    async with events, emitter:
        with pytest.raises(PayloadError, match=r"event strict.*\$\.total"):
            events.emit(strict, {"id": "x", "total": "many"})
        with pytest.raises(RemoteError, match=r"PayloadError.*strict.*\$\.total"):
            await emitter.emit(loose, {"id": "x", "total": "many"})
    assert not ran
    assert len(errors) == 1, "no retry would help"


async def test_ew_041_a_bad_result_fails_the_job(events: Events) -> None:
    seen: list[str] = []
    failing = event("bad.result", Order, Verdict)

    @events.on(
        failing, on_success=lambda ctx, result: seen.append("success"), on_error=lambda ctx, error: seen.append("error")
    )
    async def handle(ctx: EventContext[Order]) -> Any:
        return {"ok": "perhaps"}

    async with events:
        with pytest.raises(RemoteError, match=r"result of event bad\.result.*\$\.ok"):
            await events.emit(failing, Order())
    assert seen == ["error"]


async def test_ew_042_hooks_run_after_success_and_after_failure(events: Events) -> None:
    seen: list[Any] = []

    async def succeeded(ctx: EventContext[Any], result: Any) -> None:
        seen.append(("success", result))

    @events.on(check, on_success=succeeded, on_error=lambda ctx, error: seen.append(("error", str(error))))
    async def handle(ctx: EventContext[Order]) -> Verdict:
        if ctx.data.total < 0:
            raise ValueError("negative")
        return Verdict(ok=True)

    async with Events(events.url, default_job_options={"attempts": 1}) as emitter, events:
        assert await emitter.emit(check, Order()) == Verdict(ok=True)
        with pytest.raises(RemoteError, match="ValueError: negative"):
            await emitter.emit(check, Order(total=-1))
    assert seen == [("success", {"ok": True}), ("error", "negative")]


async def test_hooks_are_told_of_every_failure_and_not_of_a_handler_that_is_stopped(url: str) -> None:
    seen: list[str] = []
    failed: list[str] = []

    class Metrics:
        def on_job_failed(self, event_name: str, job_id: str, error: BaseException) -> None:
            failed.append(type(error).__name__)

    events = Events(url, metrics=Metrics(), default_retry=Retry(1))
    errors: dict[str, type[BaseException]] = {"exit": SystemExit, "cancel": asyncio.CancelledError}
    begun = asyncio.Event()

    @events.on(check, on_error=lambda ctx, error: seen.append(type(error).__name__), drain=0)
    async def handle(ctx: EventContext[Order]) -> Verdict:
        if ctx.data.id in errors:
            raise errors[ctx.data.id]
        begun.set()
        await asyncio.sleep(60)
        raise AssertionError

    async with events:
        for name in errors:
            with pytest.raises(RemoteError):
                await events.emit(check, Order(name))
        events.emit(check, Order("slow"))
        await begun.wait()
    assert seen == failed == ["SystemExit", "CancelledError"]


async def test_what_a_hook_raises_is_logged_and_changes_nothing(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    async def broken(ctx: EventContext[Any] | None, told: Any) -> None:
        raise RuntimeError("no mail today")

    @events.on(check, on_success=broken, on_error=broken)
    async def handle(ctx: EventContext[Order]) -> Verdict:
        ran.append(ctx.data.total)
        if ctx.data.total < 0:
            raise ValueError("negative")
        return Verdict(ok=True)

    async with Events(events.url, default_job_options={"attempts": 1}) as emitter, events:
        assert await emitter.emit(check, Order(total=1)) == Verdict(ok=True)
        with pytest.raises(RemoteError, match="ValueError: negative"):
            await emitter.emit(check, Order(total=-1))
    assert ran == [1, -1]
    assert caplog.text.count("a hook of an event handler failed") == 2


async def test_ew_043_the_definition_derives_the_key_and_an_explicit_one_wins(events: Events) -> None:
    keyed = event("keyed", Order, key=lambda order: order.id)
    async with events:
        await events.emit(keyed, Order("k1"))
        await events.emit(keyed, Order("k1"), key="mine")
        jobs = await events.provider.queues.get_queue("keyed").get_jobs()
        assert [job.custom_id for job in jobs] == ["k1@event.keyed", "mine@event.keyed"]


def test_ew_044_no_result_type_means_fire_and_forget() -> None:
    assert not event("a", Order).expects_result
    assert not event("a", Order, type(None)).expects_result
    assert event("a", Order, Verdict).expects_result


@dataclass
class Plain:
    total: int


class Typed(TypedDict):
    total: int


class Model(BaseModel):
    total: int


@pytest.mark.parametrize("kind", [Plain, Typed, Model, Order])
def test_data_is_read_as_the_type_that_was_declared(kind: Any) -> None:
    definition = event("typed", kind)
    read = definition.read_data({"total": 3})
    assert (read["total"] if kind is Typed else read.total) == 3
    with pytest.raises(PayloadError, match=r"typed.*total"):
        definition.read_data({"total": "many"})


@pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 201])
def test_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidCommand):
        event(name)


def test_what_is_no_data_is_called_by_the_name_of_its_event() -> None:
    question = event("what.is", object, object)
    with pytest.raises(
        InvalidCommand, match=r"data of event what\.is may hold plain values only, not builtins\.object"
    ):
        question.encode_data(object())
    with pytest.raises(InvalidCommand, match=r"result of event what\.is may hold plain values only"):
        question.check_result(object())
