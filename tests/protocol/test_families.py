"""Parents and children: PUSHF, links made later, failure policies, and what became of the children."""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol.steps import OK, check_job, complete, counts, ids_of, job_of, push, state, take
from tests.serverprocess import ServerProcess
from tests.wireclient import Client


def _flow(queue: str, *, children: int = 1, **child_options: Any) -> list[dict[str, Any]]:
    """A parent `<queue>-p` in `<queue>.parent` and its children `<queue>-c0`... in `<queue>`, children first."""
    parent, names = f"{queue}-p", [f"{queue}-c{n}" for n in range(children)]
    entries = [
        {
            "id": name,
            "queue": queue,
            "input": {
                "name": "child",
                "data": {"__parentId": parent, "__parentQueue": f"{queue}.parent"},
                "parentId": parent,
                **child_options,
            },
        }
        for name in names
    ]
    options = {"name": "parent", "data": {"__childrenIds": names}, "childrenIds": names, "dependsOn": names}
    return [*entries, {"id": parent, "queue": f"{queue}.parent", "input": options}]


# -- PUSHF ---------------------------------------------------------------------------------------------------


def test_a_family_whose_reply_would_be_too_large_is_not_added(server: ServerProcess, queue: str) -> None:
    data = "x" * 66_700  # a thousand of these fit into one command, and with the rest of their jobs into no reply
    jobs = [{"id": f"{queue}-{n}", "queue": queue, "input": {"data": data}} for n in range(1000)]
    with server.client(timeout=60) as client:
        assert client.error("PUSHF", jobs=jobs) == "flow too large: its reply would exceed 64 MB"
        assert counts(client, queue) == {}
        assert len(client.ok("PUSHF", jobs=jobs[:950])["data"]["jobs"]) == 950
        client.ok("Obliterate", queue=queue)


def test_a_flow_is_stored_whole_and_answers_with_its_jobs(client: Client, queue: str) -> None:
    reply = client.call("PUSHF", jobs=_flow(queue, children=2))
    assert set(reply) == {"ok", "data"}
    jobs = {job["id"]: check_job(job, queried=False) for job in reply["data"]["jobs"]}
    assert set(jobs) == {f"{queue}-c0", f"{queue}-c1", f"{queue}-p"}
    assert jobs[f"{queue}-c0"]["parentId"] == f"{queue}-p"
    assert jobs[f"{queue}-p"]["childrenIds"] == [f"{queue}-c0", f"{queue}-c1"]
    assert state(client, f"{queue}-p") == "waiting-children"
    for n in range(2):
        complete(client, queue, result=n)
    parent = job_of(client, f"{queue}-p")
    assert (parent["state"], parent["childrenCompleted"]) == ("waiting", 2)
    values = client.ok("GetChildrenValues", id=f"{queue}-p")["data"]["values"]
    assert values == {f"{queue}:{queue}-c0": 0, f"{queue}:{queue}-c1": 1}


def test_an_empty_flow_is_fine(client: Client) -> None:
    assert client.call("PUSHF", jobs=[]) == {"ok": True, "data": {"jobs": []}}


def _broken(queue: str, fault: str) -> list[dict[str, Any]]:
    child, parent = flow = _flow(queue)
    if fault == "twice":
        flow.append(dict(child))
    elif fault == "unknown dependency":
        child["input"]["dependsOn"] = ["nobody"]
    elif fault == "cycle":
        child["input"]["dependsOn"] = [parent["id"]]
    elif fault == "one-sided child":
        del child["input"]["parentId"]
    elif fault == "policies":
        child["input"] |= {"failParentOnFailure": True, "ignoreDependencyOnFailure": True}
    elif fault == "repeat":
        child["input"]["repeat"] = {"every": 5}
    elif fault == "dedup":
        child["input"]["uniqueKey"] = "k"
    elif fault == "data":
        del child["input"]["data"], child["input"]["name"]
    elif fault == "number":
        parent["input"]["priority"] = 0.5
    return flow


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("twice", "duplicate flow job id: {queue}-c0"),
        ("unknown dependency", "flow dependency not found: nobody"),
        ("cycle", "flow contains a dependency cycle"),
        ("one-sided child", "flow child {queue}-c0 does not point back to parent {queue}-p"),
        ("policies", "flow failure policies are mutually exclusive"),
        ("repeat", "repeat is not supported inside an atomic flow"),
        ("dedup", "deduplication is not supported inside an atomic flow"),
        ("data", "jobs[0]: input.data is required"),
        ("number", "jobs[1]: input.priority must be an integer"),
    ],
)
def test_a_broken_flow_is_refused_whole(client: Client, queue: str, fault: str, error: str) -> None:
    assert client.error("PUSHF", jobs=_broken(queue, fault)) == error.format(queue=queue)
    assert counts(client, queue) == counts(client, f"{queue}.parent") == {}


