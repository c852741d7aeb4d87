"""Cron, CronGet, CronList, CronDelete: schedules as clients see them, and what they push."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgpack
import pytest

from tests.protocol.steps import OK, counts, job_of, push, state, take, take_plain
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client


def _now() -> float:
    return time.time() * 1000


def test_cron_answers_the_schedule_with_its_next_run(client: Client, queue: str) -> None:
    reply = client.call("Cron", name=queue, queue=queue, data={"n": 1}, schedule="0 3 * * *", timezone="UTC")
    assert set(reply) == {"ok", "cron"}
    cron = reply["cron"]
    assert isinstance(cron.pop("nextRun"), float)
    assert cron == {
        "name": queue,
        "queue": queue,
        "schedule": "0 3 * * *",
        "repeatEvery": None,
        "timezone": "UTC",
        "executions": 0,
        "priority": 0,
    }
    assert client.call("CronGet", name=queue)["cron"]["schedule"] == "0 3 * * *"
    assert counts(client, queue) == {}


def test_a_schedule_runs_in_its_time_zone(client: Client, queue: str) -> None:
    rome = client.ok("Cron", name="rome", queue=queue, data=1, schedule="30 12 * * *", timezone="Europe/Rome")
    tokyo = client.ok("Cron", name="tokyo", queue=queue, data=1, schedule="30 12 * * *", timezone="Asia/Tokyo")
    hours = (rome["cron"]["nextRun"] - tokyo["cron"]["nextRun"]) / 3_600_000 % 24
    assert hours in (7, 8)


def test_an_interval_first_runs_after_one_interval(client: Client, queue: str) -> None:
    before = _now()
    cron = client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=60_000, maxLimit=5, priority=3)["cron"]
    assert before + 59_999 <= cron["nextRun"] <= _now() + 60_001
    assert (cron["schedule"], cron["repeatEvery"], cron["maxLimit"]) == (None, 60_000, 5)
    assert cron["priority"] == 3
    assert "timezone" not in cron
    assert "lastRun" not in cron
    assert "jobName" not in cron


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "Cron job must have either schedule or repeatEvery"),
        (
            {"repeatEvery": 0},
            "Cron repeatEvery must be a positive safe integer number of milliseconds",
        ),
        (
            {"repeatEvery": 1.5},
            "Cron repeatEvery must be a positive safe integer number of milliseconds",
        ),
        (
            {"repeatEvery": "1000"},
            "Cron repeatEvery must be a positive safe integer number of milliseconds",
        ),
        (
            {"schedule": "* * *"},
            "Invalid cron expression: Cron expression must have 5 fields, or 6 fields with leading seconds",
        ),
        (
            {"schedule": "0 0 30 2 *"},
            "Invalid cron expression: Cron expression has no future occurrences",
        ),
        ({"schedule": "61 * * * *"}, "Invalid cron expression: invalid minute field"),
        (
            {"schedule": "* * * * *", "timezone": "Mars/Base"},
            "Invalid cron expression: unknown time zone 'Mars/Base'",
        ),
        ({"schedule": "* * * * *", "name": ""}, "name must be a non-empty string"),
        ({"schedule": "* * * * *", "queue": "a b"}, "Queue name contains invalid characters"),
        ({"schedule": "* * * * *", "priority": 0.5}, "priority must be an integer"),
        ({"schedule": "* * * * *", "jobOptions": {"maxAttempts": 0}}, "jobOptions.maxAttempts must be at least 1"),
        ({"schedule": "* * * * *", "data": "x" * (10 * 1024 * 1024 + 1)}, "Job data too large (max 10MB)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_cron_refuses_what_it_cannot_run(client: Client, queue: str, fields: dict[str, object], error: str) -> None:
    assert client.error("Cron", **{"name": queue, "queue": queue, "data": 1, **fields}) == error
    assert client.error("CronGet", name=queue) == "Cron job not found"


@pytest.mark.parametrize("schedule", ["@daily", "@hourly", "@weekly", "*/5 * * * * *", "0 9 * * mon-fri"])
def test_macros_and_seconds_are_understood(client: Client, queue: str, schedule: str) -> None:
    cron = client.ok("Cron", name=queue, queue=queue, data=1, schedule=schedule)["cron"]
    assert _now() < cron["nextRun"] <= _now() + 8 * 86_400_000
    client.ok("CronDelete", name=queue)


def test_an_interval_pushes_jobs_with_the_options_of_the_schedule(client: Client, queue: str) -> None:
    client.ok(
        "Cron",
        name=queue,
        queue=queue,
        data={"from": "cron"},
        repeatEvery=40,
        priority=4,
        jobName="tick",
        jobOptions={"maxAttempts": 7, "backoff": {"type": "fixed", "delay": 5}, "removeOnComplete": True},
    )
    job, _ = take(client, queue)
    assert (job["name"], job["data"], job["priority"], job["maxAttempts"]) == ("tick", {"from": "cron"}, 4, 7)
    assert job["backoffConfig"] == {"type": "fixed", "delay": 5}
    assert job["removeOnComplete"] is True
    client.ok("CronDelete", name=queue)


def test_a_run_is_held_back_while_the_job_before_it_lives(client: Client, queue: str) -> None:
    client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=25)
    eventually(lambda: client.ok("CronGet", name=queue)["cron"]["executions"] >= 4)
    assert counts(client, queue) == {"waiting": 1}
    job_id = take_plain(client, queue)["id"]
    client.ok("ACK", id=job_id)
    assert take_plain(client, queue)["id"] != job_id
    client.ok("CronDelete", name=queue)


def test_without_the_overlap_guard_every_run_pushes_a_job(client: Client, queue: str) -> None:
    client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=25, preventOverlap=False)
    eventually(lambda: counts(client, queue).get("waiting", 0) >= 3)
    client.ok("CronDelete", name=queue)


def test_an_immediate_schedule_runs_at_once(client: Client, queue: str) -> None:
    client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=600_000, immediately=True)
    take_plain(client, queue)
    assert client.ok("CronGet", name=queue)["cron"]["executions"] == 1


def test_a_schedule_that_reached_its_limit_is_gone(client: Client, queue: str) -> None:
    client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=20, maxLimit=2, preventOverlap=False)
    eventually(lambda: client.call("CronGet", name=queue)["ok"] is False)
    assert client.error("CronGet", name=queue) == "Cron job not found"
    assert counts(client, queue) == {"waiting": 2}


def test_a_schedule_for_workers_only_is_skipped_without_one(server: ServerProcess, client: Client, queue: str) -> None:
    first = client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=25, skipIfNoWorker=True)["cron"]
    eventually(lambda: client.ok("CronGet", name=queue)["cron"]["nextRun"] > first["nextRun"] + 60)
    assert counts(client, queue) == {}
    client.ok("RegisterWorker", name="w", queues=[queue])
    take_plain(client, queue)
    client.ok("CronDelete", name=queue)


def test_a_schedule_is_replaced_by_name_and_keeps_its_executions(client: Client, queue: str) -> None:
    client.ok("Cron", name=queue, queue=queue, data="old", repeatEvery=30)
    eventually(lambda: client.ok("CronGet", name=queue)["cron"]["executions"] >= 1)
    replaced = client.ok("Cron", name=queue, queue=f"{queue}.new", data="new", schedule="@yearly")["cron"]
    assert replaced["executions"] >= 1
    assert (replaced["queue"], replaced["schedule"], replaced["repeatEvery"]) == (f"{queue}.new", "@yearly", None)
    lines = [cron for cron in client.ok("CronList")["crons"] if cron["name"] == queue]
    assert lines == [replaced]


def test_the_expression_wins_when_both_are_given(client: Client, queue: str) -> None:
    both = {"schedule": "@yearly", "repeatEvery": 20, "timezone": "UTC"}
    cron = client.ok("Cron", name=queue, queue=queue, data=1, **both)["cron"]
    assert cron["nextRun"] == datetime(datetime.now(UTC).year + 1, 1, 1, tzinfo=UTC).timestamp() * 1000


def test_cron_list_shows_every_schedule(client: Client, queue: str) -> None:
    client.ok("Cron", name=queue, queue=queue, data=1, schedule="@daily", jobName="n")
    reply = client.call("CronList")
    assert set(reply) == {"ok", "crons"}
    (cron,) = [cron for cron in reply["crons"] if cron["name"] == queue]
    assert cron == client.ok("CronGet", name=queue)["cron"]
    assert cron["jobName"] == "n"
    assert None not in (cron["name"], cron["queue"], cron["nextRun"], cron["executions"])


def test_cron_delete_forgets_the_schedule_and_keeps_its_jobs(client: Client, queue: str) -> None:
    client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=600_000, immediately=True)
    job_id = take_plain(client, queue)["id"]
    assert client.call("CronDelete", name=queue) == OK
    assert client.error("CronDelete", name=queue) == "Cron job not found"
    assert client.error("CronGet", name=queue) == "Cron job not found"
    assert state(client, job_id) == "active"


def test_the_unique_key_of_a_schedule_is_that_of_its_jobs(client: Client, queue: str) -> None:
    owner = push(client, queue, uniqueKey="mine")
    client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=20, uniqueKey="mine")
    eventually(lambda: client.ok("CronGet", name=queue)["cron"]["executions"] >= 2)
    assert client.ok("GetDeduplicationJobId", queue=queue, deduplicationId="mine")["data"] == {"jobId": owner}
    assert counts(client, queue) == {"waiting": 1}
    client.ok("CronDelete", name=queue)


def test_undefined_fields_of_a_schedule_count_as_absent(client: Client, queue: str) -> None:
    undefined = msgpack.ExtType(0, b"\x00")
    names = [
        "schedule",
        "priority",
        "maxLimit",
        "timezone",
        "jobName",
        "uniqueKey",
        "dedup",
        "immediately",
        "jobOptions",
    ]
    fields = dict.fromkeys(names, undefined)
    client.ok("Cron", name=queue, queue=queue, data=undefined, repeatEvery=20.0, **fields)
    job = take_plain(client, queue)
    assert job_of(client, job["id"])["data"] is None
    client.ok("CronDelete", name=queue)


def test_the_last_run_of_a_schedule_is_told(client: Client, queue: str) -> None:
    planned = client.ok("Cron", name=queue, queue=queue, data=1, repeatEvery=100)["cron"]["nextRun"]
    cron = eventually(lambda: (found := client.ok("CronGet", name=queue)["cron"])["executions"] and found)
    assert planned <= cron["lastRun"] < cron["nextRun"]
    client.ok("CronDelete", name=queue)
