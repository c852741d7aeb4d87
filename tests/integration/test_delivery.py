"""Every job has exactly one holder: many pullers, leases, heartbeats, stopped servers and vanished workers."""

from __future__ import annotations

import os
import select
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.protocol.steps import park
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

JOBS = scaled(4_000, 20_000)
PULLERS = 8


@pytest.fixture
def other(server: ServerProcess) -> Iterator[Client]:
    with server.client(timeout=30) as connected:
        yield connected


def push_numbers(client: Client, queue: str, numbers: range) -> None:
    for start in range(numbers.start, numbers.stop, 500):
        batch = [{"data": number} for number in range(start, min(start + 500, numbers.stop))]
        client.ok("PUSHB", queue=queue, jobs=batch)


class Puller(threading.Thread):
    """Pulls and acknowledges in its own way until a pull comes back empty-handed; keeps the numbers in order."""

    def __init__(self, server: ServerProcess, queue: str, number: int) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self._server = server
        self._queue = queue
        self._owner = {"owner": f"puller {number}"} if number % 2 else {}
        self._is_batch = number % 4 < 2
        self._timeout = 1_500 if number < 6 else 0

    def run(self) -> None:
        idle_until = time.monotonic() + 60
        with self._server.client() as client:
            while time.monotonic() < idle_until:
                if pulled := self._pull(client):
                    self._acknowledge(client, pulled)
                elif self._timeout or self._is_drained(client):
                    return

    def _is_drained(self, client: Client) -> bool:
        counts = client.ok("GetJobCounts", queue=self._queue)["counts"]
        return bool(counts["completed"]) and not counts["waiting"]

    def _pull(self, client: Client) -> list[tuple[str, str | None]]:
        fields = {"queue": self._queue, "timeout": self._timeout, **self._owner}
        if self._is_batch:
            reply = client.ok("PULLB", count=25, **fields)
            jobs, tokens = reply["jobs"], reply.get("tokens") or [None] * len(reply["jobs"])
        else:
            reply = client.ok("PULL", **fields)
            jobs, tokens = [job for job in (reply["job"],) if job is not None], [reply.get("token")]
        self.numbers += [job["data"] for job in jobs]
        return [(job["id"], token) for job, token in zip(jobs, tokens, strict=False)]

    def _acknowledge(self, client: Client, pulled: list[tuple[str, str | None]]) -> None:
        for job_id, token in pulled:
            client.send("ACK", id=job_id, **({"token": token} if token else {}))
        for _ in pulled:
            reply = client.recv()
            assert reply == {"ok": True}, reply