def test_a_flow_of_more_than_ten_thousand_jobs_is_refused(client: Client, queue: str) -> None:
    jobs = [{"id": str(n), "queue": queue, "input": {"data": 1}} for n in range(10_001)]
    assert client.error("PUSHF", jobs=jobs) == "flow exceeds the 10000 job limit"
    assert counts(client, queue) == {}


def test_a_flow_with_an_id_that_is_taken_is_refused_whole(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue))
    error = client.error("PUSHF", jobs=[{"id": f"{queue}-new", "queue": queue, "input": {"data": 1}}, *_flow(queue)])
    assert f"{queue}-c0" in error
    assert state(client, f"{queue}-new") == "unknown"


# -- failure policies ----------------------------------------------------------------------------------------


def _fail_child(client: Client, queue: str) -> None:
    job, token = take(client, queue)
    client.ok("FAIL", id=job["id"], token=token, error="boom", unrecoverable=True)


def test_without_a_policy_the_parent_of_a_failed_child_stays_blocked(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue))
    _fail_child(client, queue)
    assert state(client, f"{queue}-p") == "waiting-children"


def test_a_retried_child_does_not_touch_its_parent(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue, failParentOnFailure=True, backoff=0))
    job, token = take(client, queue)
    client.ok("FAIL", id=job["id"], token=token)
    assert state(client, f"{queue}-p") == "waiting-children"
    complete(client, queue)
    assert state(client, f"{queue}-p") == "waiting"


def test_fail_parent_on_failure_buries_the_parent(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue, failParentOnFailure=True))
    _fail_child(client, queue)
    assert state(client, f"{queue}-p") == "failed"
    (entry,) = client.ok("Dlq", queue=f"{queue}.parent")["entries"]
    assert (entry["reason"], entry["error"]) == ("unknown", f"Child job {queue}-c0 failed: boom")


def test_continue_parent_on_failure_lets_the_parent_go_at_once(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue, children=2, continueParentOnFailure=True))
    _fail_child(client, queue)
    assert state(client, f"{queue}-p") == "waiting"
    reply = client.call("GetFailedChildrenValues", id=f"{queue}-p")
    assert reply == {"ok": True, "values": {f"{queue}:{queue}-c0": "boom"}}
    assert client.call("GetIgnoredChildrenFailures", id=f"{queue}-p") == {"ok": True, "values": {}}


def test_ignore_dependency_on_failure_waits_for_the_other_children(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue, children=2, ignoreDependencyOnFailure=True))
    _fail_child(client, queue)
    assert state(client, f"{queue}-p") == "waiting-children"
    complete(client, queue)
    assert state(client, f"{queue}-p") == "waiting"
    reply = client.call("GetIgnoredChildrenFailures", id=f"{queue}-p")
    assert reply == {"ok": True, "values": {f"{queue}:{queue}-c0": "boom"}}
    assert client.call("GetFailedChildrenValues", id=f"{queue}-p") == {"ok": True, "values": {}}


def test_remove_dependency_on_failure_drops_it_silently(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue, removeDependencyOnFailure=True))
    _fail_child(client, queue)
    assert state(client, f"{queue}-p") == "waiting"
    for cmd in ("GetFailedChildrenValues", "GetIgnoredChildrenFailures"):
        assert client.call(cmd, id=f"{queue}-p")["values"] == {}
    assert client.call("GetFailedChildrenValues", id="nobody") == {"ok": True, "values": {}}
    assert client.call("GetIgnoredChildrenFailures", id="nobody") == {"ok": True, "values": {}}


