"""A queue goes to another node, by a failover or because its slot is moved: brokers go on by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from valkey.crc import key_slot

import valkey
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.backends.valkey.queries import QUEUES_AT_ONCE
from tests.conformance.rig import spec
from tests.serverprocess import ServerProcess
from tests.valkeyserver import SLOTS, ValkeyCluster, ValkeyServer
from tests.waiting import eventually
from tests.wireclient import Client


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ValkeyCluster]:
    cluster = ValkeyCluster(tmp_path, node_timeout_ms=500)
    try:
        cluster.start()
        cluster.add_replica()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def partial(cluster: ValkeyCluster) -> ValkeyCluster:
    """A cluster that goes on with the slots it has."""
    for node in cluster.nodes:
        node.client().config_set("cluster-require-full-coverage", "no")
    return cluster


def queue_of_primary(number: int) -> str:
    first, last = SLOTS[number]
    names = (f"queue{n}" for n in range(100))
    return next(name for name in names if first <= key_slot(f"{{{name}}}".encode()) <= last)


def push_until_taken(client: Client, queue: str) -> list[str]:
    """Push until the cluster takes it; what it said before."""
    errors, deadline = [], time.monotonic() + 30
    while not (reply := client.call("PUSH", queue=queue, data="after")).get("ok"):
        assert time.monotonic() < deadline, reply
        errors.append(reply["error"])
        time.sleep(0.05)
    return errors


@pytest.mark.timeout(120)
def test_brokers_go_on_with_the_replica_and_nothing_replicated_is_lost(cluster: ValkeyCluster) -> None:
    queue = queue_of_primary(0)
    with (
        ServerProcess(":memory:", "--backend", cluster.url) as broker,
        broker.client() as client,
        Client(broker.port, timeout=40) as waiting,
    ):
        ids = [client.ok("PUSH", queue=queue, data=n)["id"] for n in range(20)]
        held = client.ok("PULLB", queue=queue, count=20, owner="w", lockTtl=60_000)
        assert [job["id"] for job in held["jobs"]] == ids
        waiting.send("PULL", queue=queue, timeout=30_000)
        primary = cluster.nodes[0].client()
        eventually(lambda: primary.hexists(f"glide:{{{queue}}}:meta", "hrParked"), 10)
        assert primary.wait(1, 5000) == 1  # the replica has all of it
        cluster.nodes[0].kill()
        errors = push_until_taken(client, queue)
        assert all("Valkey" in error for error in errors), errors
        assert waiting.recv()["job"]["data"] == "after"
        for job, token in zip(held["jobs"], held["tokens"], strict=True):
            client.ok("ACK", id=job["id"], token=token)
        counts = client.ok("GetJobCounts", queue=queue)["counts"]
        assert (counts["completed"], counts["active"], counts["waiting"]) == (20, 1, 0)
        cluster.nodes[0].start()  # the old primary comes back as a replica, and nobody notices
        assert client.ok("PUSH", queue=queue, data="later")["id"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_dead", [False, True], ids=["cut off", "dead"])
def test_a_node_that_others_did_without_is_done_without(cluster: ValkeyCluster, is_dead: bool) -> None:
    """It is the only one that the URL names, and the first that is asked. Cut off it tells of the old primaries, says
    CLUSTERDOWN of its own slots, and hears nothing of what is published elsewhere."""
    lost, other = queue_of_primary(0), queue_of_primary(1)
    url = f"valkey+cluster://127.0.0.1:{cluster.nodes[0].port}"
    with ExitStack() as stack:
        brokers = [stack.enter_context(ServerProcess(":memory:", "--backend", url)) for _ in range(2)]
        here, there = (stack.enter_context(broker.client(timeout=60)) for broker in brokers)
        job_id = here.ok("PUSH", queue=other, data=1)["id"]
        held = there.ok("PULL", queue=other, owner="w", lockTtl=100_000)
        here.ok("PULL", queue=lost, timeout=1)  # both listen from now on
        there.ok("PULL", queue=lost, timeout=1)
        if is_dead:
            cluster.nodes[0].kill()
        else:
            cluster.cut_off(cluster.nodes[0])
        eventually(lambda: cluster.nodes[3].client().info("replication")["role"] == "master", 30)
        push_until_taken(here, lost)
        eventually(lambda: subscribers(cluster.nodes[1:]) == len(brokers), 30)
        here.send("WaitJob", id=job_id, timeout=50_000)
        eventually(lambda: cluster.nodes[1].client().hexists(f"glide:{{{other}}}:meta", "hrAwaited"))
        there.ok("ACK", id=job_id, token=held["token"], result=3)
        began = time.monotonic()
        assert here.recv()["result"] == 3
        assert time.monotonic() - began < 25


def subscribers(nodes: list[ValkeyServer]) -> int:
    """How many hear what is published at these nodes."""
    return sum(node.client().pubsub_numsub("glide:hr:ended")[0][1] for node in nodes)


def test_a_pull_waits_at_a_broker_that_began_to_listen_after_a_node_had_died(cluster: ValkeyCluster) -> None:
    with ServerProcess(":memory:", "--backend", cluster.url) as broker, broker.client(timeout=60) as client:
        cluster.nodes[0].kill()
        push_until_taken(client, queue_of_primary(0))
        assert client.ok("PULL", queue=queue_of_primary(1), timeout=1)["job"] is None


def has_slot_of(node: ValkeyServer, key: str) -> bool:
    try:
        return bool(node.client().exists(key))
    except valkey.ResponseError as error:
        if not str(error).startswith("MOVED"):
            raise
        return False


@pytest.mark.timeout(120)
def test_a_push_is_answered_while_the_slot_of_its_queue_moves(cluster: ValkeyCluster) -> None:
    queue = queue_of_primary(0)
    stream, pushed = f"glide:{{{queue}}}:stream", 0
    slot = key_slot(stream.encode())
    with ServerProcess(":memory:", "--backend", cluster.url) as broker, broker.client() as client:
        for here, there in ((0, 1), (1, 2), (2, 0)):
            target = cluster.nodes[there]
            name = str(target.client().execute_command("CLUSTER MYID"))
            move = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", name)
            cluster.nodes[here].client().execute_command(*move)
            deadline = time.monotonic() + 30
            while not has_slot_of(target, stream):
                client.ok("PUSH", queue=queue, data=pushed)
                pushed += 1
                assert time.monotonic() < deadline
            client.ok("PUSH", queue=queue, data=pushed)
            pushed += 1
        assert client.ok("GetJobCounts", queue=queue)["counts"]["waiting"] == pushed


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("away", "there"), [(1, 2), (2, 1)])
def test_queues_of_other_primaries_are_looked_after_while_one_is_away(
    partial: ValkeyCluster, away: int, there: int
) -> None:
    """A broker dies while it holds a job: another one finds that in its slow round, which also drops old jobs."""
    queue = queue_of_primary(there)
    dying = ServerProcess(":memory:", "--backend", partial.url).start()
    with (
        ServerProcess(":memory:", "--backend", partial.url, "--max-completed-jobs", "1") as broker,
        broker.client() as client,
        dying.client() as worker,
    ):
        client.ok("PUSH", queue=queue_of_primary(away), data=0)
        for n in range(4):
            client.ok("PUSH", queue=queue, data=n)
        partial.nodes[away].kill()
        done = worker.ok("PULLB", queue=queue, count=3, owner="w")
        worker.ok("ACKB", ids=[job["id"] for job in done["jobs"]], tokens=done["tokens"])
        assert worker.ok("PULL", queue=queue, owner="w", lockTtl=100)["job"]
        dying.kill()

        def is_looked_after() -> bool:
            counts = client.ok("GetJobCounts", queue=queue)["counts"]
            return (counts["waiting"], counts["active"], counts["completed"]) == (1, 0, 1)

        eventually(is_looked_after, 30)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("prefix", "away"), [("glide", 1), ("g4", 2)], ids=["list of queues", "all lists"])
def test_what_there_is_can_be_listed_while_a_primary_is_away(partial: ValkeyCluster, prefix: str, away: int) -> None:
    """With these prefixes, the node that is away has the list of queues, or those of schedules and webhooks as well."""
    queues = sorted(queue_of_primary(n) for n in range(3))
    url = f"{partial.url}?prefix={prefix}"
    with ServerProcess(":memory:", "--backend", url) as broker, broker.client(timeout=60) as client:
        for queue in queues:
            client.ok("PUSH", queue=queue, data=1)
            client.ok("Pause", queue=queue)
            client.ok("Cron", name=f"every-{queue}", queue=queue, data=1, repeatEvery=10_000_000)
        client.ok("AddWebhook", url="http://192.0.2.1/", events=["job.completed"])
        for known in ("ListQueues", "CronList", "ListWebhooks"):
            client.ok(known)
        partial.nodes[away].kill()
        for _ in range(2):
            listed = client.ok("ListQueues")["queues"]
            assert [(one["name"], one["waiting"], one["paused"]) for one in listed] == [
                (name, 1, True) for name in queues
            ]
            crons = client.ok("CronList")["crons"]
            assert sorted(cron["queue"] for cron in crons) == queues
            assert len(client.ok("ListWebhooks")["data"]["webhooks"]) == 1
            assert client.ok("DashboardOverview")["data"]["totalQueues"] == 3
            assert (
                f'bunqueue_queue_jobs_waiting{{queue="{queue_of_primary(away)}"}} 1'
                in client.ok("Prometheus")["data"]["metrics"]
            )
        lost = f"127.0.0.1:{partial.nodes[away].port}"
        assert lost in client.error("GetJobCounts", queue=queue_of_primary(away))
        assert lost in client.error("CronGet", name=f"every-{queue_of_primary(away)}") or prefix == "glide"


@pytest.mark.timeout(120)
async def test_whoever_counts_new_queues_waits_once_for_a_primary_that_is_away(
    partial: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = [f"queue{n}" for n in range(5 * QUEUES_AT_ONCE)]
    backends = [ValkeyBackend(partial.url) for _ in range(2)]
    asked: list[str] = []
    for backend in backends:
        await backend.open()
        if backend is backends[0]:
            await asyncio.gather(*(backend.insert(queue, [spec(1)]) for queue in queues))
    count_jobs = backends[1]._count_jobs

    async def counted(queue: str) -> list[int]:
        asked.append(queue)
        return await count_jobs(queue)

    monkeypatch.setattr(backends[1], "_count_jobs", counted)
    partial.nodes[2].kill()  # another one has the list of queues
    first, last = SLOTS[2]
    away = {queue for queue in queues if first <= key_slot(f"{{{queue}}}".encode()) <= last}
    await backends[1].count_new_queues()
    assert backends[1].total_counts().waiting == len(queues) - len(away)
    assert 0 < len(away.intersection(asked)) < QUEUES_AT_ONCE < len(away)
    for backend in backends:
        await backend.close()


@pytest.mark.timeout(120)
def test_schedules_of_other_brokers_are_learned_while_a_primary_is_away(partial: ValkeyCluster) -> None:
    queue = queue_of_primary(2)
    dying = ServerProcess(":memory:", "--backend", partial.url).start()
    with ServerProcess(":memory:", "--backend", partial.url) as broker, broker.client(timeout=60) as client:
        with dying.client(timeout=60) as other:
            other.ok("Cron", name="away", queue=queue_of_primary(1), data=1, repeatEvery=10_000_000)
            client.ok("PUSH", queue=queue, data=0)  # so that it is known: the list of queues will be away, too
            eventually(lambda: client.ok("CronList")["crons"])
            partial.nodes[1].kill()
            other.ok("Cron", name="there", queue=queue, data=1, repeatEvery=1500)
            dying.kill()
        eventually(lambda: client.ok("GetJobCounts", queue=queue)["counts"]["waiting"] > 1, 30)
