"""When the disk refuses: clear errors, nothing acknowledged lost, nothing half applied, and service by itself again."""

from __future__ import annotations

import os
import select
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.integration.eventfolder import assert_dense, jobs_of, read_events, read_log
from tests.integration.faultydisk import FaultyCalls, fill, small_disk
from tests.protocol.steps import park
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

QUEUE = "disk"
PAYLOAD = "x" * 8_000
DISK_MB = 40
MOST_JOBS = (DISK_MB << 20) // len(PAYLOAD)
"""No more than that fit on the disk."""
RECOVERY_SECONDS = 3.0


def stored_numbers(client: Client) -> list[int]:
    numbers: list[int] = []
    while page := client.ok("GetJobs", queue=QUEUE, offset=len(numbers), limit=1000)["jobs"]:
        numbers += [job["data"]["n"] for job in page]
    return sorted(numbers)


def storage(client: Client) -> dict[str, Any]:
    status: dict[str, Any] = client.ok("StorageStatus")["data"]
    return status


def wait_until_healthy(client: Client) -> float:
    """How long it took; the server must find out by itself that it may write again."""
    started = time.monotonic()
    while storage(client)["error"] is not None:
        assert time.monotonic() - started < RECOVERY_SECONDS, storage(client)
        time.sleep(0.01)
    return time.monotonic() - started


def push_until_refused(client: Client, first: int) -> tuple[list[int], str]:
    """Push, eight at a time; the numbers that were acknowledged and the first error."""
    acknowledged: list[int] = []
    errors: list[str] = []
    for start in range(first, first + MOST_JOBS + 8, 8):
        numbers = range(start, start + 8)
        for number in numbers:
            client.send("PUSH", queue=QUEUE, data={"n": number, "fill": PAYLOAD})
        for number in numbers:
            reply = client.recv()
            if reply["ok"]:
                acknowledged.append(number)
            else:
                errors.append(reply["error"])
        if errors:
            return acknowledged, errors[0]
    raise AssertionError("the disk did not fill up")


