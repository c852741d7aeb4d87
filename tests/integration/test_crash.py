"""kill -9 in the middle of everything: what was acknowledged is there, once, and nothing contradicts it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.eventfolder import assert_dense, jobs_of, read_events
from tests.integration.faultydisk import FaultyCalls
from tests.integration.traffic import Ledger, Traffic
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

ROUNDS = scaled(4, 8)
OPERATIONS_PER_ROUND = scaled(1_000, 2_000)
QUEUE = "crash"


def all_jobs(client: Client, queue: str) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    while page := client.ok("GetJobs", queue=queue, offset=len(jobs), limit=1000)["jobs"]:
        jobs += page
    return jobs


def stored_by_number(client: Client) -> dict[int, dict[str, Any]]:
    """Every job of the queue by the number in its payload; none may be there twice."""
    jobs = all_jobs(client, QUEUE)
    by_number = {job["data"]["n"]: job for job in jobs}
    assert len(by_number) == len(jobs), Counter(job["data"]["n"] for job in jobs).most_common(3)
    return by_number


def check_pushes(ledger: Ledger, stored: dict[int, dict[str, Any]]) -> None:
    assert [n for n in ledger.ids if n not in stored] == [], "acknowledged pushes are missing"
    assert [n for n, job_id in ledger.ids.items() if stored[n]["id"] != job_id] == []
    assert [n for n in stored if n not in ledger.asked] == [], "jobs that nobody pushed"


def check_ends(ledger: Ledger, stored: dict[int, dict[str, Any]]) -> None:
    assert [n for n in ledger.completed if stored[n]["state"] != "completed"] == [], "acknowledged completions are gone"
    for number, terminal in ledger.failed.items():
        job = stored[number]
        assert (job["state"], job["attempts"]) == ("failed" if terminal else "delayed", 1), job
        assert job["failedReason"] == f"broke {number}"
    uncertain = ledger.completing | ledger.failing
    for number, job in stored.items():
        if number not in uncertain:
            assert (job["state"], job["attempts"], job["stallCount"]) == ("waiting", 0, 0), job


def check_events(ledger: Ledger, stored: dict[int, dict[str, Any]], data_path: Path) -> None:
    """The log and the store tell the same story."""
    compare_events(ledger, stored, read_events(data_path))


def compare_events(ledger: Ledger, stored: dict[int, dict[str, Any]], events: list[dict[str, Any]]) -> None:
    assert_dense(events)
    assert events[0]["seq"] == 1
    pushed, completed = Counter(jobs_of(events, "pushed")), Counter(jobs_of(events, "completed"))
    assert set(pushed) == {job["id"] for job in stored.values()}
    assert set(completed) == {job["id"] for job in stored.values() if job["state"] == "completed"}
    assert set(jobs_of(events, "failed")) == {job["id"] for job in stored.values() if job["attempts"]}
    assert [job for job, times in (pushed + completed).items() if pushed[job] != 1 or completed[job] > 1] == []
    assert {ledger.ids[n] for n in ledger.completed if n in ledger.ids} <= set(completed)


def pull_in_flight(server: ServerProcess, in_flight: set[int], started: float) -> None:
    """Everything that was being worked on can be had again within 3 s, as if it had never been handed out."""
    missing = set(in_flight)
    with server.client() as client:
        while missing:
            jobs = client.ok("PULLB", queue=QUEUE, count=1000, timeout=0)["jobs"]
            assert jobs, f"{len(missing)} jobs in flight did not come back"
            for job in jobs:
                assert (job["attempts"], job["stallCount"]) == (0, 0), job
            missing -= {job["data"]["n"] for job in jobs}
        assert time.monotonic() - started < 3


def wait_until_idle(client: Client) -> None:
    """The jobs of a connection that was closed are given back."""
    eventually(lambda: not client.ok("GetJobCounts", queue=QUEUE)["counts"]["active"], within=5)


@pytest.mark.alone
@pytest.mark.timeout(scaled(120, 600))
def test_kill_9_in_the_middle_of_all_streams_loses_and_repeats_nothing(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "crash.db", "--max-completed-jobs", "1000000")
    ledger = Ledger()
    with server:
        for _ in range(ROUNDS):
            Traffic(server, ledger, QUEUE).until_killed(OPERATIONS_PER_ROUND)
            started = time.monotonic()
            server.start()
            assert ledger.contradictions == []
            in_flight = set(ledger.held) - ledger.completing - ledger.failing
            with server.client() as client:
                stored = stored_by_number(client)
                check_pushes(ledger, stored)
                check_ends(ledger, stored)
                check_events(ledger, stored, tmp_path / "crash.db")
                settle_uncertain(ledger, stored)
                pull_in_flight(server, in_flight, started)
                wait_until_idle(client)
            ledger.held.clear()
    print(f"\n{ledger.acknowledged} acknowledged operations over {ROUNDS} kills, {len(stored)} jobs")
    assert ledger.acknowledged >= ROUNDS * OPERATIONS_PER_ROUND


def settle_uncertain(ledger: Ledger, stored: dict[int, dict[str, Any]]) -> None:
    """What was asked and not answered is known now: it happened whole, or not at all."""
    for number in (ledger.completing | ledger.failing) - ledger.completed - set(ledger.failed):
        job = stored[number]
        if job["state"] == "completed":
            ledger.completed.add(number)
        elif job["attempts"]:
            ledger.failed[number] = job["state"] == "failed"
        else:
            assert (job["state"], job["stallCount"]) == ("waiting", 0), job
            ledger.completing.discard(number)
            ledger.failing.discard(number)
    for number in ledger.asked & set(stored):
        ledger.ids[number] = stored[number]["id"]


@pytest.mark.parametrize("written", ["torn.db-events", "torn.db-wal"], ids=["while_logging", "between_log_and_store"])
def test_a_death_in_the_middle_of_a_tick_leaves_log_and_store_agreed(tmp_path: Path, written: str) -> None:
    """Half a block in the log, or a whole one whose commit never was: neither may be seen afterwards."""
    faults = FaultyCalls(tmp_path, written)
    with ServerProcess(tmp_path / "torn.db", env=faults.env) as server:
        stored: list[str] = []
        for _ in range(3):
            with server.client() as client:
                stored += client.ok("PUSHB", queue=QUEUE, jobs=[{"data": 1}, {"data": 2}])["ids"]
                held = client.ok("PULL", queue=QUEUE)["job"]["id"]
                faults.fail("die")
                for job_id in (held, None):
                    client.send("ACK", id=job_id) if job_id else client.send("PUSH", queue=QUEUE, data=3)
                with pytest.raises(ConnectionError):
                    client.recv()
            faults.heal()
            server.kill()
            server.start()
            with server.client() as client:
                assert [job["id"] for job in all_jobs(client, QUEUE)] == stored
                assert client.ok("GetState", id=held)["state"] == "waiting"
                events = read_events(tmp_path / "torn.db")
                assert_dense(events)
                assert jobs_of(events, "pushed") == stored
                assert jobs_of(events, "completed") == []


@pytest.mark.parametrize("is_disk_good", [True, False], ids=["good_disk", "segments_cannot_be_sealed"])
def test_a_log_of_several_segments_is_whole_after_kill_9(tmp_path: Path, is_disk_good: bool) -> None:
    faults = FaultyCalls(tmp_path, "rolled.db-events/shard=0/.tmp-")
    pushed: list[str] = []
    with ServerProcess(tmp_path / "rolled.db", env=faults.env) as server:
        if not is_disk_good:
            faults.fail("write")
        with server.client() as client:
            for _ in range(8):
                pushed += client.ok("PUSHB", queue=QUEUE, jobs=[{"data": 1}] * 10_000)["ids"]
        server.kill()
        faults.heal()
        server.start()
        folder = tmp_path / "rolled.db-events" / "shard=0"
        assert list(folder.glob("seg-*.jsonl.zst")), "nothing was sealed: the log is smaller than one segment"
        events = read_events(tmp_path / "rolled.db")
        assert_dense(events)
        assert jobs_of(events, "pushed") == pushed


def test_a_segment_that_cannot_be_sealed_disturbs_nobody(tmp_path: Path) -> None:
    faults = FaultyCalls(tmp_path, "rolled.db-events/shard=0/.tmp-")
    with ServerProcess(tmp_path / "rolled.db", env=faults.env) as server:
        faults.fail("write")
        with server.client() as client:
            for _ in range(8):
                client.ok("PUSHB", queue=QUEUE, jobs=[{"data": 1}] * 10_000)
            assert client.ok("StorageStatus")["data"]["error"] is None
            faults.heal()
        assert "segment" in server.stop()


@pytest.mark.parametrize(("command", "word"), [("Drain", "drained"), ("Obliterate", "obliterated")])
def test_emptying_a_queue_goes_on_after_kill_9(tmp_path: Path, command: str, word: str) -> None:
    with ServerProcess(tmp_path / "emptied.db") as server:
        with server.client(timeout=60) as client:
            client.ok("Pause", queue=QUEUE)
            for _ in range(10):
                client.ok("PUSHB", queue=QUEUE, jobs=[{"data": 1}] * 10_000)
            before = client.ok("Count", queue=QUEUE)["count"]
            with server.client() as other:
                client.send(command, queue=QUEUE)
                eventually(lambda: other.ok("Count", queue=QUEUE)["count"] < before)
                server.kill()
        assert word not in {event["event"] for event in read_events(tmp_path / "emptied.db")}, "it was done before"
        server.start()
        with server.client() as client:
            assert client.ok("Count", queue=QUEUE)["count"] == 0
            assert client.ok("IsPaused", queue=QUEUE)["paused"] is (command == "Drain")
        events = read_events(tmp_path / "emptied.db")
        assert_dense(events)
        assert [event["last"] for event in events if event["event"] == word] == [100_001]


class Told:
    """A server that was told everything it can be told; `check` asks whether it still knows."""

    def __init__(self, client: Client) -> None:
        self.child = client.ok("PUSH", queue="family", data="child", jobId="the-child")["id"]
        self.parent = client.ok("PUSH", queue="family", data="parent", dependsOn=[self.child])["id"]
        self.keyed = client.ok("PUSH", queue="keys", data=1, uniqueKey="k", dedup={"ttl": 3_600_000})["id"]
        self.logged = client.ok("PUSH", queue="logs", data=1)["id"]
        self.delayed = client.ok("PUSH", queue="later", data=1, delay=3_600_000, priority=7)["id"]
        self.large = client.ok("PUSH", queue="large", data="x" * 100_000)["id"]
        for level in ("info", "warn"):
            client.ok("AddLog", id=self.logged, message=f"told as {level}", level=level)
        self._settings(client)
        self._ends(client)
        self.stats = self._totals(client)

    @staticmethod
    def _settings(client: Client) -> None:
        client.ok("Pause", queue="held")
        client.ok("RateLimit", queue="limited", limit=7, duration=60_000)
        client.ok("SetConcurrency", queue="limited", limit=3)
        client.ok("SetStallConfig", queue="limited", config={"stallInterval": 12_345})
        client.ok("SetDlqConfig", queue="limited", config={"maxEntries": 77})
        client.ok("Cron", name="nightly", queue="cron", data={"n": 1}, schedule="0 3 * * *", timezone="Europe/Rome")
        client.ok("AddWebhook", url="https://example.com/hook", events=["job.completed"], queue="held", secret="s")

    def _ends(self, client: Client) -> None:
        ids = [client.ok("PUSH", queue="ends", data=n)["id"] for n in range(3)]
        for _ in ids:
            client.ok("PULL", queue="ends")
        client.ok("ACK", id=ids[0], result={"answer": 42})
        client.ok("FAIL", id=ids[1], error="no use", unrecoverable=True, stack=["at line 1"])
        client.ok("FAIL", id=ids[2], error="try again")
        self.completed, self.dead, self.retried = ids

    @staticmethod
    def _totals(client: Client) -> dict[str, Any]:
        figures = client.ok("Metrics")["metrics"]
        return {name: figures[name] for name in ("totalPushed", "totalCompleted", "totalFailed")}

    def check(self, client: Client) -> None:
        self._check_settings(client)
        self._check_ends(client)
        assert client.ok("GetState", id=self.parent)["state"] == "waiting-children"
        assert client.ok("GetJobByCustomId", customId="the-child")["job"]["id"] == self.child
        assert client.ok("PUSH", queue="family", data="again", jobId="the-child")["id"] == self.child
        assert client.ok("PUSH", queue="keys", data=2, uniqueKey="k")["id"] == self.keyed
        logs = client.ok("GetLogs", id=self.logged)["data"]["logs"]
        assert [(log["level"], log["message"]) for log in logs] == [("info", "told as info"), ("warn", "told as warn")]
        delayed = client.ok("GetJob", id=self.delayed)["job"]
        assert (delayed["state"], delayed["priority"], delayed["runAt"] - delayed["createdAt"]) == (
            "delayed",
            7,
            3_600_000,
        )
        assert client.ok("GetJob", id=self.large)["job"]["data"] == "x" * 100_000
        assert self._totals(client) == self.stats

    @staticmethod
    def _check_settings(client: Client) -> None:
        assert client.ok("IsPaused", queue="held")["paused"] is True
        limits = client.ok("GetQueueLimits", queue="limited")["data"]["limits"]
        assert (limits["rateLimit"]["max"], limits["rateLimit"]["duration"]) == (7, 60_000)
        assert limits["concurrencyLimit"] == 3
        assert client.ok("GetStallConfig", queue="limited")["config"]["stallInterval"] == 12_345
        assert client.ok("GetDlqConfig", queue="limited")["config"]["maxEntries"] == 77
        cron = client.ok("CronGet", name="nightly")["cron"]
        assert (cron["queue"], cron["schedule"], cron["timezone"]) == ("cron", "0 3 * * *", "Europe/Rome")
        (webhook,) = client.ok("ListWebhooks")["data"]["webhooks"]
        assert (webhook["url"], webhook["queue"]) == ("https://example.com/hook", "held")

    def _check_ends(self, client: Client) -> None:
        assert client.ok("GetResult", id=self.completed)["result"] == {"answer": 42}
        (letter,) = client.ok("Dlq", queue="ends")["entries"]
        assert (letter["job"]["id"], letter["reason"]) == (self.dead, "max_attempts_exceeded")
        assert [attempt["error"] for attempt in letter["attempts"]] == ["no use"]
        dead = client.ok("GetJob", id=self.dead)["job"]
        assert (dead["state"], dead["failedReason"], dead["stacktrace"]) == ("failed", "no use", ["at line 1"])
        assert client.ok("GetDlqStats", queue="ends")["data"]["stats"]["total"] == 1
        assert client.ok("GetJob", id=self.retried)["job"]["attempts"] == 1


def test_everything_a_server_was_told_survives_kill_9(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "told.db") as server:
        with server.client() as client:
            told = Told(client)
            told.check(client)
        for _ in range(2):
            server.kill()
            server.start()
            with server.client() as client:
                told.check(client)


def test_a_parent_still_hears_of_its_child_after_kill_9(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "family.db") as server:
        with server.client() as client:
            child = client.ok("PUSH", queue="family", data="child")["id"]
            parent = client.ok("PUSH", queue="family", data="parent", dependsOn=[child])["id"]
            assert client.ok("PULL", queue="family")["job"]["id"] == child
        server.kill()
        server.start()
        with server.client() as client:
            assert client.ok("PULL", queue="family")["job"]["id"] == child
            client.ok("ACK", id=child)
            assert client.ok("PULL", queue="family")["job"]["id"] == parent
