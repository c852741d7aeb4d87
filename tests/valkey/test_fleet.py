"""Several brokers on one Valkey, as real processes: what one is told the others know, whoever dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from headrace.backends.valkey.library import GLIDEMQ_VERSION, glidemq_source
from headrace.clock import SystemClock
from tests.http.receiver import Call, Receiver, answer
from tests.serverprocess import ServerProcess
from tests.valkey.chaos import Chaos
from tests.valkey.foreign import Foreign
from tests.valkeyserver import ValkeyServer
from tests.waiting import eventually
from tests.wireclient import Client


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture(scope="module")
def brokers(store: ValkeyServer) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        options = ("--backend", store.url, "--webhook-allow", "127.0.0.0/8")
        yield [stack.enter_context(ServerProcess(":memory:", *options)) for _ in range(2)]


def await_end(client: Client, store: ValkeyServer, queue: str, job_id: str) -> None:
    """Send a WaitJob, and return when all brokers know that somebody waits for jobs of the queue."""
    client.send("WaitJob", id=job_id, timeout=10_000)
    eventually(lambda: store.client().hget(f"glide:{{{queue}}}:meta", "hrAwaited"))


@pytest.mark.alone
def test_a_page_of_a_queue_costs_no_memory_for_the_rest_of_it(store: ValkeyServer, queue: str) -> None:
    with ServerProcess(":memory:", "--backend", store.url) as broker, broker.client(timeout=60) as client:
        for n in range(400):
            client.ok("PUSH", queue=queue, data={"n": n, "image": "x" * 900_000})
        before = peak_mb(broker.pid)
        (shown,) = client.ok("GetJobs", queue=queue, limit=1, asc=False)["jobs"]
        assert (shown["data"]["n"], len(shown["data"]["image"])) == (399, 900_000)
        client.ok("DashboardQueue", queue=queue, includeJobs=True, jobsLimit=1, brief=True)
        assert client.ok("Clean", queue=queue, grace=0, limit=1)["count"] == 1
        assert peak_mb(broker.pid) - before < 300
        client.ok("Obliterate", queue=queue)


def peak_mb(pid: int) -> float:
    """The most memory that a process has had."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


