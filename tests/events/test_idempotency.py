"""EW-056 to EW-062: once per id, within a process."""

from __future__ import annotations

import asyncio

import pytest

from headrace.events import EventIdempotency


async def work() -> str:
    return "done"


async def test_ew_056_057_a_new_id_runs_and_a_known_one_is_skipped() -> None:
    once = EventIdempotency()
    assert await once.process_once("a", work) == (True, "done")
    assert await once.process_once("a", work) == (False, None)
    assert await once.process_once("b", work) == (True, "done")


async def test_ew_058_marking_by_hand_clearing_and_counting() -> None:
    once = EventIdempotency()
    once.mark_processed("a")
    assert not (await once.process_once("a", work)).executed
    assert len(once) == 1
    once.clear()
    assert (await once.process_once("a", work)).executed


async def test_ew_059_the_oldest_are_forgotten_beyond_the_maximum() -> None:
    once = EventIdempotency(max_entries=2)
    once.mark_processed("a")
    for event_id in "bc":
        await once.process_once(event_id, work)
    assert [once.is_processed(event_id) for event_id in "abc"] == [False, True, True]


def test_ew_060_after_the_ttl_an_id_may_run_again() -> None:
    now = [0.0]
    once = EventIdempotency(ttl=10, clock=lambda: now[0])
    once.mark_processed("a")
    now[0] = 9.9
    assert once.is_processed("a")
    now[0] = 10
    assert not once.is_processed("a")
    assert (EventIdempotency().max_entries, EventIdempotency().ttl) == (10_000, 3600)


async def test_ew_061_what_raised_may_run_again() -> None:
    async def broken() -> None:
        raise ValueError

    once = EventIdempotency()
    with pytest.raises(ValueError):  # noqa: PT011
        await once.process_once("a", broken)
    assert (await once.process_once("a", work)).executed


async def test_ew_062_two_at_once_run_one_time() -> None:
    runs = []

    async def slow() -> None:
        runs.append(1)
        await asyncio.sleep(0.01)

    once = EventIdempotency()
    outcomes = await asyncio.gather(*(once.process_once("a", slow) for _ in range(3)))
    assert sorted(outcome.executed for outcome in outcomes) == [False, False, True]
    assert len(runs) == 1
