"""Job ids: UUIDv7 text whose order is the order of creation."""

from __future__ import annotations

import os
import uuid

import pytest

from headrace.clock import ManualClock
from headrace.ids import IdSource

START = 1_700_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


def stamp(text: str) -> int:
    return uuid.UUID(text).int >> 80


def test_an_id_is_a_uuid_of_version_7_with_its_time(clock: ManualClock) -> None:
    text = IdSource(clock).next()
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert stamp(text) == START


def test_ids_of_one_millisecond_are_ordered_and_different(clock: ManualClock) -> None:
    source = IdSource(clock)
    ids = [source.next() for _ in range(4096)]
    assert ids == sorted(set(ids))
    assert {stamp(text) for text in ids} == {START}


def test_more_than_4096_in_a_millisecond_borrow_from_the_next(clock: ManualClock) -> None:
    source = IdSource(clock)
    ids = [source.next() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert stamp(ids[-1]) == START + 2
    clock.advance(1)
    assert source.next() > ids[-1]


def test_a_clock_that_goes_back_does_not_break_the_order(clock: ManualClock) -> None:
    source = IdSource(clock)
    before = source.next()
    clock.jump(-3_600_000)
    after = [source.next() for _ in range(5000)]
    assert [before, *after] == sorted({before, *after})


def test_order_holds_over_many_milliseconds(clock: ManualClock) -> None:
    source = IdSource(clock)
    ids = []
    for _ in range(300):
        ids += [source.next() for _ in range(20)]
        clock.advance(1)
    assert ids == sorted(set(ids))
    assert len(ids) == 6000


def test_two_sources_share_no_id(clock: ManualClock) -> None:
    first, second = IdSource(clock), IdSource(clock)
    assert not {first.next() for _ in range(3000)} & {second.next() for _ in range(3000)}


def test_the_time_may_be_brought_along(clock: ManualClock) -> None:
    source = IdSource(clock)
    assert stamp(source.at(START + 77)) == START + 77


def test_all_are_valid_over_several_blocks_of_randomness(clock: ManualClock) -> None:
    source = IdSource(clock)
    for text in (source.next() for _ in range(20_000)):
        assert text[14] == "7"
        assert text[19] in "89ab"
        assert len(text) == 36


@pytest.mark.parametrize("count", [0, 1, 2, 4095, 4096, 5000])
def test_many_are_as_good_as_one_by_one(count: int) -> None:
    source = IdSource(ManualClock())
    first = source.next()
    ids = [first, *source.many(ManualClock().now_ms(), count), source.next()]
    assert len(ids) == count + 2
    assert ids == sorted(set(ids))
    assert all(uuid.UUID(each).version == 7 for each in ids)


def test_a_forked_child_and_its_parent_make_different_ids(clock: ManualClock) -> None:
    source = IdSource(clock)
    source.next()
    theirs, ours = os.pipe()
    if not os.fork():
        os.write(ours, source.next().encode())
        os._exit(0)
    os.wait()
    assert os.read(theirs, 36).decode() != source.next()
