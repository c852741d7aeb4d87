"""Groups inside a queue: served in turn, with limits of their own, when a pull asks for that."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.protocol.steps import OK, counts, park, push
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

WITH_GROUP = [
    "GetGroupJobsCount",
    "GetGroupActiveCount",
    "SetGroupRateLimit",
    "GetGroupRateLimit",
    "RemoveGroupRateLimit",
    "GetGroupRateLimitTtl",
    "RateLimitGroup",
    "SetGroupConcurrency",
    "GetGroupConcurrency",
    "RemoveGroupConcurrency",
    "PauseGroup",
    "ResumeGroup",
    "IsGroupPaused",
]


def _fill(client: Client, queue: str, *names: str) -> None:
    """Jobs `a0`, `b0`... whose letter is their group; `-` stands for none."""
    for name in names:
        push(client, queue, data=name, **({} if name[0] == "-" else {"groupId": name[0]}))


def _pull(client: Client, queue: str, count: int, **group: Any) -> list[str]:
    jobs = client.ok("PULLB", queue=queue, count=count, group=group)["jobs"]
    return [job["data"] for job in jobs]


def _data(client: Client, cmd: str, queue: str, group: str = "a", **fields: Any) -> dict[str, Any]:
    reply = client.call(cmd, queue=queue, groupId=group, **fields)
    assert reply["ok"] is True, reply
    return dict(reply["data"])


@pytest.mark.parametrize("cmd", WITH_GROUP)
def test_group_commands_want_a_queue_and_a_group(client: Client, queue: str, cmd: str) -> None:
    fields = {"max": 1, "duration": 1, "concurrency": 1}
    assert client.error(cmd, groupId="g", **fields) == "Queue name is required"
    assert client.error(cmd, queue=queue, **fields) == "groupId is required"
    assert client.error(cmd, queue=queue, groupId="", **fields) == "groupId must be a non-empty string"


def test_without_a_group_option_groups_are_only_names(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1", "b0", "-0")
    jobs = client.ok("PULLB", queue=queue, count=9)["jobs"]
    assert [job["data"] for job in jobs] == ["a0", "a1", "b0", "-0"]


def test_groups_are_served_in_turn_after_jobs_without_a_group(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1", "a2", "b0", "b1", "-0", "b2")
    assert _pull(client, queue, 9) == ["-0", "a0", "b0", "a1", "b1", "a2", "b2"]


def test_group_counts(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1", "b0", "-0")
    assert _data(client, "GetGroupJobsCount", queue) == {"count": 2}
    assert client.call("GetGroupsJobsCount", queue=queue) == {"ok": True, "data": {"count": 3}}
    assert client.call("GetGroupsJobsCount", queue=queue, maxCount=1)["data"] == {"count": 3}
    assert client.error("GetGroupsJobsCount") == "Queue name is required"
    _pull(client, queue, 2)
    assert _data(client, "GetGroupActiveCount", queue) == {"count": 1}
    assert _data(client, "GetGroupJobsCount", queue) == {"count": 1}
    assert _data(client, "GetGroupJobsCount", queue, "nobody") == {"count": 0}


def test_a_group_concurrency_of_the_pull_applies_to_each_group(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1", "b0", "b1")
    assert _pull(client, queue, 9, concurrency=1) == ["a0", "b0"]
    assert _pull(client, queue, 9, concurrency=1) == []
    assert counts(client, queue) == {"active": 2, "waiting": 2}


def test_a_stored_group_concurrency_wins_over_that_of_the_pull(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1", "a2", "b0", "b1")
    assert _data(client, "GetGroupConcurrency", queue) == {"concurrency": None}
    assert client.call("SetGroupConcurrency", queue=queue, groupId="a", concurrency=2) == OK
    assert _data(client, "GetGroupConcurrency", queue) == {"concurrency": 2}
    assert _pull(client, queue, 9, concurrency=1) == ["a0", "b0", "a1"]
    assert _data(client, "RemoveGroupConcurrency", queue) == {"removed": 1}
    assert _data(client, "RemoveGroupConcurrency", queue) == {"removed": 0}
    assert _data(client, "GetGroupConcurrency", queue) == {"concurrency": None}
    for bad in (0, 1.5, "2", 2**60):
        error = client.error("SetGroupConcurrency", queue=queue, groupId="a", concurrency=bad)
        assert error == "concurrency must be a positive safe integer"


def test_a_freed_slot_of_a_group_serves_a_waiting_pull(server: ServerProcess, client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1")
    job = client.ok("PULL", queue=queue, group={"concurrency": 1})["job"]
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000, group={"concurrency": 1})
        client.ok("ACK", id=job["id"])
        assert poller.recv()["job"]["data"] == "a1"


def test_a_group_rate_limit_holds_back_its_group_only(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1", "b0", "b1")
    assert _data(client, "GetGroupRateLimit", queue) == {"limit": None}
    assert _data(client, "GetGroupRateLimitTtl", queue) == {"ttl": -2}
    assert client.call("SetGroupRateLimit", queue=queue, groupId="a", max=1, duration=60_000) == OK
    assert _data(client, "GetGroupRateLimit", queue) == {"limit": {"max": 1, "duration": 60_000}}
    assert _pull(client, queue, 9) == ["a0", "b0", "b1"]
    ttl = _data(client, "GetGroupRateLimitTtl", queue, maxJobs=1)["ttl"]
    assert 0 < ttl <= 60_000
    assert _data(client, "RemoveGroupRateLimit", queue) == {"removed": 1}
    assert _data(client, "RemoveGroupRateLimit", queue) == {"removed": 0}
    assert _pull(client, queue, 9) == ["a1"]
    for field in ("max", "duration"):
        fields = {"max": 1, "duration": 1, field: 0}
        error = client.error("SetGroupRateLimit", queue=queue, groupId="a", **fields)
        assert error == f"{field} must be a positive safe integer"
    # The two texts in full: "max must be a positive safe integer", "duration must be a positive safe integer".


@pytest.mark.alone
def test_a_rate_limit_of_the_pull_refills_and_wakes_it(server: ServerProcess, client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "a1")
    group = {"limit": {"max": 1, "duration": 250}}
    assert _pull(client, queue, 9, **group) == ["a0"]
    began = time.monotonic()
    park(client, "PULL", queue=queue, timeout=10_000, group=group)
    assert client.recv()["job"]["data"] == "a1"
    assert 0.15 <= time.monotonic() - began < 0.9


@pytest.mark.alone
def test_rate_limit_group_holds_a_group_back_for_a_while(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "b0")
    assert _pull(client, queue, 1) == ["a0"]
    _fill(client, queue, "a1")
    assert client.call("RateLimitGroup", queue=queue, groupId="a", duration=250) == OK
    assert 0 < _data(client, "GetGroupRateLimitTtl", queue)["ttl"] <= 250
    assert _pull(client, queue, 9) == ["b0"]
    began = time.monotonic()
    park(client, "PULL", queue=queue, timeout=10_000, group={})
    assert client.recv()["job"]["data"] == "a1"
    assert 0.1 <= time.monotonic() - began < 0.9
    error = client.error("RateLimitGroup", queue=queue, groupId="a", duration=-5)
    assert error == "duration must be a positive safe integer"


def test_a_paused_group_rests_until_it_is_resumed(server: ServerProcess, client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "b0")
    assert _data(client, "PauseGroup", queue) == {"changed": True}
    assert _data(client, "PauseGroup", queue) == {"changed": False}
    assert _data(client, "IsGroupPaused", queue) == {"paused": True}
    assert _pull(client, queue, 9) == ["b0"]
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000, group={})
        assert _data(client, "ResumeGroup", queue) == {"changed": True}
        assert poller.recv()["job"]["data"] == "a0"
    assert _data(client, "ResumeGroup", queue) == {"changed": False}
    assert _data(client, "IsGroupPaused", queue) == {"paused": False}


def test_affinity_asks_for_one_group_or_for_jobs_without_one(client: Client, queue: str) -> None:
    _fill(client, queue, "a0", "b0", "-0", "b1", "-1")
    assert _pull(client, queue, 9, affinity="b") == ["b0", "b1"]
    assert _pull(client, queue, 9, affinity=None) == ["-0", "-1"]
    assert _pull(client, queue, 9) == ["a0"]


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ({"concurrency": 0}, "group.concurrency must be a positive safe integer"),
        ({"limit": {"max": 0, "duration": 1}}, "group.limit.max must be a positive safe integer"),
        ({"limit": {"max": 1, "duration": 0}}, "group.limit.duration must be a positive safe integer"),
        ("g", "group must be an object"),
    ],
)
def test_a_wrong_group_option_is_refused(client: Client, queue: str, group: object, error: str) -> None:
    assert client.error("PULL", queue=queue, group=group) == error
