"""GetJob, GetState, GetResult, GetJobs, SearchJobs, counts, GetJobByCustomId, GetProgress, GetChildrenValues."""

from __future__ import annotations

import pytest

from tests.protocol.steps import bury, check_job, complete, counts, ids_of, push, state, take, take_plain
from tests.wireclient import Client

STATES = ("completed", "failed", "active", "waiting", "delayed", "waiting-children")


def _one_of_each(client: Client, queue: str) -> dict[str, str]:
    """A job in every state; which is which."""
    jobs = {"completed": push(client, queue)}
    complete(client, queue, result="done")
    jobs["failed"] = bury(client, queue)
    jobs["active"] = push(client, queue)
    take(client, queue)
    jobs["waiting"] = push(client, queue)
    jobs["delayed"] = push(client, queue, delay=600_000)
    jobs["waiting-children"] = push(client, queue, dependsOn=[jobs["waiting"]])
    return jobs


def test_get_job_shows_the_job_in_every_state(client: Client, queue: str) -> None:
    for word, job_id in _one_of_each(client, queue).items():
        reply = client.call("GetJob", id=job_id)
        assert set(reply) == {"ok", "job"}
        check_job(reply["job"], queried=True, id=job_id, state=word)
        assert ("returnvalue" in reply["job"]) == (word == "completed")
        assert ("failedReason" in reply["job"]) == (word == "failed")
    assert client.error("GetJob", id="nobody") == "Job not found"


def test_get_state_knows_every_state_and_says_unknown_otherwise(client: Client, queue: str) -> None:
    for word, job_id in _one_of_each(client, queue).items():
        assert client.call("GetState", id=job_id) == {"ok": True, "id": job_id, "state": word}
    assert client.call("GetState", id="nobody") == {"ok": True, "id": "nobody", "state": "unknown"}


def test_get_result_leaves_the_key_out_when_there_is_none(client: Client, queue: str) -> None:
    jobs = _one_of_each(client, queue)
    reply = client.call("GetResult", id=jobs["completed"])
    assert reply == {"ok": True, "id": jobs["completed"], "result": "done"}
    for job_id in (jobs["waiting"], jobs["failed"], "nobody"):
        assert client.call("GetResult", id=job_id) == {"ok": True, "id": job_id}


def test_get_jobs_lists_by_state_and_by_union_in_order_of_creation(client: Client, queue: str) -> None:
    jobs = _one_of_each(client, queue)
    for word, job_id in jobs.items():
        reply = client.call("GetJobs", queue=queue, state=word)
        assert set(reply) == {"ok", "jobs"}
        assert ids_of(reply["jobs"]) == [job_id]
        check_job(reply["jobs"][0], queried=True, state=word)
    everything = ids_of(client.ok("GetJobs", queue=queue)["jobs"])
    assert everything == list(jobs.values())
    union = ids_of(client.ok("GetJobs", queue=queue, state=["failed", "completed", "failed"])["jobs"])
    assert union == [jobs["completed"], jobs["failed"]]
    assert client.call("GetJobs", queue=queue, state="sleeping") == {"ok": True, "jobs": []}
    for none in ([], ""):
        assert ids_of(client.ok("GetJobs", queue=queue, state=none)["jobs"]) == everything
    assert client.call("GetJobs", queue=f"{queue}.none") == {"ok": True, "jobs": []}


def test_get_jobs_pages_both_ways(client: Client, queue: str) -> None:
    ids = client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(120)])["ids"]
    assert ids_of(client.ok("GetJobs", queue=queue)["jobs"]) == ids[:100]
    assert ids_of(client.ok("GetJobs", queue=queue, offset=5, limit=3)["jobs"]) == ids[5:8]
    backwards = ids_of(client.ok("GetJobs", queue=queue, asc=False, offset=1, limit=3)["jobs"])
    assert backwards == ids[118:115:-1]
    assert client.ok("GetJobs", queue=queue, limit=0)["jobs"] == []
    assert client.ok("GetJobs", queue=queue, offset=500)["jobs"] == []
    assert client.error("GetJobs", queue=queue, limit=-1) == "limit must be at least 0"