def test_competing_pullers_get_every_job_once_and_in_order(server: ServerProcess, client: Client, queue: str) -> None:
    """Half of the jobs are there before the pullers come, half arrive while they wait."""
    push_numbers(client, queue, range(JOBS // 2))
    pullers = [Puller(server, queue, number) for number in range(PULLERS)]
    for puller in pullers:
        puller.start()
    push_numbers(client, queue, range(JOBS // 2, JOBS))
    for puller in pullers:
        puller.join(timeout=90)
        assert not puller.is_alive()
    times = Counter(number for puller in pullers for number in puller.numbers)
    assert [number for number, count in times.items() if count > 1] == [], "handed out twice"
    assert [number for number in range(JOBS) if number not in times] == [], "never handed out"
    for puller in pullers:
        assert puller.numbers == sorted(puller.numbers), "a puller saw jobs out of order"
    counts = client.ok("GetJobCounts", queue=queue)["counts"]
    assert (counts["completed"], counts["waiting"], counts["active"]) == (JOBS, 0, 0)
    print(f"\n{JOBS} jobs over {PULLERS} pullers: {sorted(len(puller.numbers) for puller in pullers)}")


def test_one_puller_sees_the_order_of_the_pushes(client: Client, queue: str) -> None:
    push_numbers(client, queue, range(1_000))
    seen: list[int] = []
    while jobs := client.ok("PULLB", queue=queue, count=37)["jobs"]:
        seen += [job["data"] for job in jobs]
    assert seen == list(range(1_000))


@pytest.mark.alone
def test_an_expired_lease_goes_to_the_next_worker_in_time(client: Client, other: Client, queue: str) -> None:
    job_id = client.ok("PUSH", queue=queue, data=1)["id"]
    late = client.ok("PULL", queue=queue, owner="late", lockTtl=400)["token"]
    pulled_at = time.monotonic()
    again = other.ok("PULL", queue=queue, owner="next", timeout=10_000)
    waited = time.monotonic() - pulled_at
    assert again["job"]["id"] == job_id
    assert again["job"]["attempts"] == 1
    assert 0.39 <= waited <= 0.9
    assert client.error("ACK", id=job_id, token=late) == f"Invalid or expired lock token for job {job_id}"
    other.ok("ACK", id=job_id, token=again["token"])


def test_heartbeats_keep_a_job_with_its_worker(client: Client, other: Client, queue: str) -> None:
    job_id = client.ok("PUSH", queue=queue, data=1)["id"]
    lease_ms = 1_000
    pulled = client.ok("PULL", queue=queue, owner="steady", lockTtl=lease_ms)
    park(other, "PULL", queue=queue, timeout=60_000)

    def is_kept_for_long() -> bool:
        client.ok("JobHeartbeat", id=job_id, token=pulled["token"])
        heard_at = client.ok("GetJob", id=job_id)["job"]["lastHeartbeat"]
        return bool(heard_at > pulled["job"]["startedAt"] + 1.5 * lease_ms)

    eventually(is_kept_for_long)
    assert client.ok("ACK", id=job_id, token=pulled["token"]) == {"ok": True}
    following = client.ok("PUSH", queue=queue, data=2)["id"]
    assert other.recv()["job"]["id"] == following


def test_a_heartbeat_in_the_socket_of_a_stopped_server_keeps_the_lease(server: ServerProcess, queue: str) -> None:
    """The machine slept, or the process was stopped: who spoke in time must not be punished for it."""
    with server.client() as client, server.client() as other:
        job_id = client.ok("PUSH", queue=queue, data=1)["id"]
        token = client.ok("PULL", queue=queue, owner="steady", lockTtl=1_000)["token"]
        park(other, "PULL", queue=queue, timeout=20_000)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            client.send("JobHeartbeat", id=job_id, token=token)
            select.select([], [], [], 3.0)  # longer than the lease: what is tested is the passing of time
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert client.recv()["ok"] is True
        assert client.ok("ACK", id=job_id, token=token) == {"ok": True}
        assert client.ok("GetState", id=job_id)["state"] == "completed"


@pytest.mark.alone
def test_a_lease_without_heartbeat_ends_although_the_server_was_stopped(server: ServerProcess, queue: str) -> None:
    with server.client() as client, server.client() as other:
        job_id = client.ok("PUSH", queue=queue, data=1)["id"]
        client.ok("PULL", queue=queue, owner="silent", lockTtl=500)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            select.select([], [], [], 1.7)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        resumed = time.monotonic()
        assert other.ok("PULL", queue=queue, timeout=5_000)["job"]["id"] == job_id
        assert time.monotonic() - resumed < 0.5


@pytest.mark.alone
def test_a_disconnect_gives_jobs_back_at_once_and_counts_no_attempt(
    server: ServerProcess, client: Client, queue: str
) -> None:
    ids = [client.ok("PUSH", queue=queue, data=number)["id"] for number in range(10)]
    with server.client() as worker:
        for number in range(10):
            fields = {"owner": "w"} if number % 2 else {}
            worker.ok("PULL", queue=queue, **fields)
        client.send("PULL", queue=queue, timeout=5_000)
    closed_at = time.monotonic()
    jobs = [client.recv()["job"]]
    assert time.monotonic() - closed_at < 0.25
    jobs += client.ok("PULLB", queue=queue, count=20)["jobs"]
    assert [job["id"] for job in jobs] == ids
    assert {(job["attempts"], job["stallCount"]) for job in jobs} == {(0, 0)}


@pytest.mark.alone
def test_many_connections_that_die_at_once_give_everything_back(
    server: ServerProcess, client: Client, queue: str
) -> None:
    push_numbers(client, queue, range(1_000))
    workers = [server.client() for _ in range(100)]
    for worker in workers:
        assert len(worker.ok("PULLB", queue=queue, count=10, owner="w")["jobs"]) == 10
    assert client.ok("PULL", queue=queue)["job"] is None
    for worker in workers:
        worker.send("PULL", queue=queue, timeout=30_000)  # dies while it waits
        worker.socket.shutdown(2)
        worker.close()
    seen: list[int] = []

    def are_all_back() -> bool:
        seen.extend(job["data"] for job in client.ok("PULLB", queue=queue, count=1_000, timeout=500)["jobs"])
        return len(seen) >= 1_000

    eventually(are_all_back, within=3)  # long before their leases would end
    assert sorted(seen) == list(range(1_000))


def test_a_detached_pull_survives_its_connection(server: ServerProcess, client: Client, queue: str) -> None:
    job_id = client.ok("PUSH", queue=queue, data=1)["id"]
    with server.client() as worker:
        token = worker.ok("PULL", queue=queue, owner="w", detach=True)["token"]
    assert client.ok("PULL", queue=queue, timeout=200)["job"] is None
    client.ok("ACK", id=job_id, token=token)


@pytest.mark.alone
def test_a_long_poll_wakes_within_milliseconds_of_a_push(client: Client, other: Client, queue: str) -> None:
    waits = []
    for number in range(60):
        park(other, "PULL", queue=queue, timeout=10_000)
        pushed_at = time.perf_counter()
        client.ok("PUSH", queue=queue, data=number)
        job = other.recv()["job"]
        waits.append((time.perf_counter() - pushed_at) * 1000)
        assert job["data"] == number
        other.ok("ACK", id=job["id"])
    p50 = statistics.median(waits)
    print(f"\npush to woken long poll: p50 {p50:.2f} ms, worst {max(waits):.2f} ms")
    assert p50 < 10


def test_parked_pulls_are_served_in_the_order_in_which_they_came(
    server: ServerProcess, client: Client, queue: str
) -> None:
    workers = [server.client() for _ in range(5)]
    for worker in workers:
        park(worker, "PULL", queue=queue, timeout=10_000)
    for number, worker in enumerate(workers):
        client.ok("PUSH", queue=queue, data=number)
        assert worker.recv()["job"]["data"] == number
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("ending", ["ACK", "FAIL", "Cancel"])
@pytest.mark.alone
def test_wait_job_answers_when_the_job_ends(client: Client, other: Client, queue: str, ending: str) -> None:
    job_id = client.ok("PUSH", queue=queue, data=1)["id"]
    park(other, "WaitJob", id=job_id, timeout=20_000)
    if ending != "Cancel":
        client.ok("PULL", queue=queue)
    fields = {"ACK": {"result": {"x": 1}}, "FAIL": {"error": "broke", "unrecoverable": True}, "Cancel": {}}[ending]
    ended_at = time.monotonic()
    client.ok(ending, id=job_id, **fields)
    reply = other.recv()
    assert time.monotonic() - ended_at < 0.25
    assert reply["completed"] is (ending == "ACK")
    assert reply.get("result") == ({"x": 1} if ending == "ACK" else None)


@pytest.mark.alone
def test_wait_job_ends_with_its_timeout(client: Client, queue: str) -> None:
    job_id = client.ok("PUSH", queue=queue, data=1)["id"]
    asked_at = time.monotonic()
    assert client.ok("WaitJob", id=job_id, timeout=300)["completed"] is False
    assert 0.29 <= time.monotonic() - asked_at < 0.8
