"""What many protocol tests do on their way: push, take, bury, look at the shape of a job."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgpack

from tests.wireclient import Client

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
NONE = type(None)
OK = {"ok": True}
NOT_APPLIED = {"ok": True, "data": {"applied": False, "reason": "already-finalized"}}

JOB_SHAPE: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "queue": (str,),
    "data": (object,),
    "createdAt": (float,),
    "runAt": (float,),
    "startedAt": (float, NONE),
    "completedAt": (float, NONE),
    "attempts": (int,),
    "maxAttempts": (int,),
    "backoff": (int, float),
    "backoffConfig": (dict, NONE),
    "priority": (int,),
    "lifo": (bool,),
    "ttl": (int, float, NONE),
    "timeout": (int, float, NONE),
    "stallTimeout": (int, float, NONE),
    "uniqueKey": (str, NONE),
    "customId": (str, NONE),
    "parentId": (str, NONE),
    "groupId": (str, NONE),
    "dependsOn": (list,),
    "childrenIds": (list,),
    "tags": (list,),
    "childrenCompleted": (int,),
    "progress": (int, float),
    "progressMessage": (str, NONE),
    "stacktrace": (list, NONE),
    "removeOnComplete": (bool,),
    "removeOnFail": (bool,),
    "durable": (bool,),
    "repeat": (dict, NONE),
    "lastHeartbeat": (float,),
    "stallCount": (int,),
    "stackTraceLimit": (int,),
    "keepLogs": (int, NONE),
    "sizeLimit": (int, NONE),
    "failParentOnFailure": (bool,),
    "removeDependencyOnFailure": (bool,),
    "continueParentOnFailure": (bool,),
    "ignoreDependencyOnFailure": (bool,),
    "deduplicationTtl": (int, float, NONE),
    "deduplicationExtend": (bool,),
    "deduplicationReplace": (bool,),
    "debounceId": (str, NONE),
    "debounceTtl": (int, float, NONE),
    "timeline": (list,),
}
OPTIONAL_IN_QUERIES = {"state": str, "returnvalue": object, "failedReason": str, "name": str}


def burst(client: Client, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send these in one write, so that the server reads them in one go; their replies."""
    bodies = [msgpack.packb(command) for command in commands]
    client.socket.sendall(b"".join(struct.pack(">I", len(body)) + body for body in bodies))
    return [client.recv() for _ in commands]


def check_job(job: dict[str, Any], *, queried: bool, **expected: Any) -> dict[str, Any]:
    """`job` has exactly the keys of the protocol, each of its type, and the expected values."""
    allowed = OPTIONAL_IN_QUERIES if queried else {"name": str}
    assert set(job) - set(allowed) == set(JOB_SHAPE), set(job) ^ set(JOB_SHAPE)
    for key, types in JOB_SHAPE.items():
        value = job[key]
        assert isinstance(value, types), (key, value)
        assert not isinstance(value, bool) or bool in types or object in types, (key, value)
    for key, kind in allowed.items():
        assert key not in job or isinstance(job[key], kind), (key, job[key])
    for entry in job["timeline"]:
        assert isinstance(entry["state"], str)
        assert isinstance(entry["timestamp"], float)
        assert set(entry) <= {"state", "timestamp", "error", "attempt", "worker"}
        assert None not in entry.values()
    assert {key: job.get(key) for key in expected} == expected
    return job


def push(client: Client, queue: str, **fields: Any) -> str:
    return str(client.ok("PUSH", queue=queue, **{"data": {"n": 1}, **fields})["id"])


def take(client: Client, queue: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """The next job under a lease, and its token."""
    reply = client.ok("PULL", queue=queue, **{"owner": "tester", "timeout": 5000, **fields})
    assert reply["job"] is not None, "no job came"
    return reply["job"], reply["token"]


def take_plain(client: Client, queue: str, **fields: Any) -> dict[str, Any]:
    """The next job without a lease of a named owner."""
    job = client.ok("PULL", queue=queue, **{"timeout": 5000, **fields})["job"]
    assert job is not None, "no job came"
    return dict(job)


def complete(client: Client, queue: str, result: Any = None) -> str:
    job, token = take(client, queue)
    client.ok("ACK", id=job["id"], token=token, result=result)
    return str(job["id"])


def bury(client: Client, queue: str, error: str = "boom", **fields: Any) -> str:
    """Push a job and fail it for good."""
    job_id = push(client, queue, **fields)
    job, token = take(client, queue)
    assert job["id"] == job_id
    client.ok("FAIL", id=job_id, token=token, error=error, unrecoverable=True)
    return job_id


def state(client: Client, job_id: str) -> str:
    return str(client.ok("GetState", id=job_id)["state"])


def job_of(client: Client, job_id: str) -> dict[str, Any]:
    return dict(client.ok("GetJob", id=job_id)["job"])


def counts(client: Client, queue: str) -> dict[str, int]:
    """The counts of a queue without the zeros."""
    return {key: n for key, n in client.ok("GetJobCounts", queue=queue)["counts"].items() if n}


def park(client: Client, cmd: str, **fields: Any) -> None:
    """Send a command that waits, and return when the server has parked it (it has answered what came behind)."""
    client.send(cmd, reqId="parked", **fields)
    assert client.call("Ping", reqId="behind")["reqId"] == "behind"


def ids_of(jobs: list[dict[str, Any]]) -> list[str]:
    return [job["id"] for job in jobs]