class TestFullDisk:
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        with small_disk(tmp_path / "disk", megabytes=DISK_MB) as folder:
            yield folder

    @pytest.fixture
    def server(self, disk: Path) -> Iterator[ServerProcess]:
        (disk / "filler").write_bytes(b"x" * (27 << 20))
        with ServerProcess(disk / "full.db") as running:
            yield running

    def test_it_refuses_clearly_keeps_what_it_acknowledged_and_resumes_by_itself(
        self, server: ServerProcess, disk: Path
    ) -> None:
        with server.client() as client:
            before_ms = time.time() * 1000
            acknowledged, error = push_until_refused(client, 0)
            assert error.startswith("Storage is full"), error
            status = storage(client)
            assert status["diskFull"] is True
            assert before_ms <= status["since"] <= time.time() * 1000
            assert stored_numbers(client) == acknowledged
            assert client.ok("GetJobCounts", queue=QUEUE)["counts"]["waiting"] == len(acknowledged)
            self.check_refusal_changes_nothing(client, len(acknowledged))
            (disk / "filler").unlink()
            print(f"\n{len(acknowledged)} jobs before it was full; back {wait_until_healthy(client):.2f} s after")
            client.ok("PUSH", queue=QUEUE, data={"n": 100_000})
            assert stored_numbers(client) == [*acknowledged, 100_000]
            assert client.ok("PULL", queue=QUEUE)["job"]["data"]["n"] == acknowledged[0]
        self.check_after_restart(server, [*acknowledged, 100_000])

    @staticmethod
    def check_refusal_changes_nothing(client: Client, waiting: int) -> None:
        for cmd, fields in (
            ("PUSH", {"data": 1}),
            ("PUSHB", {"jobs": [{"data": 1}, {"data": 2}]}),
            ("PULL", {}),
            ("Pause", {}),
            ("Drain", {}),
        ):
            assert client.error(cmd, queue=QUEUE, **fields).startswith("Storage is full"), cmd
        assert client.ok("IsPaused", queue=QUEUE)["paused"] is False
        counts = client.ok("GetJobCounts", queue=QUEUE)["counts"]
        assert (counts["waiting"], counts["active"]) == (waiting, 0)

    @staticmethod
    def check_after_restart(server: ServerProcess, numbers: list[int]) -> None:
        server.kill()
        server.start()
        with server.client() as client:
            assert stored_numbers(client) == numbers
            events = read_events(Path(server.data_path))
            assert_dense(events)
            assert len(jobs_of(events, "pushed")) == len(numbers)

    def test_a_server_killed_while_its_disk_is_full_comes_back_with_everything(
        self, server: ServerProcess, disk: Path
    ) -> None:
        with server.client() as client:
            acknowledged, _ = push_until_refused(client, 0)
        fill(disk / "filler")
        server.kill()
        server.start()
        with server.client() as client:
            assert stored_numbers(client) == acknowledged
            (disk / "filler").unlink()
            wait_until_healthy(client)
            more, _ = push_until_refused(client, 100_000)
        server.kill()
        server.start()
        with server.client() as client:
            assert stored_numbers(client) == acknowledged + more

    def test_a_server_starts_on_a_full_disk_also_with_a_new_event_log(
        self, server: ServerProcess, disk: Path, tmp_path: Path
    ) -> None:
        """A disk that is full is a reason to put the log elsewhere."""
        with server.client() as client:
            acknowledged, _ = push_until_refused(client, 0)
        fill(disk / "filler")
        server.kill()
        server.flags = ("--capture", str(tmp_path / "log"))
        epochs = set()
        for number in (100_000, 100_001):
            server.start()
            with server.client() as client:
                assert stored_numbers(client) == acknowledged
                (disk / "filler").unlink(missing_ok=True)
                wait_until_healthy(client)
                client.ok("PUSH", queue=QUEUE, data={"n": number})
                acknowledged.append(number)
                epochs.add(client.ok("EventSegments")["epoch"])
            server.kill()
        gap, *pushed = read_log(tmp_path / "log")
        assert (gap["event"], len(pushed)) == ("gap", 2)
        assert {event["epoch"] for event in [gap, *pushed]} == epochs

    def test_a_server_that_cannot_start_on_a_full_disk_says_so(self, server: ServerProcess, disk: Path) -> None:
        with server.client() as client:
            client.ok("PUSH", queue=QUEUE, data={"n": 1})
        server.stop()
        fill(disk / "filler")
        with pytest.raises(RuntimeError, match="the disk is full; free some space and start again"):
            server.start()
        (disk / "filler").unlink()
        server.start()
        with server.client() as client:
            assert stored_numbers(client) == [1]

    def test_it_flutters_at_the_edge_without_losing_count(self, server: ServerProcess, disk: Path) -> None:
        acknowledged: list[int] = []
        with server.client() as client:
            for round_number in range(3):
                (disk / "filler").write_bytes(b"x" * ((27 - 9 * round_number) << 20))
                wait_until_healthy(client)
                more, _ = push_until_refused(client, round_number * 10_000)
                assert more, "space came back and was not used"
                acknowledged += more
                assert stored_numbers(client) == acknowledged
        self.check_after_restart(server, acknowledged)


def frames(*commands: dict[str, Any]) -> bytes:
    """Several commands as one piece of bytes, so that they arrive in one tick."""
    packed = [msgpack.packb(command) for command in commands]
    return b"".join(len(body).to_bytes(4, "big") + body for body in packed)


@pytest.fixture
def server(tmp_path: Path, faults: FaultyCalls) -> Iterator[ServerProcess]:
    """On a disk that fails as the tests of a class want it."""
    with ServerProcess(tmp_path / "jobs.db", env=faults.env) as running:
        yield running


