"""Brokers whose clocks differ: what they share must not come of it twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.backends.base import Demand
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.clock import ManualClock
from tests.conformance.rig import Rig, spec
from tests.valkey.foreign import Foreign
from tests.valkeyserver import shared_server

AHEAD_MS = 300


@pytest.fixture
def ahead(rig: Rig) -> Iterator[ValkeyBackend]:
    """Another broker, whose clock is ahead of the rig's."""
    clock = ManualClock(rig.clock.now_ms() + AHEAD_MS)
    other = ValkeyBackend(f"{shared_server().url}?prefix={rig.backend.url.prefix}", clock=clock)
    rig.wait(other.open())
    yield other
    rig.wait(other.close())


def started_in_turn(rig: Rig, ahead: ValkeyBackend, turns: int) -> int:
    """How many jobs both start, one asking after the other, while no time passes."""
    started = 0
    for _ in range(turns):
        for broker in (rig.backend, ahead):
            started += len(rig.wait(broker.claim("q", Demand(1, "w", 30_000, {}))))
    return started


def test_a_rate_limit_lets_no_more_jobs_start_than_it_says(rig: Rig, ahead: ValkeyBackend) -> None:
    rig.push_many(*(spec(n) for n in range(100)))
    rig.set_rate_limit("q", 10, 1000, None)
    assert started_in_turn(rig, ahead, 30) <= 10 + AHEAD_MS // 100
    rig.advance(1000)
    assert started_in_turn(rig, ahead, 30) <= 10


def test_the_bucket_of_an_ordering_key_lets_no_more_jobs_start(
    rig: Rig, foreign: Foreign, ahead: ValkeyBackend
) -> None:
    for _ in range(60):
        foreign.add(ordering="k", concurrency=100, capacity=10_000, refill=10_000)
    assert started_in_turn(rig, ahead, 30) <= 10 + AHEAD_MS // 100


def test_a_clock_that_was_far_ahead_does_not_stop_a_limited_queue(rig: Rig, ahead: ValkeyBackend) -> None:
    rig.push_many(*(spec(n) for n in range(30)))
    rig.set_rate_limit("q", 10, 1000, None)
    rig.clock.jump(-3_600_000)
    assert len(rig.wait(ahead.claim("q", Demand(10, "w", 30_000, {})))) == 10
    assert rig.pull(count=10) == []
    rig.advance(1000)
    assert len(rig.pull(count=10)) == 10
