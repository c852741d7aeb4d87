"""EW-122 to EW-133: events by the clock."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from headrace.errors import InvalidCommand
from headrace.events import EventContext, Events, Retry, event
from headrace.schedules import parse_schedule
from tests.events.conftest import Order, placed
from tests.waiting import until

report = event("report.due", Order)


async def test_ew_109_122_123_schedules_are_stored_with_their_pattern_on_the_queue_of_the_event(events: Events) -> None:
    async with events:
        nightly = await events.schedule_event(
            report, "nightly", cron="0 2 * * *", tz=ZoneInfo("Europe/Rome"), payload=Order("r", 2)
        )
        often = await events.schedule_event(report, "often", every=90, payload=Order())
        assert (nightly.cron, nightly.tz, nightly.every_ms) == ("0 2 * * *", "Europe/Rome", None)
        assert (often.cron, often.every_ms) == (None, 90_000)
        local = datetime.fromtimestamp(nightly.next_run / 1000, ZoneInfo("Europe/Rome"))
        assert (local.hour, local.minute) == (2, 0)
        (queue,) = {view.queue for view in await events.provider.queues.get_queue("report.due").schedules()}
        assert queue == "event.report.due"


async def test_ew_124_127_132_each_firing_is_an_event_of_its_own_at_its_due_time(events: Events) -> None:
    seen: list[EventContext[Order]] = []
    events.on(report)(seen.append)
    async with Events(events.url) as other, events:
        for scheduler in (events, other):
            await scheduler.schedule_event(report, "tick", every=0.05, payload=Order("r", 7))
        await until(lambda: len(seen) >= 4)
        await events.unschedule_event(report, "tick")
    due = [ctx.timestamp for ctx in seen]
    assert [ctx.event_id for ctx in seen] == [f"tick@{at:.0f}" for at in due]
    assert len(set(due)) == len(due), "two schedulers fire once"
    assert {after - before for before, after in itertools.pairwise(due)} == {50.0}
    assert seen[0].data == Order("r", 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"cron": "* * * * *", "every": 1},
        {"cron": "* * * *"},
        {"cron": "* * * * * * *"},
        {"every": 0},
        {"every": -1},
        {"every": 0.0005},
        {"cron": "99 * * * *"},
        {"cron": "* * * * *", "tz": "Mars/Olympus"},
    ],
)
async def test_ew_125_126_an_impossible_schedule_is_refused_and_nothing_is_stored(
    events: Events, wrong: dict[str, Any]
) -> None:
    async with events:
        with pytest.raises(InvalidCommand):
            await events.schedule_event(report, "s", payload=Order(), **wrong)
        assert await events.get_schedules(report) == []


async def test_ew_127_128_131_listing_replacing_and_removing(events: Events) -> None:
    async with events:
        assert await events.get_schedules(placed) == []
        await events.schedule_event(report, "s", every=100, payload=Order())
        await events.schedule_event(report, "s", every=200, payload=Order())
        assert [(info.schedule_id, info.every_ms) for info in await events.get_schedules(report)] == [("s", 200_000)]
        assert await events.unschedule_event(report, "s") is True
        assert await events.unschedule_event(report, "s") is False
        assert await events.get_schedules(report) == []


async def test_ew_129_130_schedules_outlive_who_made_them(url: str) -> None:
    async with Events(url) as keeper:
        async with Events(url) as maker:
            await maker.schedule_event(report, "s", cron="0 2 * * *", payload=Order())
        assert [info.schedule_id for info in await keeper.get_schedules(report)] == ["s"]
        assert await keeper.unschedule_event(report, "s") is True


async def test_ew_130_schedules_outlive_a_restart(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    async with Events(url) as events:
        await events.schedule_event(report, "s", cron="0 2 * * *", payload=Order())
    async with Events(url) as events:
        assert [info.schedule_id for info in await events.get_schedules(report)] == ["s"]


async def test_a_scheduled_event_reaches_every_group(events: Events) -> None:
    seen: set[str] = set()
    for group in ("a", "b"):
        events.on(report, group=group)(lambda ctx, group=group: seen.add(group))
    async with events:
        await events.schedule_event(report, "s", every=0.05, payload=Order())
        await until(lambda: seen == {"a", "b"})
        assert len(await events.get_schedules(report)) == 1
        assert await events.unschedule_event(report, "s") is True
        assert await events.get_schedules(report) == []


async def test_a_group_that_leaves_takes_its_schedules_along(events: Events) -> None:
    for group in ("a", "b"):
        events.on(report, group=group)(lambda ctx: None)
    async with events:
        await events.schedule_event(report, "s", cron="0 2 * * *", payload=Order())
        assert await events.provider.leave_group("report.due", "b") is True
        schedules = events.provider.schedules
        assert await schedules.get_schedules("report.due", "b") == []
        assert [info.schedule_id for info in await schedules.get_schedules("report.due", "a")] == ["s"]


async def test_a_scheduled_event_is_tried_as_often_as_its_handler_wants(events: Events) -> None:
    attempts: list[int] = []

    @events.on(report, retry=Retry(5, backoff="fixed", delay=0.001))
    async def fail(ctx: EventContext[Order]) -> None:
        attempts.append(ctx.attempt)
        raise ValueError("no")

    async with events:
        await events.schedule_event(report, "s", every=0.05, payload=Order())
        await until(lambda: 5 in attempts)
        await events.unschedule_event(report, "s")
    assert max(attempts) == 5


def test_ew_133_daylight_saving_fires_once_per_local_due_time() -> None:
    schedule = parse_schedule("30 2 * * *", "Europe/Rome")
    at = int(datetime(2026, 10, 24, tzinfo=UTC).timestamp() * 1000)
    days = []
    for _ in range(3):  # the clocks go back in the night to the 25th: 02:30 comes twice
        at = int(schedule.next_after(at))
        days.append(datetime.fromtimestamp(at / 1000, ZoneInfo("Europe/Rome")).day)
    assert days == [24, 25, 26]