class TestOneTruth:
    def test_the_calls_of_all_brokers_are_counted(self, brokers: list[ServerProcess], queue: str) -> None:
        with Receiver() as receiver, brokers[0].client() as here, brokers[1].client() as there:
            hook = here.ok("AddWebhook", url=receiver.url, queue=queue, events=["job.pushed"])["data"]["webhookId"]

            def are_counted(calls: int) -> bool:
                (shown,) = [hook for hook in here.ok("ListWebhooks")["data"]["webhooks"] if hook["queue"] == queue]
                return bool(shown["successCount"] == len(receiver.calls) >= calls)

            there.ok("ListWebhooks")  # which tells it of this one
            for calls, client in enumerate((here, there, here, there), 1):
                client.ok("PUSH", queue=queue, data={})
                eventually(lambda calls=calls: are_counted(calls))
            here.ok("RemoveWebhook", webhookId=hook)

    def test_a_call_is_counted_although_that_was_refused_at_first(
        self, brokers: list[ServerProcess], store: ValkeyServer, queue: str
    ) -> None:
        valkey = store.client()

        def refuse(handler: BaseHTTPRequestHandler, call: Call) -> None:
            valkey.acl_log_reset()
            valkey.acl_setuser("default", enabled=True, nopass=True, commands=["+@all", "-hset"], keys=["*"])
            answer(200)(handler, call)

        with Receiver() as receiver, brokers[0].client() as client:
            receiver.answer = refuse
            hook = client.ok("AddWebhook", url=receiver.url, queue=queue, events=["job.pushed"])["data"]["webhookId"]
            client.ok("PUSH", queue=queue, data={})
            try:
                eventually(lambda: any(refused["object"] == "hset" for refused in valkey.acl_log()))
            finally:
                valkey.acl_setuser("default", enabled=True, nopass=True, commands=["+@all"], keys=["*"])

            def is_counted() -> bool:
                (shown,) = [one for one in client.ok("ListWebhooks")["data"]["webhooks"] if one["id"] == hook]
                return bool(shown["successCount"] == 1)

            eventually(is_counted)
            client.ok("RemoveWebhook", webhookId=hook)

    def test_a_webhook_that_one_broker_was_told_of_is_called_by_all_until_it_is_removed(
        self, brokers: list[ServerProcess], queue: str
    ) -> None:
        with Receiver() as receiver, brokers[0].client() as here, brokers[1].client() as there:

            def is_called() -> bool:
                before = len(receiver.calls)
                there.ok("PUSH", queue=queue, data={})
                try:
                    return eventually(lambda: len(receiver.calls) > before, within=0.3)
                except AssertionError:
                    return False

            hook = here.ok("AddWebhook", url=receiver.url, queue=queue, events=["job.pushed"])["data"]["webhookId"]
            eventually(is_called)
            here.ok("SetWebhookEnabled", id=hook, enabled=False)
            eventually(lambda: not is_called())
            here.ok("SetWebhookEnabled", id=hook, enabled=True)
            eventually(is_called)
            here.ok("RemoveWebhook", webhookId=hook)
            eventually(lambda: not is_called())

    def test_a_job_pushed_here_is_pulled_there_and_done_everywhere(
        self, brokers: list[ServerProcess], queue: str
    ) -> None:
        with brokers[0].client() as here, brokers[1].client() as there:
            job_id = here.ok("PUSH", queue=queue, data={"n": 1})["id"]
            pulled = there.ok("PULL", queue=queue, owner="w")
            assert pulled["job"]["id"] == job_id
            assert here.ok("PULL", queue=queue)["job"] is None
            here.ok("ACK", id=job_id, token=pulled["token"], result="done")
            assert there.ok("GetResult", id=job_id)["result"] == "done"

    @pytest.mark.alone
    def test_a_long_poll_wakes_for_a_push_at_the_other_broker(self, brokers: list[ServerProcess], queue: str) -> None:
        with brokers[0].client() as here, brokers[1].client() as there:
            waits = []
            for n in range(5):
                there.send("PULL", queue=queue, timeout=10_000, owner="w")
                time.sleep(0.05)
                began = time.monotonic()
                here.ok("PUSH", queue=queue, data=n, **({"priority": 7} if n % 2 else {}))
                assert there.recv()["job"]["data"] == n
                waits.append(time.monotonic() - began)
            assert sorted(waits)[2] < 0.05

    @pytest.mark.alone
    def test_a_delayed_job_reaches_the_other_broker_in_time(self, brokers: list[ServerProcess], queue: str) -> None:
        with brokers[0].client() as here, brokers[1].client() as there:
            there.send("PULL", queue=queue, timeout=10_000, owner="w")
            time.sleep(0.05)
            began = time.monotonic()
            here.ok("PUSH", queue=queue, data=1, delay=300)
            assert there.recv()["job"]["data"] == 1
            assert 0.29 < time.monotonic() - began < 0.8

    def test_who_waits_for_the_end_of_a_job_hears_of_it_from_the_other_broker(
        self, brokers: list[ServerProcess], store: ValkeyServer, queue: str
    ) -> None:
        with brokers[0].client() as here, brokers[1].client() as there:
            job_id = here.ok("PUSH", queue=queue, data=1, removeOnComplete=True)["id"]
            pulled = there.ok("PULL", queue=queue, owner="w")
            await_end(here, store, queue, job_id)
            there.ok("ACK", id=job_id, token=pulled["token"], result={"sum": 3})
            reply = here.recv()
            assert (reply["completed"], reply["result"]) == (True, {"sum": 3})

    @pytest.mark.parametrize("broker", [0, 1])
    @pytest.mark.parametrize("removal", ["Drain", "Obliterate", "Clean", "Cancel"])
    def test_who_waits_for_a_job_that_is_removed_hears_of_it_from_either_broker(
        self, brokers: list[ServerProcess], store: ValkeyServer, queue: str, removal: str, broker: int
    ) -> None:
        with brokers[0].client() as here, brokers[broker].client() as other:
            job_id = here.ok("PUSH", queue=queue, data=1)["id"]
            await_end(here, store, queue, job_id)
            began = time.monotonic()
            other.ok(removal, **({"id": job_id} if removal == "Cancel" else {"queue": queue, "grace": 0}))
            assert here.recv()["completed"] is False
            assert time.monotonic() - began < 2

    def test_who_waits_is_known_also_after_another_broker_obliterated_the_queue(
        self, brokers: list[ServerProcess], store: ValkeyServer, queue: str
    ) -> None:
        meta = f"glide:{{{queue}}}:meta"
        with brokers[0].client() as here, brokers[0].client() as parked, brokers[1].client() as there:
            await_end(here, store, queue, here.ok("PUSH", queue=queue, data=1)["id"])
            there.ok("Pause", queue=queue)
            parked.send("PULL", queue=queue, timeout=20_000, owner="w")
            eventually(lambda: store.client().hget(meta, "hrParked"))
            there.ok("Obliterate", queue=queue)
            assert here.recv()["completed"] is False
            assert set(store.client().hgetall(meta)) == {"hrAwaited", "hrParked"}
            job_id = there.ok("PUSH", queue=queue, data=2)["id"]
            pulled = parked.recv()
            assert pulled["job"]["id"] == job_id
            await_end(here, store, queue, job_id)
            there.ok("ACK", id=job_id, token=pulled["token"], result=3)
            began = time.monotonic()
            assert here.recv()["result"] == 3
            assert time.monotonic() - began < 5

    def test_jobs_of_a_connection_that_breaks_wait_again_at_once(
        self, brokers: list[ServerProcess], queue: str
    ) -> None:
        with brokers[0].client() as here:
            here.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(3)])
            holder = brokers[1].client()
            assert len(holder.ok("PULLB", queue=queue, count=3, owner="w")["jobs"]) == 3
            holder.socket.close()
            eventually(lambda: here.ok("GetJobCounts", queue=queue)["counts"]["waiting"] == 3, 3)
            assert here.ok("PULL", queue=queue)["job"]["attempts"] == 0

    def test_a_pause_and_a_concurrency_limit_hold_at_both(self, brokers: list[ServerProcess], queue: str) -> None:
        with brokers[0].client() as here, brokers[1].client() as there:
            here.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(10)])
            here.ok("Pause", queue=queue)
            assert there.ok("PULL", queue=queue)["job"] is None
            there.ok("Resume", queue=queue)
            here.ok("SetConcurrency", queue=queue, limit=3)
            taken = [len(client.ok("PULLB", queue=queue, count=2)["jobs"]) for client in (here, there, here, there)]
            assert taken == [2, 1, 0, 0]

    def test_global_concurrency_is_never_overshot(self, brokers: list[ServerProcess], queue: str) -> None:
        """Six pullers at two brokers; the limit is looked at where the job is claimed."""
        with brokers[0].client() as here:
            here.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(120)])
            here.ok("SetConcurrency", queue=queue, limit=2)
        active, most, done = 0, 0, 0
        lock = threading.Lock()

        def work(broker: ServerProcess) -> None:
            nonlocal active, most, done
            with broker.client() as client:
                while done < 120:
                    job = client.ok("PULL", queue=queue, timeout=200)["job"]
                    if job is None:
                        continue
                    with lock:
                        active += 1
                        most = max(most, active)
                    time.sleep(0.001)
                    with lock:
                        active -= 1
                        done += 1
                    client.ok("ACK", id=job["id"])

        threads = [threading.Thread(target=work, args=(brokers[n % 2],)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (done, most) == (120, 2)

    def test_a_schedule_fires_each_slot_once(self, brokers: list[ServerProcess], queue: str) -> None:
        with brokers[0].client() as here, brokers[1].client() as there:
            fields = {"queue": queue, "data": {}, "repeatEvery": 50, "preventOverlap": False, "maxLimit": 30}
            here.ok("Cron", name=queue, **fields)
            names = lambda: [entry["name"] for entry in there.ok("CronList")["crons"]]  # noqa: E731
            eventually(lambda: queue not in names(), 15)
            assert here.ok("GetJobCounts", queue=queue)["counts"]["waiting"] == 30


@pytest.mark.alone
class TestForeignProducers:
    """Jobs of programs that call the functions themselves reach a worker that waits at a broker."""

    KINDS = ({}, {"priority": 3}, {"more": ("1",)}, {"delay": 60})

    def _waits(self, broker: ServerProcess, foreign: Foreign, queue: str) -> list[float]:
        waits = []
        with broker.client() as client:
            for given in self.KINDS * 3:
                client.send("PULL", queue=queue, timeout=10_000)
                time.sleep(0.05)
                began = time.monotonic()
                foreign.add(queue=queue, **given)
                job = client.recv()["job"]
                waits.append(time.monotonic() - began - given.get("delay", 0) / 1000)
                client.ok("ACK", id=job["id"])
        return waits

    def test_adds_through_our_library_arrive_at_once(
        self, store: ValkeyServer, brokers: list[ServerProcess], queue: str
    ) -> None:
        waits = self._waits(brokers[0], Foreign(store.client(), "glide", SystemClock()), queue)
        assert sorted(waits)[len(waits) // 2] < 0.05
        assert max(waits) < 0.5

    def test_adds_through_a_library_of_node_arrive_within_a_quarter_of_a_second(
        self, tmp_path: Path, queue: str
    ) -> None:
        """It is played by ours without the part that wakes brokers, under a version text of Node's."""
        with ValkeyServer(tmp_path) as store:
            source = glidemq_source().replace(GLIDEMQ_VERSION, "93").replace("if parked and", "if false and")
            store.client().function_load(source)
            with ServerProcess(":memory:", "--backend", store.url) as broker:
                waits = self._waits(broker, Foreign(store.client(), "glide", SystemClock()), queue)
        assert sorted(waits)[len(waits) // 2] < 0.25
        assert max(waits) < 0.8


class TestDeath:
    def test_a_job_of_a_killed_broker_comes_back_when_its_lease_ends(self, store: ValkeyServer, queue: str) -> None:
        with ServerProcess(":memory:", "--backend", store.url) as survivor:
            doomed = ServerProcess(":memory:", "--backend", store.url).start()
            with survivor.client() as client:
                client.ok("PUSH", queue=queue, data="work")
                holder = doomed.client()
                token = holder.ok("PULL", queue=queue, owner="w", lockTtl=1500)["token"]
                doomed.kill()
                assert client.ok("PULL", queue=queue)["job"] is None
                again = client.ok("PULL", queue=queue, timeout=10_000, owner="v")
                assert again["job"]["attempts"] == 1
                assert "lock token" in client.error("ACK", id=again["job"]["id"], token=token)
                client.ok("ACK", id=again["job"]["id"], token=again["token"])

    def test_a_schedule_outlives_the_broker_that_was_told(self, store: ValkeyServer, queue: str) -> None:
        with ServerProcess(":memory:", "--backend", store.url) as survivor:
            doomed = ServerProcess(":memory:", "--backend", store.url).start()
            with doomed.client() as client:
                client.ok("Cron", name=queue, queue=queue, data={}, repeatEvery=1500, preventOverlap=False)
            doomed.kill()
            with survivor.client() as client:
                eventually(lambda: client.ok("GetJobCounts", queue=queue)["counts"]["waiting"] >= 1, 10)
                client.ok("CronDelete", name=queue)

    def test_a_broker_goes_on_when_valkey_comes_back(self, tmp_path: Path) -> None:
        options = ("--appendonly", "yes", "--appendfsync", "always")
        valkey = ValkeyServer(tmp_path / "store", *options).start()
        try:
            with ServerProcess(":memory:", "--backend", valkey.url) as broker, broker.client() as client:
                ids = [client.ok("PUSH", queue="q", data=n)["id"] for n in range(20)]
                client.ok("PUSH", queue="q", data="sure", durable=True)
                valkey.kill()
                assert "Valkey" in client.error("PUSH", queue="q", data="lost")
                valkey.start()
                eventually(lambda: client.call("PUSH", queue="q", data="again").get("ok"), 15)
                pulled = client.ok("PULLB", queue="q", count=1000)["jobs"]
                assert [job["id"] for job in pulled[:20]] == ids
                assert [job["data"] for job in pulled[20:22]] == ["sure", "again"]
        finally:
            valkey.stop()


@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost_whoever_is_killed(tmp_path: Path) -> None:
    """Three brokers and six workers; brokers and workers are killed at random, Valkey is restarted once."""
    with Chaos(tmp_path) as chaos:
        chaos.run()
        assert chaos.pushed
        assert chaos.missing() == []
        assert chaos.done_twice() == []