def test_search_finds_jobs_by_what_is_in_them_page_by_page(client: Client, queue: str) -> None:
    ids = [push(client, queue, data={"to": f"user{n}@example.com"}) for n in range(12)]
    first = client.ok("SearchJobs", queue=queue, text="USER1", limit=2)
    assert ids_of(first["jobs"]) == [ids[11], ids[10]]
    assert first["examined"] == 2
    rest = client.ok("SearchJobs", queue=queue, text="USER1", limit=2, cursor=first["cursor"])
    assert ids_of(rest["jobs"]) == [ids[1]]
    assert (rest["examined"], rest["cursor"]) == (10, None)
    check_job(rest["jobs"][0], queried=True, id=ids[1], state="waiting")
    assert client.ok("SearchJobs", queue=queue, text="user", state=["failed", "completed"])["jobs"] == []
    assert client.ok("SearchJobs", queue=queue, text=ids[3])["jobs"][0]["id"] == ids[3]
    assert ids_of(client.ok("SearchJobs", queue=queue)["jobs"]) == ids[::-1]
    assert client.error("SearchJobs", queue=queue, text="x" * 201) == "text must be at most 200 characters"


def test_get_jobs_keeps_the_order_of_creation_whatever_the_pull_order(client: Client, queue: str) -> None:
    ids = [push(client, queue, **f) for f in ({}, {"priority": 5}, {"lifo": True}, {"priority": -1})]
    assert ids_of(client.ok("GetJobs", queue=queue, state="waiting")["jobs"]) == ids


def test_prioritized_jobs_are_waiting_jobs_with_a_priority_above_zero(client: Client, queue: str) -> None:
    plain, high, low = push(client, queue), push(client, queue, priority=3), push(client, queue, priority=-3)
    assert state(client, high) == "waiting"
    assert ids_of(client.ok("GetJobs", queue=queue, state="prioritized")["jobs"]) == [high]
    union = client.ok("GetJobs", queue=queue, state=["waiting", "prioritized"])["jobs"]
    assert ids_of(union) == [plain, high, low]
    assert counts(client, queue) == {"waiting": 3, "prioritized": 1}


def test_get_job_counts_has_every_key_and_zeros_for_an_unknown_queue(client: Client, queue: str) -> None:
    zeros = dict.fromkeys((*STATES, "prioritized", "paused"), 0)
    assert client.call("GetJobCounts", queue=f"{queue}.none") == {"ok": True, "counts": zeros}
    jobs = _one_of_each(client, queue)
    assert client.ok("GetJobCounts", queue=queue)["counts"] == zeros | dict.fromkeys(jobs, 1)


