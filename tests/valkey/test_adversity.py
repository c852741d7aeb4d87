"""A server that is full, was demoted, lost an answer or is worked on by a newer program: what holds all the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from msgspec.structs import replace

from headrace.backends.base import Ack, Demand, FamilyNode
from headrace.backends.valkey import delivery, library, store
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.backends.valkey.connection import Connection
from headrace.backends.valkey.delivery import ROUND_CALLS
from headrace.backends.valkey.keys import mark
from headrace.client.queue import Queue
from headrace.clock import ManualClock
from headrace.commands.workers import RegisterWorker
from headrace.connect import open_client
from headrace.engine.crons import Crons
from headrace.engine.engine import Engine
from headrace.engine.workers import WorkerRegistry
from headrace.errors import NotFound, NotSupported, StorageUnavailable
from headrace.model import CronEntry, Webhook
from headrace.server.webhooks import Hook
from headrace.views import encode
from headrace.worker.context import JobContext
from headrace.worker.worker import Worker
from tests.conformance.rig import Rig, spec, unpack
from tests.serverprocess import ServerProcess
from tests.valkey.foreign import Foreign
from tests.valkeyserver import ValkeyServer, shared_server
from tests.waiting import eventually, until
from tests.wireclient import Client as WireClient


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "valkey") as running:
        yield running


@asynccontextmanager
async def opened(url: str, **options: int) -> AsyncIterator[ValkeyBackend]:
    backend = ValkeyBackend(url, **options)
    await backend.open()
    yield backend
    await backend.close()


class Proxy:
    """Passes everything on to a server; `to` may be changed for the next connections, and answers may be lost."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.lost_with = b""
        """Answers that have this are lost, and their connection with them."""
        self.lost = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.to)
        ways = ((reader, to_server, False), (from_server, writer, True))
        tasks = {asyncio.create_task(self._pass_on(*way)) for way in ways}
        self._tasks |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, to_server):
            end.close()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
        while data := await source.read(65536):
            if is_answer and self.lost_with and self.lost_with in data:
                self.lost += 1
                self.lost_with = b""
                return
            sink.write(data)


@asynccontextmanager
async def proxied(to: int) -> AsyncIterator[tuple[Proxy, str]]:
    proxy = Proxy(to)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as listening:
        yield proxy, f"valkey://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"
        listening.close()