# -- links ---------------------------------------------------------------------------------------------------


def test_a_child_pushed_before_its_parent_is_linked_later(client: Client, queue: str) -> None:
    child = push(client, queue, data={"n": 1, "__parentId": "pending"}, parentId="pending")
    parent = push(client, f"{queue}.parent", childrenIds=[child], dependsOn=[child])
    assert client.call("UpdateParent", childId=child, parentId=parent) == OK
    job = job_of(client, child)
    assert job["parentId"] == parent
    assert job["data"] == {"n": 1, "__parentId": parent, "__parentQueue": f"{queue}.parent"}
    assert job_of(client, parent)["childrenIds"] == [child]
    complete(client, queue, result=5)
    assert state(client, parent) == "waiting"
    assert client.ok("GetChildrenValues", id=parent)["data"]["values"] == {f"{queue}:{child}": 5}


def test_update_parent_adds_an_undeclared_child(client: Client, queue: str) -> None:
    child, parent = push(client, queue, data="text"), push(client, f"{queue}.parent", delay=60_000)
    assert client.call("UpdateParent", childId=child, parentId=parent) == OK
    assert job_of(client, parent)["childrenIds"] == [child]
    assert job_of(client, child)["data"] == "text"


def test_update_parent_refuses_links_that_cannot_be(client: Client, queue: str) -> None:
    child, parent, other = (push(client, queue) for _ in range(3))
    error = client.error("UpdateParent", childId="nobody", parentId=parent)
    assert error == "Child job not found: nobody"
    error = client.error("UpdateParent", childId=child, parentId="nobody")
    assert error == "Parent job not found: nobody"
    error = client.error("UpdateParent", childId=child, parentId=child)
    assert error == "A flow job cannot be its own parent"
    client.ok("UpdateParent", childId=child, parentId=parent)
    client.ok("UpdateParent", childId=child, parentId=parent)
    error = client.error("UpdateParent", childId=child, parentId=other)
    assert error == f"Child job {child} already belongs to parent {parent}"
    push(client, f"{queue}.done")
    done = complete(client, f"{queue}.done")
    error = client.error("UpdateParent", childId=other, parentId=done)
    assert error == f"Parent job {done} is not linkable"


def test_a_parent_may_step_back_until_its_children_are_done(client: Client, queue: str) -> None:
    parent = push(client, f"{queue}.parent")
    _, token = take(client, f"{queue}.parent")
    child = push(client, queue, parentId=parent)
    error = client.error("MoveToWaitingChildren", id=parent)
    assert error == f"Lock token required for job {parent}"
    error = client.error("MoveToWaitingChildren", id=parent, token="x")
    assert error == f"Invalid or expired lock token for job {parent}"
    reply = client.call("MoveToWaitingChildren", id=parent, token=token)
    assert reply == {"ok": True, "data": {"moved": True}}
    check_job(job_of(client, parent), queried=True, state="waiting-children", attempts=0, startedAt=None)
    assert complete(client, queue) == child
    assert state(client, parent) == "waiting"
    assert client.error("MoveToWaitingChildren", id=parent) == "Job is not active"


def test_remove_child_dependency_lets_the_parent_go(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue))
    child, parent = f"{queue}-c0", f"{queue}-p"
    assert client.call("RemoveChildDependency", id=child) == {"ok": True, "removed": True}
    assert state(client, parent) == "waiting"
    assert job_of(client, parent)["childrenIds"] == []
    assert client.error("RemoveChildDependency", id=child) == f"Job {child} has no parent"
    assert client.error("RemoveChildDependency", id="nobody") == "Job not found: nobody"


def test_remove_unprocessed_children_spares_those_that_have_begun(client: Client, queue: str) -> None:
    client.ok("PUSHF", jobs=_flow(queue, children=3))
    begun, token = take(client, queue)
    assert client.call("RemoveUnprocessedChildren", id=f"{queue}-p") == OK
    assert counts(client, queue) == {"active": 1}
    assert state(client, f"{queue}-p") == "waiting-children"
    client.ok("ACK", id=begun["id"], token=token)
    assert state(client, f"{queue}-p") == "waiting"
    assert ids_of(client.ok("GetJobs", queue=queue)["jobs"]) == [begun["id"]]
