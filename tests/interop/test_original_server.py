"""Our Python client against the original server, unmodified: `bunqueue://` in a URL means what it says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Headrace
from headrace.client.policy import LinkState
from headrace.commands import jobs
from headrace.errors import LeaseLost, NotAuthenticated, NotFound, Refused
from tests.client.faces import bury, complete, pull
from tests.ports import free_port
from tests.waiting import eventually, until

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).parent / "node_modules/bunqueue/dist/main.js"


def start(port: int, folder: Path, **env: str) -> subprocess.Popen[bytes]:
    bun = subprocess.run([ROOT / "tools/bun.sh"], capture_output=True, text=True, check=True).stdout.strip()
    command = [bun, str(PACKAGE), "start", "--host", "127.0.0.1", "--tcp-port", str(port)]
    command += ["--http-port", str(free_port()), "--data-path", str(folder / "original.db")]
    process = subprocess.Popen(
        command, cwd=folder, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        eventually(lambda: _is_listening(port))
    except AssertionError:
        process.kill()
        raise
    return process


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    process = start(port, tmp_path_factory.mktemp("original"))
    yield port
    process.send_signal(signal.SIGTERM)
    process.wait(15)


async def test_jobs_are_added_run_and_followed(original: int, queue: str) -> None:
    async with Headrace(f"bunqueue://127.0.0.1:{original}") as app:
        q = app.queue(queue)
        job = await q.add("send", {"to": "ada", "when": 1_700_000_000_000}, priority=3, attempts=2, tags=["a"])
        info = await job.info()
        assert (info.name, info.data["to"], info.priority, info.max_attempts) == ("send", "ada", 3, 2)
        assert len(await q.add_many([("n", {"number": number}) for number in range(20)])) == 20
        assert await q.count() == 21
        assert await complete(q, {"sent": True}) == job.id
        assert await job.result(5) == {"sent": True}
        failed = await bury(q, "no")
        assert await q.job(failed).state() == "failed"
        assert (await q.counts())["failed"] == 1
        assert {health.state for health in app.client.health} == {LinkState.CONNECTED}


async def test_queues_are_steered(original: int, queue: str) -> None:
    async with Headrace(f"bunqueue://127.0.0.1:{original}") as app:
        q = app.queue(queue)
        job = await q.add("send", {}, delay="1h")
        await q.pause()
        assert await q.is_paused()
        await q.resume()
        await job.promote()
        await job.log("hello")
        assert [line.message for line in await job.logs()] == ["hello"]
        await q.limit_concurrency(3)
        assert (await q.limits()).concurrency_limit == 3
        made = await q.schedule(f"s-{queue}", {}, every="5m")
        assert (made.repeat_every, made.schedule) == (300_000, None)
        assert [found.name for found in await q.schedules()] == [made.name]
        assert await q.unschedule(made.name)
        assert await job.cancel()
        await q.obliterate()


async def test_errors_without_codes_have_their_kinds(original: int, queue: str) -> None:
    async with Headrace(f"bunqueue://127.0.0.1:{original}") as app:
        q = app.queue(queue)
        assert await q.get_job("nobody") is None
        with pytest.raises(NotFound):
            await q.job("nobody").info()
        job = await q.add("n", {})
        with pytest.raises(Refused, match="not delayed"):
            await job.promote()
        job_id, _ = await pull(q)
        with pytest.raises(LeaseLost):
            await q.call(jobs.Acknowledge(id=job_id, token="another"))


async def test_events_are_heard(original: int, queue: str) -> None:
    async with Headrace(f"bunqueue://127.0.0.1:{original}") as app, app.events(queue) as events:
        job = await app.queue(queue).add("n", {})
        await complete(app.queue(queue), 2)
        async for event in events:
            if event.event_type == "completed":
                break
        assert event.job_id == job.id


async def test_a_token_is_given_and_a_restart_survived(tmp_path: Path, queue: str) -> None:
    port = free_port()
    process = start(port, tmp_path, AUTH_TOKENS="secret")
    try:
        stranger = Headrace(f"bunqueue://127.0.0.1:{port}?token=wrong")
        with pytest.raises(NotAuthenticated):
            await stranger.queue(queue).count()
        await stranger.close()
        async with Headrace(f"bunqueue://127.0.0.1:{port}?token=secret") as app:
            q = app.queue(queue)
            await q.add("n", {}, durable=True)
            process.kill()
            process.wait(10)
            await until(lambda: app.client.health[0].state is LinkState.RECONNECTING)
            process = start(port, tmp_path, AUTH_TOKENS="secret")
            assert await q.count() == 1
    finally:
        process.kill()
        process.wait(10)
