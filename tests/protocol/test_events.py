"""Events over TCP: who gets them, in which order, with which particulars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.protocol.steps import OK, burst, complete, push, state, take, take_plain
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client


@pytest.fixture
def listener(server: ServerProcess, queue: str) -> Iterator[Client]:
    with server.client() as connected:
        assert connected.call("SubscribeEvents", queue=queue) == OK
        yield connected


def _heard(listener: Client) -> list[dict[str, Any]]:
    """All events up to now: whatever came before the reply to a ping."""
    listener.send("Ping", reqId="end")
    events: list[dict[str, Any]] = []
    while True:
        frame = listener.recv()
        if frame.get("reqId") == "end":
            return events
        assert set(frame) == {"type", "event"}
        assert frame["type"] == "event"
        event = frame["event"]
        assert isinstance(event["timestamp"], float)
        assert None not in (event["eventType"], event["queue"], event["jobId"])
        events.append(event)


def _brief(listener: Client, queue: str, *keys: str) -> list[tuple[Any, ...]]:
    """The events as (type, wanted particulars...); they must be of `queue`."""
    events = _heard(listener)
    assert {event["queue"] for event in events} <= {queue}
    return [(event["eventType"], *(event.get(key) for key in keys)) for event in events]


def _keys(event: dict[str, Any]) -> set[str]:
    return set(event) - {"eventType", "queue", "jobId", "timestamp"}


def test_the_life_of_a_job_is_told_in_order(client: Client, listener: Client, queue: str) -> None:
    job_id = push(client, queue)
    _, token = take(client, queue)
    client.ok("Progress", id=job_id, progress=30, message="on it")
    client.ok("ACK", id=job_id, token=token, result={"sum": 3})
    events = _heard(listener)
    assert [event["eventType"] for event in events] == ["pushed", "pulled", "progress", "completed"]
    assert {event["jobId"] for event in events} == {job_id}
    pushed, pulled, progress, completed = events
    assert _keys(pushed) == _keys(pulled) == set()
    assert progress["progress"] == 30
    assert progress["data"] == {"progress": 30, "message": "on it"}
    assert completed["data"] == {"sum": 3}
    assert [e["timestamp"] for e in events] == sorted(e["timestamp"] for e in events)


def test_a_completion_without_result_has_no_data(client: Client, listener: Client, queue: str) -> None:
    push(client, queue)
    job, token = take(client, queue)
    client.ok("ACK", id=job["id"], token=token)
    assert _keys(_heard(listener)[-1]) == set()


def test_who_subscribes_hears_nothing_of_what_came_before_not_even_in_the_same_tick(client: Client, queue: str) -> None:
    """Nobody wanted the result of the first job when it completed: it would be told as a completion without one."""
    jobs = [push(client, queue), push(client, queue)]
    first, second = ({"cmd": "ACK", "id": job, "token": take(client, queue)[1], "result": "done"} for job in jobs)
    replies = burst(client, [first, {"cmd": "SubscribeEvents", "queue": queue}, second])
    assert [reply["ok"] for reply in replies] == [True] * 3
    assert [(event["jobId"], event["data"]) for event in _heard(client)] == [(jobs[1], "done")]


def test_failures_say_whether_they_are_final(client: Client, listener: Client, queue: str) -> None:
    job_id = push(client, queue, data={"n": 1}, maxAttempts=2, backoff=0)
    for _ in range(2):
        _, token = take(client, queue)
        client.ok("FAIL", id=job_id, token=token, error="boom")
    events = [event for event in _heard(listener) if event["eventType"] in ("failed", "retried")]
    assert [event["eventType"] for event in events] == ["failed", "retried", "failed"]
    first, retried, last = events
    assert (first["error"], first["terminal"], first["data"]) == ("boom", False, {"n": 1})
    assert retried["prev"] == "failed"
    assert (last["error"], last["terminal"], last["data"]) == ("boom", True, {"n": 1})


def test_a_failure_without_an_error_has_none(client: Client, listener: Client, queue: str) -> None:
    push(client, queue)
    job, token = take(client, queue)
    client.ok("FAIL", id=job["id"], token=token, unrecoverable=True)
    assert _keys(_heard(listener)[-1]) == {"terminal", "data"}


def test_dedup_cancel_and_delay_are_told(client: Client, listener: Client, queue: str) -> None:
    owner = push(client, queue, uniqueKey="k")
    push(client, queue, uniqueKey="k")
    client.ok("Cancel", id=owner)
    job_id = push(client, queue)
    client.ok("MoveToDelayed", id=job_id, delay=60_000)
    assert _brief(listener, queue, "jobId", "prev", "delay") == [
        ("pushed", owner, None, None),
        ("duplicated", owner, None, None),
        ("removed", owner, "waiting", None),
        ("pushed", job_id, None, None),
        ("delayed", job_id, None, 60_000),
    ]


def test_pause_and_resume_are_told_without_a_job(client: Client, listener: Client, queue: str) -> None:
    client.ok("Pause", queue=queue)
    client.ok("Pause", queue=queue)
    client.ok("Resume", queue=queue)
    assert _brief(listener, queue, "jobId") == [("paused", ""), ("resumed", "")]


def test_a_stalled_job_is_told_with_its_count(client: Client, listener: Client, queue: str) -> None:
    job_id = push(client, queue)
    take(client, queue, lockTtl=60)
    eventually(lambda: state(client, job_id) == "waiting")
    (stalled,) = [event for event in _heard(listener) if event["eventType"] == "stalled"]
    assert stalled["jobId"] == job_id
    assert stalled["data"] == {"stallCount": 1, "action": "retry"}


def test_a_released_parent_is_told(client: Client, listener: Client, queue: str) -> None:
    child = push(client, f"{queue}.child")
    parent = push(client, queue, dependsOn=[child])
    complete(client, f"{queue}.child")
    assert _brief(listener, queue, "jobId", "prev") == [
        ("pushed", parent, None),
        ("waiting", parent, "waiting-children"),
    ]


def test_promotion_expiry_and_retry_from_the_dead_are_not_told(client: Client, listener: Client, queue: str) -> None:
    job_id = push(client, queue, delay=60_000)
    client.ok("Promote", id=job_id)
    client.ok("Discard", id=job_id)
    client.ok("RetryDlq", queue=queue)
    expiring = push(client, queue, ttl=0, priority=5)
    eventually(lambda: client.ok("PULL", queue=queue)["job"] is not None)
    eventually(lambda: client.ok("PULL", queue=queue)["job"] is None and state(client, expiring) != "waiting")
    told = [event["eventType"] for event in _heard(listener)]
    assert set(told) <= {"pushed", "pulled", "failed"}


def test_nobody_hears_of_other_queues_or_without_subscribing(
    server: ServerProcess, client: Client, listener: Client, queue: str
) -> None:
    with server.client() as silent:
        push(client, f"{queue}.other")
        push(client, queue)
        assert _brief(silent, queue) == []
        assert _brief(listener, queue) == [("pushed",)]


def test_a_new_subscription_replaces_the_old_one(client: Client, listener: Client, queue: str) -> None:
    assert listener.call("SubscribeEvents", queue=f"{queue}.other") == OK
    push(client, queue)
    push(client, f"{queue}.other")
    assert _brief(listener, f"{queue}.other") == [("pushed",)]
    assert listener.call("UnsubscribeEvents") == OK
    push(client, f"{queue}.other")
    assert _heard(listener) == []
    assert listener.call("UnsubscribeEvents") == OK
    assert listener.error("SubscribeEvents", queue="a b") == "Queue name contains invalid characters"


def test_events_of_one_connection_come_before_the_reply_that_follows_them(client: Client, queue: str) -> None:
    client.ok("SubscribeEvents", queue=queue)
    client.send("PUSH", queue=queue, data=1, reqId="push")
    frames = [client.recv(), client.recv()]
    assert {frame.get("reqId") or frame["event"]["eventType"] for frame in frames} == {"push", "pushed"}


def test_every_listener_hears_everything(server: ServerProcess, client: Client, queue: str) -> None:
    with server.client() as first, server.client() as second:
        for each in (first, second):
            each.ok("SubscribeEvents", queue=queue)
        ids = client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(50)])["ids"]
        for each in (first, second):
            assert [event["jobId"] for event in _heard(each)] == ids


def test_a_delayed_push_is_told_as_pushed(client: Client, listener: Client, queue: str) -> None:
    push(client, queue, delay=60_000)
    push(client, queue, delay=20)
    take_plain(client, queue)
    assert _brief(listener, queue) == [("pushed",), ("pushed",), ("pulled",)]


def test_trim_events_is_accepted_and_takes_nothing_from_the_one_log(client: Client, queue: str) -> None:
    for _ in range(5):
        push(client, queue)
    assert client.call("TrimEvents", queue=queue, maxLength=2) == {"ok": True, "data": {"removed": 0}}
    assert client.error("TrimEvents", queue=queue) == "maxLength is required"


def test_a_star_subscribes_to_all_queues_with_results_and_only_once_each(
    server: ServerProcess, client: Client, queue: str
) -> None:
    with server.client() as everywhere:
        everywhere.ok("SubscribeEvents", queue="*")
        for name in (queue, f"{queue}-2"):
            job_id = push(client, name)
            _, token = take(client, name)
            client.ok("ACK", id=job_id, token=token, result={"of": name})
        events = [event for event in _heard(everywhere) if event["queue"].startswith(queue)]
        assert [(event["eventType"], event["queue"]) for event in events] == [
            (word, name) for name in (queue, f"{queue}-2") for word in ("pushed", "pulled", "completed")
        ]
        assert [event["data"] for event in events if "data" in event] == [{"of": queue}, {"of": f"{queue}-2"}]
        everywhere.ok("SubscribeEvents", queue=queue)
        push(client, f"{queue}-2")
        assert _heard(everywhere) == []