class TestMemory:
    async def test_a_full_server_takes_nothing_new_and_lets_go_on_what_is_there(self, server: ValkeyServer) -> None:
        async with opened(server.url, max_completed=0) as backend:
            await backend.insert("q", [spec(n) for n in range(3)])
            await backend.insert_one("q", spec(priority=1, unique_key="k"))
            server.client().config_set("maxmemory", 1)
            for options in ({}, {"priority": 1}):
                with pytest.raises(StorageUnavailable, match="OOM"):
                    await backend.insert_one("q", spec(**options))
            held = await backend.claim("q", Demand(4, "w"))
            ids = [unpack(claim.job)["id"] for claim in held]
            assert len(ids) == 4
            await backend.complete([Ack(ids[0], held[0].token)])
            await backend.fail(
                ids[1], token=held[1].token, error="x", stack=None, unrecoverable=True, remove=None, retry_after=None
            )
            assert await backend.extend(ids[2], held[2].token, 1000)
            await backend.look_after()
            await backend.retire_completed()
            assert (await backend.counts("q")).completed == 0

    async def test_a_broker_that_is_to_keep_more_events_starts_on_a_full_server_and_works(
        self, server: ValkeyServer
    ) -> None:
        schedule = {"iterationCount": 0, "template": {"name": "n", "data": {}}, "nextRun": 1, "every": 1000}
        async with opened(server.url) as backend:
            await backend.insert_one("q", spec())
            await backend.claim("q", Demand(1, "dead", 1))
        server.client().hset("glide:{q}:schedulers", "s", json.dumps(schedule))
        server.client().config_set("maxmemory", 1)
        async with opened(f"{server.url}?events=5000") as backend:
            await backend.look_after()
            assert backend.total_counts().waiting == 1

    async def test_a_server_that_drops_keys_is_complained_about(
        self, server: ValkeyServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.client().config_set("maxmemory-policy", "allkeys-lru")
        async with opened(server.url):
            assert "maxmemory-policy is allkeys-lru, not noeviction" in caplog.text


class TestDemotion:
    async def test_a_server_that_became_a_replica_is_left_for_whatever_has_its_name_now(
        self, server: ValkeyServer, tmp_path: Path
    ) -> None:
        with ValkeyServer(tmp_path / "other") as promoted:
            async with proxied(server.port) as (proxy, url), opened(url) as backend:
                await backend.insert_one("q", spec(1))
                promoted.client().replicaof("127.0.0.1", server.port)
                await until(lambda: promoted.client().info("replication")["master_link_status"] == "up")
                promoted.client().replicaof("NO", "ONE")
                server.client().replicaof("127.0.0.1", promoted.port)
                proxy.to = promoted.port
                with pytest.raises(StorageUnavailable, match="READONLY"):
                    await backend.insert_one("q", spec(2))
                await backend.insert_one("q", spec(3))
                assert promoted.client().xlen("glide:{q}:stream") == 2


class TestNewerProgram:
    NEWER = library.headrace_source().replace(
        f"'{library.HEADRACE_VERSION}', '{library.GENERATION}'",
        f"'{library.GENERATION + 1}.{library.REVISION}', '{library.GENERATION + 1}'",
    )

    async def test_one_of_an_older_generation_is_told_and_does_nothing(self, server: ValkeyServer) -> None:
        async with opened(server.url) as backend:
            await backend.insert_one("q", spec(1))
            server.client().function_load(self.NEWER, replace=True)
            for asked in (backend.insert_one("q", spec(2)), backend.claim("q", Demand(1, "w")), backend.look_after()):
                with pytest.raises(StorageUnavailable, match="a newer Headrace works on this Valkey"):
                    await asked
            assert server.client().fcall("headrace_version", 0).startswith(f"{library.GENERATION + 1}.")
            assert server.client().xlen("glide:{q}:stream") == 1

    async def test_one_of_an_older_generation_does_not_start(self, server: ValkeyServer) -> None:
        server.client().function_load(self.NEWER)
        with pytest.raises(StorageUnavailable, match="upgrade this program"):
            await ValkeyBackend(server.url).open()

    async def test_a_newer_revision_serves_those_before_it(self, server: ValkeyServer) -> None:
        version = f"{library.GENERATION}.{library.REVISION + 1}"
        newer = library.headrace_source().replace(f"'{library.HEADRACE_VERSION}'", f"'{version}'")
        server.client().function_load(newer)
        async with opened(server.url) as backend:
            await backend.insert_one("q", spec(1))
            await backend.look_after()
        assert server.client().fcall("headrace_version", 0) == version


class TestLostAnswers:
    async def test_jobs_of_a_lost_answer_come_to_their_worker_long_before_the_lease_ends(self) -> None:
        shared_server().client().flushall()
        ran: list[int] = []

        async def handle(ctx: JobContext) -> None:
            ran.append(ctx.attempt)

        async with proxied(shared_server().port) as (proxy, url):
            client, producer = open_client(f"{url}?timeout=5"), open_client(f"{shared_server().url}?timeout=6")
            try:
                async with Worker(client, "q", handle, concurrency=1):
                    await until(lambda: shared_server().client().hget("glide:{q}:meta", "hrParked"))
                    proxy.lost_with = b"precious"
                    await Queue(producer, "q").add("precious")
                    await until(lambda: ran, 15)
                assert proxy.lost == 1
                assert ran == [1], "an attempt was counted that never began"
            finally:
                for one in (client, producer):
                    await asyncio.wrap_future(one.close())

    async def test_who_looks_after_them_may_find_that_a_claim_has_done_so(self, server: ValkeyServer) -> None:
        async with opened(server.url) as backend:
            backend._lost = {f"q{n}": {"token"} for n in range(3)}
            looking = asyncio.create_task(backend.look_after())
            while "q0" in backend._lost:  # noqa: ASYNC110 - not one turn of the loop longer
                await asyncio.sleep(0)
            assert await backend.claim("q2", Demand(1, "w", 30_000, None)) == []
            await looking
            assert backend._lost == {}

    async def test_messages_that_make_no_sense_are_passed_over(
        self, rig: Rig, foreign: Foreign, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = rig.backend
        backend._hear(backend._keys.ended.encode(), b"{")
        backend._hear(backend._keys.wake.encode(), b"\xff")
        backend._hear(backend._keys.wake.encode(), b"mail")
        assert "mail" in backend.take_ready()
        assert caplog.text.count("cannot be read") == 2


def test_a_broker_that_stops_gives_back_what_its_connections_hold(server: ValkeyServer) -> None:
    broker = ServerProcess(":memory:", "--backend", server.url).start()
    client = broker.client()
    job_id = client.ok("PUSH", queue="q", data=1)["id"]
    assert client.ok("PULL", queue="q", timeout=1000)["job"]["id"] == job_id
    broker.stop()
    fields = server.client().hgetall(f"glide:{{q}}:job:{job_id}")
    assert (fields["state"], fields["attemptsMade"]) == ("waiting", "0")


def test_a_broker_says_that_it_is_not_ready_while_valkey_is_away(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "valkey") as server, ServerProcess(":memory:", "--backend", server.url) as broker:
        client = broker.client()
        assert client.call("Ready") == {"ok": True, "ready": True}
        server.kill()
        eventually(lambda: not client.call("Ready")["ready"])
        assert client.call("Health")["status"] == "degraded"
        told = client.ok("StorageStatus")["data"]
        assert "cannot be reached" in told["error"]
        assert not told["diskFull"]
        server.start()
        eventually(lambda: client.call("Ready")["ready"])
        assert client.ok("StorageStatus")["data"]["error"] is None
        told = [line.partition("upkeep waits")[2] for line in broker.stop().splitlines() if "upkeep waits" in line]
        assert len(told) == len(set(told)) > 0


def push_without_pause(client: WireClient) -> None:
    body = msgpack.packb({"cmd": "PUSH", "queue": "q", "data": 0, "reqId": 0})
    with suppress(OSError):
        while True:
            client.socket.sendall((struct.pack(">I", len(body)) + body) * 500)


def read_to_the_end(client: WireClient, answers: bytearray) -> None:
    with suppress(OSError):
        while chunk := client.socket.recv(1 << 20):
            answers += chunk
        client.socket.shutdown(socket.SHUT_RDWR)


def test_a_broker_stops_under_load_and_answers_all_that_it_did(server: ValkeyServer) -> None:
    broker = ServerProcess(":memory:", "--backend", server.url).start()
    answers = bytearray()
    with broker.client(timeout=60) as client:
        pushing = threading.Thread(target=push_without_pause, args=(client,))
        reading = threading.Thread(target=read_to_the_end, args=(client, answers))
        pushing.start()
        reading.start()
        eventually(lambda: len(answers) > 100_000)
        began = time.monotonic()
        broker.stop()
        assert time.monotonic() - began < 15, "it waited for as long as it may"
        pushing.join(10)
        reading.join(10)
    assert answers.count(msgpack.packb("ok") + b"\xc3") == server.client().xlen("glide:{q}:stream")


def test_a_job_that_is_claimed_slowly_for_a_client_that_is_gone_goes_back(server: ValkeyServer) -> None:
    with ServerProcess(":memory:", "--backend", server.url) as broker, broker.client() as client:
        job_id = client.ok("PUSH", queue="q", data=1)["id"]
        with broker.client() as gone:
            server.client().client_pause(3000)
            gone.send("PULL", queue="q", owner="w", lockTtl=60_000)
            client.ok("Ping")
            gone.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: client.ok("Metrics")["metrics"]["totalPulled"])
        eventually(lambda: client.ok("GetState", id=job_id)["state"] == "waiting")


@pytest.fixture
def other(rig: Rig) -> Iterator[ValkeyBackend]:
    """Another broker, which has seen the same queues."""
    rig.push()
    backend = ValkeyBackend(f"{shared_server().url}?prefix={rig.backend.url.prefix}", clock=rig.clock)
    rig.wait(backend.open())
    yield backend
    rig.wait(backend.close())


@pytest.mark.parametrize("is_listed", [False, True], ids=["", "listed meanwhile"])
def test_a_job_pushed_to_a_queue_that_another_broker_obliterated_is_seen_within_a_round(
    rig: Rig, other: ValkeyBackend, is_listed: bool
) -> None:
    rig.wait(other.obliterate("q"))
    rig.push()
    if is_listed:
        assert rig.queues() == []
    rig.look_after()
    assert [(summary.name, summary.counts.waiting) for summary in rig.queues()] == [("q", 1)]


def test_figures_of_a_queue_that_another_broker_obliterated_are_forgotten(rig: Rig, other: ValkeyBackend) -> None:
    rig.run()
    rig.wait(other.obliterate("q"))
    assert "q" in rig.backend.queue_figures()
    rig.look_after()
    assert "q" not in rig.backend.queue_figures()
    assert rig.backend.minute_metrics("q", "completed").count == 0


class Beset(ValkeyBackend):
    """Somebody pushes to a queue between the call that found it empty and the one that takes it from the list."""

    async def _call(self, verb: str, queue: str, *args: Any, **options: Any) -> list[Any]:
        reply = await super()._call(verb, queue, *args, **options)
        if verb == "obliterate":
            await super()._call("insertPlain", queue, "late", "", b"1", b"")
        return reply


def test_who_obliterates_a_queue_sees_what_was_pushed_meanwhile(rig: Rig) -> None:
    rig.wait(rig.backend.close())
    rig.backend = Beset(f"{shared_server().url}?prefix={rig.backend.url.prefix}", clock=rig.clock)
    rig.wait(rig.backend.open())
    rig.push()
    rig.obliterate("q")
    assert [(summary.name, summary.counts.waiting) for summary in rig.queues()] == [("q", 1)]


def test_an_end_is_told_though_the_job_was_removed_before_the_answer_came(rig: Rig) -> None:
    rig.push()
    held = rig.take()
    ending = asyncio.ensure_future(rig.backend.complete([Ack(held.id, held.token)]), loop=rig._loop)

    async def both() -> None:
        await asyncio.sleep(0)
        rig.backend._in_hand.clear()
        await ending

    rig.wait(both())
    rig.settle()
    assert [event.job for event in rig.events if event.event == "completed"] == [held.id]


def cron(name: str, queue: str, **given: Any) -> CronEntry:
    fields = {"data": b"\xc0", "schedule": None, "repeat_every": 1000.0, "next_run": 1.0, "prevent_overlap": False}
    return CronEntry(name=name, queue=queue, **{**fields, **given})


class TestSchedules:
    """A broker may die between any two calls: a schedule is where the registry says, or nowhere."""

    def test_what_is_left_of_a_deleted_one_does_not_run(self, rig: Rig, foreign: Foreign) -> None:
        for name in ("a", "b"):
            rig.put_cron(cron(name, "q"))
        foreign.client.hdel(f"{foreign.prefix}:hr:cron-queues", "a")
        assert [entry.name for entry in rig.crons()] == ["b"]

    def test_one_that_moves_to_another_queue_is_in_one_of_them(self, rig: Rig, foreign: Foreign) -> None:
        for queue in ("q", "r"):
            rig.put_cron(cron("a", queue))
        rig.put_cron(cron("b", "q"))
        assert [(entry.name, entry.queue) for entry in rig.crons()] == [("a", "r"), ("b", "q")]
        assert foreign.client.hkeys(foreign.key("hr:crons")) == ["b"]

    @pytest.mark.parametrize("queue", ["q", "r"])
    def test_what_is_left_of_one_is_in_nobodys_way(self, rig: Rig, foreign: Foreign, queue: str) -> None:
        rig.put_cron(cron("a", "q"))
        if queue == "q":
            foreign.client.hdel(f"{foreign.prefix}:hr:cron-queues", "a")
        else:
            foreign.client.hset(f"{foreign.prefix}:hr:cron-queues", "a", queue)
        assert rig.wait(scheduler(rig).upsert(cron("a", "q"))).next_run == rig.clock.now_ms() + 1000
        assert [(entry.name, entry.queue) for entry in rig.crons()] == [("a", "q")]


def scheduler(rig: Rig) -> Crons:
    """One of several brokers on the same store."""
    return Crons(rig.backend, rig.clock, WorkerRegistry(rig.clock, rig.backend.ids, 30_000))


async def fire_due(crons: Crons) -> None:
    for run in crons.due_runs():
        await run


class TestSchedulesForWorkersOnly:
    """Each broker knows the workers that are connected to it."""

    @pytest.fixture
    def brokers(self, rig: Rig) -> list[Crons]:
        """The second one has a worker."""
        brokers = [scheduler(rig), scheduler(rig)]
        rig.wait(brokers[0].upsert(cron("a", "q", skip_if_no_worker=True)))
        for broker in brokers:
            rig.wait(broker.start())
        brokers[1]._workers.register(RegisterWorker(name="w", queues=["q"]))
        rig.clock.advance(1000)
        return brokers

    def test_a_slot_is_left_to_a_broker_that_has_a_worker(self, rig: Rig, brokers: list[Crons]) -> None:
        for _ in range(3):
            for broker in brokers:
                rig.wait(fire_due(broker))
            rig.clock.advance(1000)
        assert [entry.executions for entry in rig.crons()] == [3]
        assert rig.counts("q").waiting == 3

    def test_a_slot_that_nobody_ran_is_skipped_a_second_later(self, rig: Rig, brokers: list[Crons]) -> None:
        (before,) = rig.crons()
        for waited, skipped in ((0, 0), (999, 0), (1, 1)):
            rig.clock.advance(waited)
            rig.wait(fire_due(brokers[0]))
            (entry,) = rig.crons()
            assert (entry.next_run, entry.executions) == (before.next_run + skipped * 1000, 0)
        assert rig.counts("q").waiting == 0


async def test_a_schedule_whose_node_is_away_holds_up_no_timer(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    backend = ValkeyBackend(server.url, clock=clock)
    engine, is_back, look = Engine(backend, clock), asyncio.Event(), backend.cron

    async def look_at_a_node_that_is_away(name: str) -> CronEntry | None:
        if name == "away":
            await is_back.wait()
        return await look(name)

    async def waiting(queue: str) -> int:
        return (await backend.counts(queue)).waiting

    await backend.open()
    await engine.start()
    try:
        for name in ("away", "there"):
            await engine.crons.upsert(cron(name, name))
        await backend.insert_one("q", spec(delay=1000))
        monkeypatch.setattr(backend, "cron", look_at_a_node_that_is_away)
        clock.advance(1000)
        async with asyncio.timeout(10):
            await engine.sweep()
            await until(lambda: waiting("there"))
            await until(lambda: waiting("q"))
            assert await waiting("away") == 0
            await engine.crons.replan()
            await engine.sweep()
            is_back.set()
            await until(lambda: waiting("away"))
        assert engine.crons.next_due_ms() == clock.now_ms() + 1000
    finally:
        await engine.stop()


def test_schedules_that_are_planned_every_second_are_planned_once(rig: Rig) -> None:
    crons = scheduler(rig)
    rig.wait(crons.upsert(cron("c", "q")))
    for _ in range(5):
        rig.wait(crons.replan())
    assert len(crons._heap) == 1


class TestManyQueues:
    COUNT = 300

    @pytest.fixture
    def many(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What the server is asked, once there are many."""
        for n in range(self.COUNT):
            rig.push(f"q{n}")
        rig.retire_completed()
        calls: list[str] = []
        send = Connection._send

        def note(self: Connection, pipe: Any, packed: bytes) -> Any:
            calls.append(packed.decode(errors="replace"))
            return send(self, pipe, packed)

        monkeypatch.setattr(Connection, "_send", note)
        return calls

    def test_only_those_that_were_looked_after_are_asked_for_completed_jobs(self, rig: Rig, many: list[str]) -> None:
        rig.retire_completed()
        assert many == []
        rig.look_after()
        rig.retire_completed()
        asked = sum("ZCARD" in text for text in many)
        assert 0 < asked <= self.COUNT // ROUND_CALLS + 1

    def test_where_completed_jobs_went_more_may_go_at_once(self, rig: Rig) -> None:
        rig.backend.max_completed = 1
        for _ in range(6):
            rig.push()
            rig.run()
        assert [rig.retire_completed(2) for _ in range(4)] == [2, 2, 1, 0]

    def test_they_are_looked_after_a_few_at_a_time(
        self, rig: Rig, many: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def look() -> list[int]:
            is_time = asyncio.Event()

            async def sleep(seconds: float) -> None:
                if seconds:
                    await is_time.wait()

            monkeypatch.setattr(delivery, "asyncio", SimpleNamespace(sleep=sleep))
            looking = asyncio.create_task(rig.backend.look_after())
            await until(lambda: len(rig.backend._counted) >= 20)
            first = sum("_lookAfter" in text for text in many)
            is_time.set()
            await looking
            return [first, sum("_lookAfter" in text for text in many)]

        assert rig.wait(look()) == [20, self.COUNT // ROUND_CALLS + 1]

    def test_a_new_one_does_not_have_the_others_gone_through(
        self, rig: Rig, many: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        marked: list[str] = []
        monkeypatch.setattr(store, "mark", lambda queue: marked.append(queue) or mark(queue))
        job_id = rig.push("new")
        assert marked == ["new"]
        assert rig.state(job_id) == "waiting"


class TestSchedulesAtTwoBrokers:
    """One broker has looked at a schedule; before it goes on, another one acts."""

    @pytest.fixture
    def outrun(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Awaitable[Any]]], None]:
        look = rig.backend.cron

        def meanwhile(act: Callable[[], Awaitable[Any]]) -> None:
            async def look_and_be_outrun(name: str) -> CronEntry | None:
                found = await look(name)
                monkeypatch.setattr(rig.backend, "cron", look)
                await act()
                return found

            monkeypatch.setattr(rig.backend, "cron", look_and_be_outrun)

        return meanwhile

    def test_a_slot_that_fires_while_its_schedule_is_said_again_fires_once(self, rig: Rig, outrun: Any) -> None:
        one, other = scheduler(rig), scheduler(rig)
        rig.wait(other.upsert(cron("c", "q")))
        rig.clock.advance(1000)
        outrun(lambda: fire_due(other))
        rig.wait(one.upsert(cron("c", "q")))
        rig.wait(fire_due(one))
        assert rig.count() == {"waiting": 1}
        assert rig.cron("c").executions == 1

    def test_one_that_two_begin_runs_immediately_once(self, rig: Rig, outrun: Any) -> None:
        one, other = scheduler(rig), scheduler(rig)

        async def be_faster() -> None:
            await other.upsert(cron("c", "q"), immediately=True)
            await fire_due(other)

        outrun(be_faster)
        rig.clock.advance(1)
        rig.wait(one.upsert(cron("c", "q"), immediately=True))
        rig.wait(fire_due(one))
        assert rig.count() == {"waiting": 1}

    def test_one_that_is_changed_while_a_slot_fires_stays_changed(self, rig: Rig, outrun: Any) -> None:
        one, other = scheduler(rig), scheduler(rig)
        rig.wait(one.upsert(cron("c", "q")))
        rig.clock.advance(1000)
        outrun(lambda: other.upsert(cron("c", "q", data=b"\x07", repeat_every=5000.0)))
        rig.wait(fire_due(one))
        entry = rig.cron("c")
        assert (entry.data, entry.repeat_every, entry.next_run) == (b"\x07", 5000.0, rig.clock.now_ms() + 5000)


class TestLateClaims:
    """A broker, or its machine, is suspended while a claim is under way."""

    def test_jobs_whose_lease_is_all_but_over_are_not_handed_out(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job_id, fcall = rig.push(), rig.backend._server.fcall

        async def be_suspended(*call: Any) -> Any:
            reply = await fcall(*call)
            monkeypatch.undo()
            rig.clock.advance(16_000)
            return reply

        monkeypatch.setattr(rig.backend._server, "fcall", be_suspended)
        assert rig.claim("q", Demand(1, "w", 30_000, None)) == []
        assert "q" in rig.backend.take_ready()
        held = rig.take()
        assert (held.id, unpack(rig.job(job_id))["attempts"]) == (job_id, 0)

    def test_a_broker_that_was_stopped_does_not_run_a_job_beside_another(self, server: ValkeyServer) -> None:
        with (
            ServerProcess(":memory:", "--backend", server.url) as stopped,
            ServerProcess(":memory:", "--backend", server.url) as other,
            stopped.client(timeout=30) as late,
            other.client(timeout=30) as prompt,
        ):
            job_id = prompt.ok("PUSH", queue="q", data=1)["id"]
            server.client().client_pause(60_000, all=False)
            late.send("PULL", queue="q", owner="late", lockTtl=2000)
            eventually(lambda: server.client().info("clients")["blocked_clients"])
            os.kill(stopped.pid, signal.SIGSTOP)
            try:
                server.client().client_unpause()
                taken = prompt.ok("PULL", queue="q", owner="prompt", timeout=20_000)
                assert taken["job"]["id"] == job_id
            finally:
                os.kill(stopped.pid, signal.SIGCONT)
            assert late.recv()["job"] is None
            prompt.ok("ACK", id=job_id, token=taken["token"])


class TestWebhooksAtTwoBrokers:
    """One broker has read a webhook to change it; before it writes, another one acts."""

    HOOK = Webhook("w", "https://example.com", ["job.pushed"], None, None, 1.0)

    def test_one_that_is_removed_stays_removed(self, rig: Rig, other: ValkeyBackend) -> None:
        rig.add_webhook(self.HOOK)

        def be_outrun(stored: Webhook) -> Webhook:
            shared_server().client().hdel(other._keys.webhooks, stored.id)
            return replace(stored, success_count=1)

        assert rig.change_webhook("w", be_outrun) is None
        assert rig.wait(other.webhooks()) == []

    def test_one_that_is_disabled_stays_disabled_and_is_counted(self, rig: Rig, other: ValkeyBackend) -> None:
        rig.add_webhook(self.HOOK)
        hook, calls = Hook(self.HOOK), []
        hook.successes += 2

        def be_outrun(stored: Webhook) -> Webhook:
            calls.append(stored)
            if len(calls) == 1:
                record = encode(replace(stored, enabled=False, success_count=5))
                shared_server().client().hset(other._keys.webhooks, "w", record)
            return hook.figures(stored)

        rig.change_webhook("w", be_outrun)
        (stored,) = rig.wait(other.webhooks())
        assert (len(calls), stored.enabled, stored.success_count) == (2, False, 7)


def test_in_a_second_more_completed_jobs_go_than_a_broker_completes(rig: Rig) -> None:
    rig.backend.max_completed = 10
    rig.push_many(*(spec(n) for n in range(2000)))
    while held := rig.pull(count=500):
        rig.complete([Ack(one.id, one.token) for one in held])
    rig.retire_completed()
    assert rig.count() == {"completed": 10}


def test_jobs_that_may_not_start_do_not_hold_the_server_up(rig: Rig, foreign: Foreign) -> None:
    """However many have expired in front of those that may: a claim looks at so many, and is asked for again."""
    rig.push_many(*(spec(n, priority=1, ttl=100) for n in range(1000)))
    rig.clock.advance(200)
    late = rig.push(priority=1)
    expired, claims, held = 1000, 0, []
    while not held:
        rig.backend.take_ready()
        held, claims = rig.pull(), claims + 1
        left = foreign.client.zcard(foreign.key("hr:ready"))
        assert expired - left <= 300
        assert held or "q" in rig.backend.take_ready(), "who waits is not told to ask again"
        expired = left
    assert (held[0].id, claims) == (late, 5)


class TestDurable:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[ValkeyServer]:
        with ValkeyServer(tmp_path / "valkey", "--appendonly", "yes") as running:
            yield running

    async def test_durable_pushes_that_come_together_share_the_wait_for_the_disk(self, server: ValkeyServer) -> None:
        async with opened(server.url) as backend:
            ids = await asyncio.gather(*(backend.insert_one("q", spec(n, durable=True)) for n in range(40)))
            assert (await backend.counts("q")).waiting == len(set(ids)) == 40
        assert server.client().info("commandstats")["cmdstat_waitaof"]["calls"] <= 4

    async def test_one_that_is_refused_is_refused_alone(self, server: ValkeyServer) -> None:
        async with opened(server.url) as backend:
            specs = [spec(1, durable=True), spec(2, durable=True, depends_on=["nobody"]), spec(3, durable=True)]
            pushes = (backend.insert("q", [one]) for one in specs)
            first, refused, last = await asyncio.gather(*pushes, return_exceptions=True)
            assert isinstance(refused, NotFound)
            assert await backend.state(first[0]) == await backend.state(last[0]) == "waiting"

    async def test_a_family_waits_for_the_disk_too(self, server: ValkeyServer) -> None:
        nodes = [FamilyNode("parent", "q", spec(depends_on=["child"], children_ids=["child"]))]
        nodes.append(FamilyNode("child", "q", spec(parent_id="parent", durable=True)))
        async with opened(server.url) as backend:
            assert len(await backend.insert_family(nodes)) == 2
        assert server.client().info("commandstats")["cmdstat_waitaof"]["calls"] == 1
        async with opened(f"{shared_server().url}?prefix=unsynced") as backend:
            with pytest.raises(NotSupported, match="append-only file"):
                await backend.insert_family(nodes)
            assert await backend.state("child") == "unknown"

    async def test_a_push_whose_wait_was_lost_is_not_acknowledged(self, server: ValkeyServer) -> None:
        async with proxied(server.port) as (proxy, url), opened(url) as backend:
            proxy.lost_with = b"*2\r\n:1\r\n:0\r\n"  # the reply of WAITAOF
            with pytest.raises(StorageUnavailable):
                await backend.insert_one("q", spec(1, durable=True))
            assert proxy.lost == 1
            assert await backend.insert_one("q", spec(2, durable=True))
