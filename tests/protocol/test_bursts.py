"""Commands of one kind that arrive together are run together, and nobody can tell.

Every burst goes out in one write, so that the server reads its commands in one go.
"""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tests.protocol.steps import burst
from tests.wireclient import Client


def pushes(queue: str, count: int) -> list[dict[str, Any]]:
    return [{"cmd": "PUSH", "queue": queue, "data": n, "reqId": n} for n in range(count)]


def test_replies_come_in_order_and_jobs_are_served_in_order(client: Client, queue: str) -> None:
    replies = burst(client, pushes(queue, 200))
    assert [reply["reqId"] for reply in replies] == list(range(200))
    assert len({reply["id"] for reply in replies}) == 200
    pulled = burst(client, [{"cmd": "PULL", "queue": queue, "reqId": n} for n in range(200)])
    assert [reply["reqId"] for reply in pulled] == list(range(200))
    assert [reply["job"]["data"] for reply in pulled] == list(range(200))
    assert [reply["job"]["id"] for reply in pulled] == [reply["id"] for reply in replies]
    acked = burst(client, [{"cmd": "ACK", "id": reply["id"], "reqId": n} for n, reply in enumerate(replies)])
    assert acked == [{"ok": True, "reqId": n} for n in range(200)]
    assert client.ok("GetJobCounts", queue=queue)["counts"]["completed"] == 200


def test_other_options_queues_and_mistakes_in_between_keep_their_own_reply(client: Client, queue: str) -> None:
    commands = pushes(queue, 9)
    commands[2] |= {"priority": 7}
    commands[3] |= {"jobId": f"{queue}-own"}
    commands[4] |= {"queue": f"{queue}-other"}
    commands[5] |= {"priority": "high"}
    commands[6] |= {"uniqueKey": "k"}
    commands[7] |= {"uniqueKey": "k"}
    replies = burst(client, commands)
    assert [reply["reqId"] for reply in replies] == list(range(9))
    assert replies[3]["id"] == f"{queue}-own"
    assert replies[5] == {"ok": False, "error": "priority must be a number", "reqId": 5}
    assert replies[6]["id"] == replies[7]["id"]
    assert client.ok("Count", queue=queue)["count"] == 6
    assert client.ok("Count", queue=f"{queue}-other")["count"] == 1
    order = [client.ok("PULL", queue=queue)["job"]["data"] for _ in range(6)]
    assert order == [2, 0, 1, 3, 6, 8]


def test_short_pushes_in_between_others_are_stored_with_what_they_carry(client: Client, queue: str) -> None:
    commands = pushes(queue, 6)
    commands[1] |= {"queue": f"{queue}-other"}
    commands[2] |= {"name": "mail", "delay": 60_000}
    commands[3] |= {"data": msgpack.ExtType(0, b"\0")}  # JavaScript's undefined
    commands[4] |= {"priority": 7, "timestamp": 1000}
    jobs = [client.ok("GetJob", id=reply["id"])["job"] for reply in burst(client, commands)]
    assert [job["queue"] for job in jobs] == [f"{queue}-other" if n == 1 else queue for n in range(6)]
    assert [job["data"] for job in jobs] == [0, 1, 2, None, 4, 5]
    assert (jobs[2]["name"], jobs[2]["state"]) == ("mail", "delayed")
    assert (jobs[4]["priority"], jobs[4]["createdAt"]) == (7, 1000)


@pytest.mark.parametrize("command", [{"cmd": "PUSH", "data": 1}, {"cmd": "PULL"}], ids=lambda command: command["cmd"])
@pytest.mark.parametrize("name", ["no spaces", "", "line\n", "x" * 257, 5, None])
def test_a_wrong_queue_name_in_a_row_gets_the_error_it_gets_alone(
    client: Client, queue: str, command: dict[str, Any], name: object
) -> None:
    alone = client.call(**command, queue=name, reqId=1)
    first, wrong, last = burst(client, [{**command, "queue": q, "reqId": 1} for q in (queue, name, queue)])
    assert wrong == alone
    assert wrong["ok"] is False
    assert (first["ok"], last["ok"]) == (True, True)


