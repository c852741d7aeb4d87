"""Wrong tokens: answered slower and slower, counted one by one, logged in sums."""

from __future__ import annotations

import logging

import pytest

from headrace.clock import ManualClock
from headrace.engine.guessing import Guesses


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, str, int]]:
    """Level, message and fields of what was logged."""
    return [(r.levelno, r.getMessage(), r.__dict__["address"], r.__dict__["refused"]) for r in caplog.records]


def test_the_first_is_logged_at_once_and_the_others_in_one_line_a_second(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    guesses = Guesses(clock)
    for number in range(1000):
        guesses.note(f"10.0.0.{number % 200}")
    clock.advance(999)
    guesses.tell()
    first = (logging.WARNING, "wrong tokens refused: 1, the last from 10.0.0.0", "10.0.0.0", 1)
    assert told(caplog) == [first]
    clock.advance(1)
    guesses.tell()
    guesses.tell()
    rest = (logging.WARNING, "wrong tokens refused: 999, the last from 10.0.0.199", "10.0.0.199", 999)
    assert told(caplog) == [first, rest]
    assert guesses.count == 1000


def test_at_the_end_nothing_stays_untold(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    guesses = Guesses(clock)
    for _ in range(3):
        guesses.note("a")
    guesses.tell(is_last=True)
    guesses.tell(is_last=True)
    assert [refused for _, _, _, refused in told(caplog)] == [1, 2]


def test_nothing_is_logged_when_there_is_nothing_to_tell(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    guesses = Guesses(clock)
    clock.advance(5000)
    guesses.tell()
    assert caplog.records == []


def test_each_of_an_address_waits_twice_as_long_for_a_minute(clock: ManualClock) -> None:
    guesses = Guesses(clock)
    assert [guesses.note("a") for _ in range(9)] == [25, 50, 100, 200, 400, 800, 1600, 2000, 2000]
    assert guesses.note("b") == 25
    clock.advance(60_001)
    assert guesses.note("a") == 25


def test_however_many_addresses_guess_few_are_remembered(clock: ManualClock) -> None:
    guesses = Guesses(clock)
    for number in range(25_000):
        guesses.note(str(number))
    assert len(guesses._by_address) <= 10_000
