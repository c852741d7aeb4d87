"""EW-016 to EW-029 (and X20): what travels with an event, over any number of hops."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from headrace.errors import InvalidCommand, RemoteError
from headrace.events import EventContext, Events, current_meta, event, propagate
from tests.events.conftest import Order, check, echo, placed
from tests.waiting import until

hop_1 = event("hop.one", int, object)
hop_2 = event("hop.two", int, object)
hop_3 = event("hop.three", int, object)


async def test_ew_016_017_the_context_tells_of_the_event_and_is_immutable(events: Events) -> None:
    seen: list[EventContext[Order]] = []
    events.on(placed)(seen.append)
    async with events:
        with propagate(correlation_id="r"):
            subscription = events.emit(placed, Order("o7"))
        await until(lambda: seen)
    (ctx,) = seen
    assert (ctx.event_id, ctx.event_name, ctx.data) == (subscription.event_id, "order.placed", Order("o7"))
    assert (ctx.correlation_id, ctx.subscription_id) == ("r", subscription.id)
    assert ctx.causation_id is None
    assert ctx.attempt == 1
    assert ctx.timestamp > 1_700_000_000_000
    with pytest.raises(FrozenInstanceError):
        ctx.event_id = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        ctx.meta["x"] = 1  # type: ignore[index]


async def test_a_key_that_log_records_have_of_their_own_breaks_no_logger(events: Events) -> None:
    @events.on(echo)
    async def handle(ctx: EventContext[Any]) -> Any:
        ctx.log.warning("said")
        return dict(ctx.meta)

    async with events:
        with propagate(name="ada", message="hi", tenant="t1"):
            meta = await events.emit(echo, 1, timeout=5)
    assert meta == {"name": "ada", "message": "hi", "tenant": "t1"}


async def test_ew_018_the_logger_is_named_after_the_event_and_carries_the_meta(events: Events) -> None:
    seen: list[EventContext[Any]] = []
    events.on(placed)(seen.append)
    events.on(placed, group="named", logger_name="mine")(seen.append)
    async with events:
        with propagate(tenant="t1"):
            await events.emit(placed, Order())
        await until(lambda: len(seen) == 2)
    assert {ctx.log.logger.name for ctx in seen} == {"Event:order.placed", "mine"}
    assert all(ctx.log.extra == {"tenant": "t1"} for ctx in seen)


def hops(events: Events, seen: list[Any], ambient: bool = False) -> None:
    """Three handlers, each of which asks the next one."""
    for here, onward in ((hop_1, hop_2), (hop_2, hop_3), (hop_3, None)):

        async def handle(ctx: EventContext[int], onward: Any = onward) -> None:
            seen.append((ctx.event_name, ctx.event_id, ctx.causation_id, dict(current_meta())))
            if onward is not None:
                await (events if ambient else ctx).emit(onward, ctx.data)

        events.on(here)(handle)


@pytest.mark.parametrize("ambient", [False, True])
async def test_ew_019_021_022_028_116_x20_the_chain_keeps_causes_trace_and_keys(events: Events, ambient: bool) -> None:
    seen: list[Any] = []
    hops(events, seen, ambient)
    async with events:
        with propagate(correlation_id="r", trace_id="t" * 32, span_id="0" * 16, user_id="u1"):
            await events.emit(hop_1, 1)
    metas = [meta for *_, meta in seen]
    assert [meta["traceId"] for meta in metas] == ["t" * 32] * 3
    assert [meta["parentSpanId"] for meta in metas] == ["0" * 16, metas[0]["spanId"], metas[1]["spanId"]]
    assert len({meta["spanId"] for meta in metas}) == 3
    assert all((meta["correlationId"], meta["user_id"]) == ("r", "u1") for meta in metas)
    assert [cause for _, _, cause, _ in seen] == [None, seen[0][1], seen[1][1]]


async def test_ew_020_a_chained_emission_passes_its_delay(events: Events) -> None:
    @events.on(hop_1)
    async def handle(ctx: EventContext[int]) -> None:
        await ctx.emit(placed, Order(), delay=3600)

    async with events:
        await events.emit(hop_1, 1)
        counts = await events.provider.queues.get_queue("order.placed").counts()
    assert counts["delayed"] == 1


async def test_ew_023_two_chains_side_by_side_do_not_mix(events: Events) -> None:
    seen: list[Any] = []
    hops(events, seen)

    async def chain(tenant: str) -> None:
        with propagate(tenant=tenant, trace_id=tenant * 32):
            await events.emit(hop_1, 1)

    async with events:
        await asyncio.gather(chain("a"), chain("b"))
    assert sorted((name, meta["tenant"]) for name, _, _, meta in seen) == [
        (name, tenant) for name in ("hop.one", "hop.three", "hop.two") for tenant in "ab"
    ]
    assert all(meta["traceId"] == meta["tenant"] * 32 for *_, meta in seen)


async def test_ew_024_the_context_is_kept_when_the_handler_raises(events: Events) -> None:
    seen: list[Mapping[str, Any]] = []

    @events.on(check, on_error=lambda ctx, error: seen.append(current_meta()))
    async def handle(ctx: EventContext[Order]) -> None:
        raise ValueError

    async with Events(events.url, default_job_options={"attempts": 1}) as emitter, events:
        with propagate(tenant="t1"), pytest.raises(RemoteError):
            await emitter.emit(check, Order())
    assert seen == [{"tenant": "t1"}]


async def test_ew_025_026_029_nothing_is_invented_and_nothing_leaks_to_the_next_job(events: Events) -> None:
    seen: list[Any] = []
    events.on(echo, concurrency=1)(lambda ctx: seen.append(dict(current_meta())))
    async with events:
        with propagate(correlation_id="only"):
            await events.emit(echo, 1)
        await events.emit(echo, 2)
    assert seen == [{"correlationId": "only"}, {}]


async def test_emissions_merge_default_meta_below_what_is_current(memory: str) -> None:
    seen: list[Any] = []
    events = Events(memory, default_meta={"service": "shop", "tenant": "none"})
    events.on(echo)(lambda ctx: seen.append(dict(ctx.meta)))
    async with events:
        with propagate(tenant="t1"):
            await events.emit(echo, 1)
    assert seen == [{"service": "shop", "tenant": "t1"}]


@pytest.mark.parametrize("context", [{"request": object()}, {7: "a key that no handler could read"}])
async def test_a_context_that_cannot_travel_is_refused_by_its_name(memory: str, context: dict[Any, Any]) -> None:
    async with Events(memory) as events:
        with propagate(context):
            with pytest.raises(InvalidCommand, match="the context of an event"):
                events.emit(echo, 1)
            with pytest.raises(InvalidCommand, match="the context of an event"):
                await events.schedule_event(echo, "s", every=60, payload=1)
