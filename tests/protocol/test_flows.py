"""FlowStart, FlowAdvance, FlowGet, FlowList, FlowWait: a record that is changed by decision, whole or not at all.
FlowCancel and FlowSignal: wishes for whoever decides."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.steps import counts, push, state, take
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client


def start(client: Client, queue: str, **fields: Any) -> dict[str, Any]:
    flow_id = fields.pop("id", f"{queue}-flow")
    asked = {"workflow": "order", "queue": queue, "steps": [{"kind": "started", "body": {"n": 1}}], "jobs": []}
    return client.ok("FlowStart", id=flow_id, **asked | fields)


def job(queue: str, **options: Any) -> dict[str, Any]:
    return {"queue": queue, "input": {"data": {"step": "charge"}, **options}}


def test_a_flow_begins_with_its_log_and_its_first_jobs(client: Client, queue: str) -> None:
    reply = start(client, queue, jobs=[job(f"{queue}.steps", name="charge")])
    assert reply["created"] is True
    flow = reply["flow"]
    assert (flow["status"], flow["revision"], flow["endedAt"]) == ("running", 1, None)
    found = client.ok("FlowGet", id=flow["id"])
    assert found["flow"] == flow
    assert [(step["seq"], step["kind"], step["body"]) for step in found["steps"]] == [(1, "started", {"n": 1})]
    taken, _ = take(client, f"{queue}.steps")
    assert (taken["name"], taken["data"]) == ("charge", {"step": "charge"})


def test_starting_the_same_id_again_gives_the_flow_that_is_there(client: Client, queue: str) -> None:
    first = start(client, queue)["flow"]
    again = start(client, queue, workflow="other", jobs=[job(f"{queue}.steps")])
    assert (again["created"], again["flow"]) == (False, first)
    assert counts(client, f"{queue}.steps") == {}


def test_a_decision_is_carried_out_as_a_whole(client: Client, queue: str) -> None:
    flow = start(client, queue, jobs=[job(f"{queue}.steps")])["flow"]
    taken, token = take(client, f"{queue}.steps")
    changed = client.ok(
        "FlowAdvance",
        id=flow["id"],
        revision=1,
        steps=[{"kind": "completed", "step": "charge", "attempt": 1, "body": None}],
        jobs=[job(f"{queue}.steps", name="ship")],
        ack={"id": taken["id"], "token": token},
    )["flow"]
    assert (changed["revision"], changed["status"]) == (2, "running")
    assert state(client, taken["id"]) == "completed"
    assert take(client, f"{queue}.steps")[0]["name"] == "ship"
    steps = client.ok("FlowGet", id=flow["id"], after=1)["steps"]
    assert [(step["kind"], step["step"], step["body"]) for step in steps] == [("completed", "charge", None)]


def test_a_decision_on_an_old_revision_changes_nothing(client: Client, queue: str) -> None:
    flow_id = start(client, queue, jobs=[job(f"{queue}.steps")])["flow"]["id"]
    taken, token = take(client, f"{queue}.steps")
    client.ok("FlowAdvance", id=flow_id, revision=1)
    late = {"steps": [{"kind": "x"}], "jobs": [job(f"{queue}.more")], "ack": {"id": taken["id"], "token": token}}
    error = client.error("FlowAdvance", id=flow_id, revision=1, **late)
    assert error == f"Flow {flow_id} has changed: it is at revision 2, not 1"
    assert state(client, taken["id"]) == "active"
    assert counts(client, f"{queue}.more") == {}
    assert len(client.ok("FlowGet", id=flow_id)["steps"]) == 1


def test_a_decision_of_a_worker_that_lost_its_job_changes_nothing(client: Client, queue: str) -> None:
    flow_id = start(client, queue, jobs=[job(f"{queue}.steps")])["flow"]["id"]
    taken, _ = take(client, f"{queue}.steps")
    error = client.error("FlowAdvance", id=flow_id, revision=1, ack={"id": taken["id"], "token": "wrong"})
    assert error == f"Invalid or expired lock token for job {taken['id']}"
    assert client.ok("FlowGet", id=flow_id)["flow"]["revision"] == 1


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_an_ended_flow_cannot_be_changed_and_can_be_read(client: Client, queue: str, status: str) -> None:
    flow_id = start(client, queue)["flow"]["id"]
    ended = client.ok("FlowAdvance", id=flow_id, revision=1, status=status, steps=[{"kind": "end", "body": 7}])["flow"]
    assert (ended["status"], ended["endedAt"]) == (status, ended["updatedAt"])
    assert client.error("FlowAdvance", id=flow_id, revision=2) == f"Flow {flow_id} has ended"
    found = client.ok("FlowGet", id=flow_id)
    assert (found["flow"], found["steps"][-1]["body"]) == (ended, 7)


def test_what_is_not_there_is_not_found(client: Client) -> None:
    for command, fields in (("FlowGet", {}), ("FlowAdvance", {"revision": 1}), ("FlowWait", {"timeout": 10})):
        assert client.error(command, id="nobody", **fields) == "Flow not found: nobody"


WISHES = [("FlowCancel", {}), ("FlowSignal", {"name": "paid"})]


@pytest.mark.parametrize(("cmd", "fields"), WISHES)
def test_a_wish_is_a_job_for_whoever_decides_and_the_same_one_until_it_is_heard(
    client: Client, queue: str, cmd: str, fields: dict[str, Any]
) -> None:
    flow = start(client, queue)["flow"]
    for _ in range(2):
        assert client.ok(cmd, id=flow["id"], **fields)["flow"] == flow
    wish, token = take(client, queue)
    assert wish["data"]["flow"] == flow["id"]
    assert client.ok("PULL", queue=queue)["job"] is None
    client.ok("ACK", id=wish["id"], token=token)
    client.ok(cmd, id=flow["id"], **fields)
    assert take(client, queue)[0]["data"] == wish["data"]


def test_a_wish_tells_all_that_was_said(client: Client, queue: str) -> None:
    flow_id = start(client, queue)["flow"]["id"]
    client.ok("FlowCancel", id=flow_id, compensate=False, reason="too late")
    told = take(client, queue)[0]["data"]
    assert told == {"flow": flow_id, "role": "cancel", "compensate": False, "reason": "too late"}
    client.ok("FlowSignal", id=flow_id, name="paid", payload={"by": "ada"})
    told = take(client, queue)[0]["data"]
    assert told == {"flow": flow_id, "role": "signal", "step": "paid", "payload": {"by": "ada"}}


@pytest.mark.parametrize(("cmd", "fields"), WISHES)
def test_nothing_is_wished_of_a_flow_that_is_over_or_unknown(
    client: Client, queue: str, cmd: str, fields: dict[str, Any]
) -> None:
    flow = start(client, queue)["flow"]
    client.ok("FlowAdvance", id=flow["id"], revision=1, status="completed")
    assert client.error(cmd, id=flow["id"], **fields) == f"Flow {flow['id']} has ended"
    assert client.error(cmd, id="nobody", **fields) == "Flow not found: nobody"
    assert counts(client, queue) == {}


def test_jobs_of_a_flow_have_no_family(client: Client, queue: str) -> None:
    text = "a job of a workflow has no parent, dependencies or repetition"
    relative = push(client, queue)
    for options in ({"parentId": relative}, {"dependsOn": [relative]}, {"repeat": {"every": 1000}}):
        fields = {"workflow": "w", "queue": queue, "steps": [], "jobs": [job(queue, **options)]}
        assert client.error("FlowStart", id="f", **fields) == text
    assert client.error("FlowGet", id="f") == "Flow not found: f"


@pytest.mark.parametrize("end", ["fail", "discard", "cancel"])
def test_a_flow_hears_of_a_job_that_ends_without_success(client: Client, queue: str, end: str) -> None:
    flow_id = start(client, queue, jobs=[job(f"{queue}.steps", name="charge", maxAttempts=1)])["flow"]["id"]
    taken, token = take(client, f"{queue}.steps")
    if end == "fail":
        client.ok("FAIL", id=taken["id"], token=token, error="no money")
    elif end == "discard":
        client.ok("Discard", id=taken["id"], token=token)
    else:
        client.ok("Cancel", id=taken["id"], force=True)
    told = take(client, queue)[0]["data"]
    news = "job-lost" if end == "fail" else "job-removed"
    assert (told["flow"], told["news"], told["job"], told["name"]) == (flow_id, news, taken["id"], "charge")
    if end == "fail":
        assert told["error"] == "no money"


def test_an_attempt_that_is_followed_by_another_is_no_news(client: Client, queue: str) -> None:
    start(client, queue, jobs=[job(f"{queue}.steps", maxAttempts=2, backoff=60_000)])
    taken, token = take(client, f"{queue}.steps")
    client.ok("FAIL", id=taken["id"], token=token, error="once")
    assert counts(client, queue) == {}


def test_wait_answers_at_the_end_of_the_flow(server: ServerProcess, client: Client, queue: str) -> None:
    flow_id = start(client, queue)["flow"]["id"]
    replies: list[dict[str, Any]] = []

    def wait() -> None:
        with server.client() as waiting:
            replies.append(waiting.call("FlowWait", id=flow_id, timeout=10_000))

    waiting = threading.Thread(target=wait)
    waiting.start()
    client.ok("FlowAdvance", id=flow_id, revision=1, status="completed", steps=[{"kind": "end", "body": 5}])
    waiting.join(5)
    assert [reply["flow"]["status"] for reply in replies] == ["completed"]
    assert client.ok("FlowWait", id=flow_id, timeout=10_000)["flow"]["status"] == "completed"


def test_wait_answers_when_its_time_is_up(client: Client, queue: str) -> None:
    flow_id = start(client, queue)["flow"]["id"]
    assert client.ok("FlowWait", id=flow_id, timeout=20)["flow"]["status"] == "running"


def test_flows_are_listed_by_workflow_and_status_a_page_at_a_time(client: Client, queue: str) -> None:
    ids = [start(client, queue, id=f"{queue}-{n}", workflow=queue)["flow"]["id"] for n in range(5)]
    client.ok("FlowAdvance", id=ids[1], revision=1, status="failed")
    listed = client.ok("FlowList", workflow=queue, limit=3)["flows"]
    assert [flow["id"] for flow in listed] == ids[4:1:-1]
    rest = client.ok("FlowList", workflow=queue, before=listed[-1]["id"])["flows"]
    assert [flow["id"] for flow in rest] == [ids[1], ids[0]]
    assert [flow["id"] for flow in client.ok("FlowList", workflow=queue, status="failed")["flows"]] == [ids[1]]


def test_flows_and_their_logs_survive_kill_9(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "jobs.db") as server:
        with server.client() as client:
            start(client, "wf", id="live", jobs=[job("wf.steps")])
            start(client, "wf", id="done")
            client.ok("FlowAdvance", id="done", revision=1, status="completed", steps=[{"kind": "end", "body": "r"}])
        server.kill()
        server.start()
        with server.client() as client:
            assert client.ok("FlowGet", id="done")["steps"][-1]["body"] == "r"
            taken, token = take(client, "wf.steps")
            ack = {"id": taken["id"], "token": token}
            changed = client.ok("FlowAdvance", id="live", revision=1, steps=[{"kind": "more"}], ack=ack)
            assert changed["flow"]["revision"] == 2
            eventually(lambda: state(client, taken["id"]) == "completed")
            assert [step["seq"] for step in client.ok("FlowGet", id="live")["steps"]] == [1, 2]


def test_a_decision_can_drop_jobs_of_its_flow_also_those_at_work(client: Client, queue: str) -> None:
    jobs = [job(f"{queue}.steps", customId=f"{queue}-{n}") for n in range(2)]
    flow_id = start(client, queue, jobs=[*jobs, job(f"{queue}.steps", customId=f"{queue}-2", delay=60_000)])["flow"][
        "id"
    ]
    stranger = push(client, f"{queue}.steps")
    taken, token = take(client, f"{queue}.steps")
    drop = [f"{queue}-{n}" for n in range(3)] + [stranger, "nobody"]
    client.ok("FlowAdvance", id=flow_id, revision=1, status="compensating", drop=drop)
    assert "error" in client.call("ACK", id=taken["id"], token=token)
    assert counts(client, f"{queue}.steps") == {"waiting": 1}
    assert counts(client, queue) == {}, "whoever drops a job needs no news of it"


def test_wait_answers_when_the_flow_has_changed_since_a_revision(
    server: ServerProcess, client: Client, queue: str
) -> None:
    flow_id = start(client, queue)["flow"]["id"]
    replies: list[dict[str, Any]] = []

    def wait() -> None:
        with server.client() as waiting:
            replies.append(waiting.call("FlowWait", id=flow_id, timeout=10_000, revision=1, after=1))

    waiting = threading.Thread(target=wait)
    waiting.start()
    client.ok("FlowAdvance", id=flow_id, revision=1, steps=[{"kind": "completed", "step": "charge"}])
    waiting.join(5)
    assert [(reply["flow"]["revision"], len(reply["steps"])) for reply in replies] == [(2, 1)]
