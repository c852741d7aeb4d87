"""The test kit: EW-045, EW-047, EW-051, EW-053, EW-054 for events without a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.errors import (
    EventCancelledError,
    EventTimeoutError,
    InvalidCommand,
    PayloadError,
    ProviderStoppedError,
    RemoteError,
)
from headrace.events import EventContext, Events
from headrace.events.testing import TestEventProvider
from headrace.propagation import Retry
from tests.events.conftest import Order, Verdict, check, echo, placed
from tests.waiting import until


@pytest.fixture
def provider() -> TestEventProvider:
    return TestEventProvider()


@pytest.fixture
async def events(provider: TestEventProvider) -> AsyncIterator[Events]:
    made = Events(provider=provider.for_client)
    yield made
    await made.stop()


async def test_ew_045_what_nobody_handles_resolves_with_nothing(events: Events, provider: TestEventProvider) -> None:
    async with events:
        assert await events.emit(check, Order()) is None
    provider.assert_emitted(check, Order(), times=1)
    with pytest.raises(AssertionError, match=r"order\.placed was emitted 0 times"):
        provider.assert_emitted(placed)
    with pytest.raises(AssertionError, match="all of its data"):
        provider.assert_emitted(check, Order("other"))


async def test_ew_046_047_all_handlers_are_called_in_order_and_the_first_answers(events: Events) -> None:
    seen: list[str] = []

    @events.on(echo)
    async def first(ctx: EventContext[Any]) -> str:
        seen.append("default")
        return "answer"

    @events.on(echo, group="later")
    def second(ctx: EventContext[Any]) -> None:
        seen.append("later")
        raise ValueError

    async with events:
        assert await events.emit(echo, 1) == "answer"
    assert seen == ["default", "later"]


async def test_ew_051_053_keys_run_once_and_stopping_rejects_who_waits(
    events: Events, provider: TestEventProvider
) -> None:
    runs: list[int] = []
    events.on(echo)(lambda ctx: runs.append(1))
    async with events:
        await events.emit(echo, 1, key="k")
        assert await events.emit(echo, 1, key="k") is None
        waiting = [events.emit(echo, 1, delay=60), events.emit(echo, 1, delay=60, key="later")]
    assert len(runs) == 1
    for subscription in waiting:
        with pytest.raises(ProviderStoppedError):
            await subscription


async def test_stopping_does_not_wait_for_what_is_not_due(events: Events) -> None:
    asked = asyncio.Event()

    @events.on(check)
    async def ask_later(ctx: EventContext[Order]) -> Any:
        later = ctx.emit(echo, 1, delay=60)
        asked.set()
        return await later

    async with asyncio.timeout(10), events:
        waiting = events.emit(check, Order())
        await asked.wait()
    with pytest.raises(RemoteError, match="stopping"):
        await waiting


async def test_ew_054_time_passes_when_the_test_says_so(events: Events, provider: TestEventProvider) -> None:
    seen: list[Any] = []
    events.on(placed)(lambda ctx: seen.append(ctx.data.id))
    async with events:
        events.emit(placed, Order("later"), delay=60)
        now = events.emit(placed, Order("now"))
        assert not now.is_settled
        assert provider.pending_count == 2
        await provider.advance(59)
        assert (seen, provider.pending_count) == (["now"], 1)
        await provider.advance(1)
        assert (seen, provider.pending_count) == (["now", "later"], 0)
        gone = events.emit(echo, 1, delay=5, key="k")
        assert await events.cancel(echo, "k") is True
        assert await events.cancel(echo, "k") is False
        with pytest.raises(EventCancelledError):
            await gone
        impatient = events.emit(echo, 1, delay=60, timeout=10)
        await provider.advance(10)
        with pytest.raises(EventTimeoutError):
            await impatient


async def test_schedules_fire_by_the_virtual_clock(events: Events, provider: TestEventProvider) -> None:
    seen: list[str] = []
    events.on(placed)(lambda ctx: seen.append(ctx.event_id.split("@")[0]))
    async with events:
        await events.schedule_event(placed, "hourly", every=3600, payload=Order())
        await events.schedule_event(placed, "daily", cron="0 0 * * *", payload=Order())
        await provider.advance("1d")
        assert (seen.count("hourly"), seen.count("daily")) == (24, 1)
        assert await events.unschedule_event(placed, "hourly") is True
        assert len(await events.get_schedules(placed)) == 1
        await provider.advance("1d")
    assert (seen.count("hourly"), seen.count("daily")) == (24, 2)


async def test_what_production_refuses_is_refused_here_too(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    events.on(echo)(lambda ctx: "fine")
    events.on(echo, group="later")(lambda ctx: 1 / 0)
    with pytest.raises(ProviderStoppedError, match="not started"):
        events.emit(echo, 1)
    async with events:
        for key in ("a:b", ""):
            with pytest.raises(InvalidCommand, match="key"):
                events.emit(echo, 1, key=key)
        for wrong in ({}, {"cron": "* * * * *", "every": 1}, {"every": 0}, {"cron": "* * * *"}):
            with pytest.raises(InvalidCommand):
                await events.schedule_event(echo, "s", payload=1, **wrong)
        assert await events.emit(echo, 1) == "fine"
    assert "ZeroDivisionError" in caplog.text


async def test_checks_hooks_and_context_work_as_in_production(events: Events) -> None:
    @events.on(check)
    async def handle(ctx: EventContext[Order]) -> Any:
        await ctx.emit(placed, ctx.data)
        return Verdict(ok=True) if ctx.data.total else {"ok": "perhaps"}

    async with events:
        assert await events.emit(check, Order()) == Verdict(ok=True)
        with pytest.raises(RemoteError, match="PayloadError"):
            await events.emit(check, Order(total=0))
        with pytest.raises(PayloadError):
            events.emit(check, {"id": 1})


@pytest.mark.parametrize("where", ["here", "in production"])
async def test_an_emitter_hears_here_what_it_hears_in_production(
    where: str, provider: TestEventProvider, caplog: pytest.LogCaptureFixture
) -> None:
    make = {"provider": provider.for_client} if where == "here" else {"default_retry": Retry(1)}
    events = Events("memory://emitters", **make)

    @events.on(check)
    async def answer(ctx: EventContext[Order]) -> Verdict:
        if not ctx.data.total:
            raise ValueError("no total")
        return Verdict(ok=True)

    @events.on(placed)
    async def fail(ctx: EventContext[Order]) -> None:
        raise ValueError("no room")

    async with events:
        first = events.emit(check, Order(), key="k")
        assert [await first, await events.emit(check, Order(), key="k")] == [Verdict(ok=True)] * 2
        for key in (None, "failed", "failed"):
            with pytest.raises(RemoteError, match="no total") as caught:
                await events.emit(check, Order(total=0), key=key)
            assert (caught.value.type_name, caught.value.attempt) == ("ValueError", 1)
        assert await events.emit(placed, Order(), delay=60, key="later") is None
        assert await events.cancel(placed, "later") is True
        assert await events.emit(placed, Order()) is None
        await until(lambda: "no room" in caplog.text)
