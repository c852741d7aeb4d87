"""The token bucket: figures of the protocol, limits of zero, and clocks that go back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.buckets import TokenBucket


def test_two_per_second_lets_jobs_pass_at_the_times_of_the_reference() -> None:
    bucket = TokenBucket.full(2, 1000, now_ms=0)
    passed, now = [], 0
    for _ in range(8):  # five passes and the three waits between them
        if bucket.take(now):
            passed.append(now)
        else:
            wait = bucket.wait_ms(now)
            assert wait is not None
            now += wait
    assert passed == [0, 0, 500, 1000, 1500]


def test_a_refused_take_costs_nothing() -> None:
    bucket = TokenBucket(capacity=5, refill_per_ms=0.001, tokens=2, stamp=0)
    assert not bucket.take(0, 3)
    assert bucket.take(0, 2)
    assert not bucket.take(0)


def test_tokens_never_exceed_the_capacity() -> None:
    bucket = TokenBucket(capacity=3, refill_per_ms=1, tokens=100, stamp=0)
    assert bucket.peek(0) == 3
    assert bucket.take(0, 3)
    assert bucket.peek(10**12) == 3


def test_a_limit_of_zero_blocks_for_ever() -> None:
    bucket = TokenBucket.full(0, 1000, now_ms=0)
    assert not bucket.take(10**12)
    assert bucket.wait_ms(10**12) is None


def test_more_than_the_capacity_never_comes_together() -> None:
    bucket = TokenBucket.full(2, 1000, now_ms=0)
    assert bucket.wait_ms(0, 3) is None
    assert bucket.wait_ms(0, 2) == 0


def test_without_refill_an_empty_bucket_stays_empty() -> None:
    bucket = TokenBucket(capacity=1, refill_per_ms=0, tokens=1, stamp=0)
    assert bucket.take(0)
    assert bucket.wait_ms(5) is None


def test_a_clock_that_goes_back_gives_nothing_and_does_not_freeze_the_bucket() -> None:
    bucket = TokenBucket.full(2, 1000, now_ms=3_600_000)
    assert bucket.take(3_600_000, 2)
    assert not bucket.take(0)
    assert bucket.wait_ms(0) == 500
    assert not bucket.take(499)
    assert bucket.take(500)


def test_thirds_of_a_token_add_up_to_one() -> None:
    bucket = TokenBucket(capacity=1, refill_per_ms=1 / 3, tokens=0, stamp=0)
    assert not bucket.take(1)
    assert not bucket.take(2)
    assert bucket.take(3)


@given(
    limit=st.integers(1, 10_000),
    duration=st.integers(1, 10_000_000),
    asked=st.integers(1, 50),
    pauses=st.lists(st.integers(0, 10_000), max_size=20),
)
def test_the_promised_wait_is_enough_and_not_a_millisecond_too_long(
    limit: int, duration: int, asked: int, pauses: list[int]
) -> None:
    bucket, now = TokenBucket.full(limit, duration, now_ms=0), 0
    for pause in pauses:
        now += pause
        bucket.take(now)
    wait = bucket.wait_ms(now, asked)
    if asked > limit:
        assert wait is None
        return
    assert wait is not None
    if wait > 1:
        assert not bucket.take(now + wait - 2, asked)
    assert bucket.take(now + wait, asked)


@given(
    limit=st.integers(1, 100),
    duration=st.integers(1, 5000),
    tries=st.lists(st.integers(0, 200), max_size=300),
)
def test_no_stretch_of_time_lets_more_than_its_share_pass(limit: int, duration: int, tries: list[int]) -> None:
    bucket, now, passed = TokenBucket.full(limit, duration, now_ms=0), 0, 0
    for step in tries:
        now += step
        passed += bucket.take(now)
        assert passed <= limit + limit * now / duration + 1e-6