class TestInputOutputErrors:
    @pytest.fixture(params=["jobs.db-wal", "jobs.db-events"], ids=["store", "event_log"])
    def faults(self, request: pytest.FixtureRequest, tmp_path: Path) -> FaultyCalls:
        return FaultyCalls(tmp_path, request.param)

    def test_a_failing_tick_is_refused_whole_and_leaves_nothing_behind(
        self, server: ServerProcess, faults: FaultyCalls, tmp_path: Path
    ) -> None:
        with server.client() as client:
            a, b, c = self.hand_out_three_of_four(client)
            totals = client.ok("Metrics")["metrics"]
            faults.fail("write")
            client.socket.sendall(
                frames(
                    {"cmd": "PUSHB", "queue": QUEUE, "jobs": [{"data": {"n": 50}}, {"data": {"n": 51}}], "reqId": "1"},
                    {"cmd": "ACK", **a, "result": 1, "reqId": "2"},
                    {"cmd": "FAIL", **b, "error": "broke", "reqId": "3"},
                    {"cmd": "PULL", "queue": QUEUE, "owner": "w", "reqId": "4"},
                    {"cmd": "Pause", "queue": QUEUE, "reqId": "5"},
                )
            )
            replies = [client.recv() for _ in range(5)]
            assert [reply["reqId"] for reply in replies] == ["1", "2", "3", "4", "5"]
            for reply in replies:
                assert reply["ok"] is False
                assert reply["error"].startswith("Storage error"), reply
            assert client.error("ACK", **c).startswith("Storage error")
            status = storage(client)
            assert status["diskFull"] is False
            assert status["error"].startswith("Storage error")
            self.check_nothing_happened(client, totals)
            faults.heal()
            wait_until_healthy(client)
            self.repeat_what_was_refused(client, a, b, c)
        self.check_after_a_kill(server, tmp_path / "jobs.db", a, b)

    def test_a_disk_that_cannot_even_be_read_loses_nothing_and_all_is_as_before_when_it_can(
        self, tmp_path: Path
    ) -> None:
        faults = FaultyCalls(tmp_path, "gone.db-wal")
        with ServerProcess(tmp_path / "gone.db", env=faults.env) as server, server.client() as client:
            a, b, c = self.hand_out_three_of_four(client)
            totals = client.ok("Metrics")["metrics"]
            faults.fail("read", "write")
            for command, arguments in (
                ("ACK", {**a, "result": 1}),
                ("FAIL", {**b, "error": "broke"}),
                ("Pause", {"queue": QUEUE}),
                ("PUSH", {"queue": QUEUE, "data": {"n": 50}}),
            ):
                assert client.error(command, **arguments).startswith("Storage error"), command
            faults.fail("read")
            time.sleep(1.5)
            assert storage(client)["error"].startswith("Storage error")
            faults.heal()
            wait_until_healthy(client)
            self.check_nothing_happened(client, totals)
            self.repeat_what_was_refused(client, a, b, c)
            self.check_after_a_kill(server, tmp_path / "gone.db", a, b)

    @staticmethod
    def hand_out_three_of_four(client: Client) -> list[dict[str, Any]]:
        """What their worker has to show with each of the three."""
        for number in range(4):
            client.ok("PUSH", queue=QUEUE, data={"n": number}, backoff=600_000)
        pulled = [client.ok("PULL", queue=QUEUE, owner="w") for _ in range(3)]
        return [{"id": reply["job"]["id"], "token": reply["token"]} for reply in pulled]

    @staticmethod
    def check_nothing_happened(client: Client, totals: dict[str, Any]) -> None:
        counts = client.ok("GetJobCounts", queue=QUEUE)["counts"]
        assert (counts["waiting"], counts["active"], counts["delayed"], counts["completed"]) == (1, 3, 0, 0)
        assert stored_numbers(client) == [0, 1, 2, 3]
        assert client.ok("IsPaused", queue=QUEUE)["paused"] is False
        now = client.ok("Metrics")["metrics"]
        for name in ("totalPushed", "totalCompleted", "totalFailed"):
            assert now[name] == totals[name], name

    @staticmethod
    def repeat_what_was_refused(client: Client, *leases: dict[str, Any]) -> None:
        """The leases were restored: the worker says the same again and is heard."""
        a, b, c = leases
        assert "data" not in client.ok("ACK", **a, result=1)
        assert "data" not in client.ok("FAIL", **b, error="broke")
        assert client.ok("JobHeartbeat", **c)["ok"]
        assert client.ok("PULL", queue=QUEUE)["job"]["data"] == {"n": 3}
        client.ok("PUSHB", queue=QUEUE, jobs=[{"data": {"n": 50}}, {"data": {"n": 51}}])
        assert stored_numbers(client) == [0, 1, 2, 3, 50, 51]
        assert client.ok("GetJob", id=b["id"])["job"]["attempts"] == 1

    def check_after_a_kill(self, server: ServerProcess, data_path: Path, a: dict[str, Any], b: dict[str, Any]) -> None:
        server.kill()
        server.start()
        with server.client() as client:
            self.check_what_remains(client, a, b)
        self.check_log(data_path, a)

    @staticmethod
    def check_what_remains(client: Client, a: dict[str, Any], b: dict[str, Any]) -> None:
        assert stored_numbers(client) == [0, 1, 2, 3, 50, 51]
        assert client.ok("GetResult", id=a["id"])["result"] == 1
        failed = client.ok("GetJob", id=b["id"])["job"]
        assert (failed["state"], failed["attempts"]) == ("delayed", 1)

    @staticmethod
    def check_log(data_path: Path, a: dict[str, Any]) -> None:
        events = read_events(data_path)
        assert_dense(events)
        assert jobs_of(events, "completed") == [a["id"]]
        assert len(jobs_of(events, "pushed")) == 6

    def test_a_worker_that_reports_progress_in_a_failing_tick_keeps_its_job(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as worker, server.client() as client:
            job_id = client.ok("PUSH", queue=QUEUE, data={"n": 1})["id"]
            lease = {"id": job_id, "token": worker.ok("PULL", queue=QUEUE, owner="w")["token"]}
            faults.fail("write")
            assert worker.error("Progress", id=job_id, progress=50).startswith("Storage error")
            assert client.ok("GetState", id=job_id)["state"] == "active"
            faults.heal()
            wait_until_healthy(client)
            assert client.ok("PULL", queue=QUEUE)["job"] is None
            worker.ok("Progress", id=job_id, progress=60)
            assert worker.ok("ACK", **lease) == {"ok": True}

    def test_a_parent_hears_of_a_child_whose_completion_had_to_be_repeated(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client:
            child = client.ok("PUSH", queue=QUEUE, data="child")["id"]
            parent = client.ok("PUSH", queue=QUEUE, data="parent", dependsOn=[child])["id"]
            assert client.ok("PULL", queue=QUEUE)["job"]["id"] == child
            faults.fail("write")
            client.error("ACK", id=child)
            assert client.ok("GetState", id=parent)["state"] == "waiting-children"
            faults.heal()
            wait_until_healthy(client)
            client.ok("ACK", id=child)
            assert client.ok("PULL", queue=QUEUE)["job"]["id"] == parent

    def test_keys_and_custom_ids_of_a_failing_tick_are_free_again(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client:
            owner = client.ok("PUSH", queue=QUEUE, data=1, uniqueKey="held")["id"]
            faults.fail("write")
            client.error("PUSH", queue=QUEUE, data=2, uniqueKey="held", dedup={"replace": True})
            faults.heal()
            wait_until_healthy(client)
            assert client.ok("PUSH", queue=QUEUE, data=3, uniqueKey="held")["id"] == owner
            faults.fail("write")
            client.error("PUSH", queue=QUEUE, data=4, uniqueKey="free", jobId="mine")
            faults.heal()
            wait_until_healthy(client)
            assert client.error("GetJobByCustomId", customId="mine") == "Job not found"
            assert client.ok("PUSH", queue=QUEUE, data=5, jobId="mine")["id"] == "mine"
            assert client.ok("PUSH", queue=QUEUE, data=6, uniqueKey="free")["id"] not in (owner, "mine")

    def test_what_time_owes_during_an_outage_is_paid_after_it(self, server: ServerProcess, faults: FaultyCalls) -> None:
        """A delayed job falls due, a lease runs out and schedules fire while nothing can be written."""
        with server.client(timeout=20) as client, server.client() as worker:
            leased = client.ok("PUSH", queue="leased", data=1)["id"]
            worker.ok("PULL", queue="leased", owner="w", lockTtl=300)
            client.ok("Cron", name="often", queue="cron", data=1, repeatEvery=300, preventOverlap=False)
            faults.fail("write")
            client.error("PUSH", queue=QUEUE, data=1, delay=300)
            delayed_at = time.monotonic()
            while time.monotonic() - delayed_at < 0.8:
                assert storage(client)["error"] is not None
                time.sleep(0.05)
            faults.heal()
            wait_until_healthy(client)
            again = client.ok("PULL", queue="leased", timeout=2_000)["job"]
            assert (again["id"], again["attempts"]) == (leased, 1)
            fired = [client.ok("PULL", queue="cron", timeout=2_000)["job"]["id"] for _ in range(3)]
            assert len(set(fired)) == 3

    def test_a_server_can_be_stopped_while_its_disk_fails(
        self, server: ServerProcess, faults: FaultyCalls, tmp_path: Path
    ) -> None:
        with server.client() as client:
            client.ok("PUSH", queue=QUEUE, data={"n": 1})
            client.ok("PULL", queue=QUEUE)
            faults.fail("write", "sync")
            client.error("PUSH", queue=QUEUE, data={"n": 2})
            server.stop()
        faults.heal()
        server.start()
        with server.client() as client:
            assert stored_numbers(client) == [1]
            assert client.ok("PULL", queue=QUEUE)["job"]["data"] == {"n": 1}
        events = read_events(tmp_path / "jobs.db")
        assert_dense(events)
        assert len(jobs_of(events, "pushed")) == 1

    def test_a_parked_pull_of_a_failing_tick_is_refused_and_its_job_stays(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as worker, server.client() as client:
            park(worker, "PULL", queue=QUEUE, timeout=20_000)
            faults.fail("write")
            assert client.error("PUSH", queue=QUEUE, data={"n": 1}).startswith("Storage error")
            assert worker.recv()["error"].startswith("Storage error")
            faults.heal()
            wait_until_healthy(client)
            assert stored_numbers(client) == []
            worker.send("PULL", queue=QUEUE, timeout=20_000)
            client.ok("PUSH", queue=QUEUE, data={"n": 2})
            assert worker.recv()["job"]["data"] == {"n": 2}

    def test_jobs_of_a_connection_that_dies_while_the_disk_fails_come_back(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client:
            job_id = client.ok("PUSH", queue=QUEUE, data={"n": 1})["id"]
            worker = server.client()
            assert worker.ok("PULL", queue=QUEUE)["job"]["id"] == job_id
            faults.fail("write")
            client.error("PUSH", queue=QUEUE, data={"n": 2})
            worker.close()
            client.ok("Ping")
            faults.heal()
            wait_until_healthy(client)
            again = client.ok("PULL", queue=QUEUE, timeout=5_000)["job"]
            assert (again["id"], again["attempts"]) == (job_id, 0)

    def test_a_job_that_is_handed_out_while_the_disk_fails_comes_back_with_its_worker(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        """A claim is not stored, so it succeeds; only its event waits for the disk."""
        with server.client() as client:
            job_id = client.ok("PUSH", queue=QUEUE, data={"n": 1})["id"]
            worker = server.client()
            faults.fail("write")
            assert worker.ok("PULL", queue=QUEUE)["job"]["id"] == job_id
            worker.close()
            client.ok("Ping")
            faults.heal()
            wait_until_healthy(client)
            again = client.ok("PULL", queue=QUEUE, timeout=5_000)["job"]
            assert (again["id"], again["attempts"]) == (job_id, 0)
            client.ok("ACK", id=job_id)


class TestDurable:
    @pytest.fixture
    def faults(self, tmp_path: Path) -> FaultyCalls:
        return FaultyCalls(tmp_path, "jobs.db-wal")

    def test_a_durable_push_is_refused_while_the_disk_cannot_sync_and_works_otherwise(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client:
            client.ok("PUSH", queue=QUEUE, data={"n": 1}, durable=True)
            faults.fail("sync")
            for _ in range(2):
                error = client.error("PUSH", queue=QUEUE, data={"n": 2}, durable=True)
                assert error.startswith("Storage error"), error
            client.ok("PUSH", queue=QUEUE, data={"n": 3})
            faults.heal()
            client.ok("PUSH", queue=QUEUE, data={"n": 4}, durable=True)
            client.ok("PUSHB", queue=QUEUE, jobs=[{"data": {"n": 5}, "durable": True}, {"data": {"n": 6}}])
        server.kill()
        server.start()
        with server.client() as client:
            assert {1, 3, 4, 5, 6} <= set(stored_numbers(client))

    def test_pushes_that_arrive_together_share_a_flush_and_other_connections_do_not_wait_for_it(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client, server.client() as other:
            faults.fail("hold")
            frames = [msgpack.packb({"cmd": "PUSH", "queue": QUEUE, "data": n, "durable": True}) for n in range(20)]
            client.socket.sendall(b"".join(struct.pack(">I", len(frame)) + frame for frame in frames))
            eventually(lambda: other.ok("Count", queue=QUEUE)["count"] == 20)
            job_id = other.ok("PUSH", queue="other", data=1)["id"]
            assert other.ok("PULL", queue="other")["job"]["id"] == job_id
            other.ok("ACK", id=job_id)
            assert select.select([client.socket], [], [], 0)[0] == [], "acknowledged before the flush"
            faults.fail("count")
            assert all(client.recv()["ok"] for _ in frames)
            assert 1 <= faults.counted <= 3

    def test_replies_keep_their_order_when_a_later_sync_is_the_faster_one(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        faults.fail("slow")
        expected: list[str] = []
        with server.client() as client, server.client() as pace:
            for number in range(40):
                client.send("PUSH", queue=QUEUE, data={"n": number}, durable=number % 2 == 0, reqId=f"push {number}")
                pace.ok("Ping")  # what was sent is in a tick of its own by now
                client.send("Ping", reqId=f"ping {number}")
                pace.ok("Ping")
                expected += [f"push {number}", f"ping {number}"]
            assert [client.recv()["reqId"] for _ in expected] == expected


class TestUnreadable:
    """A disk that takes writes and gives nothing back."""

    @pytest.fixture
    def faults(self, tmp_path: Path) -> FaultyCalls:
        return FaultyCalls(tmp_path, "jobs.db")

    @staticmethod
    def push_what_no_cache_holds(client: Client) -> list[str]:
        """Together they are larger than what SQLite keeps in memory."""
        return [client.ok("PUSH", queue=QUEUE, data={"n": n, "fill": "x" * 9_000_000})["id"] for n in range(3)]

    def test_queries_say_that_the_disk_cannot_be_read_and_answer_again_when_it_can(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client:
            first, *_ = self.push_what_no_cache_holds(client)
            asked: tuple[tuple[str, dict[str, Any]], ...] = (
                ("GetJob", {"id": first}),
                ("GetJobs", {"queue": QUEUE}),
                ("FlowList", {}),
                ("PUSH", {"queue": QUEUE, "data": 1, "jobId": "once", "idTtl": 60_000}),
            )
            faults.fail("read")
            for command, arguments in asked:
                error = client.error(command, **arguments)
                assert error.startswith("Storage error: the database cannot be read"), (command, error)
            faults.heal()
            for command, arguments in asked:
                client.ok(command, **arguments)

    def test_a_pull_whose_payload_cannot_be_read_leaves_the_job_as_it_was(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client, server.client() as worker:
            job_ids = self.push_what_no_cache_holds(client)
            faults.fail("read")
            for command, arguments in (("PULL", {}), ("PULLB", {"count": 3})):
                error = worker.error(command, queue=QUEUE, owner="w", **arguments)
                assert error.startswith("Storage error: the database cannot be read"), (command, error)
            worker.socket.sendall(frames(*[{"cmd": "PULL", "queue": QUEUE, "reqId": str(n)} for n in range(3)]))
            for _ in range(3):
                assert worker.recv()["error"].startswith("Storage error: the database cannot be read")
            faults.heal()
            counts = client.ok("GetJobCounts", queue=QUEUE)["counts"]
            assert (counts["waiting"], counts["active"]) == (3, 0)
            for job_id in job_ids:
                job = worker.ok("PULL", queue=QUEUE)["job"]
                assert (job["id"], job["attempts"]) == (job_id, 0)

    def test_a_parked_pull_goes_on_waiting_while_a_payload_cannot_be_read(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client, server.client() as worker:
            with server.client() as leaving:
                job_ids = self.push_what_no_cache_holds(client)
                for _ in job_ids:
                    leaving.ok("PULL", queue=QUEUE)
                park(worker, "PULL", queue=QUEUE, timeout=20_000)
                faults.fail("read")
            eventually(lambda: client.ok("GetJobCounts", queue=QUEUE)["counts"]["waiting"] == 3)
            faults.heal()
            client.ok("PUSH", queue=QUEUE, data="another")
            assert worker.recv()["job"]["id"] == job_ids[0]

    def test_a_parked_pull_gets_the_next_job_when_a_payload_is_lost(
        self, server: ServerProcess, tmp_path: Path
    ) -> None:
        with server.client() as client:
            client.ok("Pause", queue=QUEUE)
            client.ok("PUSH", queue=QUEUE, data="x" * 20_000)
        server.stop()
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as file, file:
            file.execute("DELETE FROM payload")
        server.start()
        with server.client() as client, server.client() as worker:
            park(worker, "PULL", queue=QUEUE, timeout=20_000)
            client.ok("Resume", queue=QUEUE)
            client.ok("PUSH", queue=QUEUE, data="small")
            assert worker.recv()["job"]["data"] == "small"

    def test_a_job_of_a_failed_tick_that_cannot_be_read_back_is_not_reported_as_missing(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client:
            self.push_what_no_cache_holds(client)
            job_id = client.ok("PUSH", queue="small", data=1)["id"]
            faults.fail("read", "write")
            assert client.error("Cancel", id=job_id).startswith("Storage error")
            for command in ("GetJob", "GetState"):
                assert client.error(command, id=job_id).startswith("Storage error"), command
            faults.heal()
            wait_until_healthy(client)
            assert client.ok("GetState", id=job_id)["state"] == "waiting"

    def test_events_that_cannot_be_read_are_not_reported_as_dropped(
        self, server: ServerProcess, faults: FaultyCalls
    ) -> None:
        with server.client() as client:
            job_id = client.ok("PUSH", queue=QUEUE, data=1)["id"]
        server.stop()
        server.start()  # the first segment is closed now
        with server.client() as client:
            client.ok("PUSH", queue=QUEUE, data=2)
            (closed, opened) = client.ok("EventSegments")["segments"]
            faults.fail("read")
            for command, arguments in (
                ("EventSegment", {"first": closed["first"]}),
                ("Events", {"after": 0}),
                ("Events", {"after": closed["last"]}),
            ):
                error = client.error(command, **arguments)
                assert error.startswith("Storage error: the event log cannot be read"), (command, error)
            faults.heal()
            assert job_id in client.ok("Events", after=0)["lines"]
            assert client.ok("EventSegment", first=closed["first"])["size"] == closed["fileBytes"]
            assert client.ok("Events", after=closed["last"])["last"] == opened["last"]

    def test_an_engine_in_the_own_process_raises_the_same(self, faults: FaultyCalls, tmp_path: Path) -> None:
        program = """
import sys
from pathlib import Path
from headrace import Headrace
from headrace.errors import StorageUnavailable

with Headrace(f"sqlite:///{sys.argv[1]}").sync() as sync:
    jobs = [sync.queue("q").add("large", "x" * 9_000_000) for _ in range(3)]
    Path(sys.argv[2]).write_text("read")
    try:
        jobs[0].info()
    except StorageUnavailable as error:
        print(error)
"""
        arguments = [str(tmp_path / "jobs.db"), faults.env["FAULT_TRIGGER"]]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, **faults.env},
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith("Storage error: the database cannot be read"), done
