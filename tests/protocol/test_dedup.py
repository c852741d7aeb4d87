"""uniqueKey and its policies, and the commands that look at a key or free it."""

from __future__ import annotations

import pytest

from tests.protocol.steps import complete, counts, job_of, push, state, take
from tests.waiting import eventually
from tests.wireclient import Client


def _owner(client: Client, queue: str, key: str = "k") -> str | None:
    reply = client.call("GetDeduplicationJobId", queue=queue, deduplicationId=key)
    assert set(reply["data"]) == {"jobId"}
    owner: str | None = reply["data"]["jobId"]
    return owner


def test_a_held_key_gives_the_job_that_holds_it(client: Client, queue: str) -> None:
    first = push(client, queue, uniqueKey="k", data="first")
    assert push(client, queue, uniqueKey="k", data="second") == first
    assert job_of(client, first)["data"] == "first"
    assert _owner(client, queue) == first
    assert _owner(client, queue, "free") is None
    assert _owner(client, f"{queue}.none") is None
    assert counts(client, queue) == {"waiting": 1}


def test_keys_of_two_queues_are_two_keys(client: Client, queue: str) -> None:
    assert push(client, queue, uniqueKey="k") != push(client, f"{queue}.other", uniqueKey="k")


def test_a_key_is_held_while_its_job_is_delayed_active_or_waits_for_a_retry(client: Client, queue: str) -> None:
    owner = push(client, queue, uniqueKey="k", delay=30, backoff=60_000)
    assert push(client, queue, uniqueKey="k") == owner
    _, token = take(client, queue)
    assert push(client, queue, uniqueKey="k") == owner
    client.ok("FAIL", id=owner, token=token)
    assert state(client, owner) == "delayed"
    assert push(client, queue, uniqueKey="k") == owner
    assert counts(client, queue) == {"delayed": 1}


@pytest.mark.parametrize("how", ["ACK", "FAIL", "Cancel", "Discard", "Obliterate", "Clean"])
def test_a_key_is_free_when_its_job_has_ended(client: Client, queue: str, how: str) -> None:
    owner = push(client, queue, uniqueKey="k")
    if how in ("ACK", "FAIL"):
        _, token = take(client, queue)
        extra = {"unrecoverable": True} if how == "FAIL" else {}
        client.ok(how, id=owner, token=token, **extra)
    elif how in ("Obliterate", "Clean"):
        client.ok(how, queue=queue, grace=0)
    else:
        client.ok(how, id=owner)
    assert _owner(client, queue) is None
    assert push(client, queue, uniqueKey="k") != owner


def test_a_key_with_a_ttl_is_free_when_it_ran_out(client: Client, queue: str) -> None:
    owner = push(client, queue, uniqueKey="k", dedup={"ttl": 120})
    assert push(client, queue, uniqueKey="k") == owner
    eventually(lambda: _owner(client, queue) is None)
    second = push(client, queue, uniqueKey="k")
    assert second != owner
    assert _owner(client, queue) == second
    assert complete(client, queue) == owner
    assert _owner(client, queue) == second


def test_extend_restarts_the_ttl_of_the_owner(client: Client, queue: str) -> None:
    owner = push(client, queue, uniqueKey="k", dedup={"ttl": 200})
    assert push(client, queue, uniqueKey="k", dedup={"ttl": 60_000, "extend": True}) == owner
    assert client.call("PULL", queue=f"{queue}.none", timeout=260)["job"] is None
    assert push(client, queue, uniqueKey="k") == owner


def test_replace_drops_a_pending_owner_for_the_new_job(client: Client, queue: str) -> None:
    for fields in ({}, {"delay": 60_000}):
        old = push(client, queue, uniqueKey="k", data="old", dedup={"replace": True}, **fields)
        new = push(client, queue, uniqueKey="k", data="new", dedup={"replace": True})
        assert new != old
        assert state(client, old) == "unknown"
        assert _owner(client, queue) == new
    assert counts(client, queue) == {"waiting": 1}


def test_replace_moves_the_key_of_an_active_owner(client: Client, queue: str) -> None:
    old = push(client, queue, uniqueKey="k")
    _, token = take(client, queue)
    new = push(client, queue, uniqueKey="k", dedup={"replace": True})
    assert new != old
    assert _owner(client, queue) == new
    client.ok("ACK", id=old, token=token)
    assert _owner(client, queue) == new
    assert counts(client, queue) == {"completed": 1, "waiting": 1}


def test_remove_deduplication_key_frees_it(client: Client, queue: str) -> None:
    owner = push(client, queue, uniqueKey="k")
    reply = client.call("RemoveDeduplicationKey", queue=queue, deduplicationId="k")
    assert reply == {"ok": True, "data": {"count": 1}}
    assert client.call("RemoveDeduplicationKey", queue=queue, deduplicationId="k")["data"] == {"count": 0}
    assert push(client, queue, uniqueKey="k") != owner
    assert state(client, owner) == "waiting"


def test_remove_job_deduplication_key_frees_the_key_of_that_job_only(client: Client, queue: str) -> None:
    owner = push(client, queue, uniqueKey="k")
    other = push(client, queue)
    assert client.call("RemoveJobDeduplicationKey", id=owner) == {"ok": True, "data": {"removed": True}}
    for job_id in (owner, other, "nobody"):
        reply = client.call("RemoveJobDeduplicationKey", id=job_id)
        assert reply == {"ok": True, "data": {"removed": False}}
    assert _owner(client, queue) is None


def test_many_keys_are_all_remembered(client: Client, queue: str) -> None:
    jobs = [{"data": n, "uniqueKey": f"k{n}"} for n in range(1500)]
    first = client.ok("PUSHB", queue=queue, jobs=jobs)["ids"]
    assert len(set(first)) == 1500
    assert client.ok("PUSHB", queue=queue, jobs=jobs)["ids"] == first
