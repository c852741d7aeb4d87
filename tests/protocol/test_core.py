"""PUSH, PUSHB, PULL, PULLB, ACK, ACKB, FAIL: how jobs go in, are handed out, and end."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest

from tests.protocol.steps import (
    NOT_APPLIED,
    OK,
    UUID7,
    bury,
    check_job,
    complete,
    counts,
    ids_of,
    job_of,
    park,
    push,
    state,
    take,
    take_plain,
)
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

UNDEFINED = msgpack.ExtType(0, b"\x00")


# -- PUSH ----------------------------------------------------------------------------------------------------


def test_push_answers_the_id_of_the_new_job_and_nothing_else(client: Client, queue: str) -> None:
    reply = client.call("PUSH", queue=queue, data={"to": "a"})
    assert set(reply) == {"ok", "id"}
    assert reply["ok"] is True
    assert UUID7.fullmatch(reply["id"])
    assert counts(client, queue) == {"waiting": 1}


def test_a_job_without_options_has_the_defaults_of_the_reference(client: Client, queue: str) -> None:
    before = time.time() * 1000
    job_id = push(client, queue, data={"name": "kept in data", "n": [1, None, 2.5]})
    job = check_job(
        job_of(client, job_id),
        queried=True,
        id=job_id,
        queue=queue,
        data={"name": "kept in data", "n": [1, None, 2.5]},
        attempts=0,
        maxAttempts=3,
        backoff=1000,
        backoffConfig=None,
        priority=0,
        lifo=False,
        ttl=None,
        timeout=None,
        stallTimeout=None,
        uniqueKey=None,
        customId=None,
        parentId=None,
        groupId=None,
        dependsOn=[],
        childrenIds=[],
        tags=[],
        progress=0,
        progressMessage=None,
        stacktrace=None,
        removeOnComplete=False,
        removeOnFail=False,
        durable=False,
        repeat=None,
        stallCount=0,
        stackTraceLimit=10,
        keepLogs=None,
        sizeLimit=None,
        startedAt=None,
        completedAt=None,
        state="waiting",
    )
    assert "name" not in job
    assert "returnvalue" not in job
    assert "failedReason" not in job
    assert before - 1 <= job["createdAt"] <= time.time() * 1000 + 1
    assert job["runAt"] == job["createdAt"] == job["lastHeartbeat"]
    assert job["timeline"] == [{"state": "waiting", "timestamp": job["createdAt"]}]


def test_every_option_of_push_comes_back_on_the_job(client: Client, queue: str) -> None:
    given = {
        "name": "mail",
        "priority": 7,
        "maxAttempts": 5,
        "ttl": 60_000,
        "timeout": 1500.5,
        "stallTimeout": 700,
        "uniqueKey": "k",
        "groupId": "g",
        "tags": ["a", "b"],
        "lifo": True,
        "removeOnComplete": True,
        "removeOnFail": True,
        "durable": True,
        "stackTraceLimit": 3,
        "keepLogs": 4,
        "sizeLimit": 1000,
        "failParentOnFailure": True,
        "debounceId": "d",
        "debounceTtl": 9,
    }
    job_id = push(
        client,
        queue,
        **given,
        jobId="every-option",
        backoff={"type": "fixed", "delay": 20, "maxDelay": 30},
        dedup={"ttl": 5000, "extend": True, "replace": False},
    )
    assert job_id == "every-option"
    check_job(
        job_of(client, job_id),
        queried=True,
        **given,
        customId="every-option",
        backoff=20,
        backoffConfig={"type": "fixed", "delay": 20, "maxDelay": 30},
        deduplicationTtl=5000,
        deduplicationExtend=True,
        deduplicationReplace=False,
    )


def test_a_timestamp_given_with_the_push_is_when_the_job_was_created(client: Client, queue: str) -> None:
    job_id = push(client, queue, timestamp=1_700_000_000_000.0, delay=10)
    job = job_of(client, job_id)
    assert (job["createdAt"], job["runAt"]) == (1_700_000_000_000.0, 1_700_000_000_010.0)
    assert state(client, job_id) == "waiting"


def test_push_without_the_data_key_is_refused(client: Client, queue: str) -> None:
    assert client.error("PUSH", queue=queue) == "data is required"
    assert counts(client, queue) == {}


def test_a_job_with_a_name_needs_no_data(client: Client, queue: str) -> None:
    alone = client.ok("PUSH", queue=queue, name="tick")["id"]
    batch = client.ok("PUSHB", queue=queue, jobs=[{"name": "tick"}, {"name": "tock", "data": 1}])["ids"]
    flow = [{"id": f"{queue}-f", "queue": queue, "input": {"name": "tick"}}]
    client.ok("PUSHF", jobs=flow)
    assert [job_of(client, job_id)["data"] for job_id in (alone, *batch, f"{queue}-f")] == [None, None, 1, None]


@pytest.mark.parametrize("nothing", [None, UNDEFINED], ids=["nil", "undefined"])
def test_nil_and_undefined_data_count_as_null(client: Client, queue: str, nothing: object) -> None:
    job_id = push(client, queue, data=nothing)
    assert job_of(client, job_id)["data"] is None
    assert take_plain(client, queue)["data"] is None


@pytest.mark.parametrize("nothing", [None, UNDEFINED], ids=["nil", "undefined"])
def test_nil_and_undefined_options_count_as_absent(client: Client, queue: str, nothing: object) -> None:
    optional = (
        "name priority delay maxAttempts backoff ttl timeout stallTimeout uniqueKey jobId dependsOn tags groupId "
        "lifo removeOnComplete removeOnFail durable repeat dedup parentId childrenIds timestamp keepLogs"
    )
    job_id = push(client, queue, data=1, **dict.fromkeys(optional.split(), nothing))
    job = check_job(job_of(client, job_id), queried=True, maxAttempts=3, backoff=1000, priority=0, delay=None)
    assert "name" not in job


def test_data_is_returned_byte_for_byte(client: Client, queue: str) -> None:
    odd = {
        "bin": b"\x00\xff",
        "when": msgpack.Timestamp(1_700_000_000, 5),
        7: "int key",
        "nan": [float("inf")],
        "undefined": UNDEFINED,
    }
    push(client, queue, data=odd)
    assert take_plain(client, queue)["data"] == odd


def test_data_of_ten_megabytes_passes_and_more_is_refused(client: Client, queue: str) -> None:
    client.socket.settimeout(30)
    limit = 10 * 1024 * 1024
    assert client.error("PUSH", queue=queue, data="x" * (limit + 1)) == "Job data too large (max 10MB)"
    job_id = push(client, queue, data="x" * (limit - 5))
    assert counts(client, queue) == {"waiting": 1}
    client.ok("Cancel", id=job_id)


REFUSED_OPTIONS = [
    ({"queue": ""}, "Queue name is required"),
    ({"queue": None}, "Queue name is required"),
    ({"queue": "q" * 257}, "Queue name too long (max 256 characters)"),
    ({"queue": "a b"}, "Queue name contains invalid characters"),
    ({"queue": "a\n"}, "Queue name contains invalid characters"),
    ({"priority": "high"}, "priority must be a number"),
    ({"priority": float("nan")}, "priority must be a finite number"),
    ({"priority": 1.5}, "priority must be an integer"),
    ({"priority": -1_000_001}, "priority must be at least -1000000"),
    ({"priority": 1_000_001}, "priority must be at most 1000000"),
    ({"delay": -1}, "delay must be at least 0"),
    ({"delay": 31_536_000_001}, "delay must be at most 31536000000"),
    ({"delay": float("inf")}, "delay must be a finite number"),
    ({"timeout": -1}, "timeout must be at least 0"),
    ({"timeout": 86_400_001}, "timeout must be at most 86400000"),
    ({"maxAttempts": 0}, "maxAttempts must be at least 1"),
    ({"maxAttempts": 1001}, "maxAttempts must be at most 1000"),
    ({"maxAttempts": 2.5}, "maxAttempts must be an integer"),
    ({"backoff": -1}, "backoff must be at least 0"),
    ({"backoff": 86_400_001}, "backoff must be at most 86400000"),
    ({"backoff": {"type": "linear", "delay": 1}}, "backoff.type must be 'fixed' or 'exponential'"),
    ({"backoff": {"delay": 5}}, "backoff.type must be 'fixed' or 'exponential'"),
    ({"backoff": {"type": "fixed"}}, "backoff.delay is required"),
    ({"backoff": {"type": "fixed", "delay": 86_400_001}}, "backoff.delay must be at most 86400000"),
    ({"ttl": -1}, "ttl must be at least 0"),
    ({"ttl": 31_536_000_001}, "ttl must be at most 31536000000"),
    ({"groupId": 5}, "groupId must be a string"),
    ({"groupId": ""}, "groupId must be a non-empty string"),
    ({"groupId": "g" * 257}, "groupId must be at most 256 characters"),
    ({"groupId": "a\x00b"}, "groupId must not contain NUL characters"),
    ({"name": ""}, "Job name must be a non-empty string of at most 256 characters"),
    ({"name": "n" * 257}, "Job name must be a non-empty string of at most 256 characters"),
    ({"name": 5}, "Job name must be a non-empty string of at most 256 characters"),
    ({"repeat": {}}, "repeat requires exactly one of every or pattern"),
    ({"repeat": {"every": 5, "pattern": "* * * * *"}}, "repeat requires exactly one of every or pattern"),
    ({"repeat": {"every": 0}}, "repeat.every must be a positive finite number"),
    (
        {"repeat": {"pattern": "bad"}},
        "Invalid repeat pattern: Cron expression must have 5 fields, or 6 fields with leading seconds",
    ),
    (
        {"repeat": {"every": 5}, "jobId": "x"},
        "repeat jobs cannot use JobOptions.jobId; use repeat.jobId instead",
    ),
    (
        {"repeat": {"every": 5}, "dependsOn": ["x"]},
        "repeat jobs cannot participate in parent or dependency relationships",
    ),
    ({"dependsOn": ["nobody"]}, "Dependency job not found: nobody"),
    ({"parentId": "nobody"}, "Parent job not found: nobody"),
    ({"jobId": "self", "dependsOn": ["self"]}, "Job cannot depend on itself: self"),
]


@pytest.mark.parametrize(("fields", "error"), REFUSED_OPTIONS, ids=[str(f)[:40] for f, _ in REFUSED_OPTIONS])
def test_push_refuses_wrong_options_with_the_text_of_the_reference(
    client: Client, queue: str, fields: dict[str, Any], error: str
) -> None:
    assert client.error("PUSH", **{"queue": queue, "data": 1, **fields}) == error
    assert counts(client, queue) == {}


def test_a_job_that_others_wait_for_is_not_replaced(client: Client, queue: str) -> None:
    first = push(client, queue, uniqueKey="k")
    push(client, queue, dependsOn=[first])
    error = client.error("PUSH", queue=queue, data=2, uniqueKey="k", dedup={"replace": True})
    assert error == f"Cannot replace deduplicated job {first} because live jobs depend on it"
    assert counts(client, queue) == {"waiting": 1, "waiting-children": 1}


def test_of_several_faults_of_a_push_that_of_the_queue_is_named_first(client: Client) -> None:
    wrong = {"queue": "a b", "groupId": "", "priority": 1.5}
    assert client.error("PUSH", **wrong) == "Queue name contains invalid characters"
    assert client.error("PUSH") == "Queue name is required"
    assert client.error("PUSH", **wrong | {"queue": "q"}) == "data is required"
    assert client.error("PUSH", **wrong | {"queue": "q", "data": 1}) == "groupId must be a non-empty string"


def test_the_limits_themselves_are_accepted(client: Client, queue: str) -> None:
    push(client, queue, priority=1_000_000, ttl=31_536_000_000, timeout=86_400_000, maxAttempts=1000)
    push(client, queue, priority=-1_000_000.0, delay=31_536_000_000, backoff=86_400_000, name="n" * 256)
    assert counts(client, queue) == {"waiting": 1, "delayed": 1, "prioritized": 1}


def test_a_group_that_is_full_refuses_further_jobs(client: Client, queue: str) -> None:
    push(client, queue, groupId="g", groupMaxSize=1)
    error = client.error("PUSH", queue=queue, data=1, groupId="g", groupMaxSize=1)
    assert error == "Group g has reached its maximum size of 1"
    push(client, queue, groupId="other", groupMaxSize=1)
    assert counts(client, queue) == {"waiting": 2}


def test_unknown_fields_are_ignored(client: Client, queue: str) -> None:
    push(client, queue, colour="blue", attempts={"x": 1})
    assert counts(client, queue) == {"waiting": 1}


# -- jobId ---------------------------------------------------------------------------------------------------


def test_a_job_id_is_idempotent_while_its_job_lives(client: Client, queue: str) -> None:
    first = push(client, queue, jobId="order-1", data="first")
    assert first == "order-1"
    assert push(client, queue, jobId="order-1", data="second") == first
    job, token = take(client, queue)
    assert job["data"] == "first"
    assert push(client, queue, jobId="order-1", data="third") == first
    client.ok("FAIL", id=first, token=token)
    assert push(client, queue, jobId="order-1", data="fourth") == first
    assert counts(client, queue) == {"delayed": 1}


def test_a_job_id_starts_a_new_generation_after_completion(client: Client, queue: str) -> None:
    push(client, queue, jobId="gen", data="old")
    complete(client, queue, result="old result")
    client.ok("AddLog", id="gen", message="old line")
    assert push(client, queue, jobId="gen", data="new") == "gen"
    assert state(client, "gen") == "waiting"
    assert job_of(client, "gen")["data"] == "new"
    assert "result" not in client.ok("GetResult", id="gen")
    assert client.ok("GetLogs", id="gen")["data"] == {"logs": [], "count": 0}
    assert counts(client, queue) == {"waiting": 1}


def test_a_job_id_starts_a_new_generation_after_burial_and_after_cancel(client: Client, queue: str) -> None:
    bury(client, queue, jobId="gen-dlq")
    assert push(client, queue, jobId="gen-dlq") == "gen-dlq"
    assert client.ok("Dlq", queue=queue)["jobs"] == []
    client.ok("Cancel", id="gen-dlq")
    assert push(client, queue, jobId="gen-dlq") == "gen-dlq"
    assert counts(client, queue) == {"waiting": 1}


def test_the_same_job_id_in_two_queues_makes_two_jobs(client: Client, queue: str) -> None:
    other = f"{queue}.other"
    first = push(client, queue, jobId="twin", data="a")
    second = push(client, other, jobId="twin", data="b")
    assert first == "twin"
    assert UUID7.fullmatch(second)
    assert push(client, other, jobId="twin") == second
    assert job_of(client, second)["customId"] == "twin"
    assert (counts(client, queue), counts(client, other)) == ({"waiting": 1}, {"waiting": 1})


def test_an_empty_job_id_is_no_job_id(client: Client, queue: str) -> None:
    assert UUID7.fullmatch(push(client, queue, jobId=""))
    push(client, queue, jobId="")
    assert counts(client, queue) == {"waiting": 2}


# -- dependsOn, ttl, timeout, repeat -------------------------------------------------------------------------


def test_a_dependent_waits_until_every_dependency_is_completed(client: Client, queue: str) -> None:
    first, second = push(client, queue), push(client, queue)
    dependent = push(client, f"{queue}.later", dependsOn=[first, second])
    assert state(client, dependent) == "waiting-children"
    assert counts(client, f"{queue}.later") == {"waiting-children": 1}
    complete(client, queue)
    assert state(client, dependent) == "waiting-children"
    assert client.ok("PULL", queue=f"{queue}.later")["job"] is None
    complete(client, queue)
    assert state(client, dependent) == "waiting"
    assert take_plain(client, f"{queue}.later")["id"] == dependent


def test_completed_and_removed_dependencies_count_as_settled(client: Client, queue: str) -> None:
    kept = push(client, queue)
    complete(client, queue)
    gone = push(client, queue, removeOnComplete=True)
    complete(client, queue)
    assert state(client, gone) == "unknown"
    assert state(client, push(client, queue, dependsOn=[kept, gone])) == "waiting"


def test_a_dependent_of_a_failed_job_stays_blocked_and_can_be_cancelled(client: Client, queue: str) -> None:
    doomed = push(client, queue)
    dependent = push(client, f"{queue}.later", dependsOn=[doomed])
    job, token = take(client, queue)
    client.ok("FAIL", id=job["id"], token=token, unrecoverable=True)
    assert state(client, dependent) == "waiting-children"
    assert client.error("Promote", id=dependent) == "Job not found or not delayed"
    client.ok("Cancel", id=dependent)
    assert state(client, dependent) == "unknown"


def test_a_job_past_its_ttl_is_dropped_when_it_would_be_handed_out(client: Client, queue: str) -> None:
    job_id = push(client, queue, ttl=1)
    eventually(lambda: time.time() * 1000 > job_of(client, job_id)["createdAt"] + 5)
    assert client.ok("PULL", queue=queue)["job"] is None
    assert state(client, job_id) == "unknown"
    assert client.ok("Dlq", queue=queue)["jobs"] == []
    assert counts(client, queue) == {}


def test_a_job_that_runs_past_its_timeout_fails_and_is_retried(client: Client, queue: str) -> None:
    job_id = push(client, queue, timeout=60, maxAttempts=2, backoff=0)
    take(client, queue)
    eventually(lambda: state(client, job_id) != "active")
    again = job_of(client, job_id)
    assert again["attempts"] == 1
    assert again["failedReason"] == "Job timeout exceeded"
    take(client, queue)
    eventually(lambda: state(client, job_id) == "failed")
    (entry,) = client.ok("Dlq", queue=queue)["entries"]
    assert (entry["reason"], entry["error"]) == ("timeout", "Job timeout exceeded")


def test_repeat_limit_counts_the_runs_after_the_first(client: Client, queue: str) -> None:
    first = push(client, queue, repeat={"every": 20, "limit": 2}, data="again")
    runs = []
    for count in range(3):
        job, token = take(client, queue)
        assert job["repeat"]["count"] == count
        assert job["data"] == "again"
        client.ok("ACK", id=job["id"], token=token)
        runs.append(job["id"])
    assert runs[0] == first
    assert len(set(runs)) == 3
    assert counts(client, queue) == {"completed": 3}


def test_a_repeat_job_keeps_its_phase_and_ends_with_a_terminal_failure(client: Client, queue: str) -> None:
    push(client, queue, repeat={"every": 40})
    complete(client, queue)
    (successor,) = client.ok("GetJobs", queue=queue, state=["waiting", "delayed"])["jobs"]
    assert successor["runAt"] == successor["repeat"]["prevMillis"]
    job, token = take(client, queue)
    client.ok("FAIL", id=job["id"], token=token, unrecoverable=True)
    assert counts(client, queue) == {"completed": 1, "failed": 1}


# -- PUSHB ---------------------------------------------------------------------------------------------------


def test_push_batch_answers_the_ids_in_input_order(client: Client, queue: str) -> None:
    reply = client.call("PUSHB", queue=queue, jobs=[{"data": n, "customId": f"b{n}"} for n in range(5)])
    assert reply == {"ok": True, "ids": [f"b{n}" for n in range(5)]}
    assert counts(client, queue) == {"waiting": 5}
    assert client.call("PUSHB", queue=queue, jobs=[]) == {"ok": True, "ids": []}


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"data": 1, "priority": 1.5}, "jobs[1]: priority must be an integer"),
        ({}, "jobs[1]: data is required"),
        ({"data": 1, "dependsOn": ["nobody"]}, "jobs[1]: Dependency job not found: nobody"),
        ({"data": 1, "customId": "s", "dependsOn": ["s"]}, "jobs[1]: Job cannot depend on itself: s"),
        ({"data": 1, "repeat": {}}, "jobs[1]: repeat requires exactly one of every or pattern"),
        ({"data": 1, "parentId": "nobody"}, "jobs[1]: Parent job not found: nobody"),
        ("x", "jobs[1] must be an object"),
    ],
)
def test_one_bad_entry_refuses_the_whole_batch(client: Client, queue: str, entry: object, error: str) -> None:
    assert client.error("PUSHB", queue=queue, jobs=[{"data": 1}, entry, {"data": 3}]) == error
    assert counts(client, queue) == {}


def test_jobs_of_a_batch_may_depend_on_each_other_in_any_order(client: Client, queue: str) -> None:
    jobs = [{"data": 1, "customId": "late", "dependsOn": ["early"]}, {"data": 2, "customId": "early"}]
    client.ok("PUSHB", queue=queue, jobs=jobs)
    assert counts(client, queue) == {"waiting": 1, "waiting-children": 1}
    assert complete(client, queue) == "early"
    assert complete(client, queue) == "late"


def test_equal_keys_within_a_batch_give_the_first_job_twice(client: Client, queue: str) -> None:
    jobs = [
        {"data": 1, "customId": "same"},
        {"data": 2, "customId": "same"},
        {"data": 3, "uniqueKey": "u"},
        {"data": 4, "uniqueKey": "u"},
    ]
    ids = client.ok("PUSHB", queue=queue, jobs=jobs)["ids"]
    assert ids[0] == ids[1] == "same"
    assert ids[2] == ids[3]
    assert counts(client, queue) == {"waiting": 2}


def test_a_job_id_inside_a_batch_entry_is_ignored(client: Client, queue: str) -> None:
    (job_id,) = client.ok("PUSHB", queue=queue, jobs=[{"data": 1, "jobId": "not-here"}])["ids"]
    assert UUID7.fullmatch(job_id)


# -- PULL, PULLB ---------------------------------------------------------------------------------------------


def test_pull_without_owner_has_no_token_key(client: Client, queue: str) -> None:
    assert client.call("PULL", queue=queue) == {"ok": True, "job": None}
    job_id = push(client, queue)
    reply = client.call("PULL", queue=queue)
    assert set(reply) == {"ok", "job"}
    check_job(reply["job"], queried=False, id=job_id, attempts=0)
    assert reply["job"]["startedAt"] >= reply["job"]["createdAt"]
    assert state(client, job_id) == "active"
    assert client.call("ACK", id=job_id) == OK


def test_pull_with_owner_gives_a_token_and_null_when_empty(client: Client, queue: str) -> None:
    assert client.call("PULL", queue=queue, owner="w") == {"ok": True, "job": None, "token": None}
    push(client, queue)
    reply = client.call("PULL", queue=queue, owner="w")
    assert set(reply) == {"ok", "job", "token"}
    assert UUID7.fullmatch(reply["token"])


def test_pull_batch_gives_tokens_in_the_order_of_the_jobs(client: Client, queue: str) -> None:
    pushed = client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(3)])["ids"]
    assert client.call("PULLB", queue=f"{queue}.none", count=2) == {"ok": True, "jobs": []}
    assert client.call("PULLB", queue=f"{queue}.none", count=2, owner="w")["tokens"] == []
    reply = client.call("PULLB", queue=queue, count=2, owner="w")
    assert set(reply) == {"ok", "jobs", "tokens"}
    assert ids_of(reply["jobs"]) == pushed[:2]
    for job, token in zip(reply["jobs"], reply["tokens"], strict=True):
        assert client.call("ACK", id=job["id"], token=token) == OK
    assert set(client.call("PULLB", queue=queue, count=9)) == {"ok", "jobs"}


@pytest.mark.parametrize("cmd", ["PULL", "PULLB"])
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"timeout": 60_001}, "timeout must be at most 60000"),
        ({"timeout": -1}, "timeout must be at least 0"),
        ({"timeout": "1"}, "timeout must be a number"),
        ({"queue": ""}, "Queue name is required"),
        ({"lockTtl": 0}, "lockTtl must be at least 1"),
    ],
)
def test_pull_refuses_wrong_fields(client: Client, queue: str, cmd: str, fields: dict[str, Any], error: str) -> None:
    assert client.error(cmd, **{"queue": queue, "count": 1, **fields}) == error


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (0, "count must be at least 1"),
        (1001, "count must be at most 1000"),
        (None, "count is required"),
    ],
)
def test_pull_batch_refuses_wrong_counts(client: Client, queue: str, count: object, error: str) -> None:
    assert client.error("PULLB", queue=queue, count=count) == error


def test_jobs_come_by_priority_then_lifo_then_time(client: Client, queue: str) -> None:
    for name, options in {
        "fifo-1": {},
        "low": {"priority": -5},
        "lifo-old": {"lifo": True},
        "fifo-2": {},
        "high": {"priority": 9},
        "lifo-new": {"lifo": True},
        "high-2": {"priority": 9},
        "high-lifo": {"priority": 9, "lifo": True},
    }.items():
        push(client, queue, jobId=f"{queue}/{name}", **options)
    order = [job["id"].rsplit("/", 1)[1] for job in client.ok("PULLB", queue=queue, count=10)["jobs"]]
    assert order == ["high-lifo", "high", "high-2", "lifo-new", "lifo-old", "fifo-1", "fifo-2", "low"]


def test_a_delayed_job_queues_by_its_time_and_blocks_nobody(client: Client, queue: str) -> None:
    matured = push(client, queue, delay=30)
    far = push(client, queue, delay=60_000, priority=100)
    assert state(client, matured) == "delayed"
    now = push(client, queue)
    eventually(lambda: state(client, matured) == "waiting")
    later = push(client, queue)
    assert ids_of(client.ok("PULLB", queue=queue, count=10)["jobs"]) == [now, matured, later]
    assert state(client, far) == "delayed"


def test_a_waiting_pull_is_served_by_a_push(server: ServerProcess, client: Client, queue: str) -> None:
    with server.client() as poller:
        park(poller, "PULL", queue=queue, timeout=10_000, owner="w")
        job_id = push(client, queue)
        reply = poller.recv()
        assert reply["reqId"] == "parked"
        assert reply["job"]["id"] == job_id
        assert state(client, job_id) == "active"


@pytest.mark.alone
def test_a_waiting_pull_is_served_when_a_delayed_job_matures(client: Client, queue: str) -> None:
    push(client, queue, delay=120)
    began = time.monotonic()
    job = take_plain(client, queue, timeout=5000)
    assert time.monotonic() - began < 0.6
    assert job["runAt"] - job["createdAt"] == 120
    assert job["startedAt"] >= job["runAt"]


def test_a_batch_pull_waits_for_the_first_job_only(server: ServerProcess, client: Client, queue: str) -> None:
    with server.client() as poller:
        park(poller, "PULLB", queue=queue, count=10, timeout=10_000)
        push(client, queue)
        assert len(poller.recv()["jobs"]) == 1


@pytest.mark.alone
def test_a_pull_that_waits_in_vain_answers_after_its_timeout(client: Client, queue: str) -> None:
    began = time.monotonic()
    assert client.call("PULL", queue=queue, timeout=100)["job"] is None
    assert 0.09 <= time.monotonic() - began < 0.5


def test_waiting_pulls_are_served_in_the_order_in_which_they_came(
    server: ServerProcess, client: Client, queue: str
) -> None:
    with server.client() as first, server.client() as second:
        park(first, "PULL", queue=queue, timeout=10_000)
        park(second, "PULL", queue=queue, timeout=10_000)
        one, two = push(client, queue), push(client, queue)
        assert first.recv()["job"]["id"] == one
        assert second.recv()["job"]["id"] == two


# -- the end of a connection ---------------------------------------------------------------------------------


def test_jobs_of_a_closed_connection_wait_again_without_an_attempt(
    server: ServerProcess, client: Client, queue: str
) -> None:
    push(client, queue, maxAttempts=1)
    push(client, queue)
    with server.client() as leaving:
        leased, token = take(leaving, queue)
        plain = take_plain(leaving, queue)
    eventually(lambda: counts(client, queue) == {"waiting": 2})
    for job_id in (leased["id"], plain["id"]):
        job = check_job(job_of(client, job_id), queried=True, attempts=0, stallCount=0, startedAt=None)
        assert len(job["timeline"]) <= 2
    error = client.error("ACK", id=leased["id"], token=token)
    assert error == f"Job not found or not in processing state: {leased['id']}"
    error = client.error("FAIL", id=leased["id"], token=token)
    assert error == f"Job not found or not in processing state: {leased['id']}"
    assert ids_of(client.ok("PULLB", queue=queue, count=5)["jobs"]) == [leased["id"], plain["id"]]


def test_a_detached_pull_survives_its_connection(server: ServerProcess, client: Client, queue: str) -> None:
    job_id = push(client, queue)
    with server.client() as leaving:
        _, token = take(leaving, queue, detach=True)
    push(client, f"{queue}.marker")
    with server.client() as marker:
        take_plain(marker, f"{queue}.marker")
    eventually(lambda: counts(client, f"{queue}.marker") == {"waiting": 1})
    assert state(client, job_id) == "active"
    assert client.call("ACK", id=job_id, token=token) == OK


def test_the_waiting_pull_of_a_closed_connection_takes_no_job(
    server: ServerProcess, client: Client, queue: str
) -> None:
    with server.client() as leaving:
        park(leaving, "PULL", queue=queue, timeout=10_000)
    push(client, queue)
    assert take_plain(client, queue)["attempts"] == 0


def test_another_connection_may_settle_a_job_with_its_token(server: ServerProcess, client: Client, queue: str) -> None:
    job_id = push(client, queue)
    _, token = take(client, queue)
    with server.client() as other:
        assert other.call("ACK", id=job_id, token=token, result=1) == OK
    assert state(client, job_id) == "completed"


# -- ACK -----------------------------------------------------------------------------------------------------


def test_ack_completes_and_keeps_the_result(client: Client, queue: str) -> None:
    push(client, queue)
    job, token = take(client, queue)
    assert client.call("ACK", id=job["id"], token=token, result={"sum": 3}) == OK
    done = check_job(job_of(client, job["id"]), queried=True, state="completed", returnvalue={"sum": 3})
    assert done["completedAt"] >= job["startedAt"]
    assert [entry["state"] for entry in done["timeline"]] == ["waiting", "active", "completed"]
    assert counts(client, queue) == {"completed": 1}


def test_a_null_result_is_a_result_and_an_absent_one_is_none(client: Client, queue: str) -> None:
    for fields, expected in [({"result": None}, {"result": None}), ({}, {}), ({"result": UNDEFINED}, {})]:
        job_id = push(client, queue)
        _, token = take(client, queue)
        client.ok("ACK", id=job_id, token=token, **fields)
        assert client.call("GetResult", id=job_id) == {"ok": True, "id": job_id, **expected}


def test_ack_without_the_right_token_is_refused_and_changes_nothing(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    _, token = take(client, queue)
    for cmd in ("ACK", "FAIL"):
        assert client.error(cmd, id=job_id) == f"Lock token required for job {job_id}"
        assert client.error(cmd, id=job_id, token="") == f"Lock token required for job {job_id}"
        assert client.error(cmd, id=job_id, token="x") == f"Invalid or expired lock token for job {job_id}"
    assert state(client, job_id) == "active"
    assert client.call("ACK", id=job_id, token=token) == OK


@pytest.mark.parametrize("cmd", ["ACK", "FAIL"])
def test_a_job_that_is_not_active_cannot_be_settled(client: Client, queue: str, cmd: str) -> None:
    waiting = push(client, queue)
    for job_id in (waiting, "nobody"):
        assert client.error(cmd, id=job_id) == f"Job not found or not in processing state: {job_id}"
    assert client.error(cmd) == "id is required"
    assert state(client, waiting) == "waiting"


def test_remove_on_complete_leaves_nothing_behind(client: Client, queue: str) -> None:
    for push_fields, ack_fields in [({"removeOnComplete": True}, {}), ({}, {"removeOnComplete": True})]:
        job_id = push(client, queue, **push_fields)
        _, token = take(client, queue)
        client.ok("ACK", id=job_id, token=token, result=1, **ack_fields)
        assert state(client, job_id) == "unknown"
        assert client.error("GetJob", id=job_id) == "Job not found"
        assert client.error("WaitJob", id=job_id, timeout=10) == "Job not found"
    assert counts(client, queue) == {}


# -- late ACK and FAIL ---------------------------------------------------------------------------------------


def _outlive(client: Client, queue: str, **fields: Any) -> tuple[str, str]:
    """A job whose lease ran out and that waits again, and the old token."""
    job_id = push(client, queue, **fields)
    _, token = take(client, queue, lockTtl=100)
    eventually(lambda: state(client, job_id) == "waiting")
    return job_id, token


@pytest.mark.alone
def test_an_expired_lease_gives_the_job_back_within_half_a_second(client: Client, queue: str) -> None:
    push(client, queue)
    began = time.monotonic()
    take(client, queue, lockTtl=200)
    job, _ = take(client, queue)
    assert 0.19 <= time.monotonic() - began < 0.7
    check_job(job, queried=False, attempts=1, stallCount=1)


def test_a_late_ack_is_applied_while_nobody_else_has_the_job(client: Client, queue: str) -> None:
    job_id, token = _outlive(client, queue)
    assert client.call("ACK", id=job_id, token=token, result="late") == OK
    check_job(job_of(client, job_id), queried=True, state="completed", returnvalue="late")
    assert client.ok("PULL", queue=queue)["job"] is None


def test_a_late_fail_is_not_applied_when_the_lease_ran_out(client: Client, queue: str) -> None:
    job_id, token = _outlive(client, queue)
    assert client.call("FAIL", id=job_id, token=token) == NOT_APPLIED
    check_job(job_of(client, job_id), queried=True, state="waiting", attempts=1)


@pytest.mark.parametrize("cmd", ["ACK", "FAIL"])
def test_a_late_token_is_refused_when_the_job_was_handed_out_again(client: Client, queue: str, cmd: str) -> None:
    job_id, old = _outlive(client, queue)
    _, new = take(client, queue)
    assert client.error(cmd, id=job_id, token=old) == f"Invalid or expired lock token for job {job_id}"
    assert state(client, job_id) == "active"
    assert client.call("ACK", id=job_id, token=new) == OK


@pytest.mark.parametrize("cmd", ["ACK", "FAIL"])
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_late_settlement_of_a_timed_out_attempt_is_not_applied(
    client: Client, queue: str, cmd: str, max_attempts: int
) -> None:
    job_id = push(client, queue, timeout=50, maxAttempts=max_attempts, backoff=60_000)
    _, token = take(client, queue)
    eventually(lambda: state(client, job_id) != "active")
    assert client.call(cmd, id=job_id, token=token) == NOT_APPLIED
    assert state(client, job_id) == ("failed" if max_attempts == 1 else "delayed")


@pytest.mark.parametrize("cmd", ["ACK", "FAIL"])
@pytest.mark.parametrize("unrecoverable", [True, False])
def test_a_late_settlement_of_a_failed_attempt_is_not_applied(
    client: Client, queue: str, cmd: str, unrecoverable: bool
) -> None:
    job_id = push(client, queue, backoff=60_000)
    _, token = take(client, queue)
    client.ok("FAIL", id=job_id, token=token, unrecoverable=unrecoverable)
    before = state(client, job_id)
    assert client.call(cmd, id=job_id, token=token) == NOT_APPLIED
    assert state(client, job_id) == before == ("failed" if unrecoverable else "delayed")


def test_a_repeated_ack_is_answered_and_changes_nothing(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    _, token = take(client, queue)
    client.ok("ACK", id=job_id, token=token, result=1)
    assert client.call("ACK", id=job_id, token=token, result=2) == NOT_APPLIED
    assert client.ok("GetResult", id=job_id)["result"] == 1


def test_a_lease_that_runs_out_at_the_last_attempt_buries_the_job(client: Client, queue: str) -> None:
    job_id = push(client, queue, maxAttempts=1)
    take(client, queue, lockTtl=100)
    eventually(lambda: state(client, job_id) == "failed")
    (entry,) = client.ok("Dlq", queue=queue)["entries"]
    assert entry["error"] == "Lock expired at max attempts (1)"


# -- ACKB ----------------------------------------------------------------------------------------------------


def _take_many(client: Client, queue: str, count: int) -> tuple[list[str], list[str]]:
    client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(count)])
    reply = client.ok("PULLB", queue=queue, count=count, owner="w")
    return ids_of(reply["jobs"]), reply["tokens"]


def test_ack_batch_completes_all_with_their_results(client: Client, queue: str) -> None:
    ids, tokens = _take_many(client, queue, 3)
    assert client.call("ACKB", ids=ids, tokens=tokens, results=[1, UNDEFINED, None]) == OK
    assert counts(client, queue) == {"completed": 3}
    results = [client.ok("GetResult", id=job_id) for job_id in ids]
    assert [reply.get("result", "none") for reply in results] == [1, "none", None]
    assert client.call("ACKB", ids=[]) == OK


def test_an_undefined_result_in_a_batch_is_none_also_beside_undefined_tokens(client: Client, queue: str) -> None:
    client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(3)])
    ids = ids_of(client.ok("PULLB", queue=queue, count=3)["jobs"])
    reply = client.call("ACKB", ids=ids, tokens=[UNDEFINED] * 3, results=[1, UNDEFINED, None])
    assert reply == OK
    results = [client.ok("GetResult", id=job_id) for job_id in ids]
    assert [reply.get("result", "none") for reply in results] == [1, "none", None]


def test_ack_batch_removes_those_that_ask_for_it(client: Client, queue: str) -> None:
    ids, tokens = _take_many(client, queue, 2)
    assert client.call("ACKB", ids=ids, tokens=tokens, removeOnCompletes=[True, None]) == OK
    assert [state(client, job_id) for job_id in ids] == ["unknown", "completed"]


@pytest.mark.parametrize("fault", ["bad token", "no token", "unknown id", "same id twice"])
def test_ack_batch_applies_all_or_nothing(client: Client, queue: str, fault: str) -> None:
    ids, tokens = _take_many(client, queue, 3)
    wrong = {
        "bad token": (ids, [tokens[0], "wrong", tokens[2]], f"Invalid or expired lock token for job {ids[1]}"),
        "no token": (ids, [tokens[0], "", tokens[2]], f"Lock token required for job {ids[1]}"),
        "unknown id": ([*ids, "no"], [*tokens, "t"], "Job not found or not in processing state: no"),
        "same id twice": (
            [*ids, ids[0]],
            [*tokens, tokens[0]],
            f"Job not found or not in processing state: {ids[0]}",
        ),
    }
    bad_ids, bad_tokens, error = wrong[fault]
    assert client.error("ACKB", ids=bad_ids, tokens=bad_tokens) == error
    assert counts(client, queue) == {"active": 3}
    assert client.call("ACKB", ids=ids, tokens=tokens) == OK


@pytest.mark.parametrize(
    ("field", "error"),
    [
        ("tokens", "ACKB tokens length must match ids length"),
        ("results", "ACKB results length must match ids length"),
        ("removeOnCompletes", "ACKB removeOnCompletes length must match ids length"),
    ],
)
def test_lists_of_another_length_are_refused(client: Client, queue: str, field: str, error: str) -> None:
    ids, tokens = _take_many(client, queue, 2)
    item: object = True if field == "removeOnCompletes" else "x"
    assert client.error("ACKB", **{"ids": ids, "tokens": tokens, field: [item]}) == error
    assert counts(client, queue) == {"active": 2}


def test_ack_batch_lists_leases_that_were_finalised_before(client: Client, queue: str) -> None:
    ids, tokens = _take_many(client, queue, 3)
    client.ok("FAIL", id=ids[1], token=tokens[1], unrecoverable=True)
    reply = client.call("ACKB", ids=ids, tokens=tokens)
    assert reply == {"ok": True, "data": {"ignoredIndices": [1], "ignoredIds": [ids[1]]}}
    assert counts(client, queue) == {"completed": 2, "failed": 1}
    reply = client.call("ACKB", ids=ids, tokens=tokens)
    assert reply["data"] == {"ignoredIndices": [0, 1, 2], "ignoredIds": ids}


@pytest.mark.parametrize("end", ["timeout", "failure", "completion"])
def test_a_job_that_is_gone_with_its_lease_does_not_spoil_the_batch(client: Client, queue: str, end: str) -> None:
    push(client, queue, maxAttempts=1, removeOnFail=True, removeOnComplete=True, timeout=1 if end == "timeout" else 0)
    gone, token = take(client, queue)
    if end == "failure":
        client.ok("FAIL", id=gone["id"], token=token)
    elif end == "completion":
        client.ok("ACK", id=gone["id"], token=token)
    eventually(lambda: state(client, gone["id"]) == "unknown")
    ids, tokens = _take_many(client, queue, 2)
    reply = client.call("ACKB", ids=[gone["id"], *ids], tokens=[token, *tokens])
    assert reply == {"ok": True, "data": {"ignoredIndices": [0], "ignoredIds": [gone["id"]]}}
    assert counts(client, queue) == {"completed": 2}
    for command in ("ACK", "FAIL"):
        assert client.call(command, id=gone["id"], token=token) == NOT_APPLIED
        error = client.error(command, id=gone["id"], token="another")
        assert error == f"Job not found or not in processing state: {gone['id']}"


# -- FAIL ----------------------------------------------------------------------------------------------------


def test_fail_counts_the_attempt_and_retries_after_the_backoff(client: Client, queue: str) -> None:
    job_id = push(client, queue, backoff={"type": "fixed", "delay": 100})
    _, token = take(client, queue)
    assert client.call("FAIL", id=job_id, token=token, error="boom", stack=["  at a", "", "at b"]) == OK
    job = check_job(
        job_of(client, job_id),
        queried=True,
        state="delayed",
        attempts=1,
        failedReason="boom",
        stacktrace=["at a", "at b"],
        startedAt=None,
    )
    assert [entry["state"] for entry in job["timeline"]] == ["waiting", "active", "failed", "waiting"]
    failed, again = job["timeline"][2:]
    assert (failed["error"], failed["attempt"], again["attempt"]) == ("boom", 1, 2)
    retried, _ = take(client, queue)
    check_job(retried, queried=False, id=job_id, attempts=1)
    assert retried["startedAt"] - failed["timestamp"] >= 80


@pytest.mark.parametrize(
    ("backoff", "low", "high"),
    [
        (1000, 1000, 3000),
        ({"type": "exponential", "delay": 1000}, 1000, 3000),
        ({"type": "fixed", "delay": 1000}, 800, 1200),
        ({"type": "exponential", "delay": 1000, "maxDelay": 700}, 700, 700),
        (86_400_000, 3_600_000, 3_600_000),
    ],
    ids=["number", "exponential", "fixed", "maxDelay", "hour cap"],
)
def test_the_first_backoff_lies_in_its_range(client: Client, queue: str, backoff: object, low: int, high: int) -> None:
    delays = []
    for _ in range(30):
        job_id = push(client, queue, backoff=backoff, priority=1)
        _, token = take(client, queue)
        client.ok("FAIL", id=job_id, token=token)
        job = job_of(client, job_id)
        delays.append(job["runAt"] - job["timeline"][2]["timestamp"])
        assert job["runAt"] == int(job["runAt"])
    assert low <= min(delays) <= max(delays) <= high
    assert low == high or len(set(delays)) > 5


def test_the_second_backoff_is_twice_as_long(client: Client, queue: str) -> None:
    job_id = push(client, queue, backoff=1000)
    for _ in range(2):
        _, token = take(client, queue)
        client.ok("FAIL", id=job_id, token=token)
        client.ok("Promote", id=job_id) if job_of(client, job_id)["attempts"] == 1 else None
    job = job_of(client, job_id)
    failed = [entry for entry in job["timeline"] if entry["state"] == "failed"][-1]
    assert 2000 <= job["runAt"] - failed["timestamp"] <= 6000


def test_without_backoff_a_failed_job_waits_at_once(client: Client, queue: str) -> None:
    job_id = push(client, queue, backoff=0)
    _, token = take(client, queue)
    client.ok("FAIL", id=job_id, token=token)
    assert state(client, job_id) == "waiting"
    assert take_plain(client, queue)["attempts"] == 1


def test_the_last_attempt_ends_in_the_dead_letter_queue(client: Client, queue: str) -> None:
    job_id = push(client, queue, maxAttempts=2, backoff=0)
    for error in ("first", "second"):
        _, token = take(client, queue)
        client.ok("FAIL", id=job_id, token=token, error=error)
    assert state(client, job_id) == "failed"
    (entry,) = client.ok("Dlq", queue=queue)["entries"]
    assert entry["reason"] == "max_attempts_exceeded"
    assert [(a["attempt"], a["reason"], a["error"]) for a in entry["attempts"]] == [
        (1, "explicit_fail", "first"),
        (2, "explicit_fail", "second"),
    ]


def test_the_timeline_names_the_worker_of_each_attempt(client: Client, queue: str) -> None:
    job_id = push(client, queue, maxAttempts=3, backoff=1)

    def workers() -> list[str | None]:
        return [e.get("worker") for e in job_of(client, job_id)["timeline"] if e["state"] == "active"]

    for number, owner in enumerate(("ada", "bob"), 1):
        _, token = take(client, queue, owner=owner)
        assert workers() == ["ada", "bob"][:number]
        client.ok("FAIL", id=job_id, token=token, error="boom")
    take_plain(client, queue)
    assert workers() == ["ada", "bob", None]


def test_an_unrecoverable_failure_is_not_retried(client: Client, queue: str) -> None:
    job_id = bury(client, queue)
    check_job(job_of(client, job_id), queried=True, state="failed", attempts=1, failedReason="boom")


def test_remove_on_fail_leaves_nothing_behind(client: Client, queue: str) -> None:
    for push_fields, fail_fields in [({"removeOnFail": True}, {}), ({}, {"removeOnFail": True})]:
        job_id = push(client, queue, **push_fields)
        _, token = take(client, queue)
        client.ok("FAIL", id=job_id, token=token, unrecoverable=True, **fail_fields)
        assert state(client, job_id) == "unknown"
    assert counts(client, queue) == {}


def test_a_stack_longer_than_its_limit_is_cut(client: Client, queue: str) -> None:
    job_id = push(client, queue, stackTraceLimit=2, backoff=60_000)
    _, token = take(client, queue)
    client.ok("FAIL", id=job_id, token=token, stack=["a\nb", "c"])
    assert job_of(client, job_id)["stacktrace"] == ["a", "b"]


def test_a_failure_is_not_refused_for_what_it_says(client: Client, queue: str) -> None:
    job_id = push(client, queue, stackTraceLimit=1000, backoff=60_000)
    _, token = take(client, queue)
    error, stack = "x" * 1_500_000, [f"line {n}" for n in range(300)]
    client.ok("FAIL", id=job_id, token=token, error=error, stack=["y" * 1_500_000, *stack])
    job = check_job(job_of(client, job_id), queried=True, state="delayed", failedReason="x" * 1_048_576)
    assert job["stacktrace"] == ["y" * 1_048_576, *stack[:99]]