def test_jobs_of_a_paused_queue_stay_waiting(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    client.ok("Pause", queue=queue)
    assert state(client, job_id) == "waiting"
    assert counts(client, queue) == {"waiting": 1}
    for asc in (True, False):
        assert client.ok("GetJobs", queue=queue, state="paused", asc=asc)["jobs"] == []
        assert ids_of(client.ok("GetJobs", queue=queue, state=["waiting", "paused"], asc=asc)["jobs"]) == [job_id]


def test_counts_per_priority_counts_waiting_and_delayed_jobs(client: Client, queue: str) -> None:
    for fields in ({}, {"priority": 5}, {"priority": 5, "delay": 60_000}, {"priority": -3}):
        push(client, queue, **fields)
    take_plain(client, queue)
    reply = client.call("GetCountsPerPriority", queue=queue)
    assert reply == {"ok": True, "queue": queue, "counts": {"0": 1, "5": 1, "-3": 1}}
    assert client.call("GetCountsPerPriority", queue=f"{queue}.none")["counts"] == {}


def test_get_job_by_custom_id_finds_the_job_while_it_is_kept(client: Client, queue: str) -> None:
    job_id = push(client, queue, jobId="custom-7")
    reply = client.call("GetJobByCustomId", customId="custom-7")
    assert set(reply) == {"ok", "job"}
    check_job(reply["job"], queried=True, id=job_id, customId="custom-7")
    complete(client, queue, result=1)
    job = client.ok("GetJobByCustomId", customId="custom-7")["job"]
    check_job(job, queried=True, returnvalue=1)
    client.ok("RetryCompleted", queue=queue, id=job_id)
    _, token = take(client, queue)
    client.ok("FAIL", id=job_id, token=token, unrecoverable=True)
    assert client.ok("GetJobByCustomId", customId="custom-7")["job"]["id"] == job_id
    assert client.error("GetJobByCustomId", customId="nobody") == "Job not found"
    plain = push(client, queue)
    assert client.error("GetJobByCustomId", customId=plain) == "Job not found"


def test_count_counts_all_states(client: Client, queue: str) -> None:
    assert client.call("Count", queue=queue) == {"ok": True, "count": 0}
    jobs = _one_of_each(client, queue)
    assert client.call("Count", queue=queue) == {"ok": True, "count": len(jobs)}


def test_get_progress_answers_for_active_jobs_only(client: Client, queue: str) -> None:
    jobs = _one_of_each(client, queue)
    assert client.call("GetProgress", id=jobs["active"]) == {"ok": True, "progress": 0, "message": None}
    client.ok("Progress", id=jobs["active"], progress=41.5, message="half")
    reply = client.call("GetProgress", id=jobs["active"])
    assert reply == {"ok": True, "progress": 41.5, "message": "half"}
    for word in ("waiting", "completed", "failed", "delayed", "waiting-children"):
        error = client.error("GetProgress", id=jobs[word])
        assert error == f"Job is not active (current state: {word})"
    assert client.error("GetProgress", id="nobody") == "Job not found"


def test_get_children_values_gives_the_results_of_completed_children(client: Client, queue: str) -> None:
    parent = push(client, f"{queue}.parent", delay=60_000)
    child, unfinished = push(client, queue, parentId=parent), push(client, queue, parentId=parent)
    complete(client, queue, result={"n": 1})
    reply = client.call("GetChildrenValues", id=parent)
    assert reply == {"ok": True, "data": {"values": {f"{queue}:{child}": {"n": 1}}}}
    for job_id in (unfinished, "nobody"):
        assert client.call("GetChildrenValues", id=job_id) == {"ok": True, "data": {"values": {}}}


@pytest.mark.parametrize(
    "cmd", ["GetJobs", "GetJobCounts", "GetCountsPerPriority", "Count", "IsPaused", "Pause", "Drain", "Dlq"]
)
def test_queue_names_are_checked_everywhere(client: Client, cmd: str) -> None:
    assert client.error(cmd) == "Queue name is required"
    assert client.error(cmd, queue="") == "Queue name is required"
    assert client.error(cmd, queue="q" * 257) == "Queue name too long (max 256 characters)"
    assert client.error(cmd, queue="ä") == "Queue name contains invalid characters"


BIG = 1_000_000
IN_BRIEF = 70
"""Jobs of 1 MB: more than one reply holds."""


def test_jobs_in_brief_are_listed_whatever_they_carry(client: Client, queue: str) -> None:
    ids = [push(client, queue, data={"image": "x" * BIG, "of": "Ada"}) for _ in range(IN_BRIEF)]
    assert client.error("GetJobs", queue=queue).startswith("Reply exceeds 64 MB")
    listed = client.ok("GetJobs", queue=queue, brief=True)["jobs"]
    assert ids_of(listed) == ids
    for job in (listed[0], client.ok("GetJob", id=ids[0], brief=True)["job"]):
        check_job({key: job[key] for key in job if key != "dataBytes"}, queried=True, state="waiting")
        assert job["data"]["image"].startswith("xxx")
        assert job["data"]["of"] == "Ada"
        assert len(str(job["data"])) < 1000
        assert job["dataBytes"] > BIG
    shown = client.ok("DashboardQueue", queue=queue, includeJobs=True, jobsLimit=50)["data"]["jobs"]["waiting"]
    assert [job["id"] for job in shown] == ids[:50]


def test_a_search_in_brief_shows_the_beginning_of_what_it_finds(client: Client, queue: str) -> None:
    ids = [push(client, queue, data={"image": "x" * BIG, "of": "Ada"}) for _ in range(3)]
    found = client.ok("SearchJobs", queue=queue, text="Ada", brief=True)
    assert ids_of(found["jobs"]) == ids[::-1]
    assert len(str(found)) < 10_000


def test_a_job_in_brief_has_neither_result_nor_the_history_of_its_failures(client: Client, queue: str) -> None:
    jobs = _one_of_each(client, queue)
    for word, job_id in jobs.items():
        job = client.ok("GetJob", id=job_id, brief=True)["job"]
        assert (job["state"], job["timeline"], job["stacktrace"]) == (word, [], None)
        assert "returnvalue" not in job
        assert ("failedReason" in job) == (word == "failed")
        assert job["data"] == client.ok("GetJob", id=job_id)["job"]["data"]
