"""Workers among failing processes, servers and networks: nothing is lost, nothing that is leased runs twice."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace import Headrace, JobContext, NewJob, Worker
from headrace.client import conversation
from headrace.client.job import JobInfo
from headrace.client.options import Options
from headrace.errors import NotAuthenticated
from headrace.frames import encode_frame
from tests.client.fakeserver import FakeServer, protocol_2
from tests.client.proxy import Proxy
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import until
from tests.worker.handlers import double
from tests.worker.steps import is_held_for
from tests.worker.workerprocess import Marks, WorkerProcess

# How fast links notice that nobody is there any more.
QUICK = "ping_interval=0.3&command_timeout=0.5"


@pytest.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    """A server that a test may break."""
    with ServerProcess(tmp_path / "headrace.db") as server:
        yield server


def url_of(port: int, query: str = "") -> str:
    return f"headrace://127.0.0.1:{port}?{query}"


@pytest.fixture
async def producer(fresh: ServerProcess, queue: str) -> AsyncIterator[Headrace]:
    async with Headrace(url_of(fresh.port), queue=queue) as app:
        yield app


async def add(app: Headrace, count: int, seconds: float) -> None:
    calls = [("work", {"args": [n, seconds]}) for n in range(count)]
    await app.queue().add_many([NewJob(name=name, data=data, options=OPTIONS) for name, data in calls])


OPTIONS: Options = {"attempts": 50, "backoff": 0}


async def done(app: Headrace) -> int:
    return (await app.queue().counts())["completed"]


# -- workers die -------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_all_jobs_complete_under_workers_that_are_killed_again_and_again(
    fresh: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    jobs, kills, lease = scaled(700, 5000), scaled(7, 50), 1.0
    await add(producer, jobs, 0.1)
    flags = ("--lease", f"{lease}s", "--log-level", "error")
    killed: dict[int, float] = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(WorkerProcess(url_of(fresh.port), marks, *flags)) for _ in range(3)]
        for victim in itertools.islice(itertools.cycle(workers), kills):
            await until(lambda pid=victim.pid: pid in {mark.pid for mark in marks.all()}, 30)  # type: ignore[misc]
            await asyncio.sleep(random.uniform(0, 0.1))
            killed[victim.pid] = time.time()
            victim.kill()
            victim.start()
        await until(lambda: _is_all_done(producer, jobs), 120)
    assert set(marks.ended()) == set(range(jobs))
    waits = await _waits_for_return(producer, marks, killed)
    assert len(waits) > kills
    assert max(waits) < lease + 0.5


async def _is_all_done(app: Headrace, jobs: int) -> bool:
    return await done(app) == jobs


async def _waits_for_return(app: Headrace, marks: Marks, killed: dict[int, float]) -> list[float]:
    """Seconds from the death of a worker until its jobs could be had again."""
    ids = {job.data["args"][0]: job for job in await _completed(app)}
    ended = {(mark.n, mark.pid) for mark in marks.all() if mark.what == "end"}
    waits = []
    for mark in marks.all():
        if mark.pid in killed and (mark.n, mark.pid) not in ended:
            died = killed[mark.pid]
            back = [entry.timestamp / 1000 for entry in ids[mark.n].timeline if entry.error == "lock expired"]
            returned = min(at for at in back if at > mark.at)
            # On a busy machine a lease of a second may also run out under a worker that lives.
            waits += [returned - died] if returned > died else []
    return waits


async def _completed(app: Headrace) -> list[JobInfo]:
    found: list[JobInfo] = []
    while page := await app.queue().get_jobs("completed", limit=1000, offset=len(found)):
        found += page
    return found


@pytest.mark.alone
async def test_redelivery_starts_within_the_lease_and_half_a_second(
    fresh: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    lease = 1.0
    with WorkerProcess(url_of(fresh.port), marks, "--lease", f"{lease}s") as worker:
        await add(producer, 5, 20.0)
        await until(lambda: len(marks.begun()) == 5, 20)
        begun: list[float] = []

        async def handle(job: JobContext) -> None:
            begun.append(time.monotonic())

        async with Worker(producer.client, producer.default_queue, handle):
            for job in await producer.queue().get_jobs("active"):
                await is_held_for(producer.client, job.id, 1.2 * lease)
            assert begun == []
            died = time.monotonic()
            worker.kill()
            await until(lambda: len(begun) == 5, lease + 5)
    assert max(begun) - died < lease + 0.5


async def test_an_embedded_engine_that_is_killed_goes_on_where_it_was(tmp_path: Path, marks: Marks) -> None:
    jobs, kills = scaled(300, 3000), scaled(3, 20)
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Headrace(url, queue=marks.queue) as app:
        await add(app, jobs, 0.02)
    with WorkerProcess(url, marks, "--concurrency", "5") as worker:
        for kill in range(kills):
            share = jobs * (kill + 1) // (kills + 2)
            await until(lambda share=share: len(set(marks.ended())) >= share, 60)  # type: ignore[misc]
            worker.kill()
            starts = worker.said().count("started: queues")
            worker.start()
        await until(lambda: worker.said().count("started: queues") > starts, 60)  # all may end before the last kill
        await until(lambda: set(marks.ended()) == set(range(jobs)), 60)
        assert worker.stop() == 0
    async with Headrace(url, queue=marks.queue) as app:
        assert await done(app) == jobs
    # Only what ran, or had not been acknowledged yet, at the moment of a kill may have run twice.
    assert len(marks.ended()) - jobs <= kills * 5 * 3
    assert max(Counter(marks.begun()).values()) <= kills + 1


# -- servers go away ---------------------------------------------------------------------------------------------------


async def test_a_full_worker_keeps_its_jobs_over_restarts_of_the_server(
    fresh: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    """Every job runs once: the worker says which ones it has, and a server that forgot them leases them to it again."""
    jobs, restarts = scaled(60, 400), scaled(3, 20)
    await add(producer, jobs, 0.5)
    with WorkerProcess(url_of(fresh.port), marks, "--lease", "1s", "--log-level", "error") as worker:
        for restart in range(restarts):
            share = jobs * restart // (restarts + 1)
            await until(lambda share=share: len(marks.begun()) > share, 30)  # type: ignore[misc]
            if restart % 2:
                fresh.stop()
            else:
                fresh.kill()
            fresh.start()
        await until(lambda: _is_all_done(producer, jobs), 120)
        assert worker.stop() == 0
    assert Counter(marks.ended()) == Counter(range(jobs))
    assert Counter(marks.begun()) == Counter(range(jobs))


async def test_jobs_that_end_while_the_server_is_away_are_told_when_it_is_back(
    fresh: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    with WorkerProcess(url_of(fresh.port), marks, "--lease", "1s") as worker:
        await add(producer, 30, 0.5)
        await until(lambda: len(marks.begun()) == 10, 20)
        fresh.kill()
        await until(lambda: len(marks.ended()) == 10)
        await asyncio.sleep(scaled(2, 10))
        fresh.start()
        await until(lambda: _is_all_done(producer, 30), 60)
        assert worker.stop() == 0
    assert Counter(marks.begun()) == Counter(range(30))


async def test_a_server_that_was_frozen_takes_no_job_away(
    fresh: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(WorkerProcess(url_of(fresh.port), marks, "--lease", "1s", "--concurrency", "3"))
        await add(producer, 12, 2.5)
        await until(lambda: len(marks.begun()) == 6, 20)
        os.kill(fresh.pid, signal.SIGSTOP)
        await asyncio.sleep(scaled(2, 10))
        os.kill(fresh.pid, signal.SIGCONT)
        await until(lambda: _is_all_done(producer, 12), 40)
    assert Counter(marks.begun()) == Counter(range(12))


async def test_a_worker_notices_a_link_that_swallows_everything(
    fresh: ServerProcess, producer: Headrace, queue: str
) -> None:
    """Its job runs out of lease and is done elsewhere; the worker, when it can be heard again, works as before."""
    gate = asyncio.Event()
    cut_off: list[str] = []
    elsewhere: list[str] = []

    async def wait(job: JobContext) -> None:
        try:
            cut_off.append(job.name)
            await gate.wait()
        except asyncio.CancelledError:
            cut_off.append(f"{job.name} cancelled")
            raise

    async def other(job: JobContext) -> None:
        elsewhere.append(job.name)

    async with Proxy(fresh.port) as proxy, Headrace(url_of(proxy.port, QUICK), queue=queue) as app:
        worker = Worker(app.client, queue, wait, lease=1, concurrency=1)
        async with worker:
            job = await producer.queue().add("first")
            await until(lambda: cut_off == ["first"])
            proxy.swallow()
            async with Worker(producer.client, queue, other):
                assert await job.wait(timeout=20)
            assert elsewhere == ["first"]
            proxy.pass_again()
            await until(lambda: cut_off == ["first", "first cancelled"], 30)
            gate.set()
            assert await (await producer.queue().add("second")).wait(timeout=30)
    assert cut_off[2:] == ["second"]
    assert worker.figures.lost == 1


async def test_a_worker_follows_a_token_that_changes(tmp_path: Path, queue: str) -> None:
    token = "old"
    runs: list[str] = []
    let_in = asyncio.Event()

    async def handle(job: JobContext) -> None:
        runs.append(job.name)
        await let_in.wait()

    server = ServerProcess(tmp_path / "headrace.db", "--auth-tokens", "old").start()
    try:
        app = Headrace(url_of(server.port), queue=queue, connection={"token": lambda: token})
        async with app, Worker(app.client, queue, handle, lease=1):
            for n in range(5):
                await app.queue().add(f"job {n}")
            await until(lambda: len(runs) == 5)
            server.kill()
            server.flags = ("--auth-tokens", "new")
            server.start()
            with pytest.raises(NotAuthenticated):
                await app.queue().counts()
            let_in.set()
            token = "new"
            await until(lambda: _is_all_done_and_let_in(app, 5), 30)
            assert await (await app.queue().add("later")).wait(timeout=20)
    finally:
        server.kill()
    assert Counter(runs) == Counter([*(f"job {n}" for n in range(5)), "later"])


async def _is_all_done_and_let_in(app: Headrace, jobs: int) -> bool:
    try:
        return await _is_all_done(app, jobs)
    except NotAuthenticated:  # with the old token; the next try to connect has the new one
        return False


# -- networks break ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
async def test_a_network_that_breaks_again_and_again_makes_no_job_run_twice(
    fresh: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    cuts = scaled(8, 120)
    jobs = cuts * 60
    async with Proxy(fresh.port) as proxy:
        with ExitStack() as stack:
            flags = ("--lease", "5s", "--log-level", "error")
            workers = [stack.enter_context(WorkerProcess(url_of(proxy.port, QUICK), marks, *flags)) for _ in range(2)]
            await add(producer, jobs, 0.05)
            for cut in range(cuts):
                share = jobs * (cut + 1) // (cuts + 2)
                await until(lambda share=share: len(marks.ended()) >= share, 30)  # type: ignore[misc]
                proxy.cut()
            await until(lambda: _is_all_done(producer, jobs), 60)
            assert [worker.stop() for worker in workers] == [0, 0]
        assert proxy.connections > cuts
    assert Counter(marks.begun()) == Counter(range(jobs))
    assert Counter(marks.ended()) == Counter(range(jobs))


async def test_a_worker_asks_for_jobs_only_when_the_server_has_heard_which_are_its_own() -> None:
    """On Valkey commands are under way together: a pull that overtook this brought jobs that were released at once."""
    refusals = [{"ok": False, "error": "Storage is full", "code": "storage_unavailable"}]

    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        if command["cmd"] == "PULLB":
            return None
        if command["cmd"] == "ReleaseLeases":
            return {**(refusals.pop() if refusals else {"ok": True, "count": 0}), "reqId": command["reqId"]}
        return protocol_2(command)

    async with FakeServer(answer) as server, Headrace(url_of(server.port)) as app:
        async with Worker(app.client, "q", double):
            await until(lambda: any(command["cmd"] == "PULLB" for command in server.asked))
        asked = [command["cmd"] for command in server.asked]
        assert asked[: asked.index("PULLB")].count("ReleaseLeases") == 2


async def test_a_worker_renews_no_lease_that_the_server_has_not_heard_of_again() -> None:
    """A server that was restarted on a full disk knows of no leases yet: asked too early, it would call them lost."""
    replies = [{"ok": True, "count": 0}, {"ok": False, "error": "Storage is full", "code": "storage_unavailable"}]
    jobs = [{"id": "j", "queue": "q", "data": None}]

    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        match command["cmd"]:
            case "PULLB":
                reply = {"ok": True, "jobs": [jobs.pop()], "tokens": ["t"]} if jobs else None
            case "ReleaseLeases":
                reply = replies.pop(0) if replies else {"ok": True, "count": 0}
            case _:
                return protocol_2(command)
        return None if reply is None else {**reply, "reqId": command["reqId"]}

    async def hold(ctx: JobContext) -> None:
        begun.set()
        await may_end.wait()

    begun, may_end = asyncio.Event(), asyncio.Event()
    async with FakeServer(answer) as server, Headrace(url_of(server.port)) as app:

        def asked() -> list[str]:
            return [command["cmd"] for command in server.asked]

        async with Worker(app.client, "q", hold, lease=0.6):
            await asyncio.wait_for(begun.wait(), 10)
            for connection in server.connections:
                connection.close()
            await until(lambda: asked().count("ReleaseLeases") == 3)
            said = asked()
            may_end.set()
        greetings = [place for place, command in enumerate(said) if command == "ReleaseLeases"]
        assert "JobHeartbeatB" not in said[greetings[1] : greetings[2]]


async def test_an_outcome_that_is_refused_for_now_is_told_again_after_a_moment() -> None:
    """Dropped, it would let the lease run out, and a job that was done run again."""
    refusals = ["rate_limited", "storage_unavailable"]
    jobs = [{"id": "j", "queue": "q", "data": 4}]

    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        reply = {"ok": True, "count": 0, "reqId": command["reqId"]}
        match command["cmd"]:
            case "Hello":
                return protocol_2(command)
            case "PULLB":
                return {**reply, "jobs": [jobs.pop()], "tokens": ["t"]} if jobs else None
            case "ACK" if refusals:
                return {**reply, "ok": False, "error": "not now", "code": refusals.pop()}
        return reply

    async with FakeServer(answer) as server, Headrace(url_of(server.port)) as app:
        worker = Worker(app.client, "q", double)
        async with worker:
            await until(lambda: worker.figures.completed == 1)
        assert [command["result"] for command in server.asked if command["cmd"] == "ACK"] == [8, 8, 8]


async def test_an_outcome_for_which_its_link_has_no_room_is_told_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler told more of its progress than may wait: its outcome must not be lost with that."""
    monkeypatch.setattr(conversation, "MAX_WAITING", 5)
    jobs = [{"id": "j", "queue": "q", "data": None}]
    unanswered: list[dict[str, Any]] = []
    is_slow = True

    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        if command["cmd"] == "Hello":
            return protocol_2(command)
        reply = {"ok": True, "count": 0, "reqId": command["reqId"]}
        if command["cmd"] == "Progress" and is_slow:
            unanswered.append(reply)
            return None
        if command["cmd"] == "PULLB":
            return {**reply, "jobs": [jobs.pop()], "tokens": ["t"]} if jobs else None
        return reply

    async def handle(job: JobContext) -> None:
        for percent in range(40):
            job.progress(percent)

    async with FakeServer(answer) as server, Headrace(url_of(server.port, "max_in_flight=10")) as app:
        worker = Worker(app.client, "q", handle, concurrency=1)
        async with worker:
            await until(lambda: len(unanswered) == 10)
            is_slow = False
            for reply in unanswered:
                server.connections[-1].write(encode_frame(reply))
            await until(lambda: worker.figures.completed == 1)
