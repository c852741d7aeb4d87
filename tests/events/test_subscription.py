"""EW-001 to EW-015: the cell that an emitter holds."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from headrace.errors import EventTimeoutError
from headrace.events import EventSubscription


@pytest.fixture
def cell() -> EventSubscription[Any]:
    return EventSubscription()


def test_ew_001_a_new_one_keeps_its_id_and_is_unsettled() -> None:
    cell: EventSubscription[int] = EventSubscription("mine")
    assert (cell.id, cell.is_settled, cell.is_resolved, cell.is_rejected) == ("mine", False, False, False)
    with pytest.raises(asyncio.InvalidStateError):
        cell.result()


def test_ew_002_two_generated_ids_differ() -> None:
    assert EventSubscription().id != EventSubscription().id


def test_ew_003_resolving_calls_back_once_with_the_value(cell: EventSubscription[Any]) -> None:
    seen: list[Any] = []
    cell.subscribe(seen.append)
    cell.resolve(7)
    cell.resolve(8)
    assert seen == [7]


def test_ew_004_rejecting_calls_back_once_with_the_error(cell: EventSubscription[Any]) -> None:
    seen: list[Any] = []
    cell.on_error(seen.append)
    error = ValueError()
    cell.reject(error)
    assert seen == [error]


def test_ew_005_a_callback_added_afterwards_is_called_at_once(cell: EventSubscription[Any]) -> None:
    seen: list[Any] = []
    cell.resolve(None)
    cell.subscribe(seen.append)
    cell.add_done_callback(seen.append)
    assert seen == [None, cell]


@pytest.mark.parametrize("first", ["resolve", "reject"])
@pytest.mark.parametrize("second", ["resolve", "reject"])
def test_ew_006_later_settlements_are_ignored(first: str, second: str, cell: EventSubscription[Any]) -> None:
    error = ValueError("first")
    getattr(cell, first)(error)
    getattr(cell, second)(KeyError("second"))
    assert cell.is_resolved is (first == "resolve")
    assert (cell._value if first == "resolve" else cell._error) is error


def test_ew_007_settling_without_callbacks_or_with_broken_ones_does_not_raise(cell: EventSubscription[Any]) -> None:
    cell.subscribe(lambda value: 1 / 0)
    cell.resolve(1)
    EventSubscription[int]().reject(ValueError())


def test_ew_008_subscribe_and_catch_chain_in_either_order(cell: EventSubscription[Any]) -> None:
    assert cell.subscribe(print).catch(print) is cell
    assert cell.catch(print).subscribe(print) is cell


async def test_ew_009_awaiting_gives_the_value_or_the_same_error(cell: EventSubscription[Any]) -> None:
    asyncio.get_running_loop().call_soon(cell.resolve, 5)
    assert await cell == 5
    error = ValueError("x")
    failed: EventSubscription[int] = EventSubscription()
    asyncio.get_running_loop().call_soon(failed.reject, error)
    with pytest.raises(ValueError, match="x") as caught:
        await failed
    assert caught.value is error


async def test_ew_010_all_waiters_get_the_value_also_afterwards(cell: EventSubscription[Any]) -> None:
    asyncio.get_running_loop().call_soon(cell.resolve, 5)
    assert await asyncio.gather(cell.wait(), cell.wait()) == [5, 5]
    assert await cell == 5


async def test_ew_011_a_timeout_is_the_waiters_own(cell: EventSubscription[Any]) -> None:
    patient = asyncio.ensure_future(cell.wait(timeout=30))
    with pytest.raises(EventTimeoutError, match="EventSubscription timeout after 10ms"):
        await cell.wait(timeout=0.01)
    assert not cell.is_settled
    cell.resolve(1)
    assert await patient == 1


@pytest.mark.parametrize("timeout", [0, -1, None])
async def test_ew_012_no_limit_when_zero_negative_or_settled(timeout: Any, cell: EventSubscription[Any]) -> None:
    asyncio.get_running_loop().call_later(0.01, cell.resolve, 1)
    assert await cell.wait(timeout) == 1
    assert await cell.wait(1e-9) == 1


@pytest.mark.parametrize("end", ["resolve", "reject"])
async def test_ew_013_no_timer_or_waiter_is_left_on_either_outcome(end: str, cell: EventSubscription[Any]) -> None:
    waiting = asyncio.ensure_future(cell.wait(timeout=30))
    await asyncio.sleep(0)
    getattr(cell, end)(ValueError())
    await asyncio.gather(waiting, return_exceptions=True)
    assert cell._waiters == []
    assert not [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


async def test_ew_014_an_error_nobody_awaits_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cell: EventSubscription[int] = EventSubscription()
    cell.reject(ValueError())
    del cell
    gc.collect()
    await asyncio.sleep(0)
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


async def test_ew_015_cancelling_a_waiter_does_not_cancel_the_event(cell: EventSubscription[Any]) -> None:
    waiting = asyncio.ensure_future(cell.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not cell.is_settled
    cell.resolve(2)
    assert await cell == 2
