"""RateLimit, RateLimitClear, SetConcurrency, ClearConcurrency, GetQueueLimits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.protocol.steps import OK, counts, park, push, take, take_plain
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client


def _limits(client: Client, queue: str) -> dict[str, Any]:
    reply = client.call("GetQueueLimits", queue=queue)
    assert set(reply["data"]) == {"limits"}
    return dict(reply["data"]["limits"])


def _fill(client: Client, queue: str, count: int) -> None:
    client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(count)])


def test_a_queue_without_limits_says_so(client: Client, queue: str) -> None:
    nothing = {"rateLimit": None, "rateLimitTtl": -2, "concurrencyLimit": None, "maxed": False}
    assert _limits(client, queue) == nothing
    assert client.call("GetQueueLimits", queue=queue, maxJobs=5)["data"]["limits"] == nothing


def test_a_rate_of_two_per_second_refills_every_half_second(client: Client, queue: str) -> None:
    _fill(client, queue, 4)
    assert client.call("RateLimit", queue=queue, limit=2) == OK
    began = time.monotonic()
    times = []
    for _ in range(4):
        take_plain(client, queue)
        times.append(time.monotonic() - began)
    for at, expected in zip(times, (0, 0, 0.5, 1.0), strict=True):
        assert expected - 0.02 <= at < expected + 0.4, times


@pytest.mark.alone
def test_a_refill_wakes_a_waiting_pull(server: ServerProcess, client: Client, queue: str) -> None:
    _fill(client, queue, 2)
    client.ok("RateLimit", queue=queue, limit=1, duration=300)
    take_plain(client, queue)
    with server.client() as poller:
        began = time.monotonic()
        park(poller, "PULL", queue=queue, timeout=10_000)
        assert poller.recv()["job"] is not None
        assert 0.2 <= time.monotonic() - began < 0.9


def test_a_batch_pull_takes_only_as_many_as_the_rate_allows(client: Client, queue: str) -> None:
    _fill(client, queue, 10)
    client.ok("RateLimit", queue=queue, limit=3, duration=60_000)
    assert len(client.ok("PULLB", queue=queue, count=10)["jobs"]) == 3
    assert client.ok("PULLB", queue=queue, count=10)["jobs"] == []
    limits = _limits(client, queue)
    assert limits["rateLimit"] == {"max": 3, "duration": 60_000}
    assert 0 < limits["rateLimitTtl"] <= 20_001


def test_an_empty_queue_spends_no_tokens(client: Client, queue: str) -> None:
    client.ok("RateLimit", queue=queue, limit=1, duration=60_000)
    for _ in range(3):
        assert client.ok("PULL", queue=queue)["job"] is None
    push(client, queue)
    assert client.ok("PULL", queue=queue)["job"] is not None


def test_a_rate_of_zero_holds_everything_back_until_it_is_cleared(
    server: ServerProcess, client: Client, queue: str
) -> None:
    push(client, queue)
    client.ok("RateLimit", queue=queue, limit=0)
    assert client.call("PULL", queue=queue, timeout=50)["job"] is None
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000)
        assert client.call("RateLimitClear", queue=queue) == OK
        assert poller.recv()["job"] is not None
    assert _limits(client, queue)["rateLimit"] is None
    assert client.call("RateLimitClear", queue=f"{queue}.none") == OK


@pytest.mark.alone
def test_a_rate_limit_with_a_ttl_ends_by_itself(server: ServerProcess, client: Client, queue: str) -> None:
    push(client, queue)
    client.ok("RateLimit", queue=queue, limit=0, ttl=150)
    with server.client() as poller:
        began = time.monotonic()
        park(poller, "PULL", queue=queue, timeout=10_000)
        assert poller.recv()["job"] is not None
        assert time.monotonic() - began < 1.2
    eventually(lambda: _limits(client, queue)["rateLimit"] is None)


@pytest.mark.parametrize("cmd", ["RateLimit", "SetConcurrency"])
def test_a_limit_that_is_no_number_is_refused(client: Client, queue: str, cmd: str) -> None:
    for limit in ("5", True, float("nan"), float("inf"), [1]):
        assert client.error(cmd, queue=queue, limit=limit) == "limit must be a finite number"
    assert client.error(cmd, queue=queue) == "limit is required"
    assert client.error(cmd, queue=queue, limit=-1) == "limit must be at least 0"


def test_other_wrong_rates_are_refused(client: Client, queue: str) -> None:
    assert client.error("RateLimit", queue=queue, limit=1, duration=0) == "duration must be at least 1"
    assert client.error("RateLimit", queue=queue, limit=1, ttl=-1) == "ttl must be at least 0"
    assert client.error("SetConcurrency", queue=queue, limit=1.5) == "limit must be an integer"


def test_concurrency_counts_jobs_that_were_active_before(client: Client, queue: str) -> None:
    _fill(client, queue, 5)
    held = client.ok("PULLB", queue=queue, count=2)["jobs"]
    assert client.call("SetConcurrency", queue=queue, limit=2) == OK
    assert client.ok("PULL", queue=queue)["job"] is None
    limits = _limits(client, queue)
    assert (limits["concurrencyLimit"], limits["maxed"]) == (2, True)
    client.ok("ACK", id=held[0]["id"])
    assert _limits(client, queue)["maxed"] is False
    assert len(client.ok("PULLB", queue=queue, count=5)["jobs"]) == 1
    assert counts(client, queue) == {"active": 2, "waiting": 2, "completed": 1}


@pytest.mark.parametrize("how", ["ACK", "FAIL"])
@pytest.mark.alone
def test_a_freed_slot_serves_a_waiting_pull(server: ServerProcess, client: Client, queue: str, how: str) -> None:
    _fill(client, queue, 2)
    client.ok("SetConcurrency", queue=queue, limit=1)
    job, token = take(client, queue)
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000)
        client.ok(how, id=job["id"], token=token)
        began = time.monotonic()
        assert poller.recv()["job"] is not None
        assert time.monotonic() - began < 1


def test_clear_concurrency_serves_waiting_pulls(server: ServerProcess, client: Client, queue: str) -> None:
    _fill(client, queue, 2)
    client.ok("SetConcurrency", queue=queue, limit=1)
    take(client, queue)
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000)
        assert client.call("ClearConcurrency", queue=queue) == OK
        assert poller.recv()["job"] is not None
    assert _limits(client, queue)["concurrencyLimit"] is None


def test_a_concurrency_of_zero_holds_everything_back(client: Client, queue: str) -> None:
    push(client, queue)
    client.ok("SetConcurrency", queue=queue, limit=0)
    assert client.ok("PULL", queue=queue)["job"] is None
    assert counts(client, queue) == {"waiting": 1}
