"""Retry delays: the reference formulas, the cap, and their edges."""

from __future__ import annotations

import random

import pytest

from headrace.backoff import DEFAULT_CAP_MS, Kind, retry_delay_ms


def delay(n: int, luck: float, *, base: float = 1000, kind: Kind = "exponential", cap: float | None = None) -> int:
    return retry_delay_ms(n, delay_ms=base, kind=kind, max_delay_ms=cap, rng=lambda: luck)


@pytest.mark.parametrize(("n", "lowest", "middle"), [(1, 1000, 2000), (2, 2000, 4000), (5, 16_000, 32_000)])
def test_exponential_doubles_with_every_failure(n: int, lowest: int, middle: int) -> None:
    assert delay(n, 0.0) == lowest
    assert delay(n, 0.5) == middle


def test_exponential_jitter_stays_below_one_and_a_half() -> None:
    assert delay(1, 0.9999) == 3000
    assert delay(1, 0.75) == 2500


@pytest.mark.parametrize("n", [1, 2, 50])
def test_fixed_ignores_the_number_of_failures(n: int) -> None:
    assert delay(n, 0.0, kind="fixed") == 800
    assert delay(n, 0.5, kind="fixed") == 1000
    assert delay(n, 0.999999, kind="fixed") == 1200


def test_the_default_cap_is_one_hour() -> None:
    assert delay(30, 0.3) == DEFAULT_CAP_MS == 3_600_000
    assert delay(1, 0.5, base=86_400_000, kind="fixed") == DEFAULT_CAP_MS


def test_max_delay_replaces_the_cap_in_both_directions() -> None:
    assert delay(10, 0.5, cap=1500) == 1500
    assert delay(20, 0.5, cap=86_400_000) == 86_400_000
    assert delay(3, 0.5, cap=0) == 0


@pytest.mark.parametrize("kind", ["fixed", "exponential"])
def test_no_base_means_no_delay(kind: Kind) -> None:
    assert delay(7, 0.9, base=0, kind=kind) == 0


@pytest.mark.parametrize("n", [62, 63, 1000, 10**9])
def test_any_number_of_failures_stays_finite(n: int) -> None:
    assert delay(n, 0.0, base=86_400_000) == DEFAULT_CAP_MS


def test_delays_are_whole_milliseconds() -> None:
    result = delay(1, 0.123456, base=333.3)
    assert isinstance(result, int)
    assert result == round(333.3 * 2 * 0.623456)


@pytest.mark.parametrize(
    ("kind", "low", "high", "mean"), [("exponential", 1000, 3000, 2000), ("fixed", 800, 1200, 1000)]
)
def test_jitter_spreads_over_its_whole_range(kind: Kind, low: int, high: int, mean: int) -> None:
    rng = random.Random(7)
    samples = [retry_delay_ms(1, delay_ms=1000, kind=kind, max_delay_ms=None, rng=rng.random) for _ in range(2000)]
    span = high - low
    assert low <= min(samples) < low + span * 0.05
    assert high - span * 0.05 < max(samples) <= high
    assert abs(sum(samples) / len(samples) - mean) < span * 0.05