def test_pulls_beyond_the_jobs_get_none_or_wait(client: Client, queue: str) -> None:
    burst(client, pushes(queue, 3))
    replies = burst(client, [{"cmd": "PULL", "queue": queue, "owner": "w", "reqId": n} for n in range(5)])
    assert [reply["job"]["data"] if reply["job"] else None for reply in replies] == [0, 1, 2, None, None]
    tokens = [reply["token"] for reply in replies]
    assert len(set(tokens[:3])) == 3
    assert tokens[3:] == [None, None]


def test_pulls_that_wish_for_something_else_in_a_row_get_what_they_wish_for(client: Client, queue: str) -> None:
    other = f"{queue}-other"
    burst(client, pushes(queue, 5) + pushes(other, 3))
    wishes: list[dict[str, Any]] = [
        *({"queue": queue}, {"queue": queue}),
        *({"queue": queue, "owner": "w"}, {"queue": queue, "owner": "w"}),
        *({"queue": other, "owner": "w"}, {"queue": other, "owner": "w"}),
        *({"queue": queue}, {"queue": other}),
    ]
    replies = burst(client, [{"cmd": "PULL", **wish, "reqId": n} for n, wish in enumerate(wishes)])
    assert [reply["job"]["queue"] for reply in replies] == [wish["queue"] for wish in wishes]
    assert [reply["job"]["data"] for reply in replies] == [0, 1, 2, 3, 0, 1, 4, 2]
    assert [bool(reply.get("token")) for reply in replies] == ["owner" in wish for wish in wishes]


def test_without_request_ids_a_waiting_pull_holds_back_what_follows(client: Client, queue: str) -> None:
    burst(client, pushes(queue, 1))
    commands = [{"cmd": "PULL", "queue": queue, "timeout": 150} for _ in range(3)]
    replies = burst(client, [*commands, {"cmd": "Ping"}])
    assert [reply["job"] is not None for reply in replies[:3]] == [True, False, False]
    assert replies[3]["data"]["pong"] is True


def test_each_ack_stands_for_itself(client: Client, queue: str) -> None:
    burst(client, pushes(queue, 4))
    held = burst(client, [{"cmd": "PULL", "queue": queue, "owner": "w"} for _ in range(4)])
    acks = [
        {"cmd": "ACK", "id": reply["job"]["id"], "token": reply["token"], "result": n} for n, reply in enumerate(held)
    ]
    acks[1]["token"] = "wrong"
    acks.insert(2, {"cmd": "ACK", "id": "nobody"})
    acks.append(dict(acks[0]))
    replies = burst(client, acks)
    job_ids = [reply["job"]["id"] for reply in held]
    assert replies == [
        {"ok": True},
        {"ok": False, "error": f"Invalid or expired lock token for job {job_ids[1]}"},
        {"ok": False, "error": "Job not found or not in processing state: nobody"},
        {"ok": True},
        {"ok": True},
        {"ok": True, "data": {"applied": False, "reason": "already-finalized"}},
    ]
    assert [client.ok("GetState", id=job_id)["state"] for job_id in job_ids] == [
        "completed",
        "active",
        "completed",
        "completed",
    ]
    assert client.ok("GetResult", id=job_ids[3])["result"] == 3


@pytest.mark.parametrize("limit", [0, 2])
def test_limits_hold_for_pulls_that_come_together(client: Client, queue: str, limit: int) -> None:
    client.ok("SetConcurrency", queue=queue, limit=limit) if limit else client.ok("Pause", queue=queue)
    burst(client, pushes(queue, 5))
    replies = burst(client, [{"cmd": "PULL", "queue": queue} for _ in range(5)])
    assert sum(reply["job"] is not None for reply in replies) == limit
